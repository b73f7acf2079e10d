"""Panel: rewards, from the oldest row to the newest."""

import numpy as np

from jrb.plot import binned, canvas, facts, words
from jrb.plot.canvas import Axes, Tone

_BINS, _LINES, _FEW = 250, 6, 8


def draw(
    rewards: np.ndarray, held: np.ndarray | None, is_chronological: bool, axes: Axes, tone: Tone
) -> None:
    """Means, and from the least to the greatest of as many rows as share a place.

    NaN and infinite rewards are counted, and left out of all else.

    Args:
        rewards: real `[K, E, ...]`, K at least 1.
        held: bool `[K, E]`; None for all.
        is_chronological: whether rows are in the order of time; else slots are along the axis.
        axes: of matplotlib.
        tone: of the panel.
    """
    rows = len(rewards)
    flat = rewards.reshape(*rewards.shape[:2], -1)
    borders = facts.edges(rows, _BINS)
    x = borders - rows if is_chronological else borders
    parts, real = flat.shape[2], _real(flat, held)
    shown, each = min(parts, _LINES), rewards.shape[1] * rows / (len(borders) - 1)
    few = each <= _FEW
    for part in range(shown):
        mean, low, high = binned.mean_and_bounds(flat[..., part], borders, real[..., part])
        color = canvas.CYCLE[part]
        if parts == 1 and few and (low < high).any():
            axes.stairs(high, x, baseline=low, fill=True, color=color, alpha=0.22, linewidth=0)
        axes.stairs(mean, x, baseline=None, color=color, linewidth=1.3, label=f"{part}")
    axes.set_xlim(x[0], x[-1])
    if is_chronological:
        canvas.before(axes.xaxis)
    else:
        canvas.whole_numbers(axes.xaxis, 8)
    canvas.label(axes, "rows of time before the newest" if is_chronological else "slot", "reward")
    if parts > 1:
        canvas.legend(axes, tone, columns=shown)
    lines = "" if each <= 1 else "line: mean" + ("; band: least to greatest" if few else "")
    held_values = flat if held is None else flat[held]
    canvas.say(axes, tone, *_words(held_values.reshape(-1), parts, lines))


def _real(flat: np.ndarray, held: np.ndarray | None) -> np.ndarray:
    """Which rewards are held and finite, bool `[K, E, parts]`."""
    finite = np.isfinite(flat)
    return finite if held is None else finite & held[..., None]


def _words(held: np.ndarray, parts: int, lines: str) -> tuple[str, str]:
    values = held[np.isfinite(held)]
    odd = f"{len(held) - len(values):,} are not finite" if len(values) < len(held) else ""
    if not len(values):
        return "Rewards: none is finite", ""
    mean, low, high = values.mean(dtype=np.float64), values.min(), values.max()
    title = f"Rewards: {words.number(mean)} on average"
    if low == high:
        return f"Rewards: all {words.number(low)}", odd.replace("are", "others are")
    told = [f"from {words.number(low)} to {words.number(high)}"]
    none = float(np.mean(values == 0))
    if none:
        told.append(f"{words.percent(none)} are 0")
    told += [odd] if odd else []
    if parts > _LINES:
        told.append(f"{_LINES} of {parts} parts are shown")
    elif parts == 1 and lines:
        told.append(lines)
    return title, "; ".join(told)
