"""Freed memory is reused, and its pages are not allocated again."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from jrb.remote.server import keep_freed_memory

keep_freed_memory()
batches = lambda: [np.ones(1 << 23, np.uint8) for _ in range(8)]
batches()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
batches()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
sys.exit(faults > 1000)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others are left as they are")
def test_freed_batches_do_not_go_back_to_the_system():
    assert subprocess.run([sys.executable, "-c", PROGRAM]).returncode == 0
    lazy = PROGRAM.replace("\nkeep_freed_memory()", "")
    assert subprocess.run([sys.executable, "-c", lazy]).returncode == 1
