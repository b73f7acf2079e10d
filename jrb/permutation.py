"""A keyed permutation of 0 .. n - 1 that is computed, not stored."""

import jax
import jax.numpy as jnp
from jax import lax

from jrb import bits

_DOUBLE_ROUNDS = 12  # eight rounds leave a bias that can be seen for n from 5 to 20


def permute(seed: jax.Array, n: jax.Array, i: jax.Array) -> jax.Array:
    """Where a random permutation of 0 .. n - 1 sends each `i`.

    A Feistel network on pairs from a x b >= n, with a = ceil(sqrt n); what falls on n or above is
    sent through it again, until it lies below ("cycle walking"). It uses no memory beside the seed.

    Args:
        seed: uint32 `[2]`.
        n: int32; 0 is taken for 1.
        i: int32 `[B]`, in [0, n).

    Returns:
        int32 `[B]`, in [0, n); distinct for distinct `i`.

    Reference: Black and Rogaway, 2002, "Ciphers with arbitrary finite domains" (method 3).
    """
    size = jnp.maximum(n, 1).astype(jnp.uint32)
    columns = _ceil_sqrt(size)
    rows = (size + columns - jnp.uint32(1)) // columns

    def double_round(step: jax.Array, pair: tuple) -> tuple:
        row, column = pair
        column = _shift(column, _scramble(seed, 2 * step, row), columns)
        return _shift(row, _scramble(seed, 2 * step + 1, column), rows), column

    def encrypt(x: jax.Array) -> jax.Array:
        row, column = lax.fori_loop(0, _DOUBLE_ROUNDS, double_round, (x // columns, x % columns))
        return row * columns + column

    walk = lax.while_loop(
        lambda x: jnp.any(x >= size),
        lambda x: jnp.where(x >= size, encrypt(x), x),
        encrypt(i.astype(jnp.uint32)),
    )
    return walk.astype(jnp.int32)


def _ceil_sqrt(n: jax.Array) -> jax.Array:
    guess = jnp.sqrt(n.astype(jnp.float32)).astype(jnp.uint32)
    guess = guess - (guess * guess > n).astype(jnp.uint32)
    return guess + (guess * guess < n).astype(jnp.uint32)


def _scramble(seed: jax.Array, step: jax.Array, x: jax.Array) -> jax.Array:
    return bits.mix(
        bits.mix(x + seed[0]) ^ (seed[1] + jnp.uint32(0x9E3779B9) * step.astype(jnp.uint32))
    )


def _shift(x: jax.Array, word: jax.Array, n: jax.Array) -> jax.Array:
    """(x + a random number below n) mod n."""
    moved = x + lax.mulhi(word, jnp.broadcast_to(n, word.shape))
    return jnp.where(moved >= n, moved - n, moved)
