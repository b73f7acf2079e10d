"""Samples of 256 shards with unequal priorities, compared with one buffer of the same items.

All shards are on one device, because samples do not depend on devices. The benchmark reports the
greatest relative error of a weight against its formula in float64, and the standard deviation of
weighted batch means relative to that of one buffer: 1 if sharding adds no variance. N = 4,096
items, B = 1,024.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrb

from ..workloads.case import Wanted

S, LENGTH, B = 256, 16, 1024
BETAS = (0.0, 0.4, 1.0)
SAMPLER = jrb.Prioritized(alpha=1.0, eps=0.0, normalize=None)
BUFFER = jrb.ReplayBuffer(LENGTH * S, num_envs=S, batch_size=B, sampler=SAMPLER)


def masses(name: str) -> np.ndarray:
    """Returns the priorities `[T, S]`, float32, of a case; each column is a shard."""
    rng = np.random.default_rng(0)
    found = 0.5 + rng.random((LENGTH, S))
    if name == "lognormal shards":
        found *= np.exp(rng.normal(size=S))
    elif name == "lognormal items":
        found = np.exp(2 * rng.normal(size=(LENGTH, S)))
    elif name == "one shard has 90 %":
        found[:, 7] *= 9 * np.delete(found, 7, axis=1).sum() / found[:, 7].sum()
    elif name == "a quarter of the shards has none":
        found[:, ::4] = 0
    return found.astype(np.float32)


CASES = (
    "balanced",
    "lognormal shards",
    "lognormal items",
    "one shard has 90 %",
    "a quarter of the shards has none",
)


def draws(buffer: Any, given: np.ndarray, beta: float, rounds: int) -> Any:
    """Returns samples `[rounds, B]`; the item of time t and environment e holds `t * S + e`."""
    time, env = np.indices(given.shape, np.int32)
    state = buffer.extend(buffer.init({"at": jnp.int32(0)}), {"at": time * S + env}, None, given)
    draw = jax.jit(lambda keys: jax.lax.map(lambda key: buffer.sample(state, key, beta=beta), keys))
    return jax.device_get(draw(jax.random.split(jax.random.key(1), rounds)))


def exact(given: np.ndarray, beta: float, shards: int) -> np.ndarray:
    """Returns the weight of each item in float64: `(n P_i)^-beta S M_s / M`.

    A buffer that is not sharded has `shards` = 1, and no factor `S M_s / M`.
    """
    mass = given.astype(np.float64)
    part = mass.sum(axis=0) / mass.sum() if shards > 1 else np.ones(S)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (mass.size * mass / mass.sum()) ** -np.float64(np.float32(beta)) * shards * part
    return np.where(mass > 0, found, 0)


def row(name: str, beta: float, rounds: int) -> dict:
    """Measures one case; returns a row of the results."""
    given, means, errors = masses(name), [], []
    values = np.random.default_rng(1).normal(size=given.size)
    for shards, buffer in ((S, jrb.Sharded(BUFFER, S)), (1, BUFFER)):
        found = draws(buffer, given, beta, rounds)
        at, want = found.data["at"], exact(given, beta, shards).reshape(-1)
        real = found.mask
        errors.append(float(np.max(np.abs(found.weights[real] / want[at[real]] - 1))))
        weights = found.weights.astype(np.float64)
        means.append((weights * values[at]).mean(axis=1))
    chance = given.reshape(-1).astype(np.float64) / given.sum(dtype=np.float64)
    truth = float((chance * exact(given, beta, 1).reshape(-1) * values).sum())
    ours, theirs = (np.std(mean, ddof=1) for mean in means)
    return {
        "what": name,
        "beta": beta,
        "error": errors[0],
        "z": float((means[0].mean() - truth) / (ours / np.sqrt(rounds))),
        "ours_sd": float(ours),
        "one_sd": float(theirs),
        "ratio": float(ours / theirs),
    }


def run(wanted: Wanted) -> dict[str, Any]:
    """Returns a row per case and beta, each from 2,000 batches (100 if quick)."""
    rounds = wanted.pick(100, 2000)
    return {"rows": [row(name, beta, rounds) for name in CASES for beta in BETAS]}
