"""The commands together, and what becomes of errors."""

import sys
from typing import Annotated, Any

from jrb._util import wording
from jrb._util.wording import printable
from jrb.cli import bench, convert, data, demo, found, inspect, stats, verify

typer: Any = wording.require("typer", "cli")

_TRACEBACK = "--traceback"
_INTERRUPTED = 130

_UsageError: Any = next(  # typer does not name what it raises for a wrong call
    base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError"
)

app: Any = typer.Typer(
    add_completion=False,
    help="The replay buffer for JAX: look at what it saved, check it, convert it.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (
    inspect.inspect,
    verify.verify,
    convert.convert,
    stats.stats,
    demo.demo,
    bench.bench,
):
    app.command()(_command)
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def _group(
    context: typer.Context,  # pyright: ignore[reportInvalidTypeForm]
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    traceback: Annotated[bool, typer.Option(_TRACEBACK, help="Show where errors arise.")] = False,
) -> None:
    if version:
        typer.echo(f"jrb {_version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _version() -> str:
    return sys.modules["jrb"].__version__


def run(arguments: list[str]) -> int:
    """Runs a command; the status. What goes wrong is told in a line."""
    rest = [word for word in arguments if word != _TRACEBACK]
    try:
        status = app(rest, prog_name="jrb", standalone_mode=False) or 0
        return status if status != _INTERRUPTED else _failed("interrupted.", _INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted.", _INTERRUPTED)
    except _UsageError as error:
        return _failed(error.format_message(), 2)
    except BrokenPipeError:  # whoever read has seen enough
        sys.stderr.close()
        return 1
    except Exception as error:
        if len(rest) < len(arguments):
            raise
        return _failed(_line(error), 2 if isinstance(error, found.NOT_THERE) else 1)


def _failed(line: str, status: int) -> int:
    sys.stderr.write(f"jrb: {printable(' '.join(line.split()))}\n")
    return status


def _line(error: Exception) -> str:
    """What an error says; of those that are not meant for people, what it is too."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'a file'}: {error.strerror.lower()}."
    if isinstance(error, OSError | ValueError | TypeError | ImportError | RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text} ({_TRACEBACK} shows where.)"
