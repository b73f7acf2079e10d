"""Transforms that change leaves one by one, and functions that all transforms share."""

import abc
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import checks, pytree
from jrb._util.pytree import DType
from jrb._xla import random_bits
from jrb.keys import Keys, Path, ends_of, find, leaves_at, lookup, path_name, within
from jrb.types import Item, Transform, TransformContext, Unit

Paths = tuple[Path, ...]


def check_paths(name: str, paths: Any) -> None:
    """Raises unless `paths` is a tuple of paths, or None."""
    if paths is not None and (isinstance(paths, str) or not isinstance(paths, tuple)):
        raise TypeError(f"{name}: paths: expected a tuple of paths, got {paths!r}. Write (path,).")


def check_numbers(name: str, **values: Any) -> None:
    """Raises unless each value is a finite number, or a tuple of finite numbers."""
    for option, value in values.items():
        each = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(one, numbers.Real) and math.isfinite(one) for one in each):
            raise ValueError(f"{name}: {option}: expected finite numbers, got {value!r}.")


def dtype_name(name: str, dtype: DType) -> str:
    """Returns the name of a dtype that JAX keeps; raises for others."""
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name}: dtype: expected the name of one, got {dtype!r}.") from None
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        raise TypeError(
            f"{name}: dtype: expected one that JAX keeps, got {kind}. Set jax_enable_x64."
        )
    return kind.name


def change_leaves(
    data: Item, paths: Paths, what: str, change: Callable[[str, jax.Array], jax.Array]
) -> Any:
    """Returns the data with `change(name, leaf)` for each leaf at or below one of the paths."""
    # Raise for a path without entry.
    for path in paths:
        find(data, path, what)
    leaves, structure = jax.tree.flatten(data)
    for number, name in enumerate(pytree.leaf_names(data)):
        if any(within(name, path_name(path)) for path in paths):
            leaves[number] = change(name, leaves[number])
    return structure.unflatten(leaves)


class LeafTransform(Transform):
    """Changes leaves one by one: those at `paths`, or the observations, or the reward.

    Attributes:
        paths: the leaves to change; None for the default.
        of_reward: True if the default is the reward; False for observation and next observation.
    """

    of_reward: ClassVar[bool] = False
    paths: Paths | None

    def __post_init__(self) -> None:
        check_paths(type(self).__name__, self.paths)

    def leaf_paths(self, data: Item, keys: Keys) -> Paths:
        """Returns the paths of leaves to change."""
        if self.paths is not None:
            return self.paths
        if self.of_reward:
            return (keys.reward,)
        paths = keys.observation, keys.next_observation
        present = tuple(
            path for path in paths if path is not None and lookup(data, path) is not None
        )
        # Without any, an error names the observation.
        return present or (keys.observation,)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data with changed leaves."""
        names = pytree.leaf_names(data)

        def change(name: str, leaf: jax.Array) -> jax.Array:
            # A key for each leaf, so that random changes of leaves are independent.
            key = random_bits.fold(batch.key, names.index(name))
            return self._change_leaf(name, leaf, dataclasses.replace(batch, key=key))

        return change_leaves(data, self.leaf_paths(data, batch.keys), type(self).__name__, change)

    @abc.abstractmethod
    def _change_leaf(self, name: str, leaf: jax.Array, batch: TransformContext) -> jax.Array:
        """Returns the changed leaf; `batch.key` is a key for this leaf alone."""


@pytree.component
class Cast(LeafTransform):
    """Casts leaves to another dtype, such as "bfloat16".

    Attributes:
        dtype: the name of the dtype.
        paths: the leaves to change; None for all leaves of a floating dtype.
    """

    dtype: str
    paths: Paths | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype_name("Cast", self.dtype))

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data with cast leaves."""
        if self.paths is not None:
            return super().apply(data, batch)
        is_floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
        cast = lambda leaf: leaf.astype(self.dtype) if is_floating(leaf) else leaf
        return jax.tree.map(cast, data)

    def _change_leaf(self, name: str, leaf: jax.Array, batch: TransformContext) -> jax.Array:
        return leaf.astype(self.dtype)


@pytree.component
class Normalize(LeafTransform):
    """Computes (x - mean) / std, in float32 or the leaf's own wider dtype.

    Attributes:
        mean: a number, or a tuple of numbers along the last axis.
        std: a number other than 0, or a tuple of such numbers along the last axis.
        paths: the leaves to change; None for the observation and next observation.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]
    paths: Paths | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers("Normalize", mean=self.mean, std=self.std)
        sizes = {np.size(self.mean), np.size(self.std)} - {1}
        if len(sizes) > 1:
            raise ValueError(f"Normalize: expected mean and std of one length, got {sizes}.")
        if (np.asarray(self.std) == 0).any():
            raise ValueError(f"Normalize: std: expected numbers other than 0, got {self.std}.")

    def _change_leaf(self, name: str, leaf: jax.Array, batch: TransformContext) -> jax.Array:
        width = max(np.size(self.mean), np.size(self.std))
        if width > 1 and leaf.shape[-1:] != (width,):
            raise ValueError(
                f"Normalize: leaf '{name}': expected a last axis of {width}, got shape "
                f"{leaf.shape}. Name the leaves that are meant with paths=."
            )
        wide = pytree.widen(leaf)
        mean, std = jnp.asarray(self.mean, wide.dtype), jnp.asarray(self.std, wide.dtype)
        return (wide - mean) / std


@pytree.component
class Clip(LeafTransform):
    """Clips numbers between two bounds, in the leaf's own dtype.

    Attributes:
        low: the least value, None for no bound.
        high: the greatest value, None for no bound.
        paths: the leaves to change; None for the reward.
    """

    of_reward: ClassVar[bool] = True
    low: float | None = -1.0
    high: float | None = 1.0
    paths: Paths | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if not all(map(math.isfinite, bounds)):
            raise ValueError(f"Clip: expected finite bounds, got {bounds}. None is for no bound.")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"Clip: expected low <= high, got {self.low} and {self.high}.")

    def _change_leaf(self, name: str, leaf: jax.Array, batch: TransformContext) -> jax.Array:
        low, high = self.low, self.high
        # Take bounds that an integer dtype holds: 300 would wrap in uint8, and 0.5 become 0.
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            info = jnp.iinfo(leaf.dtype)
            low = None if low is None else min(max(math.ceil(low), info.min), info.max)
            high = None if high is None else max(min(math.floor(high), info.max), info.min)
            as_leaf = lambda bound: jnp.asarray(bound, leaf.dtype)
        else:
            as_leaf = lambda bound: jnp.asarray(bound).astype(leaf.dtype)
        low, high = (None if bound is None else as_leaf(bound) for bound in (low, high))
        return jnp.clip(leaf, low, high)


@pytree.component
class Scale(LeafTransform):
    """Computes factor * x + offset, in float32 or the leaf's own wider dtype.

    Attributes:
        factor: a number.
        offset: a number.
        paths: the leaves to change; None for the reward.
    """

    of_reward: ClassVar[bool] = True
    factor: float
    offset: float = 0.0
    paths: Paths | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers("Scale", factor=self.factor, offset=self.offset)

    def _change_leaf(self, name: str, leaf: jax.Array, batch: TransformContext) -> jax.Array:
        return pytree.widen(leaf) * self.factor + self.offset


@pytree.component
class RewardToGo(Transform):
    """Adds a leaf with the discounted sum of the rewards from each row of a window on.

    At row t it is G_t = r_t + discount * G_{t+1}, up to the end of the episode; at rows that are
    not real, 0. Sums are computed in float32 or wider, and rounded once to the reward's dtype. An
    episode ends where a flag is set, and where the unit knows of an end, such as by `truncate` or
    `Keys(episode=...)`. If the reward has several leaves, such as one for each agent, each has its
    own sum. To add up beyond windows, store the sum with each step: `jrb.datasets.return_to_go`.

    Windows must be whole episodes: `Sequence(n, sample_by="whole_episodes")`. If one is longer than
    n, the sums of its first n rows are NaN. Other windows need `to="window"` or `bootstrap`.

    Attributes:
        discount: gamma, from 0 to 1.
        to: "episode"; or "window" to end the sums at the last real row of each window, too.
        bootstrap: the path of a leaf `[B, L, ...]` with the value of each row's next observation,
            in place of what follows the window, and the ends of episodes that are not terminated.
            Without a flag `terminated`, all flags count as such. None to do without.
        path: the path of the result, `[B, L, ...]` for each leaf of the reward.

    Raises:
        ValueError: when the buffer is made: samples of its unit are no whole episodes.

    Reference: Chen et al., 2021, "Decision transformer", section 3.
    """

    discount: float = 1.0
    to: Literal["episode", "window"] = "episode"
    bootstrap: Path | None = None
    path: Path = ("next", "reward_to_go")

    def __post_init__(self) -> None:
        checks.fraction("discount", self.discount)
        checks.choice("to", self.to, ("episode", "window"))
        checks.path("path", self.path)
        if self.bootstrap is not None:
            checks.path("bootstrap", self.bootstrap)

    def check(self, unit: Unit) -> None:
        """Raises unless samples of the unit are whole episodes, or sums may end before."""
        needs_end = self.to == "episode" and self.bootstrap is None
        # Units without lookback need their rows in one piece for whole episodes only.
        has_end = unit.requires_contiguous_history and not unit.lookback
        if unit.row_steps is None or (needs_end and not has_end):
            raise ValueError(
                f"RewardToGo: unit: expected whole episodes, got {unit!r}. Store the sums with the "
                "steps (jrb.datasets.return_to_go), or use jrb.Sequence(n, "
                "sample_by='whole_episodes'). For other windows say what follows them: the path of "
                "a value, bootstrap=..., or nothing, to='window'."
            )

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data with one more leaf for each leaf of the reward."""
        keys, mask = batch.keys, batch.mask
        what = f"RewardToGo: leaf '{path_name(keys.reward)}'"
        reward = keys.get(data, "reward")
        for leaf in jax.tree.leaves(reward):
            # A buffer refuses units without windows; a transform may be applied without a buffer.
            if mask.ndim != 2:
                raise ValueError(f"{what}: expected windows [B, L], got {leaf.shape}.")
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"{what}: expected a floating dtype, got {leaf.dtype}. Use Cast before."
                )
        # Flags say which ends were written; the unit also knows those of `truncate`.
        ends = jnp.zeros_like(mask) if batch.ends is None else batch.ends
        if batch.ends is None or keys.flags(data):
            ends = ends | ends_of(data, keys)
        # Rows at which a sum ends, and those of them that have no value after them.
        stops, over = ends | ~jnp.pad(mask, ((0, 0), (0, 1)))[:, 1:], ends
        # A whole episode has its end, unless the window is too short for it.
        beyond = jnp.nan if self.to == "episode" and batch.ends is not None else 0.0
        values = jax.tree.map(lambda _: jnp.float32(beyond), reward)
        # With a bootstrap, a sum ends with that value, unless the episode terminated.
        if self.bootstrap is not None:
            values = find(data, self.bootstrap, "RewardToGo: bootstrap")
            if leaves_at(data, keys.terminated):
                keys = dataclasses.replace(keys, done=None, truncated=None)
            over = ends_of(data, keys) if keys.flags(data) else jnp.zeros_like(mask)
        sums = jax.tree.map(functools.partial(self._sum_rewards, mask, stops, over), reward, values)
        return insert_leaf(data, self.path, sums, "RewardToGo")

    def _sum_rewards(
        self, mask: jax.Array, stops: jax.Array, over: jax.Array, leaf: jax.Array, beyond: jax.Array
    ) -> jax.Array:
        """Returns the sums for one leaf of the reward, `[B, L, ...]`.

        Args:
            mask: bool `[B, L]`, True for real rows.
            stops: bool `[B, L]`, True for rows at which a sum ends.
            over: bool `[B, L]`, True for those of them that no value follows.
            leaf: the rewards.
            beyond: the values that follow a row; any shape that broadcasts to the rewards.
        """
        # Masks `[B, L]` for rewards with further axes, such as one for each objective.
        lift = lambda array: array.reshape(*array.shape, *(1,) * (leaf.ndim - 2))
        wide, factor = pytree.widen(leaf), self.discount
        # A factor of 0 is left out, as 0 times infinity is NaN.
        later = factor * beyond.astype(wide.dtype) if factor else 0.0
        last = wide + jnp.where(lift(over), 0, later)
        # Scan backwards over the rows of all windows at once.
        columns = wide, jnp.where(lift(stops), last, 0), lift(mask), lift(stops)
        rows = [jnp.moveaxis(jnp.broadcast_to(it, leaf.shape), 1, 0) for it in columns]

        def step(after: jax.Array, row: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            reward, last, is_real, is_stop = row
            total = jnp.where(is_stop, last, reward + factor * after if factor else reward)
            total = jnp.where(is_real, total, 0)
            return total, total

        scanned = lax.scan(step, jnp.zeros_like(rows[0][0]), rows, reverse=True)[1]
        return jnp.moveaxis(scanned, 0, 1).astype(leaf.dtype)


def insert_leaf(data: Item, path: Path, entry: Any, what: str) -> Any:
    """Returns the data with `entry` at `path`; makes missing dicts; raises if the path is taken."""
    if lookup(data, path) is not None:
        raise ValueError(f"{what}: expected nothing at '{path_name(path)}', got an entry.")

    def insert(data: Any, first: str, *deeper: str) -> Any:
        if not isinstance(data, Mapping):
            raise TypeError(f"{what}: expected nested dicts, got {type(data).__name__}.")
        return {**data, first: insert(data.get(first, {}), *deeper) if deeper else entry}

    return insert(data, *((path,) if isinstance(path, str) else path))
