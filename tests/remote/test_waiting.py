"""Interrupted waits for Ray: no pending call is lost."""

import contextlib
import itertools
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.remote import client, draws
from jrb.remote.setup import Setup
from jrb.state import Sample


class Calls:
    """Stands for Ray. Calls are numbers; the wait for each is interrupted once, and 2 failed."""

    def __init__(self):
        self.interrupted = set()

    def wait(self, calls):
        return calls, []

    def get(self, call, failing=(2,)):
        if call not in self.interrupted:
            self.interrupted.add(call)
            raise KeyboardInterrupt
        if call in failing:
            raise OSError("No space left")


def test_a_call_that_failed_is_told_though_its_wait_was_interrupted(monkeypatch):
    ray, one = Calls(), client.Flight(9)
    monkeypatch.setattr(client, "ray", lambda: ray)
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

    monkeypatch.setattr(client, "ray", lambda: types.SimpleNamespace(get=get))
    one = client.Flight(9)
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
    monkeypatch.setattr(client, "ray", lambda: types.SimpleNamespace(get=lambda call: None))
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
    """Draws that are numbered, and that an interrupt strikes while they are waited for."""

    def __init__(self):
        self.numbers, self.moments, self.permits = itertools.count(), itertools.count(), None

    def ask(self, batch_size, betas, ticket):
        return [draws.RemoteDraw([next(self.numbers)], [], batch_size, beta) for beta in betas]

    def num_ready(self, draws):
        self.strike()
        return len(draws)

    def take(self, draw, device):
        self.strike()
        names = ("indices", "probabilities", "weights", "mask", "stamp")
        return Sample(data=np.array(draw.parts), info={}, **dict.fromkeys(names, np.zeros(1)))

    def strike(self):
        if next(self.moments) % 3 == 0:
            raise KeyboardInterrupt


def test_no_batch_that_was_drawn_ahead_is_lost():
    batches, found = draws.Ahead(Drawing(), lambda: None, 1, 3, None, None), []
    while len(found) < 9:
        with contextlib.suppress(KeyboardInterrupt):
            found.append(int(next(batches).data[0]))
    assert found == list(range(9))
