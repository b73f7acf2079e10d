import numpy as np
import pytest

import jrb
from jrb.datasets.reading import tabular
from tests.datasets.access import check_access
from tests.datasets.formats.replay_logs import Ring, expected_of, filled


def logged(folder, capacity):
    """Saves as batch_rl's `OutOfGraphLoggedReplayBuffer`: just before the ring is full."""
    spans = []

    def save(ring):
        if len(ring.rows) % capacity == capacity - 1:
            ring.save(folder, len(spans))
            spans.append((max(0, len(ring.rows) - capacity), len(ring.rows)))

    return spans, save


@pytest.mark.parametrize("block", [16, 1 << 20])
def test_logs_of_one_run_are_joined_in_order_of_time(tmp_path, block, monkeypatch):
    monkeypatch.setattr(tabular, "_BLOCK", block)
    spans, save = logged(tmp_path, 40)
    ring = filled(Ring(40), 0, [9, 30, 1, 2, 41, 5, 7, 60, 3, 11, 8, 13, 21], save)
    assert len(spans) > 3
    dataset = jrb.datasets.open(tmp_path)
    assert dataset.format.name == "dopamine"
    edges = [(spans[0][0], spans[0][1])]
    for start, stop in spans[1:]:
        if start <= edges[-1][1]:
            edges[-1] = edges[-1][0], stop
        else:
            edges.append((start, stop))
    check_access(dataset, expected_of(ring, edges))
