"""`jrb convert`, which converts between formats, and `jrb data`, which manages datasets."""

import contextlib
import importlib
import os
import re
import shutil
from typing import Annotated, Any, Literal

from jrb._util.wording import bytes_text, printable, require
from jrb.cli import console, sources
from jrb.cli.inspect import bytes_on_disk

typer: Any = require("typer", "cli")

_LOADED = ("native", "h5")
"""The formats that `jrb.load` reads into JAX arrays."""
_TORCHRL = ("torchrl", "torchrl-flat")
_EPISODES = ("minari", "d4rl")
_TABLES = ("parquet", "arrow")
Format = Literal["native", "h5", "torchrl", "torchrl-flat", "minari", "d4rl", "parquet", "arrow"]
_PIECE = 8 << 20
"""The number of bytes of a table that are written at once."""

_LOST = {
    **dict.fromkeys(_TORCHRL, "batch size, unit, transforms, and state of samplers but priorities"),
    **dict.fromkeys(_EPISODES, "the description, priorities, and all other state"),
    **dict.fromkeys(_TABLES, "the description, and all state but priorities"),
}
"""The parts of a buffer that each format cannot store; datasets have none of them."""

data: Any = typer.Typer(
    help="List, copy and delete datasets.", invoke_without_command=True, rich_markup_mode=None
)
Root = Annotated[
    str | None,
    typer.Option(help="The folder. Default: the cache of the user.", callback=sources.user_path),
]


def convert(
    source: Annotated[str, sources.SOURCE],
    dest: Annotated[
        str, typer.Argument(help="The path of the result.", callback=sources.user_path)
    ],
    to: Annotated[Format, typer.Option("--to", help="The format of the result.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint or dataset at DEST.")
    ] = False,
    compression: Annotated[
        str | None, typer.Option(help="With --to h5: a filter such as gzip.")
    ] = None,
    x64: Annotated[
        bool,
        typer.Option("--x64", help="With native and h5: keep 64 bits, for JAX with x64."),
    ] = False,
    state: sources.State = None,
) -> None:
    """Convert SOURCE to another format, at DEST."""
    if compression is not None and to != "h5":
        raise typer.BadParameter("--compression: expected none but with --to h5.")
    # The leaves of a dataset become what `jrb.load` can read; everything else keeps its dtypes.
    casts = sources.kind_of(source) == sources.OTHER and to in _LOADED and not x64
    _check_dest(source, dest, overwrite)
    enable_x64 = importlib.import_module("jrb.authoring").enable_x64
    with contextlib.nullcontext() if casts else enable_x64():
        buffer, chosen, cast, lost = _load(source, to, casts, state)
        with console.show_spinner(f"writing {dest}"):
            _replace(source, dest, overwrite, (to, buffer, chosen, compression))
    # Say what the result lacks.
    lost = f" It has no place for {lost}." if lost else ""
    lost += f" As jrb.load has no 64 bits: {', '.join(cast)}; --x64 keeps them." if cast else ""
    console.show(console.plain(f"{dest}: {to}, {bytes_text(bytes_on_disk(dest))}.{lost}"))


def _check_dest(source: str, dest: str, overwrite: bool) -> None:
    """Raises if `dest` must not be written: it exists, is in use, or overlaps with `source`."""
    sources.check_no_overlap(source, dest)
    if not os.path.lexists(dest):
        return
    if not overwrite:
        raise ValueError(f"{dest}: there is something already; --overwrite would replace it.")
    if sources.kind_of(dest) == sources.OTHER:
        # Raise if there is anything but a dataset.
        sources.open_dataset(dest)
    # The lock raises if other files would be lost, or another process writes.
    with importlib.import_module("jrb.datasets.library").lock_dataset(dest):
        pass


def _load(source: str, to: str, casts: bool, number: str | None) -> tuple[Any, Any, list[str], str]:
    """Returns a buffer and its state, or a dataset and None for formats of episodes.

    Also returns texts on the leaves whose dtypes were converted, and on what the format lacks.
    """
    jrb: Any = importlib.import_module("jrb")
    # Load a checkpoint or store; only jrb's own format takes states of several buffers and objects.
    if sources.kind_of(source) != sources.OTHER:
        buffer, state = sources.load_buffer(source, number)
        single = isinstance(buffer, jrb.ReplayBuffer) and not state.edits.shape
        if to != "native" and not (single and not buffer.storage.of_objects):
            raise ValueError(
                f"{source}: expected a single buffer of arrays with --to {to}, got several, "
                "objects, or states under vmap. --to native takes them, --state 0 a single state."
            )
        return buffer, state, [], _LOST.get(to, "")
    # Open a dataset: formats of episodes take it as it is, others take a buffer with its items.
    dataset = sources.open_dataset(source, number)
    parts = {"the facts about episodes": dataset.facts, "the metadata": dataset.metadata}
    lost = " and ".join(name for name, part in parts.items() if part)
    if to in _EPISODES:
        return dataset, None, [], lost
    buffer, state = dataset.buffer(storage=jrb.MemmapStorage(None), cast=casts)
    # Compare the dtypes of the dataset with those of the buffer.
    names = importlib.import_module("jrb.authoring").leaf_names(dataset.spec)
    leaves = importlib.import_module("jax").tree.leaves
    pairs = zip(names, leaves(dataset.spec), leaves(buffer.item_spec(state)), strict=True)
    cast = [f"{n} {a.dtype} as {b.dtype}" for n, a, b in pairs if a.dtype != b.dtype]
    return buffer, state, cast, lost


def _replace(source: str, dest: str, overwrite: bool, result: tuple[Any, ...]) -> None:
    """Writes the result next to `dest`, and moves it there once complete; else `dest` stays."""
    temporary = f"{os.path.normpath(dest)}.new-{os.getpid()}"
    old = f"{temporary}-old"
    if os.path.lexists(temporary):
        raise ValueError(f"{temporary}: expected nothing there, found something. Move it away.")
    try:
        _write_result(temporary, dest, *result)
        # Check again, as writing may have taken long.
        _check_dest(source, dest, overwrite)
        if not os.path.lexists(dest):
            os.rename(temporary, dest)
            return
        # Move the old result away, and back if the new one cannot be moved to its place.
        library = importlib.import_module("jrb.datasets.library")
        with library.lock_dataset(dest) as is_own:
            try:
                os.rename(dest, old)
                os.rename(temporary, dest)
            finally:
                if os.path.lexists(old) and not os.path.lexists(dest):
                    os.rename(old, dest)
            library.discard(old, is_own)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def _write_result(
    path: str, dest: str, to: str, buffer: Any, state: Any, compression: str | None
) -> None:
    """Writes a result to `path`, in the format `to`; `dest` gives a dataset its name."""
    jrb: Any = importlib.import_module("jrb")
    if to in _LOADED:
        options = {"layout": "h5", "compression": compression} if to == "h5" else {}
        jrb.save(path, buffer, state, **options)
    elif to in _TORCHRL:
        layout = "flat" if to == "torchrl-flat" else "default"
        jrb.checkpoint.write_torchrl(path, buffer, state, layout)
    elif to == "d4rl":
        jrb.datasets.write_d4rl(path, buffer, state)
    elif to == "minari":
        # Minari requires a name with a version.
        name = os.path.basename(os.path.normpath(dest))
        versioned = re.search(r"-v\d+$", name) is not None
        name = name if versioned else re.sub(r"[^-\w]", "-", name) + "-v0"
        jrb.datasets.write_minari(path, buffer, state, dataset_id=name)
    else:
        # Write a table of all items, some megabytes at a time.
        nbytes = importlib.import_module("jrb.authoring").tree_nbytes(buffer.item_spec(state))
        reader = jrb.to_arrow(buffer, state, chunks=max(1, _PIECE // max(nbytes, 1)))
        empty = [field.name for field in reader.schema if 0 in getattr(field.type, "shape", ())]
        if empty and to == "parquet":
            raise ValueError(
                f"leaves {empty}: expected arrays of some numbers with --to parquet, got none in "
                "each. --to arrow takes them."
            )
        make = require("pyarrow", "tables").RecordBatchFileWriter
        if to == "parquet":
            make = require("pyarrow.parquet", "tables").ParquetWriter
        with make(path, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)


@data.callback()
def _group(context: typer.Context) -> None:  # pyright: ignore[reportInvalidTypeForm]
    console.show_help(context)


@data.command("list")
def list_(
    root: Root = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List the datasets in a folder."""
    if root is not None:
        # Raise if there is no such folder.
        os.scandir(root).close()
    counts = ("episodes", "transitions", "nbytes")
    rows = [
        {"name": name, "kind": one.format.name, **{key: getattr(one, key) for key in counts}}
        for name, one in importlib.import_module("jrb.datasets").list(root).items()
    ]
    if json:
        console.write_json(rows)
    elif rows:
        numbers = lambda row: [*(f"{row[key]:,}" for key in counts[:2]), bytes_text(row["nbytes"])]
        cells = [[row["name"], row["kind"], *numbers(row)] for row in rows]
        head = ("name", "kind", "episodes", "transitions", "memory")
        console.show(console.table(head, cells, numbers=3))
    else:
        folder = importlib.import_module("jrb.datasets.copies").root_of(root)
        console.show(console.plain(f"No datasets in {folder}."))


@data.command()
def delete(
    name: Annotated[str, typer.Argument(help="The name that `jrb data list` shows.")],
    root: Root = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a dataset from the disk."""
    library = importlib.import_module("jrb.datasets.library")
    # Raise for a wrong name before the user is asked.
    library.path_in(name, root)
    if not yes:
        typer.confirm(f"Remove {printable(name, '')} for good?", abort=True, err=True)
    library.delete(name, root)
    console.show(console.plain(f"Removed {name}."))


@data.command()
def copy(
    source: Annotated[
        str, typer.Argument(help="A dataset of any kind.", callback=sources.user_path)
    ],
    dest: Annotated[
        str,
        typer.Argument(
            help="The path of the new store; jrb.load reads it.", callback=sources.user_path
        ),
    ],
    state: sources.State = None,
) -> None:
    """Copy a dataset into memory-mapped files. Run it again to continue after an interruption."""
    jrb: Any = importlib.import_module("jrb")
    with importlib.import_module("jrb.authoring").enable_x64():
        dataset = sources.open_dataset(source, state)
        sources.check_no_overlap(source, dest)
        dataset.buffer(storage=jrb.MemmapStorage(dest), cast=False)
    console.show(console.plain(f"{dest} holds {dataset.transitions:,} transitions."))
