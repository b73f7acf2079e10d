"""Items with one reward per agent: returns, ranks and plots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(0)


def rows(count=12):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(count, *shape)).astype(np.float32)
    place = np.arange(count, dtype=np.float32)
    goals = {"achieved_goal": place, "desired_goal": np.full(count, -1, np.float32)}
    after = {
        "observation": {**goals, "achieved_goal": place + 1},
        "done": np.arange(count) % 4 == 3,
    }
    return {"observation": goals, "next": {**after, "reward": {"a": draw(), "b": draw()}}}


def agent(items, name):
    return {**items, "next": {**items["next"], "reward": items["next"]["reward"][name]}}


def one_reward(reached, goal):
    return jnp.float32(10) * (reached == goal).astype(jnp.float32) + goal


def rewards(reached, goal):
    return {"a": one_reward(reached, goal), "b": -one_reward(reached, goal)}


@pytest.mark.slow
def test_goals_give_each_agent_its_reward():
    items = rows()
    unit_of = lambda reward: jrb.Hindsight(reward, ratio=0.7, unit=jrb.NStep(3, 0.5))
    buffer, state = jrb.from_items(items, unit=unit_of(rewards), batch_size=32)
    found = buffer.sample(state, KEY)
    signs = {"a": one_reward, "b": lambda reached, goal: -one_reward(reached, goal)}
    for name, reward in signs.items():
        alone, its = jrb.from_items(agent(items, name), unit=unit_of(reward), batch_size=32)
        want = alone.sample(its, KEY).data["next"]["reward"]
        np.testing.assert_array_equal(found.data["next"]["reward"][name], want)


def test_goals_ask_for_rewards_as_items_have_them_and_one_flag():
    items = rows()
    buffer, state = jrb.from_items(items, unit=jrb.Hindsight(one_reward), batch_size=4)
    with pytest.raises(ValueError, match=r"Hindsight: reward: leaf 'a': .*expected the leaves"):
        buffer.sample(state, KEY)
    items["next"]["done"] = {"a": items["next"]["done"], "b": items["next"]["done"]}
    ends = lambda reached, goal: reached == goal
    jrb.from_items(items, unit=jrb.Hindsight(rewards))
    with pytest.raises(ValueError, match="Hindsight: terminated: expected one flag"):
        jrb.from_items(items, unit=jrb.Hindsight(rewards, terminated=ends))


def test_goals_compute_flags_anew_that_are_not_called_done():
    items = rows()
    items["over"], items["r"] = items["next"].pop("done"), items["next"].pop("reward")["a"]
    keys = jrb.Keys(done=None, terminated="over", truncated=None, reward="r")
    ends = lambda reached, goal: reached == goal
    unit = jrb.Hindsight(one_reward, "final", 1.0, terminated=ends, unit=jrb.NStep(3, 1.0))
    buffer, state = jrb.from_items(items, unit=unit, keys=keys, batch_size=64)
    data = buffer.sample(state, KEY).data
    want = data["next"]["observation"]["achieved_goal"] == data["observation"]["desired_goal"]
    np.testing.assert_array_equal(data["over"], want)


def test_the_rank_of_an_item_is_the_sum_over_agents():
    items = rows()
    writer = jrb.MaxValue(("next", "reward"))
    buffer = jrb.ReplayBuffer(4, batch_size=4, writer=writer)
    state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], items)), items)
    total = items["next"]["reward"]["a"] + items["next"]["reward"]["b"]
    found = jrb.items(buffer, state)["observation"]["achieved_goal"]
    np.testing.assert_array_equal(np.sort(found), np.sort(np.argsort(-total)[:4]))


def test_numbers_and_pictures_tell_the_returns_of_all():
    items = rows()
    buffer, state = jrb.from_items(items, unit=jrb.NStep(2, 1.0))
    found = jrb.stats(buffer, state)["return"]
    episodes = jrb.episodes(buffer, state)
    for name in ("a", "b"):
        alone, its = jrb.from_items(agent(items, name), unit=jrb.NStep(2, 1.0))
        assert found[name] == jrb.stats(alone, its)["return"]
        assert episodes[1].return_[name] == jrb.episodes(alone, its)[1].return_
    returns = jrb.datasets.trajectories.returns(items)
    assert [each.return_["a"] for each in episodes] == returns["a"].tolist()
    pytest.importorskip("matplotlib")
    assert jrb.plot.state(buffer, state) is not None


def test_priorities_of_windows_may_be_infinite_in_a_share_of_0():
    unit = jrb.Sequence(4)
    huge, mask = jnp.full((2, 4), 3e38, jnp.float32), jnp.ones((2, 4), jnp.bool_)
    np.testing.assert_array_equal(unit.reduce_priorities(huge, mask), huge[:, 0])
