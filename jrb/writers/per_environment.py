"""Each environment for itself."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jrb._core import rows
from jrb._util import pytree
from jrb.occupancy import PerEnvOccupancy
from jrb.ring import Clock, Ring
from jrb.types import Item, WritePlan
from jrb.writers.in_turn import InTurn


@pytree.component
class PerEnvironment(InTurn):
    """Writes each environment around a ring of its own, N / E slots long.

    A mask may then be `[E]`, or `[T, E]` for `extend`: where it is False, it is as if that
    environment had not stepped. For environments that step at their own pace, agents that die, and
    the first steps of Gymnasium's vector environments after an end, which hold no transition.

    Draws are uniform over all that is held, however much that is of each environment. Between
    environments there is no order of time: samplers that ask for one refuse, and an epoch of
    `jrb.WithoutReplacement()` ends when an environment comes to hold more.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(8, num_envs=2, writer=jrb.PerEnvironment())
        >>> state = buffer.init({"x": 0})
        >>> state = buffer.add(state, {"x": jnp.arange(2)}, mask=jnp.array([True, False]))
        >>> int(buffer.size(state))
        1
    """

    per_env: ClassVar[bool] = True

    def init(self, ring: Ring, spec: Item) -> Clock:
        """Clocks at row 0."""
        return ring.start(ring.envs)

    def plan(
        self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None
    ) -> tuple[Clock, WritePlan]:
        """The rows after each cursor. Of more than R rows of an environment, its last R."""
        return rows.in_lanes(ring, state, jax.tree.leaves(items)[0].shape[0], mask)

    def held(self, ring: Ring, state: Clock) -> PerEnvOccupancy:
        """The last rows of each environment, oldest first."""
        return PerEnvOccupancy.by(ring, state)

    def in_order(self, ring: Ring, state: Clock) -> tuple[jax.Array, jax.Array]:
        """All slots, by how many rows of their environment came since; and how many are held."""
        held, slots = self.held(ring, state), jnp.arange(ring.capacity, dtype=jnp.int32)
        later = jnp.where(held.holds(ring, slots), held.after(ring, slots), -1)
        return jnp.argsort(-later, stable=True).astype(jnp.int32), held.size
