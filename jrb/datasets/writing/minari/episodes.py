"""Episodes in Minari's HDF5: a group for each, and what is to be said of all of them.

T steps of an episode.
"""

import dataclasses
import json
from typing import Any

import h5py
import jax
import numpy as np

from jrb._base.pytree import PyTree
from jrb.datasets.reading import hdf5
from jrb.datasets.writing.minari import spaces
from jrb.datasets.writing.minari.parts import Parts
from jrb.layouts import chain
from jrb.layouts.names import Leaves

_VERSION = "0.5.4"  # the first that asks whether images are JPEG
_REWARDS = ("rewards_sum", "rewards_mean", "rewards_std", "rewards_max", "rewards_min")
_OURS = ("id", "total_steps", *_REWARDS)


@dataclasses.dataclass
class Written:
    """What is written so far.

    Attributes:
        given: the spaces that are known, under "observation" and "action".
        bounds: the least and the greatest of single integers, by name.
        specs: the arrays of the first episode, as specs `[T, ...]`.
        episodes: how many there are.
        steps: of all of them.
        running: how many had not ended.
        begun: of how many the beginning may be overwritten.
        left_out: how many steps are left out.
    """

    given: dict[str, dict[str, Any]]
    bounds: dict[str, spaces.Bounds] = dataclasses.field(default_factory=dict)
    specs: dict[str, Any] = dataclasses.field(default_factory=dict)
    episodes: int = 0
    steps: int = 0
    running: int = 0
    begun: int = 0
    left_out: int = 0

    def put(self, file: h5py.File, episode: Parts) -> None:
        """Writes an episode."""
        where = f"write_minari: episode {self.episodes}"
        after = f"{where}: leaf 'next/observation"
        seen = _joined(after, episode.observation, episode.after)
        for name, tree in (("observation", seen), ("action", episode.action)):
            self._note(name, tree)
        group = file.create_group(f"episode_{self.episodes}")
        group.attrs.update(_attributes(self.episodes, episode))
        _put(group, "observations", seen)
        _put(group, "actions", episode.action)
        _put(group, "rewards", episode.reward)
        _put(group, "terminations", episode.terminated)
        _put(group, "truncations", episode.truncated)
        infos = group.create_group("infos")
        for name, leaf in _infos(where, episode.rest).items():
            _put(infos, name, leaf)
        self.episodes += 1
        self.steps += len(episode.reward)
        self.running += episode.held.is_running
        self.begun += episode.held.is_cut
        self.left_out += episode.left_out

    def _note(self, name: str, tree: PyTree) -> None:
        """Takes down what spaces are told from."""
        if name not in self.specs:
            self.specs[name] = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree
            )
            if name in self.given:
                spaces.check(name, self.given[name], tree)
        self._widen(name, tree)

    def _widen(self, name: str, tree: PyTree) -> None:
        inner = spaces.entries(name, tree)
        for part, entry in (inner or {}).items():
            self._widen(f"{name}/{part}", entry)
        if inner is None and tree.ndim == 1 and tree.dtype.kind in "biu":
            ends = [int(tree.min()), int(tree.max()), *self.bounds.get(name, ())]
            self.bounds[name] = (min(ends), max(ends))

    def metadata(self) -> dict[str, Any]:
        """What Minari asks for, and what a reader has to know.

        Raises:
            ValueError: there is no episode.
        """
        if not self.episodes:
            raise ValueError("write_minari: expected at least one episode, got none.")
        found = {
            name: self.given.get(name) or spaces.derived(name, spec, self.bounds)
            for name, spec in self.specs.items()
        }
        return {
            "total_episodes": self.episodes,
            "total_steps": self.steps,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "minari_version": _VERSION,
            **{f"{name}_space": json.dumps(space) for name, space in found.items()},
            "notes": self._notes(),
        }

    def _notes(self) -> list[str]:
        told = {
            f"{self.running} of {self.episodes} episodes had not ended when they were written: "
            "their last steps are truncated.": self.running,
            f"The beginning of {self.begun} of {self.episodes} episodes may have been overwritten "
            "before they were written.": self.begun,
            f"{self.left_out} steps whose next observation is not known were left out.": (
                self.left_out
            ),
        }
        return [note for note, count in told.items() if count]


def _joined(where: str, before: Any, after: Any) -> Any:
    """Observations `[T + 1, ...]`, nested dicts, from those before and after each step.

    Raises:
        ValueError: they are not alike, or one is not the next one of the step before.
    """
    inner, other = spaces.entries(where, before), spaces.entries(where, after)
    if inner is not None and other is not None and inner.keys() == other.keys():
        return {part: _joined(f"{where}/{part}", inner[part], other[part]) for part in inner}
    if inner is not None or other is not None or not _alike(before, after):
        raise ValueError(
            f"{where}': expected what is like the one before the action, got {spaces.said(after)} "
            f"after {spaces.said(before)}."
        )
    breaks = chain.differ(before[None], after[None])[0]
    if breaks.any():
        raise ValueError(
            f"{where}': expected what stands before the action of the next step, got another "
            f"after step {np.flatnonzero(breaks)[0]}. Minari's sets hold every observation once: "
            "end the episode there, or write transitions of one step."
        )
    return np.concatenate([before, after[-1:]])


def _alike(before: np.ndarray, after: np.ndarray) -> bool:
    return (before.shape, before.dtype) == (after.shape, after.dtype)


def _put(group: h5py.Group, name: str, tree: PyTree) -> None:
    """Writes arrays, a container as a group."""
    where = f"{group.name}/{name}"
    inner = spaces.entries(where, tree)
    if name in group:
        raise ValueError(f"'{where}': expected names that differ, got two of these. Rename one.")
    if inner is None:
        if tree.dtype.kind not in "biufc" or tree.dtype.isbuiltin == 2:
            raise ValueError(
                f"'{where}': expected a dtype that HDF5 has, got {tree.dtype}. Store it as another."
            )
        group.create_dataset(name, data=tree)
        return
    found = group.create_group(name)
    for part, entry in inner.items():
        _put(found, part, entry)


def _infos(where: str, rest: Leaves) -> Leaves:
    """What goes into `infos`: `[T + 1, ...]` where both `info` and `next/info` are there."""
    twins = {name: "next/" + name for name in rest if name.startswith("info/")}
    twins = {name: after for name, after in twins.items() if after in rest}
    found: Leaves = {}
    for name in [name for name in rest if name not in twins.values()]:
        short = name.removeprefix("info/")
        if short in found:
            raise ValueError(
                f"{where}: leaf '{name}': expected a name of its own in infos, got '{short}' "
                "twice. Rename one."
            )
        after = rest.get(twins.get(name, ""))
        leaf = rest[name]
        found[short] = (
            leaf if after is None else _joined(f"{where}: leaf 'next/{name}", leaf, after)
        )
    return found


def _attributes(number: int, episode: Parts) -> dict[str, Any]:
    """What is said of an episode: what Minari's collector says, and facts that HDF5 can hold."""
    if episode.reward.ndim != 1 or episode.reward.dtype.kind not in "biuf":
        raise ValueError(
            f"leaf 'next/reward': expected one number for each step, got {episode.reward.dtype} "
            f"of shape {episode.reward.shape[1:]}."
        )
    reward = episode.reward.astype(np.float64)
    facts = {name: hdf5.plain(fact) for name, fact in episode.held.facts.items()}
    told = {name: fact for name, fact in facts.items() if isinstance(fact, str | int | float)}
    said = (number, len(reward), reward.sum(), reward.mean(), reward.std())
    return {**told, **dict(zip(_OURS, (*said, reward.max(), reward.min()), strict=True))}
