"""Layouts: the same transitions, arranged in other ways. Pure functions on dicts of arrays.

N transitions, E environments, T time, K trajectories. *TED* is how buffers take transitions: a dict
with `observation`, `action` and `next: {observation, reward, done, ...}`, leaves `[T, ...]` or
`[T, E, ...]`. In the *flat* layout an observation that is also the next observation of the row
before stands there once; the *nested* one says where each trajectory begins; `split` makes one
small dict of each. There and back is the identity, bit for bit.
"""

from jrb._util.public import PublicNames
from jrb.layouts.flat import flat_to_ted, ted_to_flat
from jrb.layouts.nested import combine, nested_to_ted, split, ted_to_nested

__all__ = [
    "combine",
    "flat_to_ted",
    "nested_to_ted",
    "split",
    "ted_to_flat",
    "ted_to_nested",
]
__dir__: PublicNames = lambda: __all__
