"""The right to write in a folder."""

import contextlib
import errno
import os
import weakref

from jrb._store import files
from jrb._store.errors import LockedError
from jrb._store.files import Folder

NAME = "lock"


class Lock:
    """The right to write in a folder, of this process alone, until it is released.

    The system takes it back when the process ends, however it ends. A process that was forked off
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
        """Returns if the file that is locked still has its name."""
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
        """Gives it back; after an interrupt it may be called again."""
        _release(self._files, self._process)


def _holder(file: int) -> str:
    """Returns who has locked an open file, as far as the system says so."""
    # A line is such as `1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF`: process, device and inode.
    inode = str(os.fstat(file).st_ino)
    with contextlib.suppress(OSError, IndexError), open("/proc/locks") as lines:
        for _, kind, _, _, process, where, *_ in map(str.split, lines):
            if kind == "FLOCK" and where.split(":")[-1] == inode:
                return "this process" if process == str(os.getpid()) else f"process {process}"
    return "another one"


def _release(locked: list[int], process: int) -> None:
    """Unlocks and closes the files. An interrupt leaves all to be done again but the closing."""
    while locked and os.getpid() == process:
        import fcntl

        fcntl.flock(locked[-1], fcntl.LOCK_UN)  # also where a fork has not let go of its copy yet
        os.close(locked.pop())  # popped first: a number that is closed may soon be another file's


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _close_all() -> None:
    """Closes the files in a process that was forked off; the locks stay with the other one."""
    for lock in list(_locks):
        while lock._files:
            os.close(lock._files.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
