"""What is to be saved of states: asked of them once, and checked, before anything is written."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.core

from jrb import _saved
from jrb._core import eager
from jrb._util import pytree
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import host_items, members, one_by_one, state_specs
from jrb.checkpoint.members import Several
from jrb.mix import AnyState
from jrb.state import Buffer, BufferState
from jrb.storages.host_rows import HostView
from jrb.types import Item
from jrb.types.messages import PartState


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of one buffer.

    Attributes:
        buffer: the description.
        state: its state, with `host_items.Leaf`s for arrays on the host, and
            `one_by_one.SideLeaf`s for leaves that lie side by side; without what is no array.
        spec: of one item as it is stored; of objects, nothing.
        batch: the axes that `vmap` has put before all leaves.
        stored: what the storage itself keeps.
    """

    buffer: Buffer
    state: BufferState
    spec: Item
    batch: tuple[int, ...]
    stored: PartState = None

    @functools.cached_property
    def plain(self) -> Buffer:
        """The description of such a state: all items on the device, one by one."""
        return host_items.on_device(self.buffer)

    @property
    def views(self) -> list[HostView]:
        """That of its rows on the host, if they are there."""
        is_there = host_items.is_on_host(self.buffer)
        return [self.buffer.storage.view(self.stored)] if is_there else []

    def lies_at(self, path: str) -> bool:
        """Whether a path is that of the store in which this state has its rows."""
        return any(view.rows.path == os.path.realpath(path) for view in self.views)


@dataclasses.dataclass(frozen=True)
class Together:
    """The states of several buffers, or of the shards of one.

    Attributes:
        buffer: the description, or all of them.
        kind: the class of what the states were in.
        parts: by name; of shards, those of this process.
    """

    buffer: Several
    kind: type
    parts: "dict[str, Source]"

    @property
    def views(self) -> list[HostView]:
        """Those of all rows on the host."""
        return [view for part in self.parts.values() for view in part.views]

    def lies_at(self, path: str) -> bool:
        """Whether any of these states has its rows where it would be saved below a path."""
        below = functools.partial(_saved.path_of, path)
        return any(part.lies_at(below(name)) for name, part in self.parts.items())


Source = Snapshot | Together


def taken(buffer: Several, state: AnyState, verb: str = "save") -> Source:
    """What is to be saved, after all checks.

    Raises:
        ValueError, TypeError: it is no description, or no state of it; the message names a leaf.
    """
    members.check(buffer, verb)
    if isinstance(buffer, ReplayBuffer):
        return _of_one(buffer, state)
    states, each = members.states_of(buffer, state), members.each(buffer)
    parts = {name: taken(each[name], one, verb) for name, one in states.items()}
    return Together(buffer, type(state), parts)


@contextlib.contextmanager
def reading(saved: Source) -> Iterator[None]:
    """A time during which no other thread overwrites rows.

    Raises:
        StaleError: a state is not the newest one of its store.
    """
    with contextlib.ExitStack() as stack:
        for view in saved.views:
            stack.enter_context(view.rows.drawing())
            view.rows.check_newest(view.version)
        yield


def _of_one(buffer: Buffer, state: BufferState) -> Snapshot:
    keeps = buffer.storage.state_type if eager.on_host(buffer) else object
    if not isinstance(state, BufferState) or not isinstance(state.storage, keeps):
        raise ValueError(
            f"save: expected a state of this buffer, got {type(state).__name__}. The order is "
            "save(path, buffer, state)."
        )
    _check_arrays(state)
    seen = state.replace(storage=_leaves(buffer, state.storage))
    spec, batch = state_specs.fitted(host_items.on_device(buffer), seen)
    return Snapshot(buffer, seen, spec, batch, state.storage)


def _leaves(buffer: Buffer, stored: PartState) -> Any:
    """What looks like a storage's state that has an array for every leaf."""
    if buffer.storage.of_objects:
        return None
    if host_items.is_on_host(buffer):
        return host_items.items_of(buffer.storage.view(stored))
    return one_by_one.leaves_of(stored) if one_by_one.is_packing(buffer) else stored


def _check_arrays(state: BufferState) -> None:
    """Raises unless all leaves of a state that is to be saved are arrays that are there."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        where = f"save: leaf '{pytree.leaf_name(path)}'"
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{where}: expected an array, got a tracer. Save outside jit.")
        if not pytree.is_array(leaf):
            raise TypeError(f"{where}: expected an array, got {type(leaf).__name__}.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{where}: expected an array that is there, got one that was donated. Save the "
                "state that came back."
            )
