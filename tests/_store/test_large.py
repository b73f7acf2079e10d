"""The cost of stores with many slots or arrays depends on what is written, not on the capacity."""

import errno
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jrb
from jrb._store import block_store, files
from jrb._store.block_store import BlockStore, Source
from jrb._store.shared_rows import SharedRows
from tests import bare

HUGE = 10**9


def source(rows, width):
    return Source([], "leaf", rows, width, None)


def disk(path):
    """Returns the number of bytes used on the disk."""
    paths = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
    return sum(os.stat(one).st_blocks * 512 for one in paths)


def run(script, *arguments):
    """Runs a script without JAX, and returns what it prints."""
    start = f"import sys; sys.path.insert(0, {os.path.join(bare.ROOT, 'tests')!r})\n"
    command = [sys.executable, "-c", start + "import bare; bare.install()\n" + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


MANY_SLOTS = """
import resource
import numpy as np
from jrb._store import block_store
from jrb._store.block_store import BlockStore, Source
from jrb._store.shared_rows import SharedRows
path, order, huge = sys.argv[1], sys.argv[2], int(sys.argv[3])
memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
slots = np.arange(100) if order == "ring" else np.arange(100)[::-1] * 3 + 5
rows = np.arange(1, 101).view(np.uint8).reshape(-1, 8)
before = memory()
with BlockStore.create(path) as store:
    store.array("x", Source([], "leaf", huge, 8, None))
    shared = SharedRows(store, ["x"])
    version = shared.write_rows(0, slots, [rows])
    assert store.commit({}, {}) == 1
    assert (shared.read_rows(version, [slots])[0] == rows).all()
    version = shared.write_rows(version, slots[:5] + 1000, [rows[:5]])
    version = shared.write_rows(version, slots[:5] + huge // 2, [rows[:5]])
    assert shared.reach < huge // 2 + 10**6
with BlockStore.open_to_save(path) as store:
    shared = SharedRows(store, ["x"])
    assert shared.reach < 10**6
    assert (shared.read_rows(0, [slots])[0] == rows).all()
    assert not shared.read_rows(0, [np.array([huge - 1, 4321])])[0].any()
    version = shared.write_rows(0, slots[:5] + 1000, [rows[:5]])
    assert store.commit({}, {}, keep=1) == 2
    assert (shared.read_rows(version, [slots[:5] + 1000])[0] == rows[:5]).all()
assert block_store.find_damages(path) == []
print(memory() - before)
"""


@pytest.mark.parametrize("order", ["ring", "random"])
def test_many_slots_cost_what_is_written(path, order):
    kilobytes = int(run(MANY_SLOTS, path, order, str(HUGE)))
    assert kilobytes < 40_000
    assert disk(path) < 8 << 20


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
    assert disk(path) < 8 << 20


def test_more_than_the_disk_has_is_refused_before_anything_is_made(tmp_path):
    buffer = jrb.ReplayBuffer(
        2**30, batch_size=4, storage=jrb.MemmapStorage(tmp_path / "store", prealloc=True)
    )
    with pytest.raises(OSError, match=rf"expected room for {2 * 2**30 * 4_000_000} bytes"):
        buffer.init({"x": np.zeros(10**6, np.float32)})
    assert not (tmp_path / "store" / "arrays").exists()


def test_room_that_is_set_aside_is_there_at_once(path):
    buffer = jrb.ReplayBuffer(40_000, batch_size=4, storage=jrb.MemmapStorage(path, prealloc=True))
    state = buffer.init({"x": np.zeros(100, np.uint8)})
    assert disk(path) >= 2 * 40_000 * 100
    for _ in range(2):
        state = buffer.extend(state, {"x": np.ones((100, 100), np.uint8)})
        jrb.save(path, buffer, state)
        assert disk(path) >= 2 * 40_000 * 100


def test_room_is_not_set_aside_where_the_system_cannot(path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)  # as on macOS
    with BlockStore.create(path) as store:
        store.array("x", source(4000, 1000), reserve=32)
        rows = SharedRows(store, ["x"])
        version = rows.write_rows(0, np.arange(4), [np.ones((4, 1000), np.uint8)])
        assert rows.read_rows(version, [np.arange(4)])[0].sum() == 4000
        store.commit({}, {})


@pytest.mark.parametrize("operation", ["pwrite", "fsync", "create"])
def test_a_full_disk_is_an_error_and_no_more(path, operation, monkeypatch):
    one, other = np.full((4, 8), 1, np.uint8), np.full((8, 8), 2, np.uint8)

    def full(what, *rest):
        if what == operation:
            raise OSError(errno.ENOSPC, "No space left on device")

    with BlockStore.create(path) as store:
        store.array("x", source(60, 8))
        rows = SharedRows(store, ["x"])
        version = rows.write_rows(0, np.arange(4), [one])
        store.commit({}, {})
        monkeypatch.setattr(files, "hook", full)
        if operation == "pwrite":
            with pytest.raises(OSError, match="No space left"):
                rows.write_rows(version, np.arange(8), [other])
        else:
            rows.write_rows(version, np.arange(8), [other])
            with pytest.raises(OSError, match="No space left"):
                store.commit({}, {})
        monkeypatch.setattr(files, "hook", None)
        if operation == "pwrite":
            assert rows.version == version
            np.testing.assert_array_equal(rows.read_rows(version, [np.arange(4)])[0], one)
            rows.write_rows(version, np.arange(8), [other])
        assert store.commit({}, {}) == 2
    with BlockStore.open_to_read(path) as store:
        np.testing.assert_array_equal(store.arrays["x"].read_rows(np.arange(8)), other)
    assert block_store.find_damages(path) == []


MANY_ARRAYS = """
import os, resource
import numpy as np
from jrb._store import block_store, blocks
from jrb._store.block_store import BlockStore, Source
from jrb._store.shared_rows import SharedRows
path, count = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
blocks.BLOCK = 6
names = [f"group/{number}" for number in range(count)]
rows = [np.full((4, 3), number % 251, np.uint8) for number in range(count)]
def opened(store):
    for name in names:
        store.array(name, Source([], name, 10, 3, None))
    store.keep_open()
    return SharedRows(store, names)
with BlockStore.create(path) as store:
    shared = opened(store)
    assert shared.write_rows(0, np.arange(4), rows) == 4
    assert store.commit({}, {}) == 1
    assert all(map(np.array_equal, shared.read_rows(4, [np.arange(4)] * count), rows))
with BlockStore.open_to_save(path) as store:
    shared = opened(store)
    assert all(map(np.array_equal, shared.read_rows(0, [np.arange(4)] * count), rows))
    assert shared.write_rows(0, np.arange(4), rows) == 4
    assert shared.write_rows(4, np.arange(3, 7), rows) == 8
    assert store.commit({}, {}, keep=1) == 2
    print(len(os.listdir("/proc/self/fd")))
readers = [BlockStore.open_to_read(path, 1 + number % 2) for number in range(10)]
for reader in readers:
    for name in names:
        reader.arrays[name].read_rows(np.arange(10))
print(len(os.listdir("/proc/self/fd")))
assert block_store.find_damages(path) == []
zeros = lambda start, stop: np.zeros((stop - start, 3), np.uint8)
memory = {name: Source([], name, 10, 3, zeros) for name in names}
with BlockStore.open_to_save(path) as store:
    store.put(memory)
    store.commit({}, {})
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files are not listed")
def test_many_arrays_need_few_open_files(path):
    writer, readers = map(int, run(MANY_ARRAYS, path, "300").split())
    assert writer < 50
    assert readers < 80


def test_a_copy_of_a_buffer_of_many_slots(tmp_path):
    """Loading a copy restores its rows; a second save to its path removes rows of the first."""
    buffer = jrb.ReplayBuffer(10**8, batch_size=4, storage=jrb.MemmapStorage())
    for count in (100, 30):
        state = buffer.extend(buffer.init({"x": np.uint8(0)}), {"x": np.full(count, 7, np.uint8)})
        jrb.save(tmp_path / "copy", buffer, state)
        loaded, again = jrb.load(tmp_path / "copy")
        assert int(loaded.size(again)) == count
        slots = np.arange(200)
        (found,) = again.storage.rows.read(again.storage.version, [slots])
        assert (found == np.where(slots < count, 7, 0)).all()
    assert disk(tmp_path / "copy") < 8 << 20
