import ml_dtypes
import numpy as np
import pytest

import jrb
from tests.datasets.access import after, assert_same, check_access


def steps_of(rng, steps, terminal):
    """Returns steps as RLDS has them: with one more row, whose action means nothing."""
    rows = steps + 1
    first, last, ends = (np.zeros(rows, bool) for _ in range(3))
    first[0] = last[-1] = True
    ends[-1] = terminal
    return {
        "observation": {
            "image": rng.integers(0, 256, (rows, 2, 2)).astype(np.uint8),
            "state": rng.normal(size=(rows, 3)).astype(ml_dtypes.bfloat16),
        },
        "action": rng.normal(size=(rows, 2)),
        "reward": rng.normal(size=rows).astype(np.float32),
        "discount": rng.random(rows).astype(np.float32),
        "is_first": first,
        "is_last": last,
        "is_terminal": ends,
        "language": np.array(["go"] * rows),
    }


def episodes_of(seed, count=12):
    rng = np.random.default_rng(seed)
    return [
        {
            "steps": steps_of(rng, rng.integers(1, 6), rng.random() < 0.5),
            "episode_id": np.int64(100 + number),
            "episode_metadata": {"score": float(number), "file_path": "x"},
        }
        for number in range(count)
    ]


def expected_of(episode):
    steps = episode["steps"]
    count = len(steps["reward"]) - 1
    cut = lambda leaf: leaf[:count]
    seen, terminated = steps["observation"], steps["is_terminal"][1:]
    nexts = {name: leaf[1:] for name, leaf in seen.items()}
    return {
        "observation": {name: cut(leaf) for name, leaf in seen.items()},
        "action": cut(steps["action"]),
        "discount": cut(steps["discount"]),
        "next": after(cut(steps["reward"]), terminated, steps["is_last"][1:] & ~terminated, nexts),
    }


class Tensor:
    """An array of another library."""

    def __init__(self, array):
        self.array = array

    def numpy(self):
        return self.array


class Again:
    """An iterable that can be iterated repeatedly and has no length."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


def rows_of(tree, row):
    if isinstance(tree, dict):
        return {name: rows_of(leaf, row) for name, leaf in tree.items()}
    return Tensor(tree[row])


def by_steps(episode):
    """Returns an episode whose steps are an iterable of single steps."""
    steps = episode["steps"]
    rows = lambda: (rows_of(steps, row) for row in range(len(steps["reward"])))
    return {**episode, "steps": Again(rows)}


SOURCES = {
    "list": lambda episodes: episodes,
    "tuple": tuple,
    "function": lambda episodes: lambda: iter(episodes),
    "iterable": lambda episodes: Again(lambda: iter(episodes)),
    "iterator": iter,
    "generator": lambda episodes: (episode for episode in episodes),
    "steps": lambda episodes: list(map(by_steps, episodes)),
    "iterator of iterators": lambda episodes: iter(
        [{**episode, "steps": iter(by_steps(episode)["steps"])} for episode in episodes]
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_episodes_of_every_source(source):
    episodes = episodes_of(0)
    dataset = jrb.datasets.open(SOURCES[source](episodes))
    assert dataset.format.name == "rlds"
    check_access(dataset, [expected_of(episode) for episode in episodes])
    assert dataset.facts["episode_id"].tolist() == list(range(100, 112))
    assert dataset.facts["episode_metadata/score"].tolist() == list(range(12))
    assert len(dataset.notes) == 2
    assert dataset.notes[1].endswith(": 'episode_metadata/file_path', 'language'.")
    assert "Last steps are left out, though they are not zero in action," in dataset.notes[0]


def demonstration(steps, terminal, action=1.0, reward=1.0):
    """Returns an episode as of rlds_dataset_builder: its last step has an action and the reward."""
    last = np.arange(steps) == steps - 1
    return {
        "steps": {
            "observation": np.arange(steps, dtype=np.float32),
            "action": np.where(last, action, 1.0),
            "reward": np.where(last, reward, 0.0),
            "is_first": np.arange(steps) == 0,
            "is_last": last,
            "is_terminal": last & terminal,
        }
    }


@pytest.mark.parametrize("terminal", [True, False])
def test_last_steps_with_a_reward_are_kept_where_that_is_wished(terminal):
    episodes = [demonstration(steps, terminal) for steps in (3, 1, 4)]
    dataset = jrb.datasets.open(episodes, last="keep")
    assert dataset.lengths.tolist() == [3, 1, 4]
    assert dataset.returns().tolist() == [1.0, 1.0, 1.0]
    for found, episode in zip(dataset, episodes, strict=True):
        assert_same(found["action"], episode["steps"]["action"])
        last = np.arange(len(found["action"])) == len(found["action"]) - 1
        assert found["next"]["valid"].tolist() == (~last).tolist()
        assert found["next"]["terminated"].tolist() == (last & terminal).tolist()
        assert found["next"]["truncated"].tolist() == (last & (not terminal)).tolist()
    assert jrb.stats(*dataset.buffer())["return"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("padding", "told"),
    [
        ((0, 0), None),
        ((0, 1), "in reward."),
        ((2, 0), "in action."),
        ((1, 1), "in action, reward."),
    ],
)
def test_what_is_left_out_is_told_unless_it_is_zero(padding, told):
    episodes = [demonstration(3, True, 0, 0), demonstration(4, True, *padding)]
    notes = jrb.datasets.open(episodes).notes
    assert len(notes) == (told is not None)
    assert told is None or f"not zero {told}" in notes[0]


def test_an_episode_without_its_last_observation_is_marked():
    episodes = episodes_of(0, 2)
    steps = episodes[1]["steps"]
    steps["is_last"][-1] = steps["is_terminal"][-1] = False
    dataset = jrb.datasets.open(episodes)
    assert dataset.lengths[1] == len(steps["reward"])
    found = dataset[1]["next"]
    assert found["valid"].tolist() == [True] * (len(steps["reward"]) - 1) + [False]
    assert found["truncated"].tolist() == (~found["valid"]).tolist()
    assert_same(dataset[1]["action"], steps["action"])
    assert not np.asarray(found["observation"]["image"][-1]).any()


def test_without_rewards_and_is_terminal():
    episodes = episodes_of(0, 3)
    for episode in episodes:
        del episode["steps"]["reward"], episode["steps"]["is_terminal"]
    dataset = jrb.datasets.open(episodes)
    assert "reward" not in dataset.spec["next"]
    assert any("is_terminal" in note for note in dataset.notes)
    assert all(episode["next"]["truncated"][-1] for episode in dataset)


def test_facts_that_some_episodes_lack_are_none():
    episodes = episodes_of(0, 3)
    del episodes[1]["episode_id"]
    dataset = jrb.datasets.open(episodes)
    assert dataset.facts["episode_id"].tolist() == [100, None, 102]


def test_one_episode_is_read_without_the_others():
    episodes = episodes_of(0)
    dataset = jrb.datasets.open(episodes)
    episodes[:-1] = [None] * 11
    assert_same(dataset[-1], expected_of(episodes[-1]))


def test_a_source_that_changes_is_refused():
    turns = iter(range(9))
    episodes = episodes_of(0)
    shuffled = lambda: iter(episodes[next(turns) :])
    dataset = jrb.datasets.open(shuffled)  # recognised by the first turn, described by the second
    for read in (dataset.blocks, lambda: dataset, lambda: dataset.steps(3)):
        with pytest.raises(ValueError, match=r"each time|as when the dataset was opened"):
            list(read())
    fewer = jrb.datasets.open(Again(lambda: iter(episodes[: 12 - (next(turns) > 6)])))
    with pytest.raises(ValueError, match=r"each time, with number 11, got fewer"):
        list(fewer)


def changed(number, change):
    episodes = episodes_of(0, 3)
    change(episodes[number]["steps"])
    return episodes


def cut(steps):
    steps["action"] = steps["action"][:-1]


def keep(rows):
    def change(steps):
        for name, leaf in steps.items():
            part = slice(len(leaf) - rows, None) if name != "observation" else None
            steps[name] = leaf[part] if part else {n: x[len(x) - rows :] for n, x in leaf.items()}

    return change


def mark(name, row):
    def change(steps):
        steps[name] = np.arange(len(steps[name])) == row

    return change


BAD = {
    "lengths": (lambda: changed(1, cut), "episode 1: expected arrays of one length.*'action'"),
    "no steps": (lambda: changed(2, keep(0)), "episode 2: expected"),
    "one row": (lambda: changed(2, keep(1)), "episode 2: expected observations of one step"),
    "no is_last": (lambda: changed(0, lambda s: s.pop("is_last")), "episode 0.*'is_last'"),
    "no observation": (lambda: changed(0, lambda s: s.pop("observation")), "episode 0.*observat"),
    "dtype": (lambda: changed(1, lambda s: s.update(reward=s["reward"] + 0j)), "episode 1.*leaves"),
    "leaf": (lambda: changed(1, lambda s: s.pop("discount")), "episode 1.*leaves of the first"),
    "name": (lambda: changed(0, lambda s: s.update({"../x": s["reward"]})), "names of arrays"),
    "last": (lambda: changed(0, mark("is_last", 0)), "'is_last': expected it of the last step"),
    "first": (lambda: changed(0, mark("is_first", 1)), "'is_first': expected it of the first"),
    "other": (lambda: [*episodes_of(0, 2), {"x": 1}], "episode 2: expected a dict with 'steps'"),
    "empty": (list, "got no episode"),
    "steps": (lambda: [{"steps": []}], "episode 0: expected one step or more, got none"),
    "shapes": (
        lambda: [{"steps": [{"observation": np.zeros(1)}, {"observation": np.zeros(2)}]}],
        "episode 0: step 1: expected the shapes",
    ),
    "once": (
        lambda: [{**e, "steps": iter(by_steps(e)["steps"])} for e in episodes_of(0, 2)],
        "episode 0: 'steps': expected what can be gone through again",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        jrb.datasets.open(make(), format="rlds")


def test_other_things_are_not_recognised():
    for source in ([], [1, 2], {"steps": 1}, 3, b"x", np.zeros((3, 2))):
        with pytest.raises(ValueError, match="no format matches"):
            jrb.datasets.open(source)


def test_an_error_of_the_function_comes_through():
    def source():
        raise RuntimeError("mine")
        yield

    with pytest.raises(RuntimeError, match="mine"):
        jrb.datasets.open(source)


def test_masked_values_are_refused():
    steps = {"observation": np.ma.masked_array(np.arange(3.0), [False, True, False])}
    steps |= {"is_last": np.array([False, False, True]), "reward": np.zeros(3)}
    with pytest.raises(ValueError, match="'observation': expected values everywhere, got a masked"):
        jrb.datasets.open([{"steps": steps}])
