"""The function `serve`, which starts the servers, and the handle `Remote` on a served buffer."""

import collections
import functools
import secrets
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jrb._core import steps
from jrb._core.validate import copy_arrays
from jrb.authoring import checks
from jrb.buffer import ReplayBuffer, check_batch
from jrb.limits import SampleToInsert
from jrb.remote import setup as setups
from jrb.remote.draws import Ahead, Drawing, can_draw
from jrb.remote.gate import LongWait, Permits, RemoteGate, acquire_permit, ray
from jrb.remote.server import Server
from jrb.remote.setup import Setup
from jrb.state import Device, Sample, check_origin
from jrb.types import Item
from jrb.types.messages import DrawInputs

_GATE_CALLS = 10_000  # concurrent calls of the gate: three for each process with a `Remote`


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
    """Runs a buffer in its own processes, for actors that add and learners that sample.

    Each actor writes to a stream of its own. Every stream has its own ring of capacity / streams
    items, so no window or n-step return spans two streams. Samples are taken from all streams.

    Ray restarts a server that dies. The server continues from its last save, or empty without a
    path, and Ray repeats unfinished calls. All other items since that save are lost; `stats` counts
    them.

    Args:
        buffer: the buffer. Its `num_envs` is that of one stream: None for streams of single
            timesteps, E for streams of E environments. Its capacity is that of all streams, a
            multiple of streams * E. Sampler, unit and transforms must work with
            `writer=jrb.PerEnvironment()`, unless there are as many shards as streams.
        example: one transition, as for `ReplayBuffer.init`.
        streams: the number of streams, one for each actor.
        path: the folder to which servers save; when they start, they load the last save from it.
            A storage in files keeps its files there, so that a save writes only the changes. None
            for the path of the storage; if that is None too, nothing is saved.
        limits: bounds on the ratio of samples to inserts over all shards: `extend` and `sample`
            wait while they would exceed them, and log to `jrb.remote` what they wait for after 10
            seconds. An item is one insert, a batch is B samples.
        shards: the number of servers. Stream s belongs to shard s % shards.
        seed: the random seed of all draws; see `Server`.
        save_every: the number of items after which each server saves; None for `Remote.save` only.
        in_flight: the number of unfinished calls that each process with the `Remote` may have
            before its `extend` waits; the object store may hold as many chunks.
        ray_options: options of `ray.remote` for the servers, such as `num_cpus`, `resources` or
            `max_restarts`. Servers use only the CPU, unless `num_gpus` or `resources` are given.

    Returns:
        The `Remote` for actors and learners. The servers end when it is closed, or when no
        reference to it is left.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        TypeError, ValueError: a part of the buffer cannot be served, or limits would make actors
            and learners wait for each other; the message says what to do.
    """
    library = ray()
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
    setups.check_setup(setup)
    needs = setups.check_limits(setup, limits)
    restarts = {"max_restarts": -1, "max_task_retries": -1}
    # Start the gate first: servers look it up by its name.
    gate = None
    if limits is not None:
        options = {"name": setup.gate, "num_cpus": 0, "max_concurrency": _GATE_CALLS, **restarts}
        gate = library.remote(**options)(RemoteGate).remote(limits, needs)
    # Start the servers together, and wait until all have loaded or made their states.
    server = library.remote(**(restarts | ray_options))(Server)
    servers = [server.remote(setup, shard) for shard in range(setup.shards)]
    library.get([one.ready.remote() for one in servers])
    return Remote(setup, servers, gate, owns=True)


class CallQueue:
    """A queue of at most `most` unfinished calls of Ray. A later `wait` raises their errors."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()  # only one thread at a time may remove calls

    def add(self, call: Any) -> None:
        """Adds a call to the queue."""
        self._calls.append(call)

    def wait(self, all_of_them: bool = True) -> None:
        """Waits for all calls, or until another one can be added."""
        with self._lock:
            while len(self._calls) >= (1 if all_of_them else self._most):
                try:
                    LongWait(lambda: "a server has not finished earlier calls.").get(self._calls[0])
                # An interrupt, which is no `Exception`, leaves the call in the queue.
                except Exception:
                    self._calls.popleft()
                    raise
                self._calls.popleft()


class Remote:
    """A handle on a served buffer, made by `serve`. It can be pickled and sent to Ray actors.

    Calls of one process are executed in order. No timestep is written twice. Where a stream's
    sender changes, or timesteps were lost, the stream is cut as by `truncate`.
    """

    def __init__(self, setup: Setup, servers: list[Any], gate: Any, owns: bool = False) -> None:
        self._setup, self._servers, self._gate, self._owns = setup, servers, gate, owns
        self._sender: int = secrets.randbits(63) | 1
        self._num_sent: collections.Counter[int] = collections.Counter()
        self._permits: Permits | None = None if gate is None else Permits(gate, servers)
        self._drawing: Drawing = Drawing(setup, servers, self._permits)
        self._writes: CallQueue = CallQueue(setup.in_flight)
        self._updates: CallQueue = CallQueue(setup.in_flight)
        self._unsent_updates: collections.deque[Any] = collections.deque()
        self._update_lock = threading.Lock()  # only one thread at a time may remove priorities

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
        """The buffer that was given to `serve`, with the `num_envs` of one stream."""
        return self._setup.buffer

    def extend(self, items: Item, *, stream: int, mask: Any = None, priorities: Any = None) -> None:
        """Sends T timesteps of a stream, which continue those of the previous call.

        The arrays are copied into Ray's object store, from which the server reads them without
        another copy; the caller may change them afterwards. The call waits only if `in_flight`
        calls are unfinished, or `limits` block inserts. It does not use a JAX device.

        Args:
            items: NumPy arrays `[T, ...]`, or `[T, E, ...]` if the buffer has `num_envs`. Send
                hundreds of kilobytes or more at once, since each call has a fixed cost.
            stream: the index of the stream. Only one actor may send to it at a time.
            mask: bool `[T]` or `[T, E]`, True for transitions to write; None to write all.
            priorities: real `[T]` or `[T, E]`; None for the sampler's priority of new items.

        Raises:
            ValueError: structure or shape differ from the example's.
            TypeError: a dtype differs from the example's, or the sampler takes no priorities.
        """
        # Check all arguments before anything is sent.
        setup = self._setup
        if isinstance(stream, bool) or not isinstance(stream, int | np.integer):
            raise TypeError(f"extend: stream: expected a number, got {stream!r}.")
        if not 0 <= stream < setup.streams:
            raise ValueError(f"extend: stream: expected 0 to {setup.streams - 1}, got {stream}.")
        with setup.x64_context():
            leaves = setups.convert_items(setup, items)
        length = len(leaves[0])
        mask = setups.convert_mask(setup, mask, length)
        priorities = setups.convert_priorities(setup, priorities, length)
        if not length:
            return
        # Count the unmasked items, get a permit for them, and send.
        self._writes.wait(all_of_them=False)
        lane, shard = divmod(int(stream), setup.shards)
        width = 1 if mask is not None and mask.ndim > 1 else setup.buffer.num_envs or 1
        count = width * (length if mask is None else int(mask.sum()))
        with acquire_permit(self._permits, "insert", count, shard) as ticket:
            # Counted before the call: an interrupt then leaves a gap, and no number is used twice.
            first = self._num_sent[stream]
            self._num_sent[stream] = first + length
            call = (lane, self._sender, first, leaves, mask, priorities, ticket, count)
            self._writes.add(self._servers[shard].extend.remote(*call))

    def sample(
        self,
        batch_size: int | None = None,
        beta: float | None = None,
        device: Device = None,
        context: Any = None,
    ) -> Sample:
        """Returns a batch, and updates the samplers' state, like `ReplayBuffer.draw`.

        Each shard gives a part of the batch in proportion to its mass; probabilities and weights
        are those of all shards together. With `limits`, the call waits until they allow samples
        and the buffer has a valid start.

        Args:
            batch_size: the batch size B; None for the buffer's.
            beta: the exponent of the importance weights; None for the sampler's.
            device: the JAX device of the batch; None for the default device.
            context: a pytree of arrays or numbers for samplers that take one, such as
                `jrb.Weighted`; else None. It is sent to the server.

        Returns:
            The batch, with JAX arrays. `info["shard"]`, int32 `[B]`, is the shard of each item;
            `indices` and `stamp` refer to that shard.

        Raises:
            ValueError: without `limits`, the buffer has no valid start, or fewer than `min_size`
                items; or there is no batch size.
            TypeError: there is a context, and the sampler takes none.
        """
        batch_size = self._batch_size(batch_size, context)
        self._send_updates(all_of_them=False)
        patient = self._permits is not None
        inputs = DrawInputs(beta, context)
        sample = self._drawing.draw(batch_size, inputs, device, patient)
        if sample is None:
            raise ValueError(f"sample: {self._drawing.describe()}")
        return sample

    def ahead(
        self,
        batch_size: int | None = None,
        depth: int = 4,
        *,
        beta: float | Callable[[int], float] | None = None,
        device: Device = None,
        context: Any = None,
    ) -> Ahead:
        """Returns an iterator that fetches batches to the device while the caller computes.

        Args:
            batch_size: the batch size B; None for the buffer's.
            depth: the number of batches fetched in advance, at least 1. New priorities affect
                batches only after these.
            beta: the exponent of the importance weights, or a function from the number of the
                batch to it; None for the sampler's.
            device: the JAX device of the batches; None for the default device.
            context: as for `sample`, or a function from the number of the batch to it.

        Returns:
            An endless iterator over batches. It waits while the buffer has no valid start. `close`
            it to get what was drawn: a queue does not give the items of these batches again.
        """
        checks.count("depth", depth)
        before = functools.partial(self._send_updates, all_of_them=False)
        batch_size, inputs = self._batch_size(batch_size, context), DrawInputs(beta, context)
        return Ahead(self._drawing, before, batch_size, int(depth), inputs, device)

    def update_priority(self, sample: Sample, priorities: jax.Array | np.ndarray) -> None:
        """Sends new priorities for the items of a batch.

        The call does not wait for JAX to compute the priorities: if they are not ready, a later
        call of this method or of a draw sends them. Items overwritten meanwhile are ignored.

        Args:
            sample: the batch, from `sample` or `ahead`.
            priorities: real `[B]`, or `[B, L]` for a unit of windows of L steps.

        Raises:
            TypeError: the sampler has no priorities.
            ValueError: the priorities have a wrong shape, or the sample is of another buffer.
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
        shapes = self._setup.buffer.unit.priority_shapes(sample.mask.shape)
        if np.shape(priorities) not in {sample.indices.shape, *shapes}:
            raise ValueError(
                f"update_priority: priorities: expected shape {sample.indices.shape}, one for each "
                f"that was drawn, got {np.shape(priorities)}."
            )
        # An array of JAX may not be computed yet; any other is copied, as the caller may change it.
        if hasattr(priorities, "is_ready"):
            setups.check_real("update_priority: priorities", priorities.dtype)
        else:
            priorities = setups.copy_as_float32("update_priority: priorities", priorities)
        # Of several anchors in an entry, each has its own flag, as some entries have fewer.
        mask = sample.mask if sample.indices.ndim == 1 else steps.has_item(sample)
        entry = sample.info["shard"], sample.indices, sample.stamp, mask, priorities
        self._unsent_updates.append(copy_arrays(entry))
        self._send_updates(all_of_them=False)

    def _send_updates(self, all_of_them: bool) -> None:
        """Sends priorities that are computed; waits for all, or for all but the last two."""
        with self._update_lock:
            while self._unsent_updates:
                is_patient = all_of_them or len(self._unsent_updates) > 2
                try:
                    new: Any = self._unsent_updates[0][-1]
                    # `is_ready` crashes the process if the array was deleted or donated.
                    is_computed = isinstance(new, np.ndarray) or new.is_deleted() or new.is_ready()
                    if not (is_patient or is_computed):
                        return
                    shard, indices, stamp, mask, new = map(np.asarray, self._unsent_updates[0])
                # An array was deleted. An interrupt, which is no `Exception`, leaves the entry.
                except Exception:
                    self._unsent_updates.popleft()
                    raise
                # Send each shard the batch, in which the items of other shards are masked.
                for number, server in enumerate(self._servers):
                    is_own = shard == number
                    if is_own.any():
                        self._updates.wait(all_of_them=False)
                        own_mask = mask & is_own.reshape(-1, *(1,) * (mask.ndim - 1))
                        call = indices, stamp, own_mask, new.astype(np.float32)
                        self._updates.add(server.update.remote(*call))
                # Last: an interrupt may let priorities be sent twice, which is harmless.
                self._unsent_updates.popleft()

    def size(self) -> int:
        """Returns the number of stored transitions, over all shards."""
        return sum(ray().get([server.size.remote() for server in self._servers]))

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns True if a sample would have at least one item."""
        if len(self._servers) == 1:
            batch_size = self._setup.buffer.batch_size if batch_size is None else batch_size
            return ray().get(self._servers[0].can_sample.remote(batch_size))
        each = ray().get([server.facts.remote() for server in self._servers])
        return can_draw(each, self._setup.buffer.min_size)

    def wait(self) -> None:
        """Waits until servers have written all items and priorities that this `Remote` sent.

        Raises:
            Exception: a write failed; this is its error.
        """
        self._send_updates(all_of_them=True)
        self._writes.wait()
        self._updates.wait()

    def save(self) -> list[int]:
        """Saves all shards to the path, and waits until this is done.

        Returns:
            The number of the saved generation of each shard.

        Raises:
            ValueError: there is no path.
        """
        if self._setup.path is None:
            raise ValueError("save: expected a path, got none. Call serve with path=.")
        self.wait()
        return ray().get([server.save.remote() for server in self._servers])

    def stats(self) -> dict[str, Any]:
        """Returns counts over all shards, and under "shards" a list of the counts of each.

        `size` is the number of stored items. Three counts of items include masked ones: `received`;
        `unsaved`, received since the last save, so that a crash would lose them; and `lost`, known
        to be lost. `draws` is the number of batches, `restarts` that of restarted servers, and the
        `generation` of each shard that of its last save.
        """
        each = ray().get([server.stats.remote() for server in self._servers])
        names = ("size", "received", "unsaved", "lost", "draws", "restarts")
        return {name: sum(one[name] for one in each) for name in names} | {"shards": each}

    def close(self) -> None:
        """Waits until all is written; the `Remote` that `serve` returned also ends the servers.

        Servers do not save when they end: call `save` before.
        """
        try:
            self.wait()
        finally:
            # Each actor first releases its files, and is then killed.
            if self._owns:
                library = ray()
                actors = [*self._servers, *([] if self._gate is None else [self._gate])]
                library.wait([actor.end.remote() for actor in actors], num_returns=len(actors))
                for actor in actors:
                    library.kill(actor)
                # Last, so that `close` can be called again after an interrupt.
                self._owns = False

    def _batch_size(self, batch_size: int | None, context: Any) -> int:
        buffer = self._setup.buffer
        return check_batch([buffer.sampler], buffer.batch_size, batch_size, context)
