"""Stores whose rows are written in place, in a process that never loads JAX.

Run as a script with the name of a scenario and a folder. Prints what it found as JSON.
"""

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

if __name__ == "__main__":
    import bare

    bare.install()

import numpy as np

from jrb.disk import files, live, manifest, opening, reading, threads
from jrb.disk.behind import Behind
from jrb.disk.blocks import Source
from jrb.disk.errors import DamagedError, LockedError
from jrb.disk.table import Column
from tests.stores import At, crashed, operations

CAPACITY = 60
COLUMNS = (Column("x", ("uint8", (3000,)), 3000), Column("next/y", ("uint8", (4,)), 4))


def rows(stamps):
    """Rows of all columns that are told apart by their stamps."""
    made = []
    for column in COLUMNS:
        base = np.arange(column.width, dtype=np.int64)
        made.append(((base * 7 + np.asarray(stamps)[:, None] * 31) % 251).astype(np.uint8))
    return made


class Ring:
    """A store written as a ring: row number t has the stamp t. And how it is committed."""

    def __init__(self, store, written=0):
        self.store, self.written, self.version = store, written, store.version
        self.put = store.put

    def write(self, count):
        stamps = np.arange(self.written, self.written + count)
        self.version = self.put(self.version, stamps % CAPACITY, rows(stamps), True)
        self.written += count

    def commit(self):
        number = str(self.written).encode()
        source = Source("written", ("text", []), len(number), lambda a, b: number[a:b])
        other = bytes([self.written % 256]) * 5000
        large = Source("large", ("bytes", []), len(other), lambda a, b: other[a:b])
        self.store.commit(self.version, {"kind": "test"}, [source, large])


def opened(path):
    """The ring as it was committed last, checked."""

    def use(body):
        if not body["meta"]:
            raise FileNotFoundError(path)
        reading.check_sizes(path, body)
        leaves = {leaf["name"]: leaf for leaf in body["leaves"]}
        written = int(bytes.fromhex(leaves["written"]["bytes"]))
        target = bytearray(5000)
        reading.read_leaf(path, leaves["large"], memoryview(target))
        if target != bytes([written % 256]) * 5000:
            raise ValueError("arrays of two generations")
        return Ring(opening.reopen(path, body), written)

    return reading.snapshot(path, use)


def content(ring):
    """How many rows were written, if all of the last ones are there; else what is wrong."""
    held = min(ring.written, CAPACITY)
    stamps = np.arange(ring.written - held, ring.written)
    found = ring.store.take(ring.version, [stamps % CAPACITY] * len(COLUMNS))
    same = all(map(np.array_equal, found, rows(stamps)))
    return ring.written if same else "a mixture"


def left():
    """As in another process: what this one had open is gone."""
    gc.collect()
    live.writing.clear()


def prepared(path, count):
    """A store to which so many rows were committed."""
    shutil.rmtree(path, ignore_errors=True)
    ring = Ring(opening.create(path, COLUMNS, CAPACITY, prealloc=True))
    if count:
        ring.write(count)
        ring.commit()
    return ring


def again(ring):
    """Writes over a part of what was committed, commits that, and goes on."""
    ring.write(7)
    ring.write(25)
    ring.commit()
    ring.write(40)


def behind(ring):
    """The same by a thread."""
    ring.put = Behind(ring.store).put
    again(ring)
    ring.store.settle(ring.version)


WORK = {
    "wrapped": (75, again, {75, 107}),
    "filling": (20, again, {20, 52}),
    "behind": (75, behind, {75, 107}),
    "first": (0, again, {None, 32}),
}


def judged(path, allowed):
    """What a fault has left behind; then it has to go on, and to be whole."""
    try:
        ring = opened(path)
    except FileNotFoundError:
        return None if None in allowed else "nothing there"
    found = content(ring)
    if found not in allowed:
        return f"not as committed: {found}"
    ring.write(13)
    if content(ring) != found + 13:
        return "rows were lost after it"
    ring.commit()
    if content(opened(path)) != found + 13 or opening.damages(path, manifest.read(path)):
        return "the next save failed"
    return found


def kill(path, name):
    """Kills a process at every operation in turn."""
    count, work, allowed = WORK[name]
    ring = prepared(path, count)
    total = operations(functools.partial(work, ring))
    del ring
    left()
    outcomes = []
    for number in range(1, total + 1):
        child = os.fork()
        if not child:
            ring = prepared(path, count)
            files.hook = At(number, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            work(ring)
            os._exit(1)  # the operation was never reached
        _, status = os.waitpid(child, 0)
        planned = os.WTERMSIG(status) == signal.SIGKILL
        outcomes.append(judged(path, allowed) if planned else "not as planned")
    return {"operations": total, "outcomes": outcomes}


def kill_twice(path):
    """Kills a process at every operation by which it undoes what a crash has left."""
    ring = prepared(path, 75)
    ring.write(50)
    crash = path + ".crash"
    shutil.rmtree(crash, ignore_errors=True)
    shutil.copytree(path, crash)
    del ring
    left()
    start = lambda: opened(path).write(1)
    total = operations(start)
    outcomes = []
    for number in range(1, total + 1):
        shutil.rmtree(path)
        shutil.copytree(crash, path)
        child = os.fork()
        if not child:
            files.hook = At(number, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            start()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        planned = os.WTERMSIG(status) == signal.SIGKILL
        outcomes.append(judged(path, {75}) if planned else "not as planned")
    return {"operations": total, "outcomes": outcomes}


def fail(path, name, code):
    """Raises at every operation in turn; what was committed is intact."""
    count, work, allowed = WORK[name]
    ring = prepared(path, count)
    total = operations(functools.partial(work, ring))
    del ring

    def strike(*_):
        raise OSError(code, os.strerror(code))

    outcomes = []
    for number in range(1, total + 1):
        ring = prepared(path, count)
        files.hook = At(number, strike)
        try:
            work(ring)
            raised = "nothing raised"
        except OSError as error:
            raised = None if error.errno == code else repr(error)
        files.hook = None
        del ring
        left()
        outcomes.append(raised or judged(path, allowed))
    return {"operations": total, "outcomes": outcomes}


def go_on(path):
    """Raises at every operation of a commit; the same process goes on, and is killed then."""
    ring = prepared(path, 75)
    ring.write(7)
    total = operations(ring.commit)
    outcomes = []

    def strike(*_):
        raise OSError(errno.EIO, "broken")

    for number in range(1, total + 1):
        del ring
        left()
        ring = prepared(path, 75)
        ring.write(7)
        files.hook = At(number, strike)
        try:
            ring.commit()
            outcomes.append("nothing raised")
        except OSError:
            files.hook = None
            ring.write(30)
            crash = path + ".crash"
            shutil.rmtree(crash, ignore_errors=True)
            shutil.copytree(path, crash)
            outcomes.append(judged(crash, {75, 82}))
        files.hook = None
        ring.commit()
    return {"operations": total, "outcomes": outcomes}


def power(path, name, seed):
    """Cuts the power at every operation: what was not synced is there, or not, at random."""
    count, work, allowed = WORK[name]
    ring = prepared(path, count)
    log, before = [], path + ".before"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(path, before)
    copy = lambda value: bytes(value) if isinstance(value, memoryview) else value
    files.hook = lambda *event: log.append(tuple(map(copy, event)))
    work(ring)
    files.hook = None
    del ring
    left()
    rng, outcomes = random.Random(seed), []
    for stop in range(len(log) + 1):
        crashed(before, path, log, stop, rng)
        outcomes.append(judged(path, allowed))
    return {"operations": len(log), "outcomes": outcomes}


def make(path, code):
    """A disk that is full or broken at every operation of making a store; then another try."""
    shutil.rmtree(path, ignore_errors=True)
    create = lambda: opening.create(path, COLUMNS, CAPACITY, prealloc=True)
    total = operations(lambda: create() and None)
    outcomes = []

    def strike(*_):
        raise OSError(code, os.strerror(code))

    for number in range(1, total + 1):
        left()
        shutil.rmtree(path, ignore_errors=True)
        files.hook = At(number, strike)
        try:
            create()
            outcomes.append("nothing raised")
        except OSError as error:
            outcomes.append("raised" if error.errno == code else repr(error))
        files.hook = None
        ring = Ring(create())
        ring.write(3)
        if content(ring) != 3:
            outcomes[-1] = "the next try failed"
    return {"operations": total, "outcomes": outcomes}


def large(path):
    """Files that may not grow as large as they have to."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        opening.create(path, COLUMNS, CAPACITY, prealloc=True)
        return "nothing raised"
    except OSError as error:
        return [errno.errorcode[error.errno], sorted(os.listdir(path))]


def flip(path, seed):
    """Flips bits in every file of a store, some rows overwritten since it was committed."""
    rng, missed, count = random.Random(seed), [], 0
    ring = prepared(path, 75)
    ring.write(10)
    del ring
    left()
    names = [os.path.join(top, name) for top, _, found in os.walk(path) for name in found]
    for name in names:
        with open(name, "rb") as file:
            data = file.read()
        places = range(len(data)) if len(data) < 500 else rng.sample(range(len(data)), 100)
        for place in places:
            changed = bytearray(data)
            changed[place] ^= 1 << rng.randrange(8)
            with open(name, "wb") as file:
                file.write(changed)
            count += 1
            try:
                if content(opened(path)) != 75:
                    missed.append([name, place, "WRONG"])
            except ValueError as error:
                text = str(error)
                if "leaf" not in text and "manifest" not in text:
                    missed.append([name, place, text])
        with open(name, "wb") as file:
            file.write(data)
    return {"flips": count, "missed": missed}


def truncate(path):
    """Cuts every file of rows; each cut is noticed by name, with both sizes."""
    prepared(path, 75)
    left()
    missed, count = [], 0
    for column in COLUMNS:
        name = os.path.join(path, column.file)
        with open(name, "rb") as file:
            data = file.read()
        for length in {0, 1, len(data) // 2, len(data) - 1, len(data) + 1}:
            with open(name, "wb") as file:
                file.write((data + b"0")[:length])
            count += 1
            try:
                opened(path)
                missed.append([name, length])
            except DamagedError as error:
                parts = (name, f"expected {len(data)}", f"found {length}")
                missed += [] if all(part in str(error) for part in parts) else [str(error)]
        os.unlink(name)
        try:
            opened(path)
            missed.append([name, "gone"])
        except DamagedError:
            pass
        with open(name, "wb") as file:
            file.write(data)
    return {"cuts": count, "missed": missed}


def meet(path, count):
    """Reads while another process writes and commits: each is of what was committed."""
    prepared(path, 75)
    left()
    child = os.fork()
    if not child:
        ring = opened(path)
        for number in range(count):
            ring.write(number % 50 + 1)
            ring.commit()
            ring.write(number % 3)
        os._exit(0)
    reads, torn, last, seen = 0, 0, 0, set()
    while True:
        over = os.waitpid(child, os.WNOHANG)[0]
        ring = opened(path)
        for _ in range(3):  # the same for as long as it is open
            torn += content(ring) != ring.written
        torn += ring.written < last
        last, reads = ring.written, reads + 3
        seen.add(last)
        if over:
            return {"reads": reads, "torn": torn, "generations": len(seen), "last": last}


def rivals(path):
    """Whether a second writer is turned away, and one that comes after a kill is not."""
    ring = prepared(path, 75)
    left()  # as in another process
    found, other = [], opened(path)
    try:
        other.write(1)
        found.append("two writers")
    except LockedError:
        found.append("refused")
    found.append(content(other))
    ring.write(5)
    found.append(content(other))
    del ring
    other.write(1)
    return [*found, content(other)]


def main():
    """Runs a scenario."""
    name, path, *rest = sys.argv[1:]
    threads.WORKERS = 1 if name == "power" else threads.WORKERS
    arguments = [int(part) if part.isdigit() else part for part in rest]
    json.dump(globals()[name](path, *arguments), sys.stdout)


if __name__ == "__main__":
    main()
