"""The compared libraries. To add a peer, add a class in a file here and a line below."""

from .brax import Brax
from .cpprb import Cpprb
from .dopamine import Dopamine
from .flashbax import Flashbax
from .limit import Limit
from .numpy_arrays import NumPyArrays
from .ours import Ours
from .peer import Buffer, Drawn, Peer
from .stable_baselines3 import StableBaselines3
from .take import Take
from .torchrl import TorchRL

__all__ = ["ALL", "Buffer", "Drawn", "Peer", "chosen", "packages"]

ALL: tuple[Peer, ...] = (
    Ours(),
    Flashbax(),
    Brax(),
    TorchRL(),
    Cpprb(),
    StableBaselines3(),
    Dopamine(),
    NumPyArrays(),
    Take(),
    Limit(),
)


def chosen(names: list[str] | None = None) -> list[Peer]:
    """Returns the peers with these names, and jrb, the baseline; all peers if `names` is None.

    Raises:
        ValueError: a name is not that of a peer.
    """
    if names is None:
        return list(ALL)
    known = [peer.name for peer in ALL]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ValueError(f"--peers: expected some of {', '.join(known)}, got {', '.join(wrong)}.")
    return [peer for peer in ALL if peer.name in names or isinstance(peer, Ours)]


def packages() -> tuple[str, ...]:
    """Returns the names under which pip installs the packages of all peers."""
    return tuple(dict.fromkeys(name for peer in ALL for name in peer.packages.values()))
