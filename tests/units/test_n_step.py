"""N-step returns against plain lists of episodes."""

import dataclasses

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
    """A reward that is paid in two currencies, and a discount for each row."""
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
    """Sum, product and last row of a return, in plain Python."""
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
def test_rows_may_have_their_own_discounts_and_keep_leaves(discount, stacked, storage):
    items = paid_rows(np.random.default_rng(0), (40,))
    keep = ("reward", "next/done", "observation", ("next", "discount"))
    plain = jrb.NStep(3, discount, keep=keep)
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
        np.testing.assert_array_equal(info["reward"][b], items["next"]["reward"][slot])
        assert info["next/done"][b] == items["next"]["done"][slot]
        assert info["next/discount"][b] == items["next"]["discount"][slot]
        assert info["observation"][b].item() == slot
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
        ({"keep": "discount"}, ValueError, "another name than that of info"),
        ({"keep": 3}, TypeError, "keep: expected a path or a tuple"),
        ({"keep": ("next", "reward")}, ValueError, r"leaves at 'next', other than next obs"),
        ({"keep": "next/price"}, ValueError, "keep: expected leaves at 'next/price'"),
        ({"discount": "gamma"}, ValueError, "discount: expected a floating leaf at 'gamma'"),
        ({"discount": "next/done"}, ValueError, r"floating leaf at 'next/done'"),
    ],
)
def test_what_returns_cannot_use_is_refused(changes, error, text):
    items = paid_rows(np.random.default_rng(0), (4,))
    items["next"]["observation"] = items["observation"]
    with pytest.raises(error, match=text):
        jrb.from_items(items, unit=dataclasses.replace(jrb.NStep(2, 0.9), **changes))
