"""Datasets: offline data in other libraries' files, as episodes in TED and as buffers."""

from jrb.datasets.dataset import Dataset
from jrb.datasets.kind import Description, Kind
from jrb.datasets.opening import kinds, open
from jrb.datasets.writing.d4rl import write_d4rl
from jrb.datasets.writing.rlds import write_rlds

__all__ = ["Dataset", "Description", "Kind", "kinds", "open", "write_d4rl", "write_rlds"]
