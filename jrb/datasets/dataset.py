"""A dataset: episodes in files, in the way that some library wrote them.

K episodes, T steps of one.
"""

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, overload

import jax
import numpy as np

from jrb import authoring
from jrb.authoring import checks, escaped_errors
from jrb.buffer import ReplayBuffer
from jrb.datasets import copies
from jrb.datasets import preprocess as preprocessing
from jrb.datasets.format import (
    Description,
    Episode,
    Format,
    Source,
    native,
    regrouped,
    rows_of,
    sliced,
)
from jrb.datasets.formats.recorded import Recorded
from jrb.samplers import Uniform
from jrb.state import BufferState
from jrb.types import Sampler, Storage, Unit
from jrb.units import Transition

_UNIFORM, _TRANSITION = Uniform(), Transition()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset(Sequence[Episode]):
    """Episodes in files, opened by `jrb.datasets.open`; each is read when it is accessed.

    A sequence of episodes: `len`, iteration and `dataset[3]` work; slices are datasets too. An
    episode is a nested dict of NumPy arrays `[T, ...]` in the files' dtypes, in native byte order
    (TorchRL's layout, TED): `observation`, `action`, `next: {observation, reward, terminated,
    truncated, done}`, and all other arrays that the files have for each step, under their names.
    The last step of an episode is always `done`.

    Some files lack the observation after the last step of an episode that did not terminate. It is
    then zeros, and every episode has a leaf `next/valid`, bool `[T]`, False for such steps.

    Attributes:
        source: the path, or what the format takes in place of one.
        format: the format of the files.
        description: facts that are there before steps are read.
        numbers: int64 `[K]`, which of the source's episodes these are.
        final: "keep" or "drop", what happens to a last step without its next observation.
    """

    source: Source
    format: Format
    description: Description = dataclasses.field(repr=False)
    numbers: np.ndarray
    final: str = "keep"

    def __len__(self) -> int:
        """K, the number of episodes."""
        return len(self.numbers)

    @property
    def episodes(self) -> int:
        """K, as `len`."""
        return len(self.numbers)

    @property
    def transitions(self) -> int:
        """The number of steps of all episodes."""
        return int(self.lengths.sum())

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[K]`, the steps of each episode."""
        dropped = self.cut if self.final == "drop" else 0
        return np.maximum(self.description.lengths[self.numbers] - dropped, 0)

    @property
    def cut(self) -> np.ndarray:
        """Bool `[K]`, True if the next observation of the last step is needed and in no file."""
        cut = self.description.cut
        return np.zeros(len(self), bool) if cut is None else cut[self.numbers]

    @property
    def complete(self) -> np.ndarray:
        """Bool `[K]`, True if an episode has ended and is there from its first step on.

        False only for episodes of a buffer that was saved: see `jrb.read.Episode`. In other files
        an episode ends where its rows do.
        """
        return self.facts.get("complete", np.ones(len(self), bool)).astype(bool)

    @functools.cached_property
    def spec(self) -> Any:
        """One step: a nested dict of `jax.ShapeDtypeStruct`."""
        names = ["terminated", "truncated", "done", *["valid"] * self._is_marked]
        flags = dict.fromkeys(names, jax.ShapeDtypeStruct((), np.dtype(bool)))
        spec = self.description.spec
        return {**spec, "next": {**spec["next"], **flags}}

    @property
    def nbytes(self) -> int:
        """The bytes of all steps as arrays."""
        return self.transitions * authoring.tree_nbytes(self.spec)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the files, such as environment, author, and spaces."""
        return self.description.metadata

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for readers: what was lost, left out, or assumed."""
        notes = tuple(map(authoring.printable, self.description.notes))
        if count := int(self.cut.sum()):
            kept = "left out" if self.final == "drop" else "kept, with zeros and next/valid=False"
            notes += (
                f"The observation after the last step is in no file for {count} of {len(self)} "
                f"episodes, which would need it: these steps are {kept}.",
            )
        return notes

    @property
    def facts(self) -> dict[str, np.ndarray]:
        """Arrays `[K]` by name, such as `seed`: what the files say of each episode."""
        return {name: fact[self.numbers] for name, fact in self.description.facts.items()}

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> "Dataset": ...
    def __getitem__(self, index: int | slice) -> Any:
        """Returns an episode; or the dataset of a slice of them."""
        if isinstance(index, slice):
            return self.only(self.numbers[index])
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"expected an episode of {len(self)}, got number {number}.")
        (episode,) = self.only(self.numbers[number : number + 1 or None])
        return episode

    def __iter__(self) -> Iterator[Episode]:
        return self._read(self.format.pick, each=True)

    def blocks(self) -> Iterator[Episode]:
        """Yields all steps in order, in blocks `[T, ...]` as the files are best read."""
        return self._read(self.format.blocks, each=False)

    def steps(self, rows: int | None = None) -> Iterator[Episode]:
        """Yields all steps in order.

        Args:
            rows: the number of steps at a time, `[rows, ...]`; the last block may have fewer. None
                for single steps, `[...]`.
        """
        if rows is not None:
            checks.count("rows", rows)
            yield from regrouped(self.blocks(), rows)
            return
        for block in self.blocks():
            for row in range(rows_of(block)):
                yield sliced(block, row)

    @escaped_errors()
    def returns(self) -> Any:
        """Returns float64 `[K]`, the sum of the rewards of each episode; reads only these.

        A nested dict of them where the reward has several leaves, such as one for each agent.

        Raises:
            ValueError: there are no rewards in the files.
        """
        if "reward" not in self.spec["next"]:
            raise ValueError(
                f"returns: expected a leaf 'next/reward', got a set of format '{self.format.name}' "
                f"without rewards, with the leaves {authoring.leaf_names(self.spec)}."
            )
        spec, lengths = self.spec["next"]["reward"], self.lengths.tolist()
        returns = jax.tree.map(lambda leaf: np.zeros((len(self), *leaf.shape)), spec)
        for number, rewards in enumerate(self.format.rewards(self.source, self.numbers.tolist())):
            for sums, leaf in zip(jax.tree.leaves(returns), jax.tree.leaves(rewards), strict=True):
                sums[number] = leaf[: lengths[number]].sum(axis=0, dtype=np.float64)
        return returns

    def filter(self, test: Callable[[Episode], Any]) -> "Dataset":
        """Returns the episodes for which a function is true; reads them all."""
        return self.only(self.numbers[[bool(test(episode)) for episode in self]])

    def at_least(self, steps: int) -> "Dataset":
        """Returns the episodes that have at least this number of steps."""
        checks.count("steps", steps)
        return self.only(self.numbers[self.lengths >= steps])

    def best(self, fraction: float) -> "Dataset":
        """Returns the episodes with the highest returns, as a fraction of K, in their order.

        At least one, if there is one; of equal returns the earlier ones.
        """
        checks.fraction("fraction", fraction)
        count, returns = max(1, round(fraction * len(self))), self.returns()
        shape = jax.tree.map(np.shape, returns)
        if shape != (len(self),):
            raise ValueError(
                f"best: expected one return for each episode, got them in shape {shape}. Choose by "
                "one of them, and take these: dataset.only(dataset.numbers[...])."
            )
        order = np.argsort(-returns, kind="stable")[:count]
        return self.only(self.numbers[np.sort(order)])

    @escaped_errors()
    def buffer(
        self,
        *,
        storage: Storage | None = None,
        sampler: Sampler = _UNIFORM,
        unit: Unit = _TRANSITION,
        num_envs: int | None = None,
        fraction: float | None = None,
        episodes: int | slice | Sequence[int] | np.ndarray | None = None,
        transforms: tuple[Any, ...] = (),
        cache: bool = False,
        root: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        **parts: Any,
    ) -> tuple[ReplayBuffer, BufferState]:
        """Returns a buffer that holds all steps, and is only read; and its state.

        Steps are read and written in pieces of some megabytes, however many there are. In a
        `jrb.MemmapStorage` with a path, they are committed now and then: after a crash the same
        call continues, with a warning of the logger `jrb.datasets`. Once all steps are there, it
        opens them, without any work for the parts that the copy was made with.

        Rewards that are NaN or infinite are kept; a warning of the same logger has their number,
        and the first episode that has some.

        Args:
            storage: where the items go; None for the device, or with `cache` for files.
            sampler: the buffer's sampler.
            unit: the buffer's unit.
            num_envs: E; each episode then goes to the environment that has the fewest steps so far.
                None for one stream, the episodes one after the other.
            fraction: the part of the episodes that is loaded, from the first on.
            episodes: the number of episodes from the first on; or a slice, or their numbers.
            transforms: the buffer's transforms.
            cache: True to make a copy of the dataset in files once, and to open that the next
                time. It is found by the content of the dataset's files, wherever these are.
            root: the folder of such copies; None for the user's cache of the system.
            progress: True for a bar; None for one where stderr is a terminal.
            parts: arguments of `jrb.ReplayBuffer`, such as `batch_size`. Unless `cast` is False,
                dtypes that JAX would change are converted as it would: float64 to float32, and
                int64 to int32 if all numbers fit.

        Returns:
            The description, with as many slots as are needed and `writer=jrb.ReadOnly(...)`, and
            the state.

        Raises:
            ValueError: there are no steps; something else is at the path of the storage; or the
                files have other episodes than when they were opened.
            TypeError: a writer or a capacity, which a dataset chooses itself.
            ModuleNotFoundError: platformdirs is not installed, and `cache` has no `root`.

        Example:
            >>> import jax, jrb
            >>> dataset = jrb.datasets.open("tests/data/minari/cartpole-v0")
            >>> buffer, state = dataset.buffer(episodes=3, batch_size=2)
            >>> buffer.sample(state, jax.random.key(0)).data["observation"].shape
            (2, 4)
        """
        chosen = copies.select(self, fraction, episodes)
        parts |= {"sampler": sampler, "unit": unit, "transforms": transforms}
        return copies.fill_buffer(chosen, storage, num_envs, cache, root, progress, parts)

    @escaped_errors()
    def preprocess(
        self,
        function: Callable[[Episode], Any],
        dest: str | os.PathLike[str],
        *,
        workers: int = 0,
        num_frames: int | None = None,
        by: str = "step",
        jit: bool = False,
        cast: bool = False,
        progress: bool | None = None,
    ) -> "Dataset":
        """Maps all steps through a function into a new dataset on the disk, in their order.

        Memory stays bounded, whatever the size. All dtypes are kept. The new dataset is a folder of
        Parquet files, as those of `jrb.datasets.Recorder`. Episodes end where they did: the last
        step of each is done, and `next/valid` stays as it was.

        Args:
            function: takes a step in TED, leaves `[...]`, and returns a step. Its leaves,
                shapes and dtypes may be others, but must be the same for all steps. `next/reward`,
                `next/terminated` and `next/truncated` must be among them.
            dest: the path of a folder that does not exist yet. It is not created if this fails.
            workers: the number of processes that call it, each of which imports the module in which
                it is; 0 for this one.
            num_frames: the number of steps to map at most, the first ones; None for all.
            by: "step", or "episode": the function maps an episode, leaves `[T, ...]`, to another
                of any length, or to None, which leaves it out.
            jit: True for a function of JAX. It is compiled once, and mapped by `vmap` over blocks
                of steps.
            cast: with `jit`, True to convert numbers of 64 bits to 32, if JAX has no others; an
                integer that does not fit is an error. If False, they are errors.
            progress: True for a bar; None for one where stderr is a terminal.

        Returns:
            The new dataset.

        Raises:
            RuntimeError: the function failed, or returned something else than before, or cannot be
                sent to a process; the message names the episode and the step, and the cause is the
                error.
            ValueError: there is something at `dest`; or no step was left.
            TypeError: with `jit`, numbers of 64 bits.
        """
        preprocessing.preprocess(self, function, dest, workers, num_frames, by, jit, cast, progress)
        path = authoring.absolute_path(dest, "dest")
        format = Recorded().snapshot(path)
        description = format.describe(path)
        return Dataset(path, format, description, np.arange(len(description.lengths)))

    def only(self, numbers: np.ndarray) -> Self:
        """Returns the dataset of these of the source's episodes."""
        return dataclasses.replace(self, numbers=np.asarray(numbers, np.int64))

    def __repr__(self) -> str:
        return authoring.table_text(*self._table())

    def _repr_html_(self) -> str:
        return authoring.table_html(*self._table())

    def _table(self) -> tuple[Any, ...]:
        leaves = [
            (authoring.leaf_name(path), str(leaf.dtype), str(list(leaf.shape)))
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.spec)
        ]
        where = self.source if isinstance(self.source, str) else type(self.source).__name__
        title = (
            f"Dataset ({self.format.name}): {self.episodes} episodes, {self.transitions} "
            f"transitions, {authoring.bytes_text(self.nbytes)}, {where}"
        )
        return title, ("leaf", "dtype", "shape"), leaves, self.notes

    @property
    def _is_marked(self) -> bool:
        """True if episodes have `next/valid`: the same for all slices of a set."""
        cut = self.description.cut
        return self.final == "keep" and cut is not None and bool(cut.any())

    def _read(
        self, read: Callable[[Source, list[int]], Iterator[Episode]], each: bool
    ) -> Iterator[Episode]:
        """Yields blocks of steps with all flags, episodes with `each`; refuses changed files."""
        lengths = self.description.lengths[self.numbers]
        stops, total, stop, number = np.cumsum(lengths), int(lengths.sum()), 0, -1
        last, cut = (stops - 1)[lengths > 0], self.cut[lengths > 0]
        # Where the last step is dropped, the one before it ends the episode.
        ends, lacking = np.unique(last - cut if self.final == "drop" else last), last[cut]
        with escaped_errors():
            try:
                for number, block in enumerate(read(self.source, self.numbers.tolist())):
                    start, stop = stop, stop + rows_of(block)
                    if stop > total or (each and stop != stops[number]):
                        raise IndexError("an episode has another length")
                    yield self._with_flags(block, ends, lacking, start, stop)
                if stop != total:
                    raise IndexError("there are fewer episodes")
            except IndexError as error:  # as formats raise where an episode is missing
                what = "episode" if each else "block"
                raise ValueError(
                    f"expected {total} steps in all, as when the dataset was opened, got {stop} up "
                    f"to {what} {number}: the files were changed since. Open it again."
                ) from error

    def _with_flags(
        self, block: Episode, ends: np.ndarray, lacking: np.ndarray, start: int, stop: int
    ) -> Episode:
        """Returns a block of the steps from `start` to `stop` with all flags."""
        ends, lacking = (
            steps[slice(*np.searchsorted(steps, [start, stop]))] - start
            for steps in (ends, lacking)
        )
        block = jax.tree.map(lambda leaf: leaf.astype(native(leaf.dtype), copy=False), block)
        terminated = np.asarray(block["next"]["terminated"], bool)
        truncated = np.array(block["next"]["truncated"], bool)
        truncated[ends] |= ~terminated[ends]
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        valid = np.ones(stop - start, bool)
        valid[lacking] = False
        if self._is_marked:
            flags["valid"] = valid
        block = {**block, "next": {**block["next"], **flags}}
        return sliced(block, valid) if self.final == "drop" and len(lacking) else block
