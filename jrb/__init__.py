"""jrb: the replay buffer for JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from jrb import (
    checkpoint,
    interop,
    layouts,
    limits,
    ring,
    sum_tree,
    testing,
    transforms,
    types,
)
from jrb._engine.dispatch import CopyWarning
from jrb._store.errors import LostWarning, StaleError
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import load, save
from jrb.from_items import from_items
from jrb.iterate import epochs, prefetch, steps
from jrb.keys import TED, Keys
from jrb.loops import jitted
from jrb.mix import Mix
from jrb.read import episodes, items, stats
from jrb.rebuild import rebuild
from jrb.samplers import Lifo, Newest, Prioritized, Queue, Uniform, WithoutReplacement
from jrb.state import BufferState, Sample
from jrb.storages import DeviceStorage, ListStorage, MemmapStorage, SpillStorage
from jrb.units import FrameStack, Hindsight, NStep, Sequence, Transition
from jrb.writers import Immutable, Lanes, MaxValue, Reservoir, RoundRobin, UntilFull

if TYPE_CHECKING:
    from jrb import datasets, plot

__version__ = "0.1.0"

__all__ = [
    "TED",
    "BufferState",
    "CopyWarning",
    "DeviceStorage",
    "FrameStack",
    "Hindsight",
    "Immutable",
    "Keys",
    "Lanes",
    "Lifo",
    "ListStorage",
    "LostWarning",
    "MaxValue",
    "MemmapStorage",
    "Mix",
    "NStep",
    "Newest",
    "Prioritized",
    "Queue",
    "ReplayBuffer",
    "Reservoir",
    "RoundRobin",
    "Sample",
    "Sequence",
    "SpillStorage",
    "StaleError",
    "Transition",
    "Uniform",
    "UntilFull",
    "WithoutReplacement",
    "checkpoint",
    "datasets",
    "episodes",
    "epochs",
    "from_items",
    "interop",
    "items",
    "jitted",
    "layouts",
    "limits",
    "load",
    "plot",
    "prefetch",
    "rebuild",
    "ring",
    "save",
    "stats",
    "steps",
    "sum_tree",
    "testing",
    "transforms",
    "types",
]

_ON_DEMAND = ("datasets", "plot")
"""Rooms that are imported when they are first asked for: what they need takes its time."""


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
