"""Which slots lie where, as runs, against looking at each."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from jrb._store import places


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


@hypothesis.given(lying())
def test_named_places_are_those_of_slots(where):
    of, room = where
    known = places.Places(places.runs_of(of), len(of), room)
    assert np.flatnonzero(known.named()).tolist() == sorted(place for place in of if place >= 0)
    assert known.reach == max((s + 1 for s in range(len(of)) if of[s] >= 0), default=0)
    assert known.slots == len(of) and known.room == room
    np.testing.assert_array_equal(known.runs, places.runs_of(of))
    np.testing.assert_array_equal(known.used, of[: known.reach])
    slots = {place: slot for slot, place in enumerate(of) if place >= 0}
    assert known.slots_at().tolist() == [slots.get(place, -1) for place in range(room)]
