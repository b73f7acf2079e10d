"""Applies a function to a dataset and writes the results as a new one. K episodes, T steps."""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing import reduction
from typing import Any, NamedTuple

import jax
import numpy as np

from jrb._util.pytree import kept_dtype
from jrb.authoring import Folder, checks, leaf_name, tree_nbytes
from jrb.datasets.format import Episode, count_steps, native_dtype, slice_steps
from jrb.datasets.output import new_path, track_progress
from jrb.datasets.reading.names import check
from jrb.datasets.reading.tabular import is_set
from jrb.datasets.recording import parts
from jrb.datasets.recording.parts import RecordedLeaf, RecordingSchema
from jrb.datasets.recording.writer import check_numeric
from jrb.keys import TED, Path, within
from jrb.layouts.names import Leaves, flatten
from jrb.transforms.leaves import insert_leaf

_BLOCK = 4 << 20  # the maximum bytes of a block of steps
_MOST = 4096  # the maximum number of steps of a block
_REWARD, _VALID = "next/reward", "next/valid"
_FLAGS = (parts.TERMINATED, parts.TRUNCATED)

Function = Callable[[Any], Any]

Mapped = tuple[Leaves, np.ndarray, np.ndarray]
"""Leaves `[T, ...]` by name; bool `[T]`, True for steps that end an episode; and the indices of
these episodes in the source, int64, one for each True."""


class Failure(NamedTuple):
    """An error, and the index in its block of the step that failed; None if a process failed."""

    place: int | None
    error: Exception


Forms = dict[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtypes and shapes of one step by name."""

Result = Leaves | Failure | None
"""The leaves of a mapped block by name; a failure; or None for an episode to leave out."""

Run = Callable[[Iterator[Episode]], Iterator[tuple[Episode, Result]]]
"""A function that maps blocks of steps or episodes, and yields each with its result, in order."""


def preprocess(
    dataset: Any,
    function: Function,
    dest: str | os.PathLike[str],
    workers: int,
    num_frames: int | None,
    by: str,
    jit: bool,
    cast: bool,
    progress: bool | None,
) -> None:
    """Checks the arguments of `Dataset.preprocess`, maps the steps, and writes the dataset."""
    _check_arguments(function, workers, num_frames, by, jit, cast)
    # Choose how a block is mapped, and what a block is.
    rows = max(1, min(_MOST, _BLOCK // max(tree_nbytes(dataset.spec), 1)))
    if jit:
        call = _vectorize(function, cast, dataset.spec, rows)
    else:
        call = functools.partial(_map_steps if by == "step" else _map_episode, function)
    run = functools.partial(_in_order, call, workers)
    if by == "step":
        mapped_blocks = _by_step(dataset, run, num_frames, progress, rows)
    else:
        mapped_blocks = _by_episode(dataset, run, num_frames, progress)
    # Close the generator after a failure too: it ends the processes and the progress bar.
    with new_path(dest) as folder, contextlib.closing(mapped_blocks):
        os.mkdir(folder)
        _write(folder, mapped_blocks, dataset)


def _check_arguments(
    function: Function, workers: int, num_frames: int | None, by: str, jit: bool, cast: bool
) -> None:
    """Raises for arguments of `Dataset.preprocess` that are wrong or do not fit each other."""
    checks.choice("by", by, ("step", "episode"))
    checks.flag("jit", jit)
    checks.flag("cast", cast)
    if not callable(function):
        raise TypeError(f"function: expected a function, got {function!r}.")
    if num_frames is not None:
        checks.count("num_frames", num_frames)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ValueError(f"workers: expected a number of at least 0, got {workers!r}.")
    is_blockwise, got = not workers and by == "step", f"workers={workers} and by={by!r}"
    got += ": a function of JAX is mapped over blocks of steps, in this process"
    check(not jit or is_blockwise, "jit", "workers=0 and by='step'", got)
    # Python 3.11's process pool may hang if an argument cannot be pickled.
    if workers and not _can_be_pickled(function):
        raise TypeError(
            f"function: expected one that other processes can import, got {function!r}. Put it at "
            "the top of a module, or leave workers= out."
        )


def _write(folder: str, mapped_blocks: Iterator[Mapped], dataset: Any) -> None:
    """Writes mapped steps as the parts of a recording, with facts, metadata and notes."""
    writer, blocks = parts.new_writer_name("dataset"), []
    num_parts = num_bytes = num_episodes = step = 0
    episodes = [np.zeros(0, np.int64)]

    def write_part(number: int, **about: Any) -> None:
        own, leaves = (
            {name: np.concatenate([block[name] for block in each]) for name in each[0]}
            for each in zip(*blocks, strict=True)
        )
        leaves = {
            name: leaf.astype(native_dtype(leaf.dtype)) for name, leaf in sorted(leaves.items())
        }
        specs = tuple(RecordedLeaf(n, str(it.dtype), it.shape[1:]) for n, it in leaves.items())
        schema = RecordingSchema(None, specs, **{"notes": (), "metadata": {}, "facts": {}, **about})
        Folder(folder).write_new(parts.part_name(writer, number), [schema.encode(own, leaves)])
        # Keep a block without rows, for the forms of the columns in part 0, which is written last.
        blocks[:] = [tuple({n: it[:0] for n, it in part.items()} for part in (own, leaves))]

    for leaves, is_last, numbers in mapped_blocks:
        own = _own_columns(leaves, is_last, num_episodes, step)
        # The recording has columns of its own for these flags, and `Dataset` adds `done` again.
        skipped = (*_FLAGS, "next/done")
        blocks.append((own, {n: leaf for n, leaf in leaves.items() if n not in skipped}))
        num_episodes += int(is_last.sum())
        step = 0 if is_last[-1] else int(own[parts.STEP][-1]) + 1
        num_bytes += sum(leaf.nbytes for leaf in leaves.values())
        episodes.append(numbers)
        # Write a part when enough bytes are in memory.
        if num_bytes >= parts.PART_BYTES:
            num_parts, num_bytes = num_parts + 1, 0
            write_part(num_parts)
    check(blocks, folder, "at least one step to be written", "none")
    write_part(num_parts + 1)
    # The facts of the episodes that were kept are known only now.
    write_part(0, **_about(dataset, np.concatenate(episodes)))


def _own_columns(leaves: Leaves, is_last: np.ndarray, episode: int, step: int) -> Leaves:
    """Returns the columns that a recording adds to a block, which begins at `step` of `episode`."""
    starts = np.concatenate([[-step], np.flatnonzero(is_last) + 1])
    number = np.cumsum(is_last) - is_last
    terminated, truncated = (is_set(leaves[name]) for name in _FLAGS)
    return {
        parts.EPISODE: episode + number,
        parts.STEP: np.arange(len(is_last)) - starts[number],
        parts.ENV: np.zeros(len(is_last), np.int32),
        parts.TERMINATED: terminated,
        # The last step of an episode is done, whatever the function returns.
        parts.TRUNCATED: truncated | (is_last & ~terminated),
    }


def _about(dataset: Any, episodes: np.ndarray) -> dict[str, Any]:
    """Returns the facts, metadata and notes that stay true of the `episodes` of a dataset."""
    is_numeric = lambda fact: fact.dtype.kind in "biuf"
    metadata: dict[str, Any] = {}
    # Entries that JSON lacks are left out.
    for name, value in dataset.metadata.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            metadata[name] = json.loads(json.dumps(value))
    # The new dataset finds out which steps lack a next observation, unless they were dropped.
    notes = dataset.notes if dataset.final == "drop" else dataset.description.notes
    facts = {name: each[episodes] for name, each in dataset.facts.items() if is_numeric(each)}
    return {"notes": notes, "metadata": metadata, "facts": facts}


def _by_step(
    dataset: Any, run: Run, num_frames: int | None, progress: bool | None, rows: int
) -> Generator[Mapped, None, None]:
    """Maps the first `num_frames` steps, `rows` at a time; yields the mapped blocks."""
    bounds, total = np.cumsum(dataset.lengths), int(dataset.lengths.sum())
    total = min(total, num_frames or total)
    # Mark the last step of each episode, and the last one that is written.
    is_end = np.zeros(total, bool)
    is_end[bounds[(bounds <= total) & (dataset.lengths > 0)] - 1] = is_end[-1:] = True
    episode_of = functools.partial(np.searchsorted, bounds, side="right")
    start, first = 0, {}

    def describe_step(step: int) -> str:
        episode = int(episode_of(start + step))
        return f"episode {episode}, step {start + step - [0, *bounds.tolist()][episode]}"

    def tasks() -> Iterator[Episode]:
        stop = 0
        for block in dataset.steps(rows):
            block = slice_steps(block, slice(total - stop))
            stop += count_steps(block)
            yield block
            if stop == total:
                return

    with track_progress(total, "preprocessing", progress) as advance:
        for block, result in run(tasks()):
            leaves, first = _check_result(result, first, describe_step)
            stop = start + count_steps(block)
            is_last = is_end[start:stop]
            # Steps keep the mark that says if their next observation is in the files.
            if "valid" in block["next"]:
                leaves = {**leaves, _VALID: block["next"]["valid"]}
            yield leaves, is_last, episode_of(start + np.flatnonzero(is_last))
            advance(stop - start)
            start = stop


def _by_episode(
    dataset: Any, run: Run, num_frames: int | None, progress: bool | None
) -> Generator[Mapped, None, None]:
    """Maps whole episodes, up to `num_frames` steps of results; yields the mapped episodes."""
    numbers = np.flatnonzero(dataset.lengths > 0)
    steps, first = 0, {}
    with track_progress(len(numbers), "preprocessing", progress) as advance:
        tasks = (episode for episode in dataset if count_steps(episode))
        for number, (episode, result) in zip(numbers, run(tasks), strict=False):
            describe_step = lambda place, number=number: f"episode {number}"
            leaves, first = _check_result(result, first, describe_step)
            advance(1)
            if not leaves:
                continue
            # Only a last step may lack its next observation, and the function may change the number
            # of steps.
            if "valid" in episode["next"] and _VALID not in leaves:
                valid = np.ones(len(leaves[parts.TERMINATED]), bool)
                valid[-1] = episode["next"]["valid"][-1]
                leaves = {**leaves, _VALID: valid}
            # The last episode may be cut at `num_frames` steps; its last step then ends it.
            count = min(len(leaves[parts.TERMINATED]), (num_frames or np.inf) - steps)
            is_last = np.arange(1, count + 1) == count
            yield {name: leaf[:count] for name, leaf in leaves.items()}, is_last, np.array([number])
            steps += count
            if steps == num_frames:
                break


def return_to_go(episode: Episode, *, discount: float = 1.0, path: Path = "return_to_go") -> Any:
    """Returns an episode with the discounted sum of the rewards from each step to its end.

    Give it to `Dataset.preprocess` with `by="episode"`; `functools.partial` sets its options. An
    episode that a dataset cuts (see `Dataset.complete`) is summed up to its last step.

    Args:
        episode: an episode in TED, NumPy arrays `[T, ...]`.
        discount: gamma, from 0 to 1.
        path: where the result goes, `[T, ...]` like the reward, for each of its leaves. It is
            computed in float64, and rounded once to the dtype of the reward; if that is no floating
            one, to float32, or float64 from 32 bits on.

    Raises:
        ValueError: there is no reward, `path` is taken, or `episode` is a single step.

    Example:
        >>> import numpy as np, jrb
        >>> after = {"reward": np.float32([1, 2, 4]), "terminated": np.arange(3) == 2}
        >>> jrb.datasets.return_to_go({"next": after}, discount=0.5)["return_to_go"].tolist()
        [3.0, 4.0, 4.0]
    """
    checks.fraction("discount", discount)
    checks.path("path", path)
    # Steps have flags `[]`, and no sum over time.
    is_step = not all(np.ndim(flag) for flag in TED.flags(episode).values())
    check(not is_step, "return_to_go", "an episode", "a step. Pass by='episode'")

    def sums(reward: Any) -> np.ndarray:
        # Sum backwards in place: each step adds the discounted sum of the steps after it.
        is_floating = jax.numpy.issubdtype(reward.dtype, np.floating)
        totals = np.asarray(reward).astype(np.float64)
        for step in range(len(totals) - 2, -1, -1) if discount else ():
            totals[step] += discount * totals[step + 1]
        return totals.astype(reward.dtype if is_floating else np.result_type(reward, np.float32))

    rewards = TED.get(episode, "reward")
    return insert_leaf(episode, path, jax.tree.map(sums, rewards), "return_to_go")


# Calls of the user's function.


def _map_steps(function: Function, block: Episode) -> Result:
    """Applies the function to each step of a block."""
    steps: list[Leaves] = []
    first: Forms = {}
    for row in range(count_steps(block)):
        try:
            steps.append(_flatten_result(function(slice_steps(block, row))))
            # Compare with the first step of the block, as steps of other forms cannot be stacked.
            first = _same_forms(first, steps[-1], 0)
        except Exception as error:
            return Failure(row, error)
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def _map_episode(function: Function, episode: Episode) -> Result:
    """Applies the function to an episode; returns None if the function does."""
    try:
        result = function(episode)
        if result is None:
            return None
        leaves = _flatten_result(result)
        # All leaves need one axis of time, of at least one step.
        lengths = {name: leaf.shape[0] if leaf.ndim else None for name, leaf in leaves.items()}
        is_right = len(set(lengths.values())) == 1 and not {*lengths.values()} & {None, 0}
        if not is_right:
            raise ValueError(
                "expected arrays [T, ...] of one length, at least 1, or None to leave the episode "
                f"out, got lengths {lengths}."
            )
        return leaves
    except Exception as error:
        return Failure(0, error)


def _vectorize(function: Function, cast: bool, spec: Any, rows: int) -> Callable[[Episode], Result]:
    """Returns a function that maps blocks of up to `rows` steps with one compiled program."""
    map_block = jax.jit(jax.vmap(function))
    # JAX would convert 64-bit leaves without a word.
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        if not cast and kept_dtype(leaf.dtype) != leaf.dtype:
            raise TypeError(
                f"preprocess: leaf '{leaf_name(path)}': expected a dtype that JAX keeps, got "
                f"{leaf.dtype}. Pass cast=True, or set jax_enable_x64."
            )

    def narrow(path: Any, leaf: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            numbers = leaf.astype(kept_dtype(leaf.dtype))
        # Integers must stay equal. Other numbers may be rounded, but not become infinite.
        if leaf.dtype.kind in "iu":
            is_lost = numbers != leaf
        else:
            is_lost = np.isfinite(leaf) & ~np.isfinite(numbers)
        where, expected = f"leaf '{leaf_name(path)}'", f"numbers that {numbers.dtype} holds"
        got = f"{leaf[is_lost][:1]}. Set jax_enable_x64, or encode them"
        check(not is_lost.any(), where, expected, got)
        return numbers

    def call(block: Episode) -> Result:
        # A shorter block is padded with its last step, so that nothing is compiled again.
        count = count_steps(block)
        index = np.minimum(np.arange(rows), count - 1)
        try:
            pad = lambda path, leaf: narrow(path, leaf[index])
            result = map_block(jax.tree_util.tree_map_with_path(pad, block))
            return {name: leaf[:count] for name, leaf in _flatten_result(result).items()}
        except Exception as error:
            return Failure(0, error)

    return call


def _flatten_result(item: Any) -> Leaves:
    """Returns the arrays of the function's result by name; raises if one is not numeric."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(item):
        where, is_masked = f"leaf '{leaf_name(path)}'", np.ma.is_masked(leaf)
        check(not is_masked, where, "values everywhere", "a masked array. Fill it")
    # A masked array would lose its mask here without an error.
    leaves = flatten(jax.tree.map(np.asarray, item), "function")
    for name, leaf in leaves.items():
        check_numeric(f"leaf '{name}'", leaf.dtype)
    return leaves


def _check_result(
    result: Result, first: Forms, describe_step: Callable[[int], str]
) -> tuple[Leaves, Forms]:
    """Returns a result's leaves, if any, and the forms of the first one; raises for failures."""
    if isinstance(result, dict):
        try:
            # A dataset needs a reward and these flags for each step, and all steps in one form.
            for name in (_REWARD, *_FLAGS):
                got = f"the leaves {sorted(result)}. Put back what it does not change: "
                got += "{**step, ...}"
                present = [leaf for leaf in result if within(leaf, name)]
                check(present, f"leaf '{name}'", "one in what the function returns", got)
                if name != _REWARD:  # the reward may have several leaves, of any shape
                    is_flag, row = name in result, result[present[0]].shape[1:]
                    check(is_flag and not row, f"leaf '{name}'", "shape () for a step", row)
            first = _same_forms(first, result, 1)
        except ValueError as error:
            result = Failure(0, error)
    if not isinstance(result, Failure):
        return result or {}, first
    # Say where the function failed. Of a process that failed, only the block is known.
    text = f"{type(result.error).__name__}: {result.error}"
    if result.place is None:
        text = (
            f"from {describe_step(0)} on: a process failed, not the function: {text}. With "
            "workers=, a script needs `if __name__ == '__main__':`."
        )
    else:
        text = f"{describe_step(result.place)}: {text}"
    raise RuntimeError(f"preprocess: {text}") from result.error


def _same_forms(first: Forms, leaves: Leaves, lead: int) -> Forms:
    """Returns the forms of leaves after `lead` axes; raises if they differ from the first ones."""
    forms = {name: (leaf.dtype, leaf.shape[lead:]) for name, leaf in leaves.items()}
    if first and forms != first:
        text = lambda form: f"{form[0]}{list(form[1])}" if form else "no such leaf"
        for name in sorted(first.keys() | forms.keys()):
            want, got = text(first.get(name)), text(forms.get(name))
            check(want == got, f"leaf '{name}'", f"{want}, as before", got)
    return first or forms


def _in_order(
    call: Callable[[Episode], Result], workers: int, tasks: Iterator[Episode]
) -> Iterator[tuple[Episode, Result]]:
    """Yields each task with its result, in order, from this process or from `workers` others."""
    if not workers:
        yield from ((task, call(task)) for task in tasks)
        return
    # A fork may hang: it has the locks of JAX's threads, but not the threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        # Submit some tasks for each worker at a time, so that memory does not grow with the
        # dataset.
        while batch := list(itertools.islice(tasks, 4 * workers)):
            results = pool.map(functools.partial(_call_in_worker, call), batch)
            for task in batch:
                try:
                    result = next(results)
                except Exception as error:
                    # A process failed: `call` catches the errors of the function itself.
                    result = Failure(None, error)
                yield task, result


def _call_in_worker(call: Callable[[Episode], Result], task: Episode) -> Result:
    """Runs a task in a worker process; adds the traceback to an error as a note."""
    result = call(task)
    if isinstance(result, Failure):
        # An error that cannot be sent is replaced by its text. Tracebacks are never sent, so a
        # note has their text.
        error = result.error if _can_be_pickled(result.error) else RuntimeError(repr(result.error))
        error.add_note("".join(traceback.format_exception(result.error)))
        result = Failure(result.place, error)
    return result


def _can_be_pickled(thing: object) -> bool:
    """Returns True if an object can be pickled and sent to another process."""
    try:
        pickler: Any = reduction.ForkingPickler
        pickler.loads(pickler.dumps(thing))
    except Exception:
        # Pickling can raise errors of any class.
        return False
    return True
