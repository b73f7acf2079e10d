"""How the items of a recorder look, and the check of those that it is given.

T time, E environments.
"""

import dataclasses
from typing import Any

import jax
import jax.core
import numpy as np

from jrb._util import casting, prng_keys, pytree
from jrb._util.pytree import PyTree
from jrb.checkpoint import descriptions
from jrb.datasets.recording import roles
from jrb.datasets.recording.heads import Leaf
from jrb.keys import Keys, find, path_name

_MEND = "All items of a recorder look alike; make another recorder, at another path, for others."
_NUMBERS = (bool, int, float, complex)
_NUMPY = (np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The structure, shapes and dtypes of items.

    Attributes:
        spec: of one item, `jax.ShapeDtypeStruct`s in NumPy's dtypes or those of keys.
        structure: of an item.
        specs: of its leaves.
        leaves: the same, as they lie in files.
    """

    spec: PyTree
    structure: Any
    specs: list[Any]
    leaves: tuple[Leaf, ...]

    def checked(self, items: PyTree, lead: tuple[int, ...], verb: str) -> list[Any]:
        """The leaves of items, `[*lead, ...]` each, Python's numbers as arrays.

        Raises:
            ValueError: another structure or shape; the message names a leaf.
            TypeError: another dtype, or no array.
        """
        leaves, structure = jax.tree.flatten(items)
        if structure != self.structure:
            pytree.check_structure(self.spec, items, verb, _MEND)
        found = []
        for leaf, spec, known in zip(leaves, self.specs, self.leaves, strict=True):
            if not hasattr(leaf, "dtype"):
                leaf = _number(leaf, spec, f"{verb}: leaf '{known.name}'")
            if leaf.dtype != spec.dtype or leaf.shape != (*lead, *spec.shape):
                raise _other(leaf, spec, lead, f"{verb}: leaf '{known.name}'")
            found.append(leaf)
        return found

    def arrays(self, items: PyTree, lead: tuple[int, ...], verb: str) -> list[Any]:
        """The same as NumPy arrays, keys as their words."""
        return [
            leaf if isinstance(leaf, _NUMPY) else _on_host(leaf, known, verb)
            for leaf, known in zip(self.checked(items, lead, verb), self.leaves, strict=True)
        ]

    def axes(self, items: PyTree, verb: str) -> tuple[int, ...]:
        """The axes that the first leaf of some items has before its own."""
        leaves = jax.tree.leaves(items)
        if not leaves or not self.specs:
            pytree.check_structure(self.spec, items, verb, _MEND)
        shape = np.shape(leaves[0]) if not hasattr(leaves[0], "shape") else leaves[0].shape
        return tuple(shape[: max(0, len(shape) - len(self.specs[0].shape))])


def form_of(example: Any, lead: int, keys: Keys, verb: str) -> Form:
    """The form of items such as this one.

    Args:
        example: arrays or `jax.ShapeDtypeStruct`s.
        lead: the number of axes that come before those of one item.
        keys: how items are keyed.
        verb: who asks, for an error's first words.

    Raises:
        ValueError: leaves with names that files cannot tell apart, without a reward, or with
            flags that are not one number an item.
        TypeError: a leaf that is no array of numbers.
    """
    spec = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _spec(leaf, lead, f"{verb}: leaf '{_name(path, verb)}'"), example
    )
    specs, structure = jax.tree.flatten(spec)
    names = pytree.leaf_names(spec)
    leaves = tuple(map(_leaf, names, specs))
    _check_flags(spec, leaves, keys, verb)
    roles.ted_names(names, keys)
    return Form(spec, structure, specs, leaves)


def _name(path: Any, verb: str) -> str:
    name = pytree.leaf_name(path)
    if any("/" in pytree.part_name(part) or not pytree.part_name(part) for part in path):
        raise ValueError(f"{verb}: expected names without a slash, got '{name}'. Rename it.")
    return name


def _spec(leaf: Any, lead: int, where: str) -> jax.ShapeDtypeStruct:
    if not pytree.is_array(leaf):
        if not isinstance(leaf, _NUMBERS):
            raise TypeError(
                f"{where}: expected an array, got {type(leaf).__name__}. Convert it with "
                "np.asarray, or leave it out of the item."
            )
        leaf = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(type(leaf)))
    dtype = leaf.dtype
    if not prng_keys.is_keys(dtype):
        dtype = np.dtype(dtype)
        try:
            descriptions.dtype_of(str(dtype))
        except ValueError:
            raise TypeError(
                f"{where}: expected numbers, got dtype {dtype}. Encode it, or leave it out."
            ) from None
    if len(leaf.shape) < lead:
        raise ValueError(
            f"{where}: expected {lead} axes for time and environments, got {leaf.shape}."
        )
    return jax.ShapeDtypeStruct(tuple(leaf.shape[lead:]), dtype)


def _leaf(name: str, spec: PyTree) -> Leaf:
    raw = prng_keys.raw_spec(spec)
    made = prng_keys.implementation(spec.dtype) if prng_keys.is_keys(spec.dtype) else None
    return Leaf(name, str(np.dtype(raw.dtype)), tuple(raw.shape), made)


def _check_flags(spec: PyTree, leaves: tuple[Leaf, ...], keys: Keys, verb: str) -> None:
    """Raises unless flags, and numbers of episodes, are single numbers."""
    found = {leaf.name: leaf for leaf in leaves}
    paths = [getattr(keys, flag) for flag in roles.FLAGS if keys.flags(spec)]
    names = [path_name(path) for path in paths if path_name(path) in keys.flags(spec)]
    if keys.episode is not None:
        find(spec, keys.episode, f"{verb}: episode")
        names.append(path_name(keys.episode))
    for name in names:
        leaf = found.get(name)
        if leaf is None or leaf.shape not in ((), (1,)) or leaf.keys is not None:
            raise ValueError(
                f"{verb}: leaf '{name}': expected one number for each item, of shape () or (1,), "
                f"got {'several leaves' if leaf is None else leaf.shape}."
            )
    if keys.episode is not None and found[names[-1]].numpy.kind not in "iu":
        raise TypeError(
            f"{verb}: leaf '{names[-1]}': expected integers, the numbers of episodes, got "
            f"{found[names[-1]].dtype}."
        )


def _number(leaf: object, spec: PyTree, where: str) -> np.ndarray:
    """A number of Python as an array of the dtype that JAX gives it."""
    if not isinstance(leaf, _NUMBERS):
        raise TypeError(f"{where}: expected an array, got {type(leaf).__name__}.")
    if isinstance(leaf, int) and np.dtype(spec.dtype).kind == "i":
        bounds = np.iinfo(spec.dtype)
        if not bounds.min <= leaf <= bounds.max:
            raise ValueError(f"{where}: expected an integer that {spec.dtype} holds, got {leaf}.")
    return np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(type(leaf)))


def _other(leaf: Any, spec: PyTree, lead: tuple[int, ...], where: str) -> Exception:
    if leaf.dtype != spec.dtype:
        return TypeError(
            f"{where}: expected dtype {spec.dtype}, got {leaf.dtype}. Cast it yourself: a "
            "recorder keeps every bit."
        )
    wanted = (*lead, *spec.shape)
    return ValueError(
        f"{where}: expected shape {wanted}, got {leaf.shape}. Time comes first, then the "
        "environments; add takes one timestep, append several."
    )


def _on_host(leaf: Any, known: Leaf, verb: str) -> np.ndarray:
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            f"{verb}: leaf '{known.name}': expected an array, got a tracer. Inside jit, scan and "
            "grad there is record."
        )
    return np.asarray(leaf if known.keys is None else jax.random.key_data(leaf))


def check_kept(form: Form, verb: str) -> None:
    """Raises unless JAX keeps the dtypes of all leaves."""
    for spec, leaf in zip(form.specs, form.leaves, strict=True):
        if not prng_keys.is_keys(spec.dtype) and not casting.is_kept(np.zeros((), spec.dtype)):
            raise TypeError(
                f"{verb}: leaf '{leaf.name}': expected a dtype that JAX keeps, got {spec.dtype}. "
                "Set jax_enable_x64, or record other dtypes."
            )
