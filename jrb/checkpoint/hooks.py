"""Functions of a user between items and the disk, and items that the user keeps."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrb._store import table
from jrb._store.errors import DamagedError
from jrb._store.generation import Generation
from jrb._store.store import Store
from jrb._store.table import Column
from jrb._util import pytree
from jrb.checkpoint import descriptions, external_items, rows, schema
from jrb.checkpoint.external_items import bytes_of
from jrb.checkpoint.rows import StateRows
from jrb.checkpoint.schema import Snapshot
from jrb.types import Item

Hook = Callable[[Any], Any]

KIND = "encoded"
"""The kind of items that a function was called for."""

_BLANK = ".blank"
_WITNESSES = 256
_COLUMN = "items/"


@dataclasses.dataclass(frozen=True)
class Outward:
    """What becomes of items in a save.

    Attributes:
        encode: a function from K items to what is written of them; None for the items themselves.
            Of several buffers also a dict, by name.
        items: whether they are written at all.
    """

    encode: Any = None
    items: bool = True

    def check(self) -> None:
        """Raises unless it makes sense."""
        if not isinstance(self.items, bool):
            raise TypeError(f"items: expected True or False, got {self.items!r}.")
        if self.encode is not None and not self.items:
            raise ValueError("encode: expected None with items=False, which writes no items.")

    @property
    def is_plain(self) -> bool:
        """Whether items are written as they are."""
        return self.encode is None and self.items


@dataclasses.dataclass(frozen=True)
class Inward:
    """Where items come from in a load.

    Attributes:
        decode: the inverse of the function that encoded them. Of several buffers also a dict.
        items: the items, where they were not saved. Of several buffers a dict or a tuple.
        verify: whether rows that stay where they are, in files, are all looked at.
        cast: whether leaves of 64 bits are converted to what JAX keeps.
    """

    decode: Any = None
    items: Item = None
    verify: bool = True
    cast: bool = False

    def check(self, path: str, form: dict[str, Any]) -> None:
        """Raises unless a checkpoint whose items are of this form needs these arguments."""
        name = form.get("encode")
        if name is not None and self.decode is None:
            raise ValueError(
                f"{path}: expected decode=, as the items were encoded by {name}. Pass its inverse: "
                "load(path, decode=...)."
            )
        if name is None and self.decode is not None:
            raise ValueError(
                f"{path}: decode: expected None, as the items were saved without encode=, got "
                f"{name_of(self.decode)}. Leave it out."
            )
        if name is not None and not callable(self.decode):
            raise TypeError(f"{path}: decode: expected a function, got {self.decode!r}.")
        is_needed = form.get("kind") == external_items.KIND
        if is_needed and self.items is None:
            raise ValueError(
                f"{path}: expected items=, as it was saved with items=False. Pass what "
                "jrb.items(buffer, state) gave then: load(path, items=...)."
            )
        if not is_needed and self.items is not None:
            raise ValueError(f"{path}: items: expected None, as the items are there. Leave it out.")


def name_of(hook: Any) -> str:
    """The name of a function; of a partial one, that of the function inside."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return descriptions.name_of(hook)


@dataclasses.dataclass(frozen=True)
class EncodedRows(StateRows):
    """Rows that are made of those of items by a function.

    They are written as what distinguishes them from the row that an item of zeros gives, by
    exclusive or: so the rows that nobody has written are zeros, here as elsewhere.

    Attributes:
        items: of which they are made.
        encode: the function.
        blank: what it makes of an item of zeros, uint8 `[1, width]` of each column.
        structure: of what it gives.
    """

    items: external_items.Items = dataclasses.field(kw_only=True)
    encode: Hook = dataclasses.field(kw_only=True)
    blank: tuple[np.ndarray, ...] = dataclasses.field(kw_only=True)
    structure: Any = dataclasses.field(kw_only=True)

    def take(self, rows: np.ndarray) -> list[np.ndarray]:
        """The bytes of rows `[B]` of each column, uint8 `[B, width]`."""
        items = self.items.take(rows)
        if all(table.is_zero(bytes_of(leaf)) for leaf in jax.tree.leaves(items)):
            return [np.zeros((len(rows), column.width), np.uint8) for column in self.columns]
        leaves = _checked(self.encode(items), self.structure, len(rows), "encode")
        pairs = zip(map(bytes_of, leaves), self.blank, strict=True)
        return [_across(leaf, blank) for leaf, blank in pairs]

    def fingerprints(self, rows: np.ndarray) -> list[np.ndarray]:
        """The bytes of the items `[B]`, which the function is not called for."""
        return list(map(bytes_of, jax.tree.leaves(self.items.take(rows))))

    def witnesses(self, store: Store, rows: np.ndarray) -> np.ndarray:
        """The newest rows and some others: another function of the same name changes most."""
        newest = rows[np.argsort(store.numbers(rows), kind="stable")[-_WITNESSES:]]
        return np.union1d(newest, rows[:: max(1, len(rows) // _WITNESSES)])

    @property
    def width(self) -> int:
        """The bytes of a row, or of the item that it is made of, whichever are more."""
        return max(super().width, pytree.nbytes(self.items.spec))


def encoded(saved: Snapshot, encode: Hook) -> EncodedRows:
    """The items of a state as a function gives them.

    Raises:
        TypeError, ValueError: it is no function, or gives something that cannot be written.
    """
    if not callable(encode):
        raise TypeError(f"encode: expected a function, got {encode!r}.")
    items = external_items.of(saved, "encode")
    one = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), items.spec)
    given = jax.tree.map(np.asarray, encode(one))
    structure = _structure_of(given)
    leaves = _checked(given, structure, 1, "encode")
    return EncodedRows(
        columns(structure, items.rows.count),
        (),
        items.rows.buffers,
        items.rows.capacity,
        items=items,
        encode=encode,
        blank=tuple(map(bytes_of, leaves)),
        structure=structure,
    )


def columns(structure: Any, count: int) -> tuple[Column, ...]:
    """The columns of so many rows that were encoded."""
    return tuple(
        Column.of(
            _COLUMN + name,
            (descriptions.dtype_name(leaf.dtype), str([count, *leaf.shape])),
            leaf.size * leaf.dtype.itemsize,
        )
        for name, leaf in schema.by_name(structure).items()
    )


def _structure_of(given: Any) -> Any:
    """What an encoded item is: `jax.ShapeDtypeStruct`s. Raises if no file can hold it."""
    if not jax.tree.leaves(given):
        raise ValueError("encode: expected arrays, got none. To leave items out, pass items=False.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        where = f"encode: leaf '{pytree.leaf_name(path)}'"
        if leaf.dtype.kind in "OSUMm" or leaf.dtype.fields is not None or not leaf.dtype.isnative:
            raise TypeError(f"{where}: expected an array of numbers, got dtype {leaf.dtype}.")
        if leaf.shape[:1] != (1,):
            raise ValueError(
                f"{where}: expected one row for each of K items, got shape {leaf.shape} for one."
            )
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), given)
    if "unknown" in descriptions.encode_structure(row):
        raise ValueError(
            "encode: expected arrays in dicts, lists, tuples, or classes that this program has "
            f"defined, got {jax.tree.structure(row)}."
        )
    return row


def _checked(given: Any, wanted: Any, count: int, who: str) -> list[np.ndarray]:
    """The leaves of what a function gave, if they are rows of that kind for so many items."""
    mend = "It has to give a row for each item, in the same structure each time."
    pytree.check_structure(wanted, given, who, mend)
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, want), leaf in zip(leaves, jax.tree.leaves(given), strict=True):
        array, shape = np.asarray(leaf), (count, *want.shape)
        where = f"{who}: leaf '{pytree.leaf_name(path)}'"
        if array.shape != shape:
            raise ValueError(f"{where}: expected shape {shape}, got {array.shape}. {mend}")
        if array.dtype != want.dtype:
            raise TypeError(f"{where}: expected dtype {want.dtype}, got {array.dtype}. {mend}")
        found.append(array)
    return found


def _across(leaf: np.ndarray, blank: np.ndarray) -> np.ndarray:
    """Rows as they are written, from rows as they are, and back."""
    return leaf if table.is_zero(blank) else leaf ^ blank


def form_of(held: EncodedRows) -> dict[str, Any]:
    """What a generation says of encoded items."""
    blank = b"".join(leaf.tobytes() for leaf in held.blank)
    return {
        "kind": KIND,
        "encode": name_of(held.encode),
        "structure": descriptions.encode_structure(held.structure),
        "blank": zlib.crc32(blank),
    }


def arrays_of(held: EncodedRows) -> dict[str, Any]:
    """What must be written beside encoded items."""
    return {_BLANK: b"".join(leaf.tobytes() for leaf in held.blank)}


def decoded(
    path: str,
    store: Store,
    generation: Generation,
    form: dict[str, Any],
    spec: Item,
    decode: Hook,
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Numbers of rows, and their items as leaves on the host; items of zeros are left out.

    Raises:
        TypeError, ValueError: the function gives something else than the items were.
    """
    structure = descriptions.decode_structure(form["structure"])
    made, specs = columns(structure, store.slots), jax.tree.leaves(structure)
    if [column.leaves for column in made] != [column.leaves for column in generation.columns]:
        raise DamagedError(f"{path}: expected encoded items like {structure}, found other columns.")
    wanted = external_items.host_spec(spec)
    blank = np.split(
        generation.array(_BLANK, np.uint8)[None], np.cumsum([c.width for c in made])[:-1], axis=1
    )

    def back(leaves: list[np.ndarray], count: int) -> list[np.ndarray]:
        rows = [
            np.ascontiguousarray(leaf).view(one.dtype).reshape(count, *one.shape)
            for leaf, one in zip(leaves, specs, strict=True)
        ]
        given = decode(jax.tree.unflatten(jax.tree.structure(structure), rows))
        return _checked(given, wanted, count, "decode")

    zero = back(blank, 1)
    is_zero = all(table.is_zero(bytes_of(leaf)) for leaf in zero)
    width = max(pytree.nbytes(wanted), pytree.nbytes(structure))
    for piece in rows.in_parts(np.arange(store.slots), width):
        if store.is_blank(piece):
            if not is_zero:
                yield piece, [np.repeat(leaf, len(piece), axis=0) for leaf in zero]
            continue
        found = store.take(store.version, [piece] * len(made))
        yield piece, back(list(map(_across, found, blank)), len(piece))
