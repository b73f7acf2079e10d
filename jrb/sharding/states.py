"""The states of shards, one by one, and together again.

S shards. What is sharded over devices is taken and put back shard by shard, where it lies: nothing
moves from one device to another.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrb._core import memory
from jrb._util import casting
from jrb._util.pytree import Leaf
from jrb.sharding.sharded import Sharded
from jrb.state import BufferState


def names(sharded: Sharded) -> list[str]:
    """A name for each shard, in order."""
    return [f"{number:0{len(str(sharded.shards - 1))}}" for number in range(sharded.shards)]


def split(sharded: Sharded, state: Any) -> dict[int, BufferState]:
    """The states of the shards that this process has, by number.

    Raises:
        ValueError: it is no state of so many shards.
    """
    leaves, structure = jax.tree.flatten(state)
    for leaf in leaves:
        if not np.ndim(leaf) or np.shape(leaf)[0] != sharded.shards:
            raise ValueError(
                f"expected a state of {sharded.shards} shards, arrays [{sharded.shards}, "
                f"...], got one with an array of shape {np.shape(leaf)}."
            )
    items = set(map(id, jax.tree.leaves(state.storage)))
    parts = [_pieces(leaf, id(leaf) in items) for leaf in leaves]
    here = sorted(set.intersection(*map(set, parts)))
    return {
        number: jax.tree.unflatten(structure, [part[number] for part in parts]) for number in here
    }


def _pieces(leaf: Leaf, is_large: bool) -> dict[int, Any]:
    """What each shard that is here has of an array, by its number."""
    if isinstance(leaf, np.ndarray):
        return dict(enumerate(leaf))
    found = {}
    for piece in leaf.addressable_shards:
        first = piece.index[0].start or 0
        for place in range(piece.data.shape[0]):
            found.setdefault(first + place, _taken(piece.data, place, is_large))
    return found


def _taken(array: jax.Array, place: int, is_large: bool) -> Any:
    """One shard of those on a device: on the CPU without a copy, a large one where it lies."""
    if casting.is_keys(array.dtype):
        return array[place]
    if memory.on_host(array):
        return np.asarray(array)[place]
    return memory.Part(array, place) if is_large else array[place]


def join(sharded: Sharded, states: dict[int, BufferState]) -> Any:
    """The state of the shards, from those that this process has, by number.

    Args:
        sharded: whose mesh says where they go.
        states: for each device, those of its shards lie on it, or on the host.
    """
    if sharded.mesh is None:
        each = [states[number] for number in range(sharded.shards)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    spec = PartitionSpec(sharded.axis)
    where = NamedSharding(sharded.mesh, spec)
    groups = sharded.layout.groups()
    numbers = [number for group in groups.values() for number in group]
    leaves = {number: jax.tree.leaves(states[number]) for number in set(numbers)}
    structure = jax.tree.structure(next(iter(states.values())))
    together = []
    for place, like in enumerate(next(iter(leaves.values()))):
        pieces = [
            _stacked([leaves[number][place] for number in group], device)
            for device, group in groups.items()
        ]
        shape = (sharded.shards, *like.shape)
        together.append(jax.make_array_from_single_device_arrays(shape, where, pieces))
    return jax.tree.unflatten(structure, together)


def _stacked(leaves: list[Any], device: Any) -> jax.Array:
    """Arrays `[s, ...]` on a device."""
    placed = [jax.device_put(leaf, device) for leaf in leaves]
    if len(placed) == 1:
        return _as_one(placed[0])
    return jnp.stack(placed)


@jax.jit
def _as_one(leaf: jax.Array) -> jax.Array:
    return leaf[None]


def without_mesh(sharded: Any) -> Any:
    """The description without its mesh, of which no file knows."""
    return dataclasses.replace(sharded, mesh=None) if isinstance(sharded, Sharded) else sharded


def on_mesh(sharded: Sharded, device: Any) -> Sharded:
    """The description on the mesh that was named in place of a device.

    Raises:
        TypeError: it is no mesh.
    """
    if device is None:
        return sharded
    if not isinstance(device, Mesh):
        raise TypeError(
            "load: device: expected a mesh for a checkpoint of shards, got "
            f"{type(device).__name__}. Pass the mesh whose axis {sharded.axis!r} they go over."
        )
    return dataclasses.replace(sharded, mesh=device)
