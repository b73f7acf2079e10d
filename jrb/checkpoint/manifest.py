"""Reads the metadata of checkpoints and stores, and finds their damage, without JAX.

Several buffers in one folder are parts: each is a checkpoint in a subfolder with its name.
"""

import os
from typing import Any
from urllib.parse import quote

from jrb._store import generation, opening, removal
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.generation import Generation
from jrb._store.opening import Progress, no_progress

MIX, SEVERAL, SHARDED = "mix", "several", "sharded"
"""The kinds of checkpoints that consist of others."""

HDF5 = "jrb-h5"
"""The format of checkpoints in one file of HDF5."""

EXTRA = ".extra/"
"""The prefix of the names of arrays that are further data of the user, `save(extra=...)`."""


def folder_name(name: str) -> str:
    """Returns the name of a part's folder, which is safe for any file system."""
    # The name must differ from all files that a store has in the same folder, in any version.
    safe = quote(name, safe=" !#$&'()+,;=@[]^`{}~", errors="surrogatepass")
    is_taken = safe.startswith((".", "rows", "generation", "lock"))
    return f"%{ord(safe[0]):02X}{safe[1:]}" if is_taken else safe or "%"


def path_of(path: str, name: str) -> str:
    """Returns the path of a part, which is one of several buffers in a checkpoint."""
    return os.path.join(path, folder_name(name))


def generations(saved: Generation) -> dict[str, int]:
    """Returns the generation of each part in a common one, by name; {} for a single buffer."""
    return {name: number for name, (number, _) in saved.meta.get("parts", {}).items()}


def part(path: str, whole: Generation, name: str) -> Generation:
    """Returns the generation of a part to which the common one at `path`, `whole`, refers."""
    number, identity = whole.meta["parts"][name]
    one = open_generation(path_of(path, name), number)
    if identity != one.identity:
        raise DamagedError(
            f"{one.path}: expected part '{name}' as {whole.path} names it, found one of another "
            "save. Put back the folder that belongs there; copy a checkpoint only as a whole."
        )
    return one


def readable_generations(folder: Folder, number: int) -> dict[str, int]:
    """Returns `generations` of generation `number`; {} if it is damaged or was removed."""
    try:
        return generations(Generation(folder, number))
    except (DamagedError, FileNotFoundError):
        return {}


def is_checkpoint(path: str) -> bool:
    """Returns True if a folder has a generation of a checkpoint or a store, even a damaged one."""
    try:
        folder = opening.folder_at(path)
        last = generation.last(folder)
        return last is not None and generation.is_own(folder, generation.name_of(last))
    except OSError:
        return False


def is_own(path: str, name: str) -> bool:
    """Returns True if a file in a checkpoint's folder, such as `a/lock`, belongs to the checkpoint.

    Files of other checkpoints in the folder do not.
    """
    # A part's folder belongs to the checkpoint only if a common generation refers to the part.
    part, _, inner = name.partition("/")
    if not inner or removal.is_of_store(path, name):
        return removal.is_of_store(path, name)
    folder = Folder(path)
    named = [readable_generations(folder, number) for number in generation.numbers(folder)]
    is_part = any(part == folder_name(one) for names in named for one in names)
    return is_part and is_own(os.path.join(path, part), inner)


def numbers(path: str) -> list[int]:
    """Returns the numbers of all saved generations, oldest first, also of damaged ones."""
    return [number for number in generation.numbers(opening.folder_at(path)) if number]


def open_generation(path: str, number: int | None = None) -> Generation:
    """Returns a generation, the newest if none is named."""
    folder = opening.folder_at(path)
    return generation.newest(folder) if number is None else opening.at(folder, number)


def metadata(path: str, number: int | None = None) -> dict[str, Any]:
    """See `jrb.checkpoint.metadata`."""
    return _metadata(path, open_generation(path, number))


def _metadata(path: str, saved: Generation) -> dict[str, Any]:
    meta, parts = saved.meta, generations(saved)
    form, extra = meta.get("form") or {}, meta.get("extra")
    leaves = {name: "".join(location.leaf.kind) for name, location in sorted(saved.leaves.items())}
    widths = sum(column.width for column in saved.columns)
    arrays = sum(entry["size"] for entry in saved.body["arrays"])
    return {
        "generation": saved.number,
        "kind": meta.get("kind"),
        "leaves": leaves,
        "nbytes": widths * saved.body["table"]["slots"] + arrays,
        **meta.get("facts", {}),
        "items": form.get("kind", "rows"),
        "encode": form.get("encode"),
        "extra": None if extra is None else [name.removeprefix(EXTRA) for name in extra],
        "parts": {one: _metadata(path_of(path, one), part(path, saved, one)) for one in parts},
    }


def damages(path: str, progress: Progress = no_progress) -> list[str]:
    """Returns a line about each damage of a checkpoint, of its parts, and of their parts."""
    folder = opening.folder_at(path)
    lines: list[str] = []
    folders: dict[str, None] = {}  # of the parts that are there
    for number in filter(None, reversed(generation.numbers(folder))):
        try:
            whole = Generation(folder, number)
            names = generations(whole)
        except FileNotFoundError:
            continue  # it was removed meanwhile
        except DamagedError as error:
            lines.append(str(error))
            continue
        for name in names:
            try:
                part(path, whole, name)
            except (FileNotFoundError, ValueError) as error:
                lines.append(str(error))
                if isinstance(error, FileNotFoundError):
                    continue
            folders[path_of(path, name)] = None
    # Each part is checked once, however many common generations refer to it.
    first, *others = opening.steps(progress, 1 + len(folders))
    lines = opening.damages(path, first) + lines
    for inner, step in zip(folders, others, strict=True):
        lines += damages(inner, step)
    return list(dict.fromkeys(lines))
