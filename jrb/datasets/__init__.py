"""Reads offline datasets of many libraries as episodes in TED or as buffers, and writes them."""

from jrb._util.public import PublicNames
from jrb.datasets.dataset import Dataset
from jrb.datasets.format import Description, Format
from jrb.datasets.joining import concatenate, mix
from jrb.datasets.library import delete, formats, list, open
from jrb.datasets.preprocess import return_to_go
from jrb.datasets.recording.recorder import Recorder
from jrb.datasets.trajectories import join_trajectories, lengths, returns, split_trajectories
from jrb.datasets.writing import write_d4rl, write_rlds
from jrb.datasets.writing_minari import write_minari

__all__ = [
    "Dataset",
    "Description",
    "Format",
    "Recorder",
    "concatenate",
    "delete",
    "formats",
    "join_trajectories",
    "lengths",
    "list",
    "mix",
    "open",
    "return_to_go",
    "returns",
    "split_trajectories",
    "write_d4rl",
    "write_minari",
    "write_rlds",
]
__dir__: PublicNames = lambda: __all__
