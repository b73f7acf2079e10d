"""Rows of several environments as episodes."""

import numpy as np
import pytest

from jrb.datasets.reading import vectorized
from jrb.keys import TED, Keys


def plain(rows, is_end):
    """The same in plain Python: begin, environment, rows, whether it has ended."""
    episodes = []
    for env in range(rows.shape[1]):
        begin, inside = 0, []
        for row in range(len(rows)):
            inside.append(int(rows[row, env]))
            if is_end[row, env] or row == len(rows) - 1:
                episodes.append((begin, env, inside, bool(is_end[row, env])))
                begin, inside = row + 1, []
    return sorted(episodes)


@pytest.mark.parametrize("seed", range(20))
def test_episodes_are_those_of_plain_python(seed):
    rng = np.random.default_rng(seed)
    count, envs = int(rng.integers(0, 30)), int(rng.integers(1, 4))
    rows = rng.permutation(count * envs).reshape(count, envs)
    is_end = rng.random((count, envs)) < rng.choice([0.0, 0.3, 1.0])
    has_lost = rng.random(envs) < 0.5
    order, ends, facts = vectorized.episode_order(rows, is_end, has_lost)
    wanted = plain(rows, is_end)
    assert order.tolist() == [row for each in wanted for row in each[2]]
    assert ends.tolist() == np.cumsum([len(each[2]) for each in wanted]).tolist()
    assert facts["environment"].tolist() == [each[1] for each in wanted]
    assert facts["running"].tolist() == [not each[3] for each in wanted]
    cut = [begin == 0 and bool(has_lost[env]) for begin, env, _, _ in wanted]
    assert facts["cut"].tolist() == cut
    complete = [each[3] and not lost for each, lost in zip(wanted, cut, strict=True)]
    assert facts["complete"].tolist() == complete


def test_names_in_ted():
    keys = Keys(observation="obs", next_observation="obs_next", reward=("out", "r"))
    names = ["obs/a", "obs_next/a", "obs_nex", "out/r", "out/other"]
    assert list(vectorized.leaves_in_ted("file", names, keys).values()) == [
        "observation/a",
        "next/observation/a",
        "obs_nex",
        "next/reward",
        "out/other",
    ]
    own = ["observation", "next/observation/x", "next/reward", "next/done"]
    assert vectorized.leaves_in_ted("file", own, TED) == {name: name for name in own}
    nested = Keys(observation=("obs", "now"), next_observation="obs")
    assert vectorized.leaves_in_ted("file", ["obs/now", "obs/x", "next/reward"], nested) == {
        "obs/now": "observation",
        "obs/x": "next/observation/x",
        "next/reward": "next/reward",
    }


@pytest.mark.parametrize("other", ["next/reward", "next/reward/x", "next"])
def test_a_place_that_is_taken(other):
    with pytest.raises(ValueError, match=r"file: leaf '.*': expected a place of its own in TED"):
        vectorized.leaves_in_ted("file", ["r", other, "next/done"], Keys(reward="r"))
