"""Figures of rows of panels, the style of a panel, tiles of images, and numbers as text.

The colours are those of Okabe and Ito, 2008, which people with any colour vision can distinguish. A
figure has an opaque background, so that its labels are readable on any page. H height, W width, C
channels, K frames of images.
"""

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrb.authoring import require

_axes: Any = require("matplotlib.axes", "plot")
_cm: Any = require("matplotlib.cm", "plot")
_colors: Any = require("matplotlib.colors", "plot")
_figure: Any = require("matplotlib.figure", "plot")
_ticker: Any = require("matplotlib.ticker", "plot")

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, YELLOW, GREY = "#56b4e9", "#e69f00", "#999999"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY)
AGES: Any = _colors.LinearSegmentedColormap.from_list("ages", ["#0b4f7d", "#56b4e9", "#d6ecf9"])
VALUES = "cividis"

WIDTH = 9.0
"""The width of a figure, in inches."""

_LEAST, _CHANNELS, _SIDE = 5, 16, 128
_PLANES = np.array([[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in CYCLE])
PALE = 0.22
"""The opacity of masked images."""


class Tone(NamedTuple):
    """The colours of a light or dark figure."""

    ink: str  # titles
    faint: str  # labels and numbers
    line: str  # lines of axes
    ground: str  # background


_LIGHT = Tone("#1f2328", "#4d565f", "#c5ccd3", "#ffffff")
_DARK = Tone("#f0f3f6", "#b8c0c8", "#565e67", "#16181b")

Axes = Any
"""The matplotlib axes of a panel."""

Order = tuple[int | None, int, int, int | None]
"""The axes of frames, height, width and channels in one item; None for an axis that it lacks."""


class Row(NamedTuple):
    """A row of panels of a figure."""

    height: float  # inches, with titles and labels
    panels: Sequence[Callable[[Axes, Tone], None]]  # functions that draw into axes
    widths: Sequence[float] | None = None  # relative widths of the panels
    around: float = 0.85  # the inches of the height for title and labels


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


# A figure that notebooks show even if pyplot was never imported. It is made by `type` because
# pyright knows no base class: matplotlib is an extra.
Sheet: Any = type("Sheet", (_figure.Figure,), {"_repr_png_": _png, "__module__": __name__})


def draw_rows(rows: Sequence[Row], ax: Axes | None, who: str) -> Any:
    """Returns a new figure with rows of panels; or the figure of `ax`, which they replace."""
    # A single panel is a cell of the grid, whose height excludes title and labels. Several panels
    # have an inner grid, whose height includes them.
    heights = [max(row.height - row.around * (len(row.panels) == 1), 0.1) for row in rows]
    # Make a figure, or cut the cell of `ax` in the grid of its figure into rows.
    mark = "" if ax is None else f"jrb-{id(ax)}"
    if ax is None:
        size, tone = (WIDTH, sum(row.height for row in rows) + 0.25), _LIGHT
        figure = Sheet(figsize=size, layout="constrained", facecolor=tone.ground)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        grid = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    else:
        figure, spec, tone = _clear_axes(ax, mark, who)
        space = {} if figure.get_layout_engine() is not None else {"hspace": 0.9, "wspace": 0.25}
        grid = spec.subgridspec(len(rows), 1, height_ratios=heights, **space)
    # Draw the panels, and mark their axes, so that the next plot in `ax` can remove them.
    before = len(figure.axes)
    for number, row in enumerate(rows):
        cells = [grid[number]]
        if len(row.panels) > 1:
            cells = grid[number].subgridspec(1, len(row.panels), width_ratios=row.widths)
        for place, panel in enumerate(row.panels):
            axes = figure.add_subplot(cells[place])
            set_style(axes, tone)
            panel(axes, tone)
    for axes in figure.axes[before:] if mark else ():
        axes.set_gid(mark)
    return figure


def _clear_axes(ax: Axes, mark: str, who: str) -> tuple[Any, Any, Tone]:
    """Removes the previous plot in `ax`; returns its figure, the cell of its grid, and colours."""
    spec = ax.get_subplotspec() if isinstance(ax, _axes.Axes) else None
    figure = None if spec is None else ax.get_figure(root=True)
    if spec is None or figure is None:
        raise TypeError(
            f"{who}: ax: expected an axes of a figure's grid, got {type(ax).__name__}. Make "
            "one with figure.add_subplot(), or leave it out for a new figure."
        )
    for other in figure.axes:
        if other.get_gid() == mark:
            other.remove()
    ax.set_axis_off()
    # Choose the colours by the brightness of the figure's background.
    red, green, blue, opacity = _colors.to_rgba(figure.get_facecolor())
    is_dark = opacity > 0.5 and 0.3 * red + 0.6 * green + 0.1 * blue < 0.4
    return figure, spec, _DARK if is_dark else _LIGHT


def set_style(axes: Axes, tone: Tone) -> None:
    """Sets the style of a panel."""
    axes.set_facecolor("none")
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(tone.line)
    axes.tick_params(which="both", color=tone.line, labelcolor=tone.faint, labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=tone.faint, fontsize=8.5)
        # matplotlib's own formatter may write an exponent that overlaps the title.
        axis.set_major_formatter(_ticker.FuncFormatter(_plain_number))


# Lambdas in place of this function could not be pickled with the figure.
def _plain_number(value: float, _: int | None = None, absolute: bool = False) -> str:
    return f"{abs(value) if absolute else value:,.10g}"


def write_title(axes: Axes, tone: Tone, title: str, more: str = "") -> None:
    """Sets a title and a line below it, which do not affect the width of the panel."""
    axes.set_title(title, loc="left", fontsize=10, color=tone.ink, pad=19 if more else 7)
    if more:
        place = {"xycoords": "axes fraction", "textcoords": "offset points"}
        line = axes.annotate(more, (0, 1), (0, 6), fontsize=8.5, color=tone.faint, **place)
        line.set_in_layout(False)


def whole_numbers(axis: Any, most: int = 6) -> None:
    """Puts ticks at integers, with commas between thousands."""
    axis.set_major_locator(_ticker.MaxNLocator(most, integer=True))
    axis.set_major_formatter(_ticker.StrMethodFormatter("{x:,.0f}"))


def time_axis(axes: Axes) -> None:
    """Labels the x-axis, which has rows up to 0, with the number of time steps before the end."""
    axes.set_xlabel("time steps before the newest")
    whole_numbers(axes.xaxis, 8)
    axes.xaxis.set_major_formatter(
        _ticker.FuncFormatter(functools.partial(_plain_number, absolute=True))
    )


def few_ticks(axis: Any, is_log: bool = False) -> None:
    """Puts few ticks at plain numbers; if `is_log`, makes the axis logarithmic first."""
    axis.set_major_locator(_ticker.MaxNLocator(4))
    if is_log:
        # Put ticks at powers of 10; below two decades also at 2 and 5 times them.
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        low, high = axis.get_view_interval()
        steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
        axis.set_major_locator(_ticker.LogLocator(subs=steps, numticks=6))
        axis.set_minor_locator(_ticker.NullLocator())
        axis.set_major_formatter(_ticker.FuncFormatter(_plain_number))


def add_color_bar(axes: Axes, tone: Tone, colors: Any, name: str, ticks: int = 3) -> None:
    """Adds a colour bar to the right of a panel."""
    place = axes.inset_axes((1.012, 0, 0.012, 1))
    bar = axes.get_figure(root=True).colorbar(colors, cax=place)
    bar.outline.set_visible(False)
    bar.locator = _ticker.MaxNLocator(ticks)
    bar.update_ticks()
    place.tick_params(color=tone.line, labelcolor=tone.faint, labelsize=8)
    place.set_ylabel(name, color=tone.faint, fontsize=8.5)
    if np.max(np.abs(colors.get_clim())) >= 1000:
        place.yaxis.set_major_formatter(_ticker.StrMethodFormatter("{x:,.0f}"))


def add_legend(axes: Axes, tone: Tone, place: str = "upper right", columns: int = 1) -> None:
    """Adds a legend; `place` "beside" puts it to the right of the panel instead of inside."""
    look: dict[str, Any] = {"fontsize": 8, "labelcolor": tone.faint, "frameon": False}
    if place == "beside":
        look |= {"bbox_to_anchor": (1.005, 1), "handlelength": 1.2}
        place, columns = "upper left", 1
    names = axes.legend(loc=place, ncols=columns, borderaxespad=0.2, **look)
    names.set_in_layout("bbox_to_anchor" in look)


def draw_text(title: str, more: str, ax: Axes | None, who: str) -> Any:
    """Returns a figure that only has text, for a buffer or batch without items; see `draw_rows`."""

    def draw(axes: Axes, tone: Tone) -> None:
        axes.set_axis_off()
        axes.text(0.5, 0.62, title, ha="center", fontsize=12, color=tone.ink)
        axes.text(0.5, 0.36, more, ha="center", fontsize=9, color=tone.faint)

    return draw_rows([Row(1.4, [draw], around=0)], ax, who)


def color_scale(values: np.ndarray) -> Any:
    """Returns a colour map scaled from the least to the greatest finite value."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    # Equal values would be a scale without length.
    norm = _colors.Normalize(low, high if high > low else low + max(1.0, abs(low)))
    colors = _cm.ScalarMappable(norm, VALUES)
    colors.set_array(values)
    return colors


palette: Any = _colors.ListedColormap
"""Makes a colour map from a list of colours, one for each category."""


def plot_bars(
    axes: Axes, borders: np.ndarray, heights: np.ndarray, color: str, **look: Any
) -> None:
    """Draws bars without gaps."""
    widths = np.diff(borders)
    axes.bar(borders[:-1], heights, widths, align="edge", color=color, linewidth=0, **look)


# Leaves that are images.


def axes_order(shape: tuple[int, ...]) -> Order | None:
    """Returns the axes of an image with this shape; None if the shape is no image's.

    Images are `(H, W)`, `(H, W, C)`, `(C, H, W)` with C = 3, `(K, H, W)`, `(K, H, W, C)`, and
    `(K, C, H, W)` with C = 1 or 3. C is at most 16, H and W at least 5. The first form that fits
    counts.
    """
    wide = [length >= _LEAST for length in shape]
    if len(shape) == 2 and all(wide):
        return None, 0, 1, None
    if len(shape) == 3 and wide[0] and wide[1] and shape[2] <= _CHANNELS:
        return None, 0, 1, 2
    if len(shape) == 3 and wide[1] and wide[2]:
        return (None, 1, 2, 0) if shape[0] == 3 else (0, 1, 2, None)
    if len(shape) == 4 and wide[1] and wide[2] and shape[3] <= _CHANNELS:
        return 0, 1, 2, 3
    if len(shape) == 4 and wide[2] and wide[3] and shape[1] in (1, 3):
        return 0, 2, 3, 1
    return None


def to_frames(values: np.ndarray, order: Order, lead: int) -> np.ndarray:
    """Returns images `[*lead, ...]` as `[*lead, K, H, W, C]`."""
    axes = [lead + axis for axis in order if axis is not None]
    values = np.moveaxis(values, axes, range(lead, lead + len(axes)))
    values = np.expand_dims(values, lead) if order[0] is None else values
    return values[..., None] if order[3] is None else values


def find_images(leaves: dict[str, Any], lead: int) -> tuple[str, Order] | None:
    """Returns name and axes of the first leaf with images, preferring those not below `next`."""
    for name in sorted(leaves, key=lambda name: name.startswith("next")):
        # Leaves of a `ListStorage` are any Python objects, which may have no shape.
        dtype, shape = (getattr(leaves[name], part, None) for part in ("dtype", "shape"))
        order = axes_order(tuple(shape[lead:])) if shape is not None else None
        if order is not None and getattr(dtype, "kind", "") in "biuf":
            return name, order
    return None


def to_rgb(frames: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns frames `[..., H, W, C]` as RGB from 0 to 1, and a text on how they were made."""
    # Leave out rows and columns of pixels of large images.
    step = max(1, -(-max(frames.shape[-3:-1]) // _SIDE))
    frames, channels = frames[..., ::step, ::step, :], frames.shape[-1]
    if channels > 1 and (
        frames.dtype == np.bool_ or (channels != 3 and np.isin(frames, (0, 1)).all())
    ):
        # Each plane of flags has a colour; where several are set, the last one wins.
        planes = np.full((*frames.shape[:-1], 3), 0.09, np.float32)
        for channel in range(channels):
            planes[frames[..., channel] != 0] = _PLANES[channel % len(_PLANES)]
        return planes, f"a colour for each of {channels} planes"
    # Three channels are RGB; of any other number, show the last one in grey.
    more = "" if channels in (1, 3) else f"the last of {channels} channels"
    values = frames if channels == 3 else np.repeat(frames[..., -1:], 3, axis=-1)
    if values.dtype == np.uint8:
        return values.astype(np.float32) / 255, more
    # Scale other dtypes from their least value, at most 0, to their greatest, at least 1.
    values = np.nan_to_num(values.astype(np.float32))
    low, high = values.min(initial=0), values.max(initial=1)
    return np.clip((values - low) / (high - low), 0, 1), more


def tile(pictures: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    """Returns one RGBA image of pictures `[rows, columns, H, W, 3]` with opacities per picture."""
    rows, columns, high, wide, _ = pictures.shape
    gap = max(1, round(min(high, wide) / 14))
    # A gap follows each picture, to the right and below, and the last gaps are cut off.
    sheet = np.zeros((rows, high + gap, columns, wide + gap, 4), np.float32)
    sheet[:, :high, :, :wide, :3] = pictures.transpose(0, 2, 1, 3, 4)
    sheet[:, :high, :, :wide, 3] = opacity[:, None, :, None]
    return sheet.reshape(rows * (high + gap), columns * (wide + gap), 4)[:-gap, :-gap]


def image_row(sheet: np.ndarray, title: str, more: str) -> Row:
    """Returns a row with one panel, whose height fits the picture."""

    def draw(axes: Axes, tone: Tone) -> None:
        axes.imshow(sheet, interpolation="nearest", aspect="equal")
        axes.set(xticks=[], yticks=[], anchor="W")
        axes.spines[:].set_visible(False)
        write_title(axes, tone, title, more)

    high, wide = sheet.shape[:2]
    return Row(min((WIDTH - 0.4) * high / wide, 5.0) + 0.6, [draw], around=0.6)


# Numbers and names as text.


def number(value: Any) -> str:
    """Returns three significant digits, or all digits of an integer: `1,234`, `0.0123`."""
    value = float(value)
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def span(values: np.ndarray) -> str:
    """Returns the least and the greatest number as `1 to 5`, or one number if they are equal."""
    low, high = number(values.min()), number(values.max())
    return low if low == high else f"{low} to {high}"


def percent(share: float) -> str:
    """Returns a fraction as a percentage: `34 %`, `3.4 %`, `below 0.1 %` or `above 99.9 %`."""
    if 0 < share < 0.001:
        return "below 0.1 %"
    if 0.999 < share < 1:
        return "above 99.9 %"
    return f"{100 * share:.{0 if share >= 0.1 or share == 0 else 1}f} %"


def count(amount: int, one: str, many: str = "") -> str:
    """Returns a number with its noun, such as `1 episode` or `1,234 episodes`."""
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"


def leaf_label(name: str) -> str:
    """Returns the label of a leaf; "the item" if items are single arrays."""
    return "the item" if name == "." else name.replace("/", " / ")
