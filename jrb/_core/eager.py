"""The verbs outside `jit`, wherever the items are.

For items on the device, a verb is one call of its compiled step. For items on the host it is host
code around compiled parts, for which a `DeviceProxy` stands in place of the storage: they say which
slots are written and read. With traced arguments, a verb is its step in the program around it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core import editing, steps, transforming
from jrb._core.host_proxy import HostStorageProxy, for_device, on_device, on_host, without_items
from jrb._core.validate import (
    blank,
    check,
    check_kind,
    check_state,
    explained,
    warn_of_copies,
)
from jrb._util import casting, checks, pytree
from jrb._util.pytree import Leaf, SpecKey
from jrb._xla import compiling
from jrb._xla.compiling import per_description
from jrb.state import Buffer, BufferState, Device, Sample
from jrb.types import Item, TransformContext
from jrb.types.messages import PartState


def refusal() -> TypeError:
    """Makes the error for a verb that cannot work on Python objects."""
    return TypeError(
        "ListStorage: expected to be called outside jit, vmap and scan, with Python objects. Use "
        "jrb.DeviceStorage() there, with items of arrays."
    )


def copy_if_owned(array: jax.Array, state: PartState) -> jax.Array:
    """Returns an array, copied if it is one of the state's, which may be donated later."""
    is_own = any(array is leaf for leaf in jax.tree.leaves(state))
    return jnp.copy(array) if is_own and not is_tracer(array) else array


def is_traced(*arguments: Any) -> bool:
    """Returns if any of their leaves is no array, but stands for one inside `jit`."""
    return any(map(is_tracer, jax.tree.leaves(arguments)))


def is_tracer(leaf: Leaf) -> bool:
    """Returns if it stands for an array inside `jit`."""
    return isinstance(leaf, jax.core.Tracer)


def is_one_step(buffer: Buffer, *arguments: Any) -> bool:
    """Returns if a verb is one compiled step: inside `jit`, or with all items on the device."""
    if not on_host(buffer):
        return True
    traced = is_traced(arguments)
    if traced and buffer.storage.of_objects:
        raise refusal()
    return traced


# Making states.


def check_init(buffer: Buffer, example: Item) -> None:
    """Raises inside `jit` if there are files to be made."""
    if on_host(buffer) and not buffer.storage.of_objects and is_traced(example, jnp.zeros(())):
        raise TypeError(
            "init: expected to be called outside jit, vmap and scan, as it makes files. Make the "
            "state before, and pass it as an argument."
        )


def init(buffer: Buffer, spec: Item, device: Device) -> Any:
    """Makes an empty state; `spec` is that of an item as it is stored."""
    if not on_host(buffer):
        return _blank(buffer, spec, device)
    state = _blank(for_device(buffer), spec, device)
    storage = buffer.storage.make(
        buffer.ring, spec, state.storage, is_chronological=buffer.writer.is_chronological
    )
    if device is not None:
        storage = jax.device_put(storage, device)
    return state.replace(storage=storage)


def _blank(buffer: Buffer, spec: Item, device: Device) -> Any:
    if isinstance(device, jax.Device):
        device = jax.sharding.SingleDeviceSharding(device)
    if device is not None:
        return jax.jit(lambda: blank(buffer, spec), out_shardings=device)()
    leaves, structure = jax.tree.flatten(spec)
    state = _compiled_blank(buffer, structure, tuple(leaves))
    # Memory that is not there is an error here, and not at some later call.
    return state if is_traced(state) else jax.block_until_ready(state)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled_blank(
    buffer: Buffer, structure: Any, leaves: tuple[jax.ShapeDtypeStruct, ...]
) -> Any:
    """`blank`, all arrays in one program."""
    return blank(buffer, jax.tree.unflatten(structure, leaves))


def nbytes(buffer: Buffer, spec: Item) -> int:
    """Returns the bytes that `init` allocates, on the device and on the host."""
    if not on_host(buffer):
        return pytree.nbytes(jax.eval_shape(lambda: blank(buffer, spec)))
    inner = pytree.nbytes(jax.eval_shape(lambda: blank(for_device(buffer), spec)))
    return inner + buffer.storage.nbytes(
        buffer.ring, spec, is_chronological=buffer.writer.is_chronological
    )


def half(buffer: Buffer, spec: Item) -> Any:
    """Makes an empty state without items, which are on the host."""
    return _blank(for_device(buffer), spec, None)


# Writes.


@explained
def write(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    mask: jax.Array | None,
    cuts: jax.Array | None = None,
    priorities: jax.Array | None = None,
    donate: bool = False,
) -> Any:
    """Writes items, leaves `[T, E, ...]` or `[T, ...]`, to a state that was checked.

    With `donate`, arrays of a state whose items are on the host are written in place.
    """
    rest = mask, cuts, priorities
    if buffer.writer.blocks_when_full:
        _check_room(buffer, state, items, mask)
    if is_one_step(buffer, state, items, rest):
        if not is_traced(state, items, rest):
            warn_of_copies(buffer, state, 6)
        return steps.write(buffer, state, casting.copy_arrays(items), *rest)
    after = _put(buffer, state, items, items, rest, donate)
    return steps.write(buffer, state, items, *rest) if after is None else after


def _check_room(buffer: Buffer, state: BufferState, items: Item, mask: jax.Array | None) -> None:
    """Raises where rows would find no room, as far as that is known."""
    if is_traced(state, items, mask):
        return
    room = steps.room(buffer, state.replace(storage=None))
    if is_traced(room):
        return
    num_rows = len(jax.tree.leaves(items)[0]) if mask is None else int(np.sum(mask))
    if num_rows > room:
        raise ValueError(
            f"add, extend: expected at most {int(room)} rows, for which there is room, got "
            f"{num_rows}. Draw or empty first; can_add tells whether there is room for one."
        )


@explained
def can_add(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns if a row would be written, bool `[]`."""
    check_state(buffer, state)
    return steps.can_write(buffer, state.replace(storage=None))


def _put(
    buffer: Buffer, state: BufferState, arrays: Item, items: Item, rest: tuple, donate: bool
) -> Any:
    """Writes items to a storage on the host; returns None if some arguments are traced.

    Args:
        buffer: the description.
        state: a state.
        arrays: the items as jitted parts know them.
        items: as the storage takes them.
        rest: other arguments of `steps.write`.
        donate: whether arrays of the state may be written in place.
    """
    storage, part, half = buffer.storage, for_device(buffer), on_device(buffer, state)
    # In place, the slots are planned first, and the arrays written last of all: where the items
    # find no room on the disk, or an interrupt comes before, the state is as it was. To plan costs
    # one more call, so small arrays are copied in place of that.
    in_place = (
        donate
        and storage.takes_back
        and max(leaf.size for leaf in jax.tree.leaves(half)) > _MANY_ELEMENTS
    )
    after: Any = None if in_place else steps.write(part, half, arrays, *rest)
    plan = steps.planned(part, half, arrays, *rest) if in_place else after.storage
    if is_traced(plan, after):
        return None
    with storage.writing(state.storage):
        kept = storage.put(state.storage, plan, items)
        if in_place:
            after = steps.write_in_place(part, half, arrays, *rest)
            kept = storage.moved(kept, after.storage)
        return after.replace(storage=kept)


_MANY_ELEMENTS = 1 << 14  # of an array of which a copy takes longer than one more compiled call


def fill(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    cuts: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> Any:
    """Writes to a state that nobody else has: outside `jit` too, in place."""
    check_state(buffer, state)
    if on_host(buffer):
        return write(buffer, state, items, mask, cuts)
    return _written_in_place(buffer, state, items, mask, cuts)


_written_in_place = jax.jit(steps.write, donate_argnums=1)


def write_index_only(buffer: Buffer, half: BufferState, items: Item, mask: jax.Array | None) -> Any:
    """Writes to a state whose items are on the host already, and stay as they are."""
    after = steps.write(for_device(buffer), half, items, mask)
    return after.replace(storage=half.storage)


def expire(buffer: Buffer, state: BufferState, spec: Item, num_rows: jax.Array | np.ndarray) -> Any:
    """Removes so many of the oldest rows, `[]` or `[E]`, from a state without items."""
    row = (1, buffer.ring.envs)
    blanks = jax.tree.map(lambda leaf: jnp.zeros((*row, *leaf.shape), leaf.dtype), spec)
    return steps.expire(without_items(buffer), state, blanks, jnp.asarray(num_rows, jnp.int32))


@explained
def write_objects(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    mask: jax.Array | None,
    verb: str,
    priorities: jax.Array | None = None,
    donate: bool = False,
) -> Any:
    """Writes T rows of objects: a sequence of them, with `num_envs` of sequences of E."""
    check_state(buffer, state)
    if is_one_step(buffer, state, mask, priorities):
        raise refusal()
    if isinstance(items, str | bytes | dict) or not isinstance(items, Sequence):
        raise TypeError(
            f"{verb}: expected a sequence of objects, got {type(items).__name__}. Put them in a "
            "list; for a single one there is add."
        )
    rows = [[item] for item in items] if buffer.num_envs is None else list(map(list, items))
    for row in rows:
        if len(row) != buffer.ring.envs:
            raise ValueError(
                f"{verb}: expected {buffer.ring.envs} objects in a row, one for each environment, "
                f"got {len(row)}."
            )
    rows = [[transforming.inward(buffer.transforms, item) for item in row] for row in rows]
    lead = () if buffer.num_envs is None else (buffer.num_envs,)
    if mask is not None:
        mask = checks.write_mask(verb, mask, (len(rows),), lead, buffer.writer)
    # For the jitted parts, an object is an array without meaning.
    blanks = np.zeros((len(rows), *lead), np.uint8)
    if priorities is not None:
        priorities = checks.given_priorities(verb, priorities, blanks.shape)
    if not rows:
        return state
    arrays = {"item": blanks}
    if buffer.writer.blocks_when_full:
        _check_room(buffer, state, arrays, mask)
    return _put(buffer, state, arrays, rows, (mask, None, priorities), donate)


# Draws.


@explained
def draw(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
    quiet: bool = False,
    moves: bool = True,
) -> tuple[Any, Sample]:
    """Draws a batch.

    Returns:
        The state after the draw; outside `jit`, unless it `moves`, the one before. And the sample.

    Raises:
        ValueError: outside `jit`, there is nothing to draw, unless `quiet`.
    """
    check_kind(buffer, state)
    program = _program_of(buffer)
    drawn = None
    if not (is_tracer(key) or is_tracer(state.edits)):
        run = _draw_from_host if program.is_on_host else _draw_on_device
        drawn = run(program, buffer, state, key, batch_size, beta, quiet, moves)
    if drawn is None:  # some of the arguments are traced
        if buffer.storage.of_objects:
            raise refusal()
        check_state(buffer, state)
        return steps.draw_inside(buffer, state, key, batch_size, beta)
    sampler, sample = drawn
    if program.inside < len(buffer.transforms):
        batch = TransformContext(key, sample.mask, buffer.keys, ends=sample.info.get("is_last"))
        rest = buffer.transforms[program.inside :]
        data = transforming.outward(rest, sample.data, batch, program.inside)
        sample = sample.replace(data=data)
    return state.replace(sampler=sampler) if moves else state, sample


class _DrawProgram(NamedTuple):
    """Everything about draws outside `jit` that equal descriptions share, looked up once.

    Between two compiled calls of a Python loop, each call of a function costs a microsecond.

    Attributes:
        inside: how many transforms, from the first on, are compiled with the draw. A plain function
            among them may close over a value that changes: it is called each time.
        compiled: the compiled draw.
        is_on_host: whether items are on the host.
        inner: of these, the description that jitted parts know.
        is_plain: whether items are drawn as they are stored; `assemble` has nothing to do then.
        at_anchors: and are read where the anchors are.
    """

    inside: int
    compiled: Callable[..., Any]
    is_on_host: bool
    inner: Any = None
    is_plain: bool = False
    at_anchors: bool = False


@functools.lru_cache(maxsize=64)
def _program_of(buffer: Buffer) -> _DrawProgram:
    inside = transforming.fixed(buffer.transforms)
    fixed: Any = buffer
    if inside < len(buffer.transforms):
        fixed = dataclasses.replace(buffer, transforms=buffer.transforms[:inside])
    if not on_host(buffer):
        return _DrawProgram(inside, _draw_compiled(fixed), is_on_host=False)
    inner = for_device(fixed)
    is_plain = inner.unit.one_row and not inner.transforms
    at_anchors = is_plain and isinstance(inner.storage, HostStorageProxy)
    return _DrawProgram(inside, _choose_compiled(inner), True, inner, is_plain, at_anchors)


@per_description("batch_size", "moves")
@compiling.standalone_program
def _draw_compiled(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    beta: jax.Array | float | None,
    batch_size: int,
    moves: bool,
) -> tuple[Any, Sample]:
    """A draw outside `jit`. The state is checked when it is traced, not at each call.

    What a compiled function returns is copied: neither items nor, unless it `moves`, the sampler.
    """
    check(buffer, state)
    sampler, sample = steps.draw(buffer, state, key, batch_size, beta)
    return sampler if moves else None, sample


def _draw_on_device(
    program: _DrawProgram,
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
    quiet: bool,
    moves: bool,
) -> tuple[Any, Sample] | None:
    """Draws by one compiled call; returns None where some arguments are traced."""
    drawn = program.compiled(state, key, beta, batch_size=batch_size, moves=moves)
    mask = drawn[1].mask
    if is_tracer(mask):
        return None
    if not quiet:
        _check_some(buffer, state, mask)
    return drawn


@per_description("batch_size", "names", "moves", "is_plain", "spec")
@compiling.standalone_program
def _choose_compiled(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    beta: jax.Array | float | None,
    batch_size: int,
    names: tuple[str, ...] | None,
    moves: bool,
    is_plain: bool,
    spec: SpecKey,
) -> tuple[Any, Any, Any]:
    """The part of a draw before items are fetched from the host.

    Returns:
        The sampler's state if it `moves`; the `Draw`, or if it `is_plain` the sample but its data;
        and where leaves with these names are read, None without names.
    """
    check(buffer, state, spec)
    sampler, chosen = steps.draw(buffer, state, key, batch_size, beta, read=False)
    places = None if names is None else steps.locate(buffer, state, chosen, key, names)
    if is_plain:
        chosen = steps.assemble(buffer, state, chosen, key, read=False)
    return sampler if moves else None, chosen, places


_assemble_compiled = per_description()(steps.assemble)


def _draw_from_host(
    program: _DrawProgram,
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
    quiet: bool,
    moves: bool,
) -> tuple[Any, Sample] | None:
    """Draws anchors by a compiled call, fetches items, and assembles the sample by another one.

    Returns None where some arguments are traced.
    """
    storage, kept = buffer.storage, state.storage
    if is_traced(kept):
        return None
    half, spec = on_device(buffer, state), storage.spec_key(kept)
    names = None if program.at_anchors else storage.names(kept)
    options = {"batch_size": batch_size, "names": names, "moves": moves}
    options |= {"is_plain": program.is_plain, "spec": spec}
    with storage.drawing(kept):  # nothing is overwritten meanwhile
        sampler, chosen, places = program.compiled(half, key, beta, **options)
        if is_tracer(chosen.mask):
            return None
        if not quiet:
            _check_some(buffer, state, chosen.mask)
        slots = chosen.indices if program.is_plain else chosen.slots
        data = storage.fetch(kept, slots, places)
    if storage.of_objects:
        return sampler, chosen.replace(data=_collated(buffer, program, data, chosen.mask, key))
    if program.is_plain:
        return sampler, chosen.replace(data=data)
    fetched = half.replace(storage=data)
    return sampler, _assemble_compiled(program.inner)(fetched, chosen, key)


def _check_some(buffer: Buffer, state: BufferState, mask: Any) -> None:
    """Raises unless a draw found something; this waits for it."""
    # A thread that sleeps and is woken costs 25 us and more, longer than the computation between
    # two parts in Python: poll for some 200 us first.
    for _ in range(1000):
        if mask.is_ready():
            break
    values = np.asarray(mask)
    if values.item(0) or values.any():
        return
    least = "" if buffer.min_size is None else f": min_size is {buffer.min_size}"
    raise ValueError(
        f"sample: expected something to draw, got a buffer of size {buffer.size(state)} in which "
        f"{type(buffer.sampler).__name__} finds nothing. Add items first; can_sample tells when "
        f"there are enough{least}."
    )


def _collated(
    buffer: Buffer, program: _DrawProgram, objects: list[Any], mask: jax.Array, key: jax.Array
) -> Any:
    """Makes the data of a sample of objects, None where nothing was drawn."""
    drawn, collate = np.asarray(mask), buffer.storage.collate
    if not drawn.all():
        objects = [item if real else None for item, real in zip(objects, drawn, strict=True)]
    data = objects if collate is None else collate(objects)
    if not program.inside:
        return data
    batch = TransformContext(key, mask, buffer.keys)
    return transforming.outward(buffer.transforms[: program.inside], data, batch)


@explained
def ready(buffer: Buffer, state: BufferState, batch_size: int | None) -> jax.Array:
    """Returns if a draw gives at least one item, bool `[]`."""
    return steps.ready(buffer, state.replace(storage=None), batch_size)


@explained
def take(buffer: Buffer, state: BufferState, indices: jax.Array) -> Any:
    """Returns the items at slots of any shape; objects in one list."""
    check_state(buffer, state)
    if not is_traced(state, indices):
        _check_held(buffer, state, np.asarray(indices))
    if is_one_step(buffer, state, indices):
        return steps.take(buffer, state, indices)
    return buffer.storage.take(state.storage, np.asarray(indices))


def _check_held(buffer: Buffer, state: BufferState, slots: np.ndarray) -> None:
    """Raises unless all slots hold items."""
    if not slots.size:
        return
    # The check is compiled for each length: take powers of two.
    padded = np.zeros(1 << (slots.size - 1).bit_length(), np.int32)
    padded[: slots.size] = slots.reshape(-1)
    holds = steps.holds(buffer.writer, buffer.ring, state.writer, jax.device_put(padded))
    empty = ~np.asarray(holds)[: slots.size].reshape(slots.shape)
    if empty.any():
        raise ValueError(
            f"take: expected slots that hold items, got {slots[empty][0]}, which holds none: "
            f"{int(buffer.size(state))} are held, as in_order tells."
        )


# What changes the sampler only.


@explained
def update(
    buffer: Buffer,
    state: BufferState,
    sample: Sample | jax.Array,
    priorities: jax.Array,
    donate: bool = False,
) -> Any:
    """Sets priorities."""
    check_state(buffer, state)
    if is_traced(state, sample, priorities):
        return steps.update(buffer, state, sample, priorities)
    return _moved(steps.update, donate, buffer, state, _light(sample), priorities)


@explained
def drop(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array, donate: bool = False
) -> BufferState:
    """Takes anchors out of the draws."""
    check_state(buffer, state)
    if is_traced(state, where):
        return steps.drop(buffer, state, where)
    return _moved(steps.drop, donate, buffer, state, _light(where))


def _moved(
    step: Callable[..., Any], donate: bool, buffer: Buffer, state: BufferState, *args: Any
) -> Any:
    """Calls a step that changes nothing in the state but what its sampler remembers."""
    inner, half = without_items(buffer), state.replace(storage=None)
    if not donate:
        return step(inner, half, *args).replace(storage=state.storage)
    moved = _moved_in_place(step)(inner)
    return state.replace(sampler=moved(state.sampler, half.replace(sampler=None), *args))


@functools.cache
def _moved_in_place(step: Callable[..., Any]) -> Callable[[Buffer], Any]:
    @per_description(donated=("sampler",))
    def moved(buffer: Buffer, sampler: Any, rest: BufferState, *args: Any) -> Any:
        return step(buffer, rest.replace(sampler=sampler), *args).sampler

    return moved


def _light(where: Sample | jax.Array | None) -> Any:
    """Returns a sample without its items: fewer arrays to hand over."""
    if not isinstance(where, Sample):
        return where
    return casting.copy_arrays(where.replace(data=None))


@explained
def truncate(buffer: Buffer, state: BufferState, which: jax.Array) -> Any:
    """Lets nothing of some environments, bool `[E]`, go on."""
    check_state(buffer, state)
    if is_traced(state, which):
        return steps.truncate(buffer, state, which)
    after = steps.truncate(without_items(buffer), state.replace(storage=None), which)
    return after.replace(storage=state.storage)


@explained
def empty(buffer: Buffer, state: BufferState) -> Any:
    """Returns the state without its items."""
    check_state(buffer, state)
    if is_traced(state):
        return steps.empty(buffer, state)
    after = steps.empty(without_items(buffer), state.replace(storage=None))
    storage = buffer.storage.reset(buffer.ring, state.storage, jnp.int32(0))
    return after.replace(storage=storage)


@dataclasses.dataclass(frozen=True)
class Wait:
    """Makes later writes to a state wait for a sample's reads. Outside `jit` all writes do.

    Attributes:
        buffer: the description of both.
    """

    buffer: Buffer

    def __call__(self, state: BufferState, sample: Sample) -> BufferState:
        return steps.wait(self.buffer, state, sample) if is_traced(state, sample) else state


# Edits.


@explained
def edit(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array | None, values: Item
) -> BufferState:
    """Sets values, leaves by name, of held items; `where` is None for all slots."""
    check_state(buffer, state)
    if is_one_step(buffer, state, where, values):
        if not is_traced(state, where, values):
            warn_of_copies(buffer, state)
            where = _light(where)
        return editing.edit(buffer, state, where, casting.copy_arrays(values))
    names = () if buffer.storage.of_objects else tuple(values)
    ends = bool(names) and editing.changes_ends(buffer, state, names)
    before = editing.cuts(*_with_flags(buffer, state)) if ends else None
    if where is None:
        where = jnp.arange(buffer.capacity, dtype=jnp.int32)
    after = _edit_outside(buffer, state, where, values)
    return after if before is None else _with_ends(buffer, after, before)


@explained
def rewrite(
    buffer: Buffer, state: BufferState, function: Callable[[Item], Item], batch_size: int
) -> BufferState:
    """Puts a function from B items to other leaves by name over all that is held."""
    check_state(buffer, state)
    if is_one_step(buffer, state):
        if not is_traced(state):
            warn_of_copies(buffer, state)
        return editing.rewrite(buffer, state, function, batch_size)
    order, count = steps.in_order(buffer.writer, buffer.ring, state.writer)
    slots, compiled = np.asarray(order)[: int(count)], jax.jit(function)
    before = None
    for start in range(0, len(slots), batch_size):
        part = jnp.asarray(slots[start : start + batch_size])
        values = compiled(take(buffer, state, part))
        if not start and editing.changes_ends(buffer, state, tuple(values)):
            before = editing.cuts(*_with_flags(buffer, state))
        state = _edit_outside(buffer, state, part, values)
    return state if before is None else _with_ends(buffer, state, before)


def _edit_outside(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array, values: Item
) -> BufferState:
    """Edits items on the host; the unit is not updated."""
    inner, half = for_device(buffer), on_device(buffer, state)
    arrays = {} if buffer.storage.of_objects else values
    slots, after = editing.edit_outside(inner, half, _light(where), arrays)
    with buffer.storage.writing(state.storage):
        put = buffer.storage.put_values
        storage = put(state.storage, after.storage, np.asarray(slots), values)
        return after.replace(storage=storage)


def _with_flags(buffer: Buffer, state: BufferState) -> tuple[Any, BufferState]:
    """Fetches the flags of ends of episodes, which stand for the items on the host."""
    names, flags = buffer.storage.names(state.storage), frozenset(editing.flags(buffer, state))
    inner, half = for_device(buffer), on_device(buffer, state)
    with buffer.storage.drawing(state.storage):
        slots, places = editing.places_of(inner, half, names, flags)
        read = buffer.storage.fetch(state.storage, slots, places)
    return without_items(buffer), state.replace(storage=read)


def _with_ends(buffer: Buffer, state: BufferState, before: jax.Array) -> BufferState:
    """`editing.with_ends` for items on the host, which the compiled step knows nothing of."""
    after = editing.with_ends(*_with_flags(buffer, state), before)
    return after.replace(storage=state.storage)
