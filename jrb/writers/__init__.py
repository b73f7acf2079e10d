"""Writers: which slots do these rows go to?"""

from jrb.writers.round_robin import RoundRobin

__all__ = ["RoundRobin"]
