"""The cases of a workload: each has a few programs that are timed in turn."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..peers import Peer
from ..setup import Setup
from ..timing import Program

Make = Callable[[], Program]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is asked for on the command line.

    Attributes:
        peers: those that are installed and chosen.
        quick: whether a minute must do.
        rounds: how often programs take turns.
        folder: on a disk, for what is written.
    """

    peers: Sequence[Peer]
    quick: bool = False
    rounds: int = 15
    folder: str = "."

    def pick(self, quick: Any, full: Any) -> Any:
        """The first if there is little time."""
        return quick if self.quick else full


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison, a row of a table.

    Attributes:
        what: its name.
        facts: of what size; columns of the table.
        programs: by the name of the peer; each is made when it is needed.
        base: to whose time the others' are compared.
        weight: so many times as many rounds as are asked for.
        within: a context in which the programs are made and run.
        unit: "s" for the time of a step; or what `Program.facts["value"]` is, of programs that are
            not timed but looked at, "B" or "kernels".
    """

    what: str
    facts: dict[str, Any]
    programs: dict[str, Make]
    base: str = "jrb"
    weight: float = 1.0
    unit: str = "s"
    within: Callable[[], Any] = contextlib.nullcontext

    @property
    def name(self) -> str:
        """What `--only` looks into."""
        return f"{self.what}, " + ", ".join(f"{key} {value}" for key, value in self.facts.items())

    def rounds(self, asked: int) -> int:
        """How often the programs take turns."""
        return max(1, round(asked * self.weight)) if self.unit == "s" else 0


def beside(
    wanted: Wanted, what: str, setup: Setup, make: Callable[[Peer, Setup], Program], **more: Any
) -> Case:
    """The same setup with every peer that can do it."""
    able = [peer for peer in wanted.peers if peer.can(setup)]
    programs = {peer.name: lambda peer=peer: make(peer, setup) for peer in able}
    return Case(what, more.pop("facts", {}) | setup.facts, programs, **more)
