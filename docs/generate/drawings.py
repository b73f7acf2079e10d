"""The drawings of the concepts, as SVG. Their colours are classes in `_static/jrb.css`.

All are 460 wide, so that their labels stay readable on a telephone.
"""

import html
import itertools
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
    """Blocks of an array at positions, what two generations refer to, and the steps of a commit."""
    sheet = Sheet(408, "Changed blocks go to free positions; a commit is one file, then renamed")
    across = lambda position: 68 + 38 * position
    sheet.text(8, 16, "The file of an array of six blocks, 0 to 5", "small dim")
    sheet.text(60, 44, "refers to", "end small dim")
    sheet.box(across(0), 26, 224, 28, "one", "generation 7")
    sheet.line((across(3) - 2, 54), (across(3) - 2, 74))
    sheet.text(60, 99, "block", "end small dim")
    sheet.text(60, 128, "position", "end small dim")
    for position, block in enumerate((0, 1, 2, 3, 4, 5, 0, 1, None, None)):
        style = "empty" if block is None else "one" if position < 6 else "two"
        sheet.box(across(position), 76, 34, 34, style, "" if block is None else str(block))
        sheet.text(across(position) + 17, 128, str(position), "small dim middle")
    sheet.text(across(6), 66, "0 and 1, changed", "small dim")
    sheet.text(across(8) + 36, 146, "free", "small dim middle")
    sheet.line((across(5) - 2, 156), (across(5) - 2, 136))
    sheet.text(across(2) - 8, 175, "will refer to", "end small dim")
    sheet.box(across(2), 156, 224, 28, "two", "generation 8")
    sheet.text(8, 226, "The commit:")
    steps = (
        ("1  fsync the arrays", "box", "a crash here: all of generation 7"),
        ("2  write generation.new", "box", "a crash here: all of generation 7"),
        ("3  rename, fsync the folder", "good", "from here on: generation 8"),
    )
    for number, (step, style, after) in enumerate(steps):
        y = 238 + 52 * number
        sheet.box(8, y, 212, 34, style, step)
        sheet.text(232, y + 22, after, "small")
        if number:
            sheet.line((114, y - 18), (114, y))
    sheet.text(8, 398, "Then generation 7 is removed, and positions 0 and 1 are free.", "small dim")
    return sheet.svg()


def units() -> str:
    """What one sample reads for four units, over the rows of two episodes."""
    sheet = Sheet(318, "The rows that one sample reads, for four units")
    across = lambda row: 96 + 36 * row
    for row in range(10):
        sheet.box(across(row), 26, 33, 30, "one" if row < 6 else "two", str(row))
    sheet.text(96, 16, "one episode", "small dim")
    sheet.text(across(6), 16, "the next one", "small dim")
    samples = (
        ("NStep(3, 0.99)", 3, (3, 4, 5), (), "the rewards of 3, 4 and 5"),
        ("Sequence(4)", 1, (1, 2, 3, 4), (), "four rows, one after the other"),
        ("Sequence(3, burn_in=2)", 3, (3, 4, 5), (1, 2), "two rows to warm up, then the window"),
        ("FrameStack(4)", 7, (6, 7), (), "row 6 repeated: the episode begins there"),
    )
    for number, (name, anchor, rows, before, words) in enumerate(samples):
        y = 76 + 62 * number
        sheet.text(96, y + 8, name, "code")
        for row in (*before, *rows):
            sheet.box(across(row), y + 16, 33, 20, "empty" if row in before else "good")
        sheet.line((across(anchor) + 16, y + 50), (across(anchor) + 16, y + 38))
        left = across(anchor) > 300
        x = across(anchor) + (4 if left else 28)
        sheet.text(x, y + 52, words, "small dim end" if left else "small dim")
    sheet.text(8, 45, "rows", "small dim")
    sheet.text(8, 126, "arrow:", "small dim")
    sheet.text(8, 142, "the anchor", "small dim")
    return sheet.svg()


def hindsight() -> str:
    """An episode that misses its goal, and one transition with another goal."""
    sheet = Sheet(196, "A transition is sampled with a goal that its episode reached later")
    at = [(30, 140), (95, 112), (160, 122), (225, 88), (290, 100), (355, 70)]
    for start, end in itertools.pairwise(at):
        sheet.line(start, end, tip=False)
    for step, (x, y) in enumerate(at):
        style = "one" if step == 1 else "good" if step == 4 else "box"
        sheet.box(x - 15, y - 15, 30, 30, style, str(step))
    sheet.box(400, 8, 52, 30, "bad", "goal")
    sheet.text(392, 28, "the goal of the episode was missed", "small dim end")
    sheet.line((95, 127), (95, 166), (290, 166), (290, 118))
    sheet.text(105, 184, "step 1, sampled as if its goal had been what step 4 reached", "small dim")
    return sheet.svg()


def shards() -> str:
    """Four devices with their environments, shards and parts of a batch."""
    sheet = Sheet(
        218, "Each device has environments, a shard of the buffer, and a part of the batch"
    )
    for device in range(4):
        x = 8 + 113 * device
        sheet.box(x, 8, 104, 132, "empty")
        sheet.text(x + 52, 26, f"device {device}", "middle small dim")
        sheet.box(x + 8, 36, 88, 26, "box", "E / 4 envs")
        sheet.box(x + 8, 74, 88, 26, "one", "N / 4 slots")
        sheet.box(x + 8, 112, 88, 22, "good", "B / 4 items")
        sheet.line((x + 52, 62), (x + 52, 74))
        sheet.line((x + 52, 100), (x + 52, 112))
        sheet.line((x + 52, 140), (x + 52, 164))
    sheet.box(8, 164, 443, 26, "two", "all_gather: four numbers of each shard")
    sheet.text(
        230, 208, "from them, every shard computes weights over all N items", "middle small dim"
    )
    return sheet.svg()


def actors() -> str:
    """Actors that add, servers that hold shards, and a learner."""
    sheet = Sheet(222, "Actors add to a buffer in processes of its own; a learner samples from it")
    for number in range(3):
        y = 22 + 64 * number
        sheet.box(8, y, 96, 36, "box", f"actor {number}")
        sheet.line((104, y + 18), (176, y + 18 if number == 1 else 104 + 24 * (number - 1)))
    sheet.box(176, 66, 116, 76, "one", "buffer")
    sheet.text(234, 134, "its own process", "small dim middle")
    sheet.text(140, 22, "extend", "code middle")
    sheet.box(364, 86, 88, 36, "good", "learner")
    sheet.line((292, 94), (364, 94))
    sheet.text(328, 84, "ahead", "code middle")
    sheet.line((364, 114), (292, 114))
    sheet.text(328, 138, "priorities", "small dim middle")
    sheet.line((234, 142), (234, 178))
    sheet.box(176, 178, 116, 32, "two", "saves")
    sheet.text(302, 198, "a restart continues here", "small dim")
    return sheet.svg()


def tiers() -> str:
    """Where the items of three storages are."""
    sheet = Sheet(214, "Where three storages keep their items: device, files, or both")
    sheet.text(236, 16, "device", "small dim middle")
    sheet.text(376, 16, "files on the host", "small dim middle")
    stores = (
        ("DeviceStorage", "all items", ""),
        ("SpillStorage", "the newest", "all items"),
        ("MemmapStorage", "", "all items"),
    )
    for number, (name, device, files) in enumerate(stores):
        y = 28 + 52 * number
        sheet.text(8, y + 23, name, "code")
        sheet.box(176, y, 120, 36, "one" if device else "empty", device)
        sheet.box(316, y, 120, 36, "two" if files else "empty", files)
    sheet.text(8, 200, "Sampler, unit and writer are on the device with each of them.", "small dim")
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
    "units": units,
    "hindsight": hindsight,
    "shards": shards,
    "actors": actors,
    "tiers": tiers,
}
