"""A state read from flashbax holds and draws the same items as in flashbax."""

import functools
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.interop]

flashbax = pytest.importorskip("flashbax")

EXPONENT = 0.6


def steps(start, count, envs):
    """Returns timesteps `[A, T, ...]`, each with a unique number."""
    time = jnp.arange(start, start + count, dtype=jnp.int32)
    number = time + 1000 * jnp.arange(envs, dtype=jnp.int32)[:, None]
    observation = jnp.stack([number, -number], axis=-1).astype(jnp.float32)
    return {
        "observation": observation,
        "number": number,
        "next": {"done": jnp.zeros((envs, count), bool)},
    }


EXAMPLE = jax.tree.map(lambda leaf: leaf[0, 0], steps(0, 1, 1))


def filled(buffer, count, envs, by=3):
    """Returns a flashbax state after `count` timesteps, added `by` at a time."""
    with jax.numpy_dtype_promotion("standard"):
        state = buffer.init(EXAMPLE)
        for start in range(0, count, by):
            state = buffer.add(state, steps(start, min(by, count - start), envs))
    return state


def compiled(buffer):
    """Returns the buffer with jitted methods."""
    methods = ("init", "add", "sample", "set_priorities")
    return buffer.replace(
        **{name: jax.jit(getattr(buffer, name)) for name in methods if hasattr(buffer, name)}
    )


@functools.cache
def trajectory(envs, length, sequence=2, period=1, **kind):
    make = flashbax.make_prioritised_trajectory_buffer if kind else flashbax.make_trajectory_buffer
    return compiled(
        make(
            add_batch_size=envs,
            sample_batch_size=256,
            sample_sequence_length=sequence,
            period=period,
            min_length_time_axis=sequence,
            max_length_time_axis=length,
            **kind,
        )
    )


def prioritised(envs, length, sequence=2, period=1):
    return trajectory(envs, length, sequence, period, priority_exponent=EXPONENT)


def with_priorities(buffer, state, rounds=4):
    """Returns the state after a few priority updates, and the greatest new priority."""
    highest = 1.0
    with jax.numpy_dtype_promotion("standard"):
        for seed in range(rounds):
            indices = buffer.sample(state, jax.random.key(seed)).indices
            priorities = 0.1 + jax.random.uniform(jax.random.key(100 + seed), indices.shape) * 3
            state = buffer.set_priorities(state, indices, priorities)
            highest = max(highest, float(priorities.max()))
    return state, highest


def drawn(buffer, state, seed=0):
    with jax.numpy_dtype_promotion("standard"):
        return buffer.sample(state, jax.random.key(seed))


def numbers(buffer, state):
    """Returns the number in each slot, `[R, E]`, of a ring that is full or has not wrapped."""
    slots = jnp.arange(int(buffer.size(state))).reshape(-1, buffer.ring.envs)
    return np.asarray(buffer.take(state, slots)["number"])


@pytest.mark.parametrize(("count", "envs"), [(2, 1), (7, 3), (8, 1), (8, 3), (13, 3), (24, 1)])
def test_every_row_keeps_its_place(envs, count):
    state = filled(trajectory(envs, 8), count, envs)
    dump = checkpoint.read_flashbax(state)
    rows = min(count, 8)
    assert dump.info == {
        "cursor": count % 8,
        "full": count >= 8,
        "num_envs": envs,
        "capacity": 8 * envs,
    }
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_array_equal(
            ours, np.swapaxes(np.asarray(theirs), 0, 1)[:rows], strict=True
        ),
        dump.items,
        state.experience,
    )


@pytest.mark.parametrize(("count", "envs"), [(5, 3), (8, 1), (13, 3)])
def test_adding_goes_on_where_flashbax_would(envs, count):
    theirs, ours = trajectory(envs, 8), jrb.ReplayBuffer(capacity=8 * envs, num_envs=envs)
    state = filled(theirs, count, envs)
    mine = checkpoint.read_flashbax(state).into(ours)
    more = steps(count, 5, envs)
    mine = ours.extend(mine, jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), more))
    with jax.numpy_dtype_promotion("standard"):
        state = theirs.add(state, more)
    rows = min(count + 5, 8)
    assert int(mine.writer.cursor) == int(state.current_index)
    assert int(ours.size(mine)) == rows * envs
    np.testing.assert_array_equal(
        numbers(ours, mine)[:rows], np.asarray(state.experience["number"]).T[:rows]
    )


def test_of_a_smaller_buffer_the_newest_rows_stay():
    state = filled(trajectory(2, 8), 13, 2)
    buffer = jrb.ReplayBuffer(capacity=8, num_envs=2)
    mine = checkpoint.read_flashbax(state).into(buffer)
    assert set(numbers(buffer, mine)[:, 0]) == {9, 10, 11, 12}


def test_containers_stay_as_they_are():
    buffer = trajectory(2, 8)
    with jax.numpy_dtype_promotion("standard"):
        state = buffer.init((jnp.zeros(3), [jnp.zeros((), jnp.bfloat16)]))
        state = buffer.add(state, (jnp.ones((2, 4, 3)), [jnp.ones((2, 4), jnp.bfloat16)]))
    items = checkpoint.read_flashbax(state).items
    assert isinstance(items, tuple) and isinstance(items[1], list)
    assert items[0].shape == (4, 2, 3) and items[1][0].dtype == jnp.bfloat16


def test_the_items_outlive_a_donated_state():
    buffer = trajectory(2, 8)
    state = filled(buffer, 8, 2)
    dump = checkpoint.read_flashbax(state)
    before = jax.tree.map(np.array, dump.items)
    with jax.numpy_dtype_promotion("standard"):
        jax.block_until_ready(jax.jit(buffer.add, donate_argnums=0)(state, steps(50, 6, 2)))
    chex.assert_trees_all_equal(dump.items, before)


@pytest.mark.parametrize(
    ("envs", "count", "period"), [(1, 8, 1), (3, 6, 2), (3, 13, 2), (3, 18, 4)]
)
def test_priorities_lie_where_sequences_start(envs, count, period):
    theirs = prioritised(envs, 8, sequence=4, period=period)
    state, highest = with_priorities(theirs, filled(theirs, count, envs))
    dump = checkpoint.read_flashbax(state, priority_exponent=EXPONENT, sequence_length=4)
    batch = drawn(theirs, state)
    priorities, number = dump.info["priorities"], dump.items["number"]
    assert priorities.dtype == np.float32 and priorities.shape == number.shape
    is_item = priorities >= 0
    starts = np.unique(np.asarray(batch.experience["number"])[:, 0])
    assert set(starts) <= set(number[is_item])
    mass = np.where(is_item, priorities, 0) ** EXPONENT
    expected = dict(zip(number[is_item], (mass / mass.sum())[is_item], strict=True))
    got = [expected[start] for start in np.asarray(batch.experience["number"])[:, 0]]
    np.testing.assert_allclose(got, batch.probabilities, rtol=1e-4)
    assert dump.info["alpha"] == EXPONENT and dump.info["eps"] == 0.0
    assert dump.info["max_priority"] == pytest.approx(highest, rel=1e-5)


@pytest.mark.parametrize(("count", "known"), [(7, None), (8, 3), (13, None)])
def test_sequences_are_drawn_with_the_same_probabilities(count, known):
    theirs = prioritised(2, 8, sequence=3)
    state, highest = with_priorities(theirs, filled(theirs, count, 2))
    dump = checkpoint.read_flashbax(state, priority_exponent=EXPONENT, sequence_length=known)
    ours = jrb.ReplayBuffer(
        capacity=16,
        num_envs=2,
        batch_size=256,
        sampler=jrb.Prioritized(alpha=EXPONENT, eps=0.0),
        unit=jrb.Sequence(length=3),
    )
    mine = dump.into(ours)
    assert int(mine.writer.cursor) == int(state.current_index)
    assert float(mine.sampler.highest) == pytest.approx(highest, rel=1e-5)
    one, other = drawn(theirs, state), ours.sample(mine, jax.random.key(1))
    table = lambda windows, chances: {
        tuple(window): chance
        for window, chance in zip(np.asarray(windows), np.asarray(chances), strict=True)
    }
    first = table(one.experience["number"], one.probabilities)
    second = table(other.data["number"], other.probabilities)
    assert first.keys() == second.keys()
    for window, chance in first.items():
        assert second[window] == pytest.approx(chance, rel=1e-4)


def test_raised_priorities_draw_the_same_without_an_exponent():
    theirs = prioritised(2, 8, sequence=2)
    state, _ = with_priorities(theirs, filled(theirs, 13, 2))
    raised = checkpoint.read_flashbax(state).info
    plain = checkpoint.read_flashbax(state, priority_exponent=EXPONENT).info
    some = raised["priorities"] >= 0
    np.testing.assert_array_equal(some, plain["priorities"] >= 0)
    np.testing.assert_allclose(
        raised["priorities"][some], plain["priorities"][some] ** EXPONENT, rtol=1e-5
    )
    assert raised["alpha"] == 1.0


def test_an_exponent_of_zero_leaves_what_there_is():
    theirs = trajectory(1, 8, priority_exponent=0.0)
    info = checkpoint.read_flashbax(filled(theirs, 5, 1), priority_exponent=0.0).info
    assert info["priorities"].ravel().tolist() == [1, 1, 1, 1, -1]
    assert info["max_priority"] == 1.0


def test_a_priority_of_zero_is_none_unless_the_length_is_known():
    theirs = prioritised(1, 8)
    with jax.numpy_dtype_promotion("standard"):
        state = theirs.set_priorities(filled(theirs, 6, 1), jnp.array([2]), jnp.array([0.0]))
    of = lambda length: checkpoint.read_flashbax(state, sequence_length=length).info["priorities"]
    assert of(None).ravel().tolist() == [1, 1, -1, 1, 1, -1]
    assert of(2).ravel().tolist() == [1, 1, 0, 1, 1, -1]


def test_a_broken_sequence_has_no_priority_where_the_length_is_known():
    theirs = prioritised(1, 8)
    with jax.numpy_dtype_promotion("standard"):  # a late update of an overwritten sequence
        state = theirs.set_priorities(filled(theirs, 11, 1), jnp.array([2]), jnp.array([5.0]))
    of = lambda length: checkpoint.read_flashbax(state, sequence_length=length).info["priorities"]
    assert of(None)[2, 0] == pytest.approx(5.0**EXPONENT)
    assert of(2)[:, 0].tolist() == [1, 1, -1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("count", [4, 11])
def test_item_buffers(count):
    theirs = compiled(flashbax.make_prioritised_item_buffer(8, 1, 8, True, True, EXPONENT))
    with jax.numpy_dtype_promotion("standard"):
        state = theirs.init(EXAMPLE)
        for start in range(count):
            state = theirs.add(state, steps(start, 1, 1))
    state, _ = with_priorities(theirs, state)
    dump = checkpoint.read_flashbax(
        state, priority_exponent=EXPONENT, sequence_length=1, squeeze=True
    )
    ours = jrb.ReplayBuffer(capacity=8, sampler=jrb.Prioritized(alpha=EXPONENT, eps=0.0))
    mine = dump.into(ours)
    batch = drawn(theirs, state)
    held = numbers(ours, mine)[: min(count, 8), 0]
    slots = {int(number): slot for slot, number in enumerate(held)}
    raw = np.asarray(mine.sampler.raw)
    mass = np.where(raw < 0, 0, raw) ** EXPONENT
    got = [mass[slots[int(number)]] / mass.sum() for number in batch.experience["number"]]
    np.testing.assert_allclose(got, batch.probabilities, rtol=1e-4)
    mine = ours.add(mine, dict(EXAMPLE, number=jnp.int32(99)))
    assert numbers(ours, mine)[count % 8, 0] == 99


def test_items_added_in_batches_lie_in_one_row():
    theirs = flashbax.make_item_buffer(8, 1, 4, add_sequences=True, add_batches=True)
    with jax.numpy_dtype_promotion("standard"):
        state = theirs.add(theirs.init(EXAMPLE), steps(0, 2, 3))
    dump = checkpoint.read_flashbax(state, squeeze=True)
    assert dump.items["number"].tolist() == [0, 1, 1000, 1001, 2000, 2001]
    assert dump.info == {"cursor": 6, "full": False, "num_envs": None, "capacity": 8}


@pytest.mark.parametrize("count", [5, 13])
@pytest.mark.parametrize("kind", ["make_flat_buffer", "make_prioritised_flat_buffer"])
def test_pairs_of_flat_buffers_are_windows_of_two(kind, count):
    theirs = compiled(getattr(flashbax, kind)(16, 2, 16, add_sequences=True, add_batch_size=2))
    state = filled(theirs, count, 2)
    ours = jrb.ReplayBuffer(capacity=16, num_envs=2, batch_size=256, unit=jrb.Sequence(length=2))
    windows = ours.sample(checkpoint.read_flashbax(state).into(ours), jax.random.key(0)).data
    held = {tuple(window) for window in np.asarray(windows["number"])}
    pairs = set()
    for seed in range(30):
        pair = drawn(theirs, state, seed).experience
        firsts, seconds = np.asarray(pair.first["number"]), np.asarray(pair.second["number"])
        pairs |= set(zip(firsts, seconds, strict=True))
    assert pairs == held


def test_keys_are_items_too():
    state = filled(trajectory(2, 4), 4, 2)
    keys = jax.random.split(jax.random.key(0), (2, 4))
    items = checkpoint.read_flashbax(state.replace(experience={"key": keys})).items
    assert items["key"].shape == (4, 2)
    assert bool((items["key"][3] == keys[:, 3]).all())


def test_what_is_no_state_is_named():
    queue = flashbax.make_trajectory_queue(4, 1, 1, 1)
    with pytest.raises(TypeError, match=r"TrajectoryQueueState, which has no 'current_index'"):
        checkpoint.read_flashbax(queue.init(EXAMPLE))
    with pytest.raises(TypeError, match="got dict, which has no 'experience'"):
        checkpoint.read_flashbax({})


def test_states_side_by_side_are_refused():
    state = filled(trajectory(1, 4), 2, 1)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    with pytest.raises(ValueError, match=r"under vmap, current_index of shape \(2,\)"):
        checkpoint.read_flashbax(many)


def test_arguments_that_do_not_fit_are_refused():
    state = filled(prioritised(2, 8), 4, 2)
    with pytest.raises(ValueError, match="squeeze: expected a single row"):
        checkpoint.read_flashbax(state, squeeze=True)
    with pytest.raises(ValueError, match=r"priority_exponent: expected a number in \[0, 1\]"):
        checkpoint.read_flashbax(state, priority_exponent=2.0)
    with pytest.raises(ValueError, match="sequence_length: expected at least 1"):
        checkpoint.read_flashbax(state, sequence_length=0)
    other = state.replace(sum_tree_state=state.sum_tree_state.replace(capacity=10))
    with pytest.raises(ValueError, match="5 leaves for each of 2 rows"):
        checkpoint.read_flashbax(other)


@pytest.fixture
def vault(tmp_path):
    """Returns the folder of a vault: 10 timesteps of 2 environments, from a buffer for 6."""
    library = pytest.importorskip("flashbax.vault")
    theirs = trajectory(2, 6)
    with jax.numpy_dtype_promotion("standard"):
        state = theirs.init(EXAMPLE)
        made = library.Vault("runs", state.experience, rel_dir=str(tmp_path), vault_uid="first")
        for start in range(0, 10, 2):
            state = theirs.add(state, steps(start, 2, 2))
            made.write(state)
    return tmp_path / "runs" / "first"


def test_a_vault_is_read_in_order_of_time(vault, capsys):
    capsys.readouterr()
    dump = checkpoint.read_vault(vault)
    assert capsys.readouterr().out == ""
    assert dump.info == {"cursor": 10, "full": False, "num_envs": 2, "capacity": 20}
    expected = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps(0, 10, 2))
    chex.assert_trees_all_equal(dump.items, expected)
    assert jax.tree.map(lambda leaf: leaf.dtype, dump.items) == jax.tree.map(
        lambda leaf: leaf.dtype, expected
    )


def test_a_vault_becomes_a_buffer(vault, monkeypatch):
    monkeypatch.chdir(vault.parent)
    buffer = jrb.ReplayBuffer(capacity=12, num_envs=2)
    state = checkpoint.read_vault("first").into(buffer)
    assert sorted(numbers(buffer, state)[:, 1]) == list(range(1004, 1010))
    newest = checkpoint.read_vault("first", newest=3)
    assert newest.items["number"][:, 0].tolist() == [7, 8, 9]
    assert len(checkpoint.read_vault("first", newest=30).items["number"]) == 10


def test_a_vault_takes_the_containers_of_an_example(vault):
    library = pytest.importorskip("flax.struct")
    item = library.dataclass(type("Item", (), {"__annotations__": dict.fromkeys(EXAMPLE, object)}))
    dump = checkpoint.read_vault(vault, example=item(**EXAMPLE))
    assert isinstance(dump.items, item)
    assert dump.items.number[:, 0].tolist() == list(range(10))


def test_a_vault_that_is_not_there_is_named(vault, tmp_path):
    with pytest.raises(FileNotFoundError, match="found nothing"):
        checkpoint.read_vault(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"found \['first'\]"):
        checkpoint.read_vault(vault.parent)


def test_a_vault_needs_flashbax(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flashbax.vault", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jrb\[flashbax\]'"):
        checkpoint.read_vault(tmp_path)
