"""What the verbs of a sharded buffer do on one device, for the shards that lie there.

Each body is hashable, and called with a `Here` and the arrays of these shards (see
`jrb._core.over_mesh`). S shards, s of them here, B batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrb._core import joint, steps, validate
from jrb._core.over_mesh import Cut, Here
from jrb._util.arguments import entry
from jrb._util.pytree import PyTree
from jrb._xla import random_bits
from jrb.state import Buffer, BufferState, Sample


@dataclasses.dataclass(frozen=True)
class Blank:
    """Empty states, for items of this structure."""

    part: Buffer
    structure: Any
    spec: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, here: Here) -> BufferState:
        spec = jax.tree.unflatten(self.structure, self.spec)

        def blank(number: jax.Array) -> BufferState:
            state = validate.blank(self.part, spec)
            return state.replace(writer=self.part.writer.in_shard(state.writer, number))

        return jax.vmap(blank)(here.numbers)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A verb of a buffer whose first arguments after the state are these."""

    verb: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, part: Buffer, state: BufferState, *others: Any) -> Any:
        return self.verb(part, state, *self.arguments, *others)


@dataclasses.dataclass(frozen=True)
class Each:
    """A verb in each of the shards.

    Attributes:
        part: the description of one.
        verb: called with it, a state, and arguments.
        cuts: of the arguments.
        splits: whether these are of all shards, and cut up.
    """

    part: Buffer
    verb: Callable[..., Any]
    cuts: tuple[Cut, ...]
    splits: bool

    def __call__(self, here: Here, states: BufferState, *arguments: PyTree) -> Any:
        if self.splits:
            cut_up = lambda tree, cut: tree if cut is None else _split(tree, cut, here)
            arguments = tuple(map(cut_up, arguments, self.cuts))

        def call(state: BufferState, number: jax.Array, *given: PyTree) -> Any:
            return self.verb(self.part, state, *(of_shard(each, number) for each in given))

        return jax.vmap(call, (0, 0, *self.cuts))(states, here.numbers, *arguments)


def of_shard(argument: PyTree, number: Any) -> Any:
    """A sample, masked where another shard than this one drew; anything else as it is."""
    if not isinstance(argument, Sample):
        return argument
    mine = argument.info["shard"] == number
    mask = argument.mask & mine.reshape(-1, *(1,) * (argument.mask.ndim - 1))
    return argument.replace(mask=mask)


@dataclasses.dataclass(frozen=True)
class WithoutItems:
    """A body that leaves items alone, for outside `jit`, where what it returns is copied."""

    body: Callable[..., BufferState]

    def __call__(self, here: Here, *arguments: PyTree) -> BufferState:
        return self.body(here, *arguments).replace(storage=None)


@dataclasses.dataclass(frozen=True)
class InEach:
    """A function of so many states, and of parts of batches, in each of the shards."""

    function: Callable[..., Any]
    states: int
    merges: bool

    def __call__(self, here: Here, *arguments: PyTree) -> Any:
        states, batches = arguments[: self.states], arguments[self.states :]
        found = jax.vmap(self.function)(*states, *_split(batches, 0, here))
        return _merged(found) if self.merges else found


@dataclasses.dataclass(frozen=True)
class Draw:
    """A draw: the states after it, and the part of the batch that is from here.

    Attributes:
        part: the description of one shard.
        batch_size: of each shard.
        min_size: what all shards together must hold.
        origin: that of the samples.
    """

    part: Buffer
    batch_size: int
    min_size: int | None
    origin: str

    @entry
    def __call__(
        self, here: Here, states: BufferState, key: jax.Array, beta: jax.Array | None
    ) -> Any:
        keys = jax.vmap(lambda number: random_bits.fold_in(key, number))(here.numbers)
        chosen = joint.choose(self.part, here, states, keys, self.batch_size, beta)
        samplers, draws, every, sizes = chosen
        if every is not None:
            part_sampler: Any = self.part.sampler  # below ShardedSampler, as there are stats
            sync_shards = lambda sampler, number: part_sampler.sync_shards(sampler, every)
            samplers = jax.vmap(sync_shards)(
                samplers, here.numbers
            )  # a state may be without arrays
        if self.min_size is not None:
            enough = here.total(sizes) >= self.min_size
            samplers, draws = steps.if_enough(enough, states.sampler, samplers, draws)
        finish = lambda *each: steps.finish_draw(self.part, *each)
        states, samples = jax.vmap(finish)(states, samplers, draws, keys)
        shard = jnp.broadcast_to(here.numbers[:, None], samples.indices.shape)
        info = {**samples.info, "shard": shard}
        return states, _merged(samples.replace(info=info, origin=self.origin))


class Drawn(Draw):
    """The same for outside `jit`, where whole states would be copied: those of samplers only."""

    def __call__(
        self, here: Here, states: BufferState, key: jax.Array, beta: jax.Array | None
    ) -> Any:
        states, batch = super().__call__(here, states, key, beta)
        return states.sampler, batch


class Sampled(Draw):
    """The same without the states."""

    def __call__(
        self, here: Here, states: BufferState, key: jax.Array, beta: jax.Array | None
    ) -> Sample:
        return super().__call__(here, states, key, beta)[1]


@dataclasses.dataclass(frozen=True)
class Size:
    """What all shards hold, int32 `[]`."""

    part: Buffer

    def __call__(self, here: Here, states: BufferState) -> jax.Array:
        return here.total(jax.vmap(self.part.size)(states))


@dataclasses.dataclass(frozen=True)
class CanSample:
    """Whether some shard can draw, and all together hold enough, bool `[]`."""

    part: Buffer
    batch_size: int | None
    min_size: int | None

    def __call__(self, here: Here, states: BufferState) -> jax.Array:
        ready = jax.vmap(lambda state: steps.ready(self.part, state, self.batch_size))(states)
        found = here.greatest(ready.astype(jnp.int32)) > 0
        if self.min_size is None:
            return found
        return found & (Size(self.part)(here, states) >= self.min_size)


@dataclasses.dataclass(frozen=True)
class CanAdd:
    """Whether all shards have room, bool `[]`."""

    part: Buffer

    def __call__(self, here: Here, states: BufferState) -> jax.Array:
        room = jax.vmap(lambda state: steps.can_write(self.part, state))(states)
        return here.greatest((~room).astype(jnp.int32)) == 0


def _split(tree: PyTree, cut: int, here: Here) -> Any:
    """Leaves `[..., s * k, ...]` with an axis for the shards here: `[..., s, k, ...]`."""

    def split(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        shape, some = leaf.shape, here.numbers.size
        if shape[cut : cut + 1] == () or shape[cut] % some:
            raise ValueError(
                f"expected arguments whose axis {cut} can be cut into {some} shards, got shape "
                f"{shape}. Give one entry for each environment, or for each of the batch."
            )
        return leaf.reshape(*shape[:cut], some, shape[cut] // some, *shape[cut + 1 :])

    return jax.tree.map(split, tree)


def _merged(tree: PyTree) -> Any:
    """Leaves `[s, k, ...]` without the axis of the shards here: `[s * k, ...]`."""
    flat = lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
    return jax.tree.map(flat, tree)
