"""Normalization by running statistics of what is written. E environments, T time."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrb._base import checks, pytree
from jrb._engine import dispatch, episodes, transforming
from jrb.keys import Keys, find, path_name, within
from jrb.state import Buffer, BufferState
from jrb.transforms import moments
from jrb.transforms.leaves import Paths, check_paths, rewritten
from jrb.transforms.moments import Moments
from jrb.types import Batch, Context, Item, StatefulTransform


@pytree.component
class RunningNormalize(StatefulTransform):
    """(x - mean) / sqrt(var + eps), of all that was ever written, entry by entry of a leaf.

    Items are stored as they come, and old ones are drawn by the newest statistics. Every row that
    is added counts once, and still does when a writer leaves it out, or it is overwritten, edited
    or emptied away; masked ones do not, nor a leaf in which something is not finite. A leaf of the
    next observation goes by the statistics of the observation. `normalized` does the same for what
    an agent acts on.

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
        """The moments with those of the new rows."""
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

    def apply(self, data: Item, batch: Batch) -> Item:
        """The data, normalized."""

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
    """What `RunningRewardScale` remembers.

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
    `clip`. What counts is what `RunningNormalize` says.

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

    def init(self, context: Context, spec: Item) -> Returns:
        """Returns of 0. Raises if the items have no reward, or nothing that ends an episode."""
        reward = context.keys.get(spec, "reward")
        name = path_name(context.keys.reward)
        episodes.check(spec, context.keys)
        began = _start("RunningRewardScale", name, reward)
        running = jnp.zeros((context.ring.envs, *reward.shape), began.mean.dtype)
        return Returns(moments=began, running=running)

    def on_write(
        self, context: Context, state: Returns, items: Item, mask: jax.Array, ended: jax.Array
    ) -> Returns:
        """The returns of the new rows; where one is masked, its environment stands still."""
        rewards = context.keys.get(items, "reward").astype(state.running.dtype)
        lift = lambda flags: flags.reshape(*flags.shape, *(1,) * (rewards.ndim - 2))
        real = mask & jnp.isfinite(rewards).reshape(*mask.shape, -1).all(axis=2)

        def step(running: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
            reward, real, ended = row
            here = jnp.where(real, self.discount * running + reward, running)
            return jnp.where(ended, 0, here), here

        rows = rewards, lift(real), lift(ended)
        # In shard_map a carry must vary from the start over those axes that the rows vary over.
        start = jnp.where(rows[1][0] | rows[2][0], state.running, state.running)
        running, returns = jax.lax.scan(step, start, rows)
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        return Returns(
            moments=moments.joined(state.moments, flat(returns), flat(real)), running=running
        )

    def truncate(self, state: Returns, which: jax.Array) -> Returns:
        """Returns of 0 there."""
        began = which.reshape(-1, *(1,) * (state.running.ndim - 1))
        return state.replace(running=jnp.where(began, 0, state.running))

    def adopt(self, state: Returns, old: Returns) -> Returns:
        """What was learned; the returns of running episodes where the environments are the same."""
        learned = old.moments if pytree.alike(state.moments, old.moments) else state.moments
        running = old.running if pytree.alike(state.running, old.running) else state.running
        return Returns(moments=learned, running=running)

    def apply(self, data: Item, batch: Batch) -> Item:
        """The data, with rewards scaled."""
        known = batch.state.moments
        change = lambda name, leaf: moments.scaled(leaf, known, False, self.clip, self.eps)
        return rewritten(data, (batch.keys.reward,), "RunningRewardScale", change)


def normalized(buffer: Buffer, state: BufferState, observation: Item) -> Any:
    """What an agent acts on: an observation as `RunningNormalize` gives it out.

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
    dispatch.check_state(buffer, state)
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
    """Moments of nothing, for the spec of a leaf."""
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
