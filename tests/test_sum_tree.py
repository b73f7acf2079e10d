"""The sum-tree, compared with a float64 reference: structure, search, draws, and edge cases."""

import functools
import os
import subprocess
import sys

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrb import sum_tree

CAPACITIES = (1, 2, 7, 8, 9, 63, 65, 513, 1000, 4099)
BRANCHINGS = (2, 8, 32)
SHAPES = [(capacity, 8) for capacity in CAPACITIES]
SHAPES += [(capacity, 2) for capacity in (1, 8, 65, 1000, 4099)]
SHAPES += [(capacity, 32) for capacity in (2, 9, 63, 513, 4099)]
FEW_SHAPES = [(1, 2), (2, 8), (7, 8), (8, 8), (65, 2), (513, 32), (1000, 8)]
MANY = 1 << 10  # leaves set, read and looked up in one call
DRAWS = 1 << 16
TOP = float(np.finfo(np.float32).max)
BAD = (np.nan, np.inf, -np.inf, -1.0, -1e-30)

update = jax.jit(sum_tree.update)
find = jax.jit(sum_tree.find)
total = jax.jit(sum_tree.total)
get = jax.jit(sum_tree.get)
leaves = jax.jit(sum_tree.leaves)
sample = jax.jit(sum_tree.sample, static_argnums=(2, 3))
set_run = jax.jit(sum_tree.set_run)
set_all = jax.jit(sum_tree.set_all)

in_shapes = pytest.mark.parametrize(("capacity", "branching"), SHAPES)
in_few_shapes = pytest.mark.parametrize(("capacity", "branching"), FEW_SHAPES)
either_way = pytest.mark.parametrize("stratified", [True, False])


def floats(values):
    return np.asarray(values, np.float32)


def put(tree, indices, masses):
    """Updates a tree in calls of one size, so that each tree shape is compiled once."""
    indices, masses = np.asarray(indices, np.int32), floats(masses)
    for begin in range(0, len(indices), MANY):
        some = slice(begin, begin + MANY)
        room = (0, max(0, MANY - len(indices[some])))
        tree = update(
            tree,
            np.pad(indices[some], room, constant_values=-1),
            np.pad(masses[some], room, constant_values=1),
        )
    return tree


def look_up(tree, points):
    points = floats(points)
    padded = np.pad(points, (0, MANY - len(points)))
    return np.asarray(find(tree, padded))[: len(points)]


def full(masses, branching=8):
    return put(sum_tree.init(len(masses), branching), np.arange(len(masses)), masses)


def highest_mass(capacity):
    return np.float32(2.0**125 / capacity)


def expected_leaves(old, indices, masses):
    """Returns the leaves after updates one by one; invalid ones are ignored, large ones clipped."""
    new = old.copy()
    for index, mass in zip(np.asarray(indices), floats(masses), strict=True):
        if 0 <= index < len(new) and np.isfinite(mass) and mass >= 0:
            new[index] = min(mass, highest_mass(len(new)))
    return new


def left_to_right(rows):
    out = rows[:, 0]
    for j in range(1, rows.shape[1]):
        out = out + rows[:, j]
    return out


def same_bits(a, b):
    return np.array_equal(floats(a).view(np.uint32), floats(b).view(np.uint32))


def parents_are_sums(tree):
    """Returns True if every node equals the float32 sum of its children, bit for bit."""
    nodes, branching = np.asarray(tree.nodes), tree.branching
    level = np.asarray(leaves(tree))
    for depth in range(tree.depth, -1, -1):
        if not same_bits(nodes[tree.start(depth) :][: len(level)], level):
            return False
        lead = branching - len(level) if depth == 0 else 0
        level = np.pad(level, (lead, -(len(level) + lead) % branching))
        level = left_to_right(level.reshape(-1, branching))
    return same_bits(total(tree), level[0])


def rounding(tree):
    """Returns a bound on the error of a float32 sum over all levels."""
    steps = tree.branching * (tree.depth + 2)
    return 2.0**-23 * steps * np.asarray(leaves(tree)).sum(dtype=np.float64)


def ends(tree):
    """Returns the cumulative mass at the end of each leaf."""
    return np.cumsum(np.asarray(leaves(tree)), dtype=np.float64)


def lies_in(tree, found, low, high):
    """Returns True for each leaf that overlaps [low, high], up to rounding."""
    upper = ends(tree)[found]
    lower = upper - np.asarray(leaves(tree))[found]
    slack = rounding(tree)
    return (upper >= low - slack) & (lower <= high + slack)


def chi_square(counts, masses):
    """Returns the chi-square statistic and the largest value that passes."""
    counts, masses = np.asarray(counts, np.float64), np.asarray(masses, np.float64)
    drawable = masses > 0
    if counts[~drawable].any():
        return np.inf, 0.0
    expected = masses[drawable] / masses.sum() * counts.sum()
    freedom = len(expected) - 1
    statistic = ((counts[drawable] - expected) ** 2 / expected).sum()
    return statistic, freedom + 5 * np.sqrt(2 * freedom)


def fits(counts, masses):
    statistic, limit = chi_square(counts, masses)
    return statistic <= limit


def small_integers(capacity, seed=0):
    """Returns masses with exact sums; about a fifth are zero, and at least one is positive."""
    masses = np.random.default_rng(seed).integers(0, 5, capacity)
    masses[capacity // 2] = 3
    return floats(masses)


any_mass = st.one_of(
    st.sampled_from([0.0, 1.0, 1e-3, 1e8, TOP, *BAD]),
    st.integers(0, 5).map(float),
    st.floats(0, 2.0**100, width=32, allow_subnormal=False),
)
batches = st.lists(
    st.lists(st.tuples(st.integers(-3, 2**31 - 1), any_mass), max_size=24), min_size=1, max_size=4
)


def within(capacity, numbers):
    """Returns indices that are mostly valid; some are negative or past the end."""
    return [n if n < 0 else n % (capacity + 2) for n in numbers]


@pytest.mark.slow
@hypothesis.given(shape=st.sampled_from(FEW_SHAPES), stream=batches)
def test_updates_follow_the_reference(shape, stream):
    tree, expected = sum_tree.init(*shape), np.zeros(shape[0], np.float32)
    for batch in stream:
        indices = within(shape[0], [index for index, _ in batch])
        masses = [mass for _, mass in batch]
        tree = put(tree, indices, masses)
        expected = expected_leaves(expected, indices, masses)
        assert same_bits(leaves(tree), expected)
        assert parents_are_sums(tree)
    assert abs(float(total(tree)) - expected.sum(dtype=np.float64)) <= rounding(tree)


@pytest.mark.slow
@hypothesis.given(
    shape=st.sampled_from(FEW_SHAPES),
    masses=st.lists(any_mass, min_size=1, max_size=64),
    fractions=st.lists(st.floats(0, 1, width=32, allow_subnormal=False), min_size=1, max_size=64),
)
def test_find_lands_where_the_reference_does(shape, masses, fractions):
    tree = put(sum_tree.init(*shape), np.arange(len(masses)) * 17 % shape[0], masses)
    points = floats(floats(fractions) * total(tree))
    found = look_up(tree, points)
    assert (found >= 0).all()
    assert (found < shape[0]).all()
    if float(total(tree)) > 0:
        assert (np.asarray(leaves(tree))[found] > 0).all()
        assert lies_in(tree, found, points, points).all()


@pytest.mark.slow
@in_shapes
def test_leaves_and_parents_at_every_shape(capacity, branching):
    rng = np.random.default_rng(capacity)
    tree, expected = sum_tree.init(capacity, branching), np.zeros(capacity, np.float32)
    for _ in range(3):
        indices = rng.integers(-2, capacity + 2, MANY).astype(np.int32)
        masses = floats(np.exp2(rng.uniform(-60, 60, MANY)) * rng.integers(0, 3, MANY))
        masses[rng.random(MANY) < 0.05] = rng.choice(BAD)
        tree, expected = put(tree, indices, masses), expected_leaves(expected, indices, masses)
    assert same_bits(leaves(tree), expected)
    assert parents_are_sums(tree)
    some = rng.integers(0, capacity, MANY).astype(np.int32)
    assert same_bits(get(tree, some), expected[some])


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "branching"), FEW_SHAPES[1:])
def test_sums_before_a_leaf_are_those_of_the_reference(capacity, branching):
    masses = np.random.default_rng(capacity).integers(0, 2, capacity).astype(np.float32)
    tree = set_all(sum_tree.init(capacity, branching), jnp.asarray(masses))
    before = jax.jit(jax.vmap(sum_tree.sum_before, (None, 0)))(tree, jnp.arange(capacity))
    assert before.tolist() == (np.cumsum(masses) - masses).tolist()


@in_shapes
def test_find_is_exact_where_sums_are(capacity, branching):
    masses = small_integers(capacity)
    tree, upper = full(masses, branching), np.cumsum(masses)
    points = np.random.default_rng(1).integers(0, 2 * upper[-1], MANY) / 2
    points[:3] = 0, upper[0] - 0.5 if upper[0] else 0, upper[-1] - 0.5
    expected = np.searchsorted(upper, points, side="right")
    assert float(total(tree)) == upper[-1]
    assert np.array_equal(look_up(tree, points), expected)
    assert (masses[expected] > 0).all()


@pytest.mark.slow
@either_way
@in_shapes
def test_draws_follow_the_masses(capacity, branching, stratified):
    masses = small_integers(capacity, seed=capacity)
    drawn = sample(full(masses, branching), jax.random.key(capacity), DRAWS, stratified)
    counts = np.bincount(drawn, minlength=capacity)
    assert fits(counts, masses)
    if capacity > 2:
        assert not fits(counts, np.roll(masses, 1))


@either_way
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_draws_follow_the_masses_at_every_scale(scale, stratified):
    masses = small_integers(1000) * np.float32(scale)
    drawn = sample(full(masses), jax.random.key(3), DRAWS, stratified)
    assert fits(np.bincount(drawn, minlength=1000), masses)


def test_draws_follow_masses_of_many_magnitudes():
    masses = floats(np.exp2(np.random.default_rng(5).uniform(-20, 20, 513)))
    exact = masses.astype(np.float64) / masses.sum(dtype=np.float64)
    for stratified in (True, False):
        drawn = sample(full(masses), jax.random.key(4), DRAWS, stratified)
        counts = np.bincount(drawn, minlength=513)
        often = exact * DRAWS > 5
        counts = np.append(counts[often], counts[~often].sum())
        assert fits(counts, np.append(exact[often], exact[~often].sum()))


@pytest.mark.slow
def test_every_leaf_gets_its_share_of_all_random_words():
    masses = small_integers(1000, seed=2) + floats(np.linspace(0, 1, 1000))
    tree, counts = full(masses), np.zeros(1000, np.int64)
    share = jax.jit(
        lambda tree, chunk: sum_tree.find(
            tree,
            (chunk + jnp.arange(2**20)).astype(jnp.float32) * 2**-24 * sum_tree.total(tree),
        )
    )
    for chunk in range(16):
        counts += np.bincount(share(tree, jnp.int32(chunk << 20)), minlength=1000)
    exact = masses.astype(np.float64) / masses.sum(dtype=np.float64)
    assert counts.sum() == 2**24
    assert np.abs(counts - 2**24 * exact).max() < 16


@pytest.mark.parametrize("branching", BRANCHINGS)
def test_stratified_draws_hit_each_of_equal_leaves_once(branching):
    tree = set_all(sum_tree.init(64, branching), jnp.ones(64))
    keys = jax.random.split(jax.random.key(0), 256)
    drawn = jax.jit(jax.vmap(lambda key: sum_tree.sample(tree, key, 64)))(keys)
    assert np.array_equal(np.sort(drawn, axis=1), np.tile(np.arange(64), (256, 1)))


def widest_node_drawn_anew(tree):
    """Returns the largest mass of a node inside which positions are redrawn; 0 in a small tree."""
    levels = [level for level in range(tree.depth) if tree.width(level) >= 2048]
    if not levels:
        return 0.0
    span = tree.branching ** (tree.depth - levels[0])
    return np.add.reduceat(np.asarray(leaves(tree), float), np.arange(0, tree.capacity, span)).max()


def strata_kept(tree, batch_size, key):
    """Returns True for each sorted draw that overlaps its stratum, up to the mass of a redraw."""
    drawn = np.sort(sample(tree, key, batch_size, True))
    part, slack = float(total(tree)) / batch_size, widest_node_drawn_anew(tree)
    number = np.arange(batch_size)
    return lies_in(tree, drawn, number * part - slack, (number + 1) * part + slack)


@pytest.mark.slow
@in_shapes
def test_stratified_draws_put_one_in_each_stratum(capacity, branching):
    tree = full(small_integers(capacity, seed=3), branching)
    assert strata_kept(tree, DRAWS, jax.random.key(capacity)).all()


@pytest.mark.parametrize("batch_size", [256, 4096])
def test_stratified_draws_put_one_in_each_stratum_of_a_large_tree(batch_size):
    masses = small_integers(100_000, seed=4) + np.float32(1)
    tree = set_all(sum_tree.init(100_000, 8), jnp.asarray(masses))
    kept = [strata_kept(tree, batch_size, jax.random.key(seed)) for seed in range(4)]
    assert np.all(kept)


def test_a_broken_stratum_is_noticed():
    tree = full(np.ones(1000))
    drawn = np.sort(sample(tree, jax.random.key(0), DRAWS, False))
    part = 1000 / DRAWS
    number = np.arange(DRAWS)
    assert not lies_in(tree, drawn, number * part, (number + 1) * part).all()


def test_nothing_drifts_in_100_000_updates():
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 1000, (100_000, 4)).astype(np.int32)
    masses = floats(np.exp2(rng.uniform(-30, 30, indices.shape)))
    scan = lambda tree, stream: jax.lax.scan(
        lambda tree, batch: (sum_tree.update(tree, *batch), None), tree, stream
    )
    tree, _ = jax.jit(scan)(sum_tree.init(1000, 8), (indices, masses))
    expected = np.zeros(1000, np.float32)
    for index, mass in zip(indices.ravel(), masses.ravel(), strict=True):
        expected[index] = mass
    assert same_bits(leaves(tree), expected)
    assert parents_are_sums(tree)
    tree = put(tree, np.arange(1000), np.zeros(1000))
    assert same_bits(total(tree), 0.0)
    tree = put(tree, [617], [1e-3])
    for stratified in (True, False):
        assert (np.asarray(sample(tree, jax.random.key(0), DRAWS, stratified)) == 617).all()


def test_a_wrong_parent_is_noticed():
    tree = full(np.linspace(1, 2, 513))
    for level in range(tree.depth):
        assert parents_are_sums(tree)
        node = tree.start(level)
        nudged = np.nextafter(np.asarray(tree.nodes)[node], np.float32(TOP))
        assert not parents_are_sums(tree.replace(tree.nodes.at[node].set(nudged)))


@in_few_shapes
def test_a_large_mass_that_went_leaves_nothing_behind(capacity, branching):
    tree = put(sum_tree.init(capacity, branching), [capacity - 1], [1.0])
    for index in range(min(capacity - 1, 8)):
        before = total(tree)
        tree = put(put(tree, [index], [1e8]), [index], [0.0])
        assert same_bits(total(tree), before)
    tree = put(tree, [0, capacity - 1], [1e8, 1.0])
    tree = put(tree, [0, capacity - 1], [0.0, 1.0])
    assert same_bits(total(tree), 1.0)


@pytest.mark.slow
@either_way
@in_few_shapes
def test_one_tiny_leaf_among_zeros_is_every_draw(capacity, branching, stratified):
    tree = full(np.full(capacity, 1e8), branching)
    tree = put(tree, np.arange(capacity), np.zeros(capacity))
    for index in {0, capacity // 2, capacity - 1}:
        tree = put(tree, np.arange(capacity), np.arange(capacity) == index)
        tree = put(tree, [index], [1e-30])
        drawn = np.asarray(sample(tree, jax.random.key(index), DRAWS, stratified))
        assert (drawn == index).all()


def beyond(tree):
    """Returns points at the top of the range and past it."""
    whole = np.float32(total(tree))
    near = [np.nextafter(whole, np.float32(0)), whole, np.nextafter(whole, np.float32(np.inf))]
    return floats([*near, whole * np.float32(1.5), TOP, np.inf])


@pytest.mark.slow
@in_shapes
def test_points_beyond_the_total_get_the_last_leaf_of_positive_mass(capacity, branching):
    masses = small_integers(capacity, seed=6)
    for last in {capacity // 2, capacity - 1}:
        masses[last] = 2
        masses[last + 1 :] = 0
        tree = full(masses, branching)
        assert look_up(tree, beyond(tree)).tolist() == [last] * 6


@in_shapes
def test_points_before_zero_get_the_first_leaf_of_positive_mass(capacity, branching):
    first = capacity // 2
    tree = full(np.arange(capacity) >= first, branching)
    assert look_up(tree, [0.0, -0.0, -1e-30, -1.0, -np.inf]).tolist() == [first] * 5


@hypothesis.given(
    shape=st.sampled_from(FEW_SHAPES),
    masses=st.lists(
        st.one_of(st.just(0.0), st.floats(0, 2.0**100, width=32, allow_subnormal=False)),
        min_size=1,
        max_size=64,
    ),
)
def test_no_point_however_large_finds_a_leaf_without_mass(shape, masses):
    tree = put(sum_tree.init(*shape), np.arange(len(masses)) * 29 % shape[0], masses)
    hypothesis.assume(float(total(tree)) > 0)
    points = np.append(beyond(tree), np.linspace(0, 1, 50, dtype=np.float32) * total(tree))
    assert (np.asarray(leaves(tree))[look_up(tree, points)] > 0).all()


@pytest.mark.parametrize("mass", [np.float32(1e-45), np.float32(1e-39), np.float64(1e-300)])
def test_a_mass_that_arithmetic_takes_for_none_is_drawn(mass):
    for update in (sum_tree.update, jax.jit(sum_tree.update)):
        masses = np.array([0, mass]) if mass.dtype == float else jnp.array([0, mass])
        if update is not sum_tree.update and masses.dtype == float:
            continue  # jit would convert the masses to float32
        tree = update(sum_tree.init(40), jnp.array([3, 7]), masses)
        assert sum_tree.total(tree) > 0
        assert set(sum_tree.sample(tree, jax.random.key(0), 16).tolist()) == {7}
        assert sum_tree.find(tree, jnp.zeros(1)).tolist() == [7]


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("mass", [2.0**-126, 2.0**-110])
def test_leaves_of_least_mass_are_drawn_alike(mass, stratified):
    tree = sum_tree.update(sum_tree.init(40), jnp.arange(4), jnp.full(4, mass))
    found = sum_tree.sample(tree, jax.random.key(0), 4096, stratified)
    assert np.bincount(found, minlength=4).min() > 900


@pytest.mark.parametrize(("tiny", "large"), [(1e-3, 1e8), (1e-30, 1e30), (1.0, 3e7)])
def test_leaves_too_small_to_count_beside_a_large_one_do_not_mislead(tiny, large):
    masses = np.where(np.arange(513) % 3 == 0, tiny, 0.0)
    for index in (0, 256, 512):
        masses[index] = large
        tree = full(masses)
        found = look_up(tree, beyond(tree))
        assert (np.asarray(leaves(tree))[found] > 0).all()
        drawn = np.asarray(sample(tree, jax.random.key(0), DRAWS, False))
        assert (masses[drawn] > 0).all()
        masses[index] = 0


@pytest.mark.slow
@either_way
@in_shapes
def test_a_tree_without_mass_draws_all_leaves_alike(capacity, branching, stratified):
    tree = sum_tree.init(capacity, branching)
    drawn = np.asarray(sample(tree, jax.random.key(1), DRAWS, stratified))
    assert ((drawn >= 0) & (drawn < capacity)).all()
    assert fits(np.bincount(drawn, minlength=capacity), np.ones(capacity))
    emptied = put(full(np.ones(capacity), branching), np.arange(capacity), np.zeros(capacity))
    assert np.array_equal(sample(emptied, jax.random.key(1), DRAWS, stratified), drawn)


@in_shapes
def test_a_tree_without_mass_finds_leaf_0(capacity, branching):
    tree = sum_tree.init(capacity, branching)
    assert float(total(tree)) == 0
    assert look_up(tree, [0.0, 1e-30, 1.0, TOP]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_mass_leaves_the_leaf_as_it_was(bad):
    tree = full(np.arange(1000))
    after = put(tree, [0, 7, 999], [bad, bad, bad])
    assert same_bits(after.nodes, tree.nodes)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_mass_does_not_spoil_a_valid_duplicate(bad):
    tree = full(np.full(1000, 5.0))
    for batch in ([bad, 2.0], [2.0, bad], [3.0, bad, 2.0, bad], [bad, bad, 2.0]):
        after = put(tree, [7] * len(batch), batch)
        expected = np.full(1000, 5.0)
        expected[7] = 2.0
        assert same_bits(leaves(after), expected)
        assert parents_are_sums(after)


@pytest.mark.parametrize("outside", [-1, -1000, -(2**31), 1000, 1001, 1007, 1008, 2**31 - 1])
def test_an_index_out_of_range_is_left_out(outside):
    tree = full(np.arange(1000))
    assert same_bits(put(tree, [outside], [9.0]).nodes, tree.nodes)
    after = put(tree, [outside, 3, outside], [9.0, 8.0, 7.0])
    assert same_bits(leaves(after), expected_leaves(floats(np.arange(1000)), [3], [8.0]))
    assert parents_are_sums(after)


def test_the_padding_of_the_last_row_stays_without_mass():
    tree = full(np.ones(1001))
    after = put(tree, np.arange(990, 1020), np.full(30, 4.0))
    nodes = np.asarray(after.nodes)
    assert len(nodes) > after.leaf + 1001
    assert not nodes[after.leaf + 1001 :].any()


@in_few_shapes
def test_the_last_duplicate_wins(capacity, branching):
    tree = sum_tree.init(capacity, branching)
    indices = np.full(MANY, capacity // 2)
    for masses in (np.arange(MANY), np.arange(MANY)[::-1] + 1, np.arange(MANY) % 7):
        tree = put(tree, indices, masses)
        assert float(total(tree)) == masses[-1]
        assert get(tree, indices[:1]).tolist() == [masses[-1]]


def test_the_last_duplicate_wins_in_a_large_batch():
    rng = np.random.default_rng(8)
    indices = rng.integers(-5, 1005, 1 << 17).astype(np.int32)
    masses = floats(rng.random(1 << 17))
    tree = update(full(np.ones(1000)), indices, masses)
    assert same_bits(leaves(tree), expected_leaves(np.ones(1000, np.float32), indices, masses))
    assert parents_are_sums(tree)


@pytest.mark.slow
@in_shapes
def test_huge_masses_never_make_the_total_infinite(capacity, branching):
    tree = full(np.full(capacity, TOP), branching)
    assert np.isfinite(float(total(tree)))
    assert parents_are_sums(tree)
    assert same_bits(leaves(tree), np.full(capacity, highest_mass(capacity)))
    drawn = np.asarray(sample(tree, jax.random.key(2), DRAWS, False))
    assert fits(np.bincount(drawn, minlength=capacity), np.ones(capacity))


def test_an_empty_update_changes_nothing():
    tree = full(np.arange(65))
    after = update(tree, jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32))
    assert same_bits(after.nodes, tree.nodes)


def test_integer_and_half_precision_masses_are_taken():
    tree = sum_tree.init(9, 8)
    for dtype in (jnp.int32, jnp.bfloat16, jnp.float16):
        after = update(tree, jnp.array([2, 5]), jnp.array([3, 1], dtype))
        assert leaves(after).tolist() == [0, 0, 3, 0, 0, 1, 0, 0, 0]


@pytest.mark.slow
def test_jit_equals_eager():
    rng, key = np.random.default_rng(9), jax.random.key(9)
    indices = jnp.asarray(rng.integers(-3, 520, 64), jnp.int32)
    masses = jnp.asarray(rng.random(64), jnp.float32)
    tree = full(rng.random(513))
    eager = sum_tree.update(tree, indices, masses)
    assert same_bits(eager.nodes, update(tree, indices, masses).nodes)
    assert same_bits(sum_tree.total(eager), total(eager))
    assert same_bits(sum_tree.leaves(eager), leaves(eager))
    assert same_bits(sum_tree.get(eager, jnp.arange(64)), get(eager, jnp.arange(64)))
    points = jnp.linspace(0, 1, 64) * sum_tree.total(eager)
    assert np.array_equal(sum_tree.find(eager, points), find(eager, points))
    for stratified in (True, False):
        drawn = sum_tree.sample(eager, key, 1000, stratified)
        assert np.array_equal(drawn, sample(eager, key, 1000, stratified))


def stack(each):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


@pytest.mark.slow
def test_vmap_equals_a_loop():
    rng = np.random.default_rng(10)
    each = [full(rng.random(513) * (rng.random(513) < 0.8)) for _ in range(4)]
    each[2] = sum_tree.init(513, 8)
    indices = jnp.asarray(rng.integers(-3, 520, (4, 64)), jnp.int32)
    masses = jnp.asarray(rng.random((4, 64)) - 0.1, jnp.float32).at[2].set(0)
    keys = jax.random.split(jax.random.key(10), 4)

    def act(tree, indices, masses, key):
        tree = sum_tree.update(tree, indices, masses)
        points = masses * sum_tree.total(tree)
        drawn = sum_tree.sample(tree, key, 64)
        found = sum_tree.find(tree, jnp.maximum(points, 0))
        return tree, sum_tree.total(tree), sum_tree.get(tree, drawn), drawn, found

    one = jax.jit(act)
    looped = stack([one(each[i], indices[i], masses[i], keys[i]) for i in range(4)])
    mapped = jax.jit(jax.vmap(act))(stack(each), indices, masses, keys)
    for a, b in zip(jax.tree.leaves(looped), jax.tree.leaves(mapped), strict=True):
        assert np.array_equal(a, b)
    shared = jax.jit(jax.vmap(act, in_axes=(None, 0, 0, 0)))(each[0], indices, masses, keys)
    alone = stack([one(each[0], indices[i], masses[i], keys[i]) for i in range(4)])
    for a, b in zip(jax.tree.leaves(shared), jax.tree.leaves(alone), strict=True):
        assert np.array_equal(a, b)


def test_a_second_call_does_not_retrace():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(tree, indices, masses, key):
        tree = sum_tree.update(tree, indices, masses)
        return tree, sum_tree.sample(tree, key, 8)

    tree = sum_tree.init(100, 8)
    for seed in range(3):
        tree, drawn = step(tree, jnp.arange(8), jnp.ones(8), jax.random.key(seed))
    step(sum_tree.init(100, 8), drawn, jnp.zeros(8), jax.random.key(3))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        step(sum_tree.init(101, 8), drawn, jnp.zeros(8), jax.random.key(3))


@functools.lru_cache(maxsize=1)
def ten_million_equal(branching):
    return set_all(sum_tree.init(10_000_000, branching), jnp.ones(10_000_000))


def dispersion(draws):
    """Returns variance over mean of the counts of 10^7 leaves; 1 for independent, uniform draws."""
    counts = np.bincount(np.concatenate(draws), minlength=10_000_000)
    assert counts.shape == (10_000_000,)
    return counts.var() / counts.mean()


@pytest.mark.slow
@pytest.mark.parametrize("branching", [32, 8])
def test_10_million_leaves_are_told_apart(branching):
    tree, keys = ten_million_equal(branching), jax.random.split(jax.random.key(11), 8)
    assert abs(dispersion([sample(tree, key, 1 << 18, False) for key in keys]) - 1.0) < 0.005


@pytest.mark.slow
def test_a_float32_alone_cannot_tell_10_million_leaves_apart():
    tree, keys = ten_million_equal(8), jax.random.split(jax.random.key(11), 8)
    point = jax.jit(lambda key: jax.random.uniform(key, (1 << 18,)) * 1e7)
    assert dispersion([find(tree, point(key)) for key in keys]) > 1.01


@pytest.mark.parametrize(("capacity", "branching"), [(1, 8), (9, 2), (1000, 8), (4099, 32)])
def test_a_run_of_leaves_is_set_as_one_by_one(capacity, branching):
    rng = np.random.default_rng(capacity)
    tree = set_all(sum_tree.init(capacity, branching), floats(rng.random(capacity)))
    for count in {min(5, capacity), min(300, capacity), capacity}:
        for first in {0, (capacity - count) // 2, capacity - count}:
            values = floats(rng.random(count))
            expected = np.asarray(leaves(tree)).copy()
            expected[first : first + count] = values
            tree = set_run(tree, jnp.int32(first), values)
            assert same_bits(leaves(tree), expected)
            assert parents_are_sums(tree)


def test_the_least_follows_the_leaves():
    rng, root = np.random.default_rng(12), jax.jit(sum_tree.root)
    for capacity, branching in [(1, 2), (8, 8), (1000, 8)]:
        tree = sum_tree.neutral(capacity, "min", branching)
        assert float(root(tree)) == TOP
        for scale in (1.0, 10.0, 0.1):
            values = floats(rng.random(capacity) * scale + 0.5)
            tree = set_all(tree, values)
            assert float(root(tree)) == np.min(values)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_wrong_capacity_is_an_error(capacity):
    with pytest.raises(ValueError, match=f"capacity: expected at least 1, got {capacity}"):
        sum_tree.init(capacity)


@pytest.mark.parametrize("branching", [0, 1, 3, -8, 12, 256])
def test_a_wrong_branching_is_an_error(branching):
    with pytest.raises(ValueError, match=f"branching: .*got {branching}"):
        sum_tree.init(10, branching)


def test_an_update_too_long_to_order_is_an_error():
    long = 2**24 + 1
    indices = jax.ShapeDtypeStruct((long,), jnp.int32)
    masses = jax.ShapeDtypeStruct((long,), jnp.float32)
    with pytest.raises(ValueError, match="at most 2"):
        jax.eval_shape(sum_tree.update, sum_tree.init(10), indices, masses)


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "branching"), [(34_000_000, 128), (140_000_000, 32)])
def test_the_last_leaf_of_a_huge_tree_is_found(capacity, branching):
    tree = update(sum_tree.init(capacity, branching), jnp.array([capacity - 1]), jnp.ones(1))
    assert find(tree, jnp.array([0.5])).tolist() == [capacity - 1]
    assert sample(tree, jax.random.key(0), 4, True).tolist() == [capacity - 1] * 4


@pytest.mark.slow
def test_trees_of_any_sizes_are_searched_in_one_optimized_program():
    """Runs without the tests' XLA flags, which disable optimizations that may be wrong."""
    program = """
import jax, jax.numpy as jnp
from jrb import sum_tree
sizes = (5, 20, 40, 50, 64, 100, 300, 1000, 4099)
trees = [sum_tree.update(sum_tree.init(size), jnp.arange(size), jnp.ones(size)) for size in sizes]
find = lambda trees: [sum_tree.find(tree, jnp.arange(5) + 0.5) for tree in trees]
assert [found.tolist() for found in jax.jit(find)(trees)] == [[0, 1, 2, 3, 4]] * len(sizes)
"""
    environment = os.environ | {"XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
