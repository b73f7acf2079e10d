"""Temporary stores are removed when their process ends, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jrb._store import opening, removal
from jrb._store.table import Column

MAKE = """
import os, signal, sys, numpy as np
from jrb._store import opening
from jrb._store.table import Column
store = opening.create(None, (Column.of("x", (), 1000),), 100, 120, reserve=True)
if sys.argv[1] == "fork":
    ready, done = os.pipe()
    if os.fork() == 0:
        os.write(done, b".")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
print(store.path, flush=True)
if sys.argv[1] == "end":
    sys.exit()
sys.stdin.read() if sys.argv[1] == "live" else os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Makes an empty folder the one for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def started(how):
    """Returns a process with a temporary store, and the store's folder."""
    command = [sys.executable, "-c", MAKE, how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path = process.stdout.readline().strip()
    process.stdout.close()
    return process, path


def stored():
    return opening.create(None, (Column.of("x", (), 10),), 10, 12, reserve=False)


def test_the_store_of_a_process_that_ended_is_gone(folder):
    process, _ = started("end")
    with process:
        process.wait()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("how", ["kill", "fork"])
def test_the_store_of_a_killed_process_goes_when_the_next_one_is_made(how, folder):
    process, path = started(how)
    with process:
        assert process.wait() == -signal.SIGKILL  # a surviving child does not hold the lock
        assert os.listdir(folder) == [os.path.basename(path)]
        store = stored()
        assert os.listdir(folder) == [os.path.basename(store.path)]


def test_what_is_in_use_or_belongs_to_others_stays(folder):
    live, path = started("live")
    with live:
        store = stored()
        store.put(0, np.arange(3), [np.ones((3, 10), np.uint8)])
        (folder / "jrb-temporary-mine").mkdir()
        (folder / "jrb-temporary-mine" / "rows").write_text("thesis")
        (folder / "jrb-temporary-link").symlink_to(path)
        saved = str(folder / "jrb-temporary-saved")
        promised = opening.create(saved, (Column.of("x", (), 10),), 10, 12, reserve=False)
        promised.commit(0, {}, {}, {})
        promised.close()
        before = sorted(os.listdir(folder))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda _: removal.discard_stale(str(folder), "jrb-temporary-"), range(8)))
        assert sorted(os.listdir(folder)) == before
        assert store.take(store.version, [np.arange(3)])[0].all()


def test_many_processes_may_clean_up_at_once(folder):
    stale = [folder / f"jrb-temporary-{number}" for number in range(12)]
    for path in stale:
        opening.create(
            str(path), (Column.of("x", (), 10),), 10, 12, reserve=False
        ).close()  # leaves the folder behind, as a killed process does
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: removal.discard_stale(str(folder), "jrb-temporary-"), range(16)))
    assert not [path for path in stale if path.exists()]


def test_what_somebody_put_into_a_temporary_store_stays(folder):
    store = stored()
    notes = os.path.join(store.path, "notes.md")
    with open(notes, "w") as file:
        file.write("...")
    path = store.path
    del store
    assert os.listdir(path) == ["notes.md"]
