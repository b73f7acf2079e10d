"""Stacks of frames against plain lists of episodes."""

import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jrb
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
