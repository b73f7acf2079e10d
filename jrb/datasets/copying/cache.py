"""Copies of datasets in a folder of the user's: each is made once, whoever asks.

```
<root>/<name>-<digest>      the copy of a dataset, told by the content of its files and its options
<root>/.known/<digest>      the content of files that look like this, which is so read but once
<root>/.locks/<name>        who makes the copy, or removes it
```
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator

from jrb._store import paths
from jrb._store.errors import LockedError
from jrb._store.files import Folder
from jrb._store.lock import Lock
from jrb._util import extras
from jrb.datasets.copying import fingerprint
from jrb.datasets.copying.blocks import Episodes

_PAUSE = 0.2  # seconds
_SIZE = 32  # bytes of a digest

Path = str | os.PathLike[str]

_log = logging.getLogger("jrb.datasets")


def settled(root: Path | None) -> str:
    """The absolute path of a folder of datasets; None for the user's, where the system has caches.

    Raises:
        ModuleNotFoundError: platformdirs is not installed, and there is no root.
    """
    if root is not None:
        return paths.absolute(root, "root")
    return extras.require("platformdirs", "datasets").user_cache_dir("jrb", appauthor=False)


def place_of(dataset: Episodes, num_envs: int | None, root: str) -> tuple[str, bytes]:
    """The path of a copy, and the 32 bytes that tell its content."""
    content = _content_of(dataset, num_envs, root)
    source = dataset.source
    whole = os.path.basename(source) if isinstance(source, str) else dataset.format.name
    name = os.path.splitext(whole)[0]
    return os.path.join(root, f"{name}-{content.hex()[:16]}"), content


def _content_of(dataset: Episodes, num_envs: int | None, root: str) -> bytes:
    """What tells a dataset by its content; its files are read only if they look new."""
    looks = fingerprint.by_looks(dataset, num_envs)
    note = os.path.join(_folder(root, ".known"), looks.hex())
    with contextlib.suppress(FileNotFoundError), open(note, "rb") as file:
        known = file.read()
        if len(known) == _SIZE:
            return known
    content = fingerprint.by_content(dataset, num_envs)
    beside = f"{note}.{os.getpid()}"
    with open(beside, "wb") as file:
        file.write(content)
    os.replace(beside, note)
    return content


@contextlib.contextmanager
def locked(path: str, wait: bool) -> Iterator[None]:
    """The right to make or remove a copy.

    Args:
        path: of the copy.
        wait: whether another process that has it is waited for.

    Raises:
        LockedError: another has it, and nobody waits.
    """
    root, name = os.path.split(path)
    folder = Folder(_folder(root, ".locks"))
    told = False
    while True:
        try:
            lock = Lock(folder, name)
            break
        except LockedError:
            if not wait:
                raise
        if not told:
            _log.warning("%s: waiting for another process, which makes this copy", path)
        told = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        lock.release()


def _folder(root: str, name: str) -> str:
    path = os.path.join(root, name)
    os.makedirs(path, exist_ok=True)
    return path
