"""Files that are written beside their place, and renamed once they are whole."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from jrb._store import files


@contextlib.contextmanager
def written_beside(path: str | os.PathLike[str]) -> Iterator[str]:
    """The path of an empty file, which is renamed to `path` at the end, or removed after an error.

    Raises:
        ValueError: there is something at `path`.
        FileNotFoundError: there is no folder for it.
    """
    whole = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if os.path.lexists(whole):
        raise ValueError(
            f"{whole}: expected nothing there, found something. Write to another path."
        )
    folder, name = os.path.split(whole)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder}: expected a folder to write {name!r} in. Make it first.")
    handle, temporary = tempfile.mkstemp(".new", f".{name}.", folder)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_mask())
        files.sync(handle, temporary)
        files.replace(temporary, whole)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)


def _mask() -> int:
    """The permissions that new files lack."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
