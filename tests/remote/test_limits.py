"""Limits block writers and readers."""

import pytest

import jrb
from jrb.remote import serve
from tests.remote.rows import EXAMPLE, Worker, buffer, rows

LIMITS = jrb.limits.SampleToInsert(ratio=1, min_size=10, tolerance=20)


def test_actors_wait_for_the_learner(cluster, workers):
    options = {"streams": 2, "limits": LIMITS, "shards": 2, "num_cpus": 0}
    with serve(buffer(960), EXAMPLE, **options) as remote:
        cluster.get(workers[0].work.remote(remote, 0))
        sent = workers[0].send.remote(0, 60, 5)
        for taken in (0, 10, 20):
            while remote.size() < 30 + taken:  # min_size, the tolerance, and what was sampled
                pass
            assert remote.stats()["received"] == 30 + taken
            assert not cluster.wait([sent], timeout=0)[0]
            remote.sample(10)
        assert cluster.get(sent) == 0


def test_the_learner_waits_for_actors(cluster, workers):
    with serve(buffer(960), EXAMPLE, streams=2, limits=LIMITS, num_cpus=0) as remote:
        cluster.get(workers[0].work.remote(remote))
        batch = workers[0].draw.remote(20)
        for before, more, size in ((9, 1, 5), (4, 1, 5)):
            remote.extend(rows(0, 0, before), stream=0)
            remote.wait()
            assert not cluster.wait([batch], timeout=0)[0]
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
        assert not cluster.wait([batch], timeout=1)[0]
        cluster.kill(learner)
        remote.extend(rows(0, 30, 10), stream=0)
        remote.sample(10)
        assert (remote.stats()["received"], remote.stats()["draws"]) == (40, 5)
