"""Errors that the caller gets, and calls that need no server."""

import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jrb
from jrb.remote import serve
from jrb.remote import setup as setups
from jrb.remote.server import pieces
from jrb.remote.setup import Setup
from tests.remote.rows import EXAMPLE, buffer, rows


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"streams": 5}, ValueError, "capacity: expected a multiple of 5"),
        ({"streams": 0}, ValueError, "streams: expected at least 1"),
        ({"shards": 3}, ValueError, "shards: expected at most streams = 2"),
        ({"buffer": buffer(storage=jrb.ListStorage(), unit=jrb.Transition())}, TypeError, "arrays"),
        ({"buffer": buffer(writer=jrb.MaxValue("id"), unit=jrb.Transition())}, TypeError, "writer"),
        ({"buffer": buffer(sampler=jrb.Queue())}, ValueError, "shards=2"),
        ({"buffer": buffer(sampler=jrb.Queue()), "shards": 2}, TypeError, "Use shards=1"),
        ({"example": {"x": jax.random.key(0)}}, TypeError, "leaf 'x': expected what NumPy"),
        ({"example": {"x": np.zeros(3)}}, TypeError, "leaf 'x'.*cast=True"),
        ({"save_every": 5}, ValueError, "save_every: expected a path"),
        ({"path": 5}, TypeError, "path: expected a path"),
        ({"limits": 8}, TypeError, "limits: expected jrb.limits"),
        (
            {"buffer": buffer(min_size=60), "limits": jrb.limits.SampleToInsert(1, 9, 40)},
            ValueError,
            "min_size of the buffer needs 60 items .* at most 49 are added",
        ),
        ({"buffer": buffer(storage=jrb.MemmapStorage("a")), "path": "b"}, ValueError, "path"),
    ],
)
def test_what_cannot_be_served_is_refused(cluster, changes, error, text):
    given = {"buffer": buffer(), "example": EXAMPLE, "streams": 2} | changes
    with pytest.raises(error, match=text):
        serve(given.pop("buffer"), given.pop("example"), **given)


def needs(limits, streams=1, shards=1, **parts):
    """Returns the number of items before the first draw, as `serve` computes it."""
    made = jrb.ReplayBuffer(96, **{"batch_size": 16} | parts)
    return setups.check_limits(
        Setup(made, None, streams, shards, None, 0, None, 4, True, False), limits
    )[0]


PADDED = jrb.Sequence(6, partial="pad")
STACKS = jrb.FrameStack(4, unit=jrb.Sequence(7))


@pytest.mark.parametrize(
    ("ratio", "tolerance", "options", "number"),
    [
        (1, 20, {"min_size": 24}, 24),
        (1, 20, {"min_size": 24, "num_envs": 8}, 24),  # a timestep of eight comes at once
        (4, 80, {"min_size": 24}, 24),
        (1, 20, {"unit": jrb.Sequence(24)}, 24),
        (1, 20, {"unit": jrb.Sequence(24, burn_in=40)}, 24),  # rows before the first are masked
        (1, 20, {"unit": jrb.Sequence(7), "streams": 4}, 25),  # each may have six
        (1, 20, {"unit": jrb.Sequence(7), "streams": 4, "shards": 2}, 25),
        (1, 20, {"unit": jrb.Sequence(7), "streams": 2, "num_envs": 2}, 25),
        (1, 20, {"unit": STACKS, "streams": 4, "writer": jrb.PerEnvironment()}, 25),
        (1, 20, {"unit": jrb.NStep(24, 0.9, strict=True)}, 24),
        (1, 20, {"sampler": jrb.WithoutReplacement(drop_last=True), "batch_size": 24}, 24),
        (1, 20, {"sampler": jrb.Queue(), "min_size": 24}, 24),
    ],
)
def test_limits_under_which_nothing_can_be_drawn_are_refused(ratio, tolerance, options, number):
    """Of the limits that let in just enough and those that let in one item less."""
    width = options.get("num_envs") or 1
    enough = number - tolerance // ratio + width - 1
    limits = lambda least: jrb.limits.SampleToInsert(ratio, least, tolerance)
    assert needs(limits(enough), **options) == number
    text = f"tolerance of at least {tolerance + ratio} .* needs {number} items"
    with pytest.raises(ValueError, match=text):
        needs(limits(enough - 1), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"unit": PADDED, "streams": 8},
        {"unit": jrb.NStep(90, 0.9), "streams": 1},
        {"unit": jrb.Sequence(90, sample_by="whole_episodes")},  # as short as they may be
        {"sampler": jrb.WithoutReplacement(), "batch_size": 30},
        {"unit": jrb.FrameStack(12), "streams": 8},
    ],
)
def test_units_that_draw_from_the_first_row_need_one(options):
    assert needs(jrb.limits.SampleToInsert(1, 1, 20), **options) == 1


@pytest.mark.parametrize(
    ("limits", "options", "text"),
    [
        ((1, 10, 20), {"batch_size": 40}, "tolerance of at least 20.5 where 1 items .* 40 samples"),
        ((2, 10, 20), {"num_envs": 12}, "tolerance of at least 22 where 12 items"),
        ((1.5, 10, 20), {"sampler": jrb.Queue()}, "ratio of at most 1 with Queue"),
        ((0.5, 10, 20), {"sampler": jrb.Queue(stride=4)}, "ratio of at most 0.25 with Queue"),
        ((2, 10, 20), {"sampler": jrb.Lifo()}, "ratio of at most 1 with Lifo"),
        (
            None,
            {"sampler": jrb.WithoutReplacement(drop_last=True), "batch_size": 100},
            "capacity: expected 100 or more",
        ),
    ],
)
def test_other_options_that_would_wait_for_ever_are_refused(limits, options, text):
    with pytest.raises(ValueError, match=text):
        needs(limits and jrb.limits.SampleToInsert(*limits), **options)


@hypothesis.given(st.data())
def test_accepted_limits_let_in_enough_and_refused_ones_do_not(data):
    """Streams send in turn, one timestep at a time, until one of them has a window or all wait."""
    streams, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    ratio, least = data.draw(st.sampled_from([0.5, 1, 3])), data.draw(st.integers(1, 12))
    tolerance, min_size = data.draw(st.integers(3, 12)), data.draw(st.integers(1, 24))
    limits = jrb.limits.SampleToInsert(ratio, least, tolerance)
    sent, counters = 0, limits.init()
    while limits.may_insert(counters) and sent < 96:
        sent, counters = sent + 1, limits.inserted(counters)
    enough = sent >= max(min_size, streams * (rows - 1) + 1, least)
    options = {"unit": jrb.Sequence(rows), "min_size": min_size, "batch_size": 1}
    try:
        needs(limits, streams=streams, **options)
        assert enough
    except ValueError:
        assert not enough


@pytest.fixture(scope="module")
def remote(cluster):
    with serve(buffer(), EXAMPLE, streams=2, num_cpus=0) as remote:
        yield remote


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda r: r.pop("id"), ValueError, r"leaf 'id': .* missing \['id'\]"),
        (lambda r: r.update(id=r["id"][:, 0]), ValueError, r"'id': expected shape \(4, 2\)"),
        (lambda r: r.update(id=r["id"][:2]), ValueError, r"leaf 'next/done': expected shape"),
        (lambda r: r.update(id=r["id"].astype(np.int64)), TypeError, "leaf 'id'"),
        (lambda r: r["next"].update(reward=[1.0] * 4), TypeError, "leaf 'next/reward"),
    ],
)
def test_wrong_items_are_refused_by_the_caller(remote, change, error, text):
    items = rows(0, 0, 4)
    change(items)
    before = remote.stats()["received"]
    with pytest.raises(error, match=text):
        remote.extend(items, stream=0)
    assert remote.stats()["received"] == before


def test_other_wrong_arguments_are_refused_by_the_caller(remote):
    items = rows(0, 0, 4)
    for stream, error in ((2, ValueError), (-1, ValueError), (True, TypeError), ("a", TypeError)):
        with pytest.raises(error, match="stream: expected"):
            remote.extend(items, stream=stream)
    with pytest.raises(ValueError, match=r"priorities: expected shape \(4,\)"):
        remote.extend(items, stream=0, priorities=np.ones(3))
    with pytest.raises(TypeError, match="priorities: expected real numbers"):
        remote.extend(items, stream=0, priorities=np.ones(4, bool))
    with pytest.raises(TypeError, match="mask: expected dtype bool"):
        remote.extend(items, stream=0, mask=np.ones(4))
    with pytest.raises(ValueError, match=r"mask: expected shape \(4,\)"):
        remote.extend(items, stream=0, mask=np.ones(5, bool))
    remote.extend(items, stream=0)
    sample = remote.sample(8)
    with pytest.raises(ValueError, match=r"priorities: expected shape \(8,\)"):
        remote.update_priority(sample, jnp.ones(7))
    with pytest.raises(ValueError, match="expected a Sample of this Remote"):
        remote.update_priority(sample.replace(info={}), jnp.ones(8))
    with pytest.raises(ValueError, match="depth: expected at least 1"):
        remote.ahead(depth=0)


def test_a_buffer_that_casts_takes_what_numpy_makes(cluster):
    made = jrb.ReplayBuffer(8, batch_size=4, cast=True)
    with serve(made, {"x": 0.0, "n": 0}, streams=2, num_cpus=0) as remote:
        remote.extend({"x": np.arange(3) / 8, "n": np.arange(3)}, stream=1)
        data = remote.sample(32).data
        np.testing.assert_array_equal(data["x"], np.asarray(data["n"], np.float32) / 8)
        assert data["x"].dtype == jnp.float32
        with pytest.raises(TypeError, match="expected a sampler with priorities"):
            remote.update_priority(remote.sample(2), jnp.ones(2))
        with pytest.raises(TypeError, match="sampler that takes priorities"):
            remote.extend({"x": np.ones(1), "n": np.ones(1, int)}, stream=1, priorities=[1.0])


def test_few_lengths_are_compiled():
    known = set()
    assert [pieces(length, known) for length in (3, 50, 7, 7, 9)] == [
        [3],
        [50],
        [7],
        [7],
        [9],
    ]
    assert pieces(37, known) == [32, 4, 1] and pieces(50, known) == [50]
    assert all(sum(pieces(length, known)) == length for length in range(1, 200))


def test_without_ray_there_is_an_error_that_names_the_extra():
    code = "import sys; sys.modules['ray'] = None\n"
    code += "import jrb, jrb.remote\n"
    code += "try: jrb.remote.serve(jrb.ReplayBuffer(2), {'x': 0}, streams=1)\n"
    code += "except ModuleNotFoundError as error: assert 'jrb[ray]' in str(error)\n"
    code += "else: raise SystemExit(1)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ray_is_imported_by_serve_alone():
    code = "import sys, jrb; jrb.remote.serve; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
