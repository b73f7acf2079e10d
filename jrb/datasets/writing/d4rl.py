"""D4RL: one HDF5 file, arrays of all steps."""

import os
from typing import cast

import h5py
import numpy as np

from jrb.authoring import escaped_errors
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.output import new_path
from jrb.datasets.writing.source import FLAGS, VALID, Source, check_roles
from jrb.state import BufferState

_NAMES = {
    "observation": "observations",
    "action": "actions",
    "next/reward": "rewards",
    "next/observation": "next_observations",
}


@escaped_errors()
def write_d4rl(
    path: str | os.PathLike[str],
    buffer: ReplayBuffer | Dataset,
    state: BufferState | None = None,
) -> None:
    """Writes the episodes of a buffer or a dataset in D4RL's layout, one after the other.

    Further leaves go below `infos/`. An episode that is still running, or that was cut by
    `truncate`, ends by a time-out. Attributes of the file count those that run (`running`), and
    those whose beginning may have been overwritten (`cut`). Of flags, `done` alone is taken for a
    termination. Where the observation after a last step lacks (`next/valid`), the file has no
    `next_observations`.

    Args:
        path: of the new file; nothing may be there. It is there when it is whole.
        buffer: the description, with a writer that keeps the order of time; or a dataset, without
            a state. Observations, actions and rewards are single arrays.
        state: its state. It is only read, some megabytes at a time; what lies in it is written as
            it is stored.

    Raises:
        ValueError: there is something at the path, there are no steps or no such arrays, or they
            have a dtype that HDF5 lacks.
        TypeError: neither a buffer with its state nor a dataset.
    """
    source = Source("write_d4rl", buffer, state)
    check_roles("write_d4rl", source.specs)
    for name in _NAMES:
        if name not in source.specs:
            raise ValueError(
                f"write_d4rl: expected one array '{name}', got leaves {list(source.specs)}. "
                "write_rlds takes nested ones."
            )
    for name, leaf in source.specs.items():
        if np.dtype(leaf.dtype).kind not in "biufc":
            raise ValueError(
                f"write_d4rl: leaf '{name}': expected a dtype that HDF5 has, got {leaf.dtype}. "
                "Convert it."
            )
    steps = int(source.lengths.sum())
    if not steps:
        raise ValueError("write_d4rl: expected a buffer that holds steps, got an empty one.")
    in_file = lambda name: _NAMES.get(name) or "infos/" + name.removeprefix("info/")
    with new_path(path) as temporary, h5py.File(temporary, "w") as file:
        for name, leaf in source.specs.items():
            if name not in (*FLAGS, VALID):
                file.create_dataset(in_file(name), (steps, *leaf.shape), leaf.dtype)
        for name in ("terminals", "timeouts"):
            file.create_dataset(name, (steps,), bool)
        start, running, cut, is_whole = 0, 0, 0, True
        for episode in source:
            leaves, terminated, truncated, has_last = episode.split_flags()
            arrays = {in_file(name): leaf for name, leaf in leaves.items()}
            for name, array in {**arrays, "terminals": terminated, "timeouts": truncated}.items():
                cast(h5py.Dataset, file[name])[start : start + len(array)] = array
            running += episode.is_running
            cut += episode.is_cut
            start += len(terminated)
            is_whole &= has_last
        if not is_whole:
            del file["next_observations"]
        file.attrs.update(running=running, cut=cut)
