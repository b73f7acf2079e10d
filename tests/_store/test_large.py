"""The cost of stores with many slots or leaves depends on what is written, not on the capacity."""

import errno
import os
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest

import jrb
from jrb._store import files, opening, places, store, table
from jrb._store.table import Column
from jrb.checkpoint import manifest

HUGE = 10**9


def column(name="x", width=8):
    return Column.of(name, ("uint8", f"[{width}]"), width)


def numbered(stamps):
    return [np.asarray(stamps, np.int64).view(np.uint8).reshape(-1, 8)]


def disk(path):
    """Returns the number of bytes used on the disk."""
    paths = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
    return sum(os.stat(one).st_blocks * 512 for one in paths)


@pytest.fixture
def path(tmp_path):
    yield str(tmp_path / "store")
    store.writing.clear()


@pytest.mark.parametrize("slots", [np.arange(100), np.arange(100)[::-1] * 3 + 5])
def test_many_slots_cost_what_is_written(path, slots):
    tracemalloc.start()
    try:
        one = opening.create(path, (column(),), HUGE, HUGE * 5 // 4, reserve=False)
        version = one.put(0, slots, numbered(slots))
        assert one.commit(version, {}, {}, {}) == 1
        one.close()
        there = opening.store_of(manifest.open_generation(path))
        assert there.slots == HUGE and there.is_blank(np.array([HUGE - 1]))
        np.testing.assert_array_equal(there.take(version, [slots])[0], numbered(slots)[0])
        assert not there.take(version, [np.array([HUGE - 1, 4321])])[0].any()
        version = there.put(version, slots[:5] + 1000, numbered(slots[:5]))
        assert there.commit(version, {}, {}, {}) == 2
        assert opening.damages(path) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert disk(path) < 32 << 20


def test_to_open_a_ring_no_slot_is_looked_up(path, monkeypatch):
    one = opening.create(path, (column(),), 100, 125, reserve=False)
    for version in range(0, 300, 10):  # row numbers are written ahead, for later rows
        one.put(version, np.arange(version, version + 10) % 100, numbered(range(10)))
        one.commit(version + 10, {}, {}, {})
    one.close()
    monkeypatch.delattr(places.Places, "used")
    there = opening.store_of(manifest.open_generation(path))
    assert there.version == 300 and not len(there.lost)


def test_a_buffer_of_many_slots(path):
    buffer = jrb.ReplayBuffer(HUGE, batch_size=4, storage=jrb.MemmapStorage(path))
    state = buffer.init({"x": np.uint8(0)})
    state = buffer.extend(state, {"x": np.arange(100, dtype=np.uint8)})
    jrb.save(path, buffer, state)
    del state
    loaded, state = jrb.load(path)
    assert int(loaded.size(state)) == 100
    found = loaded.sample(state, jax.random.key(0), 50).data["x"]
    assert len(set(found.tolist())) > 20 and found.max() < 100
    assert disk(path) < 32 << 20


@pytest.mark.parametrize("order", ["ring", "random"])
@pytest.mark.parametrize("first", [1, 7, 64])
def test_a_table_that_grows_is_as_one_that_was_large(path, order, first, monkeypatch):
    monkeypatch.setattr(table, "_FIRST", first * 16)
    rng = np.random.default_rng(first)
    one = opening.create(path, (column(),), 60, 75, reserve=False)
    assert one.table.room == first
    truth, written = np.zeros(60, np.int64), 0
    for step in range(40):
        count = int(rng.integers(1, 12))
        stamps = np.arange(written + 1, written + count + 1)
        slots = stamps % 60 if order == "ring" else rng.permutation(60)[:count]
        one.put(one.version, slots, numbered(stamps), expiring=order == "ring")
        truth[slots], written = stamps, written + count
        found = one.take(one.version, [np.arange(60)])[0].view(np.int64)[:, 0]
        np.testing.assert_array_equal(found, truth)
        if step % 7 == 0:
            one.commit(one.version, {}, {}, {})
        if step % 14 == 0:
            one.close()
            one = opening.store_of(manifest.open_generation(path))
    assert one.table.room == 75 or order == "random"


@pytest.mark.parametrize("operation", ["resize", "fsync"])
def test_a_full_disk_while_a_table_grows_is_an_error_and_no_more(path, operation, monkeypatch):
    monkeypatch.setattr(table, "_FIRST", 5 * 16)
    one = opening.create(path, (column(),), 60, 75, reserve=False)
    version = one.put(0, np.arange(4), numbered(np.arange(4)))

    def full(what, *rest):
        if what == operation:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "hook", full)
    with pytest.raises(OSError, match="No space left"):
        one.put(version, np.arange(4, 12), numbered(np.arange(4, 12)))
    monkeypatch.setattr(files, "hook", None)
    assert one.version == version
    np.testing.assert_array_equal(one.take(version, [np.arange(4)])[0], numbered(np.arange(4))[0])
    version = one.put(version, np.arange(4, 12), numbered(np.arange(4, 12)))
    assert one.commit(version, {}, {}, {}) == 1


def test_more_than_the_disk_has_is_refused_before_anything_is_made(tmp_path):
    buffer = jrb.ReplayBuffer(
        2**30, batch_size=4, storage=jrb.MemmapStorage(tmp_path / "store", prealloc=True)
    )
    wanted = (2**30 + 2**28) * (4_000_000 + 8)
    with pytest.raises(OSError, match=rf"expected room for {wanted} bytes"):
        buffer.init({"x": np.zeros(10**6, np.float32)})
    assert not (tmp_path / "store" / "rows").exists()


def test_room_that_is_set_aside_is_there_at_once(path):
    one = opening.create(path, (column(width=1000),), 40_000, 50_000, reserve=True)
    assert disk(path) >= 50_000 * 1008
    assert one.table.room < 50_000  # the table still grows with the rows


def test_room_is_not_set_aside_where_the_system_cannot(path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)  # as on macOS
    one = opening.create(path, (column(width=1000),), 4000, 5000, reserve=True)
    version = one.put(one.version, np.arange(4), [np.ones((4, 1000), np.uint8)])
    assert one.take(version, [np.arange(4)])[0].sum() == 4000


MANY = """
import os, resource, sys
import numpy as np
from jrb.checkpoint import manifest
from jrb._store import opening
from jrb._store.table import Column
path, leaves = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
columns = tuple(Column.of(f"group/{n}", ("uint8", "[3]"), 3) for n in range(leaves))
rows = [np.full((4, 3), n % 251, np.uint8) for n in range(leaves)]
store = opening.create(path, columns, 10, 12, reserve=False)
store.put(0, np.arange(4), rows)
assert store.commit(4, {}, {}, {}) == 1
store.close()
store = opening.store_of(manifest.open_generation(path))
assert all(map(np.array_equal, store.take(4, [np.arange(4)] * leaves), rows))
assert store.put(4, np.arange(4), rows) == 8 and store.commit(8, {}, {}, {}) == 2
assert opening.damages(path) == []
print(len(os.listdir("/proc/self/fd")))
"""


def test_many_leaves_need_few_open_files(path):
    command = [sys.executable, "-c", MANY, path, "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50


def test_a_file_that_was_put_in_the_place_of_another_is_not_written_to(path, monkeypatch):
    monkeypatch.setattr(table, "_MOST_OPEN", 1)
    one = opening.create(path, (column(),), 60, 75, reserve=False)
    name = os.path.join(path, "rows", "x.bin")
    os.rename(name, f"{name}.old")
    with open(name, "wb") as file:
        file.write(b"mine" * 1000)
    with pytest.raises(OSError, match="found another"):
        one.put(0, np.arange(4), numbered(np.arange(4)))
    with open(name, "rb") as file:
        assert file.read() == b"mine" * 1000


def test_a_copy_of_a_buffer_of_many_slots(tmp_path):
    """Loading a copy restores its rows; a second save to its path removes rows of the first."""
    buffer = jrb.ReplayBuffer(10**8, batch_size=4, storage=jrb.MemmapStorage())
    for count in (100, 30):
        state = buffer.extend(buffer.init({"x": np.uint8(0)}), {"x": np.full(count, 7, np.uint8)})
        jrb.save(tmp_path / "copy", buffer, state)
        loaded, again = jrb.load(tmp_path / "copy")
        assert int(loaded.size(again)) == count
        slots = np.arange(200)
        found = again.storage.rows.read_leaf(again.storage.version, 0, slots)
        assert (found[:, 0] == np.where(slots < count, 7, 0)).all()
    assert disk(tmp_path / "copy") < 32 << 20
