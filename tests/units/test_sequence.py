"""Windows against plain lists of episodes, and their probabilities."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.units.streams import (
    EXAMPLE,
    KEY,
    Stream,
    arrays,
    check,
    commands,
    pick,
    played,
    random_streams,
    sequence,
    ten_and_ninety,
    whole_episode,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("length", "burn_in", "short", "period", "across", "more"),
    [  # more: rows of the smaller ring beyond those that windows need
        (3, 0, "pad", 1, False, 1),
        (3, 2, "drop", 1, False, 0),
        (3, 2, "pad", 1, False, 1),
        (1, 4, "pad", 1, False, 0),
        (3, 1, "drop", 2, False, 1),
        (2, 0, "drop", 4, False, 0),
        (3, 2, "pad", 2, False, 0),
        (3, 1, "drop", 1, True, 0),
        (2, 1, "drop", 3, True, 1),
        (3, 0, "pad", 2, True, 0),
    ],
)
@random_streams
def test_sequence(length, burn_in, short, period, across, more, data):
    unit = jrb.Sequence(
        length, burn_in=burn_in, partial=short, stride=period, cross_episodes=across
    )
    expected = sequence(length, burn_in, short, period, across)
    check(unit, expected, [(length + burn_in + more, 1 + more), (12, 3)], data)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    ("rows", "length", "stride"), [(13, 13, 2), (7, 4, 4), (6, 4, 4), (4, 4, 3)]
)
def test_a_window_that_is_held_can_be_drawn_however_short_the_ring(rows, length, stride, across):
    unit = jrb.Sequence(length, stride=stride, cross_episodes=across)
    buffer = jrb.ReplayBuffer(rows, batch_size=2, unit=unit)
    state = buffer.init({"x": jnp.int32(0), "next": {"done": jnp.bool_(False)}})
    for time in range(3 * rows):
        item = {"x": jnp.int32(time), "next": {"done": jnp.bool_(False)}}
        state = buffer.add(state, item)
        assert bool(buffer.can_sample(state)) == (time >= length - 1)


@pytest.mark.parametrize("length", [1, 3])
@random_streams
def test_whole_episodes(length, data):
    unit = jrb.Sequence(length, sample_by="whole_episodes")
    rings = [(1, 1), (12, 3)] if length == 1 else [(3, 1), (4, 2)]
    check(unit, whole_episode(length), rings, data)


@pytest.mark.parametrize(("length", "short", "small"), [(3, "drop", (3, 1)), (3, "pad", (4, 2))])
@random_streams
def test_every_episode_alike(length, short, small, data):
    rows, envs = data.draw(st.sampled_from([small, (12, 3)]))
    unit = jrb.Sequence(length, sample_by="episodes", partial=short)
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


def chances(buffer, state, draws=200):
    """Returns how often each slot is drawn, and its probability in `Sample.probabilities`."""
    keys = jax.random.split(jax.random.key(1), draws)
    sample = jax.jit(jax.vmap(lambda key: buffer.sample(state, key)))(keys)
    slots = np.asarray(sample.indices).reshape(-1)
    seen = np.bincount(slots, minlength=buffer.capacity)
    chance = np.zeros(buffer.capacity)
    chance[slots] = np.asarray(sample.probabilities).reshape(-1)
    return seen, chance


def chi_square(seen, expected):
    return ((seen - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(
    "sampler", [jrb.Uniform(), jrb.Prioritized()], ids=lambda s: type(s).__name__
)
def test_windows_over_steps_are_all_alike(sampler):
    buffer = jrb.ReplayBuffer(100, num_envs=1, batch_size=64, unit=jrb.Sequence(5), sampler=sampler)
    seen, chance = chances(buffer, buffer.extend(buffer.init(EXAMPLE), ten_and_ninety()))
    valid = np.r_[0:6, 10:96]
    assert set(np.flatnonzero(seen)) == set(valid)
    np.testing.assert_allclose(chance[valid], 1 / 92, rtol=1e-5)
    assert chi_square(seen[valid], seen.sum() / 92) < 140.0  # 91 degrees of freedom, p = 0.001


def test_windows_over_episodes_draw_short_episodes_as_often_as_long_ones():
    unit = jrb.Sequence(5, sample_by="episodes")
    buffer = jrb.ReplayBuffer(100, num_envs=1, batch_size=64, unit=unit)
    seen, chance = chances(buffer, buffer.extend(buffer.init(EXAMPLE), ten_and_ninety()))
    expected = np.zeros(100)
    expected[0:6], expected[10:96] = 1 / 12, 1 / 172
    np.testing.assert_allclose(chance[expected > 0], expected[expected > 0], rtol=1e-5)
    valid = expected > 0
    assert (seen[~valid] == 0).all()
    assert chi_square(seen[valid], expected[valid] * seen.sum()) < 140.0
    assert abs(seen[:10].sum() / seen.sum() - 0.5) < 0.02


@pytest.mark.filterwarnings("ignore::jrb.PriorityWarning")
@pytest.mark.parametrize("eta", [1.0, 0.9])
def test_priorities_of_rows_become_one(eta):
    unit = jrb.Sequence(3, burn_in=1, partial="pad", priority_max_weight=eta)
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
        buffer.update_priority(state, sample, jnp.ones((8, 5)))
    with pytest.raises(ValueError, match=r"got \(8, 2\)\. TD errors .* Append a column: of zeros"):
        buffer.update_priority(state, sample, jnp.ones((8, 2)))


def test_episodes_and_priorities_are_refused_together():
    with pytest.raises(ValueError, match="two things about how likely a row is"):
        jrb.ReplayBuffer(8, unit=jrb.Sequence(2, sample_by="episodes"), sampler=jrb.Prioritized())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: jrb.Sequence(2, sample_by="whole_episodes", stride=2),
            "stride=2: expected sample_by='windows'",
        ),
        (
            lambda: jrb.Sequence(2, sample_by="episodes", cross_episodes=True),
            "cross_episodes=True: expected sample_by='w",
        ),
        (
            lambda: jrb.Sequence(2, sample_by="whole_episodes", burn_in=1),
            "burn_in: expected 0 with sample_by='whole_episodes'",
        ),
        (lambda: jrb.Sequence(2, stride=0), "stride: expected from 1"),
        (
            lambda: jrb.ReplayBuffer(
                9, unit=jrb.Sequence(8, stride=4), sampler=jrb.Queue(), writer=jrb.BlockWhenFull()
            ),
            "length . stride - 1: expected at most the 9 rows of the ring .* got 11",
        ),
        (
            lambda: jrb.ReplayBuffer(
                8, 2, unit=jrb.Sequence(2, sample_by="whole_episodes"), sampler=jrb.Queue()
            ),
            "sample_by='whole_episodes': expected a sampler that draws in any order",
        ),
        (
            lambda: jrb.ReplayBuffer(
                8, unit=jrb.FrameStack(2, unit=jrb.Sequence(2, sample_by="whole_episodes"))
            ),
            "anchors are rows",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def rows_of(number, **flags):
    return {"observation": number, "next": flags}


def drawn_by_slot(buffer, state):
    sample = jax.tree.map(np.asarray, buffer.sample(state, KEY))
    order = np.argsort(sample.indices)
    return jax.tree.map(lambda leaf: leaf[order[sample.mask[order, 0]]], sample)


def test_windows_across_need_no_flag_and_then_know_what_truncate_told():
    unit = jrb.Sequence(3, cross_episodes=True)
    buffer = jrb.ReplayBuffer(
        10, 2, batch_size=10, unit=unit, sampler=jrb.Uniform(replacement=False)
    )
    state = buffer.init({"x": 0})
    numbers = jnp.arange(18).reshape(9, 2)
    state = buffer.extend(state, {"x": numbers[:6]})
    state = buffer.truncate(state, jnp.array([True, False]))
    state = buffer.extend(state, {"x": numbers[6:]})
    for _ in range(2):
        sample = drawn_by_slot(buffer, state)
        order = np.argsort(sample.data["x"][:, 0])
        assert sample.data["x"][order].tolist() == [[n, n + 2, n + 4] for n in range(8, 14)]
        first, last = sample.info["is_first"][order], sample.info["is_last"][order]
        np.testing.assert_array_equal(first, sample.data["x"][order] == 12)
        np.testing.assert_array_equal(last, sample.data["x"][order] == 10)
        state = jrb.rebuild(buffer, state, buffer)


@pytest.mark.parametrize(("short", "stacked"), [("drop", True), ("pad", False)])
def test_a_period_is_counted_on_where_rows_are_told_anew(short, stacked):
    unit = jrb.Sequence(2, stride=3, partial=short)
    unit = jrb.FrameStack(2, unit=unit) if stacked else unit
    make = lambda rows: jrb.ReplayBuffer(
        rows, batch_size=rows, unit=unit, sampler=jrb.Uniform(replacement=False)
    )
    buffer, number = make(10), np.arange(25, dtype=np.float32)
    items = rows_of(number, observation=number, done=number == 3, reward=number)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], items))
    state = buffer.extend(state, items)  # holds rows 15 .. 24 of the episode that began with row 4
    rewards = lambda buffer, state: drawn_by_slot(buffer, state).data["next"]["reward"]
    firsts = lambda *args: sorted(rewards(*args)[:, 0].tolist())
    assert firsts(buffer, state) == [16, 19, 22]
    state = buffer.set(state, jnp.array([4]), {"next": {"done": jnp.array([False])}})
    assert firsts(buffer, state) == [16, 19, 22]
    larger = make(12)
    state = jrb.rebuild(buffer, state, larger)
    state = larger.extend(state, jax.tree.map(lambda leaf: leaf[:6], items))
    want = [0, 4, 22] + [3] * (short == "pad") + [19] * (not stacked)  # 18 is overwritten
    assert firsts(larger, state) == sorted(want)


def test_an_endless_episode_keeps_its_period():
    buffer = jrb.ReplayBuffer(
        6, batch_size=6, unit=jrb.Sequence(1, stride=5), sampler=jrb.Uniform(replacement=False)
    )
    number = np.arange(8, dtype=np.float32)
    items = rows_of(number, observation=number, done=np.zeros(8, bool))
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], items))
    ahead = 2**30 // 5 * 5 - 10
    unit = state.unit.replace(length=state.unit.length + ahead)
    state = state.replace(unit=unit)
    for count in range(8, 80, 8):
        state = buffer.extend(state, items)
        sample = drawn_by_slot(buffer, state)
        steps = np.arange(count)[-6:]
        want = [number[step % 8] for step in steps if step % 5 == 0]
        assert sorted(sample.data["observation"][:, 0].tolist()) == sorted(want)
        assert not sample.info["is_first"].any()
    assert int(state.unit.length[0]) < 2**29 + 100


def test_marks_are_known_in_streams_that_are_dealt_out_anew():
    number = np.arange(12, dtype=np.int32).reshape(6, 2)
    items = rows_of(number, done=number // 2 == 3)
    buffer = jrb.ReplayBuffer(12, 2, batch_size=12, unit=jrb.Sequence(1))
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], items))
    state = buffer.extend(state, items)
    buffer = dataclasses.replace(buffer, sampler=jrb.Uniform(replacement=False))
    for envs in (2, 1, 3, 4):
        other = dataclasses.replace(buffer, num_envs=envs)
        sample = drawn_by_slot(other, jrb.rebuild(buffer, state, other))
        numbers = sample.data["observation"][:, 0]
        assert sorted(numbers[sample.info["is_first"][:, 0]]) == [0, 1, 8, 9]
        assert {6, 7} <= set(numbers[sample.info["is_last"][:, 0]])
    whole = dataclasses.replace(buffer, unit=jrb.Sequence(4, sample_by="whole_episodes"))
    with pytest.raises(ValueError, match="rows from behind the seams"):
        jrb.rebuild(buffer, state, dataclasses.replace(whole, num_envs=3))
    sample = drawn_by_slot(whole, jrb.rebuild(buffer, state, whole))
    assert sample.data["observation"][:, 0].tolist() == [0, 1]
    assert sample.mask.sum(axis=1).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("burn_in", "storage"), [(2, jrb.DeviceStorage), (0, lambda: jrb.MemmapStorage(None))]
)
def test_a_stored_state_is_read_for_the_first_row_only(burn_in, storage):
    plain = jrb.Sequence(4, burn_in=burn_in)
    items = {
        "observation": jnp.arange(40.0),
        "hidden": {"h": jnp.arange(40.0 * 7).reshape(40, 7), "c": jnp.arange(40)},
        "next": {"done": jnp.arange(40) % 9 == 8},
    }
    drawn = []
    for unit in (plain, dataclasses.replace(plain, first_only=("hidden",))):
        buffer, state = jrb.from_items(items, unit=unit, batch_size=5, storage=storage())
        drawn.append(buffer.sample(state, jax.random.key(0)))
    whole, first = drawn
    np.testing.assert_array_equal(first.data["observation"], whole.data["observation"])
    for name in ("h", "c"):
        np.testing.assert_array_equal(first.data["hidden"][name], whole.data["hidden"][name][:, 0])
    np.testing.assert_array_equal(first.mask, whole.mask)
    text = str(jax.make_jaxpr(lambda key: buffer.sample(state, key).data)(jax.random.key(0)))
    assert f"f32[5,{4 + burn_in},7]" not in text
    with pytest.raises(ValueError, match="Sequence: first_only: expected something at 'state'"):
        jrb.from_items(items, unit=jrb.Sequence(4, first_only=("state",)))
    with pytest.raises(TypeError, match="first_only: expected a tuple of paths"):
        jrb.Sequence(4, first_only="hidden")
