"""The gate, an actor that makes inserts or samples wait to keep the `limits`, and its client.

Before each call, a caller requests a permit for a number of inserts or samples. Servers report
their totals of both after each call. When the gate decides on an insert, it adds the permits for
inserts that are not reported yet, but not those for samples, and vice versa. So the permits of a
caller that dies cannot count for the other side. `tests/remote/test_gate.py` guards that.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jrb.authoring import require
from jrb.limits import SampleToInsert

PATIENCE = 10.0  # the seconds after which it is logged what a call waits for

log: logging.Logger = logging.getLogger("jrb.remote")


def ray() -> Any:
    """Imports and returns Ray."""
    return require("ray", "ray")


class LongWait:
    """Logs what a call waits for: after 10 seconds, then whenever that time has doubled."""

    def __init__(self, reason: Callable[[], str]) -> None:
        self._reason, self._start, self._limit = reason, time.monotonic(), PATIENCE

    def pause(self, seconds: float) -> None:
        """Sleeps, and logs the reason if it is time to."""
        time.sleep(seconds)
        waited = time.monotonic() - self._start
        if waited >= self._limit:
            self._limit = 2 * waited
            log.warning("After %.0f seconds: %s", waited, self._reason())

    def get(self, call: Any) -> Any:
        """Waits for a call of Ray, and returns its result."""
        # Look once a second whether to log the reason.
        while not ray().wait([call], timeout=1)[0]:
            self.pause(0)
        return ray().get(call)


def check_sizes(limits: SampleToInsert, needs: tuple[int, str], insert: int, sample: int) -> None:
    """Raises ValueError if inserts and samples of these sizes could wait for each other for ever.

    `needs` is the number of items that are needed before anything can be drawn, and for what.
    """
    # Both sides wait for each other if a chunk and a batch together exceed the two bounds. The
    # chunk that reaches `needs` may overshoot it by all but one of its items.
    both = limits.balance(limits.min_size + insert, -sample) / 2
    needed = float(max(both, limits.balance(needs[0] + insert - 1, 0)))
    if needed > limits.tolerance:
        most = limits.min_size + int(limits.tolerance / limits.ratio)
        raise ValueError(
            f"limits: expected a tolerance of at least {needed:g} where {insert} items are added "
            f"and {sample} samples taken at once, and {needs[1]} needs {needs[0]} items before the "
            f"first sample, got {limits.tolerance:g}, with which at most {most} are added before "
            "it: both sides would wait for each other. Make the tolerance or the min_size of the "
            "limits larger, or the chunks or batches smaller."
        )


@dataclasses.dataclass
class Permit:
    """A caller's request, kept from its arrival until all its servers have reported the work."""

    side: str  # "insert" or "sample"
    count: int  # the number of items or samples
    caller: int  # the random number that identifies the caller
    shards: set[int]  # the shards that have not reported yet
    is_granted: bool = False


class RemoteGate:
    """The actor that compares the inserts and samples of all shards.

    A restart loses only permits, because the gate asks the servers for their totals.
    """

    def __init__(self, limits: SampleToInsert, needs: tuple[int, str]) -> None:
        self._limits, self._needs = limits, needs
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
        # Ask the servers for their totals before the first permit, also after a restart.
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
            tickets = [ticket for ticket, one in self._permits.items() if one.caller == caller]
            for ticket in tickets:
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
        self, side: str, count: int, ticket: int, shards: list[int], caller: int, patient: bool
    ) -> bool:
        """Waits until these shards may add `count` items, or give `count` samples.

        Returns True; if not `patient`, at once, and False if there is no permit now.
        Raises `ValueError` if the count, with the requests of others, might have to wait for ever.
        """
        # Refuse a count that could make both sides wait for ever; only then record it.
        largest = self._largest | {side: max(count, self._largest[side])}
        check_sizes(self._limits, self._needs, largest["insert"], largest["sample"])
        self._largest = largest
        permit = self._permits[ticket] = Permit(side, count, caller, set(shards))
        await self._opened.wait()
        async with self._changed:
            if patient:
                await self._changed.wait_for(
                    lambda: ticket not in self._permits or self._keeps_limits(permit)
                )
            permit.is_granted = self._keeps_limits(permit)
            if not permit.is_granted:
                self._permits.pop(ticket, None)
            return permit.is_granted

    def _keeps_limits(self, permit: Permit) -> bool:
        """Returns True if a permit keeps the limits, whether or not other permits are used."""
        # Add the granted permits of the same side, which are not in the totals yet.
        items, samples = (sum(column) for column in zip(*self._totals.values(), strict=True))
        for other in self._permits.values():
            if other.is_granted and other.side == permit.side:
                items += other.count if permit.side == "insert" else 0
                samples += other.count if permit.side == "sample" else 0
        if permit.side == "insert":
            return self._limits.balance(items + permit.count, samples) <= self._limits.tolerance
        balance = self._limits.balance(items, samples + permit.count)
        return items >= self._limits.min_size and balance >= -self._limits.tolerance

    async def describe(self) -> str:
        """Returns the numbers that decide on permits."""
        items, samples = (sum(one[side] for one in self._totals.values()) for side in (0, 1))
        waiting = collections.Counter(
            one.side for one in self._permits.values() if not one.is_granted
        )
        return (
            f"{items} items were added and {samples} samples taken under {self._limits!r}; "
            f"{waiting['insert']} calls wait to add and {waiting['sample']} to sample."
        )

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
            # Remove the permit when the last of its shards has reported.
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
        self.gate: Any = gate
        self.caller: int = secrets.randbits(63)
        self.shards: list[int] = list(range(len(servers)))
        stay = gate.stay.remote(self.caller, servers)
        self._calls: tuple[Any, Any] = stay, gate.watch.remote(self.caller, [stay])
        weakref.finalize(self, self._leave, gate, self.caller).atexit = False

    @staticmethod
    def _leave(gate: Any, caller: int) -> Any:
        return gate.leave.remote(caller) if ray().is_initialized() else None


@contextlib.contextmanager
def acquire_permit(
    permits: Permits | None, side: str, count: int, shard: int | None = None, patient: bool = True
) -> Iterator[int | None]:
    """Waits for a permit for inserts in one shard, or for samples of all (None), and yields it.

    Yields the permit's number; None without a gate, or if `count` is 0. If not `patient`, yields 0
    instead of waiting. The permit is given back if the block raises.
    """
    if permits is None or not count:
        yield None
        return
    gate, ticket = permits.gate, secrets.randbits(63)
    shards = permits.shards if shard is None else [shard]
    wait = LongWait(
        lambda: f"the limits hold back {side} of {count}: {ray().get(gate.describe.remote())}"
    )
    reply = gate.wait.remote(side, count, ticket, shards, permits.caller, patient)
    try:
        yield ticket if wait.get(reply) else 0
    except BaseException:
        if ray().is_initialized():
            gate.cancel.remote(ticket)
        raise
