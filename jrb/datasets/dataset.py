"""The class `Dataset`: episodes in files of any known format. K episodes, T steps of an episode."""

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, overload

import jax
import numpy as np

from jrb import authoring
from jrb.authoring import checks, escape_errors
from jrb.buffer import ReplayBuffer
from jrb.datasets import copies
from jrb.datasets import preprocess as preprocessing
from jrb.datasets.format import (
    Description,
    Episode,
    Format,
    Source,
    count_steps,
    native_dtype,
    regroup_steps,
    slice_steps,
)
from jrb.datasets.formats.recorded import Recorded
from jrb.datasets.reading.names import check
from jrb.migrate import writable
from jrb.queries import Facts, Queries
from jrb.samplers import Uniform
from jrb.state import BufferState
from jrb.types import Sampler, Storage, Unit
from jrb.units import Transition

_UNIFORM, _TRANSITION = Uniform(), Transition()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset(Queries, Sequence[Episode]):
    """Episodes in files, opened by `jrb.datasets.open`; each is read when it is accessed.

    A dataset is a sequence of episodes: `len`, iteration and `dataset[3]` work; a slice is another
    dataset, and so is what `where`, `best` and `sort` return, which read what they need at once. An
    episode is in TorchRL's layout (TED): a nested dict of NumPy arrays `[T, ...]` with
    `observation`, `action`, `next: {observation, reward, terminated, truncated, done}`, and all
    other arrays that the files have for each step, under their own names. Dtypes are those of the
    files, in native byte order. The last step of an episode is always `done`.

    Some files lack the observation after the last step of an episode that did not terminate. Zeros
    stand in for it, and all episodes have a leaf `next/valid`, bool `[T]`, False at these steps.

    Attributes:
        source: the path of the files, or the object that the format reads instead of files.
        format: the format of the files.
        description: the facts that are known before any step is read.
        numbers: the indices of these episodes among those of the source, int64 `[K]`.
        final: "keep" or "drop": the treatment of last steps that lack their next observation.
    """

    source: Source
    format: Format
    description: Description = dataclasses.field(repr=False)
    numbers: np.ndarray
    final: str = "keep"

    def __len__(self) -> int:
        """Returns the number of episodes K."""
        return len(self.numbers)

    @property
    def episodes(self) -> int:
        """The number of episodes K, equal to `len(dataset)`."""
        return len(self.numbers)

    @property
    def transitions(self) -> int:
        """The number of steps of all episodes."""
        return int(self.lengths.sum())

    @property
    def lengths(self) -> np.ndarray:
        """The number of steps of each episode, int64 `[K]`."""
        num_dropped = self.cut if self.final == "drop" else 0
        return np.maximum(self.description.lengths[self.numbers] - num_dropped, 0)

    @property
    def cut(self) -> np.ndarray:
        """Bool `[K]`, True for episodes that lack an observation after their last step.

        Only episodes that did not terminate need one, so others are False.
        """
        cut = self.description.cut
        return np.zeros(len(self), bool) if cut is None else cut[self.numbers]

    @property
    def complete(self) -> np.ndarray:
        """Bool `[K]`, True for episodes that the dataset holds from their first step to their end.

        Only replay buffers can hold a part of an episode; see `jrb.read.Episode`.
        """
        return self.facts.get("complete", np.ones(len(self), bool)).astype(bool)

    @functools.cached_property
    def spec(self) -> Any:
        """The shapes and dtypes of one step, a nested dict of `jax.ShapeDtypeStruct`."""
        names = ["terminated", "truncated", "done", *["valid"] * self._is_marked]
        # Flags are bool `[]` whatever the files store.
        flags = dict.fromkeys(names, jax.ShapeDtypeStruct((), np.dtype(bool)))
        spec = self.description.spec
        return {**spec, "next": {**spec["next"], **flags}}

    @property
    def nbytes(self) -> int:
        """The number of bytes that all steps take as arrays in memory."""
        return self.transitions * authoring.tree_nbytes(self.spec)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the files, such as environment, author, and spaces."""
        return self.description.metadata

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for users about data that was lost or left out, and about assumptions."""
        notes = tuple(map(authoring.printable, self.description.notes))
        if count := int(self.cut.sum()):
            how = "left out" if self.final == "drop" else "kept, with zeros and next/valid=False"
            notes += (
                f"The observation after the last step is in no file for {count} of {len(self)} "
                f"episodes, which would need it: these steps are {how}.",
            )
        return notes

    @property
    def facts(self) -> dict[str, np.ndarray]:
        """Facts that the files record about each episode: arrays `[K]` by name, such as `seed`."""
        return {name: fact[self.numbers] for name, fact in self.description.facts.items()}

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> "Dataset": ...
    def __getitem__(self, index: int | slice) -> Any:
        """Returns the episode at an integer index, or the dataset of the episodes in a slice."""
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
        """Yields all steps in order, in blocks `[T, ...]` of lengths that the format chooses."""
        return self._read(self.format.blocks, each=False)

    def steps(self, rows: int | None = None) -> Iterator[Episode]:
        """Yields all steps in order, in blocks of one length or one by one.

        Args:
            rows: the number of steps in each block, leaves `[rows, ...]`; the last block may have
                fewer. None for single steps, leaves `[...]`.
        """
        if rows is not None:
            checks.count("rows", rows)
            yield from regroup_steps(self.blocks(), rows)
            return
        for block in self.blocks():
            for row in range(count_steps(block)):
                yield slice_steps(block, row)

    @escape_errors()
    def returns(self) -> Any:
        """Returns the sum of the rewards of each episode, float64 `[K]`; reads only rewards.

        If the reward has several leaves, such as one for each agent, returns a dict of such sums.

        Raises:
            ValueError: the files have no rewards.
        """
        got = f"a set of format '{self.format.name}' without rewards, with the leaves "
        got += str(authoring.leaf_names(self.spec))
        check("reward" in self.spec["next"], "returns", "a leaf 'next/reward'", got)
        spec, lengths = self.spec["next"]["reward"], self.lengths.tolist()
        returns = jax.tree.map(lambda leaf: np.zeros((len(self), *leaf.shape)), spec)
        # Formats yield the rewards of dropped last steps too, so cut them off.
        for number, rewards in enumerate(self.format.rewards(self.source, self.numbers.tolist())):
            for sums, leaf in zip(jax.tree.leaves(returns), jax.tree.leaves(rewards), strict=True):
                sums[number] = leaf[: lengths[number]].sum(axis=0, dtype=np.float64)
        return returns

    def _facts_of_each(self) -> Facts:
        own = {"length": lambda: self.lengths, "complete": lambda: self.complete}
        own |= {"return": self.returns} if "reward" in self.spec["next"] else {}
        facts = {name: functools.partial(self.facts.get, name) for name in self.facts} | own
        # As episodes of a buffer have it.
        return facts | ({"env": facts["environment"]} if "environment" in facts else {})

    def _choose(self, find: Callable[[Any], np.ndarray]) -> Self:
        return self.only(self.numbers[find(self)])

    @escape_errors()
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
        """Returns a read-only buffer that holds all steps, and its state.

        Steps are copied in pieces of 8 MiB, so that memory stays bounded. A `jrb.MemmapStorage`
        with a path is committed every 512 MiB: after a crash the same call continues the copy,
        and logs a warning to the logger `jrb.datasets`. Once the copy is complete, the call only
        opens it, and builds new state for a sampler or unit that differs from the copy's.

        Rewards that are NaN or infinite are kept; a warning of the same logger gives their number
        and the first episode that contains one.

        Args:
            storage: the storage of the items; None for the device, or for the files of the copy
                if `cache` is True.
            sampler: the buffer's sampler.
            unit: the buffer's unit.
            num_envs: the number of environments E of the buffer; each episode is written to the
                environment that has the fewest steps so far. None for one stream of all episodes.
            fraction: the fraction of the episodes to load, the first ones; None for all.
            episodes: the number of episodes to load, the first ones; or a slice, or their indices.
            transforms: the buffer's transforms.
            cache: True to copy the dataset to files the first time, and to open this copy later.
                The copy is found by the dataset's name and the content of its files.
            root: the folder of such copies; None for the user's cache folder.
            progress: True to show a bar; None to show it if stderr is a terminal.
            parts: arguments of `jrb.ReplayBuffer`, such as `batch_size`. Unless `cast` is False,
                dtypes that JAX lacks are converted as JAX converts them: float64 to float32, and
                int64 to int32 if all numbers fit.

        Returns:
            The buffer, with a slot for every step and `writer=jrb.ReadOnly(...)`, and its state.

        Raises:
            ValueError: there are no steps; the storage's path has something other than a copy of
                this dataset; or the files have changed since the dataset was opened.
            TypeError: `parts` has a writer or a capacity, which the dataset chooses itself.
            ModuleNotFoundError: platformdirs is not installed, and `cache` has no `root`.

        Example:
            >>> import jax, jrb
            >>> dataset = jrb.datasets.open("tests/data/minari/cartpole-v0")
            >>> buffer, state = dataset.buffer(episodes=3, batch_size=2)
            >>> buffer.sample(state, jax.random.key(0)).data["observation"].shape
            (2, 4)
        """
        selection = copies.select_episodes(self, fraction, episodes)
        parts |= {"sampler": sampler, "unit": unit, "transforms": transforms}
        return copies.fill_buffer(selection, storage, num_envs, cache, root, progress, parts)

    @escape_errors()
    def to_buffer(self, **parts: Any) -> tuple[ReplayBuffer, BufferState]:
        """Returns a new buffer that holds all steps and can be written to, and its state.

        Args:
            parts: arguments of `jrb.ReplayBuffer`. By default, the capacity is the number of steps,
                and all else is as for `buffer`, but for the writer, which is not read-only.

        Raises:
            ValueError: there are no steps, or they do not fit the capacity.
        """
        flow, options = copies.deal_to_buffer(self, parts.get("num_envs"), "to_buffer")
        buffer, size = ReplayBuffer(**(options | parts)), options["capacity"]
        check(buffer.capacity >= size, "capacity", f"at least {size}", buffer.capacity)
        return buffer, copies.fill_state(flow, writable(buffer), None)

    @escape_errors()
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
        """Applies a function to all steps in order, and writes the results as a new dataset.

        Memory use does not grow with the dataset. All dtypes are kept. The new dataset is a folder
        of Parquet files, like those of `jrb.datasets.Recorder`. Episodes keep their bounds: the
        last step of each is done, and `next/valid` is copied.

        Args:
            function: the function from one step in TED, leaves `[...]`, to a step. Leaves, shapes
                and dtypes may change, but must be the same in all results, which must have
                `next/reward`, `next/terminated` and `next/truncated`.
            dest: the path of the new folder, which must not exist. A failure leaves nothing there.
            workers: the number of processes that call the function and import the module that
                defines it; 0 to call it in this process.
            num_frames: the maximum number of steps to write, the first ones; None for all.
            by: "step"; or "episode" if the function takes an episode, leaves `[T, ...]`, and
                returns an episode of any length, or None to leave the episode out.
            jit: True if the function is written in JAX. It is compiled once, and applied to blocks
                of steps by `vmap`.
            cast: with `jit`, True to convert 64-bit numbers to 32 bits unless `jax_enable_x64` is
                set; one that does not fit is an error. If False, such leaves are errors.
            progress: True to show a bar; None to show it if stderr is a terminal.

        Returns:
            The new dataset.

        Raises:
            RuntimeError: the function failed or returned other leaves than before, or a process
                failed; the message names the episode and the step, and the cause is the error.
            ValueError: `dest` exists; or there was no step to write.
            TypeError: `function` cannot be sent to other processes; or, with `jit`, a leaf has a
                64-bit dtype that JAX lacks.
        """
        preprocessing.preprocess(self, function, dest, workers, num_frames, by, jit, cast, progress)
        path = authoring.absolute_path(dest, "dest")
        format = Recorded().snapshot(path)
        description = format.describe(path)
        return Dataset(path, format, description, np.arange(len(description.lengths)))

    def only(self, numbers: np.ndarray) -> Self:
        """Returns the dataset of the source's episodes at the indices `numbers`, int64 `[K]`."""
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
        """True if episodes have a leaf `next/valid`; all slices of a dataset agree on this."""
        cut = self.description.cut
        return self.final == "keep" and cut is not None and bool(cut.any())

    def _read(
        self, read: Callable[[Source, list[int]], Iterator[Episode]], each: bool
    ) -> Iterator[Episode]:
        """Yields blocks, or `each` episode, with all flags; raises if the files have changed."""
        # Find the indices of last steps among all steps, and of last steps without a next
        # observation. Episodes without steps have none.
        lengths = self.description.lengths[self.numbers]
        stops, total, stop, number = np.cumsum(lengths), int(lengths.sum()), 0, -1
        last, cut = (stops - 1)[lengths > 0], self.cut[lengths > 0]
        # Where the last step is dropped, the one before it ends the episode.
        ends, lacking = np.unique(last - cut if self.final == "drop" else last), last[cut]
        with escape_errors():
            try:
                for number, block in enumerate(read(self.source, self.numbers.tolist())):
                    start, stop = stop, stop + count_steps(block)
                    # The files have changed if there are more steps than described, or an episode
                    # has another length.
                    if stop > total or (each and stop != stops[number]):
                        raise IndexError("an episode has another length")
                    yield self._with_flags(block, ends, lacking, start, stop)
                if stop != total:
                    raise IndexError("there are fewer episodes")
            except IndexError as error:
                # Formats raise it for a missing episode too.
                what = "episode" if each else "block"
                raise ValueError(
                    f"expected {total} steps in all, as when the dataset was opened, got {stop} up "
                    f"to {what} {number}: the files were changed since. Open it again."
                ) from error

    def _with_flags(
        self, block: Episode, ends: np.ndarray, lacking: np.ndarray, start: int, stop: int
    ) -> Episode:
        """Returns the block with the steps `start` to `stop`, with all flags.

        `ends` are the last steps of episodes, and `lacking` those without a next observation.
        """
        # Take the entries within the block, counted from its start.
        ends, lacking = (
            steps[slice(*np.searchsorted(steps, [start, stop]))] - start
            for steps in (ends, lacking)
        )
        # Bring numbers into native byte order; this copies only leaves in another order.
        block = jax.tree.map(lambda leaf: leaf.astype(native_dtype(leaf.dtype), copy=False), block)
        # The last step of an episode is done: without termination it counts as truncated.
        terminated = np.asarray(block["next"]["terminated"], bool)
        truncated = np.array(block["next"]["truncated"], bool)
        truncated[ends] |= ~terminated[ends]
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        # Mark the steps without a next observation, or leave them out.
        valid = np.ones(stop - start, bool)
        valid[lacking] = False
        if self._is_marked:
            flags["valid"] = valid
        block = {**block, "next": {**block["next"], **flags}}
        return slice_steps(block, valid) if self.final == "drop" and len(lacking) else block
