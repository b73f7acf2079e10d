"""Reads on the host what a buffer holds: items, episodes, statistics.

K items, N capacity, E environments, R = N / E rows, L length of an episode.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb import migrate
from jrb._core import editing, validate
from jrb._core.steps import context_of
from jrb._util import casting, checks, pytree
from jrb._xla.compiling import by_description
from jrb.buffer import ReplayBuffer, check_single
from jrb.keys import check_ends, leaves_at
from jrb.queries import Facts, Queries
from jrb.state import BufferState
from jrb.storages import DeviceStorage
from jrb.writers import RoundRobin


@overload
def items(buffer: ReplayBuffer, state: BufferState, chunks: None = None) -> Any: ...
@overload
def items(buffer: ReplayBuffer, state: BufferState, chunks: int) -> Iterator[Any]: ...
def items(buffer: ReplayBuffer, state: BufferState, chunks: int | None = None) -> Any:
    """Returns all items that are held, oldest first, as stored: without unit and transforms.

    Args:
        buffer: the description.
        state: is only read.
        chunks: the number of items in a chunk, if not all fit into memory; None for all at once.

    Returns:
        A pytree of NumPy arrays `[K, ...]`, with PRNG keys as their uint32 words; with `chunks`, an
        iterator over such pytrees, the last of which may be shorter. For objects, lists.

    Raises:
        ValueError: the states are batched by `vmap`.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(3)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(5)})
        >>> jrb.items(buffer, state)["x"]
        array([2, 3, 4], dtype=int32)
    """
    slots = held_slots(buffer, state, "items")
    if chunks is None:
        return take_items(buffer, state, slots)
    checks.count("chunks", chunks)
    starts = range(0, len(slots), chunks)
    return (take_items(buffer, state, slots[start : start + chunks]) for start in starts)


def held_slots(buffer: ReplayBuffer, state: BufferState, who: str) -> np.ndarray:
    """Returns the slots that hold items, oldest first."""
    _check_single_state(buffer, state, who)
    slots, count = buffer.in_order(state)
    return np.asarray(slots)[: int(count)]


def one_state(path: str, state: BufferState, index: int | tuple[int, ...] | None) -> BufferState:
    """Returns one of the states that `vmap` has made; raises unless `index` selects a single one.

    A state of one buffer is returned as it is; `index` must then be None.
    """
    axes = state.edits.shape if isinstance(state, BufferState) else ()
    index = (index,) if isinstance(index, int) else index or ()
    if len(index) == len(axes) and all(0 <= n < size for n, size in zip(index, axes, strict=True)):
        return jax.tree.map(lambda leaf: leaf[index], state) if axes else state
    # Say how to choose a state, on the command line and in Python.
    first = ",".join("0" * len(axes))
    mend = f"Choose one by --state {first}, in Python by jrb.datasets.open(path, state=({first},))."
    expected = f"one of the states under vmap, of shape {axes}" if axes else "no number of a state"
    got = ",".join(map(str, index)) or "none"
    raise ValueError(f"{path}: expected {expected}, got {got}.{f' {mend}' if axes else ''}")


def _check_single_state(buffer: ReplayBuffer, state: BufferState, who: str) -> None:
    """Raises unless `state` is a single state of this buffer with values, not traced."""
    check_single(buffer, who)
    validate.check_state(buffer, state)
    validate.check_outside_jit(who, state)


def take_items(buffer: ReplayBuffer, state: BufferState, slots: np.ndarray) -> Any:
    """Returns the items at slots `[K]`, NumPy arrays `[K, ...]`, read in pieces of 32 MB."""
    if buffer.storage.of_objects:
        return buffer.take(state, jnp.asarray(slots))
    # Allocate the results, and copy the items piece by piece.
    raw = jax.tree.map(casting.raw_spec, buffer.item_spec(state))
    whole = jax.tree.map(lambda leaf: np.empty((len(slots), *leaf.shape), leaf.dtype), raw)
    step = max(1, (32 << 20) // max(pytree.nbytes(raw), 1))
    for start in range(0, len(slots), step):
        piece = slots[start : start + step]
        # Pad to a power of two: a read is compiled for each length, and episodes have many.
        missing = (1 << (len(piece) - 1).bit_length()) - len(piece)
        rounded = jnp.asarray(np.pad(piece, (0, missing), mode="edge"))
        read = jax.device_get(jax.tree.map(casting.raw, buffer.take(state, rounded)))
        for target, leaf in zip(jax.tree.leaves(whole), jax.tree.leaves(read), strict=True):
            target[start : start + step] = leaf[: len(piece)]
    return whole


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """The rows of one episode that are held.

    An episode is complete if it has ended and its first row is held. All counts of complete
    episodes use this definition: in `jrb.stats`, in titles of pictures, on the command line.

    Attributes:
        slots: int32 `[L]`, the slots of its rows, oldest first.
        environment: the number of its environment, from 0.
        return_: the sum of its rewards, float64, in the shape of one reward, or a pytree if the
            reward has several leaves; None if items have no reward.
        ended: True if the episode has ended, False if it is still running.
        cut: True if the first rows of the episode may be lost.
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
        """True if the episode has ended and its first row is held."""
        return self.ended and not self.cut

    @property
    def length(self) -> int:
        """L, the number of rows held."""
        return len(self.slots)

    def __len__(self) -> int:
        return self.length

    @property
    def items(self) -> Any:
        """The items as stored, NumPy arrays `[L, ...]`."""
        return take_items(self._buffer, self._state, self.slots)


class Episodes(Queries, Sequence[Episode]):
    """The episodes of a state, sorted by their first rows in time, then by environment.

    `where`, `best` and `sort` choose some of them when the result is first used; the state must
    not have been donated until then.
    """

    def __init__(
        self, buffer: ReplayBuffer, state: BufferState, every: "_Every", find: Callable[[], Any]
    ) -> None:
        self._buffer, self._state, self._every, self._find = buffer, state, every, find

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        return self._find()

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> "Episodes": ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._choose(lambda episodes: np.arange(len(episodes))[index])
        every, number = self._every, self._numbers[operator.index(index)]
        return Episode(
            slots=every.slots_of(number),
            environment=int(every.env[number]),
            return_=jax.tree.map(lambda leaf: leaf[number], every.returns),
            ended=bool(every.ended[number]),
            cut=bool(every.cut[number]),
            _buffer=self._buffer,
            _state=self._state,
        )

    @property
    def slots(self) -> np.ndarray:
        """The slots of all rows of these episodes, int32 `[K]`, one episode after the other."""
        none = np.zeros(0, np.int32)
        return np.concatenate([none, *map(self._every.slots_of, self._numbers)])

    def to_buffer(self, **parts: Any) -> tuple[ReplayBuffer, BufferState]:
        """Returns a new buffer that holds the rows of these episodes, and its state.

        The episodes follow one another in one stream of time, in their order here, and end where
        they ended or are cut off. Priorities and counts of draws are kept, as by `jrb.rebuild`.

        Args:
            parts: arguments of `jrb.ReplayBuffer`. By default those of this buffer, but for the
                capacity, which is the number of rows, the writer, `jrb.RoundRobin()`, no
                `min_size`, and the storage, which is on the device.

        Raises:
            ValueError: there are no episodes; they do not fit the capacity; or the unit needs rows
                that incomplete episodes lack.
            TypeError: `num_envs` is given.
        """
        from_device = isinstance(self._buffer.storage, DeviceStorage)
        storage = self._buffer.storage if from_device else DeviceStorage()
        slots = self.slots
        if not len(slots):
            raise ValueError("to_buffer: expected at least one episode, got none.")
        if parts.get("num_envs") is not None:
            raise TypeError(
                "to_buffer: num_envs: expected none, as the episodes follow one another, got "
                f"{parts['num_envs']!r}. Use jrb.rebuild for a buffer with environments."
            )
        defaults = {"capacity": len(slots), "num_envs": None, "writer": RoundRobin()}
        defaults |= {"storage": storage, "min_size": None}
        new = dataclasses.replace(self._buffer, **(defaults | parts))
        unit = new.unit
        if unit.requires_contiguous_history:
            # Units that read earlier rows need the first ones; others need complete episodes.
            cut, ended = (column[self._numbers] for column in (self._every.cut, self._every.ended))
            if cut.any() or not (unit.lookback or ended.all()):
                raise ValueError(
                    f"to_buffer: expected complete episodes for {type(unit).__name__}, which needs "
                    "all rows of an episode. Choose them by where(complete=True)."
                )
        ends = np.zeros(len(slots), bool)
        ends[np.cumsum(self._every.length[self._numbers]) - 1] = True
        return new, migrate.copy_rows(self._buffer, self._state, new, slots, ends)

    def __repr__(self) -> str:
        complete = self._every.complete[self._numbers]
        return f"{len(self)} episodes, {int(complete.sum())} of them complete"

    def _facts_of_each(self) -> Facts:
        every = self._every
        names = {"length": every.length, "complete": every.complete, "ended": every.ended}
        names |= {"env": every.env, "age": every.age}
        names |= {} if every.returns is None else {"return": every.returns}
        take = lambda column: jax.tree.map(lambda leaf: leaf[self._numbers], column)
        return {name: functools.partial(take, column) for name, column in names.items()}

    def _choose(self, find: Callable[["Episodes"], np.ndarray]) -> "Episodes":
        choose = lambda: self._numbers[find(self)]
        return Episodes(self._buffer, self._state, self._every, choose)


@dataclasses.dataclass(frozen=True)
class _Every:
    """All episodes of a state, as columns `[K]`; T rows of time are held at most.

    Attributes:
        slots: int32 `[R, E]`, the slots of each environment, oldest row first.
        start: the oldest-first number of each episode's first row.
        length: the number of its rows.
        env: its environment.
        ended: True if its last row ends it.
        cut: True if its first rows may be lost.
        age: the number of rows of its environment that are newer than its first one.
        returns: the sum of its rewards, float64, a pytree of arrays; None without rewards.
    """

    slots: np.ndarray
    start: np.ndarray
    length: np.ndarray
    env: np.ndarray
    ended: np.ndarray
    cut: np.ndarray
    age: np.ndarray
    returns: Any

    @property
    def complete(self) -> np.ndarray:
        return self.ended & ~self.cut

    def slots_of(self, number: int) -> np.ndarray:
        """Returns the slots of an episode, oldest first, int32 `[L]`."""
        start = self.start[number]
        return self.slots[start : start + self.length[number], self.env[number]]


def episodes(buffer: ReplayBuffer, state: BufferState) -> Episodes:
    """Returns the episodes that a buffer holds.

    An episode ends at a row whose flag is set (done, terminated or truncated), or whose number
    changes after it (`Keys.episode`); and where `truncate` was called, if the unit uses ends.

    Args:
        buffer: the description, with a writer that keeps the order of time.
        state: is only read.

    Returns:
        A sequence with methods to choose and sort episodes, such as
        `jrb.episodes(buffer, state).where(min_return=100).best(0.1)`. Flags and rewards are read
        now, the items of an episode when they are accessed.

    Raises:
        ValueError: the items have no such flag or number, or the writer keeps no order of time.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9)
        >>> reward, done = jnp.arange(5.0), jnp.array([False, False, True, False, False])
        >>> items = {"next": {"reward": reward, "done": done}}
        >>> empty = buffer.init({"next": {"reward": 0.0, "done": False}})
        >>> found = jrb.episodes(buffer, buffer.extend(empty, items))
        >>> [(each.length, float(each.return_), each.complete) for each in found]
        [(3, 3.0, True), (2, 7.0, False)]
        >>> found.where(min_return=5).slots.tolist()
        [3, 4]
    """
    _check_single_state(buffer, state, "episodes")
    checks.chronological("episodes", buffer.writer)
    if buffer.storage.of_objects:
        raise ValueError(
            "episodes: expected items of arrays, got objects, whose flags nobody knows."
        )
    check_ends(buffer.storage.spec(state.storage), buffer.keys)
    # Read ends and rewards of all rows, from the oldest on, and the number of rows held.
    ends, rewards = jax.device_get(_ends_and_rewards(buffer, state))
    occupancy = buffer.writer.held(buffer.ring, state.writer)
    slots, envs = np.asarray(occupancy.from_oldest(buffer.ring)), buffer.ring.envs
    counts = np.broadcast_to(np.asarray(occupancy.rows(buffer.ring)), envs)
    # An episode begins at the oldest row, and after each end but one at the newest row.
    held = np.arange(len(ends))[:, None] < counts
    begins = held.copy()
    begins[1:] &= ends[:-1]
    # In the order of environments, the rows of an episode follow one another.
    env, start = np.nonzero(begins.T)
    stop = np.append(start[1:], 0)
    is_last = np.append(env[1:] != env[:-1], True) if len(env) else np.zeros(0, bool)
    stop = np.where(is_last, counts[env], stop[: len(env)])
    # The environments of whose oldest episode the first row may be lost.
    lost = np.broadcast_to(np.asarray(buffer.writer.has_lost(buffer.ring, state.writer)), envs)
    steps = buffer.unit.episode_step(state.unit, occupancy.from_oldest(buffer.ring)[0])
    lost = lost if steps is None else lost & (np.asarray(steps) > 0)
    first = np.cumsum(counts)[env] - counts[env] + start

    def add_up(leaf: np.ndarray) -> np.ndarray:
        rows = np.swapaxes(leaf, 0, 1)[held.T].astype(np.float64)
        return np.add.reduceat(rows, first) if len(first) else rows

    every = _Every(
        slots=slots,
        start=start,
        length=stop - start,
        env=env,
        ended=ends[stop - 1, env],
        cut=(start == 0) & lost[env],
        age=counts[env] - 1 - start,
        returns=None if rewards is None else jax.tree.map(add_up, rewards),
    )
    return Episodes(buffer, state, every, lambda: np.lexsort((env, start)))


def has_episodes(buffer: ReplayBuffer, state: BufferState) -> bool:
    """Returns True if `episodes` works: items in order of time, with flags or episode numbers."""
    storage, keys = buffer.storage, buffer.keys
    if not buffer.writer.is_chronological or storage.of_objects:
        return False
    return keys.episode is not None or bool(keys.flags(storage.spec(state.storage)))


@by_description()
def _ends_and_rewards(buffer: ReplayBuffer, state: BufferState) -> tuple[jax.Array, Any]:
    """Returns ends, bool `[R, E]`, and rewards, `[R, E, ...]` or None, from the oldest row on."""
    # Read only the leaves of flags, numbers and rewards.
    context = context_of(buffer, state.writer)
    spec = buffer.storage.spec(state.storage)
    rewards = leaves_at(spec, buffer.keys.reward)
    names = {*buffer.keys.flags(spec), *leaves_at(spec, buffer.keys.episode), *rewards}
    where = editing.slots_by_name(context, names)
    leaves = buffer.storage.read(context, state.storage, where)
    slots = context.held.from_oldest(context.ring)
    ends = editing.flagged_ends(buffer, context, leaves)
    ends |= buffer.unit.is_episode_end(context, state.unit, slots)
    return ends, buffer.keys.get(leaves, "reward") if rewards else None


def stats(buffer: ReplayBuffer, state: BufferState) -> dict[str, Any]:
    """Returns statistics about the items of a buffer.

    Args:
        buffer: the description.
        state: is only read.

    Returns:
        Plain numbers, always `size` and `capacity`. If items have flags and are in order of time:
        the numbers `episodes` and `complete` (see `jrb.read.Episode`), and of complete episodes
        `return` and `length`, each a dict of `mean`, `std`, `min` and `max`, `return` for each leaf
        of the reward. If the sampler has priorities: such a dict `priority`. If draws are counted:
        such a dict `draws` of the anchors (of all items if anchors are episodes), in which `never`
        is the share that was never drawn.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9)
        >>> items = {"next": {"reward": jnp.ones(4), "done": jnp.arange(4) % 2 == 1}}
        >>> empty = buffer.init({"next": {"reward": 0.0, "done": False}})
        >>> jrb.stats(buffer, buffer.extend(empty, items))["return"]
        {'mean': 2.0, 'std': 0.0, 'min': 2.0, 'max': 2.0}
    """
    slots = held_slots(buffer, state, "stats")
    facts: dict[str, Any] = {"size": len(slots), "capacity": buffer.capacity}
    if has_episodes(buffer, state):
        every = episodes(buffer, state)
        complete = [each for each in every if each.complete]
        facts["episodes"], facts["complete"] = len(every), len(complete)
        facts["length"] = _summarize([each.length for each in complete])
        # Rewards with axes have no single return.
        totals = jax.tree.leaves(complete[0].return_) if complete else []
        if totals and not any(map(np.ndim, totals)):
            returns = [each.return_ for each in complete]
            facts["return"] = jax.tree.map(lambda *values: _summarize(values), *returns)
    if buffer.sampler.prioritized:
        priorities = np.asarray(buffer.priorities(state))
        facts["priority"] = _summarize(priorities[priorities >= 0])
    if buffer.sampler.count_draws:
        # Anchors that stand for several slots, such as episodes, count all items.
        anchors, shares, count = anchors_in_order(buffer, state)
        if (shares[:count] == 1).all():
            slots = anchors[:count]
        draws = np.asarray(state.sampler.draws)[slots]
        facts["draws"] = _summarize(draws)
        if draws.size:
            facts["draws"]["never"] = float(np.mean(draws == 0))
    return facts


def anchors_in_order(buffer: ReplayBuffer, state: BufferState) -> tuple[np.ndarray, ...]:
    """Returns the anchors, int32 `[N]`; the probability of each at its rank; and their number.

    Entries beyond that number repeat the last anchor.
    """
    return jax.device_get(_read_anchors(buffer, state.replace(storage=None)))


@by_description()
def _read_anchors(
    buffer: ReplayBuffer, state: BufferState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    # The shape is fixed, as the number of anchors is known on the device only.
    rank = jnp.minimum(jnp.arange(buffer.capacity, dtype=jnp.int32), anchors.count - 1)
    return *anchors.nth(jnp.maximum(rank, 0), jax.random.key(0)), anchors.count


def _summarize(values: Sequence | np.ndarray) -> dict[str, float]:
    """Returns mean, std, min and max; an empty dict if there are no values."""
    array = np.asarray(values, np.float64)
    names = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {name: float(reduce(array)) for name, reduce in names.items()} if array.size else {}
