"""Datasets of Minari, written by the `minari` package: HDF5 beside JSON, arrays as they are.

T steps of an episode.
"""

import collections
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jrb._util import extras, pytree
from jrb._util.printing import escaped_errors
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.formats.minari import METADATA, leaf_spaces, package
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.names import check_names
from jrb.datasets.writing.atomic_write import free, new_folder
from jrb.datasets.writing.source import VALID, Source, SourceEpisode, first_break
from jrb.keys import within
from jrb.layouts.names import Leaves, nest
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
_RUNNING = "{} of {} episodes had not ended when they were written: their last steps are truncated."
_CUT = "The beginning of {} of {} episodes may have been overwritten before they were written."
_LEFT_OUT = "{} steps whose next observation is not known were left out."


@escaped_errors()
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
    """Writes all episodes that a buffer holds as a dataset of Minari; needs the extra `minari`.

    `minari.load_dataset(dataset_id)` finds it at `<MINARI_DATASETS_PATH>/<dataset_id>`, and
    `minari.MinariDataset(path + "/data")` anywhere. Arrays are written as they are stored, images
    without JPEG, whatever dtype the spaces have. An episode that had not ended is written too; its
    last step is truncated, as Minari's own collector does it, and its attribute `complete` False;
    of one whose beginning may be overwritten, `cut` is True. A last step whose next observation is
    not known (`next/valid`) is left out. How often that was so is told under `notes` in the
    metadata. What items have besides (but for `done`) goes into `infos`, `info` and `next/info`
    together, as they are read.

    The set is written beside, synced and renamed: whatever goes wrong, it is whole or not there.

    Args:
        path: the folder of the set, which is not there yet.
        buffer: the description, whose items have observation, action, next observation, reward,
            terminated and truncated; or a dataset, without a state.
        state: its state. It is only read.
        dataset_id: `<namespace>/<name>-v<number>`; by default the name of the folder.
        observation_space: one of Gymnasium, or its JSON as Minari writes it; by default told from
            the arrays: a `Box` as wide as the dtype, `Discrete` for single integers as far as they
            go, `MultiBinary` for flags, in dicts and tuples.
        action_space: as `observation_space`.
        env_spec: Gymnasium's spec of the environment, or its JSON.
        author: of the data, one or several.
        author_email: likewise.
        algorithm_name: what chose the actions.
        code_permalink: where the code is.
        description: a text.

    Raises:
        ValueError: something is at the path, there is no episode, items lack something or have a
            dtype that HDF5 lacks, spaces do not fit, or a next observation (or `next/info`) is
            not what stands before the action of the next step, which a set cannot hold.
        TypeError: neither a buffer with its state nor a dataset.
    """
    target = free(path)
    name = os.path.basename(target) if dataset_id is None else dataset_id
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise ValueError(
            f"dataset_id: expected <namespace>/<name>-v<number> (the namespace may lack), got "
            f"{name!r}."
        )
    about: dict[str, Any] = {
        "dataset_id": name,
        "author": [author] if isinstance(author, str) else list(author),
        "author_email": [author_email] if isinstance(author_email, str) else list(author_email),
        "algorithm_name": algorithm_name,
        "code_permalink": code_permalink,
        "description": description,
        "env_spec": _env_spec(env_spec),
        "minari_version": extras.require("minari", "minari").__version__,
    }
    given = {"observations": observation_space, "actions": action_space}
    spaces = {role: _space(f"{role[:-1]}_space", each) for role, each in given.items()}
    episodes = _Episodes(Source("write_minari", buffer, state, roles=_ROLES))
    with new_folder(target) as folder:
        data = os.path.join(folder, "data")
        # The spaces are known after the last episode; without JPEG the package does not use them.
        any_space = extras.require("gymnasium.spaces", "minari").Discrete(1)
        storage = package().MinariStorage.new(data, any_space, any_space, jpeg_encoding=False)
        storage.update_episodes(episodes)
        about |= episodes.metadata(spaces)
        storage.update_episode_metadata(episodes.facts)
        about = {**storage.read_raw_metadata(data), **about}
        about = {name: value for name, value in about.items() if value is not None}
        with open(os.path.join(data, METADATA), "w", encoding="utf-8") as file:
            json.dump(about, file)


def _env_spec(given: Any) -> str | None:
    """Returns a spec as JSON."""
    if given is None:
        return None
    try:
        text = given.to_json() if hasattr(given, "to_json") else given
        text = json.dumps(dict(text)) if isinstance(text, Mapping) else text
        is_spec = "id" in dict(json.loads(text))
    except (ValueError, TypeError):
        text, is_spec = "", False
    if not is_spec:
        raise ValueError(
            f"env_spec: expected Gymnasium's spec of an environment (env.spec), or its JSON, got "
            f"{given!r}."
        )
    return text


def _space(name: str, given: Any) -> Any:
    """Returns Gymnasium's space that somebody gave as such, or as Minari's JSON; None for none."""
    if not isinstance(given, str) and not (isinstance(given, dict) and "type" in given):
        return given
    try:
        return extras.require("minari.serialization", "minari").deserialize_space(given)
    except Exception as error:  # whatever the package raises over JSON that is no space
        raise ValueError(f"{name}: expected JSON of a space, got {given!r}.") from error


class _Episodes:
    """The episodes of a source as the package's buffers, and what is known of those given out.

    Attributes:
        forms: shape and dtype of a row of each array, by name.
        bounds: the least and the greatest of single integers, by name.
        facts: of each episode.
        notes: how often something was cut or left out, by the sentence that tells it.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.forms: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self.bounds: dict[str, tuple[int, int]] = {}
        self.facts: list[dict[str, Any]] = []
        self.notes: collections.Counter[str] = collections.Counter()

    def __iter__(self) -> Iterator[Any]:
        buffer = extras.require("minari.data_collector", "minari").EpisodeBuffer
        names = _names(self._source)
        for episode in self._source:
            where = f"write_minari: episode {len(self.facts)}"
            leaves = dict(zip(names, jax.tree.leaves(episode.items), strict=True))
            leaves.pop("next/done", None)
            leaves, num_invalid = _valid(where, leaves)
            self.notes[_LEFT_OUT] += num_invalid
            if not len(leaves["next/reward"]):
                continue
            arrays = _arrays(where, leaves)
            for name, array in arrays.items():
                self.forms[name] = array.shape[1:], array.dtype
                if array.ndim == 1 and array.dtype.kind in "biu":
                    ends = [int(array.min()), int(array.max()), *self.bounds.get(name, ())]
                    self.bounds[name] = (min(ends), max(ends))
            self.facts.append(
                _facts(len(self.facts), episode, arrays["rewards"].astype(np.float64))
            )
            self.notes[_RUNNING] += episode.is_running
            self.notes[_CUT] += episode.is_cut
            yield buffer(**{"infos": {}, **nest(arrays)})

    def metadata(self, spaces: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the spaces as Minari's JSON, and what a reader has to know.

        Args:
            spaces: those of Gymnasium that were given, or None, by "observations" and "actions".

        Raises:
            ValueError: there is no episode, or a space is not that of the arrays.
        """
        if not self.facts:
            raise ValueError("write_minari: expected at least one episode, got none.")
        as_json = extras.require("minari.serialization", "minari").serialize_space
        about: dict[str, Any] = {}
        for role, given in spaces.items():
            form = nest(self.forms)[role]
            space = _derived(role, form, self.bounds) if given is None else given
            found = {name: getattr(each, "shape", None) for name, each in leaf_spaces(role, space)}
            expected = {name: form[0] for name, form in self.forms.items() if within(name, role)}
            if found != expected:
                raise ValueError(
                    f"{role[:-1]}_space: expected a space of arrays of the shapes {expected}, got "
                    f"one of {found}."
                )
            about[f"{role[:-1]}_space"] = as_json(space)
        notes = [text.format(each, len(self.facts)) for text, each in self.notes.items() if each]
        return {**about, "notes": notes}


def _names(source: Source) -> list[str]:
    """Returns the leaves' names in TED, in which entries of a tuple are `_index_0` and so on."""
    names: list[str] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(source.spec):
        parts = source.names[pytree.leaf_name(path)].split("/")
        if any("/" in pytree.part_name(part) for part in path):
            raise ValueError(f"write_minari: expected names without a slash, got {parts}.")
        for place in range(1, min(len(parts), len(path)) + 1):
            if parts[-place] == str(getattr(path[-place], "idx", None)):
                parts[-place] = f"_index_{parts[-place]}"
        names.append("/".join(parts))
    check_names("write_minari", names)
    for name in ("next/reward", "next/terminated", "next/truncated"):
        if name not in names:
            raise ValueError(f"write_minari: leaf '{name}': expected an array, got {names}.")
    return names


def _valid(where: str, leaves: Leaves) -> tuple[Leaves, int]:
    """Returns the steps that have next observations, all or all but the last; how many have not."""
    steps = len(leaves["next/reward"])
    valid = np.asarray(leaves.pop(VALID, np.ones(steps)), bool).reshape(steps)
    if not valid[:-1].all():
        raise ValueError(
            f"{where}: leaf '{VALID}': expected False in the last step of an episode only, got it "
            f"in steps {np.flatnonzero(~valid)[:5].tolist()} of {steps}."
        )
    left_out = int(np.sum(~valid))
    return {name: leaf[: steps - left_out] for name, leaf in leaves.items()}, left_out


def _arrays(where: str, leaves: Leaves) -> Leaves:
    """Returns the arrays of an episode by Minari's names, from leaves `[T, ...]` by those in TED.

    Raises:
        ValueError: flags are no bools, there are dtypes that HDF5 lacks, or a next observation is
            not what stands before the action of the next step.
    """
    for name, leaf in leaves.items():
        kinds = {"next/reward": "biuf", "next/terminated": "b", "next/truncated": "b"}.get(name)
        if kinds and (leaf.ndim != 1 or leaf.dtype.kind not in kinds):
            raise ValueError(
                f"{where}: leaf '{name}': expected one {'bool' if kinds == 'b' else 'number'} for "
                f"each step, got {leaf.dtype} of shape {leaf.shape[1:]}."
            )
        if leaf.dtype.kind not in "biufc" or leaf.dtype.isbuiltin == 2:
            raise ValueError(
                f"{where}: leaf '{name}': expected a dtype that HDF5 has, got {leaf.dtype}. Store "
                "it as another."
            )
    seen, after = (
        {name.removeprefix("next/") for name in leaves if within(name, role)}
        for role in ("observation", "next/observation")
    )
    if seen != after:
        raise ValueError(
            f"{where}: expected next observations like those before the action, {sorted(seen)}, "
            f"got {sorted(after)}."
        )
    truncated = leaves["next/truncated"].copy()
    truncated[-1] |= ~leaves["next/terminated"][-1]
    rest = {**leaves, "next/truncated": truncated}
    for name in [name for name in leaves if name.split("/")[0] in ("observation", "info")]:
        if f"next/{name}" in rest:
            rest[name] = _chained(where, name, rest[name], rest.pop(f"next/{name}"))
    names = [_minari_name(name) for name in rest]
    check_names(where, names)
    return dict(zip(names, rest.values(), strict=True))


def _minari_name(name: str) -> str:
    for role, minari in _NAMES.items():
        if within(name, role):
            return minari + name.removeprefix(role)
    return "infos/" + name.removeprefix("info/")


def _chained(where: str, name: str, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns an array `[T + 1, ...]` from those before and after each step."""
    place = first_break(where, name, before, after)
    if place is not None:
        raise ValueError(
            f"{where}: leaf 'next/{name}': expected what stands before the action of the next "
            f"step, got another after step {place}. Minari's sets hold every observation once: "
            "end the episode there, or write transitions of one step."
        )
    return np.concatenate([before, after[-1:]])


def _facts(number: int, episode: SourceEpisode, rewards: np.ndarray) -> dict[str, Any]:
    """Returns what Minari's collector says of an episode, and the facts that HDF5 can hold."""
    facts = {name: hdf5.plain(fact) for name, fact in episode.facts.items()}
    statistics = {name: getattr(rewards, name)() for name in ("sum", "mean", "std", "max", "min")}
    return {
        **{name: fact for name, fact in facts.items() if isinstance(fact, str | int | float)},
        "id": number,
        "total_steps": len(rewards),
        **{f"rewards_{name}": value for name, value in statistics.items()},
    }


def _derived(name: str, form: Any, bounds: Mapping[str, tuple[int, int]]) -> Any:
    """Returns the space of arrays: nested dicts of the shape and the dtype of a row.

    Single integers are `Discrete`, up to the greatest that there is; flags `MultiBinary`; all else
    is a `Box`, as wide as the dtype.
    """
    spaces = extras.require("gymnasium.spaces", "minari")
    if isinstance(form, dict):
        inner = {part: _derived(f"{name}/{part}", each, bounds) for part, each in form.items()}
        numbered = [f"_index_{number}" for number in range(len(inner))]
        if inner.keys() == set(numbered):  # a tuple, or what was one when it was read
            return spaces.Tuple([inner[part] for part in numbered])
        return spaces.Dict(inner)
    shape, dtype = form
    if dtype.kind == "b" and shape:
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if not shape and dtype.kind in "biu":
        least, greatest = bounds[name]
        start = min(least, 0)
        if greatest - start < np.iinfo(np.int64).max:
            return spaces.Discrete(greatest - start + 1, start=start)
    limits = None if dtype.kind in "fc" else np.iinfo(dtype)
    low, high = (limits.min, limits.max) if limits else (-np.inf, np.inf)
    return spaces.Box(np.full(shape, low, dtype), np.full(shape, high, dtype), dtype=dtype)
