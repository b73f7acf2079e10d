"""Tables of stored items, compared with plain loops over the added items."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jrb

pytestmark = pytest.mark.slow

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

EXAMPLE = {
    "obs": {"x": jnp.zeros((2, 3), jnp.float32)},
    "step": jnp.int32(0),
    "next": {"reward": jnp.float32(0), "done": False},
}
STORAGES = {
    "device": lambda: jrb.DeviceStorage(),
    "memmap": lambda: jrb.MemmapStorage(None),
    "spill": lambda: jrb.SpillStorage(None, 6),
    "compressed": lambda: jrb.CompressedStorage(min_bytes=1),
}


def stream(rng, length, envs):
    return {
        "obs": {"x": rng.random((length, envs, 2, 3), np.float32)},
        "step": np.arange(length * envs, dtype=np.int32).reshape(length, envs),
        "next": {
            "reward": rng.random((length, envs)).astype(np.float32),
            "done": rng.random((length, envs)) < 0.3,
        },
    }


def rows_of(items, rows, envs):
    """Returns the expected table of the newest `rows` rows: one dict for each transition."""
    length, found = len(items["step"]), []
    begun, step = {}, {}
    held = range(max(0, length - rows), length)
    for env in range(envs):
        start = held.start
        for t in held:
            begun[t, env] = start
            step[t, env] = t - start
            if items["next"]["done"][t, env]:
                start = t + 1
    firsts = sorted({(begun[t, env], env) for t in held for env in range(envs)})
    number = {first: place for place, first in enumerate(firsts)}
    for t in held:
        for env in range(envs):
            facts = {"slot": t % rows * envs + env, "environment": env}
            facts |= {"episode": number[begun[t, env], env], "step": step[t, env]}
            leaves = {
                "next/done": items["next"]["done"][t, env],
                "next/reward": items["next"]["reward"][t, env],
                "obs/x": items["obs"]["x"][t, env],
                "item/step": items["step"][t, env],
            }
            found.append(facts | leaves)
    return found


def check(rows, want):
    assert len(rows) == len(want)
    for row, expected in zip(rows, want, strict=True):
        assert list(row) == list(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(np.asarray(row[name]), value, err_msg=name)


def of_arrow(table):
    columns = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if isinstance(column, pa.ExtensionArray):
            columns[name] = list(column.to_numpy_ndarray())
        else:
            columns[name] = column.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("unit", [jrb.Transition(), jrb.NStep(2, 0.9)], ids=["row", "n-step"])
@pytest.mark.parametrize(("length", "envs"), [(0, 2), (3, 1), (6, 2), (17, 2), (40, 3)])
def test_a_table_has_a_row_for_each_transition(length, envs, unit, storage):
    buffer = jrb.ReplayBuffer(6 * envs, envs, unit=unit, storage=STORAGES[storage]())
    state = buffer.init(EXAMPLE)
    items = stream(np.random.default_rng(length), length, envs)
    if length:
        state = buffer.extend(state, items)
    want = rows_of(items, 6, envs)
    check(of_arrow(jrb.to_arrow(buffer, state)), want)
    reader = jrb.to_arrow(buffer, state, chunks=4)
    batches = list(reader)
    assert [len(batch) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    check(of_arrow(pa.Table.from_batches(batches, reader.schema)), want)
    frame = jrb.to_pandas(buffer, state)
    check([dict(row) for row in frame.to_dict("records")], want)


@pytest.mark.parametrize("envs", [None, 2])
def test_priorities_are_those_of_the_slots(envs):
    sampler = jrb.Prioritized()
    buffer = jrb.ReplayBuffer(8, envs, sampler=sampler)
    lead = () if envs is None else (envs,)
    priorities = np.arange(1, 13, dtype=np.float32).reshape(-1, *lead)
    state = buffer.init({"x": 0.0})
    state = buffer.extend(state, {"x": jnp.asarray(priorities)}, priorities=priorities)
    frame = jrb.to_pandas(buffer, state)
    assert frame["priority"].tolist() == frame["x"].tolist() == list(range(5, 13))
    assert frame["priority"].dtype == np.float32
    assert "episode" not in frame
    assert jrb.to_arrow(buffer, state)["priority"].to_pylist() == list(range(5, 13))


def test_writers_without_time_have_neither_environments_nor_episodes():
    items = {"next": {"reward": jnp.arange(5.0), "done": jnp.ones(5, bool)}}
    writer = jrb.MaxValue(("next", "reward"))
    frame = jrb.to_pandas(*jrb.from_items(items, capacity=3, writer=writer))
    assert list(frame) == ["slot", "next/done", "next/reward"]
    assert sorted(frame["next/reward"]) == [2, 3, 4]


def test_lanes_and_truncated_episodes_are_told_apart():
    buffer = jrb.ReplayBuffer(8, 2, writer=jrb.PerEnvironment())
    state = buffer.init({"id": 0, "next": {"reward": 0.0, "done": False}})
    mask = np.array([[1, 1], [1, 0], [0, 1], [1, 0]], bool)
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    done = np.array([[0, 0], [1, 0], [0, 1], [0, 0]], bool)
    after = {"reward": np.ones((4, 2), np.float32), "done": done}
    state = buffer.extend(state, {"id": ids, "next": after}, mask=mask)
    frame = jrb.to_pandas(buffer, state)
    told = {row["id"]: (row["environment"], row["step"]) for _, row in frame.iterrows()}
    assert told == {0: (0, 0), 1: (1, 0), 2: (0, 1), 5: (1, 1), 6: (0, 0)}
    groups = frame.groupby("episode")["id"].apply(list).tolist()
    assert sorted(groups) == [[0, 2], [1, 5], [6]]


DTYPES = ["bool", "int8", "uint16", "int32", "float16", "float32", "complex64"]
OTHERS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"]


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 2)], ids=str)
@pytest.mark.parametrize("name", DTYPES + OTHERS)
def test_every_value_comes_through(name, shape):
    rng, dtype = np.random.default_rng(0), jnp.dtype(name)
    raw = rng.integers(-8 if "uint" not in name else 0, 8, (5, *shape))
    values = raw.astype(np.float32).astype(dtype) if name != "complex64" else raw + 1j * raw[::-1]
    values = values.astype(dtype)
    buffer, state = jrb.from_items({"x": jnp.asarray(values)})
    table, frame = jrb.to_arrow(buffer, state), jrb.to_pandas(buffer, state)
    found = table["x"].combine_chunks()
    is_tensor = isinstance(found, pa.ExtensionArray)
    flat = found.storage.values if is_tensor else found
    array = np.asarray(flat.to_pylist()).reshape(5, *(table["x"].type.shape if is_tensor else ()))
    if name == "complex64":
        array = array[..., 0] + 1j * array[..., 1]
    np.testing.assert_array_equal(array.astype(dtype), values)
    cells = np.stack(list(frame["x"]))
    np.testing.assert_array_equal(cells.astype(dtype), values)
    metadata = table.schema.field("x").metadata
    own = str(np.dtype(dtype))
    told = metadata is not None and metadata[b"jrb.dtype"].decode() == own
    assert told == (name in [*OTHERS, "complex64"])


def test_widened_numbers_are_exact():
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    buffer, state = jrb.from_items({"x": jnp.asarray(every)})
    table = jrb.to_arrow(buffer, state)
    assert table["x"].type == pa.float32()
    found = np.asarray(table["x"].combine_chunks())
    np.testing.assert_array_equal(found, every.astype(np.float32))
    for name in ("float8_e4m3fn", "float8_e5m2"):
        eight = np.arange(256, dtype=np.uint8).view(np.dtype(name))
        frame = jrb.to_pandas(*jrb.from_items({"x": jnp.asarray(eight)}))
        back = frame["x"].to_numpy().astype(eight.dtype)
        np.testing.assert_array_equal(np.isnan(back), np.isnan(eight))
        fine = ~np.isnan(eight)
        np.testing.assert_array_equal(back[fine].view(np.uint8), eight[fine].view(np.uint8))


def test_keys_are_their_words():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    buffer, state = jrb.from_items({"key": keys})
    table, words = jrb.to_arrow(buffer, state), np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(table["key"].combine_chunks().to_numpy_ndarray(), words)
    assert table.schema.field("key").metadata == {b"jrb.dtype": b"key:rbg"}
    np.testing.assert_array_equal(np.stack(list(jrb.to_pandas(buffer, state)["key"])), words)


def test_objects_have_a_column_of_pandas_only():
    objects = ["a", None, {"b": 1}]
    buffer, state = jrb.from_items(objects, storage=jrb.ListStorage())
    frame = jrb.to_pandas(buffer, state)
    assert frame["item"].tolist() == objects
    with pytest.raises(TypeError, match=r"got objects. jrb.to_pandas has a column"):
        jrb.to_arrow(buffer, state)


def test_a_table_is_a_dataset_again(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    items = {"observation": jnp.arange(10.0).reshape(5, 2), "action": jnp.arange(5)}
    ends = jnp.array([0, 1, 0, 0, 1], bool)
    items["next"] = {"reward": jnp.ones(5), "terminated": ends, "truncated": ends & False}
    buffer, state = jrb.from_items(items)
    parquet.write_table(jrb.to_arrow(buffer, state), tmp_path / "a.parquet")
    dataset = jrb.datasets.open(tmp_path / "a.parquet")
    assert dataset.lengths.tolist() == [2, 3]
    np.testing.assert_array_equal(dataset[1]["observation"], np.arange(4.0, 10).reshape(3, 2))


@pytest.mark.parametrize("call", [jrb.to_arrow, jrb.to_pandas])
def test_other_things_are_refused(call):
    buffer, state = jrb.from_items({"x": jnp.arange(3)})
    name = call.__name__
    mix = jrb.Mix((buffer, buffer), (0.5, 0.5))
    with pytest.raises(TypeError, match=rf"{name}: .* Take one at a time: mix.buffers\[0\]"):
        call(mix, (state, state))
    with pytest.raises(TypeError, match=f"{name}: expected a ReplayBuffer, got dict"):
        call({}, state)
    with pytest.raises(TypeError, match="expected a state of this buffer"):
        call(buffer, (state,))
    with pytest.raises(ValueError, match="leading axes"):
        call(buffer, jax.vmap(lambda _: state)(jnp.arange(2)))
    twice = jrb.from_items({"a": {"b": jnp.arange(3)}, "a/b": jnp.arange(3)})
    with pytest.raises(ValueError, match="a name of their own"):
        call(*twice)


@pytest.mark.parametrize("chunks", [0, -1, True, 2.0, "many"])
def test_chunks_are_a_number(chunks):
    buffer, state = jrb.from_items({"x": jnp.arange(3)})
    with pytest.raises((ValueError, TypeError), match="chunks"):
        jrb.to_arrow(buffer, state, chunks=chunks)
