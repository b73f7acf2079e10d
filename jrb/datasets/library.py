"""Opens, lists and removes datasets."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrb._store import generation, removal
from jrb.authoring import Folder, absolute_path, checks, escaped_errors
from jrb.checkpoint import hdf5, manifest
from jrb.datasets import copies
from jrb.datasets.dataset import Dataset
from jrb.datasets.format import Format, Source
from jrb.datasets.formats import OURS
from jrb.datasets.formats.arrays import check_whole

_DEPTH = 3  # folders, as Minari has them
_MINARI_ID = re.compile(r"([-\w]+/)*[-\w]+-v\d+")


class UnknownFormatError(ValueError):
    """No format matches the files at a path."""


@escaped_errors()
def open(
    source: Source, *, format: str | Format | None = None, final: str = "keep", **options: Any
) -> Dataset:
    """Opens a dataset, whatever library wrote it; reads no more than it needs to describe it.

    Args:
        source: the path of a file, or of a folder; or the id of a Minari dataset on this machine,
            such as "D4RL/door/human-v2", if there is nothing at that path. For RLDS episodes: a
            sequence of them, anything else that can be gone through again and again, a function
            that returns an iterator, or an iterator, which is taken into memory.
        format: the name of a format, or one of your own (`jrb.datasets.Format`); None to recognise
            it by the contents of the files.
        final: what happens to a last step whose next observation is in no file, of an episode that
            did not terminate: "keep" marks it by `next/valid`, "drop" leaves it out.
        options: fields of the format, such as `horizon` for D4RL or `mapping` for plain arrays.
            All formats have `max_expansion`, the largest ratio of the size of arrays in memory to
            that of their files, 100 by default. Damaged or hostile files may declare more.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: no format matches it, with what was looked for; the files are damaged, or
            declare more than `max_expansion` times what they store; or the path is that of a pipe,
            a socket or a device.
        TypeError: an option that the format does not have.
    """
    checks.choice("final", final, ("keep", "drop"))
    if isinstance(source, str | os.PathLike):
        name, source = os.fspath(source), os.fspath(source) and absolute_path(source, "source")
        if not os.path.exists(source):
            source = _minari_set(name, source)
        if not (os.path.isfile(source) or os.path.isdir(source)):
            raise UnknownFormatError(
                f"{source}: expected a file or a folder, got a pipe, a socket or a device."
            )
    chosen: Any = choose_format(source, format)
    fields = [field.name for field in dataclasses.fields(chosen)]
    if unknown := sorted(options.keys() - set(fields)):
        raise TypeError(
            f"open: expected options of the format '{chosen.name}' ({', '.join(fields)}), got "
            f"{', '.join(unknown)}."
        )
    chosen = (dataclasses.replace(chosen, **options) if options else chosen).snapshot(source)
    description = chosen.describe(source)
    return Dataset(source, chosen, description, np.arange(len(description.lengths)), final)


def _minari_set(name: Any, path: Any) -> str:
    """Returns the folder of a local Minari dataset by its id, where nothing is at a path.

    Raises:
        FileNotFoundError: it is no id, or none of a dataset on this machine.
    """
    if not isinstance(name, str) or not _MINARI_ID.fullmatch(name):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    root = os.environ.get("MINARI_DATASETS_PATH") or os.path.expanduser("~/.minari/datasets")
    found = os.path.join(os.path.abspath(root), name)
    if not os.path.isdir(found):
        raise FileNotFoundError(
            f"{path}: no such file or directory, nor a Minari dataset at {found}. "
            f"`minari download {name}` fetches it, or set MINARI_DATASETS_PATH."
        )
    return found


def formats() -> dict[str, Format]:
    """All formats by name, in the order in which they are asked; other packages' come first."""
    return {format.name: format for format in (*_installed_formats(), *OURS)}


@functools.cache
def _installed_formats() -> tuple[Format, ...]:
    """Returns the formats of other packages: entry points of the group `jrb.datasets`."""
    return tuple(e.load()() for e in importlib.metadata.entry_points(group="jrb.datasets"))


def choose_format(source: Source, format: str | Format | None = None) -> Format:
    """Returns the format of a source: the one that is named, or the first that matches it."""
    if isinstance(format, Format):
        return format
    by_name = formats()
    if format is not None:
        if format not in by_name:
            raise ValueError(f"format: expected one of {[*by_name]}, got {format!r}.")
        return by_name[format]
    for each in by_name.values():
        if each.matches(source):
            return each
    hint = check_whole(source) if isinstance(source, str) else ""
    looked = "".join(f"\n  {each.name}: {each.looks_for}" for each in by_name.values())
    raise UnknownFormatError(
        f"{source!r}: expected a dataset, got something that no format matches. "
        f"Looked for:{looked}\nName the format with format=..., or write one "
        f"(jrb.datasets.Format).{hint}"
    )


@escaped_errors()
def list(root: str | os.PathLike[str] | None = None) -> dict[str, Dataset]:
    """The datasets in a folder, copies that were made by `cache=True` among them, by name.

    Args:
        root: the folder; None for the one that `cache=True` uses.

    Returns:
        Names as `delete` takes them, paths below the folder, in their order.
    """
    folder = copies.root_of(root)
    datasets: dict[str, Dataset] = {}

    def search(path: str, depth: int) -> None:
        for name in sorted(os.listdir(path)) if depth and os.path.isdir(path) else ():
            inner = os.path.join(path, name)
            if name.startswith(".") or os.path.islink(inner):
                continue
            try:
                datasets[os.path.relpath(inner, folder)] = open(inner)
            except (ValueError, OSError):
                search(inner, depth - 1)

    search(folder, _DEPTH)
    return datasets


@escaped_errors()
def delete(name: str, root: str | os.PathLike[str] | None = None) -> None:
    """Removes a dataset from the disk: the files of its layout, or nothing if there are others.

    Args:
        name: as `list` has it.
        root: the folder; None for the one that `cache=True` uses.

    Raises:
        FileNotFoundError: there is none of this name.
        ValueError: it is no dataset, or not in the folder; or there are other
            files in its folder, which the message names.
        LockedError: it is being made, or written to.
    """
    path = path_in(name, root)
    with copies.locked(path, wait=False):  # an unfinished copy may be no dataset yet
        open(path)
        with locked(path) as is_own:
            discard(path, is_own)


def path_in(name: str, root: str | os.PathLike[str] | None) -> str:
    """Returns the path of a dataset of a folder; raises if there is none of this name."""
    folder = copies.root_of(root)
    path = os.path.normpath(os.path.join(folder, name))
    inside = os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)
    if not inside or not path.startswith(folder + os.sep) or os.path.islink(path):
        raise ValueError(f"delete: expected the name of a dataset in {folder}, got {name!r}.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    return path


@contextlib.contextmanager
def locked(path: str) -> Iterator[removal.IsOwn]:
    """Holds the locks of all that may write to a dataset; yields which files are its own.

    Refuses what is no dataset, and a folder with files in it that belong to something else.
    """
    is_own: removal.IsOwn = lambda path, name: False
    if os.path.islink(path):  # only the link is removed
        yield is_own
    elif os.path.isdir(path):
        is_ours = generation.numbers(Folder(path))
        is_own = manifest.is_own if is_ours else choose_format(path).is_own
        with removal.locked(path, is_own):
            yield is_own
    elif hdf5.is_own(path):
        with hdf5.locked(path):
            yield is_own
    else:
        choose_format(path)  # raises where it is no dataset
        yield is_own


def discard(path: str, is_own: removal.IsOwn) -> None:
    """Removes a file or a link, or the files in a folder that are its layout's own."""
    if os.path.isdir(path) and not os.path.islink(path):
        removal.discard(path, is_own)
    else:
        os.unlink(path)
