"""The contracts of the parts of a buffer, and the messages that parts exchange.

N capacity, E environments, B batch, L window, T time. A *slot* (int32) is the index of an item in
[0, N), an *anchor* a slot that a sampler may draw. Parts refer to items by their slots only.

A part is a description: a frozen, hashable class without arrays, made with the decorator
`component`, below the base of its kind (`Writer`, `Storage`, `Unit`, `Sampler`, `Transform`). All
that changes is in the state of the part, arrays or a subclass of `State`, which the buffer passes
to its methods and gets back. Every part must have the abstract methods; all others have defaults.
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
    IncomingItems,
    Item,
    MissingMethodError,
    ReadPlan,
    ShardStats,
    SlotFacts,
    SlotsForLeaf,
    TransformContext,
    WritePlan,
)
from jrb.types.sampler import (
    LimitedSampler,
    OrderedSampler,
    PrioritizedSampler,
    Sampler,
    ShardedSampler,
)
from jrb.types.storage import Storage
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
    "IncomingItems",
    "Item",
    "LimitedSampler",
    "MissingMethodError",
    "OrderedSampler",
    "PrioritizedSampler",
    "ReadPlan",
    "Sampler",
    "ShardStats",
    "ShardedSampler",
    "SlotFacts",
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
