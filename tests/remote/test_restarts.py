"""Servers and actors that die."""

import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.remote import serve
from tests.remote.rows import EXAMPLE, Worker, buffer, returned, rows


def kill(cluster, remote):
    """Kills the first server, and returns when another has taken its place."""
    before = remote.stats()["restarts"]
    cluster.kill(remote._servers[0], no_restart=False)
    while remote.stats()["restarts"] == before:
        pass


def check_returns(sample, last):
    """Raises unless every return is of timesteps up to the last one that goes on, of a stream."""
    lanes, times = np.asarray(sample.data["id"]).T.tolist()
    for lane, time, reward in zip(lanes, times, sample.data["next"]["reward"], strict=True):
        assert float(reward) == returned(lane, time, last(lane, time))[0]


@pytest.mark.parametrize(
    ("storage", "shards"),
    [(jrb.DeviceStorage(), 1), (jrb.MemmapStorage(), 1), (jrb.SpillStorage(None, 8), 2)],
    ids=["checkpoint", "memmap", "spill"],
)
def test_a_server_goes_on_from_its_last_save(cluster, workers, tmp_path, storage, shards):
    made, options = buffer(96, storage=storage), {"streams": 2, "shards": shards, "num_cpus": 0}
    with serve(made, EXAMPLE, path=tmp_path / "replay", **options) as remote:
        cluster.get([worker.work.remote(remote, stream) for stream, worker in enumerate(workers)])
        cluster.get([worker.send.remote(0, 10) for worker in workers])
        saved = remote.save()
        assert saved == [shard["generation"] for shard in remote.stats()["shards"]]
        cluster.get([worker.send.remote(10, 10) for worker in workers])
        assert remote.stats()["unsaved"] == 20
        gone = remote.sample(64)
        kill(cluster, remote)
        cluster.get([worker.send.remote(20, 10) for worker in workers])  # feeding goes on
        died = gone.mask & (gone.info["shard"] == 0)  # others took the place of its rows
        remote.update_priority(gone.replace(mask=died), jnp.full(64, 1000.0))
        remote.wait()
        stats, lost = remote.stats(), 10 * 2 // shards
        assert (stats["restarts"], stats["lost"], stats["size"]) == (1, lost, 60 - lost)
        sample = remote.sample(600)
    there = np.asarray(sample.info["shard"]) == 0
    times = np.asarray(sample.data["id"])[there, 1]
    assert set(times.tolist()) == {*range(10), *range(20, 30)}
    check_returns(sample, lambda lane, time: 9 if lane % shards == 0 and time < 10 else 29)
    likely = np.asarray(sample.probabilities)[there]
    assert likely.max() == pytest.approx(likely.min())  # no late priority came there


def test_calls_under_way_are_made_again_and_lose_nothing(cluster, tmp_path):
    options = {"streams": 2, "path": tmp_path / "replay", "in_flight": 8, "num_cpus": 0}
    with serve(buffer(192), EXAMPLE, **options) as remote:
        remote.extend(rows(0, 0, 5), stream=0)
        remote.extend(rows(1, 0, 5), stream=1)
        remote.save()
        cluster.kill(remote._servers[0], no_restart=False)
        for first in range(5, 40, 5):
            remote.extend(rows(0, first, 5), stream=0)
        remote.wait()
        while not remote.stats()["restarts"]:
            pass
        stats = remote.stats()  # some may have come to the server that died
        assert stats["size"] + stats["lost"] == 45
        remote.save()
    with serve(buffer(192), EXAMPLE, **options) as remote:  # another program goes on from there
        assert remote.size() == stats["size"]
        remote.extend(rows(1, 5, 5), stream=1)
        assert remote.size() == stats["size"] + 5


def test_without_a_path_a_server_begins_empty_and_says_what_is_lost(cluster):
    with serve(buffer(96), EXAMPLE, streams=2, num_cpus=0) as remote:
        assert remote.stats()["restarts"] == 0
        with pytest.raises(ValueError, match="save: expected a path"):
            remote.save()
        remote.extend(rows(0, 0, 10), stream=0)
        remote.extend(rows(1, 0, 4), stream=1)
        next(batches := remote.ahead(depth=2))
        remote.wait()
        cluster.kill(remote._servers[0], no_restart=False)
        while remote.size() > 0:
            pass
        remote.extend(rows(0, 10, 5), stream=0)
        remote.extend(rows(1, 4, 5), stream=1)
        remote.wait()
        assert (remote.size(), remote.stats()["lost"]) == (10, 14)
        assert remote.stats()["restarts"] == 1
        for _ in range(4):
            times = np.asarray(next(batches).data["id"])[:, 1]
        assert times.min() >= 4


def test_a_server_saves_by_itself_and_an_actor_that_is_restarted_begins_anew(cluster, tmp_path):
    options = {"path": tmp_path / "replay", "save_every": 8, "num_cpus": 0}
    with serve(buffer(96), EXAMPLE, streams=2, **options) as remote:
        actor = cluster.remote(num_cpus=0, max_restarts=1, max_task_retries=1)(Worker)
        actor = actor.remote(remote, 1)
        cluster.get(actor.send.remote(0, 10))
        assert remote.stats()["unsaved"] == 0
        before = cluster.get(actor.process.remote())
        cluster.kill(actor, no_restart=False)
        while cluster.get(actor.process.remote()) == before:
            pass  # else what the first one sent before it died would be sent again
        cluster.get(actor.send.remote(10, 15))
        assert (remote.stats()["unsaved"], remote.stats()["lost"]) == (5, 0)
        check_returns(remote.sample(400), lambda lane, time: 9 if time < 10 else 24)
        kill(cluster, remote)
        assert remote.size() == 20
        cluster.get(actor.send.remote(25, 5))
        assert remote.stats()["lost"] == 5
