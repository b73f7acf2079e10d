"""Batches as Python iterates: whole epochs, and batches drawn ahead by a thread."""

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

from jrb._core.steps import context_of
from jrb._core.validate import DonatedError, check_not_deleted
from jrb._store.errors import StaleError
from jrb._store.threads import Worker, taken_lock
from jrb._util import checks
from jrb.buffer import ReplayBuffer, check_single
from jrb.mix import Mix
from jrb.samplers import WithoutReplacement
from jrb.sharding import Sharded
from jrb.state import BufferState, Device, Sample, origin_of


@dataclasses.dataclass(frozen=True, eq=False)
class Epochs:
    """Every anchor once an epoch, in random order; made by `epochs`. It can be gone through again.

    Attributes:
        buffer: with a sampler without replacement.
        state: what is drawn from.
        key: of the order.
        batches: how many, over all epochs.
        origin: of the batches: the buffer's own, whose verbs take them.
    """

    buffer: ReplayBuffer
    state: BufferState
    key: jax.Array
    batches: int
    origin: str

    def __len__(self) -> int:
        """The number of batches."""
        return self.batches

    def __iter__(self) -> Iterator[Sample]:
        state = self.state
        for number in range(self.batches):
            state, sample = self.buffer.draw(state, jax.random.fold_in(self.key, number))
            yield sample.replace(origin=self.origin)


def epochs(
    buffer: ReplayBuffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int | None = None,
    n_epochs: int = 1,
    drop_last: bool = False,
) -> Epochs:
    """Goes through all that a buffer holds, without replacement, whatever its own sampler is.

    B batch.

    Args:
        buffer: the description. Its unit says what is gone through: transitions, windows, ...
        state: is only read; it may not be donated meanwhile.
        key: a PRNG key. It is consumed.
        batch_size: B; None for the buffer's.
        n_epochs: how often.
        drop_last: whether the last batch of an epoch is left out where it is short. Else it is
            masked at its end, so that all batches have one shape.

    Returns:
        What `for` takes, and `len`: batches of type `Sample`.

    Raises:
        ValueError: there is nothing to go through, or no batch size.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(capacity=10)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(7)})
        >>> batches = jrb.epochs(buffer, state, jax.random.key(0), batch_size=3)
        >>> len(batches), sorted(int(x) for b in batches for x in b.data["x"][b.mask])
        (3, [0, 1, 2, 3, 4, 5, 6])
    """
    check_single(buffer, "epochs")
    if not isinstance(state, BufferState):
        raise TypeError(f"epochs: expected a state of the buffer, got {type(state).__name__}.")
    batch_size = buffer.batch_size if batch_size is None else batch_size
    if batch_size is None:
        raise ValueError("batch_size: expected a number, got None. Give it to the buffer or here.")
    checks.count("batch_size", batch_size)
    checks.count("n_epochs", n_epochs)
    checks.flag("drop_last", drop_last)
    checks.key(key)
    sampler, origin = WithoutReplacement(drop_last=drop_last), origin_of(buffer)
    buffer = dataclasses.replace(buffer, sampler=sampler, batch_size=batch_size)
    state = state.replace(sampler=sampler.init(buffer.ring))
    context = context_of(buffer, state.writer)
    if state.edits.ndim:
        raise TypeError("epochs: expected a single state, got states under vmap. Take one of them.")
    count = int(buffer.unit.anchors(context, state.unit).count)
    each = count // batch_size if drop_last else -(-count // batch_size)
    if not each:
        raise ValueError(
            f"epochs: expected enough for a batch of {batch_size}, got {count} things to draw. Add "
            "items first, or take smaller batches."
        )
    return Epochs(buffer, state, key, batches=each * n_epochs, origin=origin)


def steps(
    buffer: ReplayBuffer,
    state: BufferState,
    key: jax.Array | None = None,
    *,
    n_epochs: int | None = None,
    max_iter: int | None = None,
    batch_size: int | None = None,
) -> Iterator[Sample]:
    """So many batches for a loop: whole epochs, or single draws, or the first of one or the other.

    Args:
        buffer: the description.
        state: is only read; it may not be donated meanwhile.
        key: a PRNG key, which is consumed; None for `jax.random.key(0)`.
        n_epochs: how often to go through everything, without replacement, as `epochs`; None for
            draws of the buffer's own sampler.
        max_iter: at most so many batches; None for no limit but that of the epochs.
        batch_size: B; None for the buffer's.

    Returns:
        An iterator over batches of type `Sample`; without end if there are no numbers.

    Raises:
        ValueError: there is nothing to draw, or no batch size.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer, state = jrb.from_items({"x": jnp.arange(7)})
        >>> [batch.data["x"].size for batch in jrb.steps(buffer, state, max_iter=3, batch_size=4)]
        [4, 4, 4]
        >>> len(list(jrb.steps(buffer, state, n_epochs=2, batch_size=4)))
        4
    """
    key = jax.random.key(0) if key is None else key
    if max_iter is not None:
        checks.count("max_iter", max_iter)
    if n_epochs is not None:
        batches: Iterable[Sample] = epochs(buffer, state, key, batch_size, n_epochs)
    else:
        batches = _draws(buffer, state, key, batch_size)
    return itertools.islice(batches, max_iter)


def _draws(
    buffer: ReplayBuffer, state: BufferState, key: jax.Array, batch_size: int | None
) -> Iterator[Sample]:
    for number in itertools.count():
        state, sample = buffer.draw(state, jax.random.fold_in(key, number), batch_size)
        yield sample


_Drawing = Callable[[int, Callable[[], bool]], Any]
"""Makes the batch of a number; the function says whether it is wanted still."""


class Prefetch:
    """Batches that a thread draws ahead; made by `prefetch`.

    An iterator, and a context: leaving it, `close`, the end of a `for` and of the program all end
    the thread. An interrupt of `next` loses no batch: the next call returns it.
    """

    def __init__(self, draw: _Drawing, depth: int) -> None:
        self._line = line = _Line(depth)
        line.owner = weakref.ref(self, line.taken.put)  # of C: no interrupt comes between
        work = functools.partial(_work, line, draw)
        self._thread = line.worker = Worker(work, "jrb-prefetch", daemon=True)
        line.worker.start()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            Exception: what was raised while it was drawn; after that, there are no more.
            StopIteration: after `close`, or after an exception.
        """
        return self._line.take()

    def close(self) -> None:
        """Ends the thread; batches that were drawn ahead are lost."""
        self._line.close()
        self._thread.wait()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Line:
    """What the thread and its caller share; it does not keep the iterator, which may be dropped.

    Not a `queue.Queue`: an interrupt of its `get` can lose a batch, or leave its lock taken (see
    `jrb._store.threads`). Here a batch stays in the deque until it is returned, and what an
    interrupt has cut short is made good by the next call.

    Attributes:
        owner: of the iterator.
        worker: the thread.
        drawn: batches that were not taken, with their numbers.
        wanted: the number of the first batch that may not be drawn yet.
        taken: an entry for each batch that was taken, and others, at which the thread looks anew.
        changed: a lock that the thread releases after each batch.
        error: what was raised in the thread.
    """

    owner: weakref.ref[Prefetch]
    worker: Worker

    def __init__(self, depth: int) -> None:
        self.drawn: collections.deque[tuple[int, Any]] = collections.deque()
        self.depth, self.wanted = depth, depth
        self.taken, self.changed = queue.SimpleQueue[Any](), taken_lock()
        self.is_closed, self.has_ended = False, False
        self.error: BaseException | None = None

    def is_open(self) -> bool:
        """Whether batches may still be wanted."""
        return not self.is_closed and self.owner() is not None

    def has_room(self, number: int) -> bool:
        """Waits, in the thread, until a batch is wanted; False when none will be any more."""
        if number >= self.depth:
            self.taken.get()
        while number >= self.wanted and self.is_open():
            self.taken.get()
        return self.is_open()

    def take(self) -> Any:
        while not self.is_closed:
            if not self.drawn:
                if self.has_ended:
                    break
                self.changed.acquire()
                continue
            first = number, batch = self.drawn[0]
            self.wanted = number + 1 + self.depth
            self.taken.put(None)
            if len(self.drawn) > 1:
                self.wake()  # another thread may wait for the next one
            # No call from here on: no interrupt comes between the removal and the return.
            if self.drawn and self.drawn[0] is first:
                del self.drawn[0]
                return batch
        self.wake()
        error, self.error = self.error, None
        raise StopIteration if error is None else error

    def close(self) -> None:
        self.is_closed = True
        self.taken.put(None)
        self.drawn.clear()
        self.wake()

    def wake(self) -> None:
        """Lets whoever waits for a batch look once more."""
        with contextlib.suppress(RuntimeError):  # the lock is free already
            self.changed.release()


def _work(line: _Line, draw: _Drawing) -> None:
    number = 0
    _alive.add(line)
    try:
        while line.has_room(number):
            line.drawn.append((number, draw(number, line.is_open)))
            line.wake()
            number += 1
    except StopIteration:
        pass
    except BaseException as error:
        line.error = error
    line.has_ended = True
    line.wake()
    _alive.discard(line)


_alive: set[_Line] = set()


@atexit.register
def _close_all() -> None:
    """A thread that is still inside XLA when the program is gone would bring it down."""
    for line in list(_alive):
        line.close()
        line.worker.wait()


def _newest(
    buffer: ReplayBuffer | Mix,
    newest: Callable[[], Any],
    key: jax.Array,
    wanted: Callable[[], bool],
) -> Any:
    """A draw from the newest state, made again, for a second, where that was written to meanwhile.

    The next one is known only when the verb that makes it has returned.
    """
    until = None
    try:
        while True:
            state = newest()
            try:
                check_not_deleted(
                    state
                )  # at once, as XLA complains on the terminal where it finds out
                return buffer.sample(state, key)
            except (StaleError, DonatedError):
                now = time.monotonic()
                until = now + _PATIENCE if until is None else until
                if now >= until or not wanted():
                    raise
                time.sleep(_PAUSE)
    except StopIteration as error:  # it would look like the end of the batches
        raise RuntimeError(f"prefetch: the function of states raised {error!r}.") from error


_PATIENCE, _PAUSE = 1.0, 1e-4
"""Seconds that a newer state is waited for, and between two looks for it."""


def _from(batches: Iterable[Any], state: Any, key: Any, device: Device) -> _Drawing:
    """What takes the batches of an iterable, one by one."""
    if state is not None or key is not None:
        raise TypeError("prefetch: expected no state and no key with an iterable of batches.")
    iterator = iter(batches)

    def take(number: int, wanted: Callable[[], bool]) -> Any:
        batch = next(iterator)
        return jax.block_until_ready(batch if device is None else jax.device_put(batch, device))

    return take


def prefetch(
    buffer: ReplayBuffer | Mix | Iterable[Any],
    state_or_fn: Any = None,
    key: jax.Array | None = None,
    depth: int = 2,
    *,
    device: Device = None,
) -> Prefetch:
    """Draws batches ahead, in a thread, while the caller computes with those it has.

    Or takes them ahead from any iterable, such as `epochs` or `steps`, until that ends.

    Batch number n is what `buffer.draw(state, jax.random.fold_in(key, n))` gives, and lies on the
    device when it is handed over. There are never more than `depth` batches that were drawn and
    not taken, and as many as that while the caller computes.

    Given a state, the states that samplers which consume leave behind are followed; it may not be
    donated meanwhile. Given a function, it is called before every draw, in the thread, and returns
    the state to draw from. Batch n is drawn after batch n - depth was taken: what happened to the
    state before that is seen by batch n, so that new priorities arrive at most `depth` batches
    late. Samplers that consume are only looked at. Where the state was donated before the draw was
    over, as by a verb of `jrb.jitted`, or its rows on the host were overwritten, the function is
    called again for a newer one, which has to come within a second. States on several devices may
    not be donated before a draw is over.

    Args:
        buffer: a `ReplayBuffer` or a `Mix`, with a batch size; or an iterable of batches, without
            state and key.
        state_or_fn: a state, or a function without arguments that returns one.
        key: a PRNG key. It is consumed.
        depth: how many batches are drawn ahead, at least 1.
        device: a device or a sharding that the batches are copied to; None for where they are.

    Returns:
        An iterator over batches of type `Sample`, without end; or over those of the iterable.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(capacity=10, batch_size=4)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(7)})
        >>> with jrb.prefetch(buffer, state, jax.random.key(0)) as batches:
        ...     next(batches).data["x"].shape
        (4,)
    """
    checks.count("depth", depth)
    if isinstance(buffer, Iterable):
        return Prefetch(_from(buffer, state_or_fn, key, device), depth)
    if not isinstance(buffer, ReplayBuffer | Mix | Sharded):
        raise TypeError(
            f"prefetch: expected a ReplayBuffer, a Mix, a Sharded or an iterable of batches, got "
            f"{type(buffer).__name__}. The order is prefetch(buffer, state, key)."
        )
    checks.key(key)
    root: Any = key  # a key, as was checked
    states: list[Any] = [None if callable(state_or_fn) else state_or_fn]

    def draw(number: int, wanted: Callable[[], bool]) -> Any:
        here = jax.random.fold_in(root, number)
        if callable(state_or_fn):
            sample = _newest(buffer, state_or_fn, here, wanted)
        else:
            states[0], sample = buffer.draw(states[0], here)
        if device is not None:
            sample = jax.device_put(sample, device)
        return jax.block_until_ready(sample)

    return Prefetch(draw, depth)
