"""The texts of a figure, and a check that all of them are legible."""

import itertools

import matplotlib.backends.backend_agg as agg
import matplotlib.text


def every_axes(figure):
    found = list(figure.axes)
    for axes in found:
        found += axes.child_axes
    return found


def titles(figure):
    return [text for axes in figure.axes if (text := axes.get_title(loc="left"))]


def words(figure):
    """Draws a figure and returns its visible texts."""
    return [text.get_text() for text, _ in boxes(figure)]


def boxes(figure):
    """Yields the visible texts of a figure and their boxes."""
    canvas = agg.FigureCanvasAgg(figure)
    canvas.draw()
    hidden = {id(text) for axes in every_axes(figure) for text in _hidden(axes)}
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_text().strip() and text.get_visible() and id(text) not in hidden:
            yield text, text.get_window_extent(canvas.get_renderer())


def _hidden(axes):
    """Yields the labels of hidden axes, and of ticks outside the view."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        near = 1e-6 * (high - low)
        is_off = not (axes.axison and axis.get_visible())
        if is_off:
            yield from (axis.label, axis.offsetText)
        for tick in [*axis.majorTicks, *axis.minorTicks]:
            if is_off or not low - near <= tick.get_loc() <= high + near:
                yield from (tick.label1, tick.label2)


def check(figure):
    """Asserts that every text is inside the figure, and that no two texts overlap."""
    found = list(boxes(figure))
    for text, box in found:
        inside = box.x0 >= -1 and box.y0 >= -1
        inside = inside and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert inside, f"{text.get_text()!r} is cut off: {box.extents} of {figure.bbox.extents}"
    for (one, here), (other, there) in itertools.combinations(found, 2):
        wide = min(here.x1, there.x1) - max(here.x0, there.x0)
        high = min(here.y1, there.y1) - max(here.y0, there.y0)
        assert wide <= 1 or high <= 1, f"{one.get_text()!r} lies on {other.get_text()!r}"
    assert figure.get_facecolor()[3] == 1
