"""Goals in hindsight: where they come from, and how likely each is."""

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
