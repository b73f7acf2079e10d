"""Rows that are compressed come back bit for bit, from memory and from checkpoints."""

import functools
import re
import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(0)
DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "bfloat16", "float32", "float64", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "int4"]
same = functools.partial(chex.assert_trees_all_equal, strict=True)


def compressed(capacity, level=1, min_bytes=256, **parts):
    storage = jrb.CompressedStorage(level=level, min_bytes=min_bytes)
    return jrb.ReplayBuffer(capacity, batch_size=8, storage=storage, **parts)


def noise(seed, *shape):
    """Returns bytes that hardly become smaller."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def drawings(count, side=84):
    """Returns frames of a game of 10 x 10 cells, a few of which move, scaled up."""
    rng, cells = np.random.default_rng(0), np.arange(side) * 10 // side
    frames = np.zeros((count, 10, 10), np.uint8)
    frames[:, 1:4] = np.where(rng.random((count, 3, 10)) < 0.8, 120, 0)  # bricks
    frames[:, 9] = 60 * (np.arange(10) == np.arange(count)[:, None] % 10)
    frames[np.arange(count), rng.integers(4, 9, count), rng.integers(0, 10, count)] = 255
    return frames[:, cells][:, :, cells]


def cart_poles(count):
    """Returns frames of a cart with a pole, 400 x 600 x 3."""
    frames = np.full((count, 400, 600, 3), 255, np.uint8)
    y, x = np.mgrid[:400, :600]
    for number, frame in enumerate(frames):
        place, angle = 300 + 9 * number, 0.05 * number - 0.1
        along = (x - place) * np.sin(angle) - (y - 285) * np.cos(angle)
        across = (x - place) * np.cos(angle) + (y - 285) * np.sin(angle)
        frame[300] = 0
        frame[280:310, place - 25 : place + 25] = 0
        frame[(along > -10) & (along < 125) & (abs(across) < 5)] = 202, 152, 101
    return frames


def size_on_disk(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# Memory.


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("level", [1, 3])
def test_every_dtype_comes_back_bit_for_bit(level):
    with jax.enable_x64(True):
        items = {"key": jax.random.split(KEY, (5, 3))}
        for number, name in enumerate(DTYPES):
            values = noise(number, 5, 64) if number % 2 else np.tile(noise(number, 5, 4), 16)
            if name in ("bool", "int4"):
                items[name] = jnp.asarray(values % 2 if name == "bool" else values % 7, name)
            else:
                items[name] = jnp.asarray(values).view(name)
        buffer = compressed(8, level, min_bytes=1)
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0], items))
        found = buffer.take(buffer.extend(state, items), jnp.arange(5))
        same(jax.random.key_data(found.pop("key")), jax.random.key_data(items.pop("key")))
        for name, leaf in found.items():
            assert leaf.dtype == items[name].dtype
            assert np.asarray(leaf).tobytes() == np.asarray(items[name]).tobytes(), name


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("seed", range(3))
def test_programs_do_what_lists_do(seed):
    rng = np.random.default_rng(seed)
    buffer = compressed(6, 1 + 2 * (seed % 2), min_bytes=[1, 12, 256][seed])

    def rows(count):
        frames = rng.integers(0, 3, (count, 4, 3), np.uint8)
        return {"frame": frames, "id": rng.random(count).astype(np.float32)}

    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows(1)))
    held = []  # oldest first
    for number in range(40):
        action = rng.integers(5)
        if action < 2:
            new = rows(rng.integers(1, 9))
            held = [*held, *zip(*new.values(), strict=True)][-6:]
            state = buffer.extend(state, new)
        elif action == 2 and held:
            slots, new = rng.choice(len(held), 2), rows(2)
            order, _ = buffer.in_order(state)
            state = buffer.set(state, order[slots], {"frame": new["frame"]})
            for slot, frame in zip(slots, new["frame"], strict=True):
                held[slot] = frame, held[slot][1]
        elif action == 3 and held:
            order, _ = buffer.in_order(state)
            rank = {int(slot): age for age, slot in enumerate(order[: len(held)])}
            sample = buffer.sample(state, jax.random.fold_in(KEY, number))
            for index, frame, name in zip(
                sample.indices, sample.data["frame"], sample.data["id"], strict=True
            ):
                expected = held[rank[int(index)]]
                assert (frame == expected[0]).all() and name == expected[1]
        elif action == 4 and number % 4 == 0:
            state, held = buffer.empty(state), []
        items = jrb.items(buffer, state)
        assert len(items["id"]) == len(held)
        for count, (frame, name) in enumerate(held):
            assert (items["frame"][count] == frame).all() and items["id"][count] == name


def test_large_rows_are_shared_by_threads():
    frames = np.concatenate([cart_poles(3), noise(0, 3, 400, 600, 3)])
    buffer = compressed(8)
    state = buffer.extend(buffer.init({"x": frames[0]}), {"x": frames})
    order = np.array([5, 0, 3, 1, 4, 2, 2])
    found = np.asarray(buffer.take(state, jnp.asarray(order))["x"])
    np.testing.assert_array_equal(found, frames[order])


def test_frames_of_games_become_smaller():
    for frames, times in ((drawings(64), 5), (cart_poles(6), 10)):
        buffer = compressed(len(frames))
        empty = buffer.init({"frame": frames[0], "reward": jnp.float32(0)})
        before, most = (
            empty.storage.host_bytes,
            buffer.nbytes({"frame": frames[0], "reward": jnp.float32(0)}, "host"),
        )
        rewards = np.ones(len(frames), np.float32)
        state = buffer.extend(empty, {"frame": frames, "reward": rewards})
        assert before < state.storage.host_bytes < frames.nbytes / times < most
        assert most < frames.nbytes + 100 * len(frames)
        assert "on the host" in repr(state)
        np.testing.assert_array_equal(jrb.items(buffer, state)["frame"], frames)


def test_small_leaves_are_kept_as_they_are():
    item = {"frame": jnp.zeros(300, jnp.uint8), "reward": jnp.float32(0), "vector": jnp.zeros(63)}
    sizes = {}
    for least in (1, 256, 1000):
        buffer = compressed(100, min_bytes=least)
        many = jax.tree.map(lambda leaf: np.zeros((100, *leaf.shape), leaf.dtype), item)
        state = buffer.extend(buffer.init(item), many)
        sizes[least] = state.storage.host_bytes
        np.testing.assert_array_equal(jrb.items(buffer, state)["vector"], many["vector"])
    assert sizes[1000] == 100 * (300 + 4 + 4 * 63)
    assert sizes[256] == sizes[1000] + 100 * (32 + 33 + 8 - 300)
    assert sizes[1] > 100 * 3 * 73


def test_older_states_are_refused_where_rows_were_overwritten():
    buffer = compressed(4, min_bytes=1)
    old = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(3)})
    new = buffer.extend(old, {"x": jnp.arange(3, 5)})
    assert buffer.take(old, jnp.array([1, 2]))["x"].tolist() == [1, 2]
    with pytest.raises(jrb.StaleError, match=r"CompressedStorage: .*overwritten since"):
        buffer.take(old, jnp.array([0]))
    with pytest.raises(jrb.StaleError, match=r"CompressedStorage: .*newest state"):
        buffer.add(old, {"x": 9})
    with pytest.raises(jrb.StaleError, match="newest state"):
        jrb.save("nowhere", buffer, old)
    assert buffer.take(new, jnp.arange(4))["x"].tolist() == [4, 1, 2, 3]


def test_draws_of_other_threads_are_of_one_version():
    buffer, frames = compressed(32), np.stack([np.full(400, n, np.uint8) for n in range(256)])
    rows = lambda n: {"x": frames[n : n + 8], "n": np.arange(n, n + 8, dtype=np.int32)}
    newest = [buffer.extend(buffer.init({"x": frames[0], "n": 0}), rows(0))]
    faults, is_over = [], threading.Event()

    def draw():
        number = 0
        while not is_over.is_set() or not number:
            number += 1
            try:
                data = buffer.sample(newest[0], jax.random.key(number)).data
                faults.extend(np.flatnonzero((data["x"] != data["n"][:, None]).any(1)))
            except jrb.StaleError:
                continue  # it is refused, and never wrong

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for start in range(8, 248, 8):
        newest[0] = buffer.extend(newest[0], rows(start))
    is_over.set()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"codec": "zip"}, ValueError, "codec: expected one of 'blosc2', got 'zip'"),
        ({"level": 0}, ValueError, "level"),
        ({"level": 10}, ValueError, "level"),
        ({"level": 1.5}, TypeError, "level"),
        ({"min_bytes": 0}, ValueError, "min_bytes"),
    ],
)
def test_wrong_options_are_refused(options, error, says):
    with pytest.raises(error, match=f"CompressedStorage: {says}"):
        jrb.CompressedStorage(**options)


# Checkpoints.


def filled(capacity=5000, width=1000, **parts):
    """Returns a full buffer of several groups of slots in a checkpoint, and its state."""
    buffer = compressed(capacity, sampler=jrb.Prioritized(), **parts)
    frames = np.repeat(noise(1, capacity, width // 50), 50, axis=1)
    state = buffer.init({"x": frames[0], "reward": jnp.float32(0)})
    rewards = np.arange(capacity, dtype=np.float32)
    return buffer, buffer.extend(state, {"x": frames, "reward": rewards})


def more(buffer, state, seed, count):
    frames = np.repeat(noise(seed, count, 20), 50, axis=1)
    return buffer.extend(state, {"x": frames, "reward": np.ones(count, np.float32)})


@pytest.mark.parametrize("capacity", [7, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_loaded_buffer_draws_the_same_and_goes_on(capacity, tmp_path):
    buffer, state = filled(capacity)
    for number in range(3):
        jrb.save(tmp_path / "a", buffer, state)
        again, loaded = jrb.load(tmp_path / "a")
        assert again == buffer and loaded.storage.host_bytes == state.storage.host_bytes
        same(again.sample(loaded, KEY), buffer.sample(state, KEY))
        same(jrb.items(again, loaded), jrb.items(buffer, state))
        buffer, state = again, more(again, loaded, number, 3)


def test_a_save_writes_compressed_rows_and_only_new_ones(tmp_path):
    buffer, state = filled(20_000)
    jrb.save(tmp_path, buffer, state)
    first = size_on_disk(tmp_path / "arrays")
    assert first < 1.3 * state.storage.host_bytes < 0.3 * 20_000 * 1000
    state = more(buffer, state, 2, 200)
    jrb.save(tmp_path, buffer, state, keep=1)  # so that what is written adds to what is there
    # 1024 rows are written at a time, and 64 kB of rewards.
    assert 0 < size_on_disk(tmp_path / "arrays") - first < 2 * 1024 / 20_000 * first + 150_000
    same(buffer.sample(jrb.load(tmp_path)[1], KEY), buffer.sample(state, KEY))


@pytest.mark.slow
def test_rows_that_take_more_room_than_before_are_saved_again(tmp_path):
    buffer = compressed(3000)
    state = buffer.extend(
        buffer.init({"x": np.zeros(300, np.uint8)}), {"x": np.ones((9, 300), np.uint8)}
    )
    for number, rows in enumerate(
        [noise(0, 40, 300), noise(1, 3000, 300), np.ones((3000, 300), np.uint8)]
    ):
        jrb.save(tmp_path, buffer, state)
        same(jrb.items(*jrb.load(tmp_path)), jrb.items(buffer, state))
        state = buffer.extend(state, {"x": rows})
        assert number < 3
    jrb.save(tmp_path, buffer, state)
    same(jrb.items(*jrb.load(tmp_path)), jrb.items(buffer, state))


def test_a_save_in_the_background_has_the_rows_of_its_state(tmp_path):
    buffer, state = filled(100)
    expected = jrb.items(buffer, state)
    save = jrb.checkpoint.save_async(tmp_path, buffer, state)
    more(buffer, state, 5, 60)
    save.wait()
    same(jrb.items(*jrb.load(tmp_path)), expected)


@pytest.mark.slow
def test_another_level_or_storage_may_load_it(tmp_path):
    buffer, state = filled(20)
    jrb.save(tmp_path / "a", buffer, state)
    other, loaded = jrb.load(tmp_path / "a", compressed(20, 5, sampler=jrb.Prioritized()))
    assert other.storage.level == 5
    same(other.sample(loaded, KEY), buffer.sample(state, KEY))
    parts = {"batch_size": 8, "sampler": jrb.Prioritized()}
    for storage in (jrb.DeviceStorage(), jrb.MemmapStorage(), jrb.CompressedStorage(min_bytes=1)):
        new, moved = jrb.load(tmp_path / "a", jrb.ReplayBuffer(20, storage=storage, **parts))
        assert new.storage == storage
        same(jrb.items(new, moved), jrb.items(buffer, state))
        jrb.save(tmp_path / type(storage).__name__, new, moved)
        _, back = jrb.load(tmp_path / type(storage).__name__, buffer)
        same(jrb.items(buffer, back), jrb.items(buffer, state))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["native", "h5"])
def test_larger_buffers_encoded_ones_and_hdf5_can_be_loaded(layout, tmp_path):
    buffer, state = filled(20)
    path = tmp_path / "a"
    if layout == "h5":
        jrb.save(path, buffer, state, layout="h5")
        same(jrb.items(*jrb.load(path)), jrb.items(buffer, state))
        return
    half = lambda items: {**items, "x": items["x"][:, ::50]}
    twice = lambda items: {**items, "x": np.repeat(items["x"], 50, axis=1)}
    jrb.save(path, buffer, state, encode=half)
    same(jrb.items(*jrb.load(path, decode=twice)), jrb.items(buffer, state))
    jrb.save(path, buffer, state)
    larger, loaded = jrb.load(path, capacity=30)
    assert larger.capacity == 30
    same(jrb.items(larger, loaded), jrb.items(buffer, state))


def test_damage_is_an_error_that_names_the_leaf_and_its_slots(tmp_path):
    buffer, state = filled(5000)
    jrb.save(tmp_path, buffer, state)
    (file,) = (tmp_path / "arrays").glob("*items.x*")
    data = bytearray(file.read_bytes())
    at = len(data) // 2 // 8192 * 8192
    page = bytes(data[at : at + 8192])
    data[at + 100] ^= 1
    file.write_bytes(data)
    with pytest.raises(jrb.checkpoint.DamagedError, match=r"leaf 'x', block .*slots") as raised:
        jrb.load(tmp_path)
    # Blocks are written in any order: the slots that are named are those of this page.
    first, last = map(int, re.search(r"slots (\d+) to (\d+)\.", str(raised.value)).groups())
    frames = state.storage.rows.columns[1][first : last + 1].tolist()
    assert last - first < 1024
    lengths = np.array([len(frame) for frame in frames], "<u4").tobytes()
    assert page.rstrip(b"\0") in lengths + b"".join(frames)
    assert any("leaf 'x'" in line for line in jrb.checkpoint.verify(tmp_path))


@pytest.mark.parametrize("wrong", ["longer", "shorter", "no frame", "bytes"])
def test_frames_that_are_no_rows_of_their_leaf_are_refused(wrong, tmp_path):
    """Such a file was made by another program: its checksums are right."""
    blosc2 = pytest.importorskip("blosc2")
    buffer, state = filled(20)
    frame = {
        "longer": blosc2.compress2(noise(0, 1001), typesize=1),
        "shorter": blosc2.compress2(noise(0, 999), typesize=1),
        "no frame": b"x" * 40,
        "bytes": b"x",
    }[wrong]
    state.storage.rows.columns[1][3] = frame
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(
        jrb.checkpoint.DamagedError, match="leaf 'x': slot 3: expected a row of 1000 bytes"
    ):
        jrb.load(tmp_path)


def test_without_blosc2_the_error_names_the_extra(tmp_path, monkeypatch):
    buffer, state = filled(20)
    jrb.save(tmp_path, buffer, state)
    monkeypatch.setitem(sys.modules, "blosc2", None)
    for call in (lambda: buffer.init({"x": 0}), lambda: jrb.load(tmp_path)):
        with pytest.raises(
            ModuleNotFoundError, match=r"extra 'compressed': pip install 'jrb\[comp"
        ):
            call()
    assert jrb.checkpoint.metadata(tmp_path)["size"] == 20
