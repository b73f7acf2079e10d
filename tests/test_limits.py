"""Rate limits against totals counted in plain Python."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrb.limits import SampleToInsert


@pytest.mark.parametrize(
    ("ratio", "min_size", "tolerance"), [(1, 1, 1), (4, 10, 6.5), (0.3, 5, 2), (2.5, 3, 100)]
)
def test_totals_stay_within_the_tolerance(ratio, min_size, tolerance):
    limit = SampleToInsert(ratio, min_size, tolerance)
    exact = fractions.Fraction(ratio).limit_denominator(1000)
    counters, rng = limit.init(), np.random.default_rng(0)
    items = samples = 0
    may = jax.jit(lambda c, i, s: (limit.may_insert(c, i), limit.may_sample(c, s)))
    after = jax.jit(lambda c, i, s: (limit.inserted(c, i), limit.sampled(c, s)))
    for _ in range(600):
        new, drawn = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        owed = lambda n: exact * max(0, n - min_size)
        may_insert = owed(items + new) - samples <= tolerance
        may_sample = items >= min_size and samples + drawn - owed(items) <= tolerance
        got = may(counters, new, drawn)
        assert (bool(got[0]), bool(got[1])) == (may_insert, may_sample)
        if may_insert and (rng.random() < 0.5 or not may_sample):
            counters, items = after(counters, new, drawn)[0], items + new
        elif may_sample:
            counters, samples = after(counters, new, drawn)[1], samples + drawn
    assert items > min_size
    assert samples


def test_a_loop_in_scan_holds_the_ratio_and_counters_do_not_grow():
    limit = SampleToInsert(ratio=8, min_size=100, tolerance=16)

    def step(carry, _):
        counters, items, samples = carry
        insert = limit.may_insert(counters)
        pick = lambda one, other: jax.tree.map(lambda a, b: jnp.where(insert, a, b), one, other)
        counters = pick(limit.inserted(counters), limit.sampled(counters, 4))
        return (counters, items + insert.astype(int), samples + 4 * (~insert).astype(int)), None

    start = (limit.init(), jnp.int32(0), jnp.int32(0))
    (counters, items, samples), _ = jax.lax.scan(step, start, None, 30_000)
    assert abs(8 * (int(items) - 100) - int(samples)) <= 16
    assert counters.inserted == 100
    assert abs(int(counters.balance)) <= 16


def test_what_was_not_allowed_never_overflows():
    limit = SampleToInsert(ratio=1000, min_size=1, tolerance=1000)
    counters = limit.init()
    for _ in range(50):
        counters = limit.inserted(counters, 10**5)
    assert 0 < int(counters.balance) <= 3000
    for _ in range(50):
        counters = limit.sampled(counters, 10**5)
    assert -3000 <= int(counters.balance) < 0


def test_wrong_numbers_are_refused():
    for arguments, message in [
        ((0, 1, 1), "ratio: expected a number above 0"),
        ((1e-9, 1, 1), "ratio: expected at least 0.001"),
        ((1, 0, 1), "min_size: expected at least 1"),
        ((4, 1, 3), "tolerance: expected at least 4"),
        ((0.999, 1, 1e8), "tolerance: expected less than"),
    ]:
        with pytest.raises(ValueError, match=message):
            SampleToInsert(*arguments)


@pytest.mark.parametrize("count", [250_000, 2**31 - 1])
def test_many_items_in_one_call_count_one_by_one(count):
    limit = SampleToInsert(ratio=0.5, min_size=count - 2, tolerance=4)
    counters = limit.inserted(limit.init(), count)
    assert counters.inserted == count - 2 and limit.may_sample(counters, 5)
    assert not limit.may_sample(counters, 6)
    some = limit.inserted(limit.inserted(limit.init(), count - 5), 5)
    assert jax.tree.leaves(some) == jax.tree.leaves(counters)
    traced = jax.jit(limit.inserted)(limit.init(), jnp.uint32(count))
    assert jax.tree.leaves(traced) == jax.tree.leaves(counters)


@pytest.mark.parametrize("tolerance", [10**6])
def test_many_samples_in_one_call_count_one_by_one(tolerance):
    limit = SampleToInsert(ratio=1, min_size=1, tolerance=tolerance)
    counters = limit.sampled(limit.inserted(limit.init(), 300_001), 150_000)
    assert counters.balance == 150_000
    assert limit.may_insert(counters, 850_000) and not limit.may_insert(counters, 850_001)


@pytest.mark.parametrize(
    ("count", "error"), [(-1, ValueError), (2**31, ValueError), (2.5, TypeError), (True, TypeError)]
)
def test_what_is_no_number_of_items_is_refused(count, error):
    limit = SampleToInsert(ratio=2, min_size=3, tolerance=4)
    for call in (limit.inserted, limit.sampled, limit.may_insert, limit.may_sample):
        with pytest.raises(error, match="count: expected"):
            call(limit.init(), count)
    with pytest.raises(TypeError, match="count: expected a single integer"):
        limit.inserted(limit.init(), jnp.ones(2, jnp.int32))
