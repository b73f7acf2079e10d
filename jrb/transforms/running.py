"""Normalization by running statistics of what is written. E environments, T time."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrb._core import episode_ends, transforming, validate
from jrb._util import checks, pytree
from jrb.keys import Keys, find, path_name, within
from jrb.state import Buffer, BufferState
from jrb.transforms import moments
from jrb.transforms.leaves import Paths, check_paths, rewritten
from jrb.transforms.moments import Moments
from jrb.types import Context, Item, StatefulTransform, TransformContext


@pytree.component
class RunningNormalize(StatefulTransform):
    """(x - mean) / sqrt(var + eps), of all that was ever written, entry by entry of a leaf.

    Items are stored as they come, and old ones are drawn by the newest statistics. Every row that
    is added counts once, and still does when a writer leaves it out, or it is overwritten, edited
    or emptied away; masked ones do not. A leaf in which an entry is not finite, or beyond 4.6e18 in
    float32, is left out and counted in `left_out` of the state. A leaf of the next observation goes
    by the statistics of the observation. `normalized` does the same for what an agent acts on.

    Attributes:
        paths: whose statistics are kept; None for the observation.
        center: whether the mean is subtracted.
        clip: the largest result, None for no bound.
        eps: what is added to the variance.

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
        _check_numbers("RunningNormalize", self.clip, self.eps)

    def init(self, context: Context, spec: Item) -> dict[str, Moments]:
        """Moments of each leaf, by its name. Raises if there is none, or one of other numbers."""
        found = self._leaves(spec, context.keys)
        return {name: _start("RunningNormalize", name, leaf) for name, leaf in found.items()}

    def on_write(
        self,
        context: Context,
        state: dict[str, Moments],
        items: Item,
        mask: jax.Array,
        ended: jax.Array,
    ) -> dict[str, Moments]:
        """Returns the moments with the new rows."""
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        found = self._leaves(items, context.keys)
        return {
            name: moments.joined(before, flat(found[name]), flat(mask))
            for name, before in state.items()
        }

    def _leaves(self, items: Item, keys: Keys) -> dict[str, Any]:
        """The leaves whose statistics are kept, by name."""
        paths = (keys.observation,) if self.paths is None else self.paths
        for path in paths:
            find(items, path, "RunningNormalize")
        named = zip(pytree.leaf_names(items), jax.tree.leaves(items), strict=True)
        is_meant = lambda name: any(within(name, path_name(path)) for path in paths)
        return {name: leaf for name, leaf in named if is_meant(name)}

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, normalized."""

        def change(path: tuple, leaf: jax.Array) -> jax.Array:
            name = pytree.leaf_name(path)
            return self.of_leaf(batch.state, batch.keys, name, leaf)

        return jax.tree_util.tree_map_with_path(change, data)

    def of_leaf(
        self, state: dict[str, Moments], keys: Keys, name: str, leaf: jax.Array
    ) -> jax.Array:
        """A leaf `[..., *item]` of this name, normalized if there are statistics for it."""
        found = state.get(name) or state.get(keys.twin(name) or "")
        if found is None:
            return leaf
        return moments.scaled(leaf, found, self.center, self.clip, self.eps)


class Returns(pytree.State):
    """The state of `RunningRewardScale` for one reward.

    Attributes:
        moments: of the returns of single steps.
        running: `[E, ...]`, the discounted sum of the rewards of the running episode.
    """

    moments: Moments
    running: jax.Array


@pytree.component
class RunningRewardScale(StatefulTransform):
    """Rewards divided by the running standard deviation of the discounted return, not centered.

    The return of an environment is G = discount * G + reward, from 0 in every episode. The reward
    is scaled where it is drawn: an n-step return is scaled as a whole, which is the same but for
    `clip`. What counts is what `RunningNormalize` says. Where the reward has several leaves, such
    as one for each agent, each has a return and a scale of its own.

    Attributes:
        discount: gamma, from 0 to 1.
        clip: the largest result, None for no bound.
        eps: what is added to the variance.

    Reference: Engstrom et al., 2020, "Implementation matters in deep policy gradients", section 3.
    """

    unbound: ClassVar[tuple[str, ...]] = ("clip", "eps")

    discount: float = 0.99
    clip: float | None = 10.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        checks.fraction("discount", self.discount)
        _check_numbers("RunningRewardScale", self.clip, self.eps)

    def init(self, context: Context, spec: Item) -> Any:
        """`Returns` of 0, for each leaf of the reward. Raises without one, or without flags."""
        episode_ends.check(spec, context.keys)
        prefix, envs = path_name(context.keys.reward), context.ring.envs

        def start(path: tuple, reward: Any) -> Returns:
            inner = pytree.leaf_name(path)
            name = prefix if inner == "." else f"{prefix}/{inner}"
            began = _start("RunningRewardScale", name, reward)
            running = jnp.zeros((envs, *reward.shape), began.mean.dtype)
            return Returns(moments=began, running=running)

        return jax.tree_util.tree_map_with_path(start, context.keys.get(spec, "reward"))

    def on_write(
        self, context: Context, state: Any, items: Item, mask: jax.Array, ended: jax.Array
    ) -> Any:
        """The returns of the new rows; where one is masked, its environment stands still."""
        learn = lambda reward, its: self._with_rewards(its, reward, mask, ended)
        return jax.tree.map(learn, context.keys.get(items, "reward"), state)

    def _with_rewards(
        self, state: Returns, rewards: jax.Array, mask: jax.Array, ended: jax.Array
    ) -> Returns:
        """Returns the state with one leaf of the reward, `[T, E, ...]`."""
        rewards = rewards.astype(state.running.dtype)
        lift = lambda flags: flags.reshape(*flags.shape, *(1,) * (rewards.ndim - 2))
        fits = moments.can_count(rewards).reshape(*mask.shape, -1).all(axis=2)

        def step(running: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
            reward, real, ended = row
            here = jnp.where(real, self.discount * running + reward, running)
            return jnp.where(ended, 0, here), here

        rows = rewards, lift(mask & fits), lift(ended)
        # In shard_map a carry must vary from the start over those axes that the rows vary over.
        start = jnp.where(rows[1][0] | rows[2][0], state.running, state.running)
        running, returns = jax.lax.scan(step, start, rows)
        returns = jnp.where(lift(fits), returns, jnp.nan)  # which the moments leave out, and count
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        known = moments.joined(state.moments, flat(returns), flat(mask))
        return Returns(moments=known, running=running)

    def truncate(self, state: Any, which: jax.Array) -> Any:
        """Returns of 0 there."""

        def begin(its: Returns) -> Returns:
            began = which.reshape(-1, *(1,) * (its.running.ndim - 1))
            return its.replace(running=jnp.where(began, 0, its.running))

        return jax.tree.map(begin, state, is_leaf=_is_returns)

    def import_state(self, state: Any, old: Any) -> Any:
        """Takes over what was learned, and running returns if the environments are the same."""
        own, others = (jax.tree.flatten(each, is_leaf=_is_returns) for each in (state, old))
        if own[1] != others[1]:
            return state

        def one(its: Returns, old: Returns) -> Returns:
            learned = old.moments if pytree.alike(its.moments, old.moments) else its.moments
            running = old.running if pytree.alike(its.running, old.running) else its.running
            return Returns(moments=learned, running=running)

        return jax.tree.unflatten(own[1], list(map(one, own[0], others[0])))

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, with rewards scaled."""
        known = iter(jax.tree.leaves(batch.state, is_leaf=_is_returns))  # in the order of leaves

        def change(name: str, leaf: jax.Array) -> jax.Array:
            return moments.scaled(leaf, next(known).moments, False, self.clip, self.eps)

        return rewritten(data, (batch.keys.reward,), "RunningRewardScale", change)


def _is_returns(node: Any) -> bool:
    return isinstance(node, Returns)


def normalized(buffer: Buffer, state: BufferState, observation: Item) -> Any:
    """Returns an observation for an agent to act on, normalized as `RunningNormalize` does.

    Args:
        buffer: with `RunningNormalize` among its transforms; what others do is left out.
        state: is only read.
        observation: as it is stored, with any axes in front, leaves `[..., *item]`.

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
    pairs = zip(transforming.learning(buffer.transforms), state.transforms, strict=True)
    found = [(each, its) for each, its in pairs if isinstance(each, RunningNormalize)]
    if not found:
        raise ValueError(
            "normalized: expected a buffer with jrb.transforms.RunningNormalize() among its "
            f"transforms, got {buffer.transforms!r}."
        )
    prefix = path_name(buffer.keys.observation)

    def change(path: tuple, leaf: Any) -> jax.Array:
        inner, leaf = pytree.leaf_name(path), jnp.asarray(leaf)
        name = prefix if inner == "." else f"{prefix}/{inner}"
        for transform, its in found:
            leaf = transform.of_leaf(its, buffer.keys, name, leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(change, observation)


def _start(what: str, name: str, leaf: Any) -> Moments:
    """Returns moments of no numbers, for the spec of a leaf."""
    kind = pytree.dtype_of(leaf)
    real = (jnp.floating, jnp.integer, jnp.bool_)
    if kind is None or not any(jnp.issubdtype(kind, each) for each in real):
        raise TypeError(
            f"{what}: leaf '{name}': expected real numbers, got {leaf if kind is None else kind}. "
            "Name the leaves that are meant, with paths= or keys=."
        )
    wide = jnp.issubdtype(kind, jnp.floating) and jnp.dtype(kind).itemsize > 4
    return moments.start(leaf.shape, kind if wide else jnp.float32)


def _check_numbers(what: str, clip: Any, eps: Any) -> None:
    for name, value in {"clip": clip, "eps": eps}.items():
        if name == "clip" and value is None:
            continue
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{what}: {name}: expected a number above 0, got {value!r}.")
