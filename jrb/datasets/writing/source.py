"""The episodes of a buffer or of a dataset, one after the other, as writers of files need them.

K episodes, T steps of one.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import read
from jrb.authoring import leaf_name, leaf_names, tree_nbytes
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.reading.names import check_names, ted_names
from jrb.datasets.reading.tabular import combined_flags
from jrb.keys import TED, within
from jrb.layouts import flat
from jrb.layouts.names import Leaves
from jrb.state import BufferState

FLAGS = ("next/done", "next/terminated", "next/truncated")
VALID = "next/valid"

_PIECE = 32 << 20  # bytes of items that are read at a time


@dataclasses.dataclass(frozen=True, eq=False)
class SourceEpisode:
    """An episode.

    Attributes:
        leaves: arrays `[T, ...]` by their names in TED, in the order of the source's leaves.
        facts: of the dataset. Of a buffer's episode, `environment`, `complete` (as
            `jrb.read.Episode`), `running` (it had not ended) and `cut` (its beginning may be lost).
    """

    leaves: Leaves
    facts: dict[str, Any]

    @property
    def is_running(self) -> bool:
        """True if the episode had not ended."""
        return bool(self.facts.get("running", self.facts.get("is_running", False)))

    @property
    def is_cut(self) -> bool:
        """True if the beginning of the episode may be lost."""
        return bool(self.facts.get("cut", self.facts.get("is_cut", False)))

    def split_flags(self) -> tuple[Leaves, np.ndarray, np.ndarray, bool]:
        """Returns the leaves without flags and `next/valid`, and these.

        Returns:
            The leaves; bool `[T]`, the steps that terminated; bool `[T]`, those that were
            truncated, such as the last one if it did not terminate; and False if the observation
            after the last step is not there, though it is needed. Done is terminated unless it
            says truncated.
        """
        leaves = dict(self.leaves)
        steps = len(next(iter(leaves.values())))
        flag = lambda name: (leaves.pop(name) != 0).reshape(steps) if name in leaves else None
        done, terminated, truncated = map(flag, FLAGS)
        terminated, truncated = combined_flags(steps, done, terminated, truncated)
        truncated[-1] |= ~terminated[-1]
        valid = flag(VALID)
        return leaves, terminated, truncated, valid is None or bool((valid | terminated).all())


class Source:
    """The episodes of a buffer and its state, or of a dataset; those without a step are left out.

    Iterated, it reads some megabytes at a time.

    Args:
        who: asks, for the first words of errors.
        source: the description, or a dataset.
        state: that of the buffer; None with a dataset.
        roles: fields of `jrb.Keys` that items have to have.

    Attributes:
        paths: of JAX, of the leaves of one step.
        specs: shapes and dtypes of the leaves of one step by their names in TED, in the same
            order; of PRNG keys, those of their words.
        lengths: int64 `[K]`.

    Raises:
        TypeError: something else.
        ValueError: a writer that keeps no order of time, items without flags or what is needed, or
            leaves whose names a file cannot tell apart.
    """

    def __init__(
        self, who: str, source: Any, state: BufferState | None, roles: tuple[str, ...] = ()
    ) -> None:
        self._source: Any = source
        self._state: Any = state
        if isinstance(source, Dataset) and state is None:
            keys, spec = TED, source.spec
        elif isinstance(source, ReplayBuffer) and state is not None:
            keys, spec = source.keys, source.stored(state)
        else:
            raise TypeError(
                f"{who}: expected a ReplayBuffer and its state, or a Dataset, got "
                f"{type(source).__name__} and {type(state).__name__}."
            )
        for role in roles:
            keys.get(spec, role)
        in_ted = ted_names(leaf_names(spec), keys)
        leaves = jax.tree_util.tree_leaves_with_path(spec)
        names = [in_ted[leaf_name(path)] for path, _ in leaves]
        check_names(who, names)
        words = lambda leaf: jax.eval_shape(jax.random.key_data, leaf)
        is_keys = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        specs = [words(leaf) if is_keys(leaf) else leaf for _, leaf in leaves]
        self.paths: list[Any] = [path for path, _ in leaves]
        self.specs: dict[str, Any] = dict(zip(names, specs, strict=True))
        self._episodes: Any
        self._facts: list[dict[str, Any]]
        if isinstance(source, Dataset):
            self._episodes = source.only(source.numbers[source.lengths > 0])
            facts = self._episodes.facts
            self._facts = [
                {name: fact[number] for name, fact in facts.items()}
                for number in range(len(self._episodes))
            ]
            self.lengths: np.ndarray = self._episodes.lengths
        else:
            self._episodes = list(read.episodes(source, self._state))
            self._facts = [
                {
                    "environment": each.environment,
                    "complete": each.complete,
                    "running": not each.ended,
                    "cut": each.cut,
                }
                for each in self._episodes
            ]
            self.lengths = np.array([len(each) for each in self._episodes], np.int64)

    def __iter__(self) -> Iterator[SourceEpisode]:
        items = iter(self._episodes) if self._state is None else self._read()
        for one, facts in zip(items, self._facts, strict=True):
            leaves = dict(zip(self.specs, jax.tree.leaves(one), strict=True))
            yield SourceEpisode(leaves, facts)

    def _read(self) -> Iterator[Any]:
        """Yields the items of a buffer's episodes. One read alone would be compiled per length."""
        row_bytes = max(tree_nbytes(self._source.stored(self._state)), 1)
        piece = np.cumsum(self.lengths) * row_bytes // _PIECE
        for _, numbers in itertools.groupby(range(len(piece)), lambda number: piece[number]):
            group = [self._episodes[number] for number in numbers]
            slots = np.concatenate([each.slots for each in group])
            items = read.taken(self._source, self._state, slots)
            bounds = np.cumsum([0, *map(len, group)]).tolist()
            for start, stop in itertools.pairwise(bounds):
                yield jax.tree.map(lambda leaf, part=slice(start, stop): leaf[part], items)


def check_roles(who: str, names: Any) -> None:
    """Raises `ValueError` unless there are leaves of observations, actions, next observations."""
    for role in ("observation", "action", "next/observation"):
        if not any(within(name, role) for name in names):
            raise ValueError(
                f"{who}: expected items with '{role}', got leaves {list(names)}. Name them with "
                "keys=jrb.Keys(...)."
            )


def first_break(where: str, name: str, before: np.ndarray, after: np.ndarray) -> int | None:
    """Returns the first step after which the next step has something else than `after` says.

    Args:
        where: for the first words of errors.
        name: of the leaf.
        before: what each step has, `[T, ...]`.
        after: what comes after each step, `[T, ...]`.

    Raises:
        ValueError: both have other dtypes or shapes.
    """
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        raise ValueError(
            f"{where}: leaf 'next/{name}': expected rows like those before the action, "
            f"{before.dtype} of shape {before.shape[1:]}, got {after.dtype} of {after.shape[1:]}."
        )
    breaks = np.flatnonzero(flat.differ(before[None], after[None])[0])
    return int(breaks[0]) if len(breaks) else None
