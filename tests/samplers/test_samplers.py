"""The items that each sampler draws, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(0)


def filled(sampler, count, capacity=None, batch_size=4, **options):
    """Returns a buffer with the items 0 .. count - 1, and its state."""
    buffer = jrb.ReplayBuffer(capacity or count, batch_size=batch_size, sampler=sampler, **options)
    return buffer, buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(count, dtype=jnp.int32))


def counts(buffer, state, draws=2000):
    """Returns how often each slot is drawn."""
    keys = jax.random.split(KEY, draws)
    indices = jax.jit(jax.vmap(lambda key: buffer.sample(state, key).indices))(keys)
    return np.bincount(np.asarray(indices).ravel(), minlength=buffer.capacity)


def fits(counted, expected):
    """Returns True if counts fit a distribution: a chi-square test at five standard deviations."""
    expected = np.asarray(expected, float) / np.sum(expected) * counted.sum()
    live = expected > 0
    statistic = np.sum((counted[live] - expected[live]) ** 2 / expected[live])
    freedom = live.sum() - 1
    return not counted[~live].any() and statistic <= freedom + 5 * np.sqrt(2 * freedom)


def priorities(buffer, state, values):
    return buffer.update_priority(state, np.arange(len(values)), np.asarray(values, np.float32))


@pytest.mark.parametrize(
    ("capacity", "replacement"), [(1, False), (7, True), (7, False), (37, True), (100, False)]
)
def test_uniform_is_uniform_over_what_is_held(capacity, replacement):
    buffer, state = filled(jrb.Uniform(replacement), capacity * 2 // 3 or 1, capacity)
    assert fits(counts(buffer, state), np.arange(capacity) < (capacity * 2 // 3 or 1))


def test_the_check_of_uniformity_can_fail():
    assert not fits(np.array([1000, 1000, 1200]), np.ones(3))
    assert not fits(np.array([1000, 1000, 1]), np.array([1, 1, 0]))


def test_uniform_without_replacement_repeats_nothing_in_a_batch():
    buffer, state = filled(jrb.Uniform(replacement=False), 5, 9, batch_size=8)
    for seed in range(20):
        sample = buffer.sample(state, jax.random.key(seed))
        assert sample.mask.tolist() == [True] * 5 + [False] * 3
        assert sorted(sample.data[:5].tolist()) == [0, 1, 2, 3, 4]
        assert sample.weights.tolist() == [1.0] * 5 + [0.0] * 3


def test_uniform_tells_its_probabilities():
    buffer, state = filled(jrb.Uniform(), 5, 9)
    sample = buffer.sample(state, KEY)
    np.testing.assert_allclose(sample.probabilities, 0.2)
    assert sample.weights.tolist() == [1.0] * 4


def epoch(buffer, state, batches):
    """Makes `batches` draws; returns the state and the items of each batch."""
    out, draw = [], jax.jit(buffer.draw)
    for number in range(batches):
        state, sample = draw(state, jax.random.key(number))
        out.append(sample.data[sample.mask].tolist())
    return state, out


def test_an_epoch_gives_each_item_once_and_a_short_last_batch():
    buffer, state = filled(jrb.WithoutReplacement(), 10)
    state, batches = epoch(buffer, state, 6)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_drop_last_leaves_the_short_batch_out():
    buffer, state = filled(jrb.WithoutReplacement(drop_last=True), 10)
    _, batches = epoch(buffer, state, 4)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    assert len(set(batches[0] + batches[1])) == len(set(batches[2] + batches[3])) == 8


def test_drop_last_with_less_than_a_batch_gives_nothing():
    buffer, state = filled(jrb.WithoutReplacement(drop_last=True), 3, 10)
    assert not buffer.can_sample(state)
    assert not jax.jit(buffer.draw)(state, KEY)[1].mask.any()


def test_rows_written_in_an_epoch_join_the_next():
    buffer, state = filled(jrb.WithoutReplacement(), 6, 20)
    state, first = epoch(buffer, state, 1)
    state = buffer.extend(state, jnp.arange(6, 9, dtype=jnp.int32))
    state, rest = epoch(buffer, state, 1)
    assert sorted(sum(first + rest, [])) == [0, 1, 2, 3, 4, 5]
    _, then = epoch(buffer, state, 3)
    assert sorted(sum(then, [])) == list(range(9))


@pytest.mark.parametrize("written", [3, 5, 6, 14, 23])
def test_a_slot_overwritten_in_an_epoch_gives_its_new_item_once(written):
    buffer, state = filled(jrb.WithoutReplacement(), 6, batch_size=2)
    draw = jax.jit(buffer.draw)
    state, first = draw(state, KEY)
    new = jnp.arange(100, 100 + written, dtype=jnp.int32)
    state = buffer.extend(state, new)
    state, second = draw(state, KEY)
    state, third = draw(state, KEY)
    drawn = [sample.indices.tolist() for sample in (first, second, third)]
    assert sorted(sum(drawn, [])) == [0, 1, 2, 3, 4, 5]


def test_every_order_of_an_epoch_is_alike():
    buffer, state = filled(jrb.WithoutReplacement(), 7, batch_size=1)
    assert fits(counts(buffer, state, 4000), np.ones(7))


def test_a_queue_is_first_in_first_out():
    buffer, state = filled(jrb.Queue(), 3, 8)
    state, batches = epoch(buffer, state, 2)
    assert batches == [[0, 1, 2], []]
    state = buffer.extend(state, jnp.arange(3, 9, dtype=jnp.int32))
    assert epoch(buffer, state, 2)[1] == [[3, 4, 5, 6], [7, 8]]


def test_a_queue_loses_what_is_overwritten():
    buffer, state = filled(jrb.Queue(), 5)
    state, _ = buffer.draw(state, KEY, batch_size=2)
    state = buffer.extend(state, jnp.arange(5, 9, dtype=jnp.int32))
    assert epoch(buffer, state, 2)[1] == [[4, 5, 6, 7], [8]]
    state = buffer.extend(state, jnp.arange(9, 30, dtype=jnp.int32))
    assert epoch(buffer, state, 2)[1] == [[25, 26, 27, 28], [29]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "stratified"), [(3, True), (37, False), (101, True), (101, False)]
)
def test_prioritized_draws_follow_the_priorities(capacity, stratified):
    sampler = jrb.Prioritized(alpha=0.7, eps=0.0, stratified=stratified)
    buffer, state = filled(sampler, capacity)
    values = np.random.default_rng(capacity).exponential(size=capacity)
    values[0] = 0
    state = priorities(buffer, state, values)
    assert fits(counts(buffer, state), values**0.7)
    sample = buffer.sample(state, KEY)
    share = values**0.7 / np.sum(values**0.7)
    np.testing.assert_allclose(sample.probabilities, share[sample.indices], rtol=1e-5)


NOTHING = [  # the priorities of four items, and how many of them are dropped first
    (0.0, 0),
    (0.0, 3),
    (2.0, 4),
]


SLOW = [pytest.param(normalize, marks=pytest.mark.slow) for normalize in ("buffer", None)]


@pytest.mark.slow
@pytest.mark.parametrize(("priority", "dropped"), NOTHING)
@pytest.mark.parametrize("normalize", ["batch", *SLOW])
def test_without_mass_there_is_nothing_to_draw(normalize, priority, dropped):
    sampler = jrb.Prioritized(alpha=0.7, eps=0.0, normalize=normalize)
    buffer, state = filled(sampler, 4, 6)
    state = buffer.drop(priorities(buffer, state, [priority] * 4), np.arange(dropped))
    assert not buffer.can_sample(state)
    with pytest.raises(ValueError, match=r"in which Prioritized finds no mass\. Give priorities"):
        buffer.sample(state, KEY)
    other = buffer.init(jnp.int32(0))
    other = buffer.add(other, jnp.int32(7))
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, other)
    batch = jax.jit(jax.vmap(buffer.sample, (0, None)))(both, KEY)
    assert not batch.mask[0].any() and batch.mask[1].all()
    assert not batch.weights[0].any() and not batch.probabilities[0].any()
    assert batch.weights[1].tolist() == batch.probabilities[1].tolist() == [1.0] * 4
    after = buffer.update_priority(state, jax.tree.map(lambda leaf: leaf[0], batch), jnp.ones(4))
    assert not buffer.can_sample(after)  # masked entries are no anchors to update
    state = buffer.add(state, jnp.int32(9))
    assert buffer.sample(state, KEY).data.tolist() == [9] * 4


def test_what_has_no_mass_is_not_drawn_beside_what_has_some():
    buffer, state = filled(jrb.Prioritized(eps=0.0), 20, 30)
    state = priorities(buffer, state, np.arange(20) % 4)
    assert fits(counts(buffer, state), np.where(np.arange(30) < 20, np.arange(30) % 4, 0) ** 0.6)


def test_alpha_0_draws_anchors_of_priority_0():
    buffer, state = filled(jrb.Prioritized(alpha=0.0, eps=0.0), 3, 4, batch_size=64)
    state = priorities(buffer, state, np.zeros(3))
    assert set(buffer.sample(state, KEY).indices.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [("batch", [1, 0.5743, 0.4152]), ("buffer", [1, 0.5743, 0.4152]), (None, None)],
)
def test_weights_are_those_of_the_paper(normalize, expected):
    sampler = jrb.Prioritized(alpha=0.5, beta=0.8, eps=0.0, normalize=normalize)
    buffer, state = filled(sampler, 3, batch_size=64)
    state = priorities(buffer, state, [1, 4, 9])
    sample = buffer.sample(state, KEY)
    assert set(sample.indices.tolist()) == {0, 1, 2}
    expected = (3 * np.array([1, 2, 3]) / 6) ** -0.8 if expected is None else np.array(expected)
    np.testing.assert_allclose(sample.weights, expected[sample.indices], rtol=2e-4)


def test_normalizing_by_the_buffer_does_not_depend_on_the_batch():
    sampler = jrb.Prioritized(alpha=0.5, beta=0.8, eps=0.0, normalize="buffer")
    buffer, state = filled(sampler, 4, 6, batch_size=1)
    state = priorities(buffer, state, [0, 1, 4, 9])
    for seed in range(8):
        sample = buffer.sample(state, jax.random.key(seed))
        weight = {1: 1, 2: 0.5743, 3: 0.4152}[int(sample.indices[0])]
        np.testing.assert_allclose(sample.weights, weight, rtol=2e-4)


def test_beta_may_follow_a_schedule():
    buffer, state = filled(jrb.Prioritized(alpha=1.0, eps=0.0), 2, batch_size=64)
    state = priorities(buffer, state, [1, 4])
    draw = jax.jit(buffer.sample)
    for beta in (0.0, 0.4, 1.0):
        sample = draw(state, KEY, beta=beta)
        np.testing.assert_allclose(sample.weights.min(), 0.25**beta, rtol=1e-5)
    assert draw._cache_size() == 1


def test_alpha_can_change():
    buffer, state = filled(jrb.Prioritized(alpha=0.5, eps=0.0), 3, 5)
    state = priorities(buffer, state, [1, 4, 9])
    for alpha in (0.0, 1.0, 2.0):
        state = jax.jit(buffer.set_alpha)(state, alpha)
        masses = jrb.sum_tree.leaves(state.sampler.masses)
        np.testing.assert_allclose(masses, [1, 4**alpha, 9**alpha, 0, 0], rtol=1e-5)
    state = buffer.add(state, jnp.int32(7))
    np.testing.assert_allclose(jrb.sum_tree.leaves(state.sampler.masses)[3], 81, rtol=1e-5)
    assert float(buffer.empty(state).sampler.alpha) == 2.0


@pytest.mark.parametrize(
    ("rule", "raw"),
    [
        ("max", [0.5, 0.25, 0.5, 9, 9]),
        (3.0, [0.5, 0.25, 0.5, 3, 3]),
    ],
)
def test_new_items_enter_with_their_priority(rule, raw):
    buffer, state = filled(jrb.Prioritized(new_priority=rule), 3, 5)
    assert state.sampler.raw[0] == (3.0 if rule == 3.0 else 1.0)
    state = buffer.update_priority(state, np.array([2]), np.array([9.0], np.float32))
    state = priorities(buffer, state, [0.5, 0.25, 0.5])
    state = buffer.extend(state, jnp.arange(2, dtype=jnp.int32))
    assert state.sampler.raw.tolist() == raw


HELD = jrb.Prioritized(new_priority="largest_held", eps=0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jrb.PriorityWarning")
@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("sampler", [HELD, jrb.Mixture((HELD, jrb.Prioritized()), (0.5, 0.5))])
def test_new_items_get_the_largest_priority_that_is_held(sampler, envs):
    """Random programs against a list of priorities, one for each slot."""
    rows, rng = 5, np.random.default_rng(envs)
    buffer = jrb.ReplayBuffer(rows * envs, envs, batch_size=4, sampler=sampler)
    methods = jrb.jitted(buffer)
    state, want, at = methods.init(jnp.int32(0)), np.full((rows, envs), -1, np.float32), 0
    for _ in range(60):
        what = rng.choice(["extend", "update", "drop", "empty"], p=[0.5, 0.3, 0.15, 0.05])
        if what == "extend":
            given = rng.exponential(size=(rng.choice([1, 3, 7]), envs)).astype(np.float32)
            given[rng.random(given.shape) < 0.6] = np.nan
            state = methods.extend(state, np.zeros(given.shape, np.int32), priorities=given)
            for row in given:  # what is overwritten no longer counts
                want[at] = -1
                largest = want.max() if want.max() > 0 else 1
                want[at] = np.where(np.isnan(row), largest, row)
                at = (at + 1) % rows
        elif what == "empty":
            state, at = methods.empty(state), 0
            want[:] = -1
        else:
            slots = rng.choice(rows * envs, 2, replace=False)
            held = slots[want.flat[slots] >= 0]
            new = rng.choice([0, 0.5, 1e6], 2) if what == "update" else np.full(2, -2)
            if what == "update":
                state = methods.update_priority(state, slots, new.astype(np.float32))
            else:
                state = methods.drop(state, slots)
            want.flat[held] = new[want.flat[slots] >= 0]
        assert buffer.priorities(state).tolist() == want.reshape(-1).tolist()
    assert int(jrb.stats(buffer, state)["size"]) == (want != -1).sum()


@pytest.mark.slow
def test_the_largest_held_priority_outlives_a_save_and_a_rebuild(tmp_path):
    buffer, state = filled(HELD, 3, 4)
    example = jax.ShapeDtypeStruct((), jnp.int32)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == buffer.nbytes(example)
    state = priorities(buffer, state, [9, 0.5, 0.25])
    state = buffer.drop(state, np.array([0]))
    jrb.save(tmp_path, buffer, state)
    loaded, back = jrb.load(tmp_path)
    assert loaded == buffer
    larger = jrb.ReplayBuffer(7, batch_size=4, sampler=HELD)
    for one, held in ((loaded, back), (larger, jrb.rebuild(buffer, state, larger))):
        held = one.add(held, jnp.int32(3))
        assert one.priorities(held)[:4].tolist() == [-2, 0.5, 0.25, 0.5]


def test_a_priority_that_another_one_of_the_batch_replaced_was_seen():
    buffer, state = filled(jrb.Prioritized(), 2, 3)
    slots, given = np.array([0, 1, 0]), np.array([9, 2, 1], np.float32)
    state = buffer.update_priority(state, slots, given)
    state = buffer.add(state, jnp.int32(0))
    assert state.sampler.raw.tolist() == [1, 2, 9]


@pytest.mark.filterwarnings("ignore::jrb.PriorityWarning")
def test_bad_priorities_are_refused_and_counted():
    buffer, state = filled(jrb.Prioritized(), 4, 6)
    state = priorities(buffer, state, [2, 3, 4, 5])
    bad = np.array([np.nan, np.inf, -1, 7], np.float32)
    state = buffer.update_priority(state, np.arange(4), bad)
    assert state.sampler.raw.tolist() == [2, 3, 4, 7, -1, -1]
    assert int(state.sampler.refused) == 3
    assert np.isfinite(jrb.sum_tree.total(state.sampler.masses))


def test_huge_priorities_leave_all_sums_finite():
    buffer, state = filled(jrb.Prioritized(alpha=2.0), 4)
    state = priorities(buffer, state, [3e38, 3e38, 3e38, 1])
    assert np.isfinite(jrb.sum_tree.total(state.sampler.masses))
    sample = buffer.sample(state, KEY)
    assert np.isfinite(sample.weights).all()
    assert 3 not in counts(buffer, state, 100).nonzero()[0]


@pytest.mark.filterwarnings("ignore::jrb.PriorityWarning")
def test_the_last_of_equal_indices_wins():
    buffer, state = filled(jrb.Prioritized(), 4)
    state = buffer.update_priority(
        state, np.array([1, 1, 2, 1, 2]), np.array([5, 6, 7, 8, np.nan], np.float32)
    )
    assert state.sampler.raw.tolist() == [1, 8, 7, 1]


def test_slots_without_items_take_no_priority():
    buffer, state = filled(jrb.Prioritized(), 2, 4)
    state = buffer.update_priority(state, np.array([0, 3, -1, 4, 10**6]), np.full(5, 9, np.float32))
    assert state.sampler.raw.tolist() == [9, 1, -1, -1]
    np.testing.assert_allclose(float(jrb.sum_tree.total(state.sampler.masses)), 9**0.6 + 1, 1e-5)


def test_masked_rows_of_a_sample_take_no_priority():
    buffer, state = filled(jrb.Prioritized(), 2, 4)
    sample = jax.jit(buffer.sample)(buffer.init(jnp.int32(0)), KEY)
    state = buffer.update_priority(state, sample, jnp.full(4, 9.0))
    assert state.sampler.raw.tolist() == [1, 1, -1, -1]


@pytest.mark.parametrize("key", [jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")])
@pytest.mark.parametrize("sampler", [jrb.Uniform(), jrb.Prioritized(), jrb.WithoutReplacement()])
def test_any_kind_of_key_draws(sampler, key):
    buffer, state = filled(sampler, 9)
    sample = jax.jit(buffer.sample)(state, key)
    assert sample.mask.all()
    np.testing.assert_array_equal(sample.data, sample.indices)


@pytest.mark.slow
def test_ten_million_slots_are_drawn_alike():
    n, batch = 10_000_000, 1 << 16
    buffer = jrb.ReplayBuffer(n, batch_size=batch)
    state = buffer.init(jnp.uint8(0))
    state = state.replace(writer=state.writer.replace(count=jnp.int32(n)))

    def tally(total, key):
        return total.at[buffer.sample(state, key).indices].add(jnp.uint8(1)), None

    keys = jax.random.split(KEY, 128)
    total = jax.jit(lambda: jax.lax.scan(tally, jnp.zeros(n, jnp.uint8), keys)[0])()
    total = np.asarray(total, float)
    assert abs(total.var() / total.mean() - 1) < 0.01


def test_huge_equal_priorities_keep_their_probabilities():
    buffer, state = filled(jrb.Prioritized(alpha=1.0), 9)
    sample = buffer.sample(priorities(buffer, state, np.full(9, 3e38)), KEY)
    np.testing.assert_allclose(sample.probabilities, 1 / 9, rtol=1e-5)


def test_a_drawn_item_never_has_weight_0():
    sampler = jrb.Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="buffer")
    buffer, state = filled(sampler, 2)
    sample = buffer.sample(priorities(buffer, state, [1e-30, 1e30]), KEY)
    assert (sample.weights > 0).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_masses_are_powers(eps):
    sampler = jrb.Prioritized(eps=eps)
    priorities = np.geomspace(1e-6, 1e6, 20_000, dtype=np.float32)
    buffer = jrb.ReplayBuffer(priorities.size, batch_size=4, sampler=sampler)
    state = buffer.init({"x": jnp.zeros(())})
    state = buffer.extend(state, {"x": jnp.zeros(priorities.size)}, priorities=priorities)
    base = (priorities + np.float32(eps)).astype(np.float64)
    for alpha in (0.0, 0.25, 0.6, 1.0, 1.7):
        masses = jrb.sum_tree.leaves(buffer.set_alpha(state, alpha).sampler.masses)
        exponent = np.float64(np.float32(alpha))
        error = np.abs(np.asarray(masses, np.float64) / base**exponent - 1)
        assert error.max() <= 2.0**-21
        if alpha in (0, 1):
            assert (np.asarray(masses) == base**alpha).all()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_priority_of_zero_has_the_mass_of_a_power_of_zero(alpha):
    buffer = jrb.ReplayBuffer(2, batch_size=4, sampler=jrb.Prioritized(alpha=alpha, eps=0.0))
    state = buffer.extend(
        buffer.init({"x": 0}), {"x": jnp.arange(2)}, priorities=jnp.array([0.0, 4.0])
    )
    assert jrb.sum_tree.leaves(state.sampler.masses).tolist() == [0.0**alpha, 4.0**alpha]


def test_a_traced_alpha_that_is_no_exponent_changes_nothing():
    buffer, state = filled(jrb.Prioritized(alpha=0.5), 3, 5)
    state = priorities(buffer, state, [1, 4, 9])
    for alpha in (np.nan, -1.0, np.inf):
        after = jax.jit(buffer.set_alpha)(state, jnp.float32(alpha))
        assert after.sampler.alpha == 0.5
        np.testing.assert_array_equal(after.sampler.masses.nodes, state.sampler.masses.nodes)
    with jax.debug_nans(True):
        buffer.set_alpha(state, 0.7)


@pytest.mark.parametrize("sampler", [jrb.WithoutReplacement(), jrb.Uniform(replacement=False)])
def test_all_pairs_of_a_small_buffer_are_drawn_alike(sampler):
    buffer, state = filled(sampler, 6, batch_size=2)
    keys = jax.random.split(KEY, 60_000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: buffer.sample(state, key).indices))(keys))
    pairs = np.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36)
    assert fits(pairs, ~np.eye(6, dtype=bool).ravel())


def test_updating_nothing_changes_nothing():
    buffer, state = filled(jrb.Prioritized(), 3)
    after = buffer.update_priority(state, np.zeros(0, np.int32), np.zeros(0, np.float32))
    assert after.sampler.raw.tolist() == state.sampler.raw.tolist()


def test_indices_that_int32_cannot_hold_are_no_slots():
    buffer, state = filled(jrb.Prioritized(), 3)
    far = np.array([2**32 + 1, -(2**32)])
    after = buffer.update_priority(state, far, np.full(2, 9, np.float32))
    assert after.sampler.raw.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="expected indices in"):
        buffer.take(state, far)


def test_epochs_in_order_go_from_the_oldest_to_the_newest():
    sampler = jrb.WithoutReplacement(shuffle=False)
    buffer = jrb.ReplayBuffer(10, batch_size=4, sampler=sampler)
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(13)})
    seen = []
    for number in range(5):
        state, sample = buffer.draw(state, jax.random.key(number))
        seen.append(sample.data["x"][sample.mask].tolist())
    assert seen == [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12], [3, 4, 5, 6], [7, 8, 9, 10]]
    state = buffer.extend(state, {"x": jnp.array([13, 14])})  # overwrites 3 and 4
    state, sample = buffer.draw(state, jax.random.key(9))
    assert sample.data["x"][sample.mask].tolist() == [11, 12]
    assert buffer.draw(state, jax.random.key(9))[1].data["x"].tolist() == [5, 6, 7, 8]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"normalize": "buffer"}])
def test_an_alpha_that_follows_a_schedule_is_that_of_a_new_buffer(options):
    """10,000 slots are more than one chunk of the computation, and not a multiple of it."""
    buffer, state = filled(jrb.Prioritized(alpha=0.5, **options), 9000, 10_000)
    values = np.random.default_rng(0).exponential(size=9000)
    state = priorities(buffer, state, values)
    alphas = jnp.array([0.5, 0.5, 1.0, 1.0, 0.25, 0.25])
    run = jax.jit(
        lambda state: jax.lax.scan(lambda s, a: (buffer.set_alpha(s, a), None), state, alphas)
    )
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
    both = jax.jit(jax.vmap(buffer.set_alpha))(many, jnp.array([0.5, 0.25]))
    for got, alpha in (
        (run(state)[0], 0.25),
        (jax.tree.map(lambda leaf: leaf[0], both), 0.5),
        (jax.tree.map(lambda leaf: leaf[1], both), 0.25),
    ):
        other, want = filled(jrb.Prioritized(alpha=alpha, **options), 9000, 10_000)
        want = priorities(other, want, values)
        jax.tree.map(
            lambda one, two: np.testing.assert_allclose(one, two, rtol=2e-6),
            got.sampler,
            want.sampler,
        )


def test_a_schedule_of_beta_is_what_the_numbers_say():
    buffer, state = filled(jrb.Prioritized(alpha=1.0, eps=0.0), 2, batch_size=64)
    state = priorities(buffer, state, [1, 4])
    beta = lambda step: jnp.minimum(0.4 + 0.6 * step / 4, 1.0)
    draw = lambda state, step: (state, buffer.sample(state, KEY, beta=beta(step)).weights.min())
    least = jax.jit(lambda: jax.lax.scan(draw, state, jnp.arange(6.0)))()[1]
    np.testing.assert_allclose(least, [0.25 ** min(0.4 + 0.15 * n, 1) for n in range(6)], rtol=1e-5)


def test_the_same_alpha_as_before_computes_no_masses():
    buffer, state = filled(jrb.Prioritized(alpha=0.5, eps=0.0), 3, 5)
    state = priorities(buffer, state, [1, 4, 9])
    masses = lambda state: jrb.sum_tree.leaves(state.sampler.masses).tolist()
    odd = jrb.sum_tree.update(state.sampler.masses, jnp.array([0]), jnp.array([7.0]))
    state = state.replace(sampler=state.sampler.replace(masses=odd))
    assert masses(jax.jit(buffer.set_alpha)(state, 0.5)) == [7, 2, 3, 0, 0]
    assert masses(jax.jit(buffer.set_alpha)(state, 1.0)) == [1, 4, 9, 0, 0]
    many = jax.tree.map(lambda leaf: leaf[None], state)
    assert masses(jax.vmap(buffer.set_alpha)(many, jnp.array([0.5]))) == [[1, 2, 3, 0, 0]]


@pytest.mark.parametrize(
    "sampler",
    [jrb.Uniform(), jrb.Newest(0.5), jrb.Queue(), jrb.Lifo(), jrb.WithoutReplacement()],
    ids=repr,
)
def test_methods_of_priorities_are_refused_where_there_are_none(sampler):
    buffer = jrb.ReplayBuffer(4, batch_size=2, sampler=sampler)
    state, slots = buffer.add(buffer.init({"x": 0}), {"x": 1}), jnp.array([0])
    with pytest.raises(TypeError, match="drop: expected a sampler that can leave anchors out"):
        buffer.drop(state, slots)
    with pytest.raises(TypeError, match="update_priority: expected a sampler with priorities"):
        buffer.update_priority(state, slots, jnp.ones(1))
    with pytest.raises(TypeError, match="add: priorities: expected a sampler that takes"):
        buffer.add(state, {"x": 1}, priorities=jnp.float32(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alpha", "eps", "priority"),
    [
        (1.0, 0.0, np.float32(1e-39)),
        (1.0, 0.0, np.float32(1e-45)),  # the least positive float32
        (0.5, 0.0, np.float32(3e-40)),
        (3.0, 0.0, np.float32(1e-20)),  # whose power underflows to 0
        (2.0, 1e-30, np.float32(0.0)),
        (1.0, 0.0, np.float64(1e-60)),
    ],
)
def test_a_positive_priority_is_drawn_however_small(alpha, eps, priority):
    sampler = jrb.Prioritized(alpha, eps=eps, new_priority=0.0, normalize="buffer")
    buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=sampler)
    state = buffer.add(buffer.init(jnp.int32(0)), jnp.int32(0), priorities=np.float32(0))
    if not eps:  # so that an item of priority 0 has no mass
        state = buffer.update_priority(state, jnp.array([0]), jnp.zeros(1))
    given = buffer.add(state, jnp.int32(1), priorities=np.asarray(priority))
    both = buffer.extend(state, jnp.array([1, 1]))
    new = buffer.update_priority(both, np.array([1]), np.asarray(priority)[None])
    assigned = both.replace(
        sampler=sampler.assign(both.sampler, jnp.array([1, 2]), np.asarray([priority] * 2))
    )
    drawable = {0, 1} if eps else {1}
    for held in (given, new, assigned, buffer.set_alpha(given, alpha + 1)):
        batch = buffer.sample(held, KEY, 64)
        assert 1 in batch.data.tolist() and set(batch.data.tolist()) <= drawable
        assert (batch.probabilities > 0).all() and jnp.isfinite(batch.weights).all()


def test_so_is_one_in_a_shard():
    buffer = jrb.ReplayBuffer(
        8, num_envs=2, batch_size=4, sampler=jrb.Prioritized(1.0, 1.0, 0.0, new_priority=0.0)
    )
    sharded = jrb.Sharded(buffer, 2)
    state = sharded.add(sharded.init(jnp.int32(0)), jnp.arange(2), priorities=np.array([0, 1e-39]))
    state, batch = sharded.draw(state, KEY)
    assert batch.data[batch.mask].tolist() == [1, 1]
    np.testing.assert_allclose(batch.probabilities[batch.mask], 1, rtol=1e-5)
