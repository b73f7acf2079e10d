"""A sampler that draws an exact share of every batch with each of several samplers."""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import checks, pytree, splitting
from jrb._xla import random_bits
from jrb.keys import Path
from jrb.ring import Ring
from jrb.sum_tree import SMALLEST
from jrb.types import (
    Anchors,
    AnchorUpdate,
    Draw,
    DrawCounts,
    LimitedSampler,
    OrderedSampler,
    PrioritizedSampler,
    Sampler,
    ShardedSampler,
)
from jrb.types.messages import PartState


class MixtureState(DrawCounts):
    """The states of all samplers of a mixture, in their order."""

    states: tuple[Any, ...]


@pytree.component
class Mixture(LimitedSampler):
    """Draws with several samplers from one buffer, a fixed share of every batch with each.

    Use it to draw recent experience together with all experience, or new items together with items
    by priority. `Sample.info["sampler"]`, int32 `[B]`, is the index in `samplers` of the sampler
    that drew each entry. Shares of B are rounded by largest remainders, and samplers take turns
    within the batch, so that each part of it has nearly the same shares. With `fill=True`, the last
    sampler also draws the entries for which the others have nothing left: with shares (1.0, 0.0), a
    queue comes first, and the rest of the batch is uniform.

    `Sample.probabilities` are those of the sampler that drew the entry. Importance weights are (N
    P(i))^-beta for samplers with priorities and 1 for others; they are divided by the largest in
    the batch, unless all samplers with priorities have `normalize=None`. With beta = 1, the
    weighted mean is unbiased for each sampler, and so for all. `set_alpha`, `update_priority` and
    priorities given to `add` reach all samplers with priorities; `buffer.priorities` returns those
    of the first. `jrb.Sharded` takes a mixture only if one of its samplers consumes, such as a
    queue, or it has `max_draws`, and none has priorities: each shard then draws for itself.

    The class of an instance depends on its samplers: it is a `jrb.types.PrioritizedSampler` or an
    `OrderedSampler` if any of them is.

    Attributes:
        samplers: two or more samplers, none of which counts or limits its draws.
        shares: the share of each sampler in a batch, at least 0; they add up to 1.
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).
        fill: if True, the last sampler draws what others leave masked. It must not consume.
        max_draws: the number of draws, by all samplers together, after which an item is used up, as
            for `jrb.Uniform`; None for no limit. All samplers must be ones that take `max_draws`.

    Reference: Hafner et al., 2023, "Mastering diverse domains through world models", for the queue
    of new data beside uniform replay.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> sampler = jrb.Mixture((jrb.Queue(), jrb.Uniform()), (0.25, 0.75))
        >>> buffer = jrb.ReplayBuffer(100, batch_size=4, sampler=sampler)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(9)})
        >>> state, first = buffer.draw(state, jax.random.key(0))
        >>> state, second = buffer.draw(state, jax.random.key(1))
        >>> first.info["sampler"].tolist(), second.data["x"][second.info["sampler"] == 0].tolist()
        ([1, 0, 1, 1], [1])
    """

    samplers: tuple[Sampler, ...]
    shares: tuple[float, ...]
    count_draws: bool = False
    fill: bool = False
    max_draws: int | None = None
    consumes: ClassVar[bool] = property(  # pyright: ignore[reportAssignmentType]
        lambda self: self.max_draws is not None or any(one.consumes for one in self.samplers)
    )
    row_by_row: ClassVar[bool] = property(  # pyright: ignore[reportAssignmentType]
        lambda self: any(sampler.row_by_row for sampler in self.samplers)
    )
    reads: ClassVar[tuple[Path, ...] | None] = property(  # pyright: ignore[reportAssignmentType]
        lambda self: self._paths_read()
    )
    normalize: ClassVar[Any] = property(
        lambda self: "batch" if any(one.normalize for one in self._prioritized_samplers) else None
    )

    def __new__(cls, samplers: Any = (), *others: Any, **named: Any) -> Any:
        """Makes an instance of the class that has the contracts of these samplers."""
        return object.__new__(_choose_class(samplers) if cls is Mixture else cls)

    def __post_init__(self) -> None:
        is_tuple = isinstance(self.samplers, tuple) and len(self.samplers) > 1
        if not is_tuple or not all(isinstance(one, Sampler) for one in self.samplers):
            raise TypeError(
                f"samplers: expected a tuple of two samplers or more, got {self.samplers!r}."
            )
        # `dataclasses.replace` keeps the class, whatever the new samplers are.
        if _choose_class(self.samplers) is not type(self):
            raise TypeError(
                f"samplers: expected jrb.Mixture{self.samplers}, as its class fits them."
            )
        if not isinstance(self.shares, tuple) or not all(
            isinstance(share, int | float) for share in self.shares
        ):
            raise TypeError(f"shares: expected a tuple of numbers, got {self.shares!r}.")
        splitting.check("shares", self.shares, len(self.samplers), "sampler")
        super().__post_init__()
        checks.flag("fill", self.fill)
        last = list(self.samplers)[-1]
        if self.fill and last.consumes:
            raise ValueError(
                f"fill: expected a last sampler that does not consume, got {last!r}. "
                "Put the sampler that fills the batch last."
            )
        if any(one.reads_written for one in self.samplers):
            raise ValueError(
                "samplers: expected none that draws groups, as a mixture takes batches apart, got "
                f"{self.samplers!r}. Grouped(..., sampler=...) chooses among groups."
            )
        counting = [type(one).__name__ for one in self.samplers if one.count_draws]
        if counting:
            raise ValueError(
                f"samplers: expected none with count_draws=True or max_draws, got {counting}. The "
                "mixture counts the draws of all: Mixture(..., count_draws=True, max_draws=...)."
            )
        # Other samplers, such as queues, keep ranks that count all anchors.
        can_limit = lambda one: isinstance(one, LimitedSampler) and not isinstance(one, Mixture)
        others = [type(one).__name__ for one in self.samplers if not can_limit(one)]
        if self.max_draws is not None and others:
            raise ValueError(
                "max_draws: expected samplers that leave out used-up items, such as jrb.Uniform, "
                f"Newest, Prioritized and Weighted, got {others}."
            )

    def _paths_read(self) -> tuple[Path, ...] | None:
        """Returns the paths that any of the samplers reads; None if none needs facts."""
        each = [sampler.reads for sampler in self.samplers if sampler.reads is not None]
        return tuple(dict.fromkeys(itertools.chain(*each))) if each else None

    @property
    def _prioritized_samplers(self) -> list[PrioritizedSampler]:
        return [one for one in self.samplers if isinstance(one, PrioritizedSampler)]

    def init(self, ring: Ring) -> MixtureState:
        """Returns the states of all samplers."""
        return MixtureState(states=tuple(sampler.init(ring) for sampler in self.samplers))

    def on_write(
        self, ring: Ring, state: MixtureState, change: AnchorUpdate, anchors: Anchors
    ) -> MixtureState:
        """Passes the write to all samplers."""
        return self._map_samplers(state, lambda one, own: one.on_write(ring, own, change, anchors))

    def draw(
        self,
        ring: Ring,
        state: MixtureState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[MixtureState, Draw]:
        """Draws each sampler's share, with a separate key."""
        # Largest remainders round up: the numbers are known while tracing, so shapes are fixed.
        counts = splitting.counts(np, np.asarray(self.shares, np.float64), batch_size)
        keys = jax.random.split(key, len(self.samplers) + self.fill)
        states, draws = list(state.states), []
        last = len(self.samplers) - 1
        for number, sampler in enumerate(self.samplers):
            count = batch_size if self.fill and number == last else int(counts[number])
            if not count:
                continue
            states[number], drawn = sampler.draw(
                ring, states[number], anchors, keys[number], count, beta
            )
            # Weights without a divisor can be compared: (N P(i))^-beta, as in Schaul et al.,
            # section 3.4, with the probability that this sampler drew the anchor.
            if sampler.prioritized and isinstance(sampler, ShardedSampler):
                odds = jnp.maximum(anchors.count, 1).astype(jnp.float32) * drawn.probabilities
                log_odds = jnp.log(jnp.where(odds > 0, odds, 1.0))
                weights = jnp.maximum(jnp.exp(-sampler.exponent(beta) * log_odds), SMALLEST)
                drawn = drawn.replace(weights=jnp.where(drawn.mask, weights, 0.0))
            draws.append(drawn)
        # Interleave the shares: each part of the batch has nearly the same of each.
        source = np.repeat(np.arange(len(self.samplers), dtype=np.int32), counts)
        order = splitting.alternate_sources(np, source, len(self.samplers))
        drawn = jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order], *draws)
        drawn = drawn.replace(sampler=jnp.asarray(source[order]))
        drawn = self._fill_batch(keys[-1], drawn, draws[-1]) if self.fill else drawn
        # One divisor for all samplers: two would scale their losses against each other.
        drawn = drawn if self.normalize is None else drawn.normalize_weights()
        return state.replace(states=tuple(states)), drawn

    def _fill_batch(self, key: jax.Array, drawn: Draw, others: Draw) -> Draw:
        """Returns the batch with entries of the last sampler, `others`, where it has none."""
        # In a random order, as stratified draws ascend, and only some of them are taken.
        last = len(self.samplers) - 1
        at = jnp.argsort(random_bits.bits(key, drawn.mask.shape))
        others = others.replace(sampler=jnp.full(drawn.mask.shape, last, jnp.int32))
        is_filled = (drawn.sampler == last) | ~drawn.mask
        return jax.tree.map(lambda a, b: jnp.where(is_filled, b[at], a), drawn, others)

    def ready(self, state: MixtureState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if all samplers with a share are ready; or the last one, if it fills."""
        if self.fill:
            return self.samplers[-1].ready(state.states[-1], anchors, batch_size)
        # Of a batch of unknown size, every sampler with a share may draw a part.
        values = np.asarray(self.shares, np.float64)
        counts = values > 0 if batch_size is None else splitting.counts(np, values, batch_size)
        triples = zip(self.samplers, state.states, counts, strict=True)
        each = [
            sampler.ready(own, anchors, None if batch_size is None else int(count))
            for sampler, own, count in triples
            if count
        ]
        return jnp.all(jnp.stack(each))

    def import_state(
        self, state: MixtureState, old: MixtureState, slots: jax.Array, new_slots: jax.Array
    ) -> MixtureState:
        """Takes over the states of samplers that have the same class at the same index."""
        states = list(state.states)
        for number, before in enumerate(old.states[: len(states)]):
            own = states[number]
            # Another class has another state; its items then count as new ones.
            if type(own) is type(before):
                sampler = self.samplers[number]
                states[number] = sampler.import_state(own, before, slots, new_slots)
        return state.replace(states=tuple(states))

    def rebuild_index(
        self, ring: Ring, state: MixtureState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> MixtureState:
        """Passes the new anchors to all samplers."""
        return self._map_samplers(
            state, lambda one, own: one.rebuild_index(ring, own, entered, old, new)
        )

    def reset(self, ring: Ring, state: MixtureState, token: jax.Array) -> MixtureState:
        """Resets all samplers."""
        return self._map_samplers(state, lambda one, own: one.reset(ring, own, token))

    def _map_samplers(
        self, state: MixtureState, call: Callable[[Any, PartState], Any], kind: type = Sampler
    ) -> MixtureState:
        """Returns the state after `call(sampler, state)` for each sampler of class `kind`."""
        pairs = zip(self.samplers, state.states, strict=True)
        return state.replace(
            states=tuple(call(one, own) if isinstance(one, kind) else own for one, own in pairs)
        )


@pytree.component
class OrderedMixture(Mixture, OrderedSampler):
    """A mixture in which a sampler uses the order of anchors."""

    def check(self, ring: Ring, unit: Any) -> None:
        """Raises ValueError if the order of anchors does not fit one of the samplers."""
        for sampler in self.samplers:
            if isinstance(sampler, OrderedSampler):
                sampler.check(ring, unit)

    def num_pending(self, state: MixtureState, anchors: Anchors) -> jax.Array | None:
        """Returns the greatest number of newest anchors that a sampler still has to draw."""
        pairs = zip(self.samplers, state.states, strict=True)
        pending = [
            one.num_pending(own, anchors) for one, own in pairs if isinstance(one, OrderedSampler)
        ]
        counts = [count for count in pending if count is not None]
        return jnp.max(jnp.stack(counts)) if counts else None


@pytree.component
class PrioritizedMixture(Mixture, PrioritizedSampler):
    """A mixture in which a sampler has priorities."""

    prioritized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(getattr(one, "normalize", None) == "buffer" for one in self._prioritized_samplers):
            raise ValueError(
                "samplers: expected normalize='batch' or None in a Mixture, got 'buffer': the "
                "weights of all samplers are divided by one number."
            )

    @property
    def takes_priorities(self) -> bool:  # pyright: ignore
        """True if any of the samplers takes priorities."""
        return any(one.takes_priorities for one in self._prioritized_samplers)

    def attach(self, state: MixtureState, has_delayed_anchors: bool) -> MixtureState:
        """Calls `attach` of all samplers with priorities."""
        attach = lambda one, own: one.attach(own, has_delayed_anchors)
        return self._map_samplers(state, attach, PrioritizedSampler)

    def priorities(self, state: MixtureState) -> jax.Array:
        """Returns the priorities of the first sampler that has priorities."""
        pairs = zip(self.samplers, state.states, strict=True)
        return next(
            one.priorities(own) for one, own in pairs if isinstance(one, PrioritizedSampler)
        )

    def update(
        self,
        ring: Ring,
        state: MixtureState,
        slots: jax.Array,
        priorities: jax.Array,
        ok: jax.Array,
    ) -> MixtureState:
        """Sets priorities in all samplers that have them, whichever drew the anchors."""
        update = lambda one, own: one.update(ring, own, slots, priorities, ok)
        return self._map_samplers(state, update, PrioritizedSampler)

    def assign(
        self,
        state: MixtureState,
        slots: jax.Array,
        priorities: jax.Array,
        highest: jax.Array | float | None = None,
    ) -> MixtureState:
        """Sets priorities in all samplers that have them."""
        assign = lambda one, own: one.assign(own, slots, priorities, highest)
        return self._map_samplers(state, assign, PrioritizedSampler)

    def set_alpha(self, state: MixtureState, alpha: jax.Array | float) -> MixtureState:
        """Sets the exponent of all samplers with priorities."""
        return self._map_samplers(
            state, lambda one, own: one.set_alpha(own, alpha), PrioritizedSampler
        )

    def drop(
        self, ring: Ring, state: MixtureState, slots: jax.Array, ok: jax.Array
    ) -> MixtureState:
        """Drops anchors from samplers with priorities; raises if others would still draw them."""
        others = [type(one).__name__ for one in self.samplers if not one.prioritized]
        # With `max_draws`, these get only anchors that have draws left and were not dropped.
        if others and self.max_draws is None:
            raise TypeError(
                f"drop: expected samplers that can leave anchors out, got {others}, which would "
                "draw them still."
            )
        drop = lambda one, own: one.drop(ring, own, slots, ok)
        return self._map_samplers(state, drop, PrioritizedSampler)


@pytree.component
class PrioritizedOrderedMixture(PrioritizedMixture, OrderedMixture):
    """A mixture with priorities in which a sampler uses the order of anchors."""


def _choose_class(samplers: Any) -> type[Mixture]:
    """Returns the class of a mixture of these samplers."""
    members = samplers if isinstance(samplers, tuple) else ()
    # By the class, a buffer knows what it can do: `update_priority`, `BlockWhenFull`, orders.
    has = lambda kind: any(isinstance(one, kind) for one in members)
    if has(PrioritizedSampler):
        return PrioritizedOrderedMixture if has(OrderedSampler) else PrioritizedMixture
    return OrderedMixture if has(OrderedSampler) else Mixture
