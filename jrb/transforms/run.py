"""Transforms one after the other."""

from typing import Any

import jax

from jrb import bits
from jrb.keys import Keys
from jrb.types import Batch

_FIRST = 16  # the number that `bits.fold` gets for the first transform; smaller ones are the units'


def outward(transforms: tuple, data: Any, mask: jax.Array, key: jax.Array, keys: Keys) -> Any:
    """The data on its way out, through all transforms."""
    for number, transform in enumerate(transforms):
        if hasattr(transform, "apply"):
            batch = Batch(key=bits.fold(key, _FIRST + number), mask=mask, keys=keys)
            data = transform.apply(data, batch)
        else:
            data = transform(data)
    return data


def inward(transforms: tuple, item: Any) -> Any:
    """An item on its way in, through the inverses, from last to first."""
    for transform in reversed(transforms):
        item = getattr(transform, "inverse", lambda item: item)(item)
    return item
