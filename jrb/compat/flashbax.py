"""flashbax's buffers, made of jrb's: change one import, and a program runs on jrb.

    import jrb.compat.flashbax as fbx          # in place of: import flashbax as fbx

Makers, samples and the fields of states are those of flashbax 0.1.3, which need not be installed.
`install()` makes `import flashbax` mean this module, for a trial without any change. The guide
"From flashbax" has a table of what differs. E `add_batch_size`, B batch, L window.
"""

import dataclasses
import functools
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

import jrb
from jrb._util.public import PublicNames

__all__ = [
    "ExperiencePair",
    "Mixer",
    "PrioritisedTrajectoryBuffer",
    "PrioritisedTrajectoryBufferSample",
    "PrioritisedTrajectoryBufferState",
    "PrioritisedTransitionSample",
    "SumTreeState",
    "TrajectoryBuffer",
    "TrajectoryBufferSample",
    "TrajectoryBufferState",
    "TrajectoryQueue",
    "TrajectoryQueueState",
    "TransitionSample",
    "install",
    "make_flat_buffer",
    "make_item_buffer",
    "make_mixer",
    "make_prioritised_flat_buffer",
    "make_prioritised_item_buffer",
    "make_prioritised_trajectory_buffer",
    "make_trajectory_buffer",
    "make_trajectory_queue",
]
__dir__: PublicNames = lambda: __all__

State = TypeVar("State", bound="TrajectoryBufferState")
Experience = TypeVar("Experience")
Maker = Callable[..., "PrioritisedTrajectoryBuffer"]

# Items are whatever clients store. Windows cross the ends of episodes, so no leaf is a flag.
_KEYS = jrb.Keys(next_observation=None, done=None, terminated=None, truncated=None)


def _ring(rows: int, envs: int | None, **parts: Any) -> jrb.ReplayBuffer:
    return jrb.ReplayBuffer(rows * (envs or 1), num_envs=envs, keys=_KEYS, **parts)


def _time_first(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), batch)


class TrajectoryBufferState:
    """A state of jrb with the fields of flashbax's states.

    Made from arrays, as flashbax's Vault makes it, it holds them in the same rows.
    """

    buffer: jrb.ReplayBuffer
    inner: jrb.BufferState

    def __init__(self, experience: Any, current_index: Any, is_full: Any) -> None:
        rows = _time_first(jax.tree.map(jnp.asarray, experience))
        length, envs = jax.tree.leaves(rows)[0].shape[:2]
        cursor, is_full = (jnp.ravel(jnp.asarray(x))[0].item() for x in (current_index, is_full))
        self.buffer = _ring(length, envs)
        self.inner = self.buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], rows))
        newest = slice(0, int(cursor))
        for piece in (newest, slice(newest.stop, None), newest) if is_full else (newest,):
            part = jax.tree.map(lambda leaf: leaf[piece], rows)  # noqa: B023
            if len(jax.tree.leaves(part)[0]):
                self.inner = self.buffer.extend(self.inner, part)

    @classmethod
    def of(cls: type[State], buffer: jrb.ReplayBuffer, inner: jrb.BufferState) -> State:
        """Returns a state of jrb as one of flashbax."""
        state = object.__new__(cls)
        state.buffer, state.inner = buffer, inner
        return state

    def _each(self, function: Callable[..., Any]) -> Any:
        """Calls a function for each state, of those that `pmap` or `vmap` have stacked too."""
        function = functools.partial(function, self.buffer)
        for _ in range(self.inner.writer.count.ndim):
            function = jax.vmap(function)
        return function(self.inner)

    @property
    def _rows(self) -> int:
        return self.buffer.capacity // (self.buffer.num_envs or 1)

    @property
    def experience(self) -> Any:
        """Returns the stored steps, leaves `[E, T, ...]`, as a copy."""
        return self._each(_experience)

    @property
    def current_index(self) -> jax.Array:
        """Returns the row that is written next, int32."""
        return self.inner.writer.cursor

    write_index = current_index

    @property
    def is_full(self) -> jax.Array:
        """Returns whether all rows are written, bool."""
        return self.inner.writer.count == self._rows

    @property
    def running_index(self) -> jax.Array:
        """Returns how many rows were ever written, int32."""
        return self.inner.writer.lap.astype(jnp.int32) * self._rows + self.inner.writer.cursor


class SumTreeState(NamedTuple):
    """The masses, priority to the power of the exponent, as flashbax keeps them.

    Attributes:
        nodes: float32 `[2 * C - 1]`, a binary tree of C leaves, the root first.
        max_recorded_priority: float32 `[]`, the largest mass so far.
    """

    nodes: jax.Array
    max_recorded_priority: jax.Array


class PrioritisedTrajectoryBufferState(TrajectoryBufferState):
    """The state of a prioritised buffer."""

    @property
    def sum_tree_state(self) -> SumTreeState:
        """Returns the masses in flashbax's order."""
        return self._each(_sum_tree)


class TrajectoryQueueState(TrajectoryBufferState):
    """The state of a queue."""

    @property
    def _pending(self) -> jax.Array:
        return self.inner.sampler.count // (self.buffer.num_envs or 1)

    @property
    def read_index(self) -> jax.Array:
        """Returns the row that is read next, int32."""
        return (self.write_index - self._pending) % self._rows

    @property
    def is_full(self) -> jax.Array:
        """Returns whether no row can be added before one is read, bool."""
        return self._pending == self._rows


for _class in (TrajectoryBufferState, PrioritisedTrajectoryBufferState, TrajectoryQueueState):
    jax.tree_util.register_pytree_node(
        _class,
        lambda state: ((state.inner,), state.buffer),
        lambda buffer, children, of=_class.of: of(buffer, *children),
    )


@functools.partial(jax.jit, static_argnums=0)
def _experience(buffer: jrb.ReplayBuffer, inner: jrb.BufferState) -> Any:
    rows = buffer.take(inner, jnp.arange(buffer.capacity))
    cut = lambda leaf: leaf.reshape(-1, buffer.num_envs or 1, *leaf.shape[1:])
    return _time_first(jax.tree.map(cut, rows))


@functools.partial(jax.jit, static_argnums=0)
def _sum_tree(buffer: jrb.ReplayBuffer, inner: jrb.BufferState) -> SumTreeState:
    count, alpha = buffer.capacity // _layout(buffer)[1], cast(Any, buffer.sampler).alpha
    priorities = jnp.maximum(buffer.priorities(inner, _slots(buffer, jnp.arange(count))), 0.0)
    masses = jnp.where(priorities > 0, priorities**alpha, 0.0)
    levels = [jnp.pad(masses, (0, (1 << (count - 1).bit_length()) - count))]
    while len(levels[0]) > 1:
        levels.insert(0, levels[0][::2] + levels[0][1::2])
    return SumTreeState(jnp.concatenate(levels), inner.sampler.highest**alpha)


def _layout(buffer: jrb.ReplayBuffer) -> tuple[int, int]:
    """Returns E, and the period: flashbax numbers every `period`-th step of each environment."""
    return buffer.num_envs or 1, getattr(buffer.unit, "stride", 1)


def _slots(buffer: jrb.ReplayBuffer, items: jax.Array) -> jax.Array:
    envs, stride = _layout(buffer)
    per_env = buffer.capacity // envs // stride
    return items % per_env * stride * envs + items // per_env


def _items(buffer: jrb.ReplayBuffer, slots: jax.Array) -> jax.Array:
    envs, stride = _layout(buffer)
    return slots % envs * (buffer.capacity // envs // stride) + slots // envs // stride


class ExperiencePair(NamedTuple):
    """Two consecutive time steps, leaves `[B, ...]`."""

    first: Any
    second: Any


class TrajectoryBufferSample(NamedTuple):
    """A batch: leaves `[B, L, ...]`, or `[B, ...]` of an item buffer."""

    experience: Any


class TransitionSample(NamedTuple):
    """A batch of pairs of consecutive steps."""

    experience: ExperiencePair


class PrioritisedTrajectoryBufferSample(NamedTuple):
    """A batch, the indices of its items for `set_priorities`, and their probabilities, `[B]`."""

    experience: Any
    indices: jax.Array
    probabilities: jax.Array


class PrioritisedTransitionSample(NamedTuple):
    """A batch of pairs, with indices and probabilities, `[B]`."""

    experience: ExperiencePair
    indices: jax.Array
    probabilities: jax.Array


@dataclasses.dataclass(frozen=True)
class TrajectoryBuffer:
    """The functions of a buffer, for `jit`, `vmap`, `pmap` and `shard_map`.

    Attributes:
        buffer: the buffer of jrb that does the work.
        min_rows: the number of time steps that `can_sample` waits for.
        pairs: whether a sample holds pairs of consecutive steps.
        missing: the axes that batches lack when they are added: 0 for E, 1 for time.
    """

    buffer: jrb.ReplayBuffer
    min_rows: int
    pairs: bool = False
    missing: tuple[int, ...] = ()

    def init(self, experience: Any) -> Any:
        """Returns an empty state for time steps like this one, without leading axes."""
        prioritised = isinstance(self.buffer.sampler, jrb.Prioritized)
        state = PrioritisedTrajectoryBufferState if prioritised else TrajectoryBufferState
        return state.of(self.buffer, self.buffer.init(jax.tree.map(jnp.asarray, experience)))

    def _state(self, state: TrajectoryBufferState) -> jrb.BufferState:
        if state.buffer == self.buffer:
            return state.inner
        return jrb.rebuild(state.buffer, state.inner, self.buffer)  # outside `jit`: of arrays

    def add(self, state: State, batch: Any) -> State:
        """Returns the state with time steps `[E, T, ...]` added."""
        batch = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, self.missing), batch)
        if self.buffer.num_envs is None:  # one stream, into which all steps go one after the other
            rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        else:
            rows = _time_first(batch)
        return type(state).of(self.buffer, self.buffer.extend(self._state(state), rows))

    def sample(self, state: Any, rng_key: jax.Array, batch_size: int | None = None) -> Any:
        """Returns a batch; the state is only read."""
        batch = self.buffer.sample(self._state(state), rng_key, batch_size)
        indices = _items(self.buffer, batch.indices)
        prioritised = isinstance(self.buffer.sampler, jrb.Prioritized)
        if self.pairs:
            first, second = (jax.tree.map(lambda x: x[:, i], batch.data) for i in (0, 1))  # noqa: B023
            pair = ExperiencePair(first, second)
            if prioritised:
                return PrioritisedTransitionSample(pair, indices, batch.probabilities)
            return TransitionSample(pair)
        if prioritised:
            return PrioritisedTrajectoryBufferSample(batch.data, indices, batch.probabilities)
        return TrajectoryBufferSample(batch.data)

    def can_sample(self, state: TrajectoryBufferState) -> jax.Array:
        """Returns whether enough time steps are stored, bool."""
        enough = state.inner.writer.count >= self.min_rows
        if state.buffer != self.buffer:
            return enough  # a state that was made from arrays
        return enough & state._each(jrb.ReplayBuffer.can_sample)


class PrioritisedTrajectoryBuffer(TrajectoryBuffer):
    """The functions of a prioritised buffer."""

    def set_priorities(self, state: State, indices: jax.Array, priorities: jax.Array) -> State:
        """Returns the state with new priorities `[B]` at the `indices` of a sample."""
        slots = _slots(self.buffer, indices)
        inner = self.buffer.update_priority(self._state(state), slots, priorities)
        return type(state).of(self.buffer, inner)


def _make(
    rows: int | None, envs: int | None, batch: int, least: int, unit: jrb.types.Unit, **options: Any
) -> TrajectoryBuffer:
    """Returns the functions of a buffer of `rows` steps; `can_sample` waits for `least`."""
    least = max(least, getattr(unit, "length", 1))
    if rows is None or least > rows:
        raise ValueError(f"expected windows and a minimum of at most {rows} steps, got {least}.")
    return TrajectoryBuffer(_ring(rows, envs, batch_size=batch, unit=unit), least, **options)


def make_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
) -> TrajectoryBuffer:
    """Makes a buffer of E streams from which windows of L steps are sampled uniformly."""
    rows = max_length_time_axis if max_size is None else max_size // add_batch_size
    windows = jrb.Sequence(sample_sequence_length, stride=period, cross_episodes=True)
    return _make(rows, add_batch_size, sample_batch_size, min_length_time_axis, windows)


def make_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
) -> TrajectoryBuffer:
    """Makes a buffer of time steps from which pairs of consecutive ones are sampled."""
    envs = add_batch_size or 1
    if max_length < max(2 * envs, sample_batch_size):
        raise ValueError(f"max_length: expected 2 steps of each stream, a batch; got {max_length}.")
    missing = _missing(add_batch_size is not None, add_sequences)
    rows, least, pair = (
        max_length // envs,
        min_length // envs + 1,
        jrb.Sequence(2, cross_episodes=True),
    )
    return _make(rows, envs, sample_batch_size, least, pair, pairs=True, missing=missing)


def make_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
) -> TrajectoryBuffer:
    """Makes a buffer of single items."""
    if sample_batch_size > max_length:
        raise ValueError(f"sample_batch_size: expected at most {max_length}.")
    missing = _missing(add_batches, add_sequences)
    return _make(max_length, None, sample_batch_size, min_length, jrb.Transition(), missing=missing)


def _missing(*present: bool) -> tuple[int, ...]:
    return tuple(axis for axis, is_present in enumerate(present) if not is_present)


def _prioritised(maker: Callable[..., TrajectoryBuffer]) -> Maker:
    """Returns a maker with two more arguments, `priority_exponent` and `device`, at the end."""
    count = len(inspect.signature(maker).parameters)

    def make(*args: Any, priority_exponent: float = 0.6, device: str = "cpu", **kwargs: Any) -> Any:
        exponent = args[count] if len(args) > count else priority_exponent
        if not 0 <= exponent <= 1:
            raise ValueError(f"priority_exponent: expected 0 to 1, got {exponent}.")
        uniform = maker(*args[:count], **kwargs)
        envs, period = _layout(uniform.buffer)
        capacity = uniform.buffer.capacity // (envs * period) * envs * period
        sampler = jrb.Prioritized(alpha=exponent, eps=0.0)
        buffer = dataclasses.replace(uniform.buffer, capacity=capacity, sampler=sampler)
        return PrioritisedTrajectoryBuffer(buffer, uniform.min_rows, uniform.pairs, uniform.missing)

    make.__doc__ = f"Makes a buffer as `{maker.__name__}`, from which is sampled by priority."
    return make


make_prioritised_trajectory_buffer: Maker = _prioritised(make_trajectory_buffer)
make_prioritised_flat_buffer: Maker = _prioritised(make_flat_buffer)
make_prioritised_item_buffer: Maker = _prioritised(make_item_buffer)


@dataclasses.dataclass(frozen=True)
class TrajectoryQueue:
    """The functions of a queue: each step of E streams is sampled once, oldest first."""

    buffer: jrb.ReplayBuffer
    add_sequence_length: int
    sample_sequence_length: int

    def init(self, experience: Any) -> TrajectoryQueueState:
        """Returns an empty queue."""
        inner = self.buffer.init(jax.tree.map(jnp.asarray, experience))
        return TrajectoryQueueState.of(self.buffer, inner)

    def add(self, state: TrajectoryQueueState, batch: Any) -> TrajectoryQueueState:
        """Returns the state with steps `[E, T, ...]`; rows that were not read yet stay."""
        return state.of(self.buffer, self.buffer.extend(state.inner, _time_first(batch)))

    def sample(self, state: Any) -> tuple[TrajectoryQueueState, TrajectoryBufferSample]:
        """Returns the state without the oldest L steps, and these, `[E, L, ...]`."""
        shape = self.sample_sequence_length, self.buffer.num_envs or 1
        inner, batch = self.buffer.draw(state.inner, jax.random.key(0), shape[0] * shape[1])
        data = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), batch.data)
        return state.of(self.buffer, inner), TrajectoryBufferSample(_time_first(data))

    def can_sample(self, state: TrajectoryQueueState) -> jax.Array:
        """Returns whether L steps wait to be read, bool."""
        return state._pending >= self.sample_sequence_length

    def can_add(self, state: TrajectoryQueueState) -> jax.Array:
        """Returns whether `add_sequence_length` rows are free, bool."""
        return state._pending + self.add_sequence_length <= state._rows


def make_trajectory_queue(
    max_length_time_axis: int,
    add_batch_size: int,
    add_sequence_length: int,
    sample_sequence_length: int,
    max_size: int | None = None,
) -> TrajectoryQueue:
    """Makes a queue of E streams."""
    rows = max_length_time_axis if max_size is None else max_size // add_batch_size
    if sample_sequence_length > rows:
        raise ValueError(f"sample_sequence_length: expected at most {rows}.")
    queue = _ring(rows, add_batch_size, sampler=jrb.Queue(), writer=jrb.BlockWhenFull())
    return TrajectoryQueue(queue, add_sequence_length, sample_sequence_length)


class Mixer(NamedTuple):
    """The functions of a mixture: `sample(states, key)` and `can_sample(states)`."""

    sample: Callable[..., Any]
    can_sample: Callable[..., jax.Array]


def make_mixer(
    buffers: Sequence[TrajectoryBuffer], sample_batch_size: int, proportions: Sequence[float]
) -> Mixer:
    """Makes a mixture of buffers of one kind, with fixed shares of each batch."""
    if len(buffers) != len(proportions) or len({(type(b), b.pairs) for b in buffers}) != 1:
        raise ValueError("expected buffers of one kind, and a proportion for each.")
    sizes = [int(share / sum(proportions) * sample_batch_size) for share in proportions]
    sizes[0] += sample_batch_size - sum(sizes)

    def sample(states: Sequence[Any], key: jax.Array) -> Any:
        parts = zip(buffers, states, jax.random.split(key, len(states)), sizes, strict=True)
        batches = [buffer.sample(state, one, size) for buffer, state, one, size in parts if size]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)

    def can_sample(states: Sequence[Any]) -> jax.Array:
        ready = [buffer.can_sample(state) for buffer, state in zip(buffers, states, strict=True)]
        return jnp.all(jnp.stack(ready))

    return Mixer(sample, can_sample)


def install() -> None:
    """Makes `import flashbax`, and its modules, mean this one, in this process.

    Call it before anything imports flashbax. `flashbax.vault` and `flashbax.utils` stay flashbax's
    own if it is installed: they read and write the states of this module.
    """
    spec = importlib.util.find_spec("flashbax")
    folders = list(spec.submodule_search_locations or []) if spec else []
    public = {name: value for name, value in globals().items() if not name.startswith("_")}
    kinds = ["flat_buffer", "item_buffer", "trajectory_buffer", "trajectory_queue", "mixer"]
    kinds += [f"prioritised_{kind}" for kind in kinds[:3]]
    for name in ("flashbax", "flashbax.buffers", *(f"flashbax.buffers.{kind}" for kind in kinds)):
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(public)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        if name.count(".") < 2:
            below = name.removeprefix("flashbax").replace(".", "/")
            module.__path__ = [folder + below for folder in folders]
