"""Which kind a file is of."""

import dataclasses
import functools
import importlib.metadata
import os
from typing import Any, cast

import numpy as np

from jrb._store import paths
from jrb._store.printing import escaped_errors
from jrb._util import checks
from jrb.datasets.dataset import Dataset
from jrb.datasets.kind import Kind, Source
from jrb.datasets.kinds import OURS
from jrb.datasets.reading import damage

_GROUP = "jrb.datasets"


class UnknownKindError(ValueError):
    """No kind recognises what lies at a path."""


@escaped_errors()
def open(
    source: Source, *, kind: str | Kind | None = None, final: str = "keep", **options: Any
) -> Dataset:
    """Opens a dataset, whatever library wrote it; reads no more than tells what is there.

    Args:
        source: the path of a file, or of a folder. For RLDS episodes: a sequence of them, anything
            else that can be gone through again and again, a function that returns an iterator, or
            an iterator, which is taken into memory.
        kind: the name of a kind, or one of your own (`jrb.datasets.Kind`); None to recognise it by
            what is in the files.
        final: what happens to a last step whose next observation is in no file, of an episode that
            did not terminate: "keep" marks it by `next/valid`, "drop" leaves it out.
        options: fields of the kind, such as `horizon` for D4RL or `mapping` for plain arrays. All
            kinds of files have `max_expansion`: how many times larger than the files arrays may be
            in memory, 100 by default. Damaged or hostile files declare more.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: no kind recognises it, with what was looked for; the files are damaged, or
            declare more than `max_expansion` times what they store; or the path is that of a pipe,
            a socket or a device.
        TypeError: an option that the kind does not have.
    """
    checks.choice("final", final, ("keep", "drop"))
    source = _settled(source)
    found = _configured(chosen(source, kind), options).pinned(source)
    description = found.describe(source)
    return Dataset(source, found, description, np.arange(len(description.lengths)), final)


def kinds() -> dict[str, Kind]:
    """All kinds by name, in the order in which they are asked; other packages' come first."""
    return {kind.name: kind for kind in (*_others(), *OURS)}


@functools.cache
def _others() -> tuple[Kind, ...]:
    """Kinds that other packages bring: entry points of the group `jrb.datasets`."""
    return tuple(entry.load()() for entry in importlib.metadata.entry_points(group=_GROUP))


def _settled(source: Source) -> Source:
    if not isinstance(source, str | os.PathLike):
        return source
    path = os.fspath(source) and paths.absolute(source, "source")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    if not (os.path.isfile(path) or os.path.isdir(path)):
        raise UnknownKindError(
            f"{path}: expected a file or a folder, got a pipe, a socket or a device."
        )
    return path


def chosen(source: Source, kind: str | Kind | None = None) -> Kind:
    """The kind of a source: the one that is named, or the first that recognises it.

    Raises:
        ValueError: no kind does, or none has this name.
    """
    if isinstance(kind, Kind):
        return kind
    known = kinds()
    if kind is not None:
        if kind not in known:
            raise ValueError(f"kind: expected one of {list(known)}, got {kind!r}.")
        return known[kind]
    for each in known.values():
        if each.recognises(source):
            return each
    hint = damage.check(source) if isinstance(source, str) else ""
    looked = "".join(f"\n  {each.name}: {each.looks_for}" for each in known.values())
    raise UnknownKindError(
        f"{source!r}: expected a dataset, got something that no kind recognises. "
        f"Looked for:{looked}\nName the kind with kind=..., or write one (jrb.datasets.Kind).{hint}"
    )


def _configured(kind: Kind, options: dict[str, Any]) -> Kind:
    if not options:
        return kind
    fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    unknown = options.keys() - set(fields)
    if unknown:
        raise TypeError(
            f"open: expected options of the kind '{kind.name}' ({', '.join(fields) or 'none'}), "
            f"got {', '.join(sorted(unknown))}."
        )
    return dataclasses.replace(cast(Any, kind), **options)
