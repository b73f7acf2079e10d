"""Datasets of Minari, read by the `minari` package.

Before the package reads an episode, the shapes in its files are looked at here: the package follows
links into other files, allocates whatever a file declares, and trusts offsets in Arrow files.

K episodes, T steps of one.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import h5py
import jax
import numpy as np

from jrb.authoring import ExpansionLimit, require
from jrb.datasets.format import Description, Episode, Indexed, Source, shifted, spec_of
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.names import check_names
from jrb.datasets.reading.stat_cache import StatCache, file_stamps
from jrb.layouts.names import nest

METADATA = "metadata.json"
HDF5_FILE = "main_data.hdf5"
_COUNTS = {"total_episodes", "total_steps"}
_TED = {
    "observations": "observation",
    "actions": "action",
    "rewards": "next/reward",
    "terminations": "next/terminated",
    "truncations": "next/truncated",
    "infos": "info",
}
_PER_STEP = {"rewards": "biuf", "terminations": "biu", "truncations": "biu"}
"""Arrays of single numbers, and the kinds of dtypes that they may have."""


@dataclasses.dataclass(frozen=True)
class Minari(Indexed):
    """Datasets that the installed `minari` reads: the folder of one, or its folder `data`.

    Entries of a tuple become those of a dict, `_index_0` and so on. `infos` with T + 1 rows, the
    first of them from the reset, are read as observations are: `info[t]` was known before the
    action, `next/info[t]` came with the reward. Those with T rows are `info[t]`. JPEG images are
    decoded; what is no array of numbers is left out.
    """

    name: ClassVar[str] = "minari"
    looks_for: ClassVar[str] = (
        f"a folder, or one with a folder data, with {METADATA} "
        f"({', '.join(sorted(_COUNTS))}) and {HDF5_FILE}, or Arrow or Parquet files"
    )
    own_files: ClassVar[str] = (
        r"(data/)?(metadata\.json|main_data\.hdf5|additional_data_\d+\.hdf5|"
        r"\d+/(metadata\.json|[^/]+\.(arrow|parquet)))"
    )

    def matches(self, source: Source) -> bool:
        """Returns whether there are metadata of this format, and data beside them."""
        folder = _folder_of(source)
        if folder is None:
            return False
        try:
            about = _metadata(folder)
        except (ValueError, OSError):
            return False
        data_format = about.get("data_format", "hdf5")
        if data_format == "hdf5" and not os.path.isfile(os.path.join(folder, HDF5_FILE)):
            return False
        return about.keys() >= _COUNTS and data_format in ("hdf5", "arrow", "parquet")

    def describe(self, source: Source) -> Description:
        """Returns what there is, from the shapes of all arrays and the first episode."""
        return self._scan(source).description

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes of these numbers."""
        scan = self._scan(source)
        for stored in scan.stored(numbers):
            yield scan.episode(stored)

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the rewards of these episodes, without reading the rest of them."""
        for stored in self._scan(source).stored(numbers):
            with _refused(stored.where):
                rewards = stored.column("rewards")
            yield rewards

    def _scan(self, source: Source) -> "_Scan":
        """Scans a dataset, once as long as its files stay the same."""
        folder = _folder_of(source)
        if folder is None:
            raise ValueError(
                f"{source}: expected a folder with '{METADATA}', or one with such a folder 'data', "
                "found none."
            )
        paths = [folder, *(os.path.join(folder, name) for name in (METADATA, HDF5_FILE))]
        key = (folder, self.max_expansion, file_stamps(paths))
        return _scans.get(key, lambda: _scan(folder, self.max_expansion))


class Form(NamedTuple):
    """Shape and dtype of a row of an array, and its rows beyond T; None for what has no rows."""

    shape: tuple[int, ...]
    dtype: np.dtype
    beyond: int | None


class _Stored(NamedTuple):
    """An episode in its files: its number there, T, and the forms of its arrays by name.

    `column` reads an array of single numbers `[T]`; `validate` refuses what the package would read
    out of bounds.
    """

    where: str
    number: int
    steps: int
    forms: dict[str, Form]
    column: Callable[[str], np.ndarray]
    validate: Callable[[], object]

    def infos(self) -> dict[str, Form]:
        """Returns the forms of infos, which may differ between episodes."""
        return {name: form for name, form in self.forms.items() if _role(name) == "infos"}

    def rows(self) -> dict[str, tuple[Any, ...]]:
        """Returns shape and dtype of a row of each other array."""
        return {name: form[:2] for name, form in self.forms.items() if _role(name) != "infos"}


class _Scan(NamedTuple):
    """A dataset whose files were looked at: numbers of episodes there, infos that all have."""

    storage: Any
    numbers: Sequence[int]
    infos: Mapping[str, Form]
    description: Description

    def stored(self, numbers: Sequence[int]) -> Iterator[_Stored]:
        """Yields episodes as they are in the files now; refuses others than when it was opened."""
        found = _stored(self.storage, [self.numbers[number] for number in numbers])
        for number, stored in zip(numbers, found, strict=True):
            if stored.steps != (steps := self.description.lengths[number]):
                raise ValueError(
                    f"{stored.where}: expected {steps} steps as when the dataset was opened, got "
                    f"{stored.steps}. Open it again."
                )
            yield stored

    def episode(self, stored: _Stored) -> Episode:
        """Reads an episode."""
        episode, *_ = _read(self.storage, stored, self.infos)
        rows = {len(leaf) for leaf in jax.tree.leaves(episode)}
        if (spec := spec_of(episode)) != self.description.spec or rows != {stored.steps}:
            raise ValueError(
                f"{stored.where}: expected {stored.steps} steps of {self.description.spec}, as in "
                f"the first episode, got {rows} steps of {spec}."
            )
        return episode


_scans: StatCache[_Scan] = StatCache()


def _scan(folder: str, max_expansion: float) -> _Scan:
    about = _metadata(folder)
    storage = _storage(folder, about)
    numbers = _numbers(folder, storage, about)
    files = [os.path.join(inner, name) for inner, _, names in os.walk(folder) for name in names]
    limit = ExpansionLimit(folder, files, max_expansion)
    (first,) = _stored(storage, numbers[:1])
    lengths, cuts = list[int](), list[bool]()
    names, in_all = set[str](), set(first.infos().items())
    for stored in _stored(storage, numbers):
        for shape, dtype, beyond in stored.forms.values():
            limit.add((stored.steps + (beyond or 0)) * math.prod(shape) * dtype.itemsize)
        if stored.rows() != first.rows():
            raise ValueError(
                f"{stored.where}: expected rows of {first.rows()}, as in {first.where}, got "
                f"{stored.rows()}."
            )
        names |= stored.infos().keys()
        in_all &= stored.infos().items()
        lengths.append(stored.steps)
        seen = {form.beyond for name, form in stored.forms.items() if _role(name) == "observations"}
        with _refused(stored.where):
            cuts.append(seen == {0} and not stored.column("terminations")[-1])
    infos = {name: form for name, form in in_all if form.beyond in (0, 1)}
    episode, kept, others = _read(storage, first, infos)
    about["jpeg"] = [_ted_name(name) for name in _images(storage) if name in kept]
    description = Description(
        spec_of(episode),
        np.array(lengths, np.int64),
        np.array(cuts) if any(cuts) else None,
        _facts(folder, storage, numbers),
        about,
        tuple(_notes(about, numbers, sorted((names | others) - kept))),
    )
    return _Scan(storage, numbers, infos, description)


def _folder_of(source: Source) -> str | None:
    """Returns the folder where the data are; None if there is none."""
    folders = (source, os.path.join(source, "data")) if isinstance(source, str) else ()
    return next((each for each in folders if os.path.isfile(os.path.join(each, METADATA))), None)


def _metadata(folder: str) -> dict[str, Any]:
    """Returns the metadata, spaces and environments as dicts, and `environment`, its name."""
    path = os.path.join(folder, METADATA)
    try:
        with open(path, "rb") as file:
            about = json.load(file)
        for name in ("observation_space", "action_space", "env_spec", "eval_env_spec"):
            if isinstance(about.get(name), str):
                about[name] = json.loads(about[name])
        if "id" in (spec := about.get("env_spec") or {}):
            about["environment"] = spec["id"]
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: expected metadata of Minari in JSON, got: {error}") from error
    return about


@contextlib.contextmanager
def _refused(where: str) -> Iterator[None]:
    """Raises `ValueError` with the path for whatever the libraries raise over damaged files."""
    try:
        yield
    except (ImportError, PermissionError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(where.split(": ")[0]):
            raise  # one of ours
        version = require("minari", "minari").__version__
        raise ValueError(
            f"{where}: expected what minari {version} reads, got {type(error).__name__}: {error}. "
            "The files may be damaged, or of another version of Minari."
        ) from error


def _storage(folder: str, about: Mapping[str, Any]) -> Any:
    """Opens a dataset as the package's `MinariStorage`."""
    path = os.path.join(folder, METADATA)
    for name in ("observation_space", "action_space"):
        # Without a space the package makes the environment, that is, runs code that a file names.
        if not isinstance(about.get(name), dict):
            raise ValueError(f"{path}: '{name}': expected a space, got {about.get(name)!r}.")
    with _refused(path):
        return package().MinariStorage.read(folder)


def package() -> ModuleType:
    """Returns the package's module of storages, all that it may import later being there."""
    for name in ("PIL.Image", "pyarrow.dataset"):
        require(name, "minari")
    return require("minari.dataset.minari_storage", "minari")


def _images(storage: Any) -> dict[str, Any]:
    """Returns the spaces of images that are stored as JPEG, by the names of their arrays."""
    spaces = {"observations": storage.observation_space, "actions": storage.action_space}
    leaves = [leaf for role, space in spaces.items() for leaf in leaf_spaces(role, space)]
    is_image = package().is_image_space
    return {name: space for name, space in leaves if storage.jpeg_encoding and is_image(space)}


def leaf_spaces(name: str, space: Any) -> Iterator[tuple[str, Any]]:
    """Yields the spaces of single arrays of Gymnasium's space, with the names of the arrays."""
    kind = type(space).__name__
    if kind not in ("Dict", "Tuple"):
        yield name, space
        return
    numbered = {f"_index_{number}": entry for number, entry in enumerate(space.spaces)}
    for part, entry in (space.spaces if kind == "Dict" else numbered).items():
        yield from leaf_spaces(f"{name}/{part}", entry)


def _numbers(folder: str, storage: Any, about: Mapping[str, Any]) -> list[int]:
    """Returns the numbers of the episodes, in order; refuses more or fewer than are counted."""
    with _refused(folder):
        if storage.FORMAT == "hdf5":
            with hdf5.opened(os.path.join(folder, HDF5_FILE)) as file:
                names = list(file)
        else:
            with os.scandir(folder) as entries:
                names = [f"episode_{entry.name}" for entry in entries if entry.is_dir()]
        found = [re.fullmatch(r"episode_(0|[1-9]\d*)", name) for name in names]
        numbers = sorted(int(match[1]) for match in found if match)
    if not numbers or len(numbers) != about.get("total_episodes"):
        missing = next(number for number in itertools.count() if number not in set(numbers))
        raise ValueError(
            f"{folder}: expected {about.get('total_episodes')} episodes as {METADATA} says, got "
            f"{len(numbers)}; the first that is missing is {missing}."
        )
    return numbers


def _stored(storage: Any, numbers: Sequence[int]) -> Iterator[_Stored]:
    """Yields the episodes of these numbers.

    Raises:
        ValueError: one lacks an array, or has arrays of lengths that do not fit together.
    """
    in_files = _in_hdf5 if storage.FORMAT == "hdf5" else _in_arrow
    images = {name.replace("/_index_", "/"): space for name, space in _images(storage).items()}
    for number, (where, shapes, *calls) in zip(numbers, in_files(storage, numbers), strict=True):
        steps = next(iter(shapes.get("rewards", ((), None))[0]), 0)
        forms, beyond = dict[str, Form](), {role: set[int | None]() for role in _TED}
        for name, (shape, dtype) in shapes.items():
            if image := images.get(name.replace("/_index_", "/")):  # JPEG in whatever form
                shape, dtype = (*shape[:1], *image.shape), image.dtype
            is_single = len(shape) == 1 and dtype.kind in _PER_STEP.get(name, "")
            has_rows = is_single if _role(name) in _PER_STEP else bool(shape)
            forms[name] = Form(shape[1:], dtype, shape[0] - steps if has_rows else None)
            beyond[_role(name)].add(forms[name].beyond)
        exact = all(beyond[role] == {0} for role in ("actions", *_PER_STEP))
        if steps < 1 or not exact or beyond["observations"] not in ({0}, {1}):
            raise ValueError(
                f"{where}: expected T > 0 rewards, actions, and bools of terminations and "
                f"truncations, and T + 1 observations (or T), got {shapes}."
            )
        yield _Stored(where, number, steps, forms, *calls)


def _in_hdf5(storage: Any, numbers: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    path = os.path.join(storage.data_path, HDF5_FILE)
    with hdf5.opened(path) as file:
        for number in numbers:
            where = f"{path}: 'episode_{number}'"
            with _refused(where):
                group = hdf5.follow(where, file["/"].id, f"episode_{number}".encode())
                arrays = hdf5.below(h5py.Group(group))
                shapes = {name: (each.shape or (), each.dtype) for name, each in arrays.items()}
            shapes = {name: each for name, each in shapes.items() if _role(name) in _TED}
            yield where, shapes, lambda name, arrays=arrays: arrays[name][()], lambda: None


def _in_arrow(storage: Any, numbers: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    datasets = require("pyarrow.dataset", "minari")
    for number in numbers:
        where = os.path.join(storage.data_path, str(number))
        with _refused(where):
            hidden = ["_", ".", METADATA]
            files = datasets.dataset(where, format=storage.FORMAT, ignore_prefixes=hidden)
            rows, shapes = files.count_rows(), dict[str, Any]()
            for field in (each for each in files.schema if each.name in _TED):
                # The last row of all columns but these is padding.
                padding = field.name not in ("observations", "infos")
                shapes |= _arrow_shapes(field.name, field.type, (rows - padding,))
        yield (
            where,
            shapes,
            lambda name, files=files: files.to_table(columns=[name])[name].to_numpy()[:-1],
            lambda files=files: [each.validate(full=True) for each in files.to_batches()],
        )


def _arrow_shapes(name: str, kind: Any, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields the names, shapes and dtypes of the arrays in a column."""
    types = require("pyarrow", "minari").types
    if types.is_struct(kind):
        for field in map(kind.field, range(kind.num_fields)):
            yield from _arrow_shapes(f"{name}/{field.name}", field.type, shape)
    elif types.is_fixed_size_list(kind):
        yield from _arrow_shapes(name, kind.value_type, (*shape, kind.list_size))
    else:
        yield name, (shape, np.dtype(kind.to_pandas_dtype()))


def _read(
    storage: Any, stored: _Stored, infos: Mapping[str, Form]
) -> tuple[Episode, set[str], set[str]]:
    """Reads an episode with the package, and the names of what is kept and what is left out."""
    with _refused(stored.where):
        stored.validate()
        (found,) = storage.get_episodes([stored.number])
        leaves = [leaf for role in _TED for leaf in _leaves(role, found[role])]
        check_names(stored.where, [name for name, _ in leaves])
    arrays, kept, steps = dict[str, np.ndarray](), set[str](), stored.steps
    for name, leaf in leaves:
        is_array = isinstance(leaf, np.ndarray) and leaf.ndim and leaf.dtype.kind in "biufc"
        if not is_array or (_role(name) == "infos" and name not in infos):
            continue
        kept.add(name)
        arrays[_ted_name(name)] = leaf[:steps]
        if _role(name) == "observations" or (name in infos and infos[name].beyond):
            arrays["next/" + _ted_name(name)] = shifted(leaf, steps)
    return nest(arrays), kept, {name for name, _ in leaves} - kept


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, tuple):
        tree = {f"_index_{number}": entry for number, entry in enumerate(tree)}
    if isinstance(tree, dict):
        for part, entry in tree.items():
            yield from _leaves(f"{name}/{part}", entry)
    elif isinstance(tree, np.ndarray):
        yield name, np.require(tree, requirements="W")  # Arrow's own memory is read-only
    elif tree is not None:
        yield name, tree


def _role(name: str) -> str:
    return name.partition("/")[0]


def _ted_name(name: str) -> str:
    return "/".join([_TED[_role(name)], *name.split("/")[1:]])


def _facts(folder: str, storage: Any, numbers: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns the facts of all episodes, arrays `[K]` by flat names (`options/a`)."""
    with _refused(folder):
        found = [dict(_leaves("", each)) for each in storage.get_episode_metadata(numbers)]
    episodes = [{name[1:]: hdf5.plain(fact) for name, fact in each.items()} for each in found]
    names = dict.fromkeys(name for each in episodes for name in each if name != "total_steps")
    return {name: _column([each.get(name) for each in episodes]) for name in names}


def _column(values: Sequence[Any]) -> np.ndarray:
    """Returns numbers, flags or texts as an array of such if that is exact, else as objects."""
    types = {type(value) for value in values}
    if types in ({int}, {float}, {bool}, {str}):
        array = np.array(values)
        if types != {int} or array.dtype.kind in "iu":
            return array
    return np.fromiter(values, object, len(values))


def _notes(
    about: Mapping[str, Any], numbers: Sequence[int], left_out: Sequence[str]
) -> Iterator[str]:
    missing = numbers[-1] - numbers[0] + 1 - len(numbers)
    if missing:
        between = f"{numbers[0]} and {numbers[-1]}"
        yield f"{missing} numbers are missing between the episodes {between}."
    own = about.get("notes")
    yield from (note for note in own if isinstance(note, str)) if isinstance(own, list) else ()
    if about["jpeg"]:
        yield (
            f"Images of {', '.join(about['jpeg'])} are kept as JPEG, which loses detail: these are "
            "what is decoded, not what was seen."
        )
    if left_out:
        yield (
            "Left out is what is no array of numbers, or not alike in all episodes: "
            f"{', '.join(left_out)}."
        )
