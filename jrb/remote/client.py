"""Starts the servers, and is what actors and learners hold in place of a buffer."""

import collections
import functools
import secrets
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jrb.authoring import checks
from jrb.buffer import ReplayBuffer
from jrb.limits import SampleToInsert
from jrb.remote import setup as setups
from jrb.remote.draws import Ahead, Drawing, ready
from jrb.remote.gate import Permits, RemoteGate, granted, ray
from jrb.remote.server import Server
from jrb.remote.setup import Setup
from jrb.state import Device, Sample, check_origin
from jrb.types import Item

_MANY = 10_000  # calls of the gate at once: three for each process that holds a `Remote`


def serve(
    buffer: ReplayBuffer,
    example: Item,
    *,
    streams: int,
    path: Any = None,
    limits: SampleToInsert | None = None,
    shards: int = 1,
    seed: int = 0,
    save_every: int | None = None,
    in_flight: int = 4,
    **ray_options: Any,
) -> "Remote":
    """Runs a buffer in processes of its own, which actors feed and learners draw from.

    Every stream, the work of one actor, has a ring of its own, of capacity / streams items: no
    window or n-step return crosses from one into another. Draws are over all of them.

    A server that dies is started again by Ray and continues from its last save; calls that were
    under way are made again. What came after that save is lost except for these calls, and `stats`
    says how much it was. Without a path the server begins empty.

    Args:
        buffer: the description. Its `num_envs` is that of one stream: None for streams of single
            timesteps, E for streams of E environments. Its capacity is that of all streams, a
            multiple of streams * E. Sampler, unit and transforms must work with
            `writer=jrb.PerEnvironment()`; with as many shards as streams, all do.
        example: one transition, as for `ReplayBuffer.init`.
        streams: the number of streams, one for each actor.
        path: the folder to which servers save; when they start, they load the last save from it.
            A storage in files keeps its files there, so that a save writes only the changes. None
            for the path of the storage; if that is None too, nothing is saved.
        limits: bounds the ratio of samples to inserts over all shards: `extend` or `sample` waits
            where it would leave the bounds. An item counts as one insert, a batch as B samples.
        shards: the number of servers. Stream s belongs to shard s % shards.
        seed: the random seed of all draws; see `Server`.
        save_every: the number of items after which each server saves; None for `Remote.save` only.
        in_flight: the number of unfinished calls that each process which holds the `Remote` may
            have before `extend` waits; as many chunks may be in the object store.
        ray_options: options of `ray.remote` for the servers, such as `num_cpus`, `resources` or
            `max_restarts`. Servers use only the CPU, unless `num_gpus` or `resources` are given.

    Returns:
        The `Remote` for actors and learners. The servers end with its `close`, or when nothing
        holds it any more.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        TypeError, ValueError: parts that do not go with this, with what to do.
    """
    library = ray()
    if limits is not None and not isinstance(limits, SampleToInsert):
        raise TypeError(f"limits: expected jrb.limits.SampleToInsert(...), got {limits!r}.")
    setup = Setup(
        buffer=buffer,
        spec=setups.spec_of_example(buffer, example),
        streams=streams,
        shards=shards,
        path=setups.path_of(buffer, path),
        seed=seed,
        save_every=save_every,
        in_flight=in_flight,
        on_cpu=not ray_options.get("num_gpus") and not ray_options.get("resources"),
        wide=jax.dtypes.canonicalize_dtype(np.float64) == np.float64,
        gate=None if limits is None else f"jrb-gate-{secrets.token_hex(8)}",
    )
    setups.check(setup)
    lasting = {"max_restarts": -1, "max_task_retries": -1}
    gate = None
    if limits is not None:
        options = {"name": setup.gate, "num_cpus": 0, "max_concurrency": _MANY, **lasting}
        gate = library.remote(**options)(RemoteGate).remote(limits)
    server = library.remote(**(lasting | ray_options))(Server)
    servers = [server.remote(setup, shard) for shard in range(setup.shards)]
    library.get([one.ready.remote() for one in servers])
    return Remote(setup, servers, gate, owns=True)


def _is_under_way(array: Any) -> bool:
    # `is_ready` of an array that was deleted, or donated, crashes the process.
    is_numpy = isinstance(array, np.ndarray)
    return not is_numpy and not array.is_deleted() and not array.is_ready()


class Flight:
    """Calls of Ray that are under way, at most `most`.

    What one of them raised comes out of a later call here.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: collections.deque[Any] = collections.deque()
        self._turn = threading.Lock()  # one thread at a time takes calls out

    def add(self, call: Any) -> None:
        """Adds a call."""
        self._calls.append(call)

    def wait(self, all_of_them: bool = True) -> None:
        """Waits for all calls, or until there is room for one more."""
        with self._turn:
            while len(self._calls) >= (1 if all_of_them else self._most):
                try:
                    ray().get(self._calls[0])
                except Exception:  # no interrupt: that leaves it in line, with what it may raise
                    self._calls.popleft()
                    raise
                self._calls.popleft()


class Remote:
    """A buffer in other processes, made by `serve`. It can be pickled, and sent to actors of Ray.

    What one process asks is done in that order. Each copy numbers what it sends: no timestep is
    written twice, and where a stream gets another sender, or lost some timesteps, nothing crosses
    from before to after, as with `truncate`.
    """

    def __init__(self, setup: Setup, servers: list[Any], gate: Any, owns: bool = False) -> None:
        self._setup, self._servers, self._gate, self._owns = setup, servers, gate, owns
        self._sender: int = secrets.randbits(63) | 1
        self._sent: collections.Counter[int] = collections.Counter()
        self._permits: Permits | None = None if gate is None else Permits(gate, servers)
        self._drawing: Drawing = Drawing(setup, servers, self._permits)
        self._writes: Flight = Flight(setup.in_flight)
        self._updates: Flight = Flight(setup.in_flight)
        self._late: collections.deque[Any] = collections.deque()
        self._sending = threading.Lock()  # one thread at a time takes priorities out

    def __reduce__(self) -> Any:
        return Remote, (self._setup, self._servers, self._gate)

    def __repr__(self) -> str:
        setup = self._setup
        return f"Remote(streams={setup.streams}, shards={setup.shards}, buffer={setup.buffer!r})"

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def buffer(self) -> ReplayBuffer:
        """The description that is served, as one stream sees it."""
        return self._setup.buffer

    def extend(self, items: Item, *, stream: int, mask: Any = None, priorities: Any = None) -> None:
        """Sends T timesteps of a stream, time first; how they are cut into calls does not matter.

        The arrays are copied into the object store of Ray, from which the server reads them without
        a copy; they may be changed when this returns. It does not wait for the server, unless
        `in_flight` calls are under way, or `limits` hold adding back. No device of JAX is touched.

        Args:
            items: NumPy arrays `[T, ...]`, or `[T, E, ...]` if the buffer has `num_envs`. Hundreds
                of kilobytes at a time, or more: a call has a cost of its own.
            stream: the number of the stream. One actor sends to it at a time.
            mask: bool `[T]`, the timesteps that are written, or `[T, E]`; None for all.
            priorities: real `[T]`, or `[T, E]`; None for those of new items.

        Raises:
            ValueError: another structure or shape than the example's.
            TypeError: another dtype than the example's, or priorities where there are none.
        """
        setup = self._setup
        if isinstance(stream, bool) or not isinstance(stream, int | np.integer):
            raise TypeError(f"extend: stream: expected a number, got {stream!r}.")
        if not 0 <= stream < setup.streams:
            raise ValueError(f"extend: stream: expected 0 to {setup.streams - 1}, got {stream}.")
        with setup.settings():
            leaves = setups.arrays(setup, items)
        length = len(leaves[0])
        mask = setups.mask(setup, mask, length)
        priorities = setups.priorities(setup, priorities, length)
        if not length:
            return
        self._writes.wait(all_of_them=False)
        lane, shard = divmod(int(stream), setup.shards)
        width = 1 if mask is not None and mask.ndim > 1 else setup.buffer.num_envs or 1
        count = width * (length if mask is None else int(mask.sum()))
        with granted(self._permits, "insert", count, shard) as ticket:
            # Counted before the call: an interrupt leaves a gap, not a number that is used twice.
            first, self._sent[stream] = self._sent[stream], self._sent[stream] + length
            sent = (lane, self._sender, first, leaves, mask, priorities, ticket, count)
            self._writes.add(self._servers[shard].extend.remote(*sent))

    def sample(
        self, batch_size: int | None = None, beta: float | None = None, device: Device = None
    ) -> Sample:
        """Draws a batch and waits for it; as `ReplayBuffer.draw`, so that samplers move on.

        With several shards each gives a part of the batch in proportion to its mass, and
        probabilities and weights are those over all of them. With `limits` it waits until they
        allow it, and until there is something to draw.

        Args:
            batch_size: B; None for the buffer's.
            beta: the exponent of the importance weights; None for the sampler's.
            device: where the batch is put; None for the default device.

        Returns:
            The batch, arrays of JAX. `info["shard"]`, int32 `[B]`, says which shard an item is
            from; indices and stamps are those of that shard.

        Raises:
            ValueError: there is nothing to draw, or less than `min_size`, and no `limits` to wait
                for; or no batch size.
        """
        batch_size = self._batch_size(batch_size)
        self._send_updates(all_of_them=False)
        patient = self._permits is not None
        sample = self._drawing.draw(batch_size, beta, device, patient)
        if sample is None:
            raise ValueError(
                "sample: expected something to draw, got a buffer without valid start slots. Let "
                "actors add items first; can_sample tells when there are enough."
            )
        return sample

    def ahead(
        self,
        batch_size: int | None = None,
        depth: int = 4,
        *,
        beta: float | Callable[[int], float] | None = None,
        device: Device = None,
    ) -> Ahead:
        """Draws batches ahead, and puts them on the device, while the caller computes.

        Args:
            batch_size: B; None for the buffer's.
            depth: how many batches are drawn and not taken yet, at least 1; new priorities are
                seen by draws as many batches later.
            beta: the exponent of the weights, or a function from the number of the batch to it.
            device: where batches are put; None for the default device.

        Returns:
            An endless iterator over batches. It waits while there is nothing to draw.
        """
        checks.count("depth", depth)
        before = functools.partial(self._send_updates, all_of_them=False)
        batch_size = self._batch_size(batch_size)
        return Ahead(self._drawing, before, batch_size, int(depth), beta, device)

    def update_priority(self, sample: Sample, priorities: jax.Array | np.ndarray) -> None:
        """Sends new priorities for what was drawn, without the data.

        It does not wait, not even until the priorities are computed: they are sent by a later call,
        of this or of a draw, when they are. Items overwritten since are left alone.

        Args:
            sample: what `sample` or `ahead` gave.
            priorities: real `[B]`, or `[B, L]` for a unit of windows.

        Raises:
            TypeError: the sampler has no priorities.
            ValueError: another shape, or a sample of another buffer.
        """
        sampler = self._setup.buffer.sampler
        if not sampler.prioritized:
            raise TypeError(
                f"update_priority: expected a sampler with priorities, got "
                f"{type(sampler).__name__}. Serve a buffer with sampler=jrb.Prioritized()."
            )
        if not isinstance(sample, Sample) or "shard" not in sample.info:
            raise ValueError("update_priority: expected a Sample of this Remote.")
        check_origin("update_priority", sample, self._setup.origin)
        if np.shape(priorities) not in {sample.indices.shape, sample.mask.shape}:
            raise ValueError(
                f"update_priority: priorities: expected shape {sample.indices.shape}, one for each "
                f"that was drawn, got {np.shape(priorities)}."
            )
        if hasattr(priorities, "is_ready"):  # an array of JAX, which may not be computed yet
            setups.check_real("update_priority: priorities", priorities.dtype)
        else:  # a copy: the caller may change it before it is sent
            priorities = setups.numbers("update_priority: priorities", priorities)
        entry = sample.info["shard"], sample.indices, sample.stamp, sample.mask, priorities
        self._late.append(entry)
        self._send_updates(all_of_them=False)

    def _send_updates(self, all_of_them: bool) -> None:
        """Sends priorities that are computed; all, or all but the last two, are waited for."""
        with self._sending:
            while self._late:
                is_patient = all_of_them or len(self._late) > 2
                try:
                    if not is_patient and _is_under_way(self._late[0][-1]):
                        return
                    shard, indices, stamp, mask, new = map(np.asarray, self._late[0])
                except Exception:  # it was deleted. An interrupt leaves it in line
                    self._late.popleft()
                    raise
                for number, server in enumerate(self._servers):
                    own = shard == number
                    if own.any():
                        self._updates.wait(all_of_them=False)
                        mine = mask & own.reshape(-1, *(1,) * (mask.ndim - 1))
                        sent = indices, stamp, mine, new.astype(np.float32)
                        self._updates.add(server.update.remote(*sent))
                # Last: what an interrupt lets be sent twice has the same effect.
                self._late.popleft()

    def size(self) -> int:
        """Returns the number of transitions stored."""
        return sum(ray().get([server.size.remote() for server in self._servers]))

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether a draw gives at least one item."""
        if len(self._servers) == 1:
            batch_size = self._setup.buffer.batch_size if batch_size is None else batch_size
            return ray().get(self._servers[0].can_sample.remote(batch_size))
        each = ray().get([server.facts.remote() for server in self._servers])
        return ready(each, self._setup.buffer.min_size)

    def wait(self) -> None:
        """Waits until all that was sent from here is written: at the end of an actor's work.

        Raises:
            Exception: what went wrong with it.
        """
        self._send_updates(all_of_them=True)
        self._writes.wait()
        self._updates.wait()

    def save(self) -> list[int]:
        """Saves to the path, and waits for it; from here on nothing of it is lost.

        Returns:
            The number of the generation, of each shard.

        Raises:
            ValueError: there is no path.
        """
        if self._setup.path is None:
            raise ValueError("save: expected a path, got none. Call serve with path=.")
        self.wait()
        return ray().get([server.save.remote() for server in self._servers])

    def stats(self) -> dict[str, Any]:
        """Returns counts over all shards, and under "shards" those of each.

        Counts of items, also of those that are masked: `size`, that are stored; `received`;
        `unsaved`, that came since the last save and would be lost now; `lost`, that were, as far as
        senders have told since. Besides `draws`; `restarts`, how often Ray has started a server
        again; and of each shard `generation`, the last save.
        """
        each = ray().get([server.stats.remote() for server in self._servers])
        names = ("size", "received", "unsaved", "lost", "draws", "restarts")
        return {name: sum(one[name] for one in each) for name in names} | {"shards": each}

    def close(self) -> None:
        """Waits for what was sent; the `Remote` that `serve` returned also ends the servers.

        They do not save: call `save` before.
        """
        try:
            self.wait()
        finally:
            if self._owns:  # the actors end after they have released their files
                library = ray()
                actors = [*self._servers, *([] if self._gate is None else [self._gate])]
                library.wait([actor.end.remote() for actor in actors], num_returns=len(actors))
                for actor in actors:
                    library.kill(actor)
                self._owns = False  # last: after an interrupt it may be called again

    def _batch_size(self, batch_size: int | None) -> int:
        batch_size = self._setup.buffer.batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError(
                "batch_size: expected a number, got None. Give it to ReplayBuffer(batch_size=...), "
                "or to this call."
            )
        checks.count("batch_size", batch_size)
        return int(batch_size)
