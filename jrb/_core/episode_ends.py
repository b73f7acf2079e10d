"""Ends of episodes, from the done flags and the episode numbers of items.

N capacity, E environments, R = N / E rows, T time, B batch.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jrb._util import pytree
from jrb.keys import Keys, lookup, path_name
from jrb.ring import Ring
from jrb.types import Context, Item, WritePlan


def check(spec: Item, keys: Keys, is_needed: bool = True) -> None:
    """Raises unless the items say where episodes end: by flags, of one number each, or a number."""
    # Items that say nothing of it are an error only where that `is_needed`.
    for role, name in keys.unnamed(spec).items():
        path = tuple(name.split("/")) if lookup(spec, name) is None else name
        raise ValueError(
            f"{role}: leaf '{name}': expected a leaf that keys= names, got one that it does not, "
            f"while nothing lies at '{path_name(getattr(keys, role))}'. Name it with "
            f"keys=jrb.Keys({role}={path!r}); or write {role}=None if it is something else."
        )
    flags = _flags(spec, keys) if is_needed and keys.episode is None else keys.flags(spec)
    for name, flag in flags.items():
        where = f"done: leaf '{name}'"
        if flag.shape not in ((), (1,)):
            raise ValueError(
                f"{where}: expected shape () or (1,) for one transition, got {flag.shape}. "
                "Reduce it: an episode ends for an environment as a whole."
            )
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(flag.dtype, kind) for kind in kinds):
            raise TypeError(
                f"{where}: expected a bool, integer or floating dtype, got {flag.dtype}. "
                "Compare it, as done > 0."
            )


def no_numbers(ring: Ring, spec: Item, keys: Keys) -> jax.Array | None:
    """Returns zeros as the numbers of episodes, `[E]`; None if items are not known to have any.

    Raises:
        ValueError, TypeError: there is no such leaf, or it is not one integer.
    """
    if keys.episode is None:
        return None
    leaf, where = keys.get(spec, "episode"), f"episode: leaf '{path_name(keys.episode)}'"
    if not pytree.is_array(leaf) or leaf.shape not in ((), (1,)):
        shape = leaf.shape if pytree.is_array(leaf) else pytree.leaf_names(leaf)
        raise ValueError(
            f"{where}: expected shape () or (1,) for one transition, got {shape}. An episode has "
            "one number."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        raise TypeError(f"{where}: expected an integer dtype, got {leaf.dtype}. Count episodes.")
    return jnp.zeros(ring.envs, leaf.dtype)


def changes(
    items: Item, keys: Keys, written: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds where the numbers of episodes change from one row to the next of an environment.

    Args:
        items: leaves `[T, E, ...]`.
        keys: how they are keyed.
        written: bool `[T, 1]` or `[T, E]`, the rows of time that pass.
        before: integers `[E]`, the numbers of the rows before them.

    Returns:
        Which rows are followed by one of another number, bool `[T, E]`; whether that holds for the
        row before them, bool `[E]`; and the numbers of the last rows that pass, like `before`.
    """
    numbers = keys.get(items, "episode")
    numbers = numbers.reshape(numbers.shape[:2])
    length, env = numbers.shape[0], jnp.arange(numbers.shape[1], dtype=jnp.int32)
    row = jnp.arange(length, dtype=jnp.int32)[:, None]
    # The last row that passes up to each row, and the one before that; -1 for the rows before.
    last = lax.cummax(jnp.where(written, row, -1) + jnp.zeros_like(env), axis=0)
    earlier = jnp.concatenate([jnp.full_like(last[:1], -1), last[:-1]])
    number = lambda at: jnp.where(at < 0, before, numbers[jnp.maximum(at, 0), env])
    changed = written & (numbers != number(earlier))
    at = jnp.where(changed & (earlier >= 0), earlier, length)
    cuts = jnp.zeros(numbers.shape, jnp.bool_).at[at, env].set(True, mode="drop")
    return cuts, jnp.any(changed & (earlier < 0), axis=0), number(last[-1])


def ends(items: Item, keys: Keys, lead: int = 2) -> jax.Array:
    """Returns which items end an episode: those of which any flag is not zero, bool `[T, E]`."""
    # `lead` is the number of axes before those of an item.
    _flags(items, keys)
    is_set = lambda flag: (flag != jnp.zeros((), flag.dtype)).reshape(flag.shape[:lead])
    return keys.ends(items, is_set)


def ending(context: Context, write: WritePlan, items: Item) -> jax.Array:
    """Returns which rows of a write are the last of their episodes, by flags or cuts, `[T, E]`.

    Args:
        context: of the buffer.
        write: of these rows.
        items: leaves `[T, E, ...]`; those without any flag end by cuts only.
    """
    if context.keys.flags(items):
        done = ends(items, context.keys)
    else:
        done = jnp.zeros(write.slots.shape, jnp.bool_)
    return done if write.cuts is None else done | write.cuts


def _flags(item: Item, keys: Keys) -> dict[str, jax.Array]:
    """Returns the flags that say where episodes end, by name; at least one."""
    flags = keys.flags(item)
    if not flags:
        raise ValueError(
            f"done: expected a leaf at '{path_name(keys.done)}', '{path_name(keys.terminated)}' or "
            f"'{path_name(keys.truncated)}', got an item with the leaves {pytree.leaf_names(item)}."
            f" Name the right ones with keys=jrb.Keys({keys.guesses(item, 'done')})."
        )
    return flags
