"""Benchmarks run, and those that look at how rows lie in files still find them."""

import jax
import numpy as np
import pytest

import jrb

pytestmark = pytest.mark.slow


def test_draws_from_files_are_measured(tmp_path):
    pytest.importorskip("rich")
    from benchmarks import host

    rows, _ = host.frames(1000, 1, str(tmp_path))
    rows += host.spill(1000, 1)
    assert all(row["ratio"] > 0 for row in rows)


def test_weights_of_skewed_shards_are_measured():
    pytest.importorskip("rich")
    from benchmarks import skew

    found = skew.row("one shard has 90 %", 0.4, 3)
    assert found["error"] < 1e-6
    assert found["ratio"] > 0


def test_verbs_at_some_scale_are_measured(monkeypatch):
    pytest.importorskip("rich")
    from benchmarks import scale

    monkeypatch.setattr(scale, "TASKS", scale.TASKS[-1:])
    rows = scale.together(scale.measured(1600, 1) + scale.measured(3200, 1))
    assert [row["what"] for row in rows] == ["prioritized, 8 shards: all three"]
    assert list(rows[0]["n"]) == ["1600", "3200"]
    assert all(figures["least_us"] > 0 for figures in rows[0]["n"].values())


@pytest.mark.slow
def test_behaviour_is_cloned_and_played(monkeypatch, tmp_path):
    offline = pytest.importorskip("benchmarks.offline", exc_type=ImportError)
    monkeypatch.setattr(offline, "PARTS", 2)
    monkeypatch.setattr(offline, "EPISODES", 2)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        result = offline.run(offline.RECORDED)
    assert (result["environment"], result["episodes"]) == ("CartPole-v1", 20)
    assert result["losses"][1] < result["losses"][0]
    assert np.shape(result["returns"]) == (2, 2)
    offline.picture(result).savefig(tmp_path / "returns.png")


@pytest.mark.cluster
@pytest.mark.xdist_group("ray")
def test_what_is_served_is_measured(cluster):
    pytest.importorskip("rich")
    from benchmarks import remote

    rows = remote.frames(jrb.DeviceStorage(), rounds=1, calls=2, capacity=800)
    assert all(row["ratio"] > 0 for row in rows)
