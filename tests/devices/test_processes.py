"""Several processes that each save their own shards give the results of one process."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from examples import multihost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.devices,
    pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map"),
]


def run(folder, count):
    """Runs `count` processes and returns the results of each."""
    folder.mkdir()
    coordinator = f"127.0.0.1:{multihost.free_port()}"
    command = [sys.executable, "-m", "tests.devices.process_of_shards", str(folder)]
    started = [
        subprocess.Popen([*command, str(number), str(count), coordinator])
        for number in range(count)
    ]
    assert [process.wait(timeout=300) for process in started] == [0] * count
    return [np.load(folder / f"seen-{number}.npz") for number in range(count)]


def test_shards_of_two_processes_are_those_of_one(tmp_path):
    (alone,), pair = run(tmp_path / "one", 1), run(tmp_path / "two", 2)
    assert len(alone.files) == len(pair[0].files) > 0
    for name in alone.files:
        np.testing.assert_array_equal(np.concatenate([one[name] for one in pair]), alone[name])
