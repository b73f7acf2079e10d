"""Next observations that are the observation of the next item, kept once in a chunk.

n items of a chunk, environment by environment: where one ends, the next item is another's, and
mostly does not fit.
"""

import numpy as np

from jrb.datasets.recording.chunks import Shared
from jrb.datasets.recording.heads import Head
from jrb.keys import path_name, within


def found(head: Head, columns: list[np.ndarray]) -> Shared:
    """What the leaves of a chunk share.

    Args:
        head: of its writer.
        columns: `[n, ...]`, of every leaf.
    """
    pieces = {
        after: (seen, places(columns[after], columns[seen])) for after, seen in pairs(head).items()
    }
    return {after: one for after, one in pieces.items() if len(one[1]) < len(columns[after])}


def pairs(head: Head) -> dict[int, int]:
    """From the numbers of leaves that tell the next observation to those of the observation."""
    names, before = head.names, path_name(head.keys.observation)
    after = path_name(head.keys.next_observation)
    found = {}
    for number, leaf in enumerate(head.leaves):
        name = before + leaf.name.removeprefix(after)
        if not within(leaf.name, after) or name not in names or not leaf.width:
            continue
        seen = names.index(name)
        if seen != number and (head.leaves[seen].dtype, head.leaves[seen].shape) == (
            leaf.dtype,
            leaf.shape,
        ):
            found[number] = seen
    return found


def places(after: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The places of items whose next observation is not, bit for bit, what the next item saw.

    Args:
        after: the next observations `[n, ...]`.
        seen: the observations `[n, ...]`.

    Returns:
        int64, ascending; the last item is among them.
    """
    raw = lambda column: column.reshape(len(column), -1).view(np.uint8)
    differs = np.ones(len(after), bool)
    differs[:-1] = (raw(after)[:-1] != raw(seen)[1:]).any(1)
    return np.flatnonzero(differs)
