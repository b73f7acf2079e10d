"""The right to write in a folder."""

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

    Args:
        folder: what is written in.
        name: of the file that is locked.

    Raises:
        LockedError: somebody else has it.
    """

    def __init__(self, folder: Folder, name: str = NAME) -> None:
        self._folder, self._name, self._process = folder, name, os.getpid()
        self._files: list[int] = []  # the file that is locked; none after the lock was released
        files.announce("lock", folder.path_of(name))
        weakref.finalize(self, _release, self._files, self._process)
        try:
            self._take()
            _held.add(self)
        except BaseException:
            self.release()
            raise

    def _take(self) -> None:
        try:
            import fcntl
        except ImportError as error:  # Windows
            path = self._folder.path
            raise OSError(errno.ENOSYS, "expected a system that has flock", path) from error
        while True:
            self._files.append(self._folder.open(self._name, os.O_RDWR | os.O_CREAT))
            try:
                fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise LockedError(
                    f"{self._folder.path}: expected no other writer, but one holds the lock. Wait "
                    "until it is done, or write to another path."
                ) from error
            if self._is_there():
                return
            self.release()  # it was renamed or removed meanwhile

    def _is_there(self) -> bool:
        try:
            now = self._folder.open(self._name)
        except OSError:
            return False
        try:
            return os.path.samestat(os.fstat(now), os.fstat(self._files[0]))
        finally:
            os.close(now)

    def check(self) -> None:
        """Raises unless the lock is still held, and the folder still where it was.

        Raises:
            LockedError: this is another process than the one that took it, or it was released.
            OSError: the folder, or the lock in it, was renamed, removed or replaced.
        """
        if not self._files or self._process != os.getpid():
            raise LockedError(
                f"{self._folder.path}: expected the process that opened the store, got one that "
                "was forked off from it. Write in one process only."
            )
        self._folder.check()
        if not self._is_there():
            path = self._folder.path_of(self._name)
            raise OSError(errno.ESTALE, "expected the lock that was taken, found it gone", path)

    def release(self) -> None:
        """Gives it back; after an interrupt it may be called again."""
        _release(self._files, self._process)

    def forget(self) -> None:
        """In a process that was forked off: lets go of the file, the lock stays with the other."""
        while self._files:
            os.close(self._files.pop())


def _release(locked: list[int], process: int) -> None:
    """Unlocks and closes the files. An interrupt leaves all to be done again but the closing."""
    while locked and os.getpid() == process:
        import fcntl

        fcntl.flock(locked[-1], fcntl.LOCK_UN)  # also where a fork has not let go of its copy yet
        os.close(locked.pop())  # popped first: a number that is closed may soon be another file's


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
