"""What a buffer holds, read out on the host: items, episodes, statistics.

K items, N capacity, E environments, R = N / E rows, L length of an episode.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import editing, episode_ends, validate
from jrb._core.steps import context_of
from jrb._util import casting, checks, pytree
from jrb.buffer import ReplayBuffer, check_single
from jrb.keys import leaves_at
from jrb.state import BufferState
from jrb.types.messages import PartState

_PIECE = 32 << 20  # bytes that are read at a time


@overload
def items(buffer: ReplayBuffer, state: BufferState) -> Any: ...
@overload
def items(buffer: ReplayBuffer, state: BufferState, chunks: int) -> Iterator[Any]: ...
def items(buffer: ReplayBuffer, state: BufferState, chunks: int | None = None) -> Any:
    """All that is held, oldest first, as it is stored: without unit and transforms.

    Args:
        buffer: the description.
        state: is only read.
        chunks: so many items at a time, for what memory cannot hold; None for all at once.

    Returns:
        A pytree of NumPy arrays `[K, ...]`, PRNG keys as their words; or an iterator of such, of
        which the last may be shorter. Of objects, lists.

    Raises:
        TypeError: states under vmap.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(3)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(5)})
        >>> jrb.items(buffer, state)["x"]
        array([2, 3, 4], dtype=int32)
    """
    slots = held_slots(buffer, state, "items")
    if chunks is not None:
        checks.count("chunks", chunks)
        return _in_chunks(buffer, state, slots, chunks)
    return taken(buffer, state, slots)


def held_slots(buffer: ReplayBuffer, state: BufferState, who: str) -> np.ndarray:
    """The slots that hold items, oldest first."""
    _check_single(buffer, state, who)
    slots, count = buffer.in_order(state)
    return np.asarray(slots)[: int(count)]


def _check_single(buffer: ReplayBuffer, state: BufferState, who: str) -> None:
    check_single(buffer, who)
    validate.check_state(buffer, state)


def _in_chunks(
    buffer: ReplayBuffer, state: BufferState, slots: np.ndarray, size: int
) -> Iterator[Any]:
    for start in range(0, len(slots), size):
        yield taken(buffer, state, slots[start : start + size])


def taken(buffer: ReplayBuffer, state: BufferState, slots: np.ndarray) -> Any:
    """The items at slots `[K]`, NumPy arrays `[K, ...]`, a few megabytes on their way at a time."""
    if buffer.storage.of_objects:
        return buffer.take(state, jnp.asarray(slots))
    spec = buffer.stored(state)
    raw = jax.tree.map(casting.raw_spec, spec)
    whole = jax.tree.map(lambda leaf: np.empty((len(slots), *leaf.shape), leaf.dtype), raw)
    step = max(1, _PIECE // max(pytree.nbytes(raw), 1))
    for start in range(0, len(slots), step):
        part = slots[start : start + step]
        found = jax.device_get(
            jax.tree.map(casting.raw, buffer.take(state, jnp.asarray(_rounded(part))))
        )
        for target, leaf in zip(jax.tree.leaves(whole), jax.tree.leaves(found), strict=True):
            target[start : start + step] = leaf[: len(part)]
    return whole


def _rounded(slots: np.ndarray) -> np.ndarray:
    """Slots of a length that is a power of two, the last of them again and again.

    Reads are compiled once for each length, and episodes are of many.
    """
    missing = (1 << (len(slots) - 1).bit_length()) - len(slots)
    return np.pad(slots, (0, missing), mode="edge")


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """An episode, as far as it is held: rows of one environment from an end to the next one.

    It is complete if it has ended and its first row is held. Counts of complete episodes mean this
    everywhere: in `jrb.stats`, in titles of pictures, on the command line.

    Attributes:
        slots: int32 `[L]`, its rows, oldest first.
        environment: whose it is, from 0.
        return_: the sum of its rewards, float64, in the shape of one, or a pytree of several.
            None if items have none.
        ended: whether it has ended; otherwise it is running.
        cut: whether rows from its beginning may be lost.
    """

    slots: np.ndarray
    environment: int
    return_: Any
    ended: bool
    cut: bool
    _buffer: ReplayBuffer = dataclasses.field(repr=False)
    _state: BufferState = dataclasses.field(repr=False)

    @property
    def complete(self) -> bool:
        """Whether it has ended and its first row is held."""
        return self.ended and not self.cut

    @property
    def length(self) -> int:
        """L."""
        return len(self.slots)

    def __len__(self) -> int:
        """L."""
        return self.length

    @property
    def items(self) -> Any:
        """Its items, NumPy arrays `[L, ...]`, as they are stored."""
        return taken(self._buffer, self._state, self.slots)


class Episodes(Sequence[Episode]):
    """The episodes of a state, in the order in which they began, and then of environments."""

    def __init__(self, found: list[Episode]) -> None:
        self._found = found

    def __len__(self) -> int:
        """How many there are."""
        return len(self._found)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> "Episodes": ...
    def __getitem__(self, index: int | slice) -> Any:
        """One of them; or a slice, which is as this is."""
        return Episodes(self._found[index]) if isinstance(index, slice) else self._found[index]

    def __repr__(self) -> str:
        over = sum(each.complete for each in self._found)
        return f"{len(self)} episodes, {over} of them complete"


def episodes(buffer: ReplayBuffer, state: BufferState) -> Episodes:
    """The episodes that a buffer holds.

    One ends where a flag says so (done, terminated or truncated), and where `truncate` was called
    if the unit looks at ends.

    Args:
        buffer: the description, with a writer that keeps the order of time.
        state: is only read.

    Returns:
        A sequence; the items of an episode are read when they are asked for.

    Raises:
        ValueError: items without such a flag, or a writer without an order of time.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9)
        >>> reward, done = jnp.arange(5.0), jnp.array([False, False, True, False, False])
        >>> items = {"next": {"reward": reward, "done": done}}
        >>> empty = buffer.init({"next": {"reward": 0.0, "done": False}})
        >>> found = jrb.episodes(buffer, buffer.extend(empty, items))
        >>> [(each.length, float(each.return_), each.complete) for each in found]
        [(3, 3.0, True), (2, 7.0, False)]
    """
    _check_single(buffer, state, "episodes")
    checks.chronological("episodes", buffer.writer)
    if buffer.storage.of_objects:
        raise ValueError(
            "episodes: expected items of arrays, got objects, whose flags nobody knows."
        )
    episode_ends.check(buffer.storage.spec(state.storage), buffer.keys)
    ends, rewards = jax.device_get(_facts(buffer, state))
    held = buffer.writer.held(buffer.ring, state.writer)
    slots, envs = np.asarray(held.from_oldest(buffer.ring)), buffer.ring.envs
    counts = np.broadcast_to(np.asarray(held.rows(buffer.ring)), envs).tolist()
    lost = has_lost_beginning(buffer, state.writer, state.unit)
    found = []
    for env, count in enumerate(counts):
        last = np.flatnonzero(ends[:count, env])
        edges = np.unique(np.concatenate([[0], last + 1, [count]]))
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            run = (slice(start, stop), env)
            total = jax.tree.map(lambda leaf, run=run: leaf[run].sum(0, np.float64), rewards)
            one = Episode(
                slots=slots[start:stop, env],
                environment=env,
                return_=total,
                ended=bool(ends[stop - 1, env]),
                cut=start == 0 and bool(lost[env]),
                _buffer=buffer,
                _state=state,
            )
            found.append((start, env, one))
    return Episodes([one for _, _, one in sorted(found, key=lambda each: each[:2])])


def has_lost_beginning(buffer: ReplayBuffer, writer: PartState, unit: PartState) -> np.ndarray:
    """Whether the first row of each environment's oldest episode may be lost, bool `[E]`."""
    ring = buffer.ring
    lost = np.broadcast_to(np.asarray(buffer.writer.has_lost(ring, writer)), ring.envs)
    oldest = buffer.writer.held(ring, writer).from_oldest(ring)[0]
    before = buffer.unit.episode_step(unit, oldest)
    return lost if before is None else lost & (np.asarray(before) > 0)


def has_episodes(buffer: ReplayBuffer, state: BufferState) -> bool:
    """Whether `episodes` can tell them: items lie in time, and have flags or a number."""
    storage, keys = buffer.storage, buffer.keys
    if not buffer.writer.is_chronological or storage.of_objects:
        return False
    return keys.episode is not None or bool(keys.flags(storage.spec(state.storage)))


@jax.jit
def _facts(buffer: ReplayBuffer, state: BufferState) -> tuple[jax.Array, Any]:
    """Ends, bool `[R, E]`, and rewards `[R, E, ...]`, None if there are none; oldest row first."""
    context = context_of(buffer, state.writer)
    spec = buffer.storage.spec(state.storage)
    rewards = leaves_at(spec, buffer.keys.reward)
    names = {*buffer.keys.flags(spec), *leaves_at(spec, buffer.keys.episode), *rewards}
    found = editing.leaves_of(buffer, context, state, names)
    slots = context.held.from_oldest(context.ring)
    ends = editing.flagged_ends(buffer, context, found) | buffer.unit.is_episode_end(
        context, state.unit, slots
    )
    return ends, buffer.keys.get(found, "reward") if rewards else None


def stats(buffer: ReplayBuffer, state: BufferState) -> dict[str, Any]:
    """What a buffer holds, in numbers.

    Args:
        buffer: the description.
        state: is only read.

    Returns:
        Plain numbers: `size` and `capacity`; where items have flags and lie in time, `episodes`,
        `complete` of them (see `jrb.read.Episode`), and of these `return` and `length` as `mean`,
        `std`, `min`, `max`, the return for each leaf of the reward; where there are priorities,
        `priority` as the same; and where draws are counted, `draws` of the anchors as the same, and
        `never`, the share of them that was never drawn. Where anchors are episodes, those of all
        items.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9)
        >>> items = {"next": {"reward": jnp.ones(4), "done": jnp.arange(4) % 2 == 1}}
        >>> empty = buffer.init({"next": {"reward": 0.0, "done": False}})
        >>> jrb.stats(buffer, buffer.extend(empty, items))["return"]
        {'mean': 2.0, 'std': 0.0, 'min': 2.0, 'max': 2.0}
    """
    found: dict[str, Any] = {"size": len(held_slots(buffer, state, "stats"))}
    found["capacity"] = buffer.capacity
    if has_episodes(buffer, state):
        every = episodes(buffer, state)
        over = [each for each in every if each.complete]
        found["episodes"], found["complete"] = len(every), len(over)
        found["length"] = _summary([each.length for each in over])
        totals = jax.tree.leaves(over[0].return_) if over else []
        if totals and not any(map(np.ndim, totals)):
            each_return = [each.return_ for each in over]
            found["return"] = jax.tree.map(lambda *values: _summary(values), *each_return)
    if buffer.sampler.prioritized:
        known = np.asarray(buffer.priorities(state))
        found["priority"] = _summary(known[known >= 0])
    if buffer.sampler.count_draws:
        draws = np.asarray(state.sampler.draws)[_drawable(buffer, state)]
        found["draws"] = _summary(draws)
        if draws.size:
            found["draws"]["never"] = float(np.mean(draws == 0))
    return found


def _drawable(buffer: ReplayBuffer, state: BufferState) -> np.ndarray:
    """The slots of all anchors; where one stands for more than a slot, those of all items."""
    slots, shares, count = jax.device_get(_anchors(buffer, state.replace(storage=None)))
    if (shares[:count] == 1).all():
        return slots[:count]
    return np.asarray(held_slots(buffer, state, "stats"))


@jax.jit
def _anchors(buffer: ReplayBuffer, state: BufferState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The anchors in their order, int32 `[N]`; how likely each slot is there; their number."""
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    place = jnp.minimum(jnp.arange(buffer.capacity, dtype=jnp.int32), anchors.count - 1)
    return *anchors.nth(jnp.maximum(place, 0), jax.random.key(0)), anchors.count


def _summary(values: Sequence | np.ndarray) -> dict[str, float]:
    """Of nothing, nothing."""
    array = np.asarray(values, np.float64)
    if not array.size:
        return {}
    names = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {name: float(reduce(array)) for name, reduce in names.items()}
