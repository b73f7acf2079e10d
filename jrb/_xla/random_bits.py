"""PRNG keys, random bits, integers in ranges too large for float32, and a random permutation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util.pytree import Leaf
from jrb._xla import dependencies

# The bits by which Threefry-2x32 rotates, in turns, in four rounds each.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_HALF, _LOW = np.uint32(16), np.uint32(0xFFFF)
# Rounds of a permutation. Each leaves about 0.6 of a pair's bias: enough for any n below 2^31.
_ROUNDS = 64


def check_key(value: Leaf) -> None:
    """Raises unless a value is one PRNG key, typed or old-style."""
    # The first test is that of `jnp.issubdtype`, which is slow.
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "type", None) is jax.dtypes.prng_key:
        shape = ()
    elif dtype == jnp.uint32:
        # JAX adds its options to this class as it is imported.
        default = jax.config.jax_default_prng_impl  # pyright: ignore[reportAttributeAccessIssue]
        shape = _old_style_shape(default)
    else:
        raise TypeError(
            f"key: expected a PRNG key, got {value!r}. Make one with jax.random.key(0)."
        )
    if value.shape != shape:
        raise ValueError(
            f"key: expected a single key, of shape {shape}, got shape {value.shape}. "
            "Take one of them, or vmap over them."
        )


def seed_or_key(value: Leaf) -> Leaf:
    """Returns an integer, a seed in place of a key, as uint32; and anything else as it is."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        return value
    if not 0 <= value < 2**32:
        raise ValueError(f"key: expected a key, or a seed from 0 to 2**32 - 1, got {value}.")
    return np.uint32(value)


def key_or_seed(value: Leaf) -> jax.Array:
    """Returns a single PRNG key: the given one, or that of an integer; raises for anything else."""
    value = seed_or_key(value)
    value = jax.random.key(value) if type(value) is np.uint32 else value
    check_key(value)
    return value


@functools.lru_cache
def _old_style_shape(implementation: str) -> tuple[int, ...]:
    """Returns the shape of an old-style key, which is an array of uint32."""
    return jax.eval_shape(lambda: jax.random.PRNGKey(0, impl=implementation)).shape


def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns uniform uint32, equal to `jax.random.bits(key, shape)` with JAX's default settings.

    JAX lowers its default generator to a loop on the CPU, which costs more than a whole draw from a
    buffer; here the same twenty rounds are written out. Keys of other generators go to JAX. The key
    may be typed, or old-style, uint32 `[2]`.

    Reference: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3" (Threefry-2x32).
    """
    words = jax.random.key_data(key)
    if words.shape[-1:] != (2,):
        return jax.random.bits(key, shape)
    counter = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    first, second = _threefry(words[0], words[1], jnp.zeros_like(counter), counter)
    return (first ^ second).reshape(shape)


@jax.jit
def _threefry(
    k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # As a function of `jax.jit`, it is traced and lowered once for all calls of a shape. A hundred
    # operators would take twice as long to trace as functions of `lax`.
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    # Five groups of four rounds; a key is added after each group.
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            x0 = lax.add(x0, x1)
            upper = lax.shift_left(x1, np.uint32(turn))
            lower = lax.shift_right_logical(x1, np.uint32(32 - turn))
            x1 = lax.bitwise_xor(x0, lax.bitwise_or(upper, lower))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return x0, x1


def unit_interval(words: jax.Array) -> jax.Array:
    """Returns float32 in [0, 1), multiples of 2^-24, from uint32."""
    return (words >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def below(n: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """Returns int32 in [0, n), uniform to within n / 2^64; 0 where n is 0.

    Args:
        n: int32, at least 0, broadcast against the words.
        high: uint32 `[B]`, uniform.
        low: uint32 `[B]`, uniform and independent of `high`.

    Reference: Lemire, 2019, "Fast random integer generation in an interval" (the multiplication).
    """
    # The words are the fraction high * 2^-32 + low * 2^-64, and the result is its product with n,
    # rounded down: the upper 32 bits of high * n, and what the lower 32 bits and low * n carry.
    bound = jnp.broadcast_to(n.astype(jnp.uint32), high.shape)
    fraction = high * bound
    halves = _halves(bound)
    # If the sum is smaller than a term, it has overflowed 32 bits.
    carry = (fraction + _mulhi(_halves(low), halves)) < fraction
    return (_mulhi(_halves(high), halves) + carry.astype(jnp.uint32)).astype(jnp.int32)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x >> _HALF, x & _LOW


def _mulhi(x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the upper 32 bits of the product of two uint32, given by halves."""
    # `lax.mulhi` does not compile in a program of several devices.
    (x1, x0), (y1, y0) = x, y
    # Add the four products of halves such that no sum overflows.
    middle = x1 * y0 + ((x0 * y0) >> _HALF)
    other = x0 * y1 + (middle & _LOW)
    return x1 * y1 + (middle >> _HALF) + (other >> _HALF)


def mix(words: jax.Array) -> jax.Array:
    """Returns a bijection of uint32 in which every input bit reaches every output bit.

    Reference: Wellons, 2018, "Prospecting for hash functions" (lowbias32).
    """
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))


def words(key: jax.Array, batch_size: int) -> jax.Array:
    """Returns uint32 `[2, B]`, uniform, computed once."""
    return dependencies.evaluate_once(lambda: bits(key, (2, batch_size)))


def seed(key: jax.Array) -> jax.Array:
    return bits(key, (2,))


def words_at(seed: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two uniform words for each number, uint32 `[B]`, from a seed, uint32 `[2]`."""
    return _threefry(seed[0], seed[1], jnp.zeros_like(numbers), numbers)


def fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    """Returns `jax.random.fold_in(key, number)`, without a loop on the CPU."""
    words = jax.random.key_data(key)
    if words.shape[-1:] != (2,):
        return jax.random.fold_in(key, number)
    number = jnp.asarray(number).astype(jnp.uint32)
    # JAX's default generator makes a key of the number's block, and so does this.
    block = _threefry(words[0], words[1], jnp.zeros_like(number), number)
    return _key_like(key, jnp.stack(block))


def fold(key: jax.Array, number: int) -> jax.Array:
    """Returns a key that is independent of `key`, and of the keys for other numbers >= 0."""
    words = jax.random.key_data(key)
    if words.shape[-1:] != (2,):
        return jax.random.fold_in(key, 2**32 - 1 - number)
    # `bits` uses counters with a high word of zero, so no draw uses this block.
    block = _threefry(words[0], words[1], jnp.uint32(2**32 - 1), jnp.uint32(number))
    return _key_like(key, jnp.stack(block))


def _key_like(key: jax.Array, words: jax.Array) -> jax.Array:
    """Returns a key of these words, typed if `key` is typed, else old-style."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return words
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))


def permute(seed: jax.Array, n: jax.Array, i: jax.Array) -> jax.Array:
    """Returns where a random permutation of 0 .. n - 1 sends each `i`; it is computed, not stored.

    In each round a random number k pairs every x with (k - x) mod n, and a random bit of the pair
    says whether the two change places.

    Args:
        seed: uint32 `[2]`.
        n: int32; 0 is taken for 1.
        i: int32 `[B]`, in [0, n).

    Returns:
        int32 `[B]`, in [0, n); distinct for distinct `i`.

    Reference: Hoang, Morris and Rogaway, 2012, "An enciphering scheme based on a card shuffle"
    (swap-or-not).
    """
    size = jnp.maximum(n, 1).astype(jnp.uint32)
    # Each round has a random k, the upper word of a product with n, and a salt, by which a hash of
    # a pair becomes its random bit.
    number = jnp.arange(_ROUNDS, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
    words = mix(mix(number + seed[0]) ^ seed[1])
    salts = mix(words ^ np.uint32(0x85EBCA6B))
    sums = _mulhi(_halves(words), _halves(jnp.broadcast_to(size, words.shape)))

    def swap_or_not(turn: jax.Array, x: jax.Array) -> jax.Array:
        # Modulo 2^32, a negative difference is at least 2^31, so it is above n; adding the size
        # brings it back into [0, n).
        other = sums[turn] - x
        other = jnp.where(other >= size, other + size, other)
        # Both partners hash the larger one of the two, and so they agree whether to swap.
        swaps = mix(jnp.maximum(x, other) ^ salts[turn]) & np.uint32(1)
        return jnp.where(swaps == 1, other, x)

    rounds = lambda unroll: dependencies.loop(_ROUNDS, swap_or_not, i.astype(jnp.uint32), unroll)
    # Each turn of a loop is a kernel on a GPU; on the CPU, an unrolled loop is slower.
    ranks = lax.platform_dependent(cpu=lambda: rounds(1), default=lambda: rounds(8))
    return ranks.astype(jnp.int32)
