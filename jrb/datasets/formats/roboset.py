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
from jrb.datasets.reading.hdf5_groups import EpisodeGroup, GroupFormat
from jrb.datasets.reading.names import natural_order

_NOTE = "The files have one flag, 'done': it is taken for a termination, not for a time-out."


@dataclasses.dataclass(frozen=True)
class RoboSet(GroupFormat):
    """Datasets of RoboSet; as facts, `seed` counts the files, and `episode` is the trial's number.

    Files are in the order of their names, numbers in them by their values.
    """

    name: ClassVar[str] = "roboset"
    looks_for: ClassVar[str] = "an HDF5 file with groups Trial<N>, or a folder of such"
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"Trial(\d+)")
    needed: ClassVar[tuple[str, ...]] = ("actions", "rewards", "done")
    names: ClassVar[Mapping[str, str]] = {
        "observations": "observation",
        "actions": "action",
        "rewards": "next/reward",
        "done": "next/terminated",
        "env_infos": "info",
    }

    def is_own(self, source: str, name: str) -> bool:
        """Returns whether a file is one of those with trials."""
        return "/" not in name and hdf5.is_hdf5(os.path.join(source, name))

    def matches(self, source: Source) -> bool:
        """Returns whether there are trials in the first of the files."""
        files = self.files(source)
        top = hdf5.top(files[0]) if files else {}
        return any(self.pattern.fullmatch(name) and about is None for name, about in top.items())

    def files(self, source: Source) -> list[str]:
        """Returns one HDF5 file, or those in a folder."""
        if not isinstance(source, str) or not os.path.isdir(source):
            return [source] if hdf5.is_hdf5(source) else []
        names = sorted(os.listdir(source), key=natural_order)
        paths = [os.path.join(source, name) for name in names]
        # A damaged file is kept, so that it is refused when it is opened.
        return [path for path in paths if hdf5.is_hdf5(path) or path.endswith((".h5", ".hdf5"))]

    def episode_layout(
        self, source: Source, groups: Sequence[EpisodeGroup]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """Returns the numbers of files and trials."""
        files = self.files(source)
        facts = {
            "seed": np.array([files.index(group.path) for group in groups], np.int64),
            "episode": np.array([group.number for group in groups], np.int64),
        }
        return facts, {"files": [os.path.basename(path) for path in files]}, (_NOTE,)
