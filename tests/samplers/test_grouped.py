"""Draws of groups, compared with groups that are kept in plain Python."""

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
    "prompt": jnp.int32(0),
    "observation": jnp.zeros(2),
    "next": {"observation": jnp.zeros(2), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}
STORAGES = {
    "device": jrb.DeviceStorage(),
    "once": jrb.DeviceStorage(share_next_observations=True, terminal_capacity=30),
    "spill": jrb.SpillStorage(None, 6),
    "memmap": jrb.MemmapStorage(),
}
DISTINCT = jrb.Uniform(replacement=False)


class Groups:
    """The groups of a buffer, in plain Python: lists of unique rewards, by key."""

    def __init__(self, num_groups, per_group):
        self.num_groups, self.per_group = num_groups, per_group
        self.members, self.turn, self.time = {}, {}, 0

    def change(self, left, came):
        """Removes items that are no anchors any more, then adds pairs of a key and an item."""
        for key in list(self.members):
            self.members[key] = [item for item in self.members[key] if item not in left]
            if not self.members[key]:
                del self.members[key]
        for key, item in came:
            if key not in self.members and len(self.members) == self.num_groups:
                del self.members[min(self.members, key=self.turn.get)]
            self.members[key] = [*self.members.get(key, []), item][-self.per_group :]
            self.turn[key], self.time = self.time, self.time + 1


def stream(rng, length, envs, first):
    """Returns rows whose rewards number all items; some episodes end."""
    shape = length, envs
    observation = np.zeros((*shape, 2), np.float32)
    reward = np.arange(first, first + length * envs, dtype=np.float32).reshape(shape)
    return {
        "prompt": rng.integers(0, 6, shape).astype(np.int32),
        "observation": observation,
        "next": {
            "observation": observation,
            "reward": reward,
            "done": rng.random(shape) < 0.3,
        },
    }


def squeezed(items, num_envs):
    return items if num_envs else jax.tree.map(lambda leaf: leaf[:, 0], items)


def check(buffer, state, model, sample, rounds=2):
    """Compares batches with the groups of the model."""
    sampler = buffer.sampler
    size, each = 2 * sampler.per_group, sampler.per_group
    known = {
        key: members
        for key, members in model.members.items()
        if sampler.partial == "pad" or len(members) == each
    }
    assert bool(buffer.can_sample(state)) == bool(known)
    for number in range(rounds):
        batch = jax.device_get(sample(state, jax.random.fold_in(KEY, number)))
        real = batch.mask.reshape(size, -1)[:, 0].reshape(-1, each)
        if not known:
            assert not batch.mask.any()
            assert not batch.weights.any()
            continue
        group = batch.info["group"].reshape(-1, each)
        assert (group == group[:, :1]).all()
        slots = batch.indices.reshape(-1, each)
        rewards = np.asarray(
            jax.device_get(buffer.take(state, jnp.asarray(slots)))["next"]["reward"]
        )
        for row in range(2):
            want = known[int(group[row, 0])]
            assert rewards[row][real[row]].tolist() == want
            assert real[row].tolist() == [place < len(want) for place in range(each)]
        share = 1 / (len(known) * each)
        np.testing.assert_allclose(batch.probabilities[real.reshape(-1)], share, rtol=1e-6)
        assert (batch.weights == real.reshape(-1)).all()
        assert not batch.probabilities[~real.reshape(-1)].any()


CASES = [
    ("transition", jrb.RoundRobin(), "device", None, "pad"),
    ("transition", jrb.RoundRobin(), "device", 3, "drop"),
    ("n-step", jrb.RoundRobin(), "once", 2, "pad"),
    ("strict", jrb.RoundRobin(), "device", 2, "pad"),
    ("windows", jrb.PerEnvironment(), "device", 3, "pad"),
    ("stacks", jrb.RoundRobin(), "spill", 2, "drop"),
    ("whole", jrb.RoundRobin(), "memmap", 2, "pad"),
    ("transition", jrb.MaxValue(("next", "reward")), "device", 3, "pad"),
]


@pytest.mark.parametrize(
    ("unit", "writer", "storage", "envs", "partial"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if at > 1 else [])
        for at, case in enumerate(CASES)
    ],
    ids=repr,
)
@pytest.mark.parametrize(("num_groups", "per_group"), [(4, 3), (3, 1), (50, 2)])
def test_groups_are_those_of_plain_python(
    unit, writer, storage, envs, partial, num_groups, per_group
):
    grouped = jrb.Grouped("prompt", num_groups, per_group, partial=partial)
    parts = {"unit": weights.UNITS[unit], "writer": writer, "storage": STORAGES[storage]}
    make = functools.partial(jrb.ReplayBuffer, 8 * (envs or 1), envs)
    buffer = make(sampler=grouped, batch_size=2 * per_group, **parts)
    # A buffer with priorities, which are negative where a slot is no anchor, tells the anchors.
    storage_of_twin = parts["storage"] if storage == "once" else jrb.DeviceStorage()
    twin = make(sampler=jrb.Prioritized(), **parts | {"storage": storage_of_twin})
    state, other = buffer.init(EXAMPLE), twin.init(EXAMPLE)
    extend, extend_twin = jrb.jitted(buffer).extend, jax.jit(twin.extend)
    sample, model = jax.jit(buffer.sample), Groups(num_groups, per_group)
    rng, first, anchors = np.random.default_rng(num_groups), 0, {}
    for number in range(40):
        length = 1 if parts["unit"] != jrb.Transition() else int(rng.integers(1, 4))
        items = stream(rng, length, envs or 1, first)
        first += length * (envs or 1)
        state = extend(state, squeezed(items, envs))
        for row in range(length):
            one = jax.tree.map(lambda leaf: leaf[row : row + 1], items)  # noqa: B023
            other = extend_twin(other, squeezed(one, envs))
            held = np.flatnonzero(np.asarray(twin.priorities(other)) >= 0)
            taken = jax.device_get(twin.take(other, jnp.asarray(held))) if len(held) else items
            pairs = taken["next"]["reward"].tolist(), taken["prompt"].tolist()
            now = dict(zip(*pairs, strict=True)) if len(held) else {}
            # Of those that one row makes anchors, those of an environment enter together.
            order = sorted(now.keys() - anchors.keys(), key=lambda it: (it % (envs or 1), it))
            model.change(anchors.keys() - now.keys(), [(now[item], item) for item in order])
            anchors = now
        if number % 4 == 3 or number < 3:
            check(buffer, state, model, sample)


def items_of(keys, rewards=None):
    """Returns items with these keys, and rewards 0, 1, 2, ..."""
    keys = jnp.asarray(keys, jnp.int32)
    items = jax.tree.map(lambda leaf: jnp.zeros((keys.size, *leaf.shape), leaf.dtype), EXAMPLE)
    rewards = jnp.arange(keys.size) if rewards is None else jnp.asarray(rewards)
    items["next"]["reward"] = rewards.astype(jnp.float32)
    return items | {"prompt": keys}


def test_groups_are_drawn_alike():
    keys = np.repeat(np.arange(12), [1, 3, 2, 4] * 3)
    np.random.default_rng(0).shuffle(keys)
    buffer, state = jrb.from_items(items_of(keys), sampler=jrb.Grouped("prompt", 20, 3))
    batch = buffer.sample(state, KEY, 9000)
    drawn = batch.info["group"].reshape(-1, 3)[:, 0]
    assert stats.chisquare(np.bincount(drawn, minlength=12)).pvalue > 1e-4
    np.testing.assert_allclose(batch.probabilities[batch.mask], 1 / 36, rtol=1e-6)


def test_groups_without_replacement_are_distinct():
    buffer, state = jrb.from_items(
        items_of(np.arange(30) % 5), sampler=jrb.Grouped("prompt", 9, 2, DISTINCT)
    )
    batch = buffer.sample(state, KEY, 14)
    assert sorted(batch.info["group"][batch.mask].tolist()) == sorted([*range(5)] * 2)
    assert batch.mask.tolist() == [True] * 10 + [False] * 4


def spread(leaves, age, context):
    reward, real = leaves["next/reward"], age >= 0
    high = jnp.max(jnp.where(real, reward, -jnp.inf), axis=1)
    return high - jnp.min(jnp.where(real, reward, jnp.inf), axis=1) - context


def test_weights_of_groups_see_their_items():
    keys, rewards = [4, 5, 6, 4, 5, 7], [1.0, 2.0, 9.0, 4.0, 3.0, 5.0]
    widest = jrb.Weighted(spread, leaves=(("next", "reward"),))
    buffer, state = jrb.from_items(
        items_of(keys, rewards), sampler=jrb.Grouped("prompt", 8, 2, widest), capacity=6
    )
    batch = buffer.sample(state, KEY, 8000, context=0.0)
    drawn = batch.info["group"].reshape(-1, 2)[:, 0]
    count = np.bincount(drawn, minlength=8)
    assert set(np.flatnonzero(count)) == {4, 5}
    assert stats.chisquare(count[4:6], [3000, 1000]).pvalue > 1e-4
    wanted = np.where(batch.info["group"] == 4, 0.375, 0.125)
    np.testing.assert_allclose(batch.probabilities, wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="weight above 0"):
        buffer.sample(state, KEY, 4, context=9.0)
    # The oldest item is overwritten: group 4 has a single one then.
    state = buffer.add(state, jax.tree.map(lambda leaf: leaf[0], items_of([9])))
    batch = buffer.sample(state, KEY, 100, context=0.0)
    assert set(batch.info["group"].tolist()) == {5}


def test_the_newest_groups_are_those_with_the_newest_items():
    newest = jrb.Grouped("prompt", 8, 2, jrb.Newest(count=2))
    buffer, state = jrb.from_items(items_of([1, 2, 3, 1, 4, 2]), sampler=newest)
    assert set(buffer.sample(state, KEY, 100).info["group"].tolist()) == {4, 2}


def test_draws_are_counted_by_item():
    sampler = jrb.Grouped("prompt", 4, 2, count_draws=True)
    buffer, state = jrb.from_items(items_of([1, 1, 2]), sampler=sampler, batch_size=40)
    state, first = buffer.draw(state, KEY)
    _, second = buffer.draw(state, jax.random.key(1))
    assert not first.info["draws"].any()
    times = np.bincount(first.indices[first.mask], minlength=3)
    drawn = np.asarray(second.indices[second.mask])
    np.testing.assert_array_equal(second.info["draws"][second.mask], times[drawn])


def test_edits_of_ends_make_the_groups_again():
    unit = jrb.Sequence(3, sample_by="whole_episodes")
    items = items_of([7, 7, 7, 8, 8, 8])
    items["next"]["done"] = jnp.arange(6) == 5
    buffer, state = jrb.from_items(items, unit=unit, sampler=jrb.Grouped("prompt", 3, 2))
    assert set(buffer.sample(state, KEY, 10).info["group"].tolist()) == {7}
    state = buffer.set(state, jnp.array([2]), {"next": {"done": jnp.array([True])}})
    assert set(buffer.sample(state, KEY, 100).info["group"].tolist()) == {7, 8}


def test_a_group_that_went_comes_back_with_new_items_only():
    buffer = jrb.ReplayBuffer(9, sampler=jrb.Grouped("prompt", 2, 3), batch_size=30)
    state = buffer.extend(buffer.init(EXAMPLE), items_of([1, 1, 2, 3, 1]))
    batch = buffer.sample(state, KEY)
    of_one = batch.info["group"] == 1
    assert set(batch.info["group"].tolist()) == {3, 1}
    assert set(batch.data["next"]["reward"][of_one & batch.mask].tolist()) == {4.0}


def test_one_trace_and_vmap():
    traces = []

    def counted(leaves, age, context):
        traces.append(1)
        return jnp.ones(age.shape[0])

    sampler = jrb.Grouped("prompt", 4, 2, jrb.Weighted(counted))
    buffer = jrb.ReplayBuffer(12, sampler=sampler, batch_size=4)
    states = jax.vmap(lambda _: buffer.init(EXAMPLE))(jnp.arange(8))
    keys = np.random.default_rng(0).integers(0, 5, (8, 12))
    items = [items_of(row) for row in keys]
    states = jax.jit(jax.vmap(buffer.extend))(
        states, jax.tree.map(lambda *it: jnp.stack(it), *items)
    )
    sample = jax.jit(jax.vmap(buffer.sample))
    batches = sample(states, jax.random.split(KEY, 8))
    sample(states, jax.random.split(jax.random.key(1), 8))
    assert len(traces) == 1
    for number, one in enumerate(items):
        state = buffer.extend(buffer.init(EXAMPLE), one)
        batch = buffer.sample(state, jax.random.split(KEY, 8)[number])
        np.testing.assert_array_equal(batch.indices, batches.indices[number])
        np.testing.assert_array_equal(batch.mask, batches.mask[number])


@pytest.mark.parametrize("mesh", [None, 2])
def test_shards_have_groups_of_their_own(mesh):
    sampler = jrb.Grouped("prompt", 16, 2)
    buffer = jrb.ReplayBuffer(40, 4, sampler=sampler)
    mesh = None if mesh is None else jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharded = jrb.Sharded(buffer, 2, mesh)
    keys = np.stack([np.arange(10) % 3] * 2 + [10 + np.arange(10) % 2] * 2, axis=1)
    items = jax.tree.map(
        lambda leaf: leaf.reshape(10, 4, *leaf.shape[1:]), items_of(keys.reshape(-1))
    )
    state = sharded.extend(sharded.init(EXAMPLE), items)
    batch = jax.device_get(sharded.sample(state, KEY, 400))
    group = batch.info["group"].reshape(-1, 2)
    assert (group[:, 0] == group[:, 1]).all()
    assert set(batch.info["group"].tolist()) == {0, 1, 2, 10, 11}
    # Five groups: each shard draws half of the batch, and weights say so.
    is_first = batch.info["group"] < 10
    np.testing.assert_allclose(batch.probabilities, 0.1, rtol=1e-6)
    assert is_first.sum() == 200


def test_a_state_is_saved_loaded_and_rebuilt(tmp_path):
    keys = np.random.default_rng(1).integers(0, 6, 30)
    buffer, state = jrb.from_items(
        items_of(keys), sampler=jrb.Grouped("prompt", 5, 3), capacity=20, batch_size=300
    )
    jrb.save(tmp_path / "saved", buffer, state)
    loaded, restored = jrb.load(tmp_path / "saved")
    batch = buffer.sample(state, KEY)
    same = loaded.sample(restored, KEY)
    jax.tree.map(
        np.testing.assert_array_equal, batch.replace(origin=None), same.replace(origin=None)
    )
    larger = jrb.ReplayBuffer(40, sampler=jrb.Grouped("prompt", 9, 4), batch_size=400)
    drawn = larger.sample(jrb.rebuild(buffer, state, larger), KEY)
    rewards, group = drawn.data["next"]["reward"], drawn.info["group"]
    for key in np.unique(keys[10:]):
        want = np.flatnonzero(keys == key)
        mine = rewards[(group == key) & drawn.mask]
        assert set(mine.tolist()) == set(want[want >= 10][-4:].tolist())


def test_a_conversion_of_the_key_makes_the_groups_again():
    grouped = jrb.Grouped("prompt", 5, 2)
    buffer, state = jrb.from_items(items_of([1, 2, 3, 1]), sampler=grouped, batch_size=20)
    for shift in (0, 5):
        convert = lambda item: {**item, "prompt": item["prompt"] + shift}  # noqa: B023
        batch = buffer.sample(jrb.rebuild(buffer, state, buffer, convert=convert), KEY)
        group, prompt = (it[batch.mask] for it in (batch.info["group"], batch.data["prompt"]))
        assert group.tolist() == prompt.tolist()
        assert set(group.tolist()) == {1 + shift, 2 + shift, 3 + shift}


def test_empty_and_dtypes():
    example = {"task": jnp.uint8(0), "x": jnp.bfloat16(0)}
    buffer = jrb.ReplayBuffer(6, sampler=jrb.Grouped("task", 3, 2), batch_size=2)
    state = buffer.init(example)
    with pytest.raises(ValueError, match="size 0"):
        buffer.sample(state, KEY)
    state = buffer.extend(
        state, {"task": jnp.arange(4, dtype=jnp.uint8), "x": jnp.ones(4, jnp.bfloat16)}
    )
    assert buffer.sample(state, KEY).info["group"].dtype == jnp.int32
    state = buffer.empty(state)
    assert not buffer.can_sample(state)
    assert not jax.jit(buffer.sample)(state, KEY).mask.any()


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"sampler: expected one that can draw groups"):
        jrb.Grouped("prompt", 3, 2, jrb.Prioritized())
    with pytest.raises(TypeError, match=r"sampler: expected one that can draw groups"):
        jrb.Grouped("prompt", 3, 2, jrb.Grouped("prompt", 3, 2))
    with pytest.raises(ValueError, match="without count_draws"):
        jrb.Grouped("prompt", 3, 2, jrb.Uniform(count_draws=True))
    with pytest.raises(ValueError, match="partial"):
        jrb.Grouped("prompt", 3, 2, partial="masked")
    for numbers in ((0, 2), (3, 0)):
        with pytest.raises(ValueError, match=r"expected (from 1 to|at least 1)"):
            jrb.Grouped("prompt", *numbers)
    grouped = jrb.Grouped("prompt", 3, 2)
    buffer, state = jrb.from_items(items_of([1, 2]), sampler=grouped)
    with pytest.raises(ValueError, match="batch_size: expected a multiple of per_group=2, got 3"):
        buffer.sample(state, KEY, 3)
    with pytest.raises(ValueError, match=r"set: expected other leaves .* got \['prompt'\]"):
        buffer.set(state, jnp.array([0]), {"prompt": jnp.array([5])})
    with pytest.raises(ValueError, match=r"Grouped: expected paths in an item.* got 'promt'"):
        jrb.ReplayBuffer(4, sampler=jrb.Grouped("promt", 3, 2)).init(EXAMPLE)
    with pytest.raises(ValueError, match=r"key: expected one integer .* got the leaves"):
        jrb.from_items(items_of([1]), sampler=jrb.Grouped("next", 3, 2))
    for leaf in (jnp.float32(0), jnp.zeros(2, jnp.int32), jnp.uint32(0), jnp.bool_(False)):
        buffer = jrb.ReplayBuffer(4, sampler=jrb.Grouped("key", 3, 2))
        with pytest.raises(TypeError, match="key: expected one integer that int32 holds"):
            buffer.add(buffer.init({"key": leaf}), {"key": leaf})
    with pytest.raises(ValueError, match="none that draws groups"):
        jrb.Mixture((grouped, jrb.Uniform()), (0.5, 0.5))
    episodes = jrb.Sequence(2, sample_by="episodes")
    with pytest.raises(ValueError, match="draws all alike"):
        jrb.ReplayBuffer(8, unit=episodes, sampler=grouped)
    with pytest.raises(ValueError, match="draws all alike"):
        jrb.ReplayBuffer(8, unit=episodes, sampler=jrb.Weighted(weights.every))
    mixed = jrb.ReplayBuffer(8, sampler=grouped), jrb.ReplayBuffer(8)
    with pytest.raises(ValueError, match="exact"):
        jrb.Mix(mixed, (0.5, 0.5), exact=True)
