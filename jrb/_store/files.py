"""The operations on files that must survive a fault, a function for each; errors and locks.

If `hook` is set, it is called before every operation that changes something, with the operation's
name, the path, and other arguments. It may count or record operations, raise an `OSError`, or kill
the process. Only tests set it.
"""

import contextlib
import errno
import importlib.util
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from jrb._util.wording import printable_args

Bytes = bytes | bytearray | memoryview

LOCK = "lock"
"""The name of the file that the process which writes in a folder has locked."""

hook: Callable[..., Any] | None = None

# Do not follow links, do not pass files on to other programs, and do not wait for pipes.
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
# A scheme has two letters or more, unlike a drive; `pathlib` makes one slash of two.
_URL = re.compile(r"([a-z][\w+.:-]+):/+", re.IGNORECASE)
_FILE_URL = re.compile(r"file:(/|//localhost/|///+)(?!/)", re.IGNORECASE)
_IS_SUPPORTED = os.open in os.supports_dir_fd and importlib.util.find_spec("fcntl") is not None


# Errors.


class _FileError(Exception):
    """An error whose message may hold names that come from a file."""

    def __init__(self, *args: object) -> None:
        super().__init__(*printable_args(args))


class DamagedError(_FileError, ValueError):
    """A file is not what was written: cut short, changed, or missing."""


class VersionError(ValueError):
    """A file has another version of the format."""


class LockedError(_FileError, RuntimeError):
    """Another process, or another thread, is writing to the same place."""


class StaleError(_FileError, ValueError):
    """Rows on the host that a state refers to were overwritten since."""


@contextlib.contextmanager
def refuse_damage(path: str, expected: str) -> Iterator[None]:
    """Turns the errors that code raises when it parses a damaged file into a `DamagedError`."""
    try:
        yield
    except (DamagedError, VersionError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path}: expected {expected}, got {error!r}.") from error


# Operations on files.


def announce(operation: str, path: str, *arguments: Any) -> None:
    if hook is not None:
        hook(operation, path, *arguments)


def check_system(path: str) -> None:
    """Raises `OSError` on a system that lacks open folders or flock, such as Windows."""
    if not _IS_SUPPORTED:
        raise OSError(
            errno.ENOSYS,
            "expected a system with flock, such as Linux or macOS, got one without, such as "
            "Windows. Run this in WSL 2, or save the arrays of the state yourself, as the "
            "documentation shows under Installation, Windows",
            path,
        )


def absolute_path(path: Any, name: str = "path") -> str:
    """Returns a user's path as an absolute one, with `~` as the home folder.

    Each path is made absolute when the user passes it, so that a later `chdir` changes nothing.
    `file:///x` is `/x`; other URLs, which would become folders of such names here, are refused.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name}: expected a path, got {path!r}.")
    text = os.fsdecode(os.fspath(path))
    if not text or "\0" in text:
        raise ValueError(f"{name}: expected a path, got {path!r}.")
    if url := _FILE_URL.match(text):
        return os.path.abspath(f"/{unquote(text[url.end() :])}")
    if url := _URL.match(text):
        raise ValueError(
            f"{name}: expected a path on this machine, got {text!r}. Write to a folder and copy "
            f"it there yourself, or mount that place; a folder '{url[1]}:' is './{text}'."
        )
    return os.path.abspath(os.path.expanduser(text))


def check_links(path: str) -> None:
    """Raises `FileNotFoundError` if a path leads through a link to a place that does not exist."""
    while path != os.path.dirname(path):
        if os.path.islink(path) and not os.path.exists(path):
            text = f"expected no broken link, found one to {os.readlink(path)!r}, which is gone"
            raise FileNotFoundError(errno.ENOENT, f"{text}; make that, or remove the link", path)
        path = os.path.dirname(path)


class Folder:
    """An open folder; its methods act on it even if it was moved meanwhile.

    Names may have several parts, such as `arrays/items.x-1-1.bin`. Links are never followed.
    """

    def __init__(self, path: str) -> None:
        check_system(path)
        self.path: str = os.path.realpath(path)
        self._file = os.open(self.path, _FOLDER)
        weakref.finalize(self, os.close, self._file)

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def check(self) -> None:
        """Raises unless the path still leads to this folder."""
        with contextlib.suppress(OSError):
            # Compared by device and inode, as another folder may be at the same path now.
            if os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                return
        raise OSError(
            errno.ESTALE,
            "expected the folder that was opened, found that it was renamed, removed or replaced; "
            "load it from where it is now",
            self.path,
        )

    def check_free(self, size: int) -> None:
        """Raises `OSError` unless the file system has this many bytes free."""
        status = os.fstatvfs(self._file)
        free = status.f_bavail * status.f_frsize
        if free < size:
            raise OSError(
                errno.ENOSPC, f"expected room for {size} bytes on the disk, found {free}", self.path
            )

    def is_same(self, other: "Folder") -> bool:
        return os.path.samestat(os.fstat(self._file), os.fstat(other._file))

    def names(self, name: str = ".") -> list[str]:
        """Returns the names in this folder, or in one below it; none if that does not exist."""
        try:
            with self._at(f"{name}/.") as (folder, _):
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _at(self, name: str) -> Iterator[tuple[int, str]]:
        """Opens the folder that a name is in; yields its descriptor, and the name's last part."""
        *folders, last = name.split("/")
        # Folder by folder: `O_NOFOLLOW` refuses links only in the last part of a path.
        with contextlib.ExitStack() as stack:
            folder = self._file
            for part in folders:
                try:
                    folder = os.open(part, _FOLDER | _PLAIN, dir_fd=folder)
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                        raise
                    raise DamagedError(
                        f"{self.path_of(name)}: expected folders on the way, found '{part}', a "
                        "link or a file."
                    ) from error
                stack.callback(os.close, folder)
            yield folder, last

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Opens a plain file."""
        path = self.path_of(name)
        with self._at(name) as (folder, last):
            try:
                file = os.open(last, flags | _PLAIN, 0o666, dir_fd=folder)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise DamagedError(f"{path}: expected a plain file, found a link.") from error
                raise
        # A pipe or a device may hang, or act, when it is read.
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise DamagedError(f"{path}: expected a plain file, found something else.")
        return file

    def make(self, name: str) -> None:
        """Makes a folder, and its parents, where they do not exist."""
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            path = "/".join(parts[:count])
            with self._at(path) as (folder, last):
                announce("mkdir", self.path_of(path))
                with contextlib.suppress(FileExistsError):
                    os.mkdir(last, dir_fd=folder)
            # The folder is durable before anything is put into it.
            self.sync(os.path.dirname(path) or ".")

    def create(self, name: str) -> int:
        """Opens a new, empty file to be read and written; an old one of that name is emptied."""
        announce("create", self.path_of(name))
        return self.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def write_new(self, name: str, parts: list[Bytes]) -> None:
        """Writes and syncs a file with these bytes; an old one of that name is overwritten."""
        file, path = self.create(name), self.path_of(name)
        try:
            offset = 0
            for part in parts:
                offset += write_at(file, path, offset, part)
            sync(file, path)
        finally:
            os.close(file)

    def replace(self, source: str, target: str) -> None:
        """Renames a file over another in the same folder; only `sync` makes that durable."""
        announce("replace", self.path_of(source), self.path_of(target))
        with self._at(source) as (folder, one), self._at(target) as (_, other):
            os.replace(one, other, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        announce("unlink", self.path_of(name))
        with contextlib.suppress(FileNotFoundError), self._at(name) as (folder, last):
            os.unlink(last, dir_fd=folder)

    def sync(self, name: str = ".") -> None:
        """Makes it durable which names were created, renamed and removed in a folder."""
        announce("fsync", os.path.normpath(self.path_of(name)))
        with self._at(f"{name}/.") as (folder, _):
            os.fsync(folder)


def make_folder(path: str) -> None:
    """Makes a folder, and its parents, if it does not exist; raises for files and broken links."""
    check_system(path)
    check_links(path)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: expected a folder, or nothing, found a file. Move it away.")
    if not os.path.isdir(path):
        above = os.path.dirname(os.path.abspath(path))
        make_folder(above)  # each level lasts before something is put into it
        announce("mkdir", path)
        os.makedirs(path, exist_ok=True)
        Folder(above).sync()


def write_at(file: int, path: str, offset: int, data: Bytes) -> int:
    """Writes all of the data at an offset, and returns the number of bytes."""
    piece = memoryview(data).cast("B")
    announce("pwrite", path, offset, piece)
    size = len(piece)
    while piece:  # a write that falls short is continued, or raises
        count = os.pwrite(file, piece, offset)
        offset, piece = offset + count, piece[count:]
    return size


def read_at(file: int, path: str, offset: int, target: memoryview) -> None:
    """Fills the target with the bytes of a file from an offset on."""
    done = 0
    while done < len(target):
        count = os.preadv(file, [target[done:]], offset + done)
        if not count:
            raise DamagedError(
                f"{path}: expected {offset + len(target)} bytes, found {offset + done}."
            )
        done += count


def sync(file: int, path: str) -> None:
    """Makes all writes to an open file durable."""
    announce("fsync", path)
    os.fsync(file)


def resize(file: int, path: str, size: int, reserve: bool) -> None:
    """Sets the size of an open file, adding zeros; if `reserve`, allocates its disk space."""
    announce("resize", path, size)
    try:
        # Without `fallocate`, as on macOS, a file has holes, and a full disk is an error of a later
        # write.
        if reserve and size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        error.filename = path
        raise


# Locks.


class Lock:
    """The right of this process alone to write in a folder, until it is released.

    The system takes it back when the process ends, however it ends. A process forked from this one
    does not have it.
    """

    def __init__(self, folder: Folder, name: str = LOCK) -> None:
        self._folder, self._name, self._process = folder, name, os.getpid()
        self._files: list[int] = []  # the file that is locked; none after the lock was released
        announce("lock", folder.path_of(name))
        weakref.finalize(self, _release, self._files, self._process)
        import fcntl  # here, as Windows has none; a folder was opened, so this system has it

        try:
            # Between the opening and the locking the file may be removed by whoever had the lock:
            # a lock on a file without a name would keep no other process away.
            while not self._files:
                self._files.append(folder.open(name, os.O_RDWR | os.O_CREAT))
                try:
                    fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise LockedError(
                        f"{folder.path}: expected no other writer, but {_holder(self._files[0])} "
                        "holds the lock. Wait until it is done, or choose another path."
                    ) from error
                if not self._is_in_place():
                    self.release()
            _locks.add(self)
        except BaseException:
            self.release()
            raise

    def _is_in_place(self) -> bool:
        """Returns True if the locked file still has its name in the folder."""
        try:
            file = self._folder.open(self._name)
        except OSError:
            return False
        try:
            return os.path.samestat(os.fstat(file), os.fstat(self._files[0]))
        finally:
            os.close(file)

    def check(self) -> None:
        """Raises unless the lock is still held, and the folder still where it was."""
        if not self._files or self._process != os.getpid():
            raise LockedError(
                f"{self._folder.path}: expected the process that opened the store, got one that "
                "was forked off from it. Write in one process only."
            )
        self._folder.check()
        if not self._is_in_place():
            path = self._folder.path_of(self._name)
            raise OSError(errno.ESTALE, "expected the lock that was taken, found it gone", path)

    def release(self) -> None:
        """Releases the lock; after an interrupt it may be called again."""
        _release(self._files, self._process)


def lock_shared(file: int) -> bool:
    """Locks an open file for a reader until it is closed; False if it is removed, or soon will be.

    A file is removed by `remove_unless_shared`. Without locks, no process can write.
    """
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return os.fstat(file).st_nlink > 0


def remove_unless_shared(folder: Folder, name: str) -> bool:
    """Removes a file, and returns True; or returns False, if a reader has it open and locked."""
    import fcntl

    try:
        file = folder.open(name)
    except FileNotFoundError:
        return True
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        folder.remove(name)  # whoever opens it from now on finds it locked, or without a name
        return True
    finally:
        os.close(file)


def _holder(file: int) -> str:
    """Returns, for a message, which process has locked an open file, if the system says so."""
    # A line is such as `1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF`: process, device and inode.
    inode = str(os.fstat(file).st_ino)
    with contextlib.suppress(OSError, IndexError), open("/proc/locks") as lines:
        for _, kind, _, _, process, where, *_ in map(str.split, lines):
            if kind == "FLOCK" and where.split(":")[-1] == inode:
                return "this process" if process == str(os.getpid()) else f"process {process}"
    return "another one"


def _release(locked: list[int], process: int) -> None:
    """Unlocks and closes files; after an interrupt, a second call does not close a file twice."""
    while locked and os.getpid() == process:
        import fcntl

        fcntl.flock(locked[-1], fcntl.LOCK_UN)  # works even if a forked process has the file open
        os.close(locked.pop())  # popped first: the descriptor may soon belong to another file


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _close_all() -> None:
    """Closes the lock files in a forked process; the locks stay with its parent."""
    for lock in list(_locks):
        while lock._files:
            os.close(lock._files.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
