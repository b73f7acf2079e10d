"""Storages of arrays on the host, whatever keeps their rows."""

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core.host_proxy import HostStorageProxy
from jrb._util import prng_keys, pytree
from jrb._util.pytree import SpecKey
from jrb._xla import dependencies
from jrb.ring import Occupancy, Ring
from jrb.storages import host_rows
from jrb.storages.host_rows import HostRows, HostView
from jrb.types import Context, HostStorage, Item, SlotsForLeaf, WritePlan
from jrb.types.messages import PartState


class HostArrays(HostStorage):
    """Keeps items in rows on the host, which a method makes: see `make_rows`."""

    state_type: ClassVar[type] = HostView

    @abc.abstractmethod
    def make_rows(self, ring: Ring, spec: Item, is_chronological: bool) -> HostRows:
        """Rows full of zeros.

        Args:
            ring: the ring's shape.
            spec: of one item.
            is_chronological: whether rows are written in the order of time.
        """

    @property
    def device_part(self) -> Any:
        """What stands for this storage in jitted parts."""
        return HostStorageProxy()

    def device_state(self, state: PartState) -> Any:
        """The state of `device_part`: nothing."""
        return None

    def view(self, state: PartState) -> HostView:
        """What a state knows of its rows."""
        return state

    def init(self, context: Context, spec: Item) -> Any:
        """Rows full of zeros."""
        device_state = self.device_part.init(context, spec)
        return self.make(context.ring, spec, device_state, is_chronological=True)

    def make(self, ring: Ring, spec: Item, device_state: PartState, is_chronological: bool) -> Any:
        """The same, with the state of `device_part`; and whether rows come in time."""
        return self.joined(
            host_rows.view(self.make_rows(ring, spec, is_chronological)), device_state
        )

    def joined(self, view: HostView, device_state: PartState) -> Any:
        """The state of rows on the host and of what is on the device."""
        return view

    def elsewhere(self) -> Self:
        """The same storage for rows of its own, where it would else be at the path of others."""
        return self

    def attach(self, ring: Ring, view: HostView, held: Callable[[], Occupancy]) -> Any:
        """The state for rows that were there before; a function says which of them are held."""
        return view

    def spec(self, state: PartState) -> Item:
        """What one slot holds."""
        return self.view(state).rows.spec

    def spec_key(self, state: PartState) -> SpecKey:
        """The same, made once."""
        return self.view(state).rows.spec_key

    # Outside jit.

    def drawing(self, state: PartState) -> AbstractContextManager[None]:
        """A time during which nothing is overwritten."""
        return self.view(state).rows.drawing()

    def writing(self, state: PartState) -> AbstractContextManager[None]:
        """A time after which, if something interrupts it, this state is the newest again."""
        view = self.view(state)
        return view.rows.writing(view.version)

    def names(self, state: PartState) -> tuple[str, ...] | None:
        """Those of the leaves."""
        return self.view(state).rows.names

    def put(self, state: PartState, planned: Any, items: Item) -> Any:
        """Puts items, leaves `[T, E, ...]` or `[T, ...]`, at the slots that were planned."""
        view, leaves = self.view(state), map(prng_keys.raw, jax.tree.leaves(items))
        slots, device_state = self.device_part.planned(planned)
        version = view.rows.put(view.version, slots, *leaves, patient=True)
        return self.joined(view.after(version), device_state)

    def moved(self, state: PartState, planned: Any) -> Any:
        """The same state with that of the device part which was planned."""
        return self.joined(self.view(state), self.device_part.planned(planned)[1])

    def put_values(
        self, state: PartState, device_state: PartState, slots: np.ndarray, values: Item
    ) -> Any:
        """Other values for some leaves, all others as they are."""
        view, new = self.view(state), {name: prng_keys.raw(leaf) for name, leaf in values.items()}
        return self.joined(
            view.after(view.rows.edit(view.version, slots, tuple(new), *new.values())), device_state
        )

    def fetch(self, state: PartState, slots: jax.Array, places: Any) -> Item:
        """The items there: all leaves at slots `[B]`, or each in its place."""
        view = self.view(state)
        if places is None:
            leaves = view.rows.at(view.version, np.asarray(slots))
        else:
            leaves = view.rows.take(view.version, places.each(np.asarray))
        return view.rows.drawn(leaves, host_rows.device_of(slots))

    def take(self, state: PartState, slots: np.ndarray) -> Item:
        """The items at slots of any shape."""
        view = self.view(state)
        return view.rows.fetch(view.version, [slots] * len(view.rows.names))

    # Inside jit.

    def write(
        self, context: Context, state: PartState, write: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """To the device, and by a call to the host."""
        view, kept = self.view(state), self.device_state(state)
        planned, write = self.device_part.write(context, kept, write, items)
        slots, device_state = self.device_part.planned(planned)
        leaves = [lax.stop_gradient(prng_keys.raw(leaf)) for leaf in jax.tree.leaves(items)]
        version = host_rows.call(view.rows.put, host_rows.VERSION, view.version, slots, *leaves)
        return self.joined(view.after(version), device_state), write

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """On the device, and by a call to the host."""
        if slots is None:
            slots = jnp.arange(context.ring.capacity, dtype=jnp.int32)
        view, names = self.view(state), tuple(values)
        kept = self.device_part.edit(context, self.device_state(state), slots, values)
        edit = lambda version, slots, *leaves: view.rows.edit(version, slots, names, *leaves)
        leaves = [lax.stop_gradient(prng_keys.raw(leaf)) for leaf in values.values()]
        version = host_rows.call(edit, host_rows.VERSION, view.version, slots, *leaves)
        return self.joined(view.after(version), kept)

    def nbytes(self, ring: Ring, spec: Item, is_chronological: bool) -> int:
        """The bytes of the rows, and of the version."""
        return ring.capacity * pytree.nbytes(spec) + pytree.nbytes(host_rows.VERSION)

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """A call to the host."""
        view = self.view(state)
        return view.rows.items(view.rows.call(view.version, list(map(where, view.rows.names))))

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """The same rows: what they hold is not looked at again."""
        return dependencies.after(state, token)
