"""Episodes of a buffer or of a dataset, written in the layouts of D4RL and RLDS.

K episodes, T steps of one.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any, cast

import h5py
import jax
import jax.numpy as jnp
import numpy as np

from jrb import read
from jrb.authoring import escaped_errors, leaf_name, leaf_names, tree_nbytes
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.output import new_path
from jrb.datasets.reading.names import check_names, ted_names
from jrb.datasets.reading.tabular import combined_flags
from jrb.keys import TED, within
from jrb.layouts import flat
from jrb.layouts.names import Leaves, nest
from jrb.state import BufferState

FLAGS = ("next/done", "next/terminated", "next/truncated")
VALID = "next/valid"

_PIECE = 32 << 20  # bytes of items that are read at a time
_D4RL = {
    "observation": "observations",
    "action": "actions",
    "next/reward": "rewards",
    "next/observation": "next_observations",
}


@dataclasses.dataclass(frozen=True, eq=False)
class SourceEpisode:
    """An episode: arrays `[T, ...]` by their names in TED, and facts.

    Those of a buffer's episode are `environment`, `complete` (as `jrb.read.Episode`), `running` (it
    had not ended) and `cut` (its beginning may be lost).
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
        """Returns the other leaves, terminated and truncated, bool `[T]`, and False if it is cut.

        Done is terminated unless it says truncated; the last step is truncated if it did not
        terminate. Cut is an episode whose last next observation is needed and not known.
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
    """The episodes with steps of a buffer and its state, or of a dataset, read piece by piece.

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
        ValueError: a writer without an order of time, items without flags or a role, or leaves
            whose names a file cannot tell apart.
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
    """Returns the first step whose next observation is not the observation of the next step.

    Raises:
        ValueError: both arrays `[T, ...]` have other dtypes or shapes.
    """
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        raise ValueError(
            f"{where}: leaf 'next/{name}': expected rows like those before the action, "
            f"{before.dtype} of shape {before.shape[1:]}, got {after.dtype} of {after.shape[1:]}."
        )
    breaks = np.flatnonzero(flat.differ(before[None], after[None])[0])
    return int(breaks[0]) if len(breaks) else None


@escaped_errors()
def write_d4rl(
    path: str | os.PathLike[str],
    buffer: ReplayBuffer | Dataset,
    state: BufferState | None = None,
) -> None:
    """Writes the episodes of a buffer or a dataset in D4RL's layout, one after the other.

    Further leaves go below `infos/`. An episode that is still running, or that was cut by
    `truncate`, ends by a time-out. Attributes of the file count those that run (`running`), and
    those whose beginning may have been overwritten (`cut`). Of flags, `done` alone is taken for a
    termination. Where the observation after a last step lacks (`next/valid`), the file has no
    `next_observations`.

    Args:
        path: of the new file; nothing may be there. It is there when it is whole.
        buffer: the description, with a writer that keeps the order of time; or a dataset, without
            a state. Observations, actions and rewards are single arrays.
        state: its state. It is only read, some megabytes at a time; items are written as
            they are stored.

    Raises:
        ValueError: there is something at the path, there are no steps or no such arrays, or they
            have a dtype that HDF5 lacks.
        TypeError: neither a buffer with its state nor a dataset.
    """
    source = Source("write_d4rl", buffer, state)
    check_roles("write_d4rl", source.specs)
    for name in _D4RL:
        if name not in source.specs:
            raise ValueError(
                f"write_d4rl: expected one array '{name}', got leaves {list(source.specs)}. "
                "write_rlds takes nested ones."
            )
    for name, leaf in source.specs.items():
        if np.dtype(leaf.dtype).kind not in "biufc":
            raise ValueError(
                f"write_d4rl: leaf '{name}': expected a dtype that HDF5 has, got {leaf.dtype}. "
                "Convert it."
            )
    steps = int(source.lengths.sum())
    if not steps:
        raise ValueError("write_d4rl: expected a buffer that holds steps, got an empty one.")
    in_file = lambda name: _D4RL.get(name) or "infos/" + name.removeprefix("info/")
    with new_path(path) as temporary, h5py.File(temporary, "w") as file:
        for name, leaf in source.specs.items():
            if name not in (*FLAGS, VALID):
                file.create_dataset(in_file(name), (steps, *leaf.shape), leaf.dtype)
        for name in ("terminals", "timeouts"):
            file.create_dataset(name, (steps,), bool)
        start, running, cut, is_whole = 0, 0, 0, True
        for episode in source:
            leaves, terminated, truncated, has_last = episode.split_flags()
            arrays = {in_file(name): leaf for name, leaf in leaves.items()}
            for name, array in {**arrays, "terminals": terminated, "timeouts": truncated}.items():
                cast(h5py.Dataset, file[name])[start : start + len(array)] = array
            running += episode.is_running
            cut += episode.is_cut
            start += len(terminated)
            is_whole &= has_last
        if not is_whole:
            del file["next_observations"]
        file.attrs.update(running=running, cut=cut)


@escaped_errors()
def write_rlds(
    buffer: ReplayBuffer | Dataset, state: BufferState | None = None
) -> Iterator[dict[str, Any]]:
    """Returns the episodes of a buffer or a dataset in RLDS's layout, one by one.

    An episode is a dict. `steps` has arrays `[L + 1, ...]`: the observations with the last one,
    `action`, `reward`, `is_first`, `is_last`, `is_terminal`, and further leaves under their names.
    What belongs to a step is zero in the last row. Without a leaf `discount`, that is float32, 0
    for the step that terminated and else 1. Where the observation after a last step lacks
    (`next/valid`), arrays are `[L, ...]`, and no step `is_last`.

    Beside `steps`, `environment` is whose the episode is, `is_running` whether it is still running;
    it is written as a truncated one. `is_cut` is whether its beginning may have been overwritten.
    Of a dataset, they are its facts. Of flags, `done` alone is taken for a termination.

    Args:
        buffer: the description, with a writer that keeps the order of time; or a dataset, without
            a state.
        state: its state. It is only read, some megabytes at a time; items are written as
            they are stored.

    Returns:
        An iterator, which `jrb.datasets.open` takes too.

    Raises:
        ValueError: items without observation, action or next observation; or, when the episode is
            asked for, a next observation that is not the observation of the next step, as RLDS has
            each of them once.
        TypeError: neither a buffer with its state nor a dataset.
    """
    source = Source("write_rlds", buffer, state)
    check_roles("write_rlds", source.specs)
    return (_episode(number, episode) for number, episode in enumerate(source))


def _episode(number: int, episode: SourceEpisode) -> dict[str, Any]:
    where = f"write_rlds: episode {number}"
    leaves, terminated, _, has_last = episode.split_flags()
    leaves = {"discount": (~terminated).astype(np.float32), **leaves}
    after = {
        name.removeprefix("next/"): leaves.pop(name)
        for name in list(leaves)
        if within(name, "next/observation")
    }
    before = {name for name in leaves if within(name, "observation")}
    if before != after.keys():
        raise ValueError(
            f"{where}: leaf 'next/observation': expected what the observation is, {sorted(before)},"
            f" got {sorted(after)}. RLDS has each observation once."
        )
    for name, leaf in after.items():
        step = first_break(where, name, leaves[name], leaf)
        if step is not None:
            raise ValueError(
                f"{where}: leaf 'next/{name}': expected the next step's '{name}', got another "
                f"after step {step}. RLDS has each observation once; write_d4rl has both."
            )
    rows = {"reward" if name == "next/reward" else name: leaf for name, leaf in leaves.items()}
    if has_last:  # a last row, with zeros where it has nothing
        for name, leaf in rows.items():
            last = after[name][-1:] if name in after else np.zeros_like(leaf[:1])
            rows[name] = np.concatenate([leaf, last])
    is_first, is_last, is_terminal = (np.zeros(len(terminated) + has_last, bool) for _ in range(3))
    is_first[0], is_last[-1], is_terminal[-1] = True, has_last, terminated[-1]
    rows |= {"is_first": is_first, "is_last": is_last, "is_terminal": is_terminal}
    check_names(where, rows)
    return {
        "steps": nest(rows),
        "environment": np.int64(episode.facts.get("environment", 0)),
        "is_running": np.bool_(episode.is_running),
        "is_cut": np.bool_(episode.is_cut),
    }
