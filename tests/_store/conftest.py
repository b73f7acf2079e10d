"""Folders for stores in memory if possible: faults of disks are simulated."""

import os
import pathlib
import tempfile

import pytest

MEMORY = "/dev/shm"


@pytest.fixture
def folder(tmp_path):
    """Yields an empty folder."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield pathlib.Path(path)


@pytest.fixture
def path(folder):
    """Yields the path of a store that does not exist yet."""
    return str(folder / "store")
