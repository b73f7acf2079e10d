"""The picture of what a buffer holds."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrb.buffer import ReplayBuffer
from jrb.plot import canvas, episodes_panel, facts, priority_panels, reward_panel, ring_panel
from jrb.plot.canvas import Axes, Row
from jrb.state import BufferState


def state(buffer: ReplayBuffer, state: BufferState, ax: Axes | None = None) -> Any:
    """Shows what a buffer holds.

    Panels, as far as they apply: occupancy and age around the ring; episodes as bars, a line for
    each environment, coloured by return; rewards over time; priorities over slots, and how they
    spread, with the share of the mass that the top 1 % of the anchors hold, mass being what draws
    are proportional to; and how often items were drawn, where that is counted.

    Of the items, only flags and rewards are read. Large buffers are binned; 10^7 slots take about a
    second.

    Args:
        buffer: the description.
        state: is only read.
        ax: an axes of matplotlib in whose place the picture is drawn; None for a new figure.

    Returns:
        The figure.

    Raises:
        TypeError: a state of another description, or one inside `jit`; an `ax` that is no axes.
        ValueError: a state of another capacity, states under `vmap`, or one that was donated.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9, sampler=jrb.Prioritized())
        >>> items = {"next": {"reward": jnp.ones(4), "done": jnp.arange(4) % 2 == 1}}
        >>> empty = buffer.init({"next": {"reward": 0.0, "done": False}})
        >>> figure = jrb.plot.state(buffer, buffer.extend(empty, items))
        >>> for axes in figure.axes:
        ...     axes.get_title(loc="left")
        'Holds 4 items in 9 slots (44 %)'
        '2 episodes, 2 complete'
        'Rewards: all 1'
        'Priorities: 1 on average'
        'The top 1 % hold 25 % of the mass'
    """
    facts.check(buffer, state, "plot.state")
    size = int(buffer.size(state))
    if not size:
        more = f"there is room for {buffer.capacity:,}"
        return canvas.drawn(canvas.note("The buffer is empty", more), ax, "plot.state")
    rows = [
        Row(ring_panel.height(buffer), [lambda *at: ring_panel.draw(buffer, state, *at)]),
        *_of_items(buffer, state, size),
        *_of_sampler(buffer, state),
    ]
    return canvas.drawn(rows, ax, "plot.state")


def _of_items(buffer: ReplayBuffer, state: BufferState, size: int) -> list[Row]:
    """Episodes and rewards."""
    found, panels = facts.rows(buffer, state), []
    spans = facts.spans(buffer, found)
    if spans is not None:
        height = episodes_panel.height(found)
        panels.append(Row(height, [lambda *at: episodes_panel.draw(found, spans, *at)]))
    rewards, held = found.rewards, found.held
    if rewards is not None and rewards.size:
        if not buffer.writer.is_chronological:
            rewards, held = rewards.reshape(-1, 1, *rewards.shape[2:])[:size], None
        is_chronological = buffer.writer.is_chronological
        panels.append(
            Row(1.9, [lambda *at: reward_panel.draw(rewards, held, is_chronological, *at)])
        )
    return panels


def _of_sampler(buffer: ReplayBuffer, state: BufferState) -> list[Row]:
    """Priorities, and counts of draws."""
    panels = []
    if buffer.sampler.prioritized:
        raw, masses = priority_panels.read(buffer, state)
        known = priority_panels.anchors_of(raw, raw)
        if len(known):
            slots = lambda *at: priority_panels.over_slots(raw, *at)
            spread = lambda *at: priority_panels.spread(known, masses, *at)
            panels.append(Row(2.3, [slots, spread], (1.15, 1)))
    if buffer.sampler.count_draws:
        counts = np.asarray(state.sampler.draws)[_held(buffer, state)]
        panels.append(Row(1.9, [lambda *at: priority_panels.draws(counts, *at)]))
    return panels


def _held(buffer: ReplayBuffer, state: BufferState) -> np.ndarray:
    """Which slots hold something, bool `[N]`."""
    held = buffer.writer.held(buffer.ring, state.writer)
    return np.asarray(held.holds(buffer.ring, jnp.arange(buffer.capacity, dtype=jnp.int32)))
