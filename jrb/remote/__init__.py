"""A buffer that runs for itself: actors feed it and learners draw from it, over Ray.

`serve` starts the buffer in processes of its own, as actors of Ray, and returns a `Remote`: what
actors and learners hold in its place, on any machine of the cluster. The extra `ray` brings Ray,
which is imported when `serve` is called.
"""

from jrb.remote.ahead import Ahead
from jrb.remote.client import Remote
from jrb.remote.serving import serve

__all__ = ["Ahead", "Remote", "serve"]
