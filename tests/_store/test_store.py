"""Stores: their guarantees, costs and errors."""

import json
import os
import shutil
import threading
import zlib

import numpy as np
import pytest

from jrb._store import block_store, blocks, commits, files, threads
from jrb._store.block_store import BlockStore
from jrb._store.commits import SmallArray
from jrb._store.files import DamagedError, Folder, LockedError, StaleError
from jrb._store.threads import Gate
from tests._store import faults
from tests._store.faults import Ring, committed, prepared


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Makes blocks of 8 rows of x."""
    monkeypatch.setattr(blocks, "BLOCK", 2500)
    monkeypatch.setattr(block_store, "_MOST_OPEN", 1)


@pytest.fixture
def announced():
    """Records the operations on files in their order."""
    found = []
    files.hook = lambda *event: found.append(event)
    yield found
    files.hook = None


def saved(path, count=20, keep=0):
    """Makes a store with a generation, or writes another one."""
    if not os.path.exists(path):
        prepared(path, count).store.close()
        return
    with BlockStore.open_to_save(path) as store:
        ring = Ring(store)
        ring.write(count)
        ring.commit(keep)


# Files of generations.


def change_generation(path, change, number=1):
    """Changes the JSON of a generation, and makes its checksums right."""
    name = os.path.join(path, commits.generation_name(number))
    with open(name, "rb") as file:
        first, text, data = file.read().split(b"\n", 2)
    body = json.loads(text)
    change(body)
    text = json.dumps(body).encode() + b"\n"
    first = json.loads(first) | {"size": len(text), "sum": zlib.crc32(text)}
    with open(name, "wb") as file:
        file.write(json.dumps(first, separators=(",", ":")).encode() + b"\n" + text + data)


FILES = [
    "/etc/passwd",
    "../x-1-1.bin",
    "arrays/../../x-1-1.bin",
    "arrays/a/x-1-1.bin",
    "arrays/.x-1-1.bin",
    "arrays/x-1-1.bin\n",
    "arrays/\0-1-1.bin",
    "lock",
    "",
]


@pytest.mark.parametrize(
    "change",
    [
        *({"file": name} for name in FILES),
        {"rows": 10**15},
        {"rows": -1},
        {"rows": 2.5},
        {"rows": None},
        {"width": -1},
        {"block": 0},
        {"block": 3},
        {"sum": 1},
    ],
)
def test_no_name_leads_out_of_the_folder_and_numbers_are_checked(change, path):
    saved(path)
    change_generation(path, lambda body: body["large"]["x"].update(change))
    with pytest.raises(DamagedError, match="generation-000000000001"):
        BlockStore.open_to_read(path)
    saved(path, 5)  # nothing of it is used
    assert committed(path) == 5


@pytest.mark.parametrize("change", [{"size": -1}, {"size": 10**15}, {"size": "1"}, {"sum": 1}])
def test_small_arrays_are_as_large_as_is_said(change, path):
    saved(path)
    change_generation(path, lambda body: body["small"]["large"].update(change))
    with pytest.raises(DamagedError, match="generation-000000000001"):
        BlockStore.open_to_read(path)


def test_a_renamed_generation_is_refused(path):
    saved(path)
    shutil.copy(
        os.path.join(path, commits.generation_name(1)),
        os.path.join(path, commits.generation_name(9)),
    )
    with pytest.raises(DamagedError, match=r"generation 9, got .*renamed"):
        BlockStore.open_to_read(path)
    saved(path, 5)  # the number of the next one is above all
    assert commits.list_generations(Folder(path)) == [10]
    assert committed(path) == 5


@pytest.mark.parametrize("version", [0, -1, 4, None, "4", [4], {}])
def test_a_version_that_never_was_is_refused(version, path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(commits, "VERSION", version)
        saved(path)
    with pytest.raises(ValueError, match=f"{commits.generation_name(1)}: expected"):
        BlockStore.open_to_read(path)


@pytest.mark.parametrize(("more", "cure"), [(1, "install it"), (-1, "load it with that one")])
def test_another_version_is_refused_and_stays(more, cure, path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(commits, "VERSION", commits.VERSION + more)
        saved(path)
    for act in (BlockStore.open_to_read, BlockStore.open_to_save, block_store.find_damages):
        with pytest.raises(commits.VersionError, match=f"Another version of jrb .* {cure}"):
            act(path)
    with monkeypatch.context() as patch:
        patch.setattr(commits, "VERSION", commits.VERSION + more)
        assert committed(path) == 20


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"{", b"[]\n", b"1\n", b"[" * 10**5, b'{"format":"jrb","version":6}\n']
)
def test_what_is_no_generation_is_refused(text, path):
    saved(path)
    name = os.path.join(path, commits.generation_name(2))
    with open(name, "wb") as file:
        file.write(text)
    with pytest.raises(DamagedError, match=commits.generation_name(2)) as caught:
        BlockStore.open_to_read(path)
    assert "older" in caught.value.__notes__[0]
    assert committed(path, 1) == 20
    assert block_store.find_damages(path) == [str(caught.value)]


@pytest.mark.parametrize("name", ["arrays", "array", commits.generation_name(1)])
def test_links_are_not_followed(name, path, folder):
    saved(path)
    if name == "array":
        name = os.path.join("arrays", os.listdir(os.path.join(path, "arrays"))[0])
    os.rename(os.path.join(path, name), folder / "elsewhere")
    os.symlink(folder / "elsewhere", os.path.join(path, name))
    with pytest.raises(DamagedError, match="link"), BlockStore.open_to_read(path) as store:
        faults.content(store)


def test_names_that_only_look_like_generations_count_for_nothing(path):
    saved(path)
    for name in ("generation-9", "generation-\u0661", "generation-x"):
        with open(os.path.join(path, name), "w") as file:
            file.write("{")
    assert commits.list_generations(Folder(path)) == [1]
    assert committed(path) == 20


def test_small_arrays_and_metadata_are_as_they_were(path):
    meta = {"a": [1, 2.5, None, True, "\ud800", {"ä": []}], "": float("inf")}
    small = {
        "bytes": SmallArray(["uint8", [3]], b"abc"),
        "none": SmallArray(None, b""),
        "array": SmallArray({}, np.arange(6, dtype=np.float32).reshape(2, 3)),
    }
    with BlockStore.create(path) as store:
        assert store.commit(meta, small) == 1
    with BlockStore.open_to_read(path) as store:
        assert (store.generation, store.meta) == (1, meta)
        assert {name: one.kind for name, one in store.small.items()} == {
            name: one.kind for name, one in small.items()
        }
        assert bytes(store.small["bytes"].data) == b"abc"
        np.testing.assert_array_equal(
            np.frombuffer(store.small["array"].data, np.float32), np.arange(6)
        )


# Folders.


def test_a_folder_of_somebody_else_is_left_alone(folder):
    (folder / "thesis.tex").write_text("...")
    for act in (BlockStore.create, BlockStore.open_to_save):
        with pytest.raises(ValueError, match=r"thesis\.tex"):
            act(str(folder))
        assert os.listdir(folder) == ["thesis.tex"]
    path = folder / "mine"
    saved(str(path))
    (path / "manifest.json").write_text("{}")
    saved(str(path))  # other files may be beside a checkpoint
    assert (path / "manifest.json").read_text() == "{}"
    (folder / "file").write_text("...")
    for act in (BlockStore.create, BlockStore.open_to_save):
        with pytest.raises(ValueError, match="found a file"):
            act(str(folder / "file"))


# With a lock, `x-1-1.bin` looks as that of a store that was killed before its first commit.
@pytest.mark.parametrize(
    ("name", "has_lock"), [("notes", 0), ("notes", 1), ("x.bin", 1), ("x-1-1.bin", 0)]
)
def test_a_folder_of_somebody_else_with_our_name_is_left_alone(name, has_lock, folder):
    (folder / "arrays").mkdir()
    (folder / "arrays" / name).write_text("...")
    if has_lock:
        (folder / "lock").write_text("")
    for act in (BlockStore.create, BlockStore.open_to_save):
        with pytest.raises(ValueError, match="arrays"):
            act(str(folder))
    assert (folder / "arrays" / name).read_text() == "..."


def test_files_of_others_beside_those_of_arrays_stay(path):
    saved(path)
    names = ["notes", "x.bin", "x-1.bin", ".x-1-1.bin", "x-1-1.bin.old", "x y-1-1.bin"]
    for name in names:
        with open(os.path.join(path, "arrays", name), "w") as file:
            file.write("...")
    os.makedirs(os.path.join(path, "arrays", "folder"))
    for _ in range(3):
        saved(path)
    assert {*os.listdir(os.path.join(path, "arrays"))} >= {*names, "folder"}


def test_a_store_with_something_saved_is_not_made_again(path):
    saved(path, 5)
    with pytest.raises(ValueError, match=r"jrb\.load"):
        BlockStore.create(path)
    ring = Ring(BlockStore.open_to_read(path))
    ring.write(3)
    with pytest.raises(ValueError, match="a state of this process"):
        BlockStore.create(path)
    assert block_store.store_at(path) is ring.store
    ring.store.close()
    assert block_store.store_at(path) is None


def test_a_store_that_was_never_committed_is_begun_anew(path):
    prepared(path, 0).store.close()
    with pytest.raises(FileNotFoundError, match="to which nothing was"):
        BlockStore.open_to_read(path)
    with pytest.raises(FileNotFoundError):
        block_store.find_damages(path)
    for make in (BlockStore.create, BlockStore.open_to_save):
        ring = Ring(make(path))
        ring.write(4)
        ring.store.close()
    saved(path, 9)
    assert committed(path) == 9
    assert len(os.listdir(os.path.join(path, "arrays"))) == len(faults.WIDTHS)


def test_what_is_not_there_is_an_error_that_says_so(path, folder):
    for act in (BlockStore.open_to_read, block_store.find_damages):
        with pytest.raises(FileNotFoundError, match="found no folder there"):
            act(path)
        with pytest.raises(FileNotFoundError, match="found none there"):
            act(str(folder))
    saved(path)
    with pytest.raises(FileNotFoundError, match=r"expected generation 5, found \[1\].*keep=n"):
        BlockStore.open_to_read(path, 5)
    os.symlink(folder / "gone", folder / "link")
    for act in (BlockStore.create, BlockStore.open_to_save):
        with pytest.raises(FileNotFoundError, match="broken link"):
            act(str(folder / "link" / "store"))


def test_a_writer_is_named_to_the_next_one(path):
    ring = prepared(path, 20)
    with pytest.raises(LockedError, match="this process holds the lock"):
        BlockStore.open_to_save(path)
    ring.store.close()
    BlockStore.open_to_save(path).close()


def test_a_copy_of_a_folder_is_another_store(path):
    ring = prepared(path, 20)
    os.rename(path, path + ".away")
    shutil.copytree(path + ".away", path)
    other = Ring(BlockStore.open_to_read(path))
    other.write(1)
    other.commit()
    with pytest.raises(OSError, match="renamed"):
        ring.write(1)
    assert ring.content() == 20
    assert committed(path) == 21
    assert committed(path + ".away") == 20


def test_a_store_is_outdated_when_another_one_has_saved(path):
    saved(path)
    late = Ring(BlockStore.open_to_read(path))
    saved(path, 3)
    for act in (lambda: late.write(1), late.commit, lambda: late.store.put({})):
        with pytest.raises(StaleError, match="generation 1, which was loaded, found"):
            act()
    assert late.content() == 20  # it reads what it has loaded
    assert committed(path) == 23


# Generations.


def test_what_a_reader_has_open_does_not_expire(path):
    saved(path)
    readers = [BlockStore.open_to_read(path)]
    for number in range(6):
        saved(path, 7 * number + 1)
        readers.append(BlockStore.open_to_read(path))
    assert commits.list_generations(Folder(path)) == list(range(1, 8))
    written = [faults.content(reader) for reader in readers]
    assert written == sorted(written)
    readers[2].close()
    del readers[4]  # a reader that is gone needs no `close`
    saved(path)
    assert commits.list_generations(Folder(path)) == [1, 2, 4, 6, 7, 8]
    for reader in readers:
        reader.close()
    saved(path)
    assert commits.list_generations(Folder(path)) == [9]


def test_what_an_expiry_could_not_finish_is_freed_by_the_next(path):
    ring = prepared(path, 60)
    for _ in range(8):
        ring.write(5)
        seen = []

        def fail(operation, name, *rest, seen=seen):
            seen.append(operation)
            if operation == "fsync" and "unlink" in seen:
                raise OSError(5, "Input/output error")

        files.hook = fail
        with pytest.raises(OSError, match="Input/output") as caught:
            ring.commit()
        files.hook = None
        assert "has happened, and lasts" in caught.value.__notes__[0]
        assert committed(path) == ring.written
    ring.commit()
    ring.write(60)
    ring.commit()
    assert os.path.getsize(ring.store.arrays["x"].path) <= 2 * 8 * 2400
    assert committed(path) == ring.written


def test_blocks_that_a_failed_sync_may_have_lost_are_written_again(path, announced):
    ring = prepared(path, 16)
    ring.write(5)
    failed = []

    def fail_once(operation, name, *rest):
        if operation == "fsync" and "/x-" in name and not failed:
            failed.append(name)
            raise OSError(5, "Input/output error")
        announced.append((operation, name, *rest))

    files.hook = fail_once
    with pytest.raises(OSError, match="Input/output") as caught:
        ring.commit()
    assert "has not happened" in caught.value.__notes__[0]
    announced.clear()
    ring.commit()
    again = [event for event in announced if event[0] == "pwrite" and "/x-" in event[1]]
    (position,) = {event[2] for event in again}
    assert position == ring.store.arrays["x"].positions[2] * 2400  # only the block of those rows
    assert announced.index(again[0]) < announced.index(("fsync", failed[0]))
    assert committed(path) == 21


@pytest.mark.parametrize("more", [37, 45, 60])
def test_a_commit_that_failed_to_sync_can_be_made_after_more_writes(more, path):
    ring = prepared(path, 75)
    ring.write(14)

    def fail(operation, name, *rest):
        if operation == "fsync" and "/x-" in name:
            raise OSError(5, "Input/output error")

    files.hook = fail
    try:
        with pytest.raises(OSError, match="Input/output"):
            ring.commit()
    finally:
        files.hook = None
    ring.write(more)
    ring.commit()
    assert committed(path) == 89 + more


def test_a_commit_does_not_make_damage_valid(path):
    ring = prepared(path, 60)
    with open(ring.store.arrays["x"].path, "r+b") as file:
        file.seek(int(ring.store.arrays["x"].positions[3]) * 2400 + 50)
        file.write(b"damage")
    ring.write(1)  # in another block
    ring.commit()
    (line,) = block_store.find_damages(path)
    assert "leaf 'x', block 3" in line
    with BlockStore.open_to_read(path) as store, pytest.raises(DamagedError, match="block 3"):
        store.read({"x": np.zeros((60, 300), np.uint8)})
    ring.put(np.arange(24, 32))  # the whole block
    ring.commit()
    assert committed(path) == ring.written


def test_a_save_from_memory_repairs_what_is_cut_short(path):
    saved(path, 60)
    name = BlockStore.open_to_read(path).arrays["x"].path
    os.truncate(name, 3000)
    with BlockStore.open_to_save(path) as store:
        stamps = faults.stamps_of(60)
        data = {name: faults.rows(stamps, width) for name, width in faults.WIDTHS.items()}
        store.put({name: faults.source_of(name, it) for name, it in data.items()})
        faults.commit(store, 60, stamps)
    assert committed(path) == 60
    assert not os.path.exists(name)


def test_a_closed_store_gives_its_lock_back(path):
    with BlockStore.open_to_save(path) as store:
        Ring(store).write(3)
    store.close()  # again
    BlockStore.open_to_save(path).close()
    with pytest.raises(ZeroDivisionError), BlockStore.open_to_save(path):
        _ = 1 / 0
    BlockStore.open_to_save(path).close()


# Writes wait for running draws.

AT_MOST = 60  # seconds until a wait that does not end fails the test


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE", 2 * AT_MOST)


class Watched:
    """A lock with an event that is set when a thread waits for it."""

    def __init__(self, lock):
        self.lock, self.is_waited_for = lock, threading.Event()
        self.release = lock.release

    def acquire(self, **options):
        self.is_waited_for.set()
        return self.lock.acquire(**options)


def waiting(one):
    """Starts and returns a thread that waits at the gate until the caller has left."""
    ((number, lock),) = one.inside.items()
    one.inside[number] = watched = Watched(lock)
    thread = threading.Thread(target=one.wait, daemon=True)
    thread.start()
    assert watched.is_waited_for.wait(AT_MOST)
    return thread


@pytest.mark.usefixtures("patient")
def test_a_write_waits_until_a_draw_of_another_thread_is_over():
    one = Gate()
    with one.enter():
        thread = waiting(one)
        assert thread.is_alive()
    thread.join(AT_MOST)
    assert not thread.is_alive()
    assert not one.inside


@pytest.mark.usefixtures("patient")
def test_a_draw_within_a_draw_holds_a_write_up_as_long_as_the_outer_one():
    one = Gate()
    with one.enter():
        thread = waiting(one)
        with one.enter():
            pass
        assert thread.is_alive()
    thread.join(AT_MOST)
    assert not thread.is_alive()


@pytest.mark.usefixtures("patient")
def test_nobody_waits_for_oneself():
    one = Gate()
    with one.enter():
        one.wait()
    assert not one.inside


def test_a_draw_that_never_ends_is_not_waited_for_twice(monkeypatch):
    one = Gate()
    monkeypatch.setattr(threads, "PATIENCE", 0.01)
    one.inside[-1] = threads.taken_lock()  # as if an interrupt ended a thread in the gate
    one.wait()
    assert not one.inside
    monkeypatch.setattr(threads, "PATIENCE", AT_MOST)
    assert one.wait()  # and the lock is gone


def test_a_late_draw_is_known_until_it_is_over(monkeypatch):
    one, late, again = Gate(), threads.taken_lock(), threads.taken_lock()
    monkeypatch.setattr(threads, "PATIENCE", 0.0)
    one.inside[-1] = late
    assert not one.wait()
    assert not one.wait()
    one.inside[-1] = again  # the thread's next draw
    late.release()
    assert not one.wait()
    again.release()
    assert one.wait()


def test_an_older_generation_whose_version_was_damaged_stops_no_save(path):
    saved(path)
    saved(path, keep=1)
    name = os.path.join(path, commits.generation_name(1))
    with open(name, "rb") as file:
        data = file.read()
    with open(name, "wb") as file:
        file.write(data.replace(b'"version":6', b'"version":7', 1))
    (line,) = block_store.find_damages(path)
    assert "version 7" in line and name in line
    saved(path, keep=1)
    assert block_store.find_damages(path) == []
