"""The errors and warnings of a store."""

import contextlib
from collections.abc import Iterator

from jrb._util.wording import printable_args


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
