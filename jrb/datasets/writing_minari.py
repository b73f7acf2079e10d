"""Writes episodes as a Minari dataset, by the package `minari`. T steps of an episode."""

import collections
import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jrb.authoring import escape_errors, leaf_name, require
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.formats.minari import METADATA
from jrb.datasets.output import check_absent, new_path
from jrb.datasets.reading.names import check, check_names
from jrb.datasets.reading.tabular import VALID
from jrb.datasets.writing import check_chain, dataset_of, unfinished_masks
from jrb.keys import within
from jrb.layouts.names import Leaves, flatten, nest
from jrb.state import BufferState

_ID = re.compile(r"([-\w][-\w/]*[-\w]/)?[-\w]+-v\d+")
_ROLES = ("observation", "action", "next_observation", "reward", "terminated", "truncated")
_NAMES = {
    "observation": "observations",
    "action": "actions",
    "next/reward": "rewards",
    "next/terminated": "terminations",
    "next/truncated": "truncations",
}
_KINDS = {"next/reward": "biuf", "next/terminated": "b", "next/truncated": "b"}
_RUNNING = "{} of {} episodes had not ended when they were written: their last steps are truncated."
_CUT = "The beginning of {} of {} episodes may have been overwritten before they were written."
_LEFT_OUT = "{} steps whose next observation is not known were left out."


@escape_errors()
def write_minari(
    path: str | os.PathLike[str],
    buffer: ReplayBuffer | Dataset,
    state: BufferState | None = None,
    *,
    dataset_id: str | None = None,
    observation_space: Any = None,
    action_space: Any = None,
    env_spec: Any = None,
    author: str | Iterable[str] = (),
    author_email: str | Iterable[str] = (),
    algorithm_name: str | None = None,
    code_permalink: str | None = None,
    description: str | None = None,
) -> None:
    """Writes the episodes of a buffer or a dataset as a Minari dataset; needs the extra `minari`.

    `minari.load_dataset(dataset_id)` finds it if `path` is `<MINARI_DATASETS_PATH>/<dataset_id>`;
    `minari.MinariDataset(path + "/data")` opens it anywhere. Arrays keep their dtypes; images are
    not compressed as JPEG. The last step of an unfinished episode is marked as truncated, as by
    Minari's collector. A last step without its next observation (`next/valid`) is left out. Facts
    mark unfinished episodes (`complete` is False) and those that may lack first steps (`cut`); the
    metadata's `notes` count all of these. Other leaves except `done` are written to `infos`; `info`
    and `next/info` become one array. `path` appears once the dataset is complete.

    Args:
        path: the folder of the dataset, which must not exist.
        buffer: a buffer whose items have observation, action, next observation, reward,
            terminated and truncated; or a dataset, without a state.
        state: the buffer's state. It is only read.
        dataset_id: `<namespace>/<name>-v<number>`; None for the name of the folder.
        observation_space: a Gymnasium space, or its JSON as Minari writes it. None to derive it
            from the arrays: a `Box` with the range of the dtype, `Discrete` for single integers,
            `MultiBinary` for arrays of bool, nested in `Dict` and `Tuple`.
        action_space: likewise for actions.
        env_spec: the environment's Gymnasium spec, or its JSON.
        author: the name of the author, or several names.
        author_email: the email address of the author, or several.
        algorithm_name: the algorithm that chose the actions.
        code_permalink: a link to the code that recorded the data.
        description: a text about the dataset.

    Raises:
        ValueError: the path exists, there is no episode, items lack a leaf or have a dtype that
            HDF5 lacks, a space does not fit the arrays, or a next observation (or `next/info`)
            differs from the next step's observation (or `info`): Minari stores each once.
        TypeError: `buffer` is neither a buffer with its state nor a dataset.
    """
    # Check the arguments before episodes are read.
    target = check_absent(path)
    name = os.path.basename(target) if dataset_id is None else dataset_id
    is_id = isinstance(name, str) and _ID.fullmatch(name)
    check(is_id, "dataset_id", "<namespace>/<name>-v<number> (the namespace may lack)", repr(name))
    spaces = {
        "observation": _parse_space("observation_space", observation_space),
        "action": _parse_space("action_space", action_space),
    }
    about: dict[str, Any] = {
        "dataset_id": name,
        "author": [author] if isinstance(author, str) else list(author),
        "author_email": [author_email] if isinstance(author_email, str) else list(author_email),
        "algorithm_name": algorithm_name,
        "code_permalink": code_permalink,
        "description": description,
        "env_spec": _env_spec_json(env_spec),
        "minari_version": require("minari", "minari").__version__,
    }
    # Take a buffer's episodes as a dataset. Only its items say which entries are of tuples.
    dataset, specs = dataset_of("write_minari", buffer, state, roles=_ROLES)
    stored = None if isinstance(buffer, Dataset) or state is None else buffer.item_spec(state)
    episodes = MinariEpisodes(dataset, _names_in_minari(specs, stored))
    with new_path(target) as folder:
        _write(os.path.join(folder, "data"), episodes, spaces, about)


def _write(
    path: str, episodes: "MinariEpisodes", spaces: dict[str, Any], about: dict[str, Any]
) -> None:
    """Writes all episodes into a new folder, and then spaces, facts, metadata and notes."""
    os.makedirs(path)
    # Minari imports these packages late. If one is missing, raise before episodes are written.
    require("PIL.Image", "minari")
    require("pyarrow.dataset", "minari")
    package = require("minari.dataset.minari_storage", "minari")
    # The spaces are derived from all episodes; without JPEG the package does not use them before.
    any_space = require("gymnasium.spaces", "minari").Discrete(1)
    storage = package.MinariStorage.new(path, any_space, any_space, jpeg_encoding=False)
    storage.update_episodes(episodes)
    check(episodes.facts, "write_minari", "at least one episode", "none")
    # Add the spaces, given or derived from all episodes.
    serialize = require("minari.serialization", "minari").serialize_space
    for role, given in spaces.items():
        name = f"{role}s"
        space = episodes.space(name) if given is None else given
        got = {leaf: getattr(each, "shape", None) for leaf, each in _leaf_spaces(name, space)}
        arrays = episodes.arrays.items()
        want = {leaf: array.shape[1:] for leaf, array in arrays if within(leaf, name)}
        expected = f"a space of arrays of the shapes {want}"
        check(got == want, f"{role}_space", expected, f"one of {got}")
        about[f"{role}_space"] = serialize(space)
    # Add notes, facts and metadata to those that Minari itself has recorded.
    counts = episodes.notes.items()
    about["notes"] = [text.format(n, len(episodes.facts)) for text, n in counts if n]
    storage.update_episode_metadata(episodes.facts)
    about = {**storage.read_raw_metadata(path), **about}
    about = {name: value for name, value in about.items() if value is not None}
    with open(os.path.join(path, METADATA), "w", encoding="utf-8") as file:
        json.dump(about, file)


class MinariEpisodes:
    """An iterable of episodes for Minari's storage, which gathers facts and notes meanwhile.

    `names` maps leaf names in TED to those in which entries of tuples are `_index_0` and so on.
    """

    def __init__(self, dataset: Dataset, names: Mapping[str, str]) -> None:
        self._dataset, self._names = dataset, names
        self.facts: list[dict[str, Any]] = []  # the facts of each written episode
        self.notes: collections.Counter[str] = collections.Counter()
        self.arrays: Leaves = {}  # the arrays of the last episode
        self._bounds: dict[str, tuple[int, int]] = {}  # the bounds of single integers over all

    def __iter__(self) -> Iterator[Any]:
        episode_buffer = require("minari.data_collector", "minari").EpisodeBuffer
        (is_running, is_cut), facts = unfinished_masks(self._dataset), self._dataset.facts
        for number, episode in enumerate(self._dataset):
            leaves = flatten(episode, "episode")
            leaves = {self._names.get(name, name): leaf for name, leaf in leaves.items()}
            # Leave out steps without a next observation, and episodes without other steps.
            valid = leaves.pop(VALID, np.ones(len(leaves.pop("next/done")), bool))
            self.notes[_LEFT_OUT] += int(np.sum(~valid))
            if not valid.any():
                continue
            leaves = {name: leaf[valid] for name, leaf in leaves.items()}
            self.arrays = _arrays(f"write_minari: episode {len(self.facts)}", leaves)
            # A `Discrete` space needs the bounds of the integers of all episodes.
            for name, array in self.arrays.items():
                if array.ndim == 1 and array.dtype.kind in "biu":
                    ends = [int(array.min()), int(array.max()), *self._bounds.get(name, ())]
                    self._bounds[name] = (min(ends), max(ends))
            # Record facts and count notes, of written episodes alone.
            own_facts = {name: fact[number] for name, fact in facts.items()}
            self.facts.append({**_facts(own_facts, self.arrays["rewards"]), "id": len(self.facts)})
            self.notes[_RUNNING] += bool(is_running[number])
            self.notes[_CUT] += bool(is_cut[number])
            yield episode_buffer(**{"infos": {}, **nest(self.arrays)})

    def space(self, name: str) -> Any:
        """Returns the space of the arrays under `name`; integers have bounds of all episodes."""
        return _space_of(name, nest(self.arrays)[name], self._bounds)


def _parse_space(name: str, given: Any) -> Any:
    """Returns a Gymnasium space, which may be given as JSON."""
    if not (isinstance(given, str) or (isinstance(given, dict) and "type" in given)):
        return given
    try:
        return require("minari.serialization", "minari").deserialize_space(given)
    except Exception as error:
        # The package raises various errors for wrong JSON.
        raise ValueError(f"{name}: expected JSON of a space, got {given!r}.") from error


def _facts(own: Mapping[str, Any], rewards: np.ndarray) -> dict[str, Any]:
    """Returns an episode's facts that are single values, and the statistics that Minari adds."""
    facts: dict[str, Any] = {}
    for name, fact in own.items():
        fact = fact.item() if isinstance(fact, np.generic) else fact
        if isinstance(fact, str | int | float):
            facts[name] = fact
    for name in ("sum", "mean", "std", "max", "min"):
        facts[f"rewards_{name}"] = getattr(rewards.astype(np.float64), name)()
    return {**facts, "total_steps": len(rewards)}


def _env_spec_json(given: Any) -> str | None:
    """Returns the spec of an environment as JSON text; None if none is given."""
    if given is None:
        return None
    with contextlib.suppress(ValueError, TypeError):
        text = given.to_json() if hasattr(given, "to_json") else given
        text = json.dumps(dict(text)) if isinstance(text, Mapping) else text
        if "id" in dict(json.loads(text)):
            return text
    expected = "Gymnasium's spec of an environment (env.spec), or its JSON"
    raise ValueError(f"env_spec: expected {expected}, got {given!r}.")


def _names_in_minari(specs: Mapping[str, Any], stored: Any) -> dict[str, str]:
    """Returns a dict from leaf names to names in which entries of tuples are `_index_0` and so on.

    `specs` are the leaves by name, and `stored` is the pytree that they belong to.
    """
    # Minari has one reward and two flags for each step.
    for name, kinds in _KINDS.items():
        check(name in specs, f"write_minari: leaf '{name}'", "an array", [*specs])
        shape, dtype = specs[name].shape, np.dtype(specs[name].dtype)
        expected = f"one {'bool' if kinds == 'b' else 'number'} for each step"
        is_right, where = not shape and dtype.kind in kinds, f"write_minari: leaf '{name}'"
        check(is_right, where, expected, f"{dtype} of shape {shape}")
    names: dict[str, str] = {}
    for name, (path, _) in zip(specs, jax.tree_util.tree_leaves_with_path(stored), strict=False):
        parts = name.split("/")
        has_slash = any("/" in leaf_name((part,)) for part in path)
        check(not has_slash, "write_minari", "names without a slash", parts)
        # Compare name and path from their ends: the first parts of a name may be TED's. An index in
        # the path is that of a tuple's entry.
        for place in range(1, min(len(parts), len(path)) + 1):
            if parts[-place] == str(getattr(path[-place], "idx", None)):
                parts[-place] = f"_index_{parts[-place]}"
        names[name] = "/".join(parts)
    return names


def _arrays(where: str, leaves: Leaves) -> Leaves:
    """Returns an episode's arrays by their names in Minari, given leaves by names in TED."""
    for name, leaf in leaves.items():
        is_known = leaf.dtype.kind in "biufc" and leaf.dtype.isbuiltin != 2
        got = f"{leaf.dtype}. Store it as another"
        check(is_known, f"{where}: leaf '{name}'", "a dtype that HDF5 has", got)
    # Observations and next observations need the same leaves, as they become one array.
    before, after = (
        {name.removeprefix("next/") for name in leaves if within(name, role)}
        for role in ("observation", "next/observation")
    )
    expected = f"next observations like those before the action, {sorted(before)}"
    check(before == after, where, expected, sorted(after))
    truncated = leaves["next/truncated"].copy()
    # A later step may have been left out, so the last one may lack its flag.
    truncated[-1] |= ~leaves["next/terminated"][-1]
    leaves = {**leaves, "next/truncated": truncated}
    for name in [name for name in leaves if name.split("/")[0] in ("observation", "info")]:
        if f"next/{name}" not in leaves:
            continue
        # Both become one array `[T + 1, ...]`.
        following = leaves.pop(f"next/{name}")
        cure = "Minari's sets hold every observation once: end the episode there, or write "
        cure += "transitions of one step"
        check_chain(where, name, leaves[name], following, cure)
        leaves[name] = np.concatenate([leaves[name], following[-1:]])
    # Rename the leaves as Minari does; those without a role are infos.
    names: list[str] = []
    for name in leaves:
        role = next((role for role in _NAMES if within(name, role)), None)
        name_in_infos = "infos/" + name.removeprefix("info/")
        names.append(name_in_infos if role is None else _NAMES[role] + name.removeprefix(role))
    check_names(where, names)
    return dict(zip(names, leaves.values(), strict=True))


def _space_of(name: str, array: Any, bounds: Mapping[str, tuple[int, int]]) -> Any:
    """Returns the Gymnasium space of an array `[T, ...]`, or of nested dicts of arrays.

    Single integers are `Discrete` within their `bounds`, bool arrays are `MultiBinary`, and all
    others are a `Box` with the range of the dtype.
    """
    spaces = require("gymnasium.spaces", "minari")
    if isinstance(array, dict):
        inner = {part: _space_of(f"{name}/{part}", each, bounds) for part, each in array.items()}
        numbered = [f"_index_{number}" for number in range(len(inner))]
        if inner.keys() == set(numbered):  # the entries of a tuple
            return spaces.Tuple([inner[part] for part in numbered])
        return spaces.Dict(inner)
    shape, dtype = array.shape[1:], array.dtype
    if dtype.kind == "b" and shape:
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if not shape and dtype.kind in "biu":
        least, greatest = bounds[name]
        # `Discrete` counts in int64, so a wider range becomes a box.
        start = min(least, 0)
        if greatest - start < np.iinfo(np.int64).max:
            return spaces.Discrete(greatest - start + 1, start=start)
    # All else is a box, unbounded for floating dtypes.
    limits = None if dtype.kind in "fc" else np.iinfo(dtype)
    low, high = (limits.min, limits.max) if limits else (-np.inf, np.inf)
    return spaces.Box(np.full(shape, low, dtype), np.full(shape, high, dtype), dtype=dtype)


def _leaf_spaces(name: str, space: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and the space of each single array in a Gymnasium space."""
    kind = type(space).__name__
    if kind not in ("Dict", "Tuple"):
        yield name, space
        return
    numbered = {f"_index_{number}": entry for number, entry in enumerate(space.spaces)}
    for part, entry in (space.spaces if kind == "Dict" else numbered).items():
        yield from _leaf_spaces(f"{name}/{part}", entry)
