"""`jrb inspect`: what lies at a path."""

import contextlib
import dataclasses
import importlib
import json as json_
import os
from typing import Annotated, Any

import jrb
from jrb._util import wording
from jrb._util.wording import bytes_text
from jrb.cli import console, found, reports
from jrb.cli.reports import Leaf, Report

typer: Any = wording.require("typer", "cli")

_LONGEST = 200  # characters of what a file says of itself


def inspect(
    path: Annotated[str, found.SOURCE],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save a plot of the buffer as PNG or SVG.")
    ] = None,
) -> None:
    """Show what is stored at PATH."""
    told = reports.report(path)
    if plot is not None:
        _plot(path, plot)
    if json:
        console.write_json(dataclasses.asdict(told))
    else:
        out = console.out()
        for block in blocks(told):
            out.print(block)


def _plot(path: str, file: str) -> None:
    drawing = importlib.import_module("jrb.plot")
    with importlib.import_module(
        "jrb._xla.compat"
    ).enable_x64():  # so that items of any dtype are drawn as they are
        if found.kind_of(path) == found.OTHER:
            buffer, state = found.dataset(path).buffer()
        else:
            buffer, state = found.buffer(path)
        if not isinstance(buffer, jrb.ReplayBuffer):
            raise ValueError(
                f"{path}: expected a single buffer for --plot, got several. Name a part."
            )
        drawing.state(buffer, state).savefig(os.path.expanduser(file), dpi=150)


def blocks(told: Report) -> list[Any]:
    """What is printed, one below the other."""
    made = [console.plain(f"{told.path}: {told.kind}", "bold"), console.facts(_facts(told))]
    made += _section("description", [console.plain(told.description)] if told.description else [])
    made += _section("generations", [_generations(told)] if told.generations else [])
    for name, leaves in _sections(told):
        made += _section(name, [_leaves(leaves)] if leaves else [])
    made += _section("notes", [console.plain(note) for note in told.notes])
    for name, part in told.parts.items():
        made += _section(f"part '{name}'", blocks(part))
    return made


def _sections(told: Report) -> list[tuple[str, list[Leaf]]]:
    arrays = [leaf for leaf in told.others if leaf.shape]
    numbers = len(told.others) - len(arrays)
    name = "state" + (f" (and {numbers} numbers)" if numbers else "")
    return [("items", told.leaves), (name, arrays), ("extra", told.extra)]


def _section(name: str, things: list[Any]) -> list[Any]:
    if not things:
        return []
    return [console.plain(""), console.plain(name, "bold"), *map(console.indented, things)]


def _facts(told: Report) -> list[tuple[str, str]]:
    said = [(name, _shortened(fact)) for name, fact in told.metadata.items() if fact]
    return [
        ("items", _size(told)),
        ("environments", _count(told.num_envs)),
        ("episodes", _count(told.episodes)),
        ("transitions", _count(told.transitions)),
        ("as arrays", "" if told.nbytes is None else bytes_text(told.nbytes)),
        ("on disk", "" if told.disk is None else bytes_text(told.disk)),
        *[(name, text) for name, text in said if name != "versions"],
        ("versions", _versions(told.metadata.get("versions"))),
    ]


def _shortened(fact: Any) -> str:
    """What a file says of itself in a line: spaces as gymnasium writes them, numbers in short."""
    text = str(fact)
    with contextlib.suppress(TypeError, ValueError, RecursionError):  # it is no JSON, or no space
        text = str(_space(json_.loads(fact) if isinstance(fact, str) else fact))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def _space(fact: Any) -> Any:
    """A space that Minari wrote, shortened; all else as it is."""
    if isinstance(fact, list):
        return list(map(_space, fact))
    if not isinstance(fact, dict):
        return fact
    if fact.get("type") == "Box" and {"low", "high", "shape", "dtype"} <= fact.keys():
        bounds = [_bound(fact[side]) for side in ("low", "high")]
        return _Word(f"Box({', '.join(bounds)}, {tuple(fact['shape'])}, {fact['dtype']})")
    if fact.get("type") == "Discrete" and "n" in fact:
        return _Word(f"Discrete({fact['n']})")
    if fact.get("type") == "Dict" and isinstance(fact.get("subspaces"), dict):
        inner = {name: _space(space) for name, space in fact["subspaces"].items()}
        return _Word(f"Dict({inner})")
    if fact.get("type") == "Tuple" and "subspaces" in fact:
        return _Word(f"Tuple{tuple(map(_space, fact['subspaces']))}")
    return {name: _space(value) for name, value in fact.items()}


class _Word(str):
    """A text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _bound(values: Any) -> str:
    """The number that all are, or the smallest and the largest."""
    numbers = [values]
    while numbers and isinstance(numbers[0], list):
        numbers = [each for inner in numbers for each in inner]
    least, most = min(map(float, numbers)), max(map(float, numbers))
    return f"{least:g}" if least == most else f"{least:g}..{most:g}"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _size(told: Report) -> str:
    """`30 of 40 (75 %)`."""
    if told.capacity is None or told.size is None:
        return _count(told.size) if isinstance(told.size, int) else ""
    if not isinstance(told.size, int):
        return f"{told.size} of {told.capacity:,} each"
    return f"{told.size:,} of {told.capacity:,} ({100 * told.size / told.capacity:.0f} %)"


def _versions(versions: Any) -> str:
    return ", ".join(f"{name} {number}" for name, number in (versions or {}).items())


def _generations(told: Report) -> Any:
    rows = [
        (
            str(each.generation or ""),
            each.damage or (each.time or "").replace("T", " ").replace("+00:00", " UTC"),
            f"{each.size:,}" if isinstance(each.size, int) else str(each.size or ""),
        )
        for each in told.generations
    ]
    return console.table(("number", "saved", "items"), rows, numbers=1)


def _leaves(leaves: list[Leaf]) -> Any:
    rows = [
        (leaf.name, f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]", bytes_text(leaf.nbytes))
        for leaf in leaves
    ]
    return console.table(("leaf", "type", "memory"), rows, numbers=1)
