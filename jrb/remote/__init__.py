"""Serves a buffer from its own processes: actors add to it and learners sample from it, over Ray.

`serve` starts the buffer's servers as actors of Ray, and returns a `Remote`, the handle that actors
and learners use on any machine of the cluster. The extra `ray` installs Ray, which is imported only
when `serve` is called.
"""

from jrb._util.public import PublicNames
from jrb.remote.client import Remote, serve
from jrb.remote.draws import Ahead

__all__ = ["Ahead", "Remote", "serve"]
__dir__: PublicNames = lambda: __all__
