"""Recorders under faults: sealed items are complete on disk, the others still in memory."""

import os
import random
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import jrb
from jrb.datasets import Recorder
from tests import seams
from tests._store import injection
from tests.datasets.recording.recordings import assert_same, item, stacked

pytestmark = [pytest.mark.slow, pytest.mark.faults]

HERE = os.path.dirname(jrb.__file__)
COUNT = 13


def how(number):
    return "terminated" if number % 3 == 2 else "goes on"


def calls(recorder, count=COUNT):
    """Functions that give so many items, two of them together now and then, and seal some."""
    number = 0
    while number < count:
        together = 1 + (number % 4 == 3)
        made = [item(n, how(n)) for n in range(number, number + together)]
        if together == 1:
            yield lambda made=made: recorder.add(made[0])
        else:
            yield lambda made=made: recorder.append(stacked(made))
        if number % 7 == 5:
            yield recorder.flush
        number += together


def held(path):
    """Returns the number of stored items, after a check that they are the first ones in order."""
    try:
        dataset = jrb.datasets.open(path)
    except ValueError as error:  # no part was sealed
        assert "no format" in str(error)  # noqa: PT017
        return 0
    count, found = dataset.transitions, list(dataset)
    wanted = [item(number, how(number)) for number in range(count)]
    if count:
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
        for part in ("observation", "action"):
            assert_same(whole[part], stacked(wanted)[part])
    assert dataset.lengths.tolist()[:-1] == [3] * (len(dataset) - 1)
    return count


def test_a_kill_at_any_operation_leaves_all_that_was_sealed(tmp_path):
    path, seen = tmp_path / "now", []
    recorder = Recorder(path, chunk=4)

    def copy(*event):
        there = tmp_path / str(len(seen))
        shutil.copytree(path, there)
        seen.append((there, recorder.sealed, recorder.sealed + recorder.held))

    with seams.hooked(copy):
        for call in calls(recorder):
            call()
        recorder.close()
    counts = [held(there) for there, *_ in seen]
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    for count, (_, sealed, taken) in zip(counts, seen, strict=True):
        assert sealed <= count <= taken
    assert held(path) == COUNT
    for there, *_ in seen[::6]:  # and it is continued, without what was left over
        Recorder(there, item(0)).close()
        assert not [name for name in os.listdir(there) if name.startswith(".")]


@pytest.mark.parametrize("code", [28, 5])
def test_a_disk_that_fails_at_any_operation_loses_nothing(code, tmp_path):
    number, over = 0, False
    while not over:
        path = tmp_path / str(number)
        recorder = Recorder(path, chunk=4)
        failed = 0
        with seams.hooked(injection.At(number + 1, injection.strike(code))) as hook:
            for call in [*calls(recorder), recorder.close]:
                before = recorder.held + recorder.sealed
                try:
                    call()
                except OSError as error:
                    failed += error.errno == code
                    assert recorder.held + recorder.sealed == before
                    if os.path.exists(path):
                        assert recorder.sealed <= held(path) <= before
                    call()  # now there is room
        over = hook.count <= number
        assert failed == (not over)
        assert held(path) == COUNT
        number += 1
    assert number > 20


@pytest.mark.parametrize("seed", range(2))
def test_a_loss_of_power_leaves_all_that_was_sealed(seed, tmp_path):
    path, log, sealed = tmp_path / "now", [], []
    path.mkdir()
    shutil.copytree(path, tmp_path / "before")
    recorder = None

    def note(*event):
        log.append(tuple(bytes(v) if isinstance(v, memoryview) else v for v in event))
        sealed.append(recorder.sealed if recorder else 0)

    with seams.hooked(note):
        recorder = Recorder(path, chunk=4)
        for call in calls(recorder):
            call()
        recorder.close()
    rng = random.Random(seed)
    for stop in range(len(log) + 1):
        injection.crashed(tmp_path / "before", path, log, stop, rng)
        least = sealed[stop] if stop < len(log) else COUNT
        assert least <= held(path) <= COUNT
    assert len(log) > 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_leaves_a_recorder_that_goes_on(tmp_path):
    number, over = 1, False
    while not over:
        path, trace = tmp_path / "now", injection.Interrupt(HERE, number)
        recorder = Recorder(path, chunk=4)
        before = sys.gettrace()
        for call in [*calls(recorder), recorder.close]:
            taken = recorder.held + recorder.sealed
            try:
                sys.settrace(trace)
                call()
            except KeyboardInterrupt:
                sys.settrace(before)
                if recorder.held + recorder.sealed == taken:
                    call()
            finally:
                sys.settrace(before)
        over = trace.lines < number
        closing = threading.Thread(target=recorder.close, daemon=True)
        closing.start()  # in another thread, which a lock that stayed taken would hold up
        closing.join(60)
        assert not closing.is_alive()
        assert held(path) == COUNT, number
        shutil.rmtree(path)
        number += 37
    assert number > 1000


def test_an_interrupt_or_a_failure_before_the_first_item_can_be_made_good(tmp_path):
    recorder = Recorder(tmp_path)
    failing = seams.hooked(injection.At(3, injection.strike(28)))
    with failing, pytest.raises(OSError, match="No space"):
        recorder.add(item(0))
    assert held(tmp_path) == 0
    recorder.add(item(0, how(0)))
    recorder.close()
    assert held(tmp_path) == 1


SCRIPT = """
import sys
from jrb.datasets import Recorder
from tests.datasets.recording.recordings import item
path, worker = sys.argv[1], int(sys.argv[2])
with Recorder(path, chunk=5, name=f"worker{worker}") as recorder:
    for step in range(23):
        recorder.add(item(100 * worker + step, "terminated" if step % 3 == 2 else "goes on"))
"""


def test_several_processes_write_one_recording(tmp_path):
    root = os.path.dirname(HERE)
    start = lambda n: subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path, str(n)], cwd=root)
    assert [worker.wait(timeout=120) for worker in [start(0), start(1), start(2)]] == [0] * 3
    dataset = jrb.datasets.open(tmp_path)
    names = [name.split("-")[1] for name in dataset.metadata["writers"]]
    assert sorted(names) == ["worker0", "worker1", "worker2"]
    assert dataset.lengths.tolist() == [*[3] * 7, 2] * 3
    rewards = np.concatenate([episode["next"]["reward"] for episode in dataset]) * 7
    wanted = [100 * int(name[-1]) + step for name in names for step in range(23)]
    assert np.round(rewards).astype(int).tolist() == wanted
