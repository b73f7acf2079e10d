"""The seams at which tests reach below the public names: the disk's operations, and thresholds.

A hook is called before every operation that changes a file, with its name, the path, and its other
arguments. It may count, copy what there is, raise an `OSError`, or end the process.
"""

import contextlib
import shutil

import numpy as np

from jrb._core import eager, memory, validate
from jrb._store import files, table, threads
from jrb.checkpoint import hdf5


def set_hook(hook):
    """Sets the hook, for good; None for none."""
    files.hook = hook


@contextlib.contextmanager
def hooked(hook):
    """Sets the hook for a block."""
    set_hook(hook)
    try:
        yield hook
    finally:
        set_hook(None)


@contextlib.contextmanager
def copied_at_each_operation(path, into):
    """Gives a list, which gains a copy of a folder before every operation that finds it changed."""
    copies, before = [], None

    def copy(*event):
        nonlocal before
        files = sorted(file for file in path.rglob("*") if file.is_file())
        content = [(file, file.read_bytes()) for file in files]
        if content != before:
            copies.append(into / str(len(copies)))
            shutil.copytree(path, copies[-1])
        before = content

    with hooked(copy):
        yield copies


def bytes_written(work):
    """Returns how many bytes some work writes."""
    sizes = []

    def measure(operation, path, *rest):
        if operation == "pwrite":
            sizes.append(memoryview(rest[1]).nbytes)

    with hooked(measure):
        work()
    return sum(sizes)


def use_one_thread(monkeypatch):
    """Makes files be written one after the other, so that a copy of them is of one moment."""
    monkeypatch.setattr(threads, "WORKERS", 1)


def write_small_states_in_place(monkeypatch):
    """Makes compiled methods donate small states too, which are copied else."""
    monkeypatch.setattr(eager, "_MANY_ELEMENTS", 0)


def read_in_pieces(monkeypatch, size, on_device=False):
    """Makes arrays be read in pieces of so many bytes, as if they were on another device."""
    monkeypatch.setattr(memory, "PIECE", size)
    if on_device:
        monkeypatch.setattr(memory, "_goes_to_cpu", lambda device: False)
        keep_on_device(monkeypatch)


def verify_in_pieces(monkeypatch, size):
    """Makes checksums be computed of so many bytes at a time."""
    monkeypatch.setattr(table, "_PIECE", size)
    monkeypatch.setattr(hdf5, "_PIECE", size)


@contextlib.contextmanager
def devices_counted_anew():
    """Lets the methods count JAX's devices again, at the begin and the end of a block."""
    validate._has_one_device.cache_clear()
    try:
        yield
    finally:
        validate._has_one_device.cache_clear()


def keep_on_device(monkeypatch):
    """Makes arrays of JAX count as those of a device that the host cannot read."""
    monkeypatch.setattr(memory, "on_host", lambda leaf: isinstance(leaf, np.ndarray))
