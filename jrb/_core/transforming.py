"""Applies the transforms of a buffer in order; `jrb.types.Transform` lists their methods."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb._xla import random_bits
from jrb.types import Context, Item, StatefulTransform, Storage, TransformContext, WritePlan
from jrb.types.messages import PartState

# `fold` gets this number for the key of the first transform; units use smaller ones.
_FIRST = 16


def apply_transforms(
    transforms: tuple, data: Item, batch: TransformContext, first: int = 0, states: tuple = ()
) -> Any:
    """Returns the data after all transforms were applied.

    Args:
        transforms: the transforms, in the order of application.
        data: a pytree with leaves `[B, ...]` or `[B, L, ...]`.
        batch: the facts of the batch; a separate key for each transform is derived from its key.
        first: the index of `transforms[0]` among all transforms of the buffer.
        states: the states of the stateful transforms, in order.
    """
    remaining = iter(states)
    for number, transform in enumerate(transforms, first):
        state = next(remaining) if isinstance(transform, StatefulTransform) else None
        data = _apply(transform, number, data, batch, state)
    return data


def _apply(
    transform: Any, number: int, data: Item, batch: TransformContext, state: PartState
) -> Any:
    # A plain function has no `apply`, and takes data alone.
    apply = getattr(transform, "apply", None)
    if apply is None:
        return transform(data)
    key = random_bits.fold(batch.key, _FIRST + number)
    return apply(data, dataclasses.replace(batch, key=key, state=state))


def count_fixed(transforms: tuple) -> int:
    """Returns the number of leading transforms that are descriptions, and so never change."""
    # A plain function may close over a value that changes. So outside `jit` it is called at each
    # draw, and not compiled into it.
    kinds = [pytree.is_component(type(transform)) for transform in transforms]
    return kinds.index(False) if False in kinds else len(kinds)


def apply_inverses(transforms: tuple, item: Item) -> Any:
    """Returns the item to store: an item of the user after all inverse transforms."""
    for transform in reversed(transforms):
        inverse = getattr(transform, "inverse", None)
        item = item if inverse is None else inverse(item)
    return item


def stateful_transforms(transforms: tuple) -> list[StatefulTransform]:
    return [each for each in transforms if isinstance(each, StatefulTransform)]


def _until_last(transforms: tuple) -> tuple:
    """Returns the transforms up to the last one that has a state."""
    count = len(transforms)
    while count and not isinstance(transforms[count - 1], StatefulTransform):
        count -= 1
    return transforms[:count]


def check(transforms: tuple, storage: Storage) -> None:
    """Raises `ValueError` if a transform with a state could not learn from written items."""
    first = _until_last(transforms)
    if first and storage.of_objects:
        raise ValueError(
            f"transforms: expected none with a state with {type(storage).__name__}, which cannot "
            f"look into its objects, got {type(first[-1]).__name__}."
        )
    num_fixed = count_fixed(first)
    if num_fixed < len(first):
        raise ValueError(
            f"transforms: expected descriptions before {type(first[-1]).__name__}, which learns "
            f"from what they make of items, got {first[num_fixed]!r}. Put the function behind "
            "it, or make it a class below jrb.types.Transform with jrb.types.component."
        )


def init(transforms: tuple, context: Context, spec: Item) -> tuple:
    """Returns the states before any write; `spec` has the specs of a stored item."""
    # Follow the specs through the transforms: each learns from what those before it return.
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), spec)
    item = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    states = []
    for number, transform in enumerate(_until_last(transforms)):
        state = None
        if isinstance(transform, StatefulTransform):
            state = transform.init(context, jax.tree.map(item, rows))
            states.append(state)
        apply = functools.partial(_apply, transform, number, state=state)
        rows = jax.eval_shape(lambda data, apply=apply: apply(data, _row_context(context, 1)), rows)
    return tuple(states)


def learn_from_write(
    transforms: tuple, states: tuple, context: Context, items: Item, plan: WritePlan
) -> tuple:
    """Returns the states after a write; `items` are the stored rows, leaves `[T, E, ...]`."""
    # `context` is of the buffer before the write.
    first = _until_last(transforms)
    if not first:
        return states
    lead = jax.tree.leaves(items)[0].shape[:2]
    mask = jnp.broadcast_to(plan.written_by_clock, lead)
    ended = mask & plan.episode_ends(context.keys, items)
    # Transforms are applied to the T E rows as to a batch, and learn from rows `[T, E, ...]`.
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), items)
    remaining, after = iter(states), []
    for number, transform in enumerate(first):
        state = None
        if isinstance(transform, StatefulTransform):
            stored = jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), rows)
            state = transform.on_write(context, next(remaining), stored, mask, ended)
            after.append(state)
        # What the last transform with a state returns is not learned from.
        if len(after) < len(states):
            rows = _apply(transform, number, rows, _row_context(context, mask.size), state)
    return tuple(after)


def _row_context(context: Context, count: int) -> TransformContext:
    """Returns the `TransformContext` of `count` written rows, with a constant key."""
    return TransformContext(jax.random.key(0), jnp.ones(count, jnp.bool_), context.keys)


def import_states(old: tuple[tuple, tuple], new: tuple[tuple, tuple]) -> tuple:
    """Returns the new states, after each has imported what an old state had learned."""
    # The n-th new transform of a class imports the state of the n-th old one of that class.
    by_class: dict[type, list[Any]] = {}
    for transform, state in zip(stateful_transforms(old[0]), old[1], strict=True):
        by_class.setdefault(type(transform), []).append(state)
    states = []
    for transform, state in zip(stateful_transforms(new[0]), new[1], strict=True):
        others = by_class.get(type(transform))
        states.append(transform.import_state(state, others.pop(0)) if others else state)
    return tuple(states)
