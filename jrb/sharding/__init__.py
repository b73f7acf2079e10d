"""One buffer in several shards, over the devices of a mesh."""

from jrb.sharding.sharded import Sharded

__all__ = ["Sharded"]
__dir__ = lambda: __all__
