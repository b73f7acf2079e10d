"""`FrameStack` and `Hindsight` at the oldest rows of a full ring, against a plain model."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
FRAMES = (("observation", "frame"), ("next", "observation", "frame"))


def compositions(total, most):
    """Yields every way to write `total` rows in chunks of at most `most` rows."""
    if not total:
        yield ()
    for first in range(1, min(total, most) + 1):
        for others in compositions(total - first, most):
            yield (first, *others)


def played(done):
    """Returns rows `[T, E, ...]` with these ends, whose frames are unique numbers."""
    frame, after = np.zeros((2, *done.shape), np.int32)
    fresh = itertools.count(1)
    for env in range(done.shape[1]):
        now = next(fresh)
        for time in range(len(done)):
            frame[time, env], after[time, env] = now, next(fresh)
            now = next(fresh) if done[time, env] else after[time, env]
    see = lambda place: {"frame": place, "achieved": place, "goal": np.full_like(place, -5)}
    reward = np.zeros(done.shape, np.float32)
    ends = {"reward": reward, "done": done}
    return {"observation": see(frame), "next": {"observation": see(after), **ends}}


@functools.lru_cache
def compiled(unit, rows, envs, shared, writer):
    storage = jrb.DeviceStorage()
    if shared:
        storage = jrb.DeviceStorage(share_next_observations=True, terminal_capacity=rows * envs)
    buffer = jrb.ReplayBuffer(
        rows * envs, num_envs=envs, batch_size=1024, unit=unit, storage=storage, writer=writer
    )
    return buffer, jax.jit(buffer.extend), jax.jit(buffer.sample)


def expected(items, first, stop, rows, k, strategy):
    """Returns, for each anchor among the held rows first to stop - 1, its stacks and its goals."""
    done, frames = items["next"]["done"], items["observation"]["frame"]
    after, entries = items["next"]["observation"]["frame"], {}
    for time in range(first, stop):
        for env in range(done.shape[1]):
            ends = np.flatnonzero(done[:, env])
            begin = max((end + 1 for end in ends if end < time), default=0)
            last = min((end for end in ends if end >= time), default=stop - 1)
            last, oldest = min(last, stop - 1), max(begin, first)
            if max(begin, time - k + 1) < first:
                continue  # a frame of the stack was overwritten: the row is no anchor
            stack = [int(frames[max(begin, time - back), env]) for back in reversed(range(k))]
            goals = {"future": range(time, last + 1), "final": [last]}
            goals["episode"] = range(oldest, last + 1)
            own = [after[row, env] for row in goals.get(strategy, ())]
            slot = time % rows * done.shape[1] + env
            entries[slot] = (stack, [*stack[1:], int(after[time, env])], set(map(int, own)) or {-5})
    return entries


def check(unit, k, strategy, rows, envs, shared, writer, number, seed):
    """Asserts that draws after each write are those of the model, for `number` chunkings."""
    buffer, extend, sample = compiled(unit, rows, envs, shared, writer)
    rng = np.random.default_rng(seed)
    every = list(compositions(2 * rows + 2, rows + 2))
    for which in rng.permutation(len(every))[:number]:
        done = rng.random((2 * rows + 2, envs)) < rng.choice([0.1, 0.4, 0.8, 1.0])
        items, stop = played(done), 0
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], items))
        for length in every[which]:
            part = slice(stop, stop + length)
            state = extend(state, jax.tree.map(lambda leaf, part=part: leaf[part], items))
            stop += length
            entries = expected(items, max(0, stop - rows), stop, rows, k, strategy)
            batch, drawn = jax.device_get(sample(state, KEY)), {}
            before, after = batch.data["observation"], batch.data["next"]["observation"]
            for b, slot in enumerate(batch.indices.tolist()):
                stacks = before["frame"][b], after["frame"][b]
                one = drawn.setdefault(slot, (*(np.atleast_1d(s).tolist() for s in stacks), set()))
                assert (one[0], one[1]) == tuple(np.atleast_1d(s).tolist() for s in stacks)
                one[2].add(int(before["goal"][b]))
            assert drawn == entries, (every[which], done.T.astype(int), stop)


def goals(strategy):
    near = lambda achieved, goal: jnp.float32(achieved == goal)
    paths = {"achieved": ("next", "observation", "achieved"), "goal": ("observation", "goal")}
    return jrb.Hindsight(near, strategy, 1.0, **paths, next_goal=("next", "observation", "goal"))


@pytest.mark.parametrize(
    ("k", "rows", "envs", "shared", "writer"),
    [
        (3, 4, 1, False, jrb.RoundRobin()),  # one row more than the stack
        (3, 4, 1, True, jrb.RoundRobin()),
        (2, 3, 2, True, jrb.RoundRobin()),
        (2, 3, 2, False, jrb.PerEnvironment()),
        (4, 4, 1, False, jrb.RoundRobin()),
    ],
)
def test_stacks_at_the_oldest_rows(k, rows, envs, shared, writer):
    check(jrb.FrameStack(k, paths=FRAMES), k, None, rows, envs, shared, writer, 40, k)


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_at_the_oldest_rows(strategy, k, shared):
    unit = goals(strategy) if k == 1 else jrb.FrameStack(k, paths=FRAMES, unit=goals(strategy))
    check(unit, k, strategy, 4, 1, shared, jrb.RoundRobin(), 20, k)
