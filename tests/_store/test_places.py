"""Which slots lie where, as runs, against looking at each."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from jrb._store import places, table


@st.composite
def lying(draw):
    """Places of some slots among P, round a ring or in any order, some never written; and P."""
    room = draw(st.integers(1, 12))
    count = draw(st.integers(1, room))
    order = draw(st.permutations(range(room)))
    turned = np.roll(np.arange(room), draw(st.integers(0, room)))
    of = np.asarray(draw(st.sampled_from([order, list(turned)]))[:count], np.int64)
    never = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return np.where(never, places.NEVER, of), room


@hypothesis.given(lying())
def test_runs_say_where_all_slots_lie_and_are_as_few_as_can_be(where):
    of, room = where
    runs = places.runs_of(of)
    places.check_runs(runs, len(of), room)
    np.testing.assert_array_equal(places.Places(runs, len(of), room).at(np.arange(len(of))), of)
    follows = lambda s: s > 0 and of[s - 1] >= 0 and of[s] == of[s - 1] + 1
    assert len(runs) == sum(of[s] >= 0 and not follows(s) for s in range(len(of)))


@hypothesis.given(lying(), st.data())
def test_the_slots_of_a_range_of_places(where, data):
    of, room = where
    start = data.draw(st.integers(0, room))
    stop = data.draw(st.integers(start, room))
    found = places.within(places.by_place(places.runs_of(of)), start, stop)
    each = [(place + n, slot + n) for slot, place, length in found.tolist() for n in range(length)]
    assert each == sorted((place, s) for s, place in enumerate(of) if start <= place < stop)
    assert (found[:, 2] > 0).all()


@hypothesis.given(lying(), st.integers(1, 4), st.data())
def test_a_stretch_says_where_the_rows_of_blocks_go(where, size, data):
    of, room = where
    last = -(-room // size)
    blocks = range(data.draw(st.integers(0, last)), last)
    runs = places.within(
        places.by_place(places.runs_of(of)), blocks.start * size, blocks.stop * size
    )
    found = table.Stretch(blocks, size, runs)
    here = sorted((place, slot) for slot, place in enumerate(of) if place >= blocks.start * size)
    rows = np.arange(len(of))[found.rows]
    assert rows.tolist() == [slot for _, slot in here] and found.count == len(here)
    spans = [(n, place + n - a) for a, b, place in found.spans for n in range(a, b)]
    assert spans == [(n, place) for n, (place, _) in enumerate(here)]
    inside = [sum(place < block * size for place, _ in here) for block in (*blocks, last)]
    assert found.edges == inside


@hypothesis.given(lying())
def test_named_places_are_those_of_slots(where):
    of, room = where
    known = places.Places(places.runs_of(of), len(of), room)
    for _ in range(2):  # from the runs, and once each is known
        found = known.named()
        assert np.flatnonzero(found).tolist() == sorted(place for place in of if place >= 0)
        assert known.reach == max((s + 1 for s in range(len(of)) if of[s] >= 0), default=0)
        assert known.never().tolist() == np.flatnonzero(of[: known.reach] < 0).tolist()
        assert known.slots == len(of) and known.room == room
        np.testing.assert_array_equal(known.runs, places.runs_of(of))
        np.testing.assert_array_equal(known.used, of[: known.reach])
