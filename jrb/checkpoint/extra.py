"""What a user saves in one generation with a buffer: parameters, keys, the number of a step."""

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jrb._store.errors import DamagedError
from jrb._store.generation import Generation
from jrb._util import casting, pytree
from jrb._util.pytree import Leaf
from jrb._xla import compat
from jrb.checkpoint import descriptions, rows, schema
from jrb.checkpoint.manifest import EXTRA
from jrb.types import Item

_NUMBER = bool | int | float | complex
_SORTS = {
    bool: jnp.bool_,
    int: jnp.integer,
    float: jnp.floating,
    complex: jnp.complexfloating,
}


@dataclasses.dataclass(frozen=True)
class ExtraData:
    """What stands in a generation besides the state.

    Attributes:
        meta: for JSON.
        kinds: of its arrays, by name.
        arrays: their bytes.
    """

    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)


def of(extra: Item, copy: bool) -> ExtraData:
    """A pytree of arrays and numbers, to be saved.

    Args:
        extra: None for nothing.
        copy: whether its bytes are copied now, so that it may change.

    Raises:
        TypeError: a leaf is neither.
    """
    if extra is None:
        return ExtraData()
    kinds, arrays = {}, {}
    for name, leaf in schema.by_name(extra).items():
        array = _array(name, leaf)
        kinds[EXTRA + name] = list(schema.kind_of(array))
        held = rows.array_bytes(_whole(array))
        arrays[EXTRA + name] = bytes(held) if copy else held
    return ExtraData({"extra": list(kinds)}, kinds, arrays)


def _whole(array: Leaf) -> Any:
    """The array; of one that other processes have parts of, all parts, which all ask for."""
    raw = casting.raw(array)
    if not isinstance(raw, jax.Array) or raw.is_fully_addressable or raw.is_fully_replicated:
        return array
    return multihost_utils.process_allgather(raw, tiled=True)


def _array(name: str, leaf: Leaf) -> Any:
    array: Any = np.asarray(leaf) if isinstance(leaf, _NUMBER) else leaf
    if isinstance(array, jax.core.Tracer) or not pytree.is_array(array):
        raise TypeError(
            f"save: extra: leaf '{name}': expected an array or a number, got "
            f"{type(leaf).__name__}. Encode it, or leave it out."
        )
    if not casting.is_keys(array.dtype) and np.dtype(array.dtype).kind in "OSUMm":
        raise TypeError(f"save: extra: leaf '{name}': expected numbers, got dtype {array.dtype}.")
    return array


def restored(path: str, opened: Generation, meta: dict[str, Any], example: Item) -> Any:
    """What was saved, in the structure of an example, whose leaves say what becomes of each.

    Raises:
        ValueError: other leaves, dtypes or shapes than were saved; or nothing was.
    """
    names = meta.get("extra")
    if names is None:
        raise ValueError(
            f"{path}: extra: expected a checkpoint that was saved with extra=, got one without."
        )
    wanted, entries = schema.by_name(example), opened.arrays
    odd = sorted(set(names) ^ {EXTRA + name for name in wanted})
    if odd:
        saved = [name.removeprefix(EXTRA) for name in names]
        raise ValueError(
            f"{path}: extra: leaf '{odd[0].removeprefix(EXTRA)}': expected the leaves {saved}, "
            f"got an example with {list(wanted)}."
        )
    if not set(names) <= entries.keys():
        raise DamagedError(f"{path}: extra: expected the arrays {names}, found {sorted(entries)}.")
    leaves = [_restored(opened, *leaf) for leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(example), leaves)


def _restored(opened: Generation, name: str, example: Leaf) -> Any:
    """One leaf: a Python number, an array of NumPy, or one of JAX where the example lies."""
    entry = opened.arrays[EXTRA + name]
    wanted = example if _is_spec(example) else _array(name, _as_wide(example, entry["kind"]))
    if entry["kind"] != list(schema.kind_of(wanted)):
        raise ValueError(
            f"{opened.path}: extra: leaf '{name}': expected {entry['kind']} as it was saved, got "
            f"an example of {list(schema.kind_of(wanted))}."
        )
    raw = casting.raw_spec(wanted)
    array = opened.array(EXTRA + name, raw.dtype).reshape(raw.shape)
    if isinstance(example, _NUMBER):
        return type(example)(array.item())
    if isinstance(example, np.ndarray | np.generic):
        return array if isinstance(example, np.ndarray) else array[()]
    device = example.sharding if compat.is_committed(example) else None
    return jax.device_put(casting.wrapped(jax.numpy.asarray(array), wanted.dtype), device)


def _as_wide(example: Leaf, kind: list[str]) -> Any:
    """A Python number in the dtype of a number of its sort that was saved; else the example.

    A count of steps becomes an array of 32 bits where it goes through `jit`.
    """
    if not isinstance(example, _NUMBER) or kind[1] != "[]":
        return example
    sort = next(sort for type_, sort in _SORTS.items() if isinstance(example, type_))
    dtype = descriptions.dtype_of(kind[0])
    return np.zeros((), dtype) if jnp.issubdtype(dtype, sort) else example


def _is_spec(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
