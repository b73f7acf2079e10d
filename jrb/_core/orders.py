"""Where in an array the row of a slot lies: in the order of slots, or one environment by another.

N capacity, E environments, R = N / E, W the elements of a row. Slot s is row s // E of environment
s % E. Rows that follow one another in time lie E rows apart in the order of slots, and side by side
environment by environment. Nobody else has to know: rows are named by their slots.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._xla import gather
from jrb.types import WritePlan


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of the rows of an array.

    Attributes:
        envs: E of arrays `[E, R, W]`; None for arrays `[N, W]` in the order of slots.
    """

    envs: int | None = None

    @property
    def axes(self) -> int:
        """How many axes of an array stand for slots."""
        return 1 if self.envs is None else 2

    def lead(self, capacity: int) -> tuple[int, ...]:
        """The axes that stand for N slots."""
        return (capacity,) if self.envs is None else (self.envs, capacity // self.envs)

    def capacity(self, shape: tuple[int, ...]) -> int:
        """N of an array of this shape, which may have further axes before."""
        return math.prod(shape[-1 - self.axes : -1])

    def at(self, slots: Any) -> tuple[Any, ...]:
        """The indices of slots, integers that are not negative; N lies outside."""
        return (slots,) if self.envs is None else (slots % self.envs, slots // self.envs)

    def places(self, numbers: np.ndarray, capacity: int) -> np.ndarray:
        """Where rows lie, by their numbers: slot s of buffer v has number v * N + s."""
        if self.envs is None:
            return numbers
        buffer, slots = np.divmod(numbers, capacity)
        env, row = self.at(slots)
        return buffer * capacity + env * (capacity // self.envs) + row

    def by_slot(self, words: Any) -> Any:
        """All rows in the order of slots, `[..., N, W]`; else a copy."""
        if self.envs is None:
            return words
        *batch, envs, rows, width = words.shape
        return words.swapaxes(-3, -2).reshape(*batch, envs * rows, width)

    def put(self, array: jax.Array, write: WritePlan, words: jax.Array) -> jax.Array:
        """Rows `[T, E, W]` at the slots of a write (see `jrb._core.rows.put`)."""
        if write.consecutive:
            # Signed: under `vmap` JAX 0.5 writes nothing where such an index has no sign.
            start = self._known(write.starts[0])[-1].astype(jnp.int32)
            block = words[0] if self.envs is None else words[0][:, None]
            return lax.dynamic_update_slice_in_dim(array, block, start, axis=self.axes - 1)
        words = words.reshape(-1, words.shape[-1])
        return self.edit(array, write.slots.reshape(-1), slice(None), words)

    def edit(
        self, array: jax.Array, slots: jax.Array | None, part: slice, words: jax.Array
    ) -> jax.Array:
        """A part of the rows at slots, int32 `[B]`, without those of N; None for all N in order."""
        if slots is not None:
            return array.at[(*self._known(slots), part)].set(words, mode="drop")
        if self.envs is not None:
            words = words.reshape(-1, self.envs, words.shape[-1]).swapaxes(0, 1)
        return array.at[..., part].set(words)

    def get(self, array: jax.Array, slots: jax.Array, start: int, stop: int) -> jax.Array:
        """Some elements of the rows at slots `[...]`, all in range: `[..., stop - start]`."""
        at = self._known(slots)
        if stop - start == array.shape[-1]:
            return gather.items_at(array, *at)
        axes = tuple(range(self.axes))
        return lax.gather(
            array,
            jnp.stack([*at, jnp.full_like(at[0], start)], axis=-1),
            lax.GatherDimensionNumbers(
                offset_dims=(slots.ndim,),
                collapsed_slice_dims=axes,
                start_index_map=(*axes, len(axes)),
            ),
            slice_sizes=(*(1 for _ in axes), stop - start),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )

    def _known(self, slots: jax.Array) -> tuple[jax.Array, ...]:
        """The indices of slots, of which none is negative."""
        slots = slots.astype(jnp.uint32)
        if self.envs is None:
            return (slots,)
        envs = np.uint32(self.envs)
        return lax.rem(slots, envs), lax.div(slots, envs)
