"""RLDS: episodes as dicts of NumPy arrays.

L steps of an episode.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jrb._store.printing import escaped_errors
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.reading.names import check_names
from jrb.datasets.writing.pieces import Piece, check_source, piece_of
from jrb.datasets.writing.source import Held, Source
from jrb.keys import within
from jrb.layouts import chain
from jrb.layouts.names import Leaves, nest
from jrb.state import BufferState

_SEEN, _AFTER = "observation", "next/observation"


@escaped_errors()
def write_rlds(
    buffer: ReplayBuffer | Dataset, state: BufferState | None = None
) -> Iterator[dict[str, Any]]:
    """The episodes that a buffer holds, or a dataset, in RLDS's layout, one by one.

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
    check_source(source, "write_rlds")
    return (_episode(number, held) for number, held in enumerate(source))


def _episode(number: int, held: Held) -> dict[str, Any]:
    piece = piece_of(held)
    steps, leaves = len(piece.terminated), dict(piece.leaves)
    leaves.setdefault("discount", (~piece.terminated).astype(np.float32))
    after = {name: leaves.pop(name) for name in list(leaves) if within(name, _AFTER)}
    after = {name.removeprefix("next/"): leaf for name, leaf in after.items()}
    _check_chain(
        number, {name: leaf for name, leaf in leaves.items() if within(name, _SEEN)}, after
    )
    rows = {"reward" if name == "next/reward" else name: leaf for name, leaf in leaves.items()}
    if piece.has_last:
        rows = {
            name: np.concatenate([leaf, after[name][-1:] if name in after else _zero(leaf)])
            for name, leaf in rows.items()
        }
    rows |= _flags(steps, piece)
    check_names(f"write_rlds: episode {number}", rows)
    return {
        "steps": nest(rows),
        "environment": np.int64(held.facts.get("environment", 0)),
        "is_running": np.bool_(held.is_running),
        "is_cut": np.bool_(held.is_cut),
    }


def _flags(steps: int, piece: Piece) -> Leaves:
    first, last, terminal = (np.zeros(steps + piece.has_last, bool) for _ in range(3))
    first[0], last[-1] = True, piece.has_last
    terminal[-1] = piece.terminated[-1]
    return {"is_first": first, "is_last": last, "is_terminal": terminal}


def _zero(leaf: np.ndarray) -> np.ndarray:
    return np.zeros_like(leaf[:1])


def _check_chain(number: int, before: Leaves, after: Leaves) -> None:
    """Refuses next observations that are not those of the next steps."""
    kinds = [
        {name: (leaf.shape, leaf.dtype) for name, leaf in each.items()} for each in (before, after)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"write_rlds: leaf 'next/observation': expected what the observation is, {kinds[0]}, "
            f"got {kinds[1]}. RLDS has each observation once."
        )
    for name, leaf in after.items():
        breaks = np.flatnonzero(chain.differ(before[name][None], leaf[None])[0])
        if len(breaks):
            raise ValueError(
                f"write_rlds: episode {number}: leaf 'next/{name}': expected the next step's "
                f"'{name}', got another after step {breaks[0]}. RLDS has each observation once; "
                "write_d4rl has both."
            )
