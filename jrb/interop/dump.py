"""What another library had stored, and how it becomes a state."""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrb import jitted
from jrb._util import pytree
from jrb._util.pytree import PyTree
from jrb.buffer import ReplayBuffer
from jrb.migrate import pieces, writable
from jrb.state import BufferState
from jrb.types import PrioritizedSampler


class Dump(NamedTuple):
    """What another library had stored.

    Attributes:
        items: a pytree of arrays `[T, ...]` or `[T, E, ...]`, mostly a nested dict, in the order of
            the ring, cut to what was written.
        info: a dict. `cursor`, the row that would be written next; `full`, whether the ring was;
            `num_envs`, E or None; and what else the source has: `priorities`, float `[T]` or
            `[T, E]`, p as an agent reported it, with `alpha`, `eps` and `max_priority`.
    """

    items: PyTree
    info: dict[str, Any]

    def into(self, buffer: ReplayBuffer) -> BufferState:
        """The state of a buffer that holds these items.

        Where the buffer has room for exactly these rows, every item has the place it had, and the
        cursor too. Otherwise rows are written in order of time from place 0 on; of more than there
        is room for, the newest ones.

        Args:
            buffer: with the `num_envs` of the items; priorities go to a `Prioritized` sampler.

        Raises:
            ValueError: another `num_envs`, or items that the buffer does not take.
        """
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
        rows, ring = lengths.pop(), buffer.ring
        spec = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), self.items
        )
        state = buffer.init(spec)
        first = self.info["cursor"] % rows if self.info["full"] and rows else 0
        order = (first + np.arange(rows)) % max(rows, 1)  # oldest first
        is_chronological = buffer.writer.is_chronological
        order = order[max(0, rows - ring.rows) :] if is_chronological else order
        start = first if rows == ring.rows and is_chronological else 0
        state, verbs = self._begun(buffer, state, start, rows), jitted(writable(buffer))
        for piece in pieces(order, pytree.nbytes(spec) * ring.envs):
            rows_ = jax.tree.map(operator.itemgetter(piece), self.items)
            state = verbs.extend(state, rows_)
        return self._with_priorities(buffer, state, order, start)

    def _begun(
        self, buffer: ReplayBuffer, state: BufferState, start: int, rows: int
    ) -> BufferState:
        """An empty state whose next row is `start`; what came before that, nobody knows."""
        if start:
            writer = state.writer.replace(cursor=jnp.full_like(state.writer.cursor, start))
            state = state.replace(writer=writer)
        if self.info["full"] or rows > buffer.ring.rows:
            before = jnp.full(buffer.ring.envs, jnp.iinfo(jnp.int32).max)
            unit = buffer.unit.init_mid_episode(state.unit, before)
            state = state.replace(unit=unit)
        return state

    def _with_priorities(
        self, buffer: ReplayBuffer, state: BufferState, order: np.ndarray, start: int
    ) -> BufferState:
        """The same, with the priorities of the rows in `order`, which begin at row `start`."""
        sampler = buffer.sampler
        if "priorities" not in self.info or not isinstance(sampler, PrioritizedSampler):
            return state
        if not buffer.writer.is_chronological:
            raise ValueError(
                f"into: expected a writer that keeps the order of time, got "
                f"{type(buffer.writer).__name__}: nobody knows to which places the priorities "
                "belong. Leave them out of info."
            )
        ring = buffer.ring
        rows = (start + np.arange(len(order))) % ring.rows
        slots = rows[:, None] * ring.envs + np.arange(ring.envs)
        values = np.asarray(self.info["priorities"], np.float32)[order].reshape(slots.shape)
        most = self.info.get("max_priority")
        assigned = sampler.assign(
            state.sampler, jnp.asarray(slots.reshape(-1)), jnp.asarray(values.reshape(-1)), most
        )
        return state.replace(sampler=assigned)
