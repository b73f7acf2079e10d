"""Samplers choose which anchors are drawn, and with which probability."""

from jrb._util.public import PublicNames
from jrb.samplers.grouped import Grouped
from jrb.samplers.mixture import Mixture
from jrb.samplers.ordered import Lifo, Queue
from jrb.samplers.prioritized import Prioritized
from jrb.samplers.uniform import Newest, Uniform
from jrb.samplers.weighted import Weighted
from jrb.samplers.without_replacement import WithoutReplacement

__all__ = [
    "Grouped",
    "Lifo",
    "Mixture",
    "Newest",
    "Prioritized",
    "Queue",
    "Uniform",
    "Weighted",
    "WithoutReplacement",
]
__dir__: PublicNames = lambda: __all__
