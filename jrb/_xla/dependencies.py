"""Tools that keep a buffer in place: reads that happen once, and writes that wait for them.

XLA may schedule a read of an array after a write to it, and then copies the whole array first.
Three tools prevent that. `materialize` computes a read for real, where XLA would rather repeat a
cheap gather in each of its consumers. `zero_depending_on` makes an integer zero from values that
were read; a write at an index to which it was added waits for them. `delay_writes_until` adds that
zero to every field of a state that says where the next write goes (`pytree.cursor()`).
`tests/in_place/test_in_place.py` guards all three.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import pytree
from jrb._xla import compat, compiling

T = TypeVar("T")

# The most bytes of a constant, as it becomes part of the program.
_SMALL = 1 << 18


def materialize(compute: Callable[[], T], then: Callable[[T], Any] | None = None) -> Any:
    """Returns `compute()`, evaluated exactly once and never fused into its consumers.

    Args:
        compute: a function without arguments that reads arrays it closes over.
        then: a function that is applied to the result within the same evaluation.
    """
    # The conditional keeps the reads apart from their consumers, and the barrier from `then`.
    if then is None:
        return evaluate_once(lambda: lax.optimization_barrier(compute()))
    return evaluate_once(lambda: then(lax.optimization_barrier(compute())))


def evaluate_once(compute: Callable[[], T]) -> T:
    """Returns `compute()`, evaluated just once on the CPU; elsewhere as the compiler likes."""
    types: list[Any] = []

    def taken() -> T:
        out = compute()
        if compiling.manual_axes() or not compat.HAS_MESH_IN_TYPES:
            types.append(jax.eval_shape(lambda: out))
        else:
            # A hundred times faster to trace, and the types include mesh axes.
            types.append(jax.tree.map(jax.typeof, out))
        return out

    # JAX traces this branch after `taken`, whose types save a second tracing of `compute`.
    never_taken = lambda: jax.tree.map(_never_seen, types[0] if types else jax.eval_shape(compute))
    # The condition is constant, so that `vmap` keeps the conditional. XLA's CPU compiler cannot see
    # that it is true. Other backends can, and remove the conditional: it would wait for the host.
    return lax.cond(_always(), taken, never_taken)


_always = jax.jit(lambda: opaque(1) == 1, inline=True)  # traced once


def _never_seen(like: Any) -> Any:
    """Returns the array of this type that XLA compiles most quickly, for a branch never taken."""
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    in_shard_map = bool(compiling.manual_axes())
    is_small = like.size > 1 and like.size * like.dtype.itemsize <= _SMALL
    # Inside `jax.shard_map` the constant would have to be cast to vary over mesh axes.
    if is_small and not is_key and not in_shard_map:
        return _zeros_and_one(like.shape, like.dtype)
    zeros = jnp.zeros_like(like)
    # Zeros like an array vary over the same mesh axes, except those of keys.
    return compiling.vary(zeros, compiling.varying_axes(like)) if is_key and in_shard_map else zeros


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)  # traced once
def _zeros_and_one(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # XLA compiles a kernel for an array of zeros, some 3 ms each, but none for a constant whose
    # elements differ. It folds this expression to one. A constant from NumPy would be made outside
    # the branch, and copied at each step.
    one = lax.broadcast(np.ones((), dtype), (1,) * len(shape))
    return lax.pad(one, np.zeros((), dtype), [(size - 1, 0, 0) for size in shape])


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)  # traced once
def opaque(value: int, dtype: Any = np.int32) -> jax.Array:
    """Returns an integer constant that XLA's CPU compiler does not fold; a plain one elsewhere."""
    # On an accelerator a conditional on such a value would wait for the host.
    constant = jnp.array(value, dtype)
    return lax.platform_dependent(
        cpu=lambda: lax.optimization_barrier(constant), default=lambda: constant
    )


def loop(
    trips: jax.Array | int, body: Callable[[jax.Array, T], T], carry: T, unroll: int | None = None
) -> T:
    """Runs `lax.fori_loop(0, trips, body, carry)`, inside `jax.shard_map` too."""
    # Inside `jax.shard_map`, the initial carry has to vary over all mesh axes over which the body's
    # result varies. That result may vary over more axes once the carry does: repeat until it stays.
    while compiling.manual_axes():
        leaves, structure = jax.tree.flatten(carry)
        after = jax.tree.leaves(jax.eval_shape(body, 0, carry))
        axes = [compiling.varying_axes(leaf) for leaf in after]
        current = [compiling.varying_axes(jax.typeof(leaf)) for leaf in leaves]
        if all(new <= old for new, old in zip(axes, current, strict=True)):
            break
        carry = jax.tree.unflatten(structure, map(compiling.vary, leaves, axes))
    # Under `jax.disable_jit`, JAX passes Python's integers.
    step = lambda trip, carry: body(jnp.asarray(trip), carry)
    return lax.fori_loop(0, trips, step, carry, unroll=unroll)


@jax.custom_batching.custom_vmap
def max_over_batch(count: jax.Array) -> jax.Array:
    """Returns `count`, or under `vmap` its unbatched maximum: the number of trips of a loop."""
    # Under `vmap`, a loop with a batched number of trips selects between whole arrays at each trip.
    # A loop of the maximum, in which entries that are done do nothing, works in place.
    return count


# The call of `max_over_batch` itself is for an outer `vmap`.
max_over_batch.def_vmap(
    lambda size, batched, count: (max_over_batch(jnp.max(count) if batched[0] else count), False)
)


@jax.custom_batching.custom_vmap
def unbatched_flag(flag: jax.Array) -> jax.Array:
    """Returns `flag`, int32 0 or 1; under `vmap` always 1."""
    # To reduce the flag over the batch would need a collective if the batch axis is sharded.
    return flag


@unbatched_flag.def_vmap
def _flag_of_all(size: int, batched: list[bool], flag: jax.Array) -> tuple[jax.Array, bool]:
    if not batched[0]:
        return unbatched_flag(flag), False
    # JAX refuses branches and carries unless the new flag varies over the mesh axes of the old one.
    one = jnp.int32(1)
    if compiling.manual_axes():
        one = compiling.vary(one, compiling.varying_axes(jax.typeof(flag)))
    return one, False


def overwrite(array: jax.Array, value: jax.Array | float, token: jax.Array) -> jax.Array:
    """Returns `array` filled with `value`, in place if it is donated, once `token` is known."""
    return overwrite_with(array, lambda: jnp.asarray(value, array.dtype), token)


def overwrite_with(state: T, make: Callable[[], Any], token: jax.Array) -> T:
    """Returns `state` with the values of `make()`, in place if donated, once `token` is known.

    Args:
        state: a pytree of arrays.
        make: returns a pytree with as many arrays, each with the dtype and the shape (or `[]`) of
            the old one. It is called inside the write: XLA would store earlier values separately.
        token: an int32 zero that depends on what the write has to wait for.
    """
    leaves, structure = jax.tree.flatten(state)
    if not leaves:
        return state

    def fill(_: Any, leaves: list[jax.Array]) -> list[jax.Array]:
        # XLA does not know that the condition holds, so it computes the token before it writes.
        pairs = zip(jax.tree.leaves(make()), leaves, strict=True)
        return [jnp.where(token == 0, new, old) for new, old in pairs]

    # On the CPU, a loop of one turn keeps XLA from fusing the fill with other computations.
    filled = lax.platform_dependent(
        cpu=lambda: loop(opaque(1), fill, leaves), default=lambda: fill(0, leaves)
    )
    return jax.tree.unflatten(structure, filled)


def zero_depending_on(reads: Any) -> jax.Array:
    """Returns int32 zero, `[]`, that is not known before every leaf of the pytree `reads` is."""
    # A write at an index to which it is added happens after the reads.
    leaves = [leaf for leaf in jax.tree.leaves(reads) if leaf.size]
    # Whole leaves go into the conditional: if a leaf was joined from two reads, its first element
    # alone would wait for one of them only.
    bits = lambda: functools.reduce(lax.bitwise_or, map(some_bits, leaves), jnp.int32(0))
    return materialize(lambda: hidden_zero(bits()))


def delay_writes_until(state: T, token: jax.Array) -> T:
    """Returns the state with `token`, an int32 zero, added to all cursors: writes wait for it."""
    delay = lambda mark, value: value + token.astype(value.dtype) if mark == "cursor" else value
    return pytree.map_marks(state, delay)


def empty_state(state: T, token: jax.Array) -> T:
    """Returns the state with cursors and tallies set to 0, of which cursors depend on `token`."""

    def reset(mark: str, value: jax.Array) -> jax.Array:
        # No cursor or tally is negative: this is 0, but unlike a constant it depends on the state.
        zero = jnp.minimum(value, 0)
        return zero + token.astype(value.dtype) if mark == "cursor" else zero

    return pytree.map_marks(state, reset)


def hidden_zero(bits: jax.Array) -> jax.Array:
    """Returns zero, computed from integers by shifting out a bit, which XLA does not simplify."""
    # XLA does simplify `bits * 0`, `bits & 0`, and comparisons of `bits` with itself.
    one = np.ones((), bits.dtype)
    return lax.shift_right_logical(lax.bitwise_and(bits, one), one)


def zero_after(array: jax.Array, dtype: Any = jnp.int32) -> jax.Array:
    """Returns zero, `[]`, that on the CPU depends on `array`; elsewhere a plain zero."""
    bits = some_bits(array).astype(dtype)
    return lax.platform_dependent(bits, cpu=hidden_zero, default=jnp.zeros_like)


def some_bits(leaf: jax.Array) -> jax.Array:
    """Returns bits of the first element of an array, int32 `[]`."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    # As leaf[0, 0, ...], which takes longer to trace.
    first = lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim)
    first = lax.squeeze(first, range(leaf.ndim))
    # Take the bits of a float, as a conversion to int32 would lose most of them.
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = first.real
    if jnp.issubdtype(first.dtype, jnp.floating):
        first = first.astype(jnp.float32) if jnp.finfo(first.dtype).bits < 8 else first
        words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.int32, 8: jnp.int32}[first.dtype.itemsize]
        first = lax.bitcast_convert_type(first, words)
        # Eight bytes became two words.
        first = first[0] if first.ndim else first
    return first.astype(jnp.int32)
