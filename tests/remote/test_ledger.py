"""The numbers of timesteps that arrived: nothing is written twice, and what is lost is counted."""

import collections
import random

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

import jrb
from jrb.remote import setup as setups
from jrb.remote.server import Ledger, Server
from jrb.remote.setup import Setup
from tests.remote.rows import EXAMPLE, buffer, rows


def test_the_ledger_takes_everything_once_and_tells_what_is_missing():
    ledger = Ledger(2)
    calls = [(7, 0, 5), (7, 5, 5), (7, 5, 5), (9, 0, 2), (7, 10, 1), (7, 20, 1), (7, 21, 1)]
    calls += [(7, 13, 2), (7, 13, 2), (7, 11, 2), (7, 22, 1), (7, 19, 2)]
    seen = [ledger.note(1, *call) for call in calls]
    assert [(one.is_repeat, one.is_next, one.missing) for one in seen] == [
        (False, False, 0),  # a sender that is new
        (False, True, 0),
        (True, False, 0),  # made again
        (False, False, 0),  # another sender
        (False, False, 0),  # the first one again
        (False, False, 9),  # nine are missing
        (False, True, 0),
        (False, False, -2),  # two of them come late
        (True, False, 0),
        (False, False, -2),
        (False, False, 0),
        (True, False, 0),  # one was here
    ]
    assert ledger.note(1, 7, 15, 4).missing == -4 and ledger.note(1, 7, 23, 1).missing == 0
    assert ledger.note(0, 7, 23, 1).missing == 23
    ledger.note_failure(1, 7, 23, 1)
    assert ledger.note(1, 7, 23, 1).missing == -1


@hypothesis.given(st.data())
def test_calls_in_any_order_come_once(data):
    """Compares the ledger with sets of numbers, for any number of senders on two streams."""
    size = data.draw(st.integers(1, 4))
    ledger, arrived, last = Ledger(2), collections.defaultdict(set), {}
    lost = 0
    call = st.tuples(st.integers(0, 1), st.integers(1, 20), st.integers(0, 15), st.booleans())
    for lane, sender, number, fails in data.draw(st.lists(call, max_size=60)):
        first = number * size
        numbers, own = set(range(first, first + size)), arrived[lane, sender]
        arrival = ledger.note(lane, sender, first, size)
        assert arrival.is_repeat == (numbers <= own)
        if arrival.is_repeat:
            continue
        assert arrival.is_next == (last.get(lane) == (sender, first))
        lost += arrival.missing
        own |= numbers
        last[lane] = sender, first + size
        highest = {key: max(known) + 1 for key, known in arrived.items() if known}
        assert lost == sum(highest[key] - len(arrived[key]) for key in highest)
        if fails:  # as if the write had failed: nothing of it is kept
            ledger.note_failure(lane, sender, first, size)
            own -= numbers
            last[lane] = None
            # Its numbers count as sent, so that they are lost.
            assert ledger.note(lane, sender, first, size).missing == -size
            own |= numbers
            last[lane] = sender, first + size


def server(path=None, streams=2):
    """Returns a server of the only shard, in this process."""
    made = buffer(streams * 2000, unit=jrb.Transition(), sampler=jrb.Uniform())
    spec = setups.spec_of_example(made, EXAMPLE)
    return Server(Setup(made, spec, streams, 1, path, 0, None, 4, on_cpu=False, wide=False), 0)


class Senders:
    """Processes that send timesteps of streams, and what must be stored of these."""

    def __init__(self, seed, count, streams):
        self.rng, self.streams = random.Random(seed), streams
        self.lane_of = {self.rng.getrandbits(63) | 1: n % streams for n in range(count)}
        self.sent = collections.Counter()
        self.calls = []
        self.following = [0] * streams  # the time of each stream's next row

    def call(self):
        """Returns the next call of one of them."""
        sender = self.rng.choice(list(self.lane_of))
        lane, length = self.lane_of[sender], self.rng.choice((1, 2, 4))
        first, time = self.sent[sender], self.following[lane]
        self.sent[sender] += length
        self.following[lane] += length
        self.calls.append((lane, sender, first, jax.tree.leaves(rows(lane, time, length))))
        return self.calls[-1]

    def stored(self):
        return sorted((lane, time) for lane, n in enumerate(self.following) for time in range(n))


def ids(one):
    """Returns the sorted ids of all rows that a server holds."""
    items = jrb.items(one._buffer, one._state)["id"]
    return sorted(map(tuple, np.asarray(items).tolist()))


@pytest.mark.parametrize("seed", range(3))
def test_fifty_senders_in_any_order_with_repeats_are_counted_exactly(seed):
    senders, one = Senders(seed, 50, 2), server()
    for _ in range(250):
        one.extend(*senders.call(), None, None)
        while senders.rng.random() < 0.3:  # Ray repeats a call whose answer was lost
            one.extend(*senders.rng.choice(senders.calls), None, None)
    total = sum(senders.sent.values())
    assert (one._ledger.received, one._ledger.lost, one.size()) == (total, 0, total)
    assert ids(one) == senders.stored()


def test_after_a_crash_the_ledger_of_many_senders_goes_on_from_the_save(tmp_path):
    senders, one = Senders(0, 30, 2), server(str(tmp_path / "replay"))
    for _ in range(80):
        one.extend(*senders.call(), None, None)
    one.save()
    for _ in range(40):  # these are lost; some of them are repeated
        one.extend(*senders.call(), None, None)
    again = server(str(tmp_path / "replay"))
    repeated = senders.rng.sample(senders.calls, 60)
    for call in repeated:
        again.extend(*call, None, None)
    for sender, lane in senders.lane_of.items():  # every sender sends once more
        time, senders.following[lane] = senders.following[lane], senders.following[lane] + 1
        call = lane, sender, senders.sent[sender], jax.tree.leaves(rows(lane, time, 1))
        again.extend(*call, None, None)
        senders.calls.append(call)
    arrived = [*senders.calls[:80], *senders.calls[120:]]
    arrived += [call for call in senders.calls[80:120] if any(call is one for one in repeated)]
    kept = sum(len(leaves[0]) for *_, leaves in arrived)
    lost = sum(len(leaves[0]) for *_, leaves in senders.calls) - kept
    assert lost > 0
    assert (again._ledger.lost, again.size(), again._ledger.received) == (lost, kept, kept)
