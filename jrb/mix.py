"""One batch from several buffers, such as demonstrations and replay."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core import eager, steps
from jrb._util import casting, checks, display, pytree, wording
from jrb._xla import random_bits
from jrb.buffer import ReplayBuffer
from jrb.sharding import Sharded
from jrb.state import Buffer, BufferState, Device, Sample, check_origin
from jrb.types import Item, Sampler

States = tuple[BufferState, ...]


@pytree.component
class Mix:
    """Draws every batch from several buffers, exact parts of it from each.

    Its state is the tuple of the buffers' states: write to one with its own buffer, and put it
    back. The part of buffer k has proportion_k * B items, rounded so that the parts add up to B
    (largest remainders), comes after those of the buffers before it, and covers the whole
    distribution of its buffer. `Sample.info["source"]`, int32 `[B]`, says which buffer an item is
    from; indices, probabilities, weights and stamps are that buffer's own. K buffers.

    Of `jrb.Sharded` buffers, all in the same shards, each shard draws its part of every part, and
    nothing moves between devices.

    Attributes:
        buffers: whose data have the same structure, shapes and dtypes.
        proportions: numbers that add up to 1; a draw may bring its own, which may be traced.
        batch_size: B, unless a draw names its own.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> demos = jrb.ReplayBuffer(100, batch_size=1)
        >>> replay = jrb.ReplayBuffer(1000, batch_size=1, sampler=jrb.Prioritized())
        >>> mix = jrb.Mix((demos, replay), (0.25, 0.75), batch_size=8)
        >>> one, other = mix.init({"x": jnp.int32(0)})
        >>> states = demos.add(one, {"x": jnp.int32(1)}), replay.add(other, {"x": jnp.int32(2)})
        >>> mix.sample(states, jax.random.key(0)).data["x"].tolist()
        [1, 1, 2, 2, 2, 2, 2, 2]
    """

    buffers: tuple[ReplayBuffer | Sharded, ...]
    proportions: tuple[float, ...]
    batch_size: int | None = None

    def __repr__(self) -> str:
        return display.laid_out(self)

    def _repr_html_(self) -> str:
        return display.tree_html(self)

    def __post_init__(self) -> None:
        is_buffers = isinstance(self.buffers, tuple) and self.buffers
        kinds = ReplayBuffer | Sharded
        if not is_buffers or not all(isinstance(part, kinds) for part in self.buffers):
            raise TypeError(f"buffers: expected a tuple of buffers, got {self.buffers!r}.")
        layouts = {isinstance(part, Sharded) and part.layout for part in self.buffers}
        if len(layouts) > 1:
            raise ValueError(
                "buffers: expected all in the same shards of the same mesh, or none in shards, got "
                f"{layouts}."
            )
        numbers = isinstance(self.proportions, tuple) and all(
            isinstance(share, int | float) for share in self.proportions
        )
        if not numbers:
            raise TypeError(f"proportions: expected a tuple of numbers, got {self.proportions!r}.")
        _check_proportions(np.asarray(self.proportions, np.float64), len(self.buffers))
        if self.batch_size is not None:
            checks.count("batch_size", self.batch_size)

    def init(self, example: Item, device: Device = None) -> States:
        """Makes empty states, one for each buffer, on one device (see `ReplayBuffer.init`)."""
        return tuple(
            part.init(example) if isinstance(part, Sharded) else part.init(example, device)
            for part in self.buffers
        )

    def nbytes(self, example: Item) -> int:
        """Returns the bytes that `init(example)` allocates."""
        return sum(part.nbytes(example) for part in self.buffers)

    def size(self, states: States) -> jax.Array:
        """Returns the transitions held by each buffer, int32 `[K]`."""
        return jnp.stack([part.size(state) for part, state in self._pairs(states)])

    def can_sample(self, states: States) -> jax.Array:
        """Returns if every buffer whose part is not empty has something to draw, bool `[]`."""
        if self.batch_size is None:
            counts = tuple(None if share else 0 for share in self.proportions)
        else:
            counts = self._counts(self.batch_size)
        ready = [
            part.can_sample(state, count)
            for (part, state), count in zip(self._pairs(states), counts, strict=True)
            if count != 0
        ]
        return jnp.all(jnp.stack(ready))

    @wording.takes_state
    def sample(
        self,
        states: States,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        proportions: jax.Array | None = None,
    ) -> Sample:
        """Draws a batch and leaves the states as they are; see `draw`."""
        return self._draw(states, key, batch_size, beta, proportions)[1]

    @wording.takes_state
    def draw(
        self,
        states: States,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        proportions: jax.Array | None = None,
    ) -> tuple[States, Sample]:
        """Draws a batch, and moves on those samplers that consume.

        Args:
            states: may be donated.
            key: a PRNG key. It is consumed.
            batch_size: B; None for the mix's.
            beta: of the importance weights, for all buffers that have them; None for their own.
            proportions: float `[K]`, of this batch, may be traced; None for the mix's. Every buffer
                then draws B items, of which its part is chosen at random, so that the shapes do not
                depend on it: for samplers that consume, this is an error. Where draws are counted,
                those that are chosen count.

        Returns:
            The states, and the batch.

        Raises:
            ValueError: no batch size; proportions that do not add up to 1 (outside `jit`; inside,
                they are scaled); parts whose data differ; a buffer with nothing to draw (outside
                `jit`; inside, its part of `mask` is False).
        """
        wasteful = [sampler for sampler in self._samplers if sampler.consumes]
        if proportions is not None and wasteful:
            raise ValueError(
                f"proportions: expected none in the call, with {type(wasteful[0]).__name__}, which "
                "would lose what it draws in vain. Give them to Mix, as numbers."
            )
        return self._draw(states, key, batch_size, beta, proportions)

    def _draw(
        self,
        states: States,
        key: jax.Array,
        batch_size: int | None,
        beta: jax.Array | float | None,
        proportions: Any,
    ) -> tuple[States, Sample]:
        batch_size = self.batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("batch_size: expected a number, got None. Give it to Mix or the call.")
        checks.count("batch_size", batch_size)
        checks.key(key)
        beta = None if beta is None else checks.number("beta", beta)
        keys = jax.random.split(key, len(self.buffers) + 1)
        shares = None
        if proportions is None:
            counts = needed = self._counts(batch_size)
        else:
            # Shapes may not depend on the proportions: each buffer draws B items, and of these its
            # part of the batch is chosen.
            shares = self._given_shares(proportions, batch_size)
            counts = (batch_size,) * len(self.buffers)
            needed = counts if isinstance(shares, jax.core.Tracer) else tuple(shares.tolist())
        pairs = self._pairs(states)
        after, parts = list(states), []
        for number, (buffer, state) in enumerate(pairs):
            count, quiet = counts[number], not needed[number]  # what nobody needs may be empty
            if not count:
                continue
            draw = buffer._draw if isinstance(buffer, Sharded) else partial(eager.draw, buffer)
            after[number], sample = draw(state, keys[number], count, beta, quiet)
            info = {**sample.info, "source": jnp.full(count, number, jnp.int32)}
            parts.append(sample.replace(info=info, origin=self._origin))
        _check_alike(parts)
        if shares is None:
            return tuple(after), self._within(_joined, (), (parts,), merges=True)
        chosen = self._for_each(shares, keys[-1])
        sample = self._within(_chosen, chosen, (parts,), merges=True)
        return self._counted(states, after, sample), sample

    def _counted(self, before: States, after: list[BufferState], sample: Sample) -> States:
        """Counts draws of which only some came into the batch."""
        drawn = sample.mask.reshape(sample.mask.shape[0], -1).any(axis=1)
        for number, sampler in enumerate(self._samplers):
            if sampler.count_draws:
                own = drawn & (sample.info["source"] == number)
                samplers = before[number].sampler, after[number].sampler
                counted = self._within(steps.recount, samplers, (sample, own))
                after[number] = after[number].replace(sampler=counted)
        return tuple(after)

    def update_priority(self, states: States, sample: Sample, priorities: jax.Array) -> States:
        """Sets priorities, each in the buffer that its item is from.

        Args:
            states: may be donated.
            sample: one that this mix drew.
            priorities: as for `ReplayBuffer.update_priority`.
        """
        if "source" not in sample.info:
            raise ValueError("update_priority: expected a Sample of this Mix, got one of a buffer.")
        check_origin("update_priority", sample, self._origin)
        if not any(sampler.prioritized for sampler in self._samplers):
            raise TypeError(
                "update_priority: expected a buffer with priorities, got none. "
                "Build one with sampler=jrb.Prioritized()."
            )
        source, after = sample.info["source"], []
        for number, (part, state) in enumerate(self._pairs(states)):
            mine = source == number
            mask = sample.mask & mine.reshape(-1, *(1,) * (sample.mask.ndim - 1))
            own = sample.replace(mask=mask, origin=None)
            if self._samplers[number].prioritized:
                after.append(part.update_priority(state, own, priorities))
            else:
                one = part.part if isinstance(part, Sharded) else part
                after.append(self._within(eager.Wait(one), (state,), (own,)))
        return tuple(after)

    def _pairs(self, states: States) -> list[tuple[ReplayBuffer | Sharded, BufferState]]:
        if not isinstance(states, tuple | list):
            raise TypeError(
                f"states: expected a tuple of {len(self.buffers)} states, as init of the mix makes "
                f"it, got {type(states).__name__}."
            )
        if len(states) != len(self.buffers):
            raise ValueError(
                f"states: expected one for each of {len(self.buffers)} buffers, got {len(states)}."
            )
        return list(zip(self.buffers, states, strict=True))

    def _given_shares(self, proportions: Any, batch_size: int) -> jax.Array:
        """Returns how many of a batch each buffer gives, int32 `[K]`, for proportions of a call."""
        if not isinstance(proportions, jax.core.Tracer):
            _check_proportions(np.asarray(proportions, np.float64), len(self.buffers))
        values = jnp.asarray(casting.copy_array(proportions)).astype(jnp.float32)
        if values.shape != (len(self.buffers),):
            raise ValueError(
                f"proportions: expected shape ({len(self.buffers)},), got {values.shape}."
            )
        values = jnp.maximum(jnp.nan_to_num(values), 0.0)
        return self._shards * _shares(jnp, values, batch_size // self._shards, 1e-4)

    def _counts(self, batch_size: int) -> tuple[int, ...]:
        """Returns how many of a batch each buffer gives, alike in each shard."""
        if batch_size % self._shards:
            raise ValueError(
                f"batch_size: expected a multiple of {self._shards}, the number of shards, got "
                f"{batch_size}."
            )
        values = np.asarray(self.proportions, np.float64)
        shares = _shares(np, values, batch_size // self._shards, 1e-6)
        return tuple((self._shards * shares).tolist())

    @property
    def _origin(self) -> str:
        """The origin of its samples."""
        return f"Mix({', '.join(part._origin for part in self.buffers)})"

    @property
    def _samplers(self) -> list[Sampler]:
        parts = [part.buffer if isinstance(part, Sharded) else part for part in self.buffers]
        return [part.sampler for part in parts]

    @property
    def _shards(self) -> int:
        """The number of shards that each buffer has."""
        first = self.buffers[0]
        return first.shards if isinstance(first, Sharded) else 1

    def _within(
        self, function: Callable[..., Any], states: tuple, batches: tuple, merges: bool = False
    ) -> Any:
        """Calls a function of states and batches; of sharded ones, in each shard for itself."""
        first = self.buffers[0]
        if isinstance(first, Sharded):
            return first.in_each(function, states, batches, merges)
        return function(*states, *batches)

    def _for_each(self, shares: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns how many items are from each buffer, and a key; for each shard its own."""
        if not isinstance(self.buffers[0], Sharded):
            return shares, key
        each = jnp.broadcast_to(shares // self._shards, (self._shards, shares.size))
        return each, jax.random.split(key, self._shards)


def _check_proportions(values: np.ndarray, count: int) -> None:
    if values.shape != (count,):
        raise ValueError(
            f"proportions: expected {count} numbers, one for each buffer, got shape {values.shape}."
        )
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"proportions: expected numbers of at least 0, got {values.tolist()}.")
    if not math.isclose(values.sum(), 1.0, abs_tol=1e-5):
        raise ValueError(
            f"proportions: expected numbers that add up to 1, got {values.tolist()}, which add up "
            f"to {values.sum():g}. Divide them by that."
        )


def _shares(xp: Any, proportions: Any, batch_size: int, slack: float) -> Any:
    """Returns how many of a batch each buffer gives, int32 `[K]`: largest remainders round up.

    Args:
        xp: NumPy or `jax.numpy`.
        proportions: `[K]`, of at least 0.
        batch_size: B.
        slack: by how much a number may miss an integer and still be one.
    """
    exact = proportions / xp.maximum(xp.sum(proportions), 1e-30) * batch_size
    whole = xp.floor(exact + slack)
    rank = xp.argsort(xp.lexsort((whole - exact,)))  # a stable order, in both libraries
    missing = batch_size - xp.sum(whole.astype(np.int32))
    return xp.where(rank < missing, whole + 1, whole).astype(np.int32)


def _check_alike(parts: list[Sample]) -> None:
    """Raises unless all parts have the same structure, and items of the same shapes and dtypes."""
    first, *others = parts
    item = lambda **fields: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), fields
    )
    mend = "Give the buffers units and transforms with the same result, and let all or none count."
    for other in others:
        pytree.check_like(item(data=first.data), item(data=other.data), "Mix", mend)
        want, found = (item(mask=part.mask, info=part.info) for part in (first, other))
        pytree.check_like(want, found, "Mix", mend)


def _joined(parts: list[Sample]) -> Sample:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


@jax.jit
def _chosen(shares: jax.Array, key: jax.Array, parts: list[Any]) -> Sample:
    """Chooses rows of each part at random, as many as `shares`, int32 `[K]`, says."""
    size = parts[0].indices.shape[0]
    place, ends = jnp.arange(size, dtype=jnp.int32), jnp.cumsum(shares, dtype=jnp.int32)
    source = jnp.sum(place[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    source = jnp.minimum(source, len(parts) - 1)
    within = place - (ends - shares)[source]
    seeds = random_bits.bits(key, (len(parts), 2))
    mixed = jnp.stack([random_bits.permute(seed, jnp.int32(size), place) for seed in seeds])
    row = source * size + mixed[source, within]
    return jax.tree.map(lambda leaf: leaf[row], _joined(parts))


Description = Buffer | Mix | Sharded
"""What can be saved, compiled and iterated over."""

AnyState = Any
"""A `BufferState`, or of a `Mix` the tuple of them; `vmap` may have put axes before all arrays."""
