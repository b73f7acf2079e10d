"""Every program in examples/ runs and reaches its stated result."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from examples import data_parallel, multihost
from jrb import testing

pytestmark = pytest.mark.slow


@pytest.mark.devices
@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="needs a JAX with jax.lax.pcast")
@pytest.mark.parametrize("devices", [1, jax.device_count()])
def test_data_parallel_training_learns_the_values(devices):
    assert data_parallel.run(devices) < 0.1


@pytest.mark.devices
@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="needs a JAX with jax.lax.pcast")
def test_data_parallel_training_copies_nothing_of_a_rings_size():
    def temporaries(capacity):
        train, start = data_parallel.learner(jax.device_count(), capacity)
        keys = jax.random.split(jax.random.key(0), (jax.device_count(), 3))
        return train.lower(*start, keys).compile().memory_analysis().temp_size_in_bytes

    assert abs(temporaries(2**15) - temporaries(2**13)) < 1000


@pytest.mark.devices
@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map")
@pytest.mark.parametrize(
    ("processes", "steps", "kill_at"),
    [(2, 42, 25), pytest.param(4, 120, 85, marks=pytest.mark.cluster)],
)
def test_processes_of_which_one_is_killed_go_on_bit_for_bit(tmp_path, processes, steps, kill_at):
    resumed, whole = multihost.main(tmp_path, processes, steps, kill_at)
    assert resumed == whole
    assert resumed[0] != resumed[1]  # each has shards of its own
    assert jrb.checkpoint.verify(tmp_path / "killed") == []
    assert jrb.checkpoint.metadata(tmp_path / "killed")["kind"] == "sharded"


def test_vector_environments_are_learned_from_without_a_step_that_is_none():
    pytest.importorskip("gymnasium")
    from examples import vector_environments as example

    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of integers
        before, after, state = example.run()
    assert before < 30 and after > 60
    stored, episodes = jax.device_get(state.storage), jrb.episodes(example.buffer, state)
    for env in range(example.ENVS):
        lane = [each for each in episodes if each.environment == env]
        assert all(each.ended for each in lane[:-1])
        for each in lane:
            seen, after = (part["observation"][each.slots] for part in (stored, stored["next"]))
            np.testing.assert_array_equal(seen[1:], after[:-1])
            assert (stored["next"]["reward"][each.slots] == 1).all()  # a reset step would have 0
            assert each.cut or (np.abs(seen[0]) <= 0.05).all()  # the range of initial states


def test_a_storage_of_zarr_keeps_the_contracts(tmp_path):
    pytest.importorskip("zarr")
    from examples.zarr_storage import ZarrStorage

    numbers = itertools.count()

    def make(capacity):
        storage = ZarrStorage(str(tmp_path / str(next(numbers))))
        parts = {"unit": jrb.NStep(3, 0.9), "sampler": jrb.Prioritized()}
        return jrb.ReplayBuffer(capacity, num_envs=2, batch_size=8, storage=storage, **parts)

    example = {"x": jnp.zeros(16), "next": {"reward": jnp.float32(0), "done": jnp.bool_(False)}}
    testing.conform(make, example)


PARTS = {
    "rank_based": lambda module: {"sampler": module.RankBased()},
    "previous_action": lambda module: {"unit": module.PreviousAction()},
    "bit_storage": lambda module: {"storage": module.BitStorage()},
}


@pytest.mark.whole
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_templates_keep_the_contracts(name):
    parts = PARTS[name](importlib.import_module(f"examples.parts.{name}"))
    make = lambda n: jrb.ReplayBuffer(n, num_envs=2, batch_size=8, **parts)
    frame = jnp.zeros(64)
    after = {"observation": frame, "reward": jnp.float32(0), "done": jnp.bool_(False)}
    flags = jnp.zeros((5, 3), bool)
    testing.conform(make, {"observation": frame, "action": flags, "next": after})


def test_the_quick_start_learns_to_catch_is_saved_and_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    from examples import quick_start

    with jax.numpy_dtype_promotion("standard"):  # optax needs it, readers have it
        caught = quick_start.main(tmp_path, parts=4)
    assert caught > 0.9
    assert jrb.checkpoint.verify(tmp_path / "replay") == []
    assert (tmp_path / "priorities.png").stat().st_size > 10_000


@pytest.mark.xdist_group("ray")
@pytest.mark.cluster
@pytest.mark.parametrize(("steps", "score"), [(1000, 30), (6000, 100)])
def test_actors_and_a_learner_in_processes_of_their_own_balance_a_pole(cluster, steps, score):
    pytest.importorskip("gymnasium")
    from examples import apex

    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of integers
        for seed in (5, 4, 0):  # timing, and with it learning, is random: three attempts
            before, after, stats = apex.run(steps, seed)
            if after > score:
                break
    assert after > score > before  # random play scores 22 of 200
    drawn = stats["draws"] * apex.BATCH
    owed = apex.limits.ratio * (stats["received"] - apex.limits.min_size)
    assert abs(owed - drawn) < 2 * apex.limits.tolerance  # also covers batches under way
