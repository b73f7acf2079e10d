"""Functions that make a buffer and an example item from an environment, and items from steps.

E environments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jrb.buffer import BufferOptions, ReplayBuffer
from jrb.types import Item
from jrb.writers import PerEnvironment

_FINAL = ("final_obs", "final_observation")
"""The key of the last observation of an episode in `info`: gymnasium's, and gymnax's."""


def transition(
    observation: Item,
    action: Item,
    next_observation: Item,
    reward: Any,
    terminated: Any = None,
    truncated: Any = None,
    info: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    done: Any = None,
    **leaves: Any,
) -> dict[str, Any]:
    """Returns the item for one step of an environment or of E environments, keyed as `jrb.Keys()`.

    The arguments after `action` are in the order in which gymnasium's `step` returns them, so
    `jrb.transition(observation, action, *env.step(action))` is the row to `add`. Environments that
    reset in the step in which an episode ends return the first observation of the next episode; the
    last one of the old episode is then taken from `info`: `final_obs` (gymnasium, `SAME_STEP`) or
    `final_observation` (gymnax). With gymnasium's `NEXT_STEP`, the step after an end is no
    transition, and nothing in it says so: pass `mask=~ended` to `add`, where `ended` are the flags
    of the step before. Buffers that `from_gymnasium` makes for such environments require it. With
    `DISABLED`, and with a single environment, you reset environments yourself.

    `observation` must have the values from before the step. Environments that write into the same
    array in each step (`SyncVectorEnv(..., copy=False)`) have overwritten them: pass a copy.

    Args:
        observation: the observation before the action, leaves `[...]` or `[E, ...]`.
        action: the action of the policy.
        next_observation: the observation that the step returned.
        reward: `[]` or `[E]`; a dict of agents if there are several.
        terminated: bool `[]` or `[E]`, True if a terminal state was reached; None for no such leaf.
        truncated: bool, True if the episode was cut off, such as by a time limit; or None.
        info: the last result of the step: a dict, or a list of E of them (`DictInfoToList`).
        done: one flag in place of `terminated` and `truncated`, for environments with only one.
        leaves: further leaves of the item, such as `hidden=...`.

    Raises:
        ValueError: no flag is given.

    Example:
        >>> import jrb
        >>> row = jrb.transition([0.0], 1, [0.5], 1.0, False, False, {}, log_prob=-0.7)
        >>> row["log_prob"], sorted(row["next"])
        (-0.7, ['observation', 'reward', 'terminated', 'truncated'])
    """
    flags = {"terminated": terminated, "truncated": truncated, "done": done}
    flags = {name: flag for name, flag in flags.items() if flag is not None}
    if not flags:
        raise ValueError("transition: expected terminated, truncated or done, got none of them.")
    last = _last_observation(next_observation, info or {})
    after = {"observation": last, "reward": reward, **flags}
    return {"observation": observation, "action": action, "next": after, **leaves}


def _last_observation(observation: Item, info: Any) -> Item:
    """Returns the observation after the action, from `info` for environments that were reset."""
    if isinstance(info, Mapping):
        name = next((name for name in _FINAL if name in info), None)
        if name is None:
            return observation
        # A vector of gymnasium has an array of objects, or arrays in which some rows are valid.
        finals, is_final = info[name], info.get(f"_{name}")
        if not (isinstance(finals, np.ndarray) and finals.dtype.hasobject):
            if is_final is None:
                return finals  # gymnax gives those of all environments
            row = lambda env: jax.tree.map(lambda rows: rows[env], finals)
            finals = [row(env) if flag else None for env, flag in enumerate(is_final)]
    else:
        finals = [next((one[name] for name in _FINAL if name in one), None) for one in info]
    # Write into a copy, as the environment may use its array again.
    observation = jax.tree.map(np.array, observation)
    for env, final in enumerate(finals):
        if final is not None:
            jax.tree.map(lambda rows, row: rows.__setitem__(env, row), observation, final)  # noqa: B023
    return observation


def from_gymnasium(
    env: Any, capacity: int, *, extra: Item | None = None, **options: Unpack[BufferOptions]
) -> tuple[ReplayBuffer, dict[str, Any]]:
    """Returns a buffer for a gymnasium environment, or a vector of E of them, and an example item.

    `num_envs` and the leaves come from the environment; float64 and int64 are converted
    (`cast=True`).

    If a vector of environments resets in the step after an end (`NEXT_STEP`, gymnasium's default),
    or does not say when, that step is no transition. The writer is then `PerEnvironment()`, and the
    buffer has `requires_mask=True`: `add` and `extend` raise without `mask=~ended`, bool `[E]`,
    with `ended = terminated | truncated` of the step before. A single environment in gymnasium's
    wrapper `Autoreset` is the same, with a mask `[]`. With `AutoresetMode.SAME_STEP` or `DISABLED`,
    every step is stored. If you know better, pass `requires_mask=False`.

    Args:
        env: a `gymnasium.Env` or `gymnasium.vector.VectorEnv`.
        capacity: N, for all environments together; rounded down to a multiple of E.
        extra: further leaves of one item, such as `{"hidden": jnp.zeros(128)}`.
        options: further arguments of `jrb.ReplayBuffer`: `batch_size`, `sampler`, `unit`, ...

    Returns:
        The buffer, and the example to pass to `init`: zeros, without the axis of environments.

    Raises:
        TypeError: the elements of a space are not arrays, such as those of `Text` or `Graph`.

    Example:
        >>> import gymnasium, jrb, numpy as np
        >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=4)
        >>> buffer, example = jrb.from_gymnasium(envs, 10_000, batch_size=32)
        >>> buffer.num_envs, buffer.writer, buffer.requires_mask
        (4, PerEnvironment(), True)
        >>> methods = jrb.jitted(buffer)
        >>> state, ended = methods.init(example), np.zeros(4, bool)
        >>> observation, _ = envs.reset(seed=0)
        >>> for _ in range(20):
        ...     stepped = envs.step(action := envs.action_space.sample())
        ...     row = jrb.transition(observation, action, *stepped)
        ...     state = methods.add(state, row, mask=~ended)
        ...     observation, ended = stepped[0], stepped[2] | stepped[3]
    """
    # Vectors have spaces of a single environment under other names.
    num_envs = getattr(env, "num_envs", None)
    vector = "" if num_envs is None else "single_"
    observation = _zeros_of_space(getattr(env, f"{vector}observation_space"), "observation")
    action = _zeros_of_space(getattr(env, f"{vector}action_space"), "action")
    defaults: dict[str, Any] = {"num_envs": num_envs, "cast": True}
    if _resets_in_next_step(env, num_envs is not None):
        defaults["requires_mask"] = True
        defaults |= {} if num_envs is None else {"writer": PerEnvironment()}
    example = transition(
        observation, action, observation, jnp.zeros(()), jnp.zeros((), bool), jnp.zeros((), bool)
    )
    # The user's options come last, and override the defaults.
    defaults |= options
    return ReplayBuffer.rounded(capacity, **defaults), example | dict(extra or {})


def _resets_in_next_step(env: Any, is_vector: bool) -> bool:
    """Returns True if the step after an end resets the environment, or if a vector may do so."""
    # A single environment resets itself only in a wrapper: look for it.
    if not is_vector:
        while env is not None and type(env).__name__ != "Autoreset":
            env = getattr(env, "env", None)
        return env is not None
    # Vectors of one class of environments share one dict of metadata, which has the mode of the
    # vector that was made last: the attribute comes first.
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    mode = getattr(getattr(env, "unwrapped", env), "autoreset_mode", mode)
    # Versions of gymnasium spell it as an enum, its name or its value.
    return str(getattr(mode, "name", mode)).upper().replace("_", "") in ("NONE", "NEXTSTEP")


def _zeros_of_space(space: Any, path: str) -> Item:
    """Returns zeros of one element of a space of gymnasium, in the dtype that JAX keeps."""
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, Mapping):
        return {name: _zeros_of_space(one, f"{path}/{name}") for name, one in spaces.items()}
    # `OneOf` has a tuple of spaces too, but its elements are of one of them.
    if isinstance(spaces, tuple) and type(space).__name__ != "OneOf":
        return tuple(_zeros_of_space(one, f"{path}/{i}") for i, one in enumerate(spaces))
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None or np.dtype(dtype).kind not in "biuf":
        raise TypeError(
            f"leaf {path!r}: expected a space of arrays, got {space}. Encode it as numbers, in a "
            "wrapper of the environment, or make the buffer and its example yourself."
        )
    return jnp.zeros(shape, jax.dtypes.canonicalize_dtype(dtype))


def from_gymnax(
    env: Any,
    env_params: Any,
    capacity: int,
    *,
    extra: Item | None = None,
    **options: Unpack[BufferOptions],
) -> tuple[ReplayBuffer, dict[str, Any]]:
    """Returns a buffer for a gymnax environment, and an example item.

    Nothing is computed: shapes and dtypes come from `jax.eval_shape` of a step. To `add`, pass the
    results of `env.step`, with a leading axis `num_envs` from `vmap`, to
    `jrb.transition(observation, action, next_observation, reward, terminated, truncated, info)`.
    Rewards are stored as floats, even if the environment returns integers (`cast=True` converts
    them). Versions of gymnax before 1.0 return one flag: use
    `jrb.transition(observation, action, next_observation, reward, done=done)`.

    Args:
        env: the environment, as `gymnax.make` returns it.
        env_params: its parameters.
        capacity: N, for all environments together; rounded down to a multiple of E.
        extra: further leaves of one item.
        options: further arguments of `jrb.ReplayBuffer`: `num_envs`, which is E, `batch_size`, ...

    Returns:
        The buffer, and the example to pass to `init`: zeros, without the axis of environments.

    Example:
        >>> import gymnax, jrb
        >>> env, env_params = gymnax.make("CartPole-v1")
        >>> buffer, example = jrb.from_gymnax(env, env_params, 10_000, num_envs=8, batch_size=32)
        >>> sorted(example["next"]), example["action"].dtype.name
        (['observation', 'reward', 'terminated', 'truncated'], 'int32')
    """

    def item(key: jax.Array) -> Item:
        observation, state = env.reset(key, env_params)
        action = env.action_space(env_params).sample(key)
        after, _, reward, *flags, info = env.step(key, state, action, env_params)
        if len(flags) == 1:
            return transition(observation, action, after, reward, done=flags[0])
        terminated, truncated = flags
        return transition(observation, action, after, reward, terminated, truncated, info)

    return _make_buffer(_spec_of(item, jax.random.key(0)), capacity, extra, **options)


def from_brax(
    env: Any, capacity: int, *, extra: Item | None = None, **options: Unpack[BufferOptions]
) -> tuple[ReplayBuffer, dict[str, Any]]:
    """Returns a buffer for a brax or MuJoCo Playground environment, and an example item.

    brax's `done` is also set at a time limit, for which its `EpisodeWrapper` sets
    `info["truncation"]`. The rows to `add`, for the states `before` and `after` a step, are

        cut = after.info["truncation"]
        jrb.transition(before.obs, action, after.obs, after.reward, after.done * (1 - cut), cut)

    `AutoResetWrapper` resets in the step in which an episode ends, and does not keep its last
    observation: where `truncated` is set, the next observation is the first one of the next
    episode. Give these items no weight in the loss, as brax's own agents do, or leave the wrapper
    out and reset yourself. brax's wrappers take keys of `jax.random.PRNGKey` only.

    Args:
        env: the environment, with or without wrappers, brax's or your own.
        capacity: N, for all environments together; rounded down to a multiple of E.
        extra: further leaves of one item.
        options: further arguments of `jrb.ReplayBuffer`: `num_envs` (E), `batch_size`, ... A
            `batch_size` that was given to `brax.envs.create` is the default of `num_envs`.

    Returns:
        The buffer, and the example to pass to `init`: zeros, without the axis of environments.
    """

    def item(key: jax.Array) -> Item:
        before = env.reset(key)
        action = jnp.zeros((*before.done.shape, env.action_size))
        after = env.step(before, action)
        return transition(before.obs, action, after.obs, after.reward, after.done, after.done)

    # Wrappers may add an axis of environments: some have a fixed number of them and take one key,
    # others take one key for each environment.
    keys = jax.random.split(jax.random.PRNGKey(0), options.get("num_envs") or 1)
    try:
        rows = _spec_of(item, keys[0])
        own = rows["next"]["truncated"].shape
    except (TypeError, ValueError, IndexError):
        rows, own = _spec_of(item, keys), ()
    defaults: dict[str, Any] = {"num_envs": own[0]} if own else {}
    defaults |= options
    # Drop the axis of environments, if there is one, from the spec of an item.
    axes = len(rows["next"]["truncated"].shape)
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), rows)
    return _make_buffer(spec, capacity, extra, **defaults)


def from_jaxmarl(
    env: Any, capacity: int, *, extra: Item | None = None, **options: Unpack[BufferOptions]
) -> tuple[ReplayBuffer, dict[str, Any]]:
    """Returns a buffer for a JaxMARL environment, and an example item.

    Leaves are dicts with an entry for each agent. To `add`, pass the results of `env.step` to
    `jrb.transition(observation, action, next_observation, reward, done=done)`; an episode ends
    where `done["__all__"]` is True. JaxMARL resets in the step in which an episode ends, so the
    next observation of that step belongs to the next episode: do not bootstrap there.

    Args:
        env: the environment, as `jaxmarl.make` returns it.
        capacity: N, for all environments together; rounded down to a multiple of E.
        extra: further leaves of one item.
        options: further arguments of `jrb.ReplayBuffer`: `num_envs`, which is E, `batch_size`, ...

    Returns:
        The buffer, and the example to pass to `init`: zeros, without the axis of environments.
    """

    def item(key: jax.Array) -> Item:
        observation, state = env.reset(key)
        action = {agent: env.action_space(agent).sample(key) for agent in env.agents}
        after, _, reward, done, _ = env.step(key, state, action)
        return transition(observation, action, after, reward, done=done)

    return _make_buffer(_spec_of(item, jax.random.key(0)), capacity, extra, **options)


def _make_buffer(
    spec: Any, capacity: int, extra: Item | None, **options: Any
) -> tuple[ReplayBuffer, dict[str, Any]]:
    """Returns a buffer for items of this spec, and an example item of zeros with float rewards."""
    zeros = lambda leaf, dtype: jnp.zeros(leaf.shape, dtype)
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    reward = lambda leaf: zeros(leaf, leaf.dtype if is_float(leaf) else jnp.float32)
    example = jax.tree.map(lambda leaf: zeros(leaf, leaf.dtype), spec)
    example["next"]["reward"] = jax.tree.map(reward, spec["next"]["reward"])
    options = {"cast": True} | options
    return ReplayBuffer.rounded(capacity, **options), example | dict(extra or {})


def _spec_of(item: Callable[[jax.Array], Item], key: jax.Array) -> Any:
    """Returns the spec of `item(key)` without computing it."""
    # Few environments are written for strict promotion, which the user may have set.
    with jax.numpy_dtype_promotion("standard"):
        return jax.eval_shape(item, key)
