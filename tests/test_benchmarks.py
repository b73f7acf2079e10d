"""Benchmarks that look at how rows lie in files still find them."""

import pytest

pytestmark = pytest.mark.slow


def test_draws_from_files_are_measured(tmp_path):
    pytest.importorskip("rich")
    from benchmarks import host

    rows, _ = host.frames(1000, 1, str(tmp_path))
    rows += host.spill(1000, 1)
    assert all(row["ratio"] > 0 for row in rows)
