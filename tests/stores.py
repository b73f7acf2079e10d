"""Saves and reads of a store of blocks, in a process that never loads JAX.

Run as a script with the name of a scenario and a folder. Prints what it found as JSON.
"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import zlib

if __name__ == "__main__":
    import bare

    bare.install()

from jrb.disk import files, manifest, reading, store, threads
from jrb.disk.blocks import Source
from jrb.disk.errors import DamagedError, LockedError

SIZES = {"storage/a": 300_000, "storage/b": 70_000, "small": 8, "none": 0}


def contents(stamp, changed=None):
    """Arrays that are told apart by their stamp; `changed`: only those bytes of `storage/a`."""
    made = {}
    for name, size in SIZES.items():
        seed = zlib.crc32(f"{name}{stamp}".encode())
        made[name] = random.Random(seed).randbytes(size)
    if changed is not None:
        old = contents(stamp - 1)["storage/a"]
        first, last = changed
        made["storage/a"] = old[:first] + made["storage/a"][first:last] + old[last:]
        made["storage/b"] = contents(stamp - 1)["storage/b"]
    return made


def sources(data, fresh=None):
    """What a save is given."""
    return [
        Source(
            name,
            ("uint8", [len(array)]),
            len(array),
            lambda start, stop, array=array: memoryview(array)[start:stop],
            by_slot=name == "storage/a",
            fresh=fresh if name == "storage/a" else None,
        )
        for name, array in data.items()
    ]


def save(path, data, fresh=None, keep=0, background=False):
    """One save."""
    saving = store.Saving(path)
    try:
        given = sources(data, fresh)
        tasks = saving.plan(given)
        if background:
            thread = threading.Thread(target=saving.commit, args=({}, given, tasks, keep))
            thread.start()
            thread.join()
        else:
            saving.commit({}, given, tasks, keep)
    finally:
        saving.close()


def read(path, generation=None):
    """All arrays of a store, or None if there is none."""

    def use(body):
        reading.check_sizes(path, body)
        found = {}
        for leaf in body["leaves"]:
            target = bytearray(leaf["size"])
            reading.read_leaf(path, leaf, memoryview(target))
            found[leaf["name"]] = bytes(target)
        return found

    try:
        return reading.snapshot(path, use, generation)
    except FileNotFoundError:
        return None


class At:
    """A hook that does something at the k-th operation."""

    def __init__(self, number, act):
        self.number, self.act, self.count = number, act, 0
        self.lock = threading.Lock()

    def __call__(self, operation, path, *rest):
        with self.lock:
            self.count += 1
            if self.count == self.number:
                self.act(operation, path)


def operations(work):
    """How many operations some work takes."""
    files.hook = hook = At(-1, None)
    try:
        work()
    finally:
        files.hook = None
    return hook.count


SAVES = {
    "full": lambda path: save(path, contents(2)),
    "incremental": lambda path: save(
        path, contents(2, (100_000, 110_000)), fresh=[(100_000, 110_000)], keep=1
    ),
    "background": lambda path: save(path, contents(2), background=True),
    "first": lambda path: save(path, contents(2)),
}
AFTER = {name: contents(2) for name in SAVES}
AFTER["incremental"] = contents(2, (100_000, 110_000))


def prepared(path, name):
    """A folder as it is before the save."""
    shutil.rmtree(path, ignore_errors=True)
    if name == "first":
        os.makedirs(path)
        return None
    save(path, contents(1))
    return contents(1)


def kill(path, name):
    """Kills a process at every operation of a save in turn; what is left is old or new."""
    prepared(path, name)
    count = operations(lambda: SAVES[name](path))
    outcomes = []
    for number in range(1, count + 1):
        old = prepared(path, name)
        child = os.fork()
        if not child:
            files.hook = At(number, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            SAVES[name](path)
            os._exit(1)  # the operation was never reached
        _, status = os.waitpid(child, 0)
        outcomes.append(judged(path, old, AFTER[name], os.WTERMSIG(status) == signal.SIGKILL))
    return {"operations": count, "outcomes": outcomes}


def judged(path, old, new, as_planned):
    """What a fault left behind; then the next save has to work, and to clean up."""
    found = read(path)
    outcome = "old" if found == old else "new" if found == new else "a mixture"
    if not as_planned:
        return "not as planned"
    save(path, contents(3))
    if read(path) != contents(3) or reading.damages(path):
        return "the next save failed"
    left = {name for name in os.listdir(path) if "new" in name}
    named = {
        manifest.file_name(e[0], e[1])
        for leaf in manifest.read(path)["leaves"]
        for e in leaf.get("blocks", [])
    }
    there = {os.path.join("blocks", name) for name in os.listdir(os.path.join(path, "blocks"))}
    if left or there != named:
        return f"left over: {sorted(left | (there ^ named))}"
    return outcome


def fail(path, name, code):
    """Raises at every operation of a save in turn; the old state is intact."""
    prepared(path, name)
    count = operations(lambda: SAVES[name](path))

    def strike(*_):
        raise OSError(code, os.strerror(code))

    outcomes = []
    for number in range(1, count + 1):
        old = prepared(path, name)
        files.hook = hook = At(number, strike)
        try:
            SAVES[name](path)
            raised = False
        except OSError as error:
            raised = error.errno == code
        files.hook = None
        outcome = judged(path, old, AFTER[name], hook.count >= number)
        outcomes.append(outcome if raised else f"{outcome}, nothing raised")
    return {"operations": count, "outcomes": outcomes}


def large(path):
    """A file that may not grow: the write falls short, then fails."""
    old = prepared(path, "full")
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    try:
        save(path, contents(2))
        outcome = "nothing raised"
    except OSError as error:
        outcome = errno.errorcode[error.errno]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return [outcome, judged(path, old, contents(2), True)]


def power(path, name, seed):
    """Cuts the power at every operation: what was not synced is there, or not, at random."""
    old = prepared(path, name)
    log = []
    before = path + ".before"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(path, before)
    copy = lambda value: bytes(value) if isinstance(value, memoryview) else value
    files.hook = lambda *event: log.append(tuple(map(copy, event)))
    SAVES[name](path)
    files.hook = None
    rng, outcomes = random.Random(seed), []
    for stop in range(len(log) + 1):
        crashed(before, path, log, stop, rng)
        outcome = judged(path, old, AFTER[name], True)
        finished = any(event[0] == "replace" for event in log[:stop]) and stop == len(log)
        outcomes.append("lost" if finished and outcome == "old" else outcome)
    return {"operations": len(log), "outcomes": outcomes}


def crashed(before, path, log, stop, rng):
    """The folder as a disk may show it after the first `stop` operations and a power loss."""
    shutil.rmtree(path)
    shutil.copytree(before, path)
    synced = lambda place, since: ("fsync", place) in [event[:2] for event in log[since:stop]]
    for number, (operation, place, *rest) in enumerate(log[:stop]):
        folder = os.path.dirname(rest[0] if operation in ("replace", "link") else place)
        if operation == "pwrite":
            if synced(place, number) or rng.random() < 0.5:
                with (
                    open(place, "r+b") if os.path.exists(place) else open(os.devnull, "wb") as file
                ):
                    file.seek(rest[0])
                    file.write(rest[1])
        elif operation == "truncate" and os.path.exists(place):
            os.truncate(place, rest[0])
        elif operation in NAMING and (synced(folder, number) or rng.random() < 0.5):
            name_again(operation, place, *rest)


NAMING = ("create", "mkdir", "replace", "link", "unlink")


def name_again(operation, place, *rest):
    """One operation on names; of files that were lost before, nothing."""
    if operation == "create":
        open(place, "wb").close()
    elif operation == "mkdir":
        os.makedirs(place, exist_ok=True)
    elif operation == "unlink":
        if os.path.exists(place):
            os.unlink(place)
    elif os.path.exists(place):
        os.replace(place, rest[0]) if operation == "replace" else os.link(place, rest[0])


def flip(path, seed):
    """Flips bits in every file; each is noticed, and by `damages` too."""
    rng, missed, count = random.Random(seed), [], 0
    prepared(path, "full")
    names = [os.path.join(path, name) for name in (manifest.NAME, *block_files(path))]
    for name in names:
        with open(name, "rb") as file:
            data = file.read()
        places = range(len(data)) if len(data) < 3000 else rng.sample(range(len(data)), 150)
        for place in places:
            changed = bytearray(data)
            changed[place] ^= 1 << rng.randrange(8)
            with open(name, "wb") as file:
                file.write(changed)
            count += 1
            try:
                same = read(path) == contents(1)
                missed.append([name, place, "same" if same else "WRONG"])
            except ValueError as error:
                if os.path.basename(name) not in str(error) or not reading.damages(path):
                    missed.append([name, place, str(error)])
        with open(name, "wb") as file:
            file.write(data)
    return {"flips": count, "missed": missed}


def block_files(path):
    """The files of blocks, from the folder on."""
    return [os.path.join("blocks", name) for name in os.listdir(os.path.join(path, "blocks"))]


def truncate(path):
    """Cuts every file at many lengths; each is noticed by name, and said how long it should be."""
    prepared(path, "full")
    missed, count = [], 0
    for name in block_files(path):
        whole = os.path.join(path, name)
        with open(whole, "rb") as file:
            data = file.read()
        for length in {0, 1, len(data) // 2, len(data) - 1} | set(range(0, len(data), 65536)):
            with open(whole, "wb") as file:
                file.write(data[:length])
            count += 1
            try:
                read(path)
                missed.append([name, length])
            except DamagedError as error:
                if not all(
                    part in str(error) for part in (name, str(len(data)), f"found {length}")
                ):
                    missed.append([name, length, str(error)])
        os.unlink(whole)
        try:
            read(path)
            missed.append([name, "gone"])
        except DamagedError:
            pass
        with open(whole, "wb") as file:
            file.write(data)
    return {"cuts": count, "missed": missed}


def hold(path):
    """Takes the lock and waits to be killed."""
    saving = store.Saving(path)
    sys.stdout.write("locked\n")
    sys.stdout.flush()
    sys.stdin.read()
    saving.close()


def write_on(path, count):
    """Saves one stamp after the other."""
    for stamp in range(1, count + 1):
        save(path, {name: bytes([stamp % 251]) * size for name, size in SIZES.items()})


def meet(path, count):
    """Reads while another process writes: each read is of one save, and none older than before."""
    save(path, {name: bytes(size) for name, size in SIZES.items()})
    child = os.fork()
    if not child:
        write_on(path, count)
        os._exit(0)
    reads, torn, last = 0, 0, 0
    while True:
        over = os.waitpid(child, os.WNOHANG)[0]
        found = read(path)
        stamps = {array[0] for array in found.values() if array}
        torn += any(len(set(array)) > 1 for array in found.values()) or len(stamps) != 1
        torn += max(stamps) < last
        last, reads = max(stamps), reads + 1
        if over:
            return {"reads": reads, "torn": torn, "last": last}


def second(path):
    """Whether a second writer is turned away."""
    saving = store.Saving(path)
    try:
        store.Saving(path)
        return "two writers"
    except LockedError:
        return "refused"
    finally:
        saving.close()


def main():
    """Runs a scenario."""
    name, path, *rest = sys.argv[1:]
    threads.WORKERS = 1 if name == "power" else threads.WORKERS
    arguments = [int(part) if part.isdigit() else part for part in rest]
    json.dump(globals()[name](path, *arguments), sys.stdout)


if __name__ == "__main__":
    main()
