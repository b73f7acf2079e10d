"""Every unit, against lists of episodes in plain Python, on random streams of rows."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests import reference

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
            self.frames[env] = self.number() if done else after
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
    return buffer, *map(jax.jit, (buffer.add, buffer.extend, buffer.sample, buffer.empty))


@st.composite
def commands(draw, envs, rows):
    """Calls with the done flags of their rows; episodes of length one and long ones."""
    often = draw(st.sampled_from([0.02, 0.2, 0.6]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    calls = []
    for _ in range(draw(st.integers(1, 12))):
        verb = draw(st.sampled_from(["add", "add", "extend", "extend", "long", "empty"]))
        length = {"add": 1, "extend": CHUNK, "long": 2 * rows + 1, "empty": 0}[verb]
        done = rng.random((length, envs)) < often
        mask = rng.random(length) < 0.8 if draw(st.booleans()) else np.ones(length, bool)
        calls.append((verb, np.stack([done, rng.random(done.shape) < 0.5], -1).tolist(), mask))
    return calls


def played(unit, rows, envs, calls):
    """The buffer's state and the model after the calls, and when each episode began."""
    buffer, add, extend, sample, empty = compiled(unit, rows, envs)
    state, model, stream = buffer.init(EXAMPLE), reference.Episodes(rows, envs), Stream(envs)
    begins = {}
    for verb, dones, mask in calls:
        if verb == "empty":
            state = empty(state)
            model.empty()
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
    agree(unit, rows, envs, data.draw(commands(envs, rows)), expected)


def random_streams(test):
    return hypothesis.settings(max_examples=30)(hypothesis.given(data=st.data())(test))


def n_step(n, discount, strict):
    def expected(model, entry, begins):
        window = model.ahead(entry, n)
        last = window[-1]
        if strict and len(window) < n and not last["done"]:
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


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("n", "discount"), [(1, 0.5), (3, 0.5)])
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


@pytest.mark.parametrize("short", ["drop", "pad"])
@pytest.mark.parametrize(("length", "burn_in"), [(1, 0), (3, 0), (3, 2), (1, 4)])
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


@pytest.mark.parametrize("pad", ["first", "zeros"])
@pytest.mark.parametrize("k", [1, 2, 4])
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
    calls = data.draw(commands(envs, rows))
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


@pytest.mark.parametrize("short", ["drop", "pad"])
@pytest.mark.parametrize("length", [1, 3])
@random_streams
def test_every_episode_alike(length, short, data):
    rows, envs = data.draw(st.sampled_from([(length, 1), (length + 1, 2), (12, 3)]))
    unit = jrb.Sequence(length, over="episodes", short=short)
    calls = data.draw(commands(envs, rows))
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
    calls = data.draw(commands(envs, rows))
    buffer, state, sample, model, _ = played(unit, rows, envs, calls)
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
