"""The drawings of the concepts, as SVG. Their colours are classes in `_static/jrb.css`.

All are 460 wide, so that their labels stay readable on a telephone.
"""

import html
from collections.abc import Callable, Sequence

WIDTH = 460


class Sheet:
    """What is drawn on, from the top left; lengths are in pixels."""

    def __init__(self, height: int, title: str) -> None:
        self._height, self._title = height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, style: str, label: str = "") -> None:
        """A box with a label in its middle."""
        self._parts.append(
            f'<rect class="{style}" x="{x}" y="{y}" width="{w}" height="{h}" rx="3"/>'
        )
        if label:
            self.text(x + w / 2, y + h / 2 + 5, label, "middle")

    def text(self, x: float, y: float, label: str, style: str = "") -> None:
        """A line of text; `middle`, `end`, `small`, `dim`, `code` are its styles."""
        label = html.escape(label)
        self._parts.append(f'<text class="{style}" x="{x}" y="{y}">{label}</text>')

    def line(self, *points: tuple[float, float], tip: bool = True) -> None:
        """A line through points, with an arrow's tip at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<polyline class="line" points="{path}"/>')
        if tip:
            (x, y), (u, v) = points[-1], points[-2]
            dx, dy = (x > u) - (x < u), (y > v) - (y < v)
            wings = [(x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx)]
            wings += [(x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx)]
            corners = " ".join(f"{a},{b}" for a, b in [(x, y), *wings])
            self._parts.append(f'<polygon class="tip" points="{corners}"/>')

    def svg(self) -> str:
        """The drawing."""
        title, body = html.escape(self._title), "".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {WIDTH} {self._height}"><title>{title}</title>{body}</svg>'
        )


def ring() -> str:
    """Five rows of three environments; the cursor has come round to row 2."""
    sheet = Sheet(296, "A ring of five rows and three environments, and its memory")
    for env in range(3):
        sheet.text(105 + 70 * env, 18, f"env {env}", "middle small dim")
    for row, time in enumerate((5, 6, 2, 3, 4)):
        y = 28 + 36 * row
        sheet.text(58, y + 21, f"row {row}", "end small dim")
        for env in range(3):
            style = "one" if time > 4 else "box"
            sheet.box(70 + 70 * env, y, 66, 32, style)
            sheet.text(112 + 70 * env, y + 22, f"t = {time}", "middle")
            sheet.text(74 + 70 * env, y + 13, str(3 * row + env), "small dim")
    for y, label in ((80, "newest"), (116, "oldest, and next"), (134, "to be written")):
        sheet.text(304, y + 5, label)
    sheet.line((300, 116), (284, 116))
    sheet.line((300, 80), (284, 80))
    sheet.text(8, 238, "The same in memory, slot after slot:", "small dim")
    for slot in range(15):
        style = "one" if slot < 6 else "box"
        sheet.box(8 + 29.6 * slot, 248, 27, 28, style, str(slot))
    return sheet.svg()


def anchors() -> str:
    """Nine rows held of ten, an episode that ends at row 4, and the anchors of three units."""
    sheet = Sheet(282, "Rows of an environment, and which of them are anchors for three units")
    across = lambda row: 26 + 41 * row
    for row in range(10):
        style = "empty" if row == 9 else "one" if row < 5 else "two"
        sheet.box(across(row), 26, 37, 32, style, "" if row == 9 else str(row))
    sheet.text(26, 16, "one episode", "small dim")
    sheet.text(across(5), 16, "the next one, still running", "small dim")
    sheet.text(across(4) + 18, 76, "done", "small dim middle")
    sheet.text(across(8) + 18, 76, "newest", "small dim middle")
    lines = (
        ("Transition(), NStep(3, 0.99)", range(9), None),
        ("Sequence(3)", (0, 1, 2, 5, 6), 1),
        ('Sequence(3, sample_by="whole_episodes")', (0,), 0),
    )
    for number, (name, found, shown) in enumerate(lines):
        y = 104 + 62 * number
        sheet.text(26, y, name, "code")
        for row in range(9):
            sheet.box(across(row) + 10, y + 10, 17, 17, "good" if row in found else "empty")
        if shown is not None:
            last = shown + 2 if number == 1 else 4
            left, right = across(shown) + 4, across(last) + 33
            sheet.line((left, y + 30), (left, y + 36), (right, y + 36), (right, y + 30), tip=False)
    return sheet.svg()


def waits() -> str:
    """A read that nothing orders, and one that the write waits for."""
    sheet = Sheet(330, "A write that waits for the read is in place; one that does not may copy")
    sheet.text(8, 18, "sample, then add: nothing says which comes first")
    sheet.box(8, 32, 92, 40, "box", "state")
    sheet.box(180, 28, 120, 34, "two", "write a row")
    sheet.box(180, 84, 120, 34, "one", "read B rows")
    sheet.line((100, 45), (180, 45))
    sheet.line((54, 72), (54, 101), (180, 101))
    sheet.box(340, 28, 112, 34, "box", "new state")
    sheet.line((300, 45), (340, 45))
    sheet.box(340, 84, 112, 34, "bad", "copy of N rows")
    sheet.line((300, 101), (340, 101))
    sheet.text(8, 140, "The write may run first; the read then needs the old ring.", "small dim")
    sheet.text(8, 188, "draw, then add: the write waits")
    sheet.box(8, 202, 92, 40, "box", "state")
    sheet.box(148, 204, 104, 36, "one", "read B rows")
    sheet.box(304, 204, 148, 36, "good", "a zero, made of it")
    sheet.line((100, 222), (148, 222))
    sheet.line((252, 222), (304, 222))
    sheet.box(304, 268, 148, 36, "good", "cursor + zero")
    sheet.line((378, 240), (378, 268))
    sheet.box(148, 268, 104, 36, "two", "write a row")
    sheet.line((304, 286), (252, 286))
    sheet.line((148, 286), (54, 286), (54, 242))
    sheet.text(8, 324, "The row is written into the same memory.", "small dim")
    return sheet.svg()


def commit() -> str:
    """Places of rows, what the last commit names, and the three steps of the next one."""
    sheet = Sheet(360, "New rows go to free places; a commit is one file, renamed into place")
    across = lambda place: 8 + 44.6 * place
    sheet.text(8, 16, "rows/observation.bin: N = 6 slots, 10 places", "small dim")
    for place in range(10):
        style = "one" if place < 6 else "two" if place < 8 else "empty"
        sheet.box(across(place), 84, 41, 36, style, str(place))
    sheet.box(8, 30, 264, 30, "one", "generation 7 names these")
    sheet.line((140, 60), (140, 84))
    sheet.text(across(6), 72, "two new rows", "small dim")
    sheet.text(across(6), 140, "free places, in a line", "small dim")
    sheet.text(8, 140, "6, 7 have the slots of 0, 1", "small dim")
    sheet.text(8, 186, "save:")
    steps = (
        ("1  fsync of the rows", "box", "a crash here: generation 7, whole"),
        ("2  write generation 8", "box", "a crash here: generation 7, whole"),
        ("3  rename, fsync the folder", "good", "from here on: generation 8"),
    )
    for number, (what, style, after) in enumerate(steps):
        y = 198 + 52 * number
        sheet.box(8, y, 196, 34, style, what)
        sheet.text(216, y + 22, after, "small")
        if number:
            sheet.line((106, y - 18), (106, y))
    return sheet.svg()


def ratios(bars: Sequence[tuple[str, str, float]]) -> str:
    """Bars of jrb's time over that of another library, one for each label, library and ratio.

    The outlined bar is the time of the other library; it ends at the same place in each row.
    """
    one, height = 330, 46  # pixels for a ratio of 1, and of a row
    sheet = Sheet(height * len(bars) + 8, "Time of jrb, over that of the fastest other library")
    for number, (label, peer, ratio) in enumerate(bars):
        y = height * number
        sheet.text(8, y + 18, label, "small")
        sheet.box(8, y + 24, one, 14, "empty")
        sheet.box(8, y + 24, round(one * min(ratio, 1.3), 1), 14, "one")
        sheet.text(20 + one * max(1.0, min(ratio, 1.3)), y + 36, f"{ratio:.2f} of {peer}", "small")
    return sheet.svg()


DRAWINGS: dict[str, Callable[[], str]] = {
    "ring": ring,
    "anchors": anchors,
    "waits": waits,
    "commit": commit,
}
