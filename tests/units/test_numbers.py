"""Episodes identified by a number, compared with episodes that a flag ends."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import testing
from tests.units.streams import negative_distance

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
NUMBERED = jrb.Keys(episode="traj")
UNITS = [
    jrb.NStep(3, 0.5),
    jrb.Sequence(3, burn_in=1),
    jrb.Sequence(3, partial="pad", stride=2),
    jrb.Sequence(2, cross_episodes=True),
    jrb.Sequence(4, sample_by="whole_episodes"),
    jrb.FrameStack(3),
    jrb.FrameStack(2, unit=jrb.NStep(3, 0.5, strict=True)),
]


def rows(rng, length, envs):
    """Returns rows with episode numbers, and the same rows with flags (none in the last row)."""
    steps = rng.random((length, envs)) < 0.3
    ends = np.concatenate([steps[1:], np.zeros((1, envs), bool)])
    value = np.arange(length * envs, dtype=np.float32).reshape(length, envs)
    after = {"observation": value + 0.5, "reward": value}
    numbered = {"observation": value, "traj": np.cumsum(steps, axis=0, dtype=np.int32)}
    flagged = {"observation": value, "next": {**after, "done": ends}}
    return {**numbered, "next": after}, flagged


def both(unit, envs, capacity):
    parts = {"batch_size": capacity, "sampler": jrb.Uniform(replacement=False), "unit": unit}
    one = jrb.ReplayBuffer(capacity, envs, keys=NUMBERED, **parts)
    return one, jrb.ReplayBuffer(capacity, envs, **parts)


@functools.lru_cache
def compiled(buffer):
    return jax.jit(buffer.extend), jax.jit(buffer.sample)


def drawn(buffer, state):
    """Returns the items drawn for each anchor, by slot."""
    sample = jax.tree.map(np.asarray, compiled(buffer)[1](state, KEY))
    real = sample.mask.reshape(len(sample.mask), -1).any(axis=1)
    order = np.flatnonzero(real)[np.argsort(sample.indices[real])]
    some = {"x": sample.data["observation"], "r": sample.data["next"]["reward"]}
    found = {"slot": sample.indices, "mask": sample.mask, "info": sample.info, **some}
    return jax.tree.map(lambda leaf: leaf[order], found)


def pieces(rng, length):
    """Cuts `length` rows into calls of one row and of six."""
    edges = [0]
    while edges[-1] < length:
        edges.append(edges[-1] + (6 if length - edges[-1] >= 6 and rng.random() < 0.4 else 1))
    return itertools.pairwise(edges)


RINGS = [(1, 6), (2, 24)] * 4


@pytest.mark.parametrize(("unit", "ring"), list(zip(UNITS, RINGS, strict=False)), ids=repr)
def test_a_number_ends_an_episode_as_a_flag_does(unit, ring):
    envs, capacity = ring
    numbered, flagged = both(unit, envs, capacity)
    extends = compiled(numbered)[0], compiled(flagged)[0]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        one, other = rows(rng, 18, envs)
        first = lambda leaf: leaf[0, 0]
        state = numbered.init(jax.tree.map(first, one))
        want = flagged.init(jax.tree.map(first, other))
        mask = rng.random(18) < 0.8 if seed == 3 else np.ones(18, bool)
        if seed == 3:  # masked rows do not count: compares with the next written row
            kept = np.flatnonzero(mask)
            later = np.append(one["traj"][kept[1:]] != one["traj"][kept[:-1]], np.zeros((1, envs)))
            other["next"]["done"][kept] = later.reshape(-1, envs)
        for start, stop in pieces(rng, 18):
            some = lambda leaf, start=start, stop=stop: leaf[start:stop]
            state = extends[0](state, jax.tree.map(some, one), mask[start:stop])
            want = extends[1](want, jax.tree.map(some, other), mask[start:stop])
        chex.assert_trees_all_equal(drawn(numbered, state), drawn(flagged, want))
    found, expected = jrb.episodes(numbered, state), jrb.episodes(flagged, want)
    assert [e.slots.tolist() for e in found] == [e.slots.tolist() for e in expected]
    if envs > 1:
        return
    back = jrb.rebuild(numbered, state, numbered)
    chex.assert_trees_all_equal(
        drawn(numbered, back), drawn(flagged, jrb.rebuild(flagged, want, flagged))
    )


@pytest.mark.parametrize("unit", [jrb.Sequence(2), jrb.NStep(2, 0.5, strict=True)], ids=repr)
@pytest.mark.parametrize("storage", [jrb.DeviceStorage, lambda: jrb.MemmapStorage(None)])
def test_numbers_that_are_edited_are_seen(unit, storage):
    parts = {"batch_size": 6, "unit": unit, "sampler": jrb.Uniform(replacement=False)}
    buffer = jrb.ReplayBuffer(6, keys=NUMBERED, storage=storage(), **parts)
    fresh = jrb.ReplayBuffer(6, keys=NUMBERED, **parts)
    rng = np.random.default_rng(0)
    for _ in range(6):
        items, _ = rows(rng, 9, 1)
        items = jax.tree.map(lambda leaf: leaf[:, 0], items)
        example = jax.tree.map(lambda leaf: leaf[0], items)
        state = buffer.extend(buffer.init(example), jax.tree.map(lambda leaf: leaf[:6], items))
        slots, numbers = rng.permutation(6)[:3], rng.integers(0, 3, 3, dtype=np.int32)
        state = buffer.set(state, jnp.asarray(slots), {"traj": jnp.asarray(numbers)})
        items["traj"][slots] = numbers
        state = buffer.extend(state, jax.tree.map(lambda leaf: leaf[6:8], items))
        want = fresh.extend(fresh.init(example), jax.tree.map(lambda leaf: leaf[:8], items))
        chex.assert_trees_all_equal(drawn(buffer, state), drawn(fresh, want))


def test_a_cut_and_an_empty_buffer_end_what_has_one_number():
    buffer = jrb.ReplayBuffer(
        8, keys=NUMBERED, batch_size=8, unit=jrb.Sequence(2), sampler=jrb.Uniform(replacement=False)
    )
    items = {"observation": jnp.arange(3.0), "next": {"reward": jnp.arange(3.0)}}
    items["traj"] = jnp.full(3, 7, jnp.int16)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], items))
    state = buffer.extend(buffer.truncate(buffer.extend(state, items)), items)
    assert drawn(buffer, state)["slot"].tolist() == [0, 1, 3, 4]
    state = buffer.extend(buffer.extend(buffer.empty(state), items), items)
    found = drawn(buffer, state)
    assert found["slot"].tolist() == [0, 1, 2, 3, 4]
    assert found["info"]["is_first"].tolist() == [[True, False]] + [[False, False]] * 4


def test_goals_stay_in_their_numbers():
    unit = jrb.Hindsight(
        negative_distance, "final", ratio=1.0, achieved="got", goal="want", next_goal=None
    )
    got = np.arange(8, dtype=np.int32)
    items = {"got": got, "want": -got, "traj": got // 3, "next": {"reward": got.astype(np.float32)}}
    buffer, state = jrb.from_items(items, keys=NUMBERED, unit=unit, batch_size=16)
    sample = buffer.sample(state, KEY)
    ends = np.minimum(np.asarray(sample.indices) // 3 * 3 + 2, 7)
    np.testing.assert_array_equal(sample.data["want"], ends)


def test_numbers_keep_the_contracts():
    example = {
        "observation": jnp.zeros(16),
        "traj": jnp.int32(0),
        "next": {"reward": jnp.float32(0)},
    }
    make = lambda n: jrb.ReplayBuffer(
        n, 2, batch_size=8, keys=NUMBERED, unit=jrb.Sequence(3, cross_episodes=True)
    )
    testing.conform(make, example)


def test_what_is_no_number_is_refused():
    buffer = jrb.ReplayBuffer(8, keys=NUMBERED, unit=jrb.NStep(2, 0.9))
    item = lambda **more: {**more, "next": {"reward": jnp.float32(0)}}
    with pytest.raises(ValueError, match="episode: expected a leaf at 'traj'"):
        buffer.init(item())
    with pytest.raises(ValueError, match=r"episode: leaf 'traj': expected shape \(\) or \(1,\)"):
        buffer.init(item(traj=jnp.zeros(2, jnp.int32)))
    with pytest.raises(TypeError, match="expected an integer dtype, got float32"):
        buffer.init(item(traj=jnp.float32(0)))
    other = jrb.ReplayBuffer(8, unit=jrb.NStep(2, 0.9))
    whole = item(traj=jnp.int32(0))
    whole["next"]["done"] = jnp.bool_(False)
    with pytest.raises(TypeError, match="expected a state of this buffer"):
        buffer.add(other.init(whole), whole)
