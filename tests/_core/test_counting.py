"""The number of draws of each item, against plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import testing

KEY = jax.random.key(0)
EXAMPLE = {"x": jnp.int32(0), "rank": jnp.float32(0), "next": {"done": False}}
SAMPLERS = [
    jrb.Uniform(count_draws=True),
    jrb.Uniform(replacement=False, count_draws=True),
    jrb.Newest(0.5, count_draws=True),
    jrb.WithoutReplacement(count_draws=True),
    jrb.Queue(count_draws=True),
    jrb.Lifo(count_draws=True),
    jrb.Prioritized(count_draws=True),
]
CASES = [  # others are in tests/methods
    {"sampler": SAMPLERS[0], "unit": jrb.Sequence(3, sample_by="episodes")},
    {"sampler": SAMPLERS[6], "unit": jrb.FrameStack(2, paths=("x",))},
    {"sampler": SAMPLERS[0], "writer": jrb.MaxValue("rank")},
    {"sampler": SAMPLERS[0], "min_size": 5},
]


def items(rng, *lead):
    return {
        "x": rng.integers(0, 99, lead, dtype=np.int32),
        "rank": rng.random(lead, dtype=np.float32),
        "next": {"done": rng.random(lead) < 0.3},
    }


@pytest.mark.slow
@pytest.mark.parametrize("parts", CASES, ids=lambda parts: "-".join(map(repr, parts.values())))
def test_draws_of_random_programs_are_counted(parts):
    rng, envs = np.random.default_rng(1), 2
    buffer = jrb.ReplayBuffer(12, num_envs=envs, batch_size=5, **parts)
    extend, draw, empty = map(jax.jit, (buffer.extend, buffer.draw, buffer.empty))
    peek_at = jax.jit(buffer.sample)
    stamps = jax.jit(
        lambda state: buffer.writer.generation_of(buffer.ring, state.writer, jnp.arange(12))
    )
    state, counts, before = buffer.init(EXAMPLE), np.zeros(12, int), None
    for number in range(70):
        if rng.random() < 0.4:
            state = extend(state, items(rng, 2, envs), rng.random(2) < 0.7)
        elif rng.random() < 0.03:
            state = empty(state)
        now = np.asarray(stamps(state))  # a new item has a new generation
        counts[now != before], before = 0, now
        peek = peek_at(state, jax.random.key(number))
        state, sample = draw(state, jax.random.key(number))
        slots, real = np.asarray(sample.indices), np.asarray(sample.weights) > 0
        assert sample.info["draws"].tolist() == np.where(real, counts[slots], 0).tolist()
        assert peek.info["draws"].tolist() == sample.info["draws"].tolist()
        np.add.at(counts, slots[real], 1)
        found, count = buffer.in_order(state)
        held = np.asarray(found)[: int(count)]
        assert np.asarray(state.sampler.draws)[held].tolist() == counts[held].tolist()
    assert counts.max() > 0


def test_an_item_that_stands_twice_in_a_batch_was_drawn_twice():
    buffer = jrb.ReplayBuffer(4, batch_size=6, sampler=jrb.Uniform(count_draws=True))
    state = buffer.add(buffer.init({"x": 0}), {"x": 1})
    for number in range(3):
        state, sample = buffer.draw(state, KEY)
        assert sample.info["draws"].tolist() == [6 * number] * 6


def test_counts_stop_before_they_overflow():
    buffer = jrb.ReplayBuffer(1, batch_size=4, sampler=jrb.Uniform(count_draws=True))
    state = buffer.add(buffer.init({"x": 0}), {"x": 1})
    most = jnp.full(1, 2**31 - 7, jnp.int32)
    state = state.replace(sampler=state.sampler.replace(draws=most))
    for _ in range(4):
        state, _ = buffer.draw(state, KEY)
    assert 2**31 - 7 < int(state.sampler.draws[0]) <= 2**31 - 1


def test_nobody_counts_unless_asked():
    buffer = jrb.ReplayBuffer(4, batch_size=2)
    state = buffer.add(buffer.init({"x": 0}), {"x": 1})
    assert state.sampler == {} and "draws" not in buffer.sample(state, KEY).info
    assert "draws" not in jrb.stats(buffer, state)
    with pytest.raises(TypeError, match="count_draws: expected True or False"):
        jrb.Queue(count_draws=1)


def counted(capacity=8, **parts):
    parts = {"sampler": jrb.Prioritized(count_draws=True), "batch_size": 3, **parts}
    buffer = jrb.ReplayBuffer(capacity, **parts)
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(10)})
    for number in range(4):
        state, _ = buffer.draw(state, jax.random.key(number))
    return buffer, state


def by_item(buffer, state):
    slots, count = buffer.in_order(state)
    return np.asarray(state.sampler.draws)[np.asarray(slots)[: int(count)]].tolist()


@pytest.mark.slow
def test_counts_are_saved_and_rebuilt(tmp_path):
    buffer, state = counted()
    want = by_item(buffer, state)
    assert sum(want) == 12
    jrb.save(tmp_path / "native", buffer, state)
    jrb.save(tmp_path / "file.h5", buffer, state, layout="h5")
    assert by_item(*jrb.load(tmp_path / "native")) == want
    assert by_item(*jrb.load(tmp_path / "file.h5")) == want
    for sampler in (buffer.sampler, jrb.WithoutReplacement(count_draws=True)):
        for capacity, left in ((20, want), (5, want[3:])):
            new = dataclasses.replace(buffer, capacity=capacity, sampler=sampler)
            assert by_item(new, jrb.rebuild(buffer, state, new)) == left
    plain = dataclasses.replace(buffer, sampler=jrb.Uniform())
    assert jrb.rebuild(buffer, state, plain).sampler == {}
    assert by_item(buffer, jrb.rebuild(plain, jrb.rebuild(buffer, state, plain), buffer)) == [0] * 8


def test_counts_are_summed_up():
    buffer, state = counted()
    draws = np.array(by_item(buffer, state))
    want = {"mean": 1.5, "std": draws.std(), "min": draws.min(), "max": draws.max()}
    assert jrb.stats(buffer, state)["draws"] == {**want, "never": np.mean(draws == 0)}
    assert jrb.stats(buffer, buffer.empty(state))["draws"] == {}


@pytest.mark.slow
def test_only_anchors_are_summed_up():
    sampler, unit = jrb.Uniform(count_draws=True), jrb.Sequence(3)
    buffer = jrb.ReplayBuffer(9, batch_size=1, sampler=sampler, unit=unit)
    rows = {"next": {"done": jnp.arange(5) == 2}}
    state = buffer.extend(buffer.init({"next": {"done": False}}), rows)
    state, _ = buffer.draw(state, KEY)  # a batch of one window
    found = jrb.stats(buffer, state)["draws"]
    assert found["never"] == 0.0 and found["mean"] == 1.0


@pytest.mark.parametrize(
    "storage",
    [jrb.MemmapStorage(), jrb.ListStorage(), jrb.CompressedStorage(min_bytes=1)],
    ids=repr,
)
def test_draws_from_the_host_are_counted(storage):
    sampler = jrb.Uniform(count_draws=True)
    buffer = jrb.ReplayBuffer(6, batch_size=4, sampler=sampler, storage=storage)
    if storage.of_objects:
        state = buffer.extend(buffer.init(None), ["a", "b"])
    else:
        unit = jrb.NStep(2, 0.9)
        buffer = dataclasses.replace(buffer, unit=unit)
        item = {"next": {"reward": jnp.float32(0), "done": False}}
        state = buffer.add(buffer.add(buffer.init(item), item), item)
    counts = np.zeros(6, int)
    for number in range(4):
        state, sample = buffer.draw(state, jax.random.key(number))
        assert sample.info["draws"].tolist() == counts[sample.indices].tolist()
        np.add.at(counts, np.asarray(sample.indices), 1)


@pytest.mark.slow
@pytest.mark.parametrize("proportions", [None, (0.75, 0.25)])
def test_of_a_mix_what_comes_into_the_batch_counts(proportions):
    part = jrb.ReplayBuffer(8, sampler=jrb.Uniform(count_draws=True))
    mix = jrb.Mix((part, part), (0.5, 0.5), batch_size=8)
    states = tuple(part.extend(state, {"x": jnp.arange(5)}) for state in mix.init({"x": 0}))
    shares = None if proportions is None else jnp.array(proportions)
    draw, counts = jax.jit(mix.draw), np.zeros((2, 8), int)
    for number in range(5):
        states, sample = draw(states, jax.random.key(number), proportions=shares)
        at = np.asarray(sample.info["source"]), np.asarray(sample.indices)
        assert sample.info["draws"].tolist() == counts[at].tolist()
        np.add.at(counts, at, 1)
        assert [state.sampler.draws.tolist() for state in states] == counts.tolist()
    assert counts.sum(axis=1).tolist() == ([20, 20] if proportions is None else [30, 10])


def test_a_mix_of_some_that_count_is_refused():
    parts = [
        jrb.ReplayBuffer(8, sampler=jrb.Uniform(count_draws=counts)) for counts in (True, False)
    ]
    mix = jrb.Mix(tuple(parts), (0.5, 0.5), batch_size=4)
    states = tuple(p.add(s, {"x": 1}) for p, s in zip(parts, mix.init({"x": 0}), strict=True))
    with pytest.raises(ValueError, match=r"leaf 'info/draws'.*let all or none count"):
        mix.sample(states, KEY)


@pytest.mark.slow
@pytest.mark.parametrize("agents", [None, 8])
def test_counts_are_not_copied(agents):
    item = {"x": jnp.zeros(4)}

    def step(buffer, state, total, key):
        state, sample = buffer.draw(state, key)
        state = buffer.add(state, testing.rows(item, total, 4))
        total = total + testing.consumed(sample)
        state = buffer.extend(state, testing.rows(item, total, 3, 4))
        return buffer.empty(state), total

    options = {"num_envs": 4, "batch_size": 16, "min_size": 40}
    make = lambda n: jrb.ReplayBuffer(n, sampler=jrb.Prioritized(count_draws=True), **options)
    assert testing.growth(make, item, step, agents) < 0.01
