"""Stores under faults: kills, lost power, broken disks, interrupts, forks, moved folders.

The scenarios run in processes of their own, which never load JAX: see `faults.py`.
"""

import errno
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from tests._store import faults

MEMORY = "/dev/shm"
SCRIPT = os.path.join(os.path.dirname(__file__), "faults.py")
CODES = [errno.ENOSPC, errno.EIO]  # every kind of fault gets both, every kind of work one
pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path):
    """Yields a folder in memory if possible, which is faster: disk faults are simulated."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield pathlib.Path(path)


def run(name, folder, *arguments):
    """Returns the results of a scenario."""
    path = folder / "store"
    command = [sys.executable, SCRIPT, name, str(path), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found, name):
    """Asserts that the outcomes are exactly the expected states."""
    assert found["operations"] > 10
    assert set(found["outcomes"]) == faults.WORK[name][2]


@pytest.mark.parametrize("name", faults.WORK)
def test_a_process_killed_at_any_operation_leaves_what_was_committed(name, folder):
    check(run("kill", folder, name), name)


def test_a_process_killed_at_any_operation_after_a_crash_leaves_what_was_committed(folder):
    check(run("kill_twice", folder), "wrapped")


@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_kills_at_any_moment_lose_nothing(seed, folder):
    found = run("at_random", folder, seed, 100)
    assert found["outcomes"] == []
    assert found["written"] > 500


@pytest.mark.parametrize(("name", "code"), list(zip(faults.WORK, CODES * 3, strict=False)))
def test_a_disk_that_fails_at_any_operation_leaves_what_was_committed(name, code, folder):
    check(run("fail", folder, name, code), name)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_a_process_that_goes_on_after_any_failure_keeps_its_promises(code, folder):
    assert run("go_on", folder, code)["outcomes"] == []


@pytest.mark.parametrize("name", faults.WORK)
@pytest.mark.parametrize("seed", range(2))
def test_power_lost_at_any_operation_leaves_what_was_committed(name, seed, folder):
    check(run("power", folder, name, seed), name)


@pytest.mark.parametrize(("name", "code"), list(zip(faults.SAVES, CODES * 2, strict=True)))
@pytest.mark.parametrize("fault", ["kill", "fail", "power"])
def test_a_save_leaves_the_old_or_the_new(fault, code, name, folder):
    found = run("save", folder, fault, name, code)
    assert found["operations"] > 10
    assert set(found["outcomes"]) == {"old", "new"}


@pytest.mark.parametrize(("again", "first"), [(0, 1), (1, 12)])
def test_an_interrupt_at_any_line_leaves_a_store_that_goes_on(again, first, folder):
    found = run("interrupted", folder, again, first, 41)
    assert found["lines"] > 500
    assert found["outcomes"] == []


def test_a_fork_reads_but_neither_writes_nor_keeps_the_lock(folder):
    found = run("fork", folder)
    assert found == {"child": ["refused", "refused", "refused", 75], "parent": 77, "after": 78}


def test_a_folder_that_moves_is_noticed_and_nothing_is_written_elsewhere(folder):
    moved = ["ESTALE", "ESTALE"]
    found = run("moved", folder)
    assert found == {
        "renamed": moved,
        "removed": moved,
        "lock": moved,
        "replaced": [*moved, 20],
    }


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_store_that_could_not_be_made_is_made_the_next_time(code, folder):
    assert set(run("make", folder, code)["outcomes"]) == {"raised"}


def test_files_that_may_not_be_as_large_are_an_error_and_are_removed(folder):
    assert run("large", folder) == ["EFBIG", ["generation-000000000000", "lock"]]


def test_every_flipped_bit_is_noticed(folder):
    found = run("flip", folder, 0)
    assert found["flips"] > 500
    assert found["missed"] == []


def test_every_cut_is_noticed(folder):
    assert run("truncate", folder) == {"cuts": 8, "missed": []}


def test_readers_see_one_commit_or_are_told_that_it_is_gone(folder):
    found = run("meet", folder, 60)
    assert found["wrong"] == 0
    assert found["reads"] > found["stale"]


def test_a_second_writer_is_turned_away(folder):
    assert run("rivals", folder) == ["refused", 75, 75, 76]
