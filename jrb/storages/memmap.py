"""Rows in memory-mapped files on the host."""

import os

from jrb._util import pytree
from jrb.storages.store_rows import StoreArrays


@pytree.component
class MemmapStorage(StoreArrays):
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
            Otherwise files grow as they are filled, and a full disk is an `OSError` of the write.
        spare_fraction: additional rows for what is written between two commits, as a fraction of
            N. Writers that do not write in the order of time get as many as they need, at most N.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(1000, batch_size=2, storage=jrb.MemmapStorage())
        >>> state = buffer.add(buffer.init({"x": jnp.zeros(3)}), {"x": jnp.ones(3)})
        >>> buffer.sample(state, jax.random.key(0)).data["x"].tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    path: str | os.PathLike[str] | None = None
    prealloc: bool = False
    spare_fraction: float = 0.25

    def __post_init__(self) -> None:
        self.check()
