"""Plots results: lines against N for the group `sizes`, otherwise one mark per peer."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from jrb.plot import canvas

from . import figures, markdown

Row = dict[str, Any]
LOOKS = {
    "jrb": (canvas.BLUE, "o"),
    "flashbax": (canvas.ORANGE, "s"),
    "brax": (canvas.GREEN, "^"),
    "TorchRL": (canvas.PURPLE, "D"),
    "cpprb": (canvas.YELLOW, "v"),
    "SB3": (canvas.SKY, "P"),
    "Dopamine": ("#7a5195", "X"),
    "NumPy": ("#6b6b6b", "<"),
    "NumPy take": ("#b0892f", ">"),
    "limit": ("#000000", "|"),
}
"""The color and the marker of each peer, the same in all plots."""
_TIMES = ((1.0, "seconds"), (1e-3, "ms"), (1e-6, "µs"))
_OTHERS = ("#444444", *canvas.CYCLE[1:])
_PER_ROW, _PER_NAME = 0.24, 0.185
"""Inches per case, and per name in the legend."""


def draw(result: Row, path: pathlib.Path) -> bool:
    """Writes the plot of a group; returns False if there is nothing to plot."""
    rows = [row for row in result["rows"] if row.get("median")]
    if not rows:
        return False
    powers = {row["facts"].get("N") for row in rows}
    lines = result["group"] == "sizes" and len(powers) > 1
    panels = (_lines if lines else _marks)(result, rows)
    canvas.draw_rows(panels, None, "bench").savefig(path, dpi=130)
    return True


def _look(peer: str, others: Sequence[str]) -> tuple[str, str]:
    """Returns the color and marker of a program: blue for variants of jrb."""
    if peer in LOOKS:
        return LOOKS[peer]
    at = [name for name in others if name not in LOOKS].index(peer)
    return canvas.BLUE if peer.startswith("jrb") else _OTHERS[at % len(_OTHERS)], "*dhp"[at % 4]


def _lines(result: Row, rows: list[Row]) -> list[canvas.Row]:
    """Returns a panel per workload: time against N, both on logarithmic axes."""
    names = list(dict.fromkeys(row["what"] for row in rows))
    return [
        canvas.Row(3.4, [lambda axes, tone, name=name: _curves(result, rows, name, axes, tone)])
        for name in names
    ]


def _curves(result: Row, rows: list[Row], name: str, axes: Any, tone: canvas.Tone) -> None:
    mine = [row for row in rows if row["what"] == name]
    peers = list(dict.fromkeys(row["peer"] for row in mine))
    for peer in peers:
        points = sorted(
            (row["facts"]["N"], row["median"] * 1e6) for row in mine if row["peer"] == peer
        )
        color, mark = _look(peer, peers)
        axes.plot(*zip(*points, strict=True), color=color, marker=mark, markersize=4, label=peer)
    canvas.few_ticks(axes.xaxis, is_log=True)
    canvas.few_ticks(axes.yaxis, is_log=True)
    axes.xaxis.set_major_formatter(lambda value, _: figures.power(round(value)))
    axes.set(xlabel="N, items held", ylabel="µs a step")
    canvas.write_title(axes, tone, name, _common(mine))
    canvas.add_legend(axes, tone, "beside")


def _marks(result: Row, rows: list[Row]) -> list[canvas.Row]:
    """Returns one panel with a line per case and, along it, a mark per peer."""
    cases = markdown.by_case(rows)
    peers = {row["peer"] for row in rows}
    height = max(1.3 + _PER_ROW * len(cases), 0.7 + _PER_NAME * len(peers))
    return [canvas.Row(height, [lambda axes, tone: _cases(result, rows, cases, axes, tone)])]


def _cases(
    result: Row, rows: list[Row], cases: list[dict[str, Row]], axes: Any, tone: canvas.Tone
) -> None:
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    unit = rows[0]["unit"]
    scale, word = _unit(unit, rows)
    for peer in peers:
        found = [(at, cells[peer]) for at, cells in enumerate(cases) if peer in cells]
        points = [(row["median"] / scale(row), at) for at, row in found]
        color, mark = _look(peer, peers)
        look = {"color": color, "marker": mark, "s": 60 if mark == "|" else 26, "zorder": 3}
        axes.scatter(*zip(*points, strict=True), label=peer, **look)
    varying, _ = markdown.facts(rows)
    axes.set_yticks(range(len(cases)), [_name(cells, varying) for cells in cases])
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.hlines(
        range(len(cases)), 0, 1, transform=axes.get_yaxis_transform(), color=tone.line, lw=0.4
    )
    if unit == "s":
        canvas.few_ticks(axes.xaxis, is_log=True)
    axes.set_xlabel(word)
    canvas.write_title(axes, tone, result["group"], _common(rows))
    canvas.add_legend(axes, tone, "beside")


def _unit(unit: str, rows: list[Row]) -> tuple[Callable[[Row], float], str]:
    """Returns the divisor of a row's value, and the label of the axis."""
    if unit == "B":
        return lambda row: row["facts"]["item bytes"], "times the bytes of the items alone"
    if unit == "kernels":
        return lambda row: 1, "kernels that a GPU launches"
    least = min(row["median"] for row in rows)
    scale, word = next((s, u) for s, u in _TIMES if least >= s or s == _TIMES[-1][0])
    return lambda row: scale, f"{word}, median of rounds (logarithmic; further left is faster)"


def _name(cells: dict[str, Row], varying: list[str]) -> str:
    row = next(iter(cells.values()))
    return ", ".join([row["what"], *figures.sizes(row["facts"], varying)])


def _common(rows: list[Row]) -> str:
    """Formats the facts that all rows share."""
    _, same = markdown.facts(rows)
    return ", ".join(figures.sizes(same, list(same)))
