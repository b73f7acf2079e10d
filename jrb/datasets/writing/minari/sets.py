"""Sets that Minari loads, written without Minari: HDF5 beside JSON, arrays as they are.

T steps of an episode.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import h5py

from jrb._store import files
from jrb._store.printing import escaped_errors
from jrb.buffer import ReplayBuffer
from jrb.checkpoint.shelter import Shelter
from jrb.datasets.dataset import Dataset
from jrb.datasets.kinds.minari.about import FILE, MAIN
from jrb.datasets.writing.beside import free, new_folder
from jrb.datasets.writing.minari import spaces
from jrb.datasets.writing.minari.episodes import Written
from jrb.datasets.writing.minari.parts import ROLES, parts_of
from jrb.datasets.writing.source import Source
from jrb.state import BufferState

_ID = re.compile(r"([-\w][-\w/]*[-\w]/)?[-\w]+-v\d+")


@escaped_errors()
def write_minari(
    path: str | os.PathLike[str],
    buffer: ReplayBuffer | Dataset,
    state: BufferState | None = None,
    *,
    dataset_id: str | None = None,
    observation_space: Any = None,
    action_space: Any = None,
    env_spec: Any = None,
    author: str | Iterable[str] = (),
    author_email: str | Iterable[str] = (),
    algorithm_name: str | None = None,
    code_permalink: str | None = None,
    description: str | None = None,
) -> None:
    """Writes all episodes that a buffer holds as a set of Minari.

    `minari.load_dataset(dataset_id)` finds it at `<MINARI_DATASETS_PATH>/<dataset_id>`, and
    `minari.MinariDataset(path + "/data")` anywhere. Arrays are written as they are stored, images
    without JPEG, whatever dtype the spaces have. An episode that had not ended is written too; its
    last step is truncated, as Minari's own collector does it, and its attribute `complete` False;
    of one whose beginning may be overwritten, `cut` is True. A last step whose next observation is
    not known (`next/valid`) is left out. How often that was so is told under `notes` in the
    metadata. What items have besides (but for `done`) goes into `infos`, `info` and `next/info`
    together, as they are read.

    The set is written beside, synced and renamed: whatever goes wrong, it is whole or not there.

    Args:
        path: the folder of the set, which is not there yet.
        buffer: the description, whose items have observation, action, next observation, reward,
            terminated and truncated; or a dataset, without a state.
        state: its state. It is only read.
        dataset_id: `<namespace>/<name>-v<number>`; by default the name of the folder.
        observation_space: one of Gymnasium, or its JSON as Minari writes it; by default told from
            the arrays: a `Box` as wide as the dtype, `Discrete` for single integers as far as they
            go, `MultiBinary` for flags, in dicts and tuples.
        action_space: as `observation_space`.
        env_spec: Gymnasium's spec of the environment, or its JSON.
        author: of the data, one or several.
        author_email: likewise.
        algorithm_name: what chose the actions.
        code_permalink: where the code is.
        description: a text.

    Raises:
        ValueError: something is at the path, there is no episode, items lack something or have a
            dtype that HDF5 lacks, spaces do not fit, or a next observation (or `next/info`) is
            not what stands before the action of the next step, which a set cannot hold.
        TypeError: neither a buffer with its state nor a dataset.
    """
    target = free(path)
    about: dict[str, Any] = {
        "dataset_id": _id(target, dataset_id),
        "author": [author] if isinstance(author, str) else list(author),
        "author_email": [author_email] if isinstance(author_email, str) else list(author_email),
        "algorithm_name": algorithm_name,
        "code_permalink": code_permalink,
        "description": description,
        "env_spec": _env_spec(env_spec),
    }
    given = {"observation": observation_space, "action": action_space}
    known = {
        name: spaces.as_json(f"{name}_space", space)
        for name, space in given.items()
        if space is not None
    }
    source = Source("write_minari", buffer, state, roles=ROLES)
    _write(target, Written(known), source, about)


def _id(target: str, given: str | None) -> str:
    name = os.path.basename(target) if given is None else given
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise ValueError(
            f"dataset_id: expected <namespace>/<name>-v<number> (the namespace may lack), got "
            f"{name!r}."
        )
    return name


def _env_spec(given: Any) -> str | None:
    """A spec as JSON."""
    if given is None:
        return None
    text = given if isinstance(given, str) else None
    if isinstance(given, Mapping):
        text = json.dumps(dict(given))
    elif not isinstance(given, str) and hasattr(given, "to_json"):
        text = given.to_json()
    try:
        found = json.loads(text or "")
    except ValueError:
        found = None
    if not isinstance(found, dict) or "id" not in found:
        raise ValueError(
            f"env_spec: expected Gymnasium's spec of an environment (env.spec), or its JSON, got "
            f"{given!r}."
        )
    return text


def _write(target: str, written: Written, source: Source, about: Mapping[str, Any]) -> None:
    with new_folder(target) as folder:
        data = os.path.join(folder, "data")
        files.make_folder(data)
        size = _write_file(os.path.join(data, MAIN), written, source)
        whole = {**written.metadata(), **about, "dataset_size": round(size / 1e6, 1)}
        text = json.dumps({name: value for name, value in whole.items() if value is not None})
        files.write_new(os.path.join(data, FILE), [text.encode()])


def _write_file(path: str, written: Written, source: Source) -> int:
    """Writes the arrays; returns the number of bytes."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        shelter = Shelter(opened, path)
        with h5py.File(shelter, "w") as file:
            for held in source:
                episode = parts_of(held, source.keys)
                if episode is not None:
                    written.put(file, episode)
                    shelter.check()
        shelter.check()
        return os.fstat(opened).st_size
    finally:
        os.close(opened)
