"""Weighted draws, compared with weights that are computed in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jrb
from tests.samplers import weights

KEY = jax.random.key(0)
EXAMPLE = {
    "observation": jnp.zeros(2),
    "version": jnp.int32(0),
    "next": {"observation": jnp.zeros(2), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}
STORAGES = {
    "device": jrb.DeviceStorage(),
    "once": jrb.DeviceStorage(share_next_observations=True),
}
FRESH = jrb.Weighted(weights.fresh, leaves=(("next", "reward"),))


def stream(rng, length, envs):
    observation = rng.random((length + 1, envs, 2)).astype(np.float32)
    return {
        "observation": observation[:-1],
        "version": np.arange(length * envs, dtype=np.int32).reshape(length, envs) // 7,
        "next": {
            "observation": observation[1:],
            "reward": rng.normal(size=(length, envs)).astype(np.float32),
            "done": rng.random((length, envs)) < 0.15,
        },
    }


def filled(sampler, length, envs=3, rows=16, **parts):
    """Returns a buffer and its state after `length` rows, which were written in pieces."""
    buffer = jrb.ReplayBuffer(rows * envs, envs, batch_size=4, sampler=sampler, **parts)
    state, items = buffer.init(EXAMPLE), stream(np.random.default_rng(length), length, envs)
    for start in range(0, length, 5):
        state = buffer.extend(state, jax.tree.map(lambda leaf: leaf[start : start + 5], items))  # noqa: B023
    return buffer, state


def expected(state, length, least, parts, rows=16, envs=3):
    """Returns the weight of each slot, which is 0 where a sampler with priorities has no anchor."""
    other, twin = filled(jrb.Prioritized(), length, envs, rows, **parts)
    items = jrb.items(other, twin)
    slots = np.asarray(other.in_order(twin)[0])[: len(items["version"])]
    age = dict(zip(slots.tolist(), reversed(np.arange(len(slots)) // envs), strict=True))
    reward = dict(zip(slots.tolist(), items["next"]["reward"].tolist(), strict=True))
    anchors = np.flatnonzero(np.asarray(other.priorities(twin)) >= 0).tolist()
    one = lambda slot: 0.9 ** age[slot] if reward[slot] >= least else 0.0
    return np.array([one(slot) if slot in anchors else 0.0 for slot in range(rows * envs)])


def check_draws(batch, weight, beta=0.0):
    """Compares many draws with weights: their frequencies, probabilities and weights."""
    share = weight / weight.sum()
    slots = np.asarray(batch.indices)
    assert batch.mask.any(axis=tuple(range(1, batch.mask.ndim))).all()
    np.testing.assert_allclose(batch.probabilities, share[slots], rtol=1e-5)
    count = np.bincount(slots, minlength=len(weight))
    assert not count[weight == 0].any()
    if (weight > 0).sum() > 1:
        test = stats.chisquare(count[weight > 0], len(slots) * share[weight > 0])
        assert test.pvalue > 1e-4
    want = (share[slots] / share[slots].min()) ** -beta
    np.testing.assert_allclose(batch.weights, want / want.max(), rtol=2e-5)


@pytest.mark.parametrize(
    ("unit", "writer", "storage"),
    [
        *((unit, jrb.RoundRobin(), storage) for unit in weights.UNITS for storage in STORAGES),
        # Shared observations need one clock for all environments.
        ("transition", jrb.PerEnvironment(), "device"),
        ("strict", jrb.PerEnvironment(), "device"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("length", [45, 7, pytest.param(16, marks=pytest.mark.long)])
def test_draws_follow_the_weights(unit, writer, storage, length):
    parts = {"unit": weights.UNITS[unit], "storage": STORAGES[storage], "writer": writer}
    buffer, state = filled(FRESH, length, **parts)
    draw = jax.jit(functools.partial(buffer.sample, batch_size=4000))
    for least, beta in ((-9.0, 0.0), (0.0, 0.7), (0.4, 1.0)):
        weight = expected(state, length, least, parts)
        batch = draw(state, KEY, beta=beta, context=jnp.float32(least))
        if weight.any():
            check_draws(batch, weight, beta)
        else:
            assert not batch.mask.any()
    if weight.any():
        outside = buffer.sample(state, KEY, 4000, beta, context=least)
        np.testing.assert_array_equal(outside.indices, batch.indices)


def test_items_without_weight_are_never_drawn():
    buffer, state = filled(FRESH, 20)
    with pytest.raises(ValueError, match="Weighted finds no anchor with a weight above 0"):
        buffer.sample(state, KEY, context=99.0)
    batch = jax.jit(buffer.sample)(state, KEY, context=99.0)
    for leaf in (batch.mask, batch.weights, batch.probabilities):
        assert not leaf.any()
    empty = buffer.empty(state)
    assert not buffer.can_sample(empty)
    with pytest.raises(ValueError, match="size 0"):
        buffer.sample(empty, KEY)
    assert not jax.jit(buffer.sample)(empty, KEY).mask.any()


def test_weights_that_are_no_numbers_above_0_count_as_0():
    buffer = jrb.ReplayBuffer(
        8, batch_size=500, sampler=jrb.Weighted(weights.by_reward, leaves=(("next", "reward"),))
    )
    rewards = [np.nan, np.inf, -1.0, -np.inf, 0.0, 1e-40, 3e38, 3e38]
    items = jax.tree.map(lambda leaf: jnp.zeros((8, *leaf.shape), leaf.dtype), EXAMPLE)
    items["next"]["reward"] = jnp.array(rewards, jnp.float32)
    batch = buffer.sample(buffer.extend(buffer.init(EXAMPLE), items), KEY)
    # The sum of the greatest ones is finite, so they are drawn alike; 1e-40 is nothing beside them.
    assert set(batch.indices.tolist()) == {6, 7}
    np.testing.assert_allclose(batch.probabilities, 0.5)


def test_a_new_context_compiles_nothing():
    traces = []

    def counted(leaves, age, context):
        traces.append(1)
        return jnp.where(leaves["version"] > context["least"], 1.0, 0.0)

    buffer, state = filled(jrb.Weighted(counted, leaves=("version",)), 30)
    methods = jrb.jitted(buffer)
    for least in range(5):
        batch = methods.sample(state, KEY, context={"least": jnp.int32(least)})
        assert (batch.data["version"] > least).all()
        traces = traces if least else traces[:0]
    assert not traces


def test_age_is_none_without_order_of_time():
    ages = []

    def look(leaves, age, context):
        ages.append(age)
        return jnp.ones(48)

    buffer, state = filled(jrb.Weighted(look), 9, writer=jrb.MaxValue(("next", "reward")))
    assert buffer.sample(state, KEY).mask.all()
    assert ages == [None] * len(ages)
    assert len(ages)


@pytest.mark.parametrize("function", [lambda *_: jnp.ones(3), lambda *_: 1.0, lambda *_: KEY])
def test_functions_that_return_something_else_are_refused(function):
    buffer, state = filled(jrb.Weighted(function), 9)
    with pytest.raises(ValueError, match=r"Weighted: function: expected .* shape \(48,\), got"):
        buffer.sample(state, KEY)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="function: expected a function"):
        jrb.Weighted(3)
    with pytest.raises(TypeError, match="leaves: expected a tuple"):
        jrb.Weighted(weights.every, leaves="version")
    with pytest.raises(ValueError, match="normalize"):
        jrb.Weighted(weights.every, normalize="buffer")
    for storage in (jrb.MemmapStorage(), jrb.SpillStorage(None, 6), jrb.ListStorage()):
        with pytest.raises(ValueError, match=r"storage: expected one on the device for Weighted"):
            jrb.ReplayBuffer(12, sampler=FRESH, storage=storage)
    with pytest.raises(ValueError, match=r"Weighted: expected paths .*'version'.* got 'verison'"):
        filled(jrb.Weighted(weights.every, leaves=("verison",)), 3)
    for other in (jrb.Uniform(), jrb.Prioritized(), jrb.Queue()):
        buffer, state = filled(other, 3)
        with pytest.raises(TypeError, match="context: expected None"):
            buffer.sample(state, KEY, context=1)
        with pytest.raises(TypeError, match="context: expected None"):
            buffer.draw(state, KEY, context=1)


def test_edits_are_seen_by_the_next_draw():
    buffer, state = filled(FRESH, 40)
    slots = buffer.newest(state, 2)[0].reshape(-1)
    state = buffer.set(state, slots, {"next": {"reward": jnp.full(slots.size, 50.0)}})
    batch = buffer.sample(state, KEY, 100, context=49.0)
    assert set(batch.indices.tolist()) == set(slots.tolist())


def test_a_mixture_and_a_mix_pass_the_context_on():
    both = jrb.Mixture((FRESH, jrb.Uniform()), (0.5, 0.5))
    buffer, state = filled(both, 40)
    batch = buffer.sample(state, KEY, 400, context=0.5)
    rewards, first = batch.data["next"]["reward"], batch.info["sampler"] == 0
    assert (rewards[first] >= 0.5).all()
    assert (rewards[~first] < 0.5).any()
    other, its_state = filled(jrb.Mixture((jrb.Uniform(), jrb.Newest(0.5)), (0.5, 0.5)), 20)
    mix = jrb.Mix((buffer, other), (0.5, 0.5), batch_size=400)
    batch = mix.sample((state, its_state), KEY, context=0.5)
    is_weighted = (batch.info["source"] == 0) & (batch.info["sampler"] == 0)
    assert (batch.data["next"]["reward"][is_weighted] >= 0.5).all()
    assert is_weighted.sum() == 100
    assert batch.mask.all()
    with pytest.raises(TypeError, match="context: expected None"):
        jrb.Mix((other, other), (0.5, 0.5)).sample((its_state, its_state), KEY, 8, context=1)


@pytest.mark.parametrize("mesh", [None, 2])
def test_shards_draw_as_one_buffer(mesh):
    sampler = jrb.Weighted(weights.fresh, leaves=(("next", "reward"),), beta=0.5)
    single, alone = filled(sampler, 45, envs=4)
    mesh = None if mesh is None else jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharded = jrb.Sharded(single, 2, mesh)
    state = sharded.init(EXAMPLE)
    items = stream(np.random.default_rng(45), 45, 4)
    for start in range(0, 45, 5):
        state = sharded.extend(state, jax.tree.map(lambda leaf: leaf[start : start + 5], items))  # noqa: B023
    batch = jax.device_get(sharded.sample(state, KEY, 4000, context=0.1))
    one = jax.device_get(single.sample(alone, KEY, 4000, context=0.1))
    assert (batch.data["next"]["reward"] >= 0.1).all()
    # Each item has one reward: its probability and its mean share of weights are the same.
    for reward in np.unique(one.data["next"]["reward"])[:10]:
        at, there = (it.data["next"]["reward"] == reward for it in (batch, one))
        if at.any():
            np.testing.assert_allclose(
                batch.probabilities[at][0], one.probabilities[there][0], rtol=1e-4
            )


def test_a_state_is_saved_loaded_and_rebuilt(tmp_path):
    buffer, state = filled(FRESH, 21, unit=jrb.NStep(2, 0.9, strict=True))
    jrb.save(tmp_path / "saved", buffer, state)
    with pytest.raises(ValueError, match="holds no code"):
        jrb.load(tmp_path / "saved")
    loaded, restored = jrb.load(tmp_path / "saved", buffer=buffer)
    same = loaded.sample(restored, KEY, context=0.2)
    jax.tree.map(np.testing.assert_array_equal, same, buffer.sample(state, KEY, context=0.2))
    larger = jrb.ReplayBuffer(90, 3, batch_size=4, sampler=FRESH, unit=jrb.NStep(3, 0.9))
    batch = larger.sample(jrb.rebuild(buffer, state, larger), KEY, 300, context=0.2)
    assert set(np.unique(batch.data["next"]["reward"] > -9)) == {True}
    uniform = jrb.ReplayBuffer(90, 3, batch_size=4)
    back = jrb.rebuild(uniform, jrb.rebuild(buffer, state, uniform), buffer)
    assert buffer.sample(back, KEY, context=0.2).mask.all()


def test_vmap_over_contexts_and_states():
    buffer, state = filled(FRESH, 30)
    contexts = jnp.linspace(-1, 1, 8)
    batch = jax.vmap(lambda context: buffer.sample(state, KEY, 50, context=context))(contexts)
    for number, context in enumerate(contexts.tolist()):
        alone = buffer.sample(state, KEY, 50, context=context)
        np.testing.assert_array_equal(batch.indices[number], alone.indices)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), state)
    keys = jax.random.split(KEY, 8)
    many = jax.vmap(functools.partial(buffer.sample, context=0.2))(states, keys)
    for number, key in enumerate(keys):
        one = buffer.sample(state, key, context=0.2)
        np.testing.assert_array_equal(many.indices[number], one.indices)


def test_draws_are_counted():
    sampler = jrb.Weighted(weights.every, leaves=("version",), count_draws=True)
    buffer, state = filled(sampler, 10)
    total = 0
    for key in jax.random.split(KEY, 5):
        state, _ = buffer.draw(state, key, 16)
        total += 16
        assert int(state.sampler.draws.sum()) == total
