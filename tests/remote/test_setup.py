"""Errors that the caller gets, and calls that need no server."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.remote import serve
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
