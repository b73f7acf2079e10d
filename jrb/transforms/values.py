"""Transforms of numbers, one by one."""

import jax
import jax.numpy as jnp
import numpy as np

from jrb import pytree
from jrb.transforms.leaves import Paths, check_paths, observations, rewritten
from jrb.types import Batch, Item


@pytree.component
class Cast:
    """Another dtype, such as "bfloat16".

    Attributes:
        dtype: its name.
        paths: what is cast; None for all leaves of a floating dtype.
    """

    dtype: str
    paths: Paths | None = None

    def __post_init__(self) -> None:
        check_paths("Cast", self.paths)
        jnp.dtype(self.dtype)

    def apply(self, data: Item, batch: Batch) -> Item:
        """The data, cast."""
        del batch
        dtype = jnp.dtype(self.dtype)
        if self.paths is not None:
            return rewritten(data, self.paths, "Cast", lambda name, leaf: leaf.astype(dtype))

        def cast(leaf: jax.Array) -> jax.Array:
            return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return jax.tree.map(cast, data)


@pytree.component
class Normalize:
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
        if (np.asarray(self.std) == 0).any():
            raise ValueError(f"Normalize: std: expected numbers other than 0, got {self.std}.")

    def apply(self, data: Item, batch: Batch) -> Item:
        """The data, normalized."""
        paths = observations(data, batch.keys) if self.paths is None else self.paths

        def normalize(name: str, leaf: jax.Array) -> jax.Array:
            width = max(np.size(self.mean), np.size(self.std))
            if width > 1 and leaf.shape[-1:] != (width,):
                raise ValueError(
                    f"Normalize: leaf '{name}': expected a last axis of {width}, got shape "
                    f"{leaf.shape}. Name the leaves that are meant with paths=."
                )
            wide = _float(leaf)
            mean, std = jnp.asarray(self.mean, wide.dtype), jnp.asarray(self.std, wide.dtype)
            return (wide - mean) / std

        return rewritten(data, paths, "Normalize", normalize)


@pytree.component
class Clip:
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
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"Clip: expected low <= high, got {self.low} and {self.high}.")

    def apply(self, data: Item, batch: Batch) -> Item:
        """The data, clipped."""
        paths = (batch.keys.reward,) if self.paths is None else self.paths

        def clip(name: str, leaf: jax.Array) -> jax.Array:
            del name
            return jnp.clip(leaf, self.low, self.high).astype(leaf.dtype)

        return rewritten(data, paths, "Clip", clip)


@pytree.component
class Scale:
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

    def apply(self, data: Item, batch: Batch) -> Item:
        """The data, scaled."""
        paths = (batch.keys.reward,) if self.paths is None else self.paths
        change = lambda name, leaf: _float(leaf) * self.factor + self.offset
        return rewritten(data, paths, "Scale", change)


def _float(leaf: jax.Array) -> jax.Array:
    """The leaf, as float32 if it is of no floating dtype."""
    return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(jnp.float32)
