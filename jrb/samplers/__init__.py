"""Samplers: which anchors next, and with what probability?"""

from jrb.samplers.lifo import Lifo
from jrb.samplers.newest import Newest
from jrb.samplers.prioritized import Prioritized
from jrb.samplers.queue import Queue
from jrb.samplers.uniform import Uniform
from jrb.samplers.without_replacement import WithoutReplacement

__all__ = ["Lifo", "Newest", "Prioritized", "Queue", "Uniform", "WithoutReplacement"]
