"""Checkpoints with items of 64 bits, for programs in which JAX keeps 32."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jrb import read
from jrb._util import casting, pytree
from jrb._xla import compat
from jrb.checkpoint import apart, host_items, matching, rows, snapshots, state_specs
from jrb.state import Device

Load = Callable[[Device], tuple[Any, Any]]


def narrowed(load: Load, path: str, given: bool, device: Device, cast: bool) -> tuple[Any, Any]:
    """What is loaded; with `cast` its items are converted where JAX would not keep their dtypes.

    Args:
        load: loads a buffer and its state to a device.
        path: where they are.
        given: whether the description is one of the user.
        device: where they go.
        cast: whether items are converted, as by `jrb.ReplayBuffer(cast=True)`.
    """
    try:
        return load(device)
    except matching.WideError:
        if not cast:
            raise
    # No other part of a state depends on the dtypes of items.
    with compat.enable_x64():
        buffer, wide = load(None)
        saved = snapshots.taken(buffer, wide, "load")
        if not isinstance(saved, snapshots.Snapshot) or saved.batch:
            raise TypeError(f"{path}: cast: expected a single state, got states under vmap.")
        items, slots = read.items(buffer, wide), apart.in_order(saved.plain, wide.writer)
        rest = apart.without(saved.plain, saved.state)
    spec = jax.tree.map(matching.narrow, saved.spec)
    leaves = jax.tree.leaves(casting.kept(items, "load"))
    buffer = host_items.prepared(buffer, given and not host_items.is_at(path, buffer))
    pieces = [
        (slots[part], [leaf[part] for leaf in leaves])
        for part in rows.in_parts(np.arange(len(slots)), pytree.nbytes(spec))
    ]
    if host_items.is_on_host(buffer):
        return buffer, host_items.attach(buffer, rest, host_items.filled(buffer, spec, pieces))
    want = state_specs.blank(buffer, spec)
    return buffer, apart.joined(buffer, want, rest, spec, pieces, device)
