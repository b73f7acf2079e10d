"""Parts of a recording: Parquet files with one row per step, written once and never changed.

```
20260131T120000123456-name-0a1b2c3d-000000.parquet       of a writer: its first part has no rows
20260131T120000123456-name-0a1b2c3d-000001.parquet       the rows follow, without a gap
.20260131T120000123456-name-0a1b2c3d-000002.parquet.new  a part that is being written
.20260131T120000123456-name-0a1b2c3d.lock                held by the process that writes
```

Columns have the names of leaves in TED. `episode_index` is a number that no other episode of the
recording has, `step_index` the position of the step in its episode, `env_index` its environment.
In a part, rows are sorted by environment, then by time. Numbers that Arrow has no type for, and
more than 64 of them in a step, are columns of bytes: Parquet takes 60 ns to write each number of a
list, and images have millions. The metadata of the schema has the dtypes and shapes of all leaves.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrb.authoring import require
from jrb.checkpoint import DamagedError
from jrb.datasets.reading.arrow import refused

EPISODE, STEP, ENV = "episode_index", "step_index", "env_index"
TERMINATED, TRUNCATED = "next/terminated", "next/truncated"
TYPES = {EPISODE: "int64", STEP: "int64", ENV: "int32", TERMINATED: "bool", TRUNCATED: "bool"}
"""Dtypes of the columns that a recorder adds to the leaves."""

PART_BYTES = 16 << 20
_KEY, _VERSION = b"jrb.recording", 1  # of the metadata
_MOST_NUMBERS = 64  # that a list column has per step
_GROUP = 64 << 10, 1 << 20  # bytes of a row group, at least and at most
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError)
_WRITER = r"\d{8}T\d{12}-[\w.-]+-[0-9a-f]{8}"
_PART = re.compile(rf"({_WRITER})-(\d{{6,}})\.parquet")
HIDDEN = re.compile(rf"\.({_WRITER})(-\d{{6,}}\.parquet\.new|\.lock)")


@dataclasses.dataclass(frozen=True)
class RecordedLeaf:
    """A leaf of the items of a recording."""

    name: str  # in TED, such as `next/reward`
    dtype: str  # of NumPy
    shape: tuple[int, ...]  # of one item
    key_impl: str | None = None  # the implementation of PRNG keys, whose words the numbers are

    @functools.cached_property
    def numpy(self) -> np.dtype:
        """The dtype."""
        return np.dtype(self.dtype)

    @property
    def column(self) -> str:
        """The name of the column."""
        return f"item/{self.name}" if self.name in TYPES else self.name

    @functools.cached_property
    def width(self) -> int:
        """Bytes of one item."""
        return math.prod(self.shape) * self.numpy.itemsize

    @property
    def is_bytes(self) -> bool:
        """True if the column holds the bytes of the numbers."""
        has_type = self.numpy.kind in "biuf" and self.numpy.isbuiltin == 1
        has_type &= self.numpy.itemsize <= 8
        return not has_type or math.prod(self.shape) > _MOST_NUMBERS

    @functools.cached_property
    def column_type(self) -> Any:
        """The type of the column in Arrow."""
        pa = require("pyarrow", "datasets")
        if self.is_bytes:
            return pa.binary(self.width)
        number = pa.from_numpy_dtype(self.numpy)
        return pa.fixed_shape_tensor(number, self.shape) if self.shape else number

    def encode(self, values: np.ndarray) -> Any:
        """Returns `values` `[n, ...]` as an array of Arrow."""
        pa, count, flat = require("pyarrow", "datasets"), len(values), values.reshape(-1)
        if self.is_bytes:
            raw = pa.py_buffer(np.ascontiguousarray(flat).view(np.uint8))
            return pa.Array.from_buffers(self.column_type, count, [None, raw])
        numbers = pa.array(flat)
        if not self.shape:
            return numbers
        storage = self.column_type.storage_type
        lists = pa.Array.from_buffers(storage, count, [None], children=[numbers])
        return pa.ExtensionArray.from_storage(self.column_type, lists)

    def decode(self, array: Any) -> np.ndarray:
        """Returns an array of Arrow as NumPy's `[n, ...]`, which may be read-only."""
        count = len(array)
        if self.is_bytes:
            start, size = array.offset * self.width, count * self.width
            flat = np.frombuffer(array.buffers()[1], np.uint8, size, start).view(self.numpy)
        else:
            array = array.storage.flatten() if self.shape else array
            flat = array.to_numpy(zero_copy_only=False)
        return flat.reshape(count, *self.shape)


@dataclasses.dataclass(frozen=True)
class RecordingSchema:
    """All that the parts of a writer have in common."""

    num_envs: int | None  # E; None for one stream without an axis of environments
    leaves: tuple[RecordedLeaf, ...]  # of an item, in TED, without flags
    notes: tuple[str, ...]  # sentences for readers
    metadata: Mapping[str, Any]  # of the user
    # Arrays of one number per episode, by name, of a dataset that was written as a whole; None if
    # recorders write it, and may add to it.
    facts: Mapping[str, np.ndarray] | None = None

    @functools.cached_property
    def arrow(self) -> Any:
        """The schema in Arrow. Leaves without numbers have no column, as Parquet has none."""
        pa = require("pyarrow", "datasets")
        types = {name: pa.from_numpy_dtype(dtype) for name, dtype in TYPES.items()}
        types |= {leaf.column: leaf.column_type for leaf in self.leaves if leaf.width}
        fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
        body = {"version": _VERSION, **dataclasses.asdict(self)}
        if self.facts is not None:
            body["facts"] = {name: [str(it.dtype), it.tolist()] for name, it in self.facts.items()}
        return pa.schema(fields, metadata={_KEY: json.dumps(body)})

    def encode(self, own: Mapping[str, np.ndarray], leaves: Mapping[str, np.ndarray]) -> Any:
        """Returns the bytes of a part: arrays `[n]` of `TYPES`, and `[n, ...]` of leaves."""
        pa, parquet = require("pyarrow", "datasets"), require("pyarrow.parquet", "datasets")
        columns = {name: pa.array(array) for name, array in own.items()}
        columns |= {it.column: it.encode(leaves[it.name]) for it in self.leaves if it.width}
        arrays = [columns[name] for name in self.arrow.names]
        table = pa.Table.from_arrays(arrays, schema=self.arrow)
        # A reader of one environment decodes whole groups, so a group is at most one of those.
        width = max(1, sum(leaf.width for leaf in self.leaves))
        least, most = _GROUP
        size = min(max(len(table) * width // (self.num_envs or 1), least), most)
        sink = pa.BufferOutputStream()
        # Dictionaries would make all NaN one. Snappy makes no data more than 25 times smaller, so
        # that readers can refuse files that declare to be.
        parquet.write_table(
            table,
            sink,
            row_group_size=max(1, size // width),
            compression="snappy",
            use_dictionary=[EPISODE, ENV],
            write_statistics=[EPISODE, STEP, ENV],
            write_page_checksum=True,
        )
        return sink.getvalue()


def schema_of(path: str) -> RecordingSchema:
    """Returns the schema of the part at `path`; raises `ValueError` if it is damaged or newer."""
    with refused(path):
        arrow = require("pyarrow.parquet", "datasets").read_schema(path)
    try:
        body = json.loads((arrow.metadata or {})[_KEY])
        version = body.pop("version")
        if version == _VERSION:
            leaves = [{**leaf, "shape": tuple(leaf["shape"])} for leaf in body.pop("leaves")]
            sizes = [0 if body["num_envs"] is None else body["num_envs"]]
            sizes += [size for leaf in leaves for size in leaf["shape"]]
            if any(type(size) is not int or not 0 <= size < 1 << 40 for size in sizes):
                raise ValueError(f"sizes {sizes}")
            facts = body.pop("facts")
            if facts is not None:
                facts = {name: np.array(it[1], it[0]).reshape(-1) for name, it in facts.items()}
            body |= {"notes": tuple(map(str, body["notes"])), "metadata": dict(body["metadata"])}
            specs = tuple(RecordedLeaf(**leaf) for leaf in leaves)
            schema = RecordingSchema(leaves=specs, facts=facts, **body)
            if arrow.equals(schema.arrow) and leaves:
                return schema
            raise ValueError(f"columns that are not those of {leaves}")
    except _NONSENSE as error:
        raise DamagedError(f"{path}: expected a part of a recording, got {error!r}.") from error
    raise ValueError(
        f"{path}: expected version {_VERSION} or older, got version {version!r}. A newer jrb wrote "
        "it; install that one."
    )


def new_writer_name(name: str) -> str:
    """Returns a name for a writer that no other one has."""
    now = time.time_ns() // 1000
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 1_000_000))
    return f"{moment}{now % 1_000_000:06d}-{name}-{secrets.token_hex(4)}"


def part_name(writer: str, number: int) -> str:
    """Returns the name of a part."""
    return f"{writer}-{number:06d}.parquet"


def is_own(name: str) -> bool:
    """Returns True for the names of files that recorders write, below the path of a recording."""
    return bool(_PART.fullmatch(name) or HIDDEN.fullmatch(name))


def part_counts(path: str) -> dict[str, int]:
    """Returns the number of parts of each writer, in the order in which the writers began.

    Raises `DamagedError` if a part is missing before another one.
    """
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_PART.fullmatch, sorted(os.listdir(path)))):
        numbers.setdefault(match[1], set()).add(int(match[2]))
    counts: dict[str, int] = {}
    for writer, parts in numbers.items():
        count = 0
        # A listing may miss a part that is written meanwhile, and show the next one.
        while count in parts or os.path.isfile(os.path.join(path, part_name(writer, count))):
            count += 1
        if max(parts) > count:
            raise DamagedError(
                f"{path}: expected parts without a gap, got no {part_name(writer, count)} before "
                f"{part_name(writer, max(parts))}."
            )
        counts[writer] = count
    return counts


def is_recording(path: str) -> bool:
    """Returns True if a folder has a part of a recording; the others may be damaged."""
    parquet = require("pyarrow.parquet", "datasets")
    for name in filter(_PART.fullmatch, sorted(os.listdir(path))):
        part = os.path.join(path, name)
        with contextlib.suppress(ValueError, OSError), refused(part):
            if _KEY in (parquet.read_schema(part).metadata or {}):
                return True
    return False


def check_same_leaves(
    path: str, schema: RecordingSchema, writer: str, other: RecordingSchema
) -> None:
    """Raises `ValueError` unless `schema` has the leaves that another writer has."""
    if other.leaves != schema.leaves:
        theirs, ours = (
            [(leaf.name, leaf.key_impl or leaf.dtype, leaf.shape) for leaf in each.leaves]
            for each in (other, schema)
        )
        raise ValueError(
            f"{path}: expected items as the writer '{writer}' has them, the leaves {theirs}, got "
            f"{ours}. Record them to another path."
        )
