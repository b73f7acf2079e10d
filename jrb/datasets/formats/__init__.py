"""The formats that jrb can read, in the order in which `jrb.datasets.open` tries them."""

from jrb.datasets.format import Format
from jrb.datasets.formats.arrays import Arrays, Tables
from jrb.datasets.formats.checkpoint import Checkpoint, CheckpointFile
from jrb.datasets.formats.d4rl import D4RL
from jrb.datasets.formats.dopamine import Dopamine
from jrb.datasets.formats.hdf5_groups import Robomimic, RoboSet
from jrb.datasets.formats.lerobot import LeRobot
from jrb.datasets.formats.minari import Minari
from jrb.datasets.formats.npz_episodes import NpzEpisodes
from jrb.datasets.formats.ogbench import OGBench
from jrb.datasets.formats.recorded import Recorded
from jrb.datasets.formats.rlds import RLDS
from jrb.datasets.formats.torchrl import TorchRL

OURS: tuple[Format, ...] = (
    Recorded(),
    Checkpoint(),
    CheckpointFile(),
    TorchRL(),
    Minari(),
    LeRobot(),
    Dopamine(),
    D4RL(),
    RoboSet(),
    Robomimic(),
    OGBench(),
    RLDS(),
    Tables(),
    NpzEpisodes(),
    Arrays(),
)
"""Special formats come first, because several of them could also be read as plain arrays."""
