"""The server: a Ray actor that holds one shard's buffer and state.

A stream's timesteps are written to its lane, which is the stream's part of the ring. L lanes, W
environments in each, E = L W, T time.

Its `Ledger` records which timesteps arrived, so that none is written twice and lost ones are
counted. Every sender numbers the timesteps that it sends to a stream. If Ray repeats a call because
its answer was lost, the call begins with a number that arrived before. If a server restarts from
its last save, numbers are missing; those of unfinished calls may still arrive, in any order.

No sender is forgotten, as Ray may repeat its calls at any time: each sender of a stream takes about
250 bytes, and 32 in a save. Each gap that lost calls left takes 150 bytes more, and 32 in a save.
"""

import ctypes
import dataclasses
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb import checkpoint
from jrb._core import steps
from jrb._core.host_calls import write_rows
from jrb._core.validate import for_device
from jrb._store.block_store import BlockStore
from jrb._xla.compiling import by_description
from jrb.authoring import require
from jrb.buffer import ReplayBuffer
from jrb.checkpoint.manifest import EXTRA
from jrb.loops import jitted
from jrb.remote import draws
from jrb.remote.draws import ShardFacts
from jrb.remote.gate import ray
from jrb.remote.setup import Setup
from jrb.state import BufferState, Sample
from jrb.storages import MemmapStorage, SpillStorage
from jrb.types import Context, Item, SlotsForLeaf, Storage, WritePlan, component
from jrb.types.messages import DrawInputs

_MAX_LENGTHS = 4  # the number of lengths for which a write is compiled as it is
_END = 2**63 - 1  # above every number of a timestep
_fold_in = jax.jit(jax.random.fold_in)


def keep_freed_memory() -> None:
    """Makes glibc keep up to 256 MB of freed memory in the process; does nothing elsewhere.

    A server allocates and frees batches of megabytes all the time. By default glibc returns such
    memory to the system, which zeroes its pages each time; that takes as long as to gather a batch.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # -3 is M_MMAP_THRESHOLD, and -1 is M_TRIM_THRESHOLD, in malloc.h.
    if tune is not None:
        tune(-3, 1 << 25)
        tune(-1, 1 << 28)


class Server:
    """The actor that serves one shard. It executes the calls of each caller in order, one by one.

    Its n-th draw has the key `fold_in(fold_in(key(seed), shard), n)`; after a restart, n continues
    from the last save.
    """

    def __init__(self, setup: Setup, shard: int) -> None:
        # Set up the process: this must come before JAX makes its first array.
        if setup.on_cpu:
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", setup.wide)
        keep_freed_memory()
        # Make the buffer of this shard, and the functions that write to it and draw from it.
        self._setup, self._shard = setup, shard
        self._path: str | None = setup.path_of(shard)
        self._buffer = setup.buffer_of(shard)
        self._lanes: int = setup.num_lanes(shard)
        self._write_lane = make_writer(self._buffer, self._lanes)
        self._methods: Any = jitted(self._buffer)
        self._lengths: set[int] = set()
        self._root_key: jax.Array = jax.random.fold_in(jax.random.key(setup.seed), shard)
        # Added to stamps, so that those of an earlier process do not match: see `_finish_draw`.
        self._stamp_offset: np.uint32 = np.uint32(secrets.randbits(32))
        # Load the last save, and report the number of items to the gate.
        self._unsaved: int = 0
        self._generation: int = 0
        self._ledger: Ledger = Ledger(self._lanes)
        self._state: BufferState = self._load()
        self._gate: Any = None
        self._items: int = 0
        self._samples: int = 0
        if setup.gate is not None:
            self._gate = ray().get_actor(setup.gate)
            self._items, self._samples = ray().get(self._gate.begin.remote(shard, self.size()))

    def _load(self) -> BufferState:
        """Returns the state of the last save, or an empty one."""
        buffer, path, ledger = self._buffer, self._path, self._ledger
        try:
            generations = [] if path is None else checkpoint.generations(path)
        except FileNotFoundError:
            generations = []
        # Make an empty state.
        if path is None or not generations:
            state = self._methods.init(self._setup.spec)
            if path is not None and isinstance(buffer.storage, MemmapStorage | SpillStorage):
                # The storage creates its files now; the save marks them as those of this buffer.
                self._generation = checkpoint.save(path, buffer, state, extra=ledger.to_arrays())
            return state
        # Load the last save, and the ledger that was saved with it.
        _, state = checkpoint.load(path, buffer, verify=False)
        self._generation = generations[-1]
        self._ledger = Ledger.load(path, self._generation)
        return state

    def ready(self) -> None:
        """Does nothing; to wait for this call is to wait for the start and for earlier calls."""

    def totals(self) -> tuple[int, int]:
        """Returns the numbers of items written and of samples given, for the gate."""
        return self._items, self._samples

    # Writing.

    def extend(
        self,
        lane: int,
        sender: int,
        first: int,
        leaves: list[np.ndarray],
        mask: np.ndarray | None,
        priorities: np.ndarray | None,
        ticket: int | None = None,
        count: int = 0,
    ) -> None:
        """Writes timesteps of a stream; `first` is their sender's number of the first one.

        `count` is the number of unmasked items, which are reported to the gate with the ticket.
        """
        length = len(leaves[0])
        items = length * (self._buffer.ring.envs // self._lanes)
        arrival = self._ledger.note(lane, sender, first, length)
        try:
            if not arrival.is_repeat:
                self._ledger.lost += items // length * arrival.missing
                try:
                    self._write(lane, arrival.is_next, leaves, mask, priorities)
                except BaseException:
                    self._ledger.note_failure(lane, sender, first, length)
                    self._ledger.lost += items
                    raise
                self._ledger.received += items
                self._unsaved += items
                self._items += count
        # Without this report, the permit of a write that fails would never be removed.
        finally:
            if ticket is not None:
                self._gate.report.remote(self._shard, *self.totals(), ticket)
        if self._setup.save_every is not None and self._unsaved >= self._setup.save_every:
            self.save()

    def _write(
        self,
        lane: int,
        is_next: bool,
        leaves: list[np.ndarray],
        mask: np.ndarray | None,
        priorities: np.ndarray | None,
    ) -> None:
        """Writes timesteps to a lane, in pieces of few different lengths."""
        envs, length = self._buffer.ring.envs, len(leaves[0])
        width = envs // self._lanes
        # No window may span the lane's older steps and these, if they do not follow them.
        if not is_next:
            self._state = self._methods.truncate(self._state, np.arange(envs) // width == lane)
        # With several lanes, all arrays get an axis of environments, `[T, W, ...]`.
        if self._lanes > 1:
            axes, shape = 1 + len(self._setup.lead), (length, width)
            leaves = [leaf.reshape(*shape, *leaf.shape[axes:]) for leaf in leaves]
            mask, priorities = (
                None if part is None else np.broadcast_to(part.reshape(length, -1), shape)
                for part in (mask, priorities)
            )
        start, structure = 0, jax.tree.structure(self._setup.spec)
        for size in pieces(length, self._lengths):
            part = slice(start, start + size)
            items = jax.tree.unflatten(structure, [leaf[part] for leaf in leaves])
            options = [None if each is None else each[part] for each in (mask, priorities)]
            self._state = self._write_lane(self._state, lane, items, *options)
            start += size

    def update(
        self, indices: np.ndarray, stamp: np.ndarray, mask: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Sets new priorities of drawn items that are still stored."""
        none: Any = None
        sample = Sample(
            data=none,
            indices=jax.numpy.asarray(indices),
            probabilities=none,
            weights=jax.numpy.asarray(mask, np.float32),  # 0 where an entry lacks an anchor
            mask=jax.numpy.asarray(mask),
            info={},
            stamp=jax.numpy.asarray(stamp - self._stamp_offset),
        )
        self._state = self._methods.update_priority(self._state, sample, priorities)

    # Reading.

    def draw(
        self,
        batch_size: int,
        inputs: DrawInputs,
        number: int,
        *each: ShardFacts,
        ticket: int | None = None,
    ) -> Sample | None:
        """Returns one batch, or this shard's part of it; see `draws`."""
        return next(self.draws(batch_size, [inputs], number, *each, ticket=ticket))

    def draws(
        self,
        batch_size: int,
        inputs: list[DrawInputs],
        number: int,
        *each: ShardFacts,
        ticket: int | None = None,
    ) -> Iterator[Sample | None]:
        """Yields a batch for each of `inputs`, or this shard's part of each.

        `each` has the facts of all shards, or nothing if there is only one. The number of the first
        batch seeds the division into parts, on which all shards agree. All draws are started before
        the first is yielded, so that Ray stores one while the next is computed. The samples are
        reported to the gate once, at the end. Batches are NumPy arrays; None without an anchor.
        """
        # For each batch, the number of items that this shard gives, and a seed for their choice.
        parts = [(batch_size, [0])] * len(inputs)
        if each:
            facts, parts = list(each), []
            has_enough = draws.can_draw(facts, self._setup.buffer.min_size)
            for step in range(len(inputs)):
                seed = [self._setup.seed, number + step]
                counts = draws.divide_batch(facts, batch_size, seed) if has_enough else None
                parts.append((counts[self._shard] if counts else 0, [*seed, self._shard]))
        # Of parts, a multiple of B / 8 is drawn, and a part of it kept, so that few sizes are
        # compiled. A sampler that consumes would lose the others.
        step = max(1, batch_size // 8) if each and not self._buffer.sampler.consumes else 1
        try:
            batches = [
                self._start_draw(-(-count // step) * step, own)
                for (count, _), own in zip(parts, inputs, strict=True)
            ]
            for sample, (count, seed) in zip(batches, parts, strict=True):
                yield None if sample is None else self._finish_draw(sample, count, seed)
        finally:
            if ticket is not None:
                self._gate.report.remote(self._shard, *self.totals(), ticket)

    def _start_draw(self, count: int, inputs: DrawInputs) -> Sample | None:
        """Starts a draw of `count` items; returns None if nothing can be drawn."""
        # Without an anchor, a compiled draw is masked; with a storage on the host it would raise.
        is_on_host = self._buffer.storage.is_on_host
        if not count or (is_on_host and not self.can_sample(count)):
            return None
        key = _fold_in(self._root_key, np.uint32(self._ledger.drawn))
        self._ledger.drawn += 1
        sampler = self._buffer.sampler
        # Without a state to return, a draw is faster.
        if not sampler.consumes and not sampler.count_draws:
            return self._methods.sample(self._state, key, count, *inputs)
        self._state, sample = self._methods.draw(self._state, key, count, *inputs)
        return sample

    def _finish_draw(self, sample: Sample, count: int, seed: list[int]) -> Sample | None:
        """Returns `count` items of a sample as NumPy arrays; None if all items are masked."""
        arrays = jax.tree.map(np.asarray, sample)
        if not arrays.mask.any():
            return None
        # Keep `count` of the items, chosen at random, as their order may depend on what they are.
        num_drawn = len(arrays.indices)
        if count < num_drawn:
            kept = np.random.default_rng(seed).permutation(num_drawn)[:count]
            arrays = jax.tree.map(lambda leaf: leaf[kept], arrays)
        self._samples += count
        info = {**arrays.info, "shard": np.full(count, self._shard, np.int32)}
        # After a restart slots may hold other rows, so stamps from before must not match.
        stamp = arrays.stamp + self._stamp_offset
        return arrays.replace(stamp=stamp, info=info, origin=self._setup.origin)

    def can_sample(self, batch_size: int | None) -> bool:
        """Returns True if a draw would have at least one item."""
        return bool(self._methods.can_sample(self._state, batch_size))

    def facts(self) -> ShardFacts:
        """Returns the statistics from which all shards compute their parts of a batch."""
        arrays = draws.measure_shard(self._buffer, self._state.replace(storage=None))
        mass, least, anchors, size = jax.device_get(arrays)
        return ShardFacts(float(mass), float(least), int(anchors), int(size))

    def size(self) -> int:
        """Returns the number of stored items."""
        return int(self._methods.size(self._state))

    # Saving.

    def save(self) -> int | None:
        """Saves the buffer; returns the number of the generation, or None without a path."""
        if self._path is None:
            return None
        self._ledger.size_at_save = self.size()
        options = {"extra": self._ledger.to_arrays(), "layout": "native"}
        self._generation = checkpoint.save(self._path, self._buffer, self._state, **options)
        self._unsaved = 0
        return self._generation

    def stats(self) -> dict[str, int]:
        """Returns this shard's counts; see `Remote.stats`."""
        # Ray's public functions tell only if an actor was restarted, not how often.
        actors: Any = require("ray._private.state", "ray")
        actor_id = ray().get_runtime_context().get_actor_id()
        return {
            "size": self.size(),
            "received": self._ledger.received,
            "lost": self._ledger.lost,
            "unsaved": self._unsaved,
            "draws": self._ledger.drawn,
            "restarts": int(actors.actors(actor_id=actor_id)["NumRestarts"]),
            "generation": self._generation,
        }

    def end(self) -> None:
        """Releases everything, so that temporary files are removed."""
        del self._state, self._methods, self._write_lane


# The record of what arrived.


class Arrival(NamedTuple):
    """The relation of a call's timesteps to those that arrived before."""

    is_repeat: bool  # True if some of them arrived before
    is_next: bool  # True if they directly follow the stream's last timestep
    missing: int  # the number of timesteps missing before them; minus their number if they are late


class Ledger:
    """The numbers of the timesteps that arrived, by stream and sender. L streams."""

    def __init__(self, lanes: int) -> None:
        # By stream and sender, the ranges of numbers that did not arrive, as their first number and
        # the one after their last. The range of all later numbers, up to `_END`, comes last.
        self.missing: dict[tuple[int, int], list[tuple[int, int]]] = {}
        # The sender of each stream's last timestep, 0 for none, and the number that would follow.
        self.last: list[tuple[int, int]] = [(0, 0)] * lanes
        self.received: int = 0  # items that arrived
        self.lost: int = 0  # items known to be missing
        self.drawn: int = 0  # batches
        self.size_at_save: int = 0  # items stored at the last save

    def note(self, lane: int, sender: int, first: int, count: int) -> Arrival:
        """Records the arrival of `count` timesteps, the first of which has the number `first`."""
        # Find the range of missing numbers in which all of these are.
        end, ranges = first + count, self.missing.setdefault((lane, sender), [(0, _END)])
        indices = [at for at, (start, stop) in enumerate(ranges) if start <= first and end <= stop]
        if not indices:
            return Arrival(is_repeat=True, is_next=False, missing=0)
        index = indices[0]
        start, stop = ranges[index]
        # The numbers before and after these are still missing.
        parts = (start, first), (end, stop)
        ranges[index : index + 1] = [part for part in parts if part[0] < part[1]]
        is_next, self.last[lane] = self.last[lane] == (sender, first), (sender, end)
        # Numbers below those that arrived last were counted as missing, and arrive late.
        return Arrival(False, is_next, first - start if stop == _END else -count)

    def note_failure(self, lane: int, sender: int, first: int, count: int) -> None:
        """Records that the timesteps that arrived last could not be written, and are missing."""
        self.missing[lane, sender].insert(0, (first, first + count))
        # No sender has the number 0, so whatever arrives next cuts the stream.
        self.last[lane] = 0, 0

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays to save with the buffer."""
        missing = [(*key, *bounds) for key, ranges in self.missing.items() for bounds in ranges]
        counts = [self.received, self.lost, self.drawn, self.size_at_save]
        return {
            "missing": np.array(missing, np.int64).reshape(-1, 4),
            "last": np.array(self.last, np.int64),
            "counts": np.array(counts, np.int64),
        }

    @classmethod
    def load(cls, path: str, generation: int) -> "Ledger":
        """Returns the ledger that was saved with a generation of a checkpoint."""
        # `checkpoint.load` would need an example of the arrays, with the number of senders.
        with BlockStore.open_to_read(path, generation) as store:
            missing, last, counts = (
                store.array_bytes(EXTRA + name).view(np.int64)
                for name in ("missing", "last", "counts")
            )
        # Undo `to_arrays`.
        ledger = cls(0)
        ledger.last = [(sender, number) for sender, number in last.reshape(-1, 2).tolist()]
        for lane, sender, *bounds in missing.reshape(-1, 4).tolist():
            ledger.missing.setdefault((lane, sender), []).append((bounds[0], bounds[1]))
        ledger.received, ledger.lost, ledger.drawn, ledger.size_at_save = counts.tolist()
        return ledger


# Writing to a lane.


@component
class OneStream(Storage):
    """A storage that writes only the environments of one lane, and leaves the rest to `inner`.

    Writing the items of all lanes, with all but one masked, would take L times as long.
    """

    inner: Any
    width: int

    def init(self, context: Context, spec: Item) -> Any:
        """Returns the inner storage's empty state."""
        return self.inner.init(context, spec)

    def spec(self, state: Any) -> Item:
        """Returns the inner storage's spec of an item."""
        return self.inner.spec(state)

    def write(
        self, context: Context, state: Any, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Writes the items of the only lane with slots; `items` repeats them for all lanes."""
        # Find the first environment of the lane that has slots.
        has_slots = jnp.any(plan.slots < context.ring.capacity, axis=0)
        first = jnp.argmax(has_slots).astype(jnp.int32) // self.width * self.width
        # Write with the slots of this lane only.
        slots = lax.dynamic_slice_in_dim(plan.slots, first, self.width, axis=1)
        lane_plan = dataclasses.replace(plan, slots=slots, starts=slots.reshape(-1))
        items = jax.tree.map(lambda leaf: leaf[:, : self.width], items)
        state, _ = self.inner.write(context, state, lane_plan, items)
        return state, plan

    def read(self, context: Context, state: Any, where: SlotsForLeaf) -> Item:
        """Returns the items that the inner storage reads."""
        return self.inner.read(context, state, where)


def make_writer(buffer: ReplayBuffer, lanes: int) -> Callable[..., BufferState]:
    """Returns a function that writes a stream's timesteps and returns the new state.

    Its arguments are a state, the lane, items `[T, W, ...]`, and a mask and priorities `[T, W]` or
    None. If there is only one lane, the last three are those of `ReplayBuffer.extend`.
    """
    # A single lane is the whole ring.
    if lanes == 1:
        methods: Any = jitted(buffer)
        return lambda state, lane, *items: methods.extend(state, *items)
    # On the device, one compiled function plans and writes.
    storage: Any = buffer.storage
    envs = buffer.ring.envs
    lane_buffer = dataclasses.replace(buffer, storage=OneStream(storage, envs // lanes))
    if not storage.is_on_host:
        return lambda state, lane, *items: _write(lane_buffer, state, np.int32(lane), *items)

    def write_on_host(state: BufferState, lane: int, items: Item, *options: Any) -> BufferState:
        # The jitted function plans the write, and the host storage executes it.
        half = for_device(buffer, state)
        after = _plan(lane_buffer, half, np.int32(lane), items, *options)
        if any(hasattr(transform, "inverse") for transform in buffer.transforms):
            items = _to_stored(lane_buffer, items)
        put = state.storage.rows.put_items
        return write_rows(state, put, after.storage.planned, items, lambda: after)

    return write_on_host


def _write_lane(
    buffer: ReplayBuffer, state: BufferState, lane: Any, items: Item, mask: Any, priorities: Any
) -> Any:
    """Writes items `[T, W, ...]` of one lane; all other lanes are masked."""
    storage: Any = buffer.storage
    envs, width = buffer.ring.envs, storage.width
    items = _to_stored(buffer, items)
    length = jax.tree.leaves(items)[0].shape[0]

    def repeat(leaf: Any) -> jax.Array:
        """Repeats a leaf for all lanes, `[T, E, ...]`."""
        # XLA does not store the repetitions, as the storage reads one of them.
        shape = (length, envs // width, width, *leaf.shape[2:])
        return jnp.broadcast_to(leaf[:, None], shape).reshape(length, envs, *leaf.shape[2:])

    # Mask the other lanes, and write.
    in_lane = jnp.arange(envs, dtype=jnp.int32) // width == lane
    written = in_lane if mask is None else in_lane & repeat(mask)
    written = jnp.broadcast_to(written, (length, envs))
    priorities = None if priorities is None else repeat(priorities)
    return steps.write(buffer, state, jax.tree.map(repeat, items), written, None, priorities)


# `_write` donates the state; `_plan` does not, as the storage on the host needs the old one.
_write: Callable[..., BufferState] = by_description(donated=("state",))(_write_lane)
_plan: Callable[..., BufferState] = by_description()(_write_lane)


@by_description()
def _to_stored(buffer: ReplayBuffer, items: Item) -> Any:
    """Returns items `[T, W, ...]` in the stored form, after the inverses of all transforms."""
    for transform in reversed(buffer.transforms):
        if hasattr(transform, "inverse"):
            items = jax.vmap(jax.vmap(transform.inverse))(items)
    return items


def pieces(length: int, lengths: set[int]) -> list[int]:
    """Returns the lengths of the pieces in which `length` timesteps are written.

    A write is compiled for each length. The first few lengths are used as they are and added to
    `lengths`; others are divided into powers of two.
    """
    if length in lengths or len(lengths) < _MAX_LENGTHS:
        lengths.add(length)
        return [length]
    return [1 << bit for bit in reversed(range(length.bit_length())) if length >> bit & 1]
