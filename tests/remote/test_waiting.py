"""Interrupted waits for Ray: no pending call is lost."""

import contextlib
import itertools
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.remote import client, draws, gate
from jrb.remote.setup import Setup
from jrb.state import Sample
from jrb.types.messages import DrawInputs


class Calls:
    """Stands for Ray. Calls are numbers; the wait for each is interrupted once, and 2 failed."""

    def __init__(self):
        self.interrupted = set()

    def wait(self, calls, timeout=None):
        return calls, []

    def get(self, call, failing=(2,)):
        if call not in self.interrupted:
            self.interrupted.add(call)
            raise KeyboardInterrupt
        if call in failing:
            raise OSError("No space left")


def test_a_call_that_failed_is_told_though_its_wait_was_interrupted(monkeypatch):
    ray, one = Calls(), client.CallQueue(9)
    monkeypatch.setattr(gate, "ray", lambda: ray)
    for call in (1, 2, 3):
        one.add(call)
    for error in (KeyboardInterrupt, KeyboardInterrupt, OSError, KeyboardInterrupt):
        with pytest.raises(error):
            one.wait()
    one.wait()


def test_two_threads_that_wait_for_the_same_calls_miss_none(monkeypatch):
    waited, both = [], threading.Barrier(2)

    def get(call):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # until the other thread waits for the same call, if it may
        waited.append(call)

    ray = types.SimpleNamespace(wait=lambda calls, timeout: (calls, []), get=get)
    monkeypatch.setattr(gate, "ray", lambda: ray)
    one = client.CallQueue(9)
    for call in (1, 2):
        one.add(call)
    threads = [threading.Thread(target=one.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waited) == [1, 2]


class Computed:
    """An array of JAX that is not computed yet; the first wait for it is interrupted."""

    shape, dtype = (2,), np.dtype(np.float32)

    def __init__(self, numbers):
        self.numbers, self.is_waited_for = np.array(numbers, np.float32), False

    def is_ready(self):
        return False

    def is_deleted(self):
        return False

    def __array__(self, *_, **__):
        if not self.is_waited_for:
            self.is_waited_for = True
            raise KeyboardInterrupt
        return self.numbers


@pytest.fixture
def learner(monkeypatch):
    """A `Remote`, a sample of it, and the priorities that it has sent."""
    served = jrb.ReplayBuffer(8, batch_size=2, sampler=jrb.Prioritized())
    setup = Setup(served, np.float32(0), 1, 1, None, 0, None, 4, True, False)
    sent = []
    update = types.SimpleNamespace(remote=lambda *sample_and_new: sent.append(sample_and_new[-1]))
    ray = types.SimpleNamespace(wait=lambda calls, timeout: (calls, []), get=lambda call: None)
    monkeypatch.setattr(gate, "ray", lambda: ray)
    remote = client.Remote(setup, [types.SimpleNamespace(update=update)], None)
    two = np.zeros(2, np.int32)
    rest = {"data": None, "probabilities": None, "weights": None, "mask": two == 0}
    sample = Sample(indices=two, stamp=two, info={"shard": two}, origin=setup.origin, **rest)
    return remote, sample, sent


def test_priorities_that_were_deleted_are_told_once(learner):
    remote, sample, sent = learner
    gone = jnp.ones(2)
    remote.update_priority(sample, Computed([1, 2]))
    remote.update_priority(sample, gone)
    gone.delete()
    with pytest.raises(KeyboardInterrupt):
        remote.wait()
    with pytest.raises(RuntimeError, match="deleted"):
        remote.wait()
    remote.update_priority(sample, [5.0, 6.0])
    assert [new.tolist() for new in sent] == [[1, 2], [5, 6]]


def test_priorities_are_sent_as_they_were_given_though_a_wait_was_interrupted(learner):
    remote, sample, sent = learner
    remote.update_priority(sample, Computed([1, 2]))
    later = np.array([3.0, 4.0])
    remote.update_priority(sample, later)
    later[:] = 9
    with pytest.raises(TypeError, match="expected real numbers, got dtype complex128"):
        remote.update_priority(sample, 1j * later)
    with pytest.raises(KeyboardInterrupt):
        remote.wait()
    remote.wait()
    assert [new.tolist() for new in sent] == [[1, 2], [3, 4]]


def test_a_sample_of_numpy_arrays_may_be_changed_before_its_priorities_are_sent(learner):
    remote, sample, _ = learner
    slots = []
    remote._servers[0].update.remote = lambda *given: slots.append(given[0].tolist())
    remote.update_priority(sample, Computed([1, 2]))
    sample.indices[:] = 7  # the array of this actor's next sample
    with pytest.raises(KeyboardInterrupt):
        remote.wait()
    remote.wait()
    assert slots == [[0, 0]]


class Drawing:
    """Draws that are numbered, and that an interrupt strikes while they are waited for; and Ray."""

    def __init__(self):
        self.numbers, self.moments = itertools.count(), itertools.count()
        self.permits, self.consumes = None, False

    def ask(self, batch_size, inputs, ticket):
        return [draws.RemoteDraw([next(self.numbers)], [], batch_size, own) for own in inputs]

    def wait(self, calls, num_returns, timeout):
        self.strike()
        return calls, []

    def take(self, draw, device):
        self.strike()
        names = ("indices", "probabilities", "weights", "mask", "stamp")
        return Sample(data=np.array(draw.parts), info={}, **dict.fromkeys(names, np.zeros(1)))

    def describe(self):
        return "nothing to draw"

    def strike(self):
        if next(self.moments) % 3 == 0:
            raise KeyboardInterrupt


def test_no_batch_that_was_drawn_ahead_is_lost(monkeypatch):
    monkeypatch.setattr(draws, "ray", lambda: drawing)
    drawing = Drawing()
    batches, found = draws.Ahead(drawing, lambda: None, 1, 3, DrawInputs(), None), []
    while len(found) < 9:
        with contextlib.suppress(KeyboardInterrupt):
            found.append(int(next(batches).data[0]))
    assert found == list(range(9))


def drain(batches):
    """Returns the numbers of all batches that an iterator still gives."""
    return [int(batch.data[0]) for batch in batches]


class Patient(Drawing):
    """Draws that no interrupt strikes."""

    def strike(self):
        pass


def test_a_closed_iterator_gives_back_what_was_drawn_and_a_dropped_one_tells(monkeypatch, caplog):
    monkeypatch.setattr(draws, "ray", lambda: drawing)
    drawing = Patient()
    drawing.consumes = True
    batches = draws.Ahead(drawing, lambda: None, 1, 4, DrawInputs(), None)
    assert [int(next(batches).data[0]) for _ in range(5)] == list(range(5))
    batches.close()
    later = drain(batches)
    assert later == list(range(5, next(drawing.numbers))) and len(later) > 1
    del batches
    assert not caplog.records
    with contextlib.suppress(ArithmeticError):
        for _ in draws.Ahead(drawing, lambda: None, 1, 4, DrawInputs(), None):
            raise ArithmeticError("in the learner's loop")
    assert "batches are lost" in caplog.text


class Ray:
    """Stands for Ray: a reference is a list with its result, empty until it has one."""

    @staticmethod
    def wait(calls, timeout):
        return [call for call in calls if call], [call for call in calls if not call]

    @staticmethod
    def get(call):
        return call[0]


class AllPermits:
    """Permits for a number of samples, which other readers and feeders may use as well."""

    caller, shards = 1, [0]

    def __init__(self, room):
        self.room, self.unused, self.gate = room, set(), self
        self.wait = types.SimpleNamespace(remote=self.decide)

    def decide(self, side, count, ticket, *rest):
        if count > self.room:
            return [False]
        self.room -= count
        self.unused.add(ticket)
        return [True]


def test_an_iterator_keeps_no_permit_that_it_does_not_use(monkeypatch):
    monkeypatch.setattr(gate, "ray", lambda: Ray)
    monkeypatch.setattr(draws, "ray", lambda: drawing)
    drawing = Patient()
    drawing.permits = permits = AllPermits(11)
    ask = drawing.ask

    def use(batch_size, inputs, ticket):
        permits.unused.remove(ticket)
        return ask(batch_size, inputs, ticket)

    drawing.ask = use
    batches = draws.Ahead(drawing, lambda: None, 1, 4, DrawInputs(), None)
    for number in range(10):
        assert int(next(batches).data[0]) == number
        assert not permits.unused
    assert permits.room == 1  # too little for two batches, and free for others


@pytest.mark.parametrize("side", ["insert", "sample"])
def test_a_long_wait_says_what_it_waits_for(monkeypatch, caplog, side):
    monkeypatch.setattr(gate, "ray", lambda: Ray)
    now, reply = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(gate, "time", clock)

    def wait(calls, timeout):
        now[0] += timeout
        if now[0] >= 45:
            reply.append(True)
        return reply, calls

    monkeypatch.setattr(Ray, "wait", wait)
    its_gate = types.SimpleNamespace(
        wait=types.SimpleNamespace(remote=lambda *_: reply),
        describe=types.SimpleNamespace(remote=lambda: ["30 items were added"]),
    )
    permits = types.SimpleNamespace(gate=its_gate, caller=1, shards=[0])
    with gate.acquire_permit(permits, side, 8) as ticket:
        assert ticket
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split()[1] for text in texts] == ["10", "20", "40"]
    assert all(f"hold back {side} of 8: 30 items were added" in text for text in texts)


def test_a_draw_that_finds_nothing_for_long_says_what_is_missing(monkeypatch, caplog):
    now = [0.0]
    clock = types.SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 4)
    )
    monkeypatch.setattr(gate, "time", clock)
    drawing = Patient()
    monkeypatch.setattr(draws, "ray", lambda: drawing)
    take = drawing.take
    drawing.take = lambda draw, device: take(draw, device) if now[0] > 13 else None
    assert int(next(draws.Ahead(drawing, lambda: None, 1, 1, DrawInputs(), None)).data[0]) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "After 12 seconds: nothing to draw"
    ]
