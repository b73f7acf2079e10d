"""robomimic: one HDF5 file with a group for each demonstration.

`data/demo_<k>/{obs, next_obs, actions, rewards, dones, states}`, with an attribute `num_samples`;
`data` has `env_args`, what the environment was made of, as JSON. `mask/<key>` lists the names of
some demonstrations, such as those to train on.

Reference: Mandlekar et al., What Matters in Learning from Offline Human Demonstrations, 2021.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import h5py
import numpy as np

from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.hdf5_groups import EpisodeGroup, GroupFormat, opened_groups
from jrb.datasets.reading.names import natural_order

_NOTE = (
    "The file has one flag, 'dones', for a task that is done and for the end of a demonstration: "
    "it is taken for a termination."
)


@dataclasses.dataclass(frozen=True)
class Robomimic(GroupFormat):
    """Datasets of robomimic, with their observations; rewards may be missing.

    As facts, `demo` is the number of a demonstration, and `mask/<key>`, bool, tells which of them
    the file lists under this key.
    """

    name: ClassVar[str] = "robomimic"
    looks_for: ClassVar[str] = "an HDF5 file with groups data/demo_<k>"
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"demo_(\d+)")
    parent: ClassVar[str] = "data"
    needed: ClassVar[tuple[str, ...]] = ("actions", "dones")
    names: ClassVar[Mapping[str, str]] = {
        "obs": "observation",
        "next_obs": "next/observation",
        "actions": "action",
        "rewards": "next/reward",
        "dones": "next/terminated",
    }

    def matches(self, source: Source) -> bool:
        """Returns whether there are demonstrations."""
        if hdf5.top(source).get("data", ()) is not None:  # no group
            return False
        with hdf5.opened(source) as file:
            return any(map(self.pattern.fullmatch, hdf5.own(file, "data")))

    def episode_layout(
        self, source: Source, groups: Sequence[EpisodeGroup]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """Returns the numbers, the masks, and the attributes of the file and of `data`."""
        for where, group in opened_groups(groups):
            count, actions = group.attrs.get("num_samples"), hdf5.own(group, "actions")
            has_rows = isinstance(actions, h5py.Dataset) and actions.shape
            if count is not None and has_rows and len(actions) != count:
                raise ValueError(
                    f"{where}: expected {count} actions by its attribute num_samples, got "
                    f"{len(actions)}."
                )
        facts = {"demo": np.array([group.number for group in groups], np.int64)}
        with hdf5.opened(source) as file:
            attributes = [*file.attrs.items(), *hdf5.own(file, "data").attrs.items()]
            metadata = {name: _parsed(hdf5.plain(value)) for name, value in attributes}
            masks, notes = _masks(file, [group.name.split("/")[-1] for group in groups])
        return facts | masks, metadata, (_NOTE, *notes)


def _parsed(value: object) -> Any:
    """Returns the value of a text of JSON; other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _masks(file: h5py.File, names: list[str]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Returns whether each demonstration is in the list of each key, bool `[K]`; and notes."""
    group = hdf5.own(file, "mask")
    lists = hdf5.below(group) if isinstance(group, h5py.Group) else {}
    masks, notes = dict[str, np.ndarray](), list[str]()
    for key, entry in lists.items():
        texts = hdf5.plain(np.asarray(entry[()]).reshape(-1))
        listed = [str(hdf5.plain(text)) for text in texts]
        missing = sorted(set(listed) - set(names), key=natural_order)
        if missing:
            shown = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
            notes.append(
                f"mask/{key} lists {len(missing)} demonstrations that are not in the file: {shown}."
            )
        masks[f"mask/{key}"] = np.isin(names, listed)
    return masks, tuple(notes)
