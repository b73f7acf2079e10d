"""The errors and warnings of a store."""

from jrb._util.wording import printable_args


class _FileError(Exception):
    """An error whose message may hold names that come from a file."""

    def __init__(self, *args: object) -> None:
        super().__init__(*printable_args(args))


class DamagedError(_FileError, ValueError):
    """A file is not what was written: cut short, changed, or missing."""


class LockedError(_FileError, RuntimeError):
    """Another process, or another thread, is writing to the same place."""


class StaleError(_FileError, ValueError):
    """Rows on the host that a state refers to were overwritten since."""


class LostWarning(UserWarning):
    """Some of the oldest committed rows are gone: the ring wrapped around and overwrote them."""
