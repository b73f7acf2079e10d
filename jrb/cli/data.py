"""`jrb data`: the datasets in a folder, such as the copies that `cache=True` makes."""

import importlib
from typing import Annotated, Any

from jrb._util import wording
from jrb._util.wording import bytes_text, printable
from jrb.cli import console, found

typer: Any = wording.require("typer", "cli")

app: Any = typer.Typer(
    help="List, copy and delete datasets.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Root = Annotated[str | None, typer.Option(help="The folder. Default: the cache of the user.")]


@app.command("list")
def list_(
    root: Root = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List the datasets in a folder."""
    there = importlib.import_module("jrb.datasets").list(root)
    rows = [_told(name, dataset) for name, dataset in there.items()]
    if json:
        console.write_json(rows)
        return
    head = ("name", "kind", "episodes", "transitions", "memory")
    cells = [[_text(key, row[key]) for key in (*head[:-1], "nbytes")] for row in rows]
    table = console.table(head, cells, numbers=3)
    console.out().print(table if rows else console.plain(f"No datasets in {_folder(root)}."))


def _folder(root: str | None) -> str:
    return importlib.import_module("jrb.datasets.copies").root_of(root)


def _told(name: str, dataset: Any) -> dict[str, Any]:
    counts = {key: getattr(dataset, key) for key in ("episodes", "transitions", "nbytes")}
    return {"name": name, "kind": dataset.format.name, **counts}


def _text(key: str, value: Any) -> str:
    if key == "nbytes":
        return bytes_text(value)
    return value if isinstance(value, str) else f"{value:,}"


@app.command()
def delete(
    name: Annotated[str, typer.Argument(help="The name that `jrb data list` shows.")],
    root: Root = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a dataset from the disk."""
    if not yes:
        typer.confirm(f"Remove {printable(name, '')} for good?", abort=True, err=True)
    importlib.import_module("jrb.datasets").delete(name, root)
    console.out().print(console.plain(f"Removed {name}."))


@app.command()
def copy(
    source: Annotated[str, typer.Argument(help="A dataset of any kind.")],
    dest: Annotated[str, typer.Argument(help="The path of the new store; jrb.load reads it.")],
) -> None:
    """Copy a dataset into memory-mapped files. Run it again to go on after a stop."""
    storages = importlib.import_module("jrb.storages")
    versions = importlib.import_module("jrb._xla.compat")
    with versions.enable_x64():
        dataset = found.dataset(source)
        dataset.buffer(storage=storages.MemmapStorage(dest), cast=False)
    console.out().print(console.plain(f"{dest} holds {dataset.transitions:,} transitions."))
