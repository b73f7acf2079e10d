"""The least work of a buffer on a device: write a row, gather and scatter, at given indices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import items
from .. import setup as wanted
from ..setup import Setup
from .peer import Buffer, Drawn, Peer

BATCHES = 64
"""Number of batches of indices, drawn beforehand."""


class Limit(Peer):
    """Plain JAX arrays."""

    name = "limit"
    on_device = True
    note = "bare JAX: a slice written, a gather and a scatter, with indices given"
    samplers = ("uniform", "prioritized", "without replacement")
    units = ("transition", "n-step", *wanted.WINDOWS, "stack")
    most = 10**9

    def full(self, setup: Setup) -> Buffer:
        """Returns arrays that hold all items."""
        state = {
            "rows": _filled(setup),
            "indices": jnp.asarray(given(setup), jnp.int32),
            "at": jnp.int32(0),
            "priorities": jnp.ones(setup.capacity if setup.prioritized else 1),
        }

        def add(state: Any, rows: Any) -> Any:
            at = state["at"] % jnp.int32(setup.capacity)
            write = lambda leaf, row: lax.dynamic_update_slice_in_dim(leaf, row, at, 0)
            new = jax.tree.map(write, state["rows"], rows)
            return state | {"rows": new, "at": state["at"] + jnp.int32(setup.envs)}

        def sample(state: Any, key: jax.Array) -> tuple[Any, Drawn]:
            turn = lax.shift_right_logical(jax.random.key_data(key).reshape(-1)[-1], jnp.uint32(26))
            indices = state["indices"][turn]
            return None, Drawn(_gathered(setup, state["rows"], indices), indices)

        def update(state: Any, handle: Any, new: Any) -> Any:
            return state | {"priorities": state["priorities"].at[handle].set(new)}

        return Buffer(
            state=state,
            add=add,
            sample=sample,
            update=update,
            nbytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state["rows"])),
            rows=jax.device_put,
            read=lambda data: jax.tree.map(np.asarray, data),
        )


def given(setup: Setup) -> np.ndarray:
    """Returns slots `[64, B]`, with a margin on both sides for units of several rows.

    The margin is `LENGTH` rows, at most a third of all rows.
    """
    rng, room = np.random.default_rng(0), 0
    if setup.unit != "transition":
        room = min(wanted.LENGTH, setup.capacity // setup.envs // 3) * setup.envs
    return rng.integers(room, setup.capacity - room, (BATCHES, setup.batch))


def _filled(setup: Setup) -> Any:
    """Returns all items, leaves `[N, ...]`."""
    blank = lambda leaf: jnp.zeros((setup.capacity, *leaf.shape), leaf.dtype)
    rows, first = jax.tree.map(blank, items.example(setup.items)), 0
    write = jax.jit(_put, donate_argnums=0)
    for piece in setup.pieces():
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), piece)
        rows = write(rows, flat, first)
        first += len(jax.tree.leaves(flat)[0])
    return rows


def _put(rows: Any, part: Any, first: jax.Array) -> Any:
    write = lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, first, 0)
    return jax.tree.map(write, rows, part)


def _gathered(setup: Setup, rows: Any, at: jax.Array) -> Any:
    """Gathers the unit's items at these slots."""
    take = lambda leaf, at: leaf.at[at].get(mode="promise_in_bounds")
    ahead = lambda count: at[:, None] + setup.envs * jnp.arange(count, dtype=jnp.int32)
    if setup.unit in wanted.WINDOWS:
        return jax.tree.map(lambda leaf: take(leaf, ahead(wanted.LENGTH)), rows)
    found = jax.tree.map(lambda leaf: take(leaf, at), rows)
    if setup.unit == "n-step":
        last, powers = at + (wanted.STEPS - 1) * setup.envs, wanted.DISCOUNT ** np.arange(3.0)
        rewards = take(rows["reward"], ahead(wanted.STEPS))
        found["reward"] = rewards @ jnp.asarray(powers, jnp.float32)
        found["next_obs"] = jax.tree.map(lambda leaf: take(leaf, last), rows["next_obs"])
    elif setup.unit == "stack":
        behind = ahead(wanted.STACK) - (wanted.STACK - 1) * setup.envs
        for name in ("obs", "next_obs"):
            found[name] = jax.tree.map(lambda leaf: take(leaf, behind), rows[name])
    return found
