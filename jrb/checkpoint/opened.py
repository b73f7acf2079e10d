"""A generation of a checkpoint that is loaded: found once, and asked by all."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jrb import _saved
from jrb._store import generation, opening
from jrb._store.generation import Generation
from jrb._store.store import Store


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a checkpoint says and has.

    Attributes:
        path: of its folder, as it was named.
        generation: which one.
        promised: of a part, says which of its generations the whole names now; None if there is no
            whole.
    """

    path: str
    generation: Generation
    promised: Callable[[], int | None] | None = None

    @functools.cached_property
    def store(self) -> Store:
        """Its rows, none of which was looked at.

        Raises:
            FileNotFoundError: nothing was saved there.
            DamagedError: a file is not what was written.
        """
        store = opening.store_of(self.generation)
        store.promised = self.promised
        return store

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """What is said of the state, checked."""
        return _saved.meta_of(self.generation)

    @property
    def form(self) -> dict[str, Any]:
        """What is said of items that do not lie in rows of the state's own leaves; else nothing."""
        return self.meta.get("form") or {}

    @property
    def parts(self) -> dict[str, int]:
        """Which generation of each of several buffers belongs to it."""
        return _saved.generations(self.generation)

    def part(self, name: str) -> "Opened":
        """That of one of several buffers."""
        one = _saved.part(self.path, self.generation, name)
        return Opened(_saved.path_of(self.path, name), one, lambda: self._promised_of(name))

    def _promised_of(self, name: str) -> int | None:
        """The generation of a part that the newest one of the whole names."""
        folder = opening.folder_at(self.path)
        newest = generation.last(folder) if self.promised is None else self.promised()
        return None if newest is None else _saved.known(folder, newest).get(name)
