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
from jrb.datasets.reading.grouped import Grouped, Place, gap_notes, group_at, places_in
from jrb.datasets.reading.names import natural_order

_DEMO = re.compile(r"demo_(\d+)")
_NAMES = {
    "obs": "observation",
    "next_obs": "next/observation",
    "actions": "action",
    "rewards": "next/reward",
    "dones": "next/terminated",
}
_NOTE = (
    "The file has one flag, 'dones', for a task that is done and for the end of a demonstration: "
    "it is taken for a termination."
)


@dataclasses.dataclass(frozen=True)
class Robomimic(Grouped):
    """Sets of robomimic, with their observations; rewards may lack.

    As facts, `demo` is the number of a demonstration, and `mask/<key>`, bool, whether it is one of
    those that the file lists under this key.
    """

    name: ClassVar[str] = "robomimic"
    looks_for: ClassVar[str] = "an HDF5 file with groups data/demo_<k>"
    needed: ClassVar[tuple[str, ...]] = ("actions", "dones")
    names: ClassVar[Mapping[str, str]] = _NAMES

    def matches(self, source: Source) -> bool:
        """Whether there are demonstrations."""
        if hdf5.top(source).get("data", ()) is not None:
            return False
        with hdf5.opened(source) as file:
            return any(map(_DEMO.fullmatch, hdf5.own(file, "data")))

    def places(self, source: Source) -> list[Place]:
        """The demonstrations by their numbers, of which some may lack."""
        with hdf5.opened(source) as file:
            data = hdf5.own(file, "data")
            if not isinstance(data, h5py.Group):
                raise ValueError(f"{source}: expected a group 'data', got {list(file)}.")
            return places_in(source, data, _DEMO)

    def episode_layout(
        self, source: Source, places: Sequence[Place]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """The numbers, the masks, and the attributes."""
        facts = {"demo": np.array([place.number for place in places], np.int64)}
        with hdf5.opened(source) as file:
            for place in places:
                _check_samples(place, group_at(file, place))
            metadata = {name: _parsed(hdf5.plain(value)) for name, value in _attributes(file)}
            masks, notes = _masks(file, [place.group.split("/")[-1] for place in places])
        return facts | masks, metadata, (_NOTE, *gap_notes(places), *notes)


def _attributes(file: h5py.File) -> list[tuple[str, Any]]:
    return [*file.attrs.items(), *hdf5.own(file, "data").attrs.items()]


def _parsed(value: object) -> Any:
    """A text of JSON as what it stands for; else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _masks(file: h5py.File, names: list[str]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Whether each demonstration is in the list of each key, bool `[K]`; and what is to be said."""
    group = hdf5.own(file, "mask")
    lists = hdf5.below(group) if isinstance(group, h5py.Group) else {}
    found, notes = {}, []
    for key, entry in lists.items():
        texts = hdf5.plain(np.asarray(entry[()]).reshape(-1))
        listed = [hdf5.plain(text) for text in texts]
        lost = sorted({str(name) for name in listed} - set(names), key=natural_order)
        if lost:
            shown = ", ".join(lost[:3]) + ", ..." * (len(lost) > 3)
            notes.append(
                f"mask/{key} lists {len(lost)} demonstrations that are not in the file: {shown}."
            )
        found[f"mask/{key}"] = np.isin(names, listed)
    return found, tuple(notes)


def _check_samples(place: Place, group: h5py.Group) -> None:
    """Refuses a group that has other steps than it says."""
    said, actions = group.attrs.get("num_samples"), hdf5.own(group, "actions")
    if said is None or not isinstance(actions, h5py.Dataset) or not actions.shape:
        return
    if len(actions) != said:
        raise ValueError(
            f"{place.path}: {place.group}: expected {said} actions by its attribute num_samples, "
            f"got {len(actions)}."
        )
