"""Formats of datasets in memory, with only the methods that a format must have."""

import dataclasses
from typing import ClassVar

import numpy as np

from jrb.datasets.format import Description, Format, Indexed, spec_of


@dataclasses.dataclass(frozen=True)
class Memory(Format):
    """Sources are lists of episodes as `episode_of` makes them."""

    name: ClassVar[str] = "memory"
    looks_for: ClassVar[str] = "a list of episodes"

    scale: float = 1.0

    def matches(self, source):
        return isinstance(source, list) and all("observation" in each for each in source)

    def describe(self, source):
        lengths = [len(each["action"]) for each in source]
        lacks = [len(each["observation"]) == len(each["action"]) for each in source]
        cut = np.array(lacks) & ~np.array([each["terminated"][-1] for each in source])
        return Description(
            spec_of(self._read(source[0])),
            np.array(lengths, np.int64),
            cut if cut.any() else None,
            {"seed": np.arange(len(source)) * 10},
            {"env": "corridor"},
            ("It lies in memory.",),
        )

    def episodes(self, source):
        return map(self._read, source)

    def _read(self, each):
        over, seen = each["terminated"], each["observation"]
        reward = each["reward"] * each["reward"].dtype.type(self.scale)
        after = np.concatenate([seen[1:], np.zeros_like(seen[:1])])[: len(over)]
        after = {"observation": after, "reward": reward}
        return {
            "observation": seen[: len(over)],
            "action": each["action"],
            "next": {**after, "terminated": over, "truncated": np.zeros_like(over)},
            "extra": each["extra"],
        }


class Quick(Indexed, Memory):
    """An in-memory format that reads single episodes by number."""

    name: ClassVar[str] = "quick"

    def pick(self, source, numbers):
        return (self._read(source[number]) for number in numbers)

    def episodes(self, source):
        return Indexed.episodes(self, source)


def episode_of(rng, steps, terminated, whole):
    """Returns a random episode; if `whole`, it has its last observation."""
    over = np.zeros(steps, bool)
    over[-1] = terminated
    return {
        "observation": rng.normal(size=(steps + whole, 2)).astype(np.float32),
        "action": rng.integers(0, 3, steps),
        "reward": rng.normal(size=steps).astype(np.float32),
        "terminated": over,
        "extra": {"x": rng.integers(0, 9, steps).astype(np.int8)},
    }


def source_of(seed, count=12, whole=None):
    """Episodes of any lengths and ends; `whole` for all of them, else some are."""
    rng = np.random.default_rng(seed)
    some = lambda: bool(rng.random() < 0.5)
    return [
        episode_of(rng, rng.integers(1, 7), some(), some() if whole is None else whole)
        for _ in range(count)
    ]


def expected_of(source, final="keep"):
    """The episodes of a dataset, in plain Python."""
    lacks = [
        len(each["observation"]) == len(each["action"]) and not each["terminated"][-1]
        for each in source
    ]
    return [
        _expected(each, lack, any(lacks), final) for each, lack in zip(source, lacks, strict=True)
    ]


def _expected(each, lacks, is_marked, final):
    steps = len(each["action"])
    seen = each["observation"]
    seen = np.concatenate([seen, np.zeros_like(seen[:1])])[: steps + 1]
    last = np.arange(steps) == steps - 1
    found = {
        "observation": seen[:-1],
        "action": each["action"],
        "extra": each["extra"]["x"],
        "next/observation": seen[1:],
        "next/reward": each["reward"],
        "next/terminated": each["terminated"],
    }
    kept = steps - (lacks and final == "drop")
    found = {name: leaf[:kept] for name, leaf in found.items()}
    truncated = (np.arange(kept) == kept - 1) & ~found["next/terminated"]
    found |= {"next/truncated": truncated, "next/done": found["next/terminated"] | truncated}
    if is_marked and final == "keep":
        found["next/valid"] = ~(last & lacks)
    after = {name[5:]: leaf for name, leaf in found.items() if name.startswith("next/")}
    flat = {name: leaf for name, leaf in found.items() if not name.startswith("next/")}
    return {**flat, "extra": {"x": flat["extra"]}, "next": after}
