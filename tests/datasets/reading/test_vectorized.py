"""Rows of several environments as episodes."""

import numpy as np
import pytest

from jrb.datasets.reading import vectorized
from jrb.keys import TED, Keys


def plain(numbers, over, here):
    """The same in plain Python: begin, environment, numbers of rows, whether it is over."""
    found = []
    for env in range(numbers.shape[1]):
        begin, episode = None, []
        for row in range(len(numbers)):
            if not here[row, env]:
                continue
            begin = row if begin is None else begin
            episode.append(int(numbers[row, env]))
            if over[row, env]:
                found.append((begin, env, episode, True))
                begin, episode = None, []
        if episode:
            found.append((begin, env, episode, False))
    return sorted(found)


@pytest.mark.parametrize("seed", range(20))
def test_episodes_are_those_of_plain_python(seed):
    rng = np.random.default_rng(seed)
    rows, envs = int(rng.integers(1, 30)), int(rng.integers(1, 4))
    numbers = rng.permutation(rows * envs).reshape(rows, envs)
    over = rng.random((rows, envs)) < rng.choice([0.0, 0.3, 1.0])
    first, count = rng.integers(0, rows, envs), rng.integers(0, rows + 1, envs)
    place = np.arange(rows)[:, None]
    here = (place >= first) & (place < first + count)
    lost = rng.random(envs) < 0.5
    found, wanted = vectorized.in_episodes(numbers, over, here, lost), plain(numbers, over, here)
    assert found.order.tolist() == [number for each in wanted for number in each[2]]
    assert found.ends.tolist() == np.cumsum([len(each[2]) for each in wanted]).tolist()
    assert found.environment.tolist() == [each[1] for each in wanted]
    assert found.running.tolist() == [not each[3] for each in wanted]
    oldest = [(env, each[2]) for env in range(envs) for each in wanted if each[1] == env]
    first = dict(reversed(oldest))
    cut = [lost[env] and first[env] is number for _, env, number, _ in wanted]
    assert found.cut.tolist() == cut
    assert found.complete.tolist() == [e[3] and not c for e, c in zip(wanted, cut, strict=True)]


def test_names_in_ted():
    keys = Keys(observation="obs", next_observation="obs_next", reward=("out", "r"))
    names = ["obs/a", "obs_next/a", "obs_nex", "out/r", "out/other"]
    assert list(vectorized.in_ted("file", names, keys).values()) == [
        "observation/a",
        "next/observation/a",
        "obs_nex",
        "next/reward",
        "out/other",
    ]
    own = ["observation", "next/observation/x", "next/reward", "next/done"]
    assert vectorized.in_ted("file", own, TED) == {name: name for name in own}
    nested = Keys(observation=("obs", "now"), next_observation="obs")
    assert vectorized.in_ted("file", ["obs/now", "obs/x"], nested) == {
        "obs/now": "observation",
        "obs/x": "next/observation/x",
    }


@pytest.mark.parametrize("other", ["next/reward", "next/reward/x", "next"])
def test_a_place_that_is_taken(other):
    with pytest.raises(ValueError, match=r"file: leaf '.*': expected a place of its own in TED"):
        vectorized.in_ted("file", ["r", other, "next/done"], Keys(reward="r"))
