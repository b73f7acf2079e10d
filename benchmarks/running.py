"""Runs the cases of a group: builds the programs, times them in turn, and returns the results."""

import contextlib
import gc
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import machine, timing
from .peers import Peer, packages
from .workloads.case import Case, Wanted

Row = dict[str, Any]
Tick = Callable[[str], Any]


def group(name: str, about: str, cases: Sequence[Case], wanted: Wanted, tick: Tick) -> Row:
    """Runs all cases of a group and returns the results as a JSON object.

    Args:
        name: the name of the group.
        about: its description in one line.
        cases: its cases.
        wanted: the options of the command line.
        tick: called with the name of a case, `turns` times in total.
    """
    rows: list[Row] = []
    for case in cases:
        rows += _rows(case, wanted, tick)
        gc.collect()
    notes = {peer.name: peer.note for peer in wanted.peers if peer.note}
    told = machine.about(packages())
    return {
        "group": name,
        "about": about,
        "quick": wanted.quick,
        "machine": told,
        "notes": notes,
        "rows": rows,
    }


def turns(cases: Sequence[Case], rounds: int) -> int:
    """Returns how often `tick` is called."""
    return sum((1 + case.rounds(rounds)) * len(case.programs) for case in cases)


def _rows(case: Case, wanted: Wanted, tick: Tick) -> list[Row]:
    """Returns a row per program; the row of a program that fails holds the error."""
    silent = io.StringIO()  # discards what other libraries print
    with case.within(), contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        programs, failed = _made(case, tick)
        timing.in_turn(programs.values(), case.rounds(wanted.rounds), lambda: tick(case.name))
    on_device = {peer.name: peer.on_device for peer in wanted.peers}
    return [
        {"what": case.what, "facts": case.facts, "peer": name, "unit": case.unit}
        | {"on_device": on_device.get(name, True)}
        | (_told(case, programs, name) if name in programs else {"failed": failed[name]})
        for name in case.programs
    ]


def _made(case: Case, tick: Tick) -> tuple[dict[str, timing.Program], dict[str, str]]:
    """Returns the programs, each warmed up by one call, and the errors of those that failed."""
    programs: dict[str, timing.Program] = {}
    failed: dict[str, str] = {}
    for name, make in case.programs.items():
        try:
            program = make()
            program.warm()
            programs[name] = program
        except Exception as error:  # of a peer, or out of memory: goes into the report
            failed[name] = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        tick(case.name)
    return programs, failed


def _told(case: Case, programs: dict[str, timing.Program], name: str) -> Row:
    """Returns the results of one program."""
    program, base = programs[name], programs.get(case.base)
    facts = {key: value for key, value in program.facts.items() if key != "value"}
    if case.unit != "s":
        return {"median": program.facts["value"], "more": facts}
    found = {"median": float(np.median(program.times)), "least": min(program.times)}
    ratio = None if base is None or base is program else timing.ratio(base, program)
    found |= {"ratio": ratio, "rounds": len(program.times), "steps": program.steps}
    return found | {"more": facts}


def missing(peers: Sequence[Peer]) -> dict[str, list[str]]:
    """Returns the missing packages of each peer that is not installed, by the peer's name."""
    return {peer.name: peer.missing() for peer in peers if peer.missing()}
