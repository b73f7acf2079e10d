"""The server: one buffer and its state, in a process of its own."""

import ctypes
import secrets
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb import LostWarning, checkpoint
from jrb.authoring import require
from jrb.loops import jitted
from jrb.remote import draws, streams
from jrb.remote.draws import ShardFacts
from jrb.remote.gate import ray
from jrb.remote.ledger import Ledger
from jrb.remote.setup import Setup
from jrb.state import BufferState, Sample
from jrb.storages import MemmapStorage, SpillStorage
from jrb.types import HostStorage

_fold_in = jax.jit(jax.random.fold_in)


def keep_freed_memory() -> None:
    """Lets the process keep 256 MB that it has freed, where its library is glibc.

    A server makes and frees batches of megabytes, again and again. By default glibc gives such
    memory back to the system each time, and to have its pages zeroed again takes as long as to
    gather a batch.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune is not None:  # the numbers of M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in malloc.h
        tune(-3, 1 << 25)
        tune(-1, 1 << 28)


class Server:
    """A shard; an actor of one thread, which does what each caller asks in the caller's order.

    Its n-th draw has the key `fold_in(fold_in(key(seed), shard), n)`, and n continues after a
    restart from where it was saved.
    """

    def __init__(self, setup: Setup, shard: int) -> None:
        if setup.on_cpu:
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", setup.wide)
        keep_freed_memory()
        self._setup, self._shard = setup, shard
        self._path: str | None = setup.path_of(shard)
        self._buffer = setup.served(shard)
        self._lanes: int = setup.lanes(shard)
        self._put = streams.writer(self._buffer, self._lanes)
        self._verbs: Any = jitted(self._buffer)
        self._lengths: set[int] = set()
        self._root: jax.Array = jax.random.fold_in(jax.random.key(setup.seed), shard)
        self._life: np.uint32 = np.uint32(secrets.randbits(32))
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
        """Returns the state that was saved last, or an empty one."""
        buffer, path, ledger = self._buffer, self._path, self._ledger
        try:
            generations = [] if path is None else checkpoint.generations(path)
        except FileNotFoundError:
            generations = []
        if path is None or not generations:
            state = self._verbs.init(self._setup.spec)
            if path is not None and isinstance(buffer.storage, MemmapStorage | SpillStorage):
                # Its files are there from now on, and no other description may take them.
                self._generation = checkpoint.save(path, buffer, state, extra=ledger.saved())
            return state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LostWarning)  # `stats` says it
            _, state, saved = checkpoint.load(path, buffer, extra=ledger.saved(), verify=False)
        self._generation, self._ledger = generations[-1], Ledger.loaded(saved)
        self._ledger.lost += self._ledger.held - int(buffer.size(state))
        return state

    def ready(self) -> None:
        """Does nothing: whoever waits for it waits for the server."""

    def totals(self) -> tuple[int, int]:
        """Returns the items that were written and the samples that were given, for `limits`."""
        return self._items, self._samples

    def _report(self, ticket: int | None) -> None:
        """Tells the gate that this shard's part of a permit is done."""
        if ticket is not None:
            self._gate.report.remote(self._shard, self._items, self._samples, ticket)

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
        """Writes timesteps of a stream, of which the sender sent `first` before.

        `count` items of them, those that are not masked, are reported under the ticket.
        """
        length = len(leaves[0])
        items = length * (self._buffer.ring.envs // self._lanes)
        arrival = self._ledger.note(lane, sender, first, length)
        try:
            if not arrival.again:
                self._ledger.lost += items // length * arrival.missing
                try:
                    self._write(lane, arrival.goes_on, leaves, mask, priorities)
                except BaseException:
                    self._ledger.note_failure(lane, first, length)
                    self._ledger.lost += items
                    raise
                self._ledger.received += items
                self._unsaved += items
                self._items += count
        finally:
            self._report(ticket)
        if self._setup.save_every is not None and self._unsaved >= self._setup.save_every:
            self.save()

    def _write(
        self,
        lane: int,
        goes_on: bool,
        leaves: list[np.ndarray],
        mask: np.ndarray | None,
        priorities: np.ndarray | None,
    ) -> None:
        """Writes timesteps to a lane, in pieces of few lengths."""
        envs, length = self._buffer.ring.envs, len(leaves[0])
        width = envs // self._lanes
        if not goes_on:  # nothing crosses from what the lane holds to what comes now
            self._state = self._verbs.truncate(self._state, np.arange(envs) // width == lane)
        if self._lanes > 1:
            axes, shape = 1 + len(self._setup.lead), (length, width)
            leaves = [leaf.reshape(*shape, *leaf.shape[axes:]) for leaf in leaves]
            mask, priorities = (
                None if part is None else np.broadcast_to(part.reshape(length, -1), shape)
                for part in (mask, priorities)
            )
        start, structure = 0, jax.tree.structure(self._setup.spec)
        for size in streams.pieces(length, self._lengths):
            part = slice(start, start + size)
            items = jax.tree.unflatten(structure, [leaf[part] for leaf in leaves])
            sent = [None if each is None else each[part] for each in (mask, priorities)]
            self._state = self._put(self._state, lane, items, *sent)
            start += size

    def update(
        self, indices: np.ndarray, stamp: np.ndarray, mask: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Sets new priorities of what was drawn and is still stored."""
        none: Any = None
        sample = Sample(
            data=none,
            indices=jax.numpy.asarray(indices),
            probabilities=none,
            weights=none,
            mask=jax.numpy.asarray(mask),
            info={},
            stamp=jax.numpy.asarray(stamp - self._life),
        )
        self._state = self._verbs.update_priority(self._state, sample, priorities)

    # Reading.

    def draw(
        self,
        batch_size: int,
        beta: float | None,
        number: int,
        *each: ShardFacts,
        ticket: int | None = None,
    ) -> Sample | None:
        """Draws one batch (see `draws`)."""
        return next(self.draws(batch_size, [beta], number, *each, ticket=ticket))

    def draws(
        self,
        batch_size: int,
        betas: list[float | None],
        number: int,
        *each: ShardFacts,
        ticket: int | None = None,
    ) -> Iterator[Sample | None]:
        """Draws batches; or this shard's parts of them, by the facts of each shard.

        Ray stores one while the next is computed: all are asked for before the first is given. By
        the number of the first batch all shards agree on their parts. With one shard, `each` is
        empty. The samples that are given are reported under the ticket, once, at the end. Yields
        samples of NumPy arrays, None where there is nothing to draw.
        """
        parts = [(batch_size, [0])] * len(betas)
        if each:
            seeds = [[self._setup.seed, number + step] for step in range(len(betas))]
            enough = draws.ready(list(each), self._setup.buffer.min_size)
            shares = [draws.shares(list(each), batch_size, s) if enough else None for s in seeds]
            parts = [
                (share[self._shard] if share else 0, [*seed, self._shard])
                for share, seed in zip(shares, seeds, strict=True)
            ]
        # A multiple of B / 8 is drawn and some of it chosen, so that few sizes are compiled.
        step = max(1, batch_size // 8)
        try:
            batches = [
                self._ask(-(-count // step) * step, beta)
                for (count, _), beta in zip(parts, betas, strict=True)
            ]
            for sample, (count, seed) in zip(batches, parts, strict=True):
                yield None if sample is None else self._prepare(sample, count, seed)
        finally:
            self._report(ticket)

    def _ask(self, count: int, beta: float | None) -> Sample | None:
        """Starts a draw; None where there is nothing."""
        is_on_host = isinstance(self._buffer.storage, HostStorage)
        if not count or (is_on_host and not self.can_sample(count)):
            return None
        key = _fold_in(self._root, np.uint32(self._ledger.drawn))
        self._ledger.drawn += 1
        sampler = self._buffer.sampler
        if not sampler.consumes and not sampler.count_draws:  # faster: no state is returned
            return self._verbs.sample(self._state, key, count, beta)
        self._state, sample = self._verbs.draw(self._state, key, count, beta)
        return sample

    def _prepare(self, sample: Sample, count: int, seed: list[int]) -> Sample | None:
        """Returns `count` of them as they are sent; None if there were none to draw."""
        arrays = jax.tree.map(np.asarray, sample)
        if not arrays.mask.any():
            return None
        drawn = len(arrays.indices)
        if count < drawn:
            some = np.random.default_rng(seed).permutation(drawn)[:count]
            arrays = jax.tree.map(lambda leaf: leaf[some], arrays)
        self._samples += count
        info = {**arrays.info, "shard": np.full(count, self._shard, np.int32)}
        # A stamp of an earlier life, which may have had other rows at the same slots, is stale.
        stamp = arrays.stamp + self._life
        return arrays.replace(stamp=stamp, info=info, origin=self._setup.origin)

    def can_sample(self, batch_size: int | None) -> bool:
        """Returns whether there is something to draw."""
        return bool(self._verbs.can_sample(self._state, batch_size))

    def facts(self) -> ShardFacts:
        """Returns what others must know to draw in proportion."""
        return draws.facts(self._buffer, self._state)

    def size(self) -> int:
        """Returns the number of items stored."""
        return int(self._verbs.size(self._state))

    # Keeping.

    def save(self) -> int | None:
        """Saves; returns the number of the generation, None without a path."""
        if self._path is None:
            return None
        self._ledger.held = self.size()
        extra = self._ledger.saved()
        self._generation = checkpoint.save(self._path, self._buffer, self._state, extra=extra)
        self._unsaved = 0
        return self._generation

    def stats(self) -> dict[str, int]:
        """Returns counts; see `Remote.stats`."""
        # Ray's public functions say only whether an actor was started again, not how often.
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
        del self._state, self._verbs, self._put
