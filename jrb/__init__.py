"""jrb: the replay buffer for JAX."""

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
    from jrb._core.validate import CopyWarning, PriorityWarning
    from jrb._store.errors import LostWarning, StaleError
    from jrb.buffer import ReplayBuffer, from_items
    from jrb.checkpoint import load, save
    from jrb.environments import from_brax, from_gymnasium, from_gymnax, from_jaxmarl, transition
    from jrb.iterate import epochs, prefetch, steps
    from jrb.keys import TED, Keys
    from jrb.loops import jitted
    from jrb.migrate import rebuild
    from jrb.mix import Mix
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

__version__ = "0.1.0"

# Modules are imported when a name of theirs is first asked for: the command needs no arrays, and
# JAX takes its time. Modules of jrb may import public names from here for the same reason.
_HOMES = {
    "_core.validate": "CopyWarning PriorityWarning",
    "_store.errors": "LostWarning StaleError",
    "buffer": "ReplayBuffer from_items",
    "checkpoint": "checkpoint load save",
    "datasets": "datasets",
    "environments": "from_brax from_gymnasium from_gymnax from_jaxmarl transition",
    "interop": "interop",
    "iterate": "epochs prefetch steps",
    "keys": "TED Keys",
    "layouts": "layouts",
    "limits": "limits",
    "loops": "jitted",
    "migrate": "rebuild",
    "mix": "Mix",
    "plot": "plot",
    "read": "episodes items stats",
    "remote": "remote",
    "ring": "ring",
    "samplers": "Lifo Newest Prioritized Queue Uniform WithoutReplacement",
    "sharding": "Sharded",
    "state": "BufferState Sample",
    "storages": "DeviceStorage ListStorage MemmapStorage SpillStorage",
    "sum_tree": "sum_tree",
    "tables": "to_arrow to_pandas",
    "testing": "testing",
    "transforms": "transforms",
    "types": "types",
    "units": "FrameStack Hindsight NStep Sequence Transition",
    "writers": "BlockWhenFull MaxValue PerEnvironment ReadOnly Reservoir RoundRobin",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

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
    "from_brax",
    "from_gymnasium",
    "from_gymnax",
    "from_items",
    "from_jaxmarl",
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
    "transition",
    "types",
]


if not TYPE_CHECKING:  # or every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            hint = importlib.import_module(f"{__name__}._util.wording").hint(name, __all__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
        home = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        value = home if name == _MODULE_OF[name] else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
