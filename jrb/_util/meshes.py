"""Meshes by the numbers of their devices, so that descriptions which have one can be pickled."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Named:
    """A mesh without its devices, which are of one process.

    Attributes:
        platform: of the devices.
        ids: their numbers, in the shape of the mesh, a list of lists.
        names: of the axes.
        types: of the axes, as this version of JAX has them.
    """

    platform: str
    ids: Any
    names: tuple[str, ...]
    types: Any


def named(mesh: Mesh | None) -> Named | None:
    """What says which mesh it is."""
    if mesh is None:
        return None
    ids = np.array([one.id for one in mesh.devices.flat]).reshape(mesh.devices.shape).tolist()
    platform = mesh.devices.flat[0].platform
    return Named(platform, ids, tuple(mesh.axis_names), mesh.axis_types)


def found(named: Named | None) -> Mesh | None:
    """The mesh of these devices of this program.

    Raises:
        ValueError: it has no such devices.
    """
    if named is None:
        return None
    try:
        here = {one.id: one for one in jax.devices(named.platform)}
    except RuntimeError:  # no such platform
        here = {}
    ids = np.array(named.ids)
    missing = sorted(set(ids.ravel().tolist()) - here.keys())
    if missing:
        raise ValueError(
            f"mesh: expected the devices {missing} of {named.platform!r} that it was made of, got "
            f"a program with {sorted(here)}. Pickle the description with mesh=None, and give it a "
            "mesh where it is used: dataclasses.replace(sharded, mesh=mesh)."
        )
    devices = np.array([here[number] for number in ids.ravel().tolist()], object)
    return Mesh(devices.reshape(ids.shape), named.names, axis_types=named.types)
