"""The folders of a recording, one for each writer, and what is in them.

```
writer-20260131T120000123456-name-0a1b2c3d   of each recorder that was ever opened at the path
    head                  how the items look, and where their parts are
    chunk-000000000000    the first items, and so on without a gap
    lock                  of the process that writes
```

A file is written beside the others, synced, and renamed, and then its folder is synced: it is there
whole, or not at all, whatever happens. What was named once never changes.
"""

import json
import os
import re
import secrets
import time

from jrb._store import files, lock
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.lock import Lock
from jrb.datasets.recording import chunks, framed
from jrb.datasets.recording.heads import HEAD

_WRITER = "writer-"


def claim(path: str, name: str) -> tuple[Folder, Lock]:
    """A new folder for a writer below a path, and the right to write there.

    Raises:
        ValueError: there is something else at the path.
        OSError: it cannot be written to.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: expected a folder, or nothing, found a file.")
    files.make_folder(path)
    root = Folder(path)
    others = [one for one in root.names() if not one.startswith((_WRITER, "."))]
    if others:
        raise ValueError(
            f"{path}: expected a recording, or an empty folder, found '{others[0]}' in it. Choose "
            "another path."
        )
    now = time.time_ns() // 1000
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 1_000_000))
    own = f"{_WRITER}{moment}{now % 1_000_000:06d}-{name}-{secrets.token_hex(4)}"
    root.make(own)
    folder = Folder(root.path_of(own))
    return folder, Lock(folder)


def writers(path: str) -> list[str]:
    """The folders of all writers that have begun, in the order in which they were opened."""
    root = Folder(path)
    names = [name for name in root.names() if name.startswith(_WRITER)]
    return [name for name in names if os.path.isfile(root.path_of(f"{name}/{HEAD}"))]


def is_own(name: str) -> bool:
    """Returns whether a recorder writes files of this name, below the path of a recording."""
    file = rf"({HEAD}|{chunks.PREFIX}\d+)({re.escape(framed.NEW)})?|{lock.NAME}"
    return re.fullmatch(rf"{_WRITER}[^/]+/({file})", name) is not None


def sealed(path: str) -> tuple[tuple[str, int], ...]:
    """The chunks that are there now: the folder of each writer, and how many it has.

    Raises:
        DamagedError: a chunk is missing between others.
    """
    root = Folder(path)
    return tuple((name, _count(root, name)) for name in writers(path))


def stamps(path: str, names: list[str]) -> tuple[int, ...]:
    """Numbers by which the heads of writers are told from others that were put in their place."""
    found = [os.stat(os.path.join(path, name, HEAD)) for name in names]
    return tuple(n for stat in found for n in (stat.st_dev, stat.st_ino, stat.st_ctime_ns))


def _count(root: Folder, writer: str) -> int:
    names = {name for name in root.names(writer) if name.startswith(chunks.PREFIX)}
    count, path = 0, root.path_of(writer)
    while chunks.name_of(count) in names or os.path.isfile(f"{path}/{chunks.name_of(count)}"):
        count += 1  # a listing may pass over one that came meanwhile, and show the next
    beyond = [
        name for name in names if name > chunks.name_of(count) and not name.endswith(framed.NEW)
    ]
    if beyond:
        raise DamagedError(
            f"{path}: expected chunks without a gap, found no {chunks.name_of(count)} before "
            f"{min(beyond)}."
        )
    return count


def is_recording(path: str) -> bool:
    """Whether there is a writer's folder at a path, with a head that looks like one."""
    try:
        root = Folder(path)
        for name in writers(path):
            file = root.open(f"{name}/{HEAD}")
            try:
                return json.loads(framed.first_line(file))["format"] == framed.FORMAT
            finally:
                os.close(file)
    except (OSError, *framed.NONSENSE):
        pass
    return False
