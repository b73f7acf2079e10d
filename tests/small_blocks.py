"""Small states whose arrays are in files of blocks, as those of large states are."""

import contextlib

import numpy as np
import pytest

from jrb._store import blocks
from jrb._store.block_store import BlockStore
from jrb.checkpoint import schema


@contextlib.contextmanager
def small_blocks(size=512):
    """Makes saves put every array of more than 16 bytes into blocks of at most `size` bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "SMALL", 16)  # numbers stay in the generation
        patch.setattr(schema, "BLOCK", size)
        patch.setattr(blocks, "BLOCK", size)
        yield


def file_of(path, name):
    """Returns the file of the array of this name in a store, `storage/arrays/uint32`."""
    short = name.replace("/", ".")
    (file,) = (path / "arrays").glob(f"{short}-*-*.bin")
    return file


def written_blocks(path, name):
    """Returns the numbers of the blocks of an array that are not all zeros."""
    with BlockStore.open_to_read(str(path)) as store:
        positions = store.arrays[name].positions
    return np.flatnonzero(positions >= 0).tolist()


def damage(file, offset, bit=1):
    """Flips a bit of a file."""
    data = bytearray(file.read_bytes())
    data[offset] ^= bit
    file.write_bytes(data)


def before_the_arrays_are_written(monkeypatch, call):
    """Calls a function once in the middle of a save, after its checks."""
    calls, put = [call], BlockStore.put

    def called(*args):
        if calls:
            calls.pop()()
        return put(*args)

    monkeypatch.setattr(BlockStore, "put", called)
