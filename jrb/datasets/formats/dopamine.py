"""The format of Dopamine's replay buffers, such as the DQN replay data set (`replay_logs`).

A folder has a gzipped `.npy` file for each array and checkpoint N: `$store$_observation_ckpt.N.gz`,
and the same for `action`, `reward`, `terminal` and further arrays. `add_count_ckpt.N.gz` is the
number of rows that the ring ever got, and so says where its oldest row is. Before each episode come
`stack_size - 1` rows of zeros. K episodes, T steps, n rows of a checkpoint.

References: Castro et al., Dopamine, 2018, `circular_replay_buffer.py`; Agarwal et al., An
Optimistic Perspective on Offline RL, 2020.
"""

import contextlib
import dataclasses
import functools
import gzip
import itertools
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.reading import tabular
from jrb.datasets.reading.names import check, explain_damage, to_ted
from jrb.datasets.reading.tabular import FLAGS, TERMINATED, TRUNCATED, Table, TableFormat
from jrb.keys import Keys, within

_STORE, _COUNT, _RANGE, _ENDS = "$store$_", "add_count", "invalid_range", "episode_end_indices"
_FILE = re.compile(r"(.+)_ckpt\.(\d+)\.gz")
# A pickled set of NumPy's int64, and one of its entries: 8 bytes, and references to the class.
_ENTRY = rb"C\x08(.{8})\x94\x86\x94R\x94(?:\x90|\(|h.|\x95.{8})*"
_SET = rb"\x80[\x04\x05](?:\x95.{8})?\x8f\x94(?:\(.{1,99}?(?=C\x08))?(?:%b)*\." % _ENTRY

_DAMAGE = (OSError, EOFError, zlib.error, ValueError)
_explain_damage = functools.partial(
    explain_damage, expected="a whole gzipped .npy array", errors=_DAMAGE
)

Files = Mapping[int, Mapping[str, str]]
"""The paths of the files of each checkpoint, by the part of their names before `_ckpt`."""


@dataclasses.dataclass(frozen=True)
class Dopamine(TableFormat):
    """Replay buffers that Dopamine saved or logged, read as episodes from the oldest row on.

    Checkpoints of one ring are joined: an episode continues in the next checkpoint if that begins
    with the next row, and rows that both have are read once. Else the episode is cut. Episodes end
    at `terminal`, and where Dopamine 4 noted other ends. Files are decompressed in blocks; to read
    an episode by its number, its file is decompressed up to it.

    Attributes:
        checkpoints: the numbers of the checkpoints to read; None for all.
        mapping: as in `Arrays`, with the names between `$store$_` and `_ckpt`.
    """

    name: ClassVar[str] = "dopamine"
    looks_for: ClassVar[str] = "a folder with $store$_observation_ckpt.0.gz and its siblings"
    own_files: ClassVar[str] = r"[^/]+_ckpt\.\d+\.gz"

    checkpoints: tuple[int, ...] | None = None
    mapping: Mapping[str, Any] | Keys | None = None
    # The most that gzip can reach. Frames that hardly change come near it; they are read in blocks.
    max_expansion: float = dataclasses.field(default=1032.0, repr=False, kw_only=True)

    def matches(self, source: Source) -> bool:
        """Returns True if the folder has files of Dopamine's arrays."""
        return bool(_files_of(source))

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the files as a table, whose rows are decompressed when they are read."""
        # All checkpoints must have the same arrays, and the count of rows.
        present = _files_of(source)
        files = {number: present.get(number, {}) for number in sorted(self.checkpoints or present)}
        arrays = sorted({name for own in files.values() for name in own if _STORE in name})
        for number, own in files.items():
            where, got = f"{source}: checkpoint {number}", f"{sorted(own)}. Choose checkpoints="
            check({*arrays, _COUNT} <= own.keys(), where, f"files of {[_COUNT, *arrays]}", got)
        leaves = to_ted([name.removeprefix(_STORE) for name in arrays], self.mapping, source)
        tabular.check_roles_present(source, leaves, ("observation", "action"))
        paths = [path for own in files.values() for path in own.values()]
        with contextlib.ExitStack() as stack:
            every: dict[str, GzippedColumn] = {}
            for name, leaf in leaves.items():
                every[leaf] = GzippedColumn([own[_STORE + name] for own in files.values()])
                stack.callback(every[leaf].close)
            # Check the sizes that the headers declare, before rows are read.
            lengths = {leaf: column.starts[1:] for leaf, column in every.items()}
            is_right = len({*map(str, lengths.values())}) == 1
            check(is_right, source, "arrays of one length in each checkpoint", lengths)
            ExpansionLimit(source, paths, self.max_expansion).add(declared_nbytes(every))
            # Find the rows that are steps, and show all columns in their order.
            columns, texts, left_out = tabular.sort_arrays(every)
            left_out |= {*texts, *(name for own in files.values() for name in own)} - {*arrays}
            read = functools.partial(_read_steps, source, files, columns)
            rows, table = tabular.read_once(paths, (self.name, *sorted(leaves.items())), read)
            steps = {leaf: tabular.rows_at(column, rows) for leaf, column in columns.items()}
            left_out -= {_COUNT, _RANGE, _ENDS}
            yield dataclasses.replace(table, columns={**steps, **table.columns}, left_out=left_out)


def _files_of(source: Source) -> dict[int, dict[str, str]]:
    """Returns the files of each checkpoint that has arrays, in the order of their numbers."""
    files: dict[int, dict[str, str]] = {}
    is_folder = isinstance(source, str) and os.path.isdir(source)
    for match in map(_FILE.fullmatch, sorted(os.listdir(source)) if is_folder else ()):
        if match:
            files.setdefault(int(match[2]), {})[match[1]] = os.path.join(source, match[0])
    # Files of such names without arrays belong to another program.
    has_array = lambda own: any(name.startswith(_STORE) for name in own)
    return {number: own for number, own in sorted(files.items()) if has_array(own)}


def _rows_in_order(
    files: Files, starts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, dict[int, bool]]:
    """Returns the rows of the files in order of time, and those that Dopamine 4 notes as ends.

    Also returns the indices of those before which rows are in no file, True if there are none.
    """
    rows, ends, breaks, newest, size = [], [], dict[int, bool](), -1, 0
    for own, begin, end in zip(files.values(), starts[:-1], starts[1:], strict=True):
        count = int(GzippedColumn([own[_COUNT]])[0:1][0])
        # A full ring begins at its cursor; rows from the cursor of another on were never written.
        place = np.arange(min(count, end - begin)) + (count if count > end - begin else 0)
        # A checkpoint continues the one before if it has the next row that the ring got.
        oldest, skip = count - len(place), 0
        if oldest <= newest < count:
            skip = newest - oldest
        else:
            breaks[size] = newest < 0 and oldest == 0
        # Wrap around the end of the ring, without rows that the checkpoint before has too.
        rows.append(begin + place[skip:] % (end - begin))
        # The ends are a pickled set, which is parsed, as unpickling could run code.
        if _ENDS in own:
            with gzip.open(own[_ENDS]) as file:
                pickled = file.read()
            is_set = re.fullmatch(_SET, pickled, re.DOTALL)
            check(is_set, own[_ENDS], "a set of NumPy's int64", "another. Remove it to do without")
            numbers = b"".join(re.findall(_ENTRY, pickled, re.DOTALL))
            ends.append(begin + np.frombuffer(numbers, "<i8"))
        newest, size = count, size + len(rows[-1])
    return np.concatenate(rows), np.concatenate([[], *ends]), breaks


def _read_steps(
    source: Source, files: Files, columns: Mapping[str, Any]
) -> tuple[np.ndarray, Table]:
    """Returns the rows of the files that are steps, int64 `[T]`, and a table of their flags."""
    starts = next(iter(columns.values())).starts
    rows, noted_rows, breaks = _rows_in_order(files, starts)
    check(len(rows), source, "steps", "none")
    is_zero, flags = _read_small_arrays(source, columns, rows)
    terminated, truncated = tabular.combine_flags(len(rows), *map(flags.get, FLAGS))
    # Episodes end where that is noted, and before rows that are in no file.
    is_end = terminated | truncated | np.isin(rows, noted_rows)
    is_last = is_end | np.isin(np.arange(1, len(rows) + 1) % len(rows), [*breaks])
    # The K episodes, and if their first and last steps are there.
    stops = np.flatnonzero(is_last) + 1
    begins = np.append(0, stops[:-1])
    has_first = ~np.isin(begins, [*breaks])
    has_last, lengths = is_end[stops - 1], stops - begins
    # Rows of zeros before the first step are padding; `invalid_range` tells how many there can be.
    first_files = next(iter(files.values()))
    most = 15
    if _RANGE in first_files:
        most = max(0, len(GzippedColumn([first_files[_RANGE]])) - 2)
    nonzero = np.append(np.flatnonzero(~is_zero), len(rows))
    zeros = np.minimum(nonzero[np.searchsorted(nonzero, begins)] - begins, lengths - has_last)
    padding = _padding(np.minimum(zeros, most), begins, has_first, has_last, rows, columns)
    is_step = np.arange(len(rows)) >= np.repeat(begins + padding, lengths)
    # An episode may have nothing but padding, at the end of a ring.
    has_steps = lengths > padding
    number = np.array([*files])[np.searchsorted(starts, rows[begins], "right") - 1]
    # Where a part of the padding is there, so is the first step.
    is_new = (begins == 0) & breaks[0] & ~padding.any()
    complete = (has_first | (padding > 0) | is_new) & has_last
    facts = {"checkpoint": number[has_steps], "complete": complete[has_steps]}
    notes = (f"{padding.max()} rows of zeros before each episode are left out.",) * any(padding)
    if len(breaks) > 1:
        later = number[np.isin(begins, [*breaks][1:])].tolist()
        notes += (f"Checkpoints {later} do not go on where others end: episodes are cut there.",)
    flags = {TERMINATED: terminated[is_step], TRUNCATED: (is_last & ~terminated)[is_step]}
    ends = np.cumsum(lengths - padding)[has_steps]
    return rows[is_step], Table(flags, ends, facts, notes=notes)


def _read_small_arrays(
    source: Source, columns: Mapping[str, Any], rows: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Reads flags, actions and rewards; returns which rows are zeros in all, `[T]`, and flags."""
    is_zero, flags = np.ones(len(rows), bool), dict[str, np.ndarray]()
    for leaf, column in columns.items():
        if leaf in FLAGS or within(leaf, "action") or within(leaf, "next/reward"):
            small = tabular.rows_at(column, rows)[:]
            is_zero &= ~small.reshape(len(rows), -1).any(axis=1)
            if leaf in FLAGS:
                flags[leaf] = tabular.flag_column(small, leaf, source)[:]
    check(flags, source, "an array 'terminal'", sorted(columns))
    return is_zero, flags


def _padding(
    counts: np.ndarray,
    begins: np.ndarray,
    has_first: np.ndarray,
    has_last: np.ndarray,
    rows: np.ndarray,
    columns: Mapping[str, Any],
) -> np.ndarray:
    """Returns how many of the `counts` rows without action and reward are no steps, `[K]`."""
    seen = [column for leaf, column in columns.items() if within(leaf, "observation")]

    def zero_frames(episode: Any, most: int) -> int:
        at = rows[begins[episode] :][:most]
        frames = [tabular.rows_at(column, at)[:] for column in seen]
        is_seen = [each.reshape(len(at), -1).any(axis=1) for each in frames]
        return int(np.append(np.any(is_seen, axis=0), True).argmax())

    is_whole = has_first & has_last
    # All whole episodes have the same number. Actions and rewards of some first steps are zeros
    # too; the observations, which are large, are read of one episode only.
    if is_whole.any():
        most = int(counts[is_whole].min())
        most = zero_frames(is_whole.argmax(), most) if most else 0
        counts = np.minimum(counts, most)
    for episode in np.flatnonzero(~(has_first & is_whole.any()) & (counts > 0)):
        counts[episode] = zero_frames(episode, counts[episode])
    return counts


class GzippedColumn:
    """The rows of the arrays in several files, one after the other; one file is open at a time.

    Only the rows that are read are in memory. To go on in a file, all between is decompressed; to
    go back, all from its beginning on. A single number counts as one row. `starts` has the first
    row of each file, and the number of all rows.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths, self._number, self._begin = paths, -1, 0  # of the open file, its first row
        self._file: Any = None
        # Read the header of each file; all must have rows like those of the first.
        with contextlib.closing(self):
            headers = [self._open(number) for number in range(len(paths))]
        self.dtype: np.dtype = headers[0][0]
        _, *row = headers[0][1]
        for path, (dtype, shape) in zip(paths, headers, strict=True):
            is_same = dtype == self.dtype and [*shape[1:]] == row
            check(is_same, path, f"rows as in {paths[0]}, {self.dtype}{row}", f"{dtype}{shape[1:]}")
        self.starts: list[int] = [0, *itertools.accumulate(shape[0] for _, shape in headers)]
        self.shape: tuple[int, ...] = (self.starts[-1], *row)
        self._last = -1, np.empty((0, *row), self.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        # Blocks of steps overlap by a row, which has the next observation of the row before. It is
        # kept, as the file would have to be decompressed again to go back.
        parts = [self._last[1] if start == self._last[0] < stop else self._last[1][:0]]
        start += len(parts[0])
        # Read the rows that each file has of these.
        for number, (begin, end) in enumerate(itertools.pairwise(self.starts)):
            if max(start, begin) < min(stop, end):
                parts.append(self._read(number, max(start, begin) - begin, min(stop, end) - begin))
        block = np.concatenate(parts)
        self._last = (stop - 1, block[-1:].copy()) if len(block) else self._last
        return block

    def close(self) -> None:
        """Closes the open file."""
        if self._file is not None:
            self._file.close()
        self._number, self._file = -1, None

    def _open(self, number: int) -> tuple[np.dtype, tuple[int, ...]]:
        """Opens a file in place of the open one; returns dtype and shape of its array."""
        self.close()
        with _explain_damage(self._paths[number]):
            self._file, self._number = gzip.open(self._paths[number]), number  # noqa: SIM115
            np.lib.format.read_magic(self._file)
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(self._file)
            # Rows of an array in Fortran's order are not together in the file.
            is_plain = not dtype.hasobject and (not is_fortran or len(shape) < 2)
            got = "pickled objects" if dtype.hasobject else "columns one after the other"
            check(is_plain, "data", "numbers, row by row", got)
            self._begin = self._file.tell()
        return dtype, shape or (1,)

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Reads rows of one file; raises `ValueError` if it is damaged."""
        if number != self._number:
            self._open(number)
        # Seek in decompressed bytes: gzip reads on to that place, or from the beginning to go back.
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        is_end = stop == self.starts[number + 1] - self.starts[number]
        with _explain_damage(self._paths[number]):
            self._file.seek(self._begin + start * width)
            data = self._file.read((stop - start) * width)
            # At the end of a file, gzip compares its CRC-32 with all that was read.
            is_whole = len(data) == (stop - start) * width and not (is_end and self._file.read(1))
            check(is_whole, "data", f"{stop} rows", "fewer or more")
        if is_end:
            self.close()
        return np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])
