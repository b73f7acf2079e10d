"""What is compiled of a buffer's verbs: how its parts work together.

A buffer is anything with the attributes of `jrb.ReplayBuffer`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jrb import order, pytree
from jrb.keys import Keys
from jrb.ring import Held
from jrb.state import BufferState, Sample
from jrb.transforms import run
from jrb.types import Draw, Item, Look


@jax.jit
def write(
    buffer: Any,
    state: BufferState,
    items: Item,
    mask: jax.Array | None,
    cuts: jax.Array | None = None,
) -> BufferState:
    """Writes items, leaves `[T, E, ...]` or `[T, ...]`.

    Time does not go on after the items that `cuts`, bool `[T, E]`, names, though their own done
    flags do not say so.
    """
    ring, keys = buffer.ring, buffer.keys
    if buffer.num_envs is None:
        items = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 1), items)
    held = buffer.writer.held(ring, state.writer)
    writer, write = buffer.writer.plan(ring, state.writer, items, mask, keys)
    storage, write = buffer.storage.write(ring, state.storage, held, write, items, keys)
    if not write.bounded:
        left = write.gone - jnp.maximum(held.count // ring.envs + write.rows - ring.rows, 0)
        writer = buffer.writer.shrink(ring, writer, left)
    if cuts is not None:
        items = _cut(items, cuts, keys)
    unit, change = buffer.unit.on_write(ring, state.unit, held, write, items, keys)
    anchors = buffer.unit.anchors(ring, unit, buffer.writer.held(ring, writer))
    sampler = buffer.sampler.on_write(ring, state.sampler, change, anchors)
    return state.replace(  # pyright: ignore
        storage=storage, writer=writer, sampler=sampler, unit=unit
    )


@jax.jit
def expire(buffer: Any, state: BufferState, items: Item, rows: jax.Array) -> BufferState:
    """The state without so many of the oldest rows, int32 `[]`; its items are not looked at.

    `items` is a row that is not written, leaves `[1, E, ...]`.
    """
    ring, keys, held = buffer.ring, buffer.keys, buffer.writer.held(buffer.ring, state.writer)
    nothing = jnp.zeros(1, jnp.bool_)
    writer, write = buffer.writer.plan(ring, state.writer, items, nothing, keys)
    write = dataclasses.replace(write, gone=rows, bounded=False)
    writer = buffer.writer.shrink(ring, writer, rows)
    unit, change = buffer.unit.on_write(ring, state.unit, held, write, items, keys)
    anchors = buffer.unit.anchors(ring, unit, buffer.writer.held(ring, writer))
    sampler = buffer.sampler.on_write(ring, state.sampler, change, anchors)
    return state.replace(writer=writer, sampler=sampler, unit=unit)  # pyright: ignore


def _cut(items: Item, cuts: jax.Array, keys: Keys) -> Item:
    """The items as the unit sees them, an end flagged where time does not go on."""
    flag = next(iter(keys.flags(items)), None)

    def mark(path: tuple, leaf: jax.Array) -> jax.Array:
        if pytree.leaf_name(path) != flag:
            return leaf
        cut = cuts.reshape(*cuts.shape, *(1,) * (leaf.ndim - 2))
        return jnp.where(cut, jnp.ones((), leaf.dtype), leaf)

    return jax.tree_util.tree_map_with_path(mark, items)


@functools.partial(jax.jit, static_argnames="batch_size")
def draw(
    buffer: Any,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | None,
) -> tuple[BufferState, Sample]:
    """Sampler, unit, storage, unit, transforms."""
    sampler, chosen = _choose(buffer, state, key, batch_size, beta)
    sample = _finish(buffer, state, chosen, key)
    state = state.replace(sampler=sampler)  # pyright: ignore
    return _held(buffer, state, order.token(_read(sample))), sample


@functools.partial(jax.jit, static_argnames="batch_size")
def sample(
    buffer: Any, state: BufferState, key: jax.Array, batch_size: int, beta: jax.Array | None
) -> tuple[Any, Sample]:
    """The same for outside `jit`, where all arrays that it returned would be copied.

    Returns:
        The sampler's state, and the sample.
    """
    sampler, chosen = _choose(buffer, state, key, batch_size, beta)
    return sampler, _finish(buffer, state, chosen, key)


def _choose(
    buffer: Any, state: BufferState, key: jax.Array, batch_size: int, beta: jax.Array | None
) -> tuple[Any, Draw]:
    """The sampler's part."""
    held = buffer.writer.held(buffer.ring, state.writer)
    anchors = buffer.unit.anchors(buffer.ring, state.unit, held)
    drawn = buffer.sampler.draw(buffer.ring, state.sampler, anchors, key, batch_size, beta)
    return drawn if buffer.min_size is None else _if_enough(buffer, held, state.sampler, *drawn)


def _if_enough(buffer: Any, held: Held, before: Any, after: Any, draw: Draw) -> tuple[Any, Draw]:
    """A draw, or nothing and the sampler as it was while less than `min_size` is held."""
    enough = held.count >= buffer.min_size
    keep = lambda new, old: new if new is old else jnp.where(enough, new, old)
    some = lambda leaf: jnp.where(enough, leaf, jnp.zeros_like(leaf))
    draw = Draw(
        slots=draw.slots,
        probabilities=some(draw.probabilities),
        weights=some(draw.weights),
        mask=some(draw.mask),
    )
    return jax.tree.map(keep, after, before), draw


def _look(
    buffer: Any, state: BufferState, slots: jax.Array, mask: jax.Array, key: jax.Array
) -> tuple[Held, Look]:
    """What the unit wants to read."""
    held = buffer.writer.held(buffer.ring, state.writer)
    return held, buffer.unit.look(buffer.ring, state.unit, held, slots, mask, key, buffer.keys)


def _finish(buffer: Any, state: BufferState, draw: Draw, key: jax.Array) -> Sample:
    """Storage, unit and transforms."""
    held, look = _look(buffer, state, draw.slots, draw.mask, key)
    data, info = _read_at(buffer, state, held, look, key)
    return Sample(data=data, **_fields(buffer, state, draw, look.mask, info))


def _read_at(
    buffer: Any, state: BufferState, held: Held, look: Look, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """Data and info of a sample."""
    raw = buffer.storage.read(buffer.ring, state.storage, held, look.where, buffer.keys)
    data, info = buffer.unit.reduce(raw, look, buffer.keys)
    return run.outward(buffer.transforms, data, look.mask, key, buffer.keys), info


def _fields(
    buffer: Any, state: BufferState, draw: Draw, mask: jax.Array, info: Any
) -> dict[str, Any]:
    """The fields of a sample but its data."""
    return {
        "indices": draw.slots,
        "probabilities": draw.probabilities,
        "weights": draw.weights,
        "mask": mask,
        "info": info,
        "stamp": buffer.writer.stamp(buffer.ring, state.writer, draw.slots),
    }


@functools.partial(jax.jit, static_argnames=("batch_size", "names"))
def choose(
    buffer: Any,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | None,
    names: tuple[str, ...] | None,
) -> tuple[Any, dict[str, Any], tuple[jax.Array, Any] | None]:
    """The first half of a draw from a storage on the host.

    Returns:
        The sampler's state; the fields of the sample but data; and what `finish` and the storage
        need to know: which anchors were drawn, and the places at which the leaves with these names
        are read. None for the last without names, where they are all read at the anchors.
    """
    sampler, drawn = _choose(buffer, state, key, batch_size, beta)
    held, look = _look(buffer, state, drawn.slots, drawn.mask, key)
    sample = _fields(buffer, state, drawn, look.mask, look.info)
    if names is None:
        return sampler, sample, None
    where = [look.where(name) for name in names]
    places = buffer.storage.locate(buffer.ring, state.storage, held, where)
    return sampler, sample, (drawn.mask, places)


@functools.partial(jax.jit, static_argnames="batch_size")
def ready(buffer: Any, state: BufferState, batch_size: int | None) -> jax.Array:
    """Whether a draw gives at least one item, bool `[]`."""
    held = buffer.writer.held(buffer.ring, state.writer)
    anchors = buffer.unit.anchors(buffer.ring, state.unit, held)
    found = buffer.sampler.ready(state.sampler, anchors, batch_size)
    return found if buffer.min_size is None else found & (held.count >= buffer.min_size)


@jax.jit
def finish(
    buffer: Any, state: BufferState, slots: jax.Array, mask: jax.Array, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """The second half, with a storage that reads what was fetched: data and info of the sample."""
    held, look = _look(buffer, state, slots, mask, key)
    return _read_at(buffer, state, held, look, key)


def _held(buffer: Any, state: BufferState, token: jax.Array) -> BufferState:
    """The same state, from which no place to write is known before the token."""
    return state.replace(  # pyright: ignore
        storage=buffer.storage.hold(state.storage, token),
        writer=buffer.writer.hold(state.writer, token),
        unit=buffer.unit.hold(state.unit, token),
    )


def wait(buffer: Any, state: BufferState, sample: Sample) -> BufferState:
    """The same state, in which later writes wait for what the sample was read from."""
    return _held(buffer, state, order.token(_read(sample)))


@jax.jit
def update(
    buffer: Any,
    state: BufferState,
    sample: Sample | jax.Array,
    priorities: jax.Array,
) -> BufferState:
    """New priorities for anchors that still hold what was drawn."""
    ring = buffer.ring
    if isinstance(sample, Sample):
        current = buffer.writer.stamp(ring, state.writer, sample.indices) == sample.stamp
        drawn = sample.mask.reshape(sample.mask.shape[0], -1).any(axis=1)
        token = order.token((_read(sample), current))
        slots, ok = sample.indices + token, current & drawn
        state = _held(buffer, state, token)
        if priorities.ndim > 1:
            priorities = buffer.unit.reduce_priorities(priorities, sample.mask)  # pyright: ignore
    else:
        slots, ok = sample, jnp.ones(sample.shape, jnp.bool_)
    sampler = buffer.sampler.update(ring, state.sampler, slots, priorities, ok)  # pyright: ignore
    return state.replace(sampler=sampler)  # pyright: ignore


def _read(sample: Sample) -> Any:
    """What a later write must wait for.

    Probabilities and weights are left out, so that nothing computes them if nobody wants them: the
    indices wait for what a sampler reads.
    """
    return sample.data, sample.indices, sample.mask, sample.info, sample.stamp


@jax.jit
def truncate(buffer: Any, state: BufferState, which: jax.Array) -> BufferState:
    """Some environments, bool `[E]`, begin anew after the newest row."""
    ring, held = buffer.ring, buffer.writer.held(buffer.ring, state.writer)
    unit, change = buffer.unit.truncate(ring, state.unit, held, which)
    state = state.replace(unit=unit)  # pyright: ignore
    if change is None:
        return state
    anchors = buffer.unit.anchors(ring, unit, held)
    sampler = buffer.sampler.on_write(ring, state.sampler, change, anchors)
    return state.replace(sampler=sampler)  # pyright: ignore


@jax.jit
def take(buffer: Any, state: BufferState, indices: jax.Array) -> Item:
    """The items at slots."""
    held = buffer.writer.held(buffer.ring, state.writer)
    return buffer.storage.read(buffer.ring, state.storage, held, lambda name: indices, buffer.keys)


@jax.jit
def empty(buffer: Any, state: BufferState) -> BufferState:
    """The state without its items."""
    ring, token = buffer.ring, order.token(state.writer)
    return state.replace(  # pyright: ignore
        storage=buffer.storage.reset(ring, state.storage, token),
        writer=buffer.writer.reset(ring, state.writer, token),
        sampler=buffer.sampler.reset(ring, state.sampler, token),
        unit=buffer.unit.reset(ring, state.unit, token),
    )
