"""Units decide which data an anchor stands for."""

from jrb._util.public import PublicNames
from jrb.units.frame_stack import FrameStack
from jrb.units.hindsight import Hindsight
from jrb.units.n_step import NStep
from jrb.units.packed import Packed
from jrb.units.sequence import Sequence
from jrb.units.transition import Transition

__all__ = ["FrameStack", "Hindsight", "NStep", "Packed", "Sequence", "Transition"]
__dir__: PublicNames = lambda: __all__
