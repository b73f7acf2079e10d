"""The gate's grants, with callers and servers that die at any moment, without a cluster."""

import asyncio
import collections
import random

import pytest

import jrb
from jrb.remote.gate import RemoteGate


class Call:
    """A method of a fake actor, called as Ray's are."""

    def __init__(self, function):
        self.function = function

    def remote(self, *given):
        async def answer():
            return self.function(*given)

        return answer()


class Shard:
    """A server that counts its calls."""

    def __init__(self):
        self.items = self.samples = 0
        self.totals = Call(lambda: (self.items, self.samples))
        self.ready = Call(lambda: None)


class World:
    """A gate with its servers and callers."""

    def __init__(self, limits, shards=2):
        self.limits, self.servers = limits, [Shard() for _ in range(shards)]
        self.lives, self.asked, self.granted = {}, {}, collections.deque()
        self.tasks = []
        self.restart()

    def start(self, call):
        task = asyncio.ensure_future(call)
        self.tasks.append(task)
        return task

    def restart(self):
        """Another gate, to which Ray makes all calls again that are not answered."""
        needs = self.limits.min_size, "the min_size of the limits"
        self.gate, tasks, self.asked = RemoteGate(self.limits, needs), self.asked, {}
        for caller in self.lives:
            self.enter(caller)
        for ticket, (task, given) in tasks.items():
            task.cancel()
            self.ask(ticket, *given)

    def join(self, caller):
        self.lives[caller] = asyncio.get_running_loop().create_future()
        self.enter(caller)

    def enter(self, caller):
        self.start(self.gate.stay(caller, self.servers))
        self.start(self.gate.watch(caller, [self.lives[caller]]))

    def ask(self, ticket, side, count, shards, caller, patient=True):
        call = self.gate.wait(side, count, ticket, shards, caller, patient)
        task = self.start(call)
        self.asked[ticket] = task, (side, count, shards, caller)

        def answered(task):
            if not task.cancelled() and self.asked.pop(ticket, None) and caller in self.lives:
                self.granted.append((ticket, side, count, shards, caller))

        task.add_done_callback(answered)

    def die(self, caller):
        """Ray tells the gate by and by; what was granted to the caller is never done."""
        self.lives.pop(caller).set_exception(RuntimeError("OwnerDiedError"))
        self.granted = collections.deque(g for g in self.granted if g[-1] != caller)

    async def do(self, ticket, side, count, shards, caller):
        for shard in shards:
            server = self.servers[shard]
            if side == "insert":
                server.items += count
            else:
                server.samples += count // len(shards)
            await self.gate.report(shard, server.items, server.samples, ticket)

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)

    def distance(self):
        items = sum(server.items for server in self.servers)
        samples = sum(server.samples for server in self.servers)
        return abs(self.limits.ratio * max(0, items - self.limits.min_size) - samples)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_and_drawn_stays_within_the_tolerance_whoever_dies(seed):
    limits = jrb.limits.SampleToInsert(ratio=2, min_size=30, tolerance=60)

    async def run():
        rng, world = random.Random(seed), World(limits)
        callers, tickets = list(range(8)), iter(range(10**6))
        for caller in callers:
            world.join(caller)
        for step in range(600):
            caller = rng.choice(callers)
            if caller not in {given[-1] for _, given in world.asked.values()} | {
                granted[-1] for granted in world.granted
            }:
                learns = caller % 2
                side, shards = ("sample", [0, 1]) if learns else ("insert", [rng.randrange(2)])
                world.ask(next(tickets), side, 20 if learns else 10, shards, caller)
            elif rng.random() < 0.2:
                world.die(caller)
                callers.remove(caller)
                callers.append(1000 + step * 2 + caller % 2)
                world.join(callers[-1])
            if step % 37 == 0:
                await world.settle()
                if not world.granted:
                    world.restart()
            await world.settle()
            if world.granted and rng.random() < 0.6:
                await world.do(*world.granted.popleft())
            assert world.distance() <= limits.tolerance
        return sum(server.samples for server in world.servers)

    assert asyncio.run(run()) > 1000  # nobody is held back for ever


def test_callers_that_die_while_they_are_held_back_count_for_nothing():
    limits = jrb.limits.SampleToInsert(ratio=1, min_size=10, tolerance=400)

    async def run():
        world = World(limits)
        for caller in range(10):
            world.join(caller)
        for ticket in range(9):
            world.ask(ticket, "insert", 100, [0], 0)
        await world.settle()
        assert len(world.granted) == 4
        while world.granted:
            await world.do(*world.granted.popleft())
        for caller in range(1, 9):
            world.ask(100 + caller, "insert", 100, [0], caller)
            world.die(caller)
        await world.settle()
        world.die(0)
        await world.settle()
        for ticket in range(200, 240):
            world.ask(ticket, "sample", 100, [0, 1], 9)
            await world.settle()
            while world.granted:
                await world.do(*world.granted.popleft())
        assert world.distance() <= 400 and not world.gate._departures.keys() - {9}

    asyncio.run(run())


def test_a_permit_that_was_given_back_or_failed_is_free_again():
    limits = jrb.limits.SampleToInsert(ratio=1, min_size=1, tolerance=10)

    async def run():
        world = World(limits, shards=1)
        world.join(0)
        world.ask(1, "insert", 8, [0], 0)
        world.ask(2, "insert", 8, [0], 0)
        world.ask(3, "insert", 8, [0], 0)
        await world.settle()
        assert [one[0] for one in world.granted] == [1]
        await world.gate.cancel(1)
        await world.settle()
        assert [one[0] for one in world.granted] == [1, 2]
        await world.gate.report(0, 0, 0, 2)  # a write that failed
        await world.settle()
        assert [one[0] for one in world.granted] == [1, 2, 3]

    asyncio.run(run())


def test_what_a_server_lost_may_be_added_again():
    limits = jrb.limits.SampleToInsert(ratio=1, min_size=10, tolerance=20)

    async def run():
        world = World(limits, shards=1)
        world.join(0)
        for ticket in range(3):
            world.ask(ticket, "insert", 10, [0], 0)
            await world.settle()
            await world.do(*world.granted.popleft())
        world.ask(3, "insert", 10, [0], 0)
        await world.settle()
        assert not world.granted
        world.servers[0].items, _ = await world.gate.begin(0, 0)  # with nothing
        await world.settle()
        assert [one[0] for one in world.granted] == [3]
        assert await world.gate.begin(0, 10) == (20, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("before", "side", "count", "needed"),
    [((), "insert", 22, "21 "), (("sample", 36), "insert", 5, "20.5"), ((), "sample", 41, "20.5")],
    ids=["fewer than min_size", "both sides", "samples"],
)
def test_chunks_that_could_wait_for_ever_are_refused(before, side, count, needed):
    limits = jrb.limits.SampleToInsert(ratio=1, min_size=10, tolerance=20)

    async def run():
        world = World(limits, shards=1)
        world.join(0)
        if before:
            world.ask(1, *before, [0], 0)
            await world.settle()
        with pytest.raises(ValueError, match=f"tolerance of at least {needed}"):
            await world.gate.wait(side, count, 2, [0], 0, True)

    asyncio.run(run())


def test_a_request_that_does_not_wait_leaves_all_to_the_others():
    limits = jrb.limits.SampleToInsert(ratio=1, min_size=1, tolerance=10)

    async def run():
        world = World(limits, shards=1)
        for caller in range(2):
            world.join(caller)
        ask = lambda count, ticket: world.gate.wait("sample", count, ticket, [0], 0, False)
        assert not await ask(5, 1)  # nothing was added yet
        world.ask(2, "insert", 6, [0], 0)
        await world.settle()
        await world.do(*world.granted.popleft())
        assert await ask(9, 3) and not await ask(9, 4)
        world.ask(5, "sample", 9, [0], 1)
        await world.settle()
        assert not world.granted
        assert await world.gate.describe() == (
            f"6 items were added and 0 samples taken under {limits!r}; 0 calls wait to add and 1 "
            "to sample."
        )
        await world.gate.cancel(3)
        await world.settle()
        assert [one[0] for one in world.granted] == [5]

    asyncio.run(run())
