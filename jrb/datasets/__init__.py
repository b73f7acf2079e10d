"""Datasets: offline data in other libraries' files, as episodes in TED and as buffers."""

from jrb.datasets.dataset import Dataset
from jrb.datasets.kind import Description, Kind
from jrb.datasets.opening import kinds, open
from jrb.datasets.recorder import Recorder

__all__ = ["Dataset", "Description", "Kind", "Recorder", "kinds", "open"]
