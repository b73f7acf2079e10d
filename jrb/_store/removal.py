"""Removes a folder if every file in it is known to belong to its format; otherwise nothing."""

import contextlib
import os
from collections.abc import Callable, Iterator

from jrb._store import commits, files
from jrb._store.files import Folder, Lock

IsOwn = Callable[[str, str], bool]
"""A function `(path of the folder, name below it)`: True if the file belongs to a format."""

_LOCK = ".lock"  # names of locks end so in a folder where several processes write
_MOST = 5  # the most names in an error message


def is_of_store(path: str, name: str) -> bool:
    """Returns True if a file in the folder of a store was written by the store."""
    names = files.LOCK, commits.NEW, *map(commits.name_of, commits.numbers(Folder(path)))
    return commits.is_array_file(name) or (name in names and commits.is_own(Folder(path), name))


@contextlib.contextmanager
def locked(path: str, is_own: IsOwn) -> Iterator[None]:
    """Holds the locks of all writers in a folder; raises if it has files not of its format."""
    with contextlib.ExitStack() as stack:
        own = _checked(path, is_own)
        locks = {name for name in own if name.endswith(_LOCK)}
        for name in own:  # a folder with such files has a lock that writers take
            folder, last = os.path.split(name)
            if last.startswith((files.LOCK, commits.PREFIX)):
                locks.add(os.path.join(folder, files.LOCK))
        for folder, name in sorted(map(os.path.split, locks)):
            stack.callback(Lock(Folder(os.path.join(path, folder)), name).release)
        _checked(path, is_own)  # somebody may have written before the locks were taken
        yield


def discard(path: str, is_own: IsOwn) -> None:
    """Removes all files of the format in a folder, and then all empty folders.

    Generations, by which a store is recognised, are removed after its rows. Locks are removed last:
    as long as one exists, no other process begins to write or to remove.
    """

    def turn(name: str) -> tuple[int, str]:
        last = os.path.basename(name)
        is_lock = last == files.LOCK or name.endswith(_LOCK)
        return 2 if is_lock else int(last.startswith(commits.PREFIX)), name

    names, folders = _below(path)
    for name in sorted((name for name in names if is_own(path, name)), key=turn):
        files.announce("unlink", os.path.join(path, name))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
    for name in [*sorted(folders, reverse=True), ""]:
        with contextlib.suppress(OSError):  # something else is in it
            os.rmdir(os.path.join(path, name))


def _checked(path: str, is_own: IsOwn) -> list[str]:
    """Returns the files in a folder; raises unless all of them belong to its format."""
    if _leads_away(path):
        raise ValueError(f"{path}: expected a folder to remove, found a link or a file system.")
    names, folders = _below(path)
    own = [name for name in names if is_own(path, name)]
    used = {above for name in own for above in _above(name)}
    if own and commits.ARRAYS in folders:  # which may be empty
        used.add(commits.ARRAYS)
    # An empty folder belongs to no format: whoever made it may need it.
    others = {*names, *folders} - {*own, *used}
    if others:
        # A folder without any file of the format is named itself, not the names in it.
        tops = sorted(
            {next(up for up in (*_above(name), name) if up not in used) for name in others}
        )
        more = f" and {len(tops) - _MOST} more" * (len(tops) > _MOST)
        raise ValueError(
            f"{path}: expected only files that belong to the format found there, found "
            f"{', '.join(map(repr, tops[:_MOST]))}{more}. Nothing was removed. Move them away, or "
            "remove the folder by other means."
        )
    return own


def _above(name: str) -> list[str]:
    """Returns all parent folders of a name, the outermost first."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _below(path: str) -> tuple[list[str], list[str]]:
    """Returns the names of all files, and of all folders, below a folder.

    Links are not followed; they count as files, as do folders that are other file systems.
    """

    def stop(error: OSError) -> None:
        raise error

    names, below = [], []
    for at, folders, inside in os.walk(path, onerror=stop):
        start = "" if at == path else os.path.relpath(at, path) + "/"
        away = [name for name in folders if _leads_away(os.path.join(at, name))]
        folders[:] = [name for name in folders if name not in away]
        names += [start + name for name in (*inside, *away)]
        below += [start + name for name in folders]
    return names, below


def _leads_away(path: str) -> bool:
    return os.path.islink(path) or os.path.ismount(path)
