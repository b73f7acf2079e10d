"""The verbs, wherever the items lie.

Where a storage keeps them on the host, a verb outside `jit` is host code around jitted parts; in
all other cases it is the jitted verb.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core import editing, steps, transforming, validate
from jrb._core.compiling import per_description
from jrb._core.deferred import HostStorageProxy
from jrb._util import checks, owned, pytree, wording
from jrb._util.pytree import Leaf
from jrb._xla import compat
from jrb.state import Buffer, BufferState, Device, Sample
from jrb.types import HostState, HostStorage, Item
from jrb.types.messages import PartState

F = TypeVar("F", bound=Callable[..., Any])


class DonatedError(ValueError):
    """A state was used whose arrays had been donated, or deleted."""


def explained(verb: F) -> F:
    """The same verb, which says what to do where arrays were donated, or lie on an explicit mesh.

    Raises:
        DonatedError, ValueError: in place of what JAX raises then.
    """

    @functools.wraps(verb)
    def told(*args: Any, **kwargs: Any) -> Any:
        if not _is_alone():
            for first in args[:2]:  # a verb of dispatch has the buffer before the state
                check_there(first)
        try:
            return verb(*args, **kwargs)
        except Exception as error:
            if compat.is_of_donated(error):
                raise DonatedError(_DONATED) from error
            if not compat.is_of_explicit_mesh(error):
                raise
            raise ValueError(
                "expected a state and items that are not cut over an explicit axis of a mesh, got "
                f"some for which JAX says: {str(error).splitlines()[0]} Call the verb inside "
                "jax.shard_map, under jax.vmap for a leading axis of buffers; or make the mesh "
                "with axis_types=(jax.sharding.AxisType.Auto,)."
            ) from error

    return cast(F, told)


@functools.lru_cache
def _is_alone() -> bool:
    """Whether there is one device, and no further ones on the host; asked once there are arrays."""
    try:
        on_host = jax.device_count("cpu")
    except RuntimeError:  # which is not among the platforms of this program
        on_host = 0
    return jax.device_count() == 1 and on_host <= 1


def check_there(states: Any) -> None:
    """Raises where a state on several devices was donated: JAX would end the process.

    On one device it raises by itself.
    """
    for state in states if isinstance(states, tuple) else (states,):
        one = state.edits if isinstance(state, BufferState) else None
        if isinstance(one, jax.core.Tracer) or not isinstance(one, jax.Array):
            continue
        if not isinstance(one.sharding, jax.sharding.SingleDeviceSharding):
            check_whole(state)


def check_whole(states: Any) -> None:
    """Raises where any array was donated, or deleted."""
    arrays = [leaf for leaf in jax.tree.leaves(states) if isinstance(leaf, jax.Array)]
    if any(array.is_deleted() for array in arrays):
        raise DonatedError(_DONATED)


_DONATED = (
    "expected arrays that are there, got some that were donated, or deleted. Go on with the state "
    "that came back from the call to which the old one was donated."
)


def on_host(buffer: Buffer) -> bool:
    """Whether the storage keeps items on the host."""
    return isinstance(buffer.storage, HostStorage)


@functools.lru_cache(maxsize=64)
def for_device(buffer: Buffer) -> Any:
    """The same buffer as its jitted parts know it, without items that lie on the host."""
    storage = buffer.storage
    transforms = () if storage.of_objects else buffer.transforms
    return dataclasses.replace(buffer, storage=storage.device_part, transforms=transforms)


def refusal() -> TypeError:
    """What is said where items are no arrays."""
    return TypeError(
        "ListStorage: expected to be called outside jit, vmap and scan, with Python objects. Use "
        "jrb.DeviceStorage() there, with items of arrays."
    )


def check_state(buffer: Buffer, state: BufferState) -> None:
    """Raises unless it is a state of this description, with its items where the buffer keeps them.

    Raises:
        TypeError, ValueError: as `jrb._core.validate.check`.
    """
    check_kind(buffer, state)
    if on_host(buffer):
        spec = buffer.storage.spec_key(state.storage)
        validate.check(for_device(buffer), on_device(buffer, state), spec)
    elif not isinstance(buffer.storage, HostStorageProxy):  # or `without_items`: checked before
        validate.check(buffer, state)


def check_kind(buffer: Buffer, state: BufferState) -> None:
    if not isinstance(state, BufferState):
        what = "a tuple, as a Mix has" if isinstance(state, tuple) else type(state).__name__
        raise TypeError(
            f"expected a state of this buffer, a BufferState, got {what}. Pass what init, add and "
            "the other verbs return."
        )
    host, found = on_host(buffer), state.storage
    if not isinstance(found, buffer.storage.state_type) if host else isinstance(found, HostState):
        raise TypeError(
            f"expected a state of this buffer, whose storage is {type(buffer.storage).__name__}, "
            f"got one that has its items in {type(found).__name__}. Pass the state that its init "
            "made."
        )


def apart(array: jax.Array, state: PartState) -> jax.Array:
    """An array that was read, a copy if it is one of the state's, which may be donated later."""
    is_own = any(array is leaf for leaf in jax.tree.leaves(state))
    return jnp.copy(array) if is_own and not is_tracer(array) else array


def is_traced(*arguments: Any) -> bool:
    """Whether any of their leaves is no array, but stands for one."""
    return any(map(is_tracer, jax.tree.leaves(arguments)))


def is_tracer(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def is_inside(buffer: Buffer, *arguments: Any) -> bool:
    """Whether the jitted verb is wanted. Raises where there is none."""
    if not on_host(buffer):
        return True
    inside = is_traced(arguments)
    if inside and buffer.storage.of_objects:
        raise refusal()
    return inside


def on_device(buffer: Buffer, state: BufferState) -> Any:
    """A state as jitted parts know it."""
    return state.replace(storage=buffer.storage.device_state(state.storage))


def check_init(buffer: Buffer, example: Item) -> None:
    """Raises inside `jit` if there are files to be made."""
    if on_host(buffer) and not buffer.storage.of_objects and is_traced(example, jnp.zeros(())):
        raise TypeError(
            "init: expected to be called outside jit, vmap and scan, as it makes files. Make the "
            "state before, and pass it as an argument."
        )


def init(buffer: Buffer, spec: Item, device: Device) -> Any:
    """An empty state; `spec` is that of an item as it is stored."""
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
    leaves, structure = jax.tree.flatten(spec)
    if device is None:
        made = _compiled_blank(buffer, structure, tuple(leaves))
        return made if is_traced(made) else jax.block_until_ready(made)  # or memory ends later
    return jax.jit(lambda: validate.blank(buffer, spec), out_shardings=device)()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled_blank(
    buffer: Buffer, structure: Any, leaves: tuple[jax.ShapeDtypeStruct, ...]
) -> Any:
    """An empty state; all arrays in one program."""
    return validate.blank(buffer, jax.tree.unflatten(structure, leaves))


def nbytes(buffer: Buffer, spec: Item) -> int:
    """The bytes that `init` allocates, on the device and on the host."""
    if not on_host(buffer):
        return pytree.nbytes(jax.eval_shape(lambda: validate.blank(buffer, spec)))
    inner = pytree.nbytes(jax.eval_shape(lambda: validate.blank(for_device(buffer), spec)))
    return inner + buffer.storage.nbytes(
        buffer.ring, spec, is_chronological=buffer.writer.is_chronological
    )


@explained
def write(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    mask: jax.Array | None,
    cuts: jax.Array | None = None,
    priorities: jax.Array | None = None,
) -> Any:
    """Writes items, leaves `[T, E, ...]` or `[T, ...]`, to a state that was checked."""
    rest = mask, cuts, priorities
    _check_room(buffer, state, items, mask)
    if is_inside(buffer, state, items, rest):
        if not is_traced(state, items, rest):
            warn_of_copies(buffer, state)
        return steps.write(buffer, state, owned.copied(items), *rest)
    after = _put(buffer, state, items, items, rest)
    return steps.write(buffer, state, items, *rest) if after is None else after


def _check_room(buffer: Buffer, state: BufferState, items: Item, mask: jax.Array | None) -> None:
    """Raises where rows would find no room, as far as that is known."""
    if not buffer.writer.blocks_when_full or is_traced(state, items, mask):
        return
    found = steps.room(buffer, state.replace(storage=None))
    if is_traced(found):
        return
    wanted = len(jax.tree.leaves(items)[0]) if mask is None else int(np.sum(mask))
    if wanted > found:
        raise ValueError(
            f"add, extend: expected at most {int(found)} rows, for which there is room, got "
            f"{wanted}. Draw or empty first; can_add tells whether there is room for one."
        )


@explained
def can_add(buffer: Buffer, state: BufferState) -> jax.Array:
    """Whether a row would be written, bool `[]`."""
    check_state(buffer, state)
    return steps.can_write(buffer, state.replace(storage=None))


def _put(buffer: Buffer, state: BufferState, arrays: Item, items: Item, rest: tuple) -> Any:
    """The state after a write whose items are put to the host; None if some arguments are traced.

    Large arrays of a state that is donated are written in place, last of all: where the items find
    no room, or an interrupt comes before, the state is as it was.

    Args:
        buffer: the description.
        state: a state.
        arrays: the items as jitted parts know them.
        items: as the storage takes them.
        rest: other arguments of `steps.write`.
    """
    storage, part, half = buffer.storage, for_device(buffer), on_device(buffer, state)
    in_place = (
        buffer._donates
        and storage.takes_back
        and max(leaf.size for leaf in jax.tree.leaves(half)) > _MANY
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


_MANY = 1 << 14
"""Elements of an array of which a copy takes longer than one more call of a compiled function."""


def fill(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    cuts: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> Any:
    """Checks a state that nobody else has, and writes to it: outside `jit` too, in place."""
    check_state(buffer, state)
    if on_host(buffer):
        return write(buffer, state, items, mask, cuts)
    return _written_in_place(buffer, state, items, mask, cuts)


_written_in_place = jax.jit(steps.write, donate_argnums=1)


def half(buffer: Buffer, spec: Item) -> Any:
    """An empty state without items, which lie on the host."""
    return _blank(for_device(buffer), spec, None)


def told(buffer: Buffer, half: BufferState, items: Item, mask: jax.Array | None) -> Any:
    """Such a state after a write of items that lie there already."""
    after = steps.write(for_device(buffer), half, items, mask)
    return after.replace(storage=half.storage)


def expire(buffer: Buffer, state: BufferState, spec: Item, rows: jax.Array | np.ndarray) -> Any:
    """The state, without items, that has so many of the oldest rows no more, `[]` or `[E]`."""
    row = (1, buffer.ring.envs)
    blanks = jax.tree.map(lambda leaf: jnp.zeros((*row, *leaf.shape), leaf.dtype), spec)
    return steps.expire(without_items(buffer), state, blanks, jnp.asarray(rows, jnp.int32))


class CopyWarning(UserWarning):
    """A write outside `jit` copies the buffer, as nobody donated its state."""


_WARNED: set[Any] = set()


def warn_of_copies(buffer: Hashable, state: BufferState, depth: int = 5) -> None:
    """Says once for each description that its states are large; the user is `depth` calls above."""
    if buffer in _WARNED:
        return
    size = pytree.nbytes(state)
    if size <= _MUCH:
        return
    _WARNED.add(buffer)
    warnings.warn(
        f"add, extend: outside jit each call copies the whole buffer, {wording.bytes_text(size)}. "
        "Use the verbs of jrb.jitted(buffer), which write in place, or call the verb in a function "
        "under jax.jit(..., donate_argnums=...).",
        CopyWarning,
        stacklevel=depth,
    )


_MUCH = 1_000_000  # bytes


class PriorityWarning(UserWarning):
    """Priorities that are NaN, infinite or negative were given, and refused."""


_WARNED_OF_REFUSED: set[Any] = set()
_BITS_OF_INFINITY = 0x7F800000  # of NaN more, and of negative numbers, which have the sign bit


def warn_of_refused(buffer: Hashable, verb: str, priorities: Any, mask: Any = True) -> None:
    """Says once for each description that priorities are refused, where it is known here.

    Nothing is copied from an accelerator for that, and nothing is done inside `jit`.
    """
    if not _is_here(priorities):
        return
    values = np.asarray(priorities)
    if values.dtype != np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32)
    # Taken for integers, all that is refused is larger than what is not: one reduction tells. Two
    # of them, or the hash of a description, are a pause after which XLA has to wake its thread.
    if not values.size or values.view(np.uint32).max() < _BITS_OF_INFINITY:
        return
    if buffer in _WARNED_OF_REFUSED or not _is_here(mask):
        return
    mask = np.asarray(mask)
    wrong = ~((values >= 0) & (values < np.inf)) & (mask if mask.shape == values.shape else True)
    if wrong.any():
        _WARNED_OF_REFUSED.add(buffer)
        warnings.warn(
            f"{verb}: {wrong.sum()} priorities are NaN, infinite or negative, such as "
            f"{values[wrong][0]}: they are refused, and the state counts them. Give "
            "jnp.abs(td_error), and look for what is not finite.",
            PriorityWarning,
            stacklevel=4,
        )


def _is_here(array: Any) -> bool:
    """Whether numbers can be read without a copy between devices."""
    if not isinstance(array, jax.Array):
        return np.asarray(array).dtype.kind in "biuf"
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in array.devices())


@explained
def write_objects(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    mask: jax.Array | None,
    verb: str,
    priorities: jax.Array | None = None,
) -> Any:
    """Writes T rows of objects: a sequence of them, with `num_envs` of sequences of E."""
    check_state(buffer, state)
    if is_inside(buffer, state, mask, priorities):
        raise refusal()
    rows = _rows(buffer, items, verb)
    if mask is not None:
        lead = () if buffer.num_envs is None else (buffer.num_envs,)
        mask = checks.write_mask(verb, mask, (len(rows),), lead, buffer.writer)
    blanks = np.zeros((len(rows), buffer.ring.envs), np.uint8)
    blanks = blanks[:, 0] if buffer.num_envs is None else blanks
    if priorities is not None:
        priorities = checks.given_priorities(verb, priorities, blanks.shape)
    if not rows:
        return state
    arrays = {"item": blanks}
    _check_room(buffer, state, arrays, mask)
    return _put(buffer, state, arrays, rows, (mask, None, priorities))


def _rows(buffer: Buffer, items: Item, verb: str) -> list[list[Any]]:
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
    return [[transforming.inward(buffer.transforms, item) for item in row] for row in rows]


@explained
def ready(buffer: Buffer, state: BufferState, batch_size: int | None) -> jax.Array:
    """Whether a draw gives at least one item, bool `[]`."""
    return steps.ready(buffer, state.replace(storage=None), batch_size)


@explained
def take(buffer: Buffer, state: BufferState, indices: jax.Array) -> Any:
    """The items at slots of any shape; objects in one list."""
    check_state(buffer, state)
    if not is_traced(state, indices):
        _check_held(buffer, state, np.asarray(indices))
    if is_inside(buffer, state, indices):
        return steps.take(buffer, state, indices)
    return buffer.storage.take(state.storage, np.asarray(indices))


def _check_held(buffer: Buffer, state: BufferState, slots: np.ndarray) -> None:
    if not slots.size:
        return
    room = np.zeros(1 << (slots.size - 1).bit_length(), np.int32)  # of few lengths: it is compiled
    room[: slots.size] = slots.reshape(-1)
    holds = steps.holds(buffer.writer, buffer.ring, state.writer, jax.device_put(room))
    empty = ~np.asarray(holds)[: slots.size].reshape(slots.shape)
    if empty.any():
        raise ValueError(
            f"take: expected slots that hold items, got {slots[empty][0]}, which holds none: "
            f"{int(buffer.size(state))} are held, as in_order tells."
        )


@explained
def update(
    buffer: Buffer, state: BufferState, sample: Sample | jax.Array, priorities: jax.Array
) -> Any:
    """New priorities."""
    check_state(buffer, state)
    if is_traced(state, sample, priorities):
        return steps.update(buffer, state, sample, priorities)
    return _moved(steps.update, buffer, state, _light(sample), priorities)


@explained
def drop(buffer: Buffer, state: BufferState, where: Sample | jax.Array) -> BufferState:
    """The state in which some anchors are drawn no more."""
    check_state(buffer, state)
    if is_traced(state, where):
        return steps.drop(buffer, state, where)
    return _moved(steps.drop, buffer, state, _light(where))


def _moved(step: Callable[..., Any], buffer: Buffer, state: BufferState, *args: Any) -> Any:
    """The state after a step that changes nothing in it but what its sampler remembers."""
    inner, half = without_items(buffer), state.replace(storage=None)
    if not buffer._donates:
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
    """A sample without its items: fewer arrays to hand over."""
    if not isinstance(where, Sample):
        return where
    return owned.copied(where.replace(data=None))


@explained
def edit(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array | None, values: Item
) -> BufferState:
    """Other values, leaves by name, for held items; `where` is None for all slots."""
    check_state(buffer, state)
    if is_inside(buffer, state, where, values):
        if not is_traced(state, where, values):
            warn_of_copies(buffer, state)
            where = _light(where)
        return editing.edit(buffer, state, where, owned.copied(values))
    names = () if buffer.storage.of_objects else tuple(values)
    ends = bool(names) and editing.changes_ends(buffer, state, names)
    before = editing.cuts(*_with_flags(buffer, state)) if ends else None
    if where is None:
        where = jnp.arange(buffer.capacity, dtype=jnp.int32)
    after = _edit_outside(buffer, state, where, values)
    return after if before is None else _with_ends(buffer, after, before)


def _with_flags(buffer: Buffer, state: BufferState) -> tuple[Any, BufferState]:
    """The same buffer with what tells ends of episodes in place of its items on the host."""
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


def _edit_outside(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array, values: Item
) -> BufferState:
    """The same for items on the host; the unit is told of nothing."""
    inner, half = for_device(buffer), on_device(buffer, state)
    arrays = {} if buffer.storage.of_objects else values
    slots, after = editing.edit_outside(inner, half, _light(where), arrays)
    with buffer.storage.writing(state.storage):
        put = buffer.storage.put_values
        storage = put(state.storage, after.storage, np.asarray(slots), values)
        return after.replace(storage=storage)


@explained
def rewrite(
    buffer: Buffer, state: BufferState, function: Callable[[Item], Item], batch_size: int
) -> BufferState:
    """A function from B items to other leaves by name, put over all that is held."""
    check_state(buffer, state)
    if is_inside(buffer, state):
        if not is_traced(state):
            warn_of_copies(buffer, state)
        return editing.rewrite(buffer, state, function, batch_size)
    slots, count = steps.in_order(buffer.writer, buffer.ring, state.writer)
    held, compiled = np.asarray(slots)[: int(count)], jax.jit(function)
    before = None
    for start in range(0, len(held), batch_size):
        part = jnp.asarray(held[start : start + batch_size])
        values = compiled(take(buffer, state, part))
        if not start and editing.changes_ends(buffer, state, tuple(values)):
            before = editing.cuts(*_with_flags(buffer, state))
        state = _edit_outside(buffer, state, part, values)
    return state if before is None else _with_ends(buffer, state, before)


@dataclasses.dataclass(frozen=True)
class Wait:
    """From a state and a sample to the state in which later writes wait for the sample's reads.

    Outside `jit` all do.

    Attributes:
        buffer: the description of both.
    """

    buffer: Buffer

    def __call__(self, state: BufferState, sample: Sample) -> BufferState:
        return steps.wait(self.buffer, state, sample) if is_traced(state, sample) else state


@explained
def truncate(buffer: Buffer, state: BufferState, which: jax.Array) -> Any:
    """The state after which nothing of some environments, bool `[E]`, goes on."""
    check_state(buffer, state)
    if is_traced(state, which):
        return steps.truncate(buffer, state, which)
    after = steps.truncate(without_items(buffer), state.replace(storage=None), which)
    return after.replace(storage=state.storage)


@functools.lru_cache(maxsize=64)
def without_items(buffer: Buffer) -> Any:
    """The same buffer for verbs that leave its items alone: returned, they would be copied."""
    learning = tuple(transforming.learning(buffer.transforms))
    return dataclasses.replace(buffer, storage=HostStorageProxy(), transforms=learning)


@explained
def empty(buffer: Buffer, state: BufferState) -> Any:
    """The state without its items."""
    check_state(buffer, state)
    if is_traced(state):
        return steps.empty(buffer, state)
    after = steps.empty(without_items(buffer), state.replace(storage=None))
    storage = buffer.storage.reset(buffer.ring, state.storage, jnp.int32(0))
    return after.replace(storage=storage)
