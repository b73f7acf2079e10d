"""RLDS: episodes as dicts of NumPy arrays.

L steps of an episode.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jrb.authoring import escaped_errors
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.reading.names import check_names
from jrb.datasets.writing.source import Source, SourceEpisode, check_roles, first_break
from jrb.keys import within
from jrb.layouts.names import nest
from jrb.state import BufferState


@escaped_errors()
def write_rlds(
    buffer: ReplayBuffer | Dataset, state: BufferState | None = None
) -> Iterator[dict[str, Any]]:
    """Returns the episodes of a buffer or a dataset in RLDS's layout, one by one.

    An episode is a dict. `steps` has arrays `[L + 1, ...]`: the observations with the last one,
    `action`, `reward`, `is_first`, `is_last`, `is_terminal`, and further leaves under their names.
    What belongs to a step is zero in the last row. Without a leaf `discount`, that is float32, 0
    for the step that terminated and else 1. Where the observation after a last step lacks
    (`next/valid`), arrays are `[L, ...]`, and no step `is_last`.

    Beside `steps`, `environment` is whose the episode is, `is_running` whether it is still running;
    it is written as a truncated one. `is_cut` is whether its beginning may have been overwritten.
    Of a dataset, they are its facts. Of flags, `done` alone is taken for a termination.

    Args:
        buffer: the description, with a writer that keeps the order of time; or a dataset, without
            a state.
        state: its state. It is only read, some megabytes at a time; what lies in it is written as
            it is stored.

    Returns:
        An iterator, which `jrb.datasets.open` takes too.

    Raises:
        ValueError: items without observation, action or next observation; or, when the episode is
            asked for, a next observation that is not the observation of the next step, as RLDS has
            each of them once.
        TypeError: neither a buffer with its state nor a dataset.
    """
    source = Source("write_rlds", buffer, state)
    check_roles("write_rlds", source.specs)
    return (_episode(number, episode) for number, episode in enumerate(source))


def _episode(number: int, episode: SourceEpisode) -> dict[str, Any]:
    where = f"write_rlds: episode {number}"
    leaves, terminated, _, has_last = episode.split_flags()
    leaves = {"discount": (~terminated).astype(np.float32), **leaves}
    after = {
        name.removeprefix("next/"): leaves.pop(name)
        for name in list(leaves)
        if within(name, "next/observation")
    }
    before = {name for name in leaves if within(name, "observation")}
    if before != after.keys():
        raise ValueError(
            f"{where}: leaf 'next/observation': expected what the observation is, {sorted(before)},"
            f" got {sorted(after)}. RLDS has each observation once."
        )
    for name, leaf in after.items():
        step = first_break(where, name, leaves[name], leaf)
        if step is not None:
            raise ValueError(
                f"{where}: leaf 'next/{name}': expected the next step's '{name}', got another "
                f"after step {step}. RLDS has each observation once; write_d4rl has both."
            )
    rows = {"reward" if name == "next/reward" else name: leaf for name, leaf in leaves.items()}
    if has_last:  # a last row, with zeros where it has nothing
        for name, leaf in rows.items():
            last = after[name][-1:] if name in after else np.zeros_like(leaf[:1])
            rows[name] = np.concatenate([leaf, last])
    is_first, is_last, is_terminal = (np.zeros(len(terminated) + has_last, bool) for _ in range(3))
    is_first[0], is_last[-1], is_terminal[-1] = True, has_last, terminated[-1]
    rows |= {"is_first": is_first, "is_last": is_last, "is_terminal": is_terminal}
    check_names(where, rows)
    return {
        "steps": nest(rows),
        "environment": np.int64(episode.facts.get("environment", 0)),
        "is_running": np.bool_(episode.is_running),
        "is_cut": np.bool_(episode.is_cut),
    }
