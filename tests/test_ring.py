"""Ring arithmetic against a plain Python ring that is written row by row."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrb.ring import Clock, Ring, first_places

SLOTS = 64  # the most slots of a small ring; all are computed at once
LAPS = 2**32
HUGE = [
    (2**31 - 1, 1),
    (2**31 - 2, 1),
    (2**30, 1),
    (2**30 - 1, 2),
    (715_827_882, 3),
    (2_147_483, 1000),
]

advance = jax.jit(Ring.advance, static_argnums=0)
row_after = jax.jit(Ring.row_after, static_argnums=0)
slot_after = jax.jit(Ring.slot_after, static_argnums=0)
row_slots = jax.jit(Ring.row_slots, static_argnums=0)
oldest_slot = jax.jit(Ring.oldest_slot, static_argnums=0)
generation = jax.jit(Ring.generation, static_argnums=0)
empty = jax.jit(Ring.empty, static_argnums=0)

RINGS = [Ring(1, 1), Ring(1, 5), Ring(2, 3), Ring(7, 1), Ring(9, 4), Ring(16, 4)]
rings = st.sampled_from(RINGS)
laps = st.sampled_from([0, 1, 2**31 - 1, 2**31, LAPS - 3, LAPS - 2, LAPS - 1])
counts = st.one_of(
    st.integers(0, 40), st.integers(0, 2**31 - 1), st.sampled_from([2**31 - 1, 2**31 - 16, 2**30])
)
streams = st.lists(counts, max_size=12)
in_huge_rings = pytest.mark.parametrize("ring", [Ring(*shape) for shape in HUGE])


def clock_at(ring, written, lap=0):
    """Returns the clock of a ring that started in `lap`, after `written` rows."""
    return Clock(
        cursor=jnp.int32(written % ring.rows),
        count=jnp.int32(min(written, ring.rows)),
        lap=jnp.uint32((lap + written // ring.rows) % LAPS),
    )


def numbers(clock):
    return int(clock.cursor), int(clock.count), int(clock.lap)


def dtypes(clock):
    return clock.cursor.dtype, clock.count.dtype, clock.lap.dtype


def generations(ring, clock):
    """Returns the generation of each slot."""
    slots = np.minimum(np.arange(SLOTS), ring.capacity - 1).astype(np.int32)
    found = generation(ring, clock, slots)
    assert found.dtype == jnp.uint32
    return np.asarray(found)[: ring.capacity].tolist()


def test_capacity_counts_slots():
    assert [ring.capacity for ring in RINGS] == [1, 5, 6, 7, 36, 64]


@pytest.mark.parametrize("ring", RINGS)
def test_a_new_ring_holds_nothing(ring):
    clock = ring.start()
    assert numbers(clock) == (0, 0, 0)
    assert dtypes(clock) == (jnp.int32, jnp.int32, jnp.uint32)


@hypothesis.given(ring=rings, lap=laps, stream=streams)
def test_the_clock_follows_the_rows_written(ring, lap, stream):
    clock, written = clock_at(ring, 0, lap), 0
    for rows in stream:
        clock, written = advance(ring, clock, jnp.int32(rows)), written + rows
        assert numbers(clock) == numbers(clock_at(ring, written, lap))
        assert dtypes(clock) == (jnp.int32, jnp.int32, jnp.uint32)


@hypothesis.given(ring=rings, lap=laps, stream=st.lists(st.integers(0, 40), max_size=12))
def test_how_rows_are_chunked_does_not_matter(ring, lap, stream):
    begin = clock_at(ring, 3, lap)
    chunked = functools.reduce(lambda c, rows: advance(ring, c, jnp.int32(rows)), stream, begin)
    at_once = advance(ring, begin, jnp.int32(sum(stream)))
    assert numbers(chunked) == numbers(at_once)
    assert generations(ring, chunked) == generations(ring, at_once)


@hypothesis.given(ring=rings, lap=laps, stream=streams)
def test_the_oldest_row_is_the_one_that_goes_next(ring, lap, stream):
    clock, written = clock_at(ring, 0, lap), 0
    for rows in stream:
        clock, written = advance(ring, clock, jnp.int32(rows)), written + rows
        oldest = written - min(written, ring.rows)
        assert int(oldest_slot(ring, clock)) == oldest % ring.rows * ring.envs


@st.composite
def lives(draw):
    """Draws a ring, its first lap, and its events: the rows written, or None to empty it."""
    events = st.one_of(st.none(), st.integers(0, 3), st.integers(0, 40))
    return draw(rings), draw(laps), draw(st.lists(events, max_size=16))


@hypothesis.given(life=lives())
def test_a_generation_changes_with_every_overwrite_and_with_nothing_else(life):
    ring, lap, events = life
    clock, row, seen = clock_at(ring, 0, lap), 0, [set() for _ in range(ring.capacity)]
    now = generations(ring, clock)
    for event in events:
        before = now
        if event is None:
            clock, row, touched = empty(ring, clock), 0, set(range(ring.capacity))
        else:
            clock = advance(ring, clock, jnp.int32(event))
            rows = {(row + i) % ring.rows for i in range(event)}
            touched = {r * ring.envs + e for r in rows for e in range(ring.envs)}
            row = (row + event) % ring.rows
        now = generations(ring, clock)
        for slot in range(ring.capacity):
            if slot in touched:
                seen[slot].add(before[slot])
                assert now[slot] not in seen[slot]
            else:
                assert now[slot] == before[slot]


@pytest.mark.parametrize("lap", [0, 1, LAPS - 2, LAPS - 1])
@pytest.mark.parametrize("ring", RINGS)
def test_each_single_row_renews_its_own_slots(ring, lap):
    clock = clock_at(ring, 0, lap)
    for written in range(3 * ring.rows):
        before = np.array(generations(ring, clock), np.uint32)
        clock = advance(ring, clock, jnp.int32(1))
        now = np.array(generations(ring, clock), np.uint32)
        fresh = np.arange(ring.capacity) // ring.envs == written % ring.rows
        assert np.array_equal(now - before, fresh.astype(np.uint32))


@pytest.mark.parametrize("ring", RINGS)
def test_a_lap_after_the_last_is_lap_0(ring):
    clock = clock_at(ring, 2 * ring.rows - 1, LAPS - 2)
    assert int(clock.lap) == LAPS - 1
    clock = advance(ring, clock, jnp.int32(1))
    assert numbers(clock) == (0, ring.rows, 0)
    assert set(generations(ring, clock)) == {LAPS - 1}
    assert int(empty(ring, clock_at(ring, 0, LAPS - 1)).lap) == 1


@pytest.mark.parametrize("lap", [0, 7, LAPS - 3, LAPS - 2, LAPS - 1])
@pytest.mark.parametrize("ring", RINGS)
def test_an_emptied_ring_holds_nothing_and_no_old_generation_comes_back(ring, lap):
    for written in (0, 1, ring.rows - 1, ring.rows, ring.rows + 1):
        clock = clock_at(ring, written, lap)
        old = generations(ring, clock)
        clock = empty(ring, clock)
        assert numbers(clock)[:2] == (0, 0)
        assert dtypes(clock) == (jnp.int32, jnp.int32, jnp.uint32)
        for _ in range(2 * ring.rows):
            assert not set(generations(ring, clock)) & set(old)
            clock = advance(ring, clock, jnp.int32(1))


@pytest.mark.parametrize("count", [0, 1, 4096, 4097])
def test_the_first_places_are_counted_from_0(count):
    places = jax.jit(lambda: jnp.asarray(first_places(count)))()
    assert places.dtype == jnp.int32
    assert np.array_equal(places, np.arange(count))


def test_emptied_twice_is_new_again():
    ring = Ring(7, 1)
    once = empty(ring, clock_at(ring, 9))
    assert not set(generations(ring, empty(ring, once))) & set(generations(ring, once))


@hypothesis.given(ring=rings, row=st.integers(0, 2**31 - 1), steps=counts)
def test_row_after_steps_around_the_ring(ring, row, steps):
    row = row % ring.rows
    found = row_after(ring, jnp.int32(row), jnp.int32(steps))
    assert found.dtype == jnp.int32
    assert int(found) == (row + steps) % ring.rows


@pytest.mark.parametrize("ring", RINGS)
def test_slot_after_steps_around_the_ring(ring):
    slot, steps = np.meshgrid(np.arange(ring.capacity), np.arange(ring.capacity + 1))
    found = slot_after(ring, slot.astype(np.int32), steps.astype(np.int32))
    assert found.dtype == jnp.int32
    assert np.array_equal(found, (slot + steps) % ring.capacity)


@pytest.mark.parametrize("ring", RINGS)
def test_row_slots_are_those_of_every_environment(ring):
    starts = np.arange(ring.rows) * ring.envs
    found = row_slots(ring, starts.astype(np.int32))
    assert found.dtype == jnp.int32
    assert np.array_equal(found, np.arange(ring.capacity).reshape(ring.rows, ring.envs))


@pytest.mark.parametrize("ring", RINGS)
def test_row_slots_beyond_the_ring_are_n(ring):
    starts = np.array([ring.capacity, 0, ring.capacity + 5], np.int32)
    found = np.asarray(row_slots(ring, starts))
    assert (found[[0, 2]] == ring.capacity).all()
    assert found[1].tolist() == list(range(ring.envs))


@in_huge_rings
def test_huge_rings_turn_as_small_ones_do(ring):
    clock, written = ring.start(), 0
    for rows in (1, ring.rows - 2, 1, 1, 2**31 - 1, ring.rows, ring.rows - 1, 2**31 - 1, 0):
        clock, written = advance(ring, clock, jnp.int32(rows)), written + rows
        assert numbers(clock) == numbers(clock_at(ring, written))
        oldest = written - min(written, ring.rows)
        assert int(oldest_slot(ring, clock)) == oldest % ring.rows * ring.envs


@in_huge_rings
def test_huge_rings_step_as_small_ones_do(ring):
    near = lambda n: sorted({0, 1, n // 2, n - 2, n - 1})
    for row in near(ring.rows):
        for steps in [*near(ring.rows), 2**31 - 1]:
            found = row_after(ring, jnp.int32(row), jnp.int32(steps))
            assert int(found) == (row + steps) % ring.rows
    for slot in near(ring.capacity):
        for steps in [*near(ring.capacity), ring.capacity]:
            found = slot_after(ring, jnp.int32(slot), jnp.int32(steps))
            assert int(found) == (slot + steps) % ring.capacity


@in_huge_rings
def test_huge_rings_know_the_generation_of_their_ends(ring):
    last = ring.capacity - ring.envs
    slots = np.array([0, ring.envs, last - 1, last, ring.capacity - 1], np.int32)
    for written in (0, 1, ring.rows - 1, ring.rows, ring.rows + 1, 2 * ring.rows - 1):
        found = generation(ring, clock_at(ring, written), slots)
        rows = slots.astype(np.int64) // ring.envs
        laps_written = (written - 1 - rows) // ring.rows
        assert np.asarray(found).tolist() == (laps_written % LAPS).tolist()


@in_huge_rings
def test_huge_rings_know_the_slots_of_their_rows(ring):
    starts = [0, ring.envs, ring.capacity - ring.envs, ring.capacity]
    found = np.asarray(row_slots(ring, np.array(starts, np.int32))).astype(np.int64)
    expected = np.array(starts)[:, None] + np.arange(ring.envs)
    assert np.array_equal(found, np.minimum(expected, ring.capacity))


@pytest.mark.parametrize("ring", [Ring(1, 1), Ring(9, 4)])
def test_jit_and_vmap_equal_eager(ring):
    events = jnp.array([0, 1, 2, 5, ring.rows, 2**31 - 1], jnp.int32)
    each = [ring.advance(clock_at(ring, 4, LAPS - 1), rows) for rows in events]
    mapped = jax.vmap(functools.partial(ring.advance, clock_at(ring, 4, LAPS - 1)))(events)
    for i, clock in enumerate(each):
        assert numbers(clock) == numbers(jax.tree.map(lambda leaf, i=i: leaf[i], mapped))
        assert numbers(clock) == numbers(advance(ring, clock_at(ring, 4, LAPS - 1), events[i]))
        assert int(ring.oldest_slot(clock)) == int(oldest_slot(ring, clock))
        slots = jnp.arange(ring.capacity)
        assert np.array_equal(ring.generation(clock, slots), generation(ring, clock, slots))
        assert numbers(ring.empty(clock)) == numbers(empty(ring, clock))


@pytest.mark.parametrize("ring", [Ring(9, 1), Ring(2**24, 8)], ids=str)
def test_earlier_equal_slots_are_counted(ring):
    slots = np.random.default_rng(0).integers(0, 9, 50, dtype=np.int32)
    want = [slots[:at].tolist().count(slot) for at, slot in enumerate(slots.tolist())]
    assert ring.times_before(jnp.asarray(slots)).tolist() == want


def test_equal_rings_are_one_static_argument():
    assert Ring(7, 3) == Ring(7, 3)
    assert hash(Ring(7, 3)) == hash(Ring(7, 3))
    assert Ring(7, 3) != Ring(3, 7)
