"""Functions that open, list and delete datasets."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrb._store import commits, files
from jrb.authoring import Folder, Lock, absolute_path, checks, escape_errors
from jrb.checkpoint import hdf5
from jrb.datasets import copies
from jrb.datasets.dataset import Dataset
from jrb.datasets.format import Format, Source
from jrb.datasets.formats import OURS
from jrb.datasets.formats.arrays import check_whole
from jrb.datasets.reading.names import check

_MOST = 5  # the most names in an error message
_DEPTH = 3  # nested folders that `list` searches: Minari's `namespace/name-v0` is two of them
_MINARI_ID = re.compile(r"([-\w]+/)*[-\w]+-v\d+")


class UnknownFormatError(ValueError):
    """Raised if no format matches the files at a path."""


@escape_errors()
def open(
    source: Source, *, format: str | Format | None = None, final: str = "keep", **options: Any
) -> Dataset:
    """Opens a dataset in the files of any known format; reads only what describes it.

    Args:
        source: the path of a file or folder; or, if no such path exists, the id of a Minari
            dataset on this machine, such as "D4RL/door/human-v2". For RLDS: a sequence of
            episodes, another iterable that can be repeated, a function that returns an iterator,
            or an iterator, whose episodes are all read into memory.
        format: the name of a format, or a `jrb.datasets.Format`; None to recognise the format by
            the contents of the files.
        final: the treatment of the last step of an episode that did not terminate, if the files
            lack its next observation: "keep" marks it by `next/valid`, "drop" leaves it out.
        options: fields of the format, such as `horizon` for D4RL or `mapping` for plain arrays.
            All formats have `max_expansion`, the largest ratio of the size of arrays in memory to
            that of their files, 100 by default. Damaged or hostile files may declare more.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: no format matches (the message says what each looks for); the files are
            damaged, or declare more than `max_expansion` times what they store; or the path is
            that of a pipe, a socket or a device.
        TypeError: the format does not have one of the options.
    """
    checks.choice("final", final, ("keep", "drop"))
    # A path that does not exist may be the id of a Minari dataset.
    if isinstance(source, str | os.PathLike):
        name, source = os.fspath(source), absolute_path(source, "source")
        if not os.path.exists(source):
            source = _find_minari_folder(name, source)
        if not (os.path.isfile(source) or os.path.isdir(source)):
            raise UnknownFormatError(
                f"{source}: expected a file or a folder, got a pipe, a socket or a device."
            )
    # Choose the format, and check the options before anything is read.
    reader: Any = choose_format(source, format)
    fields = [field.name for field in dataclasses.fields(reader)]
    if unknown := sorted(options.keys() - set(fields)):
        raise TypeError(
            f"open: expected options of the format '{reader.name}' ({', '.join(fields)}), got "
            f"{', '.join(unknown)}."
        )
    # Fix the format to the present content, so that all later reads agree with the description.
    reader = (dataclasses.replace(reader, **options) if options else reader).snapshot(source)
    description = reader.describe(source)
    return Dataset(source, reader, description, np.arange(len(description.lengths)), final)


def _find_minari_folder(name: Any, path: Any) -> str:
    """Returns the folder of the Minari dataset `name`; raises that `path` and it do not exist."""
    if not isinstance(name, str) or not _MINARI_ID.fullmatch(name):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    root = os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets"
    folder = os.path.join(absolute_path(root, "MINARI_DATASETS_PATH"), name)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{path}: no such file or directory, nor a Minari dataset at {folder}. "
            f"`minari download {name}` fetches it, or set MINARI_DATASETS_PATH."
        )
    return folder


def formats() -> dict[str, Format]:
    """Returns all formats by name, in the order they are tried; other packages' come first."""
    return {format.name: format for format in (*_installed_formats(), *OURS)}


@functools.cache
def _installed_formats() -> tuple[Format, ...]:
    """Returns the formats that other packages define as entry points of `jrb.datasets`."""
    return tuple(e.load()() for e in importlib.metadata.entry_points(group="jrb.datasets"))


def choose_format(source: Source, format: str | Format | None = None) -> Format:
    """Returns the format given as object or name, or else the first that matches the source."""
    if isinstance(format, Format):
        return format
    by_name = formats()
    if format is not None:
        check(format in by_name, "format", f"one of {[*by_name]}", repr(format))
        return by_name[format]
    # The first format that matches wins.
    for each in by_name.values():
        if each.matches(source):
            return each
    # No format matches a damaged file either, so look for damage before the source is called
    # unknown.
    hint = check_whole(source) if isinstance(source, str) else ""
    tried = "".join(f"\n  {each.name}: {each.looks_for}" for each in by_name.values())
    raise UnknownFormatError(
        f"{source!r}: expected a dataset, got something that no format matches. "
        f"Looked for:{tried}\nName the format with format=..., or write one "
        f"(jrb.datasets.Format).{hint}"
    )


@escape_errors()
def list(root: str | os.PathLike[str] | None = None) -> dict[str, Dataset]:
    """Returns the datasets in a folder by name, including copies that `cache=True` made.

    Args:
        root: the folder; None for the one that `cache=True` uses.

    Returns:
        The datasets, sorted by name. A name is a path relative to the folder; `delete` takes it.
    """
    folder = copies.root_of(root)
    datasets: dict[str, Dataset] = {}

    def search(path: str, depth: int) -> None:
        for name in sorted(os.listdir(path)) if depth and os.path.isdir(path) else ():
            inner = os.path.join(path, name)
            # Hidden folders have notes and locks; links may lead out of the folder.
            if name.startswith(".") or os.path.islink(inner):
                continue
            try:
                datasets[os.path.relpath(inner, folder)] = open(inner)
            except (ValueError, OSError):
                # A folder that is no dataset may contain some.
                search(inner, depth - 1)

    search(folder, _DEPTH)
    return datasets


@escape_errors()
def delete(name: str, root: str | os.PathLike[str] | None = None) -> None:
    """Removes a dataset from the disk; removes nothing if its folder has files of another kind.

    Args:
        name: the name that `list` gives the dataset.
        root: the folder; None for the one that `cache=True` uses.

    Raises:
        FileNotFoundError: the folder has nothing of this name.
        ValueError: the name is not that of a dataset in the folder; or the dataset's folder has
            files that do not belong to its format, which the message names.
        LockedError: another process is writing the dataset.
    """
    path = path_in(name, root)
    with copies.lock_copy(path, wait=False):  # an unfinished copy may be no dataset yet
        open(path)
        with lock_dataset(path) as is_own:
            discard(path, is_own)


def path_in(name: str, root: str | os.PathLike[str] | None) -> str:
    """Returns the path of the dataset `name` in a folder; raises if it does not exist."""
    folder = copies.root_of(root)
    # A name must not lead out of the folder, neither by its parts nor by links on its way.
    path = os.path.normpath(os.path.join(folder, name))
    is_inside = os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)
    is_inside &= path.startswith(folder + os.sep) and not os.path.islink(path)
    check(is_inside, "delete", f"the name of a dataset in {folder}", repr(name))
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    return path


@contextlib.contextmanager
def lock_dataset(path: str) -> Iterator[commits.IsOwn]:
    """Locks a dataset against its writers; yields the function that recognises its own files.

    Raises `ValueError` if the path is no dataset, or its folder has files of another kind.
    """
    is_own: commits.IsOwn = lambda path, name: False
    if os.path.islink(path):  # only the link is removed
        yield is_own
    # The files of jrb's own store are recognised by the store, all others by their format.
    elif os.path.isdir(path):
        is_ours = commits.list_generations(Folder(path))
        is_own = commits.belongs_to_store if is_ours else choose_format(path).is_own
        with lock_folder(path, is_own):
            yield is_own
    # A checkpoint in one file has a lock next to it.
    elif hdf5.is_own(path):
        with hdf5.lock_file(path):
            yield is_own
    else:
        choose_format(path)  # raises if the path is no dataset
        yield is_own


def discard(path: str, is_own: commits.IsOwn) -> None:
    """Removes a file, a link, or a folder's files for which `is_own` is true."""
    if os.path.isdir(path) and not os.path.islink(path):
        commits.remove_files(path, is_own)
    else:
        # A link is removed, and not the files to which it leads.
        os.unlink(path)


@contextlib.contextmanager
def lock_folder(path: str, is_own: commits.IsOwn) -> Iterator[None]:
    """Holds the locks of all writers in a folder; raises if it has files not of its format."""
    with contextlib.ExitStack() as stack:
        own = _check_files(path, is_own)
        locks = {name for name in own if name.endswith(commits.LOCK_SUFFIX)}
        for name in own:  # a folder with such files has a lock that writers take
            folder, last = os.path.split(name)
            if last.startswith((files.LOCK, commits.PREFIX)):
                locks.add(os.path.join(folder, files.LOCK))
        for folder, name in sorted(map(os.path.split, locks)):
            stack.callback(Lock(Folder(os.path.join(path, folder)), name).release)
        _check_files(path, is_own)  # somebody may have written before the locks were taken
        yield


def _check_files(path: str, is_own: commits.IsOwn) -> Sequence[str]:
    """Returns the files in a folder; raises unless all of them belong to its format."""
    if commits.leads_away(path):
        raise ValueError(f"{path}: expected a folder to remove, found a link or a file system.")
    names, folders = commits.list_below(path)
    own = [name for name in names if is_own(path, name)]
    used = {above for name in own for above in _above(name)}
    if own and commits.ARRAYS in folders:  # which may be empty
        used.add(commits.ARRAYS)
    # An empty folder belongs to no format: whoever made it may need it.
    others = {*names, *folders} - {*own, *used}
    if others:
        # A folder without any file of the format is named itself, not the names in it.
        tops = sorted(
            {next(up for up in (*_above(name), name) if up not in used) for name in others}
        )
        more = f" and {len(tops) - _MOST} more" * (len(tops) > _MOST)
        raise ValueError(
            f"{path}: expected only files that belong to the format found there, found "
            f"{', '.join(map(repr, tops[:_MOST]))}{more}. Nothing was removed. Move them away, or "
            "remove the folder by other means."
        )
    return own


def _above(name: str) -> Sequence[str]:
    """Returns all parent folders of a name, the outermost first."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]
