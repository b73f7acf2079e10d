"""The plot of a batch."""

from typing import Any

import numpy as np

from jrb._core.steps import has_item
from jrb.plot import canvas, facts
from jrb.plot.canvas import Axes, Row, Tone
from jrb.state import Sample

_IMAGES, _ACROSS, _STRIPS, _LONG, _ROWS = 32, 16, 6, 16, 64


def sample(batch: Sample, ax: Axes | None = None) -> Any:
    """Plots a batch: the drawn slots, the weights, which entries are real, and canvas.

    Single images are tiled as a contact sheet, those of windows or stacks as film strips with the
    oldest frame first; masked entries are pale. A leaf is an image if it has two axes of length 5
    or more, optionally with up to 16 channels after them or 3 before them, and frames first.

    Args:
        batch: the `Sample` that a buffer or a `jrb.Mix` returned.
        ax: the matplotlib axes to replace by the plot; None for a new figure.

    Returns:
        The figure.

    Raises:
        TypeError: `batch` is no `Sample`, or is traced by `jit`; or `ax` is no axes.
        ValueError: `batch` has several batches, as from `scan` or `vmap`.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9, batch_size=100)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(9)})
        >>> figure = jrb.plot.sample(buffer.sample(state, jax.random.key(0)))
        >>> figure.axes[0].get_title(loc="left")
        '100 draws of 9 slots'
    """
    if not isinstance(batch, Sample):
        raise TypeError(
            f"plot.sample: batch: expected a Sample, got {type(batch).__name__}. Pass what "
            "buffer.sample returns, or the second of what buffer.draw does."
        )
    facts.check_concrete(batch, "plot.sample: batch")
    # Packed rows have several anchors each.
    is_packed = batch.indices.ndim == batch.mask.ndim == 2 and "segment" in batch.info
    if batch.indices.ndim != 1 and not is_packed:
        raise ValueError(
            f"plot.sample: batch: expected a single batch, of indices (B,), got "
            f"{batch.indices.shape}. Pick one with jax.tree.map(lambda x: x[0], batch)."
        )
    real = np.asarray(batch.mask)
    drawn = np.asarray(has_item(batch))
    if not drawn.any():
        more = f"all {canvas.count(len(real), 'entry', 'entries')} of the batch are masked"
        return canvas.draw_text("Nothing was drawn", more, ax, "plot.sample")
    rows = [Row(2.2, [lambda *at: _plot_slots(batch, drawn, *at)])]
    if (np.asarray(batch.weights)[drawn] != 1).any():
        weights = lambda *at: _plot_weights(batch, drawn, *at)
        rows = [Row(2.3, [rows[0].panels[0], weights], (1.5, 1))]
    if real.ndim > 1:
        lines = min(len(real), _ROWS)
        rows.append(Row(1.5 + lines / 40, [lambda *at: _plot_windows(batch, real, *at)]))
    rows += _image_rows(batch, real)
    return canvas.draw_rows(rows, ax, "plot.sample")


def _plot_slots(batch: Sample, drawn: np.ndarray, axes: Axes, tone: Tone) -> None:
    """Plots the number of draws by slot, for each buffer of a mix."""
    slots = np.asarray(batch.indices)[drawn]
    source = np.asarray(batch.info.get("source", np.zeros(len(drawn), np.int64)))
    source = np.broadcast_to(source.reshape(-1, *(1,) * (drawn.ndim - 1)), drawn.shape)[drawn]
    # Stack the bars of the buffers.
    most, buffers = int(slots.max()) + 1, np.unique(source)
    borders, base = facts.even_edges(most, 60).astype(np.float64), np.zeros(1)
    for number in buffers:
        counts = facts.histogram(slots[source == number], borders)
        color = canvas.CYCLE[int(number) % len(canvas.CYCLE)]
        canvas.plot_bars(axes, borders, counts, color, bottom=base, label=f"buffer {number}")
        base = base + counts
    axes.set(xlim=(0, most), xlabel="slot", ylabel="draws")
    if len(buffers) > 1:
        axes.set_ylim(top=1.25 * base.max())
        canvas.add_legend(axes, tone, columns=len(buffers))
    canvas.whole_numbers(axes.xaxis)
    canvas.whole_numbers(axes.yaxis, 4)
    # Sum up arrays of the unit and the sampler that have a number for each draw.
    notes = [] if drawn.all() else [f"{(~drawn).sum():,} masked"]
    for name, leaf in batch.info.items():
        if name == "source" or np.shape(leaf) != drawn.shape:
            continue
        values = np.asarray(leaf)[drawn]
        if values.dtype == np.bool_:
            notes.append(f"{name}: {canvas.percent(float(values.mean()))}")
        elif values.dtype.kind in "iuf":
            notes.append(f"{name}: {canvas.span(values)}")
    distinct = len(np.unique(np.stack([source, slots]), axis=1).T)
    title = f"{canvas.count(len(slots), 'draw')} of {canvas.count(distinct, 'slot')}"
    canvas.write_title(axes, tone, title, "; ".join(notes[:3]))


def _plot_weights(batch: Sample, drawn: np.ndarray, axes: Axes, tone: Tone) -> None:
    """Plots weights against the probabilities of the draws."""
    weights, chances = np.asarray(batch.weights)[drawn], np.asarray(batch.probabilities)[drawn]
    axes.plot(chances, weights, "o", color=canvas.BLUE, alpha=0.5, markersize=4, markeredgewidth=0)
    top = float(weights.max(initial=0, where=np.isfinite(weights)))
    axes.set(ylim=(0, 1.08 * top or 1), xlabel="probability of the draw", ylabel="weight")
    is_log = bool(chances.min() > 0 and chances.max() / chances.min() > 30)
    canvas.few_ticks(axes.xaxis, is_log)
    low, high, mean = (canvas.number(of(weights)) for of in (np.min, np.max, np.mean))
    canvas.write_title(axes, tone, f"Weights from {low} to {high}", f"{mean} on average")


def _plot_windows(batch: Sample, real: np.ndarray, axes: Axes, tone: Tone) -> None:
    """Plots which rows of windows are real, and where episodes begin and end."""
    # Number the entries by what they are: an index of `names` and `colors`.
    marks = real[:_ROWS].astype(np.int64)
    for value, name in ((2, "is_first"), (3, "is_last")):
        flags = batch.info.get(name)
        if flags is not None and np.shape(flags) == real.shape:
            marks[np.asarray(flags)[:_ROWS]] = value
    names = ("masked", "real", "first of an episode", "last of an episode")
    colors = (tone.line, canvas.SKY, canvas.GREEN, canvas.ORANGE)
    x, y = np.arange(marks.shape[1] + 1), np.arange(len(marks) + 1)
    axes.pcolormesh(x, y, marks, cmap=canvas.palette(colors), vmin=-0.5, vmax=3.5)
    # Draw empty bars, which give the legend its entries.
    for value in np.unique(marks):
        axes.bar([0], [0], color=colors[value], label=names[value])
    axes.set(xlim=(0, x[-1]), ylim=(len(marks), 0), xlabel="row of the window", ylabel="draw")
    axes.spines[:].set_visible(False)
    canvas.whole_numbers(axes.xaxis, 8)
    canvas.whole_numbers(axes.yaxis, 4)
    canvas.add_legend(axes, tone, "beside")
    more = "" if len(real) <= _ROWS else f"the first {_ROWS} of {len(real):,} draws"
    share = canvas.percent(float(real.mean()))
    title = f"Windows of {canvas.count(real.shape[1], 'row')}: {share} of the entries are real"
    canvas.write_title(axes, tone, title, more)


def _image_rows(batch: Sample, real: np.ndarray) -> list[Row]:
    """Returns a row with a contact sheet, or with film strips; no row if there are no canvas."""
    leaves = {
        name: leaf
        for name, leaf in facts.leaves_by_name(batch.data).items()
        if np.shape(leaf)[:1] == (len(real),)
    }
    image = canvas.find_images(leaves, real.ndim)
    if image is None:
        return []
    (name, order), notes = image, []
    # Pick the frames: rows of a few windows, or images or stacks of a few draws.
    if real.ndim > 1:
        length = real.shape[1]
        at = np.unique(np.linspace(0, length - 1, min(length, _LONG)).astype(int))
        few = min(len(real), _STRIPS)
        frames = canvas.to_frames(np.asarray(leaves[name][:few][:, at]), order, 2)[:, :, -1]
        shown = real[:few][:, at]
        rows = "" if len(at) == length else f"{len(at)} of {length} rows, "
        notes = [f"{rows}oldest first", *["masked ones are pale"] * (not shown.all())]
    else:
        frames = canvas.to_frames(np.asarray(leaves[name][:_IMAGES]), order, 1)
        few = min(len(frames), _STRIPS)
        if frames.shape[1] == 1:
            few = len(frames) - len(frames) % min(_ACROSS, len(frames))
        else:
            notes = [f"stacks of {frames.shape[1]} frames, oldest first"]
        frames, shown = frames[:few], np.broadcast_to(real[:few, None], (few, frames.shape[1]))
    pictures, more = canvas.to_rgb(frames)
    opacity = np.where(shown, 1.0, canvas.PALE)
    # A contact sheet has up to 16 images in a line; film strips have a line each.
    grid = (-1, min(_ACROSS, few)) if frames.shape[1] == 1 else opacity.shape
    pictures = pictures.reshape(*grid, *pictures.shape[2:])
    sheet = canvas.tile(pictures, opacity.reshape(grid))
    whole = len(real)
    number = canvas.count(whole, "draw") if few == whole else f"{few} of {whole:,} draws"
    title = f"{canvas.leaf_label(name)}: {number}"
    return [canvas.image_row(sheet, title, "; ".join(filter(None, [*notes, more])))]
