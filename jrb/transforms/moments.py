"""Running means and variances, in the precision of the numbers that they are of."""

import functools

import jax
import jax.numpy as jnp

from jrb._util import pytree

_MOST = 2**31  # numbers; from there on the oldest weigh less and less


class Moments(pytree.State):
    """The mean and the variance of all that came so far.

    A single number among very many moves them by less than their own precision. They are therefore
    kept as sums of two numbers, of which `mean_rest` and `var_rest` are what the first cannot hold.

    Rows with an entry that is not finite, or too large for its squared distance from any other one
    to be a number of this dtype, are left out: from 2^62 (4.6e18) on in float32.

    Attributes:
        count: uint32 `[]`, how many came, up to 2^31.
        left_out: uint32 `[]`, how many rows were left out, modulo 2^32.
        mean: `[...]`, float32, or float64 for leaves of that dtype.
        mean_rest: `[...]`.
        var: `[...]`, the mean squared distance from the mean.
        var_rest: `[...]`.
    """

    count: jax.Array
    left_out: jax.Array
    mean: jax.Array
    mean_rest: jax.Array
    var: jax.Array
    var_rest: jax.Array

    def scaled(self, leaf: jax.Array, center: bool, clip: float | None, eps: float) -> jax.Array:
        """Returns (leaf - mean) / sqrt(var + eps), between -clip and clip.

        Finite for what is finite, also without a bound; before anything came, the leaf as it is.
        The last axes of `leaf` are those of the moments.
        """
        wide = leaf.astype(self.mean.dtype)
        lift = lambda array: array.reshape((1,) * (leaf.ndim - array.ndim) + array.shape)
        least = jnp.finfo(wide.dtype).tiny  # a smaller `eps` is 0 in this dtype
        spread = jnp.sqrt(jnp.maximum(jnp.maximum(self.var, 0) + eps, least))
        spread = lift(jnp.where(self.count > 0, spread, 1))
        centered = wide - lift(self.mean) - lift(self.mean_rest) if center else wide
        result = centered / spread
        if clip is None:
            largest = jnp.finfo(wide.dtype).max
            return jnp.where(jnp.isfinite(wide), jnp.clip(result, -largest, largest), result)
        return jnp.clip(result, -clip, clip)


def start(shape: tuple[int, ...], dtype: pytree.DType) -> Moments:
    """Returns the moments of no numbers."""
    fields = ("mean", "mean_rest", "var", "var_rest")
    zeros = {name: jnp.zeros(shape, dtype) for name in fields}
    none = lambda: jnp.zeros((), jnp.uint32)
    return Moments(count=none(), left_out=none(), **zeros)


def joined(moments: Moments, numbers: jax.Array, real: jax.Array) -> Moments:
    """Returns the moments of earlier numbers and some of these.

    Args:
        moments: of what came before.
        numbers: `[K, ...]`. One entry that cannot be counted leaves out all beside it.
        real: bool `[K]`, which of them count.

    Reference: Chan et al., 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances".
    """
    numbers = numbers.astype(moments.mean.dtype)
    fits = can_count(numbers).reshape(len(numbers), -1).all(axis=1)
    left_out = moments.left_out + jnp.sum(real & ~fits, dtype=jnp.uint32)
    real &= fits
    count = jnp.sum(real, dtype=jnp.uint32)
    # The moments of the new numbers. Sums of large ones that lie close together, such as 3e7 +- 20,
    # lose what tells them apart: so these are sums of distances, first from one of the numbers,
    # then from the mean so far.
    one = jnp.where(real.any(), numbers[jnp.argmax(real)], 0)[None]
    real = real.reshape(-1, *(1,) * (numbers.ndim - 1))
    many = jnp.maximum(count, 1).astype(numbers.dtype)
    sum_rows = functools.partial(jnp.sum, axis=0, keepdims=True)
    mean = one + sum_rows(jnp.where(real, numbers - one, 0)) / many
    rest = sum_rows(jnp.where(real, numbers - mean, 0)) / many
    apart = jnp.where(real, (numbers - mean) - rest, 0)
    # Each square is divided before they are added up: their sum may be no number.
    mean, rest, var = mean[0], rest[0], sum_rows(apart * (apart / many))[0]
    # Both together.
    total = moments.count + count
    part = count.astype(mean.dtype) / jnp.maximum(total, 1).astype(mean.dtype)
    apart, finer = mean - moments.mean, rest - moments.mean_rest
    wider = (var - moments.var) - moments.var_rest
    by = wider * part + (apart + finer) ** 2 * part * (1 - part)
    mean, mean_rest = _sum(moments.mean, apart * part)
    mean, mean_rest = _sum(mean, moments.mean_rest + (mean_rest + finer * part))
    var, var_rest = _sum(moments.var, moments.var_rest + by)
    return Moments(
        count=jnp.minimum(total, jnp.uint32(_MOST)),
        left_out=left_out,
        mean=mean,
        mean_rest=mean_rest,
        var=var,
        var_rest=var_rest,
    )


def can_count(numbers: jax.Array) -> jax.Array:
    """Returns True for numbers so small that squares of their distances are finite."""
    largest = float(jnp.finfo(numbers.dtype).max) ** 0.5 / 4
    return jnp.abs(numbers) < jnp.asarray(largest, numbers.dtype)  # False for NaN


def _sum(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rounded sum of two numbers, and exactly what it lacks (Knuth's two-sum)."""
    total = one + other
    second = total - one
    return total, (one - (total - second)) + (other - second)
