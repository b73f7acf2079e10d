"""`jrb convert`: from one format to another."""

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from jrb._util import wording
from jrb._util.wording import bytes_text
from jrb.cli import console, found, reports

typer: Any = wording.require("typer", "cli")

_LOADED = ("native", "h5")  # by `jrb.load`, into arrays of JAX
_WHOLE = ("native", "h5", "torchrl", "torchrl-flat")
_EPISODES = ("minari", "d4rl")
_TABLES = ("parquet", "arrow")
FORMATS = (*_WHOLE, *_EPISODES, *_TABLES)

_LOST = {
    "torchrl": "batch size, unit, transforms, and the state of samplers but priorities",
    "torchrl-flat": "batch size, unit, transforms, and the state of samplers but priorities",
    **dict.fromkeys(_EPISODES, "the description, priorities, and all other state"),
    **dict.fromkeys(_TABLES, "the description, and all state but priorities"),
}
"""What a format has no place for."""


def convert(
    source: Annotated[str, found.SOURCE],
    dest: Annotated[
        str, typer.Argument(help="The path of the result.", callback=os.path.expanduser)
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="|".join(FORMATS), help="The format of the result.")
    ],
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
) -> None:
    """Convert SOURCE to another format, at DEST."""
    _check(to, compression)
    casts = found.kind_of(source) == found.OTHER and to in _LOADED and not x64
    _check_dest(source, dest, overwrite)
    options: dict[str, Any] = {"compression": compression} if to == "h5" else {}
    options |= {"dataset_id": _minari_id(dest)} if to == "minari" else {}
    enable_x64 = importlib.import_module("jrb._xla.compat").enable_x64
    with contextlib.nullcontext() if casts else enable_x64():
        *what, cast = _opened(source, to, casts)
        with console.working(f"writing {dest}"):
            write = lambda path: _write(to, path, what, options)
            _replace(dest, write, lambda: _check_dest(source, dest, overwrite))
    size = bytes_text(reports.disk(dest))
    lost = f" It has no place for {_LOST[to]}." if to in _LOST else ""
    lost += f" As jrb.load has no 64 bits: {', '.join(cast)}; --x64 keeps them." if cast else ""
    console.out().print(console.plain(f"{dest}: {to}, {size}.{lost}"))


def _minari_id(dest: str) -> str:
    """The name of the folder, with a version, which Minari wants."""
    name = os.path.basename(os.path.normpath(dest))
    return name if re.search(r"-v\d+$", name) else re.sub(r"[^-\w]", "-", name) + "-v0"


def _check(to: str, compression: str | None) -> None:
    if to not in FORMATS:
        raise typer.BadParameter(f"--to: expected one of {', '.join(FORMATS)}, got {to!r}.")
    if compression is not None and to != "h5":
        raise typer.BadParameter("--compression: expected none but with --to h5.")


def _check_dest(source: str, dest: str, overwrite: bool) -> None:
    """Raises unless the result may go there."""
    one, other = os.path.realpath(source), os.path.realpath(dest)
    is_same = os.path.exists(dest) and os.path.samefile(source, dest)
    if is_same or os.path.commonpath([one, other]) in (one, other):
        raise ValueError(f"{dest}: expected a path apart from that of the source, got {source}.")
    if not os.path.lexists(dest):
        return
    if not overwrite:
        raise ValueError(f"{dest}: there is something already; --overwrite would replace it.")
    if found.kind_of(dest) == found.OTHER:
        found.dataset(dest)  # raises where it is none
    with _removing().locked(dest):
        pass  # raises where something else would be lost, or somebody writes


def _opened(source: str, to: str, casts: bool) -> tuple[Any, Any, list[str]]:
    """A buffer and its state; or a dataset, and None, where episodes are all that is wanted.

    The last entry tells which leaves have other dtypes than in the source.
    """
    if found.kind_of(source) != found.OTHER:
        buffer, state = found.buffer(source)
        _check_buffer(source, to, buffer, state)
        return buffer, state, []
    dataset = found.dataset(source)
    if to in _EPISODES:
        return dataset, None, []
    memmap = importlib.import_module("jrb.storages").MemmapStorage(None)
    buffer, state = dataset.buffer(storage=memmap, cast=casts)
    names = importlib.import_module("jrb._util.pytree").leaf_names(dataset.spec)
    leaves = importlib.import_module("jax").tree.leaves
    pairs = zip(names, leaves(dataset.spec), leaves(buffer.stored(state)), strict=True)
    cast = [f"{n} {a.dtype} as {b.dtype}" for n, a, b in pairs if a.dtype != b.dtype]
    return buffer, state, cast


def _check_buffer(source: str, to: str, buffer: Any, state: Any) -> None:
    """Raises where a format has no place for such buffers."""
    jrb = importlib.import_module("jrb")
    single = isinstance(buffer, jrb.ReplayBuffer) and not state.edits.shape
    if to != "native" and not (single and not buffer.storage.of_objects):
        raise ValueError(
            f"{source}: expected a single buffer of arrays with --to {to}, got several, objects, "
            "or states under vmap. --to native takes them."
        )


def _replace(dest: str, write: Callable[[str], None], check: Callable[[], None]) -> None:
    """Writes beside the path, and puts it there when it is whole; else all stays as it was."""
    temporary = f"{os.path.normpath(dest)}.new-{os.getpid()}"
    if os.path.lexists(temporary):
        raise ValueError(f"{temporary}: expected nothing there, found something. Move it away.")
    try:
        write(temporary)
        check()  # it may have taken long
        if os.path.lexists(dest):
            _swap(temporary, dest)
        else:
            os.rename(temporary, dest)
    finally:
        if os.path.isdir(temporary):
            shutil.rmtree(temporary)
        elif os.path.lexists(temporary):
            os.remove(temporary)


def _swap(temporary: str, dest: str) -> None:
    """Puts one thing in the place of another, which is removed."""
    old = f"{temporary}-old"
    with _removing().locked(dest) as is_own:
        try:
            os.rename(dest, old)
            os.rename(temporary, dest)
        finally:
            if os.path.lexists(old) and not os.path.lexists(dest):
                os.rename(old, dest)
        _removing().discard(old, is_own)


def _removing() -> Any:
    return importlib.import_module("jrb.datasets.library")


def _write(to: str, path: str, what: Sequence[Any], options: dict[str, Any]) -> None:
    buffer, state = what
    jrb = importlib.import_module("jrb")
    if to in ("native", "h5"):
        jrb.save(path, buffer, state, layout=to, **options)
    elif to in _TABLES:
        _write_table(to, path, buffer, state)
    elif to in _WHOLE:
        layout = "flat" if to == "torchrl-flat" else "default"
        jrb.checkpoint.write_torchrl(path, buffer, state, layout)
    else:
        write = {"minari": jrb.datasets.write_minari, "d4rl": jrb.datasets.write_d4rl}[to]
        write(path, buffer, state, **options)


def _write_table(to: str, path: str, buffer: Any, state: Any) -> None:
    """A table of all items, some megabytes at a time."""
    tables = importlib.import_module("jrb.tables")
    reader = tables.to_arrow(buffer, state, chunks=tables.rows_of_a_batch(buffer, state))
    if to == "parquet":
        _check_widths(reader.schema)
        make = wording.require("pyarrow.parquet", "tables").ParquetWriter
    else:
        make = wording.require("pyarrow", "tables").RecordBatchFileWriter
    with make(path, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)


def _check_widths(schema: Any) -> None:
    """Raises where Parquet would write what nobody can read."""
    empty = [field.name for field in schema if 0 in getattr(field.type, "shape", ())]
    if empty:
        raise ValueError(
            f"leaves {empty}: expected arrays of some numbers with --to parquet, got none in each. "
            "--to arrow takes them."
        )
