"""Datasets: offline data in other libraries' files, as episodes in TED and as buffers."""

from jrb.datasets.dataset import Dataset
from jrb.datasets.joining import concatenate, mix
from jrb.datasets.kind import Description, Kind
from jrb.datasets.opening import kinds, open
from jrb.datasets.trajectories import join_trajectories, split_trajectories

__all__ = [
    "Dataset",
    "Description",
    "Kind",
    "concatenate",
    "join_trajectories",
    "kinds",
    "mix",
    "open",
    "split_trajectories",
]
