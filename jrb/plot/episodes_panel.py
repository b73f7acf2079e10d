"""Panel: episodes as bars, environment by environment, the newest rows at the right."""

from typing import Any

import numpy as np

from jrb._util import extras
from jrb.plot import canvas, facts, words
from jrb.plot.canvas import Axes, Tone
from jrb.plot.facts import Rows, Spans

_collections = extras.require("matplotlib.collections", "plot")

_BARS, _LINES, _COLUMNS = 1500, 64, 400


def height(found: Rows) -> float:
    """Inches."""
    return 1.6 + min(len(found.counts), _LINES) / 28


def draw(found: Rows, spans: Spans, axes: Axes, tone: Tone) -> None:
    """A bar for each episode, coloured by its return; of very many, means."""
    most, envs = int(found.counts.max()), len(found.counts)
    by = spans.returns if spans.returns is not None else spans.stop - spans.start
    few = len(spans.env) <= _BARS and envs <= _LINES
    colors = _bars(spans, by, most, axes) if few else _means(spans, by, found, axes)
    axes.set(xlim=(-most, 0), ylim=(min(envs, _LINES) - 0.4, -0.6))
    _label(axes, envs)
    what = "length (rows)" if spans.returns is None else "return"
    canvas.scale(axes, tone, colors, what if few else f"mean {what}")
    canvas.say(axes, tone, *_words(spans, few))


def _bars(spans: Spans, by: np.ndarray, most: int, axes: Axes) -> Any:
    """One for each; those that run on, or begin before what is held, are pale at that end."""
    left, right = spans.start - most, spans.stop - most
    gap = 0.1 if len(by) * 6 > most else min(most / 500, 0.4)
    low, high = spans.env - 0.38, spans.env + 0.38
    x = np.stack([left + gap, right - gap, right - gap, left + gap], axis=1)
    y = np.stack([low, low, high, high], axis=1)
    colors = canvas.mapped(by)
    faces = colors.to_rgba(by)
    faces[~np.isfinite(by)] = canvas.rgba(canvas.GREY)
    faces[~spans.ended, 3] = 0.45
    axes.add_collection(
        _collections.PolyCollection(np.stack([x, y], axis=2), facecolors=faces, linewidths=0)
    )
    return colors


def _means(spans: Spans, by: np.ndarray, found: Rows, axes: Axes) -> Any:
    """The mean over the rows of some time and the environments of a line."""
    most, envs = int(found.counts.max()), len(found.counts)
    borders, lines = facts.edges(most, _COLUMNS), facts.edges(envs, _LINES)
    with np.errstate(over="ignore"):
        each = np.repeat(by.astype(np.float32), spans.stop - spans.start)
    dense = np.full((envs, most), np.nan, np.float32)
    if found.held is None:
        dense[:] = each.reshape(envs, most)
    else:
        dense[found.held.T] = each
    real = np.isfinite(dense)
    counts = _summed(real, borders, lines)
    means = _summed(np.where(real, dense, 0), borders, lines) / np.maximum(counts, 1)
    shown = axes.pcolormesh(
        borders - most,
        np.arange(len(lines)) - 0.5,
        np.ma.masked_array(means, counts == 0),
        norm=canvas.mapped(means[counts > 0]).norm,
        cmap=canvas.VALUES,
    )
    names = [f"{line:,}" for line in lines[:-1]]
    at = np.unique(np.linspace(0, len(names) - 1, min(len(names), 6)).astype(int))
    axes.set_yticks(at, [names[place] for place in at])
    return shown


def _summed(values: np.ndarray, columns: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Sums over parts of both axes, float64 `[lines, columns]`."""
    part = np.add.reduceat(values, columns[:-1], axis=1, dtype=np.float64)
    return np.add.reduceat(part, lines[:-1], axis=0)


def _label(axes: Axes, envs: int) -> None:
    canvas.label(axes, "rows of time before the newest", "environment" if envs > 1 else "")
    canvas.before(axes.xaxis)
    axes.spines["left"].set_visible(False)
    if envs == 1:
        axes.set_yticks([])
    elif envs <= _LINES:
        at = np.unique(np.linspace(0, envs - 1, min(envs, 6)).astype(int))
        axes.set_yticks(at, [f"{env:,}" for env in at])


def _words(spans: Spans, few: bool) -> tuple[str, str]:
    over = spans.complete
    title = f"{words.count(len(spans.env), 'episode')}, {int(over.sum()):,} complete"
    told = []
    if over.any():
        length = (spans.stop - spans.start)[over]
        told.append(f"complete ones: {words.number(length.mean())} rows long on average")
        if spans.returns is not None and np.isfinite(spans.returns[over]).all():
            told.append(f"mean return {words.number(spans.returns[over].mean())}")
    if not few:
        told.append("a cell is the mean of its rows")
    elif not spans.ended.all():
        told.append("pale: still running")
    if spans.returns is not None and not np.isfinite(spans.returns).all():
        told.append("grey: return is not finite" if few else "some returns are not finite")
    return title, ", ".join(told)
