"""Moves items from one description to another: `rebuild`, and the steps it is made of.

N capacity, E environments, T rows of time, K items.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb import Sharded, sum_tree
from jrb._core import draw_limits, eager, steps, transforming, validate
from jrb._util import casting, checks, pytree
from jrb._xla.compiling import by_description
from jrb.buffer import ReplayBuffer
from jrb.keys import ends_of, path_name
from jrb.ring import Occupancy, Ring
from jrb.samplers.prioritized import DROPPED
from jrb.state import Buffer, BufferState
from jrb.types import Context, Item, OrderedSampler, PrioritizedSampler, ShardedSampler
from jrb.types.messages import PartState
from jrb.types.sampler import missing_method
from jrb.writers import RoundRobin

_PIECE = 8 << 20
"""Bytes of items that are copied at a time."""
Convert = Callable[[Any], Any] | None
"""A function from a stored item to a new one; None keeps items as they are."""
_UNKNOWN = 2**30
"""Rows since the beginning of an episode, if unknown: more than any unit looks back."""


def rebuild(
    old: ReplayBuffer | Sharded,
    state: BufferState,
    new: ReplayBuffer | Sharded,
    *,
    convert: Convert = None,
) -> BufferState:
    """Returns a state of another description, `new`, that holds the items of `state`.

    Any part may differ: capacity, `num_envs`, sampler, unit, writer, storage. Items are copied as
    they are stored, without transforms. The newest rows that fit are kept; if the old writer does
    not keep the order of time, the best items. Kept with them are priorities, drops, counts of
    draws (and thus what is used up) if both samplers count, and ends of episodes that only the old
    unit knew. If `num_envs` differs, environments are joined end to end and cut into equal parts;
    no window crosses a seam.

    A transform with a state keeps it if both descriptions have one of its class; others learn from
    the items that are kept.

    Not kept are: the number of items that a reservoir has seen, if it becomes larger; the position
    in an epoch (the next draw begins one); `set_alpha`, if the samplers differ. A queue or a stack
    continues if both samplers are of this kind and the units are equal; otherwise every item is
    pending. Stacks of frames whose first frames may be lost are not drawn.

    A `jrb.Sharded` buffer can be rebuilt with another number of shards or as a single buffer, and a
    single buffer as a sharded one. The number of environments must stay; each shard gets its
    environments with all state of their items.

    Args:
        old: the description of `state`.
        state: is only read; a storage on the host stays usable.
        new: the new description. A storage on the host makes new files at its path.
        convert: a function of JAX from one stored item, without leading axes, to the new one, such
            as one with a further leaf; it is compiled, and applied to all items. For objects, a
            function of Python. If nothing else changes that draws depend on, items keep their
            slots, and all other arrays stay: the same key draws the same.

    Returns:
        The state, on the default device.

    Raises:
        TypeError: a buffer is a `Mix`, states are batched by `vmap`, or only one side has objects;
            or `convert` is no function, or returns leaves that are no arrays.
        ValueError: a part of `new` cannot use the items; or `num_envs` differs, and the unit would
            need rows from across a seam, or the order of a queue would be lost.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> old = jrb.ReplayBuffer(6)
        >>> state = old.extend(old.init({"x": 0}), {"x": jnp.arange(8)})
        >>> new = jrb.ReplayBuffer(4, sampler=jrb.Prioritized(), batch_size=2)
        >>> state = jrb.rebuild(old, state, new)
        >>> jrb.items(new, state)["x"].tolist(), new.priorities(state).tolist()
        ([4, 5, 6, 7], [1.0, 1.0, 1.0, 1.0])
    """
    if convert is not None and not callable(convert):
        raise TypeError(f"convert: expected a function of one stored item, got {convert!r}.")
    for each in (old, new):
        single = each.buffer if isinstance(each, Sharded) else each
        if not isinstance(single, ReplayBuffer):
            raise TypeError(
                f"rebuild: expected single buffers, got {type(single).__name__}. Rebuild the parts "
                "of a Mix one by one."
            )
    # Without shards, convert the items in their slots if all else stays, or copy them.
    if not isinstance(old, Sharded) and not isinstance(new, Sharded):
        _check_single(old, state, new)
        same = _convert_in_place(old, state, new, convert)
        if same is not None:
            return same
        return _refill(old, (state,), new, _select(old, state, new), convert)
    # With shards, make each new state from those of the old shards that have its environments.
    states = {0: state}
    if isinstance(old, Sharded):
        shards = old.split(state)
        states = {number: jax.tree.map(jnp.asarray, one) for number, one in shards.items()}
    if not isinstance(new, Sharded):
        return regroup_shards(old, states, new, 0, convert)
    # Each process makes the states of its own shards.
    numbers = sorted({number for group in new.layout.groups().values() for number in group})
    return new.join({n: regroup_shards(old, states, new, n, convert) for n in numbers})


# Copies that keep the order of rows; datasets and readers of other formats use these too.


def writable(buffer: Buffer) -> Any:
    """Returns the description without `ReadOnly`, for filling a buffer that is only read later."""
    return dataclasses.replace(buffer, writer=buffer.writer.writable())


def replay_target(buffer: Buffer) -> Any:
    """Returns the description with which to write items in the order of another buffer.

    If the writer does not keep the order of time, it has `num_envs=None`: items go one by one.
    """
    if buffer.writer.is_chronological:
        return writable(buffer)
    return dataclasses.replace(buffer, num_envs=None)


def pieces(order: np.ndarray, row_bytes: int) -> Iterator[np.ndarray]:
    """Yields parts of `order`, the indices of rows, each for a few megabytes of items."""
    step = max(1, _PIECE // max(row_bytes, 1))
    for start in range(0, len(order), step):
        yield order[start : start + step]


def with_parts(old: Buffer, state: BufferState, new: Buffer) -> Any:
    """Returns the state of `new` over the rows of a state on the host, which are not copied.

    Sampler, unit and transforms learn from all rows, which must have been written once, from slot 0
    on. `new` must have the capacity, environments and storage of `old`, and the same writer states.
    """
    ring, envs, target = old.ring, old.ring.envs, replay_target(new)
    spec = old.storage.spec(state.storage)
    # The state without its storage learns from the rows, which are read piece by piece.
    half = eager.make_device_state(target, spec)
    rows, version = state.storage.rows, state.storage.version
    counts = np.broadcast_to(old.writer.held(ring, state.writer).rows(ring), envs)
    # All pieces have one length, so that the write of them is compiled once.
    size = max(1, min(2 * _PIECE // max(1, pytree.nbytes(spec) * envs), int(counts.max())))
    for start in range(0, int(counts.max()), size):
        row = np.arange(start, start + size)
        # Rows beyond the last are masked: any slot in range will do.
        slots = np.minimum(row, ring.rows - 1)[:, None] * envs + np.arange(envs)
        slots = slots[:, 0] if old.num_envs is None else slots
        # If each environment has its own clock, each has its own number of rows.
        mask = row[:, None] < counts
        mask = jnp.asarray(mask if old.writer.per_env else mask[:, 0])
        items = rows.take(version, slots)
        after = steps.write(target, half, items, mask)
        # The items are stored already, so the storage after the write is thrown away.
        half = after.replace(storage=half.storage)
    return half.replace(storage=state.storage)


def copy_rows(
    old: ReplayBuffer, state: BufferState, new: ReplayBuffer, slots: np.ndarray, ends: np.ndarray
) -> BufferState:
    """Returns a state of `new`, of one stream, with the items at `slots`, `[T]`, in this order.

    An episode ends at each row for which `ends`, bool `[T]`, is True, whatever its flags say.
    Priorities and counts of draws are kept, as by `rebuild`.
    """
    if len(slots) > new.capacity:
        raise ValueError(f"capacity: expected at least {len(slots)}, got {new.capacity}.")
    rows = _Selection(slots[:, None], np.ones((len(slots), 1), bool), ends[:, None])
    return _refill(old, (state,), new, rows, None)


# The items that are kept.


class _Selection(NamedTuple):
    """The rows that are kept, as rows of the new buffer, `[T, E]`.

    Attributes:
        slots: int32, the old slots, oldest row first.
        mask: bool, True for real entries.
        cuts: bool, True for ends of episodes; None without order of time.
    """

    slots: np.ndarray
    mask: np.ndarray
    cuts: np.ndarray | None


def _select(buffer: ReplayBuffer, state: BufferState, target: ReplayBuffer) -> _Selection:
    """Returns the newest rows that fit; the best items if the writer keeps no order of time."""
    old, new = buffer.ring, target.ring
    is_redealt, cuts, mask = old.envs != new.envs, None, None
    if not buffer.writer.is_chronological:
        # Keep the order in which the items were written, as the new writer may keep it too.
        best = np.asarray(buffer.writer.best(old, state.writer, target.capacity))
        order = np.asarray(buffer.in_order(state)[0])
        slots = order[np.isin(order, best)][: len(best), None]
        if target.writer.is_chronological:
            # Drop the oldest items that fill no row. Each item becomes an episode of its own.
            slots = slots[len(slots) % new.envs :].reshape(-1, new.envs)
            cuts = np.ones(slots.shape, bool)
    else:
        slots, mask = _newest_rows(old, buffer.writer.held(old, state.writer), target.capacity)
        if not target.writer.is_chronological:
            slots, mask = slots[mask][:, None], None
        else:
            # The unit may know of more ends than flags tell, such as by `truncate`.
            cuts = np.array(_is_episode_end(buffer, state.writer, state.unit, slots))
            if not is_redealt and (mask.all() or target.writer.per_env):
                slots, mask, cuts = (each[-new.rows :] for each in (slots, mask, cuts))
            else:
                # Environments differ in number, or in their numbers of rows.
                is_redealt = True
                slots, cuts = _redeal(slots, cuts, mask, new.envs)
                mask = None
    if is_redealt:
        what = "num_envs: expected that of the old buffer"
        if target.unit.requires_contiguous_history:
            raise ValueError(
                f"{what} with {type(target.unit).__name__}, which would need rows from behind the "
                "seams. Keep it, or use another unit."
            )
        _check_order(what, buffer, [state], target)
    mask = np.ones(slots.shape, bool) if mask is None else mask
    return _Selection(slots.astype(np.int32), mask, cuts)


def _newest_rows(ring: Ring, occupancy: Occupancy, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slots of the newest rows, at most `limit` items, and a mask, both `[T, E]`.

    The mask is False where an environment has fewer rows; such an entry has some slot that holds an
    item.
    """
    # Align the newest rows of all environments: a negative row is from before an oldest one.
    counts = np.broadcast_to(np.asarray(occupancy.rows(ring)), ring.envs)
    row = np.arange(counts.max())[:, None] + counts - counts.max()
    from_oldest = np.asarray(occupancy.from_oldest(ring))
    slots = np.take_along_axis(from_oldest, np.maximum(row, 0), axis=0).astype(np.int32)
    # Keep whole rows, from the newest one on, as long as their items fit.
    fits = np.cumsum((row >= 0).sum(axis=1)[::-1])[::-1] <= limit
    slots, mask = slots[fits], (row >= 0)[fits]
    return np.where(mask, slots, slots[mask][:1]) if mask.any() else slots, mask


@by_description("function")
def _call(part: Any, *args: Any, function: Callable[..., Any]) -> Any:
    """Returns `function(part, *args)`, compiled once for each function and part."""
    return function(part, *args)


@by_description()
def _is_episode_end(buffer: ReplayBuffer, writer: PartState, unit: PartState, slots: Any) -> Any:
    return buffer.unit.is_episode_end(steps.context_of(buffer, writer), unit, slots)


def _redeal(
    slots: np.ndarray, ends: np.ndarray, mask: np.ndarray, envs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Joins environments `[T, E]` end to end, cuts them into `envs` equal ones, and marks seams."""
    # Items that do not fill a row are dropped from the oldest row: one item of each of the first
    # environments.
    surplus = int(mask.sum()) % envs
    first = surplus if surplus <= slots.shape[1] else 0
    # Join the environments; each ends where the next one begins.
    ends[-1:] = True
    line, seams = (
        np.concatenate([stream[real][env < first :] for env, (stream, real) in enumerate(pairs)])
        for pairs in (zip(slots.T, mask.T, strict=True), zip(ends.T, mask.T, strict=True))
    )
    # Items are still left over where a row had fewer items than there are environments: drop them.
    # Cut the others into equal parts, each of which ends at its last row.
    over = line.size % envs
    seams = seams[over:].reshape(envs, -1)
    seams[:, -1:] = True
    return line[over:].reshape(seams.shape).T, seams.T


# Items that are converted.


def _conversion(
    buffer: ReplayBuffer, state: BufferState, convert: Convert
) -> tuple[Item, Callable[[Any], Any]]:
    """Returns the spec of a new item, and `convert` for rows `[T, E, ...]`, or a list of objects.

    Without `convert`, items stay as they are.
    """
    if buffer.storage.of_objects:
        return None, lambda objects: objects if convert is None else list(map(convert, objects))
    spec = buffer.item_spec(state)
    if convert is None:
        return spec, lambda items: items

    def convert_item(item: Item) -> Item:
        new_item = validate.read_items(convert(item), "convert")
        # Raise where JAX would change a dtype.
        pytree.spec_of(new_item, "convert")
        return new_item

    new_spec = jax.eval_shape(convert_item, spec)
    if not jax.tree.leaves(new_spec):
        raise TypeError("convert: expected a function that returns the new item, got no leaf.")
    return new_spec, jax.jit(jax.vmap(jax.vmap(convert_item)))


def _convert_in_place(
    old: ReplayBuffer, state: BufferState, new: ReplayBuffer, convert: Convert
) -> BufferState | None:
    """Returns the state with new items in the same slots; None if other arrays have to change."""
    # Storage, transforms and defaults may differ. All other parts must be the same, and so must the
    # shapes of their arrays.
    same = {"storage": old.storage, "transforms": old.transforms, "batch_size": old.batch_size}
    same |= {"min_size": old.min_size, "cast": old.cast, "requires_mask": old.requires_mask}
    if convert is None or dataclasses.replace(new, **same) != old:
        return None
    spec, convert_rows = _conversion(old, state, convert)
    blank = validate.compile_blank(new).eval_shape(pytree.SpecKey(spec))
    if not pytree.are_alike(blank.replace(storage=None), state.replace(storage=None)):
        return None
    # The rows to convert, oldest first; without order of time, items in the order of slots.
    ring, held, target = old.ring, old.writer.held(old.ring, state.writer), replay_target(new)
    slots, mask = np.arange(int(held.size), dtype=np.int32)[:, None], None
    if old.writer.is_chronological:
        slots, mask = _newest_rows(ring, held, ring.capacity)
    item_bytes = 1 if spec is None else pytree.nbytes(old.item_spec(state))
    rows = list(pieces(np.arange(len(slots)), item_bytes * slots.shape[1]))
    take = lambda at: old.take(state, jnp.asarray(slots[at]))
    # Look at all items before any is written: one that changes the index is reason to copy them.
    if not all(_keeps_index(old, state, items, convert_rows(items)) for items in map(take, rows)):
        return None
    # All rows are written again by a clock that begins at the oldest one.
    result = eager.init(target, spec, None)
    if not old.writer.is_chronological:
        target = dataclasses.replace(target, writer=RoundRobin())
    clock: Any = target.writer.init(target.ring, spec)
    oldest = jnp.reshape(ring.row_of(held.first), clock.cursor.shape)
    result = result.replace(writer=clock.replace(cursor=oldest), ring=target.ring)
    for at in rows:
        items = convert_rows(take(at))
        if target.num_envs is None and not old.storage.of_objects:
            items = jax.tree.map(lambda leaf: leaf[:, 0], items)
        given = None if mask is None or mask[at].all() else jnp.asarray(mask[at])
        if old.storage.of_objects:
            result = _extend_by_objects(target, result, items, given)
        else:
            result = eager.fill(target, result, items, None, given)
    return state.replace(storage=result.storage)


def _keeps_index(buffer: ReplayBuffer, state: BufferState, old: Item, new: Item) -> bool:
    """Returns True if a conversion changes no leaf from which a part of the buffer has learned."""
    # The index does not depend on the contents of objects.
    if buffer.storage.of_objects:
        return True
    before, after = (
        dict(zip(pytree.leaf_names(tree), map(casting.raw, jax.tree.leaves(tree)), strict=True))
        for tree in (old, new)
    )
    # Collect the names of leaves that the sampler has read, that mark ends of episodes, or by which
    # the writer ranks items.
    names = {*steps.leaves_read(buffer, old, buffer.sampler.reads_written)}
    if not buffer.unit.one_row:
        names |= {*buffer.keys.flags(old), *buffer.keys.flags(new)}
    if state.numbers is not None and buffer.keys.episode is not None:
        names.add(path_name(buffer.keys.episode))
    for name in {*before, *after}:
        try:
            buffer.writer.writable().check_edit("rebuild", frozenset({name}))
        except ValueError:
            names.add(name)
    is_same = lambda name: np.array_equal(before[name], after[name])
    return all(name in before and name in after and is_same(name) for name in names)


def _extend_by_objects(
    buffer: ReplayBuffer, state: BufferState, objects: list[Any], mask: jax.Array | None
) -> BufferState:
    """Writes objects that are in the order of slots; the state has a storage of objects."""
    rows, envs = objects, buffer.num_envs
    if envs is not None:
        rows = [objects[start : start + envs] for start in range(0, len(objects), envs)]
    return buffer.extend(state, rows, mask)


# The new state. Slot s of old state k has number k N + s.


def _read(
    buffer: ReplayBuffer,
    states: Sequence[BufferState],
    slots: np.ndarray,
    read: Callable[[BufferState, jax.Array], Any],
    axis: int,
) -> Any:
    """Reads slots `[..., E]`, each environment from its state; results have E at `axis`."""
    number = slots.reshape(-1, slots.shape[-1])[0] // buffer.capacity
    parts = [
        read(states[k], jnp.asarray(slots[..., number == k] - k * buffer.capacity))
        for k in np.unique(number)
    ]
    if len(parts) == 1:
        return parts[0]
    # The parts are in the order of states; bring them to that of the environments.
    order = np.argsort(np.argsort(number, kind="stable"))
    join = lambda *leaves: jnp.concatenate(leaves, axis=axis).take(order, axis=axis)
    return jax.tree.map(join, *parts)


def _refill(
    old: ReplayBuffer,
    states: Sequence[BufferState],
    new: ReplayBuffer,
    kept: _Selection,
    convert: Convert,
) -> BufferState:
    """Returns a state of the new description that holds a selection of the old items."""
    spec, convert = _conversion(old, states[0], convert)
    result = _write_items(old, states, new, kept, spec, convert)
    state, transforms = states[0], ()
    if transforming.stateful_transforms(new.transforms):
        # Import into blank states what was learned from the items, and then what old transforms of
        # the same class know.
        none = jnp.zeros(1, jnp.int32)
        context = Context(new.ring, new.keys, Occupancy(none, none))
        blank = transforming.init(new.transforms, context, spec)
        learned = transforming.import_states(
            (new.transforms, result.transforms), (new.transforms, blank)
        )
        before = old.transforms, state.transforms
        transforms = transforming.import_states(before, (new.transforms, learned))
    result = result.replace(transforms=transforms)
    # Nothing else depends on the items if none are kept.
    if not kept.mask.any():
        return result
    # Writers that count items, such as a reservoir, continue their counts.
    if type(old.writer.writable()) is type(new.writer.writable()):
        result = result.replace(
            writer=new.writer.import_state(new.ring, result.writer, state.writer)
        )
    # The new state was written from slot 0 on: each environment fills its rows from the first on.
    row, env = np.cumsum(kept.mask, axis=0) - 1, np.arange(kept.mask.shape[1])
    new_slots = jnp.asarray((row * len(env) + env)[kept.mask].astype(np.int32))
    slots = jnp.asarray(kept.slots[kept.mask])
    samplers = [each.sampler for each in states]
    sampler = _sampler_state(old, samplers, new, result, slots, new_slots)
    if old.sampler.count_draws and new.sampler.count_draws:
        # The counts of draws go with their items; `slots` are those of all shards in a row.
        draws = jnp.concatenate([jnp.asarray(one.draws) for one in samplers])[slots]
        sampler = sampler.replace(draws=sampler.draws.at[new_slots].set(draws))
    if new.sampler.max_draws is not None:
        # Items that were used up, or dropped, stay so.
        is_anchor = sum_tree.leaf_values(sampler.drawable) > 0
        sampler = draw_limits.rebuild(new, sampler, is_anchor)
    return result.replace(sampler=sampler)


def _write_items(
    old: ReplayBuffer,
    states: Sequence[BufferState],
    new: ReplayBuffer,
    kept: _Selection,
    spec: Item,
    convert: Callable[[Any], Any],
) -> BufferState:
    """Returns a new state to which the selected items were written."""
    slots, cuts, target = kept.slots, kept.cuts, replay_target(new)
    mask = None if kept.mask.all() else jnp.asarray(kept.mask)
    if new.storage.of_objects:
        objects = convert(old.take(states[0], jnp.asarray(slots.reshape(-1))))
        return _extend_by_objects(target, target.init(None), objects, mask).replace(ring=new.ring)
    result = eager.init(target, spec, None)
    if len(slots) and cuts is not None and old.writer.is_chronological:
        steps_before = _steps_before(old, states, new, kept)
        result = result.replace(unit=target.unit.init_mid_episode(result.unit, steps_before))
    # Write the rows piece by piece, and mark the ends of episodes that no flag marks.
    for piece in pieces(np.arange(len(slots)), pytree.nbytes(spec) * slots.shape[1]):
        before = _read(old, states, slots[piece], old.take, 1)
        items, seams = convert(before), None if cuts is None else jnp.asarray(cuts[piece])
        is_converted = items is not before and old.num_envs == new.num_envs
        if is_converted and seams is not None and old.keys.flags(before):
            # The new flags say which of the rows with an old flag end an episode.
            seams &= ~ends_of(before, old.keys)
        if target.num_envs is None:
            items = jax.tree.map(lambda leaf: leaf[:, 0], items)
        result = eager.fill(target, result, items, seams, None if mask is None else mask[piece])
    refused = slots.size - int(target.size(result))
    if not target.writer.is_chronological and refused > 0:
        raise ValueError(
            f"rebuild: expected items that {type(new.writer).__name__} takes, got {refused} that "
            "it refuses, such as those with a rank of NaN."
        )
    return result.replace(ring=new.ring)


def _steps_before(
    old: ReplayBuffer, states: Sequence[BufferState], new: ReplayBuffer, kept: _Selection
) -> jax.Array:
    """Returns the steps of its episode before the first kept row of each environment, `[E]`."""
    first = np.take_along_axis(kept.slots, kept.mask.argmax(axis=0)[None], axis=0)[0]
    count = _read(old, states, first, lambda state, at: old.unit.episode_step(state.unit, at), 0)
    if count is None:
        count = _UNKNOWN
    elif old.unit != new.unit:
        # Each unit counts up to a limit of its own.
        count = np.where(count > 0, _UNKNOWN, 0)
    return jnp.asarray(np.where(kept.mask.any(axis=0), count, 0), jnp.int32)


def _sampler_state(
    buffer: ReplayBuffer,
    states: list[PartState],
    new: ReplayBuffer,
    result: BufferState,
    slots: jax.Array,
    new_slots: jax.Array,
) -> Any:
    """Returns the new sampler's state with what the old ones knew about the items at `slots`."""
    old, sampler = buffer.sampler, new.sampler
    # A sampler of the same kind imports the old state, joined from those of all shards; but queues
    # know anchors by their order, and another unit has other anchors.
    is_alike = old == sampler or (type(old) is type(sampler) and not sampler.prioritized)
    is_queue = sampler.consumes and sampler.max_draws is None
    if is_alike and not (is_queue and buffer.unit != new.unit):
        state = states[0]
        if len(states) > 1 and isinstance(old, ShardedSampler):
            state = old.concat_shard_states(states)
        elif len(states) > 1 and (old.prioritized or not old.consumes):
            # Queues need no such method: without pending items they are all alike.
            raise missing_method(old, "concat_shard_states", "rebuild", "ShardedSampler")
        import_state = type(sampler).import_state
        return _call(sampler, result.sampler, state, slots, new_slots, function=import_state)
    if not (isinstance(old, PrioritizedSampler) and isinstance(sampler, PrioritizedSampler)):
        return result.sampler
    # Another sampler with priorities gets those of the items, and drops what was dropped.
    raw = jnp.concatenate([old.priorities(state) for state in states])[slots]
    assigned = _call(sampler, result.sampler, new_slots, raw, None, function=type(sampler).assign)
    dropped = new_slots[np.asarray(raw == DROPPED)]
    if not dropped.size:
        return assigned
    return sampler.drop(new.ring, assigned, dropped, jnp.ones(dropped.shape, jnp.bool_))


def regroup_shards(
    old: ReplayBuffer | Sharded,
    states: Mapping[int, BufferState],
    new: ReplayBuffer | Sharded,
    number: int,
    convert: Convert = None,
) -> BufferState:
    """Returns the state of new shard `number`, 0 for a single buffer, from states of old shards.

    `states` must have at least the old shards that hold its environments.
    """
    part, target = (one.part if isinstance(one, Sharded) else one for one in (old, new))
    _check_shards(old, states, new)
    same = _convert_in_place(part, states[number], target, convert) if part == target else None
    if same is not None:
        return same
    # Environments are dealt to shards in their order: find the old shards that have those wanted.
    first = number * target.ring.envs
    stop = first + target.ring.envs
    needed = list(range(first // part.ring.envs, -(-stop // part.ring.envs)))
    validate.check_slots(len(needed) * part.capacity)
    # Slots of the needed shards are numbered one shard after the other.
    columns = slice(first - needed[0] * part.ring.envs, stop - needed[0] * part.ring.envs)
    shards = [states[k] for k in needed]
    kept = _select_environments(part, shards, target, columns)
    return _refill(part, shards, target, kept, convert)


def _select_environments(
    part: ReplayBuffer, shards: Sequence[BufferState], target: ReplayBuffer, columns: slice
) -> _Selection:
    """Returns the newest rows that fit of some environments, `columns` among those of shards."""
    selections = []
    for k, state in enumerate(shards):
        occupancy = part.writer.held(part.ring, state.writer)
        slots, mask = _newest_rows(part.ring, occupancy, target.ring.rows * part.ring.envs)
        ends = np.array(_is_episode_end(part, state.writer, state.unit, slots))
        selections.append((slots + k * part.capacity, mask, ends))
    # Join the shards, aligned at their newest rows, and take the columns.
    rows = max(len(slots) for slots, _, _ in selections)
    slots, mask, cuts = (
        np.concatenate([np.pad(x, ((rows - len(x), 0), (0, 0))) for x in field], axis=1)[:, columns]
        for field in zip(*selections, strict=True)
    )
    if not (mask.all() or target.writer.per_env):
        raise ValueError(
            "rebuild: expected shards that hold equally many rows, or "
            "writer=jrb.PerEnvironment(), got "
            f"{sorted(set(mask.sum(axis=0).tolist()))} rows of their environments."
        )
    # Masked entries get any slot of their environment.
    slots = np.where(mask, slots, np.max(np.where(mask, slots, 0), axis=0))
    return _Selection(slots.astype(np.int32), mask, cuts)


# Checks.


def _check_single(old: ReplayBuffer, state: BufferState, new: ReplayBuffer) -> None:
    if not isinstance(state, BufferState) or state.edits.ndim:
        raise TypeError(
            "rebuild: expected a state of a single buffer, got states under vmap. Take one of them."
        )
    if isinstance(state.edits, jax.core.Tracer):
        raise TypeError("rebuild: expected a state outside jit, got a traced one. Call it before.")
    if old.storage.of_objects != new.storage.of_objects:
        raise TypeError(
            "rebuild: expected items of arrays on both sides, or objects, got "
            f"{type(old.storage).__name__} and {type(new.storage).__name__}."
        )


def _check_order(
    what: str, old: ReplayBuffer, states: Iterable[BufferState], new: ReplayBuffer
) -> None:
    """Raises if the order of a queue would be lost."""
    is_ordered = isinstance(new.sampler, OrderedSampler)
    if is_ordered and any(bool(steps.has_pending(old, state)) for state in states):
        raise ValueError(
            f"{what} with {type(new.sampler).__name__}, whose order would be lost. Draw what is "
            "left first."
        )


def _check_shards(
    old: ReplayBuffer | Sharded, states: Mapping[int, BufferState], new: ReplayBuffer | Sharded
) -> None:
    before, after = (each.buffer if isinstance(each, Sharded) else each for each in (old, new))
    for each in (before, after):
        checks.chronological("rebuild of shards", each.writer)
    if before.ring.envs != after.ring.envs:
        raise ValueError(
            f"num_envs: expected {before.ring.envs}, as before, for another number of shards, got "
            f"{after.ring.envs}."
        )
    _check_order("shards: expected as many as before", before, states.values(), after)
