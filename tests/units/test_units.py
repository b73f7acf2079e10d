"""Properties of all units: anchors and priorities, flags, keys, and refused arguments."""

import functools
import operator

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests import reference
from tests.units.streams import (
    EXAMPLE,
    KEY,
    Stream,
    arrays,
    commands,
    frame_stack,
    n_step,
    negative_distance,
    random_streams,
    sequence,
    whole_episode,
)

pytestmark = pytest.mark.slow


@functools.lru_cache
def prioritized(unit, rows, envs):
    buffer = jrb.ReplayBuffer(
        rows * envs, num_envs=envs, batch_size=8, sampler=jrb.Prioritized(eps=0.0), unit=unit
    )
    return buffer, *map(
        jax.jit,
        (
            buffer.add,
            buffer.extend,
            buffer.sample,
            buffer.update_priority,
            buffer.empty,
            buffer.truncate,
        ),
    )


MEMBERS = [
    (jrb.NStep(3, 0.5, strict=True), n_step(3, 0.5, True), (4, 1)),
    (jrb.Sequence(3), sequence(3, 0, "drop"), (5, 2)),
    (jrb.Sequence(3, burn_in=1, partial="pad"), sequence(3, 1, "pad"), (4, 1)),
    (jrb.FrameStack(3), frame_stack(3), (5, 2)),
]


@pytest.mark.parametrize(
    ("unit", "expected", "ring"), MEMBERS, ids=lambda case: type(case).__name__
)
@random_streams
def test_priorities_are_held_just_where_anchors_are(unit, expected, ring, data):
    rows, envs = data.draw(st.sampled_from([ring, (11, 3)]))
    buffer, add, extend, sample, update, empty, truncate = prioritized(unit, rows, envs)
    state, model, stream = buffer.init(EXAMPLE), reference.Episodes(rows, envs), Stream(envs)
    begins, late = {}, None
    calls = data.draw(commands(envs, rows, truncates=True))
    for number, (method, dones, mask) in enumerate(calls):
        written = [stream.row(flags) for flags in dones]
        for row, is_written in zip(written, mask if written else [], strict=True):
            for env in range(envs):
                begins.setdefault((env, model.number[env]), model.time)
            model.add(row, is_written)
        if method == "empty":
            state = empty(state)
            model.empty()
        elif method == "truncate":
            state = truncate(state, mask)
            model.truncate(mask)
        elif method == "add":
            state = add(state, jax.tree.map(lambda leaf: leaf[0], arrays(written)), mask[0])
        else:
            state = extend(state, arrays(written), mask)
        if late is not None:  # a late update must not revive overwritten items
            state = update(state, late, jnp.arange(8.0))
        late = sample(state, jax.random.key(number)) if number % 2 else None
    want = {e["slot"] for e in model.all() if expected(model, e, begins) is not None}
    raw = np.asarray(state.sampler.raw)
    assert set(np.flatnonzero(raw >= 0).tolist()) == want
    masses = np.asarray(jrb.sum_tree.leaves(state.sampler.masses))
    np.testing.assert_array_equal(masses > 0, raw > 0)


@functools.lru_cache
def queue(unit, rows, envs):
    buffer = jrb.ReplayBuffer(rows * envs, num_envs=envs, sampler=jrb.Queue(), unit=unit)
    return buffer, jax.jit(buffer.add), jax.jit(buffer.draw, static_argnums=2)


@pytest.mark.parametrize("unit", [jrb.NStep(3, 0.5, strict=True), jrb.Sequence(2)], ids=repr)
@hypothesis.settings(max_examples=5)
@hypothesis.given(data=st.data())
def test_a_queue_gives_every_anchor_once(unit, data):
    rows, envs = 64, 3
    expected = n_step(3, 0.5, True) if isinstance(unit, jrb.NStep) else sequence(2, 0, "drop")
    buffer, add, draw = queue(unit, rows, envs)
    state, model, stream = buffer.init(EXAMPLE), reference.Episodes(rows, envs), Stream(envs)
    rng, drawn, begins = np.random.default_rng(data.draw(st.integers(0, 999))), [], {}
    for _ in range(40):
        row = stream.row([(done, False) for done in rng.random(envs) < 0.3])
        model.add(row)
        state = add(state, jax.tree.map(lambda leaf: leaf[0], arrays([row])))
        if rng.random() < 0.7 and bool(buffer.can_sample(state)):
            state, sample = draw(state, KEY, 4)
            drawn += real_slots(sample)
    while bool(buffer.can_sample(state)):
        state, sample = draw(state, KEY, 4)
        drawn += real_slots(sample)
    want = {e["slot"] for e in model.all() if expected(model, e, begins) is not None}
    assert sorted(drawn) == sorted(want)


EPOCHS = [
    (jrb.NStep(2, 0.9), n_step(2, 0.9, False), 1),
    (jrb.Sequence(3), sequence(3, 0, "drop"), 1),
    (jrb.FrameStack(2), frame_stack(2), 3),
    (jrb.Sequence(2, sample_by="episodes"), sequence(2, 0, "drop"), 1),
    (jrb.Sequence(2, sample_by="episodes"), sequence(2, 0, "drop"), 3),
    (jrb.Sequence(2, sample_by="whole_episodes"), whole_episode(2), 3),
    (jrb.Sequence(2, stride=2, partial="pad"), sequence(2, 0, "pad", period=2), 3),
]


@pytest.mark.parametrize(("unit", "expected", "envs"), EPOCHS, ids=lambda case: type(case).__name__)
def test_an_epoch_is_over_all_anchors(unit, expected, envs):
    rows = 14
    buffer = jrb.ReplayBuffer(
        rows * envs, num_envs=envs, batch_size=4, unit=unit, sampler=jrb.WithoutReplacement()
    )
    rng, stream = np.random.default_rng(envs), Stream(envs)
    model, begins = reference.Episodes(rows, envs), {}
    written = [stream.row([(done, False) for done in rng.random(envs) < 0.25]) for _ in range(30)]
    for row in written:
        for env in range(envs):
            begins.setdefault((env, model.number[env]), model.time)
        model.add(row)
    state = buffer.extend(buffer.init(EXAMPLE), arrays(written))
    anchors = [e for e in model.all() if expected(model, e, begins) is not None]
    name = {e["slot"]: (e["env"], e["episode"]) for e in anchors}
    if getattr(unit, "sample_by", "windows") == "windows":
        name = {slot: slot for slot in name}
    for epoch in range(2):
        seen = []
        while len(seen) < len(set(name.values())):
            state, sample = buffer.draw(state, jax.random.key(epoch))
            seen += [name[slot] for slot in real_slots(sample)]
        assert sorted(seen) == sorted(set(name.values()))


@pytest.mark.parametrize("unit", [jrb.FrameStack(2), jrb.Sequence(2), jrb.NStep(2, 0.9)], ids=repr)
@pytest.mark.parametrize("envs", [1, 2])
def test_an_epoch_gives_nothing_twice_while_rows_come_and_go(unit, envs):
    buffer = jrb.ReplayBuffer(
        6 * envs, num_envs=envs, batch_size=1, unit=unit, sampler=jrb.WithoutReplacement()
    )
    add, draw = jax.jit(buffer.add), jax.jit(buffer.draw)
    first = lambda action: int(np.asarray(action).reshape(-1)[0])
    for seed in range(60):
        rng, stream, state = np.random.default_rng(seed), Stream(envs), buffer.init(EXAMPLE)
        seen, epoch = set(), None
        for number in range(16):
            if rng.random() < 0.65 or number < 3:
                row = arrays([stream.row([(done, False) for done in rng.random(envs) < 0.5])])
                state = add(state, jax.tree.map(operator.itemgetter(0), row))
                continue
            state, sample = draw(state, jax.random.key(number))
            if state.sampler.seed.tolist() != epoch:
                seen, epoch = set(), state.sampler.seed.tolist()
            if real_slots(sample):
                assert first(sample.data["action"]) not in seen
                seen.add(first(sample.data["action"]))


def real_slots(sample):
    """Returns the anchors of a sample that are not masked."""
    mask = np.asarray(sample.mask)
    return np.asarray(sample.indices)[mask.reshape(len(mask), -1).any(axis=1)].tolist()


def test_an_endless_episode_outlives_its_counters():
    unit = jrb.Sequence(2, sample_by="episodes")
    buffer = jrb.ReplayBuffer(4, num_envs=1, batch_size=4, unit=unit)
    stream = Stream(1)
    rows = lambda count: arrays([stream.row([(False, False)]) for _ in range(count)])
    state = buffer.extend(buffer.init(EXAMPLE), rows(9))
    ahead = jnp.uint32(2**32 - 12)
    table = state.unit.episodes
    late = table.replace(now=table.now + ahead, first=table.first + ahead)
    state = state.replace(unit=state.unit.replace(episodes=late))
    for _ in range(4):
        state = buffer.extend(state, rows(3))
        sample = buffer.sample(state, KEY)
        assert sample.mask.all()
        np.testing.assert_allclose(sample.probabilities, 1 / 3, rtol=1e-6)


def test_flat_keys_and_other_containers():
    keys = jrb.Keys(observation="obs", next_observation="next_obs", reward="reward", done="done")
    number, flag = jnp.float32(0), jnp.bool_(False)
    example = {"obs": number, "act": number, "reward": number, "done": flag, "next_obs": number}
    buffer = jrb.ReplayBuffer(8, batch_size=8, unit=jrb.NStep(2, 1.0), keys=keys)
    time = jnp.arange(4.0)
    rows = {"obs": time, "act": time, "reward": jnp.ones(4), "next_obs": time + 1}
    state = buffer.extend(buffer.init(example), rows | {"done": jnp.zeros(4, bool)})
    sample = buffer.sample(state, KEY)
    np.testing.assert_array_equal(
        sample.data["next_obs"], sample.data["obs"] + sample.info["steps"].astype(jnp.float32)
    )
    np.testing.assert_array_equal(sample.data["reward"], sample.info["steps"])
    np.testing.assert_array_equal(sample.data["act"], sample.data["obs"])


def test_items_under_one_root_are_told_apart():
    keys = jrb.Keys(
        observation=("t", "obs"),
        action=("t", "act"),
        reward=("t", "reward"),
        done=("t", "done"),
        next_observation=("t", "next_obs"),
    )
    number = jnp.float32(0)
    item = {"obs": number, "act": number, "reward": number, "next_obs": number}
    item = {"t": item | {"done": jnp.bool_(False)}}
    time = jnp.arange(4.0)
    rows = {"obs": time, "act": time, "reward": jnp.ones(4), "next_obs": time + 1}
    rows = {"t": rows | {"done": jnp.zeros(4, bool)}}
    for unit in (jrb.NStep(3, 1.0), jrb.FrameStack(2, unit=jrb.NStep(3, 1.0))):
        buffer = jrb.ReplayBuffer(8, batch_size=8, unit=unit, keys=keys)
        data = buffer.sample(buffer.extend(buffer.init(item), rows), KEY).data["t"]
        steps = data["reward"]
        now, after = (x.reshape(8, -1)[:, -1] for x in (data["obs"], data["next_obs"]))
        np.testing.assert_array_equal(now, data["act"])
        np.testing.assert_array_equal(after, now + steps)


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        (jrb.Sequence(5), r"burn_in \+ length: expected at most the 4 rows.*got 5"),
        (jrb.Sequence(3, burn_in=2), r"burn_in \+ length: expected at most the 4 rows.*got 5"),
        (jrb.NStep(5, 0.9), "n: expected at most the 4 rows"),
        (jrb.FrameStack(5), "k: expected at most the 4 rows"),
        (jrb.FrameStack(2, unit=jrb.Sequence(2, sample_by="episodes")), "sample_by='windows'"),
    ],
    ids=repr,
)
def test_a_window_must_fit_the_ring(unit, text):
    with pytest.raises(ValueError, match=text):
        jrb.ReplayBuffer(8, num_envs=2, unit=unit)


@pytest.mark.parametrize("unit", [jrb.NStep(2, 0.9), jrb.Sequence(2), jrb.FrameStack(2)], ids=repr)
def test_a_flag_must_be_one_number(unit):
    buffer = jrb.ReplayBuffer(8, unit=unit)
    item = lambda flag: {"observation": jnp.zeros(2), "next": {"reward": jnp.float32(0), **flag}}
    with pytest.raises(ValueError, match=r"'next/done', 'next/terminated' or.*Keys\(done"):
        buffer.init(item({"over": jnp.bool_(False)}))
    with pytest.raises(ValueError, match=r"'next/done': expected shape \(\) or \(1,\).*got \(2,\)"):
        buffer.init(item({"done": jnp.zeros(2, bool)}))
    with pytest.raises(TypeError, match=r"'next/truncated': expected a bool.*got complex64"):
        buffer.init(item({"done": jnp.bool_(False), "truncated": jnp.complex64(0)}))


FLAGGED = [
    jrb.NStep(3, 0.5),
    jrb.NStep(3, 0.5, strict=True),
    jrb.Sequence(3),
    jrb.Sequence(3, burn_in=2, partial="pad"),
    jrb.Sequence(2, sample_by="episodes"),
    jrb.FrameStack(3),
]


@pytest.mark.parametrize("unit", FLAGGED, ids=repr)
def test_an_episode_ends_where_any_flag_says_so(unit):
    """Three flags of any dtype, of shape () or (1,), act like one bool that combines them."""
    rng = np.random.default_rng(0)
    flags = rng.random((3, 40, 2)) < 0.1
    number = np.arange(80, dtype=np.float32).reshape(40, 2)

    def drawn(**flags):
        rows = {
            "observation": number,
            "next": {"observation": number + 0.5, "reward": number, **flags},
        }
        buffer = jrb.ReplayBuffer(
            60, num_envs=2, batch_size=60, unit=unit, sampler=jrb.Uniform(replacement=False)
        )
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], rows))
        draw = lambda state, rows: buffer.sample(buffer.extend(state, rows), KEY)
        sample = jax.jit(draw)(state, rows)
        return sample.indices, sample.mask, sample.data["observation"], sample.info

    want = drawn(done=flags.any(axis=0))
    nan = np.where(flags[1], np.float32("nan"), np.float32(0))
    others = [
        {"terminated": flags[0] | flags[2], "truncated": flags[1]},
        {"done": flags[0], "terminated": flags[1], "truncated": flags[2]},
        {"done": flags[0][..., None], "terminated": nan, "truncated": flags[2].astype(np.int8)},
        {"truncated": flags.any(axis=0)[..., None].astype(np.float16) * np.float16(-0.5)},
    ]
    first = FLAGGED.index(unit) % 4
    for other in (others + others)[first : first + 2]:  # two for each unit
        chex.assert_trees_all_equal(drawn(**other), want)


def test_truncation_by_another_name_ends_a_return():
    keys = jrb.Keys(reward="r", done="term", truncated="trunc", next_observation="next_obs")
    buffer = jrb.ReplayBuffer(
        6, batch_size=6, unit=jrb.NStep(3, 1.0), keys=keys, sampler=jrb.Uniform(replacement=False)
    )
    rows = {"r": jnp.ones(6), "term": jnp.zeros(6, bool), "trunc": jnp.arange(6) == 2}
    sample = buffer.sample(
        buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows), KEY
    )
    by_slot = dict(zip(sample.indices.tolist(), sample.data["r"].tolist(), strict=True))
    assert by_slot == {0: 3, 1: 2, 2: 1, 3: 3, 4: 2, 5: 1}


@pytest.mark.parametrize("unit", FLAGGED, ids=repr)
def test_rewards_and_flags_of_shape_1_are_as_those_of_no_shape(unit):
    rng = np.random.default_rng(1)
    flat = {"reward": rng.random((40, 2)).astype(np.float32), "done": rng.random((40, 2)) < 0.2}
    number = np.arange(80, dtype=np.float32).reshape(40, 2)

    def drawn(after):
        rows = {"observation": number, "next": {"observation": number + 0.5, **after}}
        buffer = jrb.ReplayBuffer(
            60, num_envs=2, batch_size=60, unit=unit, sampler=jrb.Uniform(replacement=False)
        )
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], rows))
        draw = lambda state, rows: buffer.sample(buffer.extend(state, rows), KEY)
        return jax.jit(draw)(state, rows)

    one, other = drawn(flat), drawn({name: leaf[..., None] for name, leaf in flat.items()})
    np.testing.assert_array_equal(one.indices, other.indices)
    for name, leaf in flat.items():
        wide = other.data["next"][name]
        assert wide.dtype == leaf.dtype
        assert wide.shape == (*one.data["next"][name].shape, 1)
        np.testing.assert_array_equal(one.data["next"][name], wide[..., 0])


def test_what_a_unit_needs_is_named():
    done = {"done": jnp.bool_(False)}
    with pytest.raises(ValueError, match="reward: expected a leaf at 'next/reward'"):
        jrb.ReplayBuffer(8, unit=jrb.NStep(2, 0.9)).init({"next": done})
    with pytest.raises(TypeError, match=r"'next/reward'.*floating dtype, got int32"):
        jrb.ReplayBuffer(8, unit=jrb.NStep(2, 0.9)).init({"next": done | {"reward": jnp.int32(0)}})
    stack = jrb.FrameStack(2, paths=(("observation", "frames"),))
    with pytest.raises(ValueError, match="expected leaves at 'observation/frames'"):
        jrb.ReplayBuffer(8, unit=stack).init(EXAMPLE)
    twin = {"observation": jnp.zeros(2), "next": {"observation": jnp.zeros(3), **done}}
    with pytest.raises(
        ValueError, match=r"'next/observation': expected .* like it in the observation"
    ):
        jrb.ReplayBuffer(8, unit=jrb.FrameStack(2)).init(twin)
    goal = {
        "observation": {"desired_goal": jnp.zeros(2)},
        "next": {**done, "reward": jnp.float32(0)},
    }
    with pytest.raises(ValueError, match="'next/observation/achieved_goal'"):
        jrb.ReplayBuffer(8, unit=jrb.Hindsight(negative_distance)).init(goal)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: jrb.NStep(0, 0.9), ValueError),
        (lambda: jrb.NStep(2, 1.5), ValueError),
        (lambda: jrb.NStep(2, jnp.float32(0.9)), TypeError),
        (lambda: jrb.NStep(2, 0.9, strict="no"), TypeError),
        (lambda: jrb.ReplayBuffer(4, unit=jrb.FrameStack(2, unit=jrb.FrameStack(2))), ValueError),
        (lambda: jrb.ReplayBuffer(4, keys=None), TypeError),
        (lambda: jrb.Sequence(0), ValueError),
        (lambda: jrb.Sequence(2, burn_in=-1), ValueError),
        (lambda: jrb.Sequence(2, sample_by="rows"), ValueError),
        (lambda: jrb.Sequence(2, partial="cut"), ValueError),
        (lambda: jrb.FrameStack(2, pad="none"), ValueError),
        (lambda: jrb.FrameStack(2, paths="observation"), TypeError),
        (lambda: jrb.Hindsight(negative_distance, "past"), ValueError),
        (lambda: jrb.Hindsight(negative_distance, ratio=2), ValueError),
        (lambda: jrb.Hindsight(None), TypeError),
    ],
)
def test_bad_descriptions_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_the_first_anchor_comes_with_as_many_rows_as_a_unit_says():
    window = functools.partial(jrb.Sequence, 5)
    units = [jrb.Transition(), jrb.NStep(4, 0.9), jrb.NStep(4, 0.9, strict=True), window()]
    units += [window(burn_in=3), window(partial="pad"), window(stride=3, burn_in=2)]
    units += [window(cross_episodes=True), window(sample_by="episodes"), jrb.FrameStack(3)]
    units += [jrb.FrameStack(3, unit=window()), jrb.FrameStack(2, unit=jrb.NStep(3, 1.0, True))]
    goal = ("next", "observation", "goal")
    hindsight = functools.partial(
        jrb.Hindsight, negative_distance, achieved=goal, goal=goal[1:], next_goal=goal
    )
    units += [hindsight(unit=window()), hindsight()]
    items = jax.tree.map(lambda leaf: jnp.zeros((1, *jnp.shape(leaf)), leaf.dtype), EXAMPLE)
    for unit in units:
        buffer = jrb.ReplayBuffer(16, unit=unit)
        state, rows = buffer.init(EXAMPLE), 0
        while not buffer.can_sample(state):
            state, rows = buffer.extend(state, items), rows + 1
        assert rows == unit.anchor_rows, unit
