"""The file of one generation, which records a commit.

The file `generation-000000000007` begins with a line of JSON: `format`, `version`, and the length
and checksum of the body. The body follows, another line of JSON, and then the bytes of arrays, one
after the other. The body has

* `generation`, the number of the commit; `rows`, the number of the newest row;
* `meta`, the metadata of the store's owner; None before the first commit;
* `table`: `folder`, the generation that made the table; `slots`, N; `room`, the rows that its files
  hold now; `most`, P, the rows up to which they grow; `columns`,
  each with `block`, the rows of a block, and `leaves`, each with its `name`, its `kind`, and its
  `width` in bytes;
* `arrays`: the `name`, `kind`, `size` in bytes, and `sum`, CRC-32, of each array. Names of the
  store's own arrays begin with a dot: the places of rows, and the checksums of blocks.

The file is written under another name, synced, and renamed. The largest number is the newest.
"""

import dataclasses
import hashlib
import json
import os
import re
import weakref
import zlib
from typing import Any, NamedTuple

import numpy as np

from jrb._store import files, lock
from jrb._store.errors import DamagedError, refuse_damage
from jrb._store.files import Folder
from jrb._store.table import Column, Leaf

FORMAT, VERSION = "jrb", 4
PREFIX, _NEW = "generation-", "generation.new"
_HEAD = f'{{"format":"{FORMAT}",'.encode()  # how the file of each generation begins
_LARGEST_HEAD = 200  # bytes of the first line

Body = dict[str, Any]


def name_of(generation: int) -> str:
    return f"{PREFIX}{generation:012d}"


def numbers(folder: Folder) -> list[int]:
    """Returns the numbers of a folder's generations, oldest first; a new store has generation 0."""
    names = [name for name in folder.names() if re.fullmatch(PREFIX + "[0-9]{12}", name)]
    return sorted(int(name.removeprefix(PREFIX)) for name in names)


def last(folder: Folder) -> int | None:
    return max(numbers(folder), default=None)


def is_own(folder: Folder, name: str) -> bool:
    """Returns True if a file with one of a store's names was written by a store, or is empty.

    A crash may have cut the file short, or left zeros in it, and one byte may have been damaged.
    """
    try:
        with os.fdopen(folder.open(name), "rb") as file:
            head = file.read(len(_HEAD)).rstrip(b"\0")
    except DamagedError:  # a link, or no plain file
        return False
    if name == lock.NAME:
        return not head
    # In a complete head one byte may be damaged: files of other programs differ in more.
    wrong = sum(one != other for one, other in zip(head, _HEAD, strict=False))
    return wrong <= (len(head) == len(_HEAD))


def check_own(folder: Folder) -> None:
    """Raises `ValueError` if a file has one of a store's names, but was not written by a store."""
    own = {lock.NAME, _NEW, *map(name_of, numbers(folder))}
    for name in folder.names():
        if name in own and not is_own(folder, name):
            raise ValueError(
                f"{folder.path_of(name)}: expected a file of a checkpoint, or none, found one that "
                "jrb has not written, and that would be lost. Move it away, or choose another path."
            )


def body_of(
    number: int, rows: int, meta: Any, kinds: dict[str, list[Any]], columns: Any, **table: int
) -> Body:
    """Returns a body without sizes and sums of arrays; `table` are entries of its table."""
    about = {**table, "columns": list(map(dataclasses.asdict, columns))}
    arrays = [{"name": name, "kind": kind} for name, kind in kinds.items()]
    return {"generation": number, "rows": rows, "meta": meta, "table": about, "arrays": arrays}


def write(folder: Folder, body: Body, arrays: dict[str, Any]) -> None:
    """Writes the file of a generation under its name; only `Folder.sync` makes it durable."""
    check_own(folder)  # as a file of that name is overwritten
    data = [memoryview(arrays[entry["name"]]) for entry in body["arrays"]]
    # The first line checks the body, and the body checks the arrays.
    for entry, array in zip(body["arrays"], data, strict=True):
        entry.update(size=array.nbytes, sum=zlib.crc32(array))
    text = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    head = {"format": FORMAT, "version": VERSION, "size": len(text), "sum": zlib.crc32(text)}
    first = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    folder.write_new(_NEW, [first, text, *data])
    folder.replace(_NEW, name_of(body["generation"]))


class Location(NamedTuple):
    """The position of a leaf in the rows."""

    leaf: Leaf
    column: int  # the index of the column
    part: slice  # the bytes of the leaf in a row of the column


class Generation:
    """An open generation, whose size and whose body's checksum have been checked."""

    body: Body
    identity: str  # a digest of the body, and so of the checksums of all rows and arrays

    def __init__(self, folder: Folder, number: int) -> None:
        self.folder: Folder = folder
        self.path: str = folder.path_of(name_of(number))
        self.number: int = number
        self._file = folder.open(name_of(number))
        weakref.finalize(self, os.close, self._file)  # a removed file stays readable while open
        text, self._begin = _read_body(self._file, self.path)
        self.identity = hashlib.blake2b(text, digest_size=16).hexdigest()
        with refuse_damage(self.path, f"the body of generation {number}"):
            self.body = json.loads(text)
            if self.body["generation"] != number:
                raise ValueError(f"that of {self.body['generation']}: the file was renamed")
            expected = self._begin + sum(entry["size"] for entry in self.body["arrays"])
        size = os.fstat(self._file).st_size
        if size != expected:
            raise DamagedError(f"{self.path}: expected {expected} bytes, found {size}.")

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata of the owner; {} before the first commit."""
        return self.body["meta"] or {}

    @property
    def arrays(self) -> dict[str, Body]:
        """The entries of all arrays, by name."""
        return {entry["name"]: entry for entry in self.body["arrays"]}

    @property
    def columns(self) -> tuple[Column, ...]:
        leaf_of = lambda one: Leaf(one["name"], tuple(map(str, one["kind"])), one["width"])
        return tuple(
            Column(tuple(map(leaf_of, entry["leaves"])), entry["block"])
            for entry in self.body["table"]["columns"]
        )

    @property
    def leaves(self) -> dict[str, Location]:
        return {
            leaf.name: Location(leaf, number, part)
            for number, column in enumerate(self.columns)
            for leaf, part in zip(column.leaves, column.parts, strict=True)
        }

    def read(self, name: str, target: memoryview) -> None:
        """Reads an array into the target, and checks its checksum."""
        offset, entry = self._entry(name)
        files.read_at(self._file, self.path, offset, target)
        checksum = zlib.crc32(target)
        if checksum != entry["sum"]:
            raise DamagedError(
                f"{self.path}: leaf '{name}': expected the checksum {entry['sum']:08x}, found "
                f"{checksum:08x}: the bytes from {offset} on were damaged."
            )

    def _entry(self, name: str) -> tuple[int, Body]:
        """Returns the offset of an array in the file, and its entry."""
        offset = self._begin
        for entry in self.body["arrays"]:
            if entry["name"] == name:
                return offset, entry
            offset += entry["size"]
        raise DamagedError(f"{self.path}: leaf '{name}': expected an array, found none.")

    def array(self, name: str, dtype: Any) -> np.ndarray:
        """Returns an array of a dtype, whose bytes were checked."""
        target = bytearray(self._entry(name)[1]["size"])
        self.read(name, memoryview(target))
        return np.frombuffer(target, dtype)

    def runs(self) -> np.ndarray:
        """Returns the places of slots as runs, int64 `[K, 3]`; see `jrb._store.places.runs_of`."""
        return self.array(".places", np.int64).reshape(-1, 3)

    def sums(self) -> list[np.ndarray]:
        """Returns the checksums of the blocks of each column, uint32."""
        return [self.array(f".sums/{n}", np.uint32) for n in range(len(self.columns))]


def newest(folder: Folder) -> Generation:
    """Returns the newest generation."""
    while True:
        some = numbers(folder)
        if not some:
            raise FileNotFoundError(
                f"{folder.path}: expected a checkpoint, found none there. Save one first, or look "
                "at the path."
            )
        try:
            return Generation(folder, some[-1])
        except FileNotFoundError:
            continue  # a newer one was committed meanwhile, and this one removed
        except DamagedError as error:
            if len(some) > 1:
                error.add_note(f"There is an older one: load(path, generation={some[-2]}).")
            raise


def _read_body(file: int, path: str) -> tuple[bytes, int]:
    """Returns the text of the body, whose checksum is right, and where it ends in the file."""
    first, line, _ = os.pread(file, _LARGEST_HEAD, 0).partition(b"\n")
    # The first line has no checksum: it is short, and all values in it are checked.
    with refuse_damage(path, "a generation of a store"):
        head = json.loads(first)
        version, size = head["version"], head["size"]
        if not all(type(value) is int and value >= 0 for value in (version, size)):
            raise ValueError(f"version {version!r} and size {size!r}")
        if head["format"] != FORMAT or not (line and version) or size > os.fstat(file).st_size:
            raise ValueError("its first line is another")
        checksum = head["sum"]
    # The version comes first, as the body of a newer one may be anything.
    if version != VERSION:
        age = "A newer" if version > VERSION else "An older"
        raise ValueError(
            f"{path}: expected version {VERSION} of the format, got version {version}. "
            f"{age} jrb wrote this; install that one to read it."
        )
    text = os.pread(file, size, len(first) + 1)
    if zlib.crc32(text) != checksum:
        raise DamagedError(
            f"{path}: expected the checksum {checksum!r}, found {zlib.crc32(text)}: it was "
            "damaged, or edited by hand."
        )
    return text, len(first) + 1 + size
