"""The verbs of a buffer, compiled, for loops in Python."""

import dataclasses
import functools
from collections.abc import Callable
from types import EllipsisType
from typing import Any, ClassVar, overload

import jax
import jax.core
import numpy as np

from jrb._core import eager
from jrb._util import casting, checks, pytree
from jrb._util.owned import copied, copy
from jrb._util.pytree import ArrayLike
from jrb._xla import gather
from jrb.buffer import ReplayBuffer
from jrb.mix import Description, Mix
from jrb.sharded import Sharded
from jrb.state import BufferState, Sample
from jrb.types import Item


@overload
def jitted(buffer: Mix) -> "JittedMix": ...
@overload
def jitted(buffer: ReplayBuffer | Sharded) -> "Jitted": ...
@functools.lru_cache(maxsize=64)
def jitted(buffer: Description) -> "Jitted | JittedMix":
    """The same verbs, each compiled, in place: for loops in Python.

    Outside `jit`, a verb that changes a state copies it. These donate the state that they are
    given: it is written in place, and the object that was passed may not be used again. **Go on
    with the state that comes back.** What was drawn stays valid.

    As inside `jit`, a draw from an empty buffer does not raise: `mask` is False and `weights` 0.
    Items with dtypes that JAX would change are handled as everywhere else: an error, or converted
    where the buffer has `cast=True`. Storages on the host work between jitted parts in any case,
    and their draws raise as outside `jit`; what of a state is on the device is donated there too.

    Args:
        buffer: a `ReplayBuffer`, a `Mix` or a `Sharded`.

    Returns:
        An object with the verbs of the buffer.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(capacity=1000, batch_size=32)
        >>> verbs = jrb.jitted(buffer)
        >>> state = verbs.init({"x": jnp.zeros(3)})
        >>> for number in range(5):
        ...     state = verbs.add(state, {"x": jnp.full(3, float(number))})
        >>> verbs.sample(state, jax.random.key(0)).data["x"].shape
        (32, 3)
    """
    if isinstance(buffer, Mix):
        return JittedMix(buffer)
    if not isinstance(buffer, ReplayBuffer | Sharded):
        raise TypeError(
            f"jitted: expected a ReplayBuffer or a Mix, or a Sharded, got {type(buffer).__name__}."
        )
    return Jitted(buffer)


class Jitted:
    """Compiled verbs of a buffer; made by `jitted`. They take and return what its own do.

    Attributes:
        buffer: whose verbs they are.
    """

    init: Callable[..., BufferState]
    nbytes: Callable[..., int]
    take: Callable[..., Item]

    def __init__(self, buffer: ReplayBuffer | Sharded) -> None:
        self.buffer = buffer
        one = buffer.buffer if isinstance(buffer, Sharded) else buffer
        self._cast, self._of_objects = one.cast, one.storage.of_objects
        on_host = eager.on_host(one)
        if on_host and isinstance(buffer, ReplayBuffer):
            buffer = _in_place(buffer)
        writes, reads, moves, draws = _compilers(on_host)
        self._add, self._extend = writes(buffer.add), writes(buffer.extend)
        # Arguments are passed by position: names take a microsecond more at every call.
        self._draw = moves(buffer.draw, static_argnums=3, reads_items=True)  # sampler, rest, key, B
        self._update = moves(buffer.update_priority)
        self._truncate, self._empty = writes(buffer.truncate), writes(buffer.empty)
        self._set_alpha, self._drop = moves(buffer.set_alpha), moves(buffer.drop)
        self._set = writes(buffer.set)
        self._set_all = writes(lambda state, values: buffer.set(state, ..., values))
        self._map = writes(buffer.map, static_argnames=("function", "batch_size"))
        self._sample = draws(buffer.sample, static_argnums=2)
        self._can_sample = reads(buffer.can_sample, static_argnames="batch_size")
        self._size, self._in_order = reads(buffer.size), reads(buffer.in_order)
        self._newest = reads(buffer.newest, static_argnames="n")
        self._priorities, self._can_add = reads(buffer.priorities), reads(buffer.can_add)
        self.init, self.nbytes, self.take = buffer.init, buffer.nbytes, buffer.take

    def add(
        self,
        state: BufferState,
        item: Item,
        mask: ArrayLike | None = None,
        priorities: ArrayLike | None = None,
    ) -> BufferState:
        """As `ReplayBuffer.add`; the state is donated."""
        item, priorities = self._accepted(item, "add"), _numbers(self.buffer, "add", priorities)
        return self._add(state, item, copy(mask), priorities)

    def extend(
        self,
        state: BufferState,
        items: Item,
        mask: ArrayLike | None = None,
        priorities: ArrayLike | None = None,
    ) -> BufferState:
        """As `ReplayBuffer.extend`; the state is donated."""
        items = self._accepted(items, "extend")
        priorities = _numbers(self.buffer, "extend", priorities)
        return self._extend(state, items, copy(mask), priorities)

    def sample(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
    ) -> Sample:
        """As `ReplayBuffer.sample`; the state is only read."""
        return self._sample(state, copy(key), _count(batch_size), copy(beta))

    def draw(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
    ) -> tuple[BufferState, Sample]:
        """As `ReplayBuffer.draw`; the state is donated."""
        return self._draw(state, copy(key), _count(batch_size), copy(beta))

    def update_priority(
        self, state: BufferState, sample_or_indices: Sample | jax.Array, priorities: ArrayLike
    ) -> BufferState:
        """As `ReplayBuffer.update_priority`; the state is donated."""
        which = _light("update_priority", sample_or_indices)
        return self._update(state, which, _numbers(self.buffer, "update_priority", priorities))

    def set_alpha(self, state: BufferState, alpha: jax.Array | float) -> BufferState:
        """As `ReplayBuffer.set_alpha`; the state is donated."""
        return self._set_alpha(state, copy(alpha))

    def set(
        self, state: BufferState, where: Sample | jax.Array | EllipsisType, values: Item
    ) -> BufferState:
        """As `ReplayBuffer.set`; the state is donated."""
        values = self._accepted(values, "set")
        if where is ...:
            return self._set_all(state, values)
        return self._set(state, _light("set", where), values)

    def map(
        self, state: BufferState, function: Callable[[Item], Item], batch_size: int = 1024
    ) -> BufferState:
        """As `ReplayBuffer.map`; the state is donated. Each function is compiled once."""
        return self._map(state, function=function, batch_size=batch_size)

    def drop(self, state: BufferState, where: Sample | jax.Array) -> BufferState:
        """As `ReplayBuffer.drop`; the state is donated."""
        return self._drop(state, _light("drop", where))

    def truncate(self, state: BufferState, mask: ArrayLike | None = None) -> BufferState:
        """As `ReplayBuffer.truncate`; the state is donated."""
        return self._truncate(state, copy(mask))

    def empty(self, state: BufferState) -> BufferState:
        """As `ReplayBuffer.empty`; the state is donated."""
        return self._empty(state)

    def size(self, state: BufferState) -> jax.Array:
        """As `ReplayBuffer.size`."""
        return self._size(state)

    def in_order(self, state: BufferState) -> tuple[jax.Array, jax.Array]:
        """As `ReplayBuffer.in_order`."""
        return self._in_order(state)

    def newest(self, state: BufferState, n: int) -> tuple[jax.Array, jax.Array]:
        """As `ReplayBuffer.newest`."""
        return self._newest(state, n=n)

    def priorities(self, state: BufferState, slots: ArrayLike | None = None) -> jax.Array:
        """As `ReplayBuffer.priorities`."""
        return self._priorities(state, copy(slots))

    def can_add(self, state: BufferState) -> jax.Array:
        """As `ReplayBuffer.can_add`."""
        return self._can_add(state)

    def can_sample(self, state: BufferState, batch_size: int | None = None) -> jax.Array:
        """As `ReplayBuffer.can_sample`."""
        return self._can_sample(state, batch_size=batch_size)

    def _accepted(self, items: Item, verb: str) -> Item:
        """Objects as they are; else items that neither `jit` nor anybody else will change."""
        return items if self._of_objects else casting.accepted(items, verb, self._cast)


class JittedMix:
    """Compiled verbs of a mix; made by `jitted`. They take and return what its own do.

    Attributes:
        mix: whose verbs they are.
    """

    init: Callable[..., tuple[BufferState, ...]]
    nbytes: Callable[..., int]
    size: Callable[..., jax.Array]
    can_sample: Callable[..., jax.Array]

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        parts = [part.buffer if isinstance(part, Sharded) else part for part in mix.buffers]
        writes, reads, _, draws = _compilers(any(map(eager.on_host, parts)))
        self._draw = writes(mix.draw, static_argnums=2)
        self._sample = draws(mix.sample, static_argnums=2)
        self._update = writes(mix.update_priority)
        self.size, self.can_sample = reads(mix.size), reads(mix.can_sample)
        self.init, self.nbytes = mix.init, mix.nbytes

    def sample(
        self,
        states: tuple[BufferState, ...],
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        proportions: ArrayLike | None = None,
    ) -> Sample:
        """As `Mix.sample`; the states are only read."""
        given = _count(batch_size), copy(beta), copy(proportions)
        return self._sample(states, copy(key), *given)

    def draw(
        self,
        states: tuple[BufferState, ...],
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        proportions: ArrayLike | None = None,
    ) -> tuple[Any, Sample]:
        """As `Mix.draw`; the states are donated."""
        given = _count(batch_size), copy(beta), copy(proportions)
        return self._draw(states, copy(key), *given)

    def update_priority(
        self, states: tuple[BufferState, ...], sample: Sample, priorities: ArrayLike
    ) -> Any:
        """As `Mix.update_priority`; the states are donated."""
        which = _light("update_priority", sample)
        return self._update(states, which, _numbers(self.mix, "update_priority", priorities))


def _compilers(on_host: bool) -> tuple[Any, ...]:
    """What compiles verbs that write, that read numbers, that move the sampler, and that draw."""
    if on_host:
        return (_as_it_is,) * 4
    return _writing, _reading, _moving, _drawing


def _writing(verb: Callable[..., Any], **options: Any) -> Any:
    """A verb that writes items; inside another compiled function it may be part of a loop."""
    within = jax.jit(verb, donate_argnums=0, **options)
    alone = jax.jit(gather.by_itself(verb), donate_argnums=0, **options)

    @eager.explained
    def called(state: Any, *args: Any, **kwargs: Any) -> Any:
        return (within if _is_traced(state) else alone)(state, *args, **kwargs)

    return called


def _reading(verb: Callable[..., Any], **options: Any) -> Any:
    return eager.explained(jax.jit(verb, **options))


def _drawing(verb: Callable[..., Any], **options: Any) -> Any:
    """A verb that reads items; inside another compiled function it may be part of a loop."""
    within, alone = jax.jit(verb, **options), jax.jit(gather.by_itself(verb), **options)

    @eager.explained
    def called(states: Any, key: jax.Array, *args: Any) -> Any:
        first = states[0] if isinstance(states, (tuple, list)) and states else states
        inside = _is_traced(first) or isinstance(key, jax.core.Tracer)
        return (within if inside else alone)(states, key, *args)

    return called


def _is_traced(state: Any) -> bool:
    """Whether a state is one of another compiled function; False for what is no state."""
    return isinstance(getattr(state, "edits", None), jax.core.Tracer)


def _moving(verb: Callable[..., Any], reads_items: bool = False, **options: Any) -> Any:
    """A verb that changes nothing in a state but what its sampler remembers.

    All else is neither donated nor returned, as each array that comes back makes a call a
    microsecond longer. Inside another compiled function, where writes have to wait for what was
    read, the verb is called as it is. One that `reads_items` is compiled as one that Python calls.
    """

    def moved(sampler: Any, rest: BufferState, *args: Any, **kwargs: Any) -> Any:
        after = verb(rest.replace(sampler=sampler), *args, **kwargs)
        state, *sample = after if isinstance(after, tuple) else (after,)
        return state.sampler, *sample

    if reads_items:
        moved = gather.by_itself(moved)
    compiled = jax.jit(moved, donate_argnums=0, **options)

    @eager.explained
    def called(state: BufferState, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, BufferState) or _is_traced(state):
            return verb(state, *args, **kwargs)
        rest = state.replace(sampler=None)
        sampler, *sample = compiled(state.sampler, rest, *args, **kwargs)
        after = state.replace(sampler=sampler)
        return (after, *sample) if sample else after

    return called


@pytree.component
class _InPlace(ReplayBuffer):
    """A buffer whose items lie on the host, and whose verbs donate what else is in a state."""

    _donates: ClassVar[bool] = True


def _in_place(buffer: ReplayBuffer) -> _InPlace:
    fields = {field.name: getattr(buffer, field.name) for field in dataclasses.fields(buffer)}
    return _InPlace(**fields)


def _as_it_is(verb: Callable[..., Any], **options: Any) -> Any:
    del options
    return eager.explained(verb)


def _light(verb: str, where: Sample | jax.Array) -> Any:
    """A sample without its items: fewer arrays to hand over. Or slots, as int32.

    Inside another compiled function it has them: a write that follows has to wait for their reads.
    """
    if isinstance(where, jax.core.Tracer):
        return where
    if not isinstance(where, Sample):
        return checks.indices(verb, where)
    if isinstance(where.stamp, jax.core.Tracer):
        return where
    where = where.replace(data=None)
    return copied(where) if isinstance(where.stamp, np.ndarray) else where


def _numbers(buffer: Any, verb: str, priorities: ArrayLike | None) -> Any:
    """Priorities as `jit` takes them, which makes other numbers of some that NumPy has."""
    if priorities is not None and not isinstance(priorities, jax.Array):
        eager.warn_of_refused(buffer, verb, priorities)
    return checks.given_numbers(f"{verb}: priorities", priorities)


def _count(batch_size: Any) -> int | None:
    """B as `jit` takes it."""
    if batch_size is None:
        return None
    checks.count("batch_size", batch_size)
    return int(batch_size)
