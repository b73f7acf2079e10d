"""Files and folders that are written beside their place, and renamed once they are whole."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from jrb._store import files

Path = str | os.PathLike[str]


def free(path: Path) -> str:
    """The absolute path of a place where nothing is.

    Raises:
        ValueError: there is something.
    """
    whole = files.absolute(path)
    if os.path.lexists(whole):
        raise ValueError(
            f"{whole}: expected nothing there, found something. Remove it, or choose another path."
        )
    return whole


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[str]:
    """The path of an empty file, which is synced and renamed to `path`, or removed after an error.

    Raises:
        ValueError: there is something at `path`.
        FileNotFoundError: there is no folder for it.
    """
    whole = free(path)
    folder, name = os.path.split(whole)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder}: expected a folder to write {name!r} in. Make it first.")
    handle, temporary = tempfile.mkstemp(".new", f".{name}.", folder)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_mask())
        files.sync(handle, temporary)
        files.replace(temporary, free(whole))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[str]:
    """The same of a folder, and of all that is put into it; folders above it are made.

    Raises:
        ValueError: there is something at `path`.
    """
    whole = free(path)
    above, name = os.path.split(whole)
    files.make_folder(above)
    with tempfile.TemporaryDirectory(".new", f".{name}.", above) as beside:
        folder = os.path.join(beside, name)
        files.make_folder(folder)
        yield folder
        _sync(folder)
        files.replace(folder, free(whole))


def _sync(folder: str) -> None:
    """All files below are on the disk afterwards."""
    for inner, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(inner, name)
            file = os.open(path, os.O_RDONLY)
            try:
                files.sync(file, path)
            finally:
                os.close(file)
        files.Folder(inner).sync()


def _mask() -> int:
    """The permissions that new files lack."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
