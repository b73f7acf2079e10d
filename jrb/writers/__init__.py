"""Writers choose the slots to which rows are written."""

from jrb._util.public import PublicNames
from jrb.writers.ranked import MaxValue, Reservoir
from jrb.writers.ring import BlockWhenFull, PerEnvironment, ReadOnly, RoundRobin

__all__ = ["BlockWhenFull", "MaxValue", "PerEnvironment", "ReadOnly", "Reservoir", "RoundRobin"]
__dir__: PublicNames = lambda: __all__
