"""A keyed permutation of 0 .. n - 1 that is computed, not stored."""

import jax
import jax.numpy as jnp
from jax import lax

from jrb import bits

_ROUNDS = 8


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

    def encrypt(x: jax.Array) -> jax.Array:
        row, column = x // columns, x % columns
        for step in range(_ROUNDS):
            if step % 2:
                row = _shift(row, _scramble(seed, step, column), rows)
            else:
                column = _shift(column, _scramble(seed, step, row), columns)
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


def _scramble(seed: jax.Array, step: int, x: jax.Array) -> jax.Array:
    return bits.mix(bits.mix(x + seed[0]) ^ (seed[1] + jnp.uint32(0x9E3779B9) * jnp.uint32(step)))


def _shift(x: jax.Array, word: jax.Array, n: jax.Array) -> jax.Array:
    """(x + a random number below n) mod n."""
    moved = x + lax.mulhi(word, jnp.broadcast_to(n, word.shape))
    return jnp.where(moved >= n, moved - n, moved)
