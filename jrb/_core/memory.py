"""Converts arrays on a device to bytes and back, large ones in pieces."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util.pytree import Leaf
from jrb._xla import compat

Device = jax.Device | jax.sharding.Sharding | None

# Smaller arrays are not copied by a compiled program.
_SMALL = 4096
# Primes of xxHash.
_ODD = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], np.uint32)

PIECE = 8 << 20
"""Bytes that are transferred at a time."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A lazy `array[index]` of an array on a device: as it may be large, it is copied when read."""

    array: jax.Array
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.array[self.index][index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array[self.index], dtype)


def on_host(leaf: Leaf) -> bool:
    """Returns True if the host can read the array without a transfer."""
    if isinstance(leaf, np.ndarray | Part):
        return isinstance(leaf, np.ndarray)
    return len(leaf.devices()) == 1 and all(d.platform == "cpu" for d in leaf.devices())


def reader(leaf: Leaf) -> Callable[[int, int], Any]:
    """Returns a function that reads bytes `start` to `stop` of an array; on the host, a view."""
    if isinstance(leaf, Part):
        whole, first = reader(leaf.array), leaf.index * leaf.size * leaf.dtype.itemsize
        return lambda start, stop: whole(first + start, first + stop)
    if on_host(leaf):
        whole = view(np.asarray(leaf))
        return lambda start, stop: whole[start:stop]
    if len(leaf.devices()) > 1:
        return _reader_of_shards(leaf)
    width = leaf.dtype.itemsize

    def read(start: int, stop: int) -> memoryview:
        # Positions may be beyond 2^31.
        with compat.enable_x64():
            return view(np.asarray(_cut(leaf, np.int64(start // width), (stop - start) // width)))

    return read


def _reader_of_shards(leaf: jax.Array) -> Callable[[int, int], Any]:
    """Returns the reader of a sharded array; it reads each byte from one device that has it."""
    # Of replicas, which begin at the same row, keep one.
    pieces = {
        (piece.index[0].start or 0) if piece.index else 0: piece.data
        for piece in leaf.addressable_shards
    }
    # The bytes of a piece are adjacent only if the array is cut along its first axis alone, and
    # they are complete only if this process has all pieces. Otherwise let JAX join them.
    has_other_cuts = any(piece.shape[1:] != leaf.shape[1:] for piece in pieces.values())
    if has_other_cuts or sum(piece.shape[0] for piece in pieces.values()) != leaf.shape[0]:
        whole = view(np.asarray(leaf))
        return lambda start, stop: whole[start:stop]
    row = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
    parts = [(first * row, len(piece) * row, reader(piece)) for first, piece in pieces.items()]
    parts.sort(key=lambda part: part[0])

    def read(start: int, stop: int) -> Any:
        # Join what overlaps the range, without a copy if that is one piece.
        chunks = [
            read_one(max(start - first, 0), min(stop - first, nbytes))
            for first, nbytes, read_one in parts
            if first < stop and start < first + nbytes
        ]
        return chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))

    return read


def view(array: np.ndarray) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat.view(np.uint8)) if flat.size else memoryview(b"")


def block_hashes(leaf: Leaf, size: int) -> np.ndarray:
    """Returns a hash of each block of an array, computed on its device, uint64 `[K]`.

    Args:
        leaf: a JAX array, or a `Part` of one; PRNG keys as their words.
        size: the number of bytes of a block, a multiple of those of an element.
    """
    part = (leaf.array, leaf.index) if isinstance(leaf, Part) else (leaf, None)
    # Arrays may have 64 bits, or more than 2^31 elements.
    with compat.enable_x64():
        hashes = _block_hashes(*part, size // leaf.dtype.itemsize)
    return np.ascontiguousarray(hashes).view(np.uint64)[:, 0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _block_hashes(leaf: jax.Array, index: int | None, size: int) -> jax.Array:
    """Returns two sums for each block of `size` elements, uint32 `[K, 2]`."""
    # Each word goes through a bijection that depends on its position. So a change of one word
    # always changes the sums, and a swap of two words does so except in one case in 2^64.
    flat = (leaf if index is None else leaf[index]).reshape(-1)
    flat = jnp.pad(flat, (0, -flat.size % size))
    # Convert the elements to unsigned words; one of 64 bits becomes two.
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.stack([flat.real, flat.imag], axis=-1)
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(flat.dtype.itemsize, jnp.uint32)
    words = lax.bitcast_convert_type(flat, unsigned).astype(jnp.uint32)
    words = words.reshape(flat.shape[0] // size, -1)
    position = jnp.arange(words.shape[1], dtype=jnp.uint32)[None]
    mixed = (words + position * _ODD[0]) * _ODD[1]
    # Two different bijections, whose sums are the two halves of the hash.
    sums = [
        jnp.sum((mixed ^ (mixed >> bits)) * odd, axis=1, dtype=jnp.uint32)
        for bits, odd in ((15, _ODD[2]), (13, _ODD[0]))
    ]
    return jnp.stack(sums, axis=1)


def put_on_device(array: np.ndarray, device: Device = None) -> jax.Array:
    """Returns an aligned NumPy array on the device; the caller must not use the array again."""
    if array.nbytes <= PIECE or _goes_to_cpu(device):
        # The copy is a compiled program of its own, which is not worth it for a small array.
        is_copied = _SMALL < array.nbytes <= PIECE
        result = jnp.array(array, copy=True) if is_copied else jax.device_put(array)
    else:
        # Transfer pieces into an array on the device.
        whole, result = view(array), jnp.zeros(array.size, array.dtype)
        # Positions may be beyond 2^31.
        with compat.enable_x64():
            for start in range(0, len(whole), PIECE):
                block = np.frombuffer(whole[start : start + PIECE], array.dtype)
                result = _fill(result, block, np.int64(start // array.dtype.itemsize))
            result = _shaped(result, array.shape)
    return result if device is None else jax.device_put(result, device)


def _goes_to_cpu(device: Device) -> bool:
    if device is None:
        return jax.default_backend() == "cpu"
    devices = device.device_set if isinstance(device, jax.sharding.Sharding) else {device}
    return all(one.platform == "cpu" for one in devices)


_cut = jax.jit(
    lambda leaf, start, length: lax.dynamic_slice_in_dim(leaf.reshape(-1), start, length),
    static_argnums=2,
)
_fill = jax.jit(functools.partial(lax.dynamic_update_slice_in_dim, axis=0), donate_argnums=0)
_shaped = jax.jit(jnp.reshape, static_argnums=1, donate_argnums=0)
