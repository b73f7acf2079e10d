"""Descriptions, states, leaf paths, and the checks whose errors name a leaf."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import wording
from jrb._util.printing import printable

T = TypeVar("T")

PyTree = Any
"""Nested containers as `jax.tree` knows them."""

Leaf = Any
"""An array of JAX or NumPy, or a spec of one."""

ArrayLike = jax.Array | np.ndarray | np.generic | bool | int | float | complex
"""Values that JAX takes for arrays; the alias of JAX has no type for checkers outside JAX."""

DType = Any
"""A dtype of NumPy, or one of JAX that extends these."""

_COMPONENTS: set[type] = set()


@dataclass_transform(frozen_default=True)
def component(cls: type[T]) -> type[T]:
    """Makes `cls` a description: a frozen, hashable dataclass without arrays, static under JAX.

    Raises:
        TypeError: when an instance is built with an array, or anything else that does not hash.
    """
    check = getattr(cls, "__post_init__", lambda self: None)  # also that of a base

    def post_init(self: Any) -> None:
        for field in dataclasses.fields(self):
            _check_static(type(self).__name__, field.name, getattr(self, field.name))
        check(self)

    cls.__post_init__ = post_init  # pyright: ignore[reportAttributeAccessIssue]: of any class
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = _call
    _COMPONENTS.add(cls)
    made = dataclasses.dataclass(frozen=True, repr=False)(cls)
    made.__init__ = _explained(made.__init__)
    made.__hash__ = _hashed_once(made.__hash__)  # pyright: ignore[reportAttributeAccessIssue]: the same
    return jax.tree_util.register_static(made)


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` of a description, whose error for names that it does not have is of use."""

    @functools.wraps(init)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            other = wording.wrong_arguments(type(self), error, kwargs)
            if other is error:
                raise
            raise other from None

    return explained


_HASHES: dict[int, tuple[weakref.ref, int]] = {}
"""Those of the descriptions that there are, by `id`."""


def _hashed_once(compute: Callable[[Any], int]) -> Callable[[Any], int]:
    """The hash of a description, computed once: each call of a verb outside `jit` asks for it.

    It goes through all fields and those of all parts. It is not kept in the description, in which
    there is nothing but its fields.
    """

    def remembered(self: Any) -> int:
        found = _HASHES.get(id(self))
        if found is None or found[0]() is not self:  # an interrupt may have stopped `forget`
            forget = functools.partial(_HASHES.pop, id(self))
            found = weakref.ref(self, lambda _: forget()), compute(self)
            _HASHES[id(self)] = found
        return found[1]

    return remembered


def changed(description: Any) -> list[tuple[str, Any]]:
    """The fields of a description that are not what they are by default, and their values."""
    found = [(field, getattr(description, field.name)) for field in dataclasses.fields(description)]
    same = lambda value, default: type(value) is type(default) and value == default
    return [(field.name, value) for field, value in found if not same(value, field.default)]


def _call(self: Any) -> str:
    """How a description is written, without what goes without saying."""
    fields = ", ".join(f"{name}={value!r}" for name, value in changed(self))
    return f"{type(self).__name__}({fields})"


def is_component(cls: Any) -> bool:
    """Whether a class was made a description by `component`."""
    return cls in _COMPONENTS


def static(*, default: Any) -> Any:
    """A field of a state that is no array, and the same in all states that are mapped together."""
    return dataclasses.field(default=default, metadata={"static": True})


def cursor() -> Any:
    """A field of a state, integers that say where the next write goes: it waits for earlier reads.

    Empty, it is 0 (see `jrb._xla.dependencies`).
    """
    return dataclasses.field(metadata={"mark": "cursor"})


def tally() -> Any:
    """A field of a state, integers that count what there is: 0 when it is emptied."""
    return dataclasses.field(metadata={"mark": "tally"})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(static, cursor, tally)
)
class State:
    """An immutable pytree of arrays: a subclass is a frozen dataclass, built from keywords.

    Leaves are in the order of their names. Two states are equal if they are the same.
    """

    def summary(self, ring: Any) -> dict[str, str]:
        """What a person wants to know of it first, by name; the default is nothing.

        Args:
            ring: the shape of the buffer's ring.
        """
        return {}

    def shown(self) -> Any:
        """The pytree of arrays, or specs, as which a person sees it; the default is itself."""
        return self

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]: made just now
        fixed = [field.name for field in fields if field.metadata.get("static")]
        arrays = sorted({field.name for field in fields} - set(fixed))
        jax.tree_util.register_dataclass(cls, arrays, fixed)

    def replace(self, **changes: Any) -> Self:
        """The same state with other fields.

        Raises:
            TypeError: it has no such field.
        """
        made = object.__new__(type(self))  # `dataclasses.replace` costs ten times as much
        fields = vars(made)
        fields.update(vars(self))
        fields.update(changes)
        if len(fields) != len(vars(self)):
            odd, names = sorted(changes.keys() - vars(self).keys()), sorted(vars(self))
            raise TypeError(f"{type(self).__name__}: expected fields {names}, got {odd}.")
        return made


class HostState:
    """The base class of the states of storages on the host."""

    @property
    def host_bytes(self) -> int:
        """The bytes that all rows take on the host, in files or memory; 0 if that is not known."""
        return 0


class SpecKey:
    """Specs of items, as an argument of a compiled function that is no array. It is hashed once.

    Attributes:
        spec: one item.
    """

    __slots__ = ("_hash", "_key", "spec")

    def __init__(self, spec: PyTree) -> None:
        leaves, structure = jax.tree.flatten(spec)
        self.spec: PyTree = spec
        self._key: tuple[Any, ...] = (structure, tuple(leaves))
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SpecKey) and self._key == other._key)


def mapped_marks(state: T, change: Callable[[str, jax.Array], jax.Array]) -> T:
    """A state in which marked fields are changed, wherever they lie in it.

    Args:
        state: a `State`, or a plain dict or tuple of such; all else stays as it is.
        change: from the mark, "cursor" or "tally", and an array to an array.
    """

    def changed(tree: PyTree) -> Any:
        if isinstance(tree, State):
            return tree.replace(
                **{
                    field.name: changed_field(field, getattr(tree, field.name))
                    for field in dataclasses.fields(tree)  # pyright: ignore[reportArgumentType]
                }
            )
        if type(tree) is dict:
            return {name: changed(entry) for name, entry in tree.items()}
        return tuple(map(changed, tree)) if type(tree) is tuple else tree

    def changed_field(field: dataclasses.Field, value: Leaf) -> Any:
        mark = field.metadata.get("mark")
        return changed(value) if mark is None or value is None else change(mark, value)

    return changed(state)


def unmarked_names(state: PyTree) -> list[str]:
    """Returns the names of the arrays of a state that are neither `cursor()` nor `tally()`."""
    nothing: Any = None
    return leaf_names(mapped_marks(state, lambda mark, value: nothing))


def _check_static(owner: str, name: str, value: object) -> None:
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{owner}.{name}: expected a plain Python value, got an array of shape {value.shape}. "
            "A description is static: pass a number, or keep the array in a state or an argument."
        )
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{owner}.{name}: expected a hashable value, got {type(value).__name__} ({error}). "
            "Use a tuple for a list, and a frozen dataclass or a function for a part."
        ) from None


def leaf_name(path: tuple[Any, ...]) -> str:
    """`next/reward` for a key path of `jax.tree_util`; the whole item has the name `.`."""
    return "/".join(map(part_name, path)) or "."


def part_name(part: PyTree) -> str:
    """The name of one part of a key path: a key, a number, or that of an attribute."""
    for kind in ("key", "idx", "name"):
        if hasattr(part, kind):
            return str(getattr(part, kind))
    return str(part)


def shown_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf for people: the keys may come from a file."""
    return printable(leaf_name(path), "")


def leaf_names(tree: PyTree) -> list[str]:
    """The names of all leaves, in order."""
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def unique_names(tree: PyTree) -> list[str]:
    """The same, each once: a second one is followed by `#2`."""
    names: dict[str, None] = {}
    for name in leaf_names(tree):
        unique, number = name, 1
        while unique in names:
            number += 1
            unique = f"{name}#{number}"
        names[unique] = None
    return list(names)


def shown_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves and their names, as a person sees them (see `State.shown`)."""
    differs = lambda it: isinstance(it, State) and type(it).shown is not State.shown
    found = []
    for path, it in jax.tree_util.tree_leaves_with_path(tree, is_leaf=differs):
        inner = jax.tree_util.tree_leaves_with_path(it.shown() if differs(it) else it)
        found += [(leaf_name((*path, *rest)), leaf) for rest, leaf in inner]
    return found


def spec_of(tree: PyTree, what: str) -> Any:
    """The shapes and dtypes of `tree`, as `jax.ShapeDtypeStruct`s.

    Args:
        tree: a pytree of arrays, `ShapeDtypeStruct`s or Python numbers.
        what: who asks, for the error's first words.

    Raises:
        TypeError: a leaf is no array, or has a dtype that JAX would change (float64 without x64).
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _leaf_spec(f"{what}: leaf '{shown_name(path)}'", leaf), tree
    )


def _leaf_spec(where: str, leaf: Leaf) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(type(leaf)))
    if not is_array(leaf):
        raise no_array(where, leaf)
    dtype = leaf.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = np.dtype(dtype)
        if dtype.kind in "OSUMm" or dtype.fields is not None:
            raise TypeError(
                f"{where}: expected numbers, got dtype {dtype}. Encode it, or leave it out."
            )
        kept = jax.dtypes.canonicalize_dtype(dtype)
        if kept != dtype:
            raise TypeError(
                f"{where}: expected a dtype that JAX keeps, got {dtype}, which becomes {kept}. "
                f"Cast it with .astype({kept}), or make the buffer with cast=True, or set "
                "jax_enable_x64."
            )
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def no_array(where: str, leaf: Leaf) -> TypeError:
    """An error for a leaf that is no array."""
    return TypeError(
        f"{where}: expected an array, got {type(leaf).__name__}. Convert it with jnp.asarray, or "
        "leave it out of the item."
    )


def check_like(
    expected: PyTree,
    got: PyTree,
    what: str,
    mend: str,
    lead: tuple[int, ...] = (),
    casts: bool = False,
) -> None:
    """Raises unless `got` has the structure, shapes and dtypes of the specs `expected`.

    Args:
        expected: a pytree of `ShapeDtypeStruct`s.
        got: a pytree of arrays.
        what: who asks, for the error's first words.
        mend: what to do, for the error's last words.
        lead: axes that every leaf of `got` has in front.
        casts: whether dtypes were converted as far as a buffer with `cast=True` does.

    Raises:
        ValueError: another structure or shape.
        TypeError: another dtype, or a leaf that is no array.
    """
    check_structure(expected, got, what, mend)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True)
    if all(_is_like(want, leaf, lead) for want, leaf in pairs):
        return
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), leaf in zip(leaves, jax.tree.leaves(spec_of(got, what)), strict=True):
        where, shape = f"{what}: leaf '{shown_name(path)}'", (*lead, *want.shape)
        if leaf.shape != shape:
            raise ValueError(f"{where}: expected shape {shape}, got {leaf.shape}. {mend}")
        if leaf.dtype != want.dtype:
            advice = (
                f"cast=True converts only what fits whatever it is, so cast it with "
                f".astype({want.dtype}) if you know that its values fit."
                if casts
                else f"Cast it with .astype({want.dtype}), or make the buffer with cast=True."
            )
            raise TypeError(f"{where}: expected dtype {want.dtype}, got {leaf.dtype}. {advice}")


def _is_like(want: jax.ShapeDtypeStruct, leaf: Leaf, lead: tuple[int, ...]) -> bool:
    """Whether a leaf is surely what is wanted; if not, somebody has to look who names it.

    That somebody also knows whether JAX keeps numbers of 64 bits.
    """
    if not is_array(leaf) or getattr(leaf.dtype, "char", "") in WIDE:
        return False
    return leaf.dtype == want.dtype and tuple(leaf.shape) == (*lead, *want.shape)


WIDE = frozenset("lLqQdDgG")
"""NumPy's letters for numbers of 64 bits and more."""


def alike(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same structure, shapes and dtypes."""
    return jax.tree.structure(one) == jax.tree.structure(other) and same_arrays(one, other)


def same_arrays(one: PyTree, other: PyTree) -> bool:
    """Returns whether the arrays of two trees have the same shapes and dtypes, one by one."""
    kinds = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    return kinds(one) == kinds(other)


def check_structure(expected: PyTree, got: PyTree, what: str, mend: str) -> None:
    """Raises `ValueError` unless both trees have the same structure, naming where they part."""
    if jax.tree.structure(expected) == jax.tree.structure(got):
        return
    want, have = leaf_names(expected), leaf_names(got)
    missing = sorted(set(want) - set(have))
    surplus = sorted(set(have) - set(want))
    if missing or surplus:
        lacks = [f"is missing {missing}"] * bool(missing)
        odd = " and ".join(lacks + [f"has leaves not expected {surplus}"] * bool(surplus))
        text = f"the item {odd}: expected the leaves {want}, got {have}"
    else:
        text = f"expected {jax.tree.structure(expected)}, got {jax.tree.structure(got)}"
    first = printable((missing or surplus or want or ["."])[0], "")
    raise ValueError(f"{what}: leaf '{first}': {text}. {mend}")


def is_array(thing: PyTree) -> bool:
    """Whether it has a shape and a dtype, as arrays and their specs have."""
    return hasattr(thing, "shape") and hasattr(thing, "dtype")


def dtype_of(thing: PyTree) -> Any:
    """The dtype of an array or a spec of one; None for anything else."""
    return getattr(thing, "dtype", None)


def wide(leaf: jax.Array) -> jax.Array:
    """The leaf as float32, or as it is where it is of that or a wider floating dtype."""
    is_wide = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize >= 4
    return leaf if is_wide else leaf.astype(jnp.float32)


def nbytes(spec: PyTree) -> int:
    """The bytes that arrays of these shapes and dtypes take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))


def is_mapping(tree: PyTree) -> bool:
    """Whether entries are reached by `tree[name]` rather than by attribute."""
    return isinstance(tree, Mapping)
