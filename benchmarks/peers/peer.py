"""The base class of peers: libraries that make full buffers with the same three methods."""

import abc
import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from ..items import Items
from ..setup import Setup


class Drawn(NamedTuple):
    """A batch.

    Attributes:
        data: the items, in whatever form the peer gives them.
        handle: what `update` wants to know of them; an empty tuple if nothing.
    """

    data: Any
    handle: Any = ()


def _same(rows: Any) -> Any:
    return rows


def _no_update(state: Any, handle: Any, priorities: Any) -> Any:
    raise TypeError("update: expected a buffer with priorities, got one without.")


@dataclasses.dataclass
class Buffer:
    """A full buffer. Of a peer on the device, the methods are pure functions, for `jit` and `vmap`.

    Attributes:
        state: what the methods take first, and give back; others keep their own, and this is None.
        add: `(state, rows) -> state`, one row of time, leaves `[E, ...]`.
        sample: `(state, key) -> (state, Drawn)`, B items; the state is None if it is as it was.
        update: `(state, handle, priorities) -> state`, priorities `[B]`.
        nbytes: what all items, and what is known of them, take.
        rows: from NumPy's rows `[E, ...]` to what `add` takes.
        read: from `Drawn.data` to items as `Setup.rows` has them, `[B, ...]` or `[B, L, ...]`.
        in_python: what Python loops call, add, sample and update, of a library on the device that
            has methods for that; None if each of the functions above is jitted.
    """

    state: Any
    add: Callable[[Any, Any], Any]
    sample: Callable[[Any, Any], tuple[Any, Drawn]]
    update: Callable[[Any, Any, Any], Any] = _no_update
    nbytes: int = 0
    rows: Callable[[Items], Any] = _same
    read: Callable[[Any], Items] = _same
    in_python: tuple[Callable, Callable, Callable] | None = None


class Peer(abc.ABC):
    """A library, or a way of doing without one.

    Attributes:
        name: as in tables.
        packages: what must be there, as it is imported, and as it is installed.
        on_device: whether its methods are pure functions on the device; others work on the host,
            and give batches there.
        note: what must be known to compare fairly.
        kinds: of items that it can hold; None for all.
        samplers: of `Setup.sampler`.
        units: of `Setup.unit`.
        once: whether it can store observations once.
        most: the largest N that it is asked for.
    """

    name: str
    packages: dict[str, str] = {}
    on_device = False
    note = ""
    kinds: tuple[str, ...] | None = None
    samplers: tuple[str, ...] = ("uniform",)
    units: tuple[str, ...] = ("transition",)
    once = False
    most = 10**7

    def missing(self) -> list[str]:
        """The packages that are to be installed first."""
        absent = lambda name: importlib.util.find_spec(name) is None
        return [package for name, package in self.packages.items() if absent(name)]

    def can(self, setup: Setup) -> bool:
        """Whether it can do this."""
        return (
            (self.kinds is None or setup.items in self.kinds)
            and setup.sampler in self.samplers
            and setup.unit in self.units
            and (self.once or not setup.once)
            and setup.n <= self.most
        )

    def steps(self, setup: Setup, asked: int) -> int:
        """How many steps a scan has: fewer than asked for where one takes very long."""
        return asked

    @abc.abstractmethod
    def full(self, setup: Setup) -> Buffer:
        """A buffer that holds `setup.pieces()`, each item with priority 1."""
