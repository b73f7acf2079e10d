"""Writers: which slots do these rows go to?"""

from jrb.writers.immutable import Immutable
from jrb.writers.max_value import MaxValue
from jrb.writers.round_robin import RoundRobin

__all__ = ["Immutable", "MaxValue", "RoundRobin"]
