"""Functions for parts of your own: reads and writes that stay in place, ends of episodes, anchors.

N capacity, E environments, T time, B batch.
"""

from jrb._core.episodes import ending as episode_ends
from jrb._core.episodes import lengths as episode_lengths
from jrb._core.rows import last_of_equals
from jrb._core.rows import put as put_rows
from jrb._core.rows import read as read_rows
from jrb._util.pytree import leaf_name, leaf_names
from jrb._xla.dependencies import emptied, overwrite
from jrb._xla.dependencies import read as materialize
from jrb.units.transition import all_held, every_slot

__all__ = [
    "all_held",
    "emptied",
    "episode_ends",
    "episode_lengths",
    "every_slot",
    "last_of_equals",
    "leaf_name",
    "leaf_names",
    "materialize",
    "overwrite",
    "put_rows",
    "read_rows",
]
