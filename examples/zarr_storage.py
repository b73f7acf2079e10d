"""A custom storage: items in compressed zarr arrays, in a folder.

Two methods write and read rows. The base class `jrb.storages.HostStorage` does all else: it works
inside and outside `jit`, with all units and samplers, with checkpoints, and rejects old states.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import zarr

import jrb
from jrb.ring import Ring
from jrb.storages import HostStorage, PlainRows
from jrb.types import component


class ZarrRows(PlainRows):
    """The rows of all leaves: a zarr array `[N, ...]` for each, in chunks of 256 rows."""

    def __init__(self, path: str, capacity: int, spec: Any) -> None:
        super().__init__(capacity, spec)
        group = zarr.open_group(path, mode="w-")  # raises if the path exists
        self.arrays: list[Any] = [
            group.create_array(
                name, shape=(capacity, *leaf.shape), chunks=(256, *leaf.shape), dtype=leaf.dtype
            )
            for name, leaf in zip(self.names, self.raw, strict=True)
        ]

    def write_rows(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Writes rows at distinct slots."""
        for array, leaf in zip(self.arrays, leaves, strict=True):
            array.oindex[slots] = leaf

    def read_rows(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        """Returns the rows of a leaf at slots in any order; reads each chunk once."""
        distinct, places = np.unique(slots, return_inverse=True)
        return self.arrays[leaf].oindex[distinct][places]


@component
class ZarrStorage(HostStorage):
    """A storage that keeps items in a zarr group at a new path."""

    path: str
    unbound: ClassVar[tuple[str, ...]] = ("path",)  # may change when a checkpoint is loaded

    def make_rows(self, ring: Ring, spec: Any, keys: Any) -> ZarrRows:
        """Returns rows of zeros."""
        return ZarrRows(self.path, ring.capacity, spec)


if __name__ == "__main__":
    buffer = jrb.ReplayBuffer(1000, batch_size=4, storage=ZarrStorage("items.zarr"))
    state = buffer.extend(buffer.init({"x": 0.0}), {"x": jnp.arange(100.0)})
    print(buffer.sample(state, jax.random.key(0)).data)
