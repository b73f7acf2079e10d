"""The class `Dump`: items from another library's buffer, and their conversion to a state."""

import operator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jrb import jitted
from jrb.authoring import tree_nbytes
from jrb.buffer import ReplayBuffer
from jrb.migrate import pieces, writable
from jrb.state import BufferState
from jrb.types import PrioritizedSampler


class Dump(NamedTuple):
    """The items that another library's buffer held.

    Attributes:
        items: a pytree of arrays `[T, ...]` or `[T, E, ...]`, usually a nested dict: the written
            rows, in the order of the ring.
        info: a dict with `cursor`, the row to be written next; `full`, True if all rows were
            written; `num_envs`, E or None; and, if the source has them, `priorities`, float `[T]`
            or `[T, E]` (p, not p^alpha), `alpha`, `eps` and `max_priority`.
    """

    items: Any
    info: dict[str, Any]

    def into(self, buffer: ReplayBuffer) -> BufferState:
        """Returns a state of `buffer` that holds these items.

        If the buffer has exactly as many rows as the dump, every item keeps its slot. Otherwise
        rows are written in order of time from slot 0 on; if there are too many, only the newest.

        Args:
            buffer: a buffer with the `num_envs` of the items. Its sampler receives the priorities
                if it is prioritized.

        Raises:
            ValueError: the buffer has another `num_envs`, or does not accept the items.
        """
        # Check that the buffer takes the items.
        envs = self.info["num_envs"]
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"into: expected a ReplayBuffer, got {type(buffer).__name__}.")
        if envs != buffer.num_envs:
            raise ValueError(
                f"into: expected a buffer with num_envs={envs}, as the items have it, got "
                f"num_envs={buffer.num_envs}."
            )
        axes = 1 if envs is None else 2
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(self.items)}
        if len(lengths) != 1:
            raise ValueError(f"into: expected leaves of one length, got {sorted(lengths)}.")
        rows, ring, writer = lengths.pop(), buffer.ring, buffer.writer
        item = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)
        spec = jax.tree.map(item, self.items)
        state = buffer.init(spec)
        # Find the order of time, oldest row first; of too many rows, keep the newest.
        first = self.info["cursor"] % rows if self.info["full"] and rows else 0
        order = (first + np.arange(rows)) % max(rows, 1)
        order = order[max(0, rows - ring.rows) :] if writer.is_chronological else order
        # Write from the dump's oldest row on, so that every item keeps its slot.
        start = first if rows == ring.rows and writer.is_chronological else 0
        if start:
            cursor = jnp.full_like(state.writer.cursor, start)
            state = state.replace(writer=state.writer.replace(cursor=cursor))
        # Tell the unit if episodes may have begun before these rows.
        if self.info["full"] or rows > ring.rows:
            before = jnp.full(ring.envs, jnp.iinfo(jnp.int32).max)
            state = state.replace(unit=buffer.unit.init_mid_episode(state.unit, before))
        methods = jitted(writable(buffer))
        for piece in pieces(order, tree_nbytes(spec) * ring.envs):
            state = methods.extend(state, jax.tree.map(operator.itemgetter(piece), self.items))
        if "priorities" in self.info and isinstance(buffer.sampler, PrioritizedSampler):
            return self._with_priorities(buffer, state, order, start)
        return state

    def _with_priorities(
        self, buffer: ReplayBuffer, state: BufferState, order: np.ndarray, start: int
    ) -> BufferState:
        """Returns the state with the priorities of rows in `order`, stored from row `start` on."""
        ring, sampler = buffer.ring, cast(PrioritizedSampler, buffer.sampler)
        if not buffer.writer.is_chronological:
            raise ValueError(
                f"into: expected a writer that keeps the order of time, got "
                f"{type(buffer.writer).__name__}: no slot is known for each of the priorities. "
                "Leave them out of info."
            )
        # The rows were written one after the other from row `start` on.
        places = (start + np.arange(len(order))) % ring.rows
        slots = places[:, None] * ring.envs + np.arange(ring.envs)
        values = np.asarray(self.info["priorities"], np.float32)[order].reshape(-1)
        most, slots = self.info.get("max_priority"), jnp.asarray(slots.reshape(-1))
        assigned = sampler.assign(state.sampler, slots, jnp.asarray(values), most)
        return state.replace(sampler=assigned)
