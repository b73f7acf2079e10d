"""From one description to another: the newest rows stay, with their priorities.

N capacity, E environments, T rows of time.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import shards
from jrb._core import (
    counting,
    eager,
    steps,
    transforming,
    validate,
)
from jrb._core.replaying import pieces, replaying
from jrb._util import checks, pytree
from jrb.buffer import ReplayBuffer
from jrb.occupancy import Occupancy
from jrb.ring import Ring
from jrb.samplers.prioritized import DROPPED
from jrb.sharded import Sharded
from jrb.state import BufferState
from jrb.types import Context, Item, PrioritizedSampler, Sampler, ShardedSampler
from jrb.types.messages import PartState
from jrb.types.sampler import missing_method


def rebuild(
    old: ReplayBuffer | Sharded, state: BufferState, new: ReplayBuffer | Sharded
) -> BufferState:
    """The state of another description, with what this one holds.

    Any part may be another: capacity, `num_envs`, sampler, unit, writer, storage. Items stay as
    they are stored; transforms are not asked. The newest rows that there is room for stay (of a
    writer without an order of time the best items), and so do their priorities, how often they were
    drawn if both samplers count, what was dropped, and ends of episodes that only the old unit knew
    of. With another number of environments, the rows of all are laid end to end and dealt out anew,
    and no window crosses a seam.

    Transforms with a state go on where both have one of the same class; others learn from the
    items that stay.

    What does not carry over: what came to a reservoir that is made larger, which then samples from
    what it holds and what comes; how far an epoch is (the next draw begins one); the priorities of
    items where the old sampler had none; `set_alpha`, where the samplers differ. A queue goes on if
    both are queues, else all is unread. Stacks of frames whose first frames may be gone are not
    drawn.

    A `jrb.Sharded` buffer becomes one in other shards, or a single one, or the other way round:
    each shard gets its environments, whose number stays, with all that is known of their items.

    Args:
        old: the description of the state.
        state: is only read; a storage on the host may go on being used.
        new: the description that is wanted. A storage on the host gets a new store at its path.

    Returns:
        The state, on the default device.

    Raises:
        TypeError: a `Mix`, states under `vmap`, or objects on one side only.
        ValueError: items that a part of the new description cannot use; another number of
            environments where rows from behind the seams, or the order of a queue, would be lost.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> old = jrb.ReplayBuffer(6)
        >>> state = old.extend(old.init({"x": 0}), {"x": jnp.arange(8)})
        >>> new = jrb.ReplayBuffer(4, sampler=jrb.Prioritized(), batch_size=2)
        >>> state = jrb.rebuild(old, state, new)
        >>> jrb.items(new, state)["x"].tolist(), new.priorities(state).tolist()
        ([4, 5, 6, 7], [1.0, 1.0, 1.0, 1.0])
    """
    if isinstance(old, Sharded) or isinstance(new, Sharded):
        return _resharded(old, state, new)
    _check_single(old, state, new)
    kept = _chosen(old, new, state)
    if kept.dealt:
        _check_parts(old, state, new)
    return _rebuilt(_Old(old, (state,)), new, kept)


@dataclasses.dataclass(frozen=True)
class _Old:
    """What there was: the states of one description, of shards several.

    Slot s of state k has the number k N + s.
    """

    buffer: ReplayBuffer
    states: tuple[BufferState, ...]

    @property
    def state(self) -> BufferState:
        """The first of the states; of what they are alike in."""
        return self.states[0]

    @property
    def samplers(self) -> list[Any]:
        """The states of the samplers."""
        return [state.sampler for state in self.states]

    def take(self, slots: np.ndarray) -> Item:
        """The items at slots `[T, E]`, of which those of an environment are in one state."""
        if len(self.states) == 1:
            return self.buffer.take(self.state, jnp.asarray(slots))
        of_state = slots[0] // self.buffer.capacity
        found = [
            self.buffer.take(
                self.states[number],
                jnp.asarray(slots[:, of_state == number] - number * self.buffer.capacity),
            )
            for number in np.unique(of_state)
        ]
        order = np.argsort(np.argsort(of_state, kind="stable"))
        return jax.tree.map(lambda *some: jnp.concatenate(some, axis=1)[:, order], *found)

    def episode_step(self, slots: np.ndarray) -> np.ndarray | None:
        """`Unit.episode_step` of the rows at slots `[E]`."""
        of_state, found = slots // self.buffer.capacity, np.zeros(slots.shape, np.int32)
        for number in np.unique(of_state):
            here = of_state == number
            own = jnp.asarray(slots[here] - number * self.buffer.capacity)
            known = self.buffer.unit.episode_step(self.states[number].unit, own)
            if known is None:
                return None
            found[here] = known
        return found


def _rebuilt(there: _Old, new: ReplayBuffer, kept: "_Kept") -> BufferState:
    """A state of the new description, of what stays."""
    old, state = there.buffer, there.state
    made = _filled(there, new, kept)
    made = made.replace(transforms=_learned(old, state, new, made))
    if not kept.mask.any():
        return made
    if type(old.writer.writable()) is type(new.writer.writable()):
        made = made.replace(writer=new.writer.adopt(new.ring, made.writer, state.writer))
    here, places = jnp.asarray(kept.slots[kept.mask]), jnp.asarray(kept.places)
    sampler = _sampler(old.sampler, there.samplers, new, made, here, places)
    return made.replace(sampler=counting.adopted(sampler, there.samplers, here, places))


def _resharded(
    old: ReplayBuffer | Sharded, state: BufferState, new: ReplayBuffer | Sharded
) -> BufferState:
    """`rebuild` from shards, or to them."""
    states = {0: state}
    if isinstance(old, Sharded):
        states = {
            number: jax.tree.map(jnp.asarray, one)
            for number, one in shards.split(old, state).items()
        }
    if not isinstance(new, Sharded):
        return regrouped(old, states, new, 0)
    here = new.layout.numbers_here()
    return shards.joined(new, {number: regrouped(old, states, new, number) for number in here})


def regrouped(
    old: ReplayBuffer | Sharded,
    states: Mapping[int, BufferState],
    new: ReplayBuffer | Sharded,
    number: int,
) -> BufferState:
    """The state of one shard of a new description, from the shards that have its environments.

    Args:
        old: what there was.
        states: those of its shards, by number; at least of those that are needed.
        new: what is wanted.
        number: of the shard; 0 of a single buffer.

    Raises:
        ValueError: another number of environments, or no order of time; shards of which one holds
            more rows than another, where the new writer keeps them together; a queue; more than
            2^31 - 1 slots in those that one new shard is made of.
    """
    part, target = part_of(old), part_of(new)
    _check_regrouping(old, part, states, new)
    needed = needed_shards(old, new, number)
    validate.check_slots(len(needed) * part.capacity)
    first = number * target.ring.envs - needed[0] * part.ring.envs
    columns = slice(first, first + target.ring.envs)
    kept = [_chronological(part, target, states[one], place) for place, one in enumerate(needed)]
    rows = max(one.mask.shape[0] for one in kept)
    slots, mask, cuts = (
        np.concatenate([_below(field(one), rows) for one in kept], axis=1)[:, columns]
        for field in (lambda one: one.slots, lambda one: one.mask, lambda one: one.cuts)
    )
    if not (mask.all() or target.writer.per_env):
        raise ValueError(
            "rebuild: expected shards that hold equally many rows, or "
            "writer=jrb.PerEnvironment(), got "
            f"{sorted(set(mask.sum(axis=0).tolist()))} rows of their environments."
        )
    slots = np.where(mask, slots, np.max(np.where(mask, slots, 0), axis=0))  # anywhere it holds
    there = _Old(part, tuple(states[one] for one in needed))
    return _rebuilt(there, target, _Kept(slots.astype(np.int32), mask, cuts, False))


def part_of(buffer: ReplayBuffer | Sharded) -> ReplayBuffer:
    """The description of one shard; of a single buffer itself."""
    return buffer.part if isinstance(buffer, Sharded) else buffer


def needed_shards(
    old: ReplayBuffer | Sharded, new: ReplayBuffer | Sharded, number: int
) -> list[int]:
    """The shards that have the environments of a new one."""
    wide, had = part_of(new).ring.envs, part_of(old).ring.envs
    return list(range(number * wide // had, -(-(number + 1) * wide // had)))


def _below(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows `[T, E]`, the newest of so many; those above are 0."""
    return np.pad(rows, ((count - len(rows), 0), (0, 0)))


def _chronological(
    part: ReplayBuffer, target: ReplayBuffer, state: BufferState, place: int
) -> "_Kept":
    """The newest rows of a shard that there is room for, with the numbers of its slots."""
    held = part.writer.held(part.ring, state.writer)
    slots, mask = _rows_of(part.ring, held, target.ring.rows * part.ring.envs)
    cuts = _ends(part, state, slots)
    return _Kept(slots + place * part.capacity, mask, cuts, False)


def _check_regrouping(
    old: ReplayBuffer | Sharded,
    part: ReplayBuffer,
    states: Mapping[int, BufferState],
    new: ReplayBuffer | Sharded,
) -> None:
    whole, wanted = (each.buffer if isinstance(each, Sharded) else each for each in (old, new))
    for each in (whole, wanted):
        if not isinstance(each, ReplayBuffer):
            raise TypeError(
                f"rebuild: expected buffers, in shards or not, got {type(each).__name__}. Rebuild "
                "the parts of a Mix one by one."
            )
        checks.chronological("rebuild of shards", each.writer)
    if whole.ring.envs != wanted.ring.envs:
        raise ValueError(
            f"num_envs: expected {whole.ring.envs}, as before, for another number of shards, got "
            f"{wanted.ring.envs}."
        )
    goes_on = wanted.sampler.in_order and wanted.sampler.consumes
    if goes_on and any(bool(steps.has_pending(whole, one)) for one in states.values()):
        raise ValueError(
            f"shards: expected as many as before with {type(wanted.sampler).__name__}, whose order "
            "would be lost. Draw what is left first."
        )


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What stays, in rows of the new buffer.

    Attributes:
        slots: int32 `[T, E]`, where it was, in order of time.
        mask: bool `[T, E]`, which of it there is.
        cuts: bool `[T, E]`, after which time does not go on; None if there is no time.
        dealt: whether environments are not what they were.
    """

    slots: np.ndarray
    mask: np.ndarray
    cuts: np.ndarray | None
    dealt: bool

    @property
    def places(self) -> np.ndarray:
        """Where it is now, int32 `[K]`."""
        row, env = np.cumsum(self.mask, axis=0) - 1, np.arange(self.mask.shape[1])
        return (row * len(env) + env)[self.mask].astype(np.int32)


def _whole(slots: np.ndarray, cuts: np.ndarray | None, dealt: bool) -> _Kept:
    return _Kept(slots.astype(np.int32), np.ones(slots.shape, bool), cuts, dealt)


def _learned(old: ReplayBuffer, state: BufferState, new: ReplayBuffer, made: BufferState) -> tuple:
    """What the new transforms know: what the old ones had learned, or the items told them."""
    if not transforming.learning(new.transforms):
        return ()
    none = jnp.int32(0)
    context = Context(new.ring, new.keys, Occupancy(none, none))
    blank = transforming.init(new.transforms, context, old.stored(state))
    told = transforming.adopted((new.transforms, made.transforms), (new.transforms, blank))
    return transforming.adopted((old.transforms, state.transforms), (new.transforms, told))


def _sampler(
    old: Sampler,
    states: list[PartState],
    new: ReplayBuffer,
    made: BufferState,
    here: jax.Array,
    places: jax.Array,
) -> Any:
    """The new sampler's state, with what the old one knew of the items, in shards perhaps."""
    alike = type(old) is type(new.sampler) and not new.sampler.prioritized
    if alike or old == new.sampler:
        known = states[0] if len(states) == 1 else _concatenated(old, states)
        return _adopted(new.sampler, made.sampler, known, here, places)
    if not (isinstance(old, PrioritizedSampler) and isinstance(new.sampler, PrioritizedSampler)):
        return made.sampler
    raw = jnp.concatenate([old.priorities(state) for state in states])[here]
    assigned = _assigned(new.sampler, made.sampler, places, raw)
    gone = places[np.asarray(raw == DROPPED)]
    ok = jnp.ones(gone.shape, jnp.bool_)
    return new.sampler.drop(new.ring, assigned, gone, ok) if gone.size else assigned


def _concatenated(sampler: Sampler, states: list[PartState]) -> Any:
    """Returns the states of several shards as one."""
    if isinstance(sampler, ShardedSampler):
        return sampler.concat_shard_states(states)
    if sampler.consumes:  # shards are put together when nothing is pending
        return states[0]
    raise missing_method(sampler, "concat_shard_states", "rebuild", "ShardedSampler")


@functools.partial(jax.jit, static_argnums=0)
def _adopted(
    sampler: Sampler, made: PartState, old: PartState, here: jax.Array, places: jax.Array
) -> Any:
    """`import_state`, compiled once for as many items."""
    return sampler.import_state(made, old, here, places)


@functools.partial(jax.jit, static_argnums=0)
def _assigned(
    sampler: PrioritizedSampler, made: PartState, places: jax.Array, known: jax.Array
) -> Any:
    """`assign`, compiled once for as many items."""
    return sampler.assign(made, places, known, None)


def _check_single(old: ReplayBuffer, state: BufferState, new: ReplayBuffer) -> None:
    for buffer in (old, new):
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(
                f"rebuild: expected single buffers, got {type(buffer).__name__}. Rebuild the parts "
                "of a Mix one by one."
            )
    if not isinstance(state, BufferState) or state.edits.ndim:
        raise TypeError(
            "rebuild: expected a state of a single buffer, got states under vmap. Take one of them."
        )
    if old.storage.of_objects != new.storage.of_objects:
        raise TypeError(
            "rebuild: expected items of arrays on both sides, or objects, got "
            f"{type(old.storage).__name__} and {type(new.storage).__name__}."
        )


def _check_parts(old: ReplayBuffer, state: BufferState, new: ReplayBuffer) -> None:
    """Raises where a part could not tell what lies before a seam, or in which order to go on."""
    if new.unit.requires_contiguous_history:
        raise ValueError(
            f"num_envs: expected that of the old buffer with {type(new.unit).__name__}, which "
            "would need rows from behind the seams. Keep it, or use another unit."
        )
    goes_on = new.sampler.in_order and new.sampler.consumes
    if goes_on and bool(steps.has_pending(old, state)):
        raise ValueError(
            f"num_envs: expected that of the old buffer with {type(old.sampler).__name__}, whose "
            "order would be lost. Draw what is left first."
        )


def _chosen(buffer: ReplayBuffer, target: ReplayBuffer, state: BufferState) -> _Kept:
    """What stays."""
    if not buffer.writer.is_chronological:
        return _without_time(buffer, target, state)
    held, old, new = buffer.writer.held(buffer.ring, state.writer), buffer.ring, target.ring
    slots, mask = _rows_of(old, held, target.capacity)
    if not target.writer.is_chronological:
        return _whole(slots[mask][:, None], None, old.envs != new.envs)
    ends = _ends(buffer, state, slots)
    if old.envs != new.envs or not (mask.all() or target.writer.per_env):
        return _whole(*_dealt(slots, ends, mask, new.envs), True)
    return _Kept(slots[-new.rows :], mask[-new.rows :], ends[-new.rows :], False)


def _rows_of(ring: Ring, held: Occupancy, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The newest rows that hold at most so many items, and which of them there are, `[T, E]`.

    In place of others stand slots that hold something.
    """
    counts = np.broadcast_to(np.asarray(held.rows(ring)), ring.envs)
    row = np.arange(counts.max())[:, None] + counts - counts.max()
    there = np.asarray(held.from_oldest(ring))
    slots = np.take_along_axis(there, np.maximum(row, 0), axis=0).astype(np.int32)
    fits = np.cumsum((row >= 0).sum(axis=1)[::-1])[::-1] <= most
    slots, mask = slots[fits], (row >= 0)[fits]
    return np.where(mask, slots, slots[mask][:1]) if mask.any() else slots, mask


def _without_time(buffer: ReplayBuffer, target: ReplayBuffer, state: BufferState) -> _Kept:
    """The same of a writer without an order of time: the best, each an episode of its own."""
    dealt = buffer.ring.envs != target.ring.envs
    best = np.asarray(buffer.writer.best(buffer.ring, state.writer, target.capacity))
    order = np.asarray(buffer.in_order(state)[0])
    kept = order[np.isin(order, best)][: len(best)]
    if not target.writer.is_chronological:
        return _whole(kept[:, None], None, dealt)
    kept = kept[len(kept) % target.ring.envs :].reshape(-1, target.ring.envs)
    return _whole(kept, np.ones(kept.shape, bool), dealt)


def _ends(buffer: ReplayBuffer, state: BufferState, slots: np.ndarray) -> np.ndarray:
    """After which rows the unit knows that time does not go on: more than their flags may say."""
    return np.array(_known_ends(buffer, state.writer, state.unit, slots))


@functools.partial(jax.jit, static_argnums=0)
def _known_ends(
    buffer: ReplayBuffer, writer: PartState, unit: PartState, slots: jax.Array
) -> jax.Array:
    """The same, compiled once for as many rows."""
    return buffer.unit.is_episode_end(steps.context_of(buffer, writer), unit, slots)


def _dealt(
    slots: np.ndarray, ends: np.ndarray, mask: np.ndarray, envs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Streams `[T, E]`, laid end to end and cut into `envs` of equal length; and the seams."""
    surplus = int(mask.sum()) % envs  # of the oldest row
    ends[-1:] = True
    whole = lambda rows: [
        stream[there][number < surplus :] if surplus <= slots.shape[1] else stream[there]
        for number, (stream, there) in enumerate(zip(rows.T, mask.T, strict=True))
    ]
    line, seams = np.concatenate(whole(slots)), np.concatenate(whole(ends))
    over = line.size % envs  # more environments than there were items in a row
    line, seams = line[over:], seams[over:]
    streams = seams.reshape(envs, len(line) // envs)
    streams[:, -1:] = True
    return line.reshape(streams.shape).T, streams.T


def _filled(there: _Old, target: ReplayBuffer, kept: _Kept) -> BufferState:
    """An empty state of the target, and these items written to it."""
    buffer, state = there.buffer, there.state
    into, slots = replaying(target), kept.slots
    mask = None if kept.mask.all() else jnp.asarray(kept.mask)
    if target.storage.of_objects:
        return _with_objects(buffer, into, state, slots, mask).replace(ring=target.ring)
    spec = buffer.stored(state)
    new = eager.init(into, spec, None)
    if len(slots) and kept.cuts is not None and buffer.writer.is_chronological:
        before = _episode_step(there, target, kept)
        new = new.replace(unit=into.unit.init_mid_episode(new.unit, before))
    row_bytes = pytree.nbytes(spec) * slots.shape[1]
    for piece in pieces(np.arange(len(slots)), row_bytes):
        items = there.take(slots[piece])
        seams = None if kept.cuts is None else jnp.asarray(kept.cuts[piece])
        if into.num_envs is None:
            items = jax.tree.map(lambda leaf: leaf[:, 0], items)
        new = eager.fill(into, new, items, seams, None if mask is None else mask[piece])
    if not into.writer.is_chronological and int(into.size(new)) < slots.size:
        raise ValueError(
            f"rebuild: expected items that {type(target.writer).__name__} takes, got "
            f"{slots.size - int(into.size(new))} that it refuses, such as those with a rank of NaN."
        )
    return new.replace(ring=target.ring)


def _with_objects(
    buffer: ReplayBuffer,
    into: ReplayBuffer,
    state: BufferState,
    slots: np.ndarray,
    mask: jax.Array | None,
) -> BufferState:
    found = buffer.take(state, jnp.asarray(slots.reshape(-1)))
    if into.num_envs is not None:
        width = slots.shape[1]
        found = [found[start : start + width] for start in range(0, len(found), width)]
    return into.extend(into.init(None), found, mask)


_MANY = 2**30  # rows, as none may be missed that are not known


def _episode_step(there: _Old, target: ReplayBuffer, kept: _Kept) -> jax.Array:
    """How many rows of its episode came before the first of each environment, int32 `[E]`.

    Many if nobody knows; none where there is no row.
    """
    slots = np.take_along_axis(kept.slots, kept.mask.argmax(axis=0)[None], axis=0)[0]
    known = there.episode_step(slots)
    if known is None:
        known = np.full(slots.shape, _MANY, np.int32)
    elif there.buffer.unit != target.unit:
        known = np.where(known > 0, _MANY, 0)  # it counts up to a number of its own
    return jnp.asarray(np.where(kept.mask.any(axis=0), known, 0), jnp.int32)
