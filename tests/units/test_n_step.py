"""N-step returns against plain lists of episodes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.units.streams import KEY, check, n_step, random_streams

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("n", "discount", "strict", "ring"),
    [(1, 0.5, False, (3, 1)), (3, 0.5, False, (4, 2)), (3, 0.5, True, (3, 1))],
)
@random_streams
def test_n_step(n, discount, strict, ring, data):
    unit = jrb.NStep(n, discount, strict=strict)
    check(unit, n_step(n, discount, strict), [ring, (11, 3)], data)


def test_the_published_example_of_n_step_returns():
    buffer = jrb.ReplayBuffer(8, batch_size=64, unit=jrb.NStep(3, 0.5))
    number, flag = jnp.float32(0), jnp.bool_(False)
    example = {
        "observation": number,
        "next": {"observation": number, "reward": number, "done": flag},
    }
    state = buffer.init(example)
    for t in range(5):
        after = {"observation": t + 1.0, "reward": 1.0, "done": t == 4}
        item = {"observation": jnp.float32(t), "next": jax.tree.map(jnp.asarray, after)}
        state = buffer.add(state, item)
    sample = buffer.sample(state, KEY)
    order = np.argsort(np.asarray(sample.indices))
    first = [order[np.searchsorted(np.asarray(sample.indices)[order], slot)] for slot in range(5)]
    assert sample.data["next"]["reward"][jnp.array(first)].tolist() == [1.75, 1.75, 1.75, 1.5, 1.0]
    assert sample.data["next"]["observation"][jnp.array(first)].tolist() == [3, 4, 5, 5, 5]
    assert sample.data["next"]["done"][jnp.array(first)].tolist() == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert sample.info["discount"][jnp.array(first)].tolist() == [0.125, 0.125, 0.125, 0.25, 0.5]


def paid_rows(rng, shape):
    """Returns rows with a reward of two components, and with a discount each."""
    done = rng.random(shape) < 0.2
    return {
        "observation": np.arange(np.prod(shape), dtype=np.int32).reshape(shape),
        "next": {
            "reward": rng.normal(size=(*shape, 2)).astype(np.float32),
            "done": done,
            "discount": np.where(done, 0, rng.random(shape)).astype(np.float32)[..., None],
        },
    }


def returns(items, slot, n, count, discount):
    """Returns the reward sum, the discount product and the last row of a return."""
    rewards, discounts = items["next"]["reward"], items["next"]["discount"][:, 0]
    total, product, at = np.zeros(2), 1.0, slot
    for row in range(slot, min(slot + n, count)):
        total = total + product * rewards[row].astype(float)
        product *= float(discounts[row]) if discount is None else discount
        at = row
        if items["next"]["done"][row]:
            break
    return total, product, at


@pytest.mark.parametrize("storage", [jrb.DeviceStorage, lambda: jrb.MemmapStorage(None)])
@pytest.mark.parametrize(("discount", "stacked"), [("next/discount", False), (0.5, True)])
def test_rows_may_have_their_own_discounts(discount, stacked, storage):
    items = paid_rows(np.random.default_rng(0), (40,))
    plain = jrb.NStep(3, discount)
    unit = jrb.FrameStack(1, unit=plain) if stacked else plain
    buffer, state = jrb.from_items(items, unit=unit, batch_size=64, storage=storage())
    sample = jax.tree.map(np.asarray, buffer.sample(state, KEY))
    after, info = sample.data["next"], sample.info
    for b, slot in enumerate(sample.indices.tolist()):
        own = discount if stacked else None
        total, product, last = returns(items, slot, 3, 40, own)
        np.testing.assert_allclose(after["reward"][b], total, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(info["discount"][b], product, rtol=1e-5)
        assert info["steps"][b] == last - slot + 1
        assert after["done"][b] == items["next"]["done"][last]
        assert after["discount"][b] == items["next"]["discount"][last]
    assert info["discount"].dtype == np.float32


def test_discounts_of_rows_are_masked_where_nothing_is_drawn():
    items = paid_rows(np.random.default_rng(0), (4,))
    unit = jrb.NStep(2, ("next", "discount"))
    buffer = jrb.ReplayBuffer(8, batch_size=8, unit=unit, sampler=jrb.Uniform(replacement=False))
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], items))
    info = buffer.sample(buffer.extend(state, items), KEY).info
    assert (np.asarray(info["discount"][4:]) == 0).all()
    assert (np.asarray(info["steps"]) > 0).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"discount": "gamma"}, ValueError, "discount: expected a floating leaf at 'gamma'"),
        ({"discount": "next/done"}, ValueError, r"floating leaf at 'next/done'"),
    ],
)
def test_what_returns_cannot_use_is_refused(changes, error, text):
    items = paid_rows(np.random.default_rng(0), (4,))
    items["next"]["observation"] = items["observation"]
    with pytest.raises(error, match=text):
        jrb.from_items(items, unit=dataclasses.replace(jrb.NStep(2, 0.9), **changes))


@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("discount", ["next/discount", 0.0])
def test_what_comes_after_a_discount_of_0_is_not_read(discount, bad, n):
    items = paid_rows(np.random.default_rng(0), (60,))
    items["next"]["done"][:] = False
    items["next"]["reward"][3:] = bad
    items["next"]["discount"][2], items["next"]["discount"][4:] = 0, np.nan
    want = items["next"]["reward"].copy()
    buffer, state = jrb.from_items(items, unit=jrb.NStep(n, discount), batch_size=256)
    sample = jax.tree.map(np.asarray, buffer.sample(state, KEY))
    if discount:
        for slot in range(3):
            want[slot] = returns(items, slot, 3 - slot, 60, None)[0]
    else:
        want[np.isnan(want)] = bad
    few = sample.indices < 3
    np.testing.assert_allclose(
        sample.data["next"]["reward"][few], want[sample.indices[few]], rtol=1e-5
    )
    assert few.any()
    assert (sample.info["discount"][few] == 0).all()


@pytest.mark.parametrize("n", [16, 17, 40, 64])
@pytest.mark.parametrize("discount", [0.9, "next/discount"])
def test_many_rows_are_summed_as_few_are(n, discount):
    items = paid_rows(np.random.default_rng(1), (300,))
    items["next"]["done"] = np.arange(300) % 90 == 89
    items["next"]["discount"] = np.maximum(items["next"]["discount"], 0.8)
    buffer, state = jrb.from_items(items, unit=jrb.NStep(n, discount), batch_size=64)
    sample = jax.tree.map(np.asarray, buffer.sample(state, KEY))
    own = None if isinstance(discount, str) else discount
    for b, slot in enumerate(sample.indices.tolist()):
        total, product, last = returns(items, slot, n, 300, own)
        np.testing.assert_allclose(sample.data["next"]["reward"][b], total, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sample.info["discount"][b], product, rtol=1e-5)
        assert sample.info["steps"][b] == last - slot + 1


REWARD = lambda reached, goal: jnp.float32(reached == goal)


@pytest.mark.parametrize(
    "unit",
    [
        lambda n: jrb.NStep(n, 0.9),
        lambda n: jrb.NStep(n, "discount"),
        lambda n: jrb.NStep(n, 0.9, strict=True),
        jrb.Sequence,
        lambda n: jrb.Sequence(n, partial="pad"),
        lambda n: jrb.FrameStack(n, paths=(("observation", "achieved_goal"),)),
        lambda n: jrb.Hindsight(REWARD, unit=jrb.Sequence(n)),
    ],
    ids=["n-step", "own discounts", "strict", "windows", "padded", "stacks", "goals"],
)
def test_programs_hardly_grow_with_the_number_of_rows(unit):
    goals = {"achieved_goal": np.float32(0), "desired_goal": np.float32(0)}
    after = {"observation": goals, "reward": np.float32(0), "done": np.bool_(False)}
    item = {"observation": goals, "discount": np.float32(1), "next": after}

    def size(n):
        to_go = jrb.transforms.RewardToGo(to="window")
        to_go = (to_go,) if isinstance(unit(n), jrb.Sequence) else ()
        buffer = jrb.ReplayBuffer(8000, batch_size=8, unit=unit(n), transforms=to_go)
        state = jax.eval_shape(buffer.init, item)
        row = jax.tree.map(jnp.asarray, item)
        step = lambda state, key: buffer.draw(buffer.add(state, row), key)
        return len(jax.jit(step).lower(state, KEY).as_text())

    assert size(4000) < 1.7 * size(20)


def test_each_agent_has_a_return_of_its_own():
    rng = np.random.default_rng(2)
    rewards = {"a": rng.normal(size=(40, 2)), "b": rng.normal(size=(40,))}
    rewards = jax.tree.map(np.float32, rewards)
    done = {"a": np.arange(40) % 5 == 4, "b": np.arange(40) % 10 == 9}
    done["a"] |= done["b"]
    items = {"rewards": rewards, "dones": {**done, "__all__": done["a"] & done["b"]}}
    keys = jrb.Keys(reward="rewards", done="dones")
    for given in (items, {**items, "dones": done}):  # without `__all__`: where all are done
        buffer, state = jrb.from_items(given, unit=jrb.NStep(3, 0.5), keys=keys, batch_size=64)
        sample = buffer.sample(state, KEY)
        for agent, reward in rewards.items():
            alone = {"rewards": reward, "dones": items["dones"]["__all__"]}
            one, its = jrb.from_items(alone, unit=jrb.NStep(3, 0.5), keys=keys, batch_size=64)
            want = one.sample(its, KEY)
            np.testing.assert_array_equal(sample.data["rewards"][agent], want.data["rewards"])
        assert sample.info["steps"].tolist() == want.info["steps"].tolist()
        last = np.asarray(sample.indices + sample.info["steps"] - 1)
        np.testing.assert_array_equal(sample.data["dones"]["a"], done["a"][last])
    whole = jrb.Keys(reward="rewards", done=("dones", "__all__"))
    buffer, state = jrb.from_items(items, unit=jrb.NStep(3, 0.5), keys=whole, batch_size=64)
    chex.assert_trees_all_equal(buffer.sample(state, KEY).info, sample.info)
    np.testing.assert_array_equal(buffer.sample(state, KEY).data["dones"]["a"], done["a"][last])
