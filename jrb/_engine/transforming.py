"""Transforms one after the other: functions, which may have methods (see `jrb.types.Transform`)."""

from collections.abc import Callable
from typing import Any

import jax

from jrb._base import pytree, random_bits
from jrb.keys import Keys
from jrb.types import Batch, Item

_FIRST = 16  # the number that `fold` gets for the first transform; smaller ones are the units'


def outward(
    transforms: tuple, data: Item, mask: jax.Array, key: jax.Array, keys: Keys, first: int = 0
) -> Any:
    """The data on its way out, through all transforms; `first` is the number of the first one."""
    for number, transform in enumerate(transforms, first):
        apply = method(transform, "apply")
        if apply is None:
            data = transform(data)
            continue
        data = apply(data, Batch(random_bits.fold(key, _FIRST + number), mask, keys))
    return data


def method(transform: Any, name: str) -> Callable[..., Any] | None:
    """A method of a transform; None for functions, and where it has none."""
    return getattr(transform, name, None)


def fixed(transforms: tuple) -> int:
    """How many transforms, from the first on, are descriptions, which never change.

    A function may close over a value that does. Outside `jit` it is therefore called each time, and
    not compiled with a draw.
    """
    kinds = [pytree.is_component(type(transform)) for transform in transforms]
    return kinds.index(False) if False in kinds else len(kinds)


def inverses(transforms: tuple) -> list[Callable[[Any], Any]]:
    """What undoes transforms on the way in, from last to first, where something does."""
    found = [method(transform, "inverse") for transform in reversed(transforms)]
    return [inverse for inverse in found if inverse is not None]


def inward(transforms: tuple, item: Item) -> Any:
    """An item on its way in, through the inverses."""
    for inverse in inverses(transforms):
        item = inverse(item)
    return item
