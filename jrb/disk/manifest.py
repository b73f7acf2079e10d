"""The manifest of a store: what is in it, and where.

A JSON file with the keys `format`, `version`, `body` and `checksum`, the last one CRC-32 of the
body. The body has `generation`, the number of the save; `meta`, what the owner of the store writes
there; and `leaves`, one entry for each array:

* `name`, `kind` (for the owner, such as dtype and shape), `size` in bytes;
* for a small one `bytes`, in hexadecimal;
* for others `block`, the bytes of a block, and `blocks`: generation and number of the file that a
  block is in, its offset there, and its three sums (see `jrb.disk.blocks`).

Files are called by two numbers, so that no manifest can name a path.

Where rows are written in place (see `jrb.disk.live`) the body has a `table` too: `capacity`, the
rows there is room for; `held`, those below which checksums hold; and `columns`, each with the
`name` of its leaf, from which the file's name follows, its `kind`, the `width` of a row in bytes,
and `sums`, CRC-32 of each block.
"""

import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

from jrb.disk import blocks, files
from jrb.disk.errors import DamagedError
from jrb.disk.table import Column

FORMAT, VERSION = "jrb", 1
NAME, FOLDER = "manifest.json", "blocks"
INLINE = 1024
"""Bytes of the largest array that stands in the manifest itself."""

Body = dict[str, Any]
Leaf = dict[str, Any]


def encode(body: Body) -> bytes:
    """The bytes of a manifest."""
    inner = _text(body)
    head = {"format": FORMAT, "version": VERSION, "checksum": _checksum(inner)}
    return _text(head)[:-1] + b',"body":' + inner + b"}"


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _checksum(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"


def decode(data: bytes, path: str) -> Body:
    """The body of a manifest.

    Raises:
        DamagedError: it is not what was written.
        ValueError: it is of another kind or of a newer version.
    """
    try:
        text = json.loads(data)
        found = text.get("format"), text.get("version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path}: expected a manifest in JSON, got {error}.") from error
    if found[0] != FORMAT or type(found[1]) is not int or found[1] < 1:
        raise DamagedError(
            f"{path}: expected format '{FORMAT}' with a version, got format {found[0]!r}, version "
            f"{found[1]!r}."
        )
    if found[1] > VERSION:
        raise ValueError(
            f"{path}: expected version {VERSION} or older, got version {found[1]}. A newer jrb "
            "wrote this; install that one."
        )
    body = text.get("body")
    if not isinstance(body, dict) or text.get("checksum") != _checksum(_text(body)):
        raise DamagedError(
            f"{path}: the manifest's checksum is {text.get('checksum')!r}, that of its body "
            "another: it was damaged, or edited by hand. An older generation may be whole."
        )
    try:
        _check(body)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path}: expected a manifest, got one with {error!r}.") from error
    return body


def _check(body: Body) -> None:
    """Raises unless all numbers fit together."""
    _natural(body["generation"])
    if not isinstance(body["meta"], dict):
        raise TypeError("meta")
    names = set()
    for leaf in body["leaves"]:
        if not isinstance(leaf["name"], str) or not isinstance(leaf["kind"], list):
            raise TypeError("leaf")
        names.add(leaf["name"])
        _natural(leaf["size"])
        given = len(bytes.fromhex(leaf["bytes"])) if "bytes" in leaf else _check_blocks(leaf)
        if given != leaf["size"]:
            raise ValueError(f"leaf {leaf['name']}: {given} bytes for {leaf['size']}")
    if len(names) != len(body["leaves"]):
        raise ValueError("leaves of the same name")
    if "table" in body:
        _check_table(body["table"])


def _check_table(table: Body) -> None:
    """Raises unless the numbers of the rows fit together."""
    _natural(table["capacity"])
    _natural(table["held"])
    if not table["held"] <= table["capacity"]:
        raise ValueError("table: held")
    for entry in table["columns"]:
        if not isinstance(entry["name"], str) or not isinstance(entry["kind"], list):
            raise TypeError("column")
        _natural(entry["width"])
        for number in entry["sums"]:
            _natural(number)
        column = Column(entry["name"], tuple(map(str, entry["kind"])), entry["width"])
        size = column.width * table["held"]
        if len(entry["sums"]) != -(-size // column.block(table["capacity"])):
            raise ValueError(f"column {column.name}: sums")


def _check_blocks(leaf: Leaf) -> int:
    _natural(leaf["block"])
    if not 0 < leaf["block"] <= blocks.LARGEST or len(leaf["blocks"]) != -(
        -leaf["size"] // leaf["block"]
    ):
        raise ValueError(f"leaf {leaf['name']}: blocks")
    for block in leaf["blocks"]:
        if len(block) != 6:
            raise ValueError(f"leaf {leaf['name']}: blocks")
        for number in block:
            _natural(number)
    return leaf["size"]


def _natural(value: Any) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(repr(value))


def read(path: str, generation: int | None = None) -> Body:
    """The body of the newest manifest of a store, or of the one with this generation.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is not what was written.
        ValueError: it is of another kind or of a newer version.
    """
    name = os.path.join(path, NAME)
    if generation is not None:
        older = os.path.join(path, older_name(generation))
        name = older if os.path.exists(older) else name
    try:
        body = decode(files.read_all(name), name)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{path}: expected a checkpoint, found no {NAME} there. Save one first, or look at the "
            "path."
        ) from None
    if generation is not None and body["generation"] != generation:
        raise FileNotFoundError(
            f"{path}: expected generation {generation}, found {generations(path)}. Save with "
            "keep=n to keep n older ones."
        )
    return body


def generations(path: str) -> list[int]:
    """The generations of a store, oldest first."""
    newest = read(path)["generation"]
    return sorted({newest, *older(path)})


def older(path: str) -> list[int]:
    """The generations whose manifests have names of their own, oldest first."""
    return sorted(int(name[9:-5]) for name in os.listdir(path) if _is_older(name))


def older_name(generation: int) -> str:
    """The name of the manifest of an older generation."""
    return f"manifest-{generation:012d}.json"


def _is_older(name: str) -> bool:
    return name.startswith("manifest-") and name.endswith(".json") and name[9:-5].isdigit()


def file_name(generation: int, number: int) -> str:
    """The name of a file of blocks, from the store's folder on."""
    return os.path.join(FOLDER, f"{generation:012d}-{number:06d}")


def parts(leaf: Leaf) -> Iterator[tuple[int, int, list]]:
    """Start, stop and entry of each block of an array; none where it stands in the manifest."""
    if "bytes" in leaf:
        return
    for (start, stop), entry in zip(
        blocks.bounds(leaf["size"], leaf["block"]), leaf["blocks"], strict=True
    ):
        yield start, stop, entry
