"""Items changed without a buffer method: the next save to the same path writes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint
from jrb._store.blocks import BLOCK
from jrb.authoring import casting
from tests import seams
from tests.checkpoint.test_checkpoint import assert_same
from tests.seams import bytes_written
from tests.small_blocks import file_of

pytestmark = pytest.mark.filterwarnings("ignore::jrb.CopyWarning")

N = 3000
EXAMPLE = {
    "wide": jnp.zeros(1600),
    "small": jnp.zeros(3, jnp.uint8),
    "flag": jnp.bool_(False),
    "half": jnp.zeros(2, jnp.bfloat16),
    "wave": jnp.zeros(300, jnp.complex64),
    "key": jax.random.key(0),
}
"""Items of 9 kB: 27 MB in all."""


def items():
    """Returns N items, most of which differ."""
    number = lambda leaf: np.arange(N).reshape(N, *[1] * leaf.ndim) % 7
    some = lambda leaf: jnp.asarray(number(leaf) + np.zeros(leaf.shape), leaf.dtype)
    found = {name: some(leaf) for name, leaf in EXAMPLE.items() if name != "key"}
    return found | {"key": jax.random.split(jax.random.key(1), N)}


def filled():
    """Returns a full buffer and its state."""
    buffer = jrb.ReplayBuffer(N, batch_size=4)
    return buffer, buffer.extend(buffer.init(EXAMPLE), items())


def other(leaf, row):
    """Returns the array with one element, or the key, of one row changed."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.at[row].set(jax.random.key(99))
    if leaf.ndim == 1:
        return leaf.at[row].set(~leaf[row])
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf.at[row, -1].set(leaf[row, -1] ^ 1)
    return leaf.at[row, -1].set(leaf[row, -1] + 1)


def edited(state, row):
    """Returns the state with this row changed in every array of items."""
    arrays = jax.tree.map(functools.partial(other, row=row), state.storage)
    return state.replace(storage=arrays)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "device"])
def test_an_edit_by_hand_is_saved_wherever_it_is(where, tmp_path, monkeypatch):
    if where == "device":
        seams.keep_on_device(monkeypatch)
    buffer, state = filled()
    whole = bytes_written(lambda: jrb.save(tmp_path, buffer, state))
    for row in (0, 1234, N - 1):
        state = edited(state, row)
        few = bytes_written(functools.partial(jrb.save, tmp_path, buffer, state))
        assert few < 0.1 * whole
        assert_same(jrb.load(tmp_path)[1], state)
    last = edited(state, 77)
    last = jax.jit(buffer.add)(last, EXAMPLE)
    checkpoint.save_async(tmp_path, buffer, last).wait()
    assert_same(jrb.load(tmp_path)[1], last)
    assert checkpoint.verify(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(EXAMPLE), "places"])
def test_each_kind_of_leaf_is_looked_at_on_its_device(name, tmp_path, monkeypatch):
    seams.keep_on_device(monkeypatch)
    wide = jnp.zeros((N, 1600)).at[50].set(jnp.arange(1600.0))
    leaf = wide if name == "places" else items()[name]
    buffer = jrb.ReplayBuffer(N)
    state = buffer.extend(buffer.init({"x": leaf[0]}), {"x": leaf})
    jrb.save(tmp_path, buffer, state)
    after = edited(state, 50)
    if name == "places":  # only the order of values within the row changes
        change = lambda leaf: leaf.at[50].set(leaf[50, ::-1])
        after = state.replace(storage=jax.tree.map(change, state.storage))
    few = bytes_written(lambda: jrb.save(tmp_path, buffer, after))
    assert few < 5 * casting.raw(leaf).nbytes / N + 30_000 + 2 * BLOCK
    assert_same(jrb.load(tmp_path)[1], after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoded", "shards", "several", "vmapped"])
def test_an_edit_by_hand_is_saved_in_every_kind_of_save(kind, tmp_path):
    buffer, state = filled()
    rest, load = {}, lambda: jrb.load(tmp_path)[1]
    if kind == "encoded":
        rest = {"encode": lambda items: {"all": items}}
        load = lambda: jrb.load(tmp_path, decode=lambda saved: saved["all"])[1]
        after = edited(state, 1501)
    elif kind == "shards":
        buffer = jrb.Sharded(jrb.ReplayBuffer(4 * N, 4, batch_size=4), 4)
        state = buffer.init({"x": jnp.zeros(1000)})
        one = lambda leaf: leaf.at[2, 700].set(jnp.ones_like(leaf[2, 700]))
        after = state.replace(storage=jax.tree.map(one, state.storage))
    elif kind == "several":
        buffer, state = {"a": buffer, "b": buffer}, {"a": state, "b": state}
        after = state | {"b": edited(state["b"], 1501)}
    else:
        state = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
        one = jax.tree.map(lambda leaf: leaf.at[1].set(other(leaf[1], 1501)), state.storage)
        after = state.replace(storage=one)
    jrb.save(tmp_path, buffer, state, **rest)
    jrb.save(tmp_path, buffer, after, **rest)
    assert_same(load(), after)


def test_files_of_a_storage_that_something_edits_are_saved_elsewhere_as_they_are(tmp_path):
    storage = jrb.MemmapStorage(tmp_path / "own")
    buffer = jrb.ReplayBuffer(N, storage=storage)
    state = buffer.extend(buffer.init({"x": jnp.zeros(2000)}), {"x": jnp.ones((N, 2000))})
    jrb.save(tmp_path / "copy", buffer, state)
    path = file_of(tmp_path / "own", "items/x")
    file = np.memmap(path, np.float32, "r+").reshape(-1, 2000)
    file[1717, 3] = 5.0
    file.flush()
    jrb.save(tmp_path / "copy", buffer, state)
    items = jrb.items(*jrb.load(tmp_path / "copy"))["x"]
    assert items[1717, 3] == 5.0
    assert items.sum() == N * 2000 + 4
