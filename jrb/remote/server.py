"""The server: one buffer and its state, in a process of its own."""

import secrets
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb import checkpoint
from jrb._core import eager
from jrb._store.errors import LostWarning
from jrb.loops import jitted
from jrb.remote import shards, streams
from jrb.remote.allocation import keep_freed_memory
from jrb.remote.ledger import Ledger
from jrb.remote.library import ray, restarts
from jrb.remote.setup import Setup
from jrb.remote.shards import Facts
from jrb.state import BufferState, Sample
from jrb.storages import MemmapStorage, SpillStorage


class Server:
    """A shard; an actor of one thread, which does what each caller asks in the caller's order.

    Its n-th draw has the key `fold_in(fold_in(key(seed), shard), n)`, and n goes on after a restart
    from where it was saved.
    """

    def __init__(self, setup: Setup, shard: int) -> None:
        if setup.on_cpu:
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", setup.wide)
        keep_freed_memory()
        self._setup, self._shard = setup, shard
        self._path, self._buffer = setup.path_of(shard), setup.served(shard)
        self._structure, self._lanes = jax.tree.structure(setup.spec), setup.lanes(shard)
        self._put = streams.writer(self._buffer, self._lanes)
        self._verbs: Any = jitted(self._buffer)
        self._lengths: set[int] = set()
        self._root = jax.random.fold_in(jax.random.key(setup.seed), shard)
        self._life = np.uint32(secrets.randbits(32))
        self._state, self._ledger = self._begun()
        self._unsaved, self._generation = 0, self._generations()[-1:]
        self._gate: Any = None
        self._items = self._samples = 0
        if setup.gate is not None:
            self._gate = ray().get_actor(setup.gate)
            self._items, self._samples = ray().get(self._gate.begin.remote(shard, self.size()))

    def _generations(self) -> list[int]:
        try:
            return [] if self._path is None else checkpoint.generations(self._path)
        except FileNotFoundError:
            return []

    def _begun(self) -> tuple[BufferState, Ledger]:
        """What was saved last, or nothing."""
        ledger = Ledger(self._lanes)
        if self._path is None or not self._generations():
            state = self._verbs.init(self._setup.spec)
            if isinstance(self._buffer.storage, MemmapStorage | SpillStorage) and self._path:
                checkpoint.save(self._path, self._buffer, state, extra=ledger.saved())
            return state, ledger
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LostWarning)  # it is told in `stats`
            _, state, saved = checkpoint.load(
                self._path, self._buffer, extra=ledger.saved(), verify=False
            )
        ledger = Ledger.loaded(saved)
        ledger.lost += ledger.held - int(self._buffer.size(state))
        return state, ledger

    def ready(self) -> None:
        """Nothing: whoever waits for it waits for the server."""

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
        try:
            if self._extend(lane, sender, first, leaves, mask, priorities):
                self._items += count
        finally:
            self._report(ticket)
        if self._setup.save_every is not None and self._unsaved >= self._setup.save_every:
            self.save()

    def _extend(
        self,
        lane: int,
        sender: int,
        first: int,
        leaves: list[np.ndarray],
        mask: np.ndarray | None,
        priorities: np.ndarray | None,
    ) -> bool:
        """Returns whether the timesteps were written now; False if they were before."""
        length, width = len(leaves[0]), self._buffer.ring.envs // self._lanes
        arrival = self._ledger.note(lane, sender, first, length)
        if arrival.again:
            return False
        self._ledger.lost += arrival.missing * width
        try:
            if not arrival.goes_on:
                self._cut(lane)
            self._write(lane, leaves, mask, priorities)
        except BaseException:
            self._ledger.failed(lane, first, length)
            self._ledger.lost += length * width
            raise
        self._ledger.received += length * width
        self._unsaved += length * width
        return True

    def _write(
        self,
        lane: int,
        leaves: list[np.ndarray],
        mask: np.ndarray | None,
        priorities: np.ndarray | None,
    ) -> None:
        """Writes timesteps to a lane, in pieces of few lengths."""
        if self._lanes > 1:
            leaves, mask, priorities = self._in_lanes(leaves, mask, priorities)
        start = 0
        for size in streams.pieces(len(leaves[0]), self._lengths):
            part = slice(start, start + size)
            items = jax.tree.unflatten(self._structure, [leaf[part] for leaf in leaves])
            rest = [None if found is None else found[part] for found in (mask, priorities)]
            self._state = self._put(self._state, lane, items, *rest)
            start += size

    def _cut(self, lane: int) -> None:
        """Nothing goes on from what a lane holds to what comes now."""
        width = self._buffer.ring.envs // self._lanes
        which = np.arange(self._buffer.ring.envs) // width == lane
        self._state = self._verbs.truncate(self._state, which)

    def _in_lanes(self, leaves: list[np.ndarray], *rest: np.ndarray | None) -> tuple[Any, ...]:
        """Leaves `[T, W, ...]`, mask and priorities `[T, W]`."""
        width, known = self._buffer.ring.envs // self._lanes, 1 + len(self._setup.lead)
        wide = [leaf.reshape(len(leaf), width, *leaf.shape[known:]) for leaf in leaves]
        shape = (len(leaves[0]), width)
        flat = lambda found: np.broadcast_to(found.reshape(len(found), -1), shape)
        return wide, *(None if found is None else flat(found) for found in rest)

    def update(
        self, indices: np.ndarray, stamp: np.ndarray, mask: np.ndarray, priorities: np.ndarray
    ) -> None:
        """New priorities for what was drawn and still is there."""
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
        *each: Facts,
        ticket: int | None = None,
    ) -> Sample | None:
        """One batch (see `draws`)."""
        return next(self.draws(batch_size, [beta], number, *each, ticket=ticket))

    def draws(
        self,
        batch_size: int,
        betas: list[float | None],
        number: int,
        *each: Facts,
        ticket: int | None = None,
    ) -> Iterator[Sample | None]:
        """Batches; or this shard's parts of them, by what `each` shard says that it holds.

        Ray stores one while the next is computed: all are asked for before the first is given.

        Args:
            batch_size: B.
            betas: of the weights, one for each batch.
            number: of the first batch, by which all shards agree on their parts.
            ticket: under which the samples that are given are reported, once, at the end.
            each: what they hold; nothing where there is but one.

        Yields:
            Samples of NumPy arrays, None where there is nothing to be drawn.
        """
        parts = [(batch_size, [0])] * len(betas)
        if each:
            parts = [
                self._part(batch_size, number + step, list(each)) for step in range(len(betas))
            ]
        pairs = zip(parts, betas, strict=True)
        try:
            asked = [self._asked(shards.padded(part[0], batch_size), beta) for part, beta in pairs]
            for one, part in zip(asked, parts, strict=True):
                yield None if one is None else self._sent(one, *part)
        finally:
            self._report(ticket)

    def _part(self, batch_size: int, number: int, each: list[Facts]) -> tuple[int, list[int]]:
        """How many this shard gives, and by which numbers they are chosen."""
        if not shards.ready(each, self._setup.buffer.min_size):
            return 0, []
        seed = [self._setup.seed, number]
        return shards.shares(each, batch_size, seed)[self._shard], [*seed, self._shard]

    def _asked(self, count: int, beta: float | None) -> Sample | None:
        """A draw that is computed; None where there is nothing."""
        if not count or (eager.on_host(self._buffer) and not self.can_sample(count)):
            return None
        key = _fold_in(self._root, np.uint32(self._ledger.drawn))
        self._ledger.drawn += 1
        sampler = self._buffer.sampler
        if (
            not sampler.consumes and not sampler.count_draws
        ):  # no state to be returned takes less time
            return self._verbs.sample(self._state, key, count, beta)
        self._state, sample = self._verbs.draw(self._state, key, count, beta)
        return sample

    def _sent(self, sample: Sample, count: int, seed: list[int]) -> Sample | None:
        """So many of them as they go over the wire; None if there were none to be drawn."""
        found = jax.tree.map(np.asarray, sample)
        if not found.mask.any():
            return None
        found = shards.chosen(found, count, seed)
        self._samples += count
        shard = np.full(count, self._shard, np.int32)
        # Stamps of an earlier life, which may have had other rows at the same slots, are of no use.
        info, stamp = {**found.info, "shard": shard}, found.stamp + self._life
        return found.replace(stamp=stamp, info=info, origin=self._setup.origin)

    def can_sample(self, batch_size: int | None) -> bool:
        """Whether there is something to draw."""
        return bool(self._verbs.can_sample(self._state, batch_size))

    def facts(self) -> Facts:
        """What others must know to draw in proportion."""
        return shards.facts(self._buffer, self._state)

    def size(self) -> int:
        """The items held."""
        return int(self._verbs.size(self._state))

    # Keeping.

    def save(self) -> int | None:
        """Saves; the number of the generation, None without a path."""
        if self._path is None:
            return None
        self._ledger.held = self.size()
        number = checkpoint.save(self._path, self._buffer, self._state, extra=self._ledger.saved())
        self._unsaved, self._generation = 0, [number]
        return number

    def stats(self) -> dict[str, int]:
        """Counts; see `Remote.stats`."""
        ledger = self._ledger
        return {
            "size": self.size(),
            "received": ledger.received,
            "lost": ledger.lost,
            "unsaved": self._unsaved,
            "draws": ledger.drawn,
            "restarts": restarts(),
            "generation": self._generation[0] if self._generation else 0,
        }

    def end(self) -> None:
        """Lets go of everything, so that temporary files are removed."""
        del self._state, self._verbs, self._put


_fold_in = jax.jit(jax.random.fold_in)
