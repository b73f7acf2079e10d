"""Converts descriptions of buffers and structures of items to JSON, objects to bytes, and back.

Decoding imports nothing, and calls only constructors of descriptions and of containers whose
classes the program has already defined, so that a file cannot make it run code. Of functions only
the names are saved: to load a description with a function, pass it to `load`.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb import buffer, keys, mix, samplers, sharding, storages, transforms, units, writers
from jrb._store.files import DamagedError
from jrb._util import casting, pytree, wording
from jrb._util.pytree import DType, PyTree
from jrb.buffer import ReplayBuffer
from jrb.mix import Mix
from jrb.sharding import Sharded
from jrb.state import Device
from jrb.types import Item, StatefulTransform, Storage

OWN = samplers, storages, transforms, units, writers, buffer, keys, mix, sharding
"""The modules of jrb's own parts. They are imported here, so that `find_class` finds the parts."""

Json = Any

Several = Any
"""A `ReplayBuffer`, a `Mix`, a `Sharded`, or a dict or tuple of them."""


class UnknownError(ValueError):
    """A file names something that the program does not have, or that no file can hold."""


class OtherError(ValueError):
    """The given description differs from the saved one."""


# Several buffers by their names.


def check_buffers(buffer: Several, method: str) -> None:
    """Raises unless `buffer` is a description that can be saved, or a dict or tuple of these."""
    if isinstance(buffer, ReplayBuffer | Mix | Sharded):
        return
    if not isinstance(buffer, dict | tuple) or not buffer:
        order = "(path, buffer)" if method == "load" else "(path, buffer, state)"
        raise TypeError(
            f"{method}: expected a ReplayBuffer, a Mix, or a dict or tuple of them, or a Sharded, "
            f"got {type(buffer).__name__}. The order is {method}{order}."
        )
    for name, part in buffers_by_name(buffer).items():
        if not isinstance(name, str):
            raise TypeError(f"{method}: expected names of buffers, got the key {name!r}.")
        check_buffers(part, method)


def buffers_by_name(buffer: Several) -> dict[str, Any]:
    """Returns the buffers of a Mix, a dict or a tuple, or the shards of a Sharded, by name."""
    if isinstance(buffer, Sharded):
        return dict.fromkeys(buffer.names(), buffer.part)
    entries = buffer.buffers if isinstance(buffer, Mix) else buffer
    if isinstance(entries, dict):
        return entries
    return {str(number): entry for number, entry in enumerate(entries)}


def match_by_name(buffer: Several, thing: Any, what: str) -> dict[str, Any]:
    """Returns the entry of `thing` for each buffer, by name; `what` is for the error message.

    For a dict of buffers, `thing` is a dict with the same names; for a tuple or a `Mix`, a tuple of
    that length. All shards of a `Sharded` get `thing` itself.
    """
    if isinstance(buffer, Sharded):
        return dict.fromkeys(buffers_by_name(buffer), thing)
    names, form = list(buffers_by_name(buffer)), dict if isinstance(buffer, dict) else tuple
    if isinstance(buffer, Mix) and isinstance(thing, Mix):
        thing = thing.buffers
    text = type(thing).__name__
    if isinstance(thing, form):
        entries = buffers_by_name(thing)
        if entries.keys() == set(names):
            return {name: entries[name] for name in names}
        text = f"those of {list(entries)}"
    raise ValueError(
        f"{what}: expected a {form.__name__} of {len(names)} {what.split()[-1]}, one for each of "
        f"{names}, got {text}."
    )


def combine(whole: Several, parts: dict[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    """Returns pairs of a description and a state, by name, in containers like that of `whole`."""
    buffers, states = ({name: pair[k] for name, pair in parts.items()} for k in range(2))
    if isinstance(whole, dict):
        return buffers, states
    described: Any = tuple(buffers.values())
    if isinstance(whole, Mix):
        described = dataclasses.replace(whole, buffers=described)
    return described, tuple(states.values())


def functions_by_name(buffer: Several, hook: Any, what: str) -> dict[str, Any]:
    """Returns the function for each buffer, by name; `hook` is one for all, or a dict."""
    if isinstance(hook, dict):
        return match_by_name(buffers_by_name(buffer), hook, what)
    return dict.fromkeys(buffers_by_name(buffer), hook)


def without_mesh(buffer: Any) -> Any:
    """Returns the description without meshes, which no file can hold."""
    if isinstance(buffer, Sharded):
        return dataclasses.replace(buffer, mesh=None)
    if not isinstance(buffer, Mix):
        return buffer
    return dataclasses.replace(buffer, buffers=tuple(map(without_mesh, buffer.buffers)))


# Descriptions as JSON.


def encode(value: Any) -> Json:
    """Returns a description as JSON."""
    # NumPy's numbers become Python's, which JSON knows.
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is tuple:
        return {"tuple": [encode(entry) for entry in value]}
    name = name_of(type(value))
    # A class that was defined inside a function cannot be found by its name: only save the name.
    if pytree.is_component(type(value)) and find_class(name) is type(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"part": name, "fields": {key: encode(entry) for key, entry in fields.items()}}
    return {"named": name_of(value)}


def decode(node: Json, where: str = "buffer") -> Any:
    """Returns the description that JSON encodes; raises `UnknownError` for unknown classes."""
    if not isinstance(node, dict):
        return node
    if "tuple" in node:
        parts = node["tuple"]
        return tuple(decode(part, f"{where}[{number}]") for number, part in enumerate(parts))
    if "named" in node:
        raise UnknownError(
            f"{where}: the checkpoint names {node['named']}, but holds no code. Build the buffer "
            "as it was saved, and pass it: load(path, buffer=...)."
        )
    cls = find_class(node["part"])
    if cls is None or not pytree.is_component(cls):
        raise UnknownError(
            f"{where}: expected a part that this program has defined, got {node['part']}. Import "
            "its module first, or pass load(path, buffer=...)."
        )
    fields = {key: decode(part, f"{where}.{key}") for key, part in node["fields"].items()}
    # Options that the part did not have when it was saved get their defaults.
    names = {field.name for field in dataclasses.fields(cls)}
    if not names - _defaults_of(cls).keys() <= fields.keys() <= names:
        raise UnknownError(
            f"{where}: {node['part']} has other fields than it had when it was saved, "
            f"{sorted(fields)}. Pass load(path, buffer=...)."
        )
    return _construct(cls, fields, where)


def _defaults_of(cls: Any) -> dict[str, Any]:
    fields = dataclasses.fields(cls) if pytree.is_component(cls) else ()
    return {it.name: it.default for it in fields if it.default is not dataclasses.MISSING}


def _construct(cls: Any, fields: dict[str, Any], where: str) -> Any:
    try:
        return cls(**fields)
    except Exception as error:  # whatever the constructors of somebody's classes raise
        raise ValueError(f"{where}: {error}") from error


@contextlib.contextmanager
def read_from(path: str) -> Iterator[None]:
    """Returns a context whose errors become errors about a file, with its path in the message."""
    try:
        yield
    except UnknownError as error:
        raise UnknownError(f"{path}: {error}") from error
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{path}: expected what fits together: {error}") from error


# Is it the same description?


def match_description(path: str, saved: Json, given: Any, kind: type) -> Any:
    """Returns the saved description, which must be a `kind`; or the given one if it is the same.

    Batch size, `min_size`, `cast`, `requires_mask` and transforms may differ, as no state depends
    on them, except for transforms that have a state.
    """
    if given is None:
        with read_from(path):
            description = decode(saved)
            if not isinstance(description, kind):
                raise ValueError(f"buffer: expected a {kind.__name__}, got {_short(saved)}")
            return description
    lines = _differences(drop_unbound_options(saved), drop_unbound_options(encode(given)), "buffer")
    if lines:
        raise OtherError(
            f"load: {lines[0]}. Build the buffer as it was saved, leave buffer= out, or change "
            "capacity and num_envs by load(..., capacity=, num_envs=)."
        )
    return given


def drop_unbound_options(node: Json) -> Json:
    """Returns an encoded description without the options on which no state depends.

    Options that its parts did not have when it was saved have their defaults.
    """
    if isinstance(node, list):
        return [drop_unbound_options(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    if "fields" not in node:
        return {key: drop_unbound_options(entry) for key, entry in node.items()}
    cls = find_class(node["part"])
    free = {"batch_size", "transforms", "min_size", "cast", "requires_mask"}
    if cls is not None and issubclass(cls, Storage | StatefulTransform):
        free |= set(cls.unbound)
    fields = {name: encode(value) for name, value in _defaults_of(cls).items()} | node["fields"]
    bound = {
        name: drop_unbound_options(entry) for name, entry in fields.items() if name not in free
    }
    # The state depends on all transforms up to the last one that has a state.
    transforms = fields.get("transforms")
    parts = transforms.get("tuple", []) if isinstance(transforms, dict) else []
    classes = [find_class(it.get("part", "")) if isinstance(it, dict) else None for it in parts]
    stateful = [cls is not None and issubclass(cls, StatefulTransform) for cls in classes]
    if any(stateful):
        bound["transforms"] = drop_unbound_options(parts[: len(parts) - stateful[::-1].index(True)])
    return {"part": node["part"], "fields": bound}


def _differences(saved: Json, given: Json, where: str) -> list[str]:
    """Returns a line about each difference of two encoded descriptions, functions excepted."""
    if isinstance(saved, dict) and isinstance(given, dict):
        if "named" in saved and "named" in given:
            return []
        pairs = []
        if "fields" in saved and saved.get("part") == given.get("part"):
            old, new = saved["fields"], given["fields"]
            names = sorted(old.keys() | new.keys())
            pairs = [(old.get(key), new.get(key), f"{where}.{key}") for key in names]
        elif "tuple" in saved and len(saved["tuple"]) == len(given.get("tuple", ())):
            entries = enumerate(zip(saved["tuple"], given["tuple"], strict=True))
            pairs = [(*pair, f"{where}[{number}]") for number, pair in entries]
        if pairs:
            return [line for pair in pairs for line in _differences(*pair)]
    if saved == given:
        return []
    return [f"{where}: expected {_short(saved)} as it was saved, got {_short(given)}"]


def _short(node: Json) -> str:
    if isinstance(node, dict):
        return str(node.get("part") or node.get("named") or node)
    return repr(node)


# Names of classes and functions.


def name_of(thing: PyTree) -> str:
    """Returns `module:name` of a class or function; of another thing, that of its class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"


def find_class(name: str) -> type | None:
    """Returns the class of this name, if its module is imported; None if there is none."""
    module, _, path = name.partition(":")
    # Never an import: a file could name any module.
    cls: Any = sys.modules.get(module)
    for part in path.split("."):
        cls = getattr(cls, part, None)
    return cls if isinstance(cls, type) else None


# Structures of items.


def encode_structure(tree: Item) -> Json:
    """Returns the structure, shapes and dtypes of a pytree of `jax.ShapeDtypeStruct`s as JSON."""
    # Decode it as a test: otherwise a class that its fields cannot rebuild fails only in `load`.
    node = _encode_node(tree)
    try:
        is_same = jax.tree.structure(decode_structure(node)) == jax.tree.structure(tree)
    except Exception:  # whatever the constructors of somebody's classes raise
        is_same = False
    if is_same:
        return node
    leaves = [_encode_node(leaf) for leaf in jax.tree.leaves(tree)]
    return {"unknown": str(jax.tree.structure(tree)), "leaves": leaves}


def _encode_node(tree: Item) -> Json:
    if isinstance(tree, jax.ShapeDtypeStruct):
        raw = casting.raw_spec(tree)
        nbytes = raw.size * raw.dtype.itemsize  # for those who read the file without JAX
        return {"leaf": [dtype_name(tree.dtype), list(tree.shape), nbytes]}
    if tree is None:
        return {"none": True}
    if type(tree) is dict and all(isinstance(key, str | int) for key in tree):
        return {"dict": [[key, _encode_node(entry)] for key, entry in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_encode_node(entry) for entry in tree]}
    names = _field_names(type(tree))
    if names is None:
        return {"unknown": str(type(tree))}
    fields = [[name, _encode_node(getattr(tree, name))] for name in names]
    return {"class": name_of(type(tree)), "fields": fields}


def decode_structure(node: Json) -> Any:
    """Returns the pytree of `jax.ShapeDtypeStruct`s that was encoded."""
    if "leaf" in node:
        name, shape, _ = node["leaf"]
        return jax.ShapeDtypeStruct(tuple(shape), dtype_of(name))
    if "none" in node:
        return None
    if "dict" in node:
        return {key: decode_structure(entry) for key, entry in node["dict"]}
    if "list" in node:
        return [decode_structure(entry) for entry in node["list"]]
    if "tuple" in node:
        return tuple(decode_structure(entry) for entry in node["tuple"])
    if "unknown" in node:
        raise UnknownError(
            f"the items were of the structure {node['unknown']}, which no file can hold. Pass one "
            "transition: load(path, example=...)."
        )
    cls = find_class(node["class"])
    fields = {name: decode_structure(entry) for name, entry in node["fields"]}
    if cls is None or _field_names(cls) != list(fields):
        raise UnknownError(
            f"expected the class {node['class']} with the fields {list(fields)}, which the items "
            "were of. Import its module first, or pass one transition: load(path, example=...)."
        )
    return _construct(cls, fields, "items")


def _field_names(cls: Any) -> list[str] | None:
    """Returns the fields of a class of named tuples, or of a dataclass; None for any other."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    fields = getattr(cls, "_fields", None)
    return None if fields is None else list(fields)


def dtype_name(dtype: DType) -> str:
    """Returns a name such as `bfloat16`, or `key:threefry2x32` for keys."""
    if casting.is_keys(dtype):
        return f"key:{casting.implementation(dtype)}"
    return str(np.dtype(dtype))


def dtype_of(name: str) -> Any:
    """Returns the dtype of a name."""
    kind, _, implementation = name.partition(":")
    try:
        dtype = casting.dtype_of(implementation) if kind == "key" else jnp.dtype(name)
    except (KeyError, TypeError) as error:
        raise UnknownError(f"expected a dtype that JAX knows, got {name!r}.") from error
    if kind != "key" and (dtype.kind in "OSUMm" or dtype.fields is not None):
        raise UnknownError(f"expected a dtype of numbers, got {name!r}.")
    return dtype


# Objects of a `ListStorage`, by msgpack: JSON's types, bytes, tuples and arrays, but no code. Each
# save writes all of them: a list with a blob for each slot, empty for a slot without an object.

_TUPLE, _NUMPY, _SCALAR, _JAX = range(4)  # msgpack's extension types


def pack_objects(slots: np.ndarray, objects: Iterable[Any], capacity: int) -> bytes:
    """Returns the bytes of objects that are at some of N slots."""
    msgpack, blobs = wording.require("msgpack", "objects"), [b""] * capacity
    pack = functools.partial(msgpack.packb, unicode_errors="surrogatepass")

    def pack_extension(kind: int, value: list[Any]) -> Any:
        return msgpack.ExtType(kind, pack(value))

    for slot, value in zip(slots.tolist(), objects, strict=True):
        where = f"the object in slot {slot}"
        try:
            blobs[slot] = pack(_to_msgpack(value, where, pack_extension))
        except (RecursionError, ValueError) as error:  # msgpack's own limit is a ValueError
            raise ValueError(
                f"save: {where}: expected lists and dicts that end, got one that holds itself, or "
                "is too deep."
            ) from error
    return pack(blobs)


def _to_msgpack(value: Any, where: str, extension: Callable[[int, list[Any]], Any]) -> Any:
    """Returns an object of msgpack's own types, with extension types for tuples and arrays."""
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    # The range of msgpack; `type` and not `isinstance`, as a subclass would come back as an int.
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return extension(*_array_to_msgpack(value, where))
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        entries = [_to_msgpack(one, f"{where}[{n}]", extension) for n, one in enumerate(value)]
        return entries if type(value) is list else extension(_TUPLE, entries)
    odd_keys = [key for key in value if type(key) is not str] if type(value) is dict else []
    if type(value) is dict and not odd_keys:
        return {key: _to_msgpack(one, f"{where}[{key!r}]", extension) for key, one in value.items()}
    name = name_of(type(value)).replace(":", ".")
    why = f" with the key {odd_keys[0]!r}" if odd_keys else ""
    why = " of more than 64 bits" if type(value) is int else why
    raise TypeError(
        f"save: {where}: expected None, numbers, str, bytes, lists, tuples, dicts with str keys, "
        f"or arrays, got {name}{why}. Store it as one of these."
    )


def _array_to_msgpack(value: Any, where: str) -> tuple[int, list[Any]]:
    """Returns the extension type of an array, and its dtype, shape and bytes."""
    dtype, is_own = value.dtype, False
    # Times and strings have a unit or a length in their code, which their name lacks.
    by_code = not casting.is_keys(dtype) and dtype.kind in "SUMm"
    name = dtype.str if by_code else dtype_name(dtype)
    with contextlib.suppress(UnknownError):
        is_own = _dtype_from_msgpack(name) == dtype
    is_array = isinstance(value, jax.Array | np.generic) or type(value) is np.ndarray
    if not is_own or not is_array or isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"save: {where}: expected an array of numbers, got a {type(value).__name__} of "
            f"dtype {dtype}. Store its fields, or np.asarray of it."
        )
    kind = _JAX if isinstance(value, jax.Array) else _SCALAR
    kind = _NUMPY if isinstance(value, np.ndarray) else kind
    return kind, [name, list(value.shape), np.asarray(casting.raw(value)).tobytes()]


def unpack_objects(path: str, data: Any, device: Device) -> tuple[np.ndarray, list[Any]]:
    """Returns the slots and the objects whose bytes `pack_objects` returned."""
    msgpack = wording.require("msgpack", "objects")

    def unpack(data: Any) -> Any:
        return msgpack.unpackb(data, ext_hook=from_extension, unicode_errors="surrogatepass")

    def from_extension(kind: int, data: Any) -> Any:
        value = unpack(data)
        return tuple(value) if kind == _TUPLE else _array_from_msgpack(kind, value, device)

    try:
        blobs = unpack(data)
        # No object packs to an empty blob: None has a byte.
        slots = np.array([slot for slot, blob in enumerate(blobs) if blob], np.int64)
        return slots, [unpack(blobs[slot]) for slot in slots]
    except (ValueError, RecursionError) as error:  # all errors of msgpack are below ValueError
        raise DamagedError(f"{path}: expected objects, got {error!r}.") from error


def _array_from_msgpack(
    kind: int, value: list[Any], device: Device
) -> np.ndarray | np.generic | jax.Array:
    name, shape, data = value
    dtype = _dtype_from_msgpack(name)
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


def _dtype_from_msgpack(name: str) -> Any:
    return np.dtype(name) if name[1:2] in (*"SUMm",) else dtype_of(name)
