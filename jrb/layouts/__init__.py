"""Pure functions that convert transitions between layouts of nested dicts of arrays.

N transitions, E environments, T time, K trajectories. *TED* is the layout that buffers take: a dict
with `observation`, `action` and `next: {observation, reward, done, ...}`, leaves `[T, ...]` or
`[T, E, ...]`. The *flat* layout stores an observation once that is also the next observation of the
previous row, and marks the ends of trajectories; the *nested* layout has their lengths instead;
`split` makes a dict for each trajectory. Conversion to a layout and back is exact.
"""

from jrb._util.public import PublicNames
from jrb.layouts.compact import (
    combine,
    flat_to_ted,
    nested_to_ted,
    split,
    ted_to_flat,
    ted_to_nested,
)

__all__ = [
    "combine",
    "flat_to_ted",
    "nested_to_ted",
    "split",
    "ted_to_flat",
    "ted_to_nested",
]
__dir__: PublicNames = lambda: __all__
