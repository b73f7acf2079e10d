"""Draws from one server or several, in two halves: asked for, and taken when they are there."""

import dataclasses
from typing import Any

import jax

from jrb.remote import shards
from jrb.remote.library import ray
from jrb.remote.setup import Setup
from jrb.state import Device, Sample


@dataclasses.dataclass(frozen=True)
class Draw:
    """A batch that is under way.

    Attributes:
        parts: what each shard will give, references of Ray.
        each: what each shard says that it holds; nothing if there is but one.
        beta: of the weights, or None.
    """

    parts: list[Any]
    each: list[Any]
    beta: float | None


class Drawing:
    """What asks the servers for batches. With several, what they hold goes from one to another.

    Each computes by itself from that how much of the batch is its part: nobody waits here.
    """

    def __init__(self, setup: Setup, servers: list[Any], gate: Any) -> None:
        self._setup, self._servers, self._gate = setup, servers, gate
        self._number = 0

    def permit(self, batch_size: int) -> Any:
        """A reference that is there when a batch may be drawn; None where nothing holds it back."""
        return None if self._gate is None else self._gate.wait.remote("sample", batch_size)

    def ask(self, batch_size: int, beta: float | None) -> Draw:
        """Asks for a batch."""
        servers, number = self._servers, self._number
        self._number += 1
        if len(servers) == 1:
            return Draw([servers[0].draw.remote(batch_size, beta, number)], [], beta)
        each = [server.facts.remote() for server in servers]
        parts = [server.draw.remote(batch_size, beta, number, *each) for server in servers]
        return Draw(parts, each, beta)

    def is_there(self, draw: Draw) -> bool:
        """Whether a batch could be taken at once."""
        return len(ray().wait(draw.parts, num_returns=len(draw.parts), timeout=0)[0]) == len(
            draw.parts
        )

    def take(self, draw: Draw, device: Device) -> Sample | None:
        """The batch, on a device; None where there was nothing to be drawn."""
        parts = ray().get(draw.parts)
        if all(part is None for part in parts):
            return None
        if not draw.each:
            return jax.device_put(parts[0], device)
        each = ray().get(draw.each)
        return jax.device_put(shards.joined(self._setup.buffer, parts, each, draw.beta), device)
