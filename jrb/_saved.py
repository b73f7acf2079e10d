"""What checkpoints and stores say of themselves, and what is wrong with them; without JAX.

Several buffers in one folder are parts: a checkpoint each, in a folder of its own name.
"""

import os
from typing import Any
from urllib.parse import quote

from jrb._store import generation, opening, removal
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.generation import Generation
from jrb._store.opening import Progress, nobody

MIX, SEVERAL, SHARDED = "mix", "several", "sharded"
"""The kinds of checkpoints that consist of others."""

H5 = "jrb-h5"
"""The format of checkpoints in one file of HDF5."""

EXTRA = ".extra/"
"""How the names of arrays begin that were saved besides."""


def folder_name(name: str) -> str:
    """A name that no file of a store has, without what has a meaning on a file system."""
    safe = quote(name, safe=" !#$&'()+,;=@[]^`{}~", errors="surrogatepass")
    taken = safe.startswith((".", "rows", "generation", "lock"))
    return f"%{ord(safe[0]):02X}{safe[1:]}" if taken else safe or "%"


def path_of(path: str, name: str) -> str:
    """The path of one of several buffers."""
    return os.path.join(path, folder_name(name))


def generations(opened: Generation) -> dict[str, int]:
    """Which generation of each buffer belongs to one of all; nothing if it is of another kind.

    Raises:
        DamagedError: it does not say so.
    """
    meta = opened.body["meta"] or {}
    if meta.get("kind") not in (MIX, SEVERAL, SHARDED):
        return {}
    found = meta.get("parts")
    if not isinstance(found, dict) or not all(type(number) is int for number in found.values()):
        raise DamagedError(f"{opened.path}: expected the generation of each part, got {found!r}.")
    return found


def known(folder: Folder, number: int) -> dict[str, int]:
    """The same of a generation that may be damaged, or gone: then nothing."""
    try:
        return generations(Generation(folder, number))
    except (DamagedError, FileNotFoundError):
        return {}


def is_own(path: str, name: str) -> bool:
    """Returns whether a file in the folder of a checkpoint was written by jrb.

    Other checkpoints that lie in the folder are not its own.

    Args:
        path: of the folder.
        name: of the file, below the folder.
    """
    part, _, rest = name.partition("/")
    if not rest or removal.is_of_store(path, name):
        return removal.is_of_store(path, name)
    folder = Folder(path)
    parts = {folder_name(one) for n in generation.numbers(folder) for one in known(folder, n)}
    return part in parts and is_own(os.path.join(path, part), rest)


def extra_names(meta: dict[str, Any]) -> list[str] | None:
    """The names of the leaves that were saved besides; None if there is nothing."""
    found = meta.get("extra")
    return None if found is None else [name.removeprefix(EXTRA) for name in found]


def opened(path: str, number: int | None = None) -> Generation:
    """A generation, the newest if none is named.

    Raises:
        FileNotFoundError: there is no checkpoint, or no such generation.
        DamagedError: it is not what was written.
    """
    folder = opening.folder_at(path)
    return generation.newest(folder) if number is None else opening.at(folder, number)


def metadata(path: str, number: int | None = None) -> dict[str, Any]:
    """See `jrb.checkpoint.metadata`."""
    found = opened(path, number)
    meta = found.body["meta"] or {}
    form, parts = meta.get("form") or {}, generations(found)
    leaves = {name: "".join(location.leaf.kind) for name, location in sorted(found.leaves.items())}
    widths = sum(column.width for column in found.columns)
    arrays = sum(entry["size"] for entry in found.body["arrays"])
    return {
        "generation": found.number,
        "kind": meta.get("kind"),
        "leaves": leaves,
        "nbytes": widths * found.body["table"]["slots"] + arrays,
        **meta.get("facts", {}),
        "items": form.get("kind", "rows"),
        "encode": form.get("encode"),
        "score": meta.get("score"),
        "extra": extra_names(meta),
        "parts": {one: metadata(path_of(path, one), n) for one, n in parts.items()},
    }


def damages(path: str, progress: Progress = nobody) -> list[str]:
    """All that is wrong, also with the parts and theirs, a line each.

    Args:
        path: of the folder.
        progress: called now and then with the share of the work that is done, from 0 to 1.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    folder = opening.folder_at(path)
    there = [known(folder, number) for number in reversed(generation.numbers(folder))]
    parts = list(dict.fromkeys(part for each in there for part in each.items()))
    missing = [(path_of(path, name), _missing(path_of(path, name), n)) for name, n in parts]
    whole = list(dict.fromkeys(where for where, lines in missing if not lines))
    first, *others = opening.steps(progress, 1 + len(whole))
    found = opening.damages(path, first)
    found += [line for _, lines in missing for line in lines]
    for where, step in zip(whole, others, strict=True):
        found += damages(where, step)
    return list(dict.fromkeys(found))


def _missing(path: str, number: int) -> list[str]:
    """What is said of a part that has to have a generation, and does not."""
    try:
        opening.at(opening.folder_at(path), number)
    except FileNotFoundError as error:
        return [str(error)]
    except (DamagedError, ValueError):
        pass  # which is found with all the others
    return []
