"""Functions that join several datasets into one, or mix them in batches. K episodes."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jrb.authoring import leaf_name
from jrb.datasets.dataset import Dataset
from jrb.datasets.format import Description, Episode, Indexed, Source
from jrb.datasets.reading.names import check
from jrb.mix import Mix, States


@dataclasses.dataclass(frozen=True)
class Concatenation(Indexed):
    """The format of several datasets, one after the other. The source is a tuple of datasets."""

    name: ClassVar[str] = "joined"
    looks_for: ClassVar[str] = "a tuple of datasets, as jrb.datasets.concatenate makes it"

    def matches(self, source: Source) -> bool:
        """Returns True for a tuple of datasets."""
        return isinstance(source, tuple) and all(isinstance(part, Dataset) for part in source)

    def describe(self, source: Source) -> Description:
        """Returns the facts about all episodes; `dataset` is the index of an episode's dataset."""
        concat = np.concatenate
        # Keep the facts that all datasets have, and add those of the concatenation.
        names = set.intersection(*(set(part.facts) for part in source))
        facts = {name: concat([part.facts[name] for part in source]) for name in sorted(names)}
        facts["complete"] = concat([part.complete for part in source])
        # A dataset that drops last steps has no steps without a next observation.
        cuts = [part.cut if part.final == "keep" else np.zeros(len(part), bool) for part in source]
        notes = itertools.chain.from_iterable(part.description.notes for part in source)
        return Description(
            _without_marks(source[0].spec),
            concat([part.lengths for part in source]).astype(np.int64),
            concat(cuts) if any(map(np.any, cuts)) else None,
            {**facts, "dataset": np.repeat(np.arange(len(source)), [*map(len, source)])},
            {"datasets": [dict(part.metadata) for part in source]},
            tuple(dict.fromkeys(notes)),
        )

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes at the indices `numbers`."""
        return map(_without_marks, _through(source, numbers, iter))

    def blocks(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the steps of these episodes in the blocks that each dataset chooses."""
        return map(_without_marks, _through(source, numbers, Dataset.blocks))

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[Any]:
        """Yields the rewards of these episodes, without reading other leaves."""
        read = lambda part: part.format.rewards(part.source, part.numbers.tolist())
        return _through(source, numbers, read)


def _through(
    source: tuple[Dataset, ...], numbers: Sequence[int], read: Callable[[Dataset], Iterator[Any]]
) -> Iterator[Any]:
    """Yields the results of `read` for these episodes, in one call for neighbours of a dataset."""
    # Find the dataset of each episode; `first` has the number of each dataset's first episode.
    first = np.cumsum([0, *map(len, source)])
    which = np.searchsorted(first, numbers, side="right") - 1
    # Read neighbours in one call, so that a format opens its files once for all of them.
    for part, group in itertools.groupby(zip(which.tolist(), numbers, strict=True), lambda x: x[0]):
        places = [number - int(first[part]) for _, number in group]
        yield from read(source[part].only(source[part].numbers[places]))


def _without_marks(step: Any) -> Any:
    """Returns a step, or its spec, without `valid` and `done`, which datasets add."""
    after = {name: leaf for name, leaf in step["next"].items() if name not in ("valid", "done")}
    return {**step, "next": after}


def concatenate(*datasets: Dataset) -> Dataset:
    """Returns several datasets as one: the episodes of the first, then of the second, and so on.

    `facts["dataset"]`, int64 `[K]`, is the index of each episode's dataset; other facts are kept
    if all datasets have them. If one dataset lacks next observations, all episodes have a leaf
    `next/valid`.

    Raises:
        ValueError: a dataset's steps differ from those of the first in structure, shape or dtype;
            the message names the leaf.
        TypeError: an argument is not a dataset.
    """
    _name_datasets(datasets)
    description = Concatenation().describe(datasets)
    return Dataset(datasets, Concatenation(), description, np.arange(len(description.lengths)))


def _name_datasets(datasets: Mapping[str, Any] | Sequence[Any]) -> dict[str, Dataset]:
    """Returns datasets by their names, or by numbers; raises if their steps' specs differ.

    Leaves that datasets add, such as `next/valid`, may differ.
    """
    if isinstance(datasets, Mapping):
        named = dict(datasets)
    else:
        named = {str(number): part for number, part in enumerate(datasets)}
    first: dict[str, str] = {}
    for name, part in named.items():
        if not isinstance(part, Dataset):
            raise TypeError(f"expected datasets, got {type(part).__name__}.")
        # Compare the leaves by name, to name the first one that differs.
        leaves = jax.tree_util.tree_leaves_with_path(_without_marks(part.spec))
        forms = {leaf_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
        first = first or forms
        for leaf in sorted(first.keys() | forms.keys()):
            want, got = first.get(leaf, "nothing"), forms.get(leaf, "nothing")
            expected = f"{want}, as dataset {next(iter(named))} has it"
            cure, where = "Bring them to one form with preprocess", f"dataset {name}: leaf '{leaf}'"
            check(want == got, where, expected, f"{got}. {cure}")
    check(named, "datasets", "at least one dataset", "none")
    return named


def mix(
    datasets: Mapping[str, Dataset] | Sequence[Dataset],
    weights: Mapping[str, float] | Sequence[float] | None = None,
    batch_size: int | None = None,
    **parts: Any,
) -> tuple[Mix, States]:
    """Returns a `jrb.Mix` that takes a fixed share of every batch from each dataset.

    Args:
        datasets: the datasets, as a dict by name or as a sequence.
        weights: the relative shares of the datasets in a batch, a dict or sequence like
            `datasets`; numbers of at least 0. None for shares in proportion to the steps.
        batch_size: the batch size B for calls that give none.
        parts: further arguments of `Dataset.buffer`, the same for all.

    Returns:
        The mix, and the states of its buffers, in the order of the datasets.

    Raises:
        ValueError: the datasets' steps differ, as for `concatenate`; or the weights do not match
            the datasets, are negative or not finite, or are all 0.
        TypeError: one of the datasets is something else.
    """
    named = _name_datasets(datasets)
    # Bring the weights into the order of the datasets.
    if weights is None:
        weights = [part.transitions for part in named.values()]
    by_name = (
        dict(weights) if isinstance(weights, Mapping) else dict(zip(named, weights, strict=False))
    )
    is_right = by_name.keys() == named.keys() and len(weights) == len(named)
    check(is_right, "weights", f"one for each of {list(named)}", repr(weights))
    numbers = np.array([by_name[name] for name in named], np.float64)
    is_right = np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.any()
    check(is_right, "weights", "finite numbers of at least 0, not all 0", numbers.tolist())
    # Buffers of one mix need the same leaves. If one dataset has `next/valid`, take all from the
    # concatenation, where all have it.
    whole = concatenate(*named.values())
    if "valid" in whole.spec["next"]:
        stops = np.cumsum([0, *map(len, named.values())]).tolist()
        sources = [whole[start:stop] for start, stop in itertools.pairwise(stops)]
    else:
        sources = list(named.values())
    # Fill a buffer from each dataset.
    pairs = [source.buffer(batch_size=batch_size, **parts) for source in sources]
    buffers, states = zip(*pairs, strict=True)
    shares = tuple((numbers / numbers.sum()).tolist())
    return Mix(buffers, shares, batch_size=batch_size), states
