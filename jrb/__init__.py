"""jrb: the replay buffer for JAX."""

from typing import TYPE_CHECKING

from jrb._util.public import PublicNames, lazy

if TYPE_CHECKING:  # the same names as below, `as` themselves, so that checkers export them
    from jrb import checkpoint as checkpoint
    from jrb import compat as compat
    from jrb import datasets as datasets
    from jrb import interop as interop
    from jrb import layouts as layouts
    from jrb import limits as limits
    from jrb import plot as plot
    from jrb import remote as remote
    from jrb import ring as ring
    from jrb import sum_tree as sum_tree
    from jrb import testing as testing
    from jrb import transforms as transforms
    from jrb import types as types
    from jrb._core.debugging import DebugWarning as DebugWarning
    from jrb._core.debugging import debug as debug
    from jrb._core.validate import CopyWarning as CopyWarning
    from jrb._core.validate import DonatedError as DonatedError
    from jrb._core.validate import PriorityWarning as PriorityWarning
    from jrb._store.files import StaleError as StaleError
    from jrb.buffer import ReplayBuffer as ReplayBuffer
    from jrb.buffer import from_items as from_items
    from jrb.checkpoint import load as load
    from jrb.checkpoint import save as save
    from jrb.compat import to_torch as to_torch
    from jrb.environments import from_brax as from_brax
    from jrb.environments import from_gymnasium as from_gymnasium
    from jrb.environments import from_gymnax as from_gymnax
    from jrb.environments import from_jaxmarl as from_jaxmarl
    from jrb.environments import transition as transition
    from jrb.iterate import epochs as epochs
    from jrb.iterate import prefetch as prefetch
    from jrb.iterate import steps as steps
    from jrb.keys import TED as TED
    from jrb.keys import Keys as Keys
    from jrb.loops import jitted as jitted
    from jrb.migrate import rebuild as rebuild
    from jrb.mix import Mix as Mix
    from jrb.read import episodes as episodes
    from jrb.read import items as items
    from jrb.read import stats as stats
    from jrb.samplers import Grouped as Grouped
    from jrb.samplers import Lifo as Lifo
    from jrb.samplers import Mixture as Mixture
    from jrb.samplers import Newest as Newest
    from jrb.samplers import Prioritized as Prioritized
    from jrb.samplers import Queue as Queue
    from jrb.samplers import Uniform as Uniform
    from jrb.samplers import Weighted as Weighted
    from jrb.samplers import WithoutReplacement as WithoutReplacement
    from jrb.sharding import Sharded as Sharded
    from jrb.state import BufferState as BufferState
    from jrb.state import Sample as Sample
    from jrb.storages import CompressedStorage as CompressedStorage
    from jrb.storages import DeviceStorage as DeviceStorage
    from jrb.storages import ListStorage as ListStorage
    from jrb.storages import MemmapStorage as MemmapStorage
    from jrb.storages import SpillStorage as SpillStorage
    from jrb.tables import to_arrow as to_arrow
    from jrb.tables import to_pandas as to_pandas
    from jrb.units import FrameStack as FrameStack
    from jrb.units import Hindsight as Hindsight
    from jrb.units import NStep as NStep
    from jrb.units import Packed as Packed
    from jrb.units import Sequence as Sequence
    from jrb.units import Transition as Transition
    from jrb.writers import BlockWhenFull as BlockWhenFull
    from jrb.writers import MaxValue as MaxValue
    from jrb.writers import PerEnvironment as PerEnvironment
    from jrb.writers import ReadOnly as ReadOnly
    from jrb.writers import Reservoir as Reservoir
    from jrb.writers import RoundRobin as RoundRobin

__version__ = "0.1.0"

# A module is imported when one of its names is first used: the command line needs no arrays, and
# importing JAX takes long. For the same reason, modules of jrb may import public names from here.
_HOMES = {
    "_core.debugging": "DebugWarning debug",
    "_core.validate": "CopyWarning DonatedError PriorityWarning",
    "_store.files": "StaleError",
    "buffer": "ReplayBuffer from_items",
    "checkpoint": "checkpoint",
    "checkpoint.api": "load save",
    "compat": "compat to_torch",
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
    "samplers": (
        "Grouped Lifo Mixture Newest Prioritized Queue Uniform Weighted WithoutReplacement"
    ),
    "sharding": "Sharded",
    "state": "BufferState Sample",
    "storages": "CompressedStorage DeviceStorage ListStorage MemmapStorage SpillStorage",
    "sum_tree": "sum_tree",
    "tables": "to_arrow to_pandas",
    "testing": "testing",
    "transforms": "transforms",
    "types": "types",
    "units": "FrameStack Hindsight NStep Packed Sequence Transition",
    "writers": "BlockWhenFull MaxValue PerEnvironment ReadOnly Reservoir RoundRobin",
}
_HOME_OF = {name: f"jrb.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]: not a literal
__dir__: PublicNames = lambda: [*__all__, "__version__"]

if not TYPE_CHECKING:  # or every misspelt name would have a type
    __getattr__ = lazy(__name__, _HOME_OF)
