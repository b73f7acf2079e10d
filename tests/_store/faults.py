"""A store under faults, in a process that never loads JAX.

Run as a script with the name of a scenario and a folder. Prints the results as JSON.
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
import threading
import time

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import bare

    bare.install()

import numpy as np

from jrb._store import files, generation, opening, store, table, threads
from jrb._store.errors import DamagedError, LockedError, StaleError
from jrb._store.table import Column

SLOTS, SLACK = 60, 15
if __name__ == "__main__":
    table._FIRST = 20 * 3012  # bytes of a third of the rows, so that the table grows
    table._MOST_OPEN = 2  # so that the file of one column is opened for each use
COLUMNS = (Column.of("x", ("uint8", "[3000]"), 3000), Column.of("next/y", ("uint8", "[4]"), 4))


def rows(stamps):
    """Returns the rows of all columns for these stamps; rows of different stamps differ."""
    return [_patterns(column.width)[np.asarray(stamps) % 251] for column in COLUMNS]


@functools.cache
def _patterns(width):
    """Returns the rows of a column for the stamps 0 to 250, uint8 `[251, width]`."""
    base = np.arange(width, dtype=np.int64)
    return ((base * 7 + np.arange(251)[:, None] * 31) % 251).astype(np.uint8)


class Ring:
    """A store written as a ring, in which row number t has the stamp t."""

    def __init__(self, opened, written=0):
        self.store, self.written, self.version = opened, written, opened.version
        self.lost = len(opened.lost)

    def write(self, count):
        stamps = np.arange(self.written, self.written + count)
        self.version = self.store.put(self.version, stamps % SLOTS, rows(stamps))
        passed = max(0, self.written + count - SLOTS) - max(0, self.written - SLOTS)
        self.written, self.lost = self.written + count, max(0, self.lost - passed)

    def edit(self):
        """Rewrites 25 rows without overwriting committed ones; the table may grow."""
        slots = np.arange(5, 30)
        stamps = self.written - 1 - (self.written - 1 - slots) % SLOTS
        self.version = self.store.put(self.version, slots, rows(stamps), expiring=False)

    def commit(self, keep=0):
        arrays = {
            "written": str(self.written).encode(),
            "lost": str(self.lost).encode(),
            "large": bytes([self.written % 256]) * 5000,
        }
        meta = {"kind": "test"}
        return self.store.commit(self.version, meta, {name: [] for name in arrays}, arrays, keep)


def reopen(path, number=None):
    """Opens the newest or the given generation of a store and checks it."""
    while True:
        folder = opening.folder_at(path)
        one = generation.newest(folder) if number is None else opening.at(folder, number)
        try:
            there = opening.store_of(one)
            opening.check(there, rows=True)
            return there
        except (DamagedError, FileNotFoundError):
            if number is not None or generation.numbers(folder)[-1:] == [one.number]:
                raise  # otherwise retry: a newer generation exists


def opened(path, number=None):
    """Opens the ring of the newest or the given generation and checks it."""
    while True:
        there = reopen(path, number)
        if not there.generation:
            raise FileNotFoundError(path)
        try:
            entry = generation.Generation(there.folder, there.generation)
        except FileNotFoundError:
            continue  # a newer generation has replaced it
        text = lambda name, entry=entry: int(entry.array(name, np.uint8).tobytes())
        ring = Ring(there, text("written"))
        ring.lost = max(text("lost"), _behind(ring.written, there.lost))
        if entry.array("large", np.uint8).tobytes() != bytes([ring.written % 256]) * 5000:
            raise ValueError("arrays of two generations")
        return ring


def _behind(written, slots):
    """Returns the number of rows from the oldest one to the newest one at these slots."""
    stamps = written - 1 - (written - 1 - slots) % SLOTS
    return int((stamps - max(0, written - SLOTS)).max(initial=-1)) + 1


def content(ring):
    """Returns the number of rows written if the newest ones are intact, otherwise an error text."""
    held = min(ring.written, SLOTS) - ring.lost
    stamps = np.arange(ring.written - held, ring.written)
    found = ring.store.take(ring.version, [stamps % SLOTS] * len(COLUMNS))
    same = all(map(np.array_equal, found, rows(stamps)))
    return ring.written if same else "a mixture"


def left():
    """Simulates another process: closes everything that this one had open."""
    gc.collect()
    store.writing.clear()


def created(path, slack=SLACK):
    return opening.create(path, COLUMNS, SLOTS, SLOTS + slack, reserve=True)


def prepared(path, count, slack=SLACK):
    """Returns a store with `count` committed rows."""
    shutil.rmtree(path, ignore_errors=True)
    ring = Ring(created(path, slack))
    for part in (count - count // 2, count // 2):
        if part:
            ring.write(part)
    if count:
        ring.commit()
    return ring


def again(ring):
    """Overwrites a part of the committed rows, commits, and continues."""
    ring.write(7)
    ring.write(25)
    ring.commit()
    ring.write(40)


def within(ring):
    """Writes no more rows than there are free places beside the committed rows."""
    ring.write(7)
    ring.write(8)
    ring.commit()
    ring.write(14)


def edit(ring):
    """Edits and commits rows, and writes more of them."""
    for _ in range(3):
        ring.edit()
    ring.commit()
    ring.write(5)


WORK = {
    "wrapped": (75, again, {75, 107}),
    "within": (75, within, {75, 90}),
    "filling": (20, again, {20, 52}),
    "editing": (75, edit, {75}),
    "first": (0, again, {None, 32}),
}
SAFE = {"within", "editing"}  # work that never overwrites committed rows


class At:
    """A hook that acts at the k-th operation."""

    def __init__(self, number, act):
        self.number, self.act, self.count = number, act, 0
        self.lock = threading.Lock()

    def __call__(self, operation, path, *rest):
        with self.lock:
            self.count += 1
            if self.count == self.number:
                self.act(operation, path)


def operations(work):
    """Runs some work and returns the number of its file operations."""
    files.hook = hook = At(-1, None)
    try:
        work()
    finally:
        files.hook = None
    return hook.count


def judged(path, name):
    """Checks that a store works after a fault; returns its row count, None, or an error text."""
    allowed = WORK[name][2]
    try:
        ring = opened(path)
    except FileNotFoundError:
        return None if None in allowed else "nothing there"
    if ring.lost and name in SAFE:
        return f"lost {ring.lost}"
    found = content(ring)
    if found not in allowed or ring.lost >= SLOTS:
        return f"not as committed: {found}, {ring.lost}"
    ring.write(13)
    if content(ring) != found + 13:
        return "rows were lost after it"
    ring.commit()
    if content(opened(path)) != found + 13 or opening.damages(path):
        return "the next save failed"
    there = {entry for entry in os.listdir(path) if not entry.startswith("generation")}
    if there != {"lock", "rows"} or len(os.listdir(path)) != 3:
        return f"left over: {sorted(os.listdir(path))}"
    return found


def in_child(work):
    """Runs a function in a child process; returns True if SIGKILL ended the process."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) == signal.SIGKILL


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def kill(path, name):
    """Kills a process at each operation in turn."""
    count, work, _ = WORK[name]
    total = operations(functools.partial(work, prepared(path, count)))
    left()
    outcomes = []

    def child(number):
        ring = prepared(path, count)
        files.hook = At(number, die)
        work(ring)

    for number in range(1, total + 1):
        planned = in_child(functools.partial(child, number))
        outcomes.append(judged(path, name) if planned else "not as planned")
        left()
    return {"operations": total, "outcomes": outcomes}


def kill_twice(path):
    """Kills a process at every operation of the first write and commit after a crash."""
    ring = prepared(path, 75)
    ring.write(50)
    crash = path + ".crash"
    shutil.rmtree(crash, ignore_errors=True)
    shutil.copytree(path, crash)
    del ring
    left()

    def go_on():
        ring = opened(path)
        ring.write(30)
        ring.write(2)
        ring.commit()

    total = operations(go_on)
    outcomes = []

    def child(number):
        files.hook = At(number, die)
        go_on()

    for number in range(1, total + 1):
        left()
        shutil.rmtree(path)
        shutil.copytree(crash, path)
        planned = in_child(functools.partial(child, number))
        outcomes.append(judged(path, "wrapped") if planned else "not as planned")
    return {"operations": total, "outcomes": outcomes}


def strike(code):
    def raising(*_):
        raise OSError(code, os.strerror(code))

    return raising


def fail(path, name, code):
    """Raises an OSError at every operation in turn and checks the store after each."""
    count, work, _ = WORK[name]
    total = operations(functools.partial(work, prepared(path, count)))
    outcomes = []
    for number in range(1, total + 1):
        left()
        ring = prepared(path, count)
        files.hook = At(number, strike(code))
        try:
            work(ring)
            raised = "nothing raised"
        except OSError as error:
            raised = None if error.errno == code else repr(error)
        files.hook = None
        del ring
        left()
        outcomes.append(raised or judged(path, name))
    return {"operations": total, "outcomes": outcomes}


def go_on(path, code):
    """Raises at every operation of writes and commits; the same process continues, then crashes.

    Successful commits survive the crash. Readers see their rows or raise StaleError.
    """
    outcomes = []
    number, over = 0, False
    while not over:
        number += 1
        left()
        ring = prepared(path, 75)
        reader = opened(path)
        files.hook = hook = At(number, strike(code))
        promised = {75}
        for step in (7, None, 20, None):
            before = ring.written
            try:
                ring.write(step) if step else ring.commit()
                if not step:
                    promised = {ring.written}
            except OSError as error:
                note = " ".join(error.__notes__) if hasattr(error, "__notes__") else ""
                if not step:
                    promised |= {ring.written}
                    happened = "has happened" in note
                    if happened != (opened(path).written == ring.written):
                        outcomes.append("said the wrong thing")
                else:
                    try:
                        if content(ring) != before:
                            outcomes.append("a write that failed was seen")
                    except StaleError:
                        pass  # the write needed the places of old rows
                    ring.write(step)
        over, files.hook = hook.count < number, None
        try:
            if content(reader) != 75:
                outcomes.append("a reader sees another")
        except StaleError:
            pass
        ring.write(3)
        if content(ring) != ring.written:
            outcomes.append("rows are gone")
        crash = path + ".crash"
        shutil.rmtree(crash, ignore_errors=True)
        shutil.copytree(path, crash)
        found = opened(crash)
        if content(found) not in promised:
            outcomes.append(f"{found.written} is not {promised}")
        ring.commit()
        if content(opened(path)) != ring.written or opening.damages(path):
            outcomes.append("the last commit is not whole")
    return {"operations": number, "outcomes": outcomes}


def power(path, name, seed):
    """Cuts the power at every operation; each change that was not synced survives at random."""
    count, work, _ = WORK[name]
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
        outcomes.append(judged(path, name))
        left()
    return {"operations": len(log), "outcomes": outcomes}


def crashed(before, path, log, stop, rng):
    """Makes the folder as a disk may show it after the first `stop` operations and a power loss."""
    shutil.rmtree(path)
    shutil.copytree(before, path)
    synced = lambda place, since: ("fsync", place) in [event[:2] for event in log[since:stop]]
    for number, (operation, place, *rest) in enumerate(log[:stop]):
        folder = os.path.dirname(rest[0] if operation == "replace" else place)
        if operation == "pwrite":
            if synced(place, number) or rng.random() < 0.5:
                with open(place if os.path.exists(place) else os.devnull, "r+b") as file:
                    file.seek(rest[0])
                    file.write(rest[1])
        elif operation == "resize":
            if os.path.exists(place) and (synced(place, number) or rng.random() < 0.5):
                os.truncate(place, rest[0])
        elif operation in _NAMING and (synced(folder, number) or rng.random() < 0.5):
            _name_again(operation, place, *rest)


_NAMING = ("create", "mkdir", "replace", "unlink", "rmdir")


def _name_again(operation, place, *rest):
    """Repeats one operation on names; ignores files that were lost before."""
    if operation == "create":
        open(place, "wb").close()
    elif operation == "mkdir":
        os.makedirs(place, exist_ok=True)
    elif operation == "rmdir":
        shutil.rmtree(place, ignore_errors=True)
    elif operation == "unlink":
        if os.path.exists(place):
            os.unlink(place)
    elif os.path.exists(place):
        os.replace(place, rest[0])


class Save:
    """Saves a checkpoint whose rows have these stamps."""

    def __init__(self, stamps, columns=COLUMNS, keep=0):
        self.stamps, self.columns, self.keep = stamps, columns, keep

    def __call__(self, path):
        slots = np.arange(len(self.stamps))
        opened = opening.to_save(path, self.columns, len(slots))
        try:
            old = opened.take(opened.version, [slots] * len(self.columns))
            new = rows(self.stamps)[: len(self.columns)]
            pairs = zip(old, new, strict=True)
            which = np.flatnonzero(np.any([(a != b).any(1) for a, b in pairs], axis=0))
            found = [column[which] for column in new]
            opened.put(opened.version, which, found, expiring=False)
            text = {"stamps": json.dumps(list(map(int, self.stamps))).encode()}
            opened.commit(opened.version, {}, {"stamps": []}, text, self.keep)
        finally:
            opened.close()

    def is_at(self, path, number=None):
        """Returns True if the checkpoint at a path is this save."""
        found = saved_at(path, number)
        return found is not None and found == list(self.stamps)


def saved_at(path, number=None):
    """Returns a checkpoint's stamps; None without a checkpoint, -1 if rows do not match them."""
    try:
        there = reopen(path, number)
    except FileNotFoundError:
        return None
    entry = generation.Generation(there.folder, there.generation)
    stamps = json.loads(entry.array("stamps", np.uint8).tobytes())
    found = [np.zeros((there.slots, column.width), np.uint8) for column in there.table.columns]
    for number, column in enumerate(found):
        there.read_columns({number: column})
    same = all(map(np.array_equal, found, rows(stamps)))
    return stamps if same else -1


BEFORE = Save(range(40))
SAVES = {
    "full": Save(range(100, 140)),
    "incremental": Save([*range(10), *range(200, 205), *range(15, 40)], keep=1),
    "other columns": Save(range(300, 330), COLUMNS[:1]),
    "first": Save(range(40, 80)),
}


def _begun(path, name):
    shutil.rmtree(path, ignore_errors=True)
    if name != "first":
        BEFORE(path)


def _judged(path, name):
    """Checks that the next save works and cleans up; returns old, new, or an error text."""
    found, new = saved_at(path), SAVES[name]
    old = None if name == "first" else list(BEFORE.stamps)
    if found not in (old, list(new.stamps)):
        return f"a mixture: {found}"
    last = Save(range(500, 540))
    last(path)
    if not last.is_at(path) or opening.damages(path):
        return "the next save failed"
    left = sorted(os.listdir(path))
    if len(left) != 3 or not left[0].startswith("generation-0"):
        return f"left over: {left}"
    return "old" if found == old else "new"


def save(path, fault, name, code):
    """Kills the process, raises, or cuts the power at every operation of a save."""
    _begun(path, name)
    total = operations(functools.partial(SAVES[name], path))
    outcomes, log = [], []
    if fault == "power":
        _begun(path, name)
        os.makedirs(path, exist_ok=True)
        shutil.rmtree(path + ".before", ignore_errors=True)
        shutil.copytree(path, path + ".before")
        copy = lambda value: bytes(value) if isinstance(value, memoryview) else value
        files.hook = lambda *event: log.append(tuple(map(copy, event)))
        SAVES[name](path)
        files.hook = None
    rng = random.Random(code)
    for number in range(1, total + 1):
        if fault == "power":
            crashed(path + ".before", path, log, number, rng)
        else:
            _begun(path, name)
        if fault == "kill":
            in_child(functools.partial(_die_in, path, name, number))
        elif fault == "fail":
            files.hook = At(number, strike(code))
            try:
                SAVES[name](path)
                outcomes.append("nothing raised")
            except OSError:
                pass
            files.hook = None
        outcomes.append(_judged(path, name))
    return {"operations": total, "outcomes": outcomes}


def _die_in(path, name, number):
    files.hook = At(number, die)
    SAVES[name](path)


def make(path, code):
    """Raises at every operation of creating a store; the next attempt must succeed."""
    total = operations(lambda: prepared(path, 0) and None)
    outcomes = []
    for number in range(1, total + 1):
        left()
        shutil.rmtree(path, ignore_errors=True)
        files.hook = At(number, strike(code))
        try:
            created(path)
            outcomes.append("nothing raised")
        except OSError as error:
            outcomes.append("raised" if error.errno == code else repr(error))
        files.hook = None
        left()
        ring = Ring(created(path))
        ring.write(3)
        if content(ring) != 3:
            outcomes[-1] = "the next try failed"
    return {"operations": total, "outcomes": outcomes}


def large(path):
    """Creates a store above the file size limit; returns the error and the files left."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        created(path)
        return "nothing raised"
    except OSError as error:
        return [errno.errorcode[error.errno], sorted(os.listdir(path))]


def flip(path, seed):
    """Flips bits in every file of a store with rows written after the last commit."""
    rng, missed, count = random.Random(seed), [], 0
    ring = prepared(path, 75)
    ring.write(10)
    del ring
    left()
    names = [os.path.join(top, name) for top, _, found in os.walk(path) for name in found]
    for name in names:
        with open(name, "rb") as file:
            data = file.read()
        places = range(len(data)) if len(data) < 2000 else rng.sample(range(len(data)), 150)
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
                if "leaf" not in text and "generation" not in text:
                    missed.append([name, place, text])
        with open(name, "wb") as file:
            file.write(data)
    return {"flips": count, "missed": missed}


def truncate(path):
    """Truncates every file of rows; the error must name the file and both sizes."""
    prepared(path, 75)
    left()
    missed, count = [], 0
    for column in COLUMNS:
        name = os.path.join(path, "rows", column.file)
        with open(name, "rb") as file:
            data = file.read()
        for length in {0, 1, len(data) // 2, len(data) - 1}:
            with open(name, "wb") as file:
                file.write(data[:length])
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
    """Counts correct, wrong and stale reads while another process writes and commits."""
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
    found = {"reads": 0, "wrong": 0, "stale": 0, "last": 0}
    while True:
        over = os.waitpid(child, os.WNOHANG)[0]
        ring = opened(path)
        found["wrong"] += ring.written < found["last"]
        found["last"] = ring.written
        for _ in range(3):
            found["reads"] += 1
            try:
                found["wrong"] += content(ring) != ring.written
            except StaleError:
                found["stale"] += 1
        if over:
            return found


def rivals(path):
    """Checks that a second writer is refused, and a writer after a kill is not."""
    ring = prepared(path, 75)
    left()  # so that the opened store acts as another process
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
    left()
    other.write(1)
    return [*found, content(other)]


def fork(path):
    """Checks that a child forked from the writer reads, but neither writes nor keeps the lock."""
    ring = prepared(path, 75)
    found = {}
    readable, written = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for act in (functools.partial(ring.write, 3), ring.commit):
            try:
                act()
                said.append("done")
            except LockedError:
                said.append("refused")
        try:
            other = opened(path)
            other.write(1)
            said.append("done")
        except LockedError:
            said.append("refused")
        said.append(content(ring))
        os.write(written, json.dumps(said).encode())
        time.sleep(30)
        os._exit(0)
    found["child"] = json.loads(os.read(readable, 1000))
    ring.write(2)
    ring.commit()
    found["parent"] = content(opened(path))
    del ring
    left()
    other = opened(path)  # while the child is still alive
    other.write(1)
    other.commit()
    found["after"] = content(opened(path))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return found


def moved(path):
    """Checks the errors of a writer whose folder is renamed, removed or replaced by another."""
    found = {}
    for name in ("renamed", "removed", "replaced", "lock"):
        left()
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
            store.writing.clear()
            other = prepared(path, 20)
        said = []
        for act in (lambda ring=ring: ring.write(2), ring.commit):
            try:
                act()
                said.append("done")
            except OSError as error:
                said.append(errno.errorcode[error.errno])
        if name == "replaced":
            said.append(content(other))
        found[name] = said
    return found


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the k-th line run in files of a folder."""

    def __init__(self, folder, number):
        self.folder, self.number, self.lines = folder, number, 0

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(path, again, first, stride):
    """Interrupts writes, edits and commits at every `stride`-th line; the work continues.

    An interrupted step is repeated if `again` is set or rows are lost, otherwise skipped.
    """
    here = os.path.dirname(os.path.abspath(files.__file__))
    outcomes, number, over = [], first - stride, False
    while not over:
        number += stride
        left()
        ring, trace = prepared(path, 75), Interrupt(here, number)
        reader = opened(path)
        steps = (4, ring.commit, ring.edit, 5, ring.commit, 20, ring.commit)
        for step in steps:
            act = step if callable(step) else functools.partial(ring.write, step)
            try:
                sys.settrace(trace)
                act()
                sys.settrace(None)
            except KeyboardInterrupt:
                sys.settrace(None)
                if step != ring.commit:
                    ring.store.take_back(ring.version)
                lost = is_gone(ring)
                if again or lost:
                    act()
            if content(ring) != ring.written:
                outcomes.append([number, "not as written"])
        over = trace.lines < number
        try:
            if content(reader) != 75:
                outcomes.append([number, "a reader sees another"])
        except StaleError:
            pass
        ring.write(7)
        ring.edit()
        if content(opened(path)) < ring.written - 7 - 20:
            outcomes.append([number, "what was promised is gone"])
        ring.commit()
        if content(opened(path)) != ring.written or opening.damages(path):
            outcomes.append([number, "the last commit is not whole"])
    return {"lines": number, "outcomes": outcomes}


def is_gone(ring):
    """Returns True if old rows were overwritten for lack of room, or differ."""
    try:
        return content(ring) != ring.written
    except StaleError:
        return True


def at_random(path, seed, kills):
    """Kills a process that writes and commits at random times; no commit may be lost."""
    rng, outcomes, last = random.Random(seed), [], 0
    prepared(path, 75)
    left()
    for _ in range(kills):
        readable, written = os.pipe()
        child = os.fork()
        if not child:
            ring = opened(path)
            dice = random.Random(rng.random())
            while True:
                for _ in range(dice.randrange(4)):
                    ring.write(dice.randrange(1, 20))
                ring.commit()
                os.write(written, f"{ring.written}\n".encode())
        os.close(written)
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said = os.read(readable, 1 << 16).split()
        os.close(readable)
        last = int(said[-1]) if said else last
        ring = opened(path)
        if content(ring) < last or opening.damages(path):
            outcomes.append(f"{last} was promised, {content(ring)} is there")
        last = ring.written
        rng.random()
    return {"kills": kills, "outcomes": outcomes, "written": last}


def main():
    """Runs a scenario."""
    name, path, *rest = sys.argv[1:]
    threads.WORKERS = 1 if name == "power" else threads.WORKERS
    arguments = [int(part) if part.isdigit() else part for part in rest]
    json.dump(globals()[name](path, *arguments), sys.stdout)


if __name__ == "__main__":
    main()
