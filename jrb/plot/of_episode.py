"""The picture of one episode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import episode_ends
from jrb._util import checks, pytree
from jrb.buffer import ReplayBuffer
from jrb.keys import path_name, within
from jrb.plot import canvas, facts, images, words
from jrb.plot.canvas import Axes, Row, Tone
from jrb.plot.facts import Rows, Spans
from jrb.state import BufferState

_POINTS, _FRAMES, _PARTS = 2000, 12, 8


def episode(buffer: ReplayBuffer, state: BufferState, k: int, ax: Axes | None = None) -> Any:
    """Shows one episode: its rewards and their sum, actions, observations, and priorities.

    Observations that are images are shown as a film strip, at most 12 of them; those of up to 8
    numbers as lines. Of an episode of more than 2,000 rows, rows between are left out.

    Args:
        buffer: the description, with a writer that keeps the order of time.
        state: is only read.
        k: which one, as in `jrb.episodes(buffer, state)[k]`; -1 is the one that began last.
        ax: an axes of matplotlib in whose place the picture is drawn; None for a new figure.

    Returns:
        The figure.

    Raises:
        TypeError: as `jrb.plot.state`; a `k` that is no integer.
        ValueError: as `jrb.plot.state`; items without flags, a writer without an order of time, or
            fewer episodes.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9)
        >>> items = {"next": {"reward": jnp.ones(6), "done": jnp.arange(6) % 3 == 2}}
        >>> empty = buffer.init({"next": {"reward": 0.0, "done": False}})
        >>> figure = jrb.plot.episode(buffer, buffer.extend(empty, items), 0)
        >>> figure.axes[0].get_title(loc="left")
        'Episode 0 of 2: 3 rows, return 3'
    """
    facts.check(buffer, state, "plot.episode")
    _check(buffer, state, k)
    found = facts.rows(buffer, state)
    spans = facts.spans(buffer, found)
    many = 0 if spans is None else len(spans.env)
    if spans is None or not -many <= k < many:
        raise ValueError(
            f"plot.episode: k: expected from {-many} to {many - 1}, got {k}."
            if many
            else f"plot.episode: k: expected an episode that is held, got {k} of none. Add items "
            "first."
        )
    return canvas.drawn(_rows(buffer, state, found, spans, k % many), ax, "plot.episode")


def _check(buffer: ReplayBuffer, state: BufferState, k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise TypeError(f"plot.episode: k: expected an integer, got {k!r}.")
    checks.chronological("plot.episode", buffer.writer)
    if buffer.storage.of_objects:
        raise ValueError(
            "plot.episode: expected items of arrays, got objects, whose flags nobody knows."
        )
    episode_ends.check(buffer.storage.spec(state.storage), buffer.keys)


def _rows(buffer: ReplayBuffer, state: BufferState, found: Rows, spans: Spans, k: int) -> list[Row]:
    at = spans.order()[k]
    env, start, stop = (int(part[at]) for part in (spans.env, spans.start, spans.stop))
    rows = np.linspace(0, stop - start - 1, min(stop - start, _POINTS)).astype(int)
    slots = _slots(buffer, found, env, start + rows)
    heading = _words(buffer, spans, int(at), k)
    panels = [
        Row(0.5, [lambda axes, tone: canvas.heading(axes, tone, heading[0], heading[1])], around=0)
    ]
    add = lambda height, draw: panels.append(Row(height, [_along(draw, stop - start)]))
    if found.rewards is not None and found.rewards.size:
        paid = found.rewards[start:stop, env].reshape(stop - start, -1)
        add(1.9, lambda *on: _rewards(paid, *on))
    named = _read(buffer, state, slots)
    for role in ("action", "observation"):
        for name, values in _of_role(buffer, role, named):
            add(1.6, functools.partial(_lines, rows, values, name))
    if buffer.sampler.prioritized:
        raw = np.asarray(buffer.priorities(state, jnp.asarray(slots)))
        raw = np.where(raw < 0, np.nan, raw)[:, None]
        add(1.5, functools.partial(_lines, rows, raw, "priority"))
    return panels + _film(buffer, state, found, env, start, stop)


def _slots(buffer: ReplayBuffer, found: Rows, env: int, rows: np.ndarray) -> np.ndarray:
    """The slots of rows of K of one environment, int32."""
    back = int(found.counts.max()) - 1 - rows
    return ((int(found.newest[env]) - back * buffer.ring.envs) % buffer.capacity).astype(np.int32)


def _words(buffer: ReplayBuffer, spans: Spans, at: int, k: int) -> tuple[str, str]:
    length = words.count(int(spans.stop[at] - spans.start[at]), "row")
    title = f"Episode {k:,} of {len(spans.env):,}: {length}"
    if spans.returns is not None:
        title += f", return {words.number(float(spans.returns[at]))}"
    told = [f"environment {int(spans.env[at]):,}"] if buffer.ring.envs > 1 else []
    told.append("has ended" if spans.ended[at] else "still running")
    if spans.cut[at]:
        told.append("its first rows may have been overwritten")
    return title, "; ".join(told)


def _along(draw: canvas.Draw, length: int) -> canvas.Draw:
    """The same panel, along the rows of the episode."""

    def drawn(axes: Axes, tone: Tone) -> None:
        draw(axes, tone)
        axes.set_xlim(-0.5, max(length - 0.5, 0.5))
        canvas.whole_numbers(axes.xaxis, 10)

    return drawn


def _rewards(paid: np.ndarray, axes: Axes, tone: Tone) -> None:
    """Rewards as bars, and their running sum as a line."""
    rows = np.arange(len(paid))
    canvas.label(axes, "row of the episode", "reward")
    if paid.shape[1] > 1:
        _lines(rows, paid, "reward", axes, tone)
        return
    axes.vlines(rows, 0, paid[:, 0], color=canvas.BLUE, linewidth=max(0.8, min(4, 300 / len(paid))))
    axes.axhline(0, color=tone.line, linewidth=0.8)
    with np.errstate(invalid="ignore"):
        total = np.cumsum(paid[:, 0], dtype=np.float64)
    other = axes.twinx()
    canvas.style(other, tone)
    other.step(rows, total, where="post", color=canvas.ORANGE, linewidth=1.4)
    other.set_ylabel("sum so far", color=canvas.ORANGE)
    axes.yaxis.label.set_color(canvas.BLUE)
    canvas.say(axes, tone, "Rewards, and their sum so far")


def _lines(rows: np.ndarray, values: np.ndarray, name: str, axes: Axes, tone: Tone) -> None:
    """A line for each of a few numbers; dots for integers."""
    exact = values.dtype.kind in "biu"
    for part in range(values.shape[1]):
        color = canvas.CYCLE[part % len(canvas.CYCLE)]
        if exact:
            look = {"linestyle": "", "marker": "o", "markersize": 3.2, "markeredgewidth": 0}
        else:
            look = {"linewidth": 1.2, "marker": "o" if len(rows) == 1 else ""}
        axes.plot(rows, values[:, part], color=color, label=f"{part}", **look)
    if exact:
        canvas.whole_numbers(axes.yaxis, 4)
    if values.shape[1] > 1:
        canvas.legend_right(axes, tone)
    canvas.label(axes, "row of the episode", name)


def _of_role(
    buffer: ReplayBuffer, role: str, named: dict[str, np.ndarray]
) -> list[tuple[str, np.ndarray]]:
    """The leaves of a role that are a few numbers each, `[L, parts]`, by how they are shown."""
    path, found = path_name(getattr(buffer.keys, role)), []
    for name, values in named.items():
        if within(name, path):
            found.append((words.leaf(name), values.reshape(len(values), -1)))
    return found[:3]


def _read(buffer: ReplayBuffer, state: BufferState, slots: np.ndarray) -> dict[str, np.ndarray]:
    """Of actions and observations, the leaves of a few real numbers, `[L, ...]`."""
    spec = buffer.stored(state)
    small = {
        pytree.leaf_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec)
        if facts.is_real(leaf.dtype) and leaf.size and leaf.size <= _PARTS
    }
    roles = [path_name(buffer.keys.action), path_name(buffer.keys.observation)]
    names = {name for name in small if any(within(name, role) for role in roles)}
    return facts.leaves(buffer, state, slots, names)


def _film(
    buffer: ReplayBuffer, state: BufferState, found: Rows, env: int, start: int, stop: int
) -> list[Row]:
    """Some of the images."""
    spec = jax.tree_util.tree_leaves_with_path(buffer.stored(state))
    image = images.found({pytree.leaf_name(path): leaf for path, leaf in spec}, 0)
    if image is None:
        return []
    name, kind = image
    few = min(stop - start, _FRAMES)
    rows = np.linspace(0, stop - start - 1, few).astype(int)
    slots = _slots(buffer, found, env, start + rows)
    values = facts.leaves(buffer, state, slots, {name})[name]
    pictures, told = images.colored(kind.frames(values, 1)[:, -1])
    sheet = images.tiles(pictures[None], np.ones((1, few)))
    shown = "all rows" if few == stop - start else f"{few} of {stop - start:,} rows, evenly apart"
    return [images.row(sheet, f"{words.leaf(name)}: {shown}", told)]
