"""Few programs for the many lengths of episodes that are given to `extend`.

A program is compiled for each number of rows, T. The first T of a description, and each that comes
several times in a row, has a program of its own. Others are padded with masked rows, which change
no result, to 256, 2048, ... rows. NumPy pads them on the host, as JAX would compile that too.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import numpy as np

from jrb._util import casting
from jrb._util.pytree import Leaf
from jrb._xla import compat
from jrb._xla.compiling import kept_by_description
from jrb.state import BufferState
from jrb.types import Item

# Padded lengths are 256, 2048, ... A write of 256 small rows takes 0.1 ms longer than of one.
_LEAST, _FACTOR = 256, 8
# Padded rows of more bytes are at most twice as many as are given.
_MANY_BYTES = 32 << 20
# The calls with one length until it gets a program; and the most lengths that get one.
_IN_A_ROW = 4
_MOST_EXACT = 16


class Lengths:
    """The lengths for which the writes of one description are compiled.

    Attributes:
        exact: lengths that are not padded.
        kinds: the kinds of arguments that were accepted before. Others are not padded: errors about
            them have the length that the caller knows.
        newest: the length of the last call.
        repeats: the number of calls with this length since another one came.
    """

    def __init__(self) -> None:
        self.exact: set[int] = set()
        # Padding adds a mask, of a kind that every write accepts.
        self.kinds: set[Any] = {_kind(1, np.zeros(1, np.bool_))}
        self.newest, self.repeats = 0, 0

    @contextlib.contextmanager
    def pad_arguments(
        self, state: BufferState, items: Item, mask: Any, *others: Any
    ) -> Iterator[tuple[Any, ...]]:
        """Yields the arguments of a write, padded where that saves a program.

        Args:
            state: nothing is padded if it, or any other argument, is traced.
            items: leaves `[T, ...]`.
            mask: bool `[T, ...]`; None for all rows.
            others: further arrays `[T, ...]` or None; their padding is zeros.
        """
        # Arguments of several lengths are passed on as they are, for the write to raise.
        given = items, mask, *others
        leaves = jax.tree.leaves(given)
        leads = {np.shape(leaf)[:1] for leaf in leaves}
        length = sum(leads.pop()) if len(leads) == 1 else 0
        is_inside = isinstance(state, BufferState) and isinstance(state.edits, jax.core.Tracer)
        if not length or length in self.exact or is_inside or not all(map(_can_pad, leaves)):
            yield given
            return
        kinds = {_kind(number, each) for number, each in enumerate(given) if each is not None}
        yield given if self._is_exact(length, kinds) else _pad(length, *given)
        # This line is not reached if the write raises.
        self.kinds |= kinds

    def wrap_extend(self, extend: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `extend`, compiled for few of the lengths that it is called with."""

        def extend_padded(state: BufferState, *args: Any) -> Any:
            with self.pad_arguments(state, *args) as arguments:
                return extend(state, *arguments)

        return extend_padded

    def _is_exact(self, length: int, kinds: set[Any]) -> bool:
        """Counts a call; returns True if a program for this very length is compiled."""
        self.repeats = self.repeats + 1 if length == self.newest else 1
        self.newest = length
        is_regular = self.repeats >= _IN_A_ROW and len(self.exact) < _MOST_EXACT
        if is_regular or not self.exact:
            self.exact.add(length)
        return length in self.exact or not kinds <= self.kinds


lengths_of: Callable[[Any], Lengths] = kept_by_description(lambda description: Lengths())
"""A function from a description to the lengths of its writes outside `jit`."""


def _kind(number: int, argument: Any) -> tuple[Any, ...]:
    """Returns the structure, shapes and dtypes of argument `number`, whatever its length."""
    leaves, structure = jax.tree.flatten(argument)
    return number, structure, *[(leaf.shape[1:], leaf.dtype) for leaf in leaves]


def _can_pad(leaf: Leaf) -> bool:
    """Returns False for tracers, and for arrays whose time is cut over devices or processes."""
    if not isinstance(leaf, jax.Array):
        return isinstance(leaf, np.ndarray)
    if isinstance(leaf, jax.core.Tracer) or not leaf.is_fully_addressable:
        return False
    return leaf.sharding.shard_shape(leaf.shape)[:1] == leaf.shape[:1]


def _pad(length: int, items: Item, mask: Any, *others: Any) -> tuple[Any, ...]:
    """Returns the arguments of a write with more rows, which the mask leaves out."""
    # Choose the next padded length, or the next power of two if that would be many bytes.
    row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(items)) // length
    size = _LEAST
    while size < length:
        size *= _FACTOR
    if size * row_bytes > _MANY_BYTES:
        size = 1 << (length - 1).bit_length()

    def pad(leaf: Leaf, fill: Any) -> Any:
        array = np.asarray(casting.raw(leaf))
        rows = np.zeros((size, *array.shape[1:]), array.dtype)
        rows[:length], rows[length:] = array, fill(array)
        # An array that the user has put on a device stays there.
        if isinstance(leaf, jax.Array) and compat.is_committed(leaf):
            return casting.wrap_words(jax.device_put(rows, leaf.sharding), leaf.dtype)
        return casting.wrap_words(rows, leaf.dtype)

    # Items are padded with the last one: a user's inverse may not be able to compute with zeros.
    items = jax.tree.map(lambda leaf: pad(leaf, lambda array: array[-1]), items)
    mask = np.ones(length, np.bool_) if mask is None else mask
    zeros = lambda leaf: None if leaf is None else pad(leaf, lambda array: array.dtype.type(0))
    return items, *map(zeros, (mask, *others))
