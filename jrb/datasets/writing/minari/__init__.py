"""Sets of Minari, written without Minari."""

from jrb.datasets.writing.minari.sets import write_minari

__all__ = ["write_minari"]
