"""Shards over the devices of a mesh: who has which, and what they ask each other.

S shards lie on D devices, S / D on each, in order. A body is a function of the shards that lie on
one device; it is called inside `jax.shard_map`, by us or by the user, or once for all shards where
there is no mesh. S shards, s = S / D.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jrb._util.pytree import PyTree
from jrb._xla import compat, gather
from jrb.types.messages import ShardStats


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where shards lie.

    Attributes:
        shards: S.
        mesh: the mesh; None for the one that is set around a call, or one device.
        axis: the axis of it that the shards are cut over.
    """

    shards: int
    mesh: jax.sharding.Mesh | None
    axis: str

    def devices(self) -> int | None:
        """D; None where all shards lie in one place.

        Raises:
            ValueError: no such axis, or one whose devices cannot have as many shards each.
        """
        mesh = compat.ambient_mesh() if self.mesh is None else self.mesh
        if mesh is None:
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
        """The shards that belong on each device of this process; on the default one, all."""
        everything = list(range(self.shards))
        if self.mesh is None:
            return {jax.local_devices()[0]: everything}
        where = NamedSharding(self.mesh, PartitionSpec(self.axis))
        places = where.addressable_devices_indices_map((self.shards,))
        return {one: everything[index[0]] for one, index in places.items() if index is not None}

    def numbers_here(self) -> list[int]:
        """The shards of this process."""
        return sorted({number for group in self.groups().values() for number in group})

    def is_inside(self) -> bool:
        """Whether a `jax.shard_map` over the axis is around this: what is passed is its part."""
        return self.axis in compat.manual_axes()


@dataclasses.dataclass(frozen=True)
class Here:
    """The shards on this device, and how to ask the others.

    Attributes:
        numbers: int32 `[s]`, theirs.
        axis: of the mesh; None where all shards are here.
    """

    numbers: jax.Array
    axis: str | None

    def gather(self, shares: ShardStats) -> ShardStats:
        """What all shards say, arrays `[S]`, in one message: from arrays `[s]`."""
        if self.axis is None:
            return shares
        leaves, structure = jax.tree.flatten(shares)
        words = jnp.stack([lax.bitcast_convert_type(leaf, jnp.int32) for leaf in leaves], axis=1)
        every = lax.all_gather(words, self.axis, tiled=True)
        told = [
            lax.bitcast_convert_type(every[:, place], leaf.dtype)
            for place, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, told)

    def greatest(self, numbers: jax.Array) -> jax.Array:
        """The greatest of all shards' numbers, `[]`."""
        found = jnp.max(numbers)
        return found if self.axis is None else lax.pmax(found, self.axis)

    def total(self, counts: jax.Array) -> jax.Array:
        """The sum of all shards' counts, int32 `[]`; 2^31 - 1 where it is more."""
        rough, exact = jnp.sum(counts.astype(jnp.float32)), jnp.sum(counts, dtype=jnp.int32)
        if self.axis is not None:
            rough, exact = lax.psum((rough, exact), self.axis)
        return jnp.where(rough < 2.0**31 - 2.0**8, exact, _MOST)


_MOST = 2**31 - 1

Cut = int | None
"""The axis of an argument or a result that is cut over shards; None if all shards share it."""

Cuts = Cut | tuple[Cut, ...]
"""The same for a result, or for each part of a tuple of results."""


def run(
    layout: Layout,
    body: Callable[..., Any],
    cuts: tuple[Cut, ...],
    out: Cuts,
    arguments: tuple[PyTree, ...],
) -> Any:
    """Calls a body for the shards of every device.

    Args:
        layout: where they lie.
        body: hashable; called with a `Here`, and with what of each argument is for these shards.
        cuts: for each argument.
        out: for the result.
        arguments: pytrees, or None.
    """
    if layout.is_inside():
        devices = layout.devices() or 1
        return _Local(layout, body, devices)(*arguments)
    return _run(layout, body, cuts, out, gather.few_now(), arguments)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _run(
    layout: Layout,
    body: Callable[..., Any],
    cuts: tuple[Cut, ...],
    out: Cuts,
    few: gather.Few,
    arguments: tuple[PyTree, ...],
) -> Any:
    """The same from outside, compiled: for what is few now, and not what was before."""
    del few
    devices = layout.devices()
    local = _Local(layout, body, devices)
    if devices is None:
        return local(*arguments)
    spec = lambda cut: PartitionSpec(*(None,) * cut, layout.axis) if cut is not None else _WHOLE
    ins = tuple(map(spec, cuts))
    outs = tuple(map(spec, out)) if isinstance(out, tuple) else spec(out)
    return compat.shard_map(local, layout.mesh, ins, outs)(*arguments)


_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class _Local:
    """A body that is told which shards it works for."""

    layout: Layout
    body: Callable[..., Any]
    devices: int | None

    def __call__(self, *arguments: PyTree) -> Any:
        some = self.layout.shards // (self.devices or 1)
        numbers, axis = jnp.arange(some, dtype=jnp.int32), None
        if self.devices is not None:
            axis = self.layout.axis
            numbers = numbers + lax.axis_index(axis) * some
        return self.body(Here(numbers, axis), *arguments)
