"""Normalization by running statistics of the items that are written. E environments, T time."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jrb._core import transforming, validate
from jrb._util import checks, pytree
from jrb.keys import Keys, check_ends, find, path_name, within
from jrb.state import Buffer, BufferState
from jrb.transforms.leaves import Paths, change_leaves, check_paths
from jrb.types import Context, Item, StatefulTransform, TransformContext

_MOST = 2**31  # the greatest count; beyond it, old numbers weigh less and less


class Moments(pytree.State):
    """The mean and the variance of all numbers so far.

    After very many numbers, one more changes them by less than the precision of a float. Each is
    therefore kept as a sum of two floats; `mean_rest` and `var_rest` have the low-order parts.

    Rows with an entry that is not finite, or so large that squared distances may overflow (from
    2^62, 4.6e18, on in float32), are left out.

    Attributes:
        count: uint32 `[]`, the number of rows counted, up to 2^31.
        left_out: uint32 `[]`, the number of rows left out, modulo 2^32.
        mean: `[...]`, float32, or float64 for leaves of that dtype.
        mean_rest: `[...]`, the low-order part of the mean.
        var: `[...]`, the mean squared distance from the mean.
        var_rest: `[...]`, the low-order part of the variance.
    """

    count: jax.Array
    left_out: jax.Array
    mean: jax.Array
    mean_rest: jax.Array
    var: jax.Array
    var_rest: jax.Array

    @classmethod
    def start(cls, shape: tuple[int, ...], dtype: pytree.DType) -> "Moments":
        """Returns the moments before any number."""
        zeros = {name: jnp.zeros(shape, dtype) for name in ("mean", "mean_rest", "var", "var_rest")}
        return cls(count=jnp.zeros((), jnp.uint32), left_out=jnp.zeros((), jnp.uint32), **zeros)

    def extend(self, numbers: jax.Array, real: jax.Array) -> "Moments":
        """Returns the moments of all earlier numbers and of rows in `numbers` that are `real`.

        Args:
            numbers: `[K, ...]`; a row with an entry that cannot be counted is left out.
            real: bool `[K]`, True for rows that count.

        Reference: Chan et al., 1979, "Updating formulae and a pairwise algorithm for computing
        sample variances".
        """
        numbers = numbers.astype(self.mean.dtype)
        # Leave out the rows that cannot be counted.
        fits = _can_count(numbers).reshape(len(numbers), -1).all(axis=1)
        left_out = self.left_out + jnp.sum(real & ~fits, dtype=jnp.uint32)
        real &= fits
        count = jnp.sum(real, dtype=jnp.uint32)
        # The moments of the new numbers. In sums of large ones that are close together, as 3e7 +-
        # 20, their differences are rounded off: so these are sums of distances, first from one of
        # the numbers, then from the mean so far.
        one = jnp.where(real.any(), numbers[jnp.argmax(real)], 0)[None]
        real = real.reshape(-1, *(1,) * (numbers.ndim - 1))
        many = jnp.maximum(count, 1).astype(numbers.dtype)
        mean = one + _sum_rows(jnp.where(real, numbers - one, 0)) / many
        mean_rest = _sum_rows(jnp.where(real, numbers - mean, 0)) / many
        distance = jnp.where(real, (numbers - mean) - mean_rest, 0)
        # Each square is divided before they are added up, as their sum could overflow.
        var = _sum_rows(distance * (distance / many))[0]
        # Merge both as in Chan et al., but with means in place of sums, which would grow forever.
        total = self.count + count
        share = count.astype(mean.dtype) / jnp.maximum(total, 1).astype(mean.dtype)
        shift, finer_shift = mean[0] - self.mean, mean_rest[0] - self.mean_rest
        wider = (var - self.var) - self.var_rest
        var_shift = wider * share + (shift + finer_shift) ** 2 * share * (1 - share)
        mean, mean_rest = _add_exactly(self.mean, shift * share)
        mean, mean_rest = _add_exactly(mean, self.mean_rest + (mean_rest + finer_shift * share))
        var, var_rest = _add_exactly(self.var, self.var_rest + var_shift)
        return Moments(
            count=jnp.minimum(total, jnp.uint32(_MOST)),
            left_out=left_out,
            mean=mean,
            mean_rest=mean_rest,
            var=var,
            var_rest=var_rest,
        )

    def scale(self, leaf: jax.Array, center: bool, clip: float | None, eps: float) -> jax.Array:
        """Returns (leaf - mean) / sqrt(var + eps), between -clip and clip.

        Finite entries stay finite, also without a bound; before any number, the leaf is only
        clipped. The last axes of `leaf` are those of the moments.
        """
        wide = leaf.astype(self.mean.dtype)
        lift = lambda array: array.reshape((1,) * (leaf.ndim - array.ndim) + array.shape)
        # A smaller `eps` is 0 in this dtype.
        least = jnp.finfo(wide.dtype).tiny
        # Rounding may leave a variance of constants a little below 0.
        spread = jnp.sqrt(jnp.maximum(jnp.maximum(self.var, 0) + eps, least))
        spread = lift(jnp.where(self.count > 0, spread, 1))
        centered = wide - lift(self.mean) - lift(self.mean_rest) if center else wide
        result = centered / spread
        # Without a bound, a quotient may overflow.
        if clip is None:
            largest = jnp.finfo(wide.dtype).max
            return jnp.where(jnp.isfinite(wide), jnp.clip(result, -largest, largest), result)
        return jnp.clip(result, -clip, clip)


def _sum_rows(rows: jax.Array) -> jax.Array:
    """Returns the sum over the first axis, `[1, ...]`; zeros behind the rows do not change a bit.

    So a write that is padded with masked rows gives the statistics of one that is not.
    """
    while len(rows) > 1:
        rows = jnp.concatenate([rows, jnp.zeros_like(rows[: len(rows) % 2])])
        rows = lax.optimization_barrier(rows[0::2] + rows[1::2])
    return rows


class _Running(StatefulTransform):
    """A transform that divides by a running standard deviation.

    Attributes:
        clip: the largest absolute value of a result; None for no bound.
        eps: a number that is added to the variance.
    """

    clip: float | None
    eps: float

    def __post_init__(self) -> None:
        for name, value in {"clip": self.clip, "eps": self.eps}.items():
            if name == "clip" and value is None:
                continue
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(
                    f"{type(self).__name__}: {name}: expected a number above 0, got {value!r}."
                )

    def _start_moments(self, name: str, leaf: Any) -> Moments:
        """Returns moments before any number, for the spec of a leaf."""
        kind = getattr(leaf, "dtype", None)
        real = (jnp.floating, jnp.integer, jnp.bool_)
        if kind is None or not any(jnp.issubdtype(kind, each) for each in real):
            raise TypeError(
                f"{type(self).__name__}: leaf '{name}': expected real numbers, got "
                f"{leaf if kind is None else kind}. Name the leaves that are meant, with paths= or "
                "keys=."
            )
        # Leaves of float64 get moments of that dtype.
        is_wide = jnp.issubdtype(kind, jnp.floating) and jnp.dtype(kind).itemsize > 4
        return Moments.start(leaf.shape, kind if is_wide else jnp.float32)


@pytree.component
class RunningNormalize(_Running):
    """Computes (x - mean) / sqrt(var + eps) for each entry of a leaf, over all rows ever written.

    Items are stored unchanged; when they are drawn, the newest statistics normalize them. Every row
    that is added counts once, even if the writer leaves it out, or it is overwritten, edited or
    emptied later; masked rows do not count. A row of a leaf in which an entry is not finite, or
    beyond 4.6e18 in float32, is left out and counted in `left_out` of the state. Leaves of the next
    observation use the statistics of the observation. To normalize what an agent acts on, call
    `normalized`.

    Attributes:
        paths: the leaves to normalize; None for the observation.
        center: if True, the mean is subtracted.
        clip: the largest absolute value of a result; None for no bound.
        eps: a number that is added to the variance.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> running = jrb.transforms.RunningNormalize()
        >>> buffer = jrb.ReplayBuffer(100, batch_size=4, transforms=(running,))
        >>> state = buffer.init({"observation": 0.0})
        >>> state = buffer.extend(state, {"observation": jnp.array([3.0, 5.0])})
        >>> state.transforms[0]["observation"].mean.tolist()
        4.0
        >>> sorted(set(buffer.sample(state, jax.random.key(0), 64).data["observation"].tolist()))
        [-1.0, 1.0]
    """

    unbound: ClassVar[tuple[str, ...]] = ("center", "clip", "eps")

    paths: Paths | None = None
    center: bool = True
    clip: float | None = 10.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_paths("RunningNormalize", self.paths)
        checks.flag("center", self.center)
        super().__post_init__()

    def init(self, context: Context, spec: Item) -> dict[str, Moments]:
        """Returns moments of each leaf, by name; raises if a path has no leaf of real numbers."""
        leaves = self._leaves(spec, context.keys)
        return {name: self._start_moments(name, leaf) for name, leaf in leaves.items()}

    def on_write(
        self,
        context: Context,
        state: dict[str, Moments],
        items: Item,
        mask: jax.Array,
        ended: jax.Array,
    ) -> dict[str, Moments]:
        """Returns the moments after the new rows were counted."""
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        leaves = self._leaves(items, context.keys)
        return {
            name: before.extend(flat(leaves[name]), flat(mask)) for name, before in state.items()
        }

    def _leaves(self, items: Item, keys: Keys) -> dict[str, Any]:
        """Returns the leaves whose statistics are kept, by name."""
        paths = (keys.observation,) if self.paths is None else self.paths
        for path in paths:
            find(items, path, "RunningNormalize")
        named = zip(pytree.leaf_names(items), jax.tree.leaves(items), strict=True)
        is_meant = lambda name: any(within(name, path_name(path)) for path in paths)
        return {name: leaf for name, leaf in named if is_meant(name)}

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the normalized data."""
        change = lambda path, leaf: self.of_leaf(
            batch.state, batch.keys, pytree.leaf_name(path), leaf
        )
        return jax.tree_util.tree_map_with_path(change, data)

    def of_leaf(
        self, state: dict[str, Moments], keys: Keys, name: str, leaf: jax.Array
    ) -> jax.Array:
        """Returns a leaf `[..., *item]`, normalized if there are statistics for its name."""
        # A leaf of the next observation has the statistics of its twin in the observation.
        moments = state.get(name) or state.get(keys.twin(name) or "")
        return leaf if moments is None else moments.scale(leaf, self.center, self.clip, self.eps)


class Returns(pytree.State):
    """The state of `RunningRewardScale` for one reward.

    Attributes:
        moments: the moments of the returns at all steps.
        running: `[E, ...]`, the discounted sum of the rewards of the running episode.
    """

    moments: Moments
    running: jax.Array


@pytree.component
class RunningRewardScale(_Running):
    """Divides rewards by the running standard deviation of the discounted return.

    The return of an environment is G = discount * G + reward at each step, from 0 in every episode.
    Rewards are scaled when they are drawn, and not centered: an n-step return is scaled as a whole,
    which differs only by `clip`. Rows count as for `RunningNormalize`. If the reward has several
    leaves, such as one for each agent, each has its own return and scale.

    Attributes:
        discount: gamma, from 0 to 1.
        clip: the largest absolute value of a result; None for no bound.
        eps: a number that is added to the variance.

    Reference: Engstrom et al., 2020, "Implementation matters in deep policy gradients", section 3.
    """

    unbound: ClassVar[tuple[str, ...]] = ("clip", "eps")

    discount: float = 0.99
    clip: float | None = 10.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        checks.fraction("discount", self.discount)
        super().__post_init__()

    def init(self, context: Context, spec: Item) -> Any:
        """Returns empty `Returns` for each leaf of the reward; raises without reward or flags."""
        check_ends(spec, context.keys)
        prefix, envs = path_name(context.keys.reward), context.ring.envs

        def start(path: tuple, reward: Any) -> Returns:
            inner = pytree.leaf_name(path)
            moments = self._start_moments(prefix if inner == "." else f"{prefix}/{inner}", reward)
            running = jnp.zeros((envs, *reward.shape), moments.mean.dtype)
            return Returns(moments=moments, running=running)

        return jax.tree_util.tree_map_with_path(start, context.keys.get(spec, "reward"))

    def on_write(
        self, context: Context, state: Any, items: Item, mask: jax.Array, ended: jax.Array
    ) -> Any:
        """Counts the returns of the new rows; masked rows do not change a return."""

        def count_rewards(rewards: jax.Array, state: Returns) -> Returns:
            rewards = rewards.astype(state.running.dtype)
            lift = lambda flags: flags.reshape(*flags.shape, *(1,) * (rewards.ndim - 2))
            flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
            fits = _can_count(rewards).reshape(*mask.shape, -1).all(axis=2)

            def step(running: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
                reward, is_real, is_end = row
                # Masked rows, and rewards that cannot be counted, do not change the return.
                total = jnp.where(is_real, self.discount * running + reward, running)
                return jnp.where(is_end, 0, total), total

            rows = rewards, lift(mask & fits), lift(ended)
            # In shard_map a carry must vary from the start over the axes that rows vary over.
            start = jnp.where(rows[1][0] | rows[2][0], state.running, state.running)
            running, returns = jax.lax.scan(step, start, rows)
            # NaN is left out of the moments, and counted there.
            returns = jnp.where(lift(fits), returns, jnp.nan)
            moments = state.moments.extend(flat(returns), flat(mask))
            return Returns(moments=moments, running=running)

        return jax.tree.map(count_rewards, context.keys.get(items, "reward"), state)

    def truncate(self, state: Any, which: jax.Array) -> Any:
        """Sets the running returns of environments `which`, bool `[E]`, to 0."""

        def reset(one: Returns) -> Returns:
            is_reset = which.reshape(-1, *(1,) * (one.running.ndim - 1))
            return one.replace(running=jnp.where(is_reset, 0, one.running))

        return jax.tree.map(reset, state, is_leaf=_is_returns)

    def import_state(self, state: Any, old: Any) -> Any:
        """Takes over the moments, and the running returns if `num_envs` is the same."""
        own, others = (jax.tree.flatten(each, is_leaf=_is_returns) for each in (state, old))
        # The rewards have other leaves, so the old moments do not fit.
        if own[1] != others[1]:
            return state
        # With another number of environments, the running returns start at 0.
        newest = lambda own, old: old if pytree.are_alike(own, old) else own
        pairs = zip(own[0], others[0], strict=True)
        merged = [
            Returns(
                moments=newest(one.moments, two.moments), running=newest(one.running, two.running)
            )
            for one, two in pairs
        ]
        return jax.tree.unflatten(own[1], merged)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data with scaled rewards."""
        # The states are in the order of the leaves of the reward.
        states = iter(jax.tree.leaves(batch.state, is_leaf=_is_returns))
        change = lambda name, leaf: next(states).moments.scale(leaf, False, self.clip, self.eps)
        return change_leaves(data, (batch.keys.reward,), "RunningRewardScale", change)


def _is_returns(node: Any) -> bool:
    return isinstance(node, Returns)


def normalized(buffer: Buffer, state: BufferState, observation: Item) -> Any:
    """Returns an observation for an agent to act on, normalized as `RunningNormalize` does.

    Args:
        buffer: a buffer with a `RunningNormalize`; its other transforms are not applied.
        state: is only read.
        observation: observations as they are stored, with any leading axes, leaves `[..., *item]`.

    Raises:
        ValueError: the buffer has no such transform.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> from jrb import transforms
        >>> buffer = jrb.ReplayBuffer(100, transforms=(transforms.RunningNormalize(),))
        >>> state = buffer.init({"observation": 0.0})
        >>> state = buffer.extend(state, {"observation": jnp.array([2.0, 4.0, 6.0])})
        >>> transforms.normalized(buffer, state, jnp.array([4.0, 4.0])).tolist()
        [0.0, 0.0]
    """
    validate.check_state(buffer, state)
    pairs = zip(transforming.stateful_transforms(buffer.transforms), state.transforms, strict=True)
    running = [(one, its) for one, its in pairs if isinstance(one, RunningNormalize)]
    if not running:
        raise ValueError(
            "normalized: expected a buffer with jrb.transforms.RunningNormalize() among its "
            f"transforms, got {buffer.transforms!r}."
        )
    prefix = path_name(buffer.keys.observation)

    def change(path: tuple, leaf: Any) -> jax.Array:
        inner, leaf = pytree.leaf_name(path), jnp.asarray(leaf)
        name = prefix if inner == "." else f"{prefix}/{inner}"
        # Apply all such transforms, in the order in which samples pass them.
        for transform, its in running:
            leaf = transform.of_leaf(its, buffer.keys, name, leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(change, observation)


def _can_count(numbers: jax.Array) -> jax.Array:
    """Returns True for numbers so small that squares of their distances cannot overflow."""
    # The comparison is False for NaN.
    largest = float(jnp.finfo(numbers.dtype).max) ** 0.5 / 4
    return jnp.abs(numbers) < jnp.asarray(largest, numbers.dtype)


def _add_exactly(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rounded sum of two numbers, and its exact rounding error (Knuth's two-sum)."""
    total = one + other
    # The part of `other` that got into the total; the error is all that is missing of both.
    second = total - one
    return total, (one - (total - second)) + (other - second)
