"""The ring: each row takes the place of the oldest one."""

from jrb._util import pytree
from jrb.writers.in_turn import InTurn


@pytree.component
class RoundRobin(InTurn):
    """Writes rows of time one after the other around the ring; a full ring loses its oldest row."""
