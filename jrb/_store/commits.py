"""The file of one generation, which records a commit, and which files in a folder are a store's.

The file `generation-000000000007` begins with a line of JSON: `format`, `version`, and the length
and the CRC-32 of the body. The body follows, another line of JSON, and then the bytes of arrays,
one after the other. The body has

* `generation`, the number of the commit, and `meta`, the metadata of the store's owner;
* `small`, the arrays that are in this file: for each name its `kind`, for the owner, its `size` in
  bytes, and its `sum`, CRC-32;
* `large`, the arrays in blocks: for each name its `kind`, `label`, `rows`, `width`, `block` and
  `file`, and the `sum` of its table, which is in this file: the position of each block, int64, then
  the checksum of each block, uint64 (`blocks.py`).

The file is written under another name, synced, and renamed. The largest number is the newest.
"""

import contextlib
import dataclasses
import json
import os
import re
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jrb._store import files
from jrb._store.blocks import NO_POSITION, ArraySpec
from jrb._store.files import DamagedError, Folder, VersionError, refuse_damage

FORMAT, VERSION = "jrb", 6
PREFIX, NEW = "generation-", "generation.new"
ARRAYS = "arrays"
"""The folder of the files of arrays, below that of the store."""
ARRAY_FILE = re.compile(r"arrays/(?!\.)[A-Za-z0-9%._~-]*-\d+-\d+\.bin")
"""The names of these files, below the folder of the store."""
LOCK_SUFFIX = ".lock"
"""Names of locks end so in a folder where several processes write."""

_HEAD = f'{{"format":"{FORMAT}",'.encode()  # how the file of each generation begins
_LARGEST_HEAD = 200  # bytes of the first line

IsOwn = Callable[[str, str], bool]
"""A function `(path of the folder, name below it)`: True if the file belongs to a format."""


# Files and folders of a store.


def generation_name(generation: int) -> str:
    return f"{PREFIX}{generation:012d}"


def list_generations(folder: Folder) -> list[int]:
    """Returns the numbers of a folder's generations, oldest first."""
    names = [name for name in folder.names() if re.fullmatch(PREFIX + "[0-9]{12}", name)]
    return sorted(int(name.removeprefix(PREFIX)) for name in names)


def array_files(folder: Folder) -> list[str]:
    """Returns the files in the folder of arrays, by their names below the store's folder."""
    return [f"{ARRAYS}/{name}" for name in folder.names(ARRAYS)]


def is_store_file(folder: Folder, name: str) -> bool:
    """Returns True if a file with one of a store's names was written by a store, or is empty.

    A crash may have cut the file short, or left zeros in it, and one byte may have been damaged.
    """
    try:
        with os.fdopen(folder.open(name), "rb") as file:
            head = file.read(len(_HEAD)).rstrip(b"\0")
    except DamagedError:  # a link, or no plain file
        return False
    if name == files.LOCK:
        return not head
    # In a complete head one byte may be damaged: files of other programs differ in more.
    wrong = sum(one != other for one, other in zip(head, _HEAD, strict=False))
    return wrong <= (len(head) == len(_HEAD))


def _own_names(folder: Folder) -> list[str]:
    """Returns the names in a folder that only a store gives to files."""
    own = {files.LOCK, NEW, *map(generation_name, list_generations(folder))}
    return [name for name in folder.names() if name in own]


def check_own_files(folder: Folder) -> None:
    """Raises `ValueError` if a file has one of a store's names, but was not written by a store."""
    for name in _own_names(folder):
        if not is_store_file(folder, name):
            raise ValueError(
                f"{folder.path_of(name)}: expected a file of a checkpoint, or none, found one that "
                "jrb has not written, and that would be lost. Move it away, or choose another path."
            )


def check_folder(folder: Folder) -> None:
    """Raises `ValueError` if a folder has files that belong to no store."""
    check_own_files(folder)
    own = {*_own_names(folder)}
    # A store that was killed before its first commit has a lock, and only files of arrays.
    if files.LOCK in own and all(map(ARRAY_FILE.fullmatch, array_files(folder))):
        own.add(ARRAYS)
    foreign = {*folder.names()} - own
    if foreign and not list_generations(folder):
        raise ValueError(
            f"{folder.path}: expected a checkpoint, or an empty folder, found {min(foreign)!r}, "
            "which belongs to none. Choose another path."
        )


def belongs_to_store(path: str, name: str) -> bool:
    """Returns True if a file in the folder of a store was written by the store."""
    folder = Folder(path)
    is_array = ARRAY_FILE.fullmatch(name) is not None
    return is_array or (name in _own_names(folder) and is_store_file(folder, name))


def remove_files(path: str, is_own: IsOwn) -> None:
    """Removes all files of the format in a folder, and then all empty folders.

    Generations, by which a store is recognised, are removed after its rows. Locks are removed last:
    as long as one exists, no other process begins to write or to remove.
    """

    def turn(name: str) -> tuple[int, str]:
        last = os.path.basename(name)
        is_lock = last == files.LOCK or name.endswith(LOCK_SUFFIX)
        return 2 if is_lock else int(last.startswith(PREFIX)), name

    names, folders = list_below(path)
    for name in sorted((name for name in names if is_own(path, name)), key=turn):
        files.announce("unlink", os.path.join(path, name))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
    for name in [*sorted(folders, reverse=True), ""]:
        with contextlib.suppress(OSError):  # something else is in it
            os.rmdir(os.path.join(path, name))


def list_below(path: str) -> tuple[list[str], list[str]]:
    """Returns the names of all files, and of all folders, below a folder.

    Links are not followed; they count as files, as do folders that are other file systems.
    """

    def stop(error: OSError) -> None:
        raise error

    names, below = [], []
    for at, folders, inside in os.walk(path, onerror=stop):
        start = "" if at == path else os.path.relpath(at, path) + "/"
        away = [name for name in folders if leads_away(os.path.join(at, name))]
        folders[:] = [name for name in folders if name not in away]
        names += [start + name for name in (*inside, *away)]
        below += [start + name for name in folders]
    return names, below


def leads_away(path: str) -> bool:
    return os.path.islink(path) or os.path.ismount(path)


# The file of a generation.


@dataclasses.dataclass(frozen=True)
class SmallArray:
    """An array that is in the file of its generation: what it is, for the owner, and its bytes."""

    kind: Any
    data: Any


@dataclasses.dataclass(frozen=True)
class Table:
    """The blocks of an array: `positions`, int64 `[K]`, and `checksums`, uint64 `[K]`."""

    spec: ArraySpec
    positions: np.ndarray
    checksums: np.ndarray

    def to_bytes(self) -> bytes:
        """Returns the positions and then the checksums, as they are in the file."""
        return self.positions.astype("<i8").tobytes() + self.checksums.astype("<u8").tobytes()

    @classmethod
    def from_bytes(cls, spec: ArraySpec, data: bytes | bytearray) -> "Table":
        """Returns the table that `to_bytes` wrote."""
        positions = np.frombuffer(data, "<i8", spec.num_blocks).astype(np.int64)
        checksums = np.frombuffer(data, "<u8", offset=8 * spec.num_blocks).astype(np.uint64)
        return cls(spec, positions, checksums)


@dataclasses.dataclass(frozen=True)
class Generation:
    """The record of a commit.

    Attributes:
        number: the number of the commit, from 1 on.
        meta: JSON of the owner.
        small: the arrays that are in the file of the generation, by name.
        large: the tables of arrays in blocks, by name.
        identity: its number and the CRC-32 of its body; None before it is written.
    """

    number: int
    meta: dict[str, Any]
    small: dict[str, SmallArray]
    large: dict[str, Table]
    identity: tuple[int, int] | None = None


def write_generation(folder: Folder, one: Generation) -> tuple[int, int]:
    """Writes the file of a generation under its name; only `Folder.sync` makes it durable.

    Returns its identity.
    """
    check_own_files(folder)  # as a file of that name is overwritten
    # List all arrays with their checksums in the body, in the order of their bytes in the file.
    small, large, data = {}, {}, []
    for name, array in one.small.items():
        data.append(memoryview(array.data).cast("B"))
        entry = {"size": data[-1].nbytes, "sum": zlib.crc32(data[-1])}
        small[name] = {"kind": array.kind, **entry}
    for name, table in one.large.items():
        data.append(memoryview(table.to_bytes()))
        large[name] = {**dataclasses.asdict(table.spec), "sum": zlib.crc32(data[-1])}
    body = {"generation": one.number, "meta": one.meta, "small": small, "large": large}
    # The first line checks the body, and the body checks the arrays.
    text = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    head = {"format": FORMAT, "version": VERSION, "size": len(text), "sum": zlib.crc32(text)}
    first = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    folder.write_new(NEW, [first, text, *data])
    folder.replace(NEW, generation_name(one.number))
    return one.number, head["sum"]


class OpenGeneration:
    """The open file of a generation, locked so that the generation does not expire.

    Attributes:
        folder: the folder of the store.
        path: of the file.
        generation: what the file records; small arrays are read and checked with it.
    """

    def __init__(self, folder: Folder, number: int) -> None:
        self.folder: Folder = folder
        self.path: str = folder.path_of(generation_name(number))
        file = folder.open(generation_name(number))
        self._files = [file]  # a removed file stays readable while it is open
        weakref.finalize(self, _close, self._files)
        if not files.lock_shared(file):
            raise FileNotFoundError(self.path)  # whoever writes has begun to remove it
        self.generation: Generation = _read(file, self.path, number)

    def close(self) -> None:
        """Gives the lock back: the generation may expire from now on."""
        _close(self._files)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def open_folder(path: str) -> Folder:
    """Opens the folder of a checkpoint."""
    try:
        return Folder(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{path}: expected a checkpoint, found no folder there. Save one first, or look at the "
            "path."
        ) from None


def open_generation(path: str, number: int | None = None) -> OpenGeneration:
    """Opens the generation with this number of the store at a path; None for the newest."""
    folder = open_folder(path)
    if number is None:
        return open_newest(folder)
    try:
        return OpenGeneration(folder, number)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder.path}: expected generation {number}, found {list_generations(folder)}. "
            "Save with keep=n to keep n older ones."
        ) from None


def open_newest(folder: Folder) -> OpenGeneration:
    """Opens the newest generation."""
    while True:
        some = list_generations(folder)
        if not some:
            text = "a checkpoint, found none there. Save one first, or look at the path."
            if files.LOCK in folder.names():
                text = (
                    "a store with something saved, found one to which nothing was. "
                    "jrb.save(path, buffer, state) does that."
                )
            raise FileNotFoundError(f"{folder.path}: expected {text}")
        try:
            return OpenGeneration(folder, some[-1])
        except FileNotFoundError:
            continue  # a newer one was committed meanwhile, and this one removed
        except DamagedError as error:
            if len(some) > 1:
                error.add_note(f"There is an older one: load(path, generation={some[-2]}).")
            raise


def _read(file: int, path: str, number: int) -> Generation:
    total = os.fstat(file).st_size
    first, line, _ = os.pread(file, _LARGEST_HEAD, 0).partition(b"\n")
    # The first line has no checksum: it is short, and all values in it are checked.
    with refuse_damage(path, "a generation of a store"):
        head = json.loads(first)
        version = int(head["version"])
        if version != VERSION and head["format"] == FORMAT:
            cure = "install it" if version > VERSION else "load it with that one, and save it again"
            raise VersionError(
                f"{path}: expected version {VERSION} of the format, got version {version}. Another "
                f"version of jrb wrote this; {cure}."
            )
        size, checksum = int(head["size"]), int(head["sum"])
        if head["format"] != FORMAT or not line or not 0 <= size <= total:
            raise ValueError("its first line is another")
    text, offset = os.pread(file, size, len(first) + 1), len(first) + 1 + size
    if zlib.crc32(text) != checksum:
        raise DamagedError(
            f"{path}: expected the checksum {checksum:08x}, found {zlib.crc32(text):08x}: it was "
            "damaged, or edited by hand."
        )
    with refuse_damage(path, "the body of a generation"):
        one = _parse(file, path, json.loads(text), offset, checksum)
    if one.number != number:
        raise DamagedError(
            f"{path}: expected generation {number}, got {one.number}: the file was renamed."
        )
    return one


def _parse(file: int, path: str, body: Any, offset: int, checksum: int) -> Generation:
    """Returns the generation with this body, whose arrays begin at an offset of the file."""
    small, large, total = {}, {}, os.fstat(file).st_size

    def read(name: str, size: int, checksum: int) -> bytearray:
        nonlocal offset
        if not 0 <= size <= total - offset:
            raise DamagedError(
                f"{path}: array '{name}': expected {offset + size} bytes, found {total}."
            )
        data = bytearray(size)
        files.read_at(file, path, offset, memoryview(data))
        if zlib.crc32(data) != checksum:
            raise DamagedError(
                f"{path}: array '{name}': expected the checksum {checksum:08x}, found "
                f"{zlib.crc32(data):08x}: the bytes from {offset} on were damaged."
            )
        offset += size
        return data

    for name, entry in body["small"].items():
        small[name] = SmallArray(entry["kind"], read(name, entry["size"], entry["sum"]))
    for name, entry in body["large"].items():
        fields = {field.name: entry[field.name] for field in dataclasses.fields(ArraySpec)}
        spec = ArraySpec(**fields)
        if min(spec.rows, spec.width) < 0 or spec.block < 1 or spec.block & spec.block - 1:
            raise ValueError(f"rows, width or block of '{name}'")
        if not ARRAY_FILE.fullmatch(spec.file):
            raise ValueError(f"the file {spec.file!r}")
        data = read(name, 16 * spec.num_blocks, entry["sum"])
        large[name] = Table.from_bytes(spec, data)
        if large[name].positions.min(initial=0) < NO_POSITION:
            raise ValueError(f"the positions of '{name}'")
    if offset != total:
        raise DamagedError(f"{path}: expected {offset} bytes, found {total}.")
    number = body["generation"]
    return Generation(number, body["meta"], small, large, (number, checksum))
