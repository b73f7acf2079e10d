"""Datasets: offline data in other libraries' files, as episodes in TED and as buffers."""

from jrb.datasets.dataset import Dataset
from jrb.datasets.kind import Description, Kind
from jrb.datasets.library import delete, list
from jrb.datasets.opening import kinds, open
from jrb.datasets.writing.lerobot import write_lerobot
from jrb.datasets.writing.minari import write_minari

__all__ = [
    "Dataset",
    "Description",
    "Kind",
    "delete",
    "kinds",
    "list",
    "open",
    "write_lerobot",
    "write_minari",
]
