"""The picture of what was drawn."""

from typing import Any

import jax
import numpy as np

from jrb._util import pytree
from jrb.plot import binned, canvas, facts, images, words
from jrb.plot.canvas import Axes, Row, Tone
from jrb.state import Sample

_SHEET, _ACROSS, _STRIPS, _LONG = 32, 16, 6, 16
_ROWS = 64


def sample(batch: Sample, ax: Axes | None = None) -> Any:
    """Shows a batch: where the draws fell, their weights, which entries are real, and images.

    Images among the data are shown as a contact sheet, of a unit of windows or stacks as film
    strips, oldest frame first; entries that are masked are pale. An image is a leaf of two large
    axes, perhaps with up to 16 channels behind them, or three before, and frames before all.

    Args:
        batch: what `sample` or `draw` of a buffer or a `jrb.Mix` gave. B draws.
        ax: an axes of matplotlib in whose place the picture is drawn; None for a new figure.

    Returns:
        The figure.

    Raises:
        TypeError: no `Sample`, or one inside `jit`; an `ax` that is no axes.
        ValueError: several batches, as from `scan` or `vmap`.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9, batch_size=100)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(9)})
        >>> figure = jrb.plot.sample(buffer.sample(state, jax.random.key(0)))
        >>> figure.axes[0].get_title(loc="left")
        '100 draws of 9 slots'
    """
    _check(batch)
    real = np.asarray(batch.mask)
    drawn = np.asarray(real.reshape(len(real), -1).any(axis=1))
    if not drawn.any():
        more = f"all {words.count(len(real), 'entry', 'entries')} of the batch are masked"
        return canvas.drawn(canvas.note("Nothing was drawn", more), ax, "plot.sample")
    rows = [_first(batch, drawn)]
    if real.ndim > 1:
        rows.append(_windows(batch, real))
    rows += _images(batch, real)
    return canvas.drawn(rows, ax, "plot.sample")


def _check(batch: Sample) -> None:
    if not isinstance(batch, Sample):
        raise TypeError(
            f"plot.sample: batch: expected a Sample, got {type(batch).__name__}. Pass what "
            "buffer.sample returns, or the second of what buffer.draw does."
        )
    facts.check_known(batch, "plot.sample: batch")
    if batch.indices.ndim != 1:
        raise ValueError(
            f"plot.sample: batch: expected a single batch, of indices (B,), got "
            f"{batch.indices.shape}. Pick one with jax.tree.map(lambda x: x[0], batch)."
        )


def _first(batch: Sample, drawn: np.ndarray) -> Row:
    slots = np.asarray(batch.indices)
    source = batch.info.get("source")
    source = np.zeros(len(slots), np.int64) if source is None else np.asarray(source)
    where = lambda *at: _where(slots[drawn], source[drawn], batch, drawn, *at)
    weights = np.asarray(batch.weights)[drawn]
    if (weights == 1).all():
        return Row(2.2, [where])
    chances = np.asarray(batch.probabilities)[drawn]
    return Row(2.3, [where, lambda *at: _weights(weights, chances, *at)], (1.5, 1))


def _where(
    slots: np.ndarray,
    source: np.ndarray,
    batch: Sample,
    drawn: np.ndarray,
    axes: Axes,
    tone: Tone,
) -> None:
    """How many draws fell to which slots, for each buffer of a mix."""
    most = int(slots.max()) + 1
    borders, base = facts.even(most, 60).astype(np.float64), 0
    kinds = np.unique(source)
    for number in kinds:
        counts = binned.histogram(slots[source == number], borders)
        color = canvas.CYCLE[int(number) % len(canvas.CYCLE)]
        canvas.bars(axes, borders, counts, color, bottom=base, label=f"buffer {number}")
        base = base + counts
    axes.set_xlim(0, most)
    if len(kinds) > 1:
        axes.set_ylim(top=1.25 * np.max(base))
        canvas.legend(axes, tone, columns=len(kinds))
    canvas.whole_numbers(axes.xaxis)
    canvas.whole_numbers(axes.yaxis, 4)
    canvas.label(axes, "slot", "draws")
    distinct = len(np.unique(np.stack([source, slots]), axis=1).T)
    title = f"{words.count(len(slots), 'draw')} of {words.count(distinct, 'slot')}"
    canvas.say(axes, tone, title, _told(batch, drawn))


def _told(batch: Sample, drawn: np.ndarray) -> str:
    """What else a batch says of its draws, in a few words."""
    told = [] if drawn.all() else [f"{(~drawn).sum():,} masked"]
    for name, leaf in batch.info.items():
        if name == "source" or np.shape(leaf) != drawn.shape:
            continue
        values = np.asarray(leaf)[drawn]
        if values.dtype == np.bool_:
            told.append(f"{name}: {words.percent(float(values.mean()))}")
        elif values.dtype.kind in "iuf":
            low, high = words.number(float(values.min())), words.number(float(values.max()))
            told.append(f"{name}: {low}" + ("" if low == high else f" to {high}"))
    return "; ".join(told[:3])


def _weights(weights: np.ndarray, chances: np.ndarray, axes: Axes, tone: Tone) -> None:
    """Weights against the probabilities that they undo."""
    axes.plot(chances, weights, "o", color=canvas.BLUE, alpha=0.5, markersize=4, markeredgewidth=0)
    top = float(weights.max(initial=0, where=np.isfinite(weights)))
    axes.set_ylim(0, 1.08 * top or 1)
    if chances.min() > 0 and chances.max() / chances.min() > 30:
        canvas.powers(axes.xaxis)
    else:
        canvas.few(axes.xaxis, 4)
    canvas.label(axes, "probability of the draw", "weight")
    low, high = words.number(float(weights.min())), words.number(float(weights.max()))
    mean = words.number(float(weights.mean()))
    canvas.say(axes, tone, f"Weights from {low} to {high}", f"{mean} on average")


def _windows(batch: Sample, real: np.ndarray) -> Row:
    """Which rows of windows are real, and where episodes begin and end."""
    shown = real[:_ROWS]
    marks = shown.astype(np.int64)
    for value, name in ((2, "is_first"), (3, "is_last")):
        flags = batch.info.get(name)
        if flags is not None and np.shape(flags) == real.shape:
            marks[np.asarray(flags)[:_ROWS]] = value

    def draw(axes: Axes, tone: Tone) -> None:
        names = {0: "masked", 1: "real", 2: "first of an episode", 3: "last of an episode"}
        colors = {0: tone.line, 1: canvas.SKY, 2: canvas.GREEN, 3: canvas.ORANGE}
        look = canvas.palette([colors[value] for value in range(4)])
        x, y = np.arange(marks.shape[1] + 1), np.arange(len(marks) + 1)
        axes.pcolormesh(x, y, marks, cmap=look, vmin=-0.5, vmax=3.5)
        for value in np.unique(marks):
            axes.bar([0], [0], color=colors[int(value)], label=names[int(value)])
        axes.set(xlim=(0, x[-1]), ylim=(len(marks), 0))
        axes.spines[:].set_visible(False)
        canvas.whole_numbers(axes.xaxis, 8)
        canvas.whole_numbers(axes.yaxis, 4)
        canvas.label(axes, "row of the window", "draw")
        canvas.legend_right(axes, tone)
        cut = "" if len(real) <= _ROWS else f"the first {_ROWS} of {len(real):,} draws"
        share = words.percent(float(real.mean()))
        title = f"Windows of {words.count(real.shape[1], 'row')}: {share} of the entries are real"
        canvas.say(axes, tone, title, cut)

    return Row(1.5 + len(shown) / 40, [draw])


def _images(batch: Sample, real: np.ndarray) -> list[Row]:
    named = _named(batch.data, len(real))
    lead = real.ndim
    found = images.found(named, lead)
    if found is None:
        return []
    name, kind = found
    if lead > 1:
        return [_strips(name, kind, named[name], real)]
    shown = np.asarray(named[name][:_SHEET])
    frames = kind.frames(shown, 1)
    if frames.shape[1] > 1:
        title = f"{words.leaf(name)}: stacks of {frames.shape[1]} frames, oldest first"
        few = frames[: _across(frames.shape[1]) * _STRIPS]
        there = np.broadcast_to(real[: len(few), None], few.shape[:2])
        return [_side_by_side(few, there, title, _first_of(len(few), len(real)))]
    return [_contacts(name, frames[:, 0], real)]


def _first_of(shown: int, whole: int) -> str:
    return words.count(whole, "draw") if shown == whole else f"{shown} of {whole:,} draws"


def _contacts(name: str, frames: np.ndarray, real: np.ndarray) -> Row:
    """Draws side by side."""
    across = min(_ACROSS, len(frames))
    lines = len(frames) // across
    frames = frames[: across * lines]
    shape = (lines, across, *frames.shape[1:])
    there = np.where(real[: len(frames)].reshape(lines, across), 1.0, images.PALE)
    title = f"{words.leaf(name)}: {_first_of(len(frames), len(real))}"
    return _sheet(frames.reshape(shape), there, title, "")


def _strips(name: str, kind: images.Kind, leaf: Any, real: np.ndarray) -> Row:
    """A line for each of some windows."""
    length = real.shape[1]
    at = np.unique(np.linspace(0, length - 1, min(length, _LONG)).astype(int))
    few = min(len(real), _across(len(at)) * _STRIPS)
    frames = kind.frames(np.asarray(leaf[:few][:, at]), 2)[:, :, -1]
    title = f"{words.leaf(name)}: {_first_of(few, len(real))}"
    more = "oldest first" if len(at) == length else f"{len(at)} of {length} rows, oldest first"
    pale = "" if real[:few][:, at].all() else "; masked ones are pale"
    return _side_by_side(frames, real[:few][:, at], title, more + pale)


def _across(length: int) -> int:
    """How many strips of so many frames stand side by side."""
    return max(1, (_ACROSS + 1) // (length + 1))


def _side_by_side(frames: np.ndarray, real: np.ndarray, title: str, more: str) -> Row:
    """Strips `[few, K, H, W, C]` below each other, and again beside these where there is room."""
    pictures, told = images.colored(frames)
    shown = np.where(real, 1.0, images.PALE)
    lines = -(-len(frames) // min(_across(frames.shape[1]), len(frames)))
    parts = range(0, len(frames), lines)
    sheets = [images.tiles(pictures[at : at + lines], shown[at : at + lines]) for at in parts]
    return images.row(images.beside(sheets), title, "; ".join(filter(None, [more, told])))


def _sheet(frames: np.ndarray, shown: np.ndarray, title: str, more: str) -> Row:
    """Frames `[rows, columns, H, W, C]`, of these opacities, `[rows, columns]`."""
    pictures, told = images.colored(frames)
    return images.row(images.tiles(pictures, shown), title, "; ".join(filter(None, [more, told])))


def _named(data: Any, size: int) -> dict[str, Any]:
    """The leaves that have an entry for each draw, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(data)
    named = {pytree.leaf_name(path): leaf for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if np.shape(leaf)[:1] == (size,)}
