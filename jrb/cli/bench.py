"""`jrb bench`: how fast the verbs are here, beside other libraries."""

import importlib
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Annotated, Any

from jrb._util import wording

typer: Any = wording.require("typer", "cli")
_option = typer.Option

_NAME = "jrb._benchmarks"


def bench(
    groups: Annotated[
        list[str] | None, typer.Argument(help="Groups of workloads; all of them if none is named.")
    ] = None,
    quick: Annotated[bool, _option("--quick", help="small sizes, a minute or two")] = False,
    only: Annotated[str, _option(help="cases whose name contains this")] = "",
    rounds: Annotated[
        int | None, _option(help="number of rounds in which all programs run", min=1)
    ] = None,
    peers: Annotated[str | None, _option(help="such as flashbax,TorchRL; all if not given")] = None,
    json: Annotated[str | None, _option(help="one file for all results")] = None,
    plot: Annotated[bool, _option("--plot", help="draw pictures")] = False,
    out: Annotated[str, _option(help="the folder of results")] = "jrb-bench",
    folder: Annotated[str | None, _option(help="a folder on the disk to measure")] = None,
    show: Annotated[
        bool, _option("--list", help="list groups and peers, and measure none")
    ] = False,
) -> None:
    """Compare the speed of jrb and other libraries, and write tables and plots."""
    wording.require("gymnasium", "bench")
    if plot:
        wording.require("matplotlib", "bench")
    command = importlib.import_module(f"{_package().__name__}.command")
    if show:
        command.show()
        return
    options = command.Options(
        groups=groups or (),
        quick=quick,
        only=only,
        rounds=rounds,
        peers=None if peers is None else [name.strip() for name in peers.split(",")],
        json=json,
        plot=plot,
        out=out,
        folder=folder,
    )
    try:
        command.check(options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    command.run(options)


def _package() -> ModuleType:
    """The benchmarks: in the package where it was built, else the folder beside it."""
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    if importlib.util.find_spec(_NAME) is not None:
        return importlib.import_module(_NAME)
    folder = pathlib.Path(__file__).parents[2] / "benchmarks"
    if not (folder / "command.py").exists():
        raise ModuleNotFoundError("jrb bench: expected the benchmarks in the package, got none.")
    where = [str(folder)]
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=where
    )
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"jrb bench: expected a package at {folder}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module
