"""Whole episodes as anchors: those that are complete and of which the first row is held.

They are kept as `Episodes` with one row for enough; the anchor of each is its first row.

N capacity, E environments, T time.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jrb._core import anchor_queue, episodes, lanes
from jrb._core.episodes import Episodes
from jrb.occupancy import Occupancy
from jrb.types import AnchorUpdate, Context, WritePlan


def after_write(
    context: Context, state: Episodes, write: WritePlan, done: jax.Array, length: jax.Array
) -> tuple[Episodes, AnchorUpdate]:
    """An episode enters with its last row, and leaves with its first one.

    Args:
        context: of the buffer, before the write.
        state: the episodes before.
        write: which rows pass and which leave.
        done: bool `[T, E]`, which rows end an episode.
        length: int32 `[T, E]`, the rows of its episode up to each row, itself included; more than
            the ring has may be told as any number above.
    """
    after, _, _ = episodes.after_write(context, state, write, done, 1, whole=True)
    came = jnp.sum(done & write.times[0], axis=0, dtype=jnp.int32)
    change = _change(context, state, after, came)
    change = dataclasses.replace(change, entered=_firsts(context, write, done, length))
    return after, _without_first_rows(context, write, change)


def _without_first_rows(context: Context, write: WritePlan, change: AnchorUpdate) -> AnchorUpdate:
    """The change in which no row that leaves is an anchor any more."""
    ring = context.ring
    if lanes.are_in(context):
        return dataclasses.replace(change, removed=lanes.leaving(context, write).reshape(-1))
    return dataclasses.replace(
        change,
        expired=Occupancy(context.held.first, jnp.minimum(write.expired, ring.rows) * ring.envs),
        most=min(write.length, ring.rows) * ring.envs if write.bounded else None,
    )


def truncated(
    context: Context, state: Episodes, which: jax.Array, length: jax.Array
) -> tuple[Episodes, AnchorUpdate]:
    """The running episodes of some environments, bool `[E]`, are complete with the newest row.

    `length`, int32 `[E]`, are the rows of the running episodes.
    """
    now = anchor_queue.look_back(context.ring)
    runs = which & (state.length > 0)
    after = episodes.truncated(state, which, 1)
    rows_held = context.held.rows(context.ring)
    after = episodes.without_lost(context.ring, after, rows_held, now, 1, whole=True)
    change = _change(context, state, after, runs.astype(jnp.int32))
    entered = _firsts(context, now, runs[None], length[None])
    return after, dataclasses.replace(change, entered=entered)


def _firsts(context: Context, write: WritePlan, ends: jax.Array, length: jax.Array) -> jax.Array:
    """The first rows of the episodes that end, int32 `[T * E]`; N where none does or is held."""
    back = jnp.maximum(length - 1, 0)[..., None]
    return anchor_queue.rows_back(context, write, back, ends[..., None])


def _change(context: Context, before: Episodes, after: Episodes, came: jax.Array) -> AnchorUpdate:
    """So many came, int32 `[E]`; of those from before, and of them, some are there no more."""
    left = episodes.complete(before) + came - episodes.complete(after)
    total = lambda count: jnp.sum(count, dtype=jnp.int32)
    return episodes.change(context.ring, total(came), total(left))
