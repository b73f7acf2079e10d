"""Draws, wherever the items lie: one compiled call, or items fetched from the host after one."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jrb._base.pytree import SpecKey
from jrb._engine import dispatch, state_check, steps, transforming
from jrb._engine.compiling import per_description
from jrb._engine.deferred import DeferredStorage
from jrb._store import extremes
from jrb.state import Buffer, BufferState, Sample
from jrb.types import Batch
from jrb.types.messages import PartState


@dispatch.explained
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
    found = how.outside(state, key, batch_size, beta, quiet, moves)
    if found is None:
        dispatch.check_state(buffer, state)
        return steps.draw(buffer, state, key, batch_size, beta)
    return found if how.fixed is buffer else how.transformed(*found, key)


def after_draw(state: BufferState, drawn: BufferState | PartState) -> Any:
    """The state after a draw."""
    return drawn if isinstance(drawn, BufferState) else state.replace(sampler=drawn)


class _Draws:
    """Draws outside `jit` of one description, of which all is looked up once.

    Between two compiled calls of a Python loop each call of a function costs a microsecond.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.fixed = buffer, _fixed(buffer)
        storage, transforms = buffer.storage, self.fixed.transforms
        self._sample, self._is_on_host = _sample(self.fixed), dispatch.on_host(buffer)
        if not self._is_on_host:
            return
        self._inner = dispatch.for_device(self.fixed)
        self._choose = _choose(self._inner)
        # Whether items are drawn as they are stored; and, then, where the anchors are.
        self._plain = buffer.unit.one_row and (storage.of_objects or not transforms)
        self._at_anchors = self._plain and isinstance(self._inner.storage, DeferredStorage)

    def outside(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None,
        quiet: bool,
        moves: bool,
    ) -> tuple[Any, Sample] | None:
        """A draw; None where this is called inside `jit`."""
        dispatch.check_kind(self.buffer, state)
        if dispatch.is_tracer(key) or dispatch.is_tracer(state.edits):
            if self.buffer.storage.of_objects:
                raise dispatch.refusal()
            return None
        if self._is_on_host:
            return self._from_host(state, key, batch_size, beta, quiet, moves)
        found = self._sample(state, key, beta, batch_size=batch_size, moves=moves)
        if dispatch.is_tracer(found[1].mask):  # some of the other arguments are, too
            return None
        if not quiet:
            self._check_some(state, found[1].mask)
        return found

    def _from_host(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None,
        quiet: bool,
        moves: bool,
    ) -> tuple[Any, Sample] | None:
        """Draws slots inside `jit`, fetches the items, and goes on inside if there is more to do.

        None where this is called inside `jit` after all.
        """
        storage, kept = self.buffer.storage, state.storage
        half, spec = state.replace(storage=storage.device_state(kept)), storage.spec_key(kept)
        names = None if self._at_anchors else storage.names(kept)
        with storage.drawing(kept):
            sampler, fields, rest = self._choose(
                half, key, beta, batch_size=batch_size, names=names, moves=moves, spec=spec
            )
            if dispatch.is_inside(self.buffer, fields["mask"], kept):
                return None
            mask, places = (fields["mask"], None) if rest is None else rest
            if not quiet:
                self._check_some(state, mask)
            data = storage.fetch(kept, fields["indices"], places)
        if storage.of_objects:
            data = self._collated(data, fields["mask"], key)
        elif not self._plain:
            fetched = half.replace(storage=data)
            data, info = steps.finish(self._inner, fetched, fields["indices"], mask, key)
            counted = {name: leaf for name, leaf in fields["info"].items() if name == "draws"}
            fields["info"] = {**info, **counted}
        return sampler, Sample(data=data, **fields)

    def transformed(self, after: Any, sample: Sample, key: jax.Array) -> tuple[Any, Sample]:
        """The same draw after those transforms that must be called outside `jit`."""
        first = len(self.fixed.transforms)
        rest, batch = self.buffer.transforms[first:], Batch(key, sample.mask, self.buffer.keys)
        return after, sample.replace(data=transforming.outward(rest, sample.data, batch, first))

    def _check_some(self, state: BufferState, mask: jax.Array) -> None:
        """Raises unless a draw found something; this waits for it."""
        found = np.asarray(mask)
        if found.item(0) or found.any():
            return
        buffer = self.buffer
        least = "" if buffer.min_size is None else f": min_size is {buffer.min_size}"
        raise ValueError(
            f"sample: expected something to draw, got a buffer of size {buffer.size(state)} in "
            f"which {type(buffer.sampler).__name__} finds nothing. Add items first; can_sample "
            f"tells when there are enough{least}."
        )

    def _collated(self, found: list[Any], mask: jax.Array, key: jax.Array) -> Any:
        drawn, collate = np.asarray(mask), self.buffer.storage.collate
        if not extremes.least(drawn):
            found = [item if real else None for item, real in zip(found, drawn, strict=True)]
        data = found if collate is None else collate(found)
        transforms = self.fixed.transforms
        return transforming.outward(transforms, data, Batch(key, mask, self.buffer.keys))


_draws_of = functools.lru_cache(maxsize=1024)(_Draws)


def _fixed(buffer: Buffer) -> Any:
    """The same buffer up to the first transform that must be called outside `jit`."""
    count = transforming.fixed(buffer.transforms)
    if count == len(buffer.transforms):
        return buffer
    return dataclasses.replace(buffer, transforms=buffer.transforms[:count])


@per_description("batch_size", "moves")
def _sample(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    beta: jax.Array | float | None,
    batch_size: int,
    moves: bool,
) -> tuple[Any, Sample]:
    """A draw outside `jit`. The state is checked when it is traced, not at each call."""
    state_check.check(buffer, state)
    return steps.sample(buffer, state, key, batch_size, beta, moves)


@per_description("batch_size", "names", "moves", "spec")
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
    state_check.check(buffer, state, spec.spec)
    return steps.choose(buffer, state, key, batch_size, beta, names, moves)
