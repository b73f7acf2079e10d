"""An interrupt of a wait for Ray: nothing that was asked for is forgotten."""

import contextlib
import itertools

import numpy as np
import pytest

from jrb.remote import client, draws
from jrb.state import Sample


class Calls:
    """Stands for Ray. Calls are numbers; the wait for each is interrupted once, and 2 failed."""

    def __init__(self):
        self.interrupted = set()

    def wait(self, calls):
        self.get(calls[0], failing=())
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
