"""Blocks of steps, and episodes, through a function: in this process, in others, or by JAX.

T steps.
"""

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import reduction
from typing import Any

import numpy as np

from jrb._util import checks
from jrb.datasets.copying.mapped import Call, Failure, Function, Result, check_like
from jrb.datasets.copying.new_dataset import NewDataset
from jrb.datasets.format import Episode
from jrb.iterate import prefetch
from jrb.layouts.names import Leaves

_REWARD, _TERMINATED, _TRUNCATED = "next/reward", "next/terminated", "next/truncated"


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


class StepName:
    """Names steps that fail, and knows what others were like."""

    target: NewDataset

    def __init__(self, bounds: np.ndarray, target: NewDataset) -> None:
        self._bounds, self.target = bounds, target

    def __call__(self, place: int) -> str:
        """Which step of which episode is at a place of the block that is mapped now."""
        step = self.target.steps + place
        episode = int(np.searchsorted(self._bounds, step, side="right"))
        first = int(self._bounds[episode - 1]) if episode else 0
        return f"episode {episode}, step {step - first}"


class EpisodeName:
    """The same of episodes."""

    target: NewDataset
    done: int

    def __init__(self, which: list[int], target: NewDataset) -> None:
        self._which, self.target, self.done = which, target, 0

    def __call__(self, place: int) -> str:
        """Which episode is mapped now."""
        return f"episode {self._which[self.done]}"


def in_order(
    call: Call, plan: Plan, tasks: Iterable[Episode], name: "StepName | EpisodeName"
) -> Iterator[tuple[Episode, Any]]:
    """The tasks and what became of them, in their order."""
    if not plan.workers:
        for task in tasks:
            yield task, _checked(call(plan.function, task), name)
        return
    # The thread of `prefetch` waits for the processes, as no interrupt comes there.
    with prefetch(_in_processes(call, plan, tasks), depth=1) as done:
        for task, future in done:
            yield task, _came_back(future, name)


def _in_processes(
    call: Call, plan: Plan, tasks: Iterable[Episode]
) -> Iterator[tuple[Episode, "concurrent.futures.Future[Result]"]]:
    """The tasks in their order, and calls that other processes have made."""
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(plan.workers, context)
    begun: collections.deque = collections.deque()
    try:
        for task in tasks:
            begun.append((task, _begun(pool, call, plan.function, task)))
            if len(begun) > 2 * plan.workers:
                concurrent.futures.wait([begun[0][1]])
                yield begun.popleft()
        concurrent.futures.wait([future for _, future in begun])
        yield from begun
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


def _can_travel(thing: object) -> bool:
    """Whether something arrives in another process: it must be found there by its name."""
    try:
        pickler: Any = reduction.ForkingPickler
        pickler.loads(pickler.dumps(thing))
    except Exception:  # whatever its classes raise
        return False
    return True


def _came_back(
    future: "concurrent.futures.Future[Result]", name: "StepName | EpisodeName"
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


def _checked(result: Result, name: "StepName | EpisodeName") -> Leaves | None:
    """The leaves, if they are like those before them, and make steps of a dataset."""
    if result is None:
        return None
    if not isinstance(result, Failure):
        try:
            _check_steps(result)
            if name.target.like is not None:
                check_like(name.target.like, {key: leaf[0] for key, leaf in result.items()})
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
