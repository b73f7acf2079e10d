"""The methods outside `jit` of buffers whose items are on the host.

Each has up to three stages: a compiled plan finds the slots to write or read, the host writes or
reads their rows, and the rest is compiled again. In compiled parts, states have the outline of the
rows in their place (see `jrb.storages.host_rows`); such a state is called `half` here. Inside
`jit`, the same storages call the host back.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import editing, steps
from jrb._core.validate import check, for_device, is_tracer
from jrb._xla import compat
from jrb._xla.callbacks import to_device
from jrb._xla.compiling import by_description, per_description, standalone_program
from jrb.state import Buffer, BufferState
from jrb.types import Item
from jrb.types.messages import DrawInputs

_MANY_ELEMENTS = 1 << 14  # of an array that takes longer to copy than one more compiled call


# Writes.


def write(
    buffer: Buffer,
    state: BufferState,
    arrays: Item,
    others: tuple,
    donate: bool = False,
    objects: list[list[Any]] | None = None,
) -> Any:
    """Writes items; returns None if some arguments are traced.

    `arrays` are the items, or stand for `objects` in compiled parts; `others` are the further
    arguments of `steps.write`. With `donate`, arrays of the state are written in place.
    """
    rows, half = state.storage.rows, for_device(buffer, state)
    # In place, the slots are planned first, and the state's arrays are written last: if the disk is
    # full, or an interrupt comes earlier, the state is unchanged. Planning costs one more call, so
    # small arrays are copied instead.
    in_place = donate and rows.takes_back
    if in_place and max(leaf.size for leaf in jax.tree.leaves(half)) > _MANY_ELEMENTS:
        slots = _plan_slots(buffer, half, arrays, *others)
        finish = lambda: steps.write_in_place(buffer, half, arrays, *others)
    else:
        after = steps.write(buffer, half, arrays, *others)
        slots, finish = after.storage.planned, lambda: after
    if is_tracer(slots):
        return None
    items = arrays if objects is None else objects
    return write_rows(state, rows.put_items, slots, items, finish)


def write_rows(
    state: BufferState,
    put: Callable[[int, Any, Any], int],
    slots: jax.Array,
    items: Any,
    finish: Callable[[], BufferState],
) -> Any:
    """Writes rows on the host by `put`, a method of the rows of the state.

    Returns the state of compiled parts from `finish`, which is called after the write, with them.
    """
    rows, version = state.storage.rows, state.storage.version
    with rows.writing(version):
        version = put(version, slots, items)
        after = finish()
        return after.replace(storage=after.storage.with_rows(rows, version))


@by_description()
@standalone_program
def _plan_slots(
    buffer: Buffer, state: BufferState, items: Item, *others: jax.Array | None
) -> jax.Array:
    """Returns the slots that a storage on the host will write; XLA drops all other results."""
    return steps.write(buffer, state, items, *others).storage.planned


# Draws.


def draw_program(buffer: Buffer) -> Callable[..., Any]:
    """Returns a function that draws; its result is None if some of the arguments are traced."""
    storage, is_plain = buffer.storage, _samples_plain_items(buffer)
    choose, assemble = _choose_compiled(buffer), _assemble_compiled(buffer)
    assemble_items = _assemble_items_compiled(buffer)

    def draw_from_host(
        state: Any, key: Any, inputs: DrawInputs, options: dict, is_drawn: Any
    ) -> Any:
        if is_tracer(state.storage.words):
            return None
        rows, half = state.storage.rows, for_device(buffer, state)
        # Writes of other threads wait for a while. What they overwrite after all raises StaleError.
        with rows.drawing():
            sampler, chosen, located = choose(half, key, inputs, **options)
            if not is_drawn(chosen.mask):
                return None
            device = chosen.mask.sharding if compat.is_committed(chosen.mask) else None
            if is_plain and not storage.assembles:
                data = storage.sample_items(state.storage, chosen.indices, chosen.mask, device)
                return sampler, chosen.replace(data=data)
            fetched = storage.fetch(rows, state.storage.version, located)
        fetched = to_device(fetched, device)
        half = half.replace(storage=half.storage.replace(fetched=fetched))
        if is_plain:
            return sampler, chosen.replace(data=assemble_items(half, chosen.indices))
        return sampler, assemble(half, chosen, key)

    return draw_from_host


def _samples_plain_items(buffer: Buffer) -> bool:
    """Returns True if items are sampled as they are stored, at the slots of the anchors."""
    return buffer.unit.one_row and not buffer.transforms


@per_description("batch_size", "moves")
@standalone_program
def _choose_compiled(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    inputs: DrawInputs,
    batch_size: int,
    moves: bool,
) -> tuple[Any, Any, Any]:
    """Runs the part of a draw that comes before items are read on the host.

    Returns:
        The sampler's state, or None unless it `moves`; the `Draw`, or the sample without its data
        if items are sampled as they are stored; and where the host reads, or None if it reads whole
        items at the slots of the anchors.
    """
    check(buffer, state)
    sampler, chosen = steps.draw(buffer, state, key, batch_size, inputs, read=False)
    sampler, located, is_plain = sampler if moves else None, None, _samples_plain_items(buffer)
    if buffer.storage.assembles or not is_plain:
        located = steps.locate(buffer, state, chosen, key)
    if is_plain:  # all of the sample but its data is known before the host reads
        chosen = steps.assemble(buffer, state, chosen, key, read=False)
    return sampler, chosen, located


_assemble_compiled = per_description()(standalone_program(steps.assemble))


@per_description()
@standalone_program
def _assemble_items_compiled(buffer: Buffer, state: BufferState, slots: jax.Array) -> Item:
    """Makes the items of anchors, one row each, of what was fetched and of arrays of the state."""
    context = steps.context_of(buffer, state.writer)
    return buffer.storage.read(context, state.storage, lambda name: slots)


# Edits.


def edit(
    buffer: Buffer, state: BufferState, batches: Iterable[tuple[Any, dict | list[Any]]]
) -> BufferState:
    """Edits items, a batch at a time.

    A batch is a sample or slots, int32 `[B]`; and new leaves by name, or a list of objects.
    """
    cuts = None
    for where, values in batches:
        leaves = {} if isinstance(values, list) else values
        # Ends without a flag are known only to the unit: read them before the flags change.
        if cuts is None and editing.flags(buffer, state) & set(leaves):
            cuts = editing.cuts(buffer, _with_flags(buffer, state))
        after = editing.plan_edit(buffer, for_device(buffer, state), where, leaves)
        rows, slots = state.storage.rows, after.storage.planned
        state = write_rows(state, rows.edit, slots, values, lambda after=after: after)
    if cuts is None:
        return state
    # Rebuild unit and sampler, as ends of episodes have changed.
    after = editing.with_ends(buffer, _with_flags(buffer, state), cuts)
    return after.replace(storage=state.storage)


def compute_batches(
    buffer: Buffer, state: BufferState, function: Callable[[Item], Item], batch_size: int
) -> Iterator[tuple[jax.Array, Any]]:
    """Yields the slots of all held items, B at a time, and what `function` returns for the items.

    Oldest first, as inside `jit`. Items of later batches are read after earlier ones were edited.
    """
    rows, version = state.storage.rows, state.storage.version
    order, count = steps.in_order(buffer, state.writer)
    slots, compiled = np.asarray(order)[: int(count)], jax.jit(function)
    for start in range(0, len(slots), batch_size):
        part = slots[start : start + batch_size]
        yield jnp.asarray(part), compiled(rows.take(version, part))


def _with_flags(buffer: Buffer, state: BufferState) -> Any:
    """Returns the state for `editing`, with fetched flags of ends in place of all items."""
    half, rows = for_device(buffer, state), state.storage.rows
    flags = frozenset(editing.flags(buffer, state))
    with rows.drawing():
        located = editing.locate_leaves(buffer, half, flags)
        fetched = buffer.storage.fetch(rows, state.storage.version, located)
    return half.replace(storage=half.storage.replace(fetched=fetched))
