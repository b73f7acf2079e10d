"""Descriptions, states, leaf paths, and the checks whose errors name a leaf."""

import dataclasses
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import wording
from jrb._util.wording import printable

T = TypeVar("T")

PyTree = Any
"""Nested containers as `jax.tree` knows them."""

Leaf = Any
"""An array of JAX or NumPy, or a spec of one."""

ArrayLike = jax.Array | np.ndarray | np.generic | bool | int | float | complex
"""Values that JAX takes for arrays; the alias of JAX has no type for checkers outside JAX."""

DType = Any
"""A dtype of NumPy, or one of JAX that extends these."""

WIDE = frozenset("lLqQdDgG")
"""NumPy's letters for numbers of 64 bits and more."""

_COMPONENTS: set[type] = set()
# The hashes of living descriptions by `id`, as a description has no attribute but its fields.
_HASHES: dict[int, tuple[weakref.ref, int]] = {}


@dataclass_transform(frozen_default=True)
def component(cls: type[T]) -> type[T]:
    """Makes `cls` a description: a frozen, hashable dataclass without arrays, static under JAX.

    Raises:
        TypeError: when an instance is built with an array, or anything else that does not hash.
    """
    check = getattr(cls, "__post_init__", lambda self: None)  # also that of a base

    def post_init(self: Any) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _check_static(type(self).__name__, field.name, value)
            # Numbers of NumPy have a dtype, which results would take over.
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())
        check(self)

    def representation(self: Any) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in changed_fields(self))
        return f"{type(self).__name__}({fields})"

    cls.__post_init__ = post_init  # pyright: ignore[reportAttributeAccessIssue]: of any class
    cls.__repr__ = cls.__dict__.get("__repr__", representation)
    _COMPONENTS.add(cls)
    description = dataclasses.dataclass(frozen=True, repr=False)(cls)
    init, compute_hash = description.__init__, description.__hash__

    @functools.wraps(init)
    def init_with_hints(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            better = wording.wrong_arguments(type(self), error, kwargs)
            if better is error:
                raise
            raise better from None

    def cached_hash(self: Any) -> int:
        # Each call outside `jit` needs the hash, which takes a pass over all fields of all parts.
        entry = _HASHES.get(id(self))
        if entry is None or entry[0]() is not self:  # an interrupt may have stopped `forget`
            forget = functools.partial(_HASHES.pop, id(self))
            entry = weakref.ref(self, lambda _: forget()), compute_hash(self)
            _HASHES[id(self)] = entry
        return entry[1]

    description.__init__ = init_with_hints
    description.__hash__ = cached_hash  # pyright: ignore[reportAttributeAccessIssue]: the same
    return jax.tree_util.register_static(description)


def _check_static(owner: str, name: str, value: object) -> None:
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{owner}.{name}: expected a plain Python value, got an array of shape {value.shape}. "
            "A description is static: pass a number, or keep the array in a state or an argument."
        )
    # JAX keeps compiled programs by the description, which therefore must hash.
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{owner}.{name}: expected a hashable value, got {type(value).__name__} ({error}). "
            "Use a tuple for a list, and a frozen dataclass or a function for a part."
        ) from None


def changed_fields(description: Any) -> list[tuple[str, Any]]:
    """Returns the fields of a description that differ from their defaults, and their values."""
    pairs = [(field, getattr(description, field.name)) for field in dataclasses.fields(description)]
    same = lambda value, default: type(value) is type(default) and value == default
    return [(field.name, value) for field, value in pairs if not same(value, field.default)]


def is_component(cls: Any) -> bool:
    """Returns True if a class was made a description by `component`."""
    return cls in _COMPONENTS


def stable_text(value: Any) -> str:
    """Returns a text that is the same for equal values, in every process."""
    # NumPy's numbers and Python's are equal, and must give one text.
    if isinstance(value, np.generic):
        value = value.item()
    # True, 1 and 1.0 are equal too.
    if isinstance(value, int | float):
        return repr(int(value) if value == value // 1 else value)
    if isinstance(value, np.dtype):
        return repr(value.name)
    if value is None or isinstance(value, str | bytes | os.PathLike):
        return repr(value)
    if isinstance(value, tuple):
        return "(" + ",".join(map(stable_text, value)) + ")"
    # Functions and classes have a name; other parts are described by their fields.
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        entries = (getattr(value, field.name) for field in dataclasses.fields(value))
        return public_class(value) + stable_text(tuple(entries))
    # The repr of any other value may have its address in memory.
    return public_class(value)


def public_class(value: Any) -> str:
    """Returns the name of the value's class; if private, that of its first public base."""
    return next(cls.__name__ for cls in type(value).__mro__ if not cls.__name__.startswith("_"))


def static(*, default: Any) -> Any:
    """Makes a field of a state that holds no array, and is part of the state's tree structure."""
    return dataclasses.field(default=default, metadata={"static": True})


def cursor() -> Any:
    """Makes a field of integers that say where the next write goes; 0 when the state is emptied."""
    # `jrb._xla.dependencies` adds zeros to it, so that writes wait for earlier reads.
    return dataclasses.field(metadata={"mark": "cursor"})


def tally() -> Any:
    """Makes a field of integers that count entries; it is 0 when the state is emptied."""
    return dataclasses.field(metadata={"mark": "tally"})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(static, cursor, tally)
)
class State:
    """An immutable pytree of arrays: a subclass is a frozen dataclass, built from keywords.

    Leaves are in the order of their names. Two states are equal only if they are the same object.
    """

    def summary(self, ring: Any) -> dict[str, str]:
        """Returns the most important facts about the state, texts by name; by default none.

        Args:
            ring: the shape of the buffer's ring.
        """
        return {}

    def shown(self) -> Any:
        """Returns the pytree of arrays or specs that is displayed; by default the state itself."""
        return self

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]: made just now
        static_names = [field.name for field in fields if field.metadata.get("static")]
        # Sorted, so that the order of leaves does not depend on that of the fields.
        array_names = sorted({field.name for field in fields} - set(static_names))
        jax.tree_util.register_dataclass(cls, array_names, static_names)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy of the state with some fields replaced.

        Raises:
            TypeError: the state has no field of a given name.
        """
        # `dataclasses.replace` takes ten times as long.
        state = object.__new__(type(self))
        fields = vars(state)
        fields.update(vars(self))
        fields.update(changes)
        # A new name makes the dict longer: to compare lengths is the quickest check.
        if len(fields) != len(vars(self)):
            odd, names = sorted(changes.keys() - vars(self).keys()), sorted(vars(self))
            raise TypeError(f"{type(self).__name__}: expected fields {names}, got {odd}.")
        return state


class HostState(State):
    """The base class of the states of storages on the host."""

    planned: Any = None  # the slots that the host will write, after a compiled plan of a write

    @property
    def host_bytes(self) -> int:
        """The bytes that all rows take on the host, in files or memory; 0 if that is not known."""
        return 0


class SpecKey:
    """The specs of an item as a static argument of compiled functions, whose hash is cached.

    Attributes:
        spec: a pytree of specs like one item.
    """

    __slots__ = ("_hash", "_key", "spec")

    def __init__(self, spec: PyTree) -> None:
        leaves, structure = jax.tree.flatten(spec)
        self.spec: PyTree = spec
        self._key: tuple[Any, ...] = (structure, tuple(leaves))
        self._hash: int = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SpecKey) and self._key == other._key)


def map_marks(state: T, change: Callable[[str, jax.Array], jax.Array]) -> T:
    """Returns a state, or nested dicts and tuples of states, with all marked fields changed.

    `change` takes the mark, "cursor" or "tally", and the field's array, and returns the new array.
    """

    def map_tree(tree: PyTree) -> Any:
        # Change the marked fields of a state, and descend into the others.
        if isinstance(tree, State):
            fields = {}
            for field in dataclasses.fields(tree):  # pyright: ignore[reportArgumentType]
                value, mark = getattr(tree, field.name), field.metadata.get("mark")
                if mark is None or value is None:
                    fields[field.name] = map_tree(value)
                else:
                    fields[field.name] = change(mark, value)
            return tree.replace(**fields)
        if type(tree) is dict:
            return {name: map_tree(entry) for name, entry in tree.items()}
        return tuple(map(map_tree, tree)) if type(tree) is tuple else tree

    return map_tree(state)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns `next/reward` for a key path of `jax.tree_util`; the whole item has the name `.`."""
    return "/".join(map(part_name, path)) or "."


def part_name(part: PyTree) -> str:
    """Returns the name of one part of a key path: a dict's key, an index, or an attribute."""
    for kind in ("key", "idx", "name"):
        if hasattr(part, kind):
            return str(getattr(part, kind))
    return str(part)


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the names of all leaves, in order."""
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def unique_names(tree: PyTree) -> list[str]:
    """Returns the names of all leaves, made unique: the second leaf `x` is named `x#2`."""
    names: dict[str, None] = {}
    for name in leaf_names(tree):
        # Count up, as a leaf may be named `x#2` itself.
        unique, number = name, 1
        while unique in names:
            number += 1
            unique = f"{name}#{number}"
        names[unique] = None
    return list(names)


def shown_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns the names and leaves of a tree as they are displayed (see `State.shown`)."""
    has_own = lambda it: isinstance(it, State) and type(it).shown is not State.shown
    pairs = []
    # Stop at states that are displayed as other pytrees, and descend into those instead.
    for path, it in jax.tree_util.tree_leaves_with_path(tree, is_leaf=has_own):
        inner = jax.tree_util.tree_leaves_with_path(it.shown() if has_own(it) else it)
        pairs += [(leaf_name((*path, *below)), leaf) for below, leaf in inner]
    return pairs


def spec_of(tree: PyTree, what: str) -> Any:
    """Returns the specs of a tree of arrays, specs or Python numbers; raises for other leaves.

    It also raises for a dtype that JAX would change, such as float64 without x64.
    """
    where = lambda path: f"{what}: leaf '{printable(leaf_name(path), '')}'"
    return jax.tree_util.tree_map_with_path(lambda path, it: _leaf_spec(where(path), it), tree)


def _leaf_spec(where: str, leaf: Leaf) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(type(leaf)))
    if not is_array(leaf):
        raise no_array(where, leaf)
    dtype = leaf.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = np.dtype(dtype)
        if dtype.kind in "OSUMmV" and dtype.type.__module__ == "numpy":  # bfloat16 is of kind V
            raise TypeError(
                f"{where}: expected numbers, got dtype {dtype}. Encode it as numbers, such as "
                ".view('uint8') for bytes, or each field as a leaf; or leave it out."
            )
        kept = kept_dtype(dtype)
        if kept != dtype:
            raise TypeError(
                f"{where}: expected a dtype that JAX keeps, got {dtype}, which becomes {kept}. "
                f"Cast it with .astype({kept}), or make the buffer with cast=True, or set "
                "jax_enable_x64."
            )
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def kept_dtype(dtype: Any) -> Any:
    """Returns the dtype in which JAX keeps numbers of a dtype."""
    # JAX refuses float128 and complex256, which are other types on other systems.
    wider = {np.longdouble: np.float64, np.clongdouble: np.complex128}
    return jax.dtypes.canonicalize_dtype(wider.get(np.dtype(dtype).type, dtype))


def no_array(where: str, leaf: Leaf) -> TypeError:
    """Makes the error for a leaf that is no array."""
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
    """Raises unless `got` has the structure and dtypes of specs, and their shapes after `lead`.

    `what` and `mend` begin and end the error message. `casts` is True if the buffer has `cast=True`
    and so has converted dtypes already, where it can.
    """
    # Compare shapes and dtypes without making specs, as this runs at every call. JAX may narrow a
    # dtype of 64 bits, so leaves with such a dtype are looked at below.
    check_structure(expected, got, what, mend)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True)
    if all(
        is_array(leaf)
        and getattr(leaf.dtype, "char", "") not in WIDE
        and leaf.dtype == want.dtype
        and tuple(leaf.shape) == (*lead, *want.shape)
        for want, leaf in pairs
    ):
        return
    # Find the first leaf that differs.
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), leaf in zip(leaves, jax.tree.leaves(spec_of(got, what)), strict=True):
        where = f"{what}: leaf '{printable(leaf_name(path), '')}'"
        shape = (*lead, *want.shape)
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


def check_structure(expected: PyTree, got: PyTree, what: str, mend: str) -> None:
    """Raises `ValueError` with the first difference unless both trees have the same structure."""
    if jax.tree.structure(expected) == jax.tree.structure(got):
        return
    # Name the leaves that are missing or surplus; with equal names, only containers differ.
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


def are_alike(one: PyTree, other: PyTree) -> bool:
    """Returns True if two trees have the same structure, shapes and dtypes."""
    kinds = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    return jax.tree.structure(one) == jax.tree.structure(other) and kinds(one) == kinds(other)


def is_array(thing: PyTree) -> bool:
    """Returns True for an array or a spec of one: anything with a shape and a dtype."""
    return hasattr(thing, "shape") and hasattr(thing, "dtype")


def widen(leaf: jax.Array) -> jax.Array:
    """Returns a leaf as float32; unchanged if its dtype is float32 or a wider floating dtype."""
    is_wide = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize >= 4
    return leaf if is_wide else leaf.astype(jnp.float32)


def nbytes(spec: PyTree) -> int:
    """Returns the bytes that arrays of these shapes and dtypes take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))
