"""Transforms change data on its way out of a buffer.

Each takes paths, which are names or tuples of names into nested data, and changes only the entries
there. Leaves are `[B, ...]`, or `[B, L, ...]` for windows.
"""

from jrb._util.public import PublicNames
from jrb.transforms.images import CenterCrop, Grayscale, RandomCrop, RandomShift, Resize, ToFloat
from jrb.transforms.leaves import Cast, Clip, Normalize, RewardToGo, Scale
from jrb.transforms.running import RunningNormalize, RunningRewardScale, normalized
from jrb.transforms.structure import Concatenate, Exclude, Rename, Select

__all__ = [
    "Cast",
    "CenterCrop",
    "Clip",
    "Concatenate",
    "Exclude",
    "Grayscale",
    "Normalize",
    "RandomCrop",
    "RandomShift",
    "Rename",
    "Resize",
    "RewardToGo",
    "RunningNormalize",
    "RunningRewardScale",
    "Scale",
    "Select",
    "ToFloat",
    "normalized",
]
__dir__: PublicNames = lambda: __all__
