"""Arrays in blocks agree with plain arrays, and cost what changes."""

import errno
import gc
import itertools
import json
import os
import shutil
import weakref
import zlib

import numpy as np
import pytest

from jrb._store import block_store, blocks, commits, files
from jrb._store.block_store import BlockStore, Source
from jrb._store.blocks import checksum_of, find_runs, is_zero, rows_per_block
from jrb._store.commits import SmallArray
from jrb._store.files import DamagedError

# Names, and widths of rows: no bytes, fewer bytes than a block, one row a block.
WIDTHS = {"x": 3, "next/y": 40, "bytes": 1, "none": 0, "wide": 100}


@pytest.fixture
def small_blocks(monkeypatch):
    """Makes blocks of at most 96 bytes."""
    monkeypatch.setattr(blocks, "BLOCK", 96)
    monkeypatch.setattr(block_store, "RUN", 3)
    monkeypatch.setattr(blocks, "RUN", 3)
    monkeypatch.setattr(block_store, "_MOST_OPEN", 2)


def test_checksums_are_the_same_with_and_without_isal(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, (5000, 40), np.uint8)
    source = Source("bytes", "leaf 'x'", *rows.shape, lambda start, stop: rows[start:stop])
    for path in (tmp_path / "a", tmp_path / "b"):
        with BlockStore.open_to_save(str(path)) as store:
            store.put({"x": source}, False)()
            store.commit({}, {}, 0)
        monkeypatch.setattr(blocks, "crc32", zlib.crc32)
    one, other = (
        (path / "generation-000000000001").read_bytes() for path in (tmp_path / "a", tmp_path / "b")
    )
    assert one == other


@pytest.fixture
def written(monkeypatch):
    """Records the operations on files in their order."""
    events = []
    monkeypatch.setattr(files, "hook", lambda *event: events.append(event))
    return events


def bytes_of(events, name=""):
    """Returns how many bytes were written to files whose names contain a text."""
    return sum(len(event[3]) for event in events if event[0] == "pwrite" and name in event[1])


def source(data, **fields):
    """Returns an array in memory, uint8 `[N, width]`, as one that can be saved."""
    return Source([], "leaf", *data.shape, lambda start, stop: data[start:stop], **fields)


def sources(model, **fields):
    return {name: source(data, **fields) for name, data in model.items()}


def zeros(slots, widths=None):
    return {name: np.zeros((slots, w), np.uint8) for name, w in (widths or WIDTHS).items()}


def noise(rng, rows, width):
    return rng.integers(0, 256, (rows, width)).astype(np.uint8)


def array_files(path):
    return sorted(os.listdir(os.path.join(path, "arrays")))


def assert_holds(store, model):
    """Asserts that a store has exactly the rows of a model, read in both ways."""
    assert set(store.arrays) == set(model)
    targets = {name: np.full_like(data, 7) for name, data in model.items()}
    store.read(targets)
    for name, data in model.items():
        np.testing.assert_array_equal(targets[name], data)
        slots = np.random.default_rng(1).permutation(len(data))
        np.testing.assert_array_equal(store.arrays[name].read_rows(slots), data[slots])


def copy_of(model):
    return {name: data.copy() for name, data in model.items()}


class Program:
    """Random operations on a store, and on plain arrays."""

    def __init__(self, path, slots, seed):
        self.path, self.slots, self.rng = path, slots, np.random.default_rng(seed)
        self.model = zeros(slots)
        self.saved, self.readers = {}, []
        self.store = BlockStore.create(path)
        for name, data in self.model.items():
            self.store.array(name, source(data))
        self.store.keep_open()

    def step(self):
        kinds = ["write"] * 6 + ["put", "copied", "commit", "commit", "reopen", "read", "expire"]
        getattr(self, str(self.rng.choice(kinds)))()

    def write(self):
        """Writes rows at slots in a run, in several, or at random."""
        name = str(self.rng.choice(list(self.model)))
        if name not in self.store.arrays:
            return
        count = int(self.rng.integers(0, self.slots + 1))
        slots = (self.rng.integers(self.slots) + np.arange(count)) % self.slots
        if self.rng.random() < 0.4:
            slots = self.rng.integers(0, self.slots, count)  # with repetitions: the last one wins
        rows = noise(self.rng, count, WIDTHS[name])
        if self.rng.random() < 0.2:
            rows[:] = 0
        self.store.arrays[name].write_rows(slots, rows)
        for slot, row in zip(slots, rows, strict=True):
            self.model[name][slot] = row

    def changed(self):
        model = copy_of(self.model)
        for name, data in model.items():
            if self.rng.random() < 0.7:
                at = self.rng.integers(0, self.slots, 1 + self.slots // 10)
                data[at] = noise(self.rng, len(at), WIDTHS[name])
            reach = self.rng.integers(0, 2 * self.slots)
            data[reach:] = 0
        return model

    def put(self, copy=False):
        """Saves other arrays from memory, while some stay as they are."""
        new = self.changed()
        kept = [name for name in new if self.rng.random() < 0.3]
        self.model |= {name: data for name, data in new.items() if name not in kept}
        part = {name: data for name, data in self.model.items() if name not in kept}
        write = self.store.put(sources(part), copy, kept)
        if copy:
            self.model = copy_of(self.model)
            for data in part.values():
                data[:] = 99  # as a program that goes on with its arrays
        write()

    def copied(self):
        self.put(copy=True)

    def commit(self):
        keep = int(self.rng.integers(0, 3))
        number = self.store.commit({"n": int(self.rng.integers(100))}, {}, keep)
        self.saved[number] = copy_of(self.model)
        self.check_kept(sorted(self.saved)[-1 - keep :])

    def check_kept(self, numbers):
        """Checks that all other generations have expired, except those that readers have open."""
        kept = {*numbers} | {reader.generation for reader in self.readers}
        self.saved = {number: data for number, data in self.saved.items() if number in kept}
        assert commits.list_generations(self.store.folder) == sorted(self.saved)

    def expire(self):
        newest = self.store.generation
        if newest:
            self.store.expire([newest])
            self.check_kept([newest])

    def reopen(self):
        """Ends the process, and begins with the last commit."""
        self.store.close()
        if not self.saved:
            shutil.rmtree(self.path)
            self.model = zeros(self.slots)
            self.store = BlockStore.create(self.path)
        else:
            self.model = copy_of(self.saved[max(self.saved)])
            self.store = BlockStore.open_to_save(self.path)
        for name, data in self.model.items():
            self.store.array(name, source(data))

    def read(self):
        """Opens a generation, or closes one."""
        if self.readers and self.rng.random() < 0.4:
            self.readers.pop(int(self.rng.integers(len(self.readers)))).close()
        elif self.saved:
            number = int(self.rng.choice(list(self.saved)))
            self.readers.append(BlockStore.open_to_read(self.path, number))

    def check(self):
        assert_holds(self.store, self.model)
        for reader in self.readers:
            assert_holds(reader, self.saved[reader.generation])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("slots", [1, 2, 37, 64])
@pytest.mark.parametrize("seed", range(4))
def test_a_store_agrees_with_plain_arrays(slots, seed, path):
    program = Program(path, slots, seed)
    for number in range(60):
        program.step()
        if number % 3 == 0:
            program.check()
    program.commit()
    program.check()
    assert block_store.find_damages(path) == []
    for reader in program.readers:
        reader.close()
    program.readers = []
    program.commit()
    program.store.expire([program.store.generation])
    program.store.close()
    assert commits.list_generations(program.store.folder) == [program.store.generation]
    assert len(array_files(path)) == len(WIDTHS)
    for array in program.store.arrays.values():  # all that is not needed was cut off
        most = 1 + int(array.positions.max(initial=-1))
        assert os.path.getsize(array.path) == most * array.spec.size


@pytest.mark.usefixtures("small_blocks")
def test_no_rows_are_no_blocks(path):
    with BlockStore.open_to_save(path) as store:
        store.put(sources(zeros(0)))
        assert all(array.spec.num_blocks == 0 for array in store.arrays.values())
        assert store.arrays["x"].read_rows(np.zeros(0, np.int64)).shape == (0, 3)
        store.arrays["x"].write_rows(np.zeros(0, np.int64), np.zeros((0, 3), np.uint8))
        store.commit({}, {})
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, zeros(0))


# Saves of arrays in memory.


def test_a_save_costs_what_changed(path, written):
    rng = np.random.default_rng(0)
    model = {"x": noise(rng, 20_000, 100), "y": noise(rng, 20_000, 4)}

    def save():
        del written[:]
        with BlockStore.open_to_save(path) as store:
            store.put(sources(model))
            store.commit({}, {})
        return bytes_of(written, "arrays")

    assert 20_000 * 104 <= save() < 20_000 * 104 + (2 << 18)
    assert save() == 0
    assert bytes_of(written) < 3000
    assert sum(event[0] == "fsync" for event in written) <= 4
    for first in (0, 7000, 19_900):  # 0.5 % of the rows
        for data in model.values():
            data[first : first + 100] += 1
        assert 100 * 104 <= save() <= 4 << 18
        assert len(array_files(path)) == 2
    assert sum(event[0] == "fsync" for event in written) <= 6
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, model)


@pytest.mark.usefixtures("small_blocks")
def test_rows_that_are_zeros_take_no_room(path, written):
    model = zeros(64)
    model["x"][40] = 1
    with BlockStore.open_to_save(path) as store:
        store.put(sources(model))
        store.commit({}, {})
        sizes = {name: os.path.getsize(it.path) for name, it in store.arrays.items()}
        assert sizes == {name: store.arrays["x"].spec.size * (name == "x") for name in model}
        model["x"][40] = 0
        store.put(sources(model))
        assert_holds(store, model)
        store.commit({}, {})
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, model)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("reach", [0, 1, 31, 32, 33, 64])
def test_rows_beyond_the_reach_are_not_read(reach, path):
    rng = np.random.default_rng(reach)
    data, asked = noise(rng, 64, 3), []
    with BlockStore.open_to_save(path) as store:
        store.put({"x": source(data)})
        store.commit({}, {})

        def read(start, stop):
            asked.append((start, stop))
            return data[start:stop]

        data[reach:] = 0
        store.put({"x": Source([], "leaf", 64, 3, read, reach)})
        assert all(stop <= -(-reach // 32) * 32 for _, stop in asked)
        assert bool(asked) == (reach > 0)
        assert_holds(store, {"x": data})
        store.commit({}, {})
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, {"x": data})
        assert np.count_nonzero(store.arrays["x"].positions >= 0) == -(-reach // 32)


class Device:
    """An array on a device: blocks have hashes there, and every read of rows is counted."""

    def __init__(self, data):
        self.data, self.asked = data, []

    def read(self, start, stop):
        self.asked.append((start, stop))
        return self.data[start:stop]

    def hashes(self, size):
        flat = np.resize(self.data.reshape(-1), -(-self.data.size // size) * size)
        flat[self.data.size :] = 0
        return np.array([checksum_of(part) for part in flat.reshape(-1, size)], np.uint64)

    def source(self, reach=None):
        return Source([], "leaf", *self.data.shape, self.read, reach, self.hashes)

    def blocks_asked(self):
        asked = sorted({block for a, b in self.asked for block in range(a // 32, -(-b // 32))})
        self.asked = []
        return asked


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("copy", [False, True])
def test_only_blocks_with_other_hashes_are_read(copy, path):
    rng = np.random.default_rng(0)
    device = Device(noise(rng, 32 * 9 + 5, 3))

    def save(reach=None, work=lambda store: store.commit({}, {})):
        with BlockStore.open_to_save(path) as store:
            store.put({"x": device.source(reach)}, copy)()
            work(store)
        return device.blocks_asked()

    assert save() == list(range(10))
    assert save() == []
    device.data[[40, 200, 292]] += 1
    assert save() == [1, 6, 9]
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, {"x": device.data})
    # A save that was not committed, or of which the file is gone, says nothing about the next one.
    device.data[70] += 1
    assert save(work=lambda store: None) == [2]
    assert save() == [2]
    for name in array_files(path):
        os.truncate(os.path.join(path, "arrays", name), 100)
    assert save() == list(range(10))
    before = device.data.copy()
    device.data[100:] = 0
    save(reach=100)
    device.data = before
    assert save() == list(range(3, 10))
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, {"x": device.data})
        assert [name for name in store.small if name.startswith(block_store.HASHES)] == [
            block_store.HASHES + "x"
        ]


@pytest.mark.usefixtures("small_blocks")
def test_two_puts_without_a_commit_between_them_read_what_has_changed(path):
    device = Device(noise(np.random.default_rng(0), 320, 3))
    old = device.data
    with BlockStore.open_to_save(path) as store:
        store.put({"x": device.source()})
        store.commit({}, {})
        device.data = old + np.uint8(1)
        store.put({"x": device.source()})  # its commit fails, say
        device.data = old
        store.put({"x": device.source()})
        assert_holds(store, {"x": old})
        store.put({})
        device.data = old + np.uint8(2)
        store.put({"x": device.source()})
        assert_holds(store, {"x": device.data})


class Owner:
    """An object that stands for rows that never change."""


def unread(start, stop):
    raise AssertionError("read")


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_the_same_owner_are_not_read(path):
    rng, owner = np.random.default_rng(0), Owner()
    data = noise(rng, 64, 3)

    def save(one):
        with BlockStore.open_to_save(path) as store:
            store.put({"x": one})
            store.commit({}, {})
        with BlockStore.open_to_read(path) as store:
            assert_holds(store, {"x": data})

    known = Source([], "leaf", 64, 3, unread, owner=owner)
    save(source(data, owner=owner))
    save(known)
    save(known)
    # Another process may have saved something else at this path.
    shutil.copytree(path, path + ".copy")
    data = noise(rng, 64, 3)
    save(source(data))
    shutil.rmtree(path)
    os.rename(path + ".copy", path)
    with pytest.raises(AssertionError, match="read"):
        save(known)
    other = Owner()
    save(source(data, owner=other))
    data = noise(rng, 64, 3)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    save(source(data))  # no owner is not the owner that is gone


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_the_same_owner_are_read_if_others_were_put_meanwhile(path):
    rng, owners = np.random.default_rng(0), [Owner(), Owner()]
    one, other = noise(rng, 64, 3), noise(rng, 64, 3)
    with BlockStore.open_to_save(path) as store:
        store.put({"x": source(one, owner=owners[0])})
        store.commit({}, {})
        store.put({"x": source(other, owner=owners[1])})  # its commit fails, say
        store.put({"x": source(one, owner=owners[0])})
        store.commit({}, {})
        assert_holds(store, {"x": one})
        store.put({})
        store.put({"x": source(one, owner=owners[0])})
        assert_holds(store, {"x": one})


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "changes", [{"rows": 65}, {"rows": 3}, {"width": 2}, {"width": 0}, {"kind": ["float32"]}]
)
def test_an_array_of_another_kind_is_a_new_one_of_zeros(changes, path):
    rng = np.random.default_rng(0)
    model = {"x": noise(rng, 64, 3), "y": noise(rng, 64, 3)}
    with BlockStore.open_to_save(path) as store:
        store.put(sources(model))
        store.commit({}, {})
        spec = {"kind": [], "rows": 64, "width": 3} | changes
        array = store.array("x", Source(spec["kind"], "leaf", spec["rows"], spec["width"], unread))
        assert store.array("x", array.spec) is array
        assert not array.read_rows(np.arange(spec["rows"])).any()
        reader = BlockStore.open_to_read(path)
        store.commit({}, {})
        assert_holds(reader, model)
        reader.close()
        store.commit({}, {})
        assert_holds(store, model | {"x": np.zeros((spec["rows"], spec["width"]), np.uint8)})
    assert len(array_files(path)) == 2


@pytest.mark.usefixtures("small_blocks")
def test_arrays_that_are_left_out_go_and_others_stay(path):
    rng = np.random.default_rng(0)
    model = {name: noise(rng, 64, 3) for name in "abc"}
    with BlockStore.open_to_save(path) as store:
        store.put(sources(model))
        store.commit({}, {})
        model["a"] = noise(rng, 64, 3)
        store.put(sources({"a": model["a"]}), kept=["b"])
        store.commit({}, {})
        del model["c"]
        assert_holds(store, model)
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, model)
    assert len(array_files(path)) == 2


# Names.

ODD = {
    "empty": "",
    "slash": "/",
    "slashes": "//a//../b/",
    "percent": "%",
    "percent slash": "%2F",
    "dots": "..",
    "dot": ".",
    "hidden": ".x",
    "up": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "long": "n" * 5000,
    "long too": "n" * 5000 + "m",
    "surrogate": "\ud800x",
    "nul": "\0",
    "lines": "a\nb\r",
    "umlaut": "ä" * 90,
    "space": "a b",
    "a/b": "a/b",
    "a.b": "a.b",
    "lock": "lock",
    "hashes": ".hashes/x",
    "generation": "generation-000000000001",
}


@pytest.mark.usefixtures("small_blocks")
def test_names_of_arrays_never_lead_out_of_their_folder(path, folder):
    rng = np.random.default_rng(0)
    model = {name: noise(rng, 5, 3) for name in ODD.values()}
    with BlockStore.open_to_save(path) as store:
        store.put(sources(model))
        store.commit({}, {name: SmallArray([], b"1") for name in ODD.values()})
        for name in model:
            model[name] = noise(rng, 5, 3)
        store.put(sources(model))
        store.commit({}, {name: SmallArray([], b"1") for name in ODD.values()})
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, model)
        assert set(store.small) == set(ODD.values())
        used = [array.spec.file for array in store.arrays.values()]
    assert block_store.find_damages(path) == []
    assert os.listdir(folder) == ["store"]
    assert sorted(os.listdir(path)) == ["arrays", "generation-000000000002", "lock"]
    assert sorted(used) == [f"arrays/{name}" for name in array_files(path)]
    assert all(map(commits.ARRAY_FILE.fullmatch, used))


@pytest.mark.parametrize("width", [1, 3, 96, 97, 5000])
def test_a_block_is_as_large_as_is_allowed(width, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 96)
    for rows in range(200):
        block = rows_per_block(rows, width)
        assert block & block - 1 == 0
        assert block == 1 or (block * width <= 96 and block < 2 * rows)
        assert 2 * block * width > 96 or block >= rows


# Blocks and positions.


@pytest.mark.usefixtures("small_blocks")
def test_positions_of_kept_generations_are_never_written(path, written):
    rng, data = np.random.default_rng(0), np.zeros((640, 3), np.uint8)
    with BlockStore.create(path) as store:
        array = store.array("x", source(data))
        for _ in range(40):
            del written[:]
            kept = {}
            for number in commits.list_generations(store.folder):
                with BlockStore.open_to_read(path, number) as reader:
                    kept |= dict.fromkeys(reader.arrays["x"].positions.tolist())
            for _ in range(int(rng.integers(1, 4))):
                slots = (rng.integers(640) + np.arange(rng.integers(1, 100))) % 640
                array.write_rows(slots, noise(rng, len(slots), 3))
            at = {event[2] // array.spec.size for event in written if event[0] == "pwrite"}
            assert at
            assert not at & kept.keys()
            store.commit({}, {}, keep=int(rng.integers(3)))


@pytest.mark.usefixtures("small_blocks")
def test_a_block_is_copied_once_between_two_commits(path, written):
    data = np.zeros((64, 3), np.uint8)
    with BlockStore.create(path) as store:
        array = store.array("x", source(data))
        array.write_rows(np.arange(64), data + 1)
        store.commit({}, {})
        del written[:]
        for slot in (3, 4, 9):
            array.write_rows(np.array([slot]), np.full((1, 3), 9, np.uint8))
        assert [len(event[3]) for event in written if event[0] == "pwrite"] == [96, 3, 3]


@pytest.mark.usefixtures("small_blocks")
def test_a_block_that_is_cleared_is_zeros_and_its_position_is_free(path):
    rng = np.random.default_rng(0)
    data = noise(rng, 64, 3)
    with BlockStore.create(path) as store:
        array = store.array("x", source(data))
        array.write_rows(np.arange(64), data)
        array.clear_block(1)  # of no generation yet: the position is free at once
        assert array.take_position() == 1
        array.free_position(1)
        array.write_rows(np.arange(32, 64), data[32:])
        store.commit({}, {})
        reader = BlockStore.open_to_read(path)
        array.clear_block(0)
        assert not array.read_rows(np.arange(32)).any()
        assert array.take_position() == 2  # a generation refers to the one that was cleared
        store.commit({}, {})
        assert_holds(reader, {"x": data})
        reader.close()
        data[:32] = 0
        assert_holds(store, {"x": data})
        store.commit({}, {})
        array.write_rows(np.arange(3), data[:3] + 7)
        assert array.positions.tolist() == [0, 1]
        assert not array.read_rows(np.arange(3, 32)).any()


@pytest.mark.usefixtures("small_blocks")
def test_a_file_shrinks_when_its_end_is_free(path):
    rng, data = np.random.default_rng(0), np.zeros((640, 3), np.uint8)
    with BlockStore.create(path) as store:
        array = store.array("x", source(data))
        for _ in range(7):
            data[:] = noise(rng, 640, 3)
            array.write_rows(np.arange(640), data)
            reader = BlockStore.open_to_read(path) if store.generation else None
            store.commit({}, {})
            assert os.path.getsize(array.path) <= 2 * 640 * 3
            if reader is not None:
                assert os.path.getsize(array.path) == 2 * 640 * 3
                reader.close()
            store.expire([store.generation])
            assert_holds(store, {"x": data})
        for block in range(10, 20):
            array.clear_block(block)
        data[320:] = 0
        store.commit({}, {})
        store.commit({}, {})
        assert os.path.getsize(array.path) <= 640 * 3
        assert_holds(store, {"x": data})
        if array.positions.max() >= 10:  # the lower half is free now
            array.write_rows(np.arange(320), data[:320])
            store.commit({}, {})
        assert os.path.getsize(array.path) == 320 * 3
        data[:] = noise(rng, 640, 3)
        array.write_rows(np.arange(640), data)  # beyond what is mapped
        assert_holds(store, {"x": data})


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="there is no room to reserve")
def test_room_that_is_set_aside_stays(path):
    """Room for two times all blocks, so that no write of a ring fails on a disk that is full."""
    size = 5000 * 1000
    with BlockStore.create(path) as store:
        spec = Source([], "leaf", 5000, 1000)
        array = store.array("x", spec, reserve=2 * -(-5000 // 256))
        used = lambda: os.stat(array.path).st_blocks * 512
        assert used() >= 2 * size
        for _ in range(3):
            for first in range(0, 5000, 500):
                array.write_rows(
                    first + np.arange(500), np.full((500, 1000), first // 500, np.uint8)
                )
            assert used() >= 2 * size
            store.commit({}, {})
            assert used() >= 2 * size
        assert (array.read_rows(np.arange(5000))[:, 0] == np.arange(5000) // 500).all()


def test_a_disk_that_is_too_full_for_the_room_is_an_error(path, monkeypatch):
    def full(operation, *rest):
        if operation == "resize":
            raise OSError(errno.ENOSPC, "No space left on device")

    with BlockStore.create(path) as store:
        monkeypatch.setattr(files, "hook", full)
        with pytest.raises(OSError, match="No space left"):
            store.array("x", Source([], "leaf", 5000, 1000), reserve=20)
        monkeypatch.setattr(files, "hook", None)
        assert store.arrays == {}
        store.array("x", Source([], "leaf", 5000, 1000), reserve=20)
        store.commit({}, {})
    assert len(array_files(path)) == 1


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("number", range(4))
def test_a_write_that_fails_at_its_beginning_has_changed_nothing(number, path, monkeypatch):
    rng = np.random.default_rng(0)
    data = noise(rng, 128, 3)
    with BlockStore.create(path) as store:
        array = store.array("x", source(data))
        array.write_rows(np.arange(128), data)
        store.commit({}, {})
        positions, used = array.positions.copy(), array._used.copy()
        events = []

        def fail(operation, *rest):
            events.append(operation)
            if len(events) == number + 1:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files, "hook", fail)
        with pytest.raises(OSError, match="No space left"):
            array.write_rows(np.arange(5, 120), noise(rng, 115, 3))
        monkeypatch.setattr(files, "hook", None)
        np.testing.assert_array_equal(array.positions, positions)
        assert array._used[: used.size].tolist() == used.tolist()
        assert not array._used[used.size :].any()
        assert_holds(store, {"x": data})


@pytest.mark.usefixtures("small_blocks")
def test_a_file_that_is_gone_or_cut_short_is_named(path):
    data = noise(np.random.default_rng(0), 128, 3)
    with BlockStore.open_to_save(path) as store:
        store.put({"x": source(data)})
        store.commit({}, {})
        name = store.arrays["x"].path
        last = np.array([32 * store.arrays["x"].positions.argmax()])  # the file ends with its block
    target = {"x": np.empty((128, 3), np.uint8)}
    os.truncate(name, 200)
    with BlockStore.open_to_read(path) as store:
        with pytest.raises(
            DamagedError, match=r"leaf, block \d: expected \d+ bytes, found 200"
        ) as caught:
            store.read(target)
        assert name in str(caught.value)
        with pytest.raises(DamagedError, match=r"leaf: expected 384 bytes, found 200"):
            store.arrays["x"].read_rows(last)
    assert all(name in line for line in block_store.find_damages(path))
    os.unlink(name)
    with BlockStore.open_to_read(path) as store:
        for read in (store.read, lambda _: store.arrays["x"].read_rows(last)):
            with pytest.raises(DamagedError, match="leaf: expected a file, found none") as caught:
                read(target)
            assert name in str(caught.value)
    with BlockStore.open_to_save(path) as store:  # the next save writes all of it
        store.put({"x": source(data)})
        store.commit({}, {})
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, {"x": data})


@pytest.mark.usefixtures("small_blocks")
def test_each_damage_is_told_once_with_its_leaf_block_and_file(path):
    rng = np.random.default_rng(0)
    data = noise(rng, 128, 3)
    with BlockStore.open_to_save(path) as store:
        store.put({"x": source(data), "y": source(data)})
        store.commit({}, {})
        old = store.arrays["x"].positions.item(0)
        data = data.copy()
        data[0] += 1
        store.put({"x": source(data), "y": source(data)})
        store.commit({}, {}, keep=1)
        x, y = store.arrays["x"], store.arrays["y"]
    shares = []
    assert block_store.find_damages(path, shares.append) == []
    assert shares == sorted(shares) and shares[-1] == 1
    for array, position in ((x, old), (x, x.positions[2]), (y, y.positions[3])):
        with open(array.path, "r+b") as file:
            file.seek(int(position) * 96 + 5)
            byte = file.read(1)[0]
            file.seek(int(position) * 96 + 5)
            file.write(bytes([byte ^ 4]))
    lines = block_store.find_damages(path)
    assert len(lines) == 3
    for line, (array, block) in zip(lines, ((x, 0), (x, 2), (y, 3)), strict=True):
        assert array.path in line
        assert f"leaf, block {block}: expected the checksum" in line
    with BlockStore.open_to_read(path) as store, pytest.raises(DamagedError, match="block 2"):
        store.read({"x": np.empty((128, 3), np.uint8)})


# Checksums.


def test_a_checksum_finds_every_changed_bit_and_byte():
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 9, 64, 333):
        data = rng.integers(0, 256, size).astype(np.uint8)
        sums = {checksum_of(data)}
        for at in range(size):
            for bit in range(8):
                data[at] ^= 1 << bit
                sums.add(checksum_of(data))
                data[at] ^= 1 << bit
        assert len(sums) == 8 * size + 1
        assert checksum_of(data) in sums
    shifted = np.append(np.uint8(1), data)[1:]  # whatever the alignment
    assert checksum_of(shifted) == checksum_of(data) < 1 << 64


def test_blocks_that_exchange_words_have_other_checksums():
    data = np.arange(256, dtype=np.uint8)
    swapped = np.concatenate([data[8:16], data[:8], data[16:]])
    assert checksum_of(data) != checksum_of(swapped)
    assert checksum_of(np.zeros(8, np.uint8)) != checksum_of(np.zeros(16, np.uint8))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 9000])
def test_zeros_are_recognised(size):
    data = np.zeros(size, np.uint8)
    assert is_zero(data)
    for at in {0, size // 2, 4095, 4096, size - 1} & {*range(size)}:
        data[at] = 1
        assert not is_zero(data)
        data[at] = 0


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_as_long_as_can_be(seed):
    rng = np.random.default_rng(seed)
    steps = rng.choice([1, 1, 1, 0, -1, 5], rng.integers(0, 30))
    slots = np.cumsum(steps)
    found = find_runs(slots)
    assert [slot for a, b in found for slot in slots[a:b]] == slots.tolist()
    for a, b in found:
        assert a < b
        assert slots[a:b].tolist() == list(range(slots[a], slots[a] + b - a))
    for (_, b), (a, _) in itertools.pairwise(found):
        assert a == b
        assert slots[a] != slots[b - 1] + 1


def test_memory_is_aligned_so_that_it_need_not_be_copied():
    for shape, dtype in (((3, 5), np.float32), ((1,), np.int64), ((7,), np.uint8)):
        made = blocks.allocate_aligned(shape, dtype)
        assert (made.shape, made.dtype) == (shape, dtype)
        assert made.__array_interface__["data"][0] % 64 == 0


# Tables of other processes.


@pytest.mark.usefixtures("small_blocks")
def test_a_save_of_several_processes_has_the_arrays_of_all(path):
    rng = np.random.default_rng(0)
    model = {f"shards/{number}/x": noise(rng, 64, 3) for number in range(3)}
    for _ in range(4):
        names = list(model)
        with BlockStore.open_to_save(path) as leader:
            tables = {}
            for name in names[1:]:
                with BlockStore.join(path) as member:
                    member.put(sources({name: model[name]}))
                    tables |= json.loads(json.dumps(member.tables()))
            leader.put(sources({names[0]: model[names[0]]}))
            leader.commit({}, {}, others=tables)
        with BlockStore.open_to_read(path) as store:
            assert_holds(store, model)
        assert block_store.find_damages(path) == []
        assert len(array_files(path)) == 3
        for name in names:
            model[name] = model[name].copy()
            model[name][rng.integers(0, 64, 3)] += 1


@pytest.mark.usefixtures("small_blocks")
def test_another_process_reads_only_blocks_with_other_hashes_and_shortens_its_files(path):
    rng = np.random.default_rng(0)
    device, own = Device(noise(rng, 32 * 9, 3)), noise(rng, 64, 3)

    def save():
        with BlockStore.open_to_save(path) as leader, BlockStore.join(path) as member:
            member.put({"other": device.source()})
            tables = json.loads(json.dumps(member.tables()))
            leader.put(sources({"own": own}))
            leader.commit({}, {}, others=tables)
            member.truncate_files()
            size = os.path.getsize(member.arrays["other"].path)
        return device.blocks_asked(), size

    assert save()[0] == list(range(9))
    assert save()[0] == []
    device.data[[40, 200]] += 1
    assert save()[0] == [1, 6]
    device.data[:] += 1
    assert save()[0] == list(range(9))
    device.data[:] += 1
    sizes = [save()[1] for _ in range(3)]
    assert max(sizes) <= 2 * 9 * 32 * 3
    with BlockStore.open_to_read(path) as store:
        assert_holds(store, {"own": own, "other": device.data})
