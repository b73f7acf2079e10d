"""What pictures need to know of a state, read with as little of the items as will do.

N capacity, E environments, R = N / E rows, K rows held at most by any environment, M episodes.
"""

import dataclasses
import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb import read
from jrb._core import editing, validate
from jrb._core.steps import context_of
from jrb._util import pytree
from jrb._util.pytree import DType, PyTree
from jrb.buffer import ReplayBuffer, check_single
from jrb.keys import leaves_at, path_name
from jrb.state import Buffer, BufferState


def check(buffer: ReplayBuffer, state: BufferState, who: str) -> None:
    """Raises unless it is a state of this buffer, known, and a single one.

    Raises:
        TypeError: no buffer, a state of another one, or one inside `jit`.
        ValueError: states under `vmap`, or one that was donated.
    """
    check_single(buffer, who)
    if isinstance(state, BufferState):
        check_known(state, f"{who}: state")
        lead = jnp.shape(state.edits)
        if lead:
            raise ValueError(
                f"{who}: state: expected a single state, got {' x '.join(map(str, lead))} of them "
                "under vmap. Pick one with jax.tree.map(lambda x: x[0], state)."
            )
    try:
        validate.check_state(buffer, state)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{who}: state: {error}") from None


def check_known(tree: PyTree, what: str) -> None:
    """Raises where arrays cannot be looked at; the message begins with `what`."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{what}: expected arrays that are known, got traced ones. Draw the picture "
                "outside jit, of what the jitted function returns."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{what}: expected arrays that are there, got donated ones. Pass what the function "
                "returned to which they were donated."
            )


@dataclasses.dataclass(frozen=True)
class Rows:
    """Flags and rewards in the order of time, the newest row of each environment last.

    Where rows are in no order of time, they are in that of slots.

    Attributes:
        counts: int `[E]`, the rows that each environment holds, the last ones of K.
        ends: bool `[K, E]`, after which of them an episode ends; None if nobody knows.
        rewards: real `[K, E, ...]`; None if items have none.
        newest: int `[E]`, the slots of the newest rows.
        lost: bool `[E]`, whether the first row of the oldest episode may be lost.
    """

    counts: np.ndarray
    ends: np.ndarray | None
    rewards: np.ndarray | None
    newest: np.ndarray
    lost: np.ndarray

    @property
    def held(self) -> np.ndarray | None:
        """Bool `[K, E]`, which rows are held; None for all."""
        most = self.counts.max(initial=0)
        if (self.counts == most).all():
            return None
        return np.arange(most)[:, None] >= most - self.counts


def rows(buffer: ReplayBuffer, state: BufferState) -> Rows:
    """Flags and rewards of all that is held; nothing else of the items is read."""
    ring = buffer.ring
    counts, size, newest = jax.device_get(_held(buffer, state.replace(storage=None)))
    counts = np.broadcast_to(counts, ring.envs)
    lost = np.zeros(ring.envs, bool)
    if buffer.writer.is_chronological:
        lost = read.has_lost_beginning(buffer, state.writer, state.unit)
    else:  # the last row may be there in part
        counts = np.full(ring.envs, -(-int(size) // ring.envs))
    if buffer.storage.of_objects:
        return Rows(counts, None, None, newest, lost)
    ends, rewards = _columns(buffer, state)
    cut = lambda column: None if column is None else _aligned(np.asarray(column), counts)
    return Rows(counts, cut(ends), cut(rewards), newest, lost)


def _aligned(column: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """From `[R, E, ...]`, the oldest row of each environment first, to `[K, E, ...]`."""
    most = int(counts.max(initial=0))
    if (counts == most).all():
        return column[:most]
    later = np.arange(most)[:, None] - (most - counts)
    later = np.maximum(later, 0).reshape(*later.shape, *(1,) * (column.ndim - 2))
    return np.take_along_axis(column, later, axis=0)


@jax.jit
def _held(buffer: Buffer, state: BufferState) -> tuple[jax.Array, jax.Array, jax.Array]:
    held = buffer.writer.held(buffer.ring, state.writer)
    return held.rows(buffer.ring), held.size, held.newest(buffer.ring)


@jax.jit
def _columns(buffer: Buffer, state: BufferState) -> tuple[jax.Array | None, jax.Array | None]:
    """Ends, bool `[R, E]`, and rewards, `[R, E, ...]`, from the oldest row on; None without."""
    context, keys = context_of(buffer, state.writer), buffer.keys
    spec = buffer.storage.spec(state.storage)
    flags = {*keys.flags(spec)} if buffer.writer.is_chronological else set()
    if keys.episode is not None and buffer.writer.is_chronological:
        flags.add(path_name(keys.episode))
    rewards = leaves_at(spec, keys.reward)
    rewards = {name for name, leaf in rewards.items() if is_real(leaf.dtype)}
    found = editing.leaves_of(buffer, context, state, flags | rewards)
    ends = None
    if flags:
        slots = context.held.from_oldest(context.ring)
        ends = editing.flagged_ends(buffer, context, found) | buffer.unit.is_episode_end(
            context, state.unit, slots
        )
    paid = [leaf for name, leaf in leaves_at(found, keys.reward).items() if name in rewards]
    if len(paid) > 1:  # of several agents, side by side
        flat = [leaf.astype(jnp.float32).reshape(*leaf.shape[:2], -1) for leaf in paid]
        paid = [jnp.concatenate(flat, axis=2)]
    return ends, paid[0] if paid else None


def leaves(
    buffer: ReplayBuffer, state: BufferState, slots: np.ndarray, names: set[str]
) -> dict[str, np.ndarray]:
    """The leaves of these names at slots, int32 `[L]`; nothing else of the items is read."""
    if not names:
        return {}
    found = _leaves(buffer, state, jnp.asarray(slots), tuple(sorted(names)))
    return {name: np.asarray(leaf) for name, leaf in found.items()}


@functools.partial(jax.jit, static_argnames="names")
def _leaves(
    buffer: Buffer, state: BufferState, slots: jax.Array, names: tuple[str, ...]
) -> dict[str, jax.Array]:
    context = context_of(buffer, state.writer)
    where = lambda name: slots if name in names else slots[:0]
    found = jax.tree_util.tree_leaves_with_path(buffer.storage.read(context, state.storage, where))
    return {name: leaf for path, leaf in found if (name := pytree.leaf_name(path)) in names}


def is_real(dtype: DType) -> bool:
    """Whether its values are real numbers, or bool."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


@dataclasses.dataclass(frozen=True)
class Spans:
    """Where episodes lie among the rows, environment by environment. M episodes.

    Attributes:
        env: int `[M]`.
        start: int `[M]`, the first row of K.
        stop: int `[M]`, the row behind the last.
        returns: float64 `[M]`, sums of rewards, perhaps NaN or infinite; None unless an item has
            one number.
        ended: bool `[M]`, whether it has ended.
        cut: bool `[M]`, whether its first rows may be lost.
    """

    env: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    returns: np.ndarray | None
    ended: np.ndarray
    cut: np.ndarray

    @property
    def complete(self) -> np.ndarray:
        """Bool `[M]`, as `jrb.read.Episode.complete`."""
        return self.ended & ~self.cut

    def order(self) -> np.ndarray:
        """The episodes as `jrb.episodes` has them: as they began, and then by environment."""
        return np.lexsort((self.env, self.since))

    @property
    def since(self) -> np.ndarray:
        """Int `[M]`: the rows of its environment before each episode that are held."""
        first = np.concatenate([[True], self.env[1:] != self.env[:-1]])[: len(self.env)]
        begin = self.start[np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))]
        return self.start - begin


def spans(buffer: ReplayBuffer, found: Rows) -> Spans | None:
    """The episodes; None where nobody knows of ends."""
    if found.ends is None:
        return None
    most, counts, held = int(found.counts.max(initial=0)), found.counts, found.held
    last = found.ends.copy() if held is None else found.ends & held
    last[most - 1 :, counts > 0] = True
    at = np.flatnonzero(last.T)
    env, stop = at // max(most, 1), at % max(most, 1) + 1
    begin = most - counts[env]
    goes_on = np.concatenate([[False], env[1:] == env[:-1]])[: len(env)]
    start = np.where(goes_on, np.concatenate([[0], stop[:-1]])[: len(stop)], begin)
    return Spans(
        env=env,
        start=start,
        stop=stop,
        returns=_returns(found.rewards, most, env, start, stop),
        ended=found.ends[stop - 1, env],
        cut=(start == begin) & found.lost[env],
    )


def _returns(
    rewards: np.ndarray | None, most: int, env: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> np.ndarray | None:
    if rewards is None or rewards[:1, :1].size != 1:
        return None
    line = rewards.reshape(most, -1).T.astype(np.float64).reshape(-1)
    edges = np.stack([env * most + start, env * most + stop], axis=1).reshape(-1)
    with np.errstate(invalid="ignore"):  # of infinities of both signs the sum is NaN
        return np.add.reduceat(np.append(line, 0.0), edges)[::2]


def even(count: int, most: int) -> np.ndarray:
    """The borders, int `[bins + 1]`, of at most so many equal parts; the last may be smaller."""
    return np.append(np.arange(0, count, -(-count // most)), count)


def edges(count: int, most: int) -> np.ndarray:
    """The borders, int `[bins + 1]`, of at most so many about equal parts of `count`."""
    bins = max(1, min(count, most))
    return np.arange(bins + 1) * count // bins
