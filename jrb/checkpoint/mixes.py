"""Checkpoints of a mix: a checkpoint for each buffer, and one generation that names theirs.

```
generation-000000000003     of the mix: which generation of each part belongs to it
0/generation-000000000003   the first buffer, a checkpoint like any other
1/...
```

The parts are written first, and keep what the older generations of the mix name: whatever happens,
the newest generation of the mix is whole.
"""

import dataclasses
import os
from typing import Any

from jrb._store import generation, opening
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.generation import Generation
from jrb.checkpoint import descriptions, facts, matching, native, state_specs
from jrb.checkpoint.beside import Beside
from jrb.state import Device
from jrb.types import Item

KIND = "mix"


class Pending:
    """As `native.Pending`, for a mix."""

    def __init__(self, path: str, mix: Any, states: Any, copy: bool, extra: Beside) -> None:
        state_specs.snapshot(mix, states)
        self.meta: dict[str, Any] = {"kind": KIND, "buffer": descriptions.encode(mix)}
        self.meta |= {"facts": facts.of(mix, states, ()), **extra.meta}
        self.extra = extra
        self.store, self.parts = opening.to_save(path, (), 0), []
        try:
            for number, pair in enumerate(zip(mix.buffers, states, strict=True)):
                self.parts.append(native.Pending(_folder(path, number), *pair, copy, Beside()))
        except BaseException:
            self.close()
            raise

    def finish(self, keep: int) -> int:
        """Writes, and gives the locks back; the number of the generation."""
        try:
            numbers = [part.write() for part in self.parts]
            meta, extra = {**self.meta, "parts": numbers}, self.extra
            also = extra.best_of(self.store.folder)
            self.store.commit(self.store.version, meta, extra.kinds, extra.arrays, keep, also)
            kept = [set() for _ in self.parts]
            for number in generation.numbers(self.store.folder):
                for numbers, one in zip(kept, _parts(self.store.folder, number), strict=False):
                    numbers.add(one)
            for part, numbers in zip(self.parts, kept, strict=True):
                part.store.expire(numbers)
            return self.store.generation
        finally:
            self.close()

    def close(self) -> None:
        """Gives the locks back."""
        for part in self.parts:
            part.close()
        self.store.close()


def _parts(folder: Folder, number: int) -> list[int]:
    """The generations of the parts that a generation names; none if it is of another kind."""
    try:
        meta = Generation(folder, number).body["meta"] or {}
    except (DamagedError, FileNotFoundError):
        return []
    found = meta.get("parts", []) if meta.get("kind") == KIND else []
    return found if isinstance(found, list) and all(type(n) is int for n in found) else []


def _folder(path: str, number: int) -> str:
    return os.path.join(path, str(number))


def restored(path: str, mix: Any, example: Item, device: Device, opened: Generation) -> Any:
    """The mix and its states."""
    meta, given = opened.body["meta"], mix is not None
    try:
        mix, numbers = matching.matched(meta["buffer"], mix), meta["parts"]
    except KeyError as error:
        raise DamagedError(f"{path}: expected a description, got one with {error!r}.") from error
    if not isinstance(numbers, list) or len(numbers) != len(mix.buffers):
        raise DamagedError(f"{path}: expected {len(mix.buffers)} parts, got {numbers}.")
    loaded = [
        native.load(_folder(path, place), part if given else None, example, device, number)
        for place, (part, number) in enumerate(zip(mix.buffers, numbers, strict=True))
    ]
    buffers, states = zip(*loaded, strict=True)
    return dataclasses.replace(mix, buffers=buffers), states


def damages(path: str) -> list[str]:
    """All that is wrong with the parts, a line each; nothing for other checkpoints."""
    folder, found = opening.folder_at(path), []
    for number in reversed(generation.numbers(folder)):
        for place in range(len(_parts(folder, number))):
            found += opening.damages(_folder(path, place))
    return list(dict.fromkeys(found))
