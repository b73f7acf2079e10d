"""Rows that repeat others are read as they were written, as all rows that states share."""

import numpy as np
import pytest

from jrb._store.block_store import BlockStore, Source
from jrb._store.linked_rows import LinkedRows
from tests._store import test_shared_rows as shared

# These tests run here with linked rows.
small_blocks = shared.small_blocks
test_a_write_of_another_thread = shared.test_a_write_of_another_thread_is_not_taken_back
test_a_write_that_fails = shared.test_a_write_that_fails_has_not_happened
test_an_interrupted_write = shared.test_a_write_that_is_interrupted_at_any_line_has_not_happened
test_each_state = shared.test_each_state_reads_its_rows_or_is_stale
test_nothing_is_lost = shared.test_nothing_is_lost_where_something_else_is_written_in_between
test_the_newest_state = shared.test_only_the_newest_state_is_written_to

pytestmark = pytest.mark.slow

WIDTHS = {"after": 8, "x": 3, "also after": 5, "before": 8, "also before": 5}
TWINS = {0: 3, 2: 4}


class LinkedStates(shared.States):
    """States of rows with few values, so that many of them repeat the following rows."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.untouched[:] = False  # such rows are not zeros

    def next_write(self):
        slots, rows = super().next_write()
        few = [self.rng.integers(1, 3, (len(part), 1)).astype(np.uint8) for part in rows]
        return slots, [
            np.repeat(one, part.shape[1], 1) for one, part in zip(few, rows, strict=True)
        ]


@pytest.fixture(params=[1, 4, 48], autouse=True)
def linked(request, monkeypatch):
    def made(path):
        store = BlockStore.create(path)
        for name, width in WIDTHS.items():
            store.array(name, Source([], f"leaf '{name}'", shared.SLOTS, width, None))
        store.array("entries", Source([], "entries", shared.SLOTS, 4, None))
        store.keep_open()
        return LinkedRows(store, list(WIDTHS), "entries", TWINS, request.param)

    monkeypatch.setattr(shared, "WIDTHS", WIDTHS)
    monkeypatch.setattr(shared, "made", made)
    monkeypatch.setattr(shared, "States", LinkedStates)
    return request.param


@pytest.mark.parametrize("kind", shared.KINDS)
@pytest.mark.parametrize("most_kept", [8 << 20, 1])
def test_a_write_is_taken_back_or_its_rows_are_lost(kind, most_kept, path, monkeypatch):
    monkeypatch.setattr(shared.shared_rows, "_MOST_KEPT", most_kept)
    states = LinkedStates(path, kind, 3)
    for number in range(40):
        before, last = states.newest, states.last.copy()
        slots, rows = states.next_write()
        states.put(slots, rows)
        if number % 3 == 0 and len(slots):
            states.rows.undo_last_write(before)
            states.forget(before + len(slots), slots, last)
            states.lost = np.array([shared.is_lost(states, at) for at in range(shared.SLOTS)])
            assert set(np.flatnonzero(states.lost)) <= (set() if most_kept > 1 else {*range(48)})
            states.check_all()
            states.put(slots, rows)  # the same write can be made again
        states.check_all()
        if number % 5 == 0 and not states.lost.any():
            states.rows.prepare_commit(states.newest)
            states.rows.store.commit({}, {})
            states.check_all()


def test_a_commit_has_all_rows(path, linked):
    states = LinkedStates(path, "ring", 0)
    for _ in range(30):
        states.put(*states.next_write())
        states.rows.prepare_commit(states.newest)
        states.rows.store.commit({}, {})
        states.rows.store.expire([states.rows.store.generation])
        with BlockStore.open_to_read(path) as store:
            rows = LinkedRows(store, list(WIDTHS), "entries", TWINS, linked)
            written = np.flatnonzero(states.last)
            found = rows.read_rows(0, [written] * len(WIDTHS))
            for data, old in zip(found, states.versions[states.newest], strict=True):
                np.testing.assert_array_equal(data, old[written])


def test_of_several_rows_for_a_slot_the_last_is_there(path):
    states = LinkedStates(path, "random", 0)
    for count in range(1, 60):
        slots = states.rng.integers(0, shared.SLOTS, count)
        values = states.rng.integers(1, 3, (len(WIDTHS), count, 1)).astype(np.uint8)
        pairs = zip(values, WIDTHS.values(), strict=True)
        rows = [np.repeat(part, width, 1) for part, width in pairs]
        states.put(slots, rows)
        states.check_all()


def test_only_rows_that_are_not_repeated_take_room(path, linked):
    states = LinkedStates(path, "ring", 0)
    count = 40 * shared.SLOTS
    values = np.random.default_rng(0).integers(0, 256, (count + linked, 1)).astype(np.uint8)
    for start in range(0, count, linked):
        slots = (start + np.arange(linked)) % shared.SLOTS
        before, after = values[start : start + linked], values[start + linked : start + 2 * linked]
        if start % 100 == 0:
            after = after + np.uint8(1)  # an end
        full = lambda value, width: np.repeat(value, width, axis=1)
        leaves = zip([after, after, after, before, before], WIDTHS.values(), strict=True)
        rows = [full(value, width) for value, width in leaves]
        states.put(slots, rows)
        if start % 300 == 0:
            states.check_all()
    states.rows.prepare_commit(states.newest)
    entries = states.rows.store.arrays["entries"].read_rows(np.arange(shared.SLOTS))
    entries = entries.view(np.int32)
    assert np.count_nonzero(entries) <= 3 * linked and entries.max() <= 6 * linked
