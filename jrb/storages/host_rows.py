"""The base classes of storages on the host: their rows, their states, and the stages of a method.

Each method has three stages: a compiled plan of the slots, the reads and writes of the host, and
the compiled rest. Inside `jit`, the host is called back. Outside, `jrb._core.host_calls` calls it
in between, and the compiled parts get states with the outline of the rows in their place: writes
then only plan their slots, and reads take what was fetched.

A state has a *version*, an int that grows with each write: for rows on a disk, the number of rows
that were written before it.
"""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._store.files import StaleError
from jrb._util import casting, pytree
from jrb._util.pytree import SpecKey
from jrb._xla import callbacks, dependencies
from jrb.keys import Keys
from jrb.ring import Occupancy, Ring
from jrb.state import Device
from jrb.types import Context, HostState, Item, SlotsForLeaf, Storage, WritePlan
from jrb.types.messages import PartState

# The version in a state: two words, as JAX has no uint64 unless x64 is on; 32 bits would wrap after
# 4e9 writes.
WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)


# Rows.


class RowsSpec:
    """The shape of rows on the host; states of compiled parts have it in place of the rows.

    Attributes:
        capacity: N, the number of slots.
        spec: the spec of one item, `jax.ShapeDtypeStruct`s; for objects an empty pytree.
        names: the names of the leaves.
        raw: the specs of the leaves as they are stored on the host, PRNG keys as their words.
    """

    def __init__(self, capacity: int, spec: Item) -> None:
        self.capacity: int = capacity
        self.spec: Item = spec
        self.names: tuple[str, ...] = tuple(pytree.leaf_names(spec))
        # Keys have no bytes that NumPy knows; their words do.
        self.raw: list[jax.ShapeDtypeStruct] = list(map(casting.raw_spec, jax.tree.leaves(spec)))
        self._key: tuple[int, SpecKey] = capacity, SpecKey(spec)

    def __eq__(self, other: object) -> bool:
        return type(other) is RowsSpec and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def items(self, leaves: list[Any]) -> Item:
        """Returns the items made of these leaves, with PRNG keys wrapped again."""
        specs, structure = jax.tree.flatten(self.spec)
        wrap = lambda leaf, spec: casting.wrap_words(leaf, spec.dtype)
        return jax.tree.unflatten(structure, map(wrap, leaves, specs))


class HostRows(RowsSpec, abc.ABC):
    """The rows of one buffer, which all its states share.

    Attributes:
        outline: the shape of these rows.
        path: the folder that these rows are in, to which a save is a commit; None if there is none.
        takes_back: True if a write that is interrupted inside `writing` is undone.
        turn: a context that a write holds, for rows to which several threads may write.
    """

    path: str | None = None
    takes_back: ClassVar[bool] = False
    turn: AbstractContextManager[Any] = contextlib.nullcontext()

    def __init__(self, capacity: int, spec: Item) -> None:
        super().__init__(capacity, spec)
        self.outline: RowsSpec = RowsSpec(capacity, spec)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A state whose rows are on the host: expected to be saved by jrb.save, not to be "
            "pickled or copied."
        )

    @abc.abstractmethod
    def put(self, version: int, slots: np.ndarray, *leaves: Any, patient: bool = False) -> int:
        """Writes all leaves, `[T, E, ...]`, at slots `[T, E]`, and returns the next version.

        Args:
            version: the version of the state; raises `StaleError` unless it is the newest.
            slots: integers `[T, E]`; those of N or more are skipped.
            leaves: in the order of the items' leaves, PRNG keys as their words.
            patient: if True, waits for draws that are under way.
        """

    @abc.abstractmethod
    def read(self, version: int, slots: Sequence[np.ndarray], first: int = 0) -> list[Any]:
        """Returns the leaves from number `first` on, each at its own slots, never views.

        The leaf at slots of shape S has the shape `[*S, ...]` and the dtype in `raw`. Raises
        `StaleError` if a row there was overwritten after this version.
        """

    @abc.abstractmethod
    def check_newest(self, version: int) -> None:
        """Raises `StaleError` unless `version` is the newest."""

    @property
    def reach(self) -> int:
        """The slot from which on no slot was ever written; rows there are zeros."""
        return self.capacity

    def drawing(self) -> AbstractContextManager[None]:
        """Returns a context of a read, for which writes of other threads wait for a while.

        A read of what was overwritten after all raises `StaleError`.
        """
        return contextlib.nullcontext()

    def writing(self, version: int) -> AbstractContextManager[None]:
        """Returns a context for a write; if interrupted, `version` is the newest again."""
        return contextlib.nullcontext()

    def put_items(self, version: int, slots: np.ndarray, items: Item) -> int:
        """Writes items, leaves `[T, E, ...]` or `[T, ...]`, once draws under way are over."""
        return self.put(version, slots, *map(casting.raw, jax.tree.leaves(items)), patient=True)

    def edit(self, version: int, slots: np.ndarray, values: Any) -> int:
        """Writes leaves `[B, ...]`, by name, at slots `[B]`, and returns the next version.

        If a slot occurs twice, its last values count.
        """
        self.check_newest(version)
        flat, which = _distinct(slots, self.capacity)
        at = flat[which]
        # A put writes whole rows: read all leaves, change some, and write all again.
        rows = self.read(version, [at] * len(self.names))
        for name, leaf in values.items():
            number = self.names.index(name)
            leaf = np.asarray(casting.raw(leaf))
            rows[number] = leaf.reshape(len(flat), *self.raw[number].shape)[which]
        return self.put(version, at, *rows, patient=True)

    def take(self, version: int, slots: Any) -> Any:
        """Returns the items at slots of any shape, on the default device."""
        leaves = self.read(version, [np.asarray(slots)] * len(self.names))
        return self.items(jax.device_put(leaves))


def _distinct(slots: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns flat slots, int64 `[B]`, and the positions in them of distinct slots below N.

    For equal slots, it is the position of the last.
    """
    flat = np.asarray(slots).reshape(-1).astype(np.int64)
    # The first index in the reversed array is the last in the array itself.
    distinct, last = np.unique(flat[::-1], return_index=True)
    return flat, (len(flat) - 1 - last)[distinct < capacity]


class PlainRows(HostRows):
    """Rows that a subclass keeps anywhere, by its methods `write_rows` and `read_rows`.

    The version of each slot's last write is stored, to refuse reads of newer rows by old states.
    """

    _owner: ClassVar[str] = ""
    _content: ClassVar[str] = "rows"

    def __init__(self, capacity: int, spec: Item) -> None:
        super().__init__(capacity, spec)
        self._newest, self._written = 0, np.zeros(capacity, np.int64)

    @abc.abstractmethod
    def write_rows(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Writes leaves `[B, ...]`, of the specs in `raw`, at distinct slots, int64 `[B]`."""

    def prepare_rows(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        """Returns what `write_rows` gets for these leaves; if it raises, nothing has changed."""
        return leaves

    @abc.abstractmethod
    def read_rows(self, leaf: int, slots: np.ndarray) -> Any:
        """Returns leaf number `leaf` at slots, integers `[B]`, in any order and repeated."""

    def put(self, version: int, slots: np.ndarray, *leaves: Any, patient: bool = False) -> int:
        """See `HostRows.put`; of several rows for one slot, the last is written."""
        self.check_newest(version)
        flat, which = _distinct(slots, self.capacity)
        rows = [
            np.asarray(leaf).reshape(len(flat), *spec.shape)[which]
            for leaf, spec in zip(leaves, self.raw, strict=True)
        ]
        rows = self.prepare_rows(rows)
        # Set before the rows are written: if that fails, or while another thread reads, readers see
        # that rows may have changed.
        self._newest += 1
        self._written[flat[which]] = self._newest
        self.write_rows(flat[which], rows)
        return self._newest

    def read(self, version: int, slots: Sequence[np.ndarray], first: int = 0) -> list[np.ndarray]:
        """See `HostRows.read`."""
        leaves = []
        for number, at in enumerate(slots, first):
            spec = self.raw[number]
            # A copy: a subclass may return a view of rows that it overwrites later.
            rows = np.array(self.read_rows(number, at.reshape(-1)))
            leaves.append(rows.view(spec.dtype).reshape((*at.shape, *spec.shape)))
        if version != self._newest and any((self._written[at] > version).any() for at in slots):
            raise StaleError(
                f"{self._owner}expected a state whose {self._content} are still there, got one of "
                "which something was overwritten since. Draw from the state that the last write "
                "returned."
            )
        return leaves

    def check_newest(self, version: int) -> None:
        """See `HostRows.check_newest`."""
        if version != self._newest:
            raise StaleError(
                f"{self._owner}expected the newest state, got one that has been written to before. "
                f"States share their {self._content}: go on with the state that the last write "
                "returned."
            )


def bytes_of(leaf: np.ndarray, count: int) -> np.ndarray:
    """Returns rows as bytes, uint8 `[B, width]`."""
    if not leaf.size:
        return np.zeros((count, 0), np.uint8)
    return np.ascontiguousarray(leaf).reshape(count, -1).view(np.uint8)


# States.


class HostView(HostState):
    """The state of a storage on the host; its rows are those of all states of the buffer.

    In compiled parts of a method outside `jit`, it has the outline of the rows in their place.
    """

    # The high and the low word of the version, uint32 [2]; None in compiled parts.
    words: jax.Array | None = pytree.cursor()
    rows: Any = pytree.static(default=None)
    fetched: Any = None  # what `fetch` has returned, before the compiled rest of a read

    @property
    def version(self) -> int:
        """The version of the state, outside `jit`; waits for the device."""
        return _number(self.words)

    @property
    def host_bytes(self) -> int:
        """The number of bytes of all rows, on the disk or in memory of the host."""
        return self.rows.capacity * pytree.nbytes(self.rows.spec)

    def with_rows(self, rows: HostRows, version: int) -> Self:
        """Returns the state of these rows after a write, from that of compiled parts."""
        words = _on_device(_words(version))
        return self.replace(words=words, rows=rows, planned=None, fetched=None)

    def without_rows(self) -> Self:
        """Returns the state for compiled parts."""
        return self.replace(words=None, rows=self.rows.outline)

    def put(self, slots: jax.Array, items: Item) -> Self:
        """Writes items, leaves `[T, E, ...]`, at slots `[T, E]`, or plans to."""
        return self._write(lambda rows, *args: rows.put(*args), slots, jax.tree.leaves(items))

    def edit(self, slots: jax.Array, values: dict[str, jax.Array]) -> Self:
        """Writes some leaves `[B, ...]`, by name, at slots `[B]`, or plans to."""
        names = tuple(values)
        edit = lambda rows, version, slots, *leaves: rows.edit(
            version, slots, dict(zip(names, leaves, strict=True))
        )
        return self._write(edit, slots, list(values.values()))

    def _write(self, write: Callable[..., int], slots: jax.Array, leaves: list[jax.Array]) -> Self:
        """Calls `write(rows, version, slots, *leaves)`, which returns the next version."""
        if self.words is None:
            return self.replace(planned=slots)
        raws = [lax.stop_gradient(casting.raw(leaf)) for leaf in leaves]
        return self.replace(
            words=self.call(lambda *args: _words(write(*args)), WORDS, slots, *raws)
        )

    def call(self, function: Callable[..., Any], shapes: Any, *arguments: jax.Array) -> Any:
        """Calls `function(rows, version, *arrays)` on the host from jitted code, in order."""
        rows = self.rows
        run = lambda words, *arrays: function(rows, _number(words), *arrays)
        return callbacks.call_on_host(run, shapes, *map(_refuse_vmap, (self.words, *arguments)))


def _number(words: Any) -> int:
    high, low = np.asarray(words).tolist()
    return high << 32 | low


def _words(version: int) -> np.ndarray:
    return np.array([version >> 32, version & 0xFFFFFFFF], np.uint32)


@functools.partial(jax.jit, inline=True)
def _on_device(array: np.ndarray) -> jax.Array:
    """Returns its argument as an array of JAX, in a fifth of the time of `jnp.asarray`."""
    return array  # pyright: ignore[reportReturnType]: `jit` returns arrays of JAX


# JAX's own error for an ordered callback under `vmap` does not say what to do instead.
@jax.custom_batching.custom_vmap
def _refuse_vmap(argument: jax.Array) -> jax.Array:
    return argument


@_refuse_vmap.def_vmap
def _refuse(size: int, batched: Any, argument: jax.Array) -> Any:
    raise TypeError(
        f"vmap: expected a storage on the device, got one on the host for {size} buffers or draws "
        "at once, whose rows lie in one place. Use one buffer with num_envs=E in place of E "
        "buffers, a larger batch in place of several draws, or jrb.DeviceStorage()."
    )


# Storages.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UniqueSlots:
    """The slots at which the host reads leaves, stored once for leaves that share their slots.

    Attributes:
        arrays: the distinct arrays of slots.
        index: for each leaf, the number of its entry in `arrays`.
    """

    arrays: Sequence[Any]
    index: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, names: Sequence[str], where: SlotsForLeaf) -> Self:
        """Finds the distinct arrays among `where(name)` for all leaves."""
        slots = list(map(where, names))
        unique = {id(array): array for array in slots}
        numbers = {key: number for number, key in enumerate(unique)}
        return cls(list(unique.values()), tuple(numbers[id(array)] for array in slots))

    def per_leaf(self, values: Sequence[Any]) -> list[Any]:
        """Returns a value for each leaf, from a value for each entry of `arrays`."""
        return [values[number] for number in self.index]


class HostStorage(Storage):
    """A storage on the host, in rows that the method `make_rows` makes.

    Attributes:
        state_type: the class of the storage's states.
        assembles: True if items are made of what was fetched and of other arrays of the state.
    """

    is_on_host: ClassVar[bool] = True
    state_type: ClassVar[type] = HostView
    assembles: ClassVar[bool] = False

    @abc.abstractmethod
    def make_rows(self, ring: Ring, spec: Item, keys: Keys) -> HostRows:
        """Returns rows full of zeros.

        Args:
            ring: the ring's shape.
            spec: the spec of one item.
            keys: the keys of the buffer.
        """

    def elsewhere(self) -> Self:
        """Returns a storage for other rows, which must not be at the path of these."""
        return self

    def init(self, context: Context, spec: Item) -> Any:
        """Returns the state of compiled parts; `jrb._core.eager.init` gives it rows."""
        return self.state_type(words=None, rows=RowsSpec(context.ring.capacity, spec))

    def attach(
        self, ring: Ring, rows: HostRows, version: int, held: Callable[[], Occupancy]
    ) -> Any:
        """Returns the state of existing rows; `held()` returns the slots that hold items."""
        return self.state_type(words=_on_device(_words(version)), rows=rows)

    def spec(self, state: PartState) -> Item:
        """Returns the spec of an item."""
        return state.rows.spec

    def nbytes(self, ring: Ring, spec: Item, keys: Keys) -> dict[str, int]:
        """Returns the bytes of the rows, in memory of the host, and of the version."""
        return {"host": ring.capacity * pytree.nbytes(spec), "device": pytree.nbytes(WORDS)}

    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Writes rows to the host, or plans to."""
        return state.put(plan.slots, items), plan

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """Edits rows on the host, or plans to."""
        slots = jnp.arange(context.ring.capacity, dtype=jnp.int32) if slots is None else slots
        return state.edit(slots, values)

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state of the same rows, whose values are not read again."""
        return dependencies.delay_writes_until(state, token)

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """Reads items by a callback to the host, or makes them of what was fetched."""
        fetched = state.fetched
        if fetched is None:
            located = self.locate(context, state, where)
            index, shapes = located.index, self.fetched_shapes(state.rows, located)
            fetch = lambda rows, version, *arrays: self.fetch(
                rows, version, UniqueSlots(arrays, index), is_static=True
            )
            fetched = state.call(fetch, shapes, *located.arrays)
        return self.assemble(context, state, where, fetched)

    # The stages of a read.

    def locate(self, context: Context, state: PartState, where: SlotsForLeaf) -> UniqueSlots:
        """Returns the slots at which the host reads the leaves: compiled."""
        return UniqueSlots.of(state.rows.names, where)

    def fetch(
        self, rows: HostRows, version: int, located: UniqueSlots, is_static: bool = False
    ) -> Any:
        """Returns the rows at located slots, arrays of NumPy.

        With `is_static`, they have the shapes of `fetched_shapes`.
        """
        return rows.read(version, located.per_leaf(list(map(np.asarray, located.arrays))))

    def fetched_shapes(self, rows: RowsSpec, located: UniqueSlots) -> Any:
        """Returns the shapes of what `fetch` returns, inside `jit`."""
        return [
            jax.ShapeDtypeStruct((*at.shape, *spec.shape), spec.dtype)
            for at, spec in zip(located.per_leaf(located.arrays), rows.raw, strict=True)
        ]

    def assemble(
        self, context: Context, state: PartState, where: SlotsForLeaf, fetched: Any
    ) -> Item:
        """Returns the items made of rows that were fetched: compiled."""
        return state.rows.items(fetched)

    def sample_items(
        self, state: PartState, slots: jax.Array, mask: jax.Array, device: Device
    ) -> Any:
        """Returns the data of a sample of single items, outside `jit`."""
        rows = state.rows
        leaves = rows.read(state.version, [np.asarray(slots)] * len(rows.names))
        arguments = callbacks.to_device(leaves, device)
        # Compiled for each shape, of which draws have few.
        make_items = _make_items if arguments is leaves else RowsSpec.items
        return make_items(rows.outline, arguments)


_make_items = jax.jit(RowsSpec.items, static_argnums=0)
