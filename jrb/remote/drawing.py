"""Draws from one server or several, in two halves: asked for, and taken when they are there."""

import dataclasses
import time
from typing import Any

import jax

from jrb.remote import shards
from jrb.remote.library import ray
from jrb.remote.permits import Permits, granted
from jrb.remote.setup import Setup
from jrb.state import Device, Sample


@dataclasses.dataclass(frozen=True)
class Draw:
    """A batch that is under way.

    Attributes:
        parts: what each shard will give, references of Ray.
        each: what each shard says that it holds; nothing if there is but one.
        batch_size: B.
        beta: of the weights, or None.
    """

    parts: list[Any]
    each: list[Any]
    batch_size: int
    beta: float | None


PAUSE = 0.02
"""Seconds between two looks at a buffer in which there is nothing to draw."""


class Drawing:
    """What asks the servers for batches. With several, what they hold goes from one to another.

    Each computes by itself from that how much of the batch is its part: nobody waits here.
    """

    def __init__(self, setup: Setup, servers: list[Any], permits: Permits | None) -> None:
        self._setup, self._servers = setup, servers
        self.permits: Permits | None = permits
        self._number = 0

    def ask(
        self, batch_size: int, betas: list[float | None], ticket: int | None = None
    ) -> list[Draw]:
        """Asks for batches, as many as there are betas, in one call, with a permit for them."""
        servers, number, count = self._servers, self._number, len(betas)
        self._number += count
        each = [server.facts.remote() for server in servers] if len(servers) > 1 else []
        parts = [self._asked(server, batch_size, betas, number, ticket, each) for server in servers]
        return [
            Draw(list(its), each, batch_size, beta)
            for *its, beta in zip(*parts, betas, strict=True)
        ]

    @staticmethod
    def _asked(
        server: Any,
        batch_size: int,
        betas: list[float | None],
        number: int,
        ticket: int | None,
        each: list[Any],
    ) -> list[Any]:
        """References to what one server gives of each batch."""
        permit = {} if ticket is None else {"ticket": ticket}
        if len(betas) == 1:  # Ray takes no generator that yields one thing for what it yields
            return [server.draw.remote(batch_size, *betas, number, *each, **permit)]
        several = server.draws.options(num_returns=len(betas))
        return several.remote(batch_size, betas, number, *each, **permit)

    def there(self, draws: list[Draw]) -> int:
        """How many of them, from the first on, could be taken at once."""
        parts = [part for draw in draws for part in draw.parts]
        if not parts:
            return 0
        found = set(ray().wait(parts, num_returns=len(parts), timeout=0)[0])
        waits = (n for n, draw in enumerate(draws) if not found.issuperset(draw.parts))
        return next(waits, len(draws))

    def draw(
        self, batch_size: int, beta: float | None, device: Device, patient: bool
    ) -> Sample | None:
        """A batch, on a device; where it is `patient`, it asks until there is something to draw."""
        while True:
            with granted(self.permits, "sample", batch_size) as ticket:
                draw = self.ask(batch_size, [beta], ticket)[0]
            sample = self.take(draw, device)
            if sample is not None or not patient:
                return sample
            time.sleep(PAUSE)

    def take(self, draw: Draw, device: Device, again: bool = True) -> Sample | None:
        """The batch, on a device; None where there was nothing to be drawn.

        Where a shard was begun anew after it had said what it holds, its part may be missing: then
        another batch is drawn, once.
        """
        parts = ray().get(draw.parts)
        given = sum(len(part.indices) for part in parts if part is not None)
        if 0 < given < draw.batch_size and again:
            return self.take(self.ask(draw.batch_size, [draw.beta])[0], device, again=False)
        if given < draw.batch_size:
            return None
        if not draw.each:
            return jax.device_put(parts[0], device)
        each = ray().get(draw.each)
        return jax.device_put(shards.joined(self._setup.buffer, parts, each, draw.beta), device)
