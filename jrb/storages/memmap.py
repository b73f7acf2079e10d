"""Rows in memory-mapped files on the host."""

import os
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb import checks, prng, pytree
from jrb.keys import Keys
from jrb.ring import Held, Ring
from jrb.storages import host
from jrb.storages.elsewhere import Elsewhere, Places
from jrb.storages.host import Hosted
from jrb.types import Item, Where, Write


@pytree.component
class MemmapStorage:
    """Keeps the items in files on the host, one for each leaf, and reads them through mappings.

    Sampler, writer and priorities stay on the device. Outside `jit`, verbs read and write between
    jitted parts; inside, and in `scan`, they call the host, in the order of the program; under
    `vmap` they are refused. The file of a leaf `next/observation` is `rows/next/observation.bin`,
    raw rows, written round and round.

    States share their rows: an older one, of which something was overwritten since, may neither be
    written to nor draw that (`jrb.StaleError`). `jrb.save` to the path is a commit, which costs
    what changed, and `jrb.load` of the path opens it again, after a crash too, exactly as it was
    committed: nothing that is promised is written over. Only if more rows are written between two
    commits than there is room for beside N, the oldest that were promised go; a crash after that
    gives the last commit without them, and a `jrb.LostWarning` says so.

    One process may write; any number may load and read, each what was committed when it did, or
    `jrb.StaleError` when that is overwritten; files that somebody cuts short meanwhile bring a
    process down, as mappings do. Of the threads of a process one may write while others draw: a
    write waits for draws that are under way. Where a process loads a path that it writes already,
    the state that is written to first goes on, and the other is stale.

    Attributes:
        path: of a folder that is not there, or is empty; None for a temporary one, which is removed
            with the last state, or with the program. A state that went through `jit` is also held
            by JAX, until the program ends or calls `jax.clear_caches()`.
        prealloc: whether the disk sets all room aside in `init`, so that it cannot be full later.
        slack: the room beside N for what is written between two commits, as a part of N. Writers
            that do not go round in time have as much beside as they need, at most N.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(1000, batch_size=2, storage=jrb.MemmapStorage())
        >>> state = buffer.add(buffer.init({"x": jnp.zeros(3)}), {"x": jnp.ones(3)})
        >>> buffer.sample(state, jax.random.key(0)).data["x"].tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    path: str | os.PathLike[str] | None = None
    prealloc: bool = True
    slack: float = 0.25
    on_host: ClassVar[bool] = True
    state_type: ClassVar[type] = Hosted
    unbound: ClassVar[tuple[str, ...]] = ("path", "hot_capacity", "prealloc", "slack")

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", host.checked_path("MemmapStorage", self.path))
        checks.flag("prealloc", self.prealloc)
        host.check_slack(self.slack)

    @property
    def inner(self) -> Elsewhere:
        """What stands for this storage in jitted parts."""
        return Elsewhere()

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Hosted:
        """Files full of zeros. Raises if there is no room for them."""
        del keys
        return self.make(ring, spec, None, in_time=True)

    def make(self, ring: Ring, spec: Item, inner: Any, in_time: bool) -> Hosted:
        """The same, with the state of `inner`; and whether rows come in the order of time."""
        del inner
        return host.init(self.path, self.prealloc, self.slack, ring, spec, in_time)

    def attach(self, ring: Ring, hosted: Hosted, held: Held) -> Hosted:
        """The state for rows that were in the files before."""
        del ring, held
        return hosted

    def nbytes(self, ring: Ring, spec: Item, in_time: bool) -> dict[str, int]:
        """The bytes of each leaf's file, and of the numbers of the rows."""
        return host.nbytes(self.path, self.slack, ring, spec, in_time)

    def spec(self, ring: Ring, state: Hosted, keys: Keys) -> Item:
        """What one slot holds."""
        del ring, keys
        return state.host.spec

    def hosted(self, state: Hosted) -> Hosted:
        """What a state knows of its rows."""
        return state

    # Outside jit.

    def lower(self, state: Hosted) -> None:
        """The state of `inner`: nothing."""
        del state

    def drawing(self, state: Hosted) -> AbstractContextManager[None]:
        """A time during which nothing is overwritten."""
        return state.host.store.drawing.entered()

    def put(self, state: Hosted, inner: jax.Array, items: Item) -> Hosted:
        """Puts items, leaves `[T, E, ...]` or `[T, ...]`, at the slots that `inner` gave."""
        leaves = map(prng.raw, jax.tree.leaves(items))
        version = state.host.put(state.version, inner, *leaves, patient=True)
        return Hosted(version=jnp.asarray(version), host=state.host)

    def writing(self, state: Hosted) -> AbstractContextManager[None]:
        """A time after which, if something interrupts it, this state is the newest again."""
        return state.host.writing(state.version)

    def names(self, state: Hosted) -> tuple[str, ...]:
        """Those of the leaves."""
        return state.host.names

    def fetch(self, state: Hosted, slots: jax.Array, places: Places | None) -> Item:
        """The items there: all leaves at slots `[B]`, or each in its place."""
        at = np.asarray(slots)
        each = [at] * len(state.host.names) if places is None else places.each(np.asarray)
        return state.host.fetch(state.version, each, host.device_of(slots))

    # Inside jit.

    def write(
        self, ring: Ring, state: Hosted, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[Hosted, Write]:
        """A call to the host."""
        del ring, held, keys
        leaves = [lax.stop_gradient(prng.raw(leaf)) for leaf in jax.tree.leaves(items)]
        version = host.call(state.host.put, host.VERSION, state.version, write.slots, *leaves)
        return Hosted(version=version, host=state.host), write

    def read(self, ring: Ring, state: Hosted, held: Held, where: Where, keys: Keys) -> Item:
        """A call to the host."""
        del ring, held, keys
        places = [where(name) for name in state.host.names]
        return state.host.items(state.host.call(state.version, places))

    def reset(self, ring: Ring, state: Hosted, token: jax.Array) -> Hosted:
        """The same rows: what they hold is not looked at again."""
        del ring
        return self.hold(state, token)

    def hold(self, state: Hosted, token: jax.Array) -> Hosted:
        """The same state, its version not known before the token."""
        return Hosted(version=state.version + token.astype(jnp.uint32), host=state.host)
