"""Reads a store: whole saves, checked bytes, and what is wrong with them."""

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from jrb.disk import blocks, files, manifest
from jrb.disk.errors import DamagedError
from jrb.disk.manifest import Body, Leaf
from jrb.disk.threads import share

T = TypeVar("T")
_RUN = 8  # blocks that a thread reads in a row


def snapshot(path: str, use: Callable[[Body], T], generation: int | None = None) -> T:
    """What `use` makes of the newest manifest, or of that of a generation.

    A save that happens meanwhile may remove files: then `use` is called again, with the next
    manifest.
    """
    while True:
        body = manifest.read(path, generation)
        try:
            return use(body)
        except DamagedError:
            if generation is not None or manifest.read(path)["generation"] == body["generation"]:
                raise


def check_sizes(path: str, body: Body) -> None:
    """Raises `DamagedError` unless every file that a manifest names is there and long enough."""
    for name, (end, leaf) in _reaches(body).items():
        _check_size(os.path.join(path, name), end, leaf)


def _reaches(body: Body) -> dict[str, tuple[int, str]]:
    """How long each file must be, and the array that asks for it."""
    reach: dict[str, tuple[int, str]] = {}
    for leaf in body["leaves"]:
        for start, stop, entry in manifest.parts(leaf):
            name = manifest.file_name(entry[0], entry[1])
            end = (entry[2] + stop - start, leaf["name"])
            reach[name] = max(reach.get(name, end), end)
    return reach


def _check_size(file: str, end: int, leaf: str) -> None:
    try:
        size = os.stat(file, follow_symlinks=False).st_size
    except FileNotFoundError:
        raise DamagedError(f"{file}: leaf '{leaf}': expected {end} bytes, found no file.") from None
    if size < end:
        raise DamagedError(f"{file}: leaf '{leaf}': expected {end} bytes, found {size}.")


def read_block(path: str, leaf: Leaf, number: int, target: memoryview) -> None:
    """One block of an array, checked.

    Args:
        path: of the store.
        leaf: the array's entry in the manifest.
        number: of the block.
        target: as many bytes as the block has.

    Raises:
        DamagedError: it is not what was written; the message names array, block and file.
    """
    entry = leaf["blocks"][number]
    file = os.path.join(path, manifest.file_name(entry[0], entry[1]))
    try:
        files.read_into(file, entry[2], target)
    except (FileNotFoundError, DamagedError) as error:
        raise DamagedError(f"{file}: leaf '{leaf['name']}', block {number}: {error}") from error
    found = blocks.check(target)
    if found != entry[3]:
        raise DamagedError(
            f"{file}: leaf '{leaf['name']}', block {number}: expected the checksum "
            f"{entry[3]:08x}, found {found:08x}: the bytes from {entry[2]} on were damaged."
        )


def read_leaf(path: str, leaf: Leaf, target: memoryview) -> None:
    """All bytes of an array, checked, read by several threads."""
    if "bytes" in leaf:
        target[:] = bytes.fromhex(leaf["bytes"])
        return
    parts = list(enumerate(manifest.parts(leaf)))
    runs = [parts[first : first + _RUN] for first in range(0, len(parts), _RUN)]

    def read(run: list) -> None:
        for number, (start, stop, _) in run:
            read_block(path, leaf, number, target[start:stop])

    share(read, runs)


def read_pieces(path: str, leaf: Leaf, piece: int) -> Iterator[tuple[int, bytearray]]:
    """All bytes of an array, checked, in order: offsets, and about `piece` bytes at each."""
    if "bytes" in leaf:
        yield 0, bytearray.fromhex(leaf["bytes"])
        return
    parts = list(manifest.parts(leaf))
    step = max(piece // leaf["block"], 1)
    for first in range(0, len(parts), step):
        run = parts[first : first + step]
        begin = run[0][0]
        data = bytearray(run[-1][1] - begin)
        for number, (start, stop, _) in enumerate(run, first):
            read_block(path, leaf, number, memoryview(data)[start - begin : stop - begin])
        yield begin, data


def damages(path: str) -> list[str]:
    """All that is wrong with a store and its older generations, a line each."""
    while True:
        try:
            newest = manifest.read(path)["generation"]
        except DamagedError as error:
            return [str(error)]
        found: dict[str, None] = {}  # in order, each once
        for number in reversed(manifest.generations(path)):
            found.update(dict.fromkeys(_damages(path, number)))
        if not found or manifest.read(path)["generation"] == newest:
            return list(found)


def _damages(path: str, generation: int) -> Iterator[str]:
    try:
        body = manifest.read(path, generation)
    except (DamagedError, FileNotFoundError) as error:
        yield str(error)
        return
    for leaf in body["leaves"]:
        for block, (start, stop, _) in enumerate(manifest.parts(leaf)):
            try:
                read_block(path, leaf, block, memoryview(bytearray(stop - start)))
            except (DamagedError, OSError) as error:
                yield str(error)
