"""The one rule by which every path of a user is read."""

import os
from typing import Any


def absolute(path: Any, name: str = "path") -> str:
    """Returns the absolute path that a user means, in which `~` is the home folder.

    It is read once, where it comes in: a later `chdir` changes nothing.

    Args:
        path: a string or an `os.PathLike`.
        name: of the argument, for messages.

    Raises:
        TypeError: it is no path.
        ValueError: it is empty, which would be the working folder.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name}: expected a path, got {path!r}.")
    text = os.fsdecode(os.fspath(path))
    if not text:
        raise ValueError(f"{name}: expected a path, got {path!r}.")
    return os.path.abspath(os.path.expanduser(text))
