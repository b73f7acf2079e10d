"""A sheet that is cut into panels, and how a panel looks on it.

Colours are those of Okabe and Ito, 2008, which everybody can tell apart. A sheet has a ground of
its own, opaque, so that its labels can be read on any page.
"""

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrb._util import extras

_axes = extras.require("matplotlib.axes", "plot")
_cm = extras.require("matplotlib.cm", "plot")
_colors = extras.require("matplotlib.colors", "plot")
_figure: Any = extras.require("matplotlib.figure", "plot")
_ticker = extras.require("matplotlib.ticker", "plot")

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, YELLOW, GREY = "#56b4e9", "#e69f00", "#999999"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY)
AGES = _colors.LinearSegmentedColormap.from_list("ages", ["#0b4f7d", "#56b4e9", "#d6ecf9"])
VALUES = "cividis"

WIDTH = 9.0
"""Inches."""
_EDGE = 0.25  # inches above and below all panels


@dataclasses.dataclass(frozen=True)
class Tone:
    """The colours of what is no data.

    Attributes:
        ink: of titles.
        faint: of labels and numbers.
        line: of axes, and of what is not there.
        ground: what is behind it.
    """

    ink: str
    faint: str
    line: str
    ground: str


_LIGHT = Tone(ink="#1f2328", faint="#4d565f", line="#c5ccd3", ground="#ffffff")
_DARK = Tone(ink="#f0f3f6", faint="#b8c0c8", line="#565e67", ground="#16181b")

Axes = Any
"""An axes of matplotlib, in which a panel is drawn."""

Draw = Callable[[Any, Tone], None]
"""Draws a panel into its axes."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Panels side by side.

    Attributes:
        height: inches, with titles and labels.
        panels: from left to right.
        widths: of the panels, relative to each other; None for all alike.
        around: inches of the height for titles and labels.
    """

    height: float
    panels: Sequence[Draw]
    widths: Sequence[float] | None = None
    around: float = 0.85

    @property
    def inner(self) -> float:
        """The height that the grid is told: without what is around, where panels are its cells."""
        return self.height if len(self.panels) > 1 else max(self.height - self.around, 0.1)


class Sheet(_figure.Figure):
    """A figure that a notebook shows, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def drawn(rows: Sequence[Row], ax: Any, who: str) -> Any:
    """The figure with these rows of panels: a new one, or that of `ax`, in whose place they are.

    Raises:
        TypeError: `ax` is no axes of matplotlib; the message begins with `who`.
    """
    if ax is None:
        height = sum(row.height for row in rows) + _EDGE
        sheet = Sheet(figsize=(WIDTH, height), layout="constrained", facecolor=_LIGHT.ground)
        sheet.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        places, tone = _cut(sheet.add_gridspec, sheet, rows), _LIGHT
    else:
        sheet, tone, places = *_tone_of(ax, who), _within(ax, rows)
    for row, cells in zip(rows, places, strict=True):
        for panel, axes in zip(row.panels, cells, strict=True):
            style(axes, tone)
            panel(axes, tone)
    return sheet


def _tone_of(ax: Any, who: str) -> tuple[Any, Tone]:
    """The figure that an axes belongs to, and what can be read on its ground."""
    if not isinstance(ax, _axes.Axes):
        raise TypeError(
            f"{who}: ax: expected an axes of matplotlib, got {type(ax).__name__}. Make one with "
            "figure.add_subplot(), or leave it out for a new figure."
        )
    sheet = ax.get_figure(root=True)
    if sheet is None:
        raise TypeError(f"{who}: ax: expected an axes of a figure, got one that was removed.")
    red, green, blue, opacity = _colors.to_rgba(sheet.get_facecolor())
    is_dark = opacity > 0.5 and 0.3 * red + 0.6 * green + 0.1 * blue < 0.4
    return sheet, _DARK if is_dark else _LIGHT


def _within(ax: Any, rows: Sequence[Row]) -> list[list[Any]]:
    """Axes for all panels in the place of `ax`, which is hidden."""
    mark, sheet = f"jrb-{id(ax)}", ax.get_figure(root=True)
    for other in [*sheet.axes, *ax.child_axes]:
        if other.get_gid() == mark:  # of the last picture that was drawn here
            other.remove()
    ax.set_axis_off()
    spec = ax.get_subplotspec()
    if spec is None:
        places = _inset(ax, rows)
    else:
        room = {} if sheet.get_layout_engine() is not None else {"hspace": 0.9, "wspace": 0.25}
        places = _cut(lambda *a, **k: spec.subgridspec(*a, **k, **room), sheet, rows)
    for axes in [axes for cells in places for axes in cells]:
        axes.set_gid(mark)
    return places


def _cut(grid: Callable[..., Any], sheet: Any, rows: Sequence[Row]) -> list[list[Any]]:
    """Axes in a grid of rows, of which each is cut for itself."""
    lines = grid(len(rows), 1, height_ratios=[row.inner for row in rows])

    def cells(line: Any, row: Row) -> list[Any]:
        if len(row.panels) == 1:  # in the grid itself: then they stand below each other
            return [line]
        cut = line.subgridspec(1, len(row.panels), width_ratios=row.widths)
        return [cut[place] for place in range(len(row.panels))]

    found = [cells(lines[number], row) for number, row in enumerate(rows)]
    return [[sheet.add_subplot(place) for place in line] for line in found]


def _inset(ax: Any, rows: Sequence[Row]) -> list[list[Any]]:
    """Axes within one that is in no grid; each leaves room for its title and labels."""
    places, top, whole = [], 1.0, sum(row.height for row in rows)
    for row in rows:
        tall, wide, cells = row.height / whole, 1 / len(row.panels), []
        for number in range(len(row.panels)):
            bounds = (wide * (number + 0.1), top - 0.72 * tall, 0.8 * wide, 0.44 * tall)
            cells.append(ax.inset_axes(bounds))
        places.append(cells)
        top -= tall
    return places


def style(axes: Axes, tone: Tone) -> None:
    """How the axes of a panel look."""
    axes.set_facecolor("none")
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(tone.line)
    axes.tick_params(which="both", color=tone.line, labelcolor=tone.faint, labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=tone.faint, fontsize=8.5)
        axis.set_major_formatter(_ticker.FuncFormatter(_plain))  # no exponent on the title


def _plain(value: float, _: int | None = None) -> str:
    """A number at a tick."""
    return f"{value:,.10g}"


def say(axes: Axes, tone: Tone, title: str, more: str = "") -> None:
    """A title, and a line below it; however long, no panel is made narrower for them."""
    axes.set_title(title, loc="left", fontsize=10, color=tone.ink, pad=19 if more else 7)
    if more:
        line = axes.annotate(
            more,
            (0, 1),
            (0, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=8.5,
            color=tone.faint,
        )
        line.set_in_layout(False)


def heading(axes: Axes, tone: Tone, title: str, more: str) -> None:
    """A panel that is a title alone, within it."""
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=11, color=tone.ink, y=1, pad=-11)
    place = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(more, (0, 1), (0, -27), fontsize=8.5, color=tone.faint, **place)


def label(axes: Axes, x: str = "", y: str = "") -> None:
    """What is along the axes."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def whole_numbers(axis: Any, most: int = 6) -> None:
    """Ticks at integers, with a comma between thousands."""
    axis.set_major_locator(_ticker.MaxNLocator(most, integer=True))
    axis.set_major_formatter(_ticker.StrMethodFormatter("{x:,.0f}"))


def before(axis: Any) -> None:
    """Ticks at integers up to 0, as how long ago they were."""
    whole_numbers(axis, 8)
    axis.set_major_formatter(_ticker.FuncFormatter(_distance))


def _distance(value: float, _: int | None = None) -> str:
    return f"{abs(value):,.0f}"


def few(axis: Any, most: int) -> None:
    """At most so many ticks."""
    axis.set_major_locator(_ticker.MaxNLocator(most))


def powers(axis: Any) -> None:
    """A logarithmic axis whose ticks are few and plain numbers; to be called when all is drawn."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    axis.set_major_locator(_ticker.LogLocator(subs=steps, numticks=6))
    axis.set_minor_locator(_ticker.NullLocator())
    axis.set_major_formatter(_ticker.FuncFormatter(_plain))


def scale(
    axes: Axes, tone: Tone, colors: Any, what: str, whole: bool = False, tall: bool = True
) -> None:
    """What the colours mean, to the right of a panel."""
    place = axes.inset_axes((1.012, 0, 0.012, 1))
    bar = axes.get_figure(root=True).colorbar(colors, cax=place)
    bar.outline.set_visible(False)
    bar.locator = _ticker.MaxNLocator(3 if tall else 1, integer=whole)
    bar.update_ticks()
    place.tick_params(color=tone.line, labelcolor=tone.faint, labelsize=8)
    place.set_ylabel(what, color=tone.faint, fontsize=8.5)
    low, high = colors.get_clim()
    if max(abs(low), abs(high)) >= 1000:
        place.yaxis.set_major_formatter(_ticker.StrMethodFormatter("{x:,.0f}"))


def legend(axes: Axes, tone: Tone, place: str = "upper right", columns: int = 1) -> None:
    """The names of what is drawn."""
    look = {"fontsize": 8, "labelcolor": tone.faint, "frameon": False, "borderaxespad": 0.2}
    axes.legend(loc=place, ncols=columns, **look).set_in_layout(False)


def note(title: str, more: str) -> list[Row]:
    """A picture of words alone, where there is nothing to see."""

    def draw(axes: Axes, tone: Tone) -> None:
        axes.set_axis_off()
        axes.text(0.5, 0.62, title, ha="center", fontsize=12, color=tone.ink)
        axes.text(0.5, 0.36, more, ha="center", fontsize=9, color=tone.faint)
        axes.set(xlim=(0, 1), ylim=(0, 1))

    return [Row(1.4, [draw], around=0)]


def mapped(values: np.ndarray) -> Any:
    """What gives values their colours, from the least finite one to the greatest."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    norm = _colors.Normalize(low, high if high > low else low + max(1.0, abs(low)))
    found = _cm.ScalarMappable(norm, VALUES)
    found.set_array(values)
    return found


rgba = _colors.to_rgba
"""A colour as its parts from 0 to 1, the last one the opacity."""


def palette(colors: Sequence[str]) -> Any:
    """A colour for each of some kinds."""
    return _colors.ListedColormap(list(colors))


def legend_right(axes: Axes, tone: Tone) -> None:
    """The names of what is drawn, beside a panel that is full."""
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.005, 1),
        fontsize=8,
        labelcolor=tone.faint,
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.2,
    )


def bars(axes: Axes, borders: np.ndarray, heights: np.ndarray, color: str, **more: Any) -> None:
    """Bars that stand side by side."""
    axes.bar(
        borders[:-1], heights, np.diff(borders), align="edge", color=color, linewidth=0, **more
    )
