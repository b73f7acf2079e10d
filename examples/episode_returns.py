"""The return of the whole episode beside each transition, known when the episode ends.

Agents that are conditioned on returns, and those that reward diversity only in good episodes, need
for each transition what its episode came to. That is not known yet when the transition is written.
So the item keeps the number of its episode and the return so far, two leaves that never change, and
a small table beside the buffer keeps the return of each episode from its end on. A batch looks it
up: exact also for episodes whose first rows were overwritten, with any sampler, unit and storage,
inside `jit`, `scan` and `vmap`, at the cost of one write of `[E]` numbers a step.

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
        position: int32 `[E]`, where in `total` the running episode will be.
        so_far: `[E]`, the return of the running episode up to now.
    """

    total: jax.Array
    position: jax.Array
    so_far: jax.Array


EXAMPLE = {"position": jnp.zeros((), jnp.int32), "before": jnp.zeros(())}
"""The leaf that an item needs: where its return will be, and the rewards before it."""


def init(buffer: jrb.ReplayBuffer) -> EpisodeReturns:
    """Returns a table with room for all episodes of which the buffer can hold a row.

    R rows of an environment are of R episodes at most, and one more may be running. The writer has
    to overwrite the oldest items first, as all do but `MaxValue` and `Reservoir`.
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
    """Takes one step of all environments, `[E]`, and returns the leaf to store with it.

    Args:
        table: the returns until now.
        reward: `[E]`.
        ended: bool `[E]`, whether this is the last step, for any reason.
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
    """Ends the episodes that run in some environments, bool `[E]`, beside `buffer.truncate`."""
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
    """Returns the episode's return, the return from this step on, and whether they are known.

    `leaf` is what `step` returned, as it came from the buffer, `[B]` or `[B, L]`. Of episodes that
    still run, nothing is known: leave them out of the loss.
    """
    total = table.total.reshape(-1)[leaf["position"]]
    known = ~jnp.isnan(total)
    total = jnp.where(known, total, 0.0)
    return total, jnp.where(known, total - leaf["before"], 0.0), known
