"""Writes episodes in the layouts of D4RL and RLDS. K episodes, L steps of an episode."""

import os
from collections.abc import Iterator
from typing import Any, cast

import h5py
import jax
import numpy as np

from jrb.authoring import casting, escape_errors, leaf_names
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.format import Episode
from jrb.datasets.formats.checkpoint import InMemory, episode_table
from jrb.datasets.output import new_path
from jrb.datasets.reading.names import check, check_names, ted_names
from jrb.datasets.reading.tabular import FLAGS, VALID
from jrb.keys import within
from jrb.layouts import compact
from jrb.layouts.names import Leaves, flatten, nest
from jrb.state import BufferState

_D4RL = {
    "observation": "observations",
    "action": "actions",
    "next/reward": "rewards",
    "next/observation": "next_observations",
}


def dataset_of(
    who: str, source: Any, state: BufferState | None, roles: tuple[str, ...] = ()
) -> tuple[Dataset, dict[str, Any]]:
    """Returns the non-empty episodes of a buffer and its state, or of a dataset, as a dataset.

    Also returns the spec of each leaf of a step by its name in TED. Raises if items lack one of
    the `roles`, which are fields of `jrb.Keys`.
    """
    if isinstance(source, Dataset) and state is None:
        return source.only(source.numbers[source.lengths > 0]), flatten(source.spec, who)
    if not isinstance(source, ReplayBuffer) or state is None:
        raise TypeError(
            f"{who}: expected a ReplayBuffer and its state, or a Dataset, got "
            f"{type(source).__name__} and {type(state).__name__}."
        )
    # Name the leaves of the stored items as in TED, and check the names before anything is written.
    spec = jax.tree.map(casting.raw_spec, source.item_spec(state))
    for role in roles:
        source.keys.get(spec, role)
    in_ted = ted_names(leaf_names(spec), source.keys)
    names = [in_ted[name] for name in leaf_names(spec)]
    check_names(who, names)
    # The table of the buffer's episodes is the source of a dataset in memory.
    table, format = episode_table(who, source, state, names), InMemory(max_expansion=np.inf)
    dataset = Dataset(table, format, format.describe(table), np.arange(len(table.ends)))
    return dataset, dict(zip(names, jax.tree.leaves(spec), strict=True))


def split_flags(episode: Episode) -> tuple[Leaves, np.ndarray, np.ndarray, bool]:
    """Returns an episode's leaves without flags, terminated, truncated, and a bool.

    The bool is False if the observation after the last step is missing (`next/valid`).
    """
    leaves = flatten(episode, "episode")
    _, terminated, truncated = (leaves.pop(name) for name in FLAGS)
    return leaves, terminated, truncated, bool(np.all(leaves.pop(VALID, True)))


def unfinished_masks(dataset: Dataset) -> list[np.ndarray]:
    """Returns two masks of episodes, bool `[K]`: those still running, and those cut at the start.

    The start of an episode is cut if its first steps may have been overwritten in the ring.
    """
    facts, none = dataset.facts, np.zeros(len(dataset), bool)
    return [facts.get(n, facts.get(f"is_{n}", none)).astype(bool) for n in ("running", "cut")]


def check_roles(who: str, names: Any) -> None:
    """Raises `ValueError` if leaves of observation, action or next observation are missing."""
    for role in ("observation", "action", "next/observation"):
        has_role = any(within(name, role) for name in names)
        got = f"leaves {list(names)}. Name them with keys=jrb.Keys(...)"
        check(has_role, who, f"items with '{role}'", got)


def check_chain(where: str, name: str, before: np.ndarray, after: np.ndarray, cure: str) -> None:
    """Raises `ValueError` unless each row of `after` is the next row of `before`."""
    forms = [f"{rows.dtype} of shape {rows.shape[1:]}" for rows in (before, after)]
    expected = f"rows like those before the action, {forms[0]}"
    check(forms[0] == forms[1], f"{where}: leaf 'next/{name}'", expected, forms[1])
    # Rows are compared by their bits, so that NaN equals itself.
    for step in np.flatnonzero(compact.differ(before[None], after[None])[0])[:1]:
        got = f"another after step {step}. {cure}"
        expected = "what stands before the action of the next step"
        check(False, f"{where}: leaf 'next/{name}'", expected, got)


@escape_errors()
def write_d4rl(
    path: str | os.PathLike[str],
    buffer: ReplayBuffer | Dataset,
    state: BufferState | None = None,
) -> None:
    """Writes the episodes of a buffer or a dataset to an HDF5 file in D4RL's layout.

    Leaves that D4RL does not name are written below `infos/`. Episodes that are still running, or
    were ended by `truncate`, end by a time-out. Two attributes of the file count the episodes that
    are still running (`running`), and those whose first steps may have been overwritten (`cut`).
    If `done` is the only flag, it counts as termination. If a last step lacks its next observation
    (`next/valid`), the file has no `next_observations`.

    Args:
        path: the new file, which must not exist. It appears there once it is complete.
        buffer: a buffer whose writer keeps the order of time, or a dataset, without a state.
            Observation, action and reward must be single arrays.
        state: the buffer's state. It is only read, some megabytes at a time; items are written
            as they are stored.

    Raises:
        ValueError: the path exists, there are no steps, or a leaf is missing, nested, or of a
            dtype that HDF5 lacks.
        TypeError: `buffer` is neither a buffer with its state nor a dataset.
    """
    dataset, specs = dataset_of("write_d4rl", buffer, state)
    check_roles("write_d4rl", specs)
    # Raise for items that D4RL's layout cannot hold, before the file is created.
    for name in _D4RL:
        got = f"leaves {list(specs)}. write_rlds takes nested ones"
        check(name in specs, "write_d4rl", f"one array '{name}'", got)
    for name, leaf in specs.items():
        is_known, where = np.dtype(leaf.dtype).kind in "biufc", f"write_d4rl: leaf '{name}'"
        check(is_known, where, "a dtype that HDF5 has", f"{leaf.dtype}. Convert it")
    steps = dataset.transitions
    check(steps, "write_d4rl", "a buffer that holds steps", "an empty one")
    # Names that D4RL lacks are below `infos/`, as those of `info` are.
    in_file = lambda name: _D4RL.get(name) or "infos/" + name.removeprefix("info/")
    with new_path(path) as temporary, h5py.File(temporary, "w") as file:
        for name, leaf in specs.items():
            if name not in (*FLAGS, VALID):
                file.create_dataset(in_file(name), (steps, *leaf.shape), leaf.dtype)
        for name in ("terminals", "timeouts"):
            file.create_dataset(name, (steps,), bool)
        # Copy the episodes one after the other.
        start, is_whole = 0, True
        for episode in dataset:
            leaves, terminated, truncated, has_last = split_flags(episode)
            arrays = {in_file(name): leaf for name, leaf in leaves.items()}
            for name, array in {**arrays, "terminals": terminated, "timeouts": truncated}.items():
                cast(h5py.Dataset, file[name])[start : start + len(array)] = array
            start += len(terminated)
            is_whole &= has_last
        # A file of D4RL has all next observations or none.
        if not is_whole:
            del file["next_observations"]
        is_running, is_cut = unfinished_masks(dataset)
        file.attrs.update(running=is_running.sum(), cut=is_cut.sum())


@escape_errors()
def write_rlds(
    buffer: ReplayBuffer | Dataset, state: BufferState | None = None
) -> Iterator[dict[str, Any]]:
    """Returns an iterator over the episodes of a buffer or a dataset in RLDS's layout.

    An episode is a dict. `steps` has arrays `[L + 1, ...]`: `observation` with the one after the
    last step, `action`, `reward`, `is_first`, `is_last`, `is_terminal`, and all other leaves under
    their names. The last row holds only that observation; its other entries are zero. If items
    have no `discount`, it is float32, 0 at the step that terminates and 1 elsewhere. If the last
    step lacks its next observation (`next/valid`), arrays are `[L, ...]` and no step `is_last`.

    An episode also has `environment`, the index of its environment; `is_running`, True if it has
    not ended and is written as truncated; and `is_cut`, True if its first steps may have been
    overwritten. A dataset's facts provide these. If `done` is the only flag, it means termination.

    Args:
        buffer: a buffer whose writer keeps the order of time, or a dataset, without a state.
        state: the buffer's state. It is only read, some megabytes at a time; items are written
            as they are stored.

    Returns:
        The iterator, which `jrb.datasets.open` accepts.

    Raises:
        ValueError: items have no observation, action or next observation; or, raised by the
            iterator, a next observation differs from the observation of the next step: RLDS
            stores each observation once.
        TypeError: `buffer` is neither a buffer with its state nor a dataset.
    """
    dataset, specs = dataset_of("write_rlds", buffer, state)
    check_roles("write_rlds", specs)
    is_running, is_cut = unfinished_masks(dataset)
    envs = dataset.facts.get("environment", np.zeros(len(dataset), np.int64))
    return (
        {
            "steps": _steps_in_rlds(f"write_rlds: episode {number}", episode),
            "environment": np.int64(envs[number]),
            "is_running": is_running[number],
            "is_cut": is_cut[number],
        }
        for number, episode in enumerate(dataset)
    )


def _steps_in_rlds(where: str, episode: Episode) -> dict[str, Any]:
    leaves, terminated, _, has_last = split_flags(episode)
    # Without a discount in the items, termination gives it.
    leaves = {"discount": (~terminated).astype(np.float32), **leaves}
    after = {
        name.removeprefix("next/"): leaves.pop(name)
        for name in list(leaves)
        if within(name, "next/observation")
    }
    # Each observation is stored once, so both must have the same leaves and agree from step to
    # step.
    before = {name for name in leaves if within(name, "observation")}
    expected = f"what the observation is, {sorted(before)}"
    got = f"{sorted(after)}. RLDS has each observation once"
    check(before == after.keys(), f"{where}: leaf 'next/observation'", expected, got)
    for name, leaf in after.items():
        cure = "RLDS has each observation once; write_d4rl has both"
        check_chain(where, name, leaves[name], leaf, cure)
    rows = {
        name.removeprefix("next/") if within(name, "next/reward") else name: leaf
        for name, leaf in leaves.items()
    }
    # Add a row with the last observation, and zeros for all other leaves.
    if has_last:
        for name, leaf in rows.items():
            last = after[name][-1:] if name in after else np.zeros_like(leaf[:1])
            rows[name] = np.concatenate([leaf, last])
    # Only the last row is marked: as last if it is the added one, as terminal after termination.
    is_first, is_last, is_terminal = (np.zeros(len(terminated) + has_last, bool) for _ in range(3))
    is_first[0], is_last[-1], is_terminal[-1] = True, has_last, terminated[-1]
    rows |= {"is_first": is_first, "is_last": is_last, "is_terminal": is_terminal}
    check_names(where, rows)
    return nest(rows)
