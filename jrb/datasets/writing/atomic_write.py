"""Files and folders that are written beside their place, and renamed once they are whole."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator

from jrb.authoring import Folder, absolute_path


def absent(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a place where nothing is.

    Raises:
        ValueError: there is something.
    """
    target = absolute_path(path)
    if os.path.lexists(target):
        raise ValueError(
            f"{target}: expected nothing there, found something. Remove it, or choose another path."
        )
    return target


@contextlib.contextmanager
def new_path(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields a path for a new file or folder, which is synced and renamed to `path`.

    Folders above it are made. After an error nothing is left at either path.

    Raises:
        ValueError: there is something at `path`.
    """
    target = absent(path)
    above, name = os.path.split(target)
    os.makedirs(above, exist_ok=True)
    folder, temporary = Folder(above), f".{name}.{secrets.token_hex(4)}.new"
    new = folder.path_of(temporary)
    try:
        yield new
        for inner, _, names in os.walk(new):
            for each in names:
                _sync_file(os.path.join(inner, each))
            Folder(inner).sync()
        if os.path.isfile(new):
            _sync_file(new)
        absent(target)  # something may have come meanwhile
        folder.replace(temporary, name)
        folder.sync()
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)


def _sync_file(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
