"""Tables for Arrow and pandas of the items in a buffer: a row for each transition.

K items, N capacity, E environments.

Rows go from the oldest item to the newest. The columns are `slot`; `environment`, if the writer
keeps the order of time; `episode`, its number in `jrb.episodes`, and `step`, the position among the
held rows of the episode, if episodes are known; `priority`, if the sampler has priorities; and the
leaves of items under their names, such as `next/reward`, or `.` for items that are one array. A
leaf called like a column before these, such as `step`, is the column `item/step`.

No value is lost. A dtype that tables do not have is converted to one with all its values: bfloat16
and float8 to float32, integers of less than 8 bits to 8 bits, PRNG keys to their uint32 words.
"""

from typing import Any

import jax
import numpy as np

from jrb import read
from jrb._util import casting, checks, pytree, wording
from jrb._util.pytree import DType
from jrb.buffer import ReplayBuffer
from jrb.state import BufferState
from jrb.types import Item

Columns = dict[str, np.ndarray]
"""Arrays `[K, ...]` by the names of columns."""


def to_arrow(buffer: ReplayBuffer, state: BufferState, chunks: int | None = None) -> Any:
    """Returns all items, oldest first, as a table of Arrow; see `jrb.tables` for its columns.

    Leaves with axes are fixed-shape tensors; complex numbers get a last axis of real and imaginary
    parts. If the type of a field is not the leaf's dtype, the field's metadata has that as
    `jrb.dtype`, such as `bfloat16`, `complex64` or `key:threefry2x32`. Parquet cannot read back
    tensors without numbers, of shape `[0]`.

    Args:
        buffer: the description.
        state: is only read, some megabytes at a time.
        chunks: the number of rows in a batch, if not all fit into memory; None for all at once.

    Returns:
        A `pyarrow.Table` in chunks of some megabytes; or, with `chunks`, a
        `pyarrow.RecordBatchReader`, which reads each batch when it is asked for.

    Raises:
        TypeError: the buffer is a `Mix`, or its items are objects.
        ValueError: states are batched by `vmap`, or two leaves have the same name.
        ModuleNotFoundError: pyarrow is not installed.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer, state = jrb.from_items({"x": jnp.arange(6).reshape(3, 2), "y": jnp.ones(3)})
        >>> table = jrb.to_arrow(buffer, state)
        >>> table.column_names, table["x"].to_pylist()[1]
        (['slot', 'environment', 'x', 'y'], [2, 3])
    """
    pa = wording.require("pyarrow", "tables")
    if chunks is not None:
        checks.count("chunks", chunks)
    slots, facts = _fact_columns("to_arrow", buffer, state)
    if buffer.storage.of_objects:
        raise TypeError(
            "to_arrow: expected items of arrays, got objects. jrb.to_pandas has a column for them."
        )
    # Make the schema: columns of facts, then leaves, with the dtype as metadata if it was changed.
    spec = buffer.item_spec(state)
    fields = [pa.field(name, pa.from_numpy_dtype(leaf.dtype)) for name, leaf in facts.items()]
    for name, leaf in zip(_column_names(spec), jax.tree.leaves(spec), strict=True):
        raw = casting.raw_spec(leaf)
        words, shape = _real_parts(_table_dtype(raw.dtype), raw.shape)
        kind = pa.from_numpy_dtype(words)
        is_keys = casting.is_keys(leaf.dtype)
        own = f"key:{casting.implementation(leaf.dtype)}" if is_keys else str(np.dtype(leaf.dtype))
        metadata = None if own == str(words) else {"jrb.dtype": own}
        fields.append(
            pa.field(name, pa.fixed_shape_tensor(kind, shape) if shape else kind, metadata=metadata)
        )
    schema = pa.schema(fields)
    # Read batches of 32 MB: items are copied from the device one batch at a time.
    row_bytes = pytree.nbytes(jax.tree.map(casting.raw_spec, spec))
    size = chunks or max(1, (32 << 20) // max(row_bytes, 1))

    def batch(rows: slice) -> Any:
        columns = {name: leaf[rows] for name, leaf in facts.items()}
        columns |= _leaf_columns(buffer, state, slots[rows])
        arrays = [_arrow_array(pa, field.type, columns[field.name]) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    batches = (batch(slice(start, start + size)) for start in range(0, len(slots), size))
    reader = pa.RecordBatchReader.from_batches(schema, batches)
    return reader if chunks is not None else reader.read_all()


def to_pandas(buffer: ReplayBuffer, state: BufferState) -> Any:
    """Returns all items, oldest first, as a pandas frame; see `jrb.tables` for its columns.

    A leaf of one number is a column of its dtype. A leaf with axes, or of PRNG keys, is a column
    that has a NumPy array `[...]` in each row. Objects are in the column `item`.

    Args:
        buffer: the description.
        state: is only read.

    Returns:
        A `pandas.DataFrame` of K rows, numbered from 0.

    Raises:
        TypeError: the buffer is a `Mix`.
        ValueError: as for `to_arrow`.
        ModuleNotFoundError: pandas is not installed.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> items = {"next": {"reward": jnp.arange(4.0), "done": jnp.arange(4) % 2 == 1}}
        >>> frame = jrb.to_pandas(*jrb.from_items(items))
        >>> frame.groupby("episode")["next/reward"].sum().tolist()
        [1.0, 5.0]
    """
    pandas = wording.require("pandas", "tables")
    slots, columns = _fact_columns("to_pandas", buffer, state)
    if buffer.storage.of_objects:
        columns["item"] = _object_column(read.take_items(buffer, state, slots))
    else:
        columns |= _leaf_columns(buffer, state, slots)
    cells = lambda leaf: leaf if leaf.ndim == 1 else _object_column(leaf)
    return pandas.DataFrame({name: cells(leaf) for name, leaf in columns.items()})


def _fact_columns(who: str, buffer: ReplayBuffer, state: BufferState) -> tuple[np.ndarray, Columns]:
    """Returns the slots that hold items, oldest first; and the columns that are not leaves."""
    # Environments, episodes and priorities are columns only if the buffer has them.
    slots = read.held_slots(buffer, state, who)
    facts = {"slot": slots}
    if buffer.writer.is_chronological:
        facts["environment"] = slots % buffer.ring.envs
    if read.has_episodes(buffer, state):
        # Number the rows by slot, as episodes are not in the order of `slots`.
        number, step = np.zeros((2, buffer.capacity), np.int32)
        for count, each in enumerate(read.episodes(buffer, state)):
            number[each.slots], step[each.slots] = count, np.arange(len(each), dtype=np.int32)
        facts |= {"episode": number[slots], "step": step[slots]}
    if buffer.sampler.prioritized:
        facts["priority"] = np.asarray(buffer.priorities(state))[slots]
    return slots, facts


def _column_names(spec: Item) -> list[str]:
    """Returns the column name of each leaf."""
    ours = ("slot", "environment", "episode", "step", "priority")
    names = [f"item/{name}" if name in ours else name for name in pytree.leaf_names(spec)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"expected leaves with a name of their own each, got columns {names}. Read "
            "jrb.items, and rename some."
        )
    return names


def _leaf_columns(buffer: ReplayBuffer, state: BufferState, slots: np.ndarray) -> Columns:
    """Returns the leaves of items at slots, in dtypes that tables have."""
    leaves = jax.tree.leaves(read.take_items(buffer, state, slots))
    pairs = zip(_column_names(buffer.item_spec(state)), leaves, strict=True)
    return {name: leaf.astype(_table_dtype(leaf.dtype), copy=False) for name, leaf in pairs}


def _table_dtype(dtype: DType) -> np.dtype:
    """Returns a NumPy dtype for tables that holds all values of `dtype`."""
    dtype = np.dtype(dtype)
    # The value 1 marks a dtype of NumPy itself, which Arrow and pandas know too.
    if dtype.isbuiltin == 1:
        return dtype
    if jax.numpy.issubdtype(dtype, np.floating):
        return np.dtype(np.float32)
    signed = jax.numpy.issubdtype(dtype, np.signedinteger)
    return np.dtype(np.int8 if signed else np.uint8)


def _object_column(rows: Any) -> np.ndarray:
    """Returns an array of objects `[K]`, each a row."""
    # Row by row: NumPy would make one array of rows of one shape.
    cells = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        cells[number] = row
    return cells


def _arrow_array(pa: Any, kind: Any, leaf: np.ndarray) -> Any:
    """Returns a leaf `[K, ...]` as an array of the type `kind`."""
    words, shape = _real_parts(leaf.dtype, leaf.shape)
    flat = pa.array(np.ascontiguousarray(leaf).reshape(-1).view(words))
    if len(shape) == 1:
        return flat
    # Wrap the numbers without a copy: the list has no offsets, as all rows have one length.
    lists = pa.Array.from_buffers(kind.storage_type, len(leaf), [None], children=[flat])
    return pa.ExtensionArray.from_storage(kind, lists)


def _real_parts(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
    """Returns dtype and shape of an array after complex numbers became pairs of real ones."""
    if dtype.kind != "c":
        return dtype, shape
    return np.dtype(f"f{dtype.itemsize // 2}"), (*shape, 2)
