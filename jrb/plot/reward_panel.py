"""Panel: rewards, from the oldest row to the newest."""

from typing import Any

import numpy as np

from jrb.plot import binned, canvas, facts, words
from jrb.plot.canvas import Tone

_BINS, _LINES = 400, 6


def draw(
    rewards: np.ndarray, held: np.ndarray | None, in_time: bool, axes: Any, tone: Tone
) -> None:
    """Means, and from the least to the greatest of as many rows as share a place.

    Args:
        rewards: real `[K, E, ...]`, K at least 1.
        held: bool `[K, E]`; None for all.
        in_time: whether rows are in the order of time; else slots are along the axis.
        axes: of matplotlib.
        tone: of the panel.
    """
    rows = len(rewards)
    flat = rewards.reshape(*rewards.shape[:2], -1)
    borders = facts.edges(rows, _BINS)
    x = borders - rows if in_time else borders
    parts = flat.shape[2]
    shown = min(parts, _LINES)
    for part in range(shown):
        mean, low, high = binned.mean_and_bounds(flat[..., part], borders, held)
        color = canvas.CYCLE[part]
        if parts == 1 and (low < high).any():
            axes.stairs(high, x, baseline=low, fill=True, color=color, alpha=0.22, linewidth=0)
        axes.stairs(mean, x, baseline=None, color=color, linewidth=1.3, label=f"{part}")
    axes.set_xlim(x[0], x[-1])
    canvas.whole_numbers(axes.xaxis, 8)
    if in_time:
        axes.xaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
    canvas.label(axes, "rows of time before the newest" if in_time else "slot", "reward")
    if parts > 1:
        canvas.legend(axes, tone, columns=shown)
    values = flat if held is None else flat[held]
    several = len(borders) - 1 < rewards.shape[0] * rewards.shape[1]
    canvas.say(axes, tone, *_words(values, parts, several))


def _words(values: np.ndarray, parts: int, several: bool) -> tuple[str, str]:
    mean, low, high = values.mean(dtype=np.float64), values.min(), values.max()
    title = f"Rewards: {words.number(mean)} on average"
    if low == high:
        return f"Rewards: all {words.number(low)}", ""
    told = [f"from {words.number(low)} to {words.number(high)}"]
    none = float(np.mean(values == 0))
    if none:
        told.append(f"{words.percent(none)} are 0")
    if parts > _LINES:
        told.append(f"{_LINES} of {parts} parts are shown")
    elif parts == 1 and several:
        told.append("line: mean; band: least to greatest")
    return title, "; ".join(told)
