"""What a process asks the gate for."""

import contextlib
import dataclasses
import secrets
import weakref
from collections.abc import Iterator
from typing import Any

from jrb.remote.library import ray


@dataclasses.dataclass(frozen=True)
class Request:
    """A permit that was asked for: its number, and a reference that is there when it is granted."""

    ticket: int
    reply: Any


class Permits:
    """Asks the gate for permits, for one holder of a `Remote`.

    The gate forgets them when `stay` ends, or its reference fails as this process died.
    """

    def __init__(self, gate: Any, servers: list[Any]) -> None:
        self._gate, self._caller = gate, secrets.randbits(63)
        self._shards = list(range(len(servers)))
        stay = gate.stay.remote(self._caller, servers)
        self._calls = stay, gate.watch.remote(self._caller, [stay])
        weakref.finalize(self, self._leave, gate, self._caller).atexit = False

    @staticmethod
    def _leave(gate: Any, caller: int) -> Any:
        return gate.leave.remote(caller) if ray().is_initialized() else None

    def request(self, side: str, count: int, shard: int | None = None) -> Request:
        """Asks for so many items of a shard, or samples of all shards."""
        ticket, shards = secrets.randbits(63), self._shards if shard is None else [shard]
        reply = self._gate.wait.remote(side, count, ticket, shards, self._caller)
        return Request(ticket, reply)

    def cancel(self, request: Request) -> None:
        """Gives a permit back that is not used."""
        if ray().is_initialized():
            self._gate.cancel.remote(request.ticket)


@contextlib.contextmanager
def granted(
    permits: Permits | None, side: str, count: int, shard: int | None = None
) -> Iterator[int | None]:
    """Waits for a permit and gives its ticket, None where none is needed.

    The permit goes back to the gate if the block fails.
    """
    if permits is None or not count:
        yield None
        return
    request = permits.request(side, count, shard)
    try:
        ray().get(request.reply)
        yield request.ticket
    except BaseException:
        permits.cancel(request)
        raise
