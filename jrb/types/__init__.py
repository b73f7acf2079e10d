"""The contracts of the parts of a buffer, and the messages between them.

N capacity, E environments, B batch, L window, T time. A *slot* (int32) is the place of an item, an
*anchor* a slot that a sampler may draw; slots are all that parts exchange.

A part is a description: a class with the decorator `component`, which makes it frozen, hashable and
free of arrays, below the base of its kind (`Writer`, `Storage`, `Unit`, `Sampler`, `Transform`).
What it must remember is a state that the buffer hands to it and takes back: arrays, or a subclass
of `State`. An abstract method is what every part of the kind has, all others have defaults.
"""

from jrb._util.public import PublicNames
from jrb._util.pytree import HostState, State, component, cursor, static, tally
from jrb.types.messages import (
    Anchors,
    AnchorUpdate,
    AuxRead,
    Context,
    Draw,
    DrawCounts,
    IncomingPriorities,
    Item,
    MissingMethodError,
    ReadPlan,
    ShardStats,
    SlotsForLeaf,
    TransformContext,
    WritePlan,
)
from jrb.types.sampler import OrderedSampler, PrioritizedSampler, Sampler, ShardedSampler
from jrb.types.storage import HostStorage, Storage
from jrb.types.transform import StatefulTransform, Transform
from jrb.types.unit import Unit
from jrb.types.writer import Writer

__all__ = [
    "AnchorUpdate",
    "Anchors",
    "AuxRead",
    "Context",
    "Draw",
    "DrawCounts",
    "HostState",
    "HostStorage",
    "IncomingPriorities",
    "Item",
    "MissingMethodError",
    "OrderedSampler",
    "PrioritizedSampler",
    "ReadPlan",
    "Sampler",
    "ShardStats",
    "ShardedSampler",
    "SlotsForLeaf",
    "State",
    "StatefulTransform",
    "Storage",
    "Transform",
    "TransformContext",
    "Unit",
    "WritePlan",
    "Writer",
    "component",
    "cursor",
    "static",
    "tally",
]
__dir__: PublicNames = lambda: __all__
