"""Rate limits: how many samples a program may take for each item that it adds."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import checks, pytree
from jrb._util.public import PublicNames

__all__ = ["Counters", "SampleToInsert"]
__dir__: PublicNames = lambda: __all__


class Counters(pytree.State):
    """The counters of a rate limit.

    Attributes:
        inserted: int32 `[]`, the number of items that were added, counted up to `min_size`.
        balance: int32 `[]`, the samples owed for these items minus the samples taken, in units of 1
            / q of a sample for a ratio p / q; it stays within the limit.
    """

    inserted: jax.Array
    balance: jax.Array


@pytree.component
class SampleToInsert:
    """Keeps the ratio of samples taken to items added within a tolerance.

    With n items and m samples, `abs(ratio * (n - min_size) - m)` is at most `tolerance`; nothing is
    sampled before there are `min_size` items. The methods are pure functions of `Counters`: keep
    these next to the state of the buffer, and call `may_insert` and `may_sample` before you add and
    sample. The counters are exact, as the ratio is a fraction, and never overflow.

    Attributes:
        ratio: the number of samples per item, above 0; used as the nearest fraction with a
            denominator of at most 1000.
        min_size: items that must be added before anything is sampled, at least 1.
        tolerance: the largest deviation, in samples; at least the larger of 1 and the ratio.

    Reference: Cassirer et al., 2021, "Reverb: a framework for experience replay", section 3.3.

    Example:
        >>> import jrb
        >>> limit = jrb.limits.SampleToInsert(ratio=2, min_size=3, tolerance=4)
        >>> counters = limit.init()
        >>> bool(limit.may_sample(counters))
        False
        >>> counters = limit.inserted(counters, 3)
        >>> bool(limit.may_sample(counters, 4)), bool(limit.may_sample(counters, 5))
        (True, False)
        >>> counters = limit.sampled(counters, 4)
        >>> bool(limit.may_sample(counters)), bool(limit.may_insert(counters))
        (False, True)
    """

    ratio: float
    min_size: int
    tolerance: float

    def __post_init__(self) -> None:
        # Check the range of each number, then that the counters stay within int32.
        for name in ("ratio", "tolerance"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}.")
        checks.count("min_size", self.min_size)
        if self.min_size >= 2**31:
            raise ValueError(f"min_size: expected less than 2^31, got {self.min_size}.")
        if not self._fraction:
            raise ValueError(f"ratio: expected at least 0.001, got {self.ratio}.")
        # One item owes `ratio` samples at once: with less room neither side could ever move.
        if self.tolerance < max(1, self.ratio):
            raise ValueError(
                f"tolerance: expected at least {max(1, self.ratio)}, or neither adding nor "
                f"sampling may go on, got {self.tolerance}."
            )
        if 4 * self._most + self._fraction.numerator >= 2**31:
            raise ValueError(
                f"tolerance: expected less than {2**29 // self._fraction.denominator}, got "
                f"{self.tolerance}."
            )

    @property
    def _fraction(self) -> fractions.Fraction:
        return fractions.Fraction(self.ratio).limit_denominator(1000)

    @property
    def _most(self) -> int:
        """The tolerance in parts of a sample."""
        return int(self.tolerance * self._fraction.denominator)

    def balance(self, items: int, samples: int) -> fractions.Fraction:
        """Returns the exact number of samples owed for all `items`, minus `samples` taken."""
        return self._fraction * max(0, items - self.min_size) - samples

    def init(self) -> Counters:
        """Returns counters before anything was added or sampled."""
        return Counters(inserted=jnp.int32(0), balance=jnp.int32(0))

    def may_insert(self, counters: Counters, count: jax.Array | int = 1) -> jax.Array:
        """Returns True if `count` items may be added now, bool `[]`; the first `min_size` may."""
        return self.inserted(counters, count).balance <= self._most

    def may_sample(self, counters: Counters, count: jax.Array | int = 1) -> jax.Array:
        """Returns True if `count` samples may be taken now, bool `[]`."""
        return (counters.inserted >= self.min_size) & (
            self.sampled(counters, count).balance >= -self._most
        )

    def inserted(self, counters: Counters, count: jax.Array | int = 1) -> Counters:
        """Returns the counters after `count` items were added.

        `count` is an integer `[]` of at least 0, which may be traced. Items that `may_insert` did
        not allow count only up to twice the tolerance.

        Raises:
            TypeError: `count` is no integer.
            ValueError: `count` is negative or beyond int32. In a JAX array, a negative number
                counts as 0, and one beyond int32 as 2^31 - 1.
        """
        # The first items, up to `min_size`, owe no samples.
        count = _to_int32(count)
        missing = jnp.minimum(self.min_size - counters.inserted, count)
        # Allowed calls stay within the tolerance; of others, as much again is remembered.
        room = 2 * self._most - counters.balance
        # Cut before it is multiplied, so that the product stays within int32.
        owed = jnp.minimum(count - missing, room // self._fraction.numerator + 1)
        balance = counters.balance + owed * self._fraction.numerator
        return Counters(inserted=counters.inserted + missing, balance=balance)

    def sampled(self, counters: Counters, count: jax.Array | int = 1) -> Counters:
        """Returns the counters after `count` samples were taken; `count` is as in `inserted`."""
        # As in `inserted`, remember at most as much again as the tolerance, and cut to that first.
        count = _to_int32(count)
        room = counters.balance + 2 * self._most
        taken = jnp.minimum(count, room // self._fraction.denominator + 1)
        return counters.replace(balance=counters.balance - taken * self._fraction.denominator)


def _to_int32(count: jax.Array | int) -> jax.Array:
    """Returns `count`, an integer of any type, as int32 `[]`; raises if it is not valid."""
    array = count if isinstance(count, jax.Array) else np.asarray(count)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape:
        raise TypeError(f"count: expected a single integer, got {count!r}.")
    if isinstance(array, np.ndarray) and not 0 <= int(array) < 2**31:
        raise ValueError(f"count: expected an integer from 0 to {2**31 - 1}, got {count}.")
    # Clip JAX arrays, whose numbers are not known, in their own dtype.
    most = min(int(jnp.iinfo(array.dtype).max), 2**31 - 1)
    return jnp.asarray(array.clip(0, most).astype(jnp.int32))
