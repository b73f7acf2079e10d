"""Writers: which slots do these rows go to?"""

from jrb.writers.immutable import Immutable
from jrb.writers.lanes import Lanes
from jrb.writers.max_value import MaxValue
from jrb.writers.reservoir import Reservoir
from jrb.writers.round_robin import RoundRobin
from jrb.writers.until_full import UntilFull

__all__ = ["Immutable", "Lanes", "MaxValue", "Reservoir", "RoundRobin", "UntilFull"]
