"""A keyed permutation of 0 .. n - 1 that is computed, not stored."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._xla import dependencies, random_bits

_ROUNDS = 64  # a pair keeps about 0.6 of what was seen of it before in each; for any n below 2^31


def permute(seed: jax.Array, n: jax.Array, i: jax.Array) -> jax.Array:
    """Where a random permutation of 0 .. n - 1 sends each `i`.

    In each round a random number k pairs every x with (k - x) mod n, and a random bit of the pair
    says whether the two change places. It uses no memory beside the seed.

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
    number = jnp.arange(_ROUNDS, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
    words = random_bits.mix(random_bits.mix(number + seed[0]) ^ seed[1])
    salts = random_bits.mix(words ^ np.uint32(0x85EBCA6B))
    sums = random_bits.mulhi(words, jnp.broadcast_to(size, words.shape))

    def swap_or_not(turn: jax.Array, x: jax.Array) -> jax.Array:
        other = sums[turn] - x  # modulo 2^32: what is negative is at least 2^31, so above n
        other = jnp.where(other >= size, other + size, other)
        swaps = random_bits.mix(jnp.maximum(x, other) ^ salts[turn]) & np.uint32(1)
        return jnp.where(swaps == 1, other, x)

    rounds = lambda unroll: dependencies.loop(_ROUNDS, swap_or_not, i.astype(jnp.uint32), unroll)
    # Each turn of a loop is a kernel on a GPU; on the CPU, what is written out is slower.
    return lax.platform_dependent(cpu=lambda: rounds(1), default=lambda: rounds(8)).astype(
        jnp.int32
    )
