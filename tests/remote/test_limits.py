"""Limits block writers and readers."""

import re

import numpy as np
import pytest

import jrb
from jrb.remote import serve
from tests.remote.rows import EXAMPLE, Worker, buffer, rows

LIMITS = jrb.limits.SampleToInsert(ratio=1, min_size=10, tolerance=20)


def held_back(cluster, remote, inserted, sampled, waits):
    """Returns when these were counted, and the gate, knowing that, lets the calls `waits` wait."""
    expected = re.compile(f"^{inserted} items were added and {sampled} samples .*; {waits}")
    seen = 0
    while seen < 2:  # once more: calls that may go on have gone on before the second answer
        seen += bool(expected.search(cluster.get(remote._gate.describe.remote())))


def test_actors_wait_for_the_learner(cluster, workers):
    options = {"streams": 2, "limits": LIMITS, "shards": 2, "num_cpus": 0}
    with serve(buffer(960), EXAMPLE, **options) as remote:
        cluster.get(workers[0].work.remote(remote, 0))
        sent = workers[0].send.remote(0, 60, 5)
        for taken in (0, 10, 20):
            # As many as min_size, the tolerance, and what was sampled.
            held_back(cluster, remote, 30 + taken, taken, "1 calls wait to add and 0 to sample")
            assert remote.stats()["received"] == 30 + taken
            assert not cluster.wait([sent], timeout=0)[0]
            remote.sample(10)
        assert cluster.get(sent) == 0


def test_the_learner_waits_for_actors(cluster, workers):
    with serve(buffer(960), EXAMPLE, streams=2, limits=LIMITS, num_cpus=0) as remote:
        cluster.get(workers[0].work.remote(remote))
        batch = workers[0].draw.remote(20)
        sent = 0
        for before, more, size in ((9, 1, 5), (4, 1, 5)):
            remote.extend(rows(0, 0, before), stream=0)
            taken, sent = 20 * (sent > 0), sent + before
            held_back(cluster, remote, sent, taken, "0 calls wait to add and 1 to sample")
            assert not cluster.wait([batch], timeout=0)[0]
            sent += more
            remote.extend(rows(0, 0, more), stream=0)
            cluster.get(batch)
            batch = workers[0].draw.remote(size)
        ahead = remote.ahead(5, depth=2)
        remote.extend(rows(0, 0, 10), stream=0)
        assert next(ahead).data["id"].shape == (5, 2)
        with pytest.raises(ValueError, match="tolerance of at least 23"):
            remote.sample(36)
        remote.extend(rows(0, 0, 5), stream=0)
        cluster.get(batch)


def test_feeders_that_die_while_they_are_held_back_and_gates_that_die_count_for_nothing(cluster):
    with serve(buffer(960), EXAMPLE, streams=4, limits=LIMITS, num_cpus=0) as remote:
        feeders = [cluster.remote(num_cpus=0)(Worker).remote(remote, stream) for stream in range(4)]
        cluster.get([feeder.process.remote() for feeder in feeders])
        for feeder in feeders:
            feeder.send.remote(0, 100, 10)
        while remote.size() < 30:
            pass
        for feeder in feeders:
            cluster.kill(feeder)
        cluster.kill(remote._gate, no_restart=False)
        for _ in range(4):
            remote.sample(10)  # by what was written, and not a batch more
        learner = cluster.remote(num_cpus=0)(Worker).remote(remote)
        batch = learner.draw.remote(10)
        held_back(cluster, remote, 30, 40, "0 calls wait to add and 1 to sample")
        assert not cluster.wait([batch], timeout=0)[0]
        cluster.kill(learner)
        remote.extend(rows(0, 30, 10), stream=0)
        remote.sample(10)
        assert (remote.stats()["received"], remote.stats()["draws"]) == (40, 5)


def test_an_iterator_that_nobody_advances_holds_nobody_back(cluster, workers):
    with serve(buffer(960), EXAMPLE, streams=2, limits=LIMITS, num_cpus=0) as remote:
        cluster.get(workers[0].work.remote(remote))
        sent = workers[0].send.remote(0, 90, 5)
        idle, other = remote.ahead(25, depth=1), remote.ahead(25, depth=1)
        next(idle)
        for reader in (remote.sample, lambda _: next(other)):
            reader(25)
        assert cluster.get(sent) == 0
        assert next(idle).data["id"].shape == (25, 2)


def test_a_closed_iterator_over_a_queue_gives_back_what_it_has_drawn(cluster, caplog):
    made = jrb.ReplayBuffer(64, batch_size=4, sampler=jrb.Queue())
    with serve(made, {"n": np.int32(0)}, streams=1, num_cpus=0) as remote:
        remote.extend({"n": np.arange(40, dtype=np.int32)}, stream=0)
        batches, numbers = remote.ahead(depth=4), []
        for batch in batches:
            numbers += batch.data["n"].tolist()
            if len(numbers) == 12:
                batches.close()
        assert numbers == list(range(len(numbers))) and len(numbers) > 12
        rest = remote.sample(64)
        assert rest.data["n"][rest.mask].tolist() == list(range(len(numbers), 40))
        assert not caplog.records
        remote.extend({"n": np.arange(40, 60, dtype=np.int32)}, stream=0)
        next(batches := remote.ahead(depth=4))
        del batches
        assert "lost" in caplog.text
