"""What keeps a buffer in place: reads that happen, and writes that wait for them.

XLA may schedule a read of an array after a write to it, and then copies the whole array first.
Three tools prevent that. `read` computes a read for real, where XLA would rather repeat a cheap
gather in each of its consumers. `token` makes an integer zero that depends on values that were
read; a write at an index to which it was added waits for them. `after` adds a token to all that
says in a state where the next write goes: to the fields that are made by `pytree.cursor()`.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import prng_keys, pytree
from jrb._xla import compat

T = TypeVar("T")


def _same(read: Any) -> Any:
    return read


def read(compute: Callable[[], T], then: Callable[[T], Any] = _same) -> Any:
    """`compute()`, evaluated exactly once and never fused into its consumers.

    Args:
        compute: a function without arguments that reads arrays it closes over.
        then: what is made of what was read, where it is read.

    Returns:
        What `compute` returns, a pytree of arrays, or what `then` makes of it.
    """
    return once(lambda: then(lax.optimization_barrier(compute())))


def once(compute: Callable[[], T]) -> T:
    """`compute()`, evaluated just once on the CPU; elsewhere as the compiler likes.

    On the CPU it is the branch of a conditional that is always taken, which the compiler cannot
    know. The condition is a constant, so that `vmap` leaves it a conditional. Elsewhere the
    compiler knows, and the conditional, which would wait for the host, goes.
    """
    known: list[Any] = []

    def taken() -> T:
        out = compute()
        known.append(compat.types_of(out))
        return out

    def never() -> Any:  # traced after the other, which then need not be traced twice
        like = known[0] if known else jax.eval_shape(compute)
        return jax.tree.map(_zeros, like)

    return lax.cond(_always(), taken, never)


@functools.partial(jax.jit, inline=True)  # traced once
def _always() -> jax.Array:
    """True, which XLA's CPU compiler does not know."""
    return opaque(1) == 1


def _zeros(like: Any) -> Any:
    """Zeros of this type; those of keys, unlike others, do not vary over a mesh by themselves."""
    zeros = jnp.zeros_like(like)
    if not prng_keys.is_keys(like.dtype) or not compat.in_shard_map():
        return zeros
    return compat.vary(zeros, compat.varying_axes(like))


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)  # traced once
def opaque(value: int, dtype: Any = np.int32) -> jax.Array:
    """An integer constant that XLA's CPU compiler does not fold; a plain one elsewhere."""
    constant = jnp.array(value, dtype)
    return lax.platform_dependent(
        cpu=lambda: lax.optimization_barrier(constant), default=lambda: constant
    )


def loop(
    trips: jax.Array | int, body: Callable[[jax.Array, T], T], carry: T, unroll: int | None = None
) -> T:
    """`lax.fori_loop(0, trips, body, carry)`, inside `jax.shard_map` too.

    There a carry must vary, from the start, over those axes of the mesh over which what the body
    makes of it does.
    """
    if compat.in_shard_map():
        carry = _as_varying(body, carry)
    return lax.fori_loop(0, trips, body, carry, unroll=unroll)


def _as_varying(body: Callable[[jax.Array, T], T], carry: T) -> T:
    """The carry, of the type that the body leaves it in."""
    axes_of = lambda tree: [compat.varying_axes(jax.typeof(x)) for x in jax.tree.leaves(tree)]
    while True:
        after = jax.eval_shape(body, 0, carry)
        leaves, structure = jax.tree.flatten(carry)
        wanted = [compat.varying_axes(leaf) for leaf in jax.tree.leaves(after)]
        if all(want <= have for want, have in zip(wanted, axes_of(carry), strict=True)):
            return carry
        leaves = map(compat.vary, leaves, wanted)
        carry = jax.tree.unflatten(structure, leaves)


@jax.custom_batching.custom_vmap
def at_least(count: jax.Array) -> jax.Array:
    """A number, at least `count`, that is not batched: for the trips of a loop.

    Under `vmap` a loop whose trips differ would select between whole arrays at each trip; one that
    makes the trips of the longest, with those that are done doing nothing, works in place.
    """
    return count


@at_least.def_vmap
def _at_least_all(size: int, batched: list[bool], count: jax.Array) -> tuple[jax.Array, bool]:
    return at_least(jnp.max(count)) if batched[0] else at_least(count), False


@jax.custom_batching.custom_vmap
def alone(wanted: jax.Array) -> jax.Array:
    """Whether something is to be done, int32 0 or 1; under `vmap` it is done in any case, 1.

    What some of many buffers want could not be told to all without one device asking the others.
    """
    return wanted


@alone.def_vmap
def _alone_of_many(size: int, batched: list[bool], wanted: jax.Array) -> tuple[jax.Array, bool]:
    if not batched[0]:
        return alone(wanted), False
    done = jnp.int32(1)
    if compat.in_shard_map():
        done = compat.vary(done, compat.varying_axes(jax.typeof(wanted)))
    return done, False


def overwrite(array: jax.Array, value: jax.Array | float, token: jax.Array) -> jax.Array:
    """`array` filled with `value`, in its own memory if it is donated, after the token."""
    return restored(array, lambda: jnp.asarray(value, array.dtype), token)


def restored(state: T, make: Callable[[], Any], token: jax.Array) -> T:
    """`state` with the values of `make()`, in its own memory if it is donated, after the token.

    Args:
        state: a pytree of arrays.
        make: a function to one of as many arrays, of these dtypes, and of these shapes or `[]`. It
            is called where the values are written, or XLA would keep them as arrays of their own.
        token: int32 zero.
    """
    leaves, structure = jax.tree.flatten(state)
    if not leaves:
        return state

    def fill(_: Any, leaves: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(jax.tree.leaves(make()), leaves, strict=True)
        return [jnp.where(token == 0, new, old) for new, old in pairs]

    # On the CPU the loop, of one turn, keeps the fill apart from what is computed beside it.
    filled = lax.platform_dependent(
        cpu=lambda: loop(opaque(1), fill, leaves), default=lambda: fill(0, leaves)
    )
    return jax.tree.unflatten(structure, filled)


def token(reads: Any) -> jax.Array:
    """int32 zero, `[]`, that is not known before every leaf of `reads` is.

    Add it to an index, and what is written there is written after the reads.

    Args:
        reads: a pytree of arrays of any dtype.
    """
    leaves = [leaf for leaf in jax.tree.leaves(reads) if leaf.size]
    return read(lambda: _zero(leaves))


def after(state: T, token: jax.Array) -> T:
    """The same state, from which no place to write is known before `token`, an int32 zero."""

    def change(mark: str, value: jax.Array) -> jax.Array:
        return value + token.astype(value.dtype) if mark == "cursor" else value

    return pytree.mapped_marks(state, change)


def emptied(state: T, token: jax.Array) -> T:
    """The same state, its cursors and tallies 0, known after the token and what they waited for."""

    def change(mark: str, value: jax.Array) -> jax.Array:
        zero = jnp.minimum(value, 0)
        return zero + token.astype(value.dtype) if mark == "cursor" else zero

    return pytree.mapped_marks(state, change)


def _zero(leaves: list[jax.Array]) -> jax.Array:
    """int32 zero, made of a bit of every leaf.

    To be called in `once`, which takes whole leaves: of one that was put together from two reads,
    the first element alone would wait for one of them.
    """
    return hidden_zero(functools.reduce(lax.bitwise_or, map(some_bits, leaves), jnp.int32(0)))


def hidden_zero(bits: jax.Array) -> jax.Array:
    """Zero, made of integers, by shifting out a bit, which XLA does not see through."""
    one = np.ones((), bits.dtype)
    return lax.shift_right_logical(lax.bitwise_and(bits, one), one)


def zero_after(array: jax.Array, dtype: Any = jnp.int32) -> jax.Array:
    """Zero, `[]`, on the CPU not known before `array` is; elsewhere a plain one."""
    bits = some_bits(array).astype(dtype)
    return lax.platform_dependent(bits, cpu=hidden_zero, default=jnp.zeros_like)


def some_bits(leaf: jax.Array) -> jax.Array:
    """int32 `[]`, from the first element of `leaf`."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    first = lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim)
    first = lax.squeeze(first, range(leaf.ndim))  # as leaf[0, 0, ...], which takes long to trace
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = first.real
    if jnp.issubdtype(first.dtype, jnp.floating):
        first = first.astype(jnp.float32) if jnp.finfo(first.dtype).bits < 8 else first
        first = lax.bitcast_convert_type(first, _INTEGERS[first.dtype.itemsize])
        first = first[0] if first.ndim else first  # of 8 bytes, two words
    return first.astype(jnp.int32)


_INTEGERS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.int32, 8: jnp.int32}
