"""Items that are used up after `max_draws` draws; tests/methods compares with plain Python."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jrb
from tests.samplers import weights

EXAMPLE = {"x": jnp.int32(0), "next": {"reward": jnp.float32(0), "done": False}}
ONCE = jrb.Uniform(replacement=False, max_draws=1)
WEIGHTED = jrb.Weighted(weights.by_reward, leaves=(("next", "reward"),))
THIRDS = (1 / 3, 1 / 3, 1 / 3)
MIXED = jrb.Mixture((jrb.Prioritized(), jrb.Newest(0.3), WEIGHTED), THIRDS, max_draws=2)
PLAIN = jrb.Mixture((jrb.Newest(count=2), jrb.Uniform(False)), (0.5, 0.5), fill=True, max_draws=3)
CHANCES = [0.42, 0.42, 0.1, 0.02, 0.04]
SAMPLERS = [
    jrb.Uniform(max_draws=2),
    jrb.Uniform(replacement=False, max_draws=3),
    jrb.Prioritized(max_draws=1),
    dataclasses.replace(WEIGHTED, max_draws=2),
    jrb.Newest(count=3, max_draws=2),
    MIXED,
    PLAIN,
]


def items(first, count, *lead):
    number = np.arange(first, first + count, dtype=np.int32)
    after = {"reward": np.float32(1 + number % 3), "done": np.zeros(count, bool)}
    spread = lambda leaf: np.broadcast_to(leaf[(..., *[None] * len(lead))], (count, *lead))
    return jax.tree.map(spread, {"x": number, "next": after})


def filled(count=8, capacity=8, **parts):
    buffer = jrb.ReplayBuffer(capacity, **{"batch_size": 3, "sampler": ONCE, **parts})
    return buffer, buffer.extend(buffer.init(EXAMPLE), items(0, count))


def uses(sample):
    """Returns how often each item is in a batch."""
    real = np.asarray(sample.mask)
    assert (np.asarray(sample.weights) > 0).tolist() == real.tolist()
    assert (np.asarray(sample.probabilities) > 0).tolist() == real.tolist()
    return collections.Counter(np.asarray(sample.data["x"])[real].tolist())


def drain(buffer, state, seed=0):
    """Draws until nothing is left; returns the state and how often each item was drawn."""
    total, number = collections.Counter(), 0
    while buffer.can_sample(state):
        key = jax.random.key(seed + number)
        peek, (state, sample) = buffer.sample(state, key), buffer.draw(state, key)
        assert uses(peek) == uses(sample)
        total, number = total + uses(sample), number + 1
    return state, total


def name_of(sampler):
    """Returns the class and the limit, as texts of functions differ between processes."""
    return f"{type(sampler).__name__}-{sampler.max_draws}"


@pytest.mark.parametrize("sampler", SAMPLERS, ids=name_of)
def test_each_item_is_used_so_often_and_never_again(sampler):
    buffer, state = filled(10, 7, sampler=sampler)
    state, total = drain(buffer, state)
    assert total == dict.fromkeys(range(3, 10), sampler.max_draws)
    with pytest.raises(ValueError, match=f"drew fewer than {sampler.max_draws} times. Add items"):
        buffer.sample(state, jax.random.key(0))
    inside = jax.jit(buffer.sample)(state, jax.random.key(0))
    assert not inside.mask.any() and not inside.weights.any()
    # New items are drawn from then on, also in the slots of those that were used up.
    state = buffer.extend(state, items(20, 2))
    state, total = drain(buffer, state)
    assert total == dict.fromkeys((20, 21), sampler.max_draws)
    state = buffer.extend(buffer.empty(state), items(30, 1))
    assert drain(buffer, state)[1] == {30: sampler.max_draws}


def test_a_batch_without_replacement_is_full_as_long_as_items_are_left():
    buffer, state = filled(batch_size=3)
    sizes = []
    for number in range(3):
        state, sample = buffer.draw(state, jax.random.key(number))
        sizes.append(sample.mask.tolist())
    assert sizes == [[True] * 3, [True] * 3, [True, True, False]]


def chances(sampler, left):
    """Returns the probabilities of 20 slots, of which those in `left` may be drawn."""
    mass, reward = np.zeros(20), 1.0 + np.arange(20) % 3
    if isinstance(sampler, jrb.Newest):
        left = left[-(sampler.count or math.ceil(sampler.fraction * len(left))) :]
    mass[left] = 1
    if isinstance(sampler, jrb.Weighted):
        mass *= reward
    elif sampler.prioritized:
        mass *= (reward + sampler.eps) ** sampler.alpha
    return mass / mass.sum()


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("sampler", [ONCE, *SAMPLERS[2:6]], ids=name_of)
def test_items_that_are_left_are_drawn_as_ever(sampler):
    sampler = dataclasses.replace(sampler, max_draws=1)
    buffer, state = filled(25, 20, sampler=sampler, batch_size=8)
    if sampler.prioritized:
        reward = items(0, 20)["next"]["reward"]
        state = buffer.update_priority(state, jnp.arange(20), reward)
    state = buffer.set(state, jnp.arange(20), {"next": {"reward": items(0, 20)["next"]["reward"]}})
    state, first = buffer.draw(state, jax.random.key(0))
    # In the order of time, which begins at slot 5.
    drawn = np.asarray(first.indices)[np.asarray(first.mask)].tolist()
    left = [slot for slot in (*range(5, 20), *range(5)) if slot not in drawn]
    # One entry of each sampler, as the entries of one may be stratified.
    members = getattr(sampler, "samplers", (sampler,))
    one = jax.jit(jax.vmap(lambda key: buffer.sample(state, key, len(members))))
    batch = jax.device_get(one(jax.random.split(jax.random.key(1), 4000)))
    source = batch.info.get("sampler", np.zeros((4000, 1)))
    for number, member in enumerate(members):
        slots, likely = batch.indices[source == number], batch.probabilities[source == number]
        want, real = chances(member, left), likely > 0
        np.testing.assert_allclose(likely[real], want[slots[real]], rtol=1e-5)
        counts, some = np.bincount(slots, minlength=20), np.flatnonzero(want)
        assert set(np.flatnonzero(counts)) == set(some)
        assert stats.chisquare(counts[some], 4000 * want[some]).pvalue > 1e-3


@pytest.mark.slow
def test_a_late_update_or_another_alpha_revives_nothing():
    buffer, state = filled(4, sampler=jrb.Prioritized(max_draws=1), batch_size=4)
    state, sample = buffer.draw(state, jax.random.key(0))
    state = buffer.update_priority(state, sample, jnp.full(4, 9.0))
    state = buffer.update_priority(state, jnp.arange(4), jnp.full(4, 9.0))
    state = buffer.set_alpha(state, 1.0)
    assert drain(buffer, state)[1] == dict.fromkeys(set(range(4)) - set(uses(sample)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS, ids=name_of)
def test_a_blocking_writer_waits_for_items_with_draws_left(sampler):
    buffer, state = filled(0, 6, sampler=sampler, writer=jrb.BlockWhenFull())
    rng, total, written = np.random.default_rng(0), collections.Counter(), 0
    for number in range(60):
        if rng.random() < 0.6 and buffer.can_add(state):
            state, written = buffer.extend(state, items(written, 1)), written + 1
        elif buffer.can_sample(state):
            state, sample = buffer.draw(state, jax.random.key(number))
            total += uses(sample)
    state, rest = drain(buffer, state)
    total += rest
    assert written > 12 and total == dict.fromkeys(range(written), sampler.max_draws)
    # All rows are free again.
    state = buffer.extend(state, items(written, 6))
    with pytest.raises(ValueError, match="at most 0 rows"):
        buffer.add(state, jax.tree.map(lambda leaf: leaf[0], items(0, 1)))


@pytest.mark.slow
def test_dropped_items_do_not_block():
    sampler, writer = jrb.Prioritized(max_draws=1), jrb.BlockWhenFull()
    buffer, state = filled(4, 4, sampler=sampler, writer=writer)
    state = buffer.drop(state, jnp.arange(2))
    state = buffer.extend(state, items(4, 2))
    assert drain(buffer, state)[1] == dict.fromkeys(range(2, 6), 1)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [*SAMPLERS[1:3], SAMPLERS[4], PLAIN], ids=name_of)
def test_used_up_items_are_saved_and_rebuilt(sampler, tmp_path):
    buffer, state = filled(8, sampler=sampler, batch_size=6)
    state, sample = buffer.draw(state, jax.random.key(0))
    want = drain(buffer, state)[1]
    jrb.save(tmp_path, buffer, state)
    assert drain(*jrb.load(tmp_path))[1] == want
    larger = dataclasses.replace(buffer, capacity=11)
    assert drain(larger, jrb.rebuild(buffer, state, larger))[1] == want
    # Counts go to any sampler that counts, which then knows what is used up.
    other = dataclasses.replace(buffer, sampler=ONCE)
    left = set(range(8)) - set(uses(sample))
    assert drain(other, jrb.rebuild(buffer, state, other))[1] == dict.fromkeys(left, 1)


class Model:
    """Seven rows of two items each in plain Python; `draws` counts by number, oldest first."""

    def __init__(self, sampler, writer):
        self.sampler, self.blocks = sampler, writer.blocks_when_full
        self.members, self.draws = getattr(sampler, "samplers", (sampler,)), {}

    @property
    def left(self):
        return [number for number, count in self.draws.items() if count < self.sampler.max_draws]

    def room(self):
        """Returns the number of rows that may be written."""
        numbers = list(self.draws)
        first = numbers.index(self.left[0]) if self.left else len(numbers)
        return 7 - len(numbers) // 2 + first // 2 if self.blocks else 7

    def write(self, numbers):
        self.draws = dict(list((self.draws | dict.fromkeys(numbers, 0)).items())[-14:])

    def drop(self, numbers):
        self.draws |= dict.fromkeys(numbers, self.sampler.max_draws)

    def may(self, member):
        """Returns the numbers of the items that one of the samplers may draw."""
        if not isinstance(member, jrb.Newest):
            return self.left
        count = member.count or math.ceil(member.fraction * len(self.left))
        return self.left[-count:]

    def draw(self, sample):
        """Counts a batch; an entry is masked if the ones before it use its item up."""
        may = [self.may(member) for member in self.members]
        numbers, real = sample.data["x"].tolist(), sample.mask.tolist()
        assert any(real) == bool(self.left)
        source = sample.info["sampler"].tolist() if len(may) > 1 else [0] * len(real)
        for number, is_real, by in zip(numbers, real, source, strict=True):
            is_distinct = getattr(self.members[by], "replacement", True) is False
            is_left = number in may[by] and self.draws[number] < self.sampler.max_draws
            assert is_real == is_left or (is_distinct and not is_real)
            if is_real:
                self.draws[number] += 1


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("writer", [jrb.RoundRobin(), jrb.BlockWhenFull()], ids=type)
@pytest.mark.parametrize("sampler", SAMPLERS[4:], ids=name_of)
def test_random_programs_do_what_plain_python_does(sampler, writer, tmp_path):
    buffer = jrb.ReplayBuffer(14, 2, batch_size=6, sampler=sampler, writer=writer)
    state = buffer.init(EXAMPLE)
    rng, model, written, moves = np.random.default_rng(1), Model(sampler, writer), 0, 0
    draw = jax.jit(buffer.draw)
    for number in range(250):
        method = rng.choice(["extend", "draw", "drop", "empty", "move"], p=CHANCES)
        assert bool(buffer.can_add(state)) == (model.room() > 0)
        if method == "extend" and (rows := min(int(rng.integers(1, 4)), model.room())):
            new = np.arange(written, written + 2 * rows, dtype=np.int32)
            state = buffer.extend(state, items(0, rows, 2) | {"x": new.reshape(rows, 2)})
            model.write(new.tolist())
            written += 2 * rows
        elif method in ("draw", "drop"):
            state, sample = draw(state, jax.random.key(number))
            model.draw(sample)
            if sampler.prioritized:
                state = buffer.update_priority(state, sample, jnp.asarray(rng.random(6)) + 0.1)
            if sampler.prioritized and method == "drop":
                state = buffer.drop(state, sample)
                model.drop(uses(sample))
        elif method == "empty":
            state, model.draws = buffer.empty(state), {}
        elif method == "move" and moves < 5:
            moves += 1
            jrb.save(tmp_path, buffer, state)
            state = jrb.rebuild(buffer, jrb.load(tmp_path, buffer)[1], buffer)
        expected = {number: sampler.max_draws - model.draws[number] for number in model.left}
        assert bool(buffer.can_sample(state)) == bool(expected)
    assert drain(buffer, state)[1] == expected and written > 100


@pytest.mark.slow
def test_many_buffers_and_shards_and_mixes():
    buffer, state = filled(8, 8, num_envs=None)
    states = jax.vmap(lambda _: state)(jnp.arange(8))
    keys = jax.vmap(jax.random.key)(jnp.arange(8))
    draw = jax.jit(jax.vmap(buffer.draw))
    for left in (5, 2, 0, 0):
        states, sample = draw(states, keys)
        total = np.asarray(sample.info["draws"])
        assert not total.any()
        drawn = np.asarray(states.sampler.draws)
        assert (drawn <= 1).all() and (drawn.sum(axis=1) == 8 - left).all()
    mix = jrb.Mix((buffer, buffer), (0.5, 0.5), batch_size=6)
    states, total = (state, state), collections.Counter()
    for number in range(3):
        states, sample = mix.draw(states, jax.random.key(number))
        total += uses(sample)
    assert total == dict.fromkeys(range(8), 2)
    with pytest.raises(ValueError, match="would lose a part of what it draws"):
        mix.draw(states, jax.random.key(0), proportions=jnp.array([0.5, 0.5]))


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize("sampler", [ONCE, jrb.Prioritized(max_draws=1)], ids=name_of)
def test_shards_use_their_items_up(sampler):
    whole = jrb.ReplayBuffer(16, 2, batch_size=6, sampler=sampler)
    sharded = jrb.Sharded(whole, 2)
    rows = items(0, 8, 2)
    state = sharded.extend(
        sharded.init(EXAMPLE), {**rows, "x": np.arange(16, dtype=np.int32).reshape(8, 2)}
    )
    draw, total = jax.jit(sharded.draw), collections.Counter()
    for number in range(8):
        state, sample = draw(state, jax.random.key(number))
        total += uses(sample)
    assert total == dict.fromkeys(range(16), 1) and not sharded.can_sample(state)


@pytest.mark.slow
def test_a_loop_of_compiled_methods():
    buffer, _ = filled()
    run = jrb.jitted(buffer)
    state, total = run.extend(run.init(EXAMPLE), items(0, 8)), collections.Counter()
    for number in range(3):
        state, sample = run.draw(state, number)
        total += uses(sample)
    assert total == dict.fromkeys(range(8), 1) and not run.can_sample(state)


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 700])
def test_items_are_used_up_in_one_large_batch(size):
    buffer, state = filled(40, 40, sampler=jrb.Uniform(max_draws=3), batch_size=size)
    state, sample = buffer.draw(state, jax.random.key(3))
    slots, real = np.asarray(sample.indices), np.asarray(sample.mask)
    seen = collections.Counter()
    for slot, is_real in zip(slots.tolist(), real.tolist(), strict=True):
        assert is_real == (seen[slot] < 3)
        seen[slot] += 1
    assert state.sampler.draws.tolist() == [min(seen[slot], 3) for slot in range(40)]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: jrb.Uniform(max_draws=0), ValueError, "max_draws: expected from 1 to"),
        (lambda: jrb.Prioritized(max_draws=1.5), TypeError, "max_draws: expected an integer"),
        (lambda: jrb.Queue(max_draws=1), TypeError, "max_draws"),
        (lambda: jrb.Newest(0.5, max_draws=0), ValueError, "max_draws: expected from 1 to"),
        (
            lambda: jrb.Mixture((ONCE, jrb.Uniform()), (0.5, 0.5)),
            ValueError,
            r"count_draws=True or max_draws, got .* Mixture\(..., count_draws=True, max_draws=",
        ),
        (
            lambda: jrb.Mixture((jrb.Queue(), jrb.Uniform()), (0.5, 0.5), max_draws=2),
            ValueError,
            r"max_draws: expected samplers that leave out used-up items, .* got \['Queue'\]",
        ),
        (
            lambda: jrb.Mixture((PLAIN, jrb.Uniform()), (0.5, 0.5), max_draws=2),
            ValueError,
            "max_draws",
        ),
        (
            lambda: filled(sampler=ONCE, unit=jrb.Sequence(2, sample_by="episodes")),
            ValueError,
            "sample_by='episodes': expected a sampler without max_draws",
        ),
        (
            lambda: jrb.ReplayBuffer(2**24 + 1, sampler=ONCE).nbytes(EXAMPLE),
            ValueError,
            r"at most 2\^24 slots in one state with max_draws",
        ),
        (
            lambda: jrb.ReplayBuffer(
                8,
                2,
                sampler=ONCE,
                unit=jrb.Sequence(2, sample_by="whole_episodes"),
                writer=jrb.BlockWhenFull(),
            ),
            ValueError,
            "Episodes of several environments have no order",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()
