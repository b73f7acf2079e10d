"""Several datasets as one, and as one stream of batches. K episodes."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jrb._util import pytree
from jrb._util.pytree import PyTree
from jrb.datasets.dataset import Dataset
from jrb.datasets.format import Description, Episode, Indexed, Source
from jrb.mix import Mix, States


@dataclasses.dataclass(frozen=True)
class Joined(Indexed):
    """Datasets one after the other. The source is a tuple of them."""

    name: ClassVar[str] = "joined"
    looks_for: ClassVar[str] = "a tuple of datasets, as jrb.datasets.concatenate makes it"

    def matches(self, source: Source) -> bool:
        """Whether it is such a tuple."""
        return isinstance(source, tuple) and all(isinstance(part, Dataset) for part in source)

    def describe(self, source: Source) -> Description:
        """What is known of all of them; `dataset` among the facts says which one."""
        counts = [len(part) for part in source]
        names = set.intersection(*(set(part.facts) for part in source))
        facts = {name: _joined([part.facts[name] for part in source]) for name in sorted(names)}
        facts["complete"] = _joined([part.complete for part in source])
        cuts = [part.cut if part.final == "keep" else np.zeros(len(part), bool) for part in source]
        notes = itertools.chain.from_iterable(part.description.notes for part in source)
        return Description(
            _without_marks(source[0].spec),
            _joined([part.lengths for part in source]).astype(np.int64),
            _joined(cuts) if any(map(np.any, cuts)) else None,
            {**facts, "dataset": np.repeat(np.arange(len(source)), counts)},
            {"datasets": [dict(part.metadata) for part in source]},
            tuple(dict.fromkeys(notes)),
        )

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The episodes of these numbers."""
        return map(_without_marks, _through(source, numbers, iter))

    def blocks(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The same, as each of the datasets is best read."""
        return map(_without_marks, _through(source, numbers, Dataset.blocks))

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """The rewards of these episodes, without the rest of them."""
        read = lambda part: part.format.rewards(part.source, part.numbers.tolist())
        return _through(source, numbers, read)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays)


def _through(
    source: tuple[Dataset, ...], numbers: Sequence[int], read: Callable[[Dataset], Iterator[Any]]
) -> Iterator[Any]:
    """What is read of these episodes, those of one dataset that follow each other together."""
    first = np.cumsum([0, *map(len, source)])
    which = np.searchsorted(first, numbers, side="right") - 1
    for part, group in itertools.groupby(zip(which.tolist(), numbers, strict=True), lambda x: x[0]):
        places = [number - int(first[part]) for _, number in group]
        yield from read(source[part].only(source[part].numbers[places]))


def _without_marks(step: Any) -> Any:
    """A step, or a spec, without what datasets add for themselves."""
    after = {name: leaf for name, leaf in step["next"].items() if name not in ("valid", "done")}
    return {**step, "next": after}


def concatenate(*datasets: Dataset) -> Dataset:
    """Several datasets as one: the episodes of the first, then those of the second, and so on.

    `facts["dataset"]`, int64 `[K]`, says where an episode is from; other facts are those that all
    have. Where one of them lacks next observations, all have a leaf `next/valid`.

    Raises:
        ValueError: steps of other structure, shape or dtype than those of the first; the message
            names the leaf.
        TypeError: something else than datasets.
    """
    _check_alike(_numbered(datasets))
    description = Joined().describe(datasets)
    return Dataset(datasets, Joined(), description, np.arange(len(description.lengths)))


def _check_alike(datasets: Mapping[str, Any]) -> None:
    """Raises unless these are datasets, whose steps are the same but for marks."""
    for part in datasets.values():
        if not isinstance(part, Dataset):
            raise TypeError(f"expected datasets, got {type(part).__name__}.")
    if not datasets:
        raise ValueError("expected at least one dataset, got none.")
    specs = {name: _leaves(_without_marks(part.spec)) for name, part in datasets.items()}
    head, first = next(iter(specs.items()))
    for name, other in specs.items():
        for leaf in sorted(first.keys() | other.keys()):
            want, found = first.get(leaf, "nothing"), other.get(leaf, "nothing")
            if want != found:
                raise ValueError(
                    f"dataset {name}: leaf '{leaf}': expected {want}, as dataset {head} has it, "
                    f"got {found}. Bring them to one form with preprocess."
                )


def _leaves(spec: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    return {pytree.leaf_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def mix(
    datasets: Mapping[str, Dataset] | Sequence[Dataset],
    weights: Mapping[str, float] | Sequence[float] | None = None,
    batch_size: int | None = None,
    **parts: Any,
) -> tuple[Mix, States]:
    """Batches from several datasets, exact parts of each batch from each of them.

    Args:
        datasets: by name, or in a sequence.
        weights: how much of a batch comes from each, in the same form; numbers of at least 0, of
            which only ratios count. None for as much as each has steps.
        batch_size: B, unless a draw names its own.
        parts: what else `Dataset.buffer` takes, the same for all.

    Returns:
        The mix, and the states of its buffers, in the order of the datasets.

    Raises:
        ValueError: datasets of other structure, as for `concatenate`; weights for others, or that
            are no shares.
        TypeError: as `concatenate`.
    """
    named = dict(datasets) if isinstance(datasets, Mapping) else _numbered(datasets)
    _check_alike(named)
    joined = concatenate(*named.values())
    shares = _shares(named, weights)
    stops = np.cumsum([0, *map(len, named.values())]).tolist()
    marked = "valid" in joined.spec["next"]
    made = [
        (joined[start:stop] if marked else part).buffer(batch_size=batch_size, **parts)
        for part, (start, stop) in zip(named.values(), itertools.pairwise(stops), strict=True)
    ]
    buffers, states = zip(*made, strict=True)
    return Mix(tuple(buffers), shares, batch_size=batch_size), tuple(states)


def _numbered(entries: Any) -> dict[str, Any]:
    return {str(number): entry for number, entry in enumerate(entries)}


def _shares(named: Mapping[str, Dataset], weights: Any) -> tuple[float, ...]:
    """The proportions, which add up to 1."""
    if weights is None:
        weights = {name: part.transitions for name, part in named.items()}
    given = dict(weights) if isinstance(weights, Mapping) else _numbered(weights)
    if given.keys() != named.keys():
        raise ValueError(
            f"weights: expected one for each of {list(named)}, got some for {list(given)}."
        )
    numbers = np.array([given[name] for name in named], np.float64)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.sum() > 0):
        raise ValueError(
            f"weights: expected finite numbers of at least 0, not all 0, got {numbers.tolist()}."
        )
    return tuple((numbers / numbers.sum()).tolist())
