"""Units: what does one anchor stand for?"""

from jrb.units.transition import Transition

__all__ = ["Transition"]
