"""Functions that encode items for the disk, and saves without items."""

import functools
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import authoring, checkpoint, testing
from tests.checkpoint.test_checkpoint import BUFFERS, TED, assert_same, filled
from tests.seams import bytes_written
from tests.small_blocks import small_blocks, written_blocks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::jrb.CopyWarning")]

WIDTH = 4096  # bytes of a compressed row, padded with zeros


def compressed(leaf):
    """Returns rows of any dtype, each compressed on its own, uint8 `[K, WIDTH]`."""
    found = np.zeros((len(leaf), WIDTH), np.uint8)
    for row, one in zip(found, leaf, strict=True):
        data = zlib.compress(one.tobytes())
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return found


def expanded(rows, like):
    """Returns the decompressed rows in the shape and dtype of an item's leaf."""
    found = [zlib.decompressobj().decompress(row.tobytes()) for row in rows]
    return np.frombuffer(b"".join(found), like.dtype).reshape(len(rows), *like.shape)


def squeeze(items):
    return [(compressed(leaf), np.zeros((len(leaf), 0))) for leaf in jax.tree.leaves(items)]


def unsqueeze(spec, saved):
    leaves, structure = jax.tree.flatten(jax.tree.map(raw, spec))
    pairs = zip(saved, leaves, strict=True)
    return jax.tree.unflatten(structure, [expanded(rows[0], like) for rows, like in pairs])


def raw(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    like = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
    return np.zeros(like.shape, like.dtype)


def negated(items):
    """Inverts the bits of the observations, so that zeros are saved as nonzero bytes."""
    return {**items, "observation": ~items["observation"].view(np.uint8)}


def restored(saved):
    return {**saved, "observation": (~saved["observation"]).view(np.float32)}


def same_draws(buffer, state, back, count=3):
    """Asserts that two states draw equal batches as writes continue."""
    for number in range(count):
        key = jax.random.key(number)
        assert_same(buffer.sample(state, key), buffer.sample(back, key))
        row = testing.rows(TED, jnp.float32(number), 3)
        state, back = buffer.add(state, row), buffer.add(back, row)


@pytest.mark.parametrize("name", [name for name in BUFFERS if name not in ("one stream", "once")])
def test_what_is_encoded_without_loss_comes_back_to_the_bit(name, tmp_path):
    buffer, state = filled(**BUFFERS[name])
    spec = buffer.item_spec(state)
    jrb.save(tmp_path, buffer, state, encode=squeeze)
    again, back = jrb.load(tmp_path, decode=functools.partial(unsqueeze, spec))
    assert again == buffer
    assert_same(back, state)
    with small_blocks(3 * WIDTH):
        jrb.save(tmp_path, buffer, state, encode=squeeze)
        assert_same(jrb.load(tmp_path, decode=functools.partial(unsqueeze, spec))[1], state)
    assert checkpoint.verify(tmp_path) == []


def test_observations_that_are_stored_once_are_encoded_as_whole_items(tmp_path):
    buffer, state = filled(**BUFFERS["once"])
    jrb.save(tmp_path / "a", buffer, state, encode=negated)
    jrb.save(tmp_path / "b", buffer, state, items=False)
    items = jrb.items(buffer, state)
    for path, back in (("a", {"decode": restored}), ("b", {"items": items})):
        _, found = jrb.load(tmp_path / path, **back)
        assert_same(found.replace(storage=found.storage.replace(items=None)), _without_items(state))
        assert_same(jrb.items(buffer, found), items)
        same_draws(buffer, state, found, 9)


def _without_items(state):
    return state.replace(storage=state.storage.replace(items=None))


def test_every_dtype_is_seen_as_it_is(tmp_path):
    names = ("bfloat16", "float8_e4m3fn", "bool", "uint8", "int4", "float16", "int32")
    example = {name: jnp.zeros(3, name) for name in names}
    example |= {"key": jax.random.key(0), "nothing": jnp.zeros((0, 3)), "one": (jnp.float32(0), [])}
    buffer, state = filled(example=example)
    seen = {}

    def encode(items):
        seen.update(jax.tree.map(lambda leaf: leaf.dtype, items))
        return items

    jrb.save(tmp_path, buffer, state, encode=encode)
    assert all(seen[name] == np.dtype(jnp.dtype(name)) for name in names)
    assert seen["key"] == np.uint32
    _, back = jrb.load(tmp_path, decode=lambda saved: saved)
    assert_same(back, state)
    jrb.save(tmp_path, buffer, state, items=False)
    assert_same(jrb.load(tmp_path, items=jrb.items(buffer, state))[1], state)


@pytest.mark.parametrize("unit", [jrb.Transition(), jrb.Sequence(1)])
def test_states_side_by_side_are_encoded(unit, tmp_path):
    buffer, state = filled(unit=unit)
    other = buffer.add(state, testing.rows(TED, jnp.float32(7), 3))
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, other)
    jrb.save(tmp_path, buffer, states, encode=negated)
    assert_same(jrb.load(tmp_path, decode=restored)[1], states)
    with pytest.raises(TypeError, match="states under vmap"):
        jrb.save(tmp_path, buffer, states, items=False)


def test_64_bits(tmp_path):
    with authoring.enable_x64():
        buffer, state = filled(example={"x": jnp.float64(0), "n": jnp.int64(0)}, envs=None)
        jrb.save(tmp_path, buffer, state, encode=lambda items: items)
        assert_same(jrb.load(tmp_path, decode=lambda saved: saved)[1], state)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64])
def test_casts_lose_what_a_cast_loses(dtype, tmp_path):
    buffer, state = filled()
    cast = lambda dtype: (
        lambda items: {
            **items,
            "observation": items["observation"].astype(dtype),
        }
    )
    jrb.save(tmp_path, buffer, state, encode=cast(dtype))
    _, back = jrb.load(tmp_path, decode=cast(np.float32))
    np.testing.assert_array_equal(
        back.storage["observation"], np.asarray(state.storage["observation"]).astype(dtype)
    )
    assert_same(back.storage["next"], state.storage["next"])
    shape = str([24, 3])
    leaves = checkpoint.metadata(tmp_path)["leaves"]
    assert leaves["items/observation"] == np.dtype(dtype).name + shape


def test_only_what_is_new_is_encoded_and_written(tmp_path):
    example = {"x": jnp.zeros(1024)}
    buffer = jrb.ReplayBuffer(20_000, num_envs=2, storage=jrb.MemmapStorage(None))
    state = buffer.init(example)
    rows = lambda count, seed: {
        "x": np.random.default_rng(seed).normal(size=(count, 2, 1024)).astype(np.float32)
    }
    state = buffer.extend(state, rows(4000, 1))
    seen = []

    def half(items):
        seen.append(len(items["x"]))
        return {"x": items["x"].astype(np.float16)}

    save = functools.partial(jrb.save, tmp_path, buffer, encode=half)
    whole = bytes_written(lambda: save(state))
    assert whole > 0.9 * 8000 * 2048
    assert max(seen) * 4096 <= checkpoint.schema.PIECE
    for seed in range(2, 6):
        state = buffer.extend(state, rows(50, seed))
        seen.clear()
        assert bytes_written(lambda: save(state)) < 0.1 * whole  # noqa: B023
        assert sum(seen) < 100 + 3000
    assert bytes_written(lambda: save(state, encode=lambda items: half(items))) > 0.9 * whole
    _, back = jrb.load(tmp_path, decode=lambda saved: {"x": saved["x"].astype(np.float32)})
    want = jrb.items(buffer, state)["x"].astype(np.float16)
    np.testing.assert_array_equal(jrb.items(buffer, back)["x"], want)


def test_another_function_or_none_writes_everything_anew(tmp_path):
    buffer, state = filled()
    one, other = (lambda items: negated(items)), negated
    saves = [
        ({"encode": negated}, {"decode": restored}),
        ({}, {}),
        ({"encode": negated}, {"decode": restored}),
        ({"encode": one}, {"decode": restored}),
        ({"encode": lambda items: (items,)}, {"decode": lambda saved: saved[0]}),
        ({"encode": lambda items: [items]}, {"decode": lambda saved: saved[0]}),
        ({"items": False}, {}),
        ({"encode": functools.partial(other)}, {"decode": restored}),
    ]
    states = []
    for number, (out, _) in enumerate(saves):
        state = buffer.add(state, testing.rows(TED, jnp.float32(number), 3))
        states.append(state)
        jrb.save(tmp_path, buffer, state, keep=9, **out)
    assert checkpoint.verify(tmp_path) == []
    for number, (out, back) in enumerate(saves, 1):
        if not out.get("items", True):
            back = {"items": jrb.items(buffer, states[number - 1])}
        _, found = jrb.load(tmp_path, generation=number, **back)
        assert_same(found, states[number - 1])
    names = [checkpoint.metadata(tmp_path, number)["encode"] for number in range(1, 9)]
    assert names[0] == names[7] == "tests.checkpoint.test_hooks:negated"
    assert names[1] is names[6] is None
    assert "<lambda>" in names[3]


def test_another_state_is_not_taken_for_the_one_before(tmp_path):
    example = {"x": jnp.zeros(50), "observation": jnp.zeros(2)}
    buffer = jrb.ReplayBuffer(64)
    states = [
        buffer.extend(buffer.init(example), testing.rows(example, jnp.float32(seed), 40))
        for seed in (1, 2)
    ]
    later = buffer.extend(states[0], testing.rows(example, jnp.float32(3), 5))
    edited = buffer.set(later, jnp.arange(3), {"x": jnp.ones((3, 50))})
    for state in (*states, later, edited, states[0], buffer.empty(later), states[1]):
        jrb.save(tmp_path, buffer, state, encode=negated)
        assert_same(jrb.load(tmp_path, decode=restored)[1], state)


STORAGES = {"device": jrb.DeviceStorage, "memmap": jrb.MemmapStorage}


@pytest.mark.whole
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("background", [False, True])
def test_chunks_of_zeros_are_not_encoded_and_come_back_as_zeros(storage, background, tmp_path):
    example = {"observation": jnp.zeros(8)}
    buffer = jrb.ReplayBuffer(1000, storage=STORAGES[storage]())
    rows = {"observation": jnp.arange(1.0, 801.0).reshape(100, 8)}
    state = buffer.extend(buffer.init(example), rows)
    save, seen = checkpoint.save_async if background else jrb.save, []

    def encode(items):
        seen.append(items["observation"][:, 0].tolist())
        return negated(items)

    def there_and_back(state):
        seen.clear()
        save(tmp_path, buffer, state, encode=encode)
        again, back = jrb.load(tmp_path, decode=restored)
        if storage == "device":
            assert_same(back, state)
        assert_same(jrb.items(again, back), jrb.items(buffer, state))
        assert checkpoint.verify(tmp_path) == []
        return sum(seen, [])

    with small_blocks(256):  # chunks of 8 rows
        assert len(there_and_back(state)) == 1 + 104
        assert len(there_and_back(state)) == 1  # one row of zeros as an example
        slots = jnp.arange(16, 24)
        state = buffer.set(state, slots, {"observation": jnp.zeros((8, 8))})
        first = there_and_back(state)
        assert 129.0 not in first and len(first) == 1
        state = buffer.set(state, slots[:1], {"observation": jnp.ones((1, 8))})
        assert there_and_back(state).count(1.0) >= 1
        assert written_blocks(tmp_path, "items/encoded") == [*range(13)]


def test_an_empty_buffer_of_many_slots_costs_nothing(tmp_path):
    buffer = jrb.ReplayBuffer(1_000_000, storage=jrb.MemmapStorage())
    state = buffer.add(buffer.init({"observation": jnp.zeros(8)}), {"observation": jnp.ones(8)})
    written = bytes_written(lambda: jrb.save(tmp_path, buffer, state, encode=negated))
    assert written < 1_000_000
    again, back = jrb.load(tmp_path, decode=restored)
    assert_same(jrb.items(again, back), jrb.items(buffer, state))


@pytest.mark.parametrize("storage", [jrb.MemmapStorage, lambda path: jrb.SpillStorage(path, 6)])
def test_items_on_the_host(storage, tmp_path):
    own = tmp_path / "own"
    buffer, state = filled(storage=storage(own))
    jrb.save(tmp_path / "a", buffer, state, encode=negated)
    jrb.save(tmp_path / "b", buffer, state, items=False)
    items = jrb.items(buffer, state)
    for path, given in (("a", {"decode": restored}), ("b", {"items": items})):
        again, back = jrb.load(tmp_path / path, **given)
        assert_same(jrb.items(again, back), items)
        key = jax.random.key(3)
        assert_same(again.sample(back, key), buffer.sample(state, key))
    for out in ({"encode": negated}, {"items": False}):
        with pytest.raises(ValueError, match="path of the storage itself"):
            jrb.save(own, buffer, state, **out)
    jrb.save(own, buffer, state)
    with pytest.raises(ValueError, match="saved without encode="):
        jrb.load(own, decode=restored)


def test_in_the_background_and_to_another_size(tmp_path):
    buffer, state = filled()
    checkpoint.save_async(tmp_path, buffer, state, encode=negated, extra={"step": 3}, keep=1).wait()
    later = buffer.add(state, testing.rows(TED, jnp.float32(5), 3))
    checkpoint.save_async(tmp_path, buffer, later, encode=negated, keep=1).wait()
    assert_same(jrb.load(tmp_path, decode=restored)[1], later)
    _, back, extra = jrb.load(tmp_path, decode=restored, generation=1, extra={"step": 0})
    assert_same(back, state)
    assert extra == {"step": 3}
    small, back = jrb.load(tmp_path, decode=restored, capacity=9, num_envs=None)
    assert (small.capacity, int(small.size(back))) == (9, 9)
    device = jax.devices()[1]
    _, back = jrb.load(tmp_path, decode=restored, device=device)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(back))
    checkpoint.save_async(tmp_path, buffer, later, items=False).wait()
    items = jrb.items(buffer, later)
    _, back = jrb.load(tmp_path, items=items, device=device)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(back))
    small, back = jrb.load(tmp_path, items=items, capacity=9)
    assert_same(jrb.items(small, back), jax.tree.map(lambda leaf: leaf[-9:], items))


def test_a_mix_encodes_the_items_of_each(tmp_path):
    one, other = filled(), filled(**BUFFERS["prioritized"])
    mix, states = jrb.Mix((one[0], other[0]), (0.25, 0.75), batch_size=8), (one[1], other[1])
    jrb.save(tmp_path, mix, states, encode=negated)
    assert_same(jrb.load(tmp_path, decode=restored)[1], states)
    assert_same(jrb.load(tmp_path, mix, decode=restored)[1], states)
    jrb.save(tmp_path, mix, states, items=False)
    items = tuple(jrb.items(*pair) for pair in (one, other))
    assert_same(jrb.load(tmp_path, items=items)[1], states)
    with pytest.raises(ValueError, match="expected a tuple of 2 items"):
        jrb.load(tmp_path, items=items[:1])
    jrb.save(tmp_path, mix, states, encode=negated)
    with pytest.raises(ValueError, match="expected decode="):
        jrb.load(tmp_path)


WRONG_ENCODES = [
    (3, TypeError, "encode: expected a function, got 3"),
    (lambda items: items["action"][0], ValueError, r"leaf '\.': expected one row"),
    (lambda items: {"x": items["action"].astype("U")}, TypeError, "leaf 'x': expected an array of"),
    (lambda items: {"x": items["action"][:2][:1]}, ValueError, r"leaf 'x': expected shape \(24,\)"),
    (
        lambda items: {"x": items["action"].astype(np.int64 if len(items["action"]) > 1 else "i4")},
        TypeError,
        "leaf 'x': expected dtype int32, got int64",
    ),
    (lambda items: [0] * len(items["action"]), ValueError, "expected one row"),
    (lambda items: {}, ValueError, "expected arrays, got none"),
]


@pytest.mark.parametrize(("encode", "kind", "message"), WRONG_ENCODES)
def test_a_function_that_gives_something_else_is_refused(encode, kind, message, tmp_path):
    buffer, state = filled()
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(kind, match=message):
        jrb.save(tmp_path, buffer, buffer.empty(state), encode=encode)
    assert checkpoint.generations(tmp_path) == [1]
    assert_same(jrb.load(tmp_path)[1], state)
    assert checkpoint.verify(tmp_path) == []


def test_a_function_that_has_to_be_there_is_named(tmp_path):
    buffer, state = filled()
    jrb.save(tmp_path, buffer, state, encode=negated)
    with pytest.raises(
        ValueError, match=r"expected decode=.*tests\.checkpoint\.test_hooks:negated"
    ):
        jrb.load(tmp_path)
    for decode, kind, message in [
        (lambda saved: saved, ValueError, r"decode: leaf 'observation': expected shape \(.*, 3\)"),
        (lambda saved: {**restored(saved), "x": 0}, ValueError, r"leaf 'x': .*not expected"),
        (
            lambda saved: restored(jax.tree.map(lambda x: x[:-1], saved)),
            ValueError,
            "expected shape",
        ),
        (
            lambda saved: {**restored(saved), "action": saved["action"].astype(np.int64)},
            TypeError,
            "decode: leaf 'action': expected dtype int32, got int64",
        ),
    ]:
        with pytest.raises(kind, match=message):
            jrb.load(tmp_path, decode=decode)
    with pytest.raises(TypeError, match="decode: expected a function, got"):
        jrb.load(tmp_path, decode={"a": None})
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match=r"decode: expected None.*test_hooks:restored"):
        jrb.load(tmp_path, decode=restored)
    with pytest.raises(ValueError, match="encode, items: expected none with layout='h5'"):
        jrb.save(tmp_path / "x.h5", buffer, state, layout="h5", encode=negated)
    jrb.save(tmp_path / "x.h5", buffer, state, layout="h5")
    with pytest.raises(ValueError, match="decode, items: expected None"):
        jrb.load(tmp_path / "x.h5", items=jrb.items(buffer, state))


# Saves without items.


@pytest.mark.parametrize("name", [name for name in BUFFERS if name != "once"])
def test_the_same_items_make_the_same_state(name, tmp_path):
    buffer, state = filled(**BUFFERS[name])
    jrb.save(tmp_path, buffer, state, items=False, extra={"step": 4})
    items = jrb.items(buffer, state)
    again, back, extra = jrb.load(tmp_path, items=items, extra={"step": 0})
    assert (again, extra) == (buffer, {"step": 4})
    assert_same(back, state)
    assert checkpoint.metadata(tmp_path)["items"] == "apart"
    assert checkpoint.verify(tmp_path) == []
    again = jax.tree.map(jnp.asarray, items)
    assert_same(jrb.load(tmp_path, buffer, items=again)[1], state)


WRITERS = {
    "dataset": lambda: jrb.from_items(jax.tree.map(jnp.asarray, ITEMS), batch_size=2),
    "reservoir": lambda: written_to(jrb.Reservoir(), 9),
    "until full": lambda: written_to(jrb.BlockWhenFull(), 4, sampler=jrb.Queue()),
}
ITEMS = {"observation": np.arange(18, dtype=np.float32).reshape(9, 2)}


def written_to(writer, count, **parts):
    buffer = jrb.ReplayBuffer(6, batch_size=2, writer=writer, **parts)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], ITEMS))
    return buffer, buffer.extend(state, jax.tree.map(lambda leaf: leaf[:count], ITEMS))


@pytest.mark.parametrize("name", WRITERS)
def test_whatever_writer_there_is(name, tmp_path):
    buffer, state = WRITERS[name]()
    jrb.save(tmp_path, buffer, state, items=False)
    assert_same(jrb.load(tmp_path, items=jrb.items(buffer, state))[1], state)
    jrb.save(tmp_path, buffer, state, encode=negated)
    assert_same(jrb.load(tmp_path, decode=restored)[1], state)


def test_leaves_of_equal_names_are_restored(tmp_path):
    example = {"a/b": jnp.zeros(2), "a": {"b": jnp.zeros(3), "": jnp.int8(0)}, "a/": 0.0}
    buffer, state = filled(example=example)
    jrb.save(tmp_path, buffer, state, items=False)
    assert_same(jrb.load(tmp_path, items=jrb.items(buffer, state))[1], state)
    jrb.save(tmp_path, buffer, state, encode=lambda items: items)
    assert_same(jrb.load(tmp_path, decode=lambda saved: saved)[1], state)


def test_it_is_small_and_goes_on_through_draws(tmp_path):
    buffer, state = filled(
        rows=5, example={**TED, "frame": jnp.zeros(5000)}, unit=jrb.NStep(2, 0.9)
    )
    items = jrb.items(buffer, state)
    assert bytes_written(lambda: jrb.save(tmp_path, buffer, state, items=False)) < 20_000
    size = sum(os.path.getsize(os.path.join(at, n)) for at, _, ns in os.walk(tmp_path) for n in ns)
    assert size < 20_000
    empty = buffer.init({**TED, "frame": jnp.zeros(5000)})
    jrb.save(tmp_path / "empty", buffer, empty, items=False)
    assert_same(jrb.load(tmp_path / "empty", items=jrb.items(buffer, empty))[1], empty)
    _, back = jrb.load(tmp_path, items=items)
    assert_same(back, state)


def test_other_items_are_refused(tmp_path):
    buffer, state = filled()
    items = jrb.items(buffer, state)
    jrb.save(tmp_path, buffer, state, items=False)
    with pytest.raises(ValueError, match=r"expected items=.*items=False"):
        jrb.load(tmp_path)
    changed = lambda name, leaf: {**items, name: leaf}
    by_slot = jax.tree.map(np.asarray, state.storage.leaves)
    for given, kind, message in [
        (
            changed("action", items["action"][1:]),
            ValueError,
            r"leaf 'action': expected shape \(24,",
        ),
        (changed("action", items["action"] * 1.0), TypeError, "leaf 'action': expected a? ?dtype"),
        (changed("more", items["action"]), ValueError, "leaf 'more'"),
        (changed("action", items["action"] + 1), ValueError, "leaf 'action': expected the items"),
        (changed("observation", items["observation"][::-1]), ValueError, "leaf 'observation'"),
        (by_slot, ValueError, "oldest first"),
        (list(range(24)), ValueError, "leaf 'action'"),
    ]:
        with pytest.raises(kind, match=message):
            jrb.load(tmp_path, items=given)
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match="items: expected None"):
        jrb.load(tmp_path, items=items)
    with pytest.raises(ValueError, match="encode: expected None with items=False"):
        jrb.save(tmp_path, buffer, state, items=False, encode=negated)
    with pytest.raises(TypeError, match="items: expected True or False"):
        jrb.save(tmp_path, buffer, state, items=items)


def test_what_is_dead_comes_back_as_zeros_and_is_not_drawn(tmp_path):
    buffer, state = filled(unit=jrb.Sequence(2))
    state = buffer.empty(state)
    for number in range(3):
        state = buffer.add(state, testing.rows(TED, jnp.float32(number), 3))
    jrb.save(tmp_path, buffer, state, items=False)
    _, back = jrb.load(tmp_path, items=jrb.items(buffer, state))
    assert_same(back.writer, state.writer)
    same_draws(buffer, state, back)


def test_an_array_of_another_device_is_read_and_put_in_pieces(tmp_path, monkeypatch):
    example = {"observation": jnp.zeros(3000), "k": jax.random.key(0)}
    buffer, state = filled(example=example)
    memory = checkpoint.schema.memory
    monkeypatch.setattr(memory, "on_host", lambda leaf: False)
    monkeypatch.setattr(memory, "_goes_to_cpu", lambda device: False)
    monkeypatch.setattr(memory, "PIECE", 70_000)
    monkeypatch.setattr(checkpoint.schema, "PIECE", 70_000)
    jrb.save(tmp_path, buffer, state, encode=negated)
    assert_same(jrb.load(tmp_path, decode=restored)[1], state)
    once, state = filled(**BUFFERS["once"])
    jrb.save(tmp_path / "once", once, state, encode=negated)
    _, back = jrb.load(tmp_path / "once", decode=restored)
    assert_same(jrb.items(once, back), jrb.items(once, state))
