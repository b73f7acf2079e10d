"""Every unit, against lists of episodes in plain Python, on random streams of rows."""

import functools
import operator

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests import reference

pytestmark = pytest.mark.slow

KEY = jax.random.key(7)
EXAMPLE = {
    "observation": {"frame": jnp.zeros(2, jnp.int32), "goal": jnp.int32(0)},
    "action": jnp.int32(0),
    "next": {
        "observation": {"frame": jnp.zeros(2, jnp.int32), "goal": jnp.int32(0)},
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
        "truncated": jnp.bool_(False),
    },
}
CHUNK = 5


class Stream:
    """Rows of E environments: every frame is a number of its own, resets included."""

    def __init__(self, envs):
        self.envs, self.fresh = envs, 1
        self.frames = [self.number() for _ in range(envs)]

    def number(self):
        self.fresh += 1
        return self.fresh

    def row(self, dones):
        items = []
        for env, (done, truncated) in enumerate(dones):
            after = self.number()
            item = {"frame": self.frames[env], "after": after, "action": self.number()}
            item |= {"done": done, "truncated": truncated, "reward": float(self.number() % 13) - 6}
            items.append(item)
            self.frames[env] = self.number() if done or truncated else after
        return items


def arrays(rows):
    """Rows as the buffer takes them, leaves `[T, E, ...]`."""
    get = lambda name, dtype: np.array([[item[name] for item in row] for row in rows], dtype)
    frame = lambda name: np.stack([get(name, np.int32), -get(name, np.int32)], axis=-1)
    see = lambda name: {"frame": frame(name), "goal": get(name, np.int32)}
    after = {"observation": see("after"), "reward": get("reward", np.float32)}
    after |= {"done": get("done", bool), "truncated": get("truncated", bool)}
    return {"observation": see("frame"), "action": get("action", np.int32), "next": after}


@functools.lru_cache
def compiled(unit, rows, envs):
    buffer = jrb.ReplayBuffer(
        rows * envs,
        num_envs=envs,
        batch_size=rows * envs,
        sampler=jrb.Uniform(replacement=False),
        unit=unit,
    )
    verbs = (buffer.add, buffer.extend, buffer.sample, buffer.empty, buffer.truncate)
    return buffer, *map(jax.jit, verbs)


@st.composite
def commands(draw, envs, rows, truncates=False):
    """Calls with the flags of their rows; episodes of length one and long ones.

    Of `truncate`, in place of a mask over time, which environments begin anew.
    """
    often = draw(st.sampled_from([0.02, 0.2, 0.6]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    calls = []
    for _ in range(draw(st.integers(1, 12))):
        some = ["add", "add", "extend", "extend", "long", "empty"] + ["truncate"] * truncates
        verb = draw(st.sampled_from(some))
        length = {"add": 1, "extend": CHUNK, "long": 2 * rows + 1}.get(verb, 0)
        flags = rng.random((length, envs, 2)) < often / 2
        mask = rng.random(length) < 0.8 if draw(st.booleans()) else np.ones(length, bool)
        if verb == "truncate":
            mask = rng.random(envs) < 0.7
        calls.append((verb, flags.tolist(), mask))
    return calls


def played(unit, rows, envs, calls):
    """The buffer's state and the model after the calls, and when each episode began."""
    buffer, add, extend, sample, empty, truncate = compiled(unit, rows, envs)
    state, model, stream = buffer.init(EXAMPLE), reference.Episodes(rows, envs), Stream(envs)
    begins = {}
    for verb, dones, mask in calls:
        if verb == "empty":
            state = empty(state)
            model.empty()
            continue
        if verb == "truncate":
            state = truncate(state, mask)
            model.truncate(mask)
            continue
        written = [stream.row(flags) for flags in dones]
        items = arrays(written)
        if verb == "add":
            state = add(state, jax.tree.map(lambda leaf: leaf[0], items), mask[0])
        else:
            state = extend(state, items, mask)
        for row, is_written in zip(written, mask, strict=True):
            for env in range(envs):
                begins.setdefault((env, model.number[env]), model.time)
            model.add(row, is_written)
    return buffer, state, sample, model, begins


def agree(unit, rows, envs, calls, expected):
    """A draw of all anchors is what `expected(model, entry)` says, None for those that are none."""
    buffer, state, sample, model, begins = played(unit, rows, envs, calls)
    want = {}
    for entry in model.all():
        item = expected(model, entry, begins)
        if item is not None:
            want[entry["slot"]] = item
    drawn = jax.tree.map(np.asarray, sample(state, KEY))
    real = drawn.mask.reshape(drawn.mask.shape[0], -1).any(axis=1)
    assert sorted(drawn.indices[real].tolist()) == sorted(want)
    assert bool(buffer.can_sample(state)) == bool(want)
    for b in np.flatnonzero(real):
        for name, value in want[int(drawn.indices[b])].items():
            got = pick(drawn, name)[b]
            np.testing.assert_array_equal(got, np.asarray(value, got.dtype), err_msg=name)
    np.testing.assert_allclose(drawn.probabilities[real], 1 / max(len(want), 1), rtol=1e-6)
    assert (drawn.weights[~real] == 0).all()
    assert (drawn.probabilities[~real] == 0).all()


def pick(sample, name):
    """`data/next/reward` of a sample; frames as their first number."""
    part, *path = name.split("/")
    value = getattr(sample, part)
    for step in path:
        value = value[step]
    return value[..., 0] if path and path[-1] == "frame" else value


CASES = [(1, 1, 1), (4, 1, 3), (3, 2, 3), (9, 3, 4)]
RINGS = [(rows, envs) for rows, envs, _ in CASES]


def check(unit, expected, rings, data):
    rows, envs = data.draw(st.sampled_from(rings))
    agree(unit, rows, envs, data.draw(commands(envs, rows, truncates=True)), expected)


def random_streams(test):
    return hypothesis.settings(max_examples=10)(hypothesis.given(data=st.data())(test))


def n_step(n, discount, strict):
    def expected(model, entry, begins):
        window = model.ahead(entry, n)
        last = window[-1]
        if strict and len(window) < n and not last["ends"]:
            return None
        total = 0.0
        for row in reversed(window):
            total = row["reward"] + discount * total
        return {
            "data/observation/frame": entry["frame"],
            "data/action": entry["action"],
            "data/next/reward": total,
            "data/next/observation/frame": last["after"],
            "data/next/observation/goal": last["after"],
            "data/next/done": last["done"],
            "data/next/truncated": last["truncated"],
            "info/steps": len(window),
            "info/discount": discount ** len(window),
        }

    return expected


@pytest.mark.parametrize(
    ("n", "discount", "strict"), [(1, 0.5, False), (3, 0.5, False), (3, 0.5, True)]
)
@random_streams
def test_n_step(n, discount, strict, data):
    unit = jrb.NStep(n, discount, strict=strict)
    check(unit, n_step(n, discount, strict), [(3, 1), (4, 2), (11, 3)], data)


def sequence(length, burn_in, short):
    def expected(model, entry, begins):
        window = model.ahead(entry, length)
        if short == "drop" and len(window) < length:
            return None
        before = model.behind(entry, burn_in)
        rows = [(before + window)[0]] * (burn_in - len(before)) + before + window
        rows += [window[-1]] * (length - len(window))
        mask = [False] * (burn_in - len(before)) + [True] * (len(before) + len(window))
        return {
            "data/observation/frame": [row["frame"] for row in rows],
            "data/action": [row["action"] for row in rows],
            "data/next/observation/frame": [row["after"] for row in rows],
            "data/next/done": [row["done"] for row in rows],
            "mask": mask + [False] * (length - len(window)),
        }

    return expected


@pytest.mark.parametrize(
    ("length", "burn_in", "short"),
    [(3, 0, "pad"), (3, 2, "drop"), (3, 2, "pad"), (1, 4, "pad")],
)
@random_streams
def test_sequence(length, burn_in, short, data):
    unit = jrb.Sequence(length, burn_in=burn_in, short=short)
    least = length + burn_in
    check(unit, sequence(length, burn_in, short), [(least, 1), (least + 1, 2), (12, 3)], data)


def frame_stack(k, pad="first", inner=None):
    def stacks(model, entry, begins):
        frames = model.stack(entry, k, begins)
        if frames is None:
            return None
        first = begins[entry["env"], entry["episode"]]
        if pad == "zeros":
            missing = max(0, k - 1 - (entry["time"] - first))
            frames = [0] * missing + frames[missing:]
        return frames

    def expected(model, entry, begins):
        frames = stacks(model, entry, begins)
        if frames is None:
            return None
        item = inner(model, entry, begins) if inner else {}
        if item is None:
            return None
        steps = item.get("info/steps", 1)
        last = model.ahead(entry, steps)[-1]
        return item | {
            "data/observation/frame": frames,
            "data/next/observation/frame": [*stacks(model, last, begins)[1:], last["after"]],
        }

    return expected


@pytest.mark.parametrize(("k", "pad"), [(1, "first"), (4, "first"), (2, "zeros")])
@random_streams
def test_frame_stack(k, pad, data):
    check(jrb.FrameStack(k, pad=pad), frame_stack(k, pad), [(k, 1), (k + 1, 2), (9, 3)], data)


@pytest.mark.parametrize("strict", [False, True])
@random_streams
def test_n_step_over_stacked_frames(strict, data):
    paths = (("observation", "frame"), ("next", "observation", "frame"))
    unit = jrb.FrameStack(3, paths, unit=jrb.NStep(3, 0.5, strict=strict))
    expected = frame_stack(3, inner=n_step(3, 0.5, strict))
    check(unit, expected, [(3, 1), (5, 2), (11, 3)], data)


@pytest.mark.parametrize("short", ["drop", "pad"])
@random_streams
def test_windows_of_stacked_frames(short, data):
    k, length, burn_in = 3, 3, 2
    inner = sequence(length, burn_in, short)

    def expected(model, entry, begins):
        item = inner(model, entry, begins)
        if item is None or model.stack(entry, k, begins) is None:
            return None
        rows = model.behind(entry, burn_in)
        stacks = [model.stack(row, k, begins) for row in rows]
        stacks = [None] * (burn_in - len(rows)) + stacks
        mask = [stack is not None for stack in stacks] + item["mask"][burn_in:]
        return {"mask": mask}

    rows, envs = data.draw(st.sampled_from([(5, 1), (6, 2), (13, 3)]))
    unit = jrb.FrameStack(k, unit=jrb.Sequence(length, burn_in=burn_in, short=short))
    calls = data.draw(commands(envs, rows, truncates=True))
    agree(unit, rows, envs, calls, expected)
    _, state, sample, model, begins = played(unit, rows, envs, calls)
    drawn = jax.tree.map(np.asarray, sample(state, KEY))
    by_slot = {entry["slot"]: entry for entry in model.all()}
    for b, step in np.argwhere(drawn.mask):
        anchor = by_slot[int(drawn.indices[b])]
        entry = model.at(anchor["env"], anchor["time"] + step - burn_in)
        frames = model.stack(entry, k, begins)
        see = drawn.data["observation"]["frame"][b, step, :, 0]
        after = drawn.data["next"]["observation"]["frame"][b, step, :, 0]
        assert see.tolist() == frames
        assert after.tolist() == [*frames[1:], entry["after"]]
        assert drawn.data["action"][b, step] == entry["action"]


@pytest.mark.parametrize(("length", "short"), [(3, "drop"), (3, "pad")])
@random_streams
def test_every_episode_alike(length, short, data):
    rows, envs = data.draw(st.sampled_from([(length, 1), (length + 1, 2), (12, 3)]))
    unit = jrb.Sequence(length, over="episodes", short=short)
    calls = data.draw(commands(envs, rows, truncates=True))
    buffer, state, sample, model, begins = played(unit, rows, envs, calls)
    anchors = {}
    for entry in model.all():
        if sequence(length, 0, short)(model, entry, begins) is not None:
            anchors.setdefault((entry["env"], entry["episode"]), []).append(entry)
    by_slot = {entry["slot"]: entry for entry in model.all()}
    assert bool(buffer.can_sample(state)) == bool(anchors)
    for key in jax.random.split(KEY, 3):
        drawn = jax.tree.map(np.asarray, sample(state, key))
        real = np.flatnonzero(drawn.mask[:, 0])
        entries = [by_slot[int(slot)] for slot in drawn.indices[real]]
        assert sorted((e["env"], e["episode"]) for e in entries) == sorted(anchors)
        for b, entry in zip(real, entries, strict=True):
            starts = anchors[entry["env"], entry["episode"]]
            assert entry in starts
            chance = 1 / len(anchors) / len(starts)
            np.testing.assert_allclose(drawn.probabilities[b], chance, rtol=1e-6)
            for name, value in sequence(length, 0, short)(model, entry, begins).items():
                np.testing.assert_array_equal(pick(drawn, name)[b], value, err_msg=name)


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
    (jrb.NStep(3, 0.5, strict=True), n_step(3, 0.5, True)),
    (jrb.Sequence(3), sequence(3, 0, "drop")),
    (jrb.Sequence(3, burn_in=1, short="pad"), sequence(3, 1, "pad")),
    (jrb.FrameStack(3), frame_stack(3)),
]


@pytest.mark.parametrize(("unit", "expected"), MEMBERS, ids=lambda case: type(case).__name__)
@random_streams
def test_priorities_are_held_just_where_anchors_are(unit, expected, data):
    rows, envs = data.draw(st.sampled_from([(4, 1), (5, 2), (11, 3)]))
    buffer, add, extend, sample, update, empty, truncate = prioritized(unit, rows, envs)
    state, model, stream = buffer.init(EXAMPLE), reference.Episodes(rows, envs), Stream(envs)
    begins, late = {}, None
    calls = data.draw(commands(envs, rows, truncates=True))
    for number, (verb, dones, mask) in enumerate(calls):
        written = [stream.row(flags) for flags in dones]
        for row, is_written in zip(written, mask if written else [], strict=True):
            for env in range(envs):
                begins.setdefault((env, model.number[env]), model.time)
            model.add(row, is_written)
        if verb == "empty":
            state = empty(state)
            model.empty()
        elif verb == "truncate":
            state = truncate(state, mask)
            model.truncate(mask)
        elif verb == "add":
            state = add(state, jax.tree.map(lambda leaf: leaf[0], arrays(written)), mask[0])
        else:
            state = extend(state, arrays(written), mask)
        if late is not None:  # drawn before these rows came: nothing that went is revived
            state = update(state, late, jnp.arange(8.0))
        late = sample(state, jax.random.key(number)) if number % 2 else None
    want = {e["slot"] for e in model.all() if expected(model, e, begins) is not None}
    raw = np.asarray(state.sampler.raw)
    assert set(np.flatnonzero(raw >= 0).tolist()) == want
    masses = np.asarray(jrb.sum_tree.leaves(state.sampler.masses))
    np.testing.assert_array_equal(masses > 0, raw > 0)


@pytest.mark.parametrize("unit", [jrb.NStep(3, 0.5, strict=True), jrb.Sequence(2)], ids=repr)
@hypothesis.settings(max_examples=5)
@hypothesis.given(data=st.data())
def test_a_queue_gives_every_anchor_once(unit, data):
    rows, envs = 64, 3
    expected = n_step(3, 0.5, True) if isinstance(unit, jrb.NStep) else sequence(2, 0, "drop")
    buffer = jrb.ReplayBuffer(rows * envs, num_envs=envs, sampler=jrb.Queue(), unit=unit)
    add, draw = jax.jit(buffer.add), jax.jit(buffer.draw, static_argnums=2)
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
    (jrb.NStep(2, 0.9), n_step(2, 0.9, False)),
    (jrb.Sequence(3), sequence(3, 0, "drop")),
    (jrb.FrameStack(2), frame_stack(2)),
    (jrb.Sequence(2, over="episodes"), sequence(2, 0, "drop")),
]


@pytest.mark.parametrize(("unit", "expected"), EPOCHS, ids=lambda case: type(case).__name__)
@pytest.mark.parametrize("envs", [1, 3])
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
    if getattr(unit, "over", "steps") == "steps":
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
    """The anchors of a sample, without those that were not drawn."""
    mask = np.asarray(sample.mask)
    return np.asarray(sample.indices)[mask.reshape(len(mask), -1).any(axis=1)].tolist()


def negative_distance(achieved, goal):
    return -jnp.abs(achieved - goal).astype(jnp.float32)


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
@random_streams
def test_goals_come_from_where_they_should(strategy, data):
    unit = jrb.Hindsight(
        negative_distance,
        strategy,
        ratio=0.7,
        achieved=("next", "observation", "goal"),
        goal=("observation", "goal"),
        next_goal=None,
    )
    rows, envs = data.draw(st.sampled_from([(1, 1), (4, 2), (12, 3)]))
    calls = data.draw(commands(envs, rows, truncates=True))
    _, state, sample, model, _ = played(unit, rows, envs, calls)
    by_slot = {entry["slot"]: entry for entry in model.all()}
    for key in jax.random.split(KEY, 3):
        drawn = jax.tree.map(np.asarray, sample(state, key))
        assert sorted(drawn.indices[drawn.mask].tolist()) == sorted(by_slot)
        for b in np.flatnonzero(drawn.mask):
            entry = by_slot[int(drawn.indices[b])]
            goal = int(drawn.data["observation"]["goal"][b])
            assert drawn.data["next"]["observation"]["goal"][b] == entry["after"]
            if not drawn.info["relabeled"][b]:
                assert goal == entry["frame"]
                assert drawn.data["next"]["reward"][b] == entry["reward"]
                continue
            ahead = model.ahead(entry, rows)
            rows_of = {
                "future": ahead,
                "final": ahead[-1:],
                "episode": model.of_episode(entry),
                "random": model.all(),
            }
            assert goal in [row["after"] for row in rows_of[strategy]]
            assert drawn.data["next"]["reward"][b] == -abs(entry["after"] - goal)


def chances(buffer, state, draws=200):
    """How often each slot is drawn, and how often it should be by `Sample.probabilities`."""
    keys = jax.random.split(jax.random.key(1), draws)
    sample = jax.jit(jax.vmap(lambda key: buffer.sample(state, key)))(keys)
    slots = np.asarray(sample.indices).reshape(-1)
    seen = np.bincount(slots, minlength=buffer.capacity)
    chance = np.zeros(buffer.capacity)
    chance[slots] = np.asarray(sample.probabilities).reshape(-1)
    return seen, chance


def chi_square(seen, expected):
    return ((seen - expected) ** 2 / expected).sum()


def ten_and_ninety():
    """One environment, an episode of 10 steps and one of 90."""
    done = np.zeros((100, 1), bool)
    done[[9, 99]] = True
    return arrays([Stream(1).row([(bool(flag), False)]) for flag in done[:, 0]])


@pytest.mark.parametrize(
    "sampler", [jrb.Uniform(), jrb.Prioritized()], ids=lambda s: type(s).__name__
)
def test_windows_over_steps_are_all_alike(sampler):
    buffer = jrb.ReplayBuffer(100, num_envs=1, batch_size=64, unit=jrb.Sequence(5), sampler=sampler)
    seen, chance = chances(buffer, buffer.extend(buffer.init(EXAMPLE), ten_and_ninety()))
    valid = np.r_[0:6, 10:96]
    assert set(np.flatnonzero(seen)) == set(valid)
    np.testing.assert_allclose(chance[valid], 1 / 92, rtol=1e-5)
    assert chi_square(seen[valid], seen.sum() / 92) < 140.0  # 91 degrees, 0.001


def test_windows_over_episodes_draw_short_episodes_as_often_as_long_ones():
    unit = jrb.Sequence(5, over="episodes")
    buffer = jrb.ReplayBuffer(100, num_envs=1, batch_size=64, unit=unit)
    seen, chance = chances(buffer, buffer.extend(buffer.init(EXAMPLE), ten_and_ninety()))
    expected = np.zeros(100)
    expected[0:6], expected[10:96] = 1 / 12, 1 / 172
    np.testing.assert_allclose(chance[expected > 0], expected[expected > 0], rtol=1e-5)
    valid = expected > 0
    assert (seen[~valid] == 0).all()
    assert chi_square(seen[valid], expected[valid] * seen.sum()) < 140.0
    assert abs(seen[:10].sum() / seen.sum() - 0.5) < 0.02


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_goals_are_all_alike(strategy):
    unit = jrb.Hindsight(
        negative_distance,
        strategy,
        ratio=1.0,
        achieved=("next", "observation", "goal"),
        goal=("observation", "goal"),
        next_goal=None,
    )
    buffer = jrb.ReplayBuffer(100, num_envs=1, batch_size=1, unit=unit)
    items = ten_and_ninety()
    items["next"]["observation"]["goal"][:] = np.arange(100)[:, None]
    state = buffer.extend(buffer.init(EXAMPLE), items)
    keys = jax.random.split(jax.random.key(1), 20_000)
    sample = jax.jit(jax.vmap(lambda key: buffer.sample(state, key)))(keys)
    slot = np.asarray(sample.indices)[:, 0]
    goal = np.asarray(sample.data["observation"]["goal"])[:, 0]
    short = slot < 10
    first = slot[short] if strategy == "future" else np.zeros(short.sum(), int)
    within = (goal[short] - first) / (10 - first)  # uniform on a grid of [0, 1)
    middle = np.mean((9 - first) / 2 / (10 - first))
    assert abs(within.mean() - middle) < 4 * 0.3 / np.sqrt(short.sum())
    assert goal[short].max() == 9
    assert abs(sample.info["relabeled"].mean() - 1.0) < 1e-6


@pytest.mark.parametrize("eta", [1.0, 0.9])
def test_priorities_of_rows_become_one(eta):
    unit = jrb.Sequence(3, burn_in=1, short="pad", eta=eta)
    buffer = jrb.ReplayBuffer(
        8, num_envs=1, batch_size=8, unit=unit, sampler=jrb.Prioritized(eps=0.0)
    )
    stream = Stream(1)
    done = [False, False, True, False, False, False]
    rows = arrays([stream.row([(flag, False)]) for flag in done])
    state = buffer.extend(buffer.init(EXAMPLE), rows)
    sample = buffer.sample(state, KEY)
    for whole in (False, True):
        width = 4 if whole else 3
        priorities = np.random.default_rng(0).random((8, width)).astype(np.float32)
        after = buffer.update_priority(state, sample, priorities)
        for b, slot in enumerate(np.asarray(sample.indices).tolist()):
            if slot in np.asarray(sample.indices)[b + 1 :]:
                continue
            rows = min(3, [2, 5][slot > 2] - slot + 1)
            real = priorities[b, width - 3 :][:rows]
            want = eta * real.max() + (1 - eta) * real.mean()
            np.testing.assert_allclose(after.sampler.raw[slot], want, rtol=1e-6)
    bad = np.ones((8, 3), np.float32)
    bad[:, 0] = -1.0
    after = buffer.update_priority(state, sample, bad)
    np.testing.assert_array_equal(after.sampler.raw, state.sampler.raw)
    assert int(after.sampler.refused) == 8
    with pytest.raises(ValueError, match=r"expected shape \(8,\) or \(8, 3\) or \(8, 4\), one"):
        buffer.update_priority(state, sample, jnp.ones((8, 2)))


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


def test_an_endless_episode_outlives_its_counters():
    unit = jrb.Sequence(2, over="episodes")
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
        (jrb.FrameStack(2, unit=jrb.Sequence(2, over="episodes")), "over='steps'"),
    ],
    ids=repr,
)
def test_a_window_must_fit_the_ring(unit, text):
    with pytest.raises(ValueError, match=text):
        jrb.ReplayBuffer(8, num_envs=2, unit=unit)


def test_episodes_and_priorities_are_refused_together():
    with pytest.raises(ValueError, match="two things about how likely a row is"):
        jrb.ReplayBuffer(8, unit=jrb.Sequence(2, over="episodes"), sampler=jrb.Prioritized())


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
    jrb.Sequence(3, burn_in=2, short="pad"),
    jrb.Sequence(2, over="episodes"),
    jrb.FrameStack(3),
]


@pytest.mark.parametrize("unit", FLAGGED, ids=repr)
def test_an_episode_ends_where_any_flag_says_so(unit):
    """Three flags of any dtype, of shape () or (1,), mean what one bool for all of them means."""
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
        sample = buffer.sample(buffer.extend(state, rows), KEY)
        return sample.indices, sample.mask, sample.data["observation"], sample.info

    want = drawn(done=flags.any(axis=0))
    nan = np.where(flags[1], np.float32("nan"), np.float32(0))
    others = [
        {"terminated": flags[0] | flags[2], "truncated": flags[1]},
        {"done": flags[0], "terminated": flags[1], "truncated": flags[2]},
        {"done": flags[0][..., None], "terminated": nan, "truncated": flags[2].astype(np.int8)},
        {"truncated": flags.any(axis=0)[..., None].astype(np.float16) * np.float16(-0.5)},
    ]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, drawn(**other), want)


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
        return buffer.sample(buffer.extend(state, rows), KEY)

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
        (lambda: jrb.Sequence(2, over="rows"), ValueError),
        (lambda: jrb.Sequence(2, short="cut"), ValueError),
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
