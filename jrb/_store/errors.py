"""What can be wrong with files."""

from jrb._store.printing import printable


class _FileError(Exception):
    """Whose message may hold names that come from a file."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(it) if isinstance(it, str) else it for it in args))


class DamagedError(_FileError, ValueError):
    """A file is not what was written: cut short, changed, or missing."""


class LockedError(_FileError, RuntimeError):
    """Another process, or another thread, is writing there."""


class StaleError(_FileError, ValueError):
    """What a state speaks of is not there any more: rows on the host were overwritten since."""


class LostWarning(UserWarning):
    """Some of the oldest rows that a commit had promised are gone: the ring came round to them."""
