import numpy as np
import pytest

import jrb
from tests.datasets.access import assert_same, check_access, joined
from tests.datasets.memory import Memory, Quick, expected_of, source_of

KINDS = {"three methods": Memory(), "indexed": Quick()}


@pytest.fixture(params=KINDS)
def format(request):
    return KINDS[request.param]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("whole", [None, True, False])
def test_episodes_of_any_kind(format, seed, whole):
    source = source_of(seed, whole=whole)
    check_access(jrb.datasets.open(source, format=format), expected_of(source))


@pytest.mark.parametrize("seed", range(3))
def test_last_steps_are_dropped(format, seed):
    source = source_of(seed)
    dataset = jrb.datasets.open(source, format=format, final="drop")
    check_access(dataset, expected_of(source, "drop"))
    assert (dataset.lengths < dataset.description.lengths).any()


def test_slices_of_slices_and_sizes(format):
    source = source_of(0)
    dataset, expected = jrb.datasets.open(source, format=format), expected_of(source)
    check_access(dataset[1:11], expected[1:11])
    check_access(dataset[1:11][::-2], expected[1:11][::-2])
    part = dataset[2:5]
    assert part.facts["seed"].tolist() == [20, 30, 40]
    whole = joined(expected[2:5])
    sizes = [leaf.nbytes for leaf in (*leaves(whole),)]
    assert part.nbytes == sum(sizes)
    assert part.metadata == {"env": "corridor"}


def leaves(tree):
    for leaf in tree.values():
        yield from leaves(leaf) if isinstance(leaf, dict) else [leaf]


def test_slices_have_one_structure_whether_or_not_they_lack_something(format):
    source = source_of(0)
    dataset = jrb.datasets.open(source, format=format)
    whole = dataset.only(np.flatnonzero(~dataset.description.cut))
    assert all(episode["next"]["valid"].all() for episode in whole)
    assert len(whole.notes) == 1 < len(dataset.notes)


def test_filters(format):
    source = source_of(1, 20)
    dataset, expected = jrb.datasets.open(source, format=format), expected_of(source)
    pick = lambda numbers: [expected[number] for number in numbers]
    returns = np.array([each["next"]["reward"].sum(dtype=np.float64) for each in expected])
    lengths = np.array([len(each["action"]) for each in expected])
    check_access(dataset.where(min_length=4), pick(np.flatnonzero(lengths >= 4)))
    best = np.sort(np.argsort(-returns, kind="stable")[:5])
    check_access(dataset.best(0.25), pick(best))
    assert len(dataset.best(0.0)) == 1
    is_over = lambda episode: bool(episode["next"]["terminated"][-1])
    check_access(dataset.where(predicate=is_over), [each for each in expected if is_over(each)])
    assert len(dataset.where(min_length=99)) == 0
    # Facts of the files have names in conditions, and the keys of a sort.
    assert "seed" in dataset.facts
    seeds, few = dataset.facts["seed"], np.sort(returns)[5]
    chosen = dataset.where("seed > 20 and length >= 2 and complete", max_return=few)
    want = np.flatnonzero((seeds > 20) & (lengths >= 2) & (returns <= few))
    check_access(chosen, pick(want))
    check_access(dataset.sort("seed", descending=True), pick(np.argsort(-seeds, kind="stable")))
    check_access(
        dataset.sort(lambda each: len(each["action"])), pick(np.argsort(lengths, kind="stable"))
    )
    for options in ({"env": 0}, {"since": 3}, {"condition": "ended"}):
        with pytest.raises(ValueError, match="where: expected a fact that is known"):
            dataset.where(**options)
    assert dataset[:0].returns().shape == (0,)
    assert len(dataset[:0].best(1.0)) == 0


def test_equal_returns_leave_the_earlier_ones(format):
    source = source_of(0, 6)
    for each in source:
        each["reward"][:] = 0
    dataset = jrb.datasets.open(source, format=format)
    assert dataset.best(0.5).numbers.tolist() == [0, 1, 2]


def test_returns_are_of_the_steps_that_are_there(format):
    source = source_of(2)
    dataset = jrb.datasets.open(source, format=format, final="drop")
    expected = [
        each["next"]["reward"].sum(dtype=np.float64) for each in expected_of(source, "drop")
    ]
    np.testing.assert_array_equal(dataset.returns(), expected)


def test_episodes_that_are_left_without_a_step(format):
    source = source_of(0, 3, whole=False)
    source[1] = {
        name: {"x": leaf["x"][:1]} if isinstance(leaf, dict) else leaf[:1]
        for name, leaf in source[1].items()
    }
    source[1]["terminated"][:] = False
    dataset = jrb.datasets.open(source, format=format, final="drop")
    assert dataset.lengths[1] == 0
    assert dataset[1]["action"].shape == (0,)
    assert dataset.returns()[1] == 0
    assert_same(joined(list(dataset.steps(2))), joined(expected_of(source, "drop")))


def test_a_dataset_is_shown_as_a_table(format):
    dataset = jrb.datasets.open(source_of(0), format=format)
    for text in (repr(dataset), dataset._repr_html_()):
        for word in ("12 episodes", "observation", "next/valid", "float32", "It lies in memory."):
            assert word in text
    assert f"{dataset.transitions} transitions" in repr(dataset)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda d: list(d.steps(0)), ValueError),
        (lambda d: list(d.steps(1.5)), TypeError),
        (lambda d: d.where(min_length="a"), TypeError),
        (lambda d: d.best(2), ValueError),
        (lambda d: d[12], IndexError),
        (lambda d: d[-13], IndexError),
        (lambda d: d["a"], TypeError),
    ],
)
def test_bad_arguments(format, call, error):
    with pytest.raises(error):
        call(jrb.datasets.open(source_of(0), format=format))


@pytest.fixture
def agents(tmp_path):
    """A buffer with a reward for each of two agents, the second one of two numbers."""
    rewards = {"a": np.ones(10, np.float32), "b": np.arange(20.0, dtype=np.float32).reshape(10, 2)}
    steps = {
        "observation": np.arange(10, dtype=np.float32),
        "action": np.zeros(10, np.int32),
        "next": {"observation": np.arange(1.0, 11, dtype=np.float32), "reward": rewards},
    }
    steps["next"]["done"] = np.arange(10) % 4 == 3
    buffer, state = jrb.from_items(steps)
    jrb.save(tmp_path / "saved", buffer, state)
    with jrb.datasets.Recorder(tmp_path / "recorded") as recorder:
        recorder.append(steps)
    jrb.datasets.open(tmp_path / "saved").preprocess(lambda step: step, tmp_path / "mapped")
    return {
        "saved": tmp_path / "saved",
        "recorded": tmp_path / "recorded",
        "mapped": tmp_path / "mapped",
        "rlds": list(jrb.datasets.write_rlds(buffer, state)),
    }


@pytest.mark.parametrize("source", ["saved", "recorded", "mapped", "rlds"])
def test_each_agent_has_its_own_return(source, agents):
    dataset = jrb.datasets.open(agents[source])
    both = jrb.datasets.concatenate(dataset, dataset[1:])
    for each, order in ((dataset, [0, 1, 2]), (both, [0, 1, 2, 1, 2])):
        returns = each.returns()
        assert returns["a"].tolist() == [[4.0, 4.0, 2.0][number] for number in order]
        sums = [[12.0, 16.0], [44.0, 48.0], [34.0, 36.0]]
        assert returns["b"].tolist() == [sums[number] for number in order]
    assert dataset[:0].returns()["b"].shape == (0, 2)
    with pytest.raises(ValueError, match="best: expected one return for each episode"):
        dataset.best(0.5)
    buffer, state = dataset.buffer()
    assert jrb.items(buffer, state)["next"]["reward"]["b"].shape == (10, 2)


def test_rewards_of_agents_that_are_no_numbers_are_counted(agents, caplog):
    def broken(step):
        rewards = {**step["next"]["reward"], "a": np.float32("nan")}
        return {**step, "next": {**step["next"], "reward": rewards}}

    path = agents["mapped"].with_name("broken")
    jrb.datasets.open(agents["saved"]).preprocess(broken, path).buffer()
    assert "10 rewards are NaN or infinite, the first in episode 0" in caplog.text
