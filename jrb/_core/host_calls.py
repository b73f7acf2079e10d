"""The methods outside `jit` of buffers whose items are on the host.

Each has up to three stages: a compiled plan finds the slots to write or read, the host puts or
fetches their rows, and the rest is compiled again. In compiled parts, states have the outline of
the rows in their place (see `jrb.storages.host_rows`). Inside `jit`, the same storages call the
host back.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import editing, steps
from jrb._core.validate import check, for_device, is_traced
from jrb._xla import compat
from jrb._xla.compiling import by_description, per_description, standalone_program
from jrb.state import Buffer, BufferState
from jrb.types import Item

_MANY_ELEMENTS = 1 << 14  # of an array that takes longer to copy than one more compiled call


# Writes.


def write(
    buffer: Buffer,
    state: BufferState,
    arrays: Item,
    others: tuple,
    donate: bool,
    objects: list[list[Any]] | None,
) -> Any:
    """Writes items; returns None if some arguments are traced.

    `arrays` are the items, or stand for `objects` in compiled parts; `others` are the further
    arguments of `steps.write`. With `donate`, arrays of the state are written in place.
    """
    items = arrays if objects is None else objects
    storage, half = buffer.storage, for_device(buffer, state)
    view = storage.view(state.storage)
    # In place, the slots are planned first, and the state's arrays are written last: if the disk is
    # full, or an interrupt comes earlier, the state is unchanged. Planning costs one more call, so
    # small arrays are copied instead.
    in_place = donate and view.rows.takes_back
    if in_place and max(leaf.size for leaf in jax.tree.leaves(half)) > _MANY_ELEMENTS:
        after, slots = None, _plan_slots(buffer, half, arrays, *others)
        finish = lambda: steps.write_in_place(buffer, half, arrays, *others)
    else:
        after = steps.write(buffer, half, arrays, *others)
        slots, finish = storage.view(after.storage).planned, lambda: after
    return None if is_traced(slots, after) else put_rows(buffer, state, slots, items, finish)


def put_rows(
    buffer: Buffer,
    state: BufferState,
    slots: jax.Array,
    items: Item,
    finish: Callable[[], BufferState],
) -> Any:
    """Writes rows on the host, and returns the state of compiled parts from `finish` with them."""
    storage, view = buffer.storage, buffer.storage.view(state.storage)
    with view.rows.writing(view.version):
        version = view.rows.put_items(view.version, slots, items)
        after = finish()
        return after.replace(storage=storage.with_view(after.storage, view.after(version)))


@by_description()
@standalone_program
def _plan_slots(
    buffer: Buffer, state: BufferState, items: Item, *others: jax.Array | None
) -> jax.Array:
    """Returns the slots that a storage on the host will write; XLA drops all other results."""
    after = steps.write(buffer, state, items, *others)
    return buffer.storage.view(after.storage).planned


# Draws.


def draw_program(buffer: Buffer) -> Callable[..., Any]:
    """Returns a function that draws; its result is None if some of the arguments are traced."""
    storage = buffer.storage
    choose, assemble = _choose_compiled(buffer), _assemble_compiled(buffer)
    # Items that are sampled as they are stored are read at the slots of the anchors, and need no
    # second program.
    is_plain = buffer.unit.one_row and not buffer.transforms and not storage.assembles

    def draw_from_host(state: Any, key: Any, beta: Any, options: dict, is_drawn: Any) -> Any:
        view = storage.view(state.storage)
        if is_traced(view):
            return None
        half = for_device(buffer, state)
        # Writes of other threads wait for a while. What they overwrite after all raises StaleError.
        with view.rows.drawing():
            sampler, chosen, located = choose(half, key, beta, **options, is_plain=is_plain)
            if not is_drawn(chosen.mask):
                return None
            device = chosen.mask.sharding if compat.is_committed(chosen.mask) else None
            if is_plain:
                data = view.rows.fetch(view.version, chosen.indices, device, is_draw=True)
                return sampler, chosen.replace(data=storage.collate_items(data, chosen.mask))
            fetched = view.rows.to_device(storage.fetch(view, located), device)
        stored = storage.with_view(half.storage, view.without_rows(fetched))
        return sampler, assemble(half.replace(storage=stored), chosen, key)

    return draw_from_host


@per_description("batch_size", "moves", "is_plain")
@standalone_program
def _choose_compiled(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    beta: Any,
    batch_size: int,
    moves: bool,
    is_plain: bool,
) -> tuple[Any, Any, Any]:
    """Runs the part of a draw that comes before items are fetched from the host.

    Returns:
        The sampler's state, or None unless it `moves`; the `Draw`, or if `is_plain` the sample
        without its data; where the host reads the leaves, or if `is_plain` None.
    """
    check(buffer, state)
    sampler, chosen = steps.draw(buffer, state, key, batch_size, beta, read=False)
    sampler = sampler if moves else None
    if is_plain:
        return sampler, steps.assemble(buffer, state, chosen, key, read=False), None
    return sampler, chosen, steps.locate(buffer, state, chosen, key)


_assemble_compiled = per_description()(standalone_program(steps.assemble))


def take(buffer: Buffer, state: BufferState, slots: np.ndarray) -> Any:
    """Returns the items at slots of any shape, or a list of objects."""
    view = buffer.storage.view(state.storage)
    return view.rows.fetch(view.version, slots)


# Edits.


def edit(
    buffer: Buffer, state: BufferState, where: Any, values: Item, objects: list[Any] | None
) -> BufferState:
    """Sets leaves of held items to `values`, a dict by leaf name, or the items to `objects`."""
    cuts = _cuts_if_flagged(buffer, state, values)
    return _with_ends(buffer, _put_values(buffer, state, where, values, objects), cuts)


def rewrite(
    buffer: Buffer, state: BufferState, function: Callable[[Item], Item], batch_size: int
) -> BufferState:
    """Replaces leaves of all held items by those that `function` returns for B items at a time."""
    order, count = steps.in_order(buffer, state.writer)
    # Oldest first, as inside `jit`.
    slots, compiled, cuts = np.asarray(order)[: int(count)], jax.jit(function), None
    for start in range(0, len(slots), batch_size):
        part = slots[start : start + batch_size]
        values = compiled(take(buffer, state, part))
        if not start:
            cuts = _cuts_if_flagged(buffer, state, values)
        state = _put_values(buffer, state, jnp.asarray(part), values)
    return _with_ends(buffer, state, cuts)


def _put_values(
    buffer: Buffer,
    state: BufferState,
    where: Any,
    values: Item,
    objects: list[Any] | None = None,
) -> BufferState:
    """Edits items on the host; the unit is not updated."""
    storage, view = buffer.storage, buffer.storage.view(state.storage)
    after = editing.plan_edit(buffer, for_device(buffer, state), where, values)
    with view.rows.writing(view.version):
        slots = np.asarray(storage.view(after.storage).planned)
        version = view.rows.edit(view.version, slots, values if objects is None else objects)
        return after.replace(storage=storage.with_view(after.storage, view.after(version)))


def _cuts_if_flagged(buffer: Buffer, state: BufferState, values: Item) -> jax.Array | None:
    """Returns `editing.cuts` if an edit of these leaves may change ends of episodes, else None."""
    if not editing.flags(buffer, state) & set(values):
        return None
    return editing.cuts(buffer, _with_flags(buffer, state))


def _with_ends(buffer: Buffer, state: BufferState, cuts: jax.Array | None) -> BufferState:
    """Rebuilds unit and sampler after an edit that changed ends of episodes."""
    if cuts is None:
        return state
    after = editing.with_ends(buffer, _with_flags(buffer, state), cuts)
    return after.replace(storage=state.storage)


def _with_flags(buffer: Buffer, state: BufferState) -> Any:
    """Returns the state for `editing`, with fetched flags of ends in place of all items."""
    storage, half = buffer.storage, for_device(buffer, state)
    view, flags = storage.view(state.storage), frozenset(editing.flags(buffer, state))
    with view.rows.drawing():
        fetched = storage.fetch(view, editing.locate_leaves(buffer, half, flags))
    return state.replace(storage=storage.with_view(half.storage, view.without_rows(fetched)))
