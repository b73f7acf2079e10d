"""All steps, or all episodes, through a function, into a new dataset on the disk.

K episodes, T steps.
"""

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler as Travel
from typing import Any, Protocol

import jax
import numpy as np

from jrb._base import casting, checks, pytree
from jrb.datasets.copying import progress
from jrb.datasets.copying.new_dataset import NewDataset
from jrb.datasets.kind import Episode
from jrb.datasets.kinds.native.saved import VALID
from jrb.datasets.reading.rings import is_set
from jrb.layouts.names import Leaves, flatten, nest

_BLOCK = 4 << 20  # bytes of steps that are on their way together
_MOST = 4096  # steps of them
_REWARD, _TERMINATED, _TRUNCATED = "next/reward", "next/terminated", "next/truncated"
_DONE = "next/done"

Function = Callable[[Any], Any]
Found = tuple[np.ndarray, np.ndarray]
"""Where episodes end, int64 `[K]`, the steps up to there; and which ones of the source they are."""


class Episodes(Protocol):
    """What is asked of a dataset."""

    def __len__(self) -> int:
        """K."""
        ...

    def __iter__(self) -> Iterator[Episode]:
        """Its episodes."""
        ...

    @property
    def spec(self) -> Any:
        """Of one step."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[K]`."""
        ...

    @property
    def facts(self) -> Mapping[str, np.ndarray]:
        """Arrays `[K]` by name."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the files say of themselves."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know."""
        ...

    def steps(self, rows: int | None = None) -> Iterator[Episode]:
        """All steps."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is to be done; see `Dataset.preprocess`."""

    function: Function
    workers: int = 0
    num_frames: int | None = None
    by: str = "step"
    jit: bool = False
    cast: bool = False
    progress: bool | None = None

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
        if self.workers and not _can_travel(self.function):
            raise TypeError(
                f"function: expected one that other processes can import, got {self.function!r}. "
                "Put it at the top of a module, or leave workers= out."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """An item that was not mapped: its place in the block, and why."""

    place: int
    error: Exception


Result = Leaves | Failure | None
"""The leaves of a block by name; None for an episode that is left out."""

Call = Callable[[Function, Episode], Result]


def preprocess(dataset: Episodes, dest: Any, plan: Plan) -> None:
    """See `Dataset.preprocess`."""
    total = int(dataset.lengths.sum())
    target = NewDataset(dest, min(total, plan.num_frames or total))
    try:
        found = _by_step if plan.by == "step" else _by_episode
        ends, kept = found(dataset, target, plan)
        facts = {name: fact[kept] for name, fact in dataset.facts.items()}
        target.finish(ends, facts, {"metadata": dataset.metadata, "notes": dataset.notes})
    finally:
        target.discard()


def _by_step(dataset: Episodes, target: NewDataset, plan: Plan) -> Found:
    """Maps steps, block by block."""
    bounds = np.cumsum(dataset.lengths)
    total = int(dataset.lengths.sum())
    total = min(total, plan.num_frames or total)
    kept = np.flatnonzero((dataset.lengths > 0) & (bounds - dataset.lengths < total))
    ends = np.minimum(bounds[kept], total)
    rows = max(1, min(_MOST, _BLOCK // max(pytree.nbytes(dataset.spec), 1)))
    call = _Compiled(plan, dataset.spec, rows) if plan.jit else mapped
    with progress.track(total, "preprocessing", plan.progress) as advance:
        tasks = _limited(dataset.steps(rows), total)
        for block, result in _in_order(call, plan, tasks, _Step(bounds, target)):
            over = np.zeros(_length(block), bool)
            here = ends[(ends > target.steps) & (ends <= target.steps + len(over))]
            over[here - 1 - target.steps] = True
            if "valid" in block["next"]:
                result[VALID] = block["next"]["valid"]
            target.append(_ended(result, over))
            advance(len(over))
    return ends, kept


def _by_episode(dataset: Episodes, target: NewDataset, plan: Plan) -> Found:
    """Maps episodes, one by one."""
    ends, kept, most = [], [], plan.num_frames
    which = np.flatnonzero(dataset.lengths > 0).tolist()
    name = _Episode(which, target)
    with progress.track(len(which), "preprocessing", plan.progress) as advance:
        tasks = (episode for episode in dataset if _length(episode))
        for episode, result in _in_order(mapped_episode, plan, tasks, name):
            advance(1)
            number = which[name.done]
            name.done += 1
            if result is None:
                continue
            result = _carried(result, episode)
            left = min(len(result[_REWARD]), (most or np.iinfo(np.int64).max) - target.steps)
            last = np.arange(1, left + 1) == left
            target.append(_ended({key: leaf[:left] for key, leaf in result.items()}, last))
            ends.append(target.steps)
            kept.append(number)
            if target.steps == most:
                break
    return np.array(ends, np.int64), np.array(kept, np.int64)


class _Step:
    """Names steps that fail, and knows what others were like."""

    def __init__(self, bounds: np.ndarray, target: NewDataset) -> None:
        self._bounds, self.target = bounds, target

    def __call__(self, place: int) -> str:
        """Which step of which episode is at a place of the block that is mapped now."""
        step = self.target.steps + place
        episode = int(np.searchsorted(self._bounds, step, side="right"))
        first = int(self._bounds[episode - 1]) if episode else 0
        return f"episode {episode}, step {step - first}"


class _Episode:
    """The same of episodes."""

    def __init__(self, which: list[int], target: NewDataset) -> None:
        self._which, self.target, self.done = which, target, 0

    def __call__(self, place: int) -> str:
        """Which episode is mapped now."""
        return f"episode {self._which[self.done]}"


def _limited(blocks: Iterator[Episode], steps: int) -> Iterator[Episode]:
    """The blocks up to so many steps."""
    for block in blocks:
        count = min(_length(block), steps)
        if not count:
            return
        steps -= count
        yield jax.tree.map(operator.itemgetter(slice(count)), block)


def _length(block: Episode) -> int:
    return len(block["next"]["done"])


# Calls, in this process or others.


def _in_order(
    call: Call, plan: Plan, tasks: Iterable[Episode], name: "_Step | _Episode"
) -> Iterator[tuple[Episode, Any]]:
    """The tasks and what became of them, in their order."""
    if not plan.workers:
        for task in tasks:
            yield task, _checked(call(plan.function, task), name)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(plan.workers, context)
    waiting: collections.deque = collections.deque()
    try:
        for task in tasks:
            waiting.append((task, _begun(pool, call, plan.function, task)))
            if len(waiting) > 2 * plan.workers:
                first, future = waiting.popleft()
                yield first, _came_back(future, name)
        for first, future in waiting:
            yield first, _came_back(future, name)
    finally:
        pool.shutdown(cancel_futures=True)


def _begun(
    pool: concurrent.futures.ProcessPoolExecutor, call: Call, function: Function, task: Episode
) -> "concurrent.futures.Future[Result]":
    """A call that another process will make; one that failed where none does any more."""
    try:
        return pool.submit(_elsewhere, call, function, task)
    except concurrent.futures.BrokenExecutor as error:
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        future.set_exception(error)
        return future


def _elsewhere(call: Call, function: Function, task: Episode) -> Result:
    """A call in another process; an error takes along where it came from."""
    result = call(function, task)
    if not isinstance(result, Failure):
        return result
    error = result.error if _can_travel(result.error) else RuntimeError(repr(result.error))
    error.add_note("".join(traceback.format_exception(result.error)))
    return Failure(result.place, error)


def _can_travel(thing: Any) -> bool:
    """Whether something arrives in another process: it must be found there by its name."""
    try:
        Travel.loads(Travel.dumps(thing))  # pyright: ignore[reportAttributeAccessIssue]
    except Exception:  # whatever its classes raise
        return False
    return True


def _came_back(
    future: "concurrent.futures.Future[Result]", name: "_Step | _Episode"
) -> Leaves | None:
    """What a call in another process returned, checked."""
    try:
        result = future.result()
    except Exception as error:
        raise RuntimeError(
            f"preprocess: from {name(0)} on: a process failed, not the function: "
            f"{type(error).__name__}: {error}. With workers=, a script needs `if __name__ == "
            "'__main__':`."
        ) from error
    return _checked(result, name)


def _checked(result: Result, name: "_Step | _Episode") -> Leaves | None:
    """The leaves, if they are like those before them, and make steps of a dataset."""
    if result is None:
        return None
    if not isinstance(result, Failure):
        try:
            _check_steps(result)
            if name.target.like is not None:
                _check_like(name.target.like, {key: leaf[0] for key, leaf in result.items()})
            else:
                name.target.like = {key: leaf[0] for key, leaf in result.items()}
            return result
        except ValueError as error:
            result = Failure(0, error)
    error = result.error
    raise RuntimeError(
        f"preprocess: {name(result.place)}: {type(error).__name__}: {error}"
    ) from error


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


# What is called.


def mapped(function: Function, block: Episode) -> Result:
    """A block of steps, one by one through a function."""
    found: list[Leaves] = []
    for row in range(_length(block)):
        try:
            found.append(_flat(function(jax.tree.map(operator.itemgetter(row), block))))
            _check_like(found[0], found[-1])
        except Exception as error:
            return Failure(row, error)
    return {name: np.stack([each[name] for each in found]) for name in found[0]}


def mapped_episode(function: Function, episode: Episode) -> Result:
    """An episode through a function; None if it returns that."""
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


def _flat(item: Any) -> Leaves:
    """The arrays of what a function returned, by name."""
    leaves = flatten(jax.tree.map(np.asarray, item), "function")
    for name, leaf in leaves.items():
        if leaf.dtype.kind in "OSUMm" or leaf.dtype.fields is not None:
            raise TypeError(
                f"leaf '{name}': expected numbers, got dtype {leaf.dtype}. Encode it, or leave it "
                "out."
            )
    return leaves


class _Compiled:
    """Blocks of steps through a function of JAX, all in the shape of the first.

    Raises:
        TypeError: steps with numbers of 64 bits, which JAX would make ones of 32.
    """

    def __init__(self, plan: Plan, spec: Any, rows: int) -> None:
        self._function, self._rows, self._cast = jax.jit(jax.vmap(plan.function)), rows, plan.cast
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
            if not plan.cast and not casting.is_kept(np.zeros((), leaf.dtype)):
                raise TypeError(
                    f"preprocess: leaf '{pytree.leaf_name(path)}': expected a dtype that JAX "
                    f"keeps, got {leaf.dtype}. Pass cast=True, or set jax_enable_x64."
                )

    def __call__(self, function: Function, block: Episode) -> Result:
        """A block; what is missing to its full length repeats its last step."""
        count = _length(block)
        index = np.minimum(np.arange(self._rows), count - 1)
        try:
            whole = block if count == self._rows else jax.tree.map(lambda x: x[index], block)
            whole = casting.kept(whole, "preprocess") if self._cast else whole
            leaves = _flat(self._function(whole))
            return {name: leaf[:count] for name, leaf in leaves.items()}
        except Exception as error:
            return Failure(0, error)


# Ends.


def _ended(leaves: Leaves, over: np.ndarray) -> Episode:
    """Steps with their flags; after those of `over`, bool `[T]`, an episode is over."""
    terminated = is_set(leaves[_TERMINATED])
    truncated = is_set(leaves[_TRUNCATED]) | (over & ~terminated)
    flags = {_TERMINATED: terminated, _TRUNCATED: truncated, _DONE: terminated | truncated}
    return nest({**leaves, **flags})


def _carried(leaves: Leaves, episode: Episode) -> Leaves:
    """An episode that says of its last step what was said of that before."""
    if "valid" not in episode["next"] or VALID in leaves:
        return leaves
    valid = np.ones(len(leaves[_REWARD]), bool)
    valid[-1] = episode["next"]["valid"][-1]
    return {**leaves, VALID: valid}
