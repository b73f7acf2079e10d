"""A file of a recording: a line about the next one, that one, and bytes behind it.

The first line, JSON, has `format`, `version`, and length and CRC-32 of the line that follows, the
body, JSON too.
"""

import json
import os
import zlib
from typing import Any

from jrb._store.errors import DamagedError
from jrb._store.files import Folder

FORMAT, VERSION = "jrb.recording", 1
NEW = ".new"
"""What the name of a file ends with that is not whole yet."""

NONSENSE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
"""What is raised where a body is not what it should be."""

_LARGEST_FIRST = 200  # bytes of the first line

Body = dict[str, Any]


def write(folder: Folder, name: str, body: Body, data: list[memoryview]) -> int:
    """Writes a file, as a whole, and for good.

    Args:
        folder: where.
        name: what stood there before is gone.
        body: for JSON.
        data: what follows.

    Returns:
        The body's checksum.
    """
    text = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    checksum = zlib.crc32(text)
    head = {"format": FORMAT, "version": VERSION, "size": len(text), "sum": checksum}
    first = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    folder.write_new(name + NEW, [first, text, *data])
    folder.replace(name + NEW, name)
    folder.sync()
    return checksum


def first_line(file: int) -> bytes:
    """The first line of an open file."""
    return os.pread(file, _LARGEST_FIRST, 0).partition(b"\n")[0]


def read(file: int, path: str) -> tuple[Body, int, int]:
    """The body of an open file, where what follows begins, and the body's checksum.

    Raises:
        DamagedError: it is not what was written.
        ValueError: a newer version has written it.
    """
    first = first_line(file)
    try:
        head = json.loads(first)
        kind, version, size, checksum = (head[key] for key in ("format", "version", "size", "sum"))
        if kind != FORMAT or type(version) is not int or type(size) is not int:
            raise ValueError("its first line is another")
        if not 0 < size <= os.fstat(file).st_size:
            raise ValueError("it is cut short")
    except (*NONSENSE, RecursionError) as error:
        raise DamagedError(f"{path}: expected a file of a recording, got {error!r}.") from error
    if version > VERSION:
        raise ValueError(
            f"{path}: expected version {VERSION} or older, got version {version}. A newer jrb "
            "wrote this; install that one."
        )
    text = os.pread(file, size, len(first) + 1)
    if zlib.crc32(text) != checksum:
        raise DamagedError(
            f"{path}: expected the checksum {checksum!r}, found {zlib.crc32(text)}: it was cut "
            "short or damaged."
        )
    try:
        return json.loads(text), len(first) + 1 + size, checksum
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: expected a body in JSON, got {error!r}.") from error
