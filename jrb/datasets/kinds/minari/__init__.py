"""Minari's sets, in HDF5, Arrow and Parquet."""

from jrb.datasets.kinds.minari.kind import Minari

__all__ = ["Minari"]
