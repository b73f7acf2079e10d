"""A buffer of several shards, over the devices of a mesh."""

from jrb._util.public import PublicNames
from jrb.sharding.sharded import Sharded

__all__ = ["Sharded"]
__dir__: PublicNames = lambda: __all__
