"""The gate, an actor that makes inserts or samples wait to keep the `limits`, and its client.

Before each call, a caller requests a permit for a number of inserts or samples. Servers report
their totals of both after each call. When the gate decides on an insert, it adds the permits for
inserts that are not reported yet, but not those for samples, and vice versa. So the permits of a
caller that dies cannot count for the other side. `tests/remote/test_gate.py` guards that.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from jrb.authoring import require
from jrb.limits import SampleToInsert


def ray() -> Any:
    """Imports and returns Ray."""
    return require("ray", "ray")


@dataclasses.dataclass
class Permit:
    """A caller's request, kept from its arrival until all its servers have reported the work."""

    side: str  # "insert" or "sample"
    count: int  # the number of items or samples
    caller: int  # the random number that identifies the caller
    shards: set[int]  # the shards that have not reported yet
    granted: bool = False


class RemoteGate:
    """The actor that compares the inserts and samples of all shards.

    A restart loses only permits, because the gate asks the servers for their totals.
    """

    def __init__(self, limits: SampleToInsert) -> None:
        self._limits = limits
        self._totals: dict[int, tuple[int, int]] = {}  # the inserts and samples of each shard
        self._permits: dict[int, Permit] = {}  # by ticket, the number of a permit
        self._largest: dict[str, int] = {"insert": 0, "sample": 0}  # the largest requests so far
        self._departures: dict[int, asyncio.Event] = {}  # by caller, set when it leaves
        self._servers: Sequence[Any] = ()
        self._opened: asyncio.Event = asyncio.Event()
        self._changed: asyncio.Condition = asyncio.Condition()

    async def stay(self, caller: int, servers: Sequence[Any]) -> None:
        """Waits until the caller leaves. The first caller provides the servers.

        If Ray restarts the gate, it repeats this call.
        """
        departure = self._departures.setdefault(caller, asyncio.Event())
        if not self._opened.is_set():
            totals = await asyncio.gather(*[server.totals.remote() for server in servers])
            for shard, (items, samples) in enumerate(totals):
                self._raise_totals(shard, items, samples)
            self._servers = servers
            self._opened.set()
        await departure.wait()

    async def watch(self, caller: int, stay: list[Any]) -> None:
        """Waits until a caller leaves or dies, and then removes its permits.

        `stay` is a list, so that Ray does not wait for its entry, the reference to the caller's
        call of `stay`, which fails when the process dies. It is passed once per caller, not to each
        `wait`: Ray keeps about 20 kB of memory for each reference that is passed.
        """
        await asyncio.wait([asyncio.ensure_future(stay[0])])
        # Servers may still execute earlier calls of the caller: `ready` returns after these.
        ready = [server.ready.remote() for server in self._servers]
        await asyncio.gather(*ready, return_exceptions=True)
        async with self._changed:
            own = [ticket for ticket, one in self._permits.items() if one.caller == caller]
            for ticket in own:
                del self._permits[ticket]
            self._changed.notify_all()
        await self.leave(caller)

    async def leave(self, caller: int) -> None:
        """Makes the caller's `stay` return."""
        departure = self._departures.pop(caller, None)
        if departure is not None:
            departure.set()

    async def end(self) -> None:
        """Makes the `stay` of all callers return, or Ray would report them as failed calls."""
        for caller in list(self._departures):
            await self.leave(caller)

    async def wait(
        self, side: str, count: int, ticket: int, shards: list[int], caller: int
    ) -> None:
        """Waits until these shards may add `count` items, or give `count` samples.

        Raises `ValueError` if the count, with the requests of others, might have to wait for ever.
        """
        largest = self._largest | {side: max(count, self._largest[side])}
        ratio, tolerance = self._limits.ratio, self._limits.tolerance
        # Both sides wait for each other if a chunk and a batch together exceed the two bounds. The
        # chunk that reaches min_size may overshoot it by all but one of its items.
        needed = (largest["insert"] * ratio + largest["sample"]) / 2
        needed = max(needed, (largest["insert"] - 1) * ratio)
        if needed > tolerance:
            raise ValueError(
                f"limits: expected a tolerance of at least {needed:g} where {largest['insert']} "
                f"items are added and {largest['sample']} samples taken at once, got "
                f"{tolerance:g}: both sides would wait for each other. Make the tolerance larger, "
                "or the chunks or batches smaller."
            )
        self._largest = largest
        permit = self._permits[ticket] = Permit(side, count, caller, set(shards))
        await self._opened.wait()
        async with self._changed:
            await self._changed.wait_for(lambda: ticket not in self._permits or self._may(permit))
            permit.granted = True

    def _may(self, permit: Permit) -> bool:
        """Returns True if a permit keeps the limits, whether or not other permits are used."""
        items, samples = (sum(column) for column in zip(*self._totals.values(), strict=True))
        for other in self._permits.values():
            if other.granted and other.side == permit.side:
                items += other.count if permit.side == "insert" else 0
                samples += other.count if permit.side == "sample" else 0
        if permit.side == "insert":
            return self._limits.balance(items + permit.count, samples) <= self._limits.tolerance
        balance = self._limits.balance(items, samples + permit.count)
        return items >= self._limits.min_size and balance >= -self._limits.tolerance

    async def cancel(self, ticket: int) -> None:
        """Removes a permit that its caller does not use."""
        async with self._changed:
            self._permits.pop(ticket, None)
            self._changed.notify_all()

    async def report(self, shard: int, items: int, samples: int, ticket: int) -> None:
        """Records the totals of a shard that has done its part of the work of a permit."""
        async with self._changed:
            self._raise_totals(shard, items, samples)
            permit = self._permits.get(ticket)
            if permit is not None:
                permit.shards.discard(shard)
                if not permit.shards:
                    del self._permits[ticket]
            self._changed.notify_all()

    async def begin(self, shard: int, size: int) -> tuple[int, int]:
        """Returns the totals with which a server starts, which holds `size` items.

        If it lost items and all shards hold fewer than `min_size`, the missing ones no longer count
        as inserts, so that waiting actors may add as many again.
        """
        async with self._changed:
            items, samples = self._totals.get(shard, (0, 0))
            others = sum(total[0] for other, total in self._totals.items() if other != shard)
            missing = max(0, self._limits.min_size - size - others)
            self._totals[shard] = max(0, items - missing), samples
            self._changed.notify_all()
            return self._totals[shard]

    def _raise_totals(self, shard: int, items: int, samples: int) -> None:
        """Records totals, which never decrease, since reports may arrive in any order."""
        before = self._totals.get(shard, (0, 0))
        self._totals[shard] = max(items, before[0]), max(samples, before[1])


class Permits:
    """The client of the gate, one for each `Remote`.

    When a client is deleted, or its process dies, the gate removes the client's permits.
    """

    def __init__(self, gate: Any, servers: list[Any]) -> None:
        self._gate = gate
        self._caller: int = secrets.randbits(63)
        self._shards: list[int] = list(range(len(servers)))
        stay = gate.stay.remote(self._caller, servers)
        self._calls: tuple[Any, Any] = stay, gate.watch.remote(self._caller, [stay])
        weakref.finalize(self, self._leave, gate, self._caller).atexit = False

    @staticmethod
    def _leave(gate: Any, caller: int) -> Any:
        return gate.leave.remote(caller) if ray().is_initialized() else None

    def request(self, side: str, count: int, shard: int | None = None) -> tuple[int, Any]:
        """Requests a permit for inserts in one shard, or for samples of all shards (None).

        Returns the permit's number, and a Ray reference that is ready when it is granted.
        """
        ticket, shards = secrets.randbits(63), self._shards if shard is None else [shard]
        return ticket, self._gate.wait.remote(side, count, ticket, shards, self._caller)

    def cancel(self, ticket: int) -> None:
        """Gives back an unused permit."""
        if ray().is_initialized():
            self._gate.cancel.remote(ticket)


@contextlib.contextmanager
def granted(
    permits: Permits | None, side: str, count: int, shard: int | None = None
) -> Iterator[int | None]:
    """Waits for a permit and yields its number; None if there is no gate, or `count` is 0.

    The permit is given back if the block raises.
    """
    if permits is None or not count:
        yield None
        return
    ticket, reply = permits.request(side, count, shard)
    try:
        ray().get(reply)
        yield ticket
    except BaseException:
        permits.cancel(ticket)
        raise
