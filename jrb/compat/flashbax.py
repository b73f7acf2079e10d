"""flashbax's interface on jrb's buffers: change one import, and a program runs on jrb.

    import jrb.compat.flashbax as fbx          # instead of: import flashbax as fbx

Makers, samples and the fields of states are those of flashbax 0.1.3 and of its main branch, which
need not be installed. `install()` makes `import flashbax` import this module, to try a program
unchanged. The guide "From flashbax" lists differences. E `add_batch_size`, B batch, L window.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

import jrb
from jrb._xla.compiling import by_description

__all__ = ["BufferSample", "BufferState", "Experience", "ExperiencePair", "Mixer"]
__all__ += ["PrioritisedTrajectoryBuffer", "PrioritisedTrajectoryBufferSample"]
__all__ += ["PrioritisedTrajectoryBufferState", "PrioritisedTransitionSample", "SumTreeState"]
__all__ += ["TrajectoryBuffer", "TrajectoryBufferSample", "TrajectoryBufferState"]
__all__ += ["TrajectoryQueue", "TrajectoryQueueSample", "TrajectoryQueueState", "TransitionSample"]
__all__ += ["install", "make_flat_buffer", "make_item_buffer", "make_mixer"]
__all__ += ["make_prioritised_flat_buffer", "make_prioritised_item_buffer"]
__all__ += ["make_prioritised_trajectory_buffer", "make_trajectory_buffer", "make_trajectory_queue"]
__dir__: Callable[[], list[str]] = lambda: __all__

Experience = TypeVar("Experience")
BufferState = TypeVar("BufferState", bound="TrajectoryBufferState[Any]")
BufferSample = TypeVar("BufferSample", bound="TrajectoryBufferSample[Any]")

# Items are any pytrees. flashbax's windows cross the ends of episodes, so no leaf is a flag.
_KEYS = jrb.Keys(next_observation=None, done=None, terminated=None, truncated=None)
_swap: Callable[[Any], Any] = functools.partial(jax.tree.map, lambda x: jnp.swapaxes(x, 0, 1))
_period: Callable[[jrb.ReplayBuffer], int] = lambda buffer: getattr(buffer.unit, "stride", 1)


class TrajectoryBufferState(Generic[Experience]):
    """A state of a jrb buffer, with the fields of flashbax's states."""

    inner: jrb.BufferState
    buffer: jrb.ReplayBuffer  # the buffer of the inner state; static under `jit`

    def __init__(self, experience: Any = None, current_index: Any = 0, is_full: Any = 0, **of: Any):
        """Makes a state from `inner` and `buffer`, or from flashbax's arrays as its Vault does."""
        vars(self).update(of)
        if experience is None:
            return
        # Write the rows before the cursor. Of a full ring, write all rows first: those before the
        # cursor then return to their slots, as the newest ones.
        rows = _swap(jax.tree.map(jnp.asarray, experience))
        length, envs = jax.tree.leaves(rows)[0].shape[:2]
        cursor, full = (jnp.ravel(jnp.asarray(x))[0].item() for x in (current_index, is_full))
        self.buffer = jrb.ReplayBuffer(length * envs, envs, keys=_KEYS)
        self.inner = self.buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], rows))
        for stop in (length, int(cursor)) if full else (int(cursor),):
            first = jax.tree.map(lambda leaf: leaf[:stop], rows)  # noqa: B023
            self.inner = self.buffer.extend(self.inner, first)

    @property
    def experience(self) -> Any:
        """A copy of the stored steps, leaves `[E, T, ...]`."""
        return _map_states(self.buffer, self.inner, function=_stored_steps)

    # The next row to write, True if all rows were written, and the number of rows ever written.
    current_index: property = property(lambda s: s.inner.writer.cursor)
    is_full: property = property(lambda s: s.inner.writer.count == s.buffer.ring.rows)
    running_index: property = property(
        lambda s: s.inner.writer.lap.astype(jnp.int32) * s.buffer.ring.rows + s.current_index
    )


class SumTreeState(NamedTuple):
    """A tree of sums of masses, which are priorities raised to the exponent."""

    nodes: jax.Array  # level by level, root first
    max_recorded_priority: jax.Array  # the largest mass so far


class PrioritisedTrajectoryBufferState(TrajectoryBufferState[Experience]):
    """The state of a prioritised buffer."""

    @property
    def sum_tree_state(self) -> SumTreeState:
        """The tree of masses, whose leaves are in flashbax's order."""
        return _map_states(self.buffer, self.inner, function=_sum_tree)


class TrajectoryQueueState(TrajectoryBufferState[Experience]):
    """The state of a queue."""

    # The number of rows to be read, the rows to be written and read next, and True if none is free.
    num_pending: property = property(lambda s: s.inner.sampler.count // s.buffer.ring.envs)
    write_index: property = TrajectoryBufferState.current_index
    read_index: property = property(lambda s: (s.write_index - s.num_pending) % s.buffer.ring.rows)
    is_full: property = property(lambda s: s.num_pending == s.buffer.ring.rows)


for _class in (TrajectoryBufferState, PrioritisedTrajectoryBufferState, TrajectoryQueueState):
    jax.tree_util.register_dataclass(_class, ["inner"], ["buffer"])


@by_description("function")
def _map_states(
    buffer: jrb.ReplayBuffer, inner: jrb.BufferState, function: Callable[..., Any]
) -> Any:
    """Applies a function to a state, or by `vmap` to each of the states stacked in `inner`."""
    function = functools.partial(function, buffer)
    for _ in range(inner.writer.count.ndim):
        function = jax.vmap(function)
    return function(inner)


def _stored_steps(buffer: jrb.ReplayBuffer, inner: jrb.BufferState) -> Any:
    return buffer.take(inner, jnp.arange(buffer.capacity).reshape(-1, buffer.ring.envs).T)


def _sum_tree(buffer: jrb.ReplayBuffer, inner: jrb.BufferState) -> SumTreeState:
    count, alpha = buffer.capacity // _period(buffer), cast(Any, buffer.sampler).alpha
    priorities = jnp.maximum(buffer.priorities(inner, _slots(buffer, jnp.arange(count))), 0.0)
    masses = jnp.where(priorities > 0, priorities**alpha, 0.0)
    # Pad the leaves to a power of two, and add up pairs of nodes level by level.
    levels = [jnp.pad(masses, (0, (1 << (count - 1).bit_length()) - count))]
    while len(levels[0]) > 1:
        levels.insert(0, levels[0][::2] + levels[0][1::2])
    return SumTreeState(jnp.concatenate(levels), inner.sampler.highest**alpha)


def _slots(buffer: jrb.ReplayBuffer, items: jax.Array) -> jax.Array:
    # flashbax's indices count every `period`-th step, one environment after the other.
    per_env = buffer.ring.rows // _period(buffer)
    return items % per_env * _period(buffer) * buffer.ring.envs + items // per_env


class ExperiencePair(NamedTuple, Generic[Experience]):
    """Two consecutive time steps, leaves `[B, ...]`."""

    first: Experience
    second: Experience


class TrajectoryBufferSample(NamedTuple, Generic[Experience]):
    """A batch: leaves `[B, L, ...]`; of an item buffer `[B, ...]`; or of a flat one, pairs."""

    experience: Any


class PrioritisedTrajectoryBufferSample(NamedTuple, Generic[Experience]):
    """A batch, the indices of its items for `set_priorities`, and their probabilities, `[B]`."""

    experience: Any
    indices: jax.Array
    probabilities: jax.Array


TransitionSample: type[TrajectoryBufferSample[Any]] = TrajectoryBufferSample
TrajectoryQueueSample: type[TrajectoryBufferSample[Any]] = TrajectoryBufferSample
PrioritisedTransitionSample: type[Any] = PrioritisedTrajectoryBufferSample


def _pair(data: Any) -> ExperiencePair[Any]:
    return ExperiencePair(*(jax.tree.map(lambda leaf: leaf[:, i], data) for i in (0, 1)))  # noqa: B023


@dataclasses.dataclass(frozen=True)
class TrajectoryBuffer(Generic[Experience, BufferState, BufferSample]):
    """The functions of a buffer, for `jit`, `vmap`, `pmap` and `shard_map`."""

    buffer: jrb.ReplayBuffer  # the jrb buffer that holds the steps
    min_rows: int  # the number of rows that `can_sample` requires
    missing: tuple[int, ...] = ()  # leading axes that added batches lack: 0 for E, 1 for time
    state_class: ClassVar[Any] = TrajectoryBufferState

    def init(self, experience: Experience) -> Any:
        """Returns an empty state for time steps like this one, without leading axes."""
        inner = self.buffer.init(jax.tree.map(jnp.asarray, experience))
        return self.state_class(inner=inner, buffer=self.buffer)

    def _inner(self, state: Any) -> jrb.BufferState:
        # The buffer of a state that was made from arrays is another one.
        same = state.buffer == self.buffer
        return state.inner if same else jrb.rebuild(state.buffer, state.inner, self.buffer)

    def add(self, state: BufferState, batch: Any) -> BufferState:
        """Returns the state with time steps `[E, T, ...]` added."""
        batch = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, self.missing), batch)
        # In an item buffer, all steps become one stream.
        if self.buffer.num_envs is None:
            rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        else:
            rows = _swap(batch)
        inner = self.buffer.extend(self._inner(state), rows)
        return type(state)(inner=inner, buffer=self.buffer)

    def sample(self, state: Any, rng_key: jax.Array, batch_size: int | None = None) -> Any:
        """Returns a batch, without changing the state."""
        if state.buffer == self.buffer:
            return TrajectoryBufferSample(self.buffer.sample(state.inner, rng_key, batch_size).data)
        # A state made from arrays has only a ring: sample windows that start every `period` steps.
        unit, ring, count = self.buffer.unit, state.buffer.ring, state.inner.writer.count
        span = jnp.arange(unit.length) if isinstance(unit, jrb.Sequence) else 0
        starts = jnp.maximum((count - jnp.size(span)) // _period(self.buffer) + 1, 1)
        shape = (batch_size or self.buffer.batch_size or 1,)
        number = jax.random.randint(rng_key, shape, 0, starts * ring.envs)
        start, env = jnp.divmod(number, ring.envs)
        # Count the rows from the oldest one, around the ring.
        first = state.current_index - count + start * _period(self.buffer)
        slots = jax.vmap(lambda row, env: (row + span) % ring.rows * ring.envs + env)(first, env)
        data = state.buffer.take(state.inner, slots)
        return TrajectoryBufferSample(_pair(data) if self.buffer.transforms else data)

    def can_sample(self, state: Any) -> jax.Array:
        """Returns bool, True if enough time steps are stored."""
        enough = state.inner.writer.count >= self.min_rows
        if state.buffer == self.buffer:
            enough &= _map_states(self.buffer, state.inner, function=jrb.ReplayBuffer.can_sample)
        return enough


class PrioritisedTrajectoryBuffer(TrajectoryBuffer[Experience, BufferState, BufferSample]):
    """The functions of a prioritised buffer."""

    state_class = PrioritisedTrajectoryBufferState

    def sample(self, state: Any, rng_key: jax.Array, batch_size: int | None = None) -> Any:
        """Returns a batch, without changing the state."""
        batch = self.buffer.sample(self._inner(state), rng_key, batch_size)
        # Convert slots to flashbax's indices, by the inverse of `_slots`.
        (row, env), period = jnp.divmod(batch.indices, self.buffer.ring.envs), _period(self.buffer)
        indices = env * (self.buffer.ring.rows // period) + row // period
        return PrioritisedTrajectoryBufferSample(batch.data, indices, batch.probabilities)

    def set_priorities(self, state: BufferState, indices: Any, priorities: Any) -> BufferState:
        """Returns the state with new priorities `[B]` at the `indices` of a sample."""
        slots = _slots(self.buffer, indices)
        inner = self.buffer.update_priority(self._inner(state), slots, priorities)
        return type(state)(inner=inner, buffer=self.buffer)


@dataclasses.dataclass(frozen=True)
class TrajectoryQueue(TrajectoryBuffer[Experience, BufferState, BufferSample]):
    """The functions of a queue: each step is sampled once, oldest first; `add` overwrites none."""

    add_rows: int = 1  # the number of free rows that `can_add` requires
    state_class = TrajectoryQueueState

    def sample(self, state: BufferState) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the state without the oldest L steps, and these steps, leaves `[E, L, ...]`."""
        count = self.min_rows * self.buffer.ring.envs
        inner, batch = self.buffer.draw(state.inner, jax.random.key(0), count)
        data = jax.tree.map(lambda x: x.reshape(self.min_rows, -1, *x.shape[1:]), batch.data)
        return type(state)(inner=inner, buffer=self.buffer), TrajectoryQueueSample(_swap(data))

    def can_sample(self, state: Any) -> jax.Array:
        """Returns bool, True if each stream has L steps to be read."""
        return state.num_pending >= self.min_rows

    def can_add(self, state: Any) -> jax.Array:
        """Returns bool, True if `add_sequence_length` rows are free."""
        return state.num_pending + self.add_rows <= self.buffer.ring.rows


def _make_buffer(
    rows: int | None, envs: int | None, batch: int, least: int, unit: jrb.types.Unit, **options: Any
) -> TrajectoryBuffer[Any, Any, Any]:
    """Returns the functions of a buffer of `rows` rows; `can_sample` requires `least` of them."""
    least, missing = max(least, getattr(unit, "length", 1)), options.pop("missing", None)
    if rows is None or least > rows:
        raise ValueError(f"expected windows and a minimum of at most {rows} steps, got {least}.")
    buffer = jrb.ReplayBuffer(rows * (envs or 1), envs, batch, unit=unit, keys=_KEYS, **options)
    if missing is not None and batch > buffer.capacity:
        raise ValueError(f"sample_batch_size: expected at most {buffer.capacity}, got {batch}.")
    return TrajectoryBuffer(buffer, least, missing or ())


def make_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
) -> TrajectoryBuffer[Any, Any, Any]:
    """Makes a buffer of E streams from which windows of L steps are sampled uniformly."""
    rows = max_length_time_axis if max_size is None else max_size // add_batch_size
    windows = jrb.Sequence(sample_sequence_length, stride=period, cross_episodes=True)
    return _make_buffer(rows, add_batch_size, sample_batch_size, min_length_time_axis, windows)


def make_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
) -> TrajectoryBuffer[Any, Any, Any]:
    """Makes a buffer of time steps that samples pairs of consecutive steps."""
    # `min_length` counts steps of all streams; a pair needs one row more.
    envs, pair = add_batch_size or 1, jrb.Sequence(2, cross_episodes=True)
    missing = (0,) * (add_batch_size is None) + (1,) * (not add_sequences)
    rows, least = max_length // envs, min_length // envs + 1
    options: dict[str, Any] = {"missing": missing, "transforms": (_pair,)}
    return _make_buffer(rows, envs, sample_batch_size, least, pair, **options)


def make_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
) -> TrajectoryBuffer[Any, Any, Any]:
    """Makes a buffer that samples single items."""
    missing, unit = (0,) * (not add_batches) + (1,) * (not add_sequences), jrb.Transition()
    return _make_buffer(max_length, None, sample_batch_size, min_length, unit, missing=missing)


def _accept_prioritised_arguments(
    maker: Callable[..., TrajectoryBuffer[Any, Any, Any]],
) -> Callable[..., Any]:
    """Returns a maker with two more arguments, `priority_exponent` and `device` (ignored)."""
    count = len(inspect.signature(maker).parameters)

    def make(*args: Any, priority_exponent: float = 0.6, device: str = "cpu", **kwargs: Any) -> Any:
        # flashbax's makers take the exponent as the argument after those of the uniform ones.
        exponent = args[count] if len(args) > count else priority_exponent
        if not 0 <= exponent <= 1:
            raise ValueError(f"priority_exponent: expected 0 to 1, got {exponent}.")
        one, sampler = maker(*args[:count], **kwargs), jrb.Prioritized(alpha=exponent, eps=0.0)
        buffer, period = dataclasses.replace(one.buffer, sampler=sampler), _period(one.buffer)
        # flashbax keeps complete periods only. Ignore the stride in a ring too short for it.
        rows = buffer.ring.rows // period * period
        if rows < getattr(buffer.unit, "length", 1) + period - 1:
            unit = dataclasses.replace(cast(Any, buffer.unit), stride=1)
            buffer = dataclasses.replace(buffer, unit=unit)
        buffer = dataclasses.replace(buffer, capacity=rows * buffer.ring.envs)
        return PrioritisedTrajectoryBuffer(buffer, one.min_rows, one.missing)

    make.__doc__ = f"Makes a buffer like that of `{maker.__name__}` which samples by priority."
    return make


make_prioritised_trajectory_buffer: Callable[..., Any] = _accept_prioritised_arguments(
    make_trajectory_buffer
)
make_prioritised_flat_buffer: Callable[..., Any] = _accept_prioritised_arguments(make_flat_buffer)
make_prioritised_item_buffer: Callable[..., Any] = _accept_prioritised_arguments(make_item_buffer)


def make_trajectory_queue(
    max_length_time_axis: int,
    add_batch_size: int,
    add_sequence_length: int,
    sample_sequence_length: int,
    max_size: int | None = None,
) -> TrajectoryQueue[Any, Any, Any]:
    """Makes a queue of E streams, from which each step is sampled once."""
    rows = max_length_time_axis if max_size is None else max_size // add_batch_size
    if sample_sequence_length > rows:
        raise ValueError(f"sample_sequence_length: expected at most {rows}.")
    parts: dict[str, Any] = {"sampler": jrb.Queue(), "writer": jrb.BlockWhenFull(), "keys": _KEYS}
    queue = jrb.ReplayBuffer(rows * add_batch_size, add_batch_size, **parts)
    return TrajectoryQueue(queue, sample_sequence_length, add_rows=add_sequence_length)


@dataclasses.dataclass(frozen=True)
class Mixer:
    """The functions of a mixture of buffers."""

    buffers: Sequence[TrajectoryBuffer[Any, Any, Any]]
    sizes: Sequence[int]  # the number of items of a batch from each buffer

    def sample(self, states: Sequence[Any], key: jax.Array) -> Any:
        """Returns a batch with the items of one buffer after the other."""
        keys = jax.random.split(key, len(states))
        parts = zip(self.buffers, states, keys, self.sizes, strict=True)
        batches = [buffer.sample(state, one, size) for buffer, state, one, size in parts if size]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)

    def can_sample(self, states: Sequence[Any]) -> jax.Array:
        """Returns bool, True if all buffers can be sampled."""
        return jnp.array([b.can_sample(s) for b, s in zip(self.buffers, states, strict=True)]).all()


def make_mixer(buffers: Any, sample_batch_size: int, proportions: Sequence[float]) -> Mixer:
    """Makes a mixture of buffers of one kind; each gives a fixed share of every batch."""
    kinds = {(type(each), each.buffer.transforms) for each in buffers}
    if len(buffers) != len(proportions) or len(kinds) != 1:
        raise ValueError("expected buffers of one kind, and a proportion for each.")
    sizes = [int(share / sum(proportions) * sample_batch_size) for share in proportions]
    return Mixer(buffers, [sizes[0] + sample_batch_size - sum(sizes), *sizes[1:]])


def install() -> None:
    """Makes `import flashbax`, and imports of its modules, give this module, in this process.

    Call it before anything imports flashbax. If flashbax is installed, `flashbax.vault` and
    `flashbax.utils` stay its own, and work with the states of this module.
    """
    # Make a module for each of flashbax's, inner ones first, so that outer ones have them as names.
    folders = getattr(find_spec("flashbax"), "submodule_search_locations", None) or []
    kinds = ["flat_buffer", "item_buffer", "trajectory_buffer", "trajectory_queue", "mixer"]
    kinds += [f"prioritised_{kind}" for kind in kinds[:3]]
    public = {name: globals()[name] for name in __all__}
    for name in (*(f"buffers.{kind}" for kind in kinds), "buffers", ""):
        spec = ModuleSpec(f"flashbax.{name}".rstrip("."), None)
        # The other modules of a package are those of flashbax.
        if "." not in name:
            spec.submodule_search_locations = [f"{folder}/{name}" for folder in folders]
        module = sys.modules[spec.name] = module_from_spec(spec)
        vars(module).update(public)
        public |= {name.rpartition(".")[2]: module}
