"""Iterators over batches: epochs, draws, and batches drawn ahead by a thread."""

import atexit
import collections
import contextlib
import dataclasses
import functools
import itertools
import queue
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jrb._core.steps import choose, num_anchors, origin_of
from jrb._core.validate import DonatedError, check_not_deleted, check_outside_jit
from jrb._store.files import StaleError
from jrb._store.threads import Worker
from jrb._util import checks
from jrb._xla import compat, random_bits
from jrb.buffer import ReplayBuffer, check_single
from jrb.mix import Mix
from jrb.samplers import WithoutReplacement
from jrb.sharding import Sharded
from jrb.state import BufferState, Device, Sample
from jrb.types.messages import DrawInputs, PRNGKey


@dataclasses.dataclass(frozen=True, eq=False)
class Epochs:
    """The batches of `epochs`: every anchor once per epoch. They can be iterated repeatedly."""

    buffer: ReplayBuffer  # with a sampler without replacement
    state: BufferState
    key: jax.Array
    batches: int  # the number of batches of all epochs
    origin: str  # `Sample.origin` of the batches: that of the user's buffer

    def __len__(self) -> int:
        """Returns the number of batches."""
        return self.batches

    def __iter__(self) -> Iterator[Sample]:
        batches = _iter_draws(self.buffer, self.state, self.key, None)
        return (it.replace(origin=self.origin) for it in itertools.islice(batches, self.batches))


def epochs(
    buffer: ReplayBuffer,
    state: BufferState,
    key: PRNGKey | int,
    batch_size: int | None = None,
    n_epochs: int = 1,
    drop_last: bool = False,
) -> Epochs:
    """Returns batches of all anchors of a buffer without replacement, whatever its sampler is.

    Args:
        buffer: the description. Its unit decides which data are drawn: a transition, a window, ...
        state: is only read; do not donate it before the last batch.
        key: a PRNG key, which is consumed; or an integer, for `jax.random.key` of it.
        batch_size: B; None for the buffer's.
        n_epochs: the number of epochs.
        drop_last: if True, the last batch of an epoch is left out if it is short. Otherwise it is
            padded, and `mask` is False for the padding: all batches have the same shape.

    Returns:
        An iterable of batches of type `Sample`, with a `len`. With `jrb.Packed`, the call chooses
        the episodes of all batches once, without reading them, to count the batches.

    Raises:
        TypeError: it is called inside `jit`, or the key is none.
        ValueError: there are too few anchors for a batch, or no batch size is given.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(capacity=10)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(7)})
        >>> batches = jrb.epochs(buffer, state, jax.random.key(0), batch_size=3)
        >>> len(batches), sorted(int(x) for b in batches for x in b.data["x"][b.mask])
        (3, [0, 1, 2, 3, 4, 5, 6])
    """
    check_single(buffer, "epochs")
    check_outside_jit("epochs", state, key)
    if not isinstance(state, BufferState):
        raise TypeError(f"epochs: expected a state of the buffer, got {type(state).__name__}.")
    batch_size = buffer.batch_size if batch_size is None else batch_size
    if batch_size is None:
        raise ValueError("batch_size: expected a number, got None. Give it to the buffer or here.")
    checks.count("batch_size", batch_size)
    checks.count("n_epochs", n_epochs)
    checks.flag("drop_last", drop_last)
    key = random_bits.key_or_seed(key)
    # Replace the sampler and its state, so that epochs do not depend on the buffer's own.
    sampler, origin = WithoutReplacement(drop_last=drop_last), origin_of(buffer)
    buffer = dataclasses.replace(buffer, sampler=sampler, batch_size=batch_size)
    state = state.replace(sampler=sampler.init(buffer.ring))
    if state.edits.ndim:
        raise TypeError("epochs: expected a single state, got states under vmap. Take one of them.")
    # Count the batches: anchors are counted without reading items.
    per_entry = buffer.unit.anchors_per_entry
    count = int(num_anchors(buffer, state.replace(storage=None)))
    each = count // (batch_size * per_entry) if drop_last else -(-count // batch_size)
    if not each:
        raise ValueError(
            f"epochs: expected enough for a batch of {batch_size}, got {count} anchors. Add items "
            f"first, or take smaller batches. {buffer.unit.anchor_requirement}".rstrip()
        )
    batches = each * n_epochs
    if per_entry > 1:
        batches = _count_batches(buffer, state.replace(storage=None), key, n_epochs)
    return Epochs(buffer, state, key, batches=batches, origin=origin)


def _count_batches(buffer: ReplayBuffer, state: BufferState, key: jax.Array, n_epochs: int) -> int:
    """Returns the number of batches if the unit decides how many anchors fit: draws them all."""
    sampler: Any = buffer.sampler
    size: Any = buffer.batch_size
    needed = size * buffer.unit.anchors_per_entry if sampler.drop_last else 1
    draw = jax.jit(lambda state, key: choose(buffer, state, key, size, DrawInputs())[0])
    number = 0
    for _ in range(n_epochs):
        is_over = False
        while not is_over:
            # Batch n has the key of `_iter_draws`.
            state = state.replace(sampler=draw(state, jax.random.fold_in(key, number)))
            number, progress = number + 1, jax.device_get(state.sampler)
            is_over = progress.position + needed > progress.length
    return number


def steps(
    buffer: ReplayBuffer,
    state: BufferState,
    key: PRNGKey | int,
    *,
    n_epochs: int | None = None,
    max_iter: int | None = None,
    batch_size: int | None = None,
) -> Iterator[Sample]:
    """Returns an iterator over batches: those of whole epochs, or draws of the buffer's sampler.

    Args:
        buffer: the description.
        state: is only read; do not donate it before the last batch.
        key: a PRNG key, which is consumed; or an integer, for `jax.random.key` of it. Two calls
            with one key and one state give the same batches.
        n_epochs: the number of passes over all anchors, without replacement, as in `epochs`; None
            for draws of the buffer's own sampler.
        max_iter: the largest number of batches; None for no limit but that of the epochs.
        batch_size: B; None for the buffer's.

    Returns:
        An iterator over batches of type `Sample`; endless without `n_epochs` and `max_iter`.

    Raises:
        TypeError: it is called inside `jit`, or the key is none.
        ValueError: there is nothing to draw, or no batch size is given.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer, state = jrb.from_items({"x": jnp.arange(7)}, batch_size=4)
        >>> [batch.data["x"].size for batch in jrb.steps(buffer, state, 0, max_iter=3)]
        [4, 4, 4]
        >>> len(list(jrb.steps(buffer, state, jax.random.key(1), n_epochs=2)))
        4
    """
    check_outside_jit("steps", state, key)
    key = random_bits.key_or_seed(key)
    if max_iter is not None:
        checks.count("max_iter", max_iter)
    if n_epochs is not None:
        batches: Iterable[Sample] = epochs(buffer, state, key, batch_size, n_epochs)
    else:
        batches = _iter_draws(buffer, state, key, batch_size)
    return itertools.islice(batches, max_iter)


def _iter_draws(
    buffer: ReplayBuffer, state: BufferState, key: jax.Array, batch_size: int | None
) -> Iterator[Sample]:
    # Batch n has the key `fold_in(key, n)`, as in `prefetch`.
    for number in itertools.count():
        state, sample = buffer.draw(state, jax.random.fold_in(key, number), batch_size)
        yield sample


_Draw = Callable[[int, Callable[[], bool]], Any]
"""Draws the batch with a number. The function returns False when no batch is needed any more."""


class Prefetch:
    """Batches that a thread draws ahead; made by `prefetch`.

    An iterator and a context manager. The thread ends when the context is left, by `close`, when
    the iterator is deleted, as after a `for`, and with the program. An interrupt of `next` loses no
    batch: the next call returns it.
    """

    def __init__(self, draw: _Draw, depth: int) -> None:
        # The thread keeps no reference to the iterator, so that dropping the iterator ends it.
        self._queue = shared = _BatchQueue(depth)
        # The callback is a C function, inside which no interrupt can come.
        shared.owner = weakref.ref(self, shared.requests.put)
        work = compat.with_settings(functools.partial(_draw_ahead, shared, draw))
        self._thread = shared.worker = Worker(work, "jrb-prefetch", daemon=True)
        shared.worker.start()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Any:
        """Returns the next batch; if its draw failed, raises the error once, then StopIteration."""
        return self._queue.take()

    def close(self) -> None:
        """Ends the thread and drops the batches that were drawn ahead; see `prefetch`."""
        self._queue.close()
        self._thread.wait()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _BatchQueue:
    """The state that the thread and its caller share.

    An interrupt right after `get` of a queue would lose a batch. Therefore the next batch first
    moves to `first`, by C functions that no interrupt can separate, and stays there until returned.
    """

    owner: weakref.ref[Prefetch]
    worker: Worker

    def __init__(self, depth: int) -> None:
        # Batches that were drawn, with their numbers; None behind the last one.
        self.batches = queue.SimpleQueue[Any]()
        self.first: collections.deque[Any] = collections.deque()
        self.depth, self.limit = depth, depth  # the number of the first batch not to draw yet
        # An entry whenever the thread has to look at `limit` again.
        self.requests = queue.SimpleQueue[Any]()
        self.is_closed = False
        self.error: BaseException | None = None  # raised in the thread

    def is_open(self) -> bool:
        """Returns True while batches may be taken."""
        return not self.is_closed and self.owner() is not None

    def take(self) -> Any:
        """Returns the next batch; after the last, raises the thread's error or StopIteration."""
        while not self.is_closed:
            if not self.first:
                self.first.extend(map(self.batches.get, (True,)))
            entry = self.first[0]
            if entry is None:
                # Put the end back, for another thread that may wait.
                self.batches.put(None)
                break
            # Compute the limit from the batch's number: an interrupt may repeat this line.
            number, batch = entry
            self.limit = number + 1 + self.depth
            self.requests.put(None)
            # Return the batch, unless another thread has taken it. There is no call after `del`: no
            # interrupt comes before the return.
            if self.first and self.first[0] is entry:
                del self.first[0]
                return batch
        error, self.error = self.error, None
        raise StopIteration if error is None else error

    def close(self) -> None:
        self.is_closed = True
        self.requests.put(None)
        # Drop the batches, whose memory is large, and wake those who wait for one.
        self.first.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self.batches.get_nowait()
        self.batches.put(None)


def _draw_ahead(shared: _BatchQueue, draw: _Draw) -> None:
    """Draws batches while they may be taken; run by the thread."""
    _alive.add(shared)
    try:
        for number in itertools.count():
            # Wait until a batch was taken for this one; each taken batch makes one request.
            if number >= shared.depth:
                shared.requests.get()
            while number >= shared.limit and shared.is_open():
                shared.requests.get()
            if not shared.is_open():
                break
            shared.batches.put((number, draw(number, shared.is_open)))
    except StopIteration:
        pass
    except BaseException as error:
        shared.error = error
    shared.batches.put(None)
    _alive.discard(shared)


_alive: set[_BatchQueue] = set()


@atexit.register
def _close_all_queues() -> None:
    """Ends all threads: one that is inside XLA when the program exits would crash it."""
    # A thread that ends removes itself from the set meanwhile.
    for shared in list(_alive):
        shared.close()
        shared.worker.wait()


_PATIENCE, _PAUSE = 1.0, 1e-4
"""Seconds to wait for a newer state, and between two attempts."""


def _draw_newest(
    buffer: ReplayBuffer | Mix,
    newest: Callable[[], Any],
    key: PRNGKey,
    is_open: Callable[[], bool],
) -> Any:
    """Draws from the newest state; for a second, tries again if it was overwritten meanwhile.

    A newer state is known only after the method that overwrites the old one has returned.
    """
    until = None
    try:
        while True:
            state = newest()
            try:
                # Check first, as XLA would print its own complaint.
                check_not_deleted(state)
                return buffer.sample(state, key)
            except (StaleError, DonatedError):
                # Another state is expected soon: try again, for a second in all.
                until = until or time.monotonic() + _PATIENCE
                if time.monotonic() >= until or not is_open():
                    raise
                time.sleep(_PAUSE)
    except StopIteration as error:
        # It would look like the end of the batches.
        raise RuntimeError(f"prefetch: the function of states raised {error!r}.") from error


def prefetch(
    buffer: ReplayBuffer | Mix | Iterable[Any],
    state_or_fn: Any = None,
    key: jax.Array | int | None = None,
    depth: int = 2,
    *,
    device: Device = None,
) -> Prefetch:
    """Draws batches ahead in a thread, or takes them from any iterable until it ends.

    Batch number n is that of `buffer.draw(state, jax.random.fold_in(key, n))`, and is on the device
    when it is returned. At most `depth` batches are drawn and not yet taken. Batch n is drawn after
    batch n - depth was taken, so it sees all changes of the state before that: new priorities
    arrive at most `depth` batches late.

    If the iterator is closed or dropped, so are batches drawn ahead. The state that was given is
    not changed, so no item of a queue is lost. But of an iterable that takes items out of a queue,
    `depth` batches are lost: keep the iterator, or take from the queue directly.

    Args:
        buffer: a `ReplayBuffer` or a `Mix`, with a batch size; or an iterable of batches, such as
            `epochs`, without state and key.
        state_or_fn: a state, which must not be donated meanwhile; each draw continues from the
            state of the one before. Or a function without arguments that returns the newest state:
            the thread calls it before every draw, and samplers that consume then do not advance. If
            that state is donated before the draw ends, as by `jrb.jitted`, or its rows on the host
            are overwritten, the function is called again, for a second at most. States on several
            devices must not be donated before a draw ends.
        key: a PRNG key, which is consumed; or an integer, for `jax.random.key` of it. None only
            with an iterable.
        depth: the number of batches that are drawn ahead, at least 1.
        device: a device or a sharding that the batches are copied to; None for where they are.

    Returns:
        An endless iterator over batches of type `Sample`; or one over the batches of the iterable.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(capacity=10, batch_size=4)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(7)})
        >>> with jrb.prefetch(buffer, state, jax.random.key(0)) as batches:
        ...     next(batches).data["x"].shape
        (4,)
    """
    checks.count("depth", depth)
    iterator: Iterator[Any] | None = iter(buffer) if isinstance(buffer, Iterable) else None
    if iterator is not None and (state_or_fn is not None or key is not None):
        raise TypeError("prefetch: expected no state and no key with an iterable of batches.")
    if iterator is None and not isinstance(buffer, ReplayBuffer | Mix | Sharded):
        raise TypeError(
            f"prefetch: expected a ReplayBuffer, a Mix, a Sharded or an iterable of batches, got "
            f"{type(buffer).__name__}. The order is prefetch(buffer, state, key)."
        )
    check_outside_jit("prefetch", state_or_fn, key)
    source: Any = buffer
    # The thread draws from the iterable, the newest state, or the state of the draw before.
    root: Any = None if iterator is not None else random_bits.key_or_seed(key)
    states: list[Any] = [state_or_fn]

    def draw(number: int, is_open: Callable[[], bool]) -> Any:
        if iterator is not None:
            batch = next(iterator)
        elif callable(state_or_fn):
            batch = _draw_newest(source, state_or_fn, jax.random.fold_in(root, number), is_open)
        else:
            states[0], batch = source.draw(states[0], jax.random.fold_in(root, number))
        if device is not None:
            batch = jax.device_put(batch, device)
        return jax.block_until_ready(batch)

    return Prefetch(draw, depth)
