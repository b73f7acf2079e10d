"""The application of all commands, and the report of errors as one line."""

import functools
import importlib
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Annotated, Any

from jrb._util.wording import printable, require
from jrb.cli import console, convert, inspect, sources

typer: Any = require("typer", "cli")
_option = typer.Option
_path = functools.partial(_option, callback=sources.user_path)

_BENCHMARKS, _TRACEBACK, _INTERRUPTED = "jrb._benchmarks", "--traceback", 130
_LARGEST = 2**31 - 1
"""The largest int32, the default integer of JAX."""

# typer does not export the error that it raises for wrong arguments: find it among the base classes
# of one that it exports.
_UsageError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError"
)

app: Any = typer.Typer(
    help="The replay buffer for JAX: look at what it saved, check it, convert it.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (inspect.inspect, sources.verify, convert.convert, inspect.stats):
    app.command()(_command)
app.add_typer(convert.data, name="data")


@app.callback(invoke_without_command=True)
def _group(
    context: typer.Context,  # pyright: ignore[reportInvalidTypeForm]
    version: Annotated[bool, _option("--version", help="Print the version.")] = False,
    traceback: Annotated[bool, _option(_TRACEBACK, help="Show where errors arise.")] = False,
) -> None:
    if version:
        typer.echo(f"jrb {sys.modules['jrb'].__version__}")
    else:
        console.show_help(context)


@app.command()
def demo(
    env: Annotated[
        str, _option(help="a gymnax environment with discrete actions; a wrong name lists them")
    ] = ("Breakout-MinAtar"),
    steps: Annotated[
        int, _option(help="environment steps of each training", min=1, max=_LARGEST)
    ] = 400_000,
    seeds: Annotated[
        int, _option(help="number of trainings, run together under vmap", min=1, max=_LARGEST)
    ] = 1,
    seed: Annotated[int, _option(help="the first seed", min=-_LARGEST, max=_LARGEST)] = 0,
    devices: Annotated[
        int,
        _option(help="number of devices; simulated on the CPU if there are fewer", min=1, max=64),
    ] = 1,
    out: Annotated[
        str, _option(help="path of the picture", callback=sources.picture_path)
    ] = "jrb-demo.png",
) -> None:
    """Train a double DQN, all of it inside one jit."""
    # JAX learns the number of devices when it starts: set it before anything uses JAX.
    if devices > 1:
        importlib.import_module("jrb.demo").prepare_devices(devices)
    # Check the name of the environment first, whose error lists the right ones.
    report = importlib.import_module("jrb.demo.report")
    try:
        report.training.Config(env=env)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    report.main(env=env, steps=steps, seeds=seeds, seed=seed, out=out, devices=devices)


@app.command()
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="a function without arguments that ends with `return step, arg1, arg2`",
        ),
    ],
) -> None:
    """Report what makes a training step slow; the exit status is 1 if there are findings."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise typer.BadParameter(f"expected MODULE:FUNCTION, got {target!r}.")
    # Import the module, also from the current folder, and make the step and its arguments.
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"expected a module that can be imported, got {error}.") from None
    if not callable(make):
        raise typer.BadParameter(f"expected a function in {module}, got {name!r}.")
    case = make()
    if not isinstance(case, tuple) or not case or not callable(case[0]):
        raise typer.BadParameter(
            f"{target}: expected a function that ends with `return step, arg1, arg2`, the step and "
            f"what it is called with, got {printable(repr(case))[:200]}."
        )
    # Report; findings are a failure, so that scripts notice them.
    report = importlib.import_module("jrb.doctor").doctor(*case)
    typer.echo(printable(str(report)))
    if report.findings:
        raise typer.Exit(1)


@app.command()
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
    json: Annotated[str | None, _path(help="one file for all results")] = None,
    plot: Annotated[bool, _option("--plot", help="draw pictures")] = False,
    out: Annotated[str, _path(help="the folder of results")] = "jrb-bench",
    folder: Annotated[str | None, _path(help="a folder on the disk to measure")] = None,
    show: Annotated[
        bool, _option("--list", help="list groups and peers, and measure none")
    ] = False,
) -> None:
    """Compare the speed of jrb and other libraries, and write tables and plots."""
    require("gymnasium", "bench")
    if plot:
        require("matplotlib", "bench")
    command = importlib.import_module(f"{_import_benchmarks().__name__}.command")
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


def _import_benchmarks() -> ModuleType:
    """Imports the benchmarks from the installed package, or from the repository's folder."""
    if _BENCHMARKS in sys.modules or importlib.util.find_spec(_BENCHMARKS) is not None:
        return importlib.import_module(_BENCHMARKS)
    # A checkout has the folder beside the package, under another name than installed.
    folder = pathlib.Path(__file__).parents[2] / "benchmarks"
    where = [str(folder)]
    spec = importlib.util.spec_from_file_location(
        _BENCHMARKS, folder / "__init__.py", submodule_search_locations=where
    )
    if not (folder / "command.py").exists() or spec is None or spec.loader is None:
        raise ModuleNotFoundError("jrb bench: expected the benchmarks in the package, got none.")
    module = sys.modules[_BENCHMARKS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(arguments: list[str]) -> int:
    """Runs a command and returns its exit status. Errors are one line on stderr."""
    # `--traceback` is accepted anywhere among the arguments.
    words = [word for word in arguments if word != _TRACEBACK]
    try:
        status = app(words, prog_name="jrb", standalone_mode=False) or 0
        if status != _INTERRUPTED:
            return status
        line = "interrupted."
    except (KeyboardInterrupt, typer.Abort):
        line, status = "interrupted.", _INTERRUPTED
    except _UsageError as error:
        # typer's messages may begin with pydantic's "Value error, ".
        line, status = error.format_message().replace("Value error, ", ""), 2
        if error.ctx is not None:
            stop = "" if line.endswith((".", "?")) else "."
            line += f"{stop} {error.ctx.command_path} --help says more."
    except BrokenPipeError:
        # The reader of the pipe has ended. Python would complain of it on stderr at exit.
        sys.stderr.close()
        return 1
    except Exception as error:
        if len(words) < len(arguments):
            raise
        line, status = str(error), 2 if isinstance(error, sources.NOT_THERE) else 1
        # The text of an error of the system has its number, and quotes the path.
        if isinstance(error, OSError) and error.strerror:
            line = f"{error.strerror.lower()}."
            line = f"{error.filename}: {line}" if error.filename else line
        # Messages of other errors are no sentences for users: name the class, and how to see more.
        is_for_people = isinstance(error, OSError | ValueError | TypeError | ImportError)
        if not line or not (is_for_people or isinstance(error, RuntimeError)):
            line = f"{type(error).__name__}: {line} ({_TRACEBACK} shows where.)"
    sys.stderr.write(f"jrb: {printable(' '.join(line.split()))}\n")
    return status
