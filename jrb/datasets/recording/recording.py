"""The chunks of a recording, as streams of steps that stand one after the other.

Writer by writer, of one writer environment by environment, and of one environment in the order of
time. C chunks of a writer, E environments, T steps over all, K episodes.
"""

import functools
import os
from collections.abc import Callable

import numpy as np

from jrb._store.files import Folder
from jrb.datasets.recording import heads
from jrb.datasets.recording.chunks import Chunk, Index
from jrb.datasets.recording.heads import Head

_OPEN = 32  # files


class Written:
    """What one writer has sealed, and where that stands among the steps.

    Args:
        path: of the recording.
        name: of the writer's folder.
        count: C.
        first: the number of steps before its own.

    Attributes:
        head: of its items.
        totals: int64 `[E]`, the steps of each environment.
        begins: int64 `[E]`, the number of steps before those.
    """

    head: Head
    totals: np.ndarray
    begins: np.ndarray

    def __init__(self, path: str, name: str, count: int, first: int) -> None:
        self._folder = Folder(os.path.join(path, name))
        self.head, self._sum = heads.read_head(self._folder)
        self._indices = [self._open(number).index for number in range(count)]
        envs = [np.zeros((0, self.head.envs), np.int64)]
        self._counts = np.concatenate([*envs, *[index.counts[None] for index in self._indices]])
        self.totals = self._counts.sum(0)
        self.begins = first + np.cumsum(self.totals) - self.totals
        self._steps = self.begins + np.cumsum(self._counts, 0) - self._counts  # before each part
        self._places = np.cumsum(self._counts, 1) - self._counts  # of each part in its chunk
        self.chunk: Callable[[int], Chunk] = functools.lru_cache(maxsize=_OPEN)(self._open)

    def _open(self, number: int) -> Chunk:
        return Chunk(self._folder, number, self.head, self._sum)

    @property
    def ends(self) -> np.ndarray:
        """int64 `[E]`, the number of steps up to the end of each environment."""
        return self.begins + self.totals

    def steps(self, places: Callable[[Index], np.ndarray]) -> np.ndarray:
        """The numbers of the steps that lie at some places of each chunk, int64."""
        found = [np.zeros(0, np.int64)]
        for number, index in enumerate(self._indices):
            at = places(index)
            env = np.searchsorted(np.cumsum(index.counts), at, side="right")
            found.append(self._steps[number, env] + at - self._places[number, env])
        return np.concatenate(found)

    def parts(self) -> np.ndarray:
        """int64 `[parts, 3]`: the number of the first step, of the chunk, and its place there."""
        env, number = np.nonzero(self._counts.T)
        return np.stack([self._steps[number, env], number, self._places[number, env]], 1)


class Recording:
    """All that some chunks hold.

    Args:
        path: of the recording.
        sealed: the folder of each writer, and how many of its chunks count.

    Attributes:
        head: of the items, those of the first writer.
        metadata: of all writers.
        ends: int64 `[K]`, the number of steps up to the end of each episode.
        terminated: bool `[T]`.
        truncated: bool `[T]`.
        facts: `writer` and `env`, int64 `[K]`, the numbers of those of each episode.
        running: how many of the last episodes of environments have not ended.

    Raises:
        DamagedError: a file is not what was written, or not there.
        ValueError: the writers have other items.
    """

    head: Head
    metadata: dict[str, object]
    ends: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    facts: dict[str, np.ndarray]
    running: int

    def __init__(self, path: str, sealed: tuple[tuple[str, int], ...]) -> None:
        self._writers: list[Written] = []
        steps = 0
        for name, count in sealed:
            self._writers.append(Written(path, name, count, steps))
            steps += int(self._writers[-1].totals.sum())
            heads.check_alike(path, sealed[0][0], self._writers[0].head, self._writers[-1].head)
        self.head = self._writers[0].head
        users = [writer.head.metadata.get("user", {}) for writer in self._writers]
        self.metadata = {name: value for user in users for name, value in user.items()}
        self.metadata["writers"] = [name for name, _ in sealed]
        self.terminated = self._marked(steps, lambda index: index.terminated)
        self.truncated = self._marked(steps, lambda index: index.truncated)
        self._divide()
        parts = [writer.parts() for writer in self._writers]
        self._parts = np.concatenate(parts)
        self._of = np.repeat(np.arange(len(parts)), [len(each) for each in parts])

    def _marked(self, steps: int, places: Callable[[Index], np.ndarray]) -> np.ndarray:
        """Bool `[T]`, set at places of chunks."""
        marked = np.zeros(steps, bool)
        for writer in self._writers:
            marked[writer.steps(places)] = True
        return marked

    def _divide(self) -> None:
        """Finds where episodes end: by flags, before those that begin, and with each stream."""
        streams = np.concatenate([writer.ends for writer in self._writers])
        flagged = np.concatenate([w.steps(lambda index: index.ends) for w in self._writers]) + 1
        begun = np.concatenate([w.steps(lambda index: index.starts) for w in self._writers])
        ends = np.unique(np.concatenate([streams, flagged, begun]))
        self.ends = ends[ends > 0]
        of = np.searchsorted(streams, self.ends)
        envs = [np.arange(writer.head.envs) for writer in self._writers]
        numbers = [np.full(len(each), number) for number, each in enumerate(envs)]
        self.facts = {
            "env": np.concatenate(envs)[of].astype(np.int64),
            "writer": np.concatenate(numbers)[of].astype(np.int64),
        }
        self.running = len(np.setdiff1d(streams[streams > 0], flagged))

    def read(self, leaf: int, start: int, stop: int) -> np.ndarray:
        """The steps from `start` to `stop` of a leaf, `[stop - start, ...]`."""
        known = self.head.leaves[leaf]
        found = np.empty((max(0, stop - start), *known.shape), known.numpy)
        number, step = int(np.searchsorted(self._parts[:, 0], start, side="right")) - 1, start
        while step < stop:
            first, chunk, place = self._parts[number].tolist()
            after = self._parts[number + 1, 0] if number + 1 < len(self._parts) else stop
            end = min(stop, int(after))
            part = self._writers[self._of[number]].chunk(chunk)
            at = place + step - first
            found[step - start : end - start] = part.read(leaf, at, at + end - step)
            number, step = number + 1, end
        return found
