"""What stands for a storage on the host in the jitted parts of a verb."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jrb import pytree
from jrb.keys import Keys
from jrb.ring import Held, Ring
from jrb.types import Item, Where, Write


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Something for each leaf, mostly the same for many of them.

    Attributes:
        found: what there is, each once.
        index: of each leaf.
    """

    found: list[Any]
    index: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def each(self, make: Callable[[Any], Any]) -> list[Any]:
        """What `make` gives of what there is, once for each, for all leaves."""
        made = [make(one) for one in self.found]
        return [made[index] for index in self.index]


def places(where: list[jax.Array], locate: Callable[[jax.Array], Any]) -> Places:
    """What is to be known of the slots at which leaves are read."""
    unique = {id(slots): slots for slots in where}
    order = list(unique)
    return Places(
        found=[locate(slots) for slots in unique.values()],
        index=tuple(order.index(id(slots)) for slots in where),
    )


@pytree.component
class Elsewhere:
    """Says where it would write, and reads what it is given."""

    def init(self, ring: Ring, spec: Item, keys: Keys) -> None:
        """Nothing."""
        del ring, spec, keys

    def spec(self, ring: Ring, state: Any, keys: Keys) -> Item:
        """Nothing."""
        del ring, keys
        return state

    def write(
        self, ring: Ring, state: Any, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[jax.Array, Write]:
        """The slots, int32 `[T, E]`, in place of a state."""
        del ring, state, held, items, keys
        return write.slots, write

    def locate(self, ring: Ring, state: Any, held: Held, where: list[jax.Array]) -> Places:
        """The slots at which each leaf is read."""
        del ring, state, held
        return places(where, lambda slots: slots)

    def read(self, ring: Ring, state: Any, held: Held, where: Where, keys: Keys) -> Item:
        """The state itself."""
        del ring, held, where, keys
        return state

    def reset(self, ring: Ring, state: Any, token: jax.Array) -> Any:
        """Nothing."""
        del ring, token
        return state

    def hold(self, state: Any, token: jax.Array) -> Any:
        """Nothing."""
        del token
        return state
