"""Goals in hindsight: the rows that they come from, and their probabilities."""

import chex
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jrb
from tests.units.streams import (
    EXAMPLE,
    KEY,
    commands,
    negative_distance,
    played,
    random_streams,
    ten_and_ninety,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "ring"),
    [("future", (4, 2)), ("final", (1, 1)), ("episode", (12, 3)), ("random", (4, 2))],
)
@random_streams
def test_goals_come_from_where_they_should(strategy, ring, data):
    unit = jrb.Hindsight(
        negative_distance,
        strategy,
        ratio=0.7,
        achieved=("next", "observation", "goal"),
        goal=("observation", "goal"),
        next_goal=None,
    )
    rows, envs = data.draw(st.sampled_from([ring, (6, 1)]))
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


GOALS = {
    "achieved": ("next", "observation", "goal"),
    "goal": ("observation", "goal"),
    "next_goal": None,
}
OVER = [
    (jrb.NStep(3, 0.5), "future"),
    (jrb.NStep(2, 0.5, strict=True), "final"),
    (jrb.Sequence(3, burn_in=1, partial="pad"), "future"),
    (jrb.Sequence(2, stride=2), "episode"),
    (jrb.Sequence(3, sample_by="whole_episodes"), "random"),
]


def of_a_return(entry, window, goal, discount=0.5):
    """Returns the return of a window for a goal, or of its own rewards if `goal` is None."""
    paid = [row["reward"] if goal is None else -abs(row["after"] - goal) for row in window]
    return sum(discount**k * reward for k, reward in enumerate(paid))


@pytest.mark.parametrize(("inner", "strategy"), OVER, ids=repr)
@random_streams
def test_a_return_or_a_window_has_one_goal(inner, strategy, data):
    unit = jrb.Hindsight(negative_distance, strategy, ratio=0.6, unit=inner, **GOALS)
    rows, envs = 7, 2
    calls = data.draw(commands(envs, rows, truncates=True))
    _, state, sample, model, _ = played(unit, rows, envs, calls)
    by_slot = {entry["slot"]: entry for entry in model.all()}
    most = inner.n if isinstance(inner, jrb.NStep) else inner.length
    for key in jax.random.split(KEY, 3):
        drawn = jax.tree.map(np.asarray, sample(state, key))
        real = drawn.mask.reshape(len(drawn.mask), -1)
        assert not drawn.info["relabeled"][~real.any(axis=1)].any()
        for b in np.flatnonzero(real.any(axis=1)):
            entry = by_slot[int(drawn.indices[b])]
            window = model.ahead(entry, most)
            goals = np.unique(drawn.data["observation"]["goal"][b])
            reward = drawn.data["next"]["reward"][b]
            goal = int(goals[0]) if drawn.info["relabeled"][b] else None
            if goal is not None:
                assert goals.size == 1
                ahead = model.ahead(window[-1], rows)
                rows_of = {
                    "future": ahead,
                    "final": ahead[-1:],
                    "episode": model.of_episode(entry),
                    "random": model.all(),
                }
                assert goal in [row["after"] for row in rows_of[strategy]]
            if isinstance(inner, jrb.NStep):
                assert reward == np.float32(of_a_return(entry, window, goal))
                last = drawn.data["next"]["observation"]["goal"][b]
                assert last == window[-1]["after"]
                continue
            window = model.behind(entry, inner.burn_in) + window
            want = [of_a_return(entry, [row], goal) for row in window]
            assert reward[real[b]].tolist() == want
            after = drawn.data["next"]["observation"]["goal"][b]
            assert after[real[b]].tolist() == [row["after"] for row in window]


@pytest.mark.parametrize("inner", [jrb.NStep(3, 0.5), jrb.Sequence(3)], ids=repr)
def test_flags_of_all_rows_are_computed_anew_and_stacks_go_around(inner):
    """The goal is the last achieved one, in episodes of ten rows."""
    number = np.arange(30, dtype=np.int32)
    items = {
        "observation": {"frame": number, "goal": np.zeros_like(number)},
        "next": {
            "observation": {"frame": number + 1, "goal": number},
            "reward": np.zeros(30, np.float32),
            "done": number % 10 == 9,
        },
    }
    hit = lambda achieved, goal: achieved == goal
    unit = jrb.Hindsight(negative_distance, "final", ratio=0.5, terminated=hit, unit=inner, **GOALS)
    paths = (("observation", "frame"), ("next", "observation", "frame"))
    found = []
    for each in (unit, jrb.FrameStack(2, paths, unit=unit)):
        buffer, state = jrb.from_items(items, unit=each, batch_size=16)
        sample = jax.tree.map(np.asarray, buffer.sample(state, KEY))
        found.append((sample.indices, sample.info, sample.data["next"]["reward"]))
        assert sample.info["relabeled"].sum() == 8
        steps = sample.info.get("steps", np.full(16, 3))
        for b, slot in enumerate(sample.indices.tolist()):
            last = slot + steps[b] - 1
            flag = sample.data["next"]["done"][b]
            at = np.arange(slot, slot + 3) if flag.ndim else last
            want = at == slot // 10 * 10 + 9  # where the goal is achieved, or the episode ends
            np.testing.assert_array_equal(flag, want)
            if "reward" in sample.info and sample.info["relabeled"][b]:
                assert sample.info["reward"][b] == slot - (slot // 10 * 10 + 9)
    chex.assert_trees_all_equal(*found)


@pytest.mark.parametrize(
    ("ratio", "size"), [(0.8, 32), (0.5, 5), (0.0, 4), (1.0, 7), (0.3, 1), (0.7, 10)]
)
def test_the_share_that_is_relabeled_is_right_on_average_and_at_each_place(ratio, size):
    unit = jrb.Hindsight(negative_distance, ratio=ratio, **GOALS)
    buffer = jrb.ReplayBuffer(100, num_envs=1, batch_size=size, unit=unit)
    state = buffer.extend(buffer.init(EXAMPLE), ten_and_ninety())
    keys = jax.random.split(jax.random.key(2), 500)
    sample = jax.jit(jax.vmap(lambda key: buffer.sample(state, key)))(keys)
    relabeled = np.asarray(sample.info["relabeled"])
    share = round(ratio * size, 6)
    assert np.isin(relabeled.sum(axis=1), [np.floor(share), np.ceil(share)]).all()
    spread = np.sqrt(ratio * (1 - ratio) / 500)
    assert (abs(relabeled.mean(axis=0) - ratio) <= 4.5 * spread).all()


def test_units_that_cannot_have_one_goal_are_refused():
    make = lambda unit: jrb.ReplayBuffer(8, unit=jrb.Hindsight(negative_distance, unit=unit))
    with pytest.raises(ValueError, match="windows of one episode, as they get one goal"):
        make(jrb.Sequence(2, cross_episodes=True))
    with pytest.raises(ValueError, match="got FrameStack"):
        make(jrb.FrameStack(2))
    with pytest.raises(TypeError, match="unit"):
        jrb.Hindsight(negative_distance, unit=3)


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
