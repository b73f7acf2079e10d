"""Transforms of numbers, one by one."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import pytree
from jrb.transforms.leaves import Paths, check_paths, dtype_name, observations, rewritten
from jrb.types import Item, Transform, TransformContext


@pytree.component
class Cast(Transform):
    """Another dtype, such as "bfloat16".

    Attributes:
        dtype: its name.
        paths: what is cast; None for all leaves of a floating dtype.
    """

    dtype: str
    paths: Paths | None = None

    def __post_init__(self) -> None:
        check_paths("Cast", self.paths)
        object.__setattr__(self, "dtype", dtype_name("Cast", self.dtype))

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, cast."""
        dtype = jnp.dtype(self.dtype)
        if self.paths is not None:
            return rewritten(data, self.paths, "Cast", lambda name, leaf: leaf.astype(dtype))

        def cast(leaf: jax.Array) -> jax.Array:
            return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return jax.tree.map(cast, data)


@pytree.component
class Normalize(Transform):
    """(x - mean) / std, in float32 or the leaf's own wider dtype.

    Attributes:
        mean: a number, or a tuple of them along the last axis.
        std: the same; not 0.
        paths: what is normalized; None for the observation and the next.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]
    paths: Paths | None = None

    def __post_init__(self) -> None:
        check_paths("Normalize", self.paths)
        sizes = {np.size(self.mean), np.size(self.std)} - {1}
        if len(sizes) > 1:
            raise ValueError(f"Normalize: expected mean and std of one length, got {sizes}.")
        if (np.asarray(self.std) == 0).any():
            raise ValueError(f"Normalize: std: expected numbers other than 0, got {self.std}.")

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, normalized."""
        paths = observations(data, batch.keys) if self.paths is None else self.paths

        def normalize(name: str, leaf: jax.Array) -> jax.Array:
            width = max(np.size(self.mean), np.size(self.std))
            if width > 1 and leaf.shape[-1:] != (width,):
                raise ValueError(
                    f"Normalize: leaf '{name}': expected a last axis of {width}, got shape "
                    f"{leaf.shape}. Name the leaves that are meant with paths=."
                )
            wide = pytree.wide(leaf)
            mean, std = jnp.asarray(self.mean, wide.dtype), jnp.asarray(self.std, wide.dtype)
            return (wide - mean) / std

        return rewritten(data, paths, "Normalize", normalize)


@pytree.component
class Clip(Transform):
    """Between two bounds, in the leaf's own dtype.

    Attributes:
        low: the least value, None for no bound.
        high: the greatest value, None for no bound.
        paths: what is clipped; None for the reward.
    """

    low: float | None = -1.0
    high: float | None = 1.0
    paths: Paths | None = None

    def __post_init__(self) -> None:
        check_paths("Clip", self.paths)
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if not all(map(math.isfinite, bounds)):
            raise ValueError(f"Clip: expected finite bounds, got {bounds}. None is for no bound.")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"Clip: expected low <= high, got {self.low} and {self.high}.")

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, clipped."""
        paths = (batch.keys.reward,) if self.paths is None else self.paths

        def clip(name: str, leaf: jax.Array) -> jax.Array:
            low, high = self.low, self.high
            if jnp.issubdtype(leaf.dtype, jnp.integer):  # the bounds that this dtype can hold
                info = jnp.iinfo(leaf.dtype)
                low = None if low is None else min(max(math.ceil(low), info.min), info.max)
                high = None if high is None else max(min(math.floor(high), info.max), info.min)
                as_leaf = lambda bound: jnp.asarray(bound, leaf.dtype)
            else:
                as_leaf = lambda bound: jnp.asarray(bound).astype(leaf.dtype)
            low, high = (None if bound is None else as_leaf(bound) for bound in (low, high))
            return jnp.clip(leaf, low, high)

        return rewritten(data, paths, "Clip", clip)


@pytree.component
class Scale(Transform):
    """Factor * x + offset, in float32 or the leaf's own wider dtype.

    Attributes:
        factor: what is multiplied with.
        offset: what is added then.
        paths: what is scaled; None for the reward.
    """

    factor: float
    offset: float = 0.0
    paths: Paths | None = None

    def __post_init__(self) -> None:
        check_paths("Scale", self.paths)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, scaled."""
        paths = (batch.keys.reward,) if self.paths is None else self.paths
        change = lambda name, leaf: pytree.wide(leaf) * self.factor + self.offset
        return rewritten(data, paths, "Scale", change)
