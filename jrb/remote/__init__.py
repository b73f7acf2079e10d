"""A buffer in its own processes: actors feed it and learners draw from it, over Ray.

`serve` starts the buffer in processes of its own, as actors of Ray, and returns a `Remote`: what
actors and learners hold in its place, on any machine of the cluster. The extra `ray` brings Ray,
which is imported when `serve` is called.
"""

from jrb._util.public import PublicNames
from jrb.remote.client import Remote, serve
from jrb.remote.draws import Ahead

__all__ = ["Ahead", "Remote", "serve"]
__dir__: PublicNames = lambda: __all__
