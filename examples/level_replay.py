"""Level replay: the distribution of PLR as one function for `jrb.Weighted`.

Reference: Jiang et al., 2021, "Prioritized level replay", https://arxiv.org/abs/2010.03934,
section 3 and algorithm 1.
"""

import jax
import jax.numpy as jnp

EXAMPLE = {"level": jnp.int32(0), "score": jnp.float32(0), "last": jnp.int32(0)}
"""An item: the seed of a level, its score, and the number of the last episode played in it."""


def weights(leaves: dict[str, jax.Array], age: jax.Array, context: dict[str, jax.Array]):
    """Returns P_replay = (1 - rho) P_S + rho P_C of every level, float32 `[N]`.

    P_S is rank^(-1 / temperature) over its sum, where rank 1 has the greatest score and the lower
    slot comes first among equals. P_C is the number of episodes since the level was last played,
    over its sum; it is P_S as long as that sum is 0.

    Args:
        leaves: "score", float32 `[N]`, and "last", int32 `[N]`.
        age: int32 `[N]`, -1 for slots without a level.
        context: "episode", int32 `[]`, the number of episodes so far; "rho" and "temperature",
            float32 `[]`.
    """
    is_level = age >= 0
    # Slots without a level come last; a second sort inverts the order into ranks.
    order = jnp.argsort(jnp.where(is_level, -leaves["score"], jnp.inf), stable=True)
    rank = 1 + jnp.argsort(order)
    by_score = jnp.where(is_level, rank.astype(jnp.float32) ** (-1 / context["temperature"]), 0.0)
    by_score = by_score / jnp.sum(by_score)
    staleness = jnp.where(is_level, context["episode"] - leaves["last"], 0).astype(jnp.float32)
    total = jnp.sum(staleness)
    by_staleness = jnp.where(total > 0, staleness / jnp.maximum(total, 1.0), by_score)
    return (1 - context["rho"]) * by_score + context["rho"] * by_staleness
