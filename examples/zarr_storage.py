"""A storage of one's own: items in compressed arrays of zarr, in a folder.

Two methods say how rows are written and read; all else is `jrb.storages.HostArrays`: the verbs
inside `jit` and outside, units, samplers, checkpoints, and old states that are refused.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import zarr

import jrb
from jrb.ring import Ring
from jrb.storages import HostArrays, PlainRows
from jrb.types import component


class ZarrRows(PlainRows):
    """An array `[N, ...]` of zarr for each leaf, 256 rows a chunk."""

    def __init__(self, path: str, capacity: int, spec: Any) -> None:
        super().__init__(capacity, spec)
        group = zarr.open_group(path, mode="w-")  # raises if there is one
        self.arrays: list[Any] = [
            group.create_array(
                name, shape=(capacity, *leaf.shape), chunks=(256, *leaf.shape), dtype=leaf.dtype
            )
            for name, leaf in zip(self.names, self.raw, strict=True)
        ]

    def write_rows(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Rows at distinct slots."""
        for array, leaf in zip(self.arrays, leaves, strict=True):
            array.oindex[slots] = leaf

    def read_rows(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        """Rows at slots in any order; each chunk is read once."""
        distinct, places = np.unique(slots, return_inverse=True)
        return self.arrays[leaf].oindex[distinct][places]


@component
class ZarrStorage(HostArrays):
    """Keeps items in a group of zarr at a new path."""

    path: str
    unbound: ClassVar[tuple[str, ...]] = ("path",)  # a checkpoint may be loaded to another one

    def make_rows(self, ring: Ring, spec: Any, is_chronological: bool) -> ZarrRows:
        """Arrays of zeros."""
        return ZarrRows(self.path, ring.capacity, spec)


if __name__ == "__main__":
    buffer = jrb.ReplayBuffer(1000, batch_size=4, storage=ZarrStorage("items.zarr"))
    state = buffer.extend(buffer.init({"x": 0.0}), {"x": jnp.arange(100.0)})
    print(buffer.sample(state, jax.random.key(0)).data)
