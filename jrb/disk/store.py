"""A folder that holds one set of arrays, saved again and again, whole at every moment.

```
manifest.json                     what is there (see `jrb.disk.manifest`)
manifest-000000000006.json        an older generation, if asked for
blocks/000000000007-000000        blocks that the seventh save wrote
lock                              held by whoever writes
```

A save writes the blocks that changed into new files, syncs them, writes a manifest beside the old
one, syncs it, and renames it: that is the moment at which the save has happened. Files that no
manifest names any more are removed afterwards. Nothing that a manifest names is ever written again.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jrb.disk import blocks, files, manifest, threads
from jrb.disk.blocks import Source
from jrb.disk.errors import DamagedError
from jrb.disk.manifest import Body, Leaf
from jrb.disk.threads import share

_SPARSE = 4  # one in so many blocks of a large array is looked at
_FILES = 16  # at least, of a whole save
_FILE = re.compile(r"(\d{12})-(\d{6})")
_TEMPORARY = "manifest.json.new"
_KNOWN = {manifest.NAME, manifest.FOLDER, _TEMPORARY, "lock"}


class Part(NamedTuple):
    """A block of an array: the number of each, and the bytes from start to stop."""

    leaf: int
    block: int
    start: int
    stop: int


@dataclasses.dataclass
class Task:
    """Blocks that may have to be written, all into one file.

    Attributes:
        parts: the blocks.
        data: their bytes, copied; None to read them when they are written.
    """

    parts: list[Part]
    data: list[bytes] | None = None


class Saving:
    """One save, from taking the lock to giving it back.

    Args:
        path: of the store; made if it is not there.
        lock: of a store that is open to be written in place; None to take it.

    Raises:
        LockedError: somebody else is writing.
        ValueError: the folder holds other things, or a store of a newer version.
        OSError: it cannot be written to.
    """

    def __init__(self, path: str, lock: int | None = None) -> None:
        self.path = path
        check_free(path)
        files.make_folder(path)
        self._mine = lock is None
        self._lock = files.lock(os.path.join(path, "lock")) if lock is None else lock
        try:
            files.make_folder(os.path.join(path, manifest.FOLDER))
            self.previous = _previous(path)
            if self._mine and "table" in (self.previous or {}):
                raise ValueError(
                    f"{path}: expected a checkpoint or an empty folder, found a store whose rows "
                    "are written in place. Save its own state there, or save to another path."
                )
            self.generation = _next_generation(path, self.previous)
            self._old, self._waste = _leaves(self.previous), _wasteful(self.previous)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the lock back."""
        if self._mine:
            files.unlock(self._lock)

    def plan(self, sources: list[Source]) -> list[Task]:
        """The blocks that may have changed since the last save."""
        old = self._old
        foreign = any(_is_foreign(source, old.get(source.name)) for source in sources)
        wanted = [
            Part(leaf, *block)
            for leaf, source in enumerate(sources)
            if source.size > manifest.INLINE
            for block in _suspects(source, old.get(source.name), self._waste, foreign)
        ]
        return [Task(run) for run in _runs(wanted, sum(source.size for source in sources))]

    def commit(
        self,
        meta: dict[str, Any],
        sources: list[Source],
        tasks: list[Task],
        keep: int,
        table: dict[str, Any] | None = None,
    ) -> None:
        """Writes what changed, and makes it the newest generation.

        Args:
            meta: what the owner wants to know, for JSON.
            sources: the arrays.
            tasks: what `plan` said of them.
            keep: how many older generations stay.
            table: of rows that were written in place.

        Raises:
            OSError: the disk is full or broken; what was there before is still there.
        """
        try:
            leaves = self._written(sources, tasks)
            body = {"generation": self.generation, "meta": meta, "leaves": leaves}
            self._publish(body if table is None else {**body, "table": table}, keep)
        except OSError as error:
            error.add_note(f"{self.path}: the save failed; what was there before is whole.")
            self._withdraw()
            raise
        _collect(self.path, keep, body)

    def _withdraw(self) -> None:
        """Removes what a save left that failed before its moment."""
        with contextlib.suppress(OSError, ValueError):
            newest = manifest.read(self.path)
            if newest["generation"] != self.generation:
                _collect(self.path, len(manifest.older(self.path)), newest)

    def _written(self, sources: list[Source], tasks: list[Task]) -> list[Leaf]:
        """The entries of the manifest, after all blocks were written."""
        leaves = [_entry(source, self._old.get(source.name)) for source in sources]

        def write(numbered: tuple[int, Task]) -> None:
            self._write(*numbered, sources, leaves)

        share(write, enumerate(tasks))
        files.sync_folder(os.path.join(self.path, manifest.FOLDER))
        return leaves

    def _write(self, number: int, task: Task, sources: list[Source], leaves: list[Leaf]) -> None:
        """Those blocks of a task that changed, into a file of their own."""
        changed, offset = [], 0
        for place, part in enumerate(task.parts):
            source, entries = sources[part.leaf], leaves[part.leaf]["blocks"]
            data = task.data[place] if task.data else source.read(part.start, part.stop)
            sums, known = blocks.sums(data, not source.by_slot), entries[part.block]
            same = not source.by_slot and known and tuple(known[3:]) == sums
            if same and tuple(known[:2]) not in self._waste:
                continue
            entries[part.block] = [self.generation, number, offset, *sums]
            changed.append(data)
            offset += len(data)
        if changed:
            name = manifest.file_name(self.generation, number)
            files.write_new(os.path.join(self.path, name), changed)

    def _publish(self, body: Body, keep: int) -> None:
        """The moment of the save."""
        current = os.path.join(self.path, manifest.NAME)
        if keep and self.previous:
            older = os.path.join(self.path, manifest.older_name(self.previous["generation"]))
            if not os.path.exists(older):
                files.link(current, older)
        publish(self.path, body)


def publish(path: str, body: Body) -> None:
    """Puts a manifest in the place of another."""
    temporary = os.path.join(path, _TEMPORARY)
    files.write_new(temporary, [manifest.encode(body)])
    files.replace(temporary, os.path.join(path, manifest.NAME))


def check_free(path: str) -> None:
    """Raises if there is something that no store put there."""
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        raise ValueError(f"{path}: expected a folder, found a file. Save to another path.")
    others = {name for name in os.listdir(path) if not name.startswith("manifest-")} - _KNOWN
    if others and not os.path.exists(os.path.join(path, manifest.NAME)):
        raise ValueError(
            f"{path}: expected a checkpoint or an empty folder, found {sorted(others)[:3]}. Save "
            "to a folder of its own."
        )


def _previous(path: str) -> Body | None:
    """The newest manifest, or None if there is none that can be read."""
    try:
        return manifest.read(path)
    except (FileNotFoundError, DamagedError):
        return None


def _next_generation(path: str, previous: Body | None) -> int:
    """A number that no file of blocks has yet."""
    if previous is not None:
        return previous["generation"] + 1
    names = os.listdir(os.path.join(path, manifest.FOLDER))
    numbers = [int(name[:12]) for name in names if _FILE.fullmatch(name)]
    return max([0, *numbers, *manifest.older(path)]) + 1


def _leaves(body: Body | None) -> dict[str, Leaf]:
    return {leaf["name"]: leaf for leaf in body["leaves"]} if body else {}


def _entry(source: Source, old: Leaf | None) -> Leaf:
    """What the manifest says of an array; blocks that may have changed are filled in later."""
    leaf: Leaf = {"name": source.name, "kind": list(source.kind), "size": source.size}
    if source.size <= manifest.INLINE:
        return {**leaf, "bytes": bytes(source.read(0, source.size)).hex()}
    size = blocks.block_size(source.size)
    count = len(blocks.bounds(source.size, size))
    return {**leaf, "block": size, "blocks": _known(source, old) or [None] * count}


def _known(source: Source, old: Leaf | None) -> list[list] | None:
    """The blocks of the last save, if they are those of the same array."""
    if old is None or "blocks" not in old or old["size"] != source.size:
        return None
    same = old["kind"] == list(source.kind) and old["block"] == blocks.block_size(source.size)
    return list(old["blocks"]) if same else None


def _suspects(
    source: Source, old: Leaf | None, waste: set[tuple[int, int]], foreign: bool
) -> list[tuple[int, int, int]]:
    """Number, start and stop of the blocks that may have to be written."""
    bounds = blocks.bounds(source.size, blocks.block_size(source.size))
    everything = [(number, start, stop) for number, (start, stop) in enumerate(bounds)]
    known = _known(source, old)
    if known is None or source.fresh is None or foreign:
        return everything
    return [
        block
        for block, entry in zip(everything, known, strict=True)
        if blocks.is_fresh(source, *block[1:]) or tuple(entry[:2]) in waste
    ]


def _is_foreign(source: Source, old: Leaf | None) -> bool:
    """Whether an array is of another history than the one saved last, which its clock cannot tell.

    Then something differs where nothing was written since. Small arrays are compared as a whole.
    Of large ones, every fourth block by a sample, and the last one that was full at the last save
    as a whole: histories that part differ where they are new.
    """
    known = _known(source, old)
    if known is None or source.fresh is None:
        return False
    bounds = blocks.bounds(source.size, blocks.block_size(source.size))
    edge = source.edge // blocks.block_size(source.size) - 1
    for number, ((start, stop), entry) in enumerate(zip(bounds, known, strict=True)):
        whole = source.size <= blocks.WITNESS or number == edge % len(bounds)
        if (number % _SPARSE and not whole) or blocks.is_fresh(source, start, stop):
            continue
        data = source.read(start, stop)
        if (whole and blocks.check(data) != entry[3]) or blocks.sample(data) != entry[5]:
            return True
    return False


def _wasteful(body: Body | None) -> set[tuple[int, int]]:
    """Files of which less than a quarter is still in use: their blocks are written anew."""
    used: dict[tuple[int, int], int] = {}
    reach: dict[tuple[int, int], int] = {}
    for leaf in body["leaves"] if body else []:
        for start, stop, entry in manifest.parts(leaf):
            file = tuple(entry[:2])
            used[file] = used.get(file, 0) + stop - start
            reach[file] = max(reach.get(file, 0), entry[2] + stop - start)
    return {file for file in used if 4 * used[file] < reach[file]}


def _runs(wanted: list[Part], total: int) -> Iterator[list[Part]]:
    """Cuts a list of blocks into parts that fit into a file: some for each thread, none large."""
    size = lambda parts: sum(part.stop - part.start for part in parts)
    share_ = -(-size(wanted) // threads.WORKERS)
    most = min(blocks.EXTENT, max(min(share_, total // _FILES), blocks.LARGEST))
    run: list[Part] = []
    for part in wanted:
        if run and size([*run, part]) > most:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _collect(path: str, keep: int, newest: Body) -> None:
    """Removes older generations beyond `keep`, and the files that no manifest names."""
    older = [number for number in manifest.older(path) if number != newest["generation"]]
    first = max(0, len(older) - keep)
    for number in older[:first]:
        files.remove(os.path.join(path, manifest.older_name(number)))
    named = set(_named(newest))
    for number in older[first:]:
        with contextlib.suppress(DamagedError):
            named |= set(_named(manifest.read(path, number)))
    folder = os.path.join(path, manifest.FOLDER)
    for name in sorted(os.listdir(folder)):
        match = _FILE.fullmatch(name)
        if match and (int(match[1]), int(match[2])) not in named:
            files.remove(os.path.join(folder, name))


def _named(body: Body) -> Iterator[tuple[int, int]]:
    for leaf in body["leaves"]:
        for entry in leaf.get("blocks", []):
            yield entry[0], entry[1]
