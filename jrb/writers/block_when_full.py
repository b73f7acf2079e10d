"""A buffer that fills up, and then refuses."""

from typing import ClassVar

from jrb._util import pytree
from jrb.writers.in_turn import InTurn
from jrb.writers.round_robin import RoundRobin


@pytree.component
class BlockWhenFull(InTurn):
    """Writes rows until the ring is full; nothing that is held is ever overwritten.

    With `jrb.Queue()`, what was drawn makes room: nothing is lost before it was. `can_add` tells
    whether there is room for a row. Where there is none, `add` and `extend` raise outside `jit`;
    inside, and in the verbs of `jrb.jitted`, the rows that find no room are left out.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(2, writer=jrb.BlockWhenFull())
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(2)})
        >>> bool(buffer.can_add(state))
        False
    """

    blocks_when_full: ClassVar[bool] = True

    def writable(self) -> RoundRobin:
        """What fills a buffer with the newest rows of another."""
        return RoundRobin()
