"""From one capacity, or one number of environments, to another."""

import dataclasses
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import outside, pytree
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import hosted
from jrb.checkpoint.items import pieces, replaying
from jrb.ring import Held
from jrb.state import BufferState


def migrated(
    buffer: Any, state: Any, capacity: int | None, num_envs: int | EllipsisType | None
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
        hosted.prepared(buffer, given=False),
        capacity=buffer.capacity if capacity is None else capacity,
        num_envs=buffer.num_envs if num_envs is ... else num_envs,
    )
    if target.ring == buffer.ring:
        return buffer, state
    _check_parts(target, state, target.ring.envs != buffer.ring.envs)
    slots, cuts = _chosen(buffer, target, state)
    new = _filled(buffer, target, state, slots, cuts)
    adopt = getattr(target.sampler, "adopt", None)
    if adopt is not None:
        places = jnp.arange(slots.size, dtype=jnp.int32)
        sampler = adopt(new.sampler, state.sampler, jnp.asarray(slots.reshape(-1)), places)
        new = new.replace(sampler=sampler)  # pyright: ignore
    return target, new


def _check_parts(target: ReplayBuffer, state: BufferState, dealt: bool) -> None:
    """Raises where a part could not tell what lies before a seam, or in which order to go on."""
    if dealt and hasattr(target.unit, "resume"):
        raise ValueError(
            f"num_envs: expected that of the checkpoint with {type(target.unit).__name__}, which "
            "would need frames from behind the seams. Load with it, or with another unit."
        )
    if dealt and getattr(target.sampler, "in_order", False):
        unread = target.sampler.ready(state.sampler, None, None)  # pyright: ignore
        if bool(unread):
            raise ValueError(
                f"num_envs: expected that of the checkpoint with {type(target.sampler).__name__}, "
                "whose order would be lost. Draw what is left first."
            )


def _chosen(
    buffer: ReplayBuffer, target: ReplayBuffer, state: BufferState
) -> tuple[np.ndarray, np.ndarray | None]:
    """The slots to keep, int32 `[T, E]` in order of time; and after which time does not go on."""
    best = getattr(buffer.writer, "best", None)
    if best is not None:
        return np.asarray(best(buffer.ring, state.writer, target.capacity))[:, None], None
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
    if not hasattr(buffer.unit, "ends"):
        return np.zeros(slots.shape, bool)
    return np.array(buffer.unit.ends(buffer.ring, state.unit, held, jnp.asarray(slots)))


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
    new = outside.init(into, spec, None)
    if hasattr(target.unit, "resume") and len(slots):
        before = target.unit.rows_before(state.unit, slots[0])  # pyright: ignore
        new = new.replace(unit=target.unit.resume(new.unit, before))  # pyright: ignore
    row_bytes = pytree.nbytes(spec) * slots.shape[1]
    for piece in pieces(np.arange(len(slots)), row_bytes):
        items = buffer.take(state, jnp.asarray(slots[piece]))
        seams = None if cuts is None else jnp.asarray(cuts[piece])
        if into.num_envs is None:
            items = jax.tree.map(lambda leaf: leaf[:, 0], items)
        new = outside.fill(into, new, items, seams)
    return new.replace(ring=target.ring)
