"""The verbs of a sharded buffer on one device, for the shards that are there.

Each body gets `LocalShards`, hashable arguments, and the arrays of these shards (see
`jrb.sharding.mesh`). S shards, s of them here, B batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrb._core import steps, validate
from jrb._util.pytree import PyTree
from jrb._xla import random_bits
from jrb._xla.compiling import entry
from jrb.sharding import joint
from jrb.sharding.mesh import Cut, LocalShards, merged
from jrb.state import Buffer, BufferState, Sample


def blank(here: LocalShards, part: Buffer, structure: Any, leaves: tuple[Any, ...]) -> BufferState:
    """Makes empty states for items of this structure and these specs."""
    spec = jax.tree.unflatten(structure, leaves)

    def blank(number: jax.Array) -> BufferState:
        state = validate.blank(part, spec)
        return state.replace(writer=part.writer.in_shard(state.writer, number))

    return jax.vmap(blank)(here.numbers)


def each(
    here: LocalShards,
    part: Buffer,
    verb: Callable[..., Any],
    options: tuple[Any, ...],
    cuts: tuple[Cut, ...],
    splits: bool,
    returns_items: bool,
    states: BufferState,
    *arguments: PyTree,
) -> Any:
    """Calls a verb of a buffer in each shard.

    Args:
        here: the shards.
        part: the description of one.
        verb: called with it, a state, `options`, and arguments.
        options: hashable arguments.
        cuts: of the arguments.
        splits: whether these are of all shards, and cut up.
        returns_items: False for a verb that leaves items alone, outside `jit`, where a compiled
            function copies what it returns.
        states: arrays `[s, ...]`.
        arguments: arrays.
    """
    if splits:
        pairs = zip(arguments, cuts, strict=True)
        arguments = tuple(tree if cut is None else here.split(tree, cut) for tree, cut in pairs)

    def call(state: BufferState, number: jax.Array, *given: PyTree) -> Any:
        return verb(part, state, *options, *(_of_shard(it, number) for it in given))

    result = jax.vmap(call, (0, 0, *cuts))(states, here.numbers, *arguments)
    return result if returns_items else result.replace(storage=None)


def _of_shard(argument: PyTree, number: jax.Array) -> Any:
    """Masks entries of a sample that another shard drew."""
    if not isinstance(argument, Sample):
        return argument
    own = argument.info["shard"] == number
    mask = argument.mask & own.reshape(-1, *(1,) * (argument.mask.ndim - 1))
    return argument.replace(mask=mask)


def in_each(
    here: LocalShards, function: Callable[..., Any], count: int, merges: bool, *arguments: PyTree
) -> Any:
    """Calls a function of `count` states and of parts of batches in each shard."""
    states, batches = arguments[:count], arguments[count:]
    result = jax.vmap(function)(*states, *here.split(batches, 0))
    return merged(result) if merges else result


@entry
def draw(
    here: LocalShards,
    part: Buffer,
    batch_size: int,
    min_size: int | None,
    origin: str,
    returns: str,
    states: BufferState,
    key: jax.Array,
    beta: jax.Array | None,
) -> Any:
    """Draws the part of a batch that is from these shards.

    Args:
        here: the shards.
        part: the description of one.
        batch_size: of each shard.
        min_size: the items that all shards together must hold.
        origin: of the sample.
        returns: "state" for the states and the sample; outside `jit`, where a compiled function
            copies what it returns, "sampler" for those of samplers, or "sample" for nothing else.
        states: arrays `[s, ...]`.
        key: the same for all shards.
        beta: of the importance weights; None for the sampler's.
    """
    keys = jax.vmap(lambda number: random_bits.fold_in(key, number))(here.numbers)
    samplers, draws = joint.choose(part, here, states, keys, batch_size, beta, min_size)

    def finish(state: BufferState, sampler: Any, draw: Any, key: jax.Array) -> Any:
        sampler, draw = steps.counted(part, sampler, draw)
        sample = steps.assemble(part, state, draw, key)
        return steps.wait(part, state.replace(sampler=sampler), sample), sample

    states, samples = jax.vmap(finish)(states, samplers, draws, keys)
    shard = jnp.broadcast_to(here.numbers[:, None], samples.indices.shape)
    samples = samples.replace(info={**samples.info, "shard": shard}, origin=origin)
    if returns == "sample":
        return merged(samples)
    return states if returns == "state" else states.sampler, merged(samples)


def size(here: LocalShards, part: Buffer, states: BufferState) -> jax.Array:
    """Returns how many items all shards hold, int32 `[]`."""
    return here.total(jax.vmap(part.size)(states))


def can_sample(
    here: LocalShards,
    part: Buffer,
    batch_size: int | None,
    min_size: int | None,
    states: BufferState,
) -> jax.Array:
    """Returns if some shard can draw, and all together hold enough, bool `[]`."""
    ready = jax.vmap(lambda state: steps.ready(part, state, batch_size))(states)
    any_ready = here.max(ready.astype(jnp.int32)) > 0
    return any_ready if min_size is None else any_ready & (size(here, part, states) >= min_size)


def can_add(here: LocalShards, part: Buffer, states: BufferState) -> jax.Array:
    """Returns if all shards have room, bool `[]`."""
    has_room = jax.vmap(lambda state: steps.can_write(part, state))(states)
    return here.max((~has_room).astype(jnp.int32)) == 0
