"""The command behind `python -m benchmarks` and `jrb bench`."""

import contextlib
import dataclasses
import importlib
import json
import logging
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import rich.console
import rich.markdown
import rich.progress

from . import alone, peers, running, workloads
from .report import files, own, terminal
from .workloads.case import Case, Wanted

ROUNDS, QUICK_ROUNDS = 15, 5
QUICK = ("cycle", "units", "memory")
"""The groups of a quick run if none are named."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        groups: names of groups; if empty, `QUICK` if quick, and all groups with peers otherwise.
        quick: if True, use small sizes and few rounds, for a run of a minute or two.
        only: run only the cases whose name contains this.
        rounds: number of rounds; None for `ROUNDS`, or `QUICK_ROUNDS` if quick.
        peers: names of the peers to compare; None for all.
        json: one file for all results, in addition to the file of each group.
        plot: if True, draw plots.
        out: the folder of the results.
        folder: a folder on the disk to measure, for temporary files; None for the system's default.
    """

    groups: Sequence[str] = ()
    quick: bool = False
    only: str = ""
    rounds: int | None = None
    peers: Sequence[str] | None = None
    json: str | None = None
    plot: bool = False
    out: str = "jrb-bench"
    folder: str | None = None


def check(options: Options) -> None:
    """Raises ValueError if a group, peer, case or folder does not exist."""
    wrong = [name for name in options.groups if name not in names()]
    if wrong:
        raise ValueError(f"expected groups of {', '.join(names())}, got {', '.join(wrong)}.")
    if options.folder is not None and not pathlib.Path(options.folder).is_dir():
        raise ValueError(f"--folder: expected a folder that is there, got {options.folder}.")
    if options.json is not None and not pathlib.Path(options.json).parent.is_dir():
        raise ValueError(f"--json: expected a file in a folder that is there, got {options.json}.")
    if pathlib.Path(options.out).is_file():
        raise ValueError(f"--out: expected a folder, got the file {options.out}.")
    if not any(cases for _, cases in _plans(options, _wanted(options, "."))):
        raise ValueError(f"--only: expected a part of the name of a case, got {options.only!r}.")


def names() -> tuple[str, ...]:
    """Returns the names of all groups."""
    return (*workloads.GROUPS, *alone.GROUPS)


def show() -> None:
    """Prints the groups and the peers."""
    console = rich.console.Console(highlight=False)
    for name in names():
        module = alone if name in alone.GROUPS else workloads
        console.print(f"{name:12} {module.about(name)}", soft_wrap=True)
    for peer in peers.ALL:
        lacks = f"not installed: pip install {' '.join(peer.missing())}" if peer.missing() else ""
        console.print(f"{peer.name:12} {lacks or peer.note}", soft_wrap=True)


def run(options: Options) -> list[dict[str, Any]]:
    """Runs the chosen groups, prints tables, and writes and returns the results.

    Raises:
        ValueError: as in `check`.
    """
    check(options)
    lacking = running.missing(peers.chosen(options.peers))
    console = rich.console.Console(file=sys.stdout)  # prints even while stdout is redirected
    results, out = [], pathlib.Path(options.out)
    with _quietly(), tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        wanted = _wanted(options, scratch)
        for name, cases in _plans(options, wanted):
            if cases:
                results.append(_group(name, cases, wanted, console))
                _told(results[-1], out, options.plot, console)
    (out / "report.md").write_text(own.page(results, lacking))
    if options.json:
        whole = {"missing": lacking, "results": results}
        pathlib.Path(options.json).write_text(json.dumps(whole, indent=1) + "\n")
    for name, what in lacking.items():
        console.print(f"{name} is not installed: pip install {' '.join(what)}")
    console.print(f"Results are in {out}")
    return results


def _wanted(options: Options, scratch: str) -> Wanted:
    able = [peer for peer in peers.chosen(options.peers) if not peer.missing()]
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return Wanted(able, options.quick, rounds, scratch)


def _plans(options: Options, wanted: Wanted) -> list[tuple[str, list[Case]]]:
    """Returns the chosen groups and their cases."""
    chosen = options.groups or (QUICK if options.quick else workloads.GROUPS)
    return [_plan(name, wanted, options.only) for name in chosen]


def _plan(name: str, wanted: Wanted, only: str) -> tuple[str, list[Case]]:
    """Returns a group and its chosen cases; a group without peers is a single case."""
    if name in alone.GROUPS:
        what = Case(name, {}, {name: lambda: None}) if only in name else None
        return name, [what] if what else []
    cases = workloads.module(name).cases(wanted)
    return name, [case for case in cases if only in case.name and case.programs]


def _group(name: str, cases: list[Case], wanted: Wanted, console: Any) -> dict[str, Any]:
    """Runs a group behind a progress bar, and returns its results."""
    if name in alone.GROUPS:
        console.print(f"{name}: {alone.about(name)}")
        return alone.run(name, wanted)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[case]}"),
    )
    silent = {"redirect_stdout": False, "redirect_stderr": False}
    with rich.progress.Progress(*columns, console=console, transient=True, **silent) as bar:
        task = bar.add_task(name, total=running.turns(cases, wanted.rounds), case="")
        tick = lambda case: bar.update(task, advance=1, case=case[:60])
        return running.group(name, workloads.about(name), cases, wanted, tick)


def _told(result: dict[str, Any], out: pathlib.Path, plot: bool, console: Any) -> None:
    """Prints and writes the results of a group."""
    files.write(out, result)
    if result["group"] in alone.GROUPS:
        console.print(rich.markdown.Markdown(own.section(result)))
    else:
        terminal.show(result, console)
    if plot:
        module = alone if result["group"] in alone.GROUPS else _plots()
        module.draw(result, out / f"{result['group']}.png")


def _plots() -> Any:
    return importlib.import_module(f"{__package__}.report.plots")  # needs matplotlib


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppresses the warnings and log messages of other libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
