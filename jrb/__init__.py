"""jrb: the replay buffer for JAX."""

# ruff: noqa: F403, F405

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrb import (
        checkpoint,
        datasets,
        interop,
        layouts,
        limits,
        plot,
        remote,
        ring,
        sum_tree,
        testing,
        transforms,
        types,
    )
    from jrb._public import *

__version__ = "0.1.0"

__all__ = [
    "TED",
    "BlockWhenFull",
    "BufferState",
    "CopyWarning",
    "DeviceStorage",
    "FrameStack",
    "Hindsight",
    "Keys",
    "Lifo",
    "ListStorage",
    "LostWarning",
    "MaxValue",
    "MemmapStorage",
    "Mix",
    "NStep",
    "Newest",
    "PerEnvironment",
    "Prioritized",
    "PriorityWarning",
    "Queue",
    "ReadOnly",
    "ReplayBuffer",
    "Reservoir",
    "RoundRobin",
    "Sample",
    "Sequence",
    "Sharded",
    "SpillStorage",
    "StaleError",
    "Transition",
    "Uniform",
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
    "remote",
    "ring",
    "save",
    "stats",
    "steps",
    "sum_tree",
    "testing",
    "to_arrow",
    "to_pandas",
    "transforms",
    "types",
]

_ROOMS = (
    "checkpoint",
    "datasets",
    "interop",
    "layouts",
    "limits",
    "plot",
    "remote",
    "ring",
    "sum_tree",
    "testing",
    "transforms",
    "types",
)
"""Modules. They are imported when they are first asked for, as all else is: the command needs none,
and JAX takes its time."""


if not TYPE_CHECKING:  # or every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in __all__:
            hint = importlib.import_module(f"{__name__}._util.hints").hint(name, __all__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
        public = importlib.import_module(f"{__name__}._public")
        globals().update({name: getattr(public, name) for name in __all__ if name not in _ROOMS})
        return globals()[name]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
