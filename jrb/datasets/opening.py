"""Which format a file is of."""

import dataclasses
import functools
import importlib.metadata
import os
from typing import Any, cast

import numpy as np

from jrb.authoring import absolute_path, checks, escaped_errors
from jrb.datasets.dataset import Dataset
from jrb.datasets.format import Format, Source
from jrb.datasets.formats import OURS
from jrb.datasets.reading import damage

_GROUP = "jrb.datasets"


class UnknownKindError(ValueError):
    """No format matches what lies at a path."""


@escaped_errors()
def open(
    source: Source, *, format: str | Format | None = None, final: str = "keep", **options: Any
) -> Dataset:
    """Opens a dataset, whatever library wrote it; reads no more than tells what is there.

    Args:
        source: the path of a file, or of a folder. For RLDS episodes: a sequence of them, anything
            else that can be gone through again and again, a function that returns an iterator, or
            an iterator, which is taken into memory.
        format: the name of a format, or one of your own (`jrb.datasets.Format`); None to recognise
            it by the contents of the files.
        final: what happens to a last step whose next observation is in no file, of an episode that
            did not terminate: "keep" marks it by `next/valid`, "drop" leaves it out.
        options: fields of the format, such as `horizon` for D4RL or `mapping` for plain arrays.
            All formats have `max_expansion`: how many times larger than the files arrays may be in
            memory, 100 by default. Damaged or hostile files declare more.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: no format matches it, with what was looked for; the files are damaged, or
            declare more than `max_expansion` times what they store; or the path is that of a pipe,
            a socket or a device.
        TypeError: an option that the format does not have.
    """
    checks.choice("final", final, ("keep", "drop"))
    source = _settled(source)
    found = _configured(chosen(source, format), options).snapshot(source)
    description = found.describe(source)
    return Dataset(source, found, description, np.arange(len(description.lengths)), final)


def formats() -> dict[str, Format]:
    """All formats by name, in the order in which they are asked; other packages' come first."""
    return {format.name: format for format in (*_others(), *OURS)}


@functools.cache
def _others() -> tuple[Format, ...]:
    """Kinds that other packages bring: entry points of the group `jrb.datasets`."""
    return tuple(entry.load()() for entry in importlib.metadata.entry_points(group=_GROUP))


def _settled(source: Source) -> Source:
    if not isinstance(source, str | os.PathLike):
        return source
    path = os.fspath(source) and absolute_path(source, "source")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    if not (os.path.isfile(path) or os.path.isdir(path)):
        raise UnknownKindError(
            f"{path}: expected a file or a folder, got a pipe, a socket or a device."
        )
    return path


def chosen(source: Source, format: str | Format | None = None) -> Format:
    """The format of a source: the one that is named, or the first that matches it.

    Raises:
        ValueError: no format does, or none has this name.
    """
    if isinstance(format, Format):
        return format
    known = formats()
    if format is not None:
        if format not in known:
            raise ValueError(f"format: expected one of {list(known)}, got {format!r}.")
        return known[format]
    for each in known.values():
        if each.matches(source):
            return each
    hint = damage.check(source) if isinstance(source, str) else ""
    looked = "".join(f"\n  {each.name}: {each.looks_for}" for each in known.values())
    raise UnknownKindError(
        f"{source!r}: expected a dataset, got something that no format matches. "
        f"Looked for:{looked}\nName the format with format=..., or write one "
        f"(jrb.datasets.Format).{hint}"
    )


def _configured(format: Format, options: dict[str, Any]) -> Format:
    if not options:
        return format
    fields = [field.name for field in dataclasses.fields(format)]
    unknown = options.keys() - set(fields)
    if unknown:
        raise TypeError(
            f"open: expected options of the format '{format.name}' ({', '.join(fields)}), got "
            f"{', '.join(sorted(unknown))}."
        )
    return dataclasses.replace(cast(Any, format), **options)
