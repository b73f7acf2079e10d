"""Panels: priorities by slot, how they spread, and how much the largest hold."""

import numpy as np

from jrb import sum_tree
from jrb.buffer import ReplayBuffer
from jrb.plot import binned, canvas, facts, words
from jrb.plot.canvas import Axes, Tone
from jrb.samplers.prioritized import Priorities
from jrb.state import BufferState

_BINS = 400


def over_slots(raw: np.ndarray, axes: Axes, tone: Tone) -> None:
    """The mean and the greatest of the slots that share a place."""
    borders, real = facts.edges(len(raw), _BINS), raw >= 0
    mean, _, high = binned.mean_and_bounds(raw, borders, real)
    single = len(borders) - 1 == len(raw)
    if not single:
        axes.stairs(
            np.nan_to_num(high), borders, fill=True, color=canvas.SKY, alpha=0.45, label="greatest"
        )
    axes.stairs(
        np.nan_to_num(mean), borders, fill=single, color=canvas.BLUE, linewidth=1.2, label="mean"
    )
    axes.set_xlim(0, len(raw))
    axes.set_ylim(bottom=0)
    canvas.whole_numbers(axes.xaxis, 5)
    canvas.label(axes, "slot", "priority")
    if not single:
        axes.set_ylim(top=1.22 * max(float(np.nanmax(high)), 1e-30))
        canvas.legend(axes, tone, columns=2)
    known = anchors_of(raw, raw)
    title = f"Priorities: {words.number(float(known.mean(dtype=np.float64)))} on average"
    canvas.say(axes, tone, title, _bounds(raw, known))


def _bounds(raw: np.ndarray, known: np.ndarray) -> str:
    low, high = float(known.min()), float(known.max())
    told = [f"from {words.number(low)} to {words.number(high)}"] if low < high else ["all the same"]
    none, gone = int((known == 0).sum()), int((raw < -1.5).sum())
    if none and low < high:
        told.append(f"{none:,} are 0")
    if gone:
        told.append(f"{gone:,} dropped")
    return "; ".join(told)


def spread(raw: np.ndarray, masses: np.ndarray, axes: Axes, tone: Tone) -> None:
    """A histogram, and what share of the mass the largest hold; of anchors alone, `[K]`."""
    borders, geometric = binned.bins(raw)
    histogram(raw, borders, axes)
    axes.set_yscale("log", nonpositive="clip")
    if geometric:
        canvas.powers(axes.xaxis)
    else:
        canvas.few(axes.xaxis, 4)
    share, count, _ = binned.share_of_top(masses)
    least = float(np.partition(raw, len(raw) - count)[len(raw) - count])
    canvas.powers(axes.yaxis)
    axes.set_ylim(bottom=0.6)
    canvas.label(axes, "priority", "anchors")
    if not masses.sum(dtype=np.float64):
        canvas.say(axes, tone, "No anchor has mass", "all are drawn alike")
        return
    title = f"The top 1 % hold {words.percent(share)} of the mass"
    more = f"{count:,} of {words.count(len(raw), 'anchor')}"
    if raw.min() < raw.max():
        axes.axvline(least, color=canvas.ORANGE, linewidth=1.2, linestyle=(0, (4, 2)))
        more += f", from {words.number(least)} up (line)"
    canvas.say(axes, tone, title, more)


def histogram(
    values: np.ndarray, borders: np.ndarray, axes: Axes, color: str = canvas.BLUE
) -> None:
    """How many values lie in each bin."""
    canvas.bars(axes, borders, binned.histogram(values, borders), color)
    axes.set_xlim(borders[0], borders[-1])


def read(buffer: ReplayBuffer, state: BufferState) -> tuple[np.ndarray, np.ndarray]:
    """The priorities, float32 `[N]`, negative without an anchor; and what draws go by, `[K]`."""
    raw = np.asarray(buffer.priorities(state))
    if isinstance(state.sampler, Priorities):
        masses = np.asarray(sum_tree.leaf_values(state.sampler.masses))
    else:
        masses = raw
    return raw, anchors_of(raw, masses)


def anchors_of(raw: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values of those slots that are anchors; the same array where all are."""
    real = raw >= 0
    return values if real.all() else values[real]


def draws(counts: np.ndarray, axes: Axes, tone: Tone) -> None:
    """How often each item was drawn, integers `[K]`, K at least 1."""
    borders, _ = binned.bins(counts)
    if counts.max() - counts.min() < 60:
        borders = np.arange(counts.min(), counts.max() + 2) - 0.5
    histogram(counts, borders, axes, canvas.GREEN)
    canvas.whole_numbers(axes.xaxis)
    canvas.whole_numbers(axes.yaxis, 4)
    canvas.label(axes, "times drawn", "items")
    never = words.percent(float(np.mean(counts == 0)))
    mean = words.number(float(counts.mean()))
    canvas.say(axes, tone, f"{never} of the items were never drawn", f"{mean} times on average")
