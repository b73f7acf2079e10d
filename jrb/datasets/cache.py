"""Copies of datasets in a folder of the user's: each is made once, whoever asks.

```
<root>/<name>-<digest>      the copy of a dataset, named by the content of its files and its options
<root>/.known/<digest>      the digest of files that look like this, so that they are read only once
<root>/.locks/<name>        held by the process that makes the copy, or removes it
```
"""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jrb._store import files
from jrb._store.errors import LockedError
from jrb._store.files import Folder
from jrb._store.lock import Lock
from jrb._util import extras, pytree
from jrb.datasets.blocks import Episodes

_PAUSE = 0.2  # seconds
_PIECE = 4 << 20  # bytes
_SIZE = 32  # bytes of a digest

Path = str | os.PathLike[str]

_log = logging.getLogger("jrb.datasets")


def root_of(root: Path | None) -> str:
    """Returns the absolute path of a folder of datasets; None for the system's cache of the user.

    Raises:
        ModuleNotFoundError: platformdirs is not installed, and there is no root.
    """
    if root is not None:
        return files.absolute(root, "root")
    return extras.require("platformdirs", "datasets").user_cache_dir("jrb", appauthor=False)


def copy_of(dataset: Episodes, num_envs: int | None, root: str) -> tuple[str, bytes]:
    """Returns the path of a copy, and the 32 bytes that tell its content."""
    note = os.path.join(_folder(root, ".known"), digest_of_looks(dataset, num_envs).hex())
    content = b""
    with contextlib.suppress(FileNotFoundError), open(note, "rb") as file:
        content = file.read()
    if len(content) != _SIZE:  # the files look new
        content = digest_of_content(dataset, num_envs)
        with open(f"{note}.{os.getpid()}", "wb") as file:
            file.write(content)
        os.replace(file.name, note)
    source = dataset.source
    whole = os.path.basename(source) if isinstance(source, str) else dataset.format.name
    name = os.path.splitext(whole)[0]
    return os.path.join(root, f"{name}-{content.hex()[:16]}"), content


@contextlib.contextmanager
def locked(path: str, wait: bool) -> Iterator[None]:
    """Holds the right to make or remove a copy.

    Args:
        path: of the copy.
        wait: True to wait for another process that has it.

    Raises:
        LockedError: another has it, and `wait` is False.
    """
    root, name = os.path.split(path)
    folder, is_warned = Folder(_folder(root, ".locks")), False
    while True:
        try:
            lock = Lock(folder, name)
            break
        except LockedError:
            if not wait:
                raise
        if not is_warned:
            _log.warning("%s: waiting for another process, which makes this copy", path)
        is_warned = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        lock.release()


def _folder(root: str, name: str) -> str:
    path = os.path.join(root, name)
    os.makedirs(path, exist_ok=True)
    return path


def digest_of_looks(dataset: Episodes, num_envs: int | None) -> bytes:
    """Returns 32 bytes that are others for other datasets, or after the files were written to.

    Files are told by name, size and time of change.
    """

    def looks(path: str, root: str) -> Any:
        about = os.stat(path)
        return path, about.st_size, about.st_mtime_ns

    return _digest(dataset, num_envs, looks)


def digest_of_content(dataset: Episodes, num_envs: int | None) -> bytes:
    """Returns 32 bytes that are the same for the same files at any path; reads all of them."""

    def content(path: str, root: str) -> Any:
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        return os.path.relpath(path, root), digest.hexdigest()

    return _digest(dataset, num_envs, content)


def _digest(dataset: Episodes, num_envs: int | None, describe: Callable[[str, str], Any]) -> bytes:
    source = dataset.source
    if isinstance(source, tuple):
        files = [_digest(part, None, describe).hex() for part in source]
    else:
        files = [describe(path, source) for path in _files(source)]
    leaves = jax.tree_util.tree_leaves_with_path(dataset.spec)
    spec = [(pytree.leaf_name(path), str(leaf.dtype), leaf.shape) for path, leaf in leaves]
    is_x64 = jax.dtypes.canonicalize_dtype(float).itemsize == 8
    options = repr(dataset.format), dataset.final, num_envs, is_x64
    digest = hashlib.sha256(json.dumps([spec, options, files]).encode())
    for array in (dataset.numbers, dataset.lengths):
        digest.update(array.astype("<i8").tobytes())
    return digest.digest()


def _files(source: object) -> Iterator[str]:
    """Returns a file; or all files below a folder, sorted by name; links are followed."""
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
