"""Stores under faults: kills, lost power, broken disks, interrupts, forks, moved folders.

The scenarios run in processes of their own, which never load JAX: see `faults.py`.
"""

import errno
import json
import os
import subprocess
import sys

import pytest

from tests._store import faults

SCRIPT = os.path.join(os.path.dirname(__file__), "faults.py")
CODES = [errno.ENOSPC, errno.EIO]  # every kind of fault gets both, every kind of work one
KEPT = 8 << 20  # bytes of overwritten rows that are kept by default
LONG = pytest.mark.long
pytestmark = [pytest.mark.faults, pytest.mark.slow]


def run(name, folder, *arguments):
    """Returns the results of a scenario."""
    path = folder / "store"
    command = [sys.executable, SCRIPT, name, str(path), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found, name):
    """Asserts that the outcomes are exactly the expected states."""
    assert found["operations"] > 30
    assert set(found["outcomes"]) == faults.WORK[name][2]


@pytest.mark.parametrize("name", faults.WORK)
def test_a_process_killed_at_any_operation_leaves_what_was_committed(name, folder):
    check(run("kill", folder, name), name)


def test_a_process_killed_at_any_operation_after_a_crash_leaves_what_was_committed(folder):
    found = run("kill_twice", folder)
    assert found["operations"] > 20
    assert set(found["outcomes"]) == {75, 151}


@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_kills_at_any_line_lose_nothing(seed, folder):
    found = run("at_random", folder, seed, 100)
    assert found["outcomes"] == []
    assert found["written"] > 500


@pytest.mark.parametrize(("name", "code"), list(zip(faults.WORK, CODES * 3, strict=False)))
def test_a_disk_that_fails_at_any_operation_leaves_what_was_committed(name, code, folder):
    check(run("fail", folder, name, code), name)


@pytest.mark.parametrize(
    ("code", "times", "most_kept"),
    [(errno.EMFILE, 1, KEPT), (errno.EIO, 2, KEPT), (errno.ENOSPC, 1, 1000), (errno.EIO, 3, 1000)],
)
def test_a_process_that_goes_on_after_any_failure_keeps_its_promises(
    code, times, most_kept, folder
):
    found = run("go_on", folder, code, times, most_kept)
    assert found["outcomes"] == []
    assert found["failed"] > 90


@pytest.mark.parametrize("name", faults.WORK)
@pytest.mark.parametrize("seed", range(2))
def test_power_lost_at_any_operation_leaves_what_was_committed(name, seed, folder):
    check(run("power", folder, name, seed), name)


def test_power_lost_after_a_process_that_ended_in_a_commit_loses_nothing(folder):
    found = run("kill_and_power", folder, 0)
    assert found["operations"] > 200
    assert found["outcomes"] == []


@pytest.mark.parametrize(
    ("name", "first", "stride", "most_kept"),
    [
        ("ring", 1, 101, KEPT),
        ("ring", 15, 137, 1000),
        ("save", 1, 101, KEPT),
        *(pytest.param("ring", first, 29, KEPT, marks=LONG) for first in (1, 11, 21)),
        *(pytest.param("save", first, 29, KEPT, marks=LONG) for first in (1, 11, 21)),
    ],
)
def test_an_interrupt_at_any_line_leaves_what_was_there(name, first, stride, most_kept, folder):
    found = run("interrupted", folder, name, first, stride, most_kept)
    assert found["outcomes"] == []
    assert found["interrupts"] > 3000 / stride


def test_a_fork_reads_but_neither_writes_nor_keeps_the_lock(folder):
    found = run("fork", folder)
    assert found == {"child": ["refused", "refused", "refused", 75], "parent": 77, "after": 78}


def test_a_folder_that_moves_is_noticed_and_nothing_is_written_elsewhere(folder):
    moved = ["ESTALE", "ESTALE", 78]
    assert run("moved", folder) == {
        "renamed": moved,
        "removed": moved,
        "lock": moved,
        "replaced": [*moved, 20],
    }


@pytest.mark.parametrize("code", CODES)
def test_a_store_that_could_not_be_made_is_made_the_next_time(code, folder):
    found = run("make", folder, code)
    assert found["operations"] > 5
    assert set(found["outcomes"]) == {"raised"}


def test_files_that_may_not_be_as_large_are_an_error_and_nothing_changes(folder):
    assert run("large", folder) == ["EFBIG", "EFBIG", 75, 2, 75]


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=LONG)])
def test_every_flipped_bit_is_noticed(stride, folder):
    found = run("flip", folder, 0, stride)
    assert found["missed"] == []
    assert found["found"] > 4000 / stride


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=LONG)])
def test_every_cut_is_noticed(stride, folder):
    found = run("cut", folder, stride)
    assert found["missed"] == []
    assert found["found"] > 4000 / stride


def test_what_a_reader_has_opened_outlives_three_commits_of_a_writer(folder):
    found = run("meet", folder, 60)
    assert found["wrong"] == 0
    assert found["outlived"] > 3


@pytest.mark.parametrize("keep", [0, 3])
def test_generations_stay_as_long_as_asked(keep, folder):
    assert run("kept", folder, keep) == ["12"]


def test_a_second_writer_is_turned_away(folder):
    assert run("rivals", folder) == ["refused", "in use", "refused", 75]


@pytest.mark.parametrize("code", [*CODES, 0])
def test_a_second_store_of_a_process_takes_over_or_nothing_has_changed(code, folder):
    assert run("ousted", folder, code)["outcomes"] == []


@pytest.mark.parametrize(("fault", "commits"), [(0, [130, 131, 132]), (1, [130, 130, 130])])
def test_processes_save_together(fault, commits, folder):
    names = [f"shards/{number}/x" for number in range(3)]
    assert run("crew", folder, fault) == [*commits, names, 3]


def test_temporary_stores_of_killed_processes_are_removed_by_the_next_one(folder):
    found = run("temporary", folder)
    assert found["operations"] > 20
    assert found["outcomes"] == []
