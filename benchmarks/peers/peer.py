"""The base class of peers, which make full buffers with the same three methods."""

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
        data: the items, in the form in which the peer returns them.
        handle: the argument that `update` needs, such as indices; an empty tuple if none.
    """

    data: Any
    handle: Any = ()


def _same(rows: Any) -> Any:
    return rows


def _no_update(state: Any, handle: Any, priorities: Any) -> Any:
    raise TypeError("update: expected a buffer with priorities, got one without.")


@dataclasses.dataclass
class Buffer:
    """A full buffer. The methods of a peer on the device are pure functions, for `jit` and `vmap`.

    Attributes:
        state: the first argument of the methods; None for peers that keep their own state.
        add: `(state, rows) -> state`, adds one row, leaves `[E, ...]`.
        sample: `(state, key) -> (state, Drawn)`, B items; the state is None if it did not change.
        update: `(state, handle, priorities) -> state`, priorities `[B]`.
        nbytes: bytes of all items and of their metadata; 0 if unknown.
        rows: converts NumPy rows `[E, ...]` to the argument of `add`.
        read: converts `Drawn.data` to items in the form of `Setup.rows`, `[B, ...]` or
            `[B, L, ...]`.
        in_python: add, sample and update for Python loops, if a library on the device has methods
            for that; None if the functions above are jitted instead.
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
    """A library, or code that does without one.

    Attributes:
        name: the name in tables.
        packages: required packages, from the import name to the name that pip installs.
        on_device: True if its methods are pure functions on the device; False if it works and
            returns batches on the host.
        note: what a reader of the tables must know to compare fairly.
        kinds: the kinds of items that it can hold; None for all.
        samplers: the supported values of `Setup.sampler`.
        units: the supported values of `Setup.unit`.
        once: True if it can store each observation once.
        most: the largest N for which it is run.
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
        """Returns the packages that are not installed."""
        absent = lambda name: importlib.util.find_spec(name) is None
        return [package for name, package in self.packages.items() if absent(name)]

    def can(self, setup: Setup) -> bool:
        """Returns True if the peer supports a setup."""
        return (
            (self.kinds is None or setup.items in self.kinds)
            and setup.sampler in self.samplers
            and setup.unit in self.units
            and (self.once or not setup.once)
            and setup.n <= self.most
        )

    def steps(self, setup: Setup, asked: int) -> int:
        """Returns the steps of a scan: `asked`, or fewer for a peer with very slow steps."""
        return asked

    @abc.abstractmethod
    def full(self, setup: Setup) -> Buffer:
        """Returns a buffer that holds `setup.pieces()`, each item with priority 1."""
