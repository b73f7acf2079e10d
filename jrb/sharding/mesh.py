"""Shards over the devices of a mesh: where each is, and how they communicate.

S shards are on D devices, s = S / D on each, in order. A body is a function of the shards on one
device. It is called inside a `jax.shard_map`, ours or the user's; without a mesh, once for all.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jrb._util.pytree import PyTree
from jrb._xla import compat, compiling
from jrb.types.messages import ShardStats

Cut = int | None
"""The axis of an argument or a result that is cut over shards; None if all shards share it."""

Cuts = Cut | tuple[Cut, ...]
"""The cut of a result, or of each part of a tuple of results."""

Body = Callable[..., Any]
"""A function of `LocalShards`, static arguments, and the parts of arrays on this device."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The device that each shard is on.

    Attributes:
        shards: S, the number of shards.
        mesh: the mesh; None for the mesh that is set around a call, or without one a single device.
        axis: the axis of the mesh over which shards are cut.
    """

    shards: int
    mesh: jax.sharding.Mesh | None
    axis: str

    def devices(self) -> int | None:
        """Returns D, the number of devices; None if all shards are on one.

        Raises:
            ValueError: the mesh has no such axis, or its length does not divide S.
        """
        # Without a mesh of the layout, take the one that is set around the call.
        mesh = self.mesh
        if mesh is None:
            mesh = jax.sharding.get_abstract_mesh() if compat.HAS_MESH_IN_TYPES else None
        if mesh is None or mesh.empty:
            return None
        if self.axis not in mesh.shape:
            raise ValueError(
                f"axis: expected one of the mesh, {tuple(mesh.shape)}, got {self.axis!r}."
            )
        devices = mesh.shape[self.axis]
        if self.shards % devices:
            raise ValueError(
                f"shards: expected a multiple of {devices}, the devices along {self.axis!r}, got "
                f"{self.shards}."
            )
        return devices

    def groups(self) -> dict[Any, list[int]]:
        """Returns the numbers of the shards on each device of this process."""
        numbers = list(range(self.shards))
        if self.mesh is None:
            return {jax.local_devices()[0]: numbers}
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axis))
        indices = sharding.addressable_devices_indices_map((self.shards,))
        return {device: numbers[index[0]] for device, index in indices.items() if index is not None}

    def is_inside(self) -> bool:
        """Returns True inside a `jax.shard_map` over the axis, where arguments are parts."""
        return self.axis in compiling.manual_axes()


@dataclasses.dataclass(frozen=True)
class LocalShards:
    """The shards on this device, and how they communicate with all others.

    Attributes:
        numbers: int32 `[s]`, the numbers of the shards.
        axis: the axis of the mesh; None if all shards are on this device.
    """

    numbers: jax.Array
    axis: str | None

    def all_gather(self, stats: ShardStats) -> ShardStats:
        """Returns the stats of all shards, arrays `[S]`, from those of local ones, `[s]`."""
        if self.axis is None:
            return stats
        leaves, structure = jax.tree.flatten(stats)
        # All fields have 32 bits: as words they are sent in one message instead of four.
        words = jnp.stack([lax.bitcast_convert_type(leaf, jnp.int32) for leaf in leaves], axis=1)
        columns = lax.all_gather(words, self.axis, tiled=True).T
        return structure.unflatten(
            lax.bitcast_convert_type(column, leaf.dtype)
            for column, leaf in zip(columns, leaves, strict=True)
        )

    def max(self, numbers: jax.Array) -> jax.Array:
        """Returns the greatest number of all shards, `[]`."""
        greatest = jnp.max(numbers)
        return greatest if self.axis is None else lax.pmax(greatest, self.axis)

    def total(self, counts: jax.Array) -> jax.Array:
        """Returns the sum of the counts of all shards, int32 `[]`, at most 2^31 - 1."""
        # float32 tells whether int32 has wrapped: near 2^31 its steps are 2^8.
        rough, exact = jnp.sum(counts.astype(jnp.float32)), jnp.sum(counts, dtype=jnp.int32)
        if self.axis is not None:
            rough, exact = lax.psum((rough, exact), self.axis)
        return jnp.where(rough < 2.0**31 - 2.0**8, exact, 2**31 - 1)

    def split(self, tree: PyTree, axis: int) -> Any:
        """Splits an axis of leaves: `[..., s * k, ...]` becomes `[..., s, k, ...]`."""

        def split_leaf(leaf: Any) -> jax.Array:
            leaf = jnp.asarray(leaf)
            shape, count = leaf.shape, self.numbers.size
            if shape[axis : axis + 1] == () or shape[axis] % count:
                raise ValueError(
                    f"expected arguments whose axis {axis} can be cut into {count} shards, got "
                    f"shape {shape}. Give one entry for each environment, or for each of the batch."
                )
            return leaf.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])

        return jax.tree.map(split_leaf, tree)


def merge_shards(tree: PyTree) -> Any:
    """Merges the first two axes of leaves: `[s, k, ...]` becomes `[s * k, ...]`."""
    flat = lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
    return jax.tree.map(flat, tree)


def run(
    owner: Hashable,
    layout: Layout,
    body: Body,
    static: tuple[Any, ...],
    cuts: tuple[Cut, ...],
    out: Cuts,
    arrays: tuple[Any, ...],
) -> Any:
    """Calls a body for the shards of each device.

    Args:
        owner: the description with which compiled programs are kept.
        layout: the devices of the shards.
        body: the function; equal calls must pass the same one, as programs are cached by it.
        static: hashable arguments.
        cuts: for each array, the axis that is cut over shards.
        out: the axis of the result that is cut over shards.
        arrays: the array arguments, pytrees or None.
    """
    # Inside the user's `jax.shard_map`, the arrays are parts already.
    if layout.is_inside():
        return _call(layout, body, static, layout.devices() or 1, *arrays)
    # Else a compiled function cuts them over the mesh.
    limits = compiling.current_limits()
    return _compiled_run(owner)(layout, body, static, cuts, out, limits, arrays)


@compiling.kept_by_description
def _compiled_run(owner: Hashable) -> Any:
    # JAX keeps the programs of a function as long as the function. Those of `_run` would stay for
    # ever; those of a partial go with the owner.
    return jax.jit(functools.partial(_run), static_argnums=(0, 1, 2, 3, 4, 5))


def _run(
    layout: Layout,
    body: Body,
    static: tuple[Any, ...],
    cuts: tuple[Cut, ...],
    out: Cuts,
    limits: compiling.SerialLimits,
    arrays: tuple[Any, ...],
) -> Any:
    """Does `run` outside a `jax.shard_map`; the limits are part of the key of programs."""
    # Only for the key of compiled programs: a draw within a loop is another program.
    del limits
    devices = layout.devices()
    local = functools.partial(_call, layout, body, static, devices)
    if devices is None:
        return local(*arrays)

    def spec(cut: Cut) -> PartitionSpec:
        # None for each axis before the one that is cut.
        return PartitionSpec() if cut is None else PartitionSpec(*(None,) * cut, layout.axis)

    outs = tuple(map(spec, out)) if isinstance(out, tuple) else spec(out)
    return compat.shard_map(local, layout.mesh, tuple(map(spec, cuts)), outs)(*arrays)


def _call(
    layout: Layout, body: Body, static: tuple[Any, ...], devices: int | None, *arrays: PyTree
) -> Any:
    """Calls a body with the numbers of the shards on this device."""
    count = layout.shards // (devices or 1)
    numbers, axis = jnp.arange(count, dtype=jnp.int32), None
    if devices is not None:
        axis = layout.axis
        # Shards are laid over devices in order, `count` on each.
        numbers = numbers + lax.axis_index(axis) * count
    return body(LocalShards(numbers, axis), *static, *arrays)
