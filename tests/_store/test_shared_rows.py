"""States that share their rows read what was there at their time, or are told that it is gone."""

import collections
import contextlib
import errno
import itertools
import os
import sys
import threading

import numpy as np
import pytest

from jrb._store import block_store, blocks, files, shared_rows, threads
from jrb._store.block_store import BlockStore, Source
from jrb._store.files import StaleError
from jrb._store.shared_rows import SharedRows, SlotNumbers
from tests._store.injection import Interrupt

SLOTS = 48
WIDTHS = {"x": 3, "wide": 40, "none": 0}
AT_MOST = 60  # seconds until a wait that does not end fails the test
HERE = os.path.dirname(os.path.abspath(files.__file__))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Makes blocks of at most 96 bytes: 32 rows of x, or two wide ones."""
    monkeypatch.setattr(blocks, "BLOCK", 96)


def made(path):
    store = BlockStore.create(path)
    for name, width in WIDTHS.items():
        source = Source([], f"leaf '{name}'", SLOTS, width, None)
        store.array(name, source)
    store.keep_open()
    return SharedRows(store, list(WIDTHS))


def slots_of(kind, rng, position):
    """Returns distinct slots, and the next position of the ring."""
    if kind == "ring":
        count = int(rng.integers(0, 12)) if rng.random() < 0.9 else SLOTS
        return (position + np.arange(count)) % SLOTS, (position + count) % SLOTS
    if kind == "envs":  # a ring for each of four environments
        count = int(rng.integers(1, 4))
        steps = (position + np.arange(count)) % (SLOTS // 4)
        return (steps + np.arange(4)[:, None] * (SLOTS // 4)).reshape(-1), position + count
    if kind == "edits" and rng.random() < 0.7:
        return slots_of("ring", rng, position)
    if kind == "edits" and rng.random() < 0.5:  # about a round of the ring from another slot on
        return (rng.integers(SLOTS) + np.arange(SLOTS - rng.integers(3))) % SLOTS, position
    return rng.permutation(SLOTS)[: rng.integers(0, SLOTS)], position


KINDS = ["ring", "envs", "edits", "random"]


# Numbers of slots.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("seed", range(2))
def test_it_is_known_which_slots_were_written_after_a_version(kind, dtype, seed):
    rng, position = np.random.default_rng(seed), 5
    numbers, last, every = SlotNumbers(SLOTS), np.zeros(SLOTS, np.int64), np.arange(SLOTS)
    for _ in range(120):
        slots, after = slots_of(kind, rng, position)
        if not len(slots):
            continue
        before = last.copy(), numbers.newest
        undo = numbers.undo_of(slots.astype(dtype))
        numbers.add(slots.astype(dtype), blocks.find_runs(slots.astype(dtype)))
        last[slots] = numbers.newest - len(slots) + 1 + np.arange(len(slots))
        if rng.random() < 0.3:
            undo()
            undo()  # after an interrupt it may be called again
            (last, newest) = before
            assert numbers.newest == newest
        else:
            position = after
        for version in {0, numbers.newest, *rng.integers(0, numbers.newest + 1, 5).tolist()}:
            found = numbers.is_after(version, every.astype(dtype))
            np.testing.assert_array_equal(found, last > version)


@pytest.mark.parametrize("count", [1, 7, 48])
def test_writes_in_the_order_of_time_need_no_memory(count):
    numbers, position = SlotNumbers(SLOTS), 0
    for _ in range(1000):
        slots = (position + np.arange(count)) % SLOTS
        numbers.add(slots, blocks.find_runs(slots))
        position = (position + count) % SLOTS
        assert numbers._state[-1] is None
    assert numbers.newest == 1000 * count
    slots = (position + 5 + np.arange(SLOTS)) % SLOTS  # a whole round
    numbers.add(slots, blocks.find_runs(slots))
    assert numbers._state[-1] is None


# States.


class States:
    """All states of some rows: a full copy of each, and the number of the last write to a slot."""

    def __init__(self, path, kind, seed, most=15):
        self.rng, self.kind, self.most = np.random.default_rng(seed), kind, most
        self.rows = made(path)
        self.position, self.count = 0, 0
        self.last, self.lost = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, bool)
        empty = [np.zeros((SLOTS, width), np.uint8) for width in WIDTHS.values()]
        self.versions = {0: empty}
        self.untouched = np.ones(SLOTS, bool)  # no write has begun there, not even one that failed

    @property
    def newest(self):
        return max(self.versions)

    def next_write(self):
        slots, self.position = slots_of(self.kind, self.rng, self.position)
        widths = WIDTHS.values()
        rows = [self.rng.integers(1, 256, (len(slots), w)).astype(np.uint8) for w in widths]
        return slots, rows

    def put(self, slots, rows):
        before = self.newest
        self.model_put(self.rows.write_rows(before, slots, rows), slots, rows)

    def model_put(self, version, slots, rows):
        """Makes the model have a write that has happened."""
        before = self.newest
        assert version == before + len(slots)
        self.untouched[slots] = False
        self.last[slots] = before + 1 + np.arange(len(slots))
        self.lost[slots] = False
        new = [data.copy() for data in self.versions[before]]
        for data, part in zip(new, rows, strict=True):
            data[slots] = part
        self.versions[version] = new
        for old in sorted(self.versions)[: -self.most]:
            del self.versions[old]

    def forget(self, version, slots, last):
        """Takes the newest write out of the model."""
        del self.versions[version]
        self.last = last
        self.untouched[slots] = False

    def check(self, version, slots):
        """Takes rows of a state: they are what it had, or some were overwritten or lost since."""
        is_stale = [bool((self.last[at] > version).any() or self.lost[at].any()) for at in slots]
        try:
            found = self.rows.read_rows(version, slots)
        except StaleError:
            assert any(is_stale), (version, slots)
            return False
        assert not any(is_stale), (version, slots)
        for data, at, old in zip(found, slots, self.versions[version], strict=True):
            is_known = (self.last[at] > 0) | self.untouched[at]
            assert np.array_equal(data[is_known], old[at][is_known])
        return True

    def check_all(self):
        """Takes rows of many states: all rows, single ones, and others of each array."""
        count, some = 0, sorted(self.versions)
        for version in {some[-1], *some[-2:-1], *self.rng.choice(some, 2).tolist()}:
            for size in (SLOTS, 1, 4):
                slots = self.rng.permutation(SLOTS)[:size]
                count += self.check(version, [slots] * len(WIDTHS))
            slots = [self.rng.integers(0, SLOTS, 4) for _ in WIDTHS]
            self.check(version, slots)
            fresh = np.flatnonzero((self.last <= version) & ~self.lost)
            count += self.check(version, [fresh] * len(WIDTHS))
        written = np.flatnonzero(self.last)
        assert self.rows.reach >= (written[-1] + 1 if len(written) else 0)
        return count


@pytest.mark.parametrize("kind", KINDS)
def test_each_state_reads_its_rows_or_is_stale(kind, path):
    states, count = States(path, kind, 1), 0
    for _ in range(50):
        states.put(*states.next_write())
        if states.rng.random() < 0.3:
            states.rows.store.commit({}, {}, int(states.rng.integers(2)))
        count += states.check_all()
    assert count > 300
    states.rows.prepare_commit(states.rows.version)


def test_rows_are_taken_from_some_arrays(path):
    states = States(path, "ring", 0)
    for _ in range(5):
        states.put(*states.next_write())
    data, slots = states.versions[states.newest], np.arange(5)
    (wide,) = states.rows.read_rows(states.newest, [slots], first=1)
    np.testing.assert_array_equal(wide, data[1][slots])
    x, wide = states.rows.read_rows(states.newest, [slots, slots + 1])
    np.testing.assert_array_equal(x, data[0][slots])
    np.testing.assert_array_equal(wide, data[1][slots + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_newest_state_is_written_to(kind, path):
    states = States(path, kind, 0)
    for _ in range(10):
        states.put(*states.next_write())
    slots, rows = np.arange(3), [np.ones((3, width), np.uint8) for width in WIDTHS.values()]
    for version in states.versions:
        if version == states.newest:
            states.rows.check_newest(version)
            continue
        with pytest.raises(StaleError, match="newest state"):
            states.rows.write_rows(version, slots, rows)
        with pytest.raises(StaleError, match="newest state"):
            states.rows.check_newest(version)
    states.check_all()
    none = [np.zeros((0, width), np.uint8) for width in WIDTHS.values()]
    assert states.rows.write_rows(states.newest, slots[:0], none) == states.newest


def test_nothing_is_lost_where_something_else_is_written_in_between(path):
    """Rows of a state are stale exactly if one of them was overwritten: there is no false alarm."""
    states = States(path, "ring", 0, most=99)
    ones = lambda count: [np.ones((count, width), np.uint8) for width in WIDTHS.values()]
    states.put(np.arange(SLOTS), ones(SLOTS))
    for slot in range(SLOTS - 1):
        states.put(np.array([slot]), ones(1))
        assert states.check(SLOTS, [np.arange(slot + 1, SLOTS)] * len(WIDTHS))
        for at in range(slot + 1):
            assert not states.check(SLOTS, [np.array([at])] * len(WIDTHS))


# Writes that fail.


def fails_at(number, times=1):
    """Returns a hook that raises at some operations on files."""
    count = itertools.count(1)

    def hook(*_):
        if next(count) in range(number, number + times):
            raise OSError(errno.EIO, "Input/output error")

    return hook


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_has_not_happened(kind, path, monkeypatch):
    states, failed = States(path, kind, 1), 0
    for number in range(60):
        slots, rows = states.next_write()
        monkeypatch.setattr(files, "hook", fails_at(1 + int(states.rng.integers(0, 12))))
        try:
            states.put(slots, rows)
        except OSError:
            failed += 1
            monkeypatch.setattr(files, "hook", None)
            states.untouched[slots] = False
            states.check_all()
            states.rows.check_newest(states.newest)
            states.rows.prepare_commit(states.rows.version)
            if number % 2:
                states.put(slots, rows)  # the same write can be made
        monkeypatch.setattr(files, "hook", None)
        states.check_all()
        if states.rng.random() < 0.3:
            states.rows.prepare_commit(states.rows.version)
            states.rows.store.commit({}, {})
    assert failed > 10


def test_a_write_that_cannot_be_taken_back_yet_is_taken_back_later(path, monkeypatch):
    states = States(path, "random", 0)
    for _ in range(3):
        states.put(*states.next_write())
    slots = np.arange(5, 20)
    rows = [np.full((15, width), 7, np.uint8) for width in WIDTHS.values()]
    monkeypatch.setattr(files, "hook", fails_at(2, times=5))
    with pytest.raises(OSError, match="Input/output"):
        states.put(slots, rows)
    # No rows are returned as long as some may be of a write that has not happened.
    for read in (
        lambda: states.rows.read_rows(states.newest, [slots] * len(WIDTHS)),
        lambda: states.rows.prepare_commit(states.newest),
        lambda: states.rows.check_newest(states.newest),
        lambda: states.put(slots, rows),
    ):
        with pytest.raises(OSError, match="Input/output"):
            read()
    states.check_all()
    states.put(slots, rows)
    states.check_all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most_kept", [8 << 20, 300])
def test_a_write_is_taken_back(kind, most_kept, path, monkeypatch):
    monkeypatch.setattr(shared_rows, "_MOST_KEPT", most_kept)
    states, lost = States(path, kind, 0), 0
    for number in range(60):
        before, last, is_lost = states.newest, states.last.copy(), states.lost.copy()
        slots, rows = states.next_write()
        is_new = len(slots) and slots.min() >= states.rows._first_unwritten
        states.put(slots, rows)
        if number % 3 == 0 and len(slots):
            states.rows.undo_last_write(before + 1)  # of another state: nothing happens
            states.check_all()
            states.rows.undo_last_write(before)
            states.forget(before + len(slots), slots, last)
            if not is_new and len(slots) * sum(WIDTHS.values()) > most_kept:
                is_lost[slots] = True
            states.lost = is_lost
            lost += states.lost.sum()
            states.check_all()
            prepare_commit(states)
            states.rows.undo_last_write(before)
            if number % 2:
                states.put(slots, rows)
        elif number % 4 == 0:
            states.rows.store.commit({}, {})
            states.check_all()
        prepare_commit(states)
    assert bool(lost) == (most_kept == 300)


def prepare_commit(states):
    if not states.lost.any():
        states.rows.prepare_commit(states.rows.version)
        return
    with pytest.raises(StaleError, match="lost"):
        states.rows.prepare_commit(states.rows.version)


def test_a_write_of_another_thread_is_not_taken_back(path):
    states = States(path, "ring", 0)
    states.put(np.arange(5), [np.ones((5, width), np.uint8) for width in WIDTHS.values()])
    thread = threading.Thread(target=states.rows.undo_last_write, args=[0])
    thread.start()
    thread.join()
    states.rows.check_newest(5)
    states.check_all()
    states.rows.undo_last_write(0)
    states.rows.check_newest(0)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_could_not_be_kept_are_lost_until_they_are_written_again(seed, path, monkeypatch):
    monkeypatch.setattr(shared_rows, "_MOST_KEPT", 1000)
    states, lost = States(path, "ring", seed), 0
    full = [np.ones((SLOTS, width), np.uint8) for width in WIDTHS.values()]
    states.put(np.arange(SLOTS), full)
    for number in range(30):
        count = 5 + 3 * number % 35
        slots = (7 * number + np.arange(count)) % SLOTS
        rows = [np.full((count, width), number, np.uint8) for width in WIDTHS.values()]
        monkeypatch.setattr(files, "hook", fails_at(1 + int(states.rng.integers(0, 20))))
        before = states.newest
        try:
            states.put(slots, rows)
        except OSError:
            monkeypatch.setattr(files, "hook", None)
            states.rows.check_newest(before)
            # All that the write might have changed is lost, or nothing is.
            missing = [at for at in slots.tolist() if is_lost(states, at)]
            assert missing in ([at for at in slots.tolist() if states.lost[at]], slots.tolist())
            assert len(missing) <= states.lost.sum() or count * 43 > 1000
            states.lost[missing] = True
            lost += len(missing)
            states.check_all()
            prepare_commit(states)
            part = count // 2  # a part of the write is not enough
            states.put(slots[:part], [data[:part] for data in rows])
            prepare_commit(states)
            states.check_all()
            states.put(slots, rows)
            prepare_commit(states)
        monkeypatch.setattr(files, "hook", None)
        states.check_all()
    assert lost > 50


def is_lost(states, slot):
    at = [np.array([slot])] * len(WIDTHS)
    try:
        states.rows.read_rows(states.newest, at)
        return False
    except StaleError:
        return True


# Interrupts at every line.


@pytest.mark.parametrize("most_kept", [8 << 20, 100])
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_write_that_is_interrupted_at_any_line_has_not_happened(
    most_kept, is_committed, path, monkeypatch
):
    monkeypatch.setattr(shared_rows, "_MOST_KEPT", most_kept)
    states = States(path, "ring", 0)
    states.kind = "random"
    states.put(np.arange(SLOTS), [np.ones((SLOTS, w), np.uint8) for w in WIDTHS.values()])
    interrupts = 0
    for line in itertools.count(1, 3 if is_committed else 2):
        if is_committed:
            states.rows.store.commit({}, {})
        slots = np.append(states.rng.permutation(40)[:6], np.arange(40, 44))
        rows = [states.rng.integers(0, 256, (10, w)).astype(np.uint8) for w in WIDTHS.values()]
        trace, before = Interrupt(HERE, line), states.newest
        try:
            sys.settrace(trace)
            states.rows.write_rows(before, slots, rows)
            sys.settrace(None)
            states.rows.undo_last_write(before)
        except KeyboardInterrupt:
            interrupts += 1
            states.rows.undo_last_write(before)
        finally:
            sys.settrace(None)
        states.rows.check_newest(before)
        missing = [at for at in slots.tolist() if is_lost(states, at)]
        assert missing in ([], slots.tolist())
        assert not missing or most_kept == 100
        states.lost[missing] = True
        every = [np.arange(SLOTS)] * len(WIDTHS)
        states.check(before, every)
        states.check(before, [np.setdiff1d(np.arange(SLOTS), slots)] * len(WIDTHS))
        states.put(slots, rows)
        assert states.check(states.newest, every)
        if trace.lines < line:
            break
    assert interrupts > 50


@pytest.mark.slow
def test_a_write_that_moved_a_block_and_was_interrupted_is_seen_when_it_is_made_again(path):
    """At every line; the blocks were in order before, so that reads needed no positions."""
    every, everything = np.arange(SLOTS), [np.ones((SLOTS, w), np.uint8) for w in WIDTHS.values()]
    slots, twos = every[3:5], [data[3:5] * np.uint8(2) for data in everything]
    for line in itertools.count(1):
        states = States(f"{path}{line}", "ring", 0)
        states.put(every, everything)
        states.rows.store.commit({}, {})
        states.check(SLOTS, [every] * len(WIDTHS))
        trace = Interrupt(HERE, line)
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            states.rows.write_rows(SLOTS, slots, twos)
        sys.settrace(None)
        states.rows.undo_last_write(SLOTS)
        states.put(slots, twos)
        assert states.check(states.newest, [every] * len(WIDTHS)), line
        states.rows.store.close()
        if trace.lines < line:
            break
    assert line > 200


# Threads.


class WatchedLock:
    """A lock with an event that is set when a thread has to wait for it."""

    def __init__(self, waits, is_taken=False):
        self.lock, self.waits = threading.Lock() if is_taken else threading.RLock(), waits
        self.release = self.lock.release
        if is_taken:
            self.lock.acquire()

    def acquire(self, timeout=-1):
        if self.lock.acquire(blocking=False):
            return True
        self.waits.set()
        return self.lock.acquire(timeout=AT_MOST)

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


def watch_writes(monkeypatch, waits):
    """Sets an event when a thread waits for a write of another one to be over."""
    plain = shared_rows.LastWrite

    def watched(*arguments):
        last = plain(*arguments)
        last.ending = WatchedLock(waits, is_taken=True)
        return last

    monkeypatch.setattr(shared_rows, "LastWrite", watched)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "random"])
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_draw_at_any_line_of_a_write_reads_old_rows_or_is_stale(
    kind, is_committed, path, monkeypatch
):
    """Another thread draws while this one is stopped at each line of a write in turn."""
    states, found, over = States(path, kind, 0), collections.Counter(), 0
    states.put(np.arange(SLOTS), [np.ones((SLOTS, w), np.uint8) for w in WIDTHS.values()])
    goes_on, line = threading.Event(), 0
    states.rows.store.turn = WatchedLock(goes_on)
    watch_writes(monkeypatch, goes_on)
    while over < 5:
        line += 3 if is_committed else 1
        if is_committed:
            states.rows.store.commit({}, {})
        rows = [states.rng.integers(0, 256, (9, w)).astype(np.uint8) for w in WIDTHS.values()]
        slots = (np.arange(9) + 9 * line) % SLOTS
        if kind == "random":
            slots = states.rng.permutation(SLOTS)[:9]
        newest, older = states.newest, sorted(states.versions)[-3:][0]
        others = np.setdiff1d(np.arange(SLOTS), slots)
        is_newer = states.last > older  # than the older state, before this write
        errors = []

        def take(version, at):
            rows = states.rows.read_rows(version, [at] * len(WIDTHS))
            for data, expected in zip(rows, states.versions[version], strict=True):
                np.testing.assert_array_equal(data, expected[at])

        def draw(slots=slots, others=others, newest=newest, older=older, is_newer=is_newer):
            try:
                take(newest, others)
                take(older, others[~is_newer[others]])
                for at in np.flatnonzero(is_newer)[:2]:
                    with pytest.raises(StaleError):
                        take(older, np.array([at]))
                try:
                    take(newest, slots)
                    found["read"] += 1
                except StaleError:
                    found["stale"] += 1
            except BaseException as error:
                errors.append(error)  # noqa: B023
            goes_on.set()

        thread = threading.Thread(target=draw, daemon=True)

        def stop(thread=thread):
            goes_on.clear()
            thread.start()
            assert goes_on.wait(AT_MOST)

        trace = Interrupt(HERE, line, stop)
        sys.settrace(trace)
        version = states.rows.write_rows(newest, slots, rows)
        sys.settrace(None)
        if trace.lines >= trace.number:
            thread.join(AT_MOST)
            assert not thread.is_alive()
        over += trace.lines < trace.number
        if errors:
            raise errors[0]
        states.model_put(version, slots, rows)
    states.check_all()
    assert found["read"] > 50
    assert found["stale"] > 5


def test_a_write_waits_for_the_draws_of_other_threads(path, monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE", 2 * AT_MOST)
    states, waits = States(path, "ring", 0), threading.Event()
    slots, ones = np.arange(9), [np.ones((9, width), np.uint8) for width in WIDTHS.values()]
    states.put(slots, ones)
    states.rows.drawing.inside[-1] = drawing = WatchedLock(waits, is_taken=True)
    rows = [data + np.uint8(1) for data in ones]
    thread = threading.Thread(target=states.put, args=[slots, rows])
    thread.start()
    assert waits.wait(AT_MOST)
    for _ in range(3):
        found = states.rows.read_rows(9, [slots] * len(WIDTHS))  # the draw reads its rows
        assert all(map(np.array_equal, found, ones))
    assert states.newest == 9
    drawing.release()
    thread.join(AT_MOST)
    assert states.newest == 18
    states.check_all()
    drawing.acquire()
    waits.clear()
    states.model_put(states.rows.write_rows(18, slots, ones, patient=False), slots, ones)
    assert not waits.is_set()
    states.check_all()


def read_in_a_thread(states, until, monkeypatch):
    """Starts a read of all rows, which goes on after it has begun when `until()` returns."""
    began, read_rows, slots = threading.Event(), blocks.BlockArray.read_rows, np.arange(SLOTS)

    def slowly(array, *arguments):
        if threading.get_ident() == thread.ident:
            began.set()
            until()
        return read_rows(array, *arguments)

    monkeypatch.setattr(blocks.BlockArray, "read_rows", slowly)

    def read():
        with contextlib.suppress(StaleError):
            states.rows.read_rows(states.newest, [slots] * len(WIDTHS))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert began.wait(AT_MOST)
    return thread


def test_a_commit_waits_for_reads_that_no_draw_surrounds(path, monkeypatch):
    """As for those from jitted code: what a mapping reads beyond a file's end kills the process."""
    states, waits = States(path, "ring", 0), threading.Event()
    monkeypatch.setattr(threads, "taken_lock", lambda: WatchedLock(waits, is_taken=True))
    thread = read_in_a_thread(states, lambda: waits.wait(AT_MOST), monkeypatch)
    states.rows.store.commit({}, {})
    assert waits.is_set()
    assert thread.ident not in states.rows.drawing.inside
    thread.join(AT_MOST)


def test_files_are_not_shortened_while_a_read_takes_too_long(path, monkeypatch):
    states, over = States(path, "ring", 0), threading.Event()
    monkeypatch.setattr(threads, "PATIENCE", 0.0)
    everything = [np.full((SLOTS, width), 1, np.uint8) for width in WIDTHS.values()]
    size = lambda: sum(
        os.path.getsize(os.path.join(path, "arrays", name))
        for name in os.listdir(os.path.join(path, "arrays"))
    )
    commit = lambda: states.rows.store.commit({}, {}, 0)

    def put_and_commit():
        states.put(np.arange(SLOTS), everything)
        return commit(), size()

    put_and_commit()
    _, large = put_and_commit()  # blocks are in the second half of the files
    thread = read_in_a_thread(states, lambda: over.wait(AT_MOST), monkeypatch)
    assert put_and_commit()[1] == large
    over.set()
    thread.join(AT_MOST)
    states.put(np.arange(2), [data[:2] for data in everything])
    commit()
    assert size() < large


def test_a_draw_that_waits_for_a_write_does_not_hold_up_the_next_one(path, monkeypatch):
    """The next write of the same thread waits for the draw, which must not wait for `turn` then."""
    waits, began, over = threading.Event(), threading.Event(), threading.Event()
    states, errors = States(path, "ring", 0), []
    monkeypatch.setattr(threads, "PATIENCE", AT_MOST)
    watch_writes(monkeypatch, waits)
    ones = [np.ones((9, width), np.uint8) for width in WIDTHS.values()]
    states.put(np.arange(9), ones)

    def draw():
        began.wait(AT_MOST)
        with states.rows.drawing.enter():
            try:
                states.rows.read_rows(9, [np.arange(3)] * len(WIDTHS))
                errors.append("old rows")
            except StaleError:
                over.set()

    def hook(operation, *_):
        if operation == "pwrite" and not began.is_set():
            began.set()
            assert waits.wait(AT_MOST)

    thread = threading.Thread(target=draw)
    thread.start()
    monkeypatch.setattr(files, "hook", hook)
    with states.rows.store.turn:  # as if no other thread were fast enough between the two
        states.put(np.arange(9), ones)
        states.put(np.arange(9, 18), ones)
        assert over.is_set()
    thread.join(AT_MOST)
    assert errors == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "random"])
@pytest.mark.parametrize("with_commits", [False, True])
def test_writes_at_any_line_of_a_draw_leave_it_old_rows_or_make_it_stale(
    kind, with_commits, path, monkeypatch
):
    """Another thread writes while this one is stopped at each line of a draw in turn."""
    states, found = States(path, kind, 0), collections.Counter()
    monkeypatch.setattr(threads, "PATIENCE", 0.0)
    states.put(np.arange(SLOTS), [np.ones((SLOTS, w), np.uint8) for w in WIDTHS.values()])
    every = np.arange(SLOTS)

    def write():
        """Writes, and begins to write something that is then taken back."""
        slots, rows = states.next_write()
        files.hook = fails_at(int(states.rng.integers(1, 8)))
        try:
            states.rows.write_rows(states.newest, slots, [data | 1 for data in rows])
            states.rows.undo_last_write(states.newest)
        except OSError:
            pass
        files.hook = None
        states.rows.check_newest(states.newest)
        for _ in range(int(states.rng.integers(4))):
            slots, rows = states.next_write()
            states.put(slots[:3], [data[:3] for data in rows])
            if with_commits:
                states.rows.store.commit({}, {})

    lines = 50
    for trial in itertools.count():
        line = 1 + trial // 4
        states.put(*states.next_write())
        version = sorted(states.versions)[-1 - trial % 2]
        old, asked = states.versions[version], states.rng.permutation(SLOTS)[:5]
        asked = every if trial % 11 == 0 else asked
        was_stale = bool((states.last[asked] > version).any())

        def stop():
            thread = threading.Thread(target=write)
            thread.start()
            thread.join(AT_MOST)
            assert not thread.is_alive()

        trace = Interrupt(HERE, line, stop)
        sys.settrace(trace)
        try:
            rows = states.rows.read_rows(version, [asked] * len(WIDTHS))
            sys.settrace(None)
            found["read"] += 1
            assert not was_stale
            for data, expected in zip(rows, old, strict=True):
                np.testing.assert_array_equal(data, expected[asked])
        except StaleError:
            sys.settrace(None)
            found["stale"] += 1
            assert (states.last[asked] > version).any()
        finally:
            sys.settrace(None)
        lines = max(lines, trace.lines)
        if line > lines:
            break
    assert found["read"] > 50
    assert found["stale"] > 50


@pytest.mark.parametrize("kind", ["ring", "edits"])
def test_threads_draw_while_one_writes(kind, path, monkeypatch):
    """Threads draw from the newest state and from older ones; none sees other rows."""
    monkeypatch.setattr(threads, "PATIENCE", 2 * AT_MOST)
    interval = sys.getswitchinterval()
    states, errors, count = States(path, kind, 0), [], collections.Counter()
    over, writes = threading.Event(), 0
    published = collections.deque([(0, states.versions[0])], maxlen=4)

    def draw(seed):
        rng = np.random.default_rng(seed)
        try:
            while not over.is_set():
                with states.rows.drawing.enter():
                    version, data = list(published)[-1 - int(rng.integers(2))]
                    slots = rng.integers(0, SLOTS, 8)
                    try:
                        found = states.rows.read_rows(version, [slots] * len(WIDTHS))
                    except StaleError:
                        count["stale"] += 1
                        continue
                count[seed] += 1
                for one, expected in zip(found, data, strict=True):
                    np.testing.assert_array_equal(one, expected[slots])
        except BaseException as error:
            errors.append(error)
            over.set()

    # All drawn rows were written: what a write that failed leaves elsewhere is of no interest here.
    states.put(np.arange(SLOTS), [np.ones((SLOTS, w), np.uint8) for w in WIDTHS.values()])
    published.clear()
    published.append((states.newest, states.versions[states.newest]))
    published.append(published[0])
    workers = [threading.Thread(target=draw, args=[seed], daemon=True) for seed in range(3)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in workers:
            thread.start()
        while not over.is_set() and (writes < 50 or min(count[seed] for seed in range(3)) < 100):
            states.put(*states.next_write())
            published.append((states.newest, states.versions[states.newest]))
            writes += 1
            if writes % 5 == 0:
                states.rows.store.commit({}, {})
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in workers:
            thread.join(AT_MOST)
    if errors:
        raise errors[0]


def test_threads_that_find_a_write_cut_off_take_it_back_once(path, monkeypatch):
    states = States(path, "ring", 0)
    states.put(np.arange(SLOTS), [np.ones((SLOTS, w), np.uint8) for w in WIDTHS.values()])
    slots = np.arange(10, 30)
    rows = [np.full((20, width), 9, np.uint8) for width in WIDTHS.values()]
    for _ in range(20):
        monkeypatch.setattr(files, "hook", fails_at(3))
        with pytest.raises(OSError, match="Input/output"):
            states.put(slots, rows)
        monkeypatch.setattr(files, "hook", None)
        barrier, errors = threading.Barrier(3), []

        def draw(barrier=barrier, errors=errors):
            try:
                barrier.wait(AT_MOST)
                states.check(states.newest, [np.arange(SLOTS)] * len(WIDTHS))
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=draw) for _ in range(3)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join(AT_MOST)
        assert errors == []
    # The same where one waits while another one does it.
    monkeypatch.setattr(files, "hook", fails_at(3))
    with pytest.raises(OSError, match="Input/output"):
        states.put(slots, rows)
    monkeypatch.setattr(files, "hook", None)
    waits, errors = threading.Event(), []
    states.rows.store.turn = WatchedLock(waits)

    def late():
        try:
            states.rows.check_newest(states.newest)
        except BaseException as error:
            errors.append(error)

    with states.rows.store.turn:
        thread = threading.Thread(target=late)
        thread.start()
        assert waits.wait(AT_MOST)
        states.check_all()
    thread.join(AT_MOST)
    assert errors == []


# Stores.


def test_rows_of_a_generation_are_those_that_were_committed(path):
    states = States(path, "random", 0)
    for _ in range(10):
        states.put(*states.next_write())
    states.rows.store.commit({}, {})
    data = states.versions[states.newest]
    states.put(*states.next_write())
    with BlockStore.open_to_read(path) as store:
        rows = SharedRows(store, list(WIDTHS))
        assert rows.version == 0
        found = rows.read_rows(0, [np.arange(SLOTS)] * len(WIDTHS))
        for one, expected in zip(found, data, strict=True):
            np.testing.assert_array_equal(one, expected)


def test_a_store_that_was_ousted_reads_no_files_that_the_other_one_shortened(path):
    """A read beyond the end of a file would kill the process."""
    states = States(path, "ring", 0)
    every, everything = np.arange(SLOTS), [np.ones((SLOTS, w), np.uint8) for w in WIDTHS.values()]
    for _ in range(2):  # then blocks are in the second half of the files
        states.put(every, everything)
        states.rows.store.commit({}, {}, 0)
    other = SharedRows(BlockStore.open_to_read(path), list(WIDTHS))
    other.write_rows(0, every, everything)
    other.store.commit({}, {}, 0)
    with pytest.raises(StaleError):
        states.rows.read_rows(states.newest, [every] * len(WIDTHS))
    other.store.close()


def test_a_store_that_was_ousted_takes_no_write_back(path):
    """Its files are those of the other store."""
    every, everything = np.arange(SLOTS), [np.ones((SLOTS, w), np.uint8) for w in WIDTHS.values()]
    twos, threes = ([data * np.uint8(number) for data in everything] for number in (2, 3))
    at, num_cut = [every] * len(WIDTHS), 0
    for line in itertools.count(20, 40):
        states = States(f"{path}{line}", "ring", 0)
        states.put(every, everything)
        states.rows.store.commit({}, {}, 0)
        states.put(every, everything)
        trace = Interrupt(HERE, line)
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            states.rows.write_rows(states.newest, every, threes)
        sys.settrace(None)
        num_cut += not states.rows._last.is_over
        other = SharedRows(BlockStore.open_to_read(states.rows.store.path), list(WIDTHS))
        version = other.write_rows(0, every, twos)
        states.rows.undo_last_write(states.newest)
        with pytest.raises(StaleError):
            states.rows.read_rows(states.newest, at)
        with pytest.raises(StaleError):
            states.rows.check_newest(states.newest)
        assert all(map(np.array_equal, other.read_rows(version, at), twos))
        other.store.close()
        if trace.lines < line:
            break
    assert num_cut > 3


def test_two_stores_take_over_one_after_the_other(path, monkeypatch):
    states, waits = States(path, "ring", 0), threading.Event()
    states.put(*states.next_write())
    states.rows.store.commit({}, {})
    slots, ones = np.arange(4), [np.ones((4, width), np.uint8) for width in WIDTHS.values()]
    one, other = (SharedRows(BlockStore.open_to_read(path), list(WIDTHS)) for _ in range(2))
    twos = [data + np.uint8(1) for data in ones]
    thread = threading.Thread(target=other.write_rows, args=(0, slots, twos))
    monkeypatch.setattr(block_store, "_registry", WatchedLock(waits))
    find = BlockStore._find_used_positions

    def slowly(store):
        if store is one.store and not thread.ident:
            thread.start()
            assert waits.wait(AT_MOST)
        return find(store)

    monkeypatch.setattr(BlockStore, "_find_used_positions", slowly)
    one.write_rows(0, slots, ones)
    thread.join(AT_MOST)
    with pytest.raises(StaleError):
        one.write_rows(4, slots, ones)
    found = other.read_rows(4, [slots] * len(WIDTHS))
    assert all(map(np.array_equal, found, twos))
    other.store.close()


def test_of_two_stores_the_one_that_writes_later_goes_on(path):
    states = States(path, "ring", 0)
    states.put(*states.next_write())
    states.rows.store.commit({}, {})
    other = SharedRows(BlockStore.open_to_read(path), list(WIDTHS))
    slots, ones = np.arange(4), [np.ones((4, width), np.uint8) for width in WIDTHS.values()]
    assert other.write_rows(0, slots, ones) == 4
    at = [slots] * len(WIDTHS)
    for act in (
        lambda: states.rows.read_rows(states.newest, at),
        lambda: states.rows.write_rows(states.newest, slots, ones),
        lambda: states.rows.check_newest(states.newest),
        lambda: states.rows.store.commit({}, {}),
    ):
        with pytest.raises(StaleError):
            act()
    assert all((data == 1).all() for data in other.read_rows(4, at))
    other.store.commit({}, {})
    states.rows.store.close()
    assert other.write_rows(4, slots, ones) == 8
    other.store.close()
