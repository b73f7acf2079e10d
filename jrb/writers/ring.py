"""Writers that write rows around the ring, and a writer that refuses all writes."""

from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb._util.pytree import ArrayLike
from jrb.ring import Clock, Occupancy, Ring
from jrb.types import Item, WritePlan, Writer
from jrb.types.messages import PartState
from jrb.types.parts import check_part


class RingWriter(Writer):
    """A writer of rows in their order; a full ring loses its oldest row. The state is a `Clock`."""

    generation_is_lap: ClassVar[bool] = True

    def init(self, ring: Ring, spec: Item) -> Clock:
        """Returns a clock at row 0, or one for each environment."""
        return ring.start(ring.envs) if self.per_env else ring.start()

    def plan(
        self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None
    ) -> tuple[Clock, WritePlan]:
        """Plans the rows after the cursor. Of more than R rows, the last R are written."""
        return WritePlan.of_rows(ring, state, jax.tree.leaves(items)[0].shape[0], mask)

    def held(self, ring: Ring, state: Clock) -> Occupancy:
        """Returns the slots of the newest rows, as many as the clock counts."""
        return Occupancy.of_clock(ring, state)

    def has_lost(self, ring: Ring, state: Clock) -> jax.Array:
        """Returns True if more rows were written than are held, bool `[1]` or `[E]`."""
        return ring.has_lost(state).reshape(-1)

    def generation_of(self, ring: Ring, state: Clock, slots: jax.Array) -> jax.Array:
        """Returns the lap in which each slot was written."""
        return ring.generation(state, slots)

    def evict_oldest(self, ring: Ring, state: Clock, rows: jax.Array) -> Clock:
        """Returns the clock without the `rows` oldest rows."""
        return state.replace(count=jnp.maximum(state.count - rows, 0))

    def reset(self, ring: Ring, state: Clock, token: jax.Array) -> Clock:
        """Returns a clock at row 0 of a later lap."""
        return ring.empty(state)


@pytree.component
class RoundRobin(RingWriter):
    """Writes rows of time one after the other around the ring; a full ring loses its oldest row."""


@pytree.component
class BlockWhenFull(RingWriter):
    """Writes rows until the ring is full, and never overwrites an item that was not drawn yet.

    With `jrb.Queue()`, drawn items make room for new rows, so that no item is lost before it was
    drawn. `can_add` returns True if there is room for a row. Without room, `add` and `extend` raise
    outside `jit`; inside `jit`, and in the methods of `jrb.jitted`, the rows are left out.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(2, writer=jrb.BlockWhenFull())
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(2)})
        >>> bool(buffer.can_add(state))
        False
    """

    blocks_when_full: ClassVar[bool] = True

    def writable(self) -> RoundRobin:
        """Returns `RoundRobin()`, which can fill a buffer with the newest rows of another."""
        return RoundRobin()


@pytree.component
class PerEnvironment(RingWriter):
    """Writes each environment around a ring of its own, N / E slots long.

    A mask may then be `[E]`, or `[T, E]` for `extend`: where it is False, the environment did not
    step. Use it for environments that step at different times, agents that die, and the first steps
    of Gymnasium's vector environments after an end, which are no transitions.

    Draws are uniform over all stored items, however many each environment has. There is no order of
    time between environments: samplers that need one raise an error, and an epoch of
    `jrb.WithoutReplacement()` ends when an environment comes to hold more rows.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(8, num_envs=2, writer=jrb.PerEnvironment())
        >>> state = buffer.init({"x": 0})
        >>> state = buffer.add(state, {"x": jnp.arange(2)}, mask=jnp.array([True, False]))
        >>> int(buffer.size(state))
        1
    """

    per_env: ClassVar[bool] = True

    def in_order(self, ring: Ring, state: Clock) -> tuple[jax.Array, jax.Array]:
        """Returns all slots, first those with most later rows in their environment; and a count."""
        held, slots = self.held(ring, state), jnp.arange(ring.capacity, dtype=jnp.int32)
        # Environments share no clock: their items compare by how many rows came after them.
        later = jnp.where(held.holds(ring, slots), held.after(ring, slots), -1)
        return jnp.argsort(-later, stable=True).astype(jnp.int32), held.size


@pytree.component
class ReadOnly(Writer):
    """Refuses writes, for loaded datasets; otherwise acts as the writer that filled the buffer.

    Fill a buffer, then draw from its state with a description that has this writer:

        buffer = dataclasses.replace(buffer, writer=jrb.ReadOnly())

    Attributes:
        writer: the writer that filled the buffer.
    """

    writes: ClassVar[bool] = False

    writer: Writer = RoundRobin()

    def __post_init__(self) -> None:
        check_part("writer", self.writer)
        # Class variables of other writers; here they depend on the inner writer.
        for name in ("is_chronological", "per_env"):
            object.__setattr__(self, name, getattr(self.writer, name))

    def init(self, ring: Ring, spec: Item) -> Any:
        """Returns the state of the inner writer."""
        return self.writer.init(ring, spec)

    def held(self, ring: Ring, state: PartState) -> Occupancy:
        """Returns the slots that hold items, as the inner writer does."""
        return self.writer.held(ring, state)

    def has_lost(self, ring: Ring, state: PartState) -> jax.Array:
        """Returns the result of the inner writer."""
        return self.writer.has_lost(ring, state)

    def generation_of(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """Returns the result of the inner writer."""
        return self.writer.generation_of(ring, state, slots)

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """Returns the result of the inner writer."""
        return self.writer.in_order(ring, state)

    def best(self, ring: Ring, state: PartState, count: int) -> jax.Array:
        """Returns the result of the inner writer."""
        return self.writer.best(ring, state, count)

    def import_state(self, ring: Ring, state: PartState, old: PartState) -> Any:
        """Returns the result of the inner writer."""
        return self.writer.import_state(ring, state, old)

    def plan(
        self, ring: Ring, state: PartState, items: Item, mask: ArrayLike | None
    ) -> tuple[Any, WritePlan]:
        """Raises TypeError, as writes are refused."""
        self.check_edit("add", frozenset())

    def evict_oldest(self, ring: Ring, state: PartState, rows: jax.Array) -> NoReturn:
        """Raises TypeError, as writes are refused."""
        self.check_edit("add", frozenset())

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> NoReturn:
        """Raises TypeError, as writes are refused."""
        self.check_edit("empty", frozenset())

    def check_edit(self, method: str, names: frozenset[str]) -> NoReturn:
        """Raises TypeError, as writes are refused."""
        raise TypeError(
            f"{method}: expected a buffer that can be written, got one with writer=ReadOnly(). "
            "Write with a description that has the writer that filled it, jrb.RoundRobin() mostly."
        )

    def writable(self) -> Writer:
        """Returns the inner writer."""
        return self.writer
