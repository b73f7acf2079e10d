"""Samplers: which anchors next, and with what probability?"""

from jrb.samplers.prioritized import Prioritized
from jrb.samplers.queue import Queue
from jrb.samplers.uniform import Uniform
from jrb.samplers.without_replacement import WithoutReplacement

__all__ = ["Prioritized", "Queue", "Uniform", "WithoutReplacement"]
