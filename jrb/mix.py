"""Batches drawn from several buffers, such as demonstrations and replay."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb import Sharded
from jrb._core import eager, steps
from jrb._core.validate import check_state_argument, copy_array
from jrb._util import checks, display, pytree, splitting
from jrb._xla import random_bits
from jrb._xla.compiling import per_description
from jrb.buffer import ReplayBuffer, draw_arguments
from jrb.state import Buffer, BufferState, Device, Memory, Sample, check_origin
from jrb.types import Item, Sampler
from jrb.types.messages import Array, DrawInputs, PRNGKey

States = tuple[BufferState, ...]


@pytree.component
class Mix:
    """Draws batches of which each buffer contributes a fixed number of items.

    The state of a mix is the tuple of its buffers' states. To write, pass one of them to its own
    buffer, and put the result back into the tuple. Of a batch, proportion_k * B items are from
    buffer k, rounded by largest remainders so that they add up to B, in the order of the buffers.
    `Sample.info["source"]`, int32 `[B]`, is the number of the buffer that each item is from; its
    index, probability, weight and stamp are those in that buffer. K buffers.

    If the buffers are `jrb.Sharded`, all in the same shards, each shard draws an equal part from
    every buffer, and no items move between devices.

    Attributes:
        buffers: the buffers; their data have the same structure, shapes and dtypes.
        proportions: K numbers that add up to 1; a draw may pass its own, which may be traced.
        batch_size: B, for draws that do not pass their own.
        exact: if True, the parts are interleaved: every run of a batch has each buffer's share of
            items, to within one. Use it for batches that are cut into minibatches, as by
            `reshape(UTD, B // UTD, ...)` in RLPD (Ball et al., 2023). If False, they are in order.

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
    exact: bool = False

    def __repr__(self) -> str:
        return display.format_code(self)

    _repr_html_ = display.tree_html

    def __post_init__(self) -> None:
        # Check that the buffers are in the same shards, or in none.
        kinds = ReplayBuffer | Sharded
        is_tuple = isinstance(self.buffers, tuple) and self.buffers
        if not is_tuple or not all(isinstance(part, kinds) for part in self.buffers):
            raise TypeError(f"buffers: expected a tuple of buffers, got {self.buffers!r}.")
        layouts = {isinstance(part, Sharded) and part.layout for part in self.buffers}
        if len(layouts) > 1:
            raise ValueError(
                "buffers: expected all in the same shards of the same mesh, or none in shards, got "
                f"{layouts}."
            )
        if not isinstance(self.proportions, tuple) or not all(
            isinstance(share, int | float) for share in self.proportions
        ):
            raise TypeError(f"proportions: expected a tuple of numbers, got {self.proportions!r}.")
        splitting.check("proportions", self.proportions, len(self.buffers), "buffer")
        if self.batch_size is not None:
            checks.count("batch_size", self.batch_size)
        checks.flag("exact", self.exact)
        if self.exact and any(sampler.reads_written for sampler in self._samplers):
            raise ValueError(
                "exact: expected False for samplers that draw groups, as entries of all buffers "
                "take turns in a batch, got True."
            )

    def init(self, example: Item, device: Device = None) -> States:
        """Returns empty states, one for each buffer, on one device (see `ReplayBuffer.init`)."""
        return tuple(
            part.init(example) if isinstance(part, Sharded) else part.init(example, device)
            for part in self.buffers
        )

    def nbytes(self, example: Item, where: Memory = None) -> int:
        """Returns the number of bytes that `init(example)` allocates: see `ReplayBuffer.nbytes`."""
        return sum(part.nbytes(example, where) for part in self.buffers)

    def size(self, states: States) -> jax.Array:
        """Returns the number of transitions in each buffer, int32 `[K]`."""
        return jnp.stack([part.size(state) for part, state in self._pairs(states)])

    def can_sample(self, states: States) -> jax.Array:
        """Returns True if every buffer whose part is not empty can be sampled, bool `[]`."""
        # Without a batch size, ask each buffer for its own; 0 stands for buffers without a share.
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

    @check_state_argument
    def sample(
        self,
        states: States,
        key: PRNGKey,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        proportions: jax.Array | None = None,
        context: Any = None,
    ) -> Sample:
        """Samples a batch and leaves the states as they are; see `draw`."""
        inputs = DrawInputs(beta, context)
        return self._draw(states, key, batch_size, inputs, proportions)[1]

    @check_state_argument
    def draw(
        self,
        states: States,
        key: PRNGKey,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        proportions: jax.Array | None = None,
        context: Any = None,
    ) -> tuple[States, Sample]:
        """Samples a batch, and advances samplers that consume.

        Args:
            states: may be donated.
            key: a PRNG key. It is consumed.
            batch_size: B; None for the mix's.
            beta: the exponent of the weights, for all buffers that have them; None for their own.
            proportions: float `[K]`, for this batch, may be traced; None for the mix's. Every
                buffer then draws B items, from which its part is chosen at random, so that shapes
                do not depend on the proportions. This is an error with samplers that consume. If
                draws are counted, only chosen items count.
            context: a pytree for the samplers that take one, such as `jrb.Weighted`; else None.

        Returns:
            The states, and the batch.

        Raises:
            ValueError: no batch size is given; the proportions do not add up to 1 (outside `jit`;
                inside, they are scaled); the buffers' data differ in structure; a buffer has
                nothing to draw (outside `jit`; inside, its part of `mask` is False).
        """
        # With traced proportions each buffer draws a whole batch, of which most is thrown away.
        wasteful = [one for one in self._samplers if one.consumes or one.reads_written]
        if proportions is not None and wasteful:
            raise ValueError(
                f"proportions: expected none in the call, with {type(wasteful[0]).__name__}, which "
                "would lose a part of what it draws. Give them to Mix, as numbers."
            )
        return self._draw(states, key, batch_size, DrawInputs(beta, context), proportions)

    def _draw(
        self,
        states: States,
        key: jax.Array,
        batch_size: int | None,
        inputs: DrawInputs,
        proportions: Any,
    ) -> tuple[States, Sample]:
        size, inputs = draw_arguments(self._samplers, self.batch_size, key, batch_size, inputs)
        num_buffers = len(self.buffers)
        # One more, by which parts are chosen if proportions are traced.
        keys = jax.random.split(key, num_buffers + 1)
        if proportions is None:
            counts = self._counts(size)
            after, parts = self._draw_parts(states, keys, counts, counts, inputs)
            merge = _join_parts(self) if self.exact else _concatenate
            return tuple(after), self._within(merge, (), (parts,), merges=True)
        # Shapes may not depend on the proportions: each buffer draws B items, and of these its part
        # of the batch is chosen.
        if not isinstance(proportions, jax.core.Tracer):
            splitting.check("proportions", proportions, num_buffers, "buffer")
        values = jnp.asarray(copy_array(proportions)).astype(jnp.float32)
        if values.shape != (num_buffers,):
            raise ValueError(f"proportions: expected shape ({num_buffers},), got {values.shape}.")
        # Traced proportions cannot be checked: NaN and negative ones count as 0.
        values = jnp.maximum(jnp.nan_to_num(values), 0.0)
        per_shard = splitting.counts(jnp, values, size // self._shards, 1e-4)
        shares, counts = self._shards * per_shard, (size,) * num_buffers
        needed = counts if isinstance(shares, jax.core.Tracer) else tuple(shares.tolist())
        after, parts = self._draw_parts(states, keys, counts, needed, inputs)
        # Choose each buffer's part; each shard chooses by shares and a key of its own.
        choice: Any = shares, keys[-1]
        if self._shards_of_first is not None:
            each = jnp.broadcast_to(per_shard, (self._shards, num_buffers))
            choice = each, jax.random.split(keys[-1], self._shards)
        sample = self._within(_choose_parts(self), choice, (parts,), merges=True)
        # The buffers have counted all draws: count again, only items that are in the batch.
        drawn = steps.has_item(sample)
        for number, sampler in enumerate(self._samplers):
            if sampler.count_draws:
                own = sample.info["source"].reshape(-1, *(1,) * (drawn.ndim - 1)) == number
                samplers = states[number].sampler, after[number].sampler
                recounted = self._within(steps.recount, samplers, (sample, drawn & own))
                after[number] = after[number].replace(sampler=recounted)
        return tuple(after), sample

    def _draw_parts(
        self, states: States, keys: jax.Array, counts: tuple, needed: tuple, inputs: DrawInputs
    ) -> tuple[list[Any], list[Sample]]:
        """Draws `counts[k]` items from each buffer k, which may be empty if `needed[k]` is 0."""
        pairs, parts = self._pairs(states), []
        after: list[Any] = [state for _, state in pairs]
        for number, (buffer, state) in enumerate(pairs):
            count, quiet = counts[number], not needed[number]
            if not count:
                continue
            # A context is for the samplers that take one.
            takes_context = self._samplers[number].reads is not None
            own = inputs if takes_context else DrawInputs(inputs.beta)
            draw = buffer._draw if isinstance(buffer, Sharded) else partial(eager.draw, buffer)
            after[number], sample = draw(state, keys[number], count, own, quiet)
            info = {**sample.info, "source": jnp.full(count, number, jnp.int32)}
            parts.append(sample.replace(info=info, origin=self._origin))
        # Check that the parts can be joined.
        first, one = parts[0], lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        mend = "Give the buffers units and transforms with the same result, and let all or none "
        for other in parts[1:]:
            for name in ("data", "mask", "info"):
                want, got = (jax.tree.map(one, {name: vars(it)[name]}) for it in (first, other))
                pytree.check_like(want, got, "Mix", mend + "count.")
        return after, parts

    def update_priority(self, states: States, sample: Sample, priorities: Array) -> States:
        """Sets priorities of a sample, each in the buffer that the item is from.

        Args:
            states: may be donated.
            sample: a sample that this mix drew.
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
        # Each buffer gets the sample with the entries of all others masked.
        source, after = sample.info["source"], []
        for number, (part, state) in enumerate(self._pairs(states)):
            mine = (source == number).reshape(-1, *(1,) * (sample.mask.ndim - 1))
            own = sample.replace(mask=sample.mask & mine, origin=None)
            if self._samplers[number].prioritized:
                after.append(part.update_priority(state, own, priorities))
            else:
                # There is nothing to update, but later writes wait for the reads all the same.
                one = part.part if isinstance(part, Sharded) else part
                after.append(self._within(eager.wait_method(one), (state,), (own,)))
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

    def _counts(self, batch_size: int) -> tuple[int, ...]:
        """Returns the number of items of a batch from each buffer, multiples of the shards."""
        if batch_size % self._shards:
            raise ValueError(
                f"batch_size: expected a multiple of {self._shards}, the number of shards, got "
                f"{batch_size}."
            )
        values = np.asarray(self.proportions, np.float64)
        shares = splitting.counts(np, values, batch_size // self._shards)
        return tuple((self._shards * shares).tolist())

    @property
    def _origin(self) -> str:
        return f"Mix({', '.join(part._origin for part in self.buffers)})"

    @property
    def _samplers(self) -> list[Sampler]:
        parts = [part.buffer if isinstance(part, Sharded) else part for part in self.buffers]
        return [part.sampler for part in parts]

    @property
    def _shards_of_first(self) -> Sharded | None:
        """The first buffer, if the buffers are sharded; else None."""
        return first if isinstance(first := self.buffers[0], Sharded) else None

    @property
    def _shards(self) -> int:
        """The number of shards that each buffer has."""
        return 1 if self._shards_of_first is None else self._shards_of_first.shards

    def _within(
        self, function: Callable[..., Any], states: tuple, batches: tuple, merges: bool = False
    ) -> Any:
        """Calls a function of states and batches; if buffers are sharded, in each shard."""
        if self._shards_of_first is None:
            return function(*states, *batches)
        return self._shards_of_first.in_each(function, states, batches, merges)


def _concatenate(parts: list[Sample]) -> Sample:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


@per_description()
def _join_parts(mix: "Mix", parts: list[Sample]) -> Sample:
    """Returns the interleaved batch of all rows of the parts."""
    return _interleave(_concatenate(parts), len(parts))


@per_description()
def _choose_parts(mix: "Mix", shares: jax.Array, key: jax.Array, parts: list[Any]) -> Sample:
    """Returns `shares[k]` random rows of each part k, in order of k; `shares` is int32 `[K]`."""
    # Entry i of the batch is from part k if i is between the ends of the shares k - 1 and k.
    size = parts[0].indices.shape[0]
    place, ends = jnp.arange(size, dtype=jnp.int32), jnp.cumsum(shares, dtype=jnp.int32)
    source = jnp.sum(place[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    source = jnp.minimum(source, len(parts) - 1)
    within = place - (ends - shares)[source]
    # A part is the beginning of a random permutation of the rows that its buffer drew.
    seeds = random_bits.bits(key, (len(parts), 2))
    mixed = jnp.stack([random_bits.permute(seed, jnp.int32(size), place) for seed in seeds])
    row = source * size + mixed[source, within]
    sample = jax.tree.map(lambda leaf: leaf[row], _concatenate(parts))
    return _interleave(sample, len(parts)) if mix.exact else sample


def _interleave(sample: Sample, num_buffers: int) -> Sample:
    """Returns a batch whose sources alternate as evenly as their shares allow."""
    order = splitting.alternate_sources(jnp, sample.info["source"], num_buffers)
    return jax.tree.map(lambda leaf: leaf[order], sample)


Description = Buffer | Mix | Sharded
"""A description that can be saved, compiled and iterated over."""

AnyState = Any
"""A `BufferState`, or the tuple of them of a `Mix`; under `vmap`, arrays have leading axes."""
