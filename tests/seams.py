"""Access to internals for tests: hooks on file operations, and thresholds.

A hook is called before every operation that changes a file, with the operation's name, the path and
the other arguments. It may count, copy files, raise an `OSError`, or end the process.
"""

import contextlib
import shutil

import numpy as np

from jrb._core import host_calls, memory, validate
from jrb._store import blocks, files, threads
from jrb.checkpoint import hdf5


def set_hook(hook):
    """Sets the hook until it is set again; None removes it."""
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
    """Yields a list; before each operation, a copy of the folder is appended if it changed."""
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
    """Returns the number of bytes that `work` writes with `pwrite`."""
    sizes = []

    def measure(operation, path, *rest):
        if operation == "pwrite":
            sizes.append(memoryview(rest[1]).nbytes)

    with hooked(measure):
        work()
    return sum(sizes)


def use_one_thread(monkeypatch):
    """Makes one thread write all files, so that a copy shows them at a single moment."""
    monkeypatch.setattr(threads, "WORKERS", 1)


def write_small_states_in_place(monkeypatch):
    """Makes compiled methods write small states in place too; by default they are copied."""
    monkeypatch.setattr(host_calls, "_MANY_ELEMENTS", 0)


def read_in_pieces(monkeypatch, size, on_device=False):
    """Makes transfers use pieces of `size` bytes; `on_device` treats the CPU as an accelerator."""
    monkeypatch.setattr(memory, "PIECE", size)
    if on_device:
        monkeypatch.setattr(memory, "_goes_to_cpu", lambda device: False)
        keep_on_device(monkeypatch)


def verify_in_pieces(monkeypatch, size):
    """Makes verification read `size` bytes at a time."""
    monkeypatch.setattr(blocks, "BLOCK", size)
    monkeypatch.setattr(hdf5, "_PIECE", size)


@contextlib.contextmanager
def devices_counted_anew():
    """Clears the cached number of devices at the start and the end of a block."""
    validate._has_one_device.cache_clear()
    try:
        yield
    finally:
        validate._has_one_device.cache_clear()


def keep_on_device(monkeypatch):
    """Treats JAX arrays as arrays on a device that the host cannot read directly."""
    monkeypatch.setattr(memory, "on_host", lambda leaf: isinstance(leaf, np.ndarray))
