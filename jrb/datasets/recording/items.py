"""The items of a recorder: their structure, where their parts are, and checks of what it is given.

T time, E environments.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import numpy as np

from jrb._util import checks, prng_keys, pytree
from jrb._util.pytree import PyTree
from jrb.datasets.reading.mapping import ted_names
from jrb.datasets.recording.parts import TERMINATED, TRUNCATED, RecordedLeaf
from jrb.keys import Keys, find, path_name, within

_FLAGS = ("terminated", "truncated", "done")
_ROLES = ("observation", "action", "reward", "next_observation")
_RESERVED = ("next/done", TERMINATED, TRUNCATED)
_NUMBERS = (bool, int, float, complex)
_NUMPY = (np.ndarray, np.generic)
_MEND = "All items of a recorder look alike; make another recorder, at another path, for others."


def check_options(num_envs: Any, keys: Any, chunk: Any, name: Any) -> None:
    """Raises unless the options are ones that a recorder takes."""
    if num_envs is not None:
        checks.count("num_envs", num_envs, 2**31 - 1)
    if chunk is not None:
        checks.count("chunk", chunk)
    if not isinstance(keys, Keys):
        raise TypeError(f"keys: expected jrb.Keys(...), got {keys!r}.")
    if name is not None and (not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,100}", name)):
        raise ValueError(
            f"name: expected at most 100 letters, digits, dots and dashes, got {name!r}."
        )


def json_metadata(metadata: Any) -> dict[str, Any]:
    """Returns metadata as JSON gives them back."""
    try:
        if not isinstance(metadata, dict | None):
            raise TypeError(type(metadata).__name__)
        copy = json.loads(json.dumps(metadata or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: expected a dict that JSON can hold, got {error}.") from error
    if "writers" in copy:
        raise ValueError("metadata: expected other names than 'writers', which has a meaning.")
    return copy


def check_mask(mask: Any, lead: tuple[int, ...], envs: tuple[int, ...], verb: str) -> None:
    """Raises unless a mask is of shape `[T]`, or `[T, E]`; without the T if `lead` has none."""
    time = lead[: len(lead) - len(envs)]
    if mask.dtype != np.bool_:
        raise TypeError(f"{verb}: mask: expected dtype bool, got {mask.dtype}. Compare, not cast.")
    if mask.shape not in (time, lead):
        shapes = " or ".join(map(str, dict.fromkeys((time, lead))))
        raise ValueError(f"{verb}: mask: expected shape {shapes}, got {mask.shape}.")


@dataclasses.dataclass(frozen=True, eq=False)
class ItemSpec:
    """The structure, shapes and dtypes of items, and the roles of their leaves.

    Attributes:
        spec: of one item, `jax.ShapeDtypeStruct`s in NumPy's dtypes or those of keys.
        structure: of an item.
        specs: of its leaves.
        names: of its leaves.
        arrays: the leaves as they are recorded, under their names in TED.
        flags: the position of each flag that there is, by its field of `jrb.Keys`.
        episode: the position of the number of the episode; None if there is none.
    """

    spec: PyTree
    structure: Any
    specs: list[Any]
    names: list[str]
    arrays: list[RecordedLeaf]
    flags: Mapping[str, int]
    episode: int | None

    @property
    def leaves(self) -> tuple[RecordedLeaf, ...]:
        """The leaves without flags, sorted by name."""
        kept = [leaf for n, leaf in enumerate(self.arrays) if n not in self.flags.values()]
        return tuple(sorted(kept, key=lambda leaf: leaf.name))

    @property
    def notes(self) -> tuple[str, ...]:
        """What readers of a dataset of such items have to know."""
        notes = [
            f"'{leaf.name}' holds the words of PRNG keys: "
            f"jax.random.wrap_key_data(words, impl='{leaf.key_impl}') makes them keys."
            for leaf in self.leaves
            if leaf.key_impl is not None
        ]
        if not self.flags:
            notes.append("The items have no flags: episodes end where the recorder was told so.")
        elif "terminated" not in self.flags:
            name = self.names[self.flags["done"]] if "done" in self.flags else None
            instead = (
                f"'{name}' stands for it, unless truncated"
                if name
                else "every episode counts as truncated"
            )
            notes.append(f"The items have no flag of termination: {instead}.")
        return tuple(notes)

    def check(self, items: PyTree, lead: tuple[int, ...], verb: str) -> list[Any]:
        """Returns the leaves `[*lead, ...]` of items, with Python's numbers as arrays.

        Raises:
            ValueError: another structure or shape; the message names a leaf.
            TypeError: another dtype, or no array.
        """
        leaves, structure = jax.tree.flatten(items)
        if structure != self.structure:
            pytree.check_structure(self.spec, items, verb, _MEND)
        for number, (leaf, spec) in enumerate(zip(leaves, self.specs, strict=True)):
            where = f"{verb}: leaf '{self.names[number]}'"
            if not hasattr(leaf, "dtype"):
                leaf = leaves[number] = _number(leaf, spec, where)
            if leaf.dtype != spec.dtype:
                raise TypeError(
                    f"{where}: expected dtype {spec.dtype}, got {leaf.dtype}. Cast it yourself: a "
                    "recorder keeps every bit."
                )
            if leaf.shape != (*lead, *spec.shape):
                raise ValueError(
                    f"{where}: expected shape {(*lead, *spec.shape)}, got {leaf.shape}. Time comes "
                    "first, then the environments; add takes one timestep, append several."
                )
        return leaves

    def to_numpy(self, items: PyTree, lead: tuple[int, ...], verb: str) -> list[Any]:
        """Returns the leaves `[*lead, ...]` as NumPy arrays, keys as their words."""
        leaves = self.check(items, lead, verb)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, jax.core.Tracer):
                raise TypeError(
                    f"{verb}: leaf '{self.names[number]}': expected an array, got a tracer. Inside "
                    "jit, scan and grad there is record."
                )
            if not isinstance(leaf, _NUMPY):
                leaves[number] = np.asarray(prng_keys.raw(leaf))
        return leaves

    def lead_of(self, items: PyTree, verb: str) -> tuple[int, ...]:
        """Returns the axes that the first leaf of `items` has before its own."""
        leaves = jax.tree.leaves(items)
        if not leaves:
            pytree.check_structure(self.spec, items, verb, _MEND)
        return np.shape(leaves[0])[: max(0, np.ndim(leaves[0]) - len(self.specs[0].shape))]

    def check_kept_by_jax(self, verb: str) -> None:
        """Raises unless JAX has the dtypes of all leaves."""
        for name, spec in zip(self.names, self.specs, strict=True):
            is_keys = prng_keys.is_keys(spec.dtype)
            if not is_keys and jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
                raise TypeError(
                    f"{verb}: leaf '{name}': expected a dtype that JAX keeps, got {spec.dtype}. "
                    "Set jax_enable_x64, or record other dtypes."
                )


def item_spec(example: PyTree, lead: int, keys: Keys, verb: str) -> ItemSpec:
    """Returns the spec of items such as `example`, whose leaves have `lead` axes before their own.

    Raises:
        ValueError: leaves with names that files cannot tell apart, without a reward, or with
            flags that are not one number an item.
        TypeError: a leaf that is no array of numbers.
    """
    spec = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _leaf_spec(leaf, lead, f"{verb}: leaf '{_leaf_name(path, verb)}'"),
        example,
    )
    specs, structure = jax.tree.flatten(spec)
    names = pytree.leaf_names(spec)
    flags = {
        flag: _scalar(names, specs, path_name(getattr(keys, flag)), verb)
        for flag in _FLAGS
        if any(within(name, path_name(getattr(keys, flag))) for name in names)
    }
    episode = None
    if keys.episode is not None:
        find(spec, keys.episode, f"{verb}: episode")
        episode = _scalar(names, specs, path_name(keys.episode), verb)
        if specs[episode].dtype.kind not in "iu":
            raise TypeError(
                f"{verb}: leaf '{names[episode]}': expected integers, the numbers of episodes, "
                f"got {specs[episode].dtype}."
            )
    in_ted = _names_in_ted(names, keys, [names[number] for number in flags.values()])
    arrays = []
    for name, leaf in zip(names, specs, strict=True):
        raw = prng_keys.raw_spec(leaf)
        key_impl = prng_keys.implementation(leaf.dtype) if prng_keys.is_keys(leaf.dtype) else None
        dtype = str(np.dtype(np.dtype(raw.dtype).type))  # in this machine's order of bytes
        arrays.append(RecordedLeaf(in_ted[name], dtype, tuple(raw.shape), key_impl))
    return ItemSpec(spec, structure, specs, names, arrays, flags, episode)


def _leaf_name(path: Any, verb: str) -> str:
    name = pytree.leaf_name(path)
    if any("/" in pytree.part_name(part) or not pytree.part_name(part) for part in path):
        raise ValueError(f"{verb}: expected names without a slash, got '{name}'. Rename it.")
    return name


def _leaf_spec(leaf: Any, lead: int, where: str) -> jax.ShapeDtypeStruct:
    if not pytree.is_array(leaf):
        if not isinstance(leaf, _NUMBERS):
            raise TypeError(
                f"{where}: expected an array, got {type(leaf).__name__}. Convert it with "
                "np.asarray, or leave it out of the item."
            )
        leaf = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(type(leaf)))
    dtype = leaf.dtype if prng_keys.is_keys(leaf.dtype) else np.dtype(leaf.dtype)
    if isinstance(dtype, np.dtype) and (dtype.kind in "OSUMm" or dtype.fields is not None):
        raise TypeError(
            f"{where}: expected numbers, got dtype {dtype}. Encode it, or leave it out."
        )
    if len(leaf.shape) < lead:
        raise ValueError(
            f"{where}: expected {lead} axes for time and environments, got {leaf.shape}."
        )
    return jax.ShapeDtypeStruct(tuple(leaf.shape[lead:]), dtype)


def _scalar(names: list[str], specs: list[Any], path: str, verb: str) -> int:
    """Returns the position of the leaf at `path`, which has to be one number an item."""
    number = names.index(path) if path in names else None
    if (
        number is None
        or specs[number].shape not in ((), (1,))
        or prng_keys.is_keys(specs[number].dtype)
    ):
        got = "several leaves" if number is None else specs[number].shape
        raise ValueError(
            f"{verb}: leaf '{path}': expected one number for each item, of shape () or (1,), "
            f"got {got}."
        )
    return number


def _names_in_ted(names: list[str], keys: Keys, flags: list[str]) -> dict[str, str]:
    """Returns the names in TED of all leaves.

    Raises:
        ValueError: there is no reward, or two leaves would have one name.
    """
    in_ted = ted_names(names, keys, _ROLES)
    if path_name(keys.reward) not in names:
        raise ValueError(
            f"reward: expected a leaf at '{path_name(keys.reward)}', got items with the leaves "
            f"{names}. Name the right one with keys=jrb.Keys(reward=...)."
        )
    owners: dict[str, str] = dict.fromkeys(_RESERVED, "a flag")
    for leaf, name in in_ted.items():
        for other, owner in owners.items():
            if leaf not in flags and (within(name, other) or within(other, name)):
                raise ValueError(
                    f"leaf '{leaf}': expected a place of its own in TED, got '{name}', where "
                    f"{owner} stands ('{other}'). Rename it, or name all parts with "
                    "keys=jrb.Keys(...)."
                )
        if leaf not in flags:
            owners[name] = f"the leaf '{leaf}'"
    return in_ted


def _number(leaf: object, spec: Any, where: str) -> np.ndarray:
    """Returns a number of Python as an array of the dtype that JAX gives it."""
    if not isinstance(leaf, _NUMBERS):
        raise TypeError(f"{where}: expected an array, got {type(leaf).__name__}.")
    if isinstance(leaf, int) and np.dtype(spec.dtype).kind == "i":
        bounds = np.iinfo(spec.dtype)
        if not bounds.min <= leaf <= bounds.max:
            raise ValueError(f"{where}: expected an integer that {spec.dtype} holds, got {leaf}.")
    return np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(type(leaf)))
