"""Python objects as bytes, and back: exact, and without code.

`ListStorage` has N of them. They are written 64 slots at a time: a line of JSON, the nodes of these
objects, and behind it the bytes of their arrays. Such a blob lies in pages, which are the rows of a
store; a save writes those pages that differ.
"""

import dataclasses
import json
import struct
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jrb._core import memory
from jrb._store.errors import DamagedError
from jrb._store.generation import Generation
from jrb._store.table import Column
from jrb._util import prng_keys
from jrb._util.pytree import PyTree
from jrb.checkpoint import apart, descriptions, rows
from jrb.checkpoint.opened import Opened
from jrb.checkpoint.snapshots import Snapshot
from jrb.state import Buffer, Device

KIND = "objects"

_PAGE = 4096  # bytes
_SLOTS = 64  # of a blob
_PAGES, _LENGTHS = ".objects/pages", ".objects/lengths"
_LARGEST = 1 << 62  # of an integer that is written in figures


class _Writer:
    """The nodes of objects; the bytes of their arrays one after the other."""

    def __init__(self) -> None:
        self.heap, self.size = [], 0

    def node(self, value: object, where: str) -> Any:
        """An object as JSON.

        Raises:
            TypeError: it is of a class that no file can hold.
        """
        if value is None or type(value) is bool:
            return value
        if type(value) is int:
            return value if abs(value) < _LARGEST else {"int": hex(value)}
        if type(value) is float:
            finite = value - value == 0
            return value if finite else {"float": struct.pack("<d", value).hex()}
        if type(value) is str:
            return value if value.isascii() else _text(value)
        if type(value) is bytes:
            return {"bytes": self._put(value)}
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self._array(value, where)
        return self._container(value, where)

    def _container(self, value: Any, where: str) -> Any:
        if type(value) in (list, tuple):
            entries = [self.node(one, f"{where}[{n}]") for n, one in enumerate(value)]
            return entries if type(value) is list else {"tuple": entries}
        if type(value) is dict and all(type(key) is str for key in value):
            return {"dict": [[_text(k), self.node(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        cls, name = type(value), descriptions.name_of(type(value))
        fields = _fields(cls)
        if fields is None or descriptions.find_class(name) is not cls:
            raise TypeError(
                f"save: {where}: expected None, numbers, str, bytes, lists, tuples, dicts with str "
                "keys, arrays, or dataclasses and named tuples that a module has by name, got "
                f"{name.replace(':', '.')}{_why(value)}. Store it in one of these."
            )
        entries = [
            [field, self.node(getattr(value, field), f"{where}.{field}")] for field in fields
        ]
        return {"class": name, "fields": entries}

    def _array(self, value: Any, where: str) -> Any:
        dtype = value.dtype
        kind = "jax" if isinstance(value, jax.Array) else "scalar"
        if isinstance(value, np.ndarray):
            kind = "numpy" if type(value) is np.ndarray else ""
        if not kind or not _is_plain(dtype) or isinstance(value, jax.core.Tracer):
            raise TypeError(
                f"save: {where}: expected an array of numbers, got a {type(value).__name__} of "
                f"dtype {dtype}. Store its fields, or np.asarray of it."
            )
        raw = np.asarray(prng_keys.raw(value))
        plain = prng_keys.is_keys(dtype) or dtype.kind not in "SUMm"
        name = descriptions.dtype_name(dtype) if plain else dtype.str
        return {kind: [name, list(value.shape), self._put(raw.tobytes())]}

    def _put(self, data: bytes) -> list[int]:
        start, self.size = self.size, self.size + len(data)
        self.heap.append(data)
        return [start, self.size]

    def blob(self, nodes: list[Any]) -> bytes:
        """All of it."""
        text = json.dumps(nodes, separators=(",", ":")).encode()
        return b"".join([text, b"\n", *self.heap])


def _is_plain(dtype: Any) -> bool:
    """Whether the bytes of an array say all, and the name of its dtype is known."""
    if prng_keys.is_keys(dtype) or dtype.kind in "biufcSUMm":
        return True
    try:
        return descriptions.dtype_of(descriptions.dtype_name(dtype)) == dtype
    except descriptions.UnknownError:
        return False


def _text(value: str) -> Any:
    """A string; one with halves of characters apart, which JSON would join."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"str": value.encode("utf-32-le", "surrogatepass").hex()}
    return value


def _why(value: object) -> str:
    """What of a dict is in the way."""
    odd = [key for key in value if type(key) is not str] if type(value) is dict else []
    return f" with the key {odd[0]!r}" if odd else ""


def _fields(cls: Any) -> list[str] | None:
    """The fields by which an object of a class is made anew; None for other classes."""
    named = descriptions.fields_of(cls)
    if issubclass(cls, tuple) and named is not None:
        return list(named)
    if not dataclasses.is_dataclass(cls):
        return None
    fields = dataclasses.fields(cls)
    return [field.name for field in fields] if all(field.init for field in fields) else None


class _Reader:
    """The objects of a blob."""

    def __init__(self, blob: bytes, device: Device) -> None:
        text, _, self.heap = blob.partition(b"\n")
        self.nodes, self.device = json.loads(text), device

    def value(self, node: Any) -> Any:
        """The object of a node.

        Raises:
            UnknownError: a class that the program has not defined.
        """
        if isinstance(node, list):
            return list(map(self.value, node))
        if not isinstance(node, dict):
            return node
        if "class" in node:
            return self._made(node["class"], node["fields"])
        ((kind, inner),) = node.items()
        if kind == "tuple":
            return tuple(map(self.value, inner))
        if kind == "dict":
            return {self.value(key): self.value(entry) for key, entry in inner}
        return self._leaf(kind, inner)

    def _made(self, name: str, fields: list[Any]) -> Any:
        cls = descriptions.find_class(name)
        if cls is None or _fields(cls) != [field for field, _ in fields]:
            raise descriptions.UnknownError(
                f"load: expected the class {name} with the fields {[field for field, _ in fields]},"
                " of which an object was. Import its module first."
            )
        return cls(**{field: self.value(entry) for field, entry in fields})

    def _leaf(self, kind: str, inner: Any) -> Any:
        if kind == "int":
            return int(inner, 16)
        if kind == "float":
            return struct.unpack("<d", bytes.fromhex(inner))[0]
        if kind == "str":
            return bytes.fromhex(inner).decode("utf-32-le", "surrogatepass")
        if kind == "bytes":
            return self.heap[slice(*inner)]
        name, shape, place = inner
        dtype = np.dtype(name) if name[1:2] in "SUMm" else descriptions.dtype_of(name)
        spec = prng_keys.raw_spec(jax.ShapeDtypeStruct(tuple(shape), dtype))
        data = bytearray(self.heap[slice(*place)])
        raw = np.frombuffer(data, spec.dtype) if data else np.zeros(0, spec.dtype)
        raw = raw.reshape(spec.shape)
        if kind == "jax":
            return self._on_device(raw, dtype)
        return raw[()] if kind == "scalar" else raw

    def _on_device(self, raw: np.ndarray, dtype: DTypeLike) -> jax.Array:
        array = jnp.asarray(raw)
        if array.dtype != raw.dtype:
            raise TypeError(
                f"load: expected a program that keeps {raw.dtype}, as an object was saved in one, "
                "got one that does not. Set jax_enable_x64."
            )
        array = prng_keys.wrapped(array, dtype)
        return array if self.device is None else jax.device_put(array, self.device)


def blobs(saved: Snapshot) -> list[bytes]:
    """What is held, as bytes: a blob for some slots each, of which nothing is empty.

    Raises:
        StaleError: objects of this state were overwritten.
        TypeError: one is of a class that no file can hold; the message says which.
    """
    buffer, slots = saved.buffer, apart.in_order(saved.buffer, saved.state.writer)
    held = dict(zip(slots.tolist(), buffer.storage.take(saved.stored, slots), strict=True))
    return [
        _blob(held, range(first, min(first + _SLOTS, buffer.capacity)))
        for first in range(0, buffer.capacity, _SLOTS)
    ]


def _blob(held: dict[int, Any], slots: range) -> bytes:
    if held.keys().isdisjoint(slots):
        return b""
    writer = _Writer()
    try:
        return writer.blob(
            [writer.node(held.get(slot), f"the object in slot {slot}") for slot in slots]
        )
    except RecursionError:
        raise ValueError(
            f"save: the objects in slots {slots.start} to {slots.stop - 1}: expected lists and "
            "dicts that end, got one that holds itself, or is too deep."
        ) from None


def paged(blobs: list[bytes], last: Generation | None) -> tuple[rows.Rows, dict[str, Any]]:
    """The rows of a store, pages of blobs, and the arrays that say where they are.

    Args:
        blobs: each of which stays in its pages as far as it has some.
        last: the generation before, if this goes on from it.
    """
    old, size = _layout(last)
    old += [[]] * (len(blobs) - len(old))
    need = [-(-len(blob) // _PAGE) for blob in blobs]
    kept = [pages[:count] for pages, count in zip(old, need, strict=True)]
    if not sum(need) <= size <= 8 * sum(need) + 8:
        size = 1 << (sum(need) + sum(need) // 4).bit_length()
        kept = [[] for _ in blobs]
    free = iter(sorted(set(range(size)) - {page for pages in kept for page in pages}))
    pages = [
        mine + [next(free) for _ in range(count - len(mine))]
        for mine, count in zip(kept, need, strict=True)
    ]
    whole = np.zeros((1, size, _PAGE), np.uint8)
    for blob, mine in zip(blobs, pages, strict=True):
        padded = np.frombuffer(blob.ljust(len(mine) * _PAGE, b"\0"), np.uint8)
        whole[0, mine] = padded.reshape(-1, _PAGE)
    column = Column.of("objects", ("uint8", str([size, _PAGE])), _PAGE)
    arrays = {
        _PAGES: np.asarray([page for mine in pages for page in mine], np.int64).tobytes(),
        _LENGTHS: np.asarray(list(map(len, blobs)), np.int64).tobytes(),
    }
    return rows.Rows((column,), (whole,), 1, size, in_slots=False), arrays


def _layout(last: Generation | None) -> tuple[list[list[int]], int]:
    """The pages of each blob, and how many there are."""
    if last is None or _PAGES not in last.arrays or _LENGTHS not in last.arrays:
        return [], 0
    try:
        pages, lengths = last.array(_PAGES, np.int64), last.array(_LENGTHS, np.int64)
    except DamagedError:
        return [], 0
    ends = np.cumsum(-(-lengths // _PAGE)).tolist()
    starts = [0, *ends[:-1]]
    found = [pages[a:b].tolist() for a, b in zip(starts, ends, strict=True)]
    return found, last.body["table"]["slots"]


def restored(opened: Opened, buffer: Buffer, device: Device) -> Any:
    """The storage's state with all objects. The pages are checked already.

    Raises:
        DamagedError: they are not what was written.
        UnknownError: one is of a class that the program has not defined.
    """
    path, store = opened.path, opened.store
    layout, size = _layout(opened.generation)
    lengths = opened.generation.array(_LENGTHS, np.int64).tolist()
    found: list[Any] = []
    try:
        for first, (pages, length) in enumerate(zip(layout, lengths, strict=True)):
            if not length:
                found += [None] * min(_SLOTS, buffer.capacity - first * _SLOTS)
                continue
            (whole,) = store.take(store.version, [np.asarray(pages, np.int64)])
            reader = _Reader(memory.view(whole)[:length].tobytes(), device)
            found += map(reader.value, reader.nodes)
    except (KeyError, IndexError, json.JSONDecodeError) as error:
        raise DamagedError(f"{path}: expected objects, got {error!r}.") from error
    if len(found) != buffer.capacity or size != store.slots:
        raise DamagedError(f"{path}: expected {buffer.capacity} objects, found {len(found)}.")
    return filled(buffer, np.arange(buffer.capacity), found)


def filled(buffer: Buffer, slots: np.ndarray, found: list[Any]) -> Any:
    """A state of the storage with objects at slots `[K]`."""
    state = buffer.storage.make(buffer.ring, {}, None, True)
    return buffer.storage.put_values(state, None, slots, found) if len(slots) else state


def brought(opened: Opened, slots: np.ndarray, buffer: Buffer, items: PyTree) -> Any:
    """The same with the objects of a user.

    Raises:
        TypeError, ValueError: they are no sequence of as many as were held.
    """
    path, count = opened.path, opened.form["count"]
    mend = "Pass what jrb.items(buffer, state) gave when it was saved."
    if not isinstance(items, list | tuple):
        raise TypeError(f"{path}: items: expected a list, got {type(items).__name__}. {mend}")
    if len(items) != count:
        raise ValueError(f"{path}: items: expected {count} objects, got {len(items)}. {mend}")
    return filled(buffer, slots, list(items))
