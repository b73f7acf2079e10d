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
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jrb._store import files, lock
from jrb._store.errors import DamagedError
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
    """An open generation, whose body has been checked."""

    body: Body
    identity: str  # a digest of the body, and so of the checksums of all rows and arrays

    def __init__(self, folder: Folder, number: int) -> None:
        self.folder: Folder = folder
        self.path: str = folder.path_of(name_of(number))
        self.number: int = number
        self._file = folder.open(name_of(number))
        weakref.finalize(self, os.close, self._file)  # a removed file stays readable while open
        self.body, self._begin, self.identity = _read(self._file, self.path)
        if self.body["generation"] != number:
            raise DamagedError(f"{self.path}: is generation {self.body['generation']}, renamed.")
        size = os.fstat(self._file).st_size
        expected = self._begin + sum(entry["size"] for entry in self.body["arrays"])
        if size != expected:
            raise DamagedError(f"{self.path}: expected {expected} bytes, found {size}.")

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
        if len(target) % np.dtype(dtype).itemsize:
            raise DamagedError(f"{self.path}: leaf '{name}': expected whole numbers.")
        return np.frombuffer(target, dtype)

    def runs(self) -> np.ndarray:
        """Returns the places of slots as runs, int64 `[K, 3]`; see `jrb._store.places.runs_of`."""
        table = self.body["table"]
        places = self.array(".places", np.int64)
        runs = places[: len(places) // 3 * 3].reshape(-1, 3)
        fits = len(places) == runs.size
        # Neither slots nor places may be outside the table, or in two runs.
        for starts, most in ((runs[:, 0], table["slots"]), (runs[:, 1], table["room"])):
            order = np.argsort(starts)
            first, length = starts[order], runs[order, 2]
            longest = np.append(first[1:], most) - first  # a sum of forged numbers might overflow
            fits &= bool(((length > 0) & (first >= 0) & (length <= longest)).all())
        if not fits:
            raise DamagedError(f"{self.path}: expected runs of places without an overlap.")
        return runs

    def sums(self) -> list[np.ndarray]:
        """Returns the checksums of the blocks of each column, uint32."""
        room, sums = self.body["table"]["room"], []
        for number, column in enumerate(self.columns):
            sums.append(self.array(f".sums/{number}", np.uint32))
            if len(sums[-1]) != -(-room // column.block):
                raise DamagedError(f"{self.path}: {column.display_name}: other blocks than rows.")
        return sums


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


def _read(file: int, path: str) -> tuple[Body, int, str]:
    """Returns the body, the offset at which the arrays begin, and the identity."""
    # The first line has no checksum: it is short, and all values in it are checked.
    first, line, _ = os.pread(file, _LARGEST_HEAD, 0).partition(b"\n")
    try:
        head = json.loads(first)
        check_json(head, _FIRST_LINE, "first line")
        if head["format"] != FORMAT or not line or head["size"] > os.fstat(file).st_size:
            raise ValueError("its first line is another")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: expected a generation of a store, got {error!r}.") from error
    # The version comes first, as the body of a newer one may be anything.
    if head["version"] != VERSION:
        age = "A newer" if head["version"] > VERSION else "An older"
        raise ValueError(
            f"{path}: expected version {VERSION} of the format, got version {head['version']}. "
            f"{age} jrb wrote this; install that one to read it."
        )
    text = os.pread(file, head["size"], len(first) + 1)
    if zlib.crc32(text) != head["sum"]:
        raise DamagedError(
            f"{path}: expected the checksum {head['sum']!r}, found {zlib.crc32(text)}: it was "
            "damaged, or edited by hand."
        )
    # A checksum shows damage, but whoever forges a file can forge it too: check all values.
    try:
        body = json.loads(text)
        # Values must have the right types, and the numbers must agree with each other.
        check_json(body, _BODY, "body")
        table, columns = body["table"], body["table"]["columns"]
        leaves = [leaf for entry in columns for leaf in entry["leaves"]]
        check_json(leaves, [_LEAF], "leaves")
        if table["slots"] > table["most"]:
            raise ValueError("more slots than room")
        if (
            not all(entry["leaves"] for entry in columns)
            or len({entry["block"] for entry in columns}) > 1
        ):
            raise ValueError("columns without leaves, or with blocks of different size")
        for entries in (leaves, body["arrays"]):
            if len({entry["name"] for entry in entries}) != len(entries):
                raise ValueError("two of the same name")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: expected the body of a generation, got {error!r}.") from error
    identity = hashlib.blake2b(text, digest_size=16).hexdigest()
    return body, len(first) + 1 + head["size"], identity


# Checks of JSON that was read from a file, before anything relies on it.

NATURAL = range(1 << 62)
"""The range of numbers of rows, bytes and generations."""

_DEEPEST = 100  # levels, far below the limit of Python's recursion

_Kind = type | range
Schema = (
    _Kind | re.Pattern[str] | tuple[_Kind, ...] | list[Any] | dict[Any, Any] | Callable[..., Any]
)
"""A description of the values that are allowed at a place in JSON.

A type, but no subclass, so that True is no number; a range of integers; a pattern of a whole text;
a tuple of types and ranges, one of which must fit; `[schema]` for a list of any length, and
`[schema, schema]` for a list of two; `{name: schema}` for an object that may have further entries,
where a name that ends in `?` may be missing, and `...` stands for all names; or a function from the
value to its schema.
"""


def check_json(value: Any, schema: Schema, where: str, depth: int = _DEEPEST) -> None:
    """Raises `ValueError` that names the entry unless a value fits its schema."""
    if not depth:
        raise ValueError(f"{where}: expected at most {_DEEPEST} levels")
    if isinstance(schema, list):
        count = None if len(schema) == 1 else len(schema)
        fits = isinstance(value, list) and count in (None, len(value))
        _expect(fits, where, "a list" if count is None else f"a list of {count}", value)
        for number, entry in enumerate(value):
            check_json(entry, schema[number if count else 0], f"{where}[{number}]", depth - 1)
    elif isinstance(schema, dict):
        _expect(isinstance(value, dict), where, "an object", value)
        for name, inner in schema.items():
            key = name if name is ... else name.removesuffix("?")
            _expect(name is ... or name != key or key in value, where, f"'{key}' in it", value)
            for each in value if name is ... else {key} & value.keys():
                check_json(value[each], inner, f"{where}.{each}", depth - 1)
    elif isinstance(schema, re.Pattern):
        fits = isinstance(value, str) and schema.fullmatch(value)
        _expect(bool(fits), where, f"text like {schema.pattern}", value)
    elif callable(schema) and not isinstance(schema, type):
        check_json(value, schema(value), where, depth - 1)
    else:
        fits, names = False, []
        for kind in schema if isinstance(schema, tuple) else (schema,):
            if isinstance(kind, range):
                fits |= type(value) is int and value in kind
                names.append(f"a number from {kind.start} to {kind.stop - 1}")
            else:
                fits |= type(value) is kind
                names.append("nothing" if kind is type(None) else f"a {kind.__name__}")
        _expect(fits, where, " or ".join(names), value)


def _expect(fits: bool, where: str, expected: str, value: Any) -> None:
    if not fits:
        raise ValueError(f"{where}: expected {expected}, got {repr(value)[:80]}")


_FIRST_LINE = {"format": str, "version": range(1, 1 << 31), "size": NATURAL, "sum": NATURAL}
_SHAPE = re.compile(r"\[(\d+(, \d+)*)?\]")
_ENTRY = {"name": str, "kind": lambda kind: [str, _SHAPE] if kind else []}
_LEAF = _ENTRY | {"width": NATURAL}
_BODY = {
    "generation": NATURAL,
    "rows": range(1 << 47),
    "meta": (dict, type(None)),
    "table": {
        "folder": NATURAL,
        "slots": NATURAL,
        "room": NATURAL,
        "most": NATURAL,
        "columns": [{"block": range(1, 1 << 62), "leaves": [_LEAF]}],
    },
    "arrays": [_ENTRY | {"size": NATURAL, "sum": NATURAL}],
}
