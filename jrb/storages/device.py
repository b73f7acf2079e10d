"""Arrays on the device: one for each large leaf, `[N, ...]`, and few for all small ones."""

from typing import Any

import jax

from jrb._core import packed
from jrb._util import checks, pytree
from jrb.storages import shared_next
from jrb.types import AuxRead, Context, Item, SlotsForLeaf, Storage, WritePlan
from jrb.types.messages import PartState


@pytree.component
class DeviceStorage(Storage):
    """Keeps the leaves of the items in arrays `[N, ...]`, bit for bit.

    Leaves of up to a kilobyte lie side by side, where their elements are of one size: then a draw
    and an add cost little more for many leaves than for few. `state.storage["action"]` is then a
    copy of that leaf, `[N, ...]`, and `state.storage.leaves` one of all, a pytree like the items.
    Functions of `jax.tree` see the arrays themselves, `[N, W]` with W elements of all these leaves,
    and so do shardings of a state: cut over N, all is well; cut over W, it computes the same, but
    devices exchange more.

    The arrays hold rows in the order of slots. Where the unit reads windows (`jrb.Sequence`) and
    there are several environments, they are `[E, R, W]`, one environment after the other, so that
    a window is one run of memory; slots, views, draws and checkpoints do not depend on it.

    Attributes:
        share_next_observations: if True, a next observation that equals, bit for bit, the
            observation of the same environment's next row takes no memory of its own. Reads
            return exactly what was written. Rows must arrive in the order of time.
        terminal_capacity: with `share_next_observations`, the number of next observations that
            can be stored by themselves, mostly those at the ends of episodes: at least E, at most
            N. None for the larger of N / 32 and E. When more are needed, the oldest rows are
            removed early: `size` reports it, and `take` reads next observations only of slots
            that are held.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> frame = jnp.zeros((84, 84), jnp.uint8)
        >>> step = {"observation": frame, "next": {"observation": frame}}
        >>> plain = jrb.ReplayBuffer(10_000)
        >>> storage = jrb.DeviceStorage(share_next_observations=True)
        >>> shared = jrb.ReplayBuffer(10_000, storage=storage)
        >>> round(shared.nbytes(step) / plain.nbytes(step), 2)
        0.52
    """

    share_next_observations: bool = False
    terminal_capacity: int | None = None

    def __post_init__(self) -> None:
        checks.flag("share_next_observations", self.share_next_observations)
        if self.terminal_capacity is not None:
            checks.count("terminal_capacity", self.terminal_capacity)

    @property
    def requires_chronological(self) -> bool:
        """True if rows must come in the order of time."""
        return self.share_next_observations

    def init(self, context: Context, spec: Item) -> Any:
        """Makes arrays of zeros."""
        ring = context.ring
        if not self.share_next_observations:
            # Measured on a CPU, windows of 64 rows of 160 bytes in a ring of 10^6: an add and a
            # draw of 32 take 0.86 of the time with 16 environments, 0.73 with 64; adds cost the
            # same.
            in_runs = context.reads_windows and ring.envs > 1
            order = packed.RowOrder(ring.envs if in_runs else None)
            return packed.zeros(ring.capacity, spec, context.keys, order)
        count = self.terminal_capacity
        if count is None:
            count = max(ring.capacity // 32, ring.envs)
        if count < ring.envs:
            raise ValueError(
                f"terminal_capacity: expected at least one for each of {ring.envs} environments, "
                f"got {count}."
            )
        count = min(count, ring.capacity)
        if ring.capacity + count + ring.envs >= 2**31:
            raise ValueError(
                "capacity: expected, with terminal_capacity and num_envs, less than 2^31, got "
                f"{ring.capacity}."
            )
        return shared_next.init(context, spec, count)

    def spec(self, state: PartState) -> Item:
        """Returns the spec of one item."""
        return packed.spec(self.slotted(state))

    def write(
        self, context: Context, state: PartState, write: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Writes a slice for consecutive slots, else a scatter of items. Gradients stop here."""
        if self.share_next_observations:
            return shared_next.write(context, state, write, items)
        return packed.put(state, write, items)

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """Reads by one gather for each large leaf, and one for all small leaves of one size."""
        return self.read_with(context, state, where, [])[0]

    def read_with(
        self, context: Context, state: PartState, where: SlotsForLeaf, lookups: list[AuxRead]
    ) -> tuple[Item, list[jax.Array]]:
        """Reads items, and by one gather each what is looked up beside them."""
        if self.share_next_observations:
            return shared_next.read(context, state, where, lookups)
        return packed.get(state, where, lookups)

    def shares(self, context: Context, state: PartState, names: frozenset[str]) -> bool:
        """Returns if there are observations among these leaves that are stored once."""
        return self.share_next_observations and shared_next.is_shared(context, state, names)

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """Scatters the items of each leaf, or sets another array for all."""
        new = packed.edit(self.slotted(state), slots, values)
        return state.replace(items=new) if self.share_next_observations else new

    def slotted(self, state: PartState) -> Item:
        """Returns the items; not where next observations are."""
        return state.items if self.share_next_observations else state
