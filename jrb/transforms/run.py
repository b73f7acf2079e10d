"""Transforms one after the other."""

from typing import Any

import jax

from jrb import bits, pytree
from jrb.keys import Keys
from jrb.types import Batch

_FIRST = 16  # the number that `bits.fold` gets for the first transform; smaller ones are the units'


def outward(
    transforms: tuple, data: Any, mask: jax.Array, key: jax.Array, keys: Keys, first: int = 0
) -> Any:
    """The data on its way out, through all transforms; `first` is the number of the first one."""
    for number, transform in enumerate(transforms, first):
        if hasattr(transform, "apply"):
            batch = Batch(key=bits.fold(key, _FIRST + number), mask=mask, keys=keys)
            data = transform.apply(data, batch)
        else:
            data = transform(data)
    return data


def fixed(transforms: tuple) -> int:
    """How many transforms, from the first on, are descriptions, which never change.

    A function may close over a value that does. Outside `jit` it is therefore called each time, and
    not compiled with a draw.
    """
    kinds = [pytree.is_component(type(transform)) for transform in transforms]
    return kinds.index(False) if False in kinds else len(kinds)


def inward(transforms: tuple, item: Any) -> Any:
    """An item on its way in, through the inverses, from last to first."""
    for transform in reversed(transforms):
        item = getattr(transform, "inverse", lambda item: item)(item)
    return item
