"""The plot of a buffer's contents: ring, episodes, rewards, priorities and counts of draws.

N capacity, E environments, K the maximum of stored rows of an environment, M episodes.
"""

from typing import Any

import jax
import numpy as np

from jrb._core.steps import num_anchors
from jrb.authoring import require
from jrb.buffer import ReplayBuffer
from jrb.plot import canvas, facts
from jrb.plot.canvas import Axes, Row, Tone
from jrb.read import episodes, has_episodes
from jrb.state import BufferState

_collections: Any = require("matplotlib.collections", "plot")

_RING_COLUMNS, _RING_LINES = 1000, 48
_EPISODE_BARS, _EPISODE_LINES, _EPISODE_COLUMNS = 1500, 64, 400
_REWARD_BINS, _REWARD_LINES, _FEW_ROWS = 250, 6, 8
_PRIORITY_BINS = 400


def state(buffer: ReplayBuffer, state: BufferState, ax: Axes | None = None) -> Any:
    """Plots the contents of a buffer.

    The panels, if they apply, show: occupancy and age around the ring; episodes as bars, in a line
    for each environment, coloured by return; rewards over time; priorities by slot; a histogram of
    priorities, with the share of the mass of the top 1 % of anchors; and how often items were
    drawn, if the sampler counts draws.

    Only flags and rewards of the items are read. Large buffers are binned; 10^7 slots take a few
    seconds.

    Args:
        buffer: the buffer.
        state: its state. It is only read.
        ax: the matplotlib axes to replace by the plot; None for a new figure.

    Returns:
        The figure.

    Raises:
        TypeError: the state is of another buffer, or traced by `jit`; or `ax` is no axes.
        ValueError: the state has another capacity, has an axis of `vmap`, or was donated.

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
    facts.check_state(buffer, state, "plot.state")
    if not int(buffer.size(state)):
        more = f"there is room for {buffer.capacity:,}"
        return canvas.draw_text("The buffer is empty", more, ax, "plot.state")
    slots, stored = facts.stored_slots(buffer, state)
    in_time, envs = buffer.writer.is_chronological, buffer.ring.envs
    lines = min(envs, _RING_LINES) if buffer.writer.per_env else 0
    rows = [Row(1.45 + lines / 30, [lambda *at: _plot_ring(buffer, state, slots, stored, *at)])]
    if has_episodes(buffer, state):
        table = _episode_table(buffer, state, stored)
        height = 1.6 + min(envs, _EPISODE_LINES) / 28
        rows.append(Row(height, [lambda *at: _plot_episodes(table, stored, *at)]))
    # Without an order of time, rewards are plotted by slot.
    at_slots = slots if in_time else np.sort(slots, axis=0)
    rewards = facts.read_rewards(buffer, state, at_slots)
    if rewards is not None:
        rows.append(Row(1.9, [lambda *at: _plot_rewards(rewards, stored, in_time, *at)]))
    if buffer.sampler.prioritized:
        raw = np.asarray(buffer.priorities(state))
        is_anchor = raw >= 0
        masses = facts.masses_of(buffer, state, raw)
        if is_anchor.any():
            over_slots = lambda *at: _plot_priorities(raw, *at)
            spread = lambda *at: plot_priority_histogram(raw[is_anchor], masses[is_anchor], *at)
            rows.append(Row(2.3, [over_slots, spread], (1.15, 1)))
    if buffer.sampler.count_draws:
        counts = np.asarray(state.sampler.draws)[slots[stored]]
        rows.append(Row(1.9, [lambda *at: _plot_draw_counts(counts, *at)]))
    return canvas.draw_rows(rows, ax, "plot.state")


def _plot_ring(
    buffer: ReplayBuffer,
    state: BufferState,
    slots: np.ndarray,
    stored: np.ndarray,
    axes: Axes,
    tone: Tone,
) -> None:
    """Plots the ring, or each environment's, as a strip; new items are dark, old ones pale."""
    # Compute the mean age of the items in each cell, NaN where nothing is stored.
    ring, in_time, per_env = buffer.ring, buffer.writer.is_chronological, buffer.writer.per_env
    ages = np.full(buffer.capacity, np.nan, np.float32)
    steps = np.broadcast_to(np.arange(len(slots))[::-1, None], slots.shape)
    ages[slots[stored]] = steps[stored]
    # Unless rings are per environment, those of all environments look alike: show the first.
    grid = ages.reshape(ring.rows, ring.envs) if in_time else ages[:, None]
    lines = facts.edges(ring.envs, _RING_LINES) if per_env else np.arange(2)
    columns = facts.edges(len(grid), _RING_COLUMNS)
    means = facts.block_means(grid.T[: lines[-1]], columns, lines)
    # Plot the cells on the background of empty slots.
    axes.set_facecolor(tone.line + "55")
    look = {"cmap": canvas.AGES, "vmin": 0, "vmax": max(np.nanmax(means), 1)}
    borders = np.arange(len(lines)) - 0.5
    drawn = axes.pcolormesh(columns, borders, np.ma.masked_invalid(means), **look)
    axes.set(xlim=(0, columns[-1]), ylim=(borders[-1], -0.5))
    axes.spines[:].set_visible(False)
    canvas.whole_numbers(axes.xaxis, 8)
    tall, unit = len(means) > 1, "rows" if in_time else "items"
    canvas.add_color_bar(axes, tone, drawn, f"age ({unit})" if tall else "age", 3 if tall else 1)
    is_rows = in_time and ring.envs > 1
    each = f" ({ring.envs:,} environments each)" if is_rows else ""
    axes.set_xlabel(("row" if is_rows else "slot") + " of the ring" + each)
    _label_lines(axes, lines[:-1], 5)
    _describe_ring(buffer, state, slots, stored, axes, tone)


def _describe_ring(
    buffer: ReplayBuffer,
    state: BufferState,
    slots: np.ndarray,
    stored: np.ndarray,
    axes: Axes,
    tone: Tone,
) -> None:
    """Writes the title of the ring, and marks where the next write goes."""
    ring = buffer.ring
    size = int(buffer.size(state))
    share = canvas.percent(size / buffer.capacity)
    title = f"Holds {canvas.count(size, 'item')} in {buffer.capacity:,} slots ({share})"
    notes, count = [], int(num_anchors(buffer, state.replace(storage=None)))
    if buffer.writer.per_env:
        rows = stored.sum(axis=0)
        notes.append(f"environments hold {rows.min():,} to {rows.max():,} rows")
    elif buffer.writer.is_chronological:
        row = (int(slots[-1, 0]) // ring.envs + 1) % ring.rows
        x = row + 0.5 if ring.rows <= _RING_COLUMNS else row
        where = axes.get_xaxis_transform()
        axes.plot([x], [0], "^", color=canvas.ORANGE, markersize=6, clip_on=False, transform=where)
        notes.append(f"the next write goes to {'row' if ring.envs > 1 else 'slot'} {row:,}")
    if count != size:
        notes.append(canvas.count(count, "anchor") + " can be drawn")
    canvas.write_title(axes, tone, title, "; ".join(notes))


def _label_lines(axes: Axes, envs: np.ndarray, most: int) -> None:
    """Labels up to `most` lines with the indices of their first environments, `envs`."""
    shown = np.unique(np.linspace(0, len(envs) - 1, min(len(envs), most)).astype(int))
    axes.set_yticks(shown, [f"{envs[line]:,}" for line in shown] if len(envs) > 1 else [""])
    axes.set_ylabel("environment" if len(envs) > 1 else "")
    axes.tick_params(axis="y", length=3.5 if len(envs) > 1 else 0)


def _episode_table(
    buffer: ReplayBuffer, state: BufferState, stored: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns arrays `[M]` that describe the episodes, sorted by environment.

    `start` and `stop` are rows relative to the end of the ring: 0 is after the newest row. `value`
    is the return if this is one number, else the length.
    """
    with np.errstate(invalid="ignore"):  # returns may not be finite
        every = sorted(episodes(buffer, state), key=lambda episode: episode.environment)
    env = np.array([episode.environment for episode in every])
    length = np.array([len(episode) for episode in every])
    # The newest row of each environment is the last of the ring: count rows from its end.
    counts = stored.sum(axis=0)
    stop = np.cumsum(length) - np.cumsum(counts)[env]
    returns = [jax.tree.leaves(episode.return_) for episode in every]
    has_return = all(len(parts) == 1 and np.size(parts[0]) == 1 for parts in returns)
    value = np.array([parts[0] for parts in returns]) if has_return else length
    return {
        "env": env,
        "start": stop - length,
        "stop": stop,
        "value": value.reshape(-1).astype(np.float64),
        "has_return": np.array(has_return),
        "ended": np.array([episode.ended for episode in every]),
        "complete": np.array([episode.complete for episode in every]),
    }


def _plot_episodes(
    table: dict[str, np.ndarray], stored: np.ndarray, axes: Axes, tone: Tone
) -> None:
    """Plots a bar for each episode, coloured by its return; if there are too many, cell means."""
    most, envs = stored.shape
    value = table["value"]
    few = len(value) <= _EPISODE_BARS and envs <= _EPISODE_LINES
    lines = np.arange(envs + 1)
    if few:
        colors = _plot_episode_bars(table, most, axes)
    else:
        # Each row gets the value of its episode; a cell is the mean over its rows.
        lengths = table["stop"] - table["start"]
        dense = np.full((envs, most), np.nan, np.float32)
        with np.errstate(over="ignore"):
            dense[stored.T] = np.repeat(value.astype(np.float32), lengths)
        columns, lines = facts.edges(most, _EPISODE_COLUMNS), facts.edges(envs, _EPISODE_LINES)
        means = np.ma.masked_invalid(facts.block_means(dense, columns, lines))
        norm = canvas.color_scale(means.compressed()).norm
        borders = np.arange(len(lines)) - 0.5
        colors = axes.pcolormesh(columns - most, borders, means, norm=norm, cmap=canvas.VALUES)
    axes.set(xlim=(-most, 0), ylim=(len(lines) - 1.4, -0.6))
    axes.spines["left"].set_visible(False)
    canvas.time_axis(axes)
    _label_lines(axes, lines[:-1], 6)
    name = "return" if table["has_return"] else "length (rows)"
    canvas.add_color_bar(axes, tone, colors, name if few else f"mean {name}")
    # Write the title: means of the complete episodes, and how to read the colours.
    complete, notes = table["complete"], []
    title = f"{canvas.count(len(value), 'episode')}, {int(complete.sum()):,} complete"
    if complete.any():
        length = (table["stop"] - table["start"])[complete].mean()
        notes.append(f"complete ones: {canvas.number(length)} rows long on average")
        if table["has_return"] and np.isfinite(value[complete]).all():
            notes.append(f"mean return {canvas.number(value[complete].mean())}")
    if not few:
        notes.append("a cell is the mean of its rows")
    elif not table["ended"].all():
        notes.append("pale: still running")
    if not np.isfinite(value).all():
        notes.append("grey: return is not finite" if few else "some returns are not finite")
    canvas.write_title(axes, tone, title, ", ".join(notes))


def _plot_episode_bars(table: dict[str, np.ndarray], most: int, axes: Axes) -> Any:
    """Plots a bar for each episode in a line for its environment; returns the scale of colours."""
    start, stop, value = (table[name] for name in ("start", "stop", "value"))
    # Bars of short episodes have narrow gaps, so that the bars stay visible.
    gap = 0.1 if len(value) * 6 > most else min(most / 500, 0.4)
    low, high = table["env"] - 0.38, table["env"] + 0.38
    x = np.stack([start + gap, stop - gap, stop - gap, start + gap], axis=1)
    y = np.stack([low, low, high, high], axis=1)
    # Returns that are not finite are grey, running episodes pale.
    colors = canvas.color_scale(value)
    faces = colors.to_rgba(value)
    faces[~np.isfinite(value), :3] = 0.6
    faces[~table["ended"], 3] = 0.45
    corners = np.stack([x, y], axis=2)
    axes.add_collection(_collections.PolyCollection(corners, facecolors=faces, linewidths=0))
    return colors


def _plot_rewards(
    rewards: np.ndarray, stored: np.ndarray, in_time: bool, axes: Axes, tone: Tone
) -> None:
    """Plots the means of rewards `[K, E, parts]` in bins, with a band from least to greatest.

    The x-axis is time, or the slot if `in_time` is False. Rewards that are not finite are counted.
    """
    rows, envs, parts = rewards.shape
    borders = facts.edges(rows, _REWARD_BINS)
    x = borders - rows if in_time else borders
    per_bin = envs * rows / (len(borders) - 1)
    few = per_bin <= _FEW_ROWS
    for part in range(min(parts, _REWARD_LINES)):
        values = rewards[..., part]
        values = values if stored.all() else np.where(stored, values, np.nan)
        mean, low, high = facts.mean_and_bounds(values.reshape(-1), borders * envs)
        color = canvas.CYCLE[part]
        if parts == 1 and few and (low < high).any():
            axes.stairs(high, x, baseline=low, fill=True, color=color, alpha=0.22, linewidth=0)
        axes.stairs(mean, x, baseline=None, color=color, linewidth=1.3, label=f"{part}")
    axes.set(xlim=(x[0], x[-1]), xlabel="slot", ylabel="reward")
    canvas.whole_numbers(axes.xaxis, 8)
    if in_time:
        canvas.time_axis(axes)
    if parts > 1:
        canvas.add_legend(axes, tone, columns=min(parts, _REWARD_LINES))
    _write_reward_title(rewards[stored], per_bin, axes, tone)


def _write_reward_title(rewards: np.ndarray, per_bin: float, axes: Axes, tone: Tone) -> None:
    """Writes the mean of rewards `[n, parts]` and their range; a bin has `per_bin` rewards."""
    parts, values = rewards.shape[-1], rewards.reshape(-1)
    finite = values[np.isfinite(values)]
    odd = len(values) - len(finite)
    if not len(finite):
        canvas.write_title(axes, tone, "Rewards: none is finite")
        return
    if finite.min() == finite.max():
        more = f"{odd:,} others are not finite" if odd else ""
        canvas.write_title(axes, tone, f"Rewards: all {canvas.number(finite.min())}", more)
        return
    notes, zeros = [f"from {canvas.span(finite)}"], float(np.mean(finite == 0))
    if zeros:
        notes.append(f"{canvas.percent(zeros)} are 0")
    if odd:
        notes.append(f"{odd:,} are not finite")
    if parts > _REWARD_LINES:
        notes.append(f"{_REWARD_LINES} of {parts} parts are shown")
    elif parts == 1 and per_bin > 1:
        notes.append("line: mean" + ("; band: least to greatest" if per_bin <= _FEW_ROWS else ""))
    mean = canvas.number(finite.mean(dtype=np.float64))
    canvas.write_title(axes, tone, f"Rewards: {mean} on average", "; ".join(notes))


def _plot_priorities(raw: np.ndarray, axes: Axes, tone: Tone) -> None:
    """Plots the mean and the greatest of the priorities `raw`, `[N]`, in bins of slots."""
    borders, anchors = facts.edges(len(raw), _PRIORITY_BINS), raw[raw >= 0]
    mean, _, high = map(
        np.nan_to_num, facts.mean_and_bounds(np.where(raw < 0, np.nan, raw), borders)
    )
    # A bin of several slots also has a greatest priority, which the mean would hide.
    single = len(mean) == len(raw)
    if not single:
        look = {"color": canvas.SKY, "alpha": 0.45, "label": "greatest"}
        axes.stairs(high, borders, fill=True, **look)
    axes.stairs(mean, borders, fill=single, color=canvas.BLUE, linewidth=1.2, label="mean")
    axes.set(xlim=(0, len(raw)), xlabel="slot", ylabel="priority")
    axes.set_ylim(bottom=0)
    canvas.whole_numbers(axes.xaxis, 5)
    if not single:
        axes.set_ylim(top=1.22 * max(float(high.max()), 1e-30))
        canvas.add_legend(axes, tone, columns=2)
    # Say how priorities are spread, and how many slots have none to be drawn by.
    varies = anchors.min() < anchors.max()
    notes = [f"from {canvas.span(anchors)}" if varies else "all the same"]
    # Dropped anchors have the priority -2, other slots without an anchor -1.
    zeros, dropped = int((anchors == 0).sum()), int((raw < -1.5).sum())
    if zeros and varies:
        notes.append(f"{zeros:,} are 0")
    if dropped:
        notes.append(f"{dropped:,} dropped")
    mean = canvas.number(float(anchors.mean(dtype=np.float64)))
    canvas.write_title(axes, tone, f"Priorities: {mean} on average", "; ".join(notes))


def plot_priority_histogram(
    raw: np.ndarray, masses: np.ndarray, axes: Axes, tone: Tone, label: str = "priority"
) -> None:
    """Plots a histogram of anchors' priorities, and names the largest ones' share of the mass."""
    borders, is_log = facts.bins(raw)
    canvas.plot_bars(axes, borders, facts.histogram(raw, borders), canvas.BLUE)
    axes.set(xlim=(borders[0], borders[-1]), xlabel=label, ylabel="anchors")
    axes.set_yscale("log", nonpositive="clip")
    canvas.few_ticks(axes.xaxis, is_log)
    canvas.few_ticks(axes.yaxis, is_log=True)
    axes.set_ylim(bottom=0.6)
    # Compare the mass of the largest 1 % of anchors with that of all.
    total = masses.sum(dtype=np.float64)
    if not total:
        canvas.write_title(axes, tone, "No anchor has mass", "nothing can be drawn")
        return
    count = -(-len(raw) // 100)
    top = np.partition(masses, len(raw) - count)[len(raw) - count :]
    least = float(np.partition(raw, len(raw) - count)[len(raw) - count])
    title = f"The top 1 % hold {canvas.percent(top.sum(dtype=np.float64) / total)} of the mass"
    more = f"{count:,} of {canvas.count(len(raw), 'anchor')}"
    if raw.min() < raw.max():
        axes.axvline(least, color=canvas.ORANGE, linewidth=1.2, linestyle=(0, (4, 2)))
        more += f", from {canvas.number(least)} up (line)"
    canvas.write_title(axes, tone, title, more)


def _plot_draw_counts(counts: np.ndarray, axes: Axes, tone: Tone) -> None:
    """Plots a histogram of how often each item was drawn."""
    # A small range of counts gets a bin for each number.
    borders, _ = facts.bins(counts)
    if counts.max() - counts.min() < 60:
        borders = np.arange(counts.min(), counts.max() + 2) - 0.5
    canvas.plot_bars(axes, borders, facts.histogram(counts, borders), canvas.GREEN)
    axes.set(xlim=(borders[0], borders[-1]), xlabel="times drawn", ylabel="items")
    canvas.whole_numbers(axes.xaxis)
    canvas.whole_numbers(axes.yaxis, 4)
    never = canvas.percent(float(np.mean(counts == 0)))
    mean = canvas.number(float(counts.mean()))
    canvas.write_title(
        axes, tone, f"{never} of the items were never drawn", f"{mean} times on average"
    )
