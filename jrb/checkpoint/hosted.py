"""Buffers whose items lie on the host, for those who save and load arrays."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrb import columns, outside, prng
from jrb.mix import Mix
from jrb.storages.host import Host, Hosted, number


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
    def size(self) -> int:
        """How many numbers, or keys, there are."""
        return int(np.prod(self.shape))

    @property
    def raw(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the words."""
        return prng.raw_spec(jax.ShapeDtypeStruct(self.shape, self.dtype))

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes from a start to a stop."""
        return self.host.live.read(self.version, self.number, start, stop)

    def fill(self, pieces: Iterator[tuple[int, Any]]) -> np.ndarray:
        """Writes bytes at offsets, all of them; what comes back stands for the leaf."""
        self.host.live.fill(self.number, pieces)
        return np.zeros(0, np.uint8)


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


def leaves(hosted: Hosted) -> Any:
    """All items, as a pytree of `Leaf`s."""
    capacity, host = hosted.host.live.table.capacity, hosted.host
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
    hosted.host.live.settle(number(hosted.version))
    return device, state.replace(storage=leaves(hosted))


@contextlib.contextmanager
def reading(buffer: Any, state: Any) -> Iterator[None]:
    """A time during which no thread overwrites rows."""
    parts = [(buffer, state)]
    if isinstance(buffer, Mix):
        states = state if isinstance(state, tuple) else ()
        parts = list(zip(buffer.buffers, states, strict=False))  # others say what is missing
    with contextlib.ExitStack() as stack:
        for part, its in parts:
            if is_hosted(part):
                stack.enter_context(of(part, its).host.live.drawing())
        yield


def prepared(buffer: Any, given: bool) -> Any:
    """The buffer that a checkpoint is loaded into.

    A store of its own path may still be in use: without a description, the items go to a temporary
    one.
    """
    if isinstance(buffer, Mix):
        parts = tuple(prepared(part, given) for part in buffer.buffers)
        return dataclasses.replace(buffer, buffers=parts)
    if given or not is_hosted(buffer):
        return buffer
    return dataclasses.replace(buffer, storage=dataclasses.replace(buffer.storage, path=None))


def sinks(buffer: Any, spec: Any, want: Any) -> Any:
    """A tree like `want`, the specs of a state: a `Leaf` of a new store, or None for an array."""
    if isinstance(buffer, Mix):
        parts = zip(buffer.buffers, spec, want, strict=True)
        return tuple(sinks(*part) for part in parts)
    nothing = jax.tree.map(lambda leaf: _NOWHERE, want)
    if not is_hosted(buffer):
        return nothing
    hosted = of(buffer, outside.init(buffer, spec, None))
    return nothing.replace(storage=leaves(hosted))


_NOWHERE = object()


def sink(leaf: Any) -> Callable[[Iterator[tuple[int, Any]]], Any] | None:
    """What takes the bytes of a leaf, if it goes to the host."""
    return leaf.fill if isinstance(leaf, Leaf) else None


def attached(buffer: Any, state: Any, places: Any) -> Any:
    """A state whose items were filled into sinks."""
    if isinstance(buffer, Mix):
        parts = zip(buffer.buffers, state, places, strict=True)
        return tuple(attached(*part) for part in parts)
    if not is_hosted(buffer):
        return state
    return attach(buffer, state, jax.tree.leaves(places.storage)[0].host)


def attach(buffer: Any, state: Any, host: Host) -> Any:
    """The state that knows of rows which are in their files."""
    held = buffer.writer.held(buffer.ring, state.writer)
    hosted = Hosted(version=jax.numpy.zeros(2, jax.numpy.uint32), host=host)
    return state.replace(storage=buffer.storage.attach(buffer.ring, hosted, held))
