"""The methods outside `jit`, for items on the device or on the host.

For items on the device, a method is one call of its compiled step. For items on the host, see
`jrb._core.host_calls`. With traced arguments, a method adds its step to the program that is traced.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core import debugging, editing, host_calls, steps, transforming
from jrb._core.lengths import lengths_of
from jrb._core.validate import (
    blank,
    check,
    check_kind,
    check_state,
    compile_blank,
    copy_arrays,
    explain_jax_error,
    is_traced,
    is_tracer,
    on_host,
    warn_of_copies,
)
from jrb._util import pytree
from jrb._util.pytree import SpecKey
from jrb._xla.compiling import kept_by_description, per_description, standalone_program
from jrb.state import Buffer, BufferState, Device, Sample
from jrb.types import Item, PrioritizedSampler, TransformContext
from jrb.types.messages import DrawInputs, PartState


def copy_if_owned(array: jax.Array, state: PartState) -> jax.Array:
    """Returns an array; a copy if it is a leaf of the state, which may be donated later."""
    is_own = any(array is leaf for leaf in jax.tree.leaves(state))
    return jnp.copy(array) if is_own and not is_tracer(array) else array


def is_one_step(buffer: Buffer, *arguments: Any) -> bool:
    """Returns True if a method is one compiled step: inside `jit`, or with items on the device."""
    return not on_host(buffer) or is_traced(arguments)


# Making states.


def init(buffer: Buffer, spec: Item, device: Device) -> Any:
    """Returns an empty state; `spec` has the specs of a stored item."""
    state = make_device_state(buffer, spec, device)
    if not on_host(buffer):
        return state
    # The state has the outline of its rows, which are made here.
    rows = buffer.storage.make_rows(buffer.ring, spec, buffer.keys)
    stored = state.storage.with_rows(rows, 0)
    return state.replace(storage=stored if device is None else jax.device_put(stored, device))


def make_device_state(buffer: Buffer, spec: Item, device: Device = None) -> Any:
    """Returns an empty state, without rows on the host."""
    if isinstance(device, jax.Device):
        device = jax.sharding.SingleDeviceSharding(device)
    if device is not None:
        return jax.jit(lambda: blank(buffer, spec), out_shardings=device)()
    state = compile_blank(buffer)(SpecKey(spec))
    # If memory is short, this raises here, and not at some later call.
    return state if is_traced(state) else jax.block_until_ready(state)


def nbytes(buffer: Buffer, spec: Item, where: str | None) -> int:
    """Returns the bytes that `init` allocates: on the "device", the "host", in "files", or all."""
    sizes = [{"device": pytree.nbytes(compile_blank(buffer).eval_shape(SpecKey(spec)))}]
    if on_host(buffer):
        sizes += [buffer.storage.nbytes(buffer.ring, spec, buffer.keys)]
    return sum(size for each in sizes for kind, size in each.items() if where in (None, kind))


# Writes.


@explain_jax_error
def write(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    mask: jax.Array | None,
    cuts: jax.Array | None = None,
    priorities: jax.Array | None = None,
    donate: bool = False,
    objects: list[list[Any]] | None = None,
) -> Any:
    """Writes items, leaves `[T, E, ...]` or `[T, ...]`, to a state that was checked.

    With `donate`, arrays of a state whose items are on the host are written in place. `objects` are
    T rows of E objects, for which `items` has numbers without a meaning.
    """
    others = mask, cuts, priorities
    if buffer.writer.blocks_when_full:
        _check_room(buffer, state, items, mask)
    traced = is_traced(state, items, others)
    # Inside `jit`, XLA decides about copies. A storage on the host may have some items on a device.
    copies = not on_host(buffer) or (buffer.storage.assembles and not donate)
    if copies and not traced:
        warn_of_copies(buffer, state, 7)
    after = None
    if on_host(buffer) and not traced:
        after = host_calls.write(buffer, state, items, others, donate, objects)
    if after is None:
        after = steps.write(buffer, state, copy_arrays(items), *others)
    if debugging.OBSERVERS:
        debugging.notify("add", buffer, state, after, items=items)
    return after


def _check_room(buffer: Buffer, state: BufferState, items: Item, mask: jax.Array | None) -> None:
    """Raises `ValueError` if there is no room for the rows; checks nothing inside `jit`."""
    if is_traced(state, items, mask):
        return
    # Inside `jit` the result may be traced though the state is not.
    room = steps.room(buffer, state.replace(storage=None))
    if is_traced(room):
        return
    num_rows = len(jax.tree.leaves(items)[0]) if mask is None else int(np.sum(mask))
    if num_rows > room:
        raise ValueError(
            f"add, extend: expected at most {int(room)} rows, for which there is room, got "
            f"{num_rows}. Draw or empty first; can_add tells whether there is room for one."
        )


@explain_jax_error
def can_add(buffer: Buffer, state: BufferState) -> jax.Array:
    check_state(buffer, state)
    return steps.can_write(buffer, state.replace(storage=None))


def fill(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    cuts: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> Any:
    """Writes in place, also outside `jit`, to a state that is used nowhere else."""
    check_state(buffer, state)
    with lengths_of(buffer).pad_arguments(state, items, mask, cuts) as (items, mask, cuts):
        if on_host(buffer):
            return host_calls.write(buffer, state, items, (mask, cuts, None))
        return steps.write_in_place(buffer, state, copy_arrays(items), mask, cuts)


# Draws.


@explain_jax_error
def draw(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    inputs: DrawInputs,
    quiet: bool = False,
    moves: bool = True,
) -> tuple[Any, Sample]:
    """Draws a batch.

    Returns:
        The state after the draw (outside `jit`, only if `moves`, else as it was); and the sample.

    Raises:
        ValueError: there is nothing to draw, outside `jit` and without `quiet`.
    """
    check_kind(buffer, state)
    inside, run = _program_of(buffer)
    drawn = None
    # Only two arrays are looked at, as to look at all takes longer; `_is_drawn` notices the others.
    if not (is_tracer(key) or is_tracer(state.edits)):
        is_drawn = functools.partial(_is_drawn, buffer, state, quiet)
        drawn = run(state, key, inputs, {"batch_size": batch_size, "moves": moves}, is_drawn)
    # If some of the arguments are traced, add the draw to the program that is traced.
    if drawn is None:
        check_state(buffer, state)
        drawn = steps.draw_inside(buffer, state, key, batch_size, inputs)
        if debugging.OBSERVERS:
            debugging.notify("sample", buffer, state, drawn, key=key)
        return drawn
    sampler, sample = drawn
    # Apply the transforms that are not compiled into the draw.
    if inside < len(buffer.transforms):
        batch = TransformContext(key, sample.mask, buffer.keys, ends=sample.info.get("is_last"))
        data = transforming.apply_transforms(buffer.transforms[inside:], sample.data, batch, inside)
        sample = sample.replace(data=data)
    drawn = state.replace(sampler=sampler) if moves else state, sample
    if debugging.OBSERVERS:
        debugging.notify("sample", buffer, state, drawn, key=key)
    return drawn


def _is_drawn(buffer: Buffer, state: BufferState, quiet: bool, mask: Any) -> bool:
    """Returns True for a draw, False for a traced one; raises if one is empty, unless `quiet`."""
    if is_tracer(mask) or quiet:
        return not is_tracer(mask)
    # To sleep and be woken costs a thread 25 us or more, longer than what the compiled program has
    # left to do: poll for some 200 us first.
    for _ in range(1000):
        if mask.is_ready():
            break
    # The first entry is nearly always True, and quicker to look at than all.
    values = np.asarray(mask)
    if values.item(0) or values.any():
        return True
    # Nothing was drawn: find out why.
    size = int(buffer.size(state))
    num_anchors = int(steps.num_anchors(buffer, state.replace(storage=None)))
    is_masked = bool(ready(buffer, state, len(values)))
    raise ValueError(f"sample: {explain_no_draw(buffer, size, num_anchors, is_masked)}")


def explain_no_draw(buffer: Buffer, size: int, num_anchors: int, is_masked: bool = False) -> str:
    """Returns why nothing can be drawn from `size` items with `num_anchors` anchors, and the cure.

    `is_masked` is True if the sampler drew anchors, and the unit masked them.
    """
    unit, need = type(buffer.unit).__name__, buffer.unit.anchor_requirement
    sampler = type(buffer.sampler).__name__
    why = f"in which {sampler} finds nothing"
    cure = f"Add items first; can_sample tells when there are enough. {need}"
    if buffer.min_size is not None and size < buffer.min_size:
        why = f"where min_size is {buffer.min_size}"
    elif num_anchors and buffer.sampler.reads is not None:
        why = f"in which {sampler} finds no anchor with a weight above 0"
        cure = "See what its function returns for the leaves, ages and the context of this draw."
    elif is_masked:
        why, cure = f"in which {unit} masks every anchor of the batch", "Draw more, or add items."
    elif size and not num_anchors and buffer.sampler.max_draws is not None:
        why = f"in which {unit} has no anchor that {sampler} drew fewer than "
        why += f"{buffer.sampler.max_draws} times"
    elif size and not num_anchors:
        why, cure = f"in which {unit} has no anchor", need or cure
    elif num_anchors and isinstance(buffer.sampler, PrioritizedSampler):
        why = f"in which {sampler} finds no mass"
        cure = "Give priorities above 0, add items, or drop fewer of them."
    return f"expected something to draw, got a buffer of size {size} {why}. {cure}".rstrip()


@kept_by_description
def _program_of(buffer: Buffer) -> tuple[int, Callable[..., Any]]:
    """Returns how many transforms are compiled into a draw, and the function that draws."""
    # The function returns the sampler's state and the sample; None if some arguments are traced.
    # It is cached: between two compiled calls of a Python loop, each call of a function costs a
    # microsecond. A plain function among the transforms may close over a value that changes: it is
    # called at each draw, and so are the transforms after it, and all transforms of objects.
    inside = 0
    if buffer.transforms and not buffer.storage.of_objects:
        inside = transforming.count_fixed(buffer.transforms)
    fixed: Any = buffer
    if inside < len(buffer.transforms):
        fixed = dataclasses.replace(buffer, transforms=buffer.transforms[:inside])
    if on_host(buffer):
        return inside, host_calls.draw_program(fixed)
    compiled = _draw_compiled(fixed)

    def draw_on_device(
        state: Any, key: Any, inputs: DrawInputs, options: dict, is_drawn: Any
    ) -> Any:
        drawn = compiled(state, key, inputs, **options)
        return drawn if is_drawn(drawn[1].mask) else None

    return inside, draw_on_device


@per_description("batch_size", "moves")
@standalone_program
def _draw_compiled(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    inputs: DrawInputs,
    batch_size: int,
    moves: bool,
) -> tuple[Any, Sample]:
    """Draws outside `jit`. The state is checked while this is traced, not at each call."""
    check(buffer, state)
    sampler, sample = steps.draw(buffer, state, key, batch_size, inputs)
    # A compiled function copies what it returns, so the sampler is returned only if it moves.
    return sampler if moves else None, sample


@explain_jax_error
def ready(buffer: Buffer, state: BufferState, batch_size: int | None) -> jax.Array:
    return steps.ready(buffer, state.replace(storage=None), batch_size)


@explain_jax_error
def take(buffer: Buffer, state: BufferState, indices: jax.Array) -> Any:
    """Returns the items at slots of any shape; objects in one list."""
    check_state(buffer, state)
    if not is_traced(state, indices) and np.size(indices):
        slots = np.asarray(indices)
        # The check is compiled for each length: take powers of two.
        padded = np.zeros(1 << (slots.size - 1).bit_length(), np.int32)
        padded[: slots.size] = slots.reshape(-1)
        holds = steps.holds(buffer, state.writer, jax.device_put(padded))
        is_empty = ~np.asarray(holds)[: slots.size].reshape(slots.shape)
        if is_empty.any():
            raise ValueError(
                f"take: expected slots that hold items, got {slots[is_empty][0]}, which holds "
                f"none: {int(buffer.size(state))} are held, as in_order tells."
            )
    if is_one_step(buffer, state, indices):
        return steps.take(buffer, state, indices)
    return state.storage.rows.take(state.storage.version, indices)


# Methods that leave items alone: outside `jit`, the items are not passed to the compiled step.


@explain_jax_error
def update(
    buffer: Buffer,
    state: BufferState,
    sample: Sample | jax.Array,
    priorities: jax.Array,
    donate: bool = False,
) -> Any:
    after = _call_without_items(steps.update, donate, buffer, state, sample, priorities)
    if debugging.OBSERVERS:
        debugging.notify(
            "update_priority", buffer, state, after, which=sample, priorities=priorities
        )
    return after


@explain_jax_error
def drop(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array, donate: bool = False
) -> BufferState:
    return _call_without_items(steps.drop, donate, buffer, state, where)


def _call_without_items(
    step: Callable[..., Any], donate: bool, buffer: Buffer, state: BufferState, *args: Any
) -> Any:
    """Calls a step that leaves items alone; with `donate`, it may change the sampler only."""
    check_state(buffer, state)
    if is_traced(state, args):
        return step(buffer, state, *args)
    half, args = state.replace(storage=None), tuple(map(_without_data, args))
    if not donate:
        return step(buffer, half, *args).replace(storage=state.storage)
    # Only the sampler's state is donated, and the program returns nothing else.
    move_sampler = _sampler_program(step)(buffer)
    return state.replace(sampler=move_sampler(state.sampler, half.replace(sampler=None), *args))


@functools.cache
def _sampler_program(step: Callable[..., Any]) -> Callable[[Buffer], Any]:
    """Returns a step as a function from a description to a program that returns the sampler."""

    @per_description(donated=("sampler",))
    def move_sampler(buffer: Buffer, sampler: Any, others: BufferState, *args: Any) -> Any:
        return step(buffer, others.replace(sampler=sampler), *args).sampler

    return move_sampler


def _without_data(where: Sample | jax.Array | None) -> Any:
    """Returns a sample without its data, so that fewer arrays are passed; slots as they are."""
    if not isinstance(where, Sample):
        return where
    return copy_arrays(where.replace(data=None))


@explain_jax_error
def truncate(buffer: Buffer, state: BufferState, which: jax.Array) -> Any:
    """Ends the running episodes of some environments, bool `[E]`."""
    return _call_without_items(steps.truncate, False, buffer, state, which)


@explain_jax_error
def empty(buffer: Buffer, state: BufferState) -> Any:
    after = _call_without_items(steps.empty, False, buffer, state)
    if is_traced(state):
        return after
    # The step had no items: empty their storage here.
    storage = buffer.storage.reset(buffer.ring, state.storage, jnp.int32(0))
    return after.replace(storage=storage)


@kept_by_description
def wait_method(buffer: Buffer) -> Callable[[BufferState, Sample], BufferState]:
    """Returns a method that makes later writes to a state wait for the reads of a sample."""
    # Outside `jit`, all writes do so.
    return lambda state, sample: (
        steps.wait(buffer, state, sample) if is_traced(state, sample) else state
    )


# Edits.


@explain_jax_error
def edit(
    buffer: Buffer,
    state: BufferState,
    where: Sample | jax.Array | None,
    values: Item,
    objects: list[Any] | None = None,
) -> BufferState:
    """Sets leaves of held items to `values`, a dict by leaf name; `where=None` is all slots.

    For items that are objects, `values` is empty, and `objects` has the new ones.
    """
    check_state(buffer, state)
    if is_one_step(buffer, state, where, values):
        if not is_traced(state, where, values):
            warn_of_copies(buffer, state)
            where = _without_data(where)
        return editing.edit(buffer, state, where, copy_arrays(values))
    where = jnp.arange(buffer.capacity, dtype=jnp.int32) if where is None else _without_data(where)
    return host_calls.edit(buffer, state, [(where, values if objects is None else objects)])


@explain_jax_error
def rewrite(
    buffer: Buffer, state: BufferState, function: Callable[[Item], Item], batch_size: int
) -> BufferState:
    """Replaces leaves of all held items by those that `function` returns for B items at a time."""
    check_state(buffer, state)
    if is_one_step(buffer, state):
        if not is_traced(state):
            warn_of_copies(buffer, state)
        return editing.rewrite(buffer, state, function, batch_size)
    batches = host_calls.compute_batches(buffer, state, function, batch_size)
    return host_calls.edit(buffer, state, batches)
