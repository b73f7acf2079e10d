"""A store under faults, in a process that never loads JAX.

Run as a script with the name of a scenario and a folder. Prints the results as JSON.
"""

import contextlib
import errno
import functools
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import bare

    bare.install()

import numpy as np

from jrb._store import block_store, blocks, commits, files, shared_rows, threads
from jrb._store.block_store import BlockStore, Source
from jrb._store.commits import SmallArray
from jrb._store.files import Folder, LockedError, StaleError
from jrb._store.shared_rows import SharedRows
from tests._store.injection import (
    At,
    Interrupt,
    crashed,
    die,
    in_child,
    operations,
    recorder,
    strike,
)

SLOTS = 60
WIDTHS = {"x": 300, "next/y": 4, "none": 0}
LARGE = 5000
HERE = os.path.dirname(os.path.abspath(files.__file__))
if __name__ == "__main__":
    blocks.BLOCK = 2500  # 8 rows of x
    blocks.RUN = block_store.RUN = 3
    block_store._MOST_OPEN = 1  # so that the file of one array is opened for each write


def rows(stamps, width):
    """Returns rows for these stamps, uint8 `[B, width]`, zeros for -1; different stamps differ."""
    stamps, base = np.asarray(stamps), np.arange(width, dtype=np.int64)
    values = ((base * 7 + stamps[:, None] * 31) % 251).astype(np.uint8)
    return np.where(stamps[:, None] >= 0, values, 0).astype(np.uint8)


def stamps_of(written):
    """Returns the stamp of each slot after this many rows in the ring; -1 where none is."""
    last = written - 1 - (written - 1 - np.arange(SLOTS)) % SLOTS
    return np.where(last >= 0, last, -1)


def source_of(name, data):
    """Returns an array in memory, uint8 `[N, width]`, as one that can be saved."""
    read = lambda start, stop: data[start:stop]
    return Source(["uint8"], f"leaf '{name}'", *data.shape, read)


class Ring:
    """A store on a disk, open for writing, in whose ring row number t has the stamp t."""

    def __init__(self, store):
        self.store, self.written = store, store.meta.get("written", 0)
        self.stamps = np.asarray(store.meta.get("stamps", [-1] * SLOTS))
        for name, width in WIDTHS.items():
            store.array(name, source_of(name, np.zeros((SLOTS, width), np.uint8)))
        store.keep_open()
        self.rows, self.version = SharedRows(store, list(WIDTHS)), 0

    def put(self, slots):
        """Writes rows with new stamps at slots, int64 `[B]`."""
        stamps = np.arange(self.written, self.written + len(slots))
        new = [rows(stamps, width) for width in WIDTHS.values()]
        self.version = self.rows.write_rows(self.version, slots, new)
        self.written += len(slots)
        self.stamps = self.stamps.copy()
        self.stamps[slots] = stamps

    def write(self, count):
        """Writes the next rows of the ring; of more than a round, the last ones."""
        self.put((self.written + np.arange(min(count, SLOTS))) % SLOTS)

    def edit(self, seed):
        """Writes at random slots."""
        self.put(np.random.default_rng(seed).permutation(SLOTS)[:9])

    def commit(self, keep=0):
        self.rows.prepare_commit(self.rows.version)
        return commit(self.store, self.written, self.stamps, keep)

    def content(self):
        """Returns the number of rows written if all are as they were, otherwise an error text."""
        slots = np.flatnonzero(self.stamps >= 0)
        found = self.rows.read_rows(self.version, [slots] * len(WIDTHS))
        expected = [rows(self.stamps[slots], width) for width in WIDTHS.values()]
        return self.written if all(map(np.array_equal, found, expected)) else "a mixture"


def commit(store, written, stamps, keep=0, joined=None):
    small = {"large": SmallArray([], bytes([written % 256]) * LARGE)}
    meta = {"written": written, "stamps": np.asarray(stamps).tolist()}
    return store.commit(meta, small, keep, joined)


def content(store):
    """Returns the number of rows written if a generation is whole, otherwise an error text."""
    written, stamps = store.meta["written"], store.meta["stamps"]
    if bytes(store.small["large"].data) != bytes([written % 256]) * LARGE:
        return "arrays of two generations"
    slots = np.arange(SLOTS)
    for name, array in store.arrays.items():
        expected = rows(stamps, array.spec.width)
        if not np.array_equal(array.read_rows(slots), expected):
            return "a mixture"
        target = np.full(expected.shape, 7, np.uint8)
        store.read({name: target})
        if not np.array_equal(target, expected):
            return "another mixture"
    return written


def committed(path, number=None):
    """Returns the number of rows of a generation, the newest by default; None without one.

    All older generations are checked, too.
    """
    try:
        with BlockStore.open_to_read(path, number) as store:
            written = content(store)
    except FileNotFoundError:
        return None
    if number is None:
        for other in commits.list_generations(Folder(path)):
            if not isinstance(committed(path, other), int):
                return f"generation {other} is not whole"
        if damages := block_store.find_damages(path):
            return damages[0]
    return written


def prepared(path, count):
    """Returns a ring with `count` committed rows."""
    shutil.rmtree(path, ignore_errors=True)
    ring = Ring(BlockStore.create(path))
    if count:
        ring.written = count - min(count, SLOTS)
        ring.write(min(count, SLOTS))
        ring.commit()
    return ring


# Work that faults disturb.


def again(ring):
    """Overwrites more than a round of the ring, commits twice, and goes on."""
    ring.write(7)
    ring.write(SLOTS)
    ring.write(9)
    ring.commit()
    ring.write(40)
    ring.commit(keep=1)
    ring.write(5)


def edit(ring):
    """Writes at random slots, before and after commits."""
    for seed in range(3):
        ring.edit(seed)
        ring.edit(10 + seed)
        ring.commit(keep=2 - seed)
    ring.edit(99)


def checkpoint(ring):
    """Saves arrays from memory in the same store, also with rows of another width."""
    for written, width, copy in ((130, 300, False), (133, 300, True), (140, 20, False)):
        stamps = stamps_of(written)
        data = {"x": rows(stamps, width), "next/y": rows(stamps, 4)}
        ring.store.put({name: source_of(name, it) for name, it in data.items()}, copy)()
        commit(ring.store, written, stamps)


def together(ring):
    """Saves arrays of two processes of one program, the second of which has no lock."""
    path = ring.store.path
    ring.store.close()
    for written in (130, 141):
        stamps = stamps_of(written)
        of = lambda *names, stamps=stamps: {
            name: source_of(name, rows(stamps, WIDTHS[name])) for name in names
        }
        with BlockStore.open_to_save(path) as leader, BlockStore.join(path) as member:
            leader.put(of("x"))
            member.put(of("next/y", "none"), copy=True)()
            tables = json.loads(json.dumps(member.tables()))
            commit(leader, written, stamps, joined=tables)


WORK = {
    "ring": (75, again, {75, 151, 191}),
    "first": (0, again, {None, 76, 116}),
    "random": (75, edit, {75, 93, 111, 129}),
    "checkpoint": (75, checkpoint, {75, 130, 133, 140}),
    "together": (75, together, {75, 130, 141}),
}
"""The rows that are committed before, the work, and what may be committed after a fault in it."""


def judged(path, name):
    """Checks that a store works after a fault; returns what is committed, or an error text."""
    found = committed(path)
    if found not in WORK[name][2]:
        return f"not as committed: {found}"
    with BlockStore.open_to_save(path) as store:
        is_ring = "x" in store.arrays and store.arrays["x"].spec.width == WIDTHS["x"]
        ring = Ring(store)
        ring.put(np.arange(13 if is_ring else SLOTS))
        if ring.content() != ring.written:
            return "the next write failed"
        ring.commit()
        if committed(path) != ring.written:
            return f"the next save failed: {committed(path)}"
    names = sorted(os.listdir(path))
    if names != ["arrays", commits.generation_name(store.generation), "lock"]:
        return f"left over: {names}"
    files_of_arrays = sorted(os.listdir(os.path.join(path, "arrays")))
    if files_of_arrays != sorted(os.path.basename(it.spec.file) for it in store.arrays.values()):
        return f"left over: {files_of_arrays}"
    return found


def kill(path, name):
    """Kills a process at each operation in turn."""
    count, work, _ = WORK[name]
    ring = prepared(path, count)
    total = operations(functools.partial(work, ring))
    ring.store.close()
    outcomes = []

    def child(number):
        ring = prepared(path, count)
        files.hook = At(number, die)
        work(ring)

    for number in range(1, total + 1):
        planned = in_child(functools.partial(child, number))
        outcomes.append(judged(path, name) if planned else "not as planned")
    return {"operations": total, "outcomes": outcomes}


def kill_twice(path):
    """Kills a process at every operation of the first write and commit after a crash."""
    ring = prepared(path, 75)
    ring.write(50)
    crash = path + ".crash"
    shutil.rmtree(crash, ignore_errors=True)
    shutil.copytree(path, crash)
    ring.store.close()

    def go_on():
        with BlockStore.open_to_save(path) as store:
            ring = Ring(store)
            ring.write(30)
            ring.write(46)
            ring.commit()

    total = operations(go_on)
    outcomes = []

    def child(number):
        files.hook = At(number, die)
        go_on()

    for number in range(1, total + 1):
        shutil.rmtree(path)
        shutil.copytree(crash, path)
        planned = in_child(functools.partial(child, number))
        outcomes.append(judged(path, "ring") if planned else "not as planned")
    return {"operations": total, "outcomes": outcomes}


def fail(path, name, code):
    """Raises an OSError at every operation in turn and checks the store after each."""
    count, work, _ = WORK[name]
    ring = prepared(path, count)
    total = operations(functools.partial(work, ring))
    ring.store.close()
    outcomes = []
    for number in range(1, total + 1):
        ring = prepared(path, count)
        files.hook = At(number, strike(code))
        try:
            work(ring)
            raised = "nothing raised"
        except OSError as error:
            raised = None if error.errno == code else repr(error)
        files.hook = None
        ring.store.close()
        outcomes.append(raised or judged(path, name))
    return {"operations": total, "outcomes": outcomes}


def power(path, name, seed):
    """Cuts the power at every operation; each change that was not synced survives at random."""
    count, work, _ = WORK[name]
    ring = prepared(path, count)
    log, before = [], path + ".before"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(path, before)
    files.hook = recorder(log)
    work(ring)
    files.hook = None
    ring.store.close()
    rng, outcomes = random.Random(seed), []
    for stop in range(len(log) + 1):
        crashed(before, path, log, stop, rng)
        outcomes.append(judged(path, name))
    return {"operations": len(log), "outcomes": outcomes}


def kill_and_power(path, seed):
    """Ends a process at every operation of a commit, then another one goes on and loses power."""
    before = path + ".before"
    ring = prepared(path, 75)
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(path, before)
    ring.write(70)
    total = operations(ring.commit)
    ring.store.close()
    rng, outcomes, count = random.Random(seed), [], 0
    for number in range(1, total + 1):
        log = []
        shutil.rmtree(path)
        shutil.copytree(before, path)
        record = recorder(log)
        with BlockStore.open_to_save(path) as store:
            ring = Ring(store)
            files.hook = record
            ring.write(60)
            fault = At(number, strike(errno.EIO))
            files.hook = lambda *event, fault=fault: (fault(*event), record(*event))  # noqa: B023
            with contextlib.suppress(OSError):
                ring.commit()
        files.hook = record
        promised, stops = {75, 135}, [len(log)]
        with BlockStore.open_to_save(path) as store:
            ring = Ring(store)
            for step in (25, 40):
                ring.write(step)
                ring.commit()
                promised.add(ring.written)
                stops.append(len(log))
        files.hook = None
        for stop in {*stops, *rng.sample(range(len(log)), 12)}:
            count += 1
            crashed(before, path, log, stop, rng)
            with contextlib.suppress(FileNotFoundError), BlockStore.open_to_read(path) as store:
                found = content(store)
                if found not in promised or (stop == len(log) and found != ring.written):
                    outcomes.append([number, stop, found])
    return {"operations": count, "outcomes": outcomes}


def go_on(path, code, times, most_kept):
    """Raises at every operation of writes and commits; the same process goes on, then crashes.

    A write that failed has changed nothing, or the rows at its slots are lost until it is made
    again. What the last successful commit has survives the crash, and readers keep what they
    opened.
    """
    shared_rows._MOST_KEPT = most_kept
    outcomes, number, over, failed = [], 0, False, 0
    while not over:
        number += 1
        ring = prepared(path, 75)
        reader = BlockStore.open_to_read(path)
        files.hook = hook = At(number, strike(code), times)
        promised = {75}
        for step in (7, None, SLOTS, 30, None, "edit", "edit", None):
            act = ring.commit if step is None else functools.partial(ring.write, step)
            act = functools.partial(ring.edit, number) if step == "edit" else act
            try:
                act()
                promised = {ring.written} if step is None else promised
            except OSError as error:
                failed += 1
                note = " ".join(getattr(error, "__notes__", ()))
                if step is None:
                    promised |= {ring.written}
                    if ("has happened" in note) != (committed(path) == ring.written):
                        outcomes.append([number, "said the wrong thing"])
                else:
                    outcomes += [[number, text] for text in unlike(ring, patient_of(hook))]
                    persist(act, hook)
            if persist(ring.content, hook) != ring.written:
                outcomes.append([number, "rows are gone"])
        over, files.hook = hook.count < number, None
        if content(reader) != 75:
            outcomes.append([number, "a reader sees another"])
        reader.close()
        crash = path + ".crash"
        shutil.rmtree(crash, ignore_errors=True)
        shutil.copytree(path, crash)
        if committed(crash) not in promised:
            outcomes.append([number, f"{committed(crash)} is not {promised}"])
        ring.commit()
        if committed(path) != ring.written:
            outcomes.append([number, "the last commit is not whole"])
        ring.store.close()
    return {"operations": number, "failed": failed, "outcomes": outcomes}


def persist(act, hook):
    """Calls a function until no injected error disturbs it."""
    for _ in hook.numbers:
        with contextlib.suppress(OSError):
            return act()
    return act()


def patient_of(hook):
    return functools.partial(persist, hook=hook)


def unlike(ring, call=lambda act: act()):
    """Returns what is not as before a write that has failed, as a list of texts.

    Rows at the slots of the write may be lost if they were too many to keep, but never others.
    """
    try:
        return [] if call(ring.content) == ring.written else ["a write that failed was seen"]
    except StaleError:
        if shared_rows._MOST_KEPT > 1 << 20:
            return ["rows are lost"]
    texts, lost = [], 0
    for slot in np.flatnonzero(ring.stamps >= 0):
        at = np.array([slot])
        try:
            found = ring.rows.read_rows(ring.version, [at] * len(WIDTHS))
        except StaleError:
            lost += 1
            continue
        expected = [rows(ring.stamps[at], width) for width in WIDTHS.values()]
        texts += [] if all(map(np.array_equal, found, expected)) else ["a lost row was seen"]
    try:
        ring.rows.prepare_commit(ring.rows.version)
        return [*texts, "a lost row was not noticed"]
    except StaleError:
        return texts


def interrupted(path, name, first, stride, most_kept):
    """Interrupts steps at every `stride`-th line; each is then repeated."""
    shared_rows._MOST_KEPT = most_kept
    outcomes, number, over, count = [], first - stride, False, 0
    while not over:
        number += stride
        ring, trace = prepared(path, 75), Interrupt(HERE, number)
        reader = BlockStore.open_to_read(path)
        old = ring.written
        for act in STEPS[name](ring):
            try:
                sys.settrace(trace)
                act()
                sys.settrace(None)
            except KeyboardInterrupt:
                sys.settrace(None)
                count += 1
                if name == "ring":
                    ring.rows.undo_last_write(ring.version)
                    outcomes += [[number, text] for text in unlike(ring)]
                if committed(path) not in (old, ring.written):
                    outcomes.append([number, f"{committed(path)} is there, not {old}"])
                act()
            if name == "ring" and ring.content() != ring.written:
                outcomes.append([number, "not as written"])
            old = committed(path)
        over = trace.lines < number
        if content(reader) != 75:
            outcomes.append([number, "a reader sees another"])
        reader.close()
        if committed(path) != ring.written:
            outcomes.append([number, "what was promised is gone"])
        ring.store.close()
        with BlockStore.open_to_save(path) as store:
            ring = Ring(store)
            ring.put(np.arange(SLOTS))
            ring.commit()
        if committed(path) != ring.written:
            outcomes.append([number, "the last commit is not whole"])
    return {"lines": number, "interrupts": count, "outcomes": outcomes}


def ring_steps(ring):
    yield functools.partial(ring.write, 4)
    yield ring.commit
    yield functools.partial(ring.write, SLOTS)
    yield functools.partial(ring.edit, 1)
    yield functools.partial(ring.edit, 2)
    yield functools.partial(ring.commit, 1)


def save_steps(ring):
    """Yields saves of arrays in memory, each of which opens the store, as a checkpoint does."""
    ring.store.close()
    path = ring.store.path

    def save(written, width, copy):
        stamps = stamps_of(written)
        data = {"x": rows(stamps, width), "next/y": rows(stamps, 4)}
        store = BlockStore.open_to_save(path)
        try:
            store.put({name: source_of(name, it) for name, it in data.items()}, copy)()
            commit(store, written, stamps)
        finally:
            store.close()

    def forgetful(*arguments):
        try:
            save(*arguments)
        except KeyboardInterrupt as error:
            # It may have come before `try` or within `close`: the lock goes with its owner.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            raise

    for arguments in ((130, 300, True), (133, 300, False), (140, 20, True)):
        ring.written = arguments[0]
        yield functools.partial(forgetful, *arguments)


STEPS = {"ring": ring_steps, "save": save_steps}


def at_random(path, seed, kills):
    """Kills a process that writes and commits at random lines; no commit may be lost."""
    rng, outcomes, last = random.Random(seed), [], 75
    prepared(path, 75).store.close()
    for number in range(kills):
        readable, written = os.pipe()
        dice, line = random.Random(rng.random()), rng.randrange(1, 6000)

        def work(dice=dice, line=line, written=written):
            trace = Interrupt(HERE, line, die)
            threading.settrace(trace)
            sys.settrace(trace)
            ring = Ring(BlockStore.open_to_save(path))
            while True:
                for _ in range(dice.randrange(4)):
                    ring.write(dice.randrange(1, 70))
                ring.commit(dice.randrange(3))
                os.write(written, f"{ring.written}\n".encode())

        if not in_child(work):
            outcomes.append(f"kill {number} was not as planned")
        os.close(written)
        said = os.read(readable, 1 << 16).split()
        os.close(readable)
        promised, found = int(said[-1]) if said else last, committed(path)
        if not isinstance(found, int) or found < promised:
            outcomes.append(f"{promised} was promised, {found} is there")
        last = found
    return {"kills": kills, "outcomes": outcomes, "written": last}


def meet(path, count):
    """Reads all of each generation until three newer ones are there; another process writes."""
    prepared(path, 75).store.close()
    child = os.fork()
    if not child:
        ring = Ring(BlockStore.open_to_save(path))
        for number in range(count):
            ring.write(number % SLOTS + 1)
            ring.commit()
            ring.write(number % 3)
        os._exit(0)
    found = {"reads": 0, "wrong": 0, "generations": 0, "outlived": 0}
    over = 0
    while not over:
        with BlockStore.open_to_read(path) as store:
            found["generations"] += 1
            while not over:
                found["reads"] += 1
                found["wrong"] += content(store) != store.meta["written"]
                if commits.list_generations(Folder(path))[-1] >= store.generation + 3:
                    found["outlived"] += 1
                    found["wrong"] += content(store) != store.meta["written"]
                    break
                over = os.waitpid(child, os.WNOHANG)[0]
    return found


def kept(path, keep):
    """Checks the generations that are kept, while others expire."""
    ring, found = prepared(path, 75), []
    at = {1: 75}
    for number in range(2, 12):
        ring.write(37 if number % 2 else 5)
        at[ring.commit(keep)] = ring.written
        there = commits.list_generations(Folder(path))
        if there != list(range(max(1, number - keep), number + 1)):
            found.append(f"{there} at {number}")
        found += [f"{one} is not whole" for one in there if committed(path, one) != at[one]]
    ring.commit()
    ring.store.close()
    return [*found, *map(str, commits.list_generations(Folder(path)))]


def rivals(path):
    """Checks that a second writer is refused, and a writer after a kill is not."""
    ring = prepared(path, 75)
    found = []
    for act in (BlockStore.open_to_save, BlockStore.create):
        try:
            act(path)
            found.append("two writers")
        except LockedError:
            found.append("refused")
        except ValueError:
            found.append("in use")

    def child():
        try:
            BlockStore.open_to_save(path)
        except LockedError:
            die()

    found.append("refused" if in_child(child) else "two writers")
    ring.store.close()
    with BlockStore.open_to_save(path) as store:
        found.append(content(store))
    return found


def ousted(path, code):
    """Makes a second store of one process take over, with an error at each operation of that.

    Without a code, there is an interrupt at some lines instead.
    """
    outcomes, number, over = [], 0, False
    while not over:
        number += 1
        one = prepared(path, 75)
        one.write(3)
        other = Ring(BlockStore.open_to_read(path))
        hook, trace = At(number, strike(code)), Interrupt(HERE, 3 * number)
        try:
            if code:
                files.hook = hook
            else:
                sys.settrace(trace)
            other.write(5)
        except OSError:
            pass
        except KeyboardInterrupt:
            other.rows.undo_last_write(other.version)
        sys.settrace(None)
        files.hook, over = None, hook.count < number if code else trace.lines < 3 * number
        if other.content() != other.written:
            outcomes.append([number, "the second store is not as before"])
        if number % 2 and not one.store.is_ousted:
            one.write(2)  # who was not ousted goes on
            if one.content() != one.written:
                outcomes.append([number, "the first store is damaged"])
        if number % 4 > 1:  # somebody loads the path again instead
            other = Ring(BlockStore.open_to_read(path))
        try:
            other.write(4)
            other.commit()
        except StaleError as error:
            outcomes.append([number, str(error)[-60:]])
            other.store.close()
            one.store.close()
            continue
        for act in (functools.partial(one.write, 1), one.commit, one.content):
            try:
                act()
                outcomes.append([number, "the first store was not ousted"])
            except StaleError:
                pass
        if committed(path) != other.written:
            outcomes.append([number, "the second store is not whole"])
        one.store.close()
        late = Ring(BlockStore.open_to_read(path))
        other.write(1)
        other.commit()
        try:
            late.write(1)
            outcomes.append([number, "an outdated store took over"])
        except StaleError:
            pass
        try:
            other.write(1)
        except StaleError as error:
            outcomes.append([number, str(error)[-60:]])
        if other.content() != other.written:
            outcomes.append([number, "a takeover that failed did harm"])
        other.store.close()
    return {"operations": number, "outcomes": outcomes}


def fork(path):
    """Checks that a child forked from the writer reads, but neither writes nor keeps the lock."""
    ring = prepared(path, 75)
    readable, written = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for act in (
            functools.partial(ring.write, 3),
            ring.commit,
            lambda: BlockStore.open_to_save(path),
        ):
            try:
                act()
                said.append("done")
            except LockedError:
                said.append("refused")
        os.write(written, json.dumps([*said, ring.content()]).encode())
        signal.pause()
        os._exit(0)
    found = {"child": json.loads(os.read(readable, 1000))}
    ring.write(2)
    ring.commit()
    found["parent"] = committed(path)
    ring.store.close()
    with BlockStore.open_to_save(path) as store:  # while the child is still alive
        other = Ring(store)
        other.write(1)
        other.commit()
    found["after"] = committed(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return found


def crew(path, fault):
    """Saves arrays of three processes; one of them may die before it has told its tables."""
    prepared(path, 75).store.close()
    found = []
    for round_ in range(3):
        stamps, pipes = stamps_of(130 + round_), []
        with BlockStore.open_to_save(path) as leader:
            for number in (1, 2):
                readable, written = os.pipe()
                child = os.fork()
                if not child:
                    os.close(readable)
                    with BlockStore.join(path) as member:
                        member.put({f"shards/{number}/x": source_of("x", rows(stamps, 300))})
                        if fault and number == round_:
                            die()
                        with os.fdopen(written, "w") as file:
                            json.dump(member.tables(), file)
                    os._exit(0)
                os.close(written)
                pipes.append((child, readable))
            leader.put({"shards/0/x": source_of("x", rows(stamps, 300))})
            tables = {}
            for child, readable in pipes:
                with os.fdopen(readable) as file:
                    text = file.read()
                os.waitpid(child, 0)
                tables |= json.loads(text) if text else {}
            if len(tables) == 2:
                commit(leader, 130 + round_, stamps, joined=tables)
        found.append(committed(path))
    with BlockStore.open_to_read(path) as store:
        names = sorted(store.arrays)
    return [*found, names, len(os.listdir(os.path.join(path, "arrays")))]


def moved(path):
    """Checks the errors of a writer whose folder is renamed, removed or replaced by another."""
    found = {}
    for name in ("renamed", "removed", "replaced", "lock"):
        shutil.rmtree(path + ".away", ignore_errors=True)
        ring = prepared(path, 75)
        ring.write(3)
        if name == "removed":
            shutil.rmtree(path)
        elif name == "lock":
            os.unlink(os.path.join(path, "lock"))
        else:
            os.rename(path, path + ".away")
        if name == "replaced":
            prepared(path, 20).store.close()
        said = []
        for act in (lambda ring=ring: ring.write(2), ring.commit):
            try:
                act()
                said.append("done")
            except OSError as error:
                said.append(errno.errorcode[error.errno])
        said.append(ring.content())
        if name == "replaced":
            said.append(committed(path))
        found[name] = said
        ring.store.close()
    return found


def make(path, code):
    """Raises at every operation of creating a store; the next attempt must succeed."""
    total = operations(lambda: prepared(path, 0).store.close())
    outcomes = []
    for number in range(1, total + 1):
        shutil.rmtree(path, ignore_errors=True)
        files.hook = At(number, strike(code))
        try:
            prepared(path, 0)
            outcomes.append("nothing raised")
        except OSError as error:
            outcomes.append("raised" if error.errno == code else repr(error))
        files.hook = None
        gc.collect()
        block_store.writing.clear()
        ring = Ring(BlockStore.create(path))
        ring.write(3)
        ring.commit()
        if committed(path) != 3 or len(os.listdir(os.path.join(path, "arrays"))) != len(WIDTHS):
            outcomes[-1] = "the next try failed"
        ring.store.close()
    return {"operations": total, "outcomes": outcomes}


def large(path):
    """Writes above the limit on the size of files; returns the errors, and what is there."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ring = prepared(path, 75)
    resource.setrlimit(resource.RLIMIT_FSIZE, (21_000, resource.RLIM_INFINITY))
    found = []
    wide = source_of("wide", np.zeros((SLOTS, 3000), np.uint8))
    for act in (lambda: ring.write(40), lambda: ring.store.array("wide", wide, reserve=SLOTS)):
        try:
            act()
            found.append("nothing raised")
        except OSError as error:
            found.append(errno.errorcode[error.errno])
    return [*found, ring.content(), ring.commit(), committed(path)]


def temporary(path):
    """Kills a process at each operation on a temporary store; the next one removes what is left."""
    os.makedirs(path)
    tempfile.tempdir = path
    found = {"operations": 0, "outcomes": []}

    def work():
        ring = Ring(BlockStore.create(None))
        ring.write(70)
        ring.write(20)
        if ring.content() != ring.written:
            found["outcomes"].append("not as written")
        return

    total = operations(work)
    if os.listdir(path):
        found["outcomes"].append("left over at the end")

    def child(number):
        files.hook = At(number, die)
        work()
        gc.collect()

    for number in range(1, total + 1):
        found["operations"] += 1
        if not in_child(functools.partial(child, number)):
            found["outcomes"].append("not as planned")
        empty = [one for one in os.listdir(path) if not os.listdir(os.path.join(path, one))]
        store = BlockStore.create(None)
        # An empty folder may belong to a process that has yet to lock it.
        if {*os.listdir(path)} != {os.path.basename(store.path), *empty}:
            found["outcomes"].append([number, os.listdir(path)])
        del store
        if {*os.listdir(path)} != {*empty}:
            found["outcomes"].append([number, "a store that nobody has"])
        for one in empty:
            os.rmdir(os.path.join(path, one))
    return found


def flip(path, seed, stride):
    """Flips a bit of every `stride`-th byte of a store with two generations."""
    rng = random.Random(seed)

    def flips(data):
        changed = bytearray(data)
        for at in range(0, len(data), stride):
            changed[at] ^= 1 << rng.randrange(8)
            yield changed
            changed[at] = data[at]

    return damage(path, flips)


def cut(path, stride):
    """Cuts the files of a store with two generations at every `stride`-th length."""
    return damage(path, lambda data: (data[:length] for length in range(0, len(data), stride)))


def damage(path, changes):
    global LARGE
    blocks.BLOCK, WIDTHS["x"], LARGE = 300, 30, 300
    missed, count, found = [], 0, 0
    ring = prepared(path, 75)
    ring.write(10)
    ring.commit(keep=1)
    ring.write(3)
    ring.store.close()
    names = [os.path.join(top, name) for top, _, there in os.walk(path) for name in there]
    for name in sorted(names):
        with open(name, "rb") as file:
            data = file.read()
        for changed in changes(data):
            with open(name, "wb") as file:
                file.write(changed)
            count += 1
            texts = list(noticed(path, name))
            found += "found" in texts
            missed += [[name, text] for text in texts if text not in (None, "found")]
            lines = damages_at(path)
            if bool(lines) != ("found" in texts) or not all(name in line for line in lines):
                missed.append([name, texts, lines])
        with open(name, "wb") as file:
            file.write(data)
    return {"changes": count, "found": found, "missed": missed[:20]}


def damages_at(path):
    """Returns lines about damages; the version of a generation may be another one by a flip."""
    try:
        return block_store.find_damages(path)
    except commits.VersionError as error:
        return [str(error)]


def noticed(path, changed):
    """Yields, for each generation, "found" for a clear error, None, or what is wrong."""
    for number, written in ((1, 75), (2, 85)):
        if changed.endswith(commits.generation_name(3 - number)):
            continue
        try:
            with BlockStore.open_to_read(path, number if number == 1 else None) as store:
                targets = {
                    name: np.zeros((SLOTS, width), np.uint8) for name, width in WIDTHS.items()
                }
                store.read(targets)
                expected = store.meta["stamps"]
            same = all(
                np.array_equal(it, rows(expected, WIDTHS[key])) for key, it in targets.items()
            )
            yield None if written == store.meta["written"] and same else "WRONG"
        except ValueError as error:
            text = str(error)
            is_rows = "arrays" in changed
            what = ("leaf", "block") if is_rows and "damaged" in text else ()
            yield "found" if changed in text and all(word in text for word in what) else text


def main():
    """Runs a scenario."""
    name, path, *rest = sys.argv[1:]
    # In threads, the saves of `together` have 42 or 43 operations, by the order of their blocks.
    if name in ("power", "kill_and_power", "flip", "cut") or rest[:1] == ["together"]:
        threads.WORKERS = 1
    arguments = [int(part) if part.isdigit() else part for part in rest]
    json.dump(globals()[name](path, *arguments), sys.stdout)


if __name__ == "__main__":
    main()
