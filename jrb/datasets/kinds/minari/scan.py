"""What is in the episodes of a set of Minari, and how one of them is read.

K episodes, T steps of one.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jrb._base.expansion import Limit
from jrb.datasets.kind import Description, Episode, Source, shifted
from jrb.datasets.kinds.minari import (
    about as minari_about,
)
from jrb.datasets.kinds.minari import (
    arrow as minari_arrow,
)
from jrb.datasets.kinds.minari import (
    hdf5 as minari_hdf5,
)
from jrb.datasets.kinds.minari.leaf import Stored
from jrb.datasets.kinds.minari.summary import (
    TED,
    Form,
    Summary,
    check_alike,
    is_info,
    role,
    said,
    summary,
)
from jrb.layouts.names import nest


class Files(Protocol):
    """The open files of a set."""

    def numbers(self) -> list[int]:
        """Those of the episodes, in order."""
        ...

    def stored(self, number: int, names: Iterable[str] | None = None) -> Stored:
        """The leaves of an episode, or those of these names."""
        ...

    def attributes(self, number: int) -> dict[str, Any]:
        """What is said of an episode."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """A set, as far as it is known without its arrays.

    Attributes:
        folder: where it lies.
        numbers: those of the episodes in the files, of which some may lack.
        forms: what is read, by name.
        description: what is known of it.
    """

    folder: str
    numbers: Sequence[int]
    forms: Mapping[str, Form]
    description: Description

    def episode(self, files: Files, number: int) -> Episode:
        """An episode, read."""
        steps = int(self.description.lengths[number])
        found: dict[str, np.ndarray] = {}
        for name, array in self.read(files, number, self.forms).items():
            ted = ted_name(name)
            found[ted] = array[:steps]
            if _is_twice(name, self.forms[name]):
                found["next/" + ted] = shifted(array, steps)
        return nest(found)

    def read(self, files: Files, number: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Arrays of an episode, by name.

        Raises:
            ValueError: they are damaged, or no longer what they were.
        """
        stored, found = files.stored(self.numbers[number], names), {}
        steps = int(self.description.lengths[number])
        for name in names:
            leaf, form = stored.leaves.get(name), self.forms[name]
            if leaf is None or leaf.form != form[:2] or not steps <= leaf.rows <= steps + 1:
                raise ValueError(
                    f"{stored.where}: '{name}': expected {said(form)} with T = {steps} as when "
                    "the set was opened, got something else. Open it again."
                )
            found[name] = leaf.read()
        return found


def scanned(source: Source, max_expansion: float) -> Scan:
    """What is in all episodes; looked for once, as long as the files stay the same.

    Raises:
        ValueError: the files are damaged, or do not fit together.
    """
    folder = minari_about.folder_of(source)
    if folder is None:
        raise ValueError(
            f"{source}: expected a folder with '{minari_about.FILE}' or '{minari_about.MAIN}', or "
            "one with such a folder 'data', found none."
        )
    return _scan(folder, max_expansion, tuple(_signatures(folder)))


def _signatures(folder: str) -> Iterator[tuple[int, ...]]:
    for name in ("", minari_about.FILE, minari_about.MAIN):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(os.path.join(folder, name))
            yield found.st_ino, found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=16)
def _scan(folder: str, max_expansion: float, signatures: tuple[Any, ...]) -> Scan:
    """The signatures tell a set from what stood in the same place before."""
    about = minari_about.metadata(folder)
    limit = Limit(folder, _files_below(folder), max_expansion)
    with opened(folder, about) as files:
        numbers = files.numbers()
        _check_numbers(folder, numbers, about)
        found = [_summary(files.stored(number), limit) for number in numbers]
        facts = _facts([files.attributes(number) for number in numbers])
    forms = {name: form for name, form in found[0].forms.items() if not is_info(name)}
    for each in found:
        check_alike(each, found[0].where, forms)
    infos = {name: form for name, form in found[0].forms.items() if is_info(name)}
    kept = {name for name in infos if all(each.forms.get(name) == infos[name] for each in found)}
    forms |= {name: infos[name] for name in infos if name in kept}
    seen = frozenset[str]().union(*(each.others | each.forms.keys() for each in found))
    about["jpeg"] = [ted_name(name) for name, form in forms.items() if form.is_jpeg]
    description = Description(
        nest(_specs(forms)),
        np.array([each.steps for each in found], np.int64),
        np.array([each.is_cut for each in found]) if any(each.is_cut for each in found) else None,
        facts,
        about,
        (*_gap_note(numbers), *_notes(about, sorted(seen - forms.keys()))),
    )
    return Scan(folder, numbers, forms, description)


def _files_below(folder: str) -> Iterator[str]:
    for inner, _, names in os.walk(folder):
        yield from (os.path.join(inner, name) for name in names)


def _summary(stored: Stored, limit: Limit) -> Summary:
    """Looks at an episode whose arrays are not too large for its files."""
    for leaf in stored.leaves.values():
        limit.add(leaf.rows * math.prod(leaf.shape) * leaf.dtype.itemsize)
    return summary(stored)


@contextlib.contextmanager
def opened(folder: str, about: Mapping[str, Any]) -> Iterator[Files]:
    """The files of a set.

    Raises:
        ValueError: they are damaged, or in a format that is not known.
    """
    layout = about.get("data_format", "hdf5")
    spaces = minari_about.spaces_of(folder, about)
    if layout in minari_arrow.FORMATS:
        yield minari_arrow.Files(folder, about)
    elif layout == "hdf5":
        with contextlib.ExitStack() as stack:
            is_jpeg = about.get("jpeg_encoding", True) is True
            yield minari_hdf5.Files(folder, spaces, is_jpeg, stack)
    else:
        known = ("hdf5", *minari_arrow.FORMATS)
        raise ValueError(f"{folder}: 'data_format': expected one of {known}, got {layout!r}.")


def _check_numbers(folder: str, numbers: Sequence[int], about: Mapping[str, Any]) -> None:
    """Refuses sets with fewer or more episodes than their metadata count."""
    told = about.get("total_episodes", len(numbers))
    count = told if isinstance(told, int) and told > 0 else max(len(numbers), 1)
    if len(set(numbers)) == len(numbers) == count:
        return
    found = set(numbers)
    lacking = list(itertools.islice((each for each in range(count) if each not in found), 5))
    surplus = [each for each in numbers if each >= count][:5]
    raise ValueError(
        f"{folder}: expected the episodes 0 to {count - 1}, got {len(numbers)}; of these lack "
        f"{lacking}, not expected are {surplus}."
    )


def _gap_note(numbers: Sequence[int]) -> tuple[str, ...]:
    first, last = numbers[0], numbers[-1]
    missing = last - first + 1 - len(numbers)
    told = f"{missing} numbers are missing between the episodes {first} and {last}."
    return (told,) * (missing > 0)


def ted_name(name: str) -> str:
    """Where a leaf lies in TED."""
    head, *rest = name.split("/")
    return "/".join([TED[head], *rest])


def _is_twice(name: str, form: Form) -> bool:
    """Whether a leaf is one of the next step too."""
    return role(name) == "observations" or (is_info(name) and form.has_next)


def _specs(forms: Mapping[str, Form]) -> dict[str, jax.ShapeDtypeStruct]:
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for name, form in forms.items():
        spec = jax.ShapeDtypeStruct(form.shape, form.dtype)
        found[ted_name(name)] = spec
        if _is_twice(name, form):
            found["next/" + ted_name(name)] = spec
    return found


def _facts(attributes: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """What is said of episodes, arrays `[K]` by name; None where nothing is."""
    names = dict.fromkeys(name for each in attributes for name in each if name != "total_steps")
    return {name: _column([each.get(name) for each in attributes]) for name in names}


def _column(values: Sequence[Any]) -> np.ndarray:
    """An array `[K]` of integers, floats, flags or texts if all are such, else of objects."""
    types = {type(value) for value in values}
    if types <= {float} or types <= {bool} or types <= {str}:
        return np.array(values)
    if types <= {int}:
        for dtype in (np.int64, np.uint64):
            if np.iinfo(dtype).min <= min(values) and max(values) <= np.iinfo(dtype).max:
                return np.array(values, dtype)
    return np.fromiter(values, object, len(values))


def _notes(about: Mapping[str, Any], left_out: Sequence[str]) -> Iterator[str]:
    own = about.get("notes")
    if isinstance(own, list):
        yield from (note for note in own if isinstance(note, str))
    if about["jpeg"]:
        yield (
            f"Images of {', '.join(about['jpeg'])} are kept as JPEG, which loses detail: these are "
            "what is decoded, not what was seen."
        )
    if left_out:
        yield (
            f"Left out is what is no array of numbers, or not alike in all episodes: "
            f"{', '.join(left_out)}."
        )
