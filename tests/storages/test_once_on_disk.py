"""Observations that files on the host store once are those that were written."""

import dataclasses
import functools
import itertools
import pathlib
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(5)
UNITS = {
    "transition": jrb.Transition(),
    "n-step": jrb.NStep(3, 0.9),
    "windows": jrb.Sequence(3, partial="pad"),
    "windows across ends": jrb.Sequence(3, cross_episodes=True),
    "stacks": jrb.FrameStack(2),
    "goals": jrb.Hindsight(lambda achieved, goal: jnp.sum(achieved == goal, dtype=jnp.float32)),
}
ONCE = {
    "memmap": lambda path=None: jrb.MemmapStorage(path, share_next_observations=True),
    "spill": lambda path=None: jrb.SpillStorage(path, 4, share_next_observations=True),
}
EXAMPLE = {
    "observation": {
        "observation": np.zeros(3, np.uint8),
        "achieved_goal": np.zeros(1, np.float32),
        "desired_goal": np.zeros(1, np.float32),
    },
    "action": np.int32(0),
    "next": {"reward": np.float32(0), "done": np.bool_(False)},
}
EXAMPLE["next"]["observation"] = EXAMPLE["observation"]
same = functools.partial(chex.assert_trees_all_equal, strict=True)


class Stream:
    """Steps of environments, whose episodes end with and without flags."""

    def __init__(self, seed, envs):
        self.rng, self.envs, self.count = np.random.default_rng(seed), envs, 0
        self.now = self.observation()

    def observation(self):
        # Few values: some observations repeat others by chance.
        leaves = jax.tree.leaves(EXAMPLE["observation"])
        rows = [
            self.rng.integers(0, 3, (self.envs, *leaf.shape)).astype(leaf.dtype) for leaf in leaves
        ]
        return jax.tree.unflatten(jax.tree.structure(EXAMPLE["observation"]), rows)

    def step(self, mask):
        """Returns a row `[E, ...]`; environments whose entry is masked stay where they are."""
        now, after, new = self.now, self.observation(), self.observation()
        done, cut = self.rng.random((2, self.envs)) < 0.15
        self.count += 1
        pick = lambda flag, one, other: jax.tree.map(
            lambda a, b: np.where(flag.reshape(-1, *[1] * (a.ndim - 1)), a, b), one, other
        )
        self.now = pick(mask, pick(done | cut, new, after), now)
        reward = np.full(self.envs, self.count, np.float32)
        action = np.full(self.envs, self.count, np.int32)
        after = {"observation": after, "reward": reward, "done": done}
        return {"observation": now, "action": action, "next": after}


def play(buffers, seed, steps=25):
    """Yields the states of buffers after each method of a random program."""
    envs, per_env = buffers[0].num_envs, buffers[0].writer.per_env
    stream, rng = Stream(seed, envs), np.random.default_rng(seed)
    states = [buffer.init(EXAMPLE) for buffer in buffers]
    for _ in range(steps):
        kind, time = rng.choice(["add", "extend", "set", "truncate", "empty"], p=KINDS), 1
        if kind in ("add", "extend"):
            time = int(rng.choice([2, 5])) if kind == "extend" else 1
            mask = rng.random((time, envs) if per_env else time) < 0.8
            rows = [stream.step(np.broadcast_to(one, envs)) for one in mask]
            items = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
            call, arguments = "extend", (items, mask)
        elif kind == "set":
            slots = rng.integers(0, buffers[0].capacity, 3).astype(np.int32)
            new = jax.tree.map(lambda leaf: leaf[:1].repeat(3, 0), stream.observation())
            values = {"observation": new} if rng.random() < 0.5 else {"action": slots}
            call, arguments = "set", (slots, values)
        elif kind == "truncate":
            call, arguments = "truncate", (rng.random(envs) < 0.5,)
        else:
            call, arguments = "empty", ()
        pairs = zip(buffers, states, strict=True)
        states = [getattr(buffer, call)(state, *arguments) for buffer, state in pairs]
        yield states


KINDS = [0.5, 0.2, 0.15, 0.1, 0.05]
CASES = [(unit, jrb.RoundRobin(), storage) for unit in UNITS for storage in ONCE]
CASES += [(unit, jrb.PerEnvironment(), "memmap") for unit in ("transition", "windows")]


IN_TURN = jrb.RoundRobin()


def made(storage, unit="transition", writer=IN_TURN, **parts):
    parts = {"capacity": 12, "num_envs": 2, "batch_size": 8, "sampler": jrb.Prioritized(), **parts}
    return jrb.ReplayBuffer(storage=storage, unit=UNITS[unit], writer=writer, **parts)


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "writer", "storage"), CASES)
def test_draws_are_those_of_storages_that_store_them_twice(unit, writer, storage):
    storages = (jrb.DeviceStorage(), jrb.MemmapStorage(), ONCE[storage]())
    buffers, count = [made(it, unit, writer) for it in storages], 0
    for states in play(buffers, CASES.index((unit, writer, storage))):
        if bool(buffers[0].can_sample(states[0])):
            count += 1
            key = jax.random.fold_in(KEY, count)
            draws = [b.sample(state, key) for b, state in zip(buffers, states, strict=True)]
            same(*draws[:2])
            same(draws[0], draws[2])
    assert count > 5


@pytest.mark.slow
@pytest.mark.parametrize("storage", ONCE)
def test_commits_and_copies_have_all_items(storage, tmp_path):
    plain, buffer = made(jrb.DeviceStorage()), made(ONCE[storage](tmp_path / "own"))
    for number, (expected, state) in enumerate(play([plain, buffer], 3, 12)):
        if not int(plain.size(expected)):
            continue
        path = tmp_path / ("own" if number % 2 else "other")
        jrb.save(path, buffer, state)
        loaded, again = jrb.load(path)
        assert loaded.storage.share_next_observations
        same(jrb.items(loaded, again), jrb.items(plain, expected))
        same(jrb.items(buffer, state), jrb.items(plain, expected))
        same(loaded.sample(again, KEY), plain.sample(expected, KEY))
        del again
    # Another process goes on from the last commit.
    del state
    buffer, state = jrb.load(tmp_path / "own")
    before = jrb.items(buffer, state)
    state = buffer.add(state, Stream(0, 2).step(np.ones(2, bool)))
    same(jrb.items(*jrb.load(tmp_path / "own")), before)


@pytest.mark.slow
def test_it_is_converted_to_other_descriptions(tmp_path):
    once, twice = made(ONCE["memmap"](tmp_path / "own")), made(jrb.MemmapStorage())
    (state,) = list(play([once], 4, 10))[-1]
    jrb.save(tmp_path / "own", once, state)
    _, other = jrb.load(tmp_path / "own", twice)
    same(jrb.items(twice, other), jrb.items(once, state))
    jrb.save(tmp_path / "twice", twice, other)
    other_once = made(ONCE["spill"]())
    _, again = jrb.load(tmp_path / "twice", other_once)
    same(jrb.items(other_once, again), jrb.items(once, state))
    back = dataclasses.replace(once, storage=ONCE["spill"]())
    same(jrb.items(back, jrb.rebuild(twice, other, back)), jrb.items(once, state))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ONCE)
def test_frames_take_half_of_the_disk(storage, tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (601, 2, 84, 84)).astype(np.uint8)
    done = np.arange(600) % 100 == 99
    after = {"observation": frames[1:], "done": np.repeat(done[:, None], 2, axis=1)}
    sizes = []
    for name, make in (("twice", jrb.MemmapStorage), ("once", ONCE[storage])):
        buffer = jrb.ReplayBuffer(1000, 2, 4, storage=make(tmp_path / name))
        example = {
            "observation": frames[0, 0],
            "next": {"observation": frames[0, 0], "done": False},
        }
        state = buffer.init(example)
        for start in range(0, 600, 60):
            part = slice(start, start + 60)
            cut = lambda leaf, part=part: leaf[part]
            state = buffer.extend(
                state, jax.tree.map(cut, {"observation": frames[:-1], "next": after})
            )
        jrb.save(tmp_path / name, buffer, state)
        files = [*pathlib.Path(tmp_path / name, "arrays").iterdir()]
        sizes.append(sum(512 * file.stat().st_blocks for file in files))
        assert buffer.nbytes(example, "files") < 1.1 * (1 if name == "once" else 2) * 1000 * 84 * 84
    assert sizes[1] < 0.55 * sizes[0]


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match=r"prealloc: expected False with share_next_observations"):
        jrb.MemmapStorage(prealloc=True, share_next_observations=True)
    with pytest.raises(TypeError, match=r"share_next_observations: expected"):
        jrb.SpillStorage(None, 4, share_next_observations=1)
    buffer = jrb.ReplayBuffer(4, storage=jrb.MemmapStorage(share_next_observations=True))
    with pytest.raises(ValueError, match=r"expected leaves at 'next/observation'.*'next/reward'"):
        buffer.init({"next": {"reward": jnp.zeros(())}})


WRITER = """
import sys
import jrb
from tests.storages import test_once_on_disk as own
buffer = own.made(own.ONCE[sys.argv[2]](sys.argv[1]))
for number, (state,) in enumerate(own.play([buffer], 6, 1000)):
    if number % 4 == 0:
        jrb.save(sys.argv[1], buffer, state, extra={"number": number})
        sys.stdout.write("saved\\n")
        sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.parametrize("storage", ONCE)
def test_after_a_kill_the_last_commit_is_there(storage, tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "own"), storage]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(5):
            assert process.stdout.readline() == "saved\n"
        process.kill()
    loaded, state, extra = jrb.load(tmp_path / "own", extra={"number": 0})
    number = extra["number"]
    plain = made(jrb.DeviceStorage())
    (expected,) = next(itertools.islice(play([plain], 6, 1000), number, None))
    assert number >= 16 and int(plain.size(expected))
    same(jrb.items(loaded, state), jrb.items(plain, expected))
