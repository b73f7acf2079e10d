"""What is said of whatever lies at a path; of ours without JAX, and without a look at the rows."""

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jrb._store import generation, table
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.generation import Generation
from jrb.checkpoint import manifest
from jrb.cli import found

_ROWS = "storage/"


@dataclass(frozen=True)
class Leaf:
    """An array: its name, dtype and shape, and the bytes that it takes.

    Of items, dtype and shape of one, and the bytes of all.
    """

    name: str
    dtype: str
    shape: list[int]
    nbytes: int


@dataclass(frozen=True)
class Saved:
    """A generation: its number, when it was saved, and how many items it has."""

    generation: int
    time: str | None = None
    size: Any = None
    damage: str | None = None


@dataclass(frozen=True)
class Report:
    """What is known without reading all of it; None for what is not.

    Attributes:
        path: where it lies.
        kind: "checkpoint", "store", "mix", "several", "checkpoint in HDF5", or a kind of datasets.
        description: of the buffer, as it is written.
        size: the items held; a list where `vmap` has put states side by side.
        capacity: N.
        num_envs: E.
        nbytes: as arrays.
        disk: bytes that the files take.
        episodes: how many.
        transitions: how many steps they have.
        generations: those that are there, oldest first.
        leaves: of items.
        others: arrays of the state that are not of items.
        extra: what was saved besides.
        notes: what a reader has to know.
        metadata: what the files say of themselves.
        parts: the same of each of several buffers.
    """

    path: str
    kind: str
    description: str | None = None
    size: Any = None
    capacity: int | None = None
    num_envs: int | None = None
    nbytes: int | None = None
    disk: int | None = None
    episodes: int | None = None
    transitions: int | None = None
    generations: list[Saved] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    others: list[Leaf] = field(default_factory=list)
    extra: list[Leaf] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, "Report"] = field(default_factory=dict)


def report(path: str) -> Report:
    """What is known of what lies at a path.

    Raises:
        FileNotFoundError, NotOursError: there is nothing of ours.
        DamagedError: it is not what was written.
    """
    kind = found.kind_of(path)
    if kind == found.FOLDER:
        return _of_folder(path, manifest.opened(path))
    return _of_file(path) if kind == found.FILE else _of_dataset(path)


# Checkpoints and stores.


def _of_folder(path: str, opened: Generation) -> Report:
    meta = manifest.meta_of(opened)
    facts, form = meta.get("facts") or {}, meta.get("form") or {}
    kind = {"buffer": "checkpoint", "None": "store"}.get(told := str(meta.get("kind")), told)
    parts = manifest.generations(opened)
    arrays = list(_arrays(opened))
    rows = opened.body["table"]["slots"]
    leaves = [_row_leaf(location.leaf, rows, meta) for _, location in sorted(opened.leaves.items())]
    return Report(
        path,
        kind,
        facts.get("description"),
        facts.get("size"),
        facts.get("capacity", None if parts else rows),
        facts.get("num_envs"),
        sum(leaf.nbytes for leaf in (*leaves, *arrays)),
        disk(path),
        generations=[_saved_as(Folder(path), each) for each in _numbers(path)],
        leaves=leaves,
        others=[leaf for leaf in arrays if not leaf.name.startswith(".")],
        extra=_extra(arrays),
        notes=_notes(form, opened.number),
        metadata={"versions": facts.get("versions")} if facts else {},
        parts={name: _of_part(path, opened, name) for name in parts},
    )


def _of_part(path: str, whole: Generation, name: str) -> Report:
    return _of_folder(manifest.path_of(path, name), manifest.part(path, whole, name))


def _row_leaf(leaf: table.Leaf, rows: int, meta: dict[str, Any]) -> Leaf:
    """A leaf of items; of a state's own arrays, whose first axes are of buffers and rows."""
    dtype, shape = _type_of(leaf.kind)
    if leaf.name.startswith(_ROWS) and not meta.get("form"):
        shape = shape[1 + len(meta.get("batch") or ()) :]
    return Leaf(leaf.name.removeprefix(_ROWS), dtype, shape, leaf.width * rows)


def _numbers(path: str) -> list[int]:
    return [number for number in generation.numbers(Folder(path)) if number]


def _saved_as(folder: Folder, number: int) -> Saved:
    """What a generation says first; a damaged one is said to be."""
    try:
        meta = manifest.meta_of(Generation(folder, number))
    except (DamagedError, FileNotFoundError) as error:
        return Saved(number, damage=str(error))
    facts = meta.get("facts") or {}
    return Saved(number, facts.get("time"), facts.get("size"))


def _arrays(opened: Generation) -> Iterator[Leaf]:
    """The arrays of a generation, without those by which a store knows its rows."""
    for entry in opened.body["arrays"]:
        if entry["kind"]:
            yield Leaf(entry["name"], *_type_of(entry["kind"]), entry["size"])


def _type_of(kind: Any) -> tuple[str, list[int]]:
    """Dtype and shape, as they were written down."""
    dtype, shape = (*kind, "[]")[:2] if kind else ("bytes", "[]")
    return str(dtype), shape if isinstance(shape, list) else json.loads(shape)


def _extra(arrays: list[Leaf]) -> list[Leaf]:
    begins = manifest.EXTRA
    return [
        Leaf(leaf.name.removeprefix(begins), leaf.dtype, leaf.shape, leaf.nbytes)
        for leaf in arrays
        if leaf.name.startswith(begins)
    ]


def _notes(form: dict[str, Any], number: int) -> list[str]:
    told = {
        "encoded": f"Items are encoded by {form.get('encode')}: load(path, decode=...).",
        "objects": "Items are Python objects.",
        "apart": f"{form.get('count')} items were left out: load(path, items=...).",
    }
    notes = [told[form["kind"]]] if form.get("kind") in told else []
    return notes + ["Nothing was saved to it yet."] * (not number)


def disk(path: str) -> int:
    """Bytes that files take on the disk."""
    files = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names] or [path]
    return sum(os.stat(file).st_blocks * 512 for file in files if os.path.exists(file))


# One file of HDF5.


def _of_file(path: str) -> Report:
    h5py = importlib.import_module("h5py")
    try:
        with h5py.File(path, "r", locking=False) as file:
            about = json.loads(file["jrb"][()].tobytes())
            manifest.check(path, about, manifest.ABOUT_HDF5)
            facts = about.get("facts") or {}
            capacity, rows = facts.get("capacity"), about["rows"]
            envs = facts.get("num_envs")
            others = [
                Leaf(name, str(leaf.attrs["dtype"]), list(leaf.shape), leaf.nbytes)
                for name, leaf in sorted(_datasets(h5py, file["state"]))
            ]
            leaves = list(_leaves_of(about["items"], rows * (envs or 1)))
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise DamagedError(f"{path}: expected a checkpoint in HDF5, got {error!r}.") from error
    return Report(
        path,
        "checkpoint in HDF5",
        facts.get("description"),
        facts.get("size"),
        capacity,
        envs,
        sum(leaf.nbytes for leaf in (*leaves, *others)),
        disk(path),
        episodes=len(about["trajectories"]),
        transitions=rows * (envs or 1),
        generations=[Saved(0, facts.get("time"), facts.get("size"))],
        leaves=leaves,
        others=others,
        metadata={"versions": facts.get("versions")},
    )


def _datasets(h5py: Any, group: Any) -> list[tuple[str, Any]]:
    there: list[tuple[str, Any]] = []
    note = lambda name, thing: there.append((name, thing)) if hasattr(thing, "shape") else None
    group.visititems(note)
    return there


def _leaves_of(node: Any, rows: int, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """The leaves of a structure that was written down; see `jrb.checkpoint.descriptions`."""
    if "leaf" in node:
        dtype, shape = node["leaf"]
        width = _width(dtype)
        size = rows
        for length in shape:
            size *= length
        yield Leaf("/".join(path) or ".", dtype, shape, size * width)
    for name, inner in _entries(node):
        yield from _leaves_of(inner, rows, (*path, name))


def _entries(node: Any) -> list[tuple[str, Any]]:
    named = node.get("dict") or node.get("fields")
    listed = node.get("list") or node.get("tuple") or node.get("leaves") or ()
    pairs = named if named else enumerate(listed)
    return [(str(name), inner) for name, inner in pairs]


def _width(dtype: str) -> int:
    """Bytes of a number of a dtype; of keys, of their words."""
    import_module = importlib.import_module
    if dtype.startswith("key:"):
        return 8 if dtype == "key:threefry2x32" else 16
    numpy = import_module("numpy")
    import_module("ml_dtypes")  # whose names NumPy then knows
    return numpy.dtype(dtype).itemsize


# Datasets.


def _of_dataset(path: str) -> Report:
    dataset = found.dataset(path)
    pytree = importlib.import_module("jrb._util.pytree")
    steps = dataset.transitions
    specs = pytree.jax.tree.leaves(dataset.spec)
    leaves = [
        Leaf(name, str(leaf.dtype), list(leaf.shape), steps * pytree.nbytes(leaf))
        for name, leaf in zip(pytree.leaf_names(dataset.spec), specs, strict=True)
    ]
    return Report(
        path,
        dataset.format.name,
        nbytes=dataset.nbytes,
        disk=disk(path),
        episodes=dataset.episodes,
        transitions=steps,
        leaves=leaves,
        notes=list(dataset.notes),
        metadata=dict(dataset.metadata),
    )
