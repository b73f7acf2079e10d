"""The public names but those of rooms; `jrb` imports this when it is asked for the first one."""

# ruff: noqa: F401

from jrb._core.validate import CopyWarning, PriorityWarning
from jrb._store.errors import LostWarning, StaleError
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import load, save
from jrb.iterate import epochs, prefetch, steps
from jrb.keys import TED, Keys
from jrb.loops import jitted
from jrb.migrate import rebuild
from jrb.mix import Mix
from jrb.of_items import from_items
from jrb.read import episodes, items, stats
from jrb.samplers import Lifo, Newest, Prioritized, Queue, Uniform, WithoutReplacement
from jrb.sharding import Sharded
from jrb.state import BufferState, Sample
from jrb.storages import DeviceStorage, ListStorage, MemmapStorage, SpillStorage
from jrb.tables import to_arrow, to_pandas
from jrb.units import FrameStack, Hindsight, NStep, Sequence, Transition
from jrb.writers import (
    BlockWhenFull,
    MaxValue,
    PerEnvironment,
    ReadOnly,
    Reservoir,
    RoundRobin,
)
