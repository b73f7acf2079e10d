"""Random streams of rows, and comparisons of buffers with plain lists on them."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

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
    """Rows of E environments; every frame, also after a reset, is a unique number."""

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
    """Returns rows in the form that a buffer takes, leaves `[T, E, ...]`."""
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
    methods = (buffer.add, buffer.extend, buffer.sample, buffer.empty, buffer.truncate)
    return buffer, *map(jax.jit, methods)


@st.composite
def commands(draw, envs, rows, truncates=False):
    """Draws calls with the flags and the mask of their rows, for short and long episodes.

    The mask of `truncate` selects environments. Rings of at most `CHUNK` rows have no "long" calls,
    because each `extend` already fills them.
    """
    often = draw(st.sampled_from([0.02, 0.2, 0.6]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    calls = []
    for _ in range(draw(st.integers(1, 12))):
        some = ["add", "add", "extend", "extend", "long" if rows > CHUNK else "add", "empty"]
        some += ["truncate"] * truncates
        method = draw(st.sampled_from(some))
        length = {"add": 1, "extend": CHUNK, "long": 2 * rows + 1}.get(method, 0)
        flags = rng.random((length, envs, 2)) < often / 2
        mask = rng.random(length) < 0.8 if draw(st.booleans()) else np.ones(length, bool)
        if method == "truncate":
            mask = rng.random(envs) < 0.7
        calls.append((method, flags.tolist(), mask))
    return calls


def played(unit, rows, envs, calls):
    """Runs calls on a buffer and on the model; returns both, and when each episode began."""
    buffer, add, extend, sample, empty, truncate = compiled(unit, rows, envs)
    state, model, stream = buffer.init(EXAMPLE), reference.Episodes(rows, envs), Stream(envs)
    begins = {}
    for method, dones, mask in calls:
        if method == "empty":
            state = empty(state)
            model.empty()
            continue
        if method == "truncate":
            state = truncate(state, mask)
            model.truncate(mask)
            continue
        written = [stream.row(flags) for flags in dones]
        items = arrays(written)
        if method == "add":
            state = add(state, jax.tree.map(lambda leaf: leaf[0], items), mask[0])
        else:
            state = extend(state, items, mask)
        for row, is_written in zip(written, mask, strict=True):
            for env in range(envs):
                begins.setdefault((env, model.number[env]), model.time)
            model.add(row, is_written)
    return buffer, state, sample, model, begins


def agree(unit, rows, envs, calls, expected):
    """Asserts that a draw of all anchors gives what `expected` returns for each stored entry.

    `expected(model, entry, begins)` returns None for an entry that is no anchor.
    """
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
    """Reads a path such as `data/next/reward` from a sample; only the first number of frames."""
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


def sequence(length, burn_in, short, period=1, across=False):
    def expected(model, entry, begins):
        start = 0 if across else begins[entry["env"], entry["episode"]]
        has_room = model.rows >= (length if short == "drop" else 1) + period - 1
        if has_room and (entry["time"] - start) % period:
            return None
        of_env = model.held[entry["env"]]
        place = of_env.index(entry)
        window = of_env[place:][:length] if across else model.ahead(entry, length)
        if short == "drop" and len(window) < length:
            return None
        before = of_env[:place] if across else model.behind(entry, burn_in)
        return windowed(before[len(before) - min(burn_in, len(before)) :], window)

    def windowed(before, window):
        mask = [False] * (burn_in - len(before)) + [True] * (len(before) + len(window))
        mask += [False] * (length - len(window))
        rows = [(before + window)[0]] * (burn_in - len(before)) + before + window
        rows += [window[-1]] * (length - len(window))
        return shown(rows, mask)

    return expected


def whole_episode(length):
    """Expects the first rows of each complete episode whose first row is stored, padded."""

    def expected(model, entry, begins):
        every = model.of_episode(entry)
        if entry["time"] != begins[entry["env"], entry["episode"]] or not every[-1]["ends"]:
            return None
        rows = every[:length]
        padding = length - len(rows)
        return shown(rows + [rows[-1]] * padding, [True] * len(rows) + [False] * padding)

    return expected


def shown(rows, mask):
    """Returns the expected sample of a window of rows."""
    return {
        "data/observation/frame": [row["frame"] for row in rows],
        "data/action": [row["action"] for row in rows],
        "data/next/observation/frame": [row["after"] for row in rows],
        "data/next/done": [row["done"] for row in rows],
        "mask": mask,
        "info/is_first": [row["first"] and real for row, real in zip(rows, mask, strict=True)],
        "info/is_last": [row["ends"] and real for row, real in zip(rows, mask, strict=True)],
    }


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


def negative_distance(achieved, goal):
    return -jnp.abs(achieved - goal).astype(jnp.float32)


def ten_and_ninety():
    """Returns the rows of one environment: an episode of 10 steps and one of 90."""
    done = np.zeros((100, 1), bool)
    done[[9, 99]] = True
    return arrays([Stream(1).row([(bool(flag), False)]) for flag in done[:, 0]])
