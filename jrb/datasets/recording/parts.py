"""Parts of a recording: Parquet files with one row per step, written once and never changed.

```
20260131T120000123456-name-0a1b2c3d-000000.parquet       a writer's first part, without rows
20260131T120000123456-name-0a1b2c3d-000001.parquet       its next part; numbers have no gaps
.20260131T120000123456-name-0a1b2c3d-000002.parquet.new  a part that is being written
.20260131T120000123456-name-0a1b2c3d.lock                the lock of the writer's process
```

Columns have the names of leaves in TED. `episode_index` is unique to an episode of the recording,
`step_index` is the position of the step in its episode, and `env_index` is its environment. In a
part, rows are sorted by environment, then by time. Leaves of dtypes that Arrow lacks, or of more
than 64 numbers, are columns of bytes: Parquet takes 60 ns to write each number of a list, and
images have millions. The schema's metadata holds the dtypes and shapes of all leaves.
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
from jrb.datasets.reading.arrow import explain_damage
from jrb.datasets.reading.names import check

EPISODE, STEP, ENV = "episode_index", "step_index", "env_index"
TERMINATED, TRUNCATED = "next/terminated", "next/truncated"
TYPES = {EPISODE: "int64", STEP: "int64", ENV: "int32", TERMINATED: "bool", TRUNCATED: "bool"}
"""Dtypes of the columns that a recorder adds to the leaves."""

PART_BYTES = 16 << 20
_KEY, _VERSION = b"jrb.recording", 1  # the key and version of the schema's metadata
_MOST_NUMBERS = 64  # the maximum for a column of lists; larger leaves are bytes
_GROUP = 64 << 10, 1 << 20  # the minimum and maximum bytes of a row group
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError)
_WRITER = r"\d{8}T\d{12}-[\w.-]+-[0-9a-f]{8}"
_PART = re.compile(rf"({_WRITER})-(\d{{6,}})\.parquet")
HIDDEN = re.compile(rf"\.({_WRITER})(-\d{{6,}}\.parquet\.new|\.lock)")
OWN = f"{_PART.pattern}|{HIDDEN.pattern}"
"""The names of a recorder's files in the folder of a recording."""


@dataclasses.dataclass(frozen=True)
class RecordedLeaf:
    """A leaf of the items of a recording."""

    name: str  # in TED, such as `next/reward`
    dtype: str  # the name of a NumPy dtype
    shape: tuple[int, ...]  # of one item
    key_impl: str | None = None  # if the leaf holds the words of PRNG keys, their implementation

    @functools.cached_property
    def numpy(self) -> np.dtype:
        """The NumPy dtype."""
        return np.dtype(self.dtype)

    @property
    def column(self) -> str:
        """The name of the leaf's column, `item/<name>` if a recorder's column has the name."""
        return f"item/{self.name}" if self.name in TYPES else self.name

    @functools.cached_property
    def width(self) -> int:
        """The number of bytes of one item."""
        return math.prod(self.shape) * self.numpy.itemsize

    @property
    def is_bytes(self) -> bool:
        """True if the column holds each item as bytes, not as numbers."""
        # Arrow has numbers of up to 64 bits, in NumPy's own dtypes.
        has_type = self.numpy.kind in "biuf" and self.numpy.isbuiltin == 1
        has_type &= self.numpy.itemsize <= 8
        return not has_type or math.prod(self.shape) > _MOST_NUMBERS

    @functools.cached_property
    def column_type(self) -> Any:
        """The Arrow type of the column."""
        pa = require("pyarrow", "datasets")
        if self.is_bytes:
            return pa.binary(self.width)
        number = pa.from_numpy_dtype(self.numpy)
        return pa.fixed_shape_tensor(number, self.shape) if self.shape else number

    def encode(self, values: np.ndarray) -> Any:
        """Returns `values` `[n, ...]` as an Arrow array."""
        pa, count, flat = require("pyarrow", "datasets"), len(values), values.reshape(-1)
        if self.is_bytes:
            # Arrow takes the array's memory as the values of the column, without a copy for each
            # item.
            raw = pa.py_buffer(np.ascontiguousarray(flat).view(np.uint8))
            return pa.Array.from_buffers(self.column_type, count, [None, raw])
        numbers = pa.array(flat)
        if not self.shape:
            return numbers
        # An item of several numbers is a list of fixed size over the flat numbers.
        storage = self.column_type.storage_type
        lists = pa.Array.from_buffers(storage, count, [None], children=[numbers])
        return pa.ExtensionArray.from_storage(self.column_type, lists)

    def decode(self, array: Any) -> np.ndarray:
        """Returns an Arrow array as a NumPy array `[n, ...]`, which may be read-only."""
        count = len(array)
        if self.is_bytes:
            # A slice of a column shares its buffer, and begins at an offset in it.
            start, size = array.offset * self.width, count * self.width
            flat = np.frombuffer(array.buffers()[1], np.uint8, size, start).view(self.numpy)
        else:
            array = array.storage.flatten() if self.shape else array
            flat = array.to_numpy(zero_copy_only=False)
        return flat.reshape(count, *self.shape)


@dataclasses.dataclass(frozen=True)
class RecordingSchema:
    """The contents of a schema, which all parts of a writer share."""

    num_envs: int | None  # E; None for one stream without an axis of environments
    leaves: tuple[RecordedLeaf, ...]  # the leaves of an item, without flags
    notes: tuple[str, ...]  # notes for users of the dataset
    metadata: Mapping[str, Any]  # the user's facts about the dataset
    # Facts about each episode, arrays `[K]` by name, if the dataset was written at once by
    # `Dataset.preprocess`; None if recorders write it, who may append more episodes.
    facts: Mapping[str, np.ndarray] | None = None

    @functools.cached_property
    def arrow(self) -> Any:
        """The Arrow schema. Leaves of size 0 have no column, since Parquet lacks such columns."""
        pa = require("pyarrow", "datasets")
        # The recorder's columns come first, then the leaves in the order of their names.
        types = {name: pa.from_numpy_dtype(dtype) for name, dtype in TYPES.items()}
        types |= {leaf.column: leaf.column_type for leaf in self.leaves if leaf.width}
        fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
        # The metadata in JSON describe the leaves, as Arrow's types do not tell all dtypes and
        # shapes.
        body = {"version": _VERSION, **dataclasses.asdict(self)}
        if self.facts is not None:
            body["facts"] = {name: [str(it.dtype), it.tolist()] for name, it in self.facts.items()}
        return pa.schema(fields, metadata={_KEY: json.dumps(body)})

    def encode(self, own: Mapping[str, np.ndarray], leaves: Mapping[str, np.ndarray]) -> Any:
        """Returns the bytes of a part of n rows, given the columns of `TYPES` and the leaves."""
        pa, parquet = require("pyarrow", "datasets"), require("pyarrow.parquet", "datasets")
        # Put the columns into the order of the schema.
        columns = {name: pa.array(array) for name, array in own.items()}
        columns |= {it.column: it.encode(leaves[it.name]) for it in self.leaves if it.width}
        arrays = [columns[name] for name in self.arrow.names]
        table = pa.Table.from_arrays(arrays, schema=self.arrow)
        # Readers decode whole groups, so a group should not hold rows of many environments.
        width = max(1, sum(leaf.width for leaf in self.leaves))
        least, most = _GROUP
        size = min(max(len(table) * width // (self.num_envs or 1), least), most)
        sink = pa.BufferOutputStream()
        # Dictionaries would merge different NaN. Snappy compresses at most 25-fold, so that readers
        # can reject files that declare a larger ratio.
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
    """Returns the schema of the part at `path`; raises if damaged or of a newer version."""
    with explain_damage(path):
        arrow = require("pyarrow.parquet", "datasets").read_schema(path)
    try:
        body = json.loads((arrow.metadata or {})[_KEY])
        version = body.pop("version")
        if version == _VERSION:
            # Check all sizes before arrays of these shapes are allocated.
            leaves = [{**leaf, "shape": tuple(leaf["shape"])} for leaf in body.pop("leaves")]
            sizes = [0 if body["num_envs"] is None else body["num_envs"]]
            sizes += [size for leaf in leaves for size in leaf["shape"]]
            if any(type(size) is not int or not 0 <= size < 1 << 40 for size in sizes):
                raise ValueError(f"sizes {sizes}")
            # Make facts arrays again, and compare the columns with those that the leaves need.
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
    """Returns a unique name for a writer, made of the time, `name` and random digits."""
    # Names sort by the time at which the writers began.
    now = time.time_ns() // 1000
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 1_000_000))
    return f"{moment}{now % 1_000_000:06d}-{name}-{secrets.token_hex(4)}"


def part_name(writer: str, number: int) -> str:
    """Returns the file name of a writer's part."""
    return f"{writer}-{number:06d}.parquet"


def part_counts(path: str) -> dict[str, int]:
    """Returns the number of parts of each writer, in the order in which the writers began.

    Raises `DamagedError` if a part is missing before another one.
    """
    # Collect the numbers of each writer's parts from the names of the files.
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_PART.fullmatch, sorted(os.listdir(path)))):
        numbers.setdefault(match[1], set()).add(int(match[2]))
    counts: dict[str, int] = {}
    for writer, parts in numbers.items():
        count = 0
        # A listing may miss a part that is written meanwhile and yet show a later one.
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
    """Returns True if a folder has at least one readable part of a recording."""
    parquet = require("pyarrow.parquet", "datasets")
    for name in filter(_PART.fullmatch, sorted(os.listdir(path))):
        part = os.path.join(path, name)
        # Another program's Parquet file may have such a name, so look for the metadata; a damaged
        # part is passed over.
        with contextlib.suppress(ValueError, OSError), explain_damage(part):
            if _KEY in (parquet.read_schema(part).metadata or {}):
                return True
    return False


def check_same_leaves(
    path: str, schema: RecordingSchema, writer: str, other: RecordingSchema
) -> None:
    """Raises `ValueError` unless `schema` and the schema `other` of `writer` have equal leaves."""
    # Compare keys by their implementation, for a message that names it.
    theirs, ours = (
        [(leaf.name, leaf.key_impl or leaf.dtype, leaf.shape) for leaf in each.leaves]
        for each in (other, schema)
    )
    expected = f"items as the writer '{writer}' has them, the leaves {theirs}"
    is_same, got = other.leaves == schema.leaves, f"{ours}. Record them to another path"
    check(is_same, path, expected, got)
