"""RoboSet: HDF5 files with a group for each trial, several of them in a folder.

`Trial<N>/{observations, actions, rewards, done, env_infos, ...}`, all of the trial's length.

Reference: Bharadhwaj et al., RoboAgent, 2023.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.grouped import Grouped, Place, gap_notes, places_in
from jrb.datasets.reading.names import natural_order

_TRIAL = re.compile(r"Trial(\d+)")
_NAMES = {
    "observations": "observation",
    "actions": "action",
    "rewards": "next/reward",
    "done": "next/terminated",
    "env_infos": "info",
}
_NOTE = "The files have one flag, 'done': it is taken for a termination, not for a time-out."


@dataclasses.dataclass(frozen=True)
class RoboSet(Grouped):
    """Sets of RoboSet; as facts, `seed` counts the files, and `episode` is the number of a trial.

    Files are in the order of their names, numbers in them by their values.
    """

    name: ClassVar[str] = "roboset"
    looks_for: ClassVar[str] = "an HDF5 file with groups Trial<N>, or a folder of such"
    needed: ClassVar[tuple[str, ...]] = ("actions", "rewards", "done")
    names: ClassVar[Mapping[str, str]] = _NAMES

    def is_own(self, source: str, name: str) -> bool:
        """Returns whether a file is one of those with trials."""
        return "/" not in name and hdf5.is_hdf5(os.path.join(source, name))

    def matches(self, source: Source) -> bool:
        """Whether there are trials in the first of the files."""
        files = _files(source)
        top = hdf5.top(files[0]) if files else {}
        return any(_TRIAL.fullmatch(name) and about is None for name, about in top.items())

    def files(self, source: Source) -> list[str]:
        """Those with trials."""
        return _files(source)

    def places(self, source: Source) -> list[Place]:
        """The trials of one file after the other, by their numbers, of which some may lack."""
        found = []
        for path in _files(source):
            with hdf5.opened(path) as file:
                found += places_in(path, file, _TRIAL)
        return found

    def episode_layout(
        self, source: Source, places: Sequence[Place]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """The numbers of files and trials."""
        files = _files(source)
        seeds = [files.index(place.path) for place in places]
        trials = [place.number for place in places]
        facts = {"seed": np.array(seeds, np.int64), "episode": np.array(trials, np.int64)}
        metadata = {"files": [os.path.basename(path) for path in files]}
        return facts, metadata, (_NOTE, *gap_notes(places))


def _files(source: Any) -> list[str]:
    """The HDF5 files: one, or those in a folder."""
    if not isinstance(source, str) or not os.path.isdir(source):
        return [source] if hdf5.is_hdf5(source) else []
    names = sorted(os.listdir(source), key=natural_order)
    paths = [os.path.join(source, name) for name in names]
    # A file that is named so and is none is refused when it is opened.
    return [path for path in paths if hdf5.is_hdf5(path) or path.endswith((".h5", ".hdf5"))]
