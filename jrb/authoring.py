"""Functions for parts of your own: reads and writes that stay in place, ends of episodes, anchors.

N capacity, E environments, T time, B batch.
"""

from jrb._base.ordering import emptied, overwrite
from jrb._base.ordering import read as materialize
from jrb._base.pytree import leaf_name, leaf_names
from jrb._engine.episodes import ending as episode_ends
from jrb._engine.episodes import lengths as episode_lengths
from jrb._engine.rows import last_of_equals
from jrb._engine.rows import put as put_rows
from jrb._engine.rows import read as read_rows
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
