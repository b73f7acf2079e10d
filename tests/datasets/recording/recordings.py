"""Items of a recorder that are told apart by their numbers, and what has to come back of them."""

import numpy as np

KINDS = ("goes on", "terminated", "truncated")


def item(number, how="goes on", after=0.5):
    """Returns an item; its next observation is that of number + `after`, or missing if None."""
    seen = {} if after is None else {"observation": seen_at(number + after)}
    return {
        "observation": seen_at(number),
        "action": np.int8(number % 100),
        "next": {
            **seen,
            "reward": np.float64(number / 7),
            "terminated": np.bool_(how == "terminated"),
            "truncated": np.bool_(how == "truncated"),
        },
    }


def seen_at(number):
    return {"image": np.full((2, 3), number, np.float32), "none": np.zeros((0,), np.uint8)}


def stacked(items):
    """The items `[...]` along a new first axis."""
    first = items[0]
    if isinstance(first, dict):
        return {name: stacked([one[name] for one in items]) for name in first}
    return np.stack(items)


class Stream:
    """The items that one environment of a recorder was given."""

    def __init__(self):
        self.steps = []  # number, how, and whether the recorder was told that it begins anew
        self.anew = False

    def add(self, number, how):
        self.steps.append((number, how, self.anew))
        self.anew = False

    def episodes(self):
        """Lists of number and how."""
        found, over = [], True
        for number, how, anew in self.steps:
            if over or anew:
                found.append([])
            found[-1].append((number, how))
            over = how != "goes on"
        return found


def check(dataset, streams, after=0.5):
    """Raises unless a dataset holds the episodes of some streams, and nothing else."""
    wanted = [episode for stream in streams for episode in stream.episodes()]
    assert dataset.lengths.tolist() == [len(episode) for episode in wanted]
    for found, episode in zip(dataset, wanted, strict=True):
        check_episode(found, episode, after)
    for number in range(0, len(wanted), 3):
        check_episode(dataset[number - len(wanted)], wanted[number], after)
    count = sum(map(len, wanted))
    assert sum(len(block["action"]) for block in dataset.steps(7)) == count


def check_episode(found, episode, after):
    items = stacked([item(number, how, after) for number, how in episode])
    numbers = np.array([number for number, _ in episode])
    assert_same(found["observation"], items["observation"])
    assert_same(found["action"], items["action"])
    assert_same(found["next"]["reward"], items["next"]["reward"])
    assert_same(found["next"]["terminated"], items["next"]["terminated"])
    cut = ~items["next"]["terminated"][-1]
    assert found["next"]["truncated"].tolist() == [False] * (len(numbers) - 1) + [bool(cut)]
    seen = found["next"]["observation"]["image"]
    if after is not None:
        assert_same(seen, items["next"]["observation"]["image"])
    else:
        assert_same(seen[:-1], items["observation"]["image"][1:])
        assert not seen[-1].any()
        if "valid" in found["next"]:
            assert found["next"]["valid"].tolist() == [True] * (len(numbers) - 1) + [not cut]


def assert_same(found, wanted):
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)
        for name in wanted:
            assert_same(found[name], wanted[name])
        return
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()
