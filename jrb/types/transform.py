"""The contract of transforms."""

import abc

from jrb.types.messages import Batch, Item


class Transform(abc.ABC):
    """What happens to data on the way out.

    Any function from data to data will do as well; this is for those that must know more. One with
    a method `inverse(item)` is undone on the way in, item by item.
    """

    @abc.abstractmethod
    def apply(self, data: Item, batch: Batch) -> Item:
        """From data, leaves `[B, ...]` or `[B, L, ...]`, to data."""
