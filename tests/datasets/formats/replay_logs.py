"""Writes Dopamine's replay buffers as its own class does, and knows their episodes."""

import gzip
import pickle

import numpy as np

from tests.datasets.access import after, chained


class Ring:
    """The ring of Dopamine's `OutOfGraphReplayBuffer`, beside a list of all rows ever added."""

    def __init__(self, capacity, stack_size=4, horizon=1, frame=(3, 2), **extra):
        self.capacity, self.stack_size, self.horizon = capacity, stack_size, horizon
        self.forms = {
            "observation": (frame, np.uint8),
            "action": ((), np.int32),
            "reward": ((), np.float32),
            "terminal": ((), np.uint8),
            **extra,
        }
        # `np.empty` in Dopamine: what was never written is anything.
        self.store = {
            name: np.full((capacity, *shape), 7, dtype)
            for name, (shape, dtype) in self.forms.items()
        }
        self.rows, self.starts_next, self.ends = [], True, set()

    @property
    def cursor(self):
        return np.int64(len(self.rows) % self.capacity)

    def _put(self, row, episode):
        for name, value in row.items():
            self.store[name][self.cursor] = value
        self.rows.append((row, episode))

    def add(self, row, episode, is_end):
        """Adds a step; `is_end` ends the episode, also without `terminal`."""
        if self.starts_next:
            for _ in range(self.stack_size - 1):
                self.ends.discard(self.cursor)
                zeros = {name: np.zeros(*form) for name, form in self.forms.items()}
                self._put(zeros, None)
        self.starts_next = bool(is_end or row["terminal"])
        (self.ends.add if self.starts_next else self.ends.discard)(self.cursor)
        self._put(row, episode)

    def save(self, folder, number, count=None, ends=False):
        """Writes a checkpoint; `count` stands for a lowered `add_count`, as in last logs."""
        count = len(self.rows) if count is None else count
        indices = (count - self.horizon + np.arange(self.stack_size + self.horizon)) % self.capacity
        arrays = {f"$store$_{name}": leaf for name, leaf in self.store.items()}
        for name, array in {
            **arrays,
            "add_count": np.array(count),
            "invalid_range": indices,
        }.items():
            with gzip.GzipFile(folder / f"{name}_ckpt.{number}.gz", "wb", 1) as file:
                np.save(file, array, allow_pickle=False)
        if ends:
            with gzip.GzipFile(folder / f"episode_end_indices_ckpt.{number}.gz", "wb") as file:
                pickle.dump(self.ends, file)


def filled(ring, seed, lengths, save, time_outs=(), blank=0.0):
    """Adds episodes of these lengths and calls `save(ring)` after each step.

    `time_outs` are the episodes that end without `terminal`; `blank` is the share of steps in which
    all is zero, as in padding.
    """
    rng = np.random.default_rng(seed)
    for episode, length in enumerate(lengths):
        for step in range(length):
            row = {}
            for name, (shape, dtype) in ring.forms.items():
                numbers = rng.integers(1, 100, shape) * (rng.random() >= blank)
                row[name] = np.asarray(numbers, dtype)
            is_last = step == length - 1
            row["terminal"] = np.uint8(is_last and episode not in time_outs)
            ring.add(row, episode, is_last and episode in time_outs)
            save(ring)
    return ring


def expected_of(ring, spans, terminal="terminal"):
    """The episodes in the rows that were added from and to these numbers, `next/valid` included."""
    episodes = []
    for start, stop in spans:
        for row, episode in ring.rows[start:stop]:
            if episode is None:
                continue
            if not episodes or episodes[-1][0] != (start, episode):
                episodes.append(((start, episode), []))
            episodes[-1][1].append(row)
    every = [_in_ted(rows) for _, rows in episodes]
    if all(each["next"]["valid"].all() for each in every):
        for each in every:
            del each["next"]["valid"]
    return every


def _in_ted(rows):
    leaves = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    terminated = leaves.pop("terminal").astype(bool)
    is_last = np.arange(len(rows)) == len(rows) - 1
    nexts = chained(leaves["observation"], len(rows))
    valid = ~is_last | terminated
    reward = leaves.pop("reward")
    return {**leaves, "next": after(reward, terminated, is_last & ~terminated, nexts, valid)}
