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


@pytest.mark.xdist_group("ray")
def test_what_is_served_is_measured(cluster):
    pytest.importorskip("rich")
    from benchmarks import remote

    rows = remote.frames(jrb.DeviceStorage(), rounds=1, calls=2, capacity=800)
    assert all(row["ratio"] > 0 for row in rows)
