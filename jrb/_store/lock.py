"""The lock that gives one process the right to write in a folder."""

import contextlib
import errno
import os
import weakref

from jrb._store import files
from jrb._store.errors import LockedError
from jrb._store.files import Folder

NAME = "lock"


class Lock:
    """The right of this process alone to write in a folder, until it is released.

    The system takes it back when the process ends, however it ends. A process forked from this one
    does not have it.
    """

    def __init__(self, folder: Folder, name: str = NAME) -> None:
        self._folder, self._name, self._process = folder, name, os.getpid()
        self._files: list[int] = []  # the file that is locked; none after the lock was released
        files.announce("lock", folder.path_of(name))
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


def share(file: int) -> bool:
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
