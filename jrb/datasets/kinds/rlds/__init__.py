"""RLDS: episodes that some code yields."""

from jrb.datasets.kinds.rlds.kind import RLDS

__all__ = ["RLDS"]
