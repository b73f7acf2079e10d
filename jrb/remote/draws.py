"""Draws batches from one or several servers, in proportion to mass. S shards, B batch."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core.eager import explain_no_draw
from jrb._core.steps import drawable_anchors, has_item
from jrb._xla.compiling import by_description
from jrb.authoring import context_of
from jrb.buffer import ReplayBuffer
from jrb.remote.gate import LongWait, Permits, acquire_permit, log, ray
from jrb.remote.setup import Setup
from jrb.state import BufferState, Device, Sample
from jrb.types import ShardedSampler
from jrb.types.messages import DrawInputs

PAUSE = 0.02
"""The seconds to wait before another draw, if the buffer had no valid start."""


class ShardFacts(NamedTuple):
    """The statistics of a shard, which its server reports."""

    mass: float  # the sum of (p + eps)^alpha over all anchors; without priorities their number
    least: float  # the least mass of an anchor; infinite if unknown
    anchors: int  # the number of anchors
    size: int  # the number of items


@by_description()
def measure_shard(buffer: ReplayBuffer, state: BufferState) -> tuple[Any, ...]:
    """Returns the fields of a shard's `ShardFacts` as arrays; `state` needs no storage."""
    context, sampler = context_of(buffer, state.writer), buffer.sampler
    anchors = drawable_anchors(buffer, state)
    # Such samplers have only one shard: every mass above 0 serves, here the number of anchors.
    if sampler.reads is not None or not isinstance(sampler, ShardedSampler):
        return anchors.count, jnp.float32(jnp.inf), anchors.count, context.held.size
    stats = sampler.stats(buffer.ring, state.sampler, anchors)
    return stats.mass, stats.min_mass, stats.num_anchors, context.held.size


def can_draw(each: list[ShardFacts], min_size: int | None) -> bool:
    """Returns True if all shards together hold `min_size` items, and an anchor with mass."""
    enough = min_size is None or sum(one.size for one in each) >= min_size
    return enough and any(one.mass > 0 for one in each)


def divide_batch(each: list[ShardFacts], batch_size: int, seed: list[int]) -> list[int]:
    """Returns the number of items of a batch from each shard, on average exactly by its mass.

    This is systematic sampling: the cumulative sums of B m_s / M are shifted by one uniform number
    and rounded down.
    """
    masses = np.array([one.mass for one in each], np.float64)
    bounds = np.cumsum(masses) / masses.sum() * batch_size
    # Rounding must neither lose nor add an item at the end.
    bounds[-1] = batch_size
    ends = np.floor(bounds + np.random.default_rng(seed).random()).astype(int)
    ends[-1] = batch_size
    return np.diff(ends, prepend=0).tolist()


def combine_parts(
    buffer: ReplayBuffer, parts: list[Sample | None], each: list[ShardFacts], beta: float | None
) -> Sample:
    """Returns the batch of all parts, with probabilities and weights over all shards.

    Weights are (n P(i))^-beta over the n anchors of all shards, normalized as the sampler does.
    """
    # Multiply the probability of each item in its shard by that of the shard.
    masses = np.array([one.mass for one in each], np.float64)
    shard_probabilities = masses / masses.sum()
    scaled = [
        part.replace(probabilities=part.probabilities * np.float32(shard_probabilities[shard]))
        for shard, part in enumerate(parts)
        if part is not None
    ]
    batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *scaled)
    sampler = buffer.sampler
    # Such a sampler has only one shard, which computed the weights.
    if not isinstance(sampler, ShardedSampler):
        return batch
    # Masked items get a probability of 1, so that the minimum ignores them.
    is_real = has_item(batch)
    probabilities = np.where(is_real, batch.probabilities, 1).astype(np.float64)
    # Divide by the probability that has weight 1: that of a uniform draw, or the least.
    divisor = 1 / sum(one.anchors for one in each)
    if sampler.normalize == "batch":
        divisor = probabilities[is_real].min(initial=1)
    elif sampler.normalize == "buffer":
        divisor = min(one.least for one in each) / masses.sum()
        # If no shard knows its least mass, the least probability in the batch replaces it.
        divisor = divisor if 0 < divisor < 1 else probabilities.min()
    weights = np.where(is_real, (probabilities / divisor) ** -float(sampler.exponent(beta)), 0)
    return batch.replace(weights=weights.astype(np.float32))


class RemoteDraw(NamedTuple):
    """A batch that servers are drawing."""

    parts: list[Any]  # Ray references to the part of each shard
    each: list[Any]  # Ray references to the facts of each shard; empty if there is one shard
    batch_size: int
    inputs: DrawInputs


class Drawing:
    """Requests batches from the servers, without waiting.

    If there are several servers, each receives the facts of all, from which it computes its part.
    """

    def __init__(self, setup: Setup, servers: list[Any], permits: Permits | None) -> None:
        self._setup, self._servers = setup, servers
        self.permits: Permits | None = permits
        self.consumes: bool = setup.buffer.sampler.consumes
        self._number: int = 0

    def ask(
        self, batch_size: int, inputs: list[DrawInputs], ticket: int | None = None
    ) -> list[RemoteDraw]:
        """Requests a batch for each of `inputs`, under one permit with the number `ticket`."""
        number, count = self._number, len(inputs)
        self._number += count
        # Several servers divide a batch by the facts of all, which Ray sends from server to server.
        several = self._servers if len(self._servers) > 1 else []
        each = [server.facts.remote() for server in several]
        parts: list[list[Any]] = []
        for server in self._servers:
            # With `num_returns=1`, Ray would return the generator itself.
            if count == 1:
                draw = server.draw.remote
                parts.append([draw(batch_size, *inputs, number, *each, ticket=ticket)])
            else:
                draws = server.draws.options(num_returns=count).remote
                parts.append(draws(batch_size, inputs, number, *each, ticket=ticket))
        return [
            RemoteDraw([of_server[index] for of_server in parts], each, batch_size, own)
            for index, own in enumerate(inputs)
        ]

    def draw(
        self, batch_size: int, inputs: DrawInputs, device: Device, patient: bool
    ) -> Sample | None:
        """Returns a batch, or None if there is no valid start; if `patient`, waits for one."""
        wait = LongWait(self.describe)
        while True:
            with acquire_permit(self.permits, "sample", batch_size) as ticket:
                draw = self.ask(batch_size, [inputs], ticket)[0]
            sample = self.take(draw, device)
            if sample is not None or not patient:
                return sample
            wait.pause(PAUSE)

    def describe(self) -> str:
        """Returns why nothing can be drawn, and the cure."""
        each = ray().get([server.facts.remote() for server in self._servers])
        size, anchors = sum(one.size for one in each), sum(one.anchors for one in each)
        return explain_no_draw(self._setup.buffer, size, anchors)

    def take(self, draw: RemoteDraw, device: Device, again: bool = True) -> Sample | None:
        """Returns the batch of a draw on a device; None if there was no valid start.

        If a shard was reset after it reported its facts, its part may be missing: if `again`, one
        more batch is drawn then.
        """
        # Wait for the parts, and count their items.
        parts = ray().get(draw.parts)
        count = sum(len(part.indices) for part in parts if part is not None)
        if 0 < count < draw.batch_size and again:
            return self.take(self.ask(draw.batch_size, [draw.inputs])[0], device, again=False)
        if count < draw.batch_size:
            return None
        batch = parts[0]
        if draw.each:
            each = ray().get(draw.each)
            batch = combine_parts(self._setup.buffer, parts, each, draw.inputs.beta)
        with self._setup.x64_context():
            return jax.device_put(batch, device)


class Ahead:
    """An endless iterator over batches, made by `Remote.ahead`.

    It keeps `depth` batches, which are being drawn or are on the device. It needs no thread: Ray
    draws and sends, and JAX copies, while the caller computes.
    """

    def __init__(
        self,
        drawing: Drawing,
        before: Callable[[], None],
        batch_size: int,
        depth: int,
        inputs: DrawInputs,
        device: Device,
    ) -> None:
        self._drawing, self._before, self._device = drawing, before, device
        self._batch_size, self._depth, self._inputs = batch_size, depth, inputs
        # Each call has a fixed cost, so one call requests half of the batches.
        self._group: int = max(1, depth // 2)
        self._num_requested: int = 0
        self._is_closed: bool = False
        self._queue: collections.deque[RemoteDraw | Sample] = collections.deque()

    def __iter__(self) -> "Ahead":
        return self

    def __next__(self) -> Sample:
        """Returns the next batch; waits until the buffer has a valid start."""
        # Take the first batch, waiting for it if it is still being drawn.
        sample, wait = None, LongWait(self._drawing.describe)
        while sample is None:
            if not self._queue:
                self._fill(patient=True)
            if not self._queue:
                raise StopIteration
            # It is removed only after the wait, which may be interrupted.
            first = self._queue[0]
            is_draw = isinstance(first, RemoteDraw)
            sample = self._drawing.take(first, self._device) if is_draw else first
            self._queue.popleft()
            if sample is None:
                wait.pause(PAUSE)
        try:
            # Request more batches, and start to copy to the device those that were drawn meanwhile.
            self._fill(patient=False)
            draws = ((n, one) for n, one in enumerate(self._queue) if isinstance(one, RemoteDraw))
            for index, draw in list(draws):
                finished, _ = ray().wait(draw.parts, num_returns=len(draw.parts), timeout=0)
                is_ready = len(finished) == len(draw.parts)
                batch = self._drawing.take(draw, self._device) if is_ready else None
                if batch is None:
                    break
                self._queue[index] = batch
        # Even after an interrupt, the next call returns this batch.
        except BaseException:
            self._queue.appendleft(sample)
            raise
        return sample

    def close(self) -> None:
        """Ends the requests. `next` still returns the batches that were drawn, then ends."""
        self._is_closed = True

    def _fill(self, patient: bool) -> None:
        """Requests batches up to the depth, if limits allow it; if `patient`, waits for the first.

        It keeps no permit for later, which would hold back all others until `next` is called.
        """
        self._before()
        size = self._batch_size * self._group
        while len(self._queue) + self._group <= self._depth and not self._is_closed:
            numbers = range(self._num_requested, self._num_requested + self._group)
            of_batch = lambda n: (one(n) if callable(one) else one for one in self._inputs)
            inputs = [DrawInputs(*of_batch(n)) for n in numbers]
            waits = patient and not self._queue
            with acquire_permit(self._drawing.permits, "sample", size, patient=waits) as ticket:
                # Without waiting, 0 says that the limits allow no samples now.
                if ticket == 0:
                    return
                self._queue.extend(self._drawing.ask(self._batch_size, inputs, ticket))
                self._num_requested += self._group

    def __del__(self) -> None:
        if self._queue and self._drawing.consumes:
            log.warning("ahead: %d batches are lost: see Ahead.close.", len(self._queue))
