"""From one capacity, or one number of environments, to another."""

import dataclasses
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np

from jrb._base import pytree
from jrb._engine import dispatch
from jrb._engine.replaying import pieces, replaying
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import host_items
from jrb.mix import AnyState, Description
from jrb.ring import Held
from jrb.state import BufferState
from jrb.types import Context


def migrated(
    buffer: Description, state: AnyState, capacity: int | None, num_envs: int | EllipsisType | None
) -> tuple[ReplayBuffer, BufferState]:
    """The description of another size, and the state that holds the newest rows.

    With another number of environments, the rows of all are laid end to end and dealt out anew; no
    window crosses a seam.

    Raises:
        TypeError: a mix, or states side by side under `vmap`.
        ValueError: a capacity that the number of environments does not divide.
    """
    single = isinstance(buffer, ReplayBuffer)
    if not single or buffer.writer.held(buffer.ring, state.writer).count.ndim:
        raise TypeError(
            "load: capacity, num_envs: expected a checkpoint of a single buffer, got a Mix, or "
            "states under vmap. Load it as it is."
        )
    target = dataclasses.replace(
        host_items.prepared(buffer, given=False),
        capacity=buffer.capacity if capacity is None else capacity,
        num_envs=buffer.num_envs if num_envs is ... else num_envs,
    )
    if target.ring == buffer.ring:
        return buffer, state
    _check_parts(target, state, target.ring.envs != buffer.ring.envs)
    slots, cuts = _chosen(buffer, target, state)
    new = _filled(buffer, target, state, slots, cuts)
    here, places = jnp.asarray(slots.reshape(-1)), jnp.arange(slots.size, dtype=jnp.int32)
    sampler = target.sampler.adopt(new.sampler, state.sampler, here, places)
    return target, new.replace(sampler=sampler)


def _check_parts(target: ReplayBuffer, state: BufferState, dealt: bool) -> None:
    """Raises where a part could not tell what lies before a seam, or in which order to go on."""
    if dealt and _before(target, state, np.zeros(target.ring.envs, np.int32)) is not None:
        raise ValueError(
            f"num_envs: expected that of the checkpoint with {type(target.unit).__name__}, which "
            "would need frames from behind the seams. Load with it, or with another unit."
        )
    if dealt and bool(target.sampler.has_unread(state.sampler)):
        raise ValueError(
            f"num_envs: expected that of the checkpoint with {type(target.sampler).__name__}, "
            "whose order would be lost. Draw what is left first."
        )


def _chosen(
    buffer: ReplayBuffer, target: ReplayBuffer, state: BufferState
) -> tuple[np.ndarray, np.ndarray | None]:
    """The slots to keep, int32 `[T, E]` in order of time; and after which time does not go on."""
    if not buffer.writer.in_time:
        best = buffer.writer.best(buffer.ring, state.writer, target.capacity)
        return np.asarray(best)[:, None], None
    held = buffer.writer.held(buffer.ring, state.writer)
    old, new = buffer.ring, target.ring
    rows = int(held.count) // old.envs
    first = int(held.first) + np.arange(rows, dtype=np.int64) * old.envs
    slots = (first[:, None] + np.arange(old.envs)) % old.capacity
    kept = slots[max(0, rows - target.capacity // old.envs) :].astype(np.int32)
    ends = _ends(buffer, state, held, kept)
    if old.envs == new.envs:
        return kept, ends
    return _dealt(kept, ends, new.envs)


def _ends(buffer: ReplayBuffer, state: BufferState, held: Held, slots: np.ndarray) -> np.ndarray:
    """After which rows the unit knows that time does not go on: more than their flags may say."""
    context = Context(buffer.ring, buffer.keys, held)
    return np.array(buffer.unit.ends(context, state.unit, jnp.asarray(slots)))


def _before(buffer: ReplayBuffer, state: BufferState, slots: np.ndarray) -> jax.Array | None:
    """How many rows of their episodes came before some slots; None if it does not matter."""
    return buffer.unit.rows_before(state.unit, jnp.asarray(slots))


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
    spec = buffer.stored(state)
    into = replaying(target)
    new = dispatch.init(into, spec, None)
    before = _before(target, state, slots[0]) if len(slots) else None
    if before is not None:
        new = new.replace(unit=target.unit.resume(new.unit, before))
    row_bytes = pytree.nbytes(spec) * slots.shape[1]
    for piece in pieces(np.arange(len(slots)), row_bytes):
        items = buffer.take(state, jnp.asarray(slots[piece]))
        seams = None if cuts is None else jnp.asarray(cuts[piece])
        if into.num_envs is None:
            items = jax.tree.map(lambda leaf: leaf[:, 0], items)
        new = dispatch.fill(into, new, items, seams)
    return new.replace(ring=target.ring)
