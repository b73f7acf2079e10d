"""The structure of a recorder's items, and checks of new items. T time, E environments."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb.authoring import leaf_name, leaf_names
from jrb.datasets.reading.names import check, check_names, ted_names
from jrb.datasets.recording.parts import TERMINATED, TRUNCATED, RecordedLeaf
from jrb.keys import Keys, path_name, within

FLAGS = ("done", "terminated", "truncated")
_ROLES = ("observation", "action", "reward", "next_observation")
_RESERVED = ("next/done", TERMINATED, TRUNCATED)
_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def is_keys(dtype: Any) -> bool:
    """Returns True if a dtype is that of typed PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@dataclasses.dataclass(frozen=True, eq=False)
class ItemSpec:
    """The structure, shapes and dtypes of items, and the roles of their leaves."""

    structure: Any
    specs: list[Any]  # the shape and dtype of each leaf, without leading axes
    names: list[str]  # the names of the leaves
    arrays: list[RecordedLeaf]  # the leaves as they are recorded, with their names in TED
    flags: dict[str, int]  # the index of the leaf of each flag, by its field of `jrb.Keys`
    episode: int | None  # the index of the leaf with the episode number; None if there is none

    @property
    def leaves(self) -> tuple[RecordedLeaf, ...]:
        """The recorded leaves that are not flags, sorted by name."""
        step_leaves = [leaf for n, leaf in enumerate(self.arrays) if n not in self.flags.values()]
        return tuple(sorted(step_leaves, key=lambda leaf: leaf.name))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on these items for users of the dataset, about keys and missing flags."""
        notes = [
            f"'{leaf.name}' holds the words of PRNG keys: "
            f"jax.random.wrap_key_data(words, impl='{leaf.key_impl}') makes them keys."
            for leaf in self.leaves
            if leaf.key_impl is not None
        ]
        if not self.flags:
            notes.append("The items have no flags: episodes end where the recorder was told so.")
        elif "terminated" not in self.flags:
            instead = "every episode counts as truncated"
            if "done" in self.flags:
                instead = f"'{self.names[self.flags['done']]}' stands for it, unless truncated"
            notes.append(f"The items have no flag of termination: {instead}.")
        return tuple(notes)

    def check(self, items: Any, lead: tuple[int, ...], method: str) -> list[Any]:
        """Returns the leaves `[*lead, ...]` of items, numbers as arrays; raises if one differs."""
        # Compare the structure first, to name the leaves that are missing or not expected.
        leaves, structure = jax.tree.flatten(items)
        if structure != self.structure:
            ours, names = set(self.names), leaf_names(items)
            text = (
                f"the leaves {self.names}, got {names}: missing {sorted(ours.difference(names))}, "
                f"not expected {sorted({*names} - ours)}"
            )
            if ours == {*names}:
                text = f"the structure {self.structure}, got {structure}"
            raise ValueError(
                f"{method}: expected an item with {text}. All items of a recorder look alike; "
                "record others to another path."
            )
        for number, (leaf, spec) in enumerate(zip(leaves, self.specs, strict=True)):
            where = f"{method}: leaf '{self.names[number]}'"
            # Python numbers are taken as the numbers that JAX makes of them.
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


def _number(leaf: object, spec: Any, where: str) -> np.ndarray:
    """Returns a Python number as an array of the dtype that JAX gives it."""
    if isinstance(leaf, int) and np.dtype(spec.dtype).kind == "i":
        # NumPy would wrap an integer that does not fit, without an error.
        bounds = np.iinfo(spec.dtype)
        fits = bounds.min <= leaf <= bounds.max
        check(fits, where, f"an integer that {spec.dtype} holds", leaf)
    return np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(type(leaf)))


def item_spec(example: Any, lead: int, keys: Keys, method: str) -> ItemSpec:
    """Returns the spec of items like `example`, whose leaves have `lead` leading axes.

    Raises for items without a reward, with names that collide in TED, or with other than numbers.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(example)
    names = [leaf_name(path) for path, _ in leaves]
    specs = [_leaf_spec(leaf, lead, f"{method}: leaf '{leaf_name(path)}'") for path, leaf in leaves]
    # A slash separates the levels of names in TED, so no key may have one.
    for path, _ in leaves:
        has_slash = any("/" in leaf_name((part,)) for part in path)
        check(not has_slash, method, "names without a slash", f"'{leaf_name(path)}'. Rename it")
    # A dataset needs rewards; the other parts of a transition may be missing.
    reward = path_name(keys.reward)
    got = f"items with the leaves {names}. Name the right one with keys=jrb.Keys(reward=...)"
    has_reward = any(within(name, reward) for name in names)
    check(has_reward, "reward", f"a leaf at '{reward}'", got)
    # Name the leaves as in TED. Flags become columns of the recorder's own, so only the others need
    # names apart from each other.
    numbers = _single_numbers(names, specs, keys, method)
    episode = numbers.pop("episode", None)
    in_ted = ted_names(names, keys, _ROLES)
    step_names = [in_ted[name] for n, name in enumerate(names) if n not in numbers.values()]
    try:
        check_names(method, [*_RESERVED, *step_names])
    except ValueError as error:
        raise ValueError(
            f"{error} Each leaf needs a place of its own in TED, apart from the flags "
            f"{list(_RESERVED)}: name all parts with keys=jrb.Keys(...)."
        ) from error
    arrays = [_recorded_leaf(in_ted[name], spec) for name, spec in zip(names, specs, strict=True)]
    # Arrow gives the sizes of single values in 32 bits.
    for leaf in arrays:
        got, is_small = f"{leaf.dtype} of shape {leaf.shape}", leaf.width < 1 << 31
        check(is_small, f"{method}: leaf '{leaf.name}'", "less than 2 GiB in one item", got)
    return ItemSpec(structure, specs, names, arrays, numbers, episode)


def _single_numbers(names: list[str], specs: list[Any], keys: Keys, method: str) -> dict[str, int]:
    """Returns the leaf indices of the flags and the episode number, by their fields of `Keys`."""
    numbers: dict[str, int] = {}
    for role in (*FLAGS, "episode"):
        # A flag is optional. If `keys` has a path for episode numbers, there must be such a leaf.
        path = path_name(getattr(keys, role))
        if not (role == "episode" and path) and not any(within(name, path) for name in names):
            continue
        # A leaf of this name must be one number; a group of leaves below it is none.
        place = names.index(path) if path in names else -1
        spec, where = specs[place], f"{method}: leaf '{path}'"
        is_number = place >= 0 and spec.shape in ((), (1,)) and not is_keys(spec.dtype)
        got = spec if place >= 0 else "no such leaf"
        check(is_number, where, "one number for each item, of shape () or (1,)", got)
        if role == "episode" and spec.dtype.kind not in "iu":
            raise TypeError(
                f"{where}: expected integers, the numbers of episodes, got {spec.dtype}."
            )
        numbers[role] = place
    return numbers


def _recorded_leaf(name: str, spec: Any) -> RecordedLeaf:
    """Returns a leaf as it is recorded: keys as their words, in this machine's byte order."""
    if not is_keys(spec.dtype):
        return RecordedLeaf(name, str(np.dtype(spec.dtype.type)), tuple(spec.shape))
    # Find the implementation of the keys, with which their words become keys again.
    words = jax.eval_shape(jax.random.key_data, spec)
    impls = [impl for impl in _KEY_IMPLS if jax.random.key(0, impl=impl).dtype == spec.dtype]
    if not impls:
        raise TypeError(f"leaf '{name}': expected keys of {_KEY_IMPLS}, got {spec.dtype}.")
    return RecordedLeaf(name, str(words.dtype), tuple(words.shape), impls[0])


def _leaf_spec(leaf: Any, lead: int, where: str) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "dtype"):
        leaf = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(type(leaf)))
    dtype = leaf.dtype if is_keys(leaf.dtype) else np.dtype(leaf.dtype)
    if isinstance(dtype, np.dtype):
        check_numeric(where, dtype)
    has_lead = len(leaf.shape) >= lead
    check(has_lead, where, f"{lead} axes for time and environments", leaf.shape)
    return jax.ShapeDtypeStruct(tuple(leaf.shape[lead:]), dtype)


def check_numeric(where: str, dtype: np.dtype) -> None:
    """Raises `TypeError` for dtypes of texts, times, objects and structs."""
    # Dtypes of other packages, such as bfloat16, are of kind V too, but are numbers.
    if dtype.kind in "OSUMmV" and dtype.type.__module__ == "numpy":
        raise TypeError(
            f"{where}: expected numbers, got dtype {dtype}. Encode it, or leave it out."
        )
