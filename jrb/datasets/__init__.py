"""Datasets: offline data in other libraries' files, as episodes in TED and as buffers."""

from jrb.datasets.dataset import Dataset
from jrb.datasets.kind import Description, Kind
from jrb.datasets.opening import kinds, open
from jrb.datasets.writing.lerobot import write_lerobot

__all__ = ["Dataset", "Description", "Kind", "kinds", "open", "write_lerobot"]
