"""`permute` gives a permutation for every n, and a random one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrb._xla import random_bits

SMALL = 300
SEED = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)

permute = jax.jit(random_bits.permute)


@jax.jit
@jax.vmap
def small_orders(seed, n):
    """Returns the permutation of 0 .. n - 1, padded with its last element."""
    return random_bits.permute(seed, n, jnp.minimum(jnp.arange(SMALL), jnp.maximum(n, 1) - 1))


@jax.jit
def many_orders(seeds, n):
    """Returns the permutations of 0 .. n - 1 for many seeds, padded to 10 elements."""
    i = jnp.minimum(jnp.arange(10), n - 1)
    return jax.vmap(lambda seed: random_bits.permute(seed, n, i))(seeds)


def seeds_of(count):
    return jax.vmap(random_bits.seed)(jax.random.split(jax.random.key(0), count))


def is_bijection(found, n):
    return np.array_equal(np.sort(found), np.arange(n))


@pytest.mark.parametrize("seed", [SEED, jnp.zeros(2, jnp.uint32), ~jnp.zeros(2, jnp.uint32)])
def test_a_bijection_for_every_small_n(seed):
    sizes = jnp.arange(1, SMALL + 1)
    orders = np.asarray(small_orders(jnp.broadcast_to(seed, (SMALL, 2)), sizes))
    assert orders.dtype == np.int32
    for n in range(1, SMALL + 1):
        assert is_bijection(orders[n - 1, :n], n)
    assert not is_bijection(orders[9, :9], 9)


def test_a_bijection_for_larger_n():
    squares = [k * k + d for k in (100, 181, 316) for d in (-1, 0, 1)]
    for n in [2**15, 99_991, 100_000, 46 * 47, *squares]:
        i = np.minimum(np.arange(100_489), n - 1).astype(np.int32)
        found = np.asarray(permute(SEED, jnp.int32(n), i))
        assert is_bijection(found[:n], n)


def points_in(n):
    rng = np.random.default_rng(n)
    inside = np.arange(2**14)
    points = np.concatenate([inside, n - 1 - inside, rng.integers(0, n, 2**16)])
    return points.astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "n", [2**31 - 1, 2**31 - 2, 2**30, 46340**2 + 1, 46340**2, 46340**2 - 1, 46340 * 46341, 10**9]
)
def test_distinct_and_in_range_for_huge_n(n):
    points = points_in(n)
    found = np.asarray(permute(SEED, jnp.int32(n), points))
    assert found.min() >= 0
    assert found.max() < n
    assert len(np.unique(found)) == len(np.unique(points))
    counts = np.histogram(found, bins=64, range=(0, n))[0]
    expected = len(points) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * np.sqrt(2 * 63)


def test_n_of_0_is_taken_for_1():
    zero = jnp.zeros(3, jnp.int32)
    assert random_bits.permute(SEED, jnp.int32(0), zero).tolist() == [0, 0, 0]
    assert random_bits.permute(SEED, jnp.int32(1), zero).tolist() == [0, 0, 0]


def test_different_seeds_give_different_orders():
    orders = np.asarray(small_orders(seeds_of(256), jnp.full(256, 100)))
    assert len(np.unique(orders, axis=0)) == 256
    assert np.array_equal(orders, small_orders(seeds_of(256), jnp.full(256, 100)))


def test_each_bit_of_the_seed_matters():
    flips = 1 << jnp.arange(32, dtype=jnp.uint32)
    first = jnp.stack([SEED[0] ^ flips, jnp.broadcast_to(SEED[1], 32)], axis=1)
    second = jnp.stack([jnp.broadcast_to(SEED[0], 32), SEED[1] ^ flips], axis=1)
    seeds = jnp.concatenate([SEED[None], first, second])
    orders = np.asarray(small_orders(seeds, jnp.full(65, 100)))
    assert len(np.unique(orders, axis=0)) == 65


def passes_chi_square(values, cells):
    counts = np.bincount(values, minlength=cells)
    expected = counts.sum() / cells
    statistic = ((counts - expected) ** 2 / expected).sum()
    return statistic <= cells - 1 + 5 * np.sqrt(2 * (cells - 1))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 5, 7, 9, 10])
def test_every_element_lands_everywhere_alike(n):
    orders = np.asarray(many_orders(seeds_of(1 << 14), jnp.int32(n)))[:, :n]
    for element in range(n):
        assert passes_chi_square(orders[:, element], n)
    assert not passes_chi_square(orders[:, 0] % (n - 1), n)


def test_pairs_of_elements_land_everywhere_alike():
    orders = np.asarray(many_orders(seeds_of(1 << 14), jnp.int32(10)))
    for a, b in [(0, 1), (0, 9), (4, 5), (3, 7)]:
        second = orders[:, b] - (orders[:, b] > orders[:, a])
        assert passes_chi_square(orders[:, a] * 9 + second, 90)


def test_all_orders_of_four_are_alike():
    orders = np.asarray(many_orders(seeds_of(1 << 14), jnp.int32(4)))[:, :4]
    number = orders @ np.array([64, 16, 4, 1])
    assert passes_chi_square(np.unique(number, return_inverse=True)[1], 24)


def test_jit_with_traced_n_equals_eager():
    i = jnp.arange(50)
    for n in (50, 51, 1000):
        eager = random_bits.permute(SEED, jnp.int32(n), i)
        assert np.array_equal(eager, permute(SEED, jnp.int32(n), i))


def test_a_second_n_does_not_retrace():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def order(seed, n, i):
        return random_bits.permute(seed, n, i)

    for n in (5, 6, 2**31 - 1):
        order(SEED, jnp.int32(n), jnp.arange(5))
