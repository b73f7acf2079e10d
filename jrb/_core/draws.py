"""Draws, wherever the items lie: one compiled call, or items fetched from the host after one."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jrb._core import eager, steps, transforming, validate
from jrb._core.compiling import per_description
from jrb._core.deferred import HostStorageProxy
from jrb._store import extremes
from jrb._util.pytree import SpecKey
from jrb._xla import gather
from jrb.state import Buffer, BufferState, Sample, origin_of
from jrb.types import TransformContext
from jrb.types.messages import PartState


@eager.explained
def draw(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
    quiet: bool = False,
    moves: bool = True,
) -> tuple[Any, Any]:
    """The sampler's state, or that of the whole buffer inside `jit`, and a sample.

    Where nothing `moves`, nobody wants the state, and outside `jit` it may be None.

    Raises:
        ValueError: outside `jit`, there is nothing to draw, unless `quiet`.
    """
    how = _draws_of(buffer)
    found = how(_Asked(buffer, state, key, batch_size, beta, quiet, moves))
    if found is None:
        eager.check_state(buffer, state)
        return steps.draw(buffer, state, key, batch_size, beta)
    if how.inside == len(buffer.transforms):
        return found
    after, sample = found
    batch = TransformContext(key, sample.mask, buffer.keys, ends=sample.info.get("is_last"))
    rest = buffer.transforms[how.inside :]
    data = transforming.outward(rest, sample.data, batch, how.inside)
    return after, sample.replace(data=data)


def after_draw(state: BufferState, drawn: BufferState | PartState) -> Any:
    """The state after a draw."""
    return drawn if isinstance(drawn, BufferState) else state.replace(sampler=drawn)


class _Asked(NamedTuple):
    """What a draw is asked for (see `draw`)."""

    buffer: Buffer
    state: BufferState
    key: jax.Array
    batch_size: int
    beta: jax.Array | float | None
    quiet: bool
    moves: bool


class _OnDevice:
    """Draws outside `jit`, of which all is looked up once that equal descriptions share.

    Between two compiled calls of a Python loop each call of a function costs a microsecond. A plain
    function among the transforms is that of the buffer that is asked. Called inside `jit`, it gives
    None.

    Attributes:
        inside: how many transforms, from the first on, may be called inside `jit`.
    """

    def __init__(self, buffer: Buffer, inside: int) -> None:
        self.inside, self._sample = inside, _sample(_up_to(buffer, inside))

    def __call__(self, asked: _Asked) -> tuple[Any, Sample] | None:
        """A draw by one compiled call."""
        buffer, state, key, batch_size, beta, quiet, moves = asked
        eager.check_kind(buffer, state)
        if eager.is_tracer(key) or eager.is_tracer(state.edits):
            return None
        found = self._sample(state, key, beta, batch_size=batch_size, moves=moves)
        if eager.is_tracer(found[1].mask):  # some of the other arguments are, too
            return None
        if not quiet:
            _check_some(buffer, state, found[1].mask)
        return found


class _FromHost:
    """The same where items lie on the host."""

    def __init__(self, buffer: Buffer, inside: int) -> None:
        self.inside, self._inner = inside, eager.for_device(_up_to(buffer, inside))
        self._choose, self._origin = _choose(self._inner), origin_of(buffer)
        # Whether items are drawn as they are stored; and, then, where the anchors are.
        self._plain = buffer.unit.one_row and (buffer.storage.of_objects or not inside)
        self._at_anchors = self._plain and isinstance(self._inner.storage, HostStorageProxy)

    def __call__(self, asked: _Asked) -> tuple[Any, Sample] | None:
        """Draws slots inside `jit`, fetches the items, and goes on inside if more is to be done."""
        buffer, state, key, batch_size, beta, quiet, moves = asked
        eager.check_kind(buffer, state)
        storage, kept = buffer.storage, state.storage
        if eager.is_tracer(key) or eager.is_traced(kept):
            return _left_to_jit(buffer)
        half, spec = state.replace(storage=storage.device_state(kept)), storage.spec_key(kept)
        names = None if self._at_anchors else storage.names(kept)
        with storage.drawing(kept):
            sampler, fields, rest = self._choose(
                half, key, beta, batch_size=batch_size, names=names, moves=moves, spec=spec
            )
            if eager.is_tracer(fields["mask"]):  # some of the other arguments are, too
                return _left_to_jit(buffer)
            mask, places = (fields["mask"], None) if rest is None else rest
            if not quiet:
                _check_some(buffer, state, mask)
            data = storage.fetch(kept, fields["indices"], places)
        if storage.of_objects:
            data = _collated(buffer, self.inside, data, fields["mask"], key)
        elif not self._plain:
            fetched = half.replace(storage=data)
            data, info = steps.finish(self._inner, fetched, fields["indices"], mask, key)
            counted = {name: leaf for name, leaf in fields["info"].items() if name == "draws"}
            fields["info"] = {**info, **counted}
        return sampler, Sample(data=data, origin=self._origin, **fields)


@functools.lru_cache(maxsize=64)
def _draws_of(buffer: Buffer) -> _OnDevice | _FromHost:
    kind = _FromHost if eager.on_host(buffer) else _OnDevice
    return kind(buffer, transforming.fixed(buffer.transforms))


def _left_to_jit(buffer: Buffer) -> None:
    """None, for a draw inside `jit`. Raises where there can be none."""
    if buffer.storage.of_objects:
        raise eager.refusal()


def _up_to(buffer: Buffer, count: int) -> Any:
    """The same buffer with so many of its transforms, from the first on."""
    if count == len(buffer.transforms):
        return buffer
    return dataclasses.replace(buffer, transforms=buffer.transforms[:count])


def _check_some(buffer: Buffer, state: BufferState, mask: Any) -> None:
    """Raises unless a draw found something; this waits for it."""
    # A thread that sleeps and is woken costs 25 us and more, longer than the computation between
    # two parts in Python: poll for some 200 us first.
    for _ in range(1000):
        if mask.is_ready():
            break
    found = np.asarray(mask)
    if found.item(0) or found.any():
        return
    least = "" if buffer.min_size is None else f": min_size is {buffer.min_size}"
    raise ValueError(
        f"sample: expected something to draw, got a buffer of size {buffer.size(state)} in which "
        f"{type(buffer.sampler).__name__} finds nothing. Add items first; can_sample tells when "
        f"there are enough{least}."
    )


def _collated(
    buffer: Buffer, inside: int, found: list[Any], mask: jax.Array, key: jax.Array
) -> Any:
    drawn, collate = np.asarray(mask), buffer.storage.collate
    if not extremes.least(drawn):
        found = [item if real else None for item, real in zip(found, drawn, strict=True)]
    data = found if collate is None else collate(found)
    if not inside:
        return data
    batch = TransformContext(key, mask, buffer.keys)
    return transforming.outward(buffer.transforms[:inside], data, batch)


@per_description("batch_size", "moves")
@gather.by_itself
def _sample(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    beta: jax.Array | float | None,
    batch_size: int,
    moves: bool,
) -> tuple[Any, Sample]:
    """A draw outside `jit`. The state is checked when it is traced, not at each call."""
    validate.check(buffer, state)
    return steps.sample(buffer, state, key, batch_size, beta, moves)


@per_description("batch_size", "names", "moves", "spec")
@gather.by_itself
def _choose(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    beta: jax.Array | float | None,
    batch_size: int,
    names: tuple[str, ...] | None,
    moves: bool,
    spec: SpecKey,
) -> Any:
    """The first half of a draw (see `steps.choose`). The state is checked when it is traced."""
    validate.check(buffer, state, spec)
    return steps.choose(buffer, state, key, batch_size, beta, names, moves)
