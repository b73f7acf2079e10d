"""Draws from one server or several: asked for, and taken when they are there."""

import collections
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jrb.remote import shards
from jrb.remote.gate import Permits, granted, ray
from jrb.remote.setup import Setup
from jrb.state import Device, Sample

PAUSE = 0.02
"""Seconds between two looks at a buffer in which there is nothing to draw."""


class RemoteDraw(NamedTuple):
    """A batch that is under way.

    Attributes:
        parts: what each shard will give, references of Ray.
        each: the facts of each shard; nothing if there is but one.
        batch_size: B.
        beta: of the weights, or None.
    """

    parts: list[Any]
    each: list[Any]
    batch_size: int
    beta: float | None


class Drawing:
    """Asks the servers for batches. With several, the facts of each go to all others.

    From these each computes by itself how much of the batch is its part: nothing waits here.
    """

    def __init__(self, setup: Setup, servers: list[Any], permits: Permits | None) -> None:
        self._setup, self._servers = setup, servers
        self.permits: Permits | None = permits
        self._number: int = 0

    def ask(
        self, batch_size: int, betas: list[float | None], ticket: int | None = None
    ) -> list[RemoteDraw]:
        """Asks for batches, as many as there are betas, in one call, with a permit for them."""
        number, count = self._number, len(betas)
        self._number += count
        several = self._servers if len(self._servers) > 1 else []
        each = [server.facts.remote() for server in several]
        parts: list[list[Any]] = []
        for server in self._servers:
            if count == 1:  # Ray takes no generator that yields one thing for what it yields
                draw = server.draw.remote
                parts.append([draw(batch_size, *betas, number, *each, ticket=ticket)])
            else:
                draws = server.draws.options(num_returns=count).remote
                parts.append(draws(batch_size, betas, number, *each, ticket=ticket))
        return [
            RemoteDraw([its[place] for its in parts], each, batch_size, beta)
            for place, beta in enumerate(betas)
        ]

    def num_ready(self, draws: list[RemoteDraw]) -> int:
        """Returns how many of them, from the first on, can be taken at once."""
        parts = [part for draw in draws for part in draw.parts]
        if not parts:
            return 0
        ready = set(ray().wait(parts, num_returns=len(parts), timeout=0)[0])
        waits = (place for place, draw in enumerate(draws) if not ready.issuperset(draw.parts))
        return next(waits, len(draws))

    def draw(
        self, batch_size: int, beta: float | None, device: Device, patient: bool
    ) -> Sample | None:
        """Draws a batch; if `patient`, asks until there is something to draw."""
        while True:
            with granted(self.permits, "sample", batch_size) as ticket:
                draw = self.ask(batch_size, [beta], ticket)[0]
            sample = self.take(draw, device)
            if sample is not None or not patient:
                return sample
            time.sleep(PAUSE)

    def take(self, draw: RemoteDraw, device: Device, again: bool = True) -> Sample | None:
        """Returns the batch, on a device; None if there was nothing to draw.

        Where a shard began anew after it had told its facts, its part may be missing: then another
        batch is drawn, once.
        """
        parts = ray().get(draw.parts)
        count = sum(len(part.indices) for part in parts if part is not None)
        if 0 < count < draw.batch_size and again:
            return self.take(self.ask(draw.batch_size, [draw.beta])[0], device, again=False)
        if count < draw.batch_size:
            return None
        if not draw.each:
            return jax.device_put(parts[0], device)
        each = ray().get(draw.each)
        return jax.device_put(shards.combine(self._setup.buffer, parts, each, draw.beta), device)


class Ahead:
    """An endless iterator over batches, made by `Remote.ahead`.

    `depth` draws are under way, or have come and are on the device. There is no thread: Ray draws
    and sends, and JAX copies, while the caller computes.
    """

    def __init__(
        self,
        drawing: Drawing,
        before: Callable[[], None],
        batch_size: int,
        depth: int,
        beta: float | Callable[[int], float] | None,
        device: Device,
    ) -> None:
        self._drawing, self._before, self._device = drawing, before, device
        self._batch_size, self._depth, self._beta = batch_size, depth, beta
        self._group: int = max(1, depth // 2)  # a call has a cost of its own
        self._asked: int = 0
        self._request: tuple[int, Any] | None = None  # a permit for the next group
        self._line: collections.deque[RemoteDraw | Sample] = collections.deque()

    def __iter__(self) -> "Ahead":
        return self

    def __next__(self) -> Sample:
        """Returns the next batch; waits until there is something to draw."""
        sample = None
        while sample is None:
            self._fill(patient=True)
            first = self._line[0]  # an interrupt of the wait leaves it there
            is_draw = isinstance(first, RemoteDraw)
            sample = self._drawing.take(first, self._device) if is_draw else first
            self._line.popleft()
            if sample is None:
                time.sleep(PAUSE)
        try:
            self._fill(patient=False)
            draws = {n: one for n, one in enumerate(self._line) if isinstance(one, RemoteDraw)}
            count = self._drawing.num_ready(list(draws.values()))
            for place, draw in itertools.islice(draws.items(), count):
                batch = self._drawing.take(draw, self._device)
                if batch is None:
                    break
                self._line[place] = batch
        except BaseException:  # also an interrupt: the next call returns the batch
            self._line.appendleft(sample)
            raise
        return sample

    def _fill(self, patient: bool) -> None:
        """Asks for more batches, if the limits allow it."""
        self._before()
        while len(self._line) + self._group <= self._depth and self._is_allowed(patient):
            numbers = range(self._asked, self._asked + self._group)
            betas = [self._beta(n) if callable(self._beta) else self._beta for n in numbers]
            request, self._request = self._request, None
            ticket = None if request is None else request[0]
            self._line.extend(self._drawing.ask(self._batch_size, betas, ticket))
            self._asked += self._group

    def _is_allowed(self, patient: bool) -> bool:
        """Returns whether limits let more pass; waits for that, or for the first batch in line."""
        permits = self._drawing.permits
        if permits is None:
            return True
        if self._request is None:
            self._request = permits.request("sample", self._batch_size * self._group)
        reply = self._request[1]
        first: Any = self._line[0] if self._line else None
        others = first.parts[:1] if isinstance(first, RemoteDraw) else []
        wait = patient and not isinstance(first, Sample)
        ready, _ = ray().wait([reply, *others], timeout=None if wait else 0)
        if reply not in ready:
            return False
        ray().get(reply)  # which raises what the gate refused
        return True

    def __del__(self) -> None:
        if self._request is not None and self._drawing.permits is not None:
            self._drawing.permits.cancel(self._request[0])
