"""The rows of a ring on a disk, which several states of a buffer share.

A state has a version, the number of rows that were written before it. All states read the same
rows; only the newest one may be written to. An older one reads rows that were not overwritten since
then, and a `StaleError` says if one was.

A write either happens, or the state before it goes on as if there had been none, also if Ctrl-C
comes in between: the rows that it overwrites are kept in memory until the next write, and are put
back. Of a write of more than 8 MB that is cut off, the rows at its slots are lost for that state;
the same write can be made again.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jrb._store.block_store import BlockStore, gate_of
from jrb._store.blocks import BlockArray, RowWrite, find_runs
from jrb._store.files import StaleError
from jrb._store.threads import PATIENCE, Gate, taken_lock

_MOST_KEPT = 8 << 20  # the bytes of overwritten rows that are kept for an undo


class SlotNumbers:
    """The numbers of the writes that changed each slot last.

    Row number n was the n-th row that was written, from 1 on. Writes in the order of time go to
    slots that follow each other around the ring, so one run describes all of them: their memory
    does not grow with the capacity. After a write in any other order, each slot has a number.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        # The number of the newest row; the number before the first row of the run, and the slot of
        # row n less n - 1; and the number of the newest row of each slot, int64 [N], if it is
        # needed. One attribute: draws of other threads read all as of one moment.
        self._state: tuple[int, int, int, np.ndarray | None] = (0, 0, 0, None)

    @property
    def newest(self) -> int:
        """The number of the newest row."""
        return self._state[0]

    def undo_of(self, slots: np.ndarray) -> Callable[[], None]:
        """Returns a function that takes back the next write, which is at slots `[B]`."""
        state = self._state
        last = state[-1]
        # A closure keeps what it mentions: the slots only where they are needed.
        saved = None if last is None else (slots, last[slots])

        def undo() -> None:
            if last is not None and saved is not None:
                last[saved[0]] = saved[1]
            self._state = state

        return undo

    def add(self, slots: np.ndarray, pieces: list[tuple[int, int]]) -> None:
        """Counts a write at slots; `pieces` are the runs of consecutive slots."""
        newest, first, shift, last = self._state
        follows = lambda shift: all(
            (newest + start + shift) % self._slots == slots.item(start) for start, _ in pieces
        )
        if last is None and (not newest or not follows(shift)):
            own_shift = (slots.item(0) - newest) % self._slots
            if follows(own_shift) and (not newest or len(slots) >= self._slots):
                first, shift = newest, own_shift  # no row of an earlier run is left
            else:
                last = np.zeros(self._slots, np.int64)
                rows = np.arange(max(first, newest - self._slots), newest)
                last[(rows + shift) % self._slots] = rows + 1
        if last is not None:
            last[slots] = newest + 1 + np.arange(len(slots))
        self._state = (newest + len(slots), first, shift, last)

    def is_after(self, version: int, slots: np.ndarray) -> np.ndarray:
        """Returns which slots were written after a version, bool like `slots`."""
        newest, first, shift, last = self._state
        if last is not None:
            return last[slots] > version
        # The slots from that of the first later row of the run on, as many as there were rows.
        start = max(first, version)
        return (slots - (start + shift) % self._slots) % self._slots < newest - start


@dataclasses.dataclass
class ArrayWrite:
    """The part of a write that goes to one array.

    Attributes:
        array: the array.
        slots: integers `[B]`, distinct.
        rows: uint8 `[B, width]`.
        pieces: the runs of consecutive slots.
        keep: True if an undo needs the rows before, however many there are, and though no state
            has rows at the slots of the write.
    """

    array: BlockArray
    slots: np.ndarray
    rows: np.ndarray
    pieces: list[tuple[int, int]]
    keep: bool = False


@dataclasses.dataclass
class LastWrite:
    """The write that was made last, to take it back.

    Attributes:
        version: the version before it.
        slots: integers `[B]`; none if no state has rows there.
        rows: the rows that were there before and are kept: array, slots, and uint8 `[B, width]`.
        is_kept: False if there were too many rows.
        lost: the slots whose rows were lost before it.
        forget: takes the write out of the numbers.
        thread: the identifier of the thread that made it.
        is_over: False while it is being made; it stays False if it was cut off.
        ending: a lock that is released when it is over or was cut off.
    """

    version: int
    slots: np.ndarray
    rows: list[tuple[BlockArray, np.ndarray, np.ndarray]]
    is_kept: bool
    lost: np.ndarray
    forget: Callable[[], None]
    thread: int
    is_over: bool = False
    ending: threading.Lock = dataclasses.field(default_factory=taken_lock)


class SharedRows:
    """The rows of some arrays of a store, of which each has N.

    Attributes:
        store: the store.
        names: the names of the arrays.
        drawing: tracks draws and single reads, for which writes of other threads wait; that of all
            stores of this process that have the same path.
    """

    def __init__(self, store: BlockStore, names: list[str]) -> None:
        self.store: BlockStore = store
        self.names: list[str] = names
        self.drawing: Gate = gate_of(store.path)
        self._arrays = [store.arrays[name] for name in names]
        self._slots = self._arrays[0].spec.rows
        self._numbers = SlotNumbers(self._slots)
        self._last: LastWrite | None = None
        self._lost = np.zeros(0, np.int64)  # slots of a write that was cut off
        self._num_undone = 0  # the writes that were taken back
        self._num_changes = 0  # odd while rows are being written, or taken back
        self._first_unwritten = self.reach

    @property
    def version(self) -> int:
        """The version of the newest state."""
        return self._numbers.newest

    @property
    def reach(self) -> int:
        """The slot from which on nothing was ever written; rows there are zeros."""
        return max(array.reach for array in self._arrays)

    # Reading.

    def read_rows(self, version: int, slots: list[np.ndarray], first: int = 0) -> list[np.ndarray]:
        """Returns rows of the arrays from `first` on, uint8 `[B, width]`, each at its slots `[B]`.

        Slots are signed integers. Rows that no state has are zeros, or those of a write that was
        taken back. Raises `StaleError` if a row was overwritten after the version.
        """
        with self.drawing.enter():
            while True:
                if self.store.is_ousted:  # the other store may have shortened the files
                    raise self._stale_error()
                self._undo_cut_write()
                before = self._marks()
                rows = self._gather(slots, first)
                # Checked after the reads, as a row may have been overwritten meanwhile.
                if version != self._numbers.newest or self.store.is_ousted or len(self._lost):
                    for at in {id(at): at for at in slots}.values():
                        self._check_unchanged(version, at)
                # Another thread may have moved a block meanwhile, and reused its position; or a
                # write was cut off and taken back, some of whose rows were read.
                if before == self._marks():
                    return rows

    def _marks(self) -> list[Any]:
        """Returns numbers that differ after a read if its rows may be of different moments."""
        return [self._num_undone, *(array.moves for array in self._arrays)]

    def _gather(self, slots: list[np.ndarray], first: int = 0) -> list[np.ndarray]:
        """Returns rows of the arrays from `first` on, each at its slots, without any check."""
        # Mostly, all arrays are read at the same slots.
        highest = {id(at): at.item(at.argmax()) if at.size else -1 for at in slots}
        pairs = zip(self._arrays[first:], slots, strict=False)
        return [array.read_rows(at, highest[id(at)]) for array, at in pairs]

    def _check_unchanged(self, version: int, slots: np.ndarray) -> None:
        """Raises `StaleError` if a row is lost, or may be of a later version."""
        is_gone = self._numbers.is_after(version, slots)
        if len(self._lost):
            is_gone |= np.isin(slots, self._lost)
        if self.store.is_ousted or is_gone.any():
            raise self._stale_error()

    def _stale_error(self) -> StaleError:
        return StaleError(
            f"{self.store.path}: expected a state whose rows are still there, got one of which "
            "some that were asked for were overwritten since. Draw from the state that the last "
            "write returned, or load the path again."
        )

    def prepare_commit(self, version: int) -> None:
        """Raises `StaleError` if rows are lost, or newer ones; `store.turn` is held."""
        self.check_newest(version)
        if len(self._lost):
            raise StaleError(
                f"{self.store.path}: expected whole rows, found some that were lost, as a write "
                "failed. Make that write again, or load the path to go on from what was saved last."
            )

    def check_newest(self, version: int) -> None:
        """Raises `StaleError` unless this is the version of the newest state."""
        self._undo_cut_write()
        if self.store.is_ousted or version != self.version:
            raise StaleError(
                f"{self.store.path}: expected the newest state, got one that has been written to "
                "before. States share their rows on the host: go on with the state that the last "
                "write returned, or the one that was loaded last."
            )

    # Writing.

    def write_rows(
        self, version: int, slots: np.ndarray, rows: list[np.ndarray], patient: bool = True
    ) -> int:
        """Writes rows, uint8 `[B, width]` of every array, at distinct slots, signed integers `[B]`.

        Returns the version of the new state. If it fails, nothing has changed. If `patient`, the
        write waits for draws of other threads.
        """
        # A save is inside too, and needs the turn for its commit: it is waited for without.
        if patient:
            self.drawing.wait()
        with self.store.turn:
            self.store.ensure_writer()
            self.check_newest(version)
            if not len(slots):
                return version
            pieces = find_runs(slots)
            plan = self._plan(slots, rows, pieces)
            # Blocks that no state reads yet are written first: only these need room on the disk.
            writes: list[RowWrite] = []
            try:
                for it in plan:  # one after the other, so that all can be cancelled
                    write = it.array.begin_write(it.slots, it.rows, it.pieces)
                    writes.append(write)
                if patient:
                    self.drawing.wait()
                last = self._overwritten(version, slots, plan)
            except BaseException:
                for write in writes:
                    write.cancel()
                raise
            self._last = last  # from here on, a write that is cut off is taken back
            try:
                self._num_changes += 1  # odd from here on
                self._numbers.add(slots, pieces)
                for write in writes:
                    write.finish()
                self._num_changes += 1
                last.is_over = True
            finally:
                last.ending.release()
            if len(self._lost):
                self._lost = np.setdiff1d(self._lost, slots)
            return self.version

    def _plan(
        self, slots: np.ndarray, rows: list[np.ndarray], pieces: list[tuple[int, int]]
    ) -> list[ArrayWrite]:
        """Returns the writes into all arrays; `pieces` are the runs of consecutive slots."""
        pairs = zip(self._arrays, rows, strict=True)
        return [ArrayWrite(array, slots, part, pieces) for array, part in pairs]

    def _overwritten(self, version: int, slots: np.ndarray, plan: list[ArrayWrite]) -> LastWrite:
        """Returns the facts by which the next write can be undone."""
        num_bytes = sum(len(it.slots) * it.array.spec.width for it in plan)
        is_new = slots.item(slots.argmin()) >= self._first_unwritten
        is_kept = is_new or num_bytes <= _MOST_KEPT
        before = [
            (it.array, it.slots, it.array.read_rows(it.slots))
            for it in plan
            if it.keep or (is_kept and not is_new)
        ]
        self._first_unwritten = max(self._first_unwritten, slots.item(slots.argmax()) + 1)
        forget = self._numbers.undo_of(slots)
        slots = slots[:0] if is_new else slots
        thread = threading.get_ident()
        return LastWrite(version, slots, before, is_kept, self._lost, forget, thread)

    def undo_last_write(self, version: int) -> None:
        """Undoes the last write if this thread made it, to the state of this version.

        It is for a write that was interrupted after it had happened, so that no state includes it.
        """
        with self.store.turn:
            last = self._last
            if (
                last is not None
                and last.thread == threading.get_ident()
                and last.version == version
            ):
                last.is_over = False
                self._undo_cut_write()

    def _undo_cut_write(self) -> None:
        """Takes back a write that was cut off, if there is one."""
        last = self._last
        if last is None or last.is_over or self.store.is_ousted:
            return
        # Another thread may be making the write just now. A draw does not wait for its `turn`: the
        # thread may take that for its next write, and wait for this draw to be over.
        if last.thread != threading.get_ident() and last.ending.acquire(timeout=PATIENCE):
            last.ending.release()
        if last.is_over:
            return
        with self.store.turn:
            last = self._last
            # Another thread has taken it back meanwhile, or the files are another store's.
            if last is None or last.is_over or self.store.is_ousted:
                return
            self._num_changes |= 1
            for array in self._arrays:  # a block may have moved without being counted
                array.moves += 1
            for array, slots, rows in last.rows:
                array.write_rows(slots, rows)
            self._lost = last.lost if last.is_kept else np.union1d(last.lost, last.slots)
            self._num_undone += 1  # before the version is the old one again; see `read_rows`
            last.forget()
            self._num_changes += 1
            self._last = None
