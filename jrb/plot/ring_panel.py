"""Panel: which slots hold something, and how old it is."""

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core.steps import context_of
from jrb.buffer import ReplayBuffer
from jrb.plot import canvas, facts, words
from jrb.plot.canvas import Axes, Tone
from jrb.state import Buffer, BufferState
from jrb.writers.ranked import OneByOne

_COLUMNS, _LANES = 1000, 48


def height(buffer: ReplayBuffer) -> float:
    """Inches."""
    return 1.45 + (min(buffer.ring.envs, _LANES) / 30 if buffer.writer.per_env else 0)


def draw(buffer: ReplayBuffer, state: BufferState, axes: Axes, tone: Tone) -> None:
    """A strip of the ring, or of each environment's own; dark is new, and pale is old."""
    borders, lanes, ages = _ages(buffer, state)
    most = np.nanmax(ages)
    axes.set_facecolor(tone.line + "55")
    drawn = axes.pcolormesh(
        borders,
        np.arange(len(lanes) + 1) - 0.5,
        np.ma.masked_invalid(ages),
        cmap=canvas.AGES,
        vmin=0,
        vmax=max(most, 1),
    )
    axes.set(xlim=(0, borders[-1]), ylim=(len(lanes) - 0.5, -0.5))
    axes.spines[:].set_visible(False)
    canvas.whole_numbers(axes.xaxis, 8)
    unit = "rows" if buffer.writer.is_chronological else "items"
    tall = len(lanes) > 1
    canvas.scale(axes, tone, drawn, f"age ({unit})" if tall else "age", whole=True, tall=tall)
    _label(buffer, lanes, axes)
    canvas.say(axes, tone, _title(buffer, state), _more(buffer, state, axes))


def _label(buffer: ReplayBuffer, lanes: np.ndarray, axes: Axes) -> None:
    envs, is_chronological = buffer.ring.envs, buffer.writer.is_chronological
    of = (
        f" of the ring ({envs:,} environments each)"
        if is_chronological and envs > 1
        else " of the ring"
    )
    canvas.label(axes, ("row" if is_chronological and envs > 1 else "slot") + of)
    if len(lanes) == 1:
        axes.set_yticks([])
        return
    shown = np.unique(np.linspace(0, len(lanes) - 1, min(len(lanes), 5)).astype(int))
    axes.set_yticks(shown, [f"{lanes[place]:,}" for place in shown])
    axes.set_ylabel("environment")


def _title(buffer: ReplayBuffer, state: BufferState) -> str:
    size = int(buffer.size(state))
    share = words.percent(size / buffer.capacity)
    return f"Holds {words.count(size, 'item')} in {buffer.capacity:,} slots ({share})"


def _more(buffer: ReplayBuffer, state: BufferState, axes: Axes) -> str:
    """What else is to be said of it; the place of the next write is marked."""
    told, ring = [], buffer.ring
    cursor, rows, size, anchors = jax.device_get(_facts(buffer, state.replace(storage=None)))
    if buffer.writer.is_chronological and not buffer.writer.per_env:
        row = int(cursor[0]) % ring.rows
        x = row + 0.5 if ring.rows <= _COLUMNS else row
        where = axes.get_xaxis_transform()
        axes.plot([x], [0], "^", color=canvas.ORANGE, markersize=6, clip_on=False, transform=where)
        told.append(f"the next write goes to {'row' if ring.envs > 1 else 'slot'} {row:,}")
    elif buffer.writer.per_env:
        told.append(f"environments hold {rows.min():,} to {rows.max():,} rows")
    if anchors != size:
        told.append(words.count(int(anchors), "anchor") + " can be drawn")
    return "; ".join(told)


@jax.jit
def _facts(buffer: Buffer, state: BufferState) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rows that are written next, how many are held, of how many items, and the anchors."""
    held = buffer.writer.held(buffer.ring, state.writer)
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    return held.next_row(buffer.ring), held.rows(buffer.ring), held.size, anchors.count


def _ages(buffer: ReplayBuffer, state: BufferState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Borders of columns, environments, and ages `[lanes, columns]`; NaN where nothing is."""
    if buffer.writer.is_chronological:
        return _ages_of_rows(buffer, state)
    borders = facts.edges(buffer.capacity, _COLUMNS)
    since = _since(buffer, state)
    known = np.append(since, 0.0)
    inside = np.minimum(borders, len(since))
    sums = np.add.reduceat(known, inside)[:-1]
    count = np.diff(inside)
    mean = np.where(count > 0, sums / np.maximum(count, 1), np.nan)
    return borders, np.zeros(1, np.int64), mean[None]


def _ages_of_rows(
    buffer: ReplayBuffer, state: BufferState
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same by the row in the middle of each column."""
    ring = buffer.ring
    borders, lanes = facts.edges(ring.rows, _COLUMNS), np.zeros(1, np.int64)
    if buffer.writer.per_env:
        lanes = facts.edges(ring.envs, _LANES)[:-1]
    slots = (borders[:-1] + np.diff(borders) // 2) * ring.envs + lanes[:, None]
    light = state.replace(storage=None)
    after, holds = jax.device_get(_after(buffer, light, jnp.asarray(slots, jnp.int32)))
    return borders, lanes, np.where(holds, after, np.nan)


@jax.jit
def _after(buffer: Buffer, state: BufferState, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many rows came after each slot, and whether it is held."""
    held = buffer.writer.held(buffer.ring, state.writer)
    return held.after(buffer.ring, slots), held.holds(buffer.ring, slots)


def _since(buffer: ReplayBuffer, state: BufferState) -> np.ndarray:
    """How many items came after each, float64 `[K]` in the order of slots."""
    size, writer = int(buffer.size(state)), buffer.writer.writable()
    if isinstance(writer, OneByOne):
        numbers = np.asarray(state.writer.stamps)[:size]
        return (np.asarray(state.writer.number) - np.uint32(1) - numbers).astype(np.float64)
    slots = np.asarray(buffer.in_order(state)[0])[:size]
    found = np.empty(buffer.capacity)
    found[slots] = np.arange(size)[::-1]
    return found[np.sort(slots)]
