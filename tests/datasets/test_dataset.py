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
    check_access(dataset.at_least(4), pick(np.flatnonzero(lengths >= 4)))
    best = np.sort(np.argsort(-returns, kind="stable")[:5])
    check_access(dataset.best(0.25), pick(best))
    assert len(dataset.best(0.0)) == 1
    is_over = lambda episode: bool(episode["next"]["terminated"][-1])
    check_access(dataset.filter(is_over), [each for each in expected if is_over(each)])
    assert len(dataset.at_least(99)) == 0
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
        (lambda d: d.at_least(0), ValueError),
        (lambda d: d.best(2), ValueError),
        (lambda d: d[12], IndexError),
        (lambda d: d[-13], IndexError),
        (lambda d: d["a"], TypeError),
    ],
)
def test_bad_arguments(format, call, error):
    with pytest.raises(error):
        call(jrb.datasets.open(source_of(0), format=format))
