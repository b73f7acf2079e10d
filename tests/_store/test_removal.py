"""Temporary stores go when their process ends, however it ends; files of others stay."""

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jrb._store import block_store, commits, files
from jrb._store.block_store import BlockStore, Source
from jrb._store.files import LockedError
from jrb._store.shared_rows import SharedRows
from jrb.datasets import library
from tests import bare

MAKE = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import bare; bare.install()
import numpy as np
from jrb._store.block_store import BlockStore, Source
store = BlockStore.create(None)
store.array("x", Source([], "x", 100, 1000, None), reserve=1)
store.arrays["x"].write_rows(np.arange(100), np.ones((100, 1000), np.uint8))
if sys.argv[1] == "fork":
    ready, done = os.pipe()
    if os.fork() == 0:
        os.write(done, b".")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
print(store.path, flush=True)
if sys.argv[1] == "objects":
    folder = os.path.dirname(store.path)
    if os.fork() == 0:
        del store
        sys.exit()
    os.wait()
    assert os.listdir(folder) == [os.path.basename(store.path)]
    store.close()
    assert len(os.listdir(folder)) == 1
    del store
    assert os.listdir(folder) == []
    sys.exit()
if sys.argv[1] == "end":
    sys.exit()
sys.stdin.read() if sys.argv[1] == "live" else os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Makes an empty folder the one for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def started(how):
    """Returns a process with a temporary store, and the store's folder."""
    command = [sys.executable, "-c", MAKE, how, os.path.join(bare.ROOT, "tests")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path = process.stdout.readline().strip()
    process.stdout.close()
    return process, path


def stored(path=None):
    store = BlockStore.create(path)
    store.array("x", Source([], "x", 10, 10, None))
    return store


def test_the_store_of_a_process_that_ended_is_gone(temporary):
    process, _ = started("end")
    with process:
        process.wait()
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("how", ["kill", "fork"])
def test_the_store_of_a_killed_process_goes_when_the_next_one_is_made(how, temporary):
    process, path = started(how)
    with process:
        assert process.wait() == -signal.SIGKILL  # a surviving child does not hold the lock
        assert os.listdir(temporary) == [os.path.basename(path)]
        store = stored()
        assert os.listdir(temporary) == [os.path.basename(store.path)]


def test_what_is_in_use_or_belongs_to_others_stays(temporary):
    live, path = started("live")
    with live:
        store = stored()
        rows = SharedRows(store, ["x"])
        version = rows.write_rows(0, np.arange(3), [np.ones((3, 10), np.uint8)])
        (temporary / "jrb-temporary-mine").mkdir()
        (temporary / "jrb-temporary-mine" / "rows").write_text("thesis")
        (temporary / "jrb-temporary-empty").mkdir()
        (temporary / "jrb-temporary-file").write_text("thesis")
        (temporary / "jrb-temporary-link").symlink_to(path)
        with stored(str(temporary / "jrb-temporary-saved")) as promised:
            promised.commit({}, {})
        before = sorted(os.listdir(temporary))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda _: block_store._remove_stale(str(temporary)), range(8)))
        assert sorted(os.listdir(temporary)) == before
        assert rows.read_rows(version, [np.arange(3)])[0].all()
        assert BlockStore.open_to_read(promised.path).generation == 1


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_new_store_that_is_taken_for_a_stale_one_is_made_again(
    temporary, monkeypatch, is_removed
):
    """Between making its folder and locking it, another process may clean up."""
    import fcntl

    lock, others = fcntl.flock, []

    def flock(file, flags):
        if not others:
            (path,) = temporary.glob("jrb-temporary-*")
            others.append(os.open(path / files.LOCK, os.O_RDWR))
            lock(others[0], flags)
            if is_removed:
                commits.remove_files(str(path), commits.belongs_to_store)
                os.close(others[0])
        return lock(file, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    store = BlockStore.create(None)
    store.array("x", Source([], "x", 4, 8))
    assert store.commit({}, {}) == 1


def test_many_processes_may_clean_up_at_once(temporary):
    stale = [temporary / f"jrb-temporary-{number}" for number in range(12)]
    for path in stale:
        stored(str(path)).close()  # leaves the folder behind, as a killed process does
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: block_store._remove_stale(str(temporary)), range(16)))
    assert not [path for path in stale if path.exists()]


def test_what_somebody_put_into_a_temporary_store_stays(temporary):
    store = stored()
    path = store.path
    for name in ("notes.md", "arrays/notes.md", "arrays/data.bin"):
        with open(os.path.join(path, name), "w") as file:
            file.write("...")
    del store
    gc.collect()
    assert sorted(os.listdir(path)) == ["arrays", "notes.md"]
    assert sorted(os.listdir(os.path.join(path, "arrays"))) == ["data.bin", "notes.md"]


def test_a_temporary_store_goes_with_its_object_and_not_with_a_fork(temporary):
    process, _ = started("objects")
    with process:
        process.stdin.close()
        assert process.wait() == 0
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("number", range(1, 6))
def test_a_temporary_store_that_could_not_be_made_is_gone(number, temporary, monkeypatch):
    events = []

    def fail(*event):
        events.append(event)
        if len(events) == number:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "hook", fail)
    try:
        store = stored()
        assert len(events) < number
    except OSError:
        store = None
    monkeypatch.setattr(files, "hook", None)
    del store
    gc.collect()
    assert os.listdir(temporary) == []


# Removal of a folder.


def remove(path):
    with library.lock_folder(path, commits.belongs_to_store):
        commits.remove_files(path, commits.belongs_to_store)


@pytest.fixture
def saved(temporary):
    path = str(temporary / "store")
    with stored(path) as store:
        store.commit({}, {})
        store.commit({}, {}, keep=1)
    return path


def test_a_store_is_removed(saved, temporary):
    remove(saved)
    assert os.listdir(temporary) == []


@pytest.mark.parametrize(
    "name",
    ["notes.md", "arrays/notes.md", "arrays/x.bin", "arrays/.x-1-1.bin", "generation-1", "more/x"],
)
def test_a_folder_with_files_of_others_is_not_removed(name, saved, temporary):
    file = temporary / "store" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("thesis")
    before = sorted(temporary.rglob("*"))
    with pytest.raises(ValueError, match="Nothing was removed"):
        remove(saved)
    assert sorted(temporary.rglob("*")) == before


@pytest.mark.parametrize("name", ["lock", "generation-000000000002", "generation.new"])
def test_a_file_of_another_program_with_a_name_of_a_store_is_not_removed(name, saved, temporary):
    (temporary / "store" / name).write_text("This is a thesis about stores.")
    with pytest.raises(ValueError, match="Nothing was removed"):
        remove(saved)
    # Nor is it overwritten.
    with pytest.raises(ValueError, match="that jrb has not written, and that would be lost"):
        BlockStore.open_to_save(saved)
    assert (temporary / "store" / name).read_text() == "This is a thesis about stores."


def test_a_store_that_is_written_or_a_link_is_not_removed(saved, temporary):
    with BlockStore.open_to_save(saved), pytest.raises(LockedError, match="this process"):
        remove(saved)
    (temporary / "link").symlink_to(saved)
    with pytest.raises(ValueError, match="found a link"):
        remove(str(temporary / "link"))
    elsewhere = temporary / "elsewhere"
    os.rename(os.path.join(saved, "arrays"), elsewhere)
    os.symlink(elsewhere, os.path.join(saved, "arrays"))
    with pytest.raises(ValueError, match="arrays"):
        remove(saved)
    assert len(os.listdir(elsewhere)) == 1
