"""Random bits equal JAX's own, and their maps to a range are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrb import sum_tree
from jrb._xla import random_bits
from tests.test_sum_tree import ten_million_equal

SHAPES = [(), (7,), (3, 0), (2, 256), (2, 3, 5)]
SEEDS = [0, 1, 12345, 2**31 - 1, -1]
EXTREMES = [0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]

below = jax.jit(random_bits.below)
mix = jax.jit(random_bits.mix)


def many_keys(impl=None):
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl=impl))(jnp.array(SEEDS, jnp.int32))
    return jnp.concatenate([keys, jax.random.split(keys[0], 11)])


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_jax_for_typed_keys(shape):
    both = lambda key: (random_bits.bits(key, shape), jax.random.bits(key, shape))
    mine, theirs = jax.jit(jax.vmap(both))(many_keys())
    assert mine.dtype == theirs.dtype == jnp.uint32
    assert mine.shape == (16, *shape)
    assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("shape", [(), (2, 256)])
def test_bits_are_those_of_jax_for_legacy_keys(shape):
    both = lambda key: (random_bits.bits(key, shape), jax.random.bits(key, shape))
    mine, theirs = jax.jit(jax.vmap(both))(jax.random.key_data(many_keys()))
    assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("key", [jax.random.key(7), jax.random.PRNGKey(7)])
def test_bits_are_those_of_jax_outside_jit(key):
    assert np.array_equal(random_bits.bits(key, (2, 5)), jax.random.bits(key, (2, 5)))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_generators_work(impl):
    key = jax.random.key(3, impl=impl)
    for same in (key, jax.random.split(key)[1]):
        assert np.array_equal(random_bits.bits(same, (2, 7)), jax.random.bits(same, (2, 7)))
    mapped = jax.vmap(lambda key: random_bits.bits(key, (3,)))(many_keys(impl))
    assert mapped.shape == (16, 3)


def test_different_keys_give_different_bits():
    words = np.asarray(jax.vmap(lambda key: random_bits.bits(key, (64,)))(many_keys()))
    assert len(np.unique(words)) == words.size


def test_words_and_seed_are_bits():
    for key in (jax.random.key(5), jax.random.PRNGKey(5), jax.random.key(5, impl="rbg")):
        assert np.array_equal(random_bits.words(key, 9), random_bits.bits(key, (2, 9)))
        assert np.array_equal(random_bits.seed(key), random_bits.bits(key, (2,)))
        assert random_bits.seed(key).dtype == jnp.uint32


def test_seeds_of_different_keys_differ():
    seeds = np.asarray(jax.vmap(random_bits.seed)(jax.random.split(jax.random.key(0), 1000)))
    assert len(np.unique(seeds, axis=0)) == 1000


def test_unit_interval_is_the_upper_24_bits_and_never_1():
    random = np.random.default_rng(0).integers(0, 2**32, 1 << 16, np.uint32)
    words = np.concatenate([random, np.array([*EXTREMES, 255, 256], np.uint32)])
    found = random_bits.unit_interval(jnp.asarray(words))
    assert found.dtype == jnp.float32
    assert np.array_equal(np.asarray(found, np.float64), (words >> 8) / 2**24)
    assert found.min() == 0
    assert found.max() == np.float32(1 - 2.0**-24)


def exact_below(n, high, low):
    return [
        ((upper * 2**32 + lower) * bound) >> 64
        for bound, upper, lower in zip(n.tolist(), high.tolist(), low.tolist(), strict=True)
    ]


def test_below_is_exact_for_random_words():
    rng = np.random.default_rng(1)
    n = (2 ** rng.uniform(0, 31, 1 << 14)).astype(np.int32)
    high, low = rng.integers(0, 2**32, (2, 1 << 14), np.uint32)
    found = below(n, high, low)
    assert found.dtype == jnp.int32
    assert found.tolist() == exact_below(n, high, low)


def test_below_is_exact_for_extreme_words():
    sizes = [0, 1, 2, 3, 7, 2**16 - 1, 2**16, 2**30, 2**31 - 2, 2**31 - 1]
    grid = np.meshgrid(sizes, EXTREMES, EXTREMES)
    n = grid[0].ravel().astype(np.int32)
    high, low = (part.ravel().astype(np.uint32) for part in grid[1:])
    found = np.asarray(below(n, high, low))
    assert found.tolist() == exact_below(n, high, low)
    assert (found >= 0).all()
    assert (found < np.maximum(n, 1)).all()


def test_below_carries_from_the_low_word():
    n = np.array([3, 10, 2**31 - 1], np.int32)
    high, low = np.uint32(2**32 // n.astype(np.int64)), np.full(3, 2**32 - 1, np.uint32)
    found = below(n, high, low).tolist()
    assert found == exact_below(n, high, low)
    assert found != exact_below(n, high, 0 * low)


@pytest.mark.parametrize("n", [0, 1, 10, 2**31 - 1])
def test_below_takes_one_bound_for_all_words(n):
    high, low = random_bits.bits(jax.random.key(2), (2, 4096))
    found = np.asarray(below(jnp.int32(n), high, low))
    bounds = np.full(4096, n, np.int32)
    assert found.tolist() == exact_below(bounds, np.asarray(high), np.asarray(low))
    if n == 10:
        counts = np.bincount(found, minlength=10)
        assert ((counts - 409.6) ** 2 / 409.6).sum() < 9 + 5 * np.sqrt(18)


def unmix(words):
    """Inverts `mix`, by modular inverses and repeated shifts."""
    words = words ^ (words >> 16)
    words = words * np.uint32(pow(0x846CA68B, -1, 2**32))
    words = words ^ (words >> 15) ^ (words >> 30)
    words = words * np.uint32(pow(0x7FEB352D, -1, 2**32))
    return words ^ (words >> 16)


def test_mix_is_a_bijection_on_a_sample():
    random = np.random.default_rng(3).integers(0, 2**32, 1 << 18, np.uint32)
    ends = np.arange(-(1 << 17), 1 << 17).astype(np.uint32)
    words = np.unique(np.concatenate([random, ends]))
    mixed = np.asarray(mix(words))
    assert mixed.dtype == np.uint32
    assert len(np.unique(mixed)) == len(words)
    assert np.array_equal(unmix(mixed), words)


def test_every_input_bit_of_mix_reaches_every_output_bit():
    words = np.random.default_rng(4).integers(0, 2**32, 1 << 13, np.uint32)
    places = np.arange(32, dtype=np.uint32)
    changed = np.stack([mix(words) ^ mix(words ^ np.uint32(1 << i)) for i in range(32)])
    flipped = ((changed[:, :, None] >> places) & np.uint32(1)).mean(axis=1)
    assert flipped.min() > 0.4
    assert flipped.max() < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_10_million_leaves_share_all_random_words(half, monkeypatch):
    """Of the two words of a draw, one picks among nodes of 4096 leaves, the other inside them."""
    tree = ten_million_equal(8)
    monkeypatch.setattr(random_bits, "bits", lambda key, shape: key)
    draw = jax.jit(lambda words: sum_tree.draw(tree, words, 1 << 20, False)[1])
    fixed = jnp.full(1 << 20, 1_234_567_890, jnp.uint32)
    drawn, low = [], jnp.asarray(np.random.default_rng(13).integers(0, 4, 1 << 20, np.uint32))
    for chunk in range(4):  # one of every four consecutive words
        every = ((((chunk << 20) + jnp.arange(1 << 20, dtype=jnp.uint32)) << 2) + low) << 8
        drawn.append(draw(jnp.stack([fixed, every] if half else [every, fixed])))
    drawn = np.concatenate(drawn)
    if half:
        counts = np.bincount(drawn - drawn.min())
        assert counts.shape == (4096,)
        assert np.abs(counts - 1024).max() <= 2
    else:
        counts = np.bincount(drawn // 4096)
        assert counts.shape == (2442,)
        assert np.abs(counts[:-1] - 2**22 * 4096 / 1e7).max() <= 2
