"""All steps, or all episodes, through a function, into a new dataset on the disk.

K episodes, T steps.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import operator
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import reduction
from typing import Any

import jax
import numpy as np

from jrb._util import casting, checks, pytree
from jrb._util.pytree import PyTree
from jrb.datasets.blocks import Episodes
from jrb.datasets.format import Episode, rows_of
from jrb.datasets.progress import track
from jrb.datasets.reading.vectorized import is_set
from jrb.datasets.recording.dataset_writer import DatasetWriter
from jrb.datasets.writing.atomic_write import new_folder
from jrb.iterate import prefetch
from jrb.layouts.names import Leaves, flatten

_BLOCK = 4 << 20  # bytes of steps that are mapped together
_MOST = 4096  # steps that are mapped together
_REWARD, _TERMINATED, _TRUNCATED = "next/reward", "next/terminated", "next/truncated"
_DONE, _VALID = "next/done", "next/valid"

Function = Callable[[Any], Any]

Mapped = tuple[Leaves, np.ndarray, np.ndarray]
"""Leaves `[T, ...]` by name; the steps that end an episode, bool `[T]`; and the numbers of the
source's episodes that end there, int64."""


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """Steps that were not mapped.

    Attributes:
        place: of the step in the block.
        error: that the function raised, or its process.
        is_of_process: True if a process failed.
    """

    place: int
    error: Exception
    is_of_process: bool = False


Result = Leaves | Failure | None
"""The leaves of a block by name; None for an episode that is left out."""

Call = Callable[[Function, Episode], Result]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The arguments of `Dataset.preprocess`."""

    function: Function
    workers: int
    num_frames: int | None
    by: str
    jit: bool
    cast: bool
    progress: bool | None

    def __post_init__(self) -> None:
        checks.choice("by", self.by, ("step", "episode"))
        checks.flag("jit", self.jit)
        checks.flag("cast", self.cast)
        if not callable(self.function):
            raise TypeError(f"function: expected a function, got {self.function!r}.")
        if self.num_frames is not None:
            checks.count("num_frames", self.num_frames)
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 0:
            raise ValueError(f"workers: expected a number of at least 0, got {self.workers!r}.")
        if self.jit and (self.workers or self.by != "step"):
            raise ValueError(
                f"jit: expected workers=0 and by='step', got workers={self.workers} and "
                f"by={self.by!r}: a function of JAX is mapped over blocks of steps, in this "
                "process."
            )
        if self.workers and not _can_be_sent(self.function):
            raise TypeError(
                f"function: expected one that other processes can import, got {self.function!r}. "
                "Put it at the top of a module, or leave workers= out."
            )


def preprocess(dataset: Episodes, dest: Any, plan: Plan) -> None:
    """Maps steps or episodes; see `Dataset.preprocess`."""
    mapped = (_by_step if plan.by == "step" else _by_episode)(dataset, plan)
    with new_folder(dest) as folder, contextlib.closing(mapped):
        target, kept = DatasetWriter(folder), [np.zeros(0, np.int64)]
        for leaves, is_last, numbers in mapped:
            target.append(_with_flags(leaves, is_last), is_last)
            kept.append(numbers)
        facts = {name: fact[np.concatenate(kept)] for name, fact in dataset.facts.items()}
        target.finish(facts, dataset.metadata, dataset.notes)


def _by_step(dataset: Episodes, plan: Plan) -> Generator[Mapped, None, None]:
    """Maps steps, block by block."""
    bounds, total = np.cumsum(dataset.lengths), int(dataset.lengths.sum())
    total = min(total, plan.num_frames or total)
    kept = np.flatnonzero((dataset.lengths > 0) & (bounds - dataset.lengths < total))
    ends = np.minimum(bounds[kept], total)
    rows = max(1, min(_MOST, _BLOCK // max(pytree.nbytes(dataset.spec), 1)))
    call = _Compiled(plan.function, plan.cast, dataset.spec, rows) if plan.jit else _mapped
    start, checked = 0, _Checked()

    def where(place: int) -> str:
        episode = int(np.searchsorted(bounds, start + place, side="right"))
        step = start + place - (int(bounds[episode - 1]) if episode else 0)
        return f"episode {episode}, step {step}"

    with track(total, "preprocessing", plan.progress) as advance:
        tasks = _limited(dataset.steps(rows), total)
        for block, result in _in_order(call, plan.function, tasks, plan.workers):
            leaves, stop = checked(result, where) or {}, start + rows_of(block)
            inside = (ends > start) & (ends <= stop)
            is_last = np.zeros(stop - start, bool)
            is_last[ends[inside] - 1 - start] = True
            if "valid" in block["next"]:
                leaves[_VALID] = block["next"]["valid"]
            yield leaves, is_last, kept[inside]
            advance(stop - start)
            start = stop


def _by_episode(dataset: Episodes, plan: Plan) -> Generator[Mapped, None, None]:
    """Maps episodes, one by one."""
    numbers = np.flatnonzero(dataset.lengths > 0)
    steps, checked = 0, _Checked()
    with track(len(numbers), "preprocessing", plan.progress) as advance:
        tasks = (episode for episode in dataset if rows_of(episode))
        mapped = _in_order(_mapped_episode, plan.function, tasks, plan.workers)
        for number, (episode, result) in zip(numbers, mapped, strict=False):
            leaves = checked(result, lambda place, number=number: f"episode {number}")
            advance(1)
            if leaves is None:
                continue
            if "valid" in episode["next"] and _VALID not in leaves:
                valid = np.ones(len(leaves[_REWARD]), bool)
                valid[-1] = episode["next"]["valid"][-1]
                leaves = {**leaves, _VALID: valid}
            count = len(leaves[_REWARD])
            if plan.num_frames is not None:
                count = min(count, plan.num_frames - steps)
            is_last = np.arange(1, count + 1) == count
            yield {name: leaf[:count] for name, leaf in leaves.items()}, is_last, np.array([number])
            steps += count
            if steps == plan.num_frames:
                break


def _limited(blocks: Iterator[Episode], steps: int) -> Iterator[Episode]:
    """Returns the blocks up to so many steps."""
    for block in blocks:
        count = min(rows_of(block), steps)
        if not count:
            return
        steps -= count
        yield jax.tree.map(operator.itemgetter(slice(count)), block)


def _with_flags(leaves: Leaves, is_last: np.ndarray) -> Leaves:
    """Returns the leaves with flags, where steps that end an episode are done."""
    terminated = is_set(leaves[_TERMINATED])
    truncated = is_set(leaves[_TRUNCATED]) | (is_last & ~terminated)
    kept = {name: leaf for name, leaf in leaves.items() if name != _DONE}
    return {**kept, _TERMINATED: terminated, _TRUNCATED: truncated}


# Calls of the function.


def _mapped(function: Function, block: Episode) -> Result:
    """Maps a block of steps, one by one."""
    steps: list[Leaves] = []
    for row in range(rows_of(block)):
        try:
            steps.append(_flat(function(jax.tree.map(operator.itemgetter(row), block))))
            _check_like(steps[0], steps[-1])
        except Exception as error:
            return Failure(row, error)
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def _mapped_episode(function: Function, episode: Episode) -> Result:
    """Maps an episode; None if the function returns that."""
    try:
        result = function(episode)
        if result is None:
            return None
        leaves = _flat(result)
        lengths = {name: leaf.shape[0] if leaf.ndim else None for name, leaf in leaves.items()}
        if len(set(lengths.values())) != 1 or lengths[next(iter(lengths))] in (None, 0):
            raise ValueError(
                "expected arrays [T, ...] of one length, at least 1, or None to leave the episode "
                f"out, got lengths {lengths}."
            )
        return leaves
    except Exception as error:
        return Failure(0, error)


def _flat(item: PyTree) -> Leaves:
    """Returns the arrays of what a function returned, by name."""
    leaves = flatten(jax.tree.map(np.asarray, item), "function")
    for name, leaf in leaves.items():
        if leaf.dtype.kind in "OSUMm" or leaf.dtype.fields is not None:
            raise TypeError(
                f"leaf '{name}': expected numbers, got dtype {leaf.dtype}. Encode it, or leave it "
                "out."
            )
    return leaves


class _Compiled:
    """Maps blocks of steps by a function of JAX, all in the shape of the first.

    Raises:
        TypeError: steps with numbers of 64 bits, which JAX would make ones of 32.
    """

    def __init__(self, function: Function, cast: bool, spec: PyTree, rows: int) -> None:
        self._function, self._rows, self._cast = jax.jit(jax.vmap(function)), rows, cast
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
            if not cast and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
                raise TypeError(
                    f"preprocess: leaf '{pytree.leaf_name(path)}': expected a dtype that JAX "
                    f"keeps, got {leaf.dtype}. Pass cast=True, or set jax_enable_x64."
                )

    def __call__(self, function: Function, block: Episode) -> Result:
        """Maps a block; one that is shorter is filled up with its last step."""
        count = rows_of(block)
        index = np.minimum(np.arange(self._rows), count - 1)
        try:
            whole = block if count == self._rows else jax.tree.map(lambda x: x[index], block)
            whole = casting.kept(whole, "preprocess") if self._cast else whole
            leaves = _flat(self._function(whole))
            return {name: leaf[:count] for name, leaf in leaves.items()}
        except Exception as error:
            return Failure(0, error)


class _Checked:
    """Checks results: each must have the leaves, shapes and dtypes of the first."""

    def __init__(self) -> None:
        self._first: Leaves | None = None

    def __call__(self, result: Result, where: Callable[[int], str]) -> Leaves | None:
        """Returns the leaves of a result.

        Raises:
            RuntimeError: the function failed, or returned something else than before.
        """
        if result is not None and not isinstance(result, Failure):
            try:
                first = {name: leaf[0] for name, leaf in result.items()}
                _check_steps(result)
                _check_like(self._first or first, first)
                self._first = first
            except ValueError as error:
                result = Failure(0, error)
        if not isinstance(result, Failure):
            return result
        what, error = where(result.place), result.error
        text = f"{type(error).__name__}: {error}"
        if result.is_of_process:
            what = f"from {what} on"
            text = f"a process failed, not the function: {text}. With workers=, a script needs "
            text += "`if __name__ == '__main__':`."
        raise RuntimeError(f"preprocess: {what}: {text}") from error


def _check_steps(leaves: Leaves) -> None:
    """Raises unless there are reward and flags."""
    for name in (_REWARD, _TERMINATED, _TRUNCATED):
        if name not in leaves:
            raise ValueError(
                f"leaf '{name}': expected one in what the function returns, got the leaves "
                f"{sorted(leaves)}. Put back what it does not change: {{**step, ...}}."
            )
        if name != _REWARD and leaves[name].ndim != 1:
            raise ValueError(
                f"leaf '{name}': expected shape () for a step, got {leaves[name].shape[1:]}."
            )


def _check_like(first: Leaves, leaves: Leaves) -> None:
    """Raises unless two steps have the same leaves, shapes and dtypes."""
    if first.keys() != leaves.keys():
        raise ValueError(f"expected the leaves {sorted(first)}, as before, got {sorted(leaves)}.")
    for name, leaf in leaves.items():
        want = first[name]
        if want.shape != leaf.shape or want.dtype != leaf.dtype:
            raise ValueError(
                f"leaf '{name}': expected {want.dtype}{list(want.shape)}, as before, got "
                f"{leaf.dtype}{list(leaf.shape)}."
            )


# Other processes.


def _in_order(
    call: Call, function: Function, tasks: Iterable[Episode], workers: int
) -> Iterator[tuple[Episode, Result]]:
    """Returns the tasks and their results, in their order."""
    if not workers:
        yield from ((task, call(function, task)) for task in tasks)
        return
    # The thread of `prefetch` waits for the processes: an interrupt of this one harms no pool.
    with prefetch(_in_processes(call, function, tasks, workers), depth=1) as done:
        for task, future in done:
            error = future.exception()
            yield task, Failure(0, error, True) if error else future.result()


def _in_processes(
    call: Call, function: Function, tasks: Iterable[Episode], workers: int
) -> Iterator[tuple[Episode, Any]]:
    """Returns the tasks in their order, and finished futures of their results."""
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context)
    begun: collections.deque = collections.deque()
    try:
        for task in tasks:
            try:
                future = pool.submit(_call_elsewhere, call, function, task)
            except concurrent.futures.BrokenExecutor as error:
                future = concurrent.futures.Future()
                future.set_exception(error)
            begun.append((task, future))
            if len(begun) > 2 * workers:
                concurrent.futures.wait([begun[0][1]])
                yield begun.popleft()
        concurrent.futures.wait([future for _, future in begun])
        yield from begun
    finally:
        pool.shutdown(cancel_futures=True)


def _call_elsewhere(call: Call, function: Function, task: Episode) -> Result:
    """Calls the function in another process; an error takes its traceback along as a note."""
    result = call(function, task)
    if not isinstance(result, Failure):
        return result
    error = result.error if _can_be_sent(result.error) else RuntimeError(repr(result.error))
    error.add_note("".join(traceback.format_exception(result.error)))
    return Failure(result.place, error)


def _can_be_sent(thing: object) -> bool:
    """Returns True if another process can receive something, which it imports by its name."""
    try:
        pickler: Any = reduction.ForkingPickler
        pickler.loads(pickler.dumps(thing))
    except Exception:  # whatever its classes raise
        return False
    return True
