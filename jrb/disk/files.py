"""Every operation on files that must survive a fault, one function each.

`hook`, where it is set, is called before every operation that changes something, with its name, the
path, and what else it takes; it may count, note down, raise an `OSError`, or kill the process.
Tests set it.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from typing import Any

from jrb.disk.errors import DamagedError, LockedError

Bytes = bytes | bytearray | memoryview

hook: Callable[..., Any] | None = None


def _announce(operation: str, path: str, *rest: Any) -> None:
    if hook is not None:
        hook(operation, path, *rest)


def make_folder(path: str) -> None:
    """A new folder, if there is none."""
    if not os.path.isdir(path):
        _announce("mkdir", path)
        os.makedirs(path, exist_ok=True)
        sync_folder(os.path.dirname(os.path.abspath(path)))


def write_new(path: str, parts: list[Bytes]) -> None:
    """A new file with these bytes, synced; what stood there is gone."""
    _announce("create", path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        offset = 0
        for part in parts:
            offset += write_at(file, path, offset, part)
        sync(file, path)
    finally:
        os.close(file)


def write_at(file: int, path: str, offset: int, data: Bytes) -> int:
    """Writes all of the data at an offset; a write that falls short goes on, or raises."""
    left = memoryview(data).cast("B")
    _announce("pwrite", path, offset, left)
    size = len(left)
    while left:
        written = os.pwrite(file, left, offset)
        offset, left = offset + written, left[written:]
    return size


def sync(file: int, path: str) -> None:
    """What was written to an open file is on the disk afterwards."""
    _announce("fsync", path)
    os.fsync(file)


def replace(source: str, target: str) -> None:
    """Renames a file over another, and syncs the folder."""
    _announce("replace", source, target)
    os.replace(source, target)
    sync_folder(os.path.dirname(target))


def link(source: str, target: str) -> None:
    """A second name for a file."""
    _announce("link", source, target)
    os.link(source, target)


def remove(path: str) -> None:
    """Removes a file, if it is there."""
    _announce("unlink", path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync_folder(path: str) -> None:
    """What was created, renamed and removed in a folder is on the disk afterwards."""
    _announce("fsync", path)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_file(path: str, size: int, reserve: bool) -> None:
    """A new file of zeros; what stood there is gone.

    Args:
        path: of the file.
        size: bytes.
        reserve: whether the disk sets the room aside now, or finds it when it is written to.

    Raises:
        OSError: there is no room; then there is no file.
    """
    _announce("create", path)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _announce("fallocate", path, size)
        if reserve and size:
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        os.unlink(path)
        error.filename = path
        raise
    finally:
        os.close(file)


def truncate(file: int, path: str, size: int) -> None:
    """Cuts an open file."""
    _announce("truncate", path, size)
    os.ftruncate(file, size)


def open_to_read(path: str) -> int:
    """A file, opened.

    Raises:
        DamagedError: it is a link, or no plain file.
        OSError: it is not there, or may not be read.
    """
    return _open_plain(path, os.O_RDONLY)


def open_to_write(path: str) -> int:
    """A file, opened to be read and written.

    Raises:
        As `open_to_read`.
    """
    return _open_plain(path, os.O_RDWR)


def _open_plain(path: str, how: int) -> int:
    try:
        file = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError(f"{path}: expected a plain file, found a link.") from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise DamagedError(f"{path}: expected a plain file, found something else.")
    return file


def read_all(path: str) -> bytes:
    """All of a file."""
    with os.fdopen(open_to_read(path), "rb") as file:
        return file.read()


def read_into(path: str, offset: int, target: memoryview) -> None:
    """Fills the target from an offset in a file on.

    Raises:
        DamagedError: the file is too short.
    """
    file = open_to_read(path)
    try:
        done = 0
        while done < len(target):
            count = os.preadv(file, [target[done:]], offset + done)
            if not count:
                raise DamagedError(
                    f"{path}: expected {offset + len(target)} bytes, found {offset + done}."
                )
            done += count
    finally:
        os.close(file)


def lock(path: str) -> int:
    """Takes the lock of a file, until the file that this returns is closed.

    The system lets go of it when the process ends, however it ends.

    Raises:
        LockedError: somebody else holds it.
    """
    _announce("lock", path)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise LockedError(
                f"{path}: expected no other writer, but one holds the lock. Wait until it is done, "
                "or write to another path."
            ) from error
        if _is_at(file, path):
            return file
        os.close(file)  # it was renamed or removed meanwhile


def share_lock(file: int) -> bool:
    """Takes a lock of an open file that others may share; whether that was possible."""
    return _try_lock(file, fcntl.LOCK_SH)


def lock_alone(file: int) -> bool:
    """Takes a lock of an open file that nobody else has; whether that was possible."""
    return _try_lock(file, fcntl.LOCK_EX)


def _try_lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int) -> None:
    """Gives a lock back, also for the copies that a fork has made of the file."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _is_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
