"""The plot of one episode. L rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrb.buffer import ReplayBuffer
from jrb.keys import path_name, within
from jrb.plot import canvas, facts
from jrb.plot.canvas import Axes, Row, Tone
from jrb.read import Episode, episodes
from jrb.state import BufferState

_POINTS, _FRAMES, _PARTS = 2000, 12, 8


def episode(buffer: ReplayBuffer, state: BufferState, k: int, ax: Axes | None = None) -> Any:
    """Plots one episode: its rewards and their sum, actions, observations, and priorities.

    Observations that are images are shown as a film strip of at most 12 frames; observations and
    actions of up to 8 numbers as lines. Episodes of more than 2,000 rows are thinned out evenly.

    Args:
        buffer: a buffer whose writer keeps the order of time.
        state: its state. It is only read.
        k: the index of the episode in `jrb.episodes(buffer, state)`; -1 for the latest to begin.
        ax: the matplotlib axes to replace by the plot; None for a new figure.

    Returns:
        The figure.

    Raises:
        TypeError: as in `jrb.plot.state`; or `k` is not an integer.
        ValueError: as in `jrb.plot.state`; items have no flags, the writer does not keep the order
            of time, or there is no episode `k`.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9)
        >>> items = {"next": {"reward": jnp.ones(6), "done": jnp.arange(6) % 3 == 2}}
        >>> empty = buffer.init({"next": {"reward": 0.0, "done": False}})
        >>> figure = jrb.plot.episode(buffer, buffer.extend(empty, items), 0)
        >>> figure.axes[0].get_title(loc="left")
        'Episode 0 of 2: 3 rows, return 3'
    """
    facts.check_state(buffer, state, "plot.episode")
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise TypeError(f"plot.episode: k: expected an integer, got {k!r}.")
    with np.errstate(invalid="ignore"):  # returns may not be finite
        every = episodes(buffer, state)
    if not -len(every) <= k < len(every):
        expected = f"from {-len(every)} to {len(every) - 1}, got {k}."
        none = f"an episode that is stored, got {k} of none. Add items first."
        raise ValueError(f"plot.episode: k: expected {expected if len(every) else none}")
    one, length = every[k], len(every[k])
    # The title has a row of its own, as the first panel differs.
    heading = partial(_write_heading, buffer, one, k % len(every), len(every))
    rows = [Row(0.5, [heading], around=0)]
    rewards = facts.read_rewards(buffer, state, one.slots[:, None])
    if rewards is not None:
        rows.append(_row_over_steps(1.9, length, partial(_plot_rewards, rewards[:, 0])))
    # Plot small leaves of the action and the observation, at most 3 of each, and priorities.
    shown = np.linspace(0, length - 1, min(length, _POINTS)).astype(int)
    slots = one.slots[shown]
    specs = facts.leaves_by_name(buffer.item_spec(state))
    small = {
        name
        for name, leaf in specs.items()
        if facts.is_real(leaf.dtype) and leaf.size and leaf.size <= _PARTS
    }
    for path in (buffer.keys.action, buffer.keys.observation):
        names = sorted(name for name in small if within(name, path_name(path)))[:3]
        for name, leaf in facts.read_leaves(buffer, state, slots, set(names)).items():
            plot = partial(_plot_lines, shown, leaf, canvas.leaf_label(name))
            rows.append(_row_over_steps(1.6, length, plot))
    if buffer.sampler.prioritized:
        raw = np.asarray(buffer.priorities(state, jnp.asarray(slots)))
        plot = partial(_plot_lines, shown, np.where(raw < 0, np.nan, raw), "priority")
        rows.append(_row_over_steps(1.5, length, plot))
    image = canvas.find_images(specs, 0)
    if image is not None:
        rows.append(_film_strip(buffer, state, one, *image))
    return canvas.draw_rows(rows, ax, "plot.episode")


def _row_over_steps(height: float, length: int, draw: Callable[[Axes, Tone], None]) -> Row:
    """Returns a row with one panel, whose x-axis is the `length` rows of the episode."""

    def panel(axes: Axes, tone: Tone) -> None:
        axes.set_xlabel("row of the episode")
        draw(axes, tone)
        axes.set_xlim(-0.5, max(length - 0.5, 0.5))
        canvas.whole_numbers(axes.xaxis, 10)

    return Row(height, [panel])


def _film_strip(
    buffer: ReplayBuffer, state: BufferState, one: Episode, name: str, order: canvas.Order
) -> Row:
    """Returns a row with images of some of the episode's rows; of stacked frames the newest one."""
    length, few = len(one), min(len(one), _FRAMES)
    film = one.slots[np.linspace(0, length - 1, few).astype(int)]
    leaf = facts.read_leaves(buffer, state, film, {name})[name]
    pictures, more = canvas.to_rgb(canvas.to_frames(leaf, order, 1)[:, -1])
    sheet = canvas.tile(pictures[None], np.ones((1, few)))
    which = "all rows" if few == length else f"{few} of {length:,} rows, evenly apart"
    return canvas.image_row(sheet, f"{canvas.leaf_label(name)}: {which}", more)


def _write_heading(
    buffer: ReplayBuffer, one: Episode, k: int, count: int, axes: Axes, tone: Tone
) -> None:
    """Writes the figure's title, and a line below it, into a panel of their own."""
    title = f"Episode {k:,} of {count:,}: {canvas.count(len(one), 'row')}"
    if one.return_ is not None and np.size(one.return_) == 1 and np.ndim(one.return_) < 2:
        title += f", return {canvas.number(np.reshape(one.return_, ()))}"
    notes = [f"environment {one.environment:,}"] * (buffer.ring.envs > 1)
    notes.append("has ended" if one.ended else "still running")
    notes += ["its first rows may have been overwritten"] * one.cut
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=11, color=tone.ink, y=1, pad=-11)
    place = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate("; ".join(notes), (0, 1), (0, -27), fontsize=8.5, color=tone.faint, **place)


def _plot_rewards(rewards: np.ndarray, axes: Axes, tone: Tone) -> None:
    """Plots rewards `[L, 1]` as bars with their cumulative sum; or `[L, parts]` as lines."""
    rows = np.arange(len(rewards))
    if rewards.shape[1] > 1:
        _plot_lines(rows, rewards, "reward", axes, tone)
        return
    # Plot the rewards as bars.
    width = max(0.8, min(4, 300 / len(rows)))
    axes.vlines(rows, 0, rewards[:, 0], color=canvas.BLUE, linewidth=width)
    axes.axhline(0, color=tone.line, linewidth=0.8)
    axes.set_ylabel("reward", color=canvas.BLUE)
    # Plot the cumulative sum, with an axis of its own at the right. It is NaN for infinities of
    # both signs.
    with np.errstate(invalid="ignore"):
        total = np.cumsum(rewards[:, 0], dtype=np.float64)
    other = axes.twinx()
    canvas.set_style(other, tone)
    other.step(rows, total, where="post", color=canvas.ORANGE, linewidth=1.4)
    other.set_ylabel("sum so far", color=canvas.ORANGE)
    canvas.write_title(axes, tone, "Rewards, and their sum so far")


def _plot_lines(rows: np.ndarray, values: np.ndarray, name: str, axes: Axes, tone: Tone) -> None:
    """Plots each number of values `[L, ...]` over the rows: lines for floats, dots for integers."""
    # A single row would be a line without length: mark it.
    values, exact = values.reshape(len(values), -1), values.dtype.kind in "biu"
    look = {"linewidth": 1.2, "marker": "o" if len(rows) == 1 else ""}
    if exact:
        look = {"linestyle": "", "marker": "o", "markersize": 3.2, "markeredgewidth": 0}
        canvas.whole_numbers(axes.yaxis, 4)
    for part in range(values.shape[1]):
        color = canvas.CYCLE[part % len(canvas.CYCLE)]
        axes.plot(rows, values[:, part], color=color, label=f"{part}", **look)
    if values.shape[1] > 1:
        canvas.add_legend(axes, tone, "beside")
    axes.set_ylabel(name)
