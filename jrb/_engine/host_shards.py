"""Shards whose items lie on the host: a loop around their verbs, outside `jit`.

S shards, s of them in this process, B batch, b = B / S.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jrb._base import random_bits
from jrb._base.pytree import PyTree
from jrb._engine import dispatch, draws, joint, shard_bodies, steps
from jrb._engine.over_mesh import Cut
from jrb.state import Buffer, BufferState, Sample
from jrb.types import Draw, Share

States = BufferState | tuple[BufferState, ...]
"""The states of shards: arrays `[S, ...]`; or, with items on the host, those of this process."""


@dataclasses.dataclass(frozen=True)
class HostShards:
    """The shards of this process.

    Attributes:
        parts: their descriptions, each with a store of its own.
        numbers: theirs, among all S.
    """

    parts: tuple[Any, ...]
    numbers: tuple[int, ...]

    def each(
        self,
        verb: Callable[..., Any],
        states: States,
        arguments: tuple[PyTree, ...],
        cuts: tuple[Cut, ...],
        splits: bool,
    ) -> list[Any]:
        """What a verb of a buffer gives in each shard (see `jrb.sharded`)."""
        pieces = [self._pieces(*pair, splits) for pair in zip(arguments, cuts, strict=True)]
        rows = zip(self.numbers, self._pairs(states), *pieces, strict=True)
        return [
            verb(*pair, *(shard_bodies.of_shard(each, number) for each in given))
            for number, pair, *given in rows
        ]

    def _pieces(self, argument: PyTree, cut: Cut, splits: bool) -> list[Any]:
        """What of an argument is for each shard."""
        count = len(self.parts)
        if cut is None:
            return [argument] * count
        mine = jax.tree.map(local, argument)
        if not splits:
            return [jax.tree.map(lambda leaf: leaf[place], mine) for place in range(count)]  # noqa: B023
        split = lambda leaf: np.split(np.asarray(leaf), count, axis=cut)
        leaves, structure = jax.tree.flatten(mine)
        each = list(map(split, leaves))
        return [
            jax.tree.unflatten(structure, [leaf[place] for leaf in each]) for place in range(count)
        ]

    def draw(
        self,
        states: States,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | None,
        min_size: int | None,
    ) -> tuple[States, Sample, bool]:
        """A draw, `joint.draw`, of which this process has the part of its shards, `[s * b, ...]`.

        Returns:
            The states after it; the part of the batch; and whether anything was drawn at all.
        """
        found = [_share(_light(part), _light_state(state)) for part, state in self._pairs(states)]
        shares, sizes = _stacked([one for one, _ in found]), [size for _, size in found]
        every = None if shares is None else _of_all(shares)
        enough = min_size is None or self.total(sizes) >= min_size
        after, samples = [], []
        for number, (part, state) in zip(self.numbers, self._pairs(states), strict=True):
            own = random_bits.fold_in(key, jnp.int32(number))
            drawn, sample = draws.draw(part, state, own, batch_size, beta, True)
            then = draws.after_draw(state, drawn) if enough else state
            if every is not None:
                then = then.replace(sampler=part.sampler.heed(then.sampler, every))
            after.append(then)
            samples.append(_numbered(sample, number))
        batch = jax.tree.map(lambda *leaves: np.stack(list(map(np.asarray, leaves))), *samples)
        if shares is not None and every is not None:
            batch = self._weighed(batch, shares, every, beta)
        if not enough:
            batch = _masked(batch, np.zeros(batch.indices.shape, bool))
        some = bool(np.any(_of_all(np.asarray(batch.mask).any())))
        return tuple(after), jax.tree.map(_merged, batch), some

    def total(self, counts: list[Any]) -> int:
        """The sum of what each shard of all processes has."""
        return int(np.sum(_of_all(np.asarray(counts)), dtype=np.int64))

    def _pairs(self, states: States) -> list[tuple[Any, BufferState]]:
        return list(zip(self.parts, cast(tuple, states), strict=True))

    def _weighed(self, batch: Sample, shares: Share, every: Share, beta: jax.Array | None) -> Any:
        """The samples `[s, b]`, as parts of a draw from all shards."""
        drawn = batch.mask.reshape(*batch.indices.shape, -1).any(axis=-1)
        draws = Draw(
            slots=batch.indices,
            probabilities=jnp.asarray(batch.probabilities),
            weights=batch.weights,
            mask=jnp.asarray(drawn),
        )
        greatest = lambda numbers: jnp.max(jnp.asarray(_of_all(np.asarray(jnp.max(numbers)))))
        whole, sampler = joint.Whole(every), self.parts[0].sampler
        told = joint.weighed(sampler, draws, shares, whole, beta, greatest)
        told = jax.tree.map(np.asarray, told)
        batch = batch.replace(probabilities=told.probabilities, weights=told.weights)
        return _masked(batch, told.mask)


def local(leaf: Any) -> Any:
    """What this process has of an array, as one of NumPy."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    pieces = {piece.index[0].start or 0: piece.data for piece in leaf.addressable_shards}
    return np.concatenate([np.asarray(pieces[first]) for first in sorted(pieces)])


def _of_all(tree: PyTree) -> Any:
    """What all processes have, one after the other, `[S, ...]`."""
    if jax.process_count() == 1:
        return tree
    found = multihost_utils.process_allgather(tree)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)


def _light(part: Buffer) -> Any:
    """The description without its store, of which nothing that is compiled depends."""
    return dispatch.without_items(part)


def _light_state(state: BufferState) -> BufferState:
    return state.replace(storage=None, transforms=())


@jax.jit
def _share(part: Buffer, state: BufferState) -> tuple[Share | None, jax.Array]:
    """What the sampler of a shard says to the others, and how many items are held."""
    context = steps.context_of(part, state.writer)
    anchors = part.unit.anchors(context, state.unit)
    return part.sampler.share(part.ring, state.sampler, anchors), context.held.size


def _stacked(trees: list[Any]) -> Any:
    if trees[0] is None:
        return None
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _numbered(sample: Sample, number: int) -> Sample:
    shard = jnp.full(sample.indices.shape, number, jnp.int32)
    return sample.replace(info={**sample.info, "shard": shard}, origin=None)


def _masked(batch: Sample, mask: np.ndarray) -> Any:
    """Samples of which some count no more, bool `[s, b]`."""
    wide = mask.reshape(*mask.shape, *(1,) * (batch.mask.ndim - 2))
    return batch.replace(
        mask=batch.mask & wide,
        probabilities=np.where(mask, batch.probabilities, 0),
        weights=np.where(mask, batch.weights, 0),
    )


def _merged(leaf: np.ndarray) -> np.ndarray:
    return leaf.reshape(-1, *leaf.shape[2:])
