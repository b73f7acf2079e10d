"""RLDS: episodes that some code yields."""

from jrb.datasets.formats.rlds.format import RLDS

__all__ = ["RLDS"]
