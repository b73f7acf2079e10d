"""What tests inject into file operations: kills, errors, interrupts, and a loss of power."""

import dis
import functools
import os
import shutil
import signal
import sys
import threading

from jrb._store import files


class At:
    """A hook that acts at the k-th operation, and at some after it."""

    def __init__(self, number, act, times=1):
        self.numbers, self.act, self.count = range(number, number + times), act, 0
        self.lock = threading.Lock()

    def __call__(self, operation, path, *rest):
        with self.lock:
            self.count += 1
            if self.count in self.numbers:
                self.act(operation, path)


def operations(work):
    """Runs some work and returns the number of its file operations."""
    files.hook = hook = At(-1, None)
    try:
        work()
    finally:
        files.hook = None
    return hook.count


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


def strike(code):
    def raising(*_):
        raise OSError(code, os.strerror(code))

    return raising


def recorder(log):
    """Returns a hook that appends each operation to a list, for `crashed`."""
    copy = lambda value: bytes(value) if isinstance(value, memoryview) else value
    return lambda *event: log.append(tuple(map(copy, event)))


def crashed(before, path, log, stop, rng):
    """Makes the folder as a disk may show it after the first `stop` operations and a power loss.

    What was not synced is on the disk, or not, or half of it.
    """
    shutil.rmtree(path)
    shutil.copytree(before, path)
    synced = lambda place, since: ("fsync", place) in [event[:2] for event in log[since:stop]]
    for number, (operation, place, *rest) in enumerate(log[:stop]):
        folder = os.path.dirname(rest[0] if operation == "replace" else place)
        if operation == "pwrite":
            offset, data = rest
            is_synced = synced(place, number)
            if not is_synced and rng.random() < 0.3:
                data = data[: rng.randrange(len(data) + 1)]
            if is_synced or rng.random() < 0.6:
                with open(place if os.path.exists(place) else os.devnull, "r+b") as file:
                    file.seek(offset)
                    file.write(data)
        elif operation == "resize":
            if os.path.exists(place) and (synced(place, number) or rng.random() < 0.5):
                os.truncate(place, rest[0])
        elif operation in _NAMING and (synced(folder, number) or rng.random() < 0.5):
            _name_again(operation, place, *rest)


_NAMING = ("create", "mkdir", "replace", "unlink", "rmdir")


def _name_again(operation, place, *rest):
    """Repeats one operation on names; ignores files that were lost before."""
    if operation == "create":
        if os.path.isdir(os.path.dirname(place)):
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


class Interrupt:
    """A trace function that acts at the k-th line run in files of a folder.

    By default it raises KeyboardInterrupt. It leaves out the line of a `with` at which its context
    ends: Python runs no handler of a signal between the last statement and the call of `__exit__`.
    """

    def __init__(self, folder, number, act=None):
        self.folder, self.number, self.act, self.lines = folder, number, act, 0

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                if frame.f_lasti in _exits(frame.f_code):
                    self.number += 1
                    return self
                sys.settrace(None)
                if self.act is None:
                    raise KeyboardInterrupt
                self.act()
        return self


@functools.cache
def _exits(code):
    """Returns the offsets of instructions with which the end of a `with` begins."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    is_none = lambda step: step.opname == "LOAD_CONST" and step.argval is None
    names = ["None" if is_none(step) else step.opname for step in steps]
    found = set()
    for at, step in enumerate(steps):
        start = at + (names[at] == "SWAP")
        if names[start : start + 3] == ["None"] * 3 or "WITH_EXCEPT_START" in names[at : at + 2]:
            found.add(step.offset)
    return found
