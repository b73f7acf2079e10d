"""Writers: which slots do these rows go to?"""

from jrb.writers.block_when_full import BlockWhenFull
from jrb.writers.max_value import MaxValue
from jrb.writers.per_environment import PerEnvironment
from jrb.writers.read_only import ReadOnly
from jrb.writers.reservoir import Reservoir
from jrb.writers.round_robin import RoundRobin

__all__ = ["BlockWhenFull", "MaxValue", "PerEnvironment", "ReadOnly", "Reservoir", "RoundRobin"]
