"""Python objects in checkpoints, by msgpack: JSON's types, bytes, tuples and arrays; no code.

The objects of a `ListStorage` are written 64 slots at a time: each such blob is a msgpack list.
Blobs lie in pages, which are the rows of a store, so that a save writes the pages that differ.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core import memory
from jrb._store.errors import DamagedError
from jrb._store.generation import Generation
from jrb._store.store import Store
from jrb._store.table import Column
from jrb._util import casting, wording
from jrb._util.pytree import PyTree
from jrb.checkpoint import descriptions, external_items
from jrb.checkpoint.rows import StateRows
from jrb.checkpoint.schema import Snapshot
from jrb.state import Buffer, Device

KIND, FORM = "objects", {"kind": "objects", "format": "msgpack"}
"""What a generation says of objects."""

_PAGE = 4096  # bytes
_SLOTS = 64  # of a blob
_PAGES, _LENGTHS = ".objects/pages", ".objects/lengths"
_TUPLE, _NUMPY, _SCALAR, _JAX = range(4)  # msgpack's extension types


def _msgpack() -> Any:
    return wording.require("msgpack", "objects")


def _packable(value: Any, where: str) -> Any:
    """Returns an object of msgpack's own types, with extension types for tuples and arrays.

    Raises:
        TypeError: it is of a class that no file can hold; the message says where.
    """
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _array(value, where)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        entries = [_packable(one, f"{where}[{n}]") for n, one in enumerate(value)]
        return entries if type(value) is list else _ext(_TUPLE, entries)
    odd = [key for key in value if type(key) is not str] if type(value) is dict else []
    if type(value) is dict and not odd:
        return {key: _packable(one, f"{where}[{key!r}]") for key, one in value.items()}
    name = descriptions.name_of(type(value)).replace(":", ".")
    why = f" with the key {odd[0]!r}" if odd else ""
    why = " of more than 64 bits" if type(value) is int else why
    raise TypeError(
        f"save: {where}: expected None, numbers, str, bytes, lists, tuples, dicts with str keys, "
        f"or arrays, got {name}{why}. Store it as one of these."
    )


def _array(value: Any, where: str) -> Any:
    dtype = value.dtype
    kind = _JAX if isinstance(value, jax.Array) else _SCALAR
    if isinstance(value, np.ndarray):
        kind = _NUMPY if type(value) is np.ndarray else None
    if kind is None or not _is_plain(dtype) or isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"save: {where}: expected an array of numbers, got a {type(value).__name__} of "
            f"dtype {dtype}. Store its fields, or np.asarray of it."
        )
    by_name = casting.is_keys(dtype) or dtype.kind not in "SUMm"
    name = descriptions.dtype_name(dtype) if by_name else dtype.str
    raw = np.asarray(casting.raw(value))
    return _ext(kind, [name, list(value.shape), raw.tobytes()])


def _ext(kind: int, value: list[Any]) -> Any:
    return _msgpack().ExtType(kind, _pack(value))


def _pack(value: Any) -> bytes:
    return _msgpack().packb(value, unicode_errors="surrogatepass")


def _unpack(data: Any, device: Device) -> Any:
    def extension(kind: int, inner: Any) -> Any:
        value = _unpack(inner, device)
        return tuple(value) if kind == _TUPLE else _restored_array(kind, value, device)

    return _msgpack().unpackb(data, ext_hook=extension, unicode_errors="surrogatepass")


def _restored_array(kind: int, value: Any, device: Device) -> Any:
    name, shape, data = value
    dtype = np.dtype(name) if name[1:2] in "SUMm" else descriptions.dtype_of(name)
    spec = casting.raw_spec(jax.ShapeDtypeStruct(tuple(shape), dtype))
    raw = np.frombuffer(bytearray(data), spec.dtype) if data else np.zeros(0, spec.dtype)
    raw = raw.reshape(spec.shape)
    if kind != _JAX:
        return raw[()] if kind == _SCALAR else raw
    array = jnp.asarray(raw)
    if array.dtype != raw.dtype:
        raise TypeError(
            f"load: expected a program that keeps {raw.dtype}, as an object was saved in one, "
            "got one that does not. Set jax_enable_x64."
        )
    array = casting.wrapped(array, dtype)
    return array if device is None else jax.device_put(array, device)


def _is_plain(dtype: Any) -> bool:
    """Returns whether the bytes of an array say all, and the name of its dtype is known."""
    if casting.is_keys(dtype) or dtype.kind in "biufcSUMm":
        return True
    try:
        return descriptions.dtype_of(descriptions.dtype_name(dtype)) == dtype
    except descriptions.UnknownError:
        return False


def blobs(saved: Snapshot) -> list[bytes]:
    """Returns the objects that are held, a blob for some slots each, empty where none is.

    Raises:
        StaleError: objects of this state were overwritten.
        TypeError: one is of a class that no file can hold; the message says which.
    """
    buffer, slots = saved.buffer, external_items.in_order(saved.buffer, saved.state.writer)
    held = dict(zip(slots.tolist(), buffer.storage.take(saved.stored, slots), strict=True))
    blobs = []
    for first in range(0, buffer.capacity, _SLOTS):
        part = range(first, min(first + _SLOTS, buffer.capacity))
        blobs.append(b"" if held.keys().isdisjoint(part) else _blob(held, part))
    return blobs


def _blob(held: dict[int, Any], slots: range) -> bytes:
    try:
        return _pack([_packable(held.get(n), f"the object in slot {n}") for n in slots])
    except (RecursionError, ValueError) as error:  # msgpack's own limit is a ValueError
        raise ValueError(
            f"save: the objects in slots {slots.start} to {slots.stop - 1}: expected lists and "
            "dicts that end, got one that holds itself, or is too deep."
        ) from error


def paged(blobs: list[bytes], last: Generation | None) -> tuple[StateRows, dict[str, Any]]:
    """Returns the rows of a store, pages of blobs, and the arrays that say where they are.

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
    whole, order = np.zeros((1, size, _PAGE), np.uint8), []
    for blob, own, count in zip(blobs, kept, need, strict=True):
        pages = own + [next(free) for _ in range(count - len(own))]
        padded = np.frombuffer(blob.ljust(count * _PAGE, b"\0"), np.uint8)
        whole[0, pages] = padded.reshape(-1, _PAGE)
        order += pages
    column = Column.of("objects", ("uint8", str([size, _PAGE])), _PAGE)
    arrays = {
        _PAGES: np.asarray(order, np.int64).tobytes(),
        _LENGTHS: np.asarray(list(map(len, blobs)), np.int64).tobytes(),
    }
    return StateRows((column,), (whole,), 1, size, in_slots=False), arrays


def _layout(last: Generation | None) -> tuple[list[list[int]], int]:
    """Returns the pages of each blob, and how many there are."""
    if last is None or _PAGES not in last.arrays or _LENGTHS not in last.arrays:
        return [], 0
    try:
        pages, lengths = last.array(_PAGES, np.int64), last.array(_LENGTHS, np.int64)
    except DamagedError:
        return [], 0
    ends = np.cumsum(-(-lengths // _PAGE)).tolist()
    edges = zip([0, *ends[:-1]], ends, strict=True)
    return [pages[a:b].tolist() for a, b in edges], last.body["table"]["slots"]


def restored(
    path: str,
    store: Store,
    generation: Generation,
    form: dict[str, Any],
    buffer: Buffer,
    device: Device,
) -> Any:
    """Returns the storage's state with all objects. The pages are checked already.

    Raises:
        DamagedError: they are not what was written.
        ValueError: an earlier version wrote them.
    """
    if form.get("format") != FORM["format"]:
        raise ValueError(
            f"{path}: expected objects that were written by msgpack, got those of jrb 0.1.0 in its "
            "own format. Load them with that version, and keep what jrb.items(buffer, state) gives."
        )
    layout, size = _layout(generation)
    lengths = generation.array(_LENGTHS, np.int64).tolist()
    objects: list[Any] = []
    for pages, length in zip(layout, lengths, strict=True):
        count = min(_SLOTS, buffer.capacity - len(objects))
        if not length:
            objects += [None] * count
            continue
        (whole,) = store.take(store.version, [np.asarray(pages, np.int64)])
        try:
            objects += _unpack(memory.view(whole)[:length], device)
        except (ValueError, IndexError) as error:  # all errors of msgpack are below ValueError
            raise DamagedError(f"{path}: expected objects, got {error!r}.") from error
    if len(objects) != buffer.capacity or size != store.slots:
        raise DamagedError(f"{path}: expected {buffer.capacity} objects, found {len(objects)}.")
    return _filled(buffer, np.arange(buffer.capacity), objects)


def _filled(buffer: Buffer, slots: np.ndarray, objects: list[Any]) -> Any:
    """Returns a state of the storage with objects at slots `[K]`."""
    state = buffer.storage.make(buffer.ring, {}, None, True)
    return buffer.storage.put_values(state, None, slots, objects) if len(slots) else state


def given(path: str, form: dict[str, Any], slots: np.ndarray, buffer: Buffer, items: PyTree) -> Any:
    """Returns a state of the storage with the objects of a user.

    Raises:
        TypeError, ValueError: they are no sequence of as many as were held.
    """
    mend = external_items.MEND
    if not isinstance(items, list | tuple):
        raise TypeError(f"{path}: items: expected a list, got {type(items).__name__}. {mend}")
    if len(items) != form["count"]:
        raise ValueError(
            f"{path}: items: expected {form['count']} objects, got {len(items)}. {mend}"
        )
    return _filled(buffer, slots, list(items))
