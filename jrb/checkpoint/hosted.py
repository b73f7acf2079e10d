"""Buffers whose items lie on the host, for those who save and load arrays."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import columns, outside
from jrb._store.store import Store
from jrb.mix import Mix
from jrb.storages.host import Host, Hosted, number, words


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of all items, which looks like an array `[N, ...]`.

    Attributes:
        host: where it is.
        version: of the state.
        number: of its column.
        shape: N, and that of an item.
        dtype: as items have it.
    """

    host: Host
    version: int
    number: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.host.store.table.columns[self.number].width

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """The bytes of some rows, uint8 `[B, width]`."""
        return self.host.store.take_column(self.version, self.number, slots)


def is_hosted(buffer: Any) -> bool:
    """Whether a buffer keeps arrays on the host."""
    return outside.on_host(buffer) and not outside.of_objects(buffer)


def of(buffer: Any, state: Any) -> Hosted:
    """What a state knows of its rows.

    Raises:
        ValueError: it is no state of this buffer.
    """
    found = getattr(state, "storage", None)
    if not isinstance(found, buffer.storage.state_type):
        raise ValueError(
            f"save: expected a state of this buffer, got {type(state).__name__}. The order is "
            "save(path, buffer, state)."
        )
    return buffer.storage.hosted(found)


def is_own(path: str, buffer: Any, state: Any) -> bool:
    """Whether a path is that of the store in which this state has its rows."""
    return is_hosted(buffer) and of(buffer, state).host.store.path == os.path.realpath(path)


def leaves(hosted: Hosted) -> Any:
    """All items, as a pytree of `Leaf`s."""
    capacity, host = hosted.capacity, hosted.host
    version = number(hosted.version)
    specs, structure = jax.tree.flatten(host.spec)

    def leaf(number: int, spec: Any) -> Any:
        make = functools.partial(Leaf, host, version, number, (capacity, *spec.shape))
        if not columns.is_small(spec.dtype):
            return make(spec.dtype)
        return columns.Packed(make(columns.word_dtype(spec.dtype)), np.dtype(spec.dtype))

    return jax.tree.unflatten(structure, [leaf(*each) for each in enumerate(specs)])


def exported(buffer: Any, state: Any) -> tuple[Any, Any]:
    """The buffer as if its items were on the device, and its state with `Leaf`s for them.

    Raises:
        StaleError: the state is not the newest one of its store.
    """
    if isinstance(buffer, Mix):
        if not isinstance(state, tuple) or len(state) != len(buffer.buffers):
            return buffer, state
        parts = [exported(*pair) for pair in zip(buffer.buffers, state, strict=True)]
        buffers, states = zip(*parts, strict=True)
        return dataclasses.replace(buffer, buffers=buffers), states
    if not outside.on_host(buffer):
        return buffer, state
    device = outside.on_device(buffer)  # raises for objects
    hosted = of(buffer, state)
    hosted.host.store.check_newest(number(hosted.version))
    return device, state.replace(storage=leaves(hosted))


@contextlib.contextmanager
def reading(buffer: Any, state: Any) -> Iterator[None]:
    """A time during which no other thread overwrites rows."""
    pairs = [(buffer, state)]
    if isinstance(buffer, Mix):
        states = state if isinstance(state, tuple) else ()  # others say what is missing
        pairs = list(zip(buffer.buffers, states, strict=False))
    with contextlib.ExitStack() as stack:
        for one, its in pairs:
            if is_hosted(one):
                stack.enter_context(of(one, its).host.store.drawing.entered())
        yield


def prepared(buffer: Any, given: bool) -> Any:
    """The buffer that a checkpoint is loaded into.

    A store of its own path may still be in use: without a description, the items go to a temporary
    one.
    """
    if given or not is_hosted(buffer):
        return buffer
    return dataclasses.replace(buffer, storage=dataclasses.replace(buffer.storage, path=None))


def filled(buffer: Any, spec: Any, store: Store, pieces: Iterator[np.ndarray]) -> Host:
    """A new store of a buffer, which has the rows of another, read piece by piece."""
    host = of(buffer, outside.init(buffer, spec, None)).host
    for slots in pieces:
        found = store.take(store.version, [slots] * len(host.names))
        if any(leaf.any() for leaf in found):
            host.store.put(host.store.version, slots, found)
    return host


def attach(buffer: Any, state: Any, host: Host) -> Any:
    """The state that knows of rows which are in their files."""
    held = buffer.writer.held(buffer.ring, state.writer)
    hosted = Hosted(version=jnp.asarray(words(host.store.version)), host=host)
    return state.replace(storage=buffer.storage.attach(buffer.ring, hosted, held))
