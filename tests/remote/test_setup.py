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
from jrb.remote.ledger import Ledger
from jrb.remote.streams import pieces
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
        ({"buffer": buffer(storage=jrb.MemmapStorage("a")), "path": "b"}, ValueError, "path"),
    ],
)
def test_what_cannot_be_served_is_refused(cluster, changes, error, text):
    given = {"buffer": buffer(), "example": EXAMPLE, "streams": 2} | changes
    with pytest.raises(error, match=text):
        serve(given.pop("buffer"), given.pop("example"), **given)


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


def test_the_ledger_takes_everything_once_and_tells_what_is_missing():
    ledger = Ledger(2)
    calls = [(7, 0, 5), (7, 5, 5), (7, 5, 5), (9, 0, 2), (7, 10, 1), (7, 20, 1), (7, 21, 1)]
    calls += [(7, 13, 2), (7, 13, 2), (7, 11, 2), (7, 22, 1), (7, 19, 2)]
    seen = [ledger.note(1, *call) for call in calls]
    assert [(one.again, one.goes_on, one.missing) for one in seen] == [
        (False, False, 0),  # a sender that is new
        (False, True, 0),
        (True, False, 0),  # made again
        (False, False, 0),  # another sender
        (False, False, 0),  # the first one again
        (False, False, 9),  # nine are missing
        (False, True, 0),
        (False, False, -2),  # two of them come late
        (True, False, 0),
        (False, False, -2),
        (False, False, 0),
        (True, False, 0),  # one was here
    ]
    again = Ledger.loaded(ledger.saved())
    assert again.note(1, 7, 15, 5).missing == -5 and again.note(1, 7, 23, 1).missing == 0
    assert again.note(0, 7, 23, 1).missing == 23
    again.note_failure(1, 23, 1)
    assert again.note(1, 7, 23, 1).missing == -1


@hypothesis.given(st.data())
def test_calls_in_any_order_come_once(data):
    """Calls that begin anew and again, as a model of sets of numbers has it."""
    ledger, here, last = Ledger(1), set(), None
    for first in data.draw(st.lists(st.integers(0, 12), max_size=30)):
        call = set(range(first * 3, first * 3 + 3))
        before = max(here, default=-1) + 1
        arrival = ledger.note(0, 5, first * 3, 3)
        assert arrival.again == call.issubset(here)
        if not arrival.again:
            assert arrival.goes_on == (last == first * 3)
            assert arrival.missing == (-3 if first * 3 < before else first * 3 - before)
            here, last = here | call, first * 3 + 3


def test_few_lengths_are_compiled():
    known = set()
    assert [pieces(length, known) for length in (3, 50, 7, 7, 9)] == [[3], [50], [7], [7], [9]]
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
