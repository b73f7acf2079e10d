"""Checks of the arguments that users pass to methods, made before anything is written."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._util import pytree
from jrb._util.pytree import Leaf, PyTree

_INTEGERS = int | np.integer
_FLOAT32 = np.dtype(np.float32)
_SMALLEST = np.finfo(np.float32).tiny


def count(name: str, value: object, most: int | None = None) -> None:
    """Raises unless a value is an integer of at least 1, and at most `most` if that is given."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        # Such as 1e6, which many write for a capacity.
        is_whole = isinstance(value, float) and value.is_integer()
        mend = f" Write int({value!r})." if is_whole else ""
        raise TypeError(f"{name}: expected an integer, got {value!r}.{mend}")
    if value < 1 or (most is not None and value > most):
        bound = "at least 1" if most is None else f"from 1 to {most}"
        raise ValueError(f"{name}: expected {bound}, got {value}.")


def multiple(capacity: int, envs: int) -> None:
    """Raises unless the capacity is a multiple of the number of environments."""
    if capacity % envs:
        fewer, more = capacity // envs * envs, -(-capacity // envs) * envs
        legal = f"{fewer} or {more}" if fewer else str(more)
        raise ValueError(
            f"capacity: expected a multiple of num_envs = {envs}, got {capacity}. "
            f"The nearest are {legal}."
        )


def mask(method: str, value: object, shape: tuple[int, ...], meaning: str) -> jax.Array:
    """Returns a mask as a JAX array; raises unless it is bool and of this shape."""
    array = value if isinstance(value, jax.Array) else np.array(value)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"{method}: mask: expected dtype bool, got {array.dtype}. Compare, do not cast."
        )
    if array.shape != shape:
        raise ValueError(
            f"{method}: mask: expected shape {shape}, got {array.shape}. It says {meaning}."
        )
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(array)


def number(name: str, value: Leaf) -> jax.Array:
    """Returns a single real number, traced or not, as float32 `[]`; raises for other values."""
    if isinstance(value, str) or jnp.shape(value):
        raise TypeError(f"{name}: expected a single number, got {value!r}.")
    # The caller may write to an array of NumPy as soon as the method has returned.
    value = value.copy() if isinstance(value, np.ndarray) else value
    return jnp.asarray(value).astype(jnp.float32)


def indices(method: str, value: object) -> jax.Array:
    """Returns integers as int32; those that int32 cannot hold become -1, which is no slot."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{method}: indices: expected integers or a Sample, got dtype {array.dtype}. "
            "Pass the sample, or its indices."
        )
    if array.dtype.itemsize >= 4 and array.dtype != jnp.int32:
        where = jnp.where if isinstance(array, jax.Array) else np.where
        fits = (array >= 0) & (array <= array.dtype.type(2**31 - 1))
        # An unsigned dtype has no -1: set the others to 0, and subtract 1 from them as int32.
        array = where(fits, array, array.dtype.type(0)).astype(jnp.int32)
        array = array - (~fits).astype(jnp.int32)
    return jnp.asarray(array.astype(jnp.int32))


def in_range(method: str, indices: jax.Array, size: int, has_padding: bool = False) -> None:
    """Raises unless all indices are in [0, size), or `size` for padding; skips traced ones."""
    if isinstance(indices, jax.core.Tracer):
        return
    slots = np.asarray(indices)
    wrong = (slots < 0) | (slots >= size + has_padding)
    if wrong.any():
        raise ValueError(f"{method}: expected indices in [0, {size}), got {slots[wrong][0]}.")


def real_numbers(name: str, value: object) -> jax.Array:
    """Returns real numbers as float32: for a NumPy array a NumPy copy, else a JAX array."""
    # The conversion below takes 40 us for an array of JAX, and 15 us for one of NumPy.
    if isinstance(value, jax.Array) and value.dtype == jnp.float32 and not value.weak_type:
        return value
    array: Any = value
    if type(value) is np.ndarray and value.dtype == _FLOAT32:
        return array.copy()
    # Check that the numbers are real. NumPy takes spans of time for integers.
    is_host = type(value) is np.ndarray or isinstance(value, np.generic)
    array = np.array(value) if is_host else jnp.asarray(value)
    is_real = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if not is_real or array.dtype.kind == "m":
        raise TypeError(f"{name}: expected real numbers, got dtype {array.dtype}.")
    # A number that is too large for float32 becomes infinite, and is refused later.
    with np.errstate(over="ignore"):
        narrow = array.astype(jnp.float32)
    if array.dtype.itemsize <= 4:
        return narrow
    # A positive number stays positive.
    where: Any = np.where if is_host else jnp.where
    return where((array > 0) & (narrow == 0), _SMALLEST, narrow)


def given_numbers(name: str, value: Any) -> Any:
    """Returns NumPy's or Python's numbers as float32; arrays of JAX, and None, unchanged."""
    return value if value is None or isinstance(value, jax.Array) else real_numbers(name, value)


def flag(name: str, value: object) -> None:
    """Raises unless a value is a Python bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}.")


def path(name: str, value: object) -> None:
    """Raises unless a value is a name or a tuple of names."""
    parts = value if isinstance(value, tuple) and value else (value,)
    if not all(isinstance(part, str) for part in parts):
        raise TypeError(f"{name}: expected a name or a tuple of names, got {value!r}.")


def fraction(name: str, value: object) -> None:
    """Raises unless a value is a Python number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}.")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value}.")


def choice(name: str, value: object, choices: tuple[Any, ...]) -> None:
    """Raises unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}.")


def window(name: str, rows: int, held: int) -> None:
    """Raises if a window has more rows than the ring holds."""
    if rows > held:
        raise ValueError(
            f"{name}: expected at most the {held} rows of the ring (capacity / num_envs), got "
            f"{rows}. Make the capacity larger, or the window shorter."
        )


def write_mask(
    method: str, value: Any, time: tuple[int, ...], lead: tuple[int, ...], writer: Any
) -> jax.Array:
    """Returns a mask of rows, or of single items if the writer can write a part of a row."""
    # A mask of items has an axis of environments; any other must be a mask of rows.
    each = (*time, *lead)
    if not lead or jnp.shape(value) != each:
        return mask(
            method, value, time, "which rows of time are written, for all environments alike"
        )
    if not writer.per_env:
        raise ValueError(
            f"{method}: mask: expected shape {time}, as {type(writer).__name__} writes all "
            f"environments together, got {each}. Use writer=jrb.PerEnvironment()."
        )
    return mask(method, value, each, "which items are written")


def given_mask(method: str, value: Any, axes: int) -> None:
    """Raises unless a mask is given for each environment: it must have this number of axes."""
    if value is None or jnp.ndim(value) < axes:
        got = "none" if value is None else f"shape {jnp.shape(value)}"
        raise TypeError(
            f"{method}: mask: expected one flag for each environment, as the buffer has "
            f"requires_mask=True, got {got}. The step after an end of an episode is a reset, no "
            "transition (gymnasium's NEXT_STEP mode): pass mask=~ended, with ended = terminated | "
            "truncated of the step before. Vectors with autoreset_mode=AutoresetMode.SAME_STEP, or "
            "buffers with requires_mask=False, take all steps."
        )


def shared_clock(name: str, writer: Any) -> None:
    """Raises if the writer may write one environment without the others."""
    if writer.per_env:
        raise ValueError(
            f"{name}: expected a writer of all environments together, got "
            f"{type(writer).__name__}, between whose environments there is no order of time. Use "
            "jrb.RoundRobin(), or a buffer for each environment under jax.vmap."
        )


def chronological(name: str, writer: Any) -> None:
    """Raises unless the writer keeps rows in the order of time."""
    if not writer.is_chronological:
        raise ValueError(
            f"{name}: expected a writer that keeps rows in the order of time, got "
            f"{type(writer).__name__}. Use jrb.RoundRobin(), or unit=jrb.Transition()."
        )


def priorities(value: object, shapes: list[tuple[int, ...]], num_axes: int = 1) -> jax.Array:
    """Returns priorities as float32, of one of `shapes`, the first of which is the indices'.

    Indices have `num_axes` axes.
    """
    array = real_numbers("update_priority: priorities", value)
    if len(shapes[0]) != num_axes:
        raise ValueError(
            f"update_priority: indices: expected shape (B,), got {shapes[0]}. Flatten them, or "
            "vmap over the states too."
        )
    if array.shape not in shapes:
        # TD errors between the rows of a window have one column too few.
        mend = "Reduce the errors to that, such as jnp.abs(td_error)."
        if array.shape in [(*shape[:-1], shape[-1] - 1) for shape in shapes[1:]]:
            mend = (
                "TD errors within a window are one row fewer than its rows, as the last one has no "
                "next row there. Append a column: of zeros, jnp.pad(errors, ((0, 0), (0, 1))), "
                "where priority_max_weight is 1, as they leave the maximum; else of the errors' "
                f"mean. Or reduce them to {shapes[0]}."
            )
        raise ValueError(
            f"update_priority: priorities: expected shape {' or '.join(map(str, shapes))}, one for "
            f"each that was drawn, got {array.shape}. {mend}"
        )
    return array


def given_priorities(method: str, value: object, shape: tuple[int, ...]) -> jax.Array:
    """Returns the priorities of new items as float32; raises unless they have this shape."""
    array = real_numbers(f"{method}: priorities", value)
    if array.shape != shape:
        raise ValueError(
            f"{method}: priorities: expected shape {shape}, one for each transition, got "
            f"{array.shape}. Time comes first, then the environments."
        )
    return array


def objects(method: str, value: object, count: int) -> list[Any]:
    """Returns a sequence of `count` objects as a list; raises for other values."""
    if isinstance(value, str | bytes | dict) or not isinstance(value, Sequence):
        raise TypeError(f"{method}: expected a sequence of objects, got {type(value).__name__}.")
    if len(value) != count:
        raise ValueError(
            f"{method}: expected {count} objects, one for each slot, got {len(value)}."
        )
    return list(value)


def length(items: PyTree) -> int:
    """Returns T, the length of the first axis of the first leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(pytree.spec_of(items, "extend"))
    if not leaves:
        raise ValueError("extend: expected at least one leaf, got an empty pytree.")
    path, leaf = leaves[0]
    if not leaf.shape:
        raise ValueError(
            f"extend: leaf '{pytree.leaf_name(path)}': expected an axis of time, got shape (). "
            "For a single timestep there is add."
        )
    return leaf.shape[0]


def lead(items: PyTree, axes: tuple[int, ...], method: str) -> None:
    """Raises unless the shapes of all leaves begin with these axes."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(pytree.spec_of(items, method)):
        if leaf.shape[: len(axes)] != axes:
            raise ValueError(
                f"{method}: leaf '{pytree.leaf_name(path)}': expected a shape from {axes} on, "
                f"got {leaf.shape}. Time comes first, then the environments."
            )


MAX_EXPANSION = 100.0
_ALWAYS = 32 << 20  # bytes that are accepted whatever the ratio


class ExpansionLimit:
    """The most bytes that arrays may take in memory, as a multiple of the bytes of their files.

    A kilobyte of a compressed or sparse file can declare gigabytes of zeros: it is refused before
    memory is allocated.

    Args:
        source: the dataset, for the error message.
        paths: the paths of its files.
        max_expansion: the largest multiple that is accepted.
    """

    def __init__(self, source: object, paths: Iterable[str], max_expansion: float) -> None:
        self._source: object = source
        self._max_expansion: float = max_expansion
        self._stored: int = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
        self._declared: int = 0

    def add(self, declared: int) -> None:
        """Counts the bytes of further arrays, before any of them is read.

        Raises:
            ValueError: the arrays are too large; the message has both numbers and the argument
                that raises the limit.
        """
        # Add up all arrays, as many small ones take as much memory as a large one.
        self._declared += declared
        most = max(self._max_expansion * self._stored, _ALWAYS)
        if self._declared > most:
            ratio = math.ceil(self._declared / max(self._stored, 1))
            raise ValueError(
                f"{self._source}: expected arrays of at most {self._max_expansion:g} times the "
                f"{self._stored} bytes of the files, got {self._declared} declared bytes. The "
                "files may be damaged. If the data are right, raise the limit: "
                f"max_expansion={ratio}."
            )


def declared_nbytes(columns: Mapping[str, Any]) -> int:
    """Returns the bytes of all columns in memory, by their declared shapes and dtypes."""
    return sum(
        math.prod(map(int, column.shape)) * np.dtype(column.dtype).itemsize
        for column in columns.values()
    )
