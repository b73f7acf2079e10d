"""Running means and variances, in the precision of the numbers that they are of."""

import jax
import jax.numpy as jnp

from jrb._base import pytree

_MOST = 2**31  # numbers; from there on the oldest weigh less and less


class Moments(pytree.State):
    """The mean and the variance of all that came so far.

    A single number among very many moves them by less than their own precision. They are therefore
    kept as sums of two numbers, of which `mean_rest` and `var_rest` are what the first cannot hold.

    Attributes:
        count: uint32 `[]`, how many came, up to 2^31.
        mean: `[...]`, float32, or float64 for leaves of that dtype.
        mean_rest: `[...]`.
        var: `[...]`, the mean squared distance from the mean.
        var_rest: `[...]`.
    """

    count: jax.Array
    mean: jax.Array
    mean_rest: jax.Array
    var: jax.Array
    var_rest: jax.Array


def start(shape: tuple[int, ...], dtype: pytree.DType) -> Moments:
    """Those of nothing."""
    fields = ("mean", "mean_rest", "var", "var_rest")
    zeros = {name: jnp.zeros(shape, dtype) for name in fields}
    return Moments(count=jnp.zeros((), jnp.uint32), **zeros)


def joined(moments: Moments, numbers: jax.Array, real: jax.Array) -> Moments:
    """The moments of what came before and some of these numbers.

    Args:
        moments: of what came before.
        numbers: `[K, ...]`. One entry that is not finite leaves out all beside it.
        real: bool `[K]`, which of them count.

    Reference: Chan et al., 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances".
    """
    numbers = numbers.astype(moments.mean.dtype)
    real &= jnp.isfinite(numbers).reshape(len(numbers), -1).all(axis=1)
    count = jnp.sum(real, dtype=jnp.uint32)
    mean, var = _of_these(numbers, real, count)
    total = moments.count + count
    part = _ratio(count, total, mean.dtype)
    apart = (mean - moments.mean) - moments.mean_rest
    wider = (var - moments.var) - moments.var_rest
    by = wider * part + apart * apart * part * (1 - part)
    mean, mean_rest = _sum(moments.mean, moments.mean_rest + apart * part)
    var, var_rest = _sum(moments.var, moments.var_rest + by)
    return Moments(
        count=jnp.minimum(total, jnp.uint32(_MOST)),
        mean=mean,
        mean_rest=mean_rest,
        var=var,
        var_rest=var_rest,
    )


def _of_these(numbers: jax.Array, real: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of the numbers `[K, ...]` that are real, which are `count`."""
    real = real.reshape(-1, *(1,) * (numbers.ndim - 1))
    many = jnp.maximum(count, 1).astype(numbers.dtype)
    mean = jnp.sum(jnp.where(real, numbers, 0), axis=0) / many
    apart = jnp.where(real, numbers - mean, 0)
    return mean, jnp.sum(apart * apart, axis=0) / many


def _ratio(one: jax.Array, other: jax.Array, dtype: pytree.DType) -> jax.Array:
    return one.astype(dtype) / jnp.maximum(other, 1).astype(dtype)


def _sum(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rounded sum of two numbers, and exactly what it lacks (Knuth's two-sum)."""
    total = one + other
    second = total - one
    return total, (one - (total - second)) + (other - second)


def scaled(
    leaf: jax.Array, moments: Moments, center: bool, clip: float | None, eps: float
) -> jax.Array:
    """(leaf - mean) / sqrt(var + eps), between -clip and clip; as it is before anything came.

    The last axes of `leaf` are those of the moments.
    """
    wide = leaf.astype(moments.mean.dtype)
    some = moments.count > 0
    spread = jnp.where(some, jnp.sqrt(jnp.maximum(moments.var, 0) + eps), 1)
    found = (wide - moments.mean if center else wide) / spread
    return found if clip is None else jnp.clip(found, -clip, clip)
