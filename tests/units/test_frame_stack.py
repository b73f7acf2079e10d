"""Stacks of frames against plain lists of episodes."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import types
from tests.units.streams import (
    KEY,
    agree,
    check,
    commands,
    frame_stack,
    n_step,
    played,
    random_streams,
    sequence,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("k", "pad", "rings"),
    [
        (1, "first", [(1, 1), (2, 2)]),
        (4, "first", [(4, 1), (9, 3)]),
        (2, "zeros", [(3, 2), (9, 3)]),
    ],
)
@random_streams
def test_frame_stack(k, pad, rings, data):
    check(jrb.FrameStack(k, pad=pad), frame_stack(k, pad), rings, data)


@pytest.mark.parametrize("strict", [False, True])
@random_streams
def test_n_step_over_stacked_frames(strict, data):
    paths = (("observation", "frame"), ("next", "observation", "frame"))
    unit = jrb.FrameStack(3, paths, unit=jrb.NStep(3, 0.5, strict=strict))
    expected = frame_stack(3, inner=n_step(3, 0.5, strict))
    check(unit, expected, [(3, 1) if strict else (5, 2), (11, 3)], data)


@pytest.mark.parametrize(
    ("short", "period", "across", "rings"),
    [
        ("drop", 1, False, [(6, 2), (13, 3)]),
        ("pad", 2, False, [(5, 1), (6, 2)]),
        ("drop", 2, True, [(5, 1), (13, 3)]),
    ],
)
@random_streams
def test_windows_of_stacked_frames(short, period, across, rings, data):
    k, length, burn_in = 3, 3, 2
    inner = sequence(length, burn_in, short, period, across)

    def expected(model, entry, begins):
        item = inner(model, entry, begins)
        if item is None or model.stack(entry, k, begins) is None:
            return None
        rows = model.behind(entry, burn_in)
        if across:
            of_env = model.held[entry["env"]]
            place = of_env.index(entry)
            rows = of_env[max(0, place - burn_in) : place]
        stacks = [model.stack(row, k, begins) for row in rows]
        stacks = [None] * (burn_in - len(rows)) + stacks
        mask = [stack is not None for stack in stacks] + item["mask"][burn_in:]
        marks = {name: item[name] for name in ("info/is_first", "info/is_last")}
        real = {name: np.array(mark) & mask for name, mark in marks.items()}
        return {"mask": mask, **real}

    rows, envs = data.draw(st.sampled_from(rings))
    windows = jrb.Sequence(
        length, burn_in=burn_in, partial=short, stride=period, cross_episodes=across
    )
    unit = jrb.FrameStack(k, unit=windows)
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


@pytest.mark.whole
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.complex64, "keys"])
@pytest.mark.parametrize("k", [1, 3])
def test_next_stacks_of_any_dtype_are_moved_on_by_a_frame(dtype, k):
    frames = jax.random.split(KEY, 9) if dtype == "keys" else np.arange(9).astype(dtype)
    done = np.arange(8) == 3
    rows = {"observation": frames[:8], "next": {"observation": frames[1:], "done": done}}
    buffer, state = jrb.from_items(rows, unit=jrb.FrameStack(k))
    sample = buffer.sample(state, KEY, batch_size=16)
    plain = lambda keys: np.asarray(jax.random.key_data(keys) if dtype == "keys" else keys)
    seen, after = plain(sample.data["observation"]), plain(sample.data["next"]["observation"])
    np.testing.assert_array_equal(after[:, :-1], seen[:, 1:])
    np.testing.assert_array_equal(after[:, -1], plain(frames)[np.asarray(sample.indices) + 1])


@types.component
class Apart(types.Unit):
    """Reads the anchor and the row two steps later, `[B, 2, ...]`, with one mask for both.

    With `back`, it reads the row two steps before the anchor, and the anchor.
    """

    back: bool = False

    @property
    def window(self):
        return jrb.Sequence(1, burn_in=2) if self.back else jrb.Sequence(3)

    max_entry_delay = property(lambda self: self.window.max_entry_delay)
    lookback = property(lambda self: self.window.lookback)

    def init(self, context, spec):
        return self.window.init(context, spec)

    def on_write(self, context, state, write, items):
        return self.window.on_write(context, state, write, items)

    def truncate(self, context, state, which):
        return self.window.truncate(context, state, which)

    def is_episode_end(self, context, state, slots):
        return self.window.is_episode_end(context, state, slots)

    def episode_step(self, state, slots):
        return self.window.episode_step(state, slots)

    def init_mid_episode(self, state, before):
        return self.window.init_mid_episode(state, before)

    def reset(self, ring, state, token):
        return self.window.reset(ring, state, token)

    def anchors(self, context, state):
        return self.window.anchors(context, state)

    def plan_read(self, context, state, slots, mask, key):
        plan = self.window.plan_read(context, state, slots, mask, key)
        both = lambda name: plan.where(name)[:, jnp.array([0, -1])]
        return types.ReadPlan(where=both, mask=plan.mask[:, [0, -1]].all(axis=1), info={})

    def reduce(self, raw, plan, keys):
        return raw, plan.info


@pytest.mark.parametrize("new_priority", ["max", "largest_held"])
def test_rows_whose_stack_was_not_kept_have_no_priority(new_priority):
    """A buffer that begins in the middle of an episode draws only stacks that it has."""

    def step(x):
        following = {"observation": x + 1, "reward": 0.0, "done": False}
        return {"observation": x, "next": following}

    old = jrb.ReplayBuffer(1, unit=jrb.Sequence(1))
    state = old.init(step(0))
    for x in range(4):
        state = old.add(state, step(x))
    sampler = jrb.Prioritized(new_priority=new_priority)
    new = jrb.ReplayBuffer(8, batch_size=8, sampler=sampler, unit=jrb.FrameStack(3))
    state = jrb.rebuild(old, state, new)
    for x, anchors in ((4, 0), (5, 1), (6, 2)):
        state = new.add(state, step(x))
        held = [1 if 2 <= slot < 2 + anchors else -1 for slot in range(8)]
        assert new.priorities(state).tolist() == held
        assert bool(new.can_sample(state)) == bool(anchors)
    stacks = np.unique(new.sample(state, jax.random.key(0)).data["observation"], axis=0)
    assert stacks.tolist() == [[3, 4, 5], [4, 5, 6]]


@pytest.mark.whole
@pytest.mark.parametrize("back", [False, True])
def test_stacks_of_a_unit_that_reads_several_rows_for_an_entry(back):
    done = np.isin(np.arange(23), [9, 15])
    after = {"observation": np.arange(1, 24), "done": done}
    rows = {"observation": np.arange(23), "next": after}
    stacked = jrb.FrameStack(3, unit=Apart(back))
    buffer = jrb.ReplayBuffer(16, batch_size=64, unit=stacked, cast=True)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
    state = buffer.extend(state, rows)
    sample = jax.device_get(buffer.sample(state, KEY))
    begins = [max(start for start in (0, 10, 16) if start <= row) for row in range(23)]
    drawn = set()
    for anchor, real, seen in zip(
        sample.indices, sample.mask, sample.data["observation"], strict=True
    ):
        row = int(anchor) + 16 if anchor < 7 else int(anchor)
        one, other = (row - 2, row) if back else (row, row + 2)
        stacks = [[max(begins[at], at - k) for k in (2, 1, 0)] for at in (one, other)]
        is_held = begins[one] == begins[other] and min(stacks[0]) >= 7
        assert is_held or not real
        if real:
            assert seen.tolist() == stacks
            drawn.add(row)
    assert len(drawn) > 4
