"""Saves Python objects by msgpack: JSON's types, bytes, tuples and arrays, but no code.

The objects of a `ListStorage` are one array of a generation, which each save writes as a whole: a
msgpack list with a msgpack blob for each slot, empty for a slot without an object.
"""

import contextlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core import eager
from jrb._store.errors import DamagedError
from jrb._util import casting, wording
from jrb.checkpoint import descriptions, external_items
from jrb.checkpoint.schema import Snapshot
from jrb.state import Buffer, Device

KIND, FORM = "objects", {"kind": "objects", "format": "msgpack"}
"""The kind and the metadata of items that are objects."""

ARRAY = ".objects"
"""The name of the array in which objects are saved."""

_TUPLE, _NUMPY, _SCALAR, _JAX = range(4)  # msgpack's extension types


def packed_objects(saved: Snapshot) -> bytes:
    """Returns the objects of a state as one array of bytes."""
    buffer, slots = saved.buffer, external_items.in_order(saved.buffer, saved.state.writer)
    blobs = [b""] * buffer.capacity
    values = saved.stored.rows.stored(saved.stored.version, slots)
    for slot, value in zip(slots.tolist(), values, strict=True):
        where = f"the object in slot {slot}"
        try:
            blobs[slot] = _pack(_packable(value, where))
        except (RecursionError, ValueError) as error:  # msgpack's own limit is a ValueError
            raise ValueError(
                f"save: {where}: expected lists and dicts that end, got one that holds itself, or "
                "is too deep."
            ) from error
    return _pack(blobs)


def _packable(value: Any, where: str) -> Any:
    """Returns an object of msgpack's own types, with extension types for tuples and arrays."""
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    # The range of msgpack; `type` and not `isinstance`, as a subclass would come back as an int.
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _packed_array(value, where)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        entries = [_packable(one, f"{where}[{n}]") for n, one in enumerate(value)]
        return entries if type(value) is list else _extension(_TUPLE, entries)
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


def _packed_array(value: Any, where: str) -> Any:
    dtype = value.dtype
    is_key = casting.is_keys(dtype)
    is_own = is_key or dtype.kind in "biufcSUMm"  # saved as the dtype's name or code
    if not is_own:
        with contextlib.suppress(descriptions.UnknownError):
            is_own = descriptions.dtype_of(descriptions.dtype_name(dtype)) == dtype
    is_array = isinstance(value, jax.Array | np.generic) or type(value) is np.ndarray
    if not is_own or not is_array or isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"save: {where}: expected an array of numbers, got a {type(value).__name__} of "
            f"dtype {dtype}. Store its fields, or np.asarray of it."
        )
    kind = _JAX if isinstance(value, jax.Array) else _SCALAR
    kind = _NUMPY if isinstance(value, np.ndarray) else kind
    # Times and strings have a unit or a length in their code, which their name lacks.
    by_code = not is_key and dtype.kind in "SUMm"
    name = dtype.str if by_code else descriptions.dtype_name(dtype)
    raw = np.asarray(casting.raw(value))
    return _extension(kind, [name, list(value.shape), raw.tobytes()])


def _extension(kind: int, value: list[Any]) -> Any:
    return wording.require("msgpack", "objects").ExtType(kind, _pack(value))


def _pack(value: Any) -> bytes:
    return wording.require("msgpack", "objects").packb(value, unicode_errors="surrogatepass")


def restored(
    path: str,
    data: Any,
    buffer: Buffer,
    slots: np.ndarray | None,
    items: Any,
    device: Device,
) -> Any:
    """Returns the storage's state with the saved objects, or with `items` at the given slots."""
    if slots is None:
        slots, objects = _saved_objects(path, data, device)
    else:
        objects, mend = items, external_items.MEND
        if not isinstance(items, list | tuple):
            raise TypeError(f"{path}: items: expected a list, got {type(items).__name__}. {mend}")
        if len(items) != len(slots):
            raise ValueError(
                f"{path}: items: expected {len(slots)} objects, got {len(items)}. {mend}"
            )
    view = eager.init(buffer, {}, None).storage
    return view.after(view.rows.edit(view.version, slots, list(objects)))


def _saved_objects(path: str, data: Any, device: Device) -> tuple[np.ndarray, list[Any]]:
    """Returns the slots that have objects, and the objects."""
    try:
        blobs = _unpack(data, device)
        # No object packs to an empty blob: None has a byte.
        slots = np.array([slot for slot, blob in enumerate(blobs) if blob], np.int64)
        return slots, [_unpack(blobs[slot], device) for slot in slots]
    except (ValueError, RecursionError) as error:  # all errors of msgpack are below ValueError
        raise DamagedError(f"{path}: expected objects, got {error!r}.") from error


def _unpack(data: Any, device: Device) -> Any:
    def extension(kind: int, inner: Any) -> Any:
        value = _unpack(inner, device)
        if kind == _TUPLE:
            return tuple(value)
        name, shape, data = value
        return _restored_array(kind, name, shape, data, device)

    msgpack = wording.require("msgpack", "objects")
    return msgpack.unpackb(data, ext_hook=extension, unicode_errors="surrogatepass")


def _restored_array(
    kind: int, name: str, shape: list[int], data: bytes, device: Device
) -> np.ndarray | np.generic | jax.Array:
    dtype = np.dtype(name) if name[1:2] in (*"SUMm",) else descriptions.dtype_of(name)
    spec = casting.raw_spec(jax.ShapeDtypeStruct(tuple(shape), dtype))
    # A bytearray, so that the array can be written to, as the one that was saved.
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
    array = casting.wrap_words(array, dtype)
    return array if device is None else jax.device_put(array, device)
