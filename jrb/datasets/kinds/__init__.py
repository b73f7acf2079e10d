"""The layouts that are known, each a file or a folder, in the order in which they are asked."""

from jrb.datasets.kind import Kind
from jrb.datasets.kinds.arrays import Arrays
from jrb.datasets.kinds.d4rl import D4RL
from jrb.datasets.kinds.lerobot import LeRobot
from jrb.datasets.kinds.minari import Minari
from jrb.datasets.kinds.native import Native, NativeH5
from jrb.datasets.kinds.npz_episodes import NpzEpisodes
from jrb.datasets.kinds.ogbench import OGBench
from jrb.datasets.kinds.recorded import Recorded
from jrb.datasets.kinds.rlds import RLDS
from jrb.datasets.kinds.robomimic import Robomimic
from jrb.datasets.kinds.roboset import RoboSet
from jrb.datasets.kinds.table import Tables
from jrb.datasets.kinds.torchrl import TorchRL

OURS: tuple[Kind, ...] = (
    Recorded(),
    Native(),
    NativeH5(),
    TorchRL(),
    Minari(),
    LeRobot(),
    D4RL(),
    RoboSet(),
    Robomimic(),
    OGBench(),
    RLDS(),
    Tables(),
    NpzEpisodes(),
    Arrays(),
)
"""The special ones first: several layouts could be read as plain arrays."""
