"""flashbax: item buffers for transitions, trajectory buffers for windows and n-step returns."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import items
from .. import setup as wanted
from ..setup import Setup
from .peer import Buffer, Drawn, Peer

_ROWS = {"transition": 1, "slices": wanted.LENGTH, "n-step": wanted.STEPS, "stack": wanted.STACK}


class Flashbax(Peer):
    """Pure functions of a state."""

    name = "flashbax"
    packages = {"flashbax": "flashbax"}
    on_device = True
    note = "windows cross the ends of episodes; stacks and n-step returns are made of windows"
    samplers = ("uniform", "prioritized")
    units = tuple(_ROWS)
    most = 10**8

    def full(self, setup: Setup) -> Buffer:
        """A full buffer, written a piece at a time."""
        as_items = setup.unit == "transition"
        buffer, example = (_items if as_items else _trajectories)(setup), items.example(setup.items)
        state, add = buffer.init(example), jax.jit(buffer.add, donate_argnums=0)
        for piece in setup.pieces():
            state = _written(state, add, piece, as_items)
        read = functools.partial(_drawn, setup)

        def add_row(state: Any, rows: Any) -> Any:
            one = rows if as_items else jax.tree.map(lambda leaf: leaf[:, None], rows)
            return buffer.add(state, one)

        def sample(state: Any, key: jax.Array) -> tuple[Any, Drawn]:
            found = buffer.sample(state, key)
            return None, Drawn(read(found.experience), found.indices if setup.prioritized else ())

        return Buffer(
            state=state,
            add=add_row,
            sample=sample,
            update=lambda state, handle, new: buffer.set_priorities(state, handle, new),
            nbytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
            rows=jax.device_put,
            read=lambda data: jax.tree.map(np.asarray, data),
        )


def _items(setup: Setup) -> Any:
    import flashbax

    make = flashbax.make_prioritised_item_buffer if setup.prioritized else flashbax.make_item_buffer
    sizes = {"max_length": setup.capacity, "min_length": 1, "sample_batch_size": setup.batch}
    return make(**sizes, **_device(setup), add_batches=True)


def _device(setup: Setup) -> dict[str, str]:
    """Returns the device option, by which flashbax chooses how to set priorities."""
    return {"device": jax.default_backend()} if setup.prioritized else {}


def _trajectories(setup: Setup) -> Any:
    import flashbax

    one, other = flashbax.make_trajectory_buffer, flashbax.make_prioritised_trajectory_buffer
    return (other if setup.prioritized else one)(
        **_device(setup),
        add_batch_size=setup.envs,
        sample_batch_size=setup.batch,
        sample_sequence_length=_ROWS[setup.unit],
        period=1,
        min_length_time_axis=_ROWS[setup.unit],
        max_length_time_axis=setup.capacity // setup.envs,
    )


def _written(state: Any, add: Any, piece: Any, as_items: bool) -> Any:
    """Adds a piece `[T, E, ...]`, 5,000 rows per call, because larger calls are slow."""
    turned = lambda leaf: leaf.reshape(-1, *leaf.shape[2:]) if as_items else leaf.swapaxes(0, 1)
    whole = jax.tree.map(turned, piece)
    total = jax.tree.leaves(whole)[0].shape[0 if as_items else 1]
    for first in range(0, total, 5000):
        cut = slice(first, first + 5000)
        part = jax.tree.map(lambda leaf: leaf[cut] if as_items else leaf[:, cut], whole)
        state = add(state, part)
    return state


def _drawn(setup: Setup, found: Any) -> Any:
    """Computes the unit's items from windows `[B, L, ...]`."""
    if setup.unit == "n-step":
        powers = wanted.DISCOUNT ** np.arange(wanted.STEPS, dtype=np.float32)
        first = jax.tree.map(lambda leaf: leaf[:, 0], found)
        return first | {
            "reward": found["reward"] @ jnp.asarray(powers),
            "done": found["done"].any(axis=1),
            "next_obs": jax.tree.map(lambda leaf: leaf[:, -1], found["next_obs"]),
        }
    if setup.unit == "stack":
        last = jax.tree.map(lambda leaf: leaf[:, -1], found)
        return last | {"obs": found["obs"], "next_obs": found["next_obs"]}
    return found
