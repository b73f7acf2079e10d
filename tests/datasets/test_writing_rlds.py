import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.datasets.formats import checkpoint
from tests.datasets.access import assert_same, check_access
from tests.datasets.streams import cut_off, episodes_of, filled

pytestmark = pytest.mark.slow


def expected_of(episode, ended=True):
    """Returns an episode as the set reads it: with a discount; a running one is truncated."""
    after = dict(episode["next"])
    if not ended:
        last = np.arange(len(after["reward"])) == len(after["reward"]) - 1
        after["truncated"] = after["done"] = last
    discount = (~after["terminated"]).astype(np.float32)
    return {"discount": discount, **episode, "next": after}


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_is_read_back(seed):
    episodes = episodes_of(seed)
    dataset = jrb.datasets.open(jrb.datasets.write_rlds(*filled(episodes)))
    assert dataset.format.name == "rlds"
    check_access(dataset, list(map(expected_of, episodes)))
    assert not dataset.facts["is_running"].any()
    assert dataset.facts["environment"].tolist() == [0] * len(episodes)


def test_the_layout_is_that_of_rlds():
    episodes = episodes_of(0)
    for written, episode in zip(jrb.datasets.write_rlds(*filled(episodes)), episodes, strict=True):
        steps, count = written["steps"], len(episode["action"])
        names = {"observation", "action", "reward", "discount", "info"}
        assert set(steps) == names | {"is_first", "is_last", "is_terminal"}
        assert_same(steps["observation"][:-1], episode["observation"])
        assert_same(steps["observation"][1:], episode["next"]["observation"])
        assert steps["is_first"].tolist() == [True] + [False] * count
        assert steps["is_last"].tolist() == [False] * count + [True]
        assert not steps["is_terminal"][:-1].any()
        assert steps["is_terminal"][-1] == episode["next"]["terminated"][-1]
        for name in ("action", "reward", "discount"):
            assert len(steps[name]) == count + 1
            assert steps[name][-1] == 0


def test_nested_leaves_of_any_dtype_and_discounts():
    episodes = episodes_of(2, 4)
    for episode in episodes:
        count = len(episode["action"])
        image = np.arange((count + 1) * 4, dtype=np.uint8).reshape(count + 1, 2, 2)
        low = np.arange(count + 1).astype(jnp.bfloat16)
        seen = {"image": image, "low": low}
        episode["observation"] = {name: leaf[:-1] for name, leaf in seen.items()}
        episode["next"]["observation"] = {name: leaf[1:] for name, leaf in seen.items()}
        episode["discount"] = np.full(count, 0.9, np.float32)
        episode["next"]["cost"] = np.arange(count, dtype=np.int8)
    dataset = jrb.datasets.open(list(jrb.datasets.write_rlds(*filled(episodes))))
    check_access(dataset, episodes)


def test_a_wrapped_ring_and_a_running_episode():
    episodes = episodes_of(1, 6)
    running = cut_off(episodes_of(5, 1)[0], 1)
    running["next"] |= {name: np.zeros(1, bool) for name in ("done", "terminated", "truncated")}
    held = sum(len(episode["action"]) for episode in episodes[3:]) + 1
    dataset = jrb.datasets.open(jrb.datasets.write_rlds(*filled([*episodes, running], held)))
    check_access(dataset, [*map(expected_of, episodes[3:]), expected_of(running, False)])
    assert dataset.facts["is_running"].tolist() == [False] * 3 + [True]
    assert dataset.facts["is_cut"].tolist() == [True] + [False] * 3


def test_last_observations_that_lack_stay_marked():
    episodes = episodes_of(0, 4)
    for episode in episodes:
        episode["next"]["valid"] = ~episode["next"]["truncated"]
        episode["next"]["observation"][episode["next"]["truncated"]] = 0
    assert not all(episode["next"]["valid"].all() for episode in episodes)
    written = list(jrb.datasets.write_rlds(*filled(episodes)))
    for each, episode in zip(written, episodes, strict=True):
        assert each["steps"]["is_last"].any() == episode["next"]["valid"].all()
    check_access(jrb.datasets.open(written), list(map(expected_of, episodes)))


def test_steps_that_do_not_follow_each_other_are_refused():
    episodes = episodes_of(0, 3)
    long = next(number for number, each in enumerate(episodes) if len(each["action"]) > 1)
    episodes[long]["next"]["observation"][0] += 1
    written = jrb.datasets.write_rlds(*filled(episodes))
    with pytest.raises(ValueError, match=f"episode {long}.*another after step 0"):
        list(written)


def test_what_lacks_is_refused_at_once():
    episodes = episodes_of(0, 2)
    for episode in episodes:
        del episode["next"]["observation"]
    with pytest.raises(ValueError, match="expected items with 'next/observation'"):
        jrb.datasets.write_rlds(*filled(episodes))
    episodes = episodes_of(0, 2)
    for episode in episodes:
        episode["observation"] = {"a": episode["observation"]}
    with pytest.raises(ValueError, match="expected what the observation is"):
        next(jrb.datasets.write_rlds(*filled(episodes)))


def test_a_dataset_is_written_as_it_is_read():
    running = cut_off(episodes_of(5, 1)[0], 1)
    running["next"] |= {name: np.zeros(1, bool) for name in ("done", "terminated", "truncated")}
    dataset = jrb.datasets.open(list(jrb.datasets.write_rlds(*filled([*episodes_of(3), running]))))
    again = jrb.datasets.open(list(jrb.datasets.write_rlds(dataset)))
    check_access(again, list(dataset))
    for name, fact in dataset.facts.items():
        assert again.facts[name].tolist() == fact.tolist()
    assert again.facts["is_running"].tolist() == [False] * 5 + [True]


def test_episodes_are_read_in_groups(monkeypatch):
    """The groups have several sizes, and the environments' episodes several lengths."""
    episodes = episodes_of(6, 7)
    wanted = list(jrb.datasets.write_rlds(*filled(episodes)))
    for size in (1, 100, 1000):
        monkeypatch.setattr(checkpoint, "_PIECE", size)
        for one, other in zip(jrb.datasets.write_rlds(*filled(episodes)), wanted, strict=True):
            assert_same(one, other)
