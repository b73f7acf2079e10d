"""What tells a dataset from all others: by the looks of its files, or by all that is in them."""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import jax

from jrb._util import pytree
from jrb._xla import compat
from jrb.datasets.copying.blocks import Episodes

_PIECE = 4 << 20  # bytes


def by_looks(dataset: Episodes, num_envs: int | None) -> bytes:
    """32 bytes: another dataset, or the same after its files were written to, has others.

    Files are told by name, size and time of change.
    """
    if isinstance(dataset.source, tuple):
        return _digest(dataset, num_envs, [by_looks(part, None).hex() for part in dataset.source])
    files = [_looks(path) for path in _files(dataset.source)]
    return _digest(dataset, num_envs, files)


def by_content(dataset: Episodes, num_envs: int | None) -> bytes:
    """32 bytes: the same for the same files, wherever they lie; reads all that is in them."""
    root = dataset.source
    if isinstance(root, tuple):
        return _digest(dataset, num_envs, [by_content(part, None).hex() for part in root])
    files = [(os.path.relpath(path, root), _content(path)) for path in _files(root)]
    return _digest(dataset, num_envs, files)


def _digest(dataset: Episodes, num_envs: int | None, files: list[Any]) -> bytes:
    leaves = jax.tree_util.tree_leaves_with_path(dataset.spec)
    spec = [(pytree.leaf_name(path), str(leaf.dtype), leaf.shape) for path, leaf in leaves]
    options = repr(dataset.format), dataset.final, num_envs, compat.is_x64()
    told = hashlib.sha256(json.dumps([spec, options, files]).encode())
    for array in (dataset.numbers, dataset.lengths):
        told.update(array.astype("<i8").tobytes())
    return told.digest()


def _files(source: object) -> Iterator[str]:
    """A file; or all files below a folder, in the order of their names; links are followed."""
    if not isinstance(source, str):
        raise TypeError(
            f"expected a dataset in files, got one in a {type(source).__name__}, which nothing "
            "tells from another. Leave out the path of the storage, and cache=."
        )
    if os.path.isfile(source):
        yield source
    seen = set[str]()
    for folder, folders, names in os.walk(source, followlinks=True):
        folders[:] = [] if os.path.realpath(folder) in seen else sorted(folders)
        seen.add(os.path.realpath(folder))
        paths = (os.path.join(folder, name) for name in sorted(names))
        yield from filter(os.path.isfile, paths)


def _looks(path: str) -> tuple[str, int, int]:
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns


def _content(path: str) -> str:
    told = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            told.update(piece)
    return told.hexdigest()
