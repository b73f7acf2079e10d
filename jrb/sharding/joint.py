"""The methods of a sharded buffer on one device, for the shards that it has.

Except for `call_method`, a function has the name of the method that calls it. Each
function gets `LocalShards`, hashable arguments, and the arrays of these shards (see
`jrb.sharding.mesh.run`). Each shard draws its part of the batch from its own anchors. One
`all_gather` then exchanges the statistics of all shards (`ShardStats`), from which every shard
computes probabilities and weights over the items of all shards.

S shards, s of them on this device, B batch, b = B / S.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import steps, validate
from jrb._util.pytree import PyTree
from jrb._xla import random_bits
from jrb._xla.compiling import with_unified_arguments
from jrb.sharding.mesh import Cut, LocalShards, merge_shards
from jrb.state import Buffer, BufferState, Sample
from jrb.types import Draw, ShardedSampler, ShardStats
from jrb.types.messages import DrawInputs

_LEAST, _MOST = 1e-36, 3e38  # of probabilities that are raised to a power, and of weights
_TINY = float(np.finfo(np.float32).tiny)


def init(shards: LocalShards, part: Buffer, structure: Any, leaves: tuple[Any, ...]) -> BufferState:
    """Returns empty states for items of this structure and these specs of leaves."""
    spec = jax.tree.unflatten(structure, leaves)

    def make_state(number: jax.Array) -> BufferState:
        # Reservoirs of different shards must not make the same choices.
        state = validate.blank(part, spec)
        return state.replace(writer=part.writer.in_shard(state.writer, number))

    return jax.vmap(make_state)(shards.numbers)


def call_method(
    shards: LocalShards,
    part: Buffer,
    method: Callable[..., Any],
    options: tuple[Any, ...],
    cuts: tuple[Cut, ...],
    splits: bool,
    returns_items: bool,
    states: BufferState,
    *arguments: PyTree,
) -> Any:
    """Calls a method of a buffer in each shard.

    Args:
        shards: the shards of this device.
        part: the description of one shard.
        method: the method, called with `part`, a state, `options`, and arguments.
        options: hashable arguments.
        cuts: for each argument, the axis that is cut over shards.
        splits: True if arguments are for all shards of this device, and must be split.
        returns_items: False to leave items out of the result, if the method does not change them:
            outside `jit`, a compiled function copies what it returns.
        states: the states, arrays `[s, ...]`.
        arguments: the array arguments of the method.
    """
    if splits:
        pairs = zip(arguments, cuts, strict=True)
        arguments = tuple(tree if cut is None else shards.split(tree, cut) for tree, cut in pairs)

    def call(state: BufferState, number: jax.Array, *args: PyTree) -> Any:
        # A user may have changed the order of a sample: mask entries that another shard drew.
        own_args = []
        for arg in args:
            if isinstance(arg, Sample):
                is_own = arg.info["shard"] == number
                shape = (-1, *(1,) * (arg.mask.ndim - 1))
                arg = arg.replace(mask=arg.mask & is_own.reshape(shape))
            own_args.append(arg)
        return method(part, state, *options, *own_args)

    # One program for all shards of a device, whatever their number.
    result = jax.vmap(call, (0, 0, *cuts))(states, shards.numbers, *arguments)
    return result if returns_items else result.replace(storage=None)


def in_each(
    shards: LocalShards, function: Callable[..., Any], count: int, merges: bool, *arguments: PyTree
) -> Any:
    """Calls a function in each shard, on `count` states and on parts of batches."""
    states, batches = arguments[:count], arguments[count:]
    result = jax.vmap(function)(*states, *shards.split(batches, 0))
    return merge_shards(result) if merges else result


def size(shards: LocalShards, part: Buffer, states: BufferState) -> jax.Array:
    """Returns the number of items in all shards, int32 `[]`."""
    return shards.total(jax.vmap(part.size)(states))


def can_sample(
    shards: LocalShards,
    part: Buffer,
    batch_size: int | None,
    min_size: int | None,
    states: BufferState,
) -> jax.Array:
    """Returns True if some shard can draw, and all together hold enough, bool `[]`."""
    ready = jax.vmap(lambda state: steps.ready(part, state, batch_size))(states)
    # A maximum, as JAX has no `any` over a mesh.
    is_ready = shards.max(ready.astype(jnp.int32)) > 0
    return is_ready if min_size is None else is_ready & (size(shards, part, states) >= min_size)


def can_add(shards: LocalShards, part: Buffer, states: BufferState) -> jax.Array:
    """Returns True if all shards have room, bool `[]`."""
    has_room = jax.vmap(lambda state: steps.can_write(part, state))(states)
    return shards.max((~has_room).astype(jnp.int32)) == 0


@with_unified_arguments
def draw(
    shards: LocalShards,
    part: Buffer,
    batch_size: int,
    min_size: int | None,
    origin: str,
    returns: str,
    states: BufferState,
    key: jax.Array,
    inputs: DrawInputs,
) -> Any:
    """Draws the parts of a batch that come from these shards.

    Args:
        shards: the shards of this device.
        part: the description of one shard.
        batch_size: b, the number of items from each shard.
        min_size: the items that all shards together must hold.
        origin: `Sample.origin` of the result.
        returns: "state" for the states and the sample. Outside `jit`, where a compiled function
            copies what it returns, "sampler" for the samplers' states and the sample, or "sample"
            for it alone.
        states: the states, arrays `[s, ...]`.
        key: the same for all shards.
        inputs: the exponent of the importance weights, and the context; the same for all shards.
    """
    # Choose anchors in each shard, with a key of its own that does not depend on the devices.
    keys = jax.vmap(lambda number: random_bits.fold_in(key, number))(shards.numbers)
    choose = functools.partial(steps.choose, part, batch_size=batch_size, inputs=inputs)
    samplers, draws = jax.vmap(choose)(states, keys)  # draws have arrays [s, b]
    # Make each draw a part of one from all shards. Samplers that consume have no such numbers.
    stats = jax.vmap(lambda state: steps.shard_stats(part, state, inputs.context))(states)
    if stats is not None:
        all_stats = shards.all_gather(stats)
        sampler: Any = part.sampler  # a ShardedSampler, as it has stats
        draws = weigh_draws(sampler, draws, stats, all_stats, inputs.beta, shards)
        sync = lambda state, _: sampler.sync_shards(state, all_stats)
        samplers = jax.vmap(sync)(samplers, shards.numbers)  # its state may have no arrays
    # Mask everything if all shards together hold too few items.
    if min_size is not None:
        has_enough = size(shards, part, states) >= min_size
        samplers, draws = steps.mask_unless(has_enough, states.sampler, samplers, draws)

    def finish(state: BufferState, sampler: Any, draw: Any, key: jax.Array) -> Any:
        sampler, draw = steps.count_draw(part, sampler, draw)
        sample = steps.assemble(part, state, draw, key)
        return steps.wait(part, state.replace(sampler=sampler), sample), sample

    # Read the items, and join the parts of the shards of this device.
    states, samples = jax.vmap(finish)(states, samplers, draws, keys)
    shard = jnp.broadcast_to(shards.numbers[:, None], samples.indices.shape[:2])
    samples = samples.replace(info={**samples.info, "shard": shard}, origin=origin)
    if returns == "sample":
        return merge_shards(samples)
    return states if returns == "state" else states.sampler, merge_shards(samples)


def weigh_draws(
    sampler: ShardedSampler,
    draws: Draw,
    stats: ShardStats,
    all_stats: ShardStats,
    beta: jax.Array | None,
    shards: LocalShards,
) -> Draw:
    """Returns the draws with probabilities and weights for a draw from all shards together.

    With P_i the probability of anchor i among the n anchors of all shards, M_s the mass of its
    shard and M that of all, its weight is (n P_i)^-beta S M_s / M, as each shard draws equally many
    items, whatever its mass. A shard without mass is masked, and the others get larger weights. If
    no shard has mass, all are masked.

    Args:
        sampler: the sampler of a shard.
        draws: arrays `[s, b]`, with probabilities among the anchors of the shard.
        stats: the statistics of these shards, arrays `[s]`.
        all_stats: the statistics of all shards, arrays `[S]`.
        beta: the exponent of the importance weights; None for the sampler's.
        shards: the shards of this device.
    """
    # Computed alike in every shard and on any number of devices: sums by pairs, one inverse.
    power, num_shards = sampler.exponent(beta), len(all_stats.mass)
    anchors = _pairwise_sum(all_stats.num_anchors.astype(jnp.float32))
    # Multiplied by the inverse, as XLA may round one quotient in two ways in two programs.
    inverse = 1 / jnp.maximum(_pairwise_sum(all_stats.mass), _TINY)
    share, all_shares = stats.mass * inverse, all_stats.mass * inverse  # M_s / M

    # Compute the probabilities among all anchors, and the weights before normalization.
    relative = lambda probability: jnp.maximum(anchors * probability, _LEAST) ** -power
    probabilities = draws.probabilities * share[:, None]
    # A shard without mass draws anything, which is masked: the others weigh more for it.
    mask = draws.mask & (share > 0)[:, None]
    weights = jnp.minimum(num_shards * share[:, None] * relative(probabilities), _MOST)
    # Divide by the largest weight in the batch, or by the largest that any anchor could get.
    if sampler.normalize == "batch":
        weights = weights * (1 / jnp.maximum(shards.max(jnp.where(mask, weights, 0.0)), _TINY))
    elif sampler.normalize == "buffer":
        greatest = num_shards * all_shares * relative(all_stats.min_mass * inverse)
        weights = weights * (1 / jnp.max(jnp.where(all_shares > 0, greatest, _TINY)))
    # A weight of 0 is for masked entries only.
    weights = jnp.maximum(weights, _TINY)
    return draws.replace(probabilities=probabilities, weights=weights).keep_where(mask)


def _pairwise_sum(numbers: jax.Array) -> jax.Array:
    """Returns the sum of `[S]`, added by pairs, so that all programs round it alike."""
    while numbers.size > 1:
        # The order of additions is that of the shards, on any number of devices: pad with a zero
        # to an even number, and add neighbours.
        even = jnp.pad(numbers, (0, numbers.size % 2))
        numbers = even[0::2] + even[1::2]
    return numbers[0]
