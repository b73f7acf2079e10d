"""Running statistics stay finite, and do not depend on how rows are cut into calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import transforms as tr

BOTH = (tr.RunningNormalize(), tr.RunningRewardScale(0.0))


@functools.cache
def buffer_of(envs=None, transforms=BOTH, **parts):
    return jrb.ReplayBuffer(200, num_envs=envs, batch_size=64, transforms=transforms, **parts)


def items(numbers, done=False):
    numbers = np.asarray(numbers, np.float32)
    after = {"reward": numbers, "done": np.broadcast_to(done, numbers.shape)}
    return {"observation": numbers, "next": after}


def written(buffer, numbers, cuts=(), done=False):
    rows = items(numbers, done)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
    for part in zip(*(np.split(leaf, cuts) for leaf in jax.tree.leaves(rows)), strict=True):
        state = buffer.extend(state, jax.tree.unflatten(jax.tree.structure(rows), part))
    return state


def moments_of(state):
    return state.transforms[0]["observation"], state.transforms[1].moments


@pytest.mark.parametrize("huge", [3e19, -1e25, 3.4e38, np.inf, np.nan])
def test_what_is_too_large_is_left_out_and_counted(huge):
    numbers = np.linspace(-1, 1, 40, dtype=np.float32)
    numbers[[7, 20]] = huge, -huge
    rest = np.delete(numbers, [7, 20]).astype(np.float64)
    state = written(buffer_of(), numbers)
    for found in moments_of(state):
        assert (int(found.count), int(found.left_out)) == (38, 2)
        np.testing.assert_allclose(found.mean, rest.mean(), atol=1e-7)
        np.testing.assert_allclose(found.var, rest.var(), rtol=1e-6)
    for clip in (10.0, None):
        both = tr.RunningNormalize(clip=clip), tr.RunningRewardScale(0.0, clip=clip)
        data = buffer_of(transforms=both).sample(state, jax.random.key(0)).data
        for leaf in (data["observation"], data["next"]["reward"]):
            assert np.isnan(leaf).any() == np.isnan(huge)
            assert np.isfinite(huge) <= np.isfinite(leaf).all()
            assert clip is None or not (np.abs(leaf) > clip).any()


def test_the_largest_numbers_that_count_leave_everything_finite():
    numbers = np.float32([4e18, -4e18] * 50)
    for cuts in ((), range(1, 100), (33,)):
        for found in moments_of(written(buffer_of(), numbers, cuts)):
            assert (int(found.count), int(found.left_out)) == (100, 0)
            np.testing.assert_allclose(found.var, 1.6e37, rtol=1e-5)


def test_a_return_that_grows_too_large_is_left_out_until_its_episode_ends():
    buffer = buffer_of(transforms=(tr.RunningRewardScale(1.0),))
    state = written(buffer, [3e18] * 4 + [1.0] * 2, done=np.arange(6) == 3)
    found = state.transforms[0]
    assert (int(found.moments.count), int(found.moments.left_out)) == (3, 3)
    assert found.running.tolist() == [2.0]


@pytest.mark.parametrize("offset", [3e7, -3e7, 1e9, 0.0])
@pytest.mark.parametrize("cuts", [(), range(1, 180), (7, 100)], ids=["one call", "rows", "three"])
def test_moments_are_exact_far_from_zero_however_rows_are_cut(offset, cuts):
    spread = 20 * max(1.0, abs(offset) / 3e7)
    numbers = offset + np.random.default_rng(0).uniform(-spread, spread, 180)
    numbers = numbers.astype(np.float32)
    wide = numbers.astype(np.float64)
    state = written(buffer_of(), numbers, cuts)
    for found in moments_of(state):
        mean = float(found.mean) + float(found.mean_rest)
        np.testing.assert_allclose(mean, wide.mean(), atol=1e-5 * spread)
        np.testing.assert_allclose(found.var, wide.var(), rtol=1e-5)
    seen = tr.normalized(buffer_of(), state, jnp.asarray(numbers))
    np.testing.assert_allclose(seen, (wide - wide.mean()) / wide.std(), atol=1e-4)


def test_many_equal_numbers_behind_another_one_are_summed_exactly():
    numbers = np.full(300_000, 0.1, np.float32)
    numbers[0] = 0.0
    found, _ = moments_of(written(buffer_of(), numbers))
    wide = numbers.astype(np.float64)
    np.testing.assert_allclose(found.mean, wide.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.var, wide.var(), rtol=1e-3)


def test_an_eps_below_all_numbers_leaves_what_is_constant_finite():
    buffer = buffer_of(transforms=(tr.RunningNormalize(eps=1e-60),))
    state = written(buffer, [5.0] * 9)
    assert buffer.sample(state, jax.random.key(0)).data["observation"].tolist() == [0.0] * 64


@pytest.mark.parametrize("unit", [jrb.Transition(), jrb.NStep(2, 0.9)], ids=repr)
def test_returns_end_where_the_number_of_the_episode_changes(unit):
    keys, scale = jrb.Keys(episode="id"), (tr.RunningRewardScale(1.0),)
    buffer = jrb.ReplayBuffer(8, 2, transforms=scale, keys=keys, unit=unit)
    state = buffer.init({"id": 0, "next": {"reward": 0.0}})
    numbers = np.int32([[5, 7], [5, 8], [6, 8], [6, 8]])
    rows = {"id": numbers, "next": {"reward": np.ones((4, 2), np.float32)}}
    at_once = buffer.extend(state, rows)
    for t in range(4):
        state = buffer.add(state, jax.tree.map(lambda leaf, t=t: leaf[t], rows))
    for found in (at_once, state):
        assert found.transforms[0].running.tolist() == [2.0, 3.0]


@pytest.mark.slow
def test_each_agent_has_a_return_and_a_scale_of_its_own():
    alone, scale = buffer_of(), (tr.RunningRewardScale(0.9),)
    rng = np.random.default_rng(1)
    rewards = {"a": rng.normal(size=(20, 3)), "b": 100 * rng.normal(size=(20,))}
    rewards = jax.tree.map(np.float32, rewards)
    rows = {"next": {"reward": rewards, "done": np.arange(20) % 7 == 6}}
    both = jrb.ReplayBuffer(20, batch_size=16, transforms=scale)
    one = jax.tree.map(lambda leaf: leaf[0], rows)
    state = both.extend(both.init(one), rows)
    state = both.truncate(state)
    batch = both.sample(state, jax.random.key(0))
    for agent, reward in rewards.items():
        alone = jrb.ReplayBuffer(20, batch_size=16, transforms=scale)
        own = {"next": {"reward": reward, "done": rows["next"]["done"]}}
        its = alone.extend(alone.init(jax.tree.map(lambda leaf: leaf[0], own)), own)
        its = alone.truncate(its)
        same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
        same(state.transforms[0][agent], its.transforms[0])
        drawn = alone.sample(its, jax.random.key(0)).data["next"]["reward"]
        same(batch.data["next"]["reward"][agent], drawn)
    rebuilt = jrb.rebuild(both, state, jrb.ReplayBuffer(40, batch_size=16, transforms=scale))
    same(rebuilt.transforms[0]["a"].moments, state.transforms[0]["a"].moments)
