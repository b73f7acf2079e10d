"""From one description to another: the newest rows stay, with their priorities.

N capacity, E environments, T rows of time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._base import pytree
from jrb._engine import dispatch
from jrb._engine.replaying import pieces, replaying
from jrb.buffer import ReplayBuffer
from jrb.ring import Held
from jrb.samplers.prioritized import DROPPED
from jrb.state import BufferState
from jrb.types import Context


def rebuild(old: ReplayBuffer, state: BufferState, new: ReplayBuffer) -> BufferState:
    """The state of another description, with what this one holds.

    Any part may be another: capacity, `num_envs`, sampler, unit, writer, storage. Items stay as
    they are stored; transforms are not asked. The newest rows that there is room for stay (of a
    writer without an order of time the best items), and so do their priorities, what was dropped,
    and ends of episodes that only the old unit knew of. With another number of environments, the
    rows of all are laid end to end and dealt out anew, and no window crosses a seam.

    What does not carry over: what came to a reservoir that is made larger, which then samples from
    what it holds and what comes; how far an epoch is (the next draw begins one); the priorities of
    items where the old sampler had none; `set_alpha`, where the samplers differ. A queue goes on if
    both are queues, else all is unread. Stacks of frames whose first frames may be gone are not
    drawn.

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
    _check_single(old, state, new)
    _check_parts(old, state, new)
    slots, cuts = _chosen(old, new, state)
    made = _filled(old, new, state, slots, cuts)
    if not slots.size:
        return made
    if type(old.writer) is type(new.writer):
        made = made.replace(writer=new.writer.adopt(new.ring, made.writer, state.writer))
    here = jnp.asarray(slots.reshape(-1))
    places = jnp.arange(slots.size, dtype=jnp.int32)
    return made.replace(sampler=_sampler(old, state, new, made, here, places))


def _sampler(
    old: ReplayBuffer,
    state: BufferState,
    new: ReplayBuffer,
    made: BufferState,
    here: jax.Array,
    places: jax.Array,
) -> Any:
    """The new sampler's state, with what the old one knew of the items."""
    if old.sampler == new.sampler:
        return new.sampler.adopt(made.sampler, state.sampler, here, places)
    if type(old.sampler) is type(new.sampler) and not new.sampler.prioritized:
        return new.sampler.adopt(made.sampler, state.sampler, here, places)
    if not (old.sampler.prioritized and new.sampler.prioritized):
        return made.sampler
    known = old.sampler.priorities(state.sampler)[here]
    assigned = new.sampler.assign(made.sampler, places, known, None)
    gone = places[np.asarray(known == DROPPED)]
    ok = jnp.ones(gone.shape, jnp.bool_)
    return new.sampler.drop(new.ring, assigned, gone, ok) if gone.size else assigned


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
    if old.ring.envs == new.ring.envs:
        return
    if new.unit.needs_past:
        raise ValueError(
            f"num_envs: expected that of the old buffer with {type(new.unit).__name__}, which "
            "would need rows from behind the seams. Keep it, or use another unit."
        )
    if bool(old.sampler.has_unread(state.sampler)) and new.sampler.in_order:
        raise ValueError(
            f"num_envs: expected that of the old buffer with {type(old.sampler).__name__}, whose "
            "order would be lost. Draw what is left first."
        )


def _chosen(
    buffer: ReplayBuffer, target: ReplayBuffer, state: BufferState
) -> tuple[np.ndarray, np.ndarray | None]:
    """The slots to keep, int32 `[T, E]` in order of time; and after which time does not go on."""
    if not buffer.writer.in_time:
        return _without_time(buffer, target, state)
    held = buffer.writer.held(buffer.ring, state.writer)
    old, new = buffer.ring, target.ring
    rows = int(held.count) // old.envs
    first = int(held.first) + np.arange(rows, dtype=np.int64) * old.envs
    slots = (first[:, None] + np.arange(old.envs)) % old.capacity
    kept = slots[max(0, rows - target.capacity // old.envs) :].astype(np.int32)
    if not target.writer.in_time:
        return kept.reshape(-1, 1), None
    ends = _ends(buffer, state, held, kept)
    if old.envs == new.envs:
        return kept, ends
    return _dealt(kept, ends, new.envs)


def _without_time(
    buffer: ReplayBuffer, target: ReplayBuffer, state: BufferState
) -> tuple[np.ndarray, np.ndarray | None]:
    """The same of a writer without an order of time: the best, each an episode of its own."""
    best = np.asarray(buffer.writer.best(buffer.ring, state.writer, target.capacity))
    if not target.writer.in_time:
        return best[:, None], None
    order = np.asarray(buffer.in_order(state)[0])
    kept = order[np.isin(order, best)][: len(best)]
    kept = kept[len(kept) % target.ring.envs :].reshape(-1, target.ring.envs)
    return kept, np.ones(kept.shape, bool)


def _ends(buffer: ReplayBuffer, state: BufferState, held: Held, slots: np.ndarray) -> np.ndarray:
    """After which rows the unit knows that time does not go on: more than their flags may say."""
    context = Context(buffer.ring, buffer.keys, held)
    return np.array(buffer.unit.ends(context, state.unit, jnp.asarray(slots)))


def _dealt(slots: np.ndarray, ends: np.ndarray, envs: int) -> tuple[np.ndarray, np.ndarray]:
    """Streams `[T, E]`, laid end to end and cut into `envs` of equal length; and the seams."""
    surplus = slots.size % envs  # of the oldest row
    ends[-1:] = True
    whole = lambda rows: [
        stream[number < surplus :] if surplus <= slots.shape[1] else stream
        for number, stream in enumerate(rows.T)
    ]
    line, seams = np.concatenate(whole(slots)), np.concatenate(whole(ends))
    over = line.size % envs  # more environments than there were items in a row
    line, seams = line[over:], seams[over:]
    lanes = seams.reshape(envs, len(line) // envs)
    lanes[:, -1:] = True
    return line.reshape(lanes.shape).T, lanes.T


def _filled(
    buffer: ReplayBuffer,
    target: ReplayBuffer,
    state: BufferState,
    slots: np.ndarray,
    cuts: np.ndarray | None,
) -> BufferState:
    """An empty state of the target, and these items written to it."""
    into = replaying(target)
    if target.storage.of_objects:
        return _with_objects(buffer, into, state, slots).replace(ring=target.ring)
    spec = buffer.stored(state)
    new = dispatch.init(into, spec, None)
    if len(slots) and cuts is not None:
        before = _rows_before(buffer, state, target, slots[0])
        new = new.replace(unit=into.unit.resume(new.unit, before))
    row_bytes = pytree.nbytes(spec) * slots.shape[1]
    for piece in pieces(np.arange(len(slots)), row_bytes):
        items = buffer.take(state, jnp.asarray(slots[piece]))
        seams = None if cuts is None else jnp.asarray(cuts[piece])
        if into.num_envs is None:
            items = jax.tree.map(lambda leaf: leaf[:, 0], items)
        new = dispatch.fill(into, new, items, seams)
    if not into.writer.in_time and int(into.size(new)) < slots.size:
        raise ValueError(
            f"rebuild: expected items that {type(target.writer).__name__} takes, got "
            f"{slots.size - int(into.size(new))} that it refuses, such as those with a rank of NaN."
        )
    return new.replace(ring=target.ring)


def _with_objects(
    buffer: ReplayBuffer, into: ReplayBuffer, state: BufferState, slots: np.ndarray
) -> BufferState:
    found = buffer.take(state, jnp.asarray(slots.reshape(-1)))
    if into.num_envs is not None:
        width = slots.shape[1]
        found = [found[start : start + width] for start in range(0, len(found), width)]
    return into.extend(into.init(None), found)


_MANY = 2**30  # rows, as none may be missed that are not known


def _rows_before(
    buffer: ReplayBuffer, state: BufferState, target: ReplayBuffer, slots: np.ndarray
) -> jax.Array:
    """How many rows of its episode came before each of these, int32 `[E]`; many if none knows."""
    known = buffer.unit.rows_before(state.unit, jnp.asarray(slots))
    if known is None:
        return jnp.full(slots.shape, _MANY, jnp.int32)
    if buffer.unit == target.unit:
        return known
    return jnp.where(known > 0, _MANY, 0)  # it counts up to a number of its own
