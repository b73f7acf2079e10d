"""One batch of all shards, drawn as from one buffer: its rows go to where they belong.

S shards, s of them here, B batch, D devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._base import prng_keys, random_bits
from jrb._engine import steps
from jrb._engine.joint import Chosen, Whole, weighed
from jrb._engine.over_mesh import Here
from jrb.state import Buffer, BufferState, Sample
from jrb.types import Draw


def choose(
    part: Buffer,
    here: Here,
    states: BufferState,
    key: jax.Array,
    keys: jax.Array,
    batch_size: int,
    beta: jax.Array | None,
) -> Chosen:
    """What the shards that lie here give to a batch of B; each looks at all its places.

    Args:
        part: the description of one shard.
        here: which they are.
        states: theirs, arrays `[s, ...]`.
        key: the same for all shards, says which shard gives which entry.
        keys: `[s]`, one for each.
        batch_size: B, of all shards together.
        beta: of the importance weights; None for the sampler's.

    Returns:
        Draws `[s, B]`, of which those of this shard are not masked.
    """
    shares, sizes = jax.vmap(functools.partial(steps.share_of, part))(states)
    every = here.gather(shares)
    whole = Whole(every)
    owner, places = _places(whole, key, batch_size, part.sampler.stratified)
    draws = jax.vmap(functools.partial(steps.pick, part, places=places))(states, keys)
    draws = draws.replace(mask=draws.mask & (owner == here.numbers[:, None]))
    draws = weighed(part.sampler, draws, shares, whole, beta, here.greatest, evenly=False)
    return Chosen(states.sampler, draws, every, sizes)


def _places(
    whole: Whole, key: jax.Array, batch_size: int, stratified: bool
) -> tuple[jax.Array, jax.Array]:
    """The shard of each entry of the batch, int32 `[B]`, and its place there, in [0, 1)."""
    at = random_bits.unit_interval(random_bits.bits(key, (batch_size,)))
    if stratified:
        at = (at + jnp.arange(batch_size, dtype=jnp.float32)) * jnp.float32(1 / batch_size)
    ends = lax.associative_scan(jnp.add, whole.parts)
    ends = ends * (1 / ends[-1])  # of what rounding has left
    last = jnp.max(jnp.where(whole.parts > 0, jnp.arange(len(ends)), 0)).astype(jnp.int32)
    owner = jnp.minimum(jnp.sum(at[:, None] >= ends, axis=1, dtype=jnp.int32), last)
    begin = jnp.where(owner > 0, ends[jnp.maximum(owner - 1, 0)], 0.0)
    within = (at - begin) / jnp.maximum(ends[owner] - begin, 1e-30)
    return owner, jnp.clip(within, 0.0, 1 - 2.0**-24)


def moved(here: Here, samples: Sample, draws: Draw) -> Sample:
    """Each entry from the shard that drew it, `[s, B, ...]`, to its device, `[B / D, ...]`."""

    def move(leaf: jax.Array) -> jax.Array:
        words = _words(leaf)
        drawn = draws.mask.reshape(*draws.mask.shape, *(1,) * (words.ndim - 2))
        found = jnp.sum(jnp.where(drawn, words, 0), axis=0, dtype=words.dtype)
        return _unwords(here.scattered(found), leaf)

    return jax.tree.map(move, samples)


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers, whose sum with zeros is exact."""
    leaf = prng_keys.raw(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return _words(jnp.stack([leaf.real, leaf.imag], axis=-1))
    if leaf.dtype.itemsize == 1 and jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf.astype(jnp.uint8)
    return lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize])


def _unwords(words: jax.Array, like: jax.Array) -> Any:
    """The array that these are the bits of."""
    if prng_keys.is_keys(like.dtype):
        return prng_keys.wrapped(words, like.dtype)
    if like.dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        pair = lax.bitcast_convert_type(words, like.real.dtype)
        return lax.complex(pair[..., 0], pair[..., 1])
    if like.dtype.itemsize == 1 and jnp.issubdtype(like.dtype, jnp.integer):
        return words.astype(like.dtype)
    return lax.bitcast_convert_type(words, like.dtype)


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
