"""The actor that holds back those who add, or those who sample, and what callers ask it for.

Servers count what they wrote and what they gave, and report their totals after each call. The gate
adds the permits that are not used yet, each to its own side only: a chunk that was permitted counts
as added once a server has written it, so a caller that dies leaves nothing behind that counts.
`tests/remote/test_gate.py` guards that.
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
    """Returns Ray, which is imported when it is needed."""
    return require("ray", "ray")


@dataclasses.dataclass
class Permit:
    """The request of a caller, from its arrival until servers have reported that it is done."""

    side: str  # "insert" or "sample"
    count: int  # of items, or of samples
    caller: int
    shards: set[int]  # those that have not reported yet
    granted: bool = False


class RemoteGate:
    """Compares what all shards together have written and given; an actor of its own.

    A restart loses nothing but permits: the totals are asked of the servers.
    """

    def __init__(self, limits: SampleToInsert) -> None:
        self._limits = limits
        self._totals: dict[int, tuple[int, int]] = {}  # of each shard, items and samples
        self._permits: dict[int, Permit] = {}
        self._largest: dict[str, int] = {"insert": 0, "sample": 0}
        self._departures: dict[int, asyncio.Event] = {}  # of each caller, set when it leaves
        self._servers: Sequence[Any] = ()
        self._opened: asyncio.Event = asyncio.Event()
        self._changed: asyncio.Condition = asyncio.Condition()

    async def stay(self, caller: int, servers: Sequence[Any]) -> None:
        """Returns when the caller has left. The first caller brings the servers.

        Ray makes the call again where it restarts the gate.
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
        """Forgets the permits of a caller when it leaves or dies.

        `stay` is the reference of the caller's `stay`, which fails when its process dies, in a list
        so that Ray does not wait for it. It is brought once per caller, not with each `wait`: Ray
        keeps about 20 kB of memory for each reference that a call brings.
        """
        await asyncio.wait([asyncio.ensure_future(stay[0])])
        # What the caller sent before may still be written: servers get to this call after that.
        ready = [server.ready.remote() for server in self._servers]
        await asyncio.gather(*ready, return_exceptions=True)
        async with self._changed:
            own = [ticket for ticket, one in self._permits.items() if one.caller == caller]
            for ticket in own:
                del self._permits[ticket]
            self._changed.notify_all()
        await self.leave(caller)

    async def leave(self, caller: int) -> None:
        """Lets the caller's `stay` return."""
        departure = self._departures.pop(caller, None)
        if departure is not None:
            departure.set()

    async def end(self) -> None:
        """Lets all callers' `stay` return: Ray would report them as calls that failed."""
        for caller in list(self._departures):
            await self.leave(caller)

    async def wait(
        self, side: str, count: int, ticket: int, shards: list[int], caller: int
    ) -> None:
        """Waits until `count` items may be added, or samples taken, by these shards.

        Raises `ValueError` if, with what others ask for, the count could be held back for ever.
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
        """Returns whether a permit can be granted, if every other one is used or none is."""
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
        """Forgets a permit that its caller does not use."""
        async with self._changed:
            self._permits.pop(ticket, None)
            self._changed.notify_all()

    async def report(self, shard: int, items: int, samples: int, ticket: int) -> None:
        """Takes the totals of a shard that has done its part of a permit."""
        async with self._changed:
            self._raise_totals(shard, items, samples)
            permit = self._permits.get(ticket)
            if permit is not None:
                permit.shards.discard(shard)
                if not permit.shards:
                    del self._permits[ticket]
            self._changed.notify_all()

    async def begin(self, shard: int, size: int) -> tuple[int, int]:
        """Returns to a server that begins with `size` items the totals to go on from.

        If the shards hold fewer than `min_size` as it has lost items, those that are missing do not
        count any more: actors that are held back may add as many again.
        """
        async with self._changed:
            items, samples = self._totals.get(shard, (0, 0))
            others = sum(total[0] for other, total in self._totals.items() if other != shard)
            missing = max(0, self._limits.min_size - size - others)
            self._totals[shard] = max(0, items - missing), samples
            self._changed.notify_all()
            return self._totals[shard]

    def _raise_totals(self, shard: int, items: int, samples: int) -> None:
        """Notes totals, which never fall; reports may come in any order."""
        before = self._totals.get(shard, (0, 0))
        self._totals[shard] = max(items, before[0]), max(samples, before[1])


class Permits:
    """Asks the gate for permits, for one holder of a `Remote`.

    The gate forgets them when `stay` ends, or its reference fails as this process died.
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
        """Asks for items of a shard, or samples of all shards.

        Returns the number of the permit, and a reference that is ready when it is granted.
        """
        ticket, shards = secrets.randbits(63), self._shards if shard is None else [shard]
        return ticket, self._gate.wait.remote(side, count, ticket, shards, self._caller)

    def cancel(self, ticket: int) -> None:
        """Gives a permit back that is not used."""
        if ray().is_initialized():
            self._gate.cancel.remote(ticket)


@contextlib.contextmanager
def granted(
    permits: Permits | None, side: str, count: int, shard: int | None = None
) -> Iterator[int | None]:
    """Waits for a permit and yields its number, None where none is needed.

    The permit goes back to the gate if the block fails.
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
