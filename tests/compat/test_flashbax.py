"""`jrb.compat.flashbax`, compared with flashbax, and under flashbax's own tests."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import chex
import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb.compat.flashbax as fbx

ENVS = 3
ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = {"x": jnp.zeros(2), "done": jnp.zeros((), bool)}

KNOWN = {
    # samples a buffer without any pair, for which flashbax returns uninitialized memory
    "prioritised_flat_buffer_test.py::test_adjust_priorities",
    # call a private function
    "prioritised_trajectory_buffer_test.py::test_human_case_1",
    "prioritised_trajectory_buffer_test.py::test_human_case_2",
    "prioritised_trajectory_buffer_test.py::test_human_case_3",
}
"""Tests of flashbax that may fail, with the reasons."""


@pytest.fixture(autouse=True)
def promotion():
    """Allows dtype promotion: flashbax adds integers to floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_flashbax_is_flashbax():
    assert "compat" not in flashbax.make_flat_buffer.__module__


def batch_of(seed, *axes):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(*axes, 2)), jnp.float32),
        "done": jnp.asarray(rng.random(axes) < 0.3),
    }


MAKERS = {
    "trajectory": (
        lambda lib: lib.make_trajectory_buffer(ENVS, 16, 4, 1, 4, max_length_time_axis=12),
        (ENVS, 5),
    ),
    "prioritised trajectory": (
        lambda lib: lib.make_prioritised_trajectory_buffer(
            ENVS, 16, 4, 2, 4, max_length_time_axis=13, priority_exponent=0.5
        ),
        (ENVS, 5),
    ),
    "flat": (lambda lib: lib.make_flat_buffer(37, 6, 16, True, ENVS), (ENVS, 4)),
    "flat, single steps": (lambda lib: lib.make_flat_buffer(12, 3, 8), ()),
    "prioritised flat": (
        lambda lib: lib.make_prioritised_flat_buffer(36, 6, 16, False, ENVS, 0.7),
        (ENVS,),
    ),
    "item": (lambda lib: lib.make_item_buffer(20, 4, 8, True, True), (ENVS, 2)),
    "prioritised item": (
        lambda lib: lib.make_prioritised_item_buffer(20, 4, 8, add_batches=True),
        (3,),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_states_have_the_fields_of_flashbax(name):
    make, axes = MAKERS[name]
    mine, other = make(fbx), make(flashbax)
    state, theirs = mine.init(EXAMPLE), other.init(EXAMPLE)
    add, their_add = jax.jit(mine.add), jax.jit(other.add)
    for number in range(17):
        batch = batch_of(number, *axes)
        state, theirs = add(state, batch), their_add(theirs, batch)
        assert bool(state.is_full) == bool(theirs.is_full)
        assert int(state.current_index) == int(theirs.current_index)
        assert bool(mine.can_sample(state)) == bool(other.can_sample(theirs))
        if theirs.is_full:
            chex.assert_trees_all_equal(state.experience, theirs.experience)
        if "prioritised" in name:
            assert int(state.running_index) == int(theirs.running_index)
            np.testing.assert_allclose(
                state.sum_tree_state.nodes[0], theirs.sum_tree_state.nodes[0], rtol=1e-5
            )
    sample = jax.jit(mine.sample)(state, jax.random.key(1))
    their_sample = jax.jit(other.sample)(theirs, jax.random.key(1))
    shapes = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    assert shapes(sample.experience) == shapes(their_sample.experience)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MAKERS if "prioritised" in name])
def test_priorities_go_where_flashbax_puts_them(name):
    make, axes = MAKERS[name]
    mine, other = make(fbx), make(flashbax)
    state, theirs = mine.init(EXAMPLE), other.init(EXAMPLE)
    for number in range(11):
        batch = batch_of(number, *axes)
        state, theirs = mine.add(state, batch), other.add(theirs, batch)
    sample = mine.sample(state, jax.random.key(0))
    indices, where = np.unique(sample.indices, return_index=True)
    priorities = jnp.arange(1.0, 1.0 + len(indices))
    state = mine.set_priorities(state, jnp.asarray(indices), priorities)
    theirs = other.set_priorities(theirs, jnp.asarray(indices), priorities)
    np.testing.assert_allclose(state.sum_tree_state.nodes, theirs.sum_tree_state.nodes, rtol=1e-5)
    rows = jax.vmap(lambda item: item)(jax.tree.map(lambda leaf: leaf[where], sample.experience))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(rows))
    again = mine.sample(state, jax.random.key(2))
    leaves = np.asarray(theirs.sum_tree_state.nodes)
    masses = leaves[len(leaves) // 2 + np.asarray(again.indices)]
    np.testing.assert_allclose(again.probabilities, masses / leaves[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 8, 10])  # 8 are rounded down to 5, too few for the period
def test_priorities_reach_the_windows_that_were_sampled(rows):
    buffer = fbx.make_prioritised_trajectory_buffer(ENVS, 64, 2, 5, 2, max_length_time_axis=rows)
    state = buffer.init({"t": jnp.int32(0)})
    add, sample = jax.jit(buffer.add), jax.jit(buffer.sample)
    for number in range(14):
        state = add(state, {"t": number + 100 * jnp.arange(ENVS, dtype=jnp.int32)[:, None]})
        if not buffer.can_sample(state):
            continue
        batch = sample(state, jax.random.key(number))
        for index in np.unique(batch.indices):
            chosen = batch.experience["t"][np.asarray(batch.indices) == index]
            assert (chosen == chosen[0]).all()
            ones = jnp.asarray(batch.indices == index, jnp.float32)
            again = sample(buffer.set_priorities(state, batch.indices, ones), jax.random.key(0))
            assert (again.indices == index).all()
            assert (again.experience["t"] == chosen[0]).all()


def test_samples_are_windows_of_what_was_added():
    buffer = fbx.make_trajectory_buffer(ENVS, 64, 4, 1, 4, max_length_time_axis=12)
    state = buffer.init({"t": jnp.int32(0)})
    steps = jnp.arange(30).reshape(1, 30) + 100 * jnp.arange(ENVS)[:, None]
    for first in range(0, 30, 6):
        state = buffer.add(state, {"t": steps[:, first : first + 6].astype(jnp.int32)})
    windows = np.asarray(buffer.sample(state, jax.random.key(0)).experience["t"])
    assert (np.diff(windows, axis=1) == 1).all()
    assert set(windows[:, 0] % 100) == set(range(18, 27))


def test_pairs_cross_the_ends_of_episodes():
    buffer = fbx.make_flat_buffer(8, 2, 8)
    state = buffer.init({"t": jnp.int32(0), "done": jnp.zeros((), bool)})
    for number in range(8):
        state = buffer.add(state, {"t": jnp.int32(number), "done": jnp.asarray(number == 3)})
    pair = buffer.sample(state, jax.random.key(0)).experience
    assert (np.asarray(pair.second["t"]) == np.asarray(pair.first["t"]) + 1).all()


def test_priorities_of_0_leave_nothing_to_sample():
    buffer = fbx.make_prioritised_item_buffer(8, 2, 4)
    state = buffer.init(EXAMPLE)
    for seed in range(3):
        state = buffer.add(state, batch_of(seed))
    none = buffer.set_priorities(state, jnp.arange(3), jnp.zeros(3))
    assert buffer.can_sample(state) and not buffer.can_sample(none)
    with pytest.raises(ValueError, match="finds no mass"):
        buffer.sample(none, jax.random.key(0))
    assert not jax.jit(buffer.sample)(none, jax.random.key(0)).probabilities.any()
    some = buffer.set_priorities(none, jnp.array([1]), jnp.array([0.5]))
    assert set(buffer.sample(some, jax.random.key(0)).indices.tolist()) == {1}


def test_a_queue_gives_each_step_once():
    queue = fbx.make_trajectory_queue(6, ENVS, 2, 2)
    state, total = queue.init({"t": jnp.int32(0)}), []
    add, sample = jax.jit(queue.add), jax.jit(queue.sample)
    written = 0
    for _ in range(12):
        while queue.can_add(state):
            row = jnp.arange(written, written + 2, dtype=jnp.int32)
            state = add(state, {"t": jnp.broadcast_to(row, (ENVS, 2))})
            written += 2
        state, batch = sample(state)
        assert batch.experience["t"].shape == (ENVS, 2)
        total += batch.experience["t"][1].tolist()
    assert total == list(range(24))


def test_mixtures_have_exact_shares():
    buffers = [fbx.make_item_buffer(20, 2, 8, add_sequences=True) for _ in range(2)]
    states = [
        buffer.add(buffer.init({"t": jnp.int32(0)}), {"t": jnp.full(20, 10 * number, jnp.int32)})
        for number, buffer in enumerate(buffers)
    ]
    mixer = fbx.make_mixer(buffers, 8, (0.25, 0.75))
    assert bool(mixer.can_sample(states))
    batch = jax.jit(mixer.sample)(states, jax.random.key(0))
    assert sorted(batch.experience["t"].tolist()) == [0] * 2 + [10] * 6


def test_a_state_can_be_made_of_arrays():
    buffer = fbx.make_trajectory_buffer(ENVS, 16, 4, 1, 4, max_length_time_axis=12)
    state = buffer.init(EXAMPLE)
    for number in range(3):
        state = buffer.add(state, batch_of(number, ENVS, 5))
    again = fbx.TrajectoryBufferState(state.experience, state.current_index, state.is_full)
    chex.assert_trees_all_equal(again.experience, state.experience)
    assert int(again.current_index) == int(state.current_index)
    assert bool(buffer.can_sample(again))
    both = [buffer.sample(one, jax.random.key(0)) for one in (state, again)]
    assert jax.tree.map(jnp.shape, both[0]) == jax.tree.map(jnp.shape, both[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: fbx.make_trajectory_buffer(2, 4, 9, 1, 9, max_length_time_axis=8),
        lambda: fbx.make_flat_buffer(3, 1, 1, add_batch_size=2),
        lambda: fbx.make_item_buffer(4, 1, 5),
        lambda: fbx.make_prioritised_item_buffer(4, 1, 2, priority_exponent=1.5),
        lambda: fbx.make_trajectory_queue(4, 1, 1, 5),
        lambda: fbx.make_mixer([fbx.make_item_buffer(4, 1, 2)], 4, [0.5, 0.5]),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ValueError, match="expected"):
        make()


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.parametrize(
    ("some", "least"),
    [
        ("flat and not doesnt_sample", 10),
        pytest.param("not doesnt_sample", 50, marks=pytest.mark.long),
        pytest.param("doesnt_sample", 50, marks=pytest.mark.long),
    ],
)
def test_the_tests_of_flashbax(some, least):
    """Runs flashbax's test files in a subprocess, with `jrb.compat.flashbax` in its place."""
    folder = pathlib.Path(flashbax.__file__).parent
    files = sorted(
        str(path) for path in folder.glob("buffers/*_test.py") if "sum_tree" not in path.name
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.compat.flashbax_plugin", "-q", "-rf"]
    command += [
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        f"--rootdir={folder}",
        "-k",
        some,
        *files,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    failed = set(re.findall(r"FAILED \S*?(\w+\.py::\w+)", result.stdout))
    assert failed <= KNOWN, result.stdout
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > least, result.stdout


def test_installed_modules_have_the_names_that_programs_import():
    script = """
        import jrb.compat.flashbax as facade
        facade.install()
        facade.install()
        import flashbax, flashbax.buffers.trajectory_buffer as trajectory
        from flashbax.buffers.trajectory_buffer import BufferState, TrajectoryBufferState
        from flashbax.buffers import flat_buffer, make_flat_buffer, prioritised_item_buffer
        from flashbax.buffers.flat_buffer import ExperiencePair, TransitionSample
        from flashbax.buffers.trajectory_queue import TrajectoryQueueSample
        import flashbax.vault, flashbax.utils
        assert flashbax.flat_buffer is flashbax.buffers.flat_buffer is flat_buffer
        assert flashbax.make_flat_buffer is facade.make_flat_buffer is make_flat_buffer
        assert trajectory.TrajectoryBufferState is facade.TrajectoryBufferState
        TrajectoryBufferState[dict], trajectory.TrajectoryBuffer[dict, BufferState, dict]
        flashbax.TrajectoryBufferSample[dict], ExperiencePair[dict], TransitionSample[dict]
        facade.PrioritisedTrajectoryBufferState[dict], facade.TrajectoryQueueState[dict]
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


def agents_of(make, axes, count):
    """Returns a buffer and the vmapped states of `count` agents, each with its own steps."""
    buffer = make(fbx)
    states = jax.vmap(lambda _: buffer.init(EXAMPLE))(jnp.arange(count))
    for number in range(14):
        batches = [batch_of(100 * agent + number, *axes) for agent in range(count)]
        states = jax.vmap(buffer.add)(states, jax.tree.map(lambda *x: jnp.stack(x), *batches))
    return buffer, states


def check_agents(buffer, states, batches, after=None):
    """Asserts that each agent samples its own steps and, given `after`, has its own priorities."""
    for agent, steps in enumerate(np.asarray(states.experience["x"])):
        stored = {tuple(step) for step in steps.reshape(-1, 2).tolist()}
        sampled = jax.tree.map(lambda leaf: np.asarray(leaf)[agent], batches.experience)  # noqa: B023
        for items in sampled if isinstance(sampled, fbx.ExperiencePair) else (sampled,):
            assert {tuple(step) for step in items["x"].reshape(-1, 2).tolist()} <= stored
    if after is not None:
        tree = after.sum_tree_state
        masses = np.take_along_axis(
            np.asarray(tree.nodes), tree.nodes.shape[1] // 2 + np.asarray(batches.indices), 1
        )
        alpha = buffer.buffer.sampler.alpha
        np.testing.assert_allclose(masses, np.array([[2.0], [3.0]]) ** alpha + 0 * masses, 1e-5)


def cycle_of(buffer):
    """Returns one draw of an agent, with a priority update if the buffer has priorities."""

    def cycle(state, key, priority):
        batch = buffer.sample(state, key)
        if isinstance(buffer, fbx.PrioritisedTrajectoryBuffer):
            state = buffer.set_priorities(state, batch.indices, priority + 0 * batch.probabilities)
        return state, batch, buffer.can_sample(state)

    return cycle


MAPS = {
    "vmap": jax.vmap,
    "jit of vmap": lambda function: jax.jit(jax.vmap(function)),
    "pmap": lambda function: jax.pmap(function, axis_name="device"),
}


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("how", MAPS)
@pytest.mark.parametrize("name", ["trajectory", "flat", "prioritised flat", "prioritised item"])
def test_states_that_are_mapped(name, how):
    make, axes = MAKERS[name]
    buffer, states = agents_of(make, axes, 2)
    priorities, keys = jnp.array([2.0, 3.0]), jax.random.split(jax.random.key(0), 2)
    after, batches, ready = MAPS[how](cycle_of(buffer))(states, keys, priorities)
    assert ready.all()
    assert np.asarray(states.is_full).shape == np.asarray(after.current_index).shape == (2,)
    check_agents(buffer, states, batches, after if "prioritised" in name else None)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map")
@pytest.mark.parametrize("replicated", [False, True])
def test_states_in_shard_map(replicated):
    """Each device has its own state; the new priorities are replicated or differ."""
    make, axes = MAKERS["prioritised trajectory"]
    buffer, states = agents_of(make, axes, 2)
    spec = jax.sharding.PartitionSpec("device")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("device",))
    cycle = jax.vmap(cycle_of(buffer), in_axes=(0, 0, None if replicated else 0))
    specs = (spec, spec, jax.sharding.PartitionSpec() if replicated else spec)
    step = jax.jit(jax.shard_map(cycle, mesh=mesh, in_specs=specs, out_specs=spec))
    keys = jax.random.split(jax.random.key(0), 2)
    priorities = jnp.float32(2.0) if replicated else jnp.array([2.0, 3.0])
    after, batches, ready = step(states, keys, priorities)
    assert ready.all()
    check_agents(buffer, states, batches, None if replicated else after)


@pytest.mark.slow
def test_a_mixer_of_mapped_states():
    buffers, states = zip(*[agents_of(*MAKERS["prioritised flat"], 2)] * 2, strict=True)
    mixer = fbx.make_mixer(buffers, 16, (0.5, 0.5))
    keys = jax.random.split(jax.random.key(0), 2)
    batches = jax.vmap(mixer.sample)(states, keys)
    assert batches.experience.first["x"].shape == (2, 16, 2)
    assert jax.vmap(mixer.can_sample)(states).all()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["trajectory", "flat", "item"])
def test_a_state_of_arrays_is_sampled_inside_jit(name, full):
    """A buffer samples its windows from the arrays of another buffer, as read from a Vault."""
    first = fbx.make_trajectory_buffer(ENVS, 1, 1, 1, 1, max_length_time_axis=12)
    state = first.init({"t": jnp.int32(0)})
    for number in range(0, 20 if full else 10, 5):
        steps = jnp.arange(number, number + 5) + 100 * jnp.arange(ENVS)[:, None]
        state = first.add(state, {"t": steps.astype(jnp.int32)})
    state = fbx.TrajectoryBufferState(state.experience, state.current_index, state.is_full)
    buffer = MAKERS[name][0](fbx)
    batch = jax.jit(buffer.sample, static_argnums=2)(state, jax.random.key(0), 400).experience
    stored = range(8, 20) if full else range(10)
    length = {"trajectory": 4, "flat": 2, "item": 1}[name]
    if name == "flat":
        batch = {"t": jnp.stack([batch.first["t"], batch.second["t"]], axis=1)}
    windows = np.asarray(batch["t"]).reshape(-1, length)
    starts = [
        100 * env + step for env in range(ENVS) for step in stored[: len(stored) - length + 1]
    ]
    assert set(windows[:, 0].tolist()) == set(starts)
    assert (windows == windows[:, :1] + np.arange(length)).all()
    if name == "trajectory":
        assert jax.jit(buffer.can_sample)(state)
