"""All rows on the host, the newest ones on the device too."""

import functools
import os
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb import checks, columns, order, prng, pytree, rows
from jrb.keys import TED, Keys
from jrb.ring import Clock, Held, Ring
from jrb.storages import host
from jrb.storages.elsewhere import Places, places
from jrb.storages.host import Hosted
from jrb.types import Item, Where, Write


@pytree.state
class Hot:
    """The newest rows, on the device.

    Attributes:
        items: leaves `[H, ...]`.
        clock: where they lie; a ring of its own.
    """

    items: Item
    clock: Clock


@pytree.state
class Spilled:
    """The state of a storage that spills.

    Attributes:
        hot: the newest rows.
        hosted: all rows.
    """

    hot: Hot
    hosted: Hosted

    @property
    def capacity(self) -> int:
        """N."""
        return self.hosted.capacity


@pytree.component
class HotRing:
    """The newest rows of a ring, and what stands for the rest of it in jitted parts."""

    capacity: int

    def ring(self, ring: Ring) -> Ring:
        """The shape of the hot ring."""
        return Ring(rows=min(self.capacity // ring.envs, ring.rows), envs=ring.envs)

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Hot:
        """No rows."""
        del keys
        hot = self.ring(ring)
        items = jax.tree.map(lambda leaf: columns.room(hot.capacity, leaf), spec)
        return Hot(items=items, clock=hot.start())

    def spec(self, ring: Ring, state: Hot, keys: Keys) -> Item:
        """What one slot holds."""
        del ring, keys
        return columns.spec(state.items)

    def written(self, ring: Ring, state: Hot, write: Write, items: Item) -> Hot:
        """The last of the rows put where they belong."""
        mask = None if write.consecutive else write.written
        clock, put = rows.in_turn(self.ring(ring), state.clock, write.passed.size, mask)
        write_to = lambda column, new: columns.put(column, put, columns.packed(new))
        new = jax.tree.map(write_to, state.items, items, is_leaf=columns.is_column)
        return Hot(items=new, clock=clock)

    def write(
        self, ring: Ring, state: Hot, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[tuple[Hot, jax.Array], Write]:
        """The hot rows, and the slots, int32 `[T, E]`."""
        del held, keys
        return (self.written(ring, state, write, items), write.slots), write

    def where(self, ring: Ring, state: Hot, held: Held, slots: jax.Array) -> Any:
        """For slots, int32 `[...]`: their places among the hot rows, and whether they are there."""
        hot = self.ring(ring)
        back = (held.count - 1 - ring.place(held, slots)) // ring.envs
        here = (back >= 0) & (back < state.clock.count)
        row = hot.row_after(state.clock.cursor, jnp.where(here, hot.rows - 1 - back, 0))
        return row * ring.envs + slots % ring.envs, here

    def locate(self, ring: Ring, state: Hot, held: Held, where: list[jax.Array]) -> Places:
        """The slots at which leaves are read, their places among the hot rows, and which are."""
        return places(where, lambda slots: (slots, *self.where(ring, state, held, slots)))

    def read(self, ring: Ring, state: Any, held: Held, where: Where, keys: Keys) -> Item:
        """The state itself: what was fetched."""
        del ring, held, where, keys
        return state

    def reset(self, ring: Ring, state: Hot, token: jax.Array) -> Hot:
        """No rows."""
        del token
        return state.replace(clock=self.ring(ring).emptied(state.clock))  # pyright: ignore

    def hold(self, state: Hot, token: jax.Array) -> Hot:
        """The same, its cursor not known before the token."""
        clock = state.clock.replace(cursor=state.clock.cursor + token)  # pyright: ignore
        return state.replace(clock=clock)  # pyright: ignore


@jax.jit
def _gathered(leaves: list[jax.Array], at: list[jax.Array]) -> list[jax.Array]:
    """Rows of each leaf, `[*slots, ...]`."""
    return [rows.get(leaf, row) for leaf, row in zip(leaves, at, strict=True)]


@functools.partial(jax.jit, donate_argnums=0)
def _merged(hot: list[jax.Array], cold: list[jax.Array], at: list[jax.Array]) -> list[jax.Array]:
    """Rows `[*slots, ...]` into which others are put, at places among them, one after the other."""
    found = []
    for warm, rest, start in zip(hot, cold, at, strict=True):
        line = warm.reshape(-1, *rest.shape[1:])
        line = rows.put_blocks(line, start, rest[:, None]) if start.size else line
        found.append(line.reshape(warm.shape))
    return found


def _cold(slots: np.ndarray, hot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots that are not hot, and where in the batch they stand.

    In few lengths, so that little is compiled: none, or an eighth of the batch and then half more,
    again and again.
    """
    flat, cold = slots.reshape(-1), np.flatnonzero(~hot.reshape(-1))
    if not len(cold):
        return flat[:0], cold.astype(np.int32)
    length = -(-len(flat) // 8)
    while length < len(cold):
        length += -(-length // 2)
    at = np.full(min(length, len(flat)), len(flat), np.int32)
    at[: len(cold)] = cold
    return flat[np.where(at < len(flat), at, cold[0])], at


@pytree.component
class SpillStorage:
    """Keeps all items in files on the host, and the newest ones in a ring on the device too.

    Draws are, bit for bit, those of a `DeviceStorage` of the whole capacity: what is hot is read on
    the device, the rest on the host. Writes go to both. Otherwise as `jrb.MemmapStorage`. Rows must
    come in the order of time.

    Attributes:
        path: of a folder that is not there, or is empty; None for a temporary one.
        hot_capacity: H, how many items are on the device, a multiple of E; at most N are.
        prealloc: whether the disk sets all room aside in `init`, so that it cannot be full later.
        slack: the room beside N for what is written between two commits, as a part of N.
    """

    path: str | os.PathLike[str] | None
    hot_capacity: int
    prealloc: bool = True
    slack: float = 0.25
    in_time: ClassVar[bool] = True
    on_host: ClassVar[bool] = True
    state_type: ClassVar[type] = Spilled
    unbound: ClassVar[tuple[str, ...]] = ("path", "hot_capacity", "prealloc", "slack")

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", host.checked_path("SpillStorage", self.path))
        checks.count("hot_capacity", self.hot_capacity, 2**31 - 1)
        object.__setattr__(self, "hot_capacity", int(self.hot_capacity))
        checks.flag("prealloc", self.prealloc)
        host.check_slack(self.slack)

    @property
    def inner(self) -> HotRing:
        """What stands for this storage in jitted parts."""
        return HotRing(self.hot_capacity)

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Spilled:
        """Files and arrays full of zeros. Raises if there is no room for them."""
        return self.make(ring, spec, self.inner.init(ring, spec, keys), in_time=True)

    def make(self, ring: Ring, spec: Item, inner: Hot, in_time: bool) -> Spilled:
        """The same, with the state of `inner`."""
        checks.divides("hot_capacity", self.hot_capacity, ring.envs)
        hosted = host.init(self.path, self.prealloc, self.slack, ring, spec, in_time)
        return Spilled(hot=inner, hosted=hosted)

    def nbytes(self, ring: Ring, spec: Item, in_time: bool) -> dict[str, int]:
        """The bytes of each leaf's file, and of the numbers of the rows."""
        return host.nbytes(self.path, self.slack, ring, spec, in_time)

    def attach(self, ring: Ring, hosted: Hosted, held: Held) -> Spilled:
        """The state for rows that were in the files before: the newest ones are made hot again."""
        hot = self.inner.ring(ring)
        count = min(int(held.count) // ring.envs, hot.rows)
        first = int(held.first) + int(held.count) - count * ring.envs
        slots = (first + np.arange(count * ring.envs)) % ring.capacity
        newest = hosted.host.fetch(hosted.version, [slots] * len(hosted.host.names))
        state = self.inner.init(ring, hosted.host.spec, TED)
        clock = hot.advance(state.clock, jnp.int32(count))
        put = lambda column, new: columns.with_array(
            column, columns.array(column).at[: len(slots)].set(columns.packed(new))
        )
        items = jax.tree.map(put, state.items, newest, is_leaf=columns.is_column)
        return Spilled(hot=Hot(items=items, clock=clock), hosted=hosted)

    def hosted(self, state: Spilled) -> Hosted:
        """What a state knows of its rows."""
        return state.hosted

    def spec(self, ring: Ring, state: Spilled, keys: Keys) -> Item:
        """What one slot holds."""
        del ring, keys
        return state.hosted.host.spec

    # Outside jit.

    def lower(self, state: Spilled) -> Hot:
        """The state of `inner`: the hot rows."""
        return state.hot

    def drawing(self, state: Spilled) -> AbstractContextManager[None]:
        """A time during which nothing is overwritten."""
        return state.hosted.host.store.drawing.entered()

    def put(self, state: Spilled, inner: tuple[Hot, jax.Array], items: Item) -> Spilled:
        """Puts items, leaves `[T, E, ...]` or `[T, ...]`, at the slots that `inner` gave."""
        hot, slots = inner
        leaves = map(prng.raw, jax.tree.leaves(items))
        host_ = state.hosted.host
        version = host_.put(state.hosted.version, slots, *leaves, patient=True)
        return Spilled(hot=hot, hosted=Hosted(version=jnp.asarray(version), host=host_))

    def writing(self, state: Spilled) -> AbstractContextManager[None]:
        """A time after which, if something interrupts it, this state is the newest again."""
        return state.hosted.host.writing(state.hosted.version)

    def names(self, state: Spilled) -> tuple[str, ...]:
        """Those of the leaves."""
        return state.hosted.host.names

    def fetch(self, state: Spilled, slots: jax.Array, places: Places) -> Item:
        """The items there: hot ones on the device, which the host does not wait for."""
        del slots
        host_ = state.hosted.host
        each = places.each(lambda one: one)
        hot = _gathered(jax.tree.leaves(state.hot.items), [row for _, row, _ in each])
        at = places.each(lambda one: _cold(np.asarray(one[0]), np.asarray(one[2])))
        cold = host_.items(host_.take(state.hosted.version, [slots for slots, _ in at]))
        leaves, structure = jax.tree.flatten(cold)
        words = list(map(columns.packed, leaves))
        merged = _merged(hot, words, [place for _, place in at])
        found = map(columns.unpacked, merged, [leaf.dtype for leaf in leaves])
        return jax.tree.unflatten(structure, found)

    # Inside jit.

    def write(
        self, ring: Ring, state: Spilled, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[Spilled, Write]:
        """To the device, and a call to the host."""
        del held, keys
        hot = self.inner.written(ring, state.hot, write, items)
        leaves = [lax.stop_gradient(prng.raw(leaf)) for leaf in jax.tree.leaves(items)]
        host_, version = state.hosted.host, state.hosted.version
        version = host.call(host_.put, host.VERSION, version, write.slots, *leaves)
        return Spilled(hot=hot, hosted=Hosted(version=version, host=host_)), write

    def read(self, ring: Ring, state: Spilled, held: Held, where: Where, keys: Keys) -> Item:
        """From the device, and what is not there by a call to the host."""
        del keys
        names = state.hosted.host.names
        where_hot = lambda slots: (slots, *self.inner.where(ring, state.hot, held, slots))
        found = places([where(name) for name in names], where_hot)
        at = found.each(lambda one: one)
        slots = found.each(lambda one: jnp.where(one[2], -1, one[0]))
        cold = state.hosted.host.items(state.hosted.host.call(state.hosted.version, slots))
        leaves, structure = jax.tree.flatten(cold)
        pairs = list(zip(jax.tree.leaves(state.hot.items), at, strict=True))
        hot = order.once(lambda: [rows.get(words, row) for words, (_, row, _) in pairs])
        merged = [
            jnp.where(
                here.reshape(*here.shape, *(1,) * (warm.ndim - here.ndim)),
                warm,
                columns.packed(rest),
            )
            for warm, rest, (_, _, here) in zip(hot, leaves, at, strict=True)
        ]
        found = map(columns.unpacked, merged, [leaf.dtype for leaf in leaves])
        return jax.tree.unflatten(structure, found)

    def reset(self, ring: Ring, state: Spilled, token: jax.Array) -> Spilled:
        """No hot rows."""
        emptied = self.inner.reset(ring, state.hot, token)
        return self.hold(Spilled(hot=emptied, hosted=state.hosted), token)

    def hold(self, state: Spilled, token: jax.Array) -> Spilled:
        """The same state, its cursor and version not known before the token."""
        version = state.hosted.version + token.astype(jnp.uint32)
        return Spilled(
            hot=self.inner.hold(state.hot, token),
            hosted=Hosted(version=version, host=state.hosted.host),
        )
