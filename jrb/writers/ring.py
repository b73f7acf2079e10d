"""Writers that write rows of time around the ring, each in place of the oldest one."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrb._core import rows
from jrb._util import pytree
from jrb.ring import Clock, Occupancy, Ring
from jrb.types import Item, WritePlan, Writer


class RingWriter(Writer):
    """Writes rows in their order; a full ring loses its oldest row. The state is a `Clock`."""

    generation_is_lap: ClassVar[bool] = True

    def init(self, ring: Ring, spec: Item) -> Clock:
        """Returns a clock at row 0, or one for each environment."""
        return ring.start(ring.envs) if self.per_env else ring.start()

    def plan(
        self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None
    ) -> tuple[Clock, WritePlan]:
        """Plans the rows after the cursor. Of more than R rows, the last R are written."""
        return rows.plan_rows(ring, state, jax.tree.leaves(items)[0].shape[0], mask)

    def held(self, ring: Ring, state: Clock) -> Occupancy:
        """The last rows, oldest first."""
        return Occupancy.of_clock(ring, state)

    def has_lost(self, ring: Ring, state: Clock) -> jax.Array:
        """True where the clock passed more rows than are held, bool `[1]` or `[E]`."""
        return ring.has_lost(state).reshape(-1)

    def generation_of(self, ring: Ring, state: Clock, slots: jax.Array) -> jax.Array:
        """The lap in which each slot was written."""
        return ring.generation(state, slots)

    def evict_oldest(self, ring: Ring, state: Clock, rows: jax.Array) -> Any:
        """Returns the clock with `rows` fewer rows."""
        return ring.shrunk(state, rows)

    def reset(self, ring: Ring, state: Clock, token: jax.Array) -> Any:
        """Returns a clock at row 0 of a later lap."""
        return ring.emptied(state)


@pytree.component
class RoundRobin(RingWriter):
    """Writes rows of time one after the other around the ring; a full ring loses its oldest row."""


@pytree.component
class BlockWhenFull(RingWriter):
    """Writes rows until the ring is full, and never overwrites an item that was not drawn yet.

    With `jrb.Queue()`, items that were drawn make room: nothing is lost before it was drawn.
    `can_add` returns whether there is room for a row. Without room, `add` and `extend` raise
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
        """The writer that fills a buffer with the newest rows of another."""
        return RoundRobin()


@pytree.component
class PerEnvironment(RingWriter):
    """Writes each environment around a ring of its own, N / E slots long.

    A mask may then be `[E]`, or `[T, E]` for `extend`: where it is False, the environment did not
    step. For environments that step at their own pace, agents that die, and the first steps of
    Gymnasium's vector environments after an end, which are no transitions.

    Draws are uniform over all stored items, however many are of each environment. There is no order
    of time between environments: samplers that need one raise an error, and an epoch of
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
        """All slots, by the rows of their environment written since; and the number of items."""
        held, slots = self.held(ring, state), jnp.arange(ring.capacity, dtype=jnp.int32)
        later = jnp.where(held.holds(ring, slots), held.after(ring, slots), -1)
        return jnp.argsort(-later, stable=True).astype(jnp.int32), held.size
