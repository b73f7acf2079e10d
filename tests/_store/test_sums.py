"""Checksums of blocks, and which of them are read together."""

import hypothesis
import hypothesis.strategies as st

from jrb._store import sums
from jrb._store.threads import WORKERS


@hypothesis.given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40))
def test_parts_are_about_one_length_and_enough_for_all_threads(start, length, count):
    run = range(start, start + length)
    parts = sums._alike(run, min(count, length))
    assert [block for part in parts for block in part] == list(run)
    lengths = {len(part) for part in parts}
    assert min(lengths) > 0 and max(lengths) - min(lengths) < 2
    assert len(parts) % WORKERS == 0 or len(parts) == length
    assert min(count, length) <= len(parts) < count + WORKERS
