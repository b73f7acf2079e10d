"""Looks up the return of the complete episode for each sampled transition.

Agents that are conditioned on returns, and agents that reward diversity only in good episodes, need
the return of each transition's episode. It is not known when the transition is written. So the item
stores the position of its episode in a small table, and the return so far; the table stores the
return of each episode once this has ended. A batch looks it up. The result is exact, even if the
episode's first rows were overwritten. It works with any sampler, unit and storage, and inside
`jit`, `scan` and `vmap`. The cost is one write of `[E]` numbers per step.

Reference: Kumar et al., 2020, "One solution is not all you need: few-shot extrapolation via
structured MaxEnt RL" (SMERL); Srivastava et al., 2019, "Training agents using upside-down
reinforcement learning"; Chen et al., 2021, "Decision transformer".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jrb


class EpisodeReturns(NamedTuple):
    """The returns of the last M episodes of E environments. Save it with `jrb.save(extra=...)`.

    Attributes:
        total: `[M, E]`, the return of each episode; NaN from its first step until it ends.
        position: int32 `[E]`, the row of `total` for the running episode.
        so_far: `[E]`, the return of the running episode up to now.
    """

    total: jax.Array
    position: jax.Array
    so_far: jax.Array


EXAMPLE = {"position": jnp.zeros((), jnp.int32), "before": jnp.zeros(())}
"""The leaf to add to an item: the index of its return in `total`, and the return before it."""


def init(buffer: jrb.ReplayBuffer) -> EpisodeReturns:
    """Returns a table that is large enough for all episodes of which the buffer can hold a row.

    R rows of an environment belong to at most R episodes, and one more may be running. The writer
    must overwrite the oldest items first, as all writers except `MaxValue` and `Reservoir` do.
    """
    envs = buffer.num_envs or 1
    room = buffer.capacity // envs + 1
    return EpisodeReturns(
        total=jnp.zeros((room, envs)),
        position=jnp.zeros(envs, jnp.int32),
        so_far=jnp.zeros(envs),
    )


def step(
    table: EpisodeReturns, reward: jax.Array, ended: jax.Array, stepped: Any = True
) -> tuple[EpisodeReturns, dict[str, jax.Array]]:
    """Adds one step of all environments; returns the table, and the leaf to store with the items.

    Args:
        table: the returns up to the previous step.
        reward: the rewards of the step, `[E]`.
        ended: bool `[E]`, True if this is the last step of an episode, for any reason.
        stepped: bool `[E]`, False where the buffer's mask leaves the step out.
    """
    room, envs = table.total.shape
    env = jnp.arange(envs, dtype=jnp.int32)
    leaf = {"position": table.position * envs + env, "before": table.so_far}
    so_far = table.so_far + jnp.where(stepped, reward, 0.0)
    total = jnp.where(ended, so_far, jnp.nan)
    at = jnp.where(stepped, table.position, room)  # out of range: nothing is written
    ended = ended & stepped
    after = EpisodeReturns(
        total=table.total.at[at, env].set(total, mode="drop"),
        position=jnp.where(ended, (table.position + 1) % room, table.position),
        so_far=jnp.where(ended, 0.0, so_far),
    )
    return after, leaf


def truncate(table: EpisodeReturns, which: jax.Array) -> EpisodeReturns:
    """Ends the running episodes of environments, bool `[E]`; call it with `buffer.truncate`."""
    room, envs = table.total.shape
    env = jnp.arange(envs, dtype=jnp.int32)
    runs = which & jnp.isnan(table.total[table.position, env])
    at = jnp.where(runs, table.position, room)
    return EpisodeReturns(
        total=table.total.at[at, env].set(table.so_far, mode="drop"),
        position=jnp.where(runs, (table.position + 1) % room, table.position),
        so_far=jnp.where(runs, 0.0, table.so_far),
    )


def look_up(table: EpisodeReturns, leaf: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
    """Returns the episode's return, the return from this step on, and bool, True if known.

    `leaf` is the sampled leaf of `step`, `[B]` or `[B, L]`. The returns of running episodes are
    not known: leave these entries out of the loss.
    """
    total = table.total.reshape(-1)[leaf["position"]]
    known = ~jnp.isnan(total)
    total = jnp.where(known, total, 0.0)
    return total, jnp.where(known, total - leaf["before"], 0.0), known
