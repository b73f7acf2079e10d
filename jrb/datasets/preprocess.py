"""All steps, or all episodes, through a function, into a new dataset on the disk.

K episodes, T steps.
"""

import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb._util import pytree
from jrb.datasets.copying import progress
from jrb.datasets.copying.blocks import Episodes
from jrb.datasets.copying.calls import EpisodeName, Plan, StepName, in_order
from jrb.datasets.copying.mapped import Compiled, length_of, mapped, mapped_episode
from jrb.datasets.copying.new_dataset import NewDataset
from jrb.datasets.format import Episode
from jrb.datasets.formats.native import VALID
from jrb.datasets.reading.vectorized import is_set
from jrb.layouts.names import Leaves, nest

_BLOCK = 4 << 20  # bytes of steps that are on their way together
_MOST = 4096  # steps of them
_REWARD, _TERMINATED, _TRUNCATED = "next/reward", "next/terminated", "next/truncated"
_DONE = "next/done"

Found = tuple[np.ndarray, np.ndarray]
"""Where episodes end, int64 `[K]`, the steps up to there; and which ones of the source they are."""


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
    call = Compiled(plan.function, plan.cast, dataset.spec, rows) if plan.jit else mapped
    with progress.track(total, "preprocessing", plan.progress) as advance:
        tasks = _limited(dataset.steps(rows), total)
        for block, result in in_order(call, plan, tasks, StepName(bounds, target)):
            over = np.zeros(length_of(block), bool)
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
    name = EpisodeName(which, target)
    with progress.track(len(which), "preprocessing", plan.progress) as advance:
        tasks = (episode for episode in dataset if length_of(episode))
        for episode, result in in_order(mapped_episode, plan, tasks, name):
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


def _limited(blocks: Iterator[Episode], steps: int) -> Iterator[Episode]:
    """The blocks up to so many steps."""
    for block in blocks:
        count = min(length_of(block), steps)
        if not count:
            return
        steps -= count
        yield jax.tree.map(operator.itemgetter(slice(count)), block)


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
