"""What a state of a description looks like, and whether a given one does.

Told from what is static, shapes and kinds of parts, when a verb is traced: it costs nothing when
the verb runs. N capacity, E environments.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jrb._core import counting, episodes, transforming
from jrb._core.steps import context_of
from jrb._util import pytree
from jrb._util.arguments import entry
from jrb._util.pytree import Leaf, PyTree, SpecKey
from jrb.ring import Ring
from jrb.state import Buffer, BufferState
from jrb.types import Item
from jrb.types.messages import PartState
from jrb.types.parts import BASES

_MEND = "Pass the state that init of this very description made, or one that came from it."
_RESIZE = (
    "To bring the newest rows to another size, save the state with its own description, and load "
    "it by jrb.load(path, capacity=..., num_envs=...)."
)


@entry
def blank(buffer: Buffer, spec: Item) -> BufferState:
    """An empty state for items of this spec as they are stored, behind all inverses.

    Raises:
        ValueError: it has more slots than int32 can tell apart.
    """
    ring = buffer.ring
    check_slots(ring.capacity)
    writer = buffer.writer.init(ring, spec)
    context = context_of(buffer, writer)
    return BufferState(
        storage=buffer.storage.init(context, spec),
        writer=writer,
        sampler=_attached(buffer, buffer.sampler.init(ring)),
        unit=buffer.unit.init(context, spec),
        edits=jnp.zeros((), jnp.uint32),
        transforms=transforming.init(buffer.transforms, context, spec),
        numbers=episodes.no_numbers(ring, spec, buffer.keys) if _looks_at_ends(buffer) else None,
        ring=ring,
    )


def _attached(buffer: Buffer, sampler: PartState) -> Any:
    """Returns a new state of the sampler as part of a state of the buffer."""
    sampler = buffer.sampler.attach(sampler, buffer.unit.has_delayed_anchors)
    return counting.init(buffer.sampler, buffer.ring, sampler)


def _looks_at_ends(buffer: Buffer) -> bool:
    return not buffer.unit.one_row or bool(transforming.learning(buffer.transforms))


def check_slots(slots: int) -> None:
    """Raises unless so many slots of one state can be told apart.

    Raises:
        ValueError: they cannot.
    """
    if slots >= 2**31:
        raise ValueError(
            f"capacity: expected at most {2**31 - 1} slots in one state, got {slots}. Cut the "
            "buffer into more shards: jrb.Sharded(buffer, shards=...)."
        )


def check(buffer: Buffer, state: BufferState, spec: SpecKey | None = None) -> None:
    """Raises unless a state is one of this description.

    Args:
        buffer: the description.
        state: a `BufferState`.
        spec: of one item as it is stored; None to ask the storage.

    Raises:
        ValueError: it is one of another capacity, or number of environments, or of many buffers.
        TypeError: it is one of other parts.
    """
    leaves, structure = jax.tree.flatten(state)
    kinds = tuple([_kind(leaf) for leaf in leaves])
    _check(buffer, structure, kinds, spec)


def _kind(leaf: Leaf) -> tuple[Any, Any]:
    try:
        return leaf.shape, leaf.dtype
    except AttributeError:
        raise TypeError(
            f"expected a state of this buffer, with arrays for leaves, got {type(leaf).__name__}. "
            "Pass the state that came back from the last verb."
        ) from None


@functools.lru_cache(maxsize=256)
def _check(buffer: Buffer, structure: Any, kinds: tuple, spec: SpecKey | None) -> None:
    """The same, remembered where nothing was raised."""
    leaves = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    state = jax.tree.unflatten(structure, leaves)
    given = None if spec is None else spec.spec
    if _fits(buffer, state, given):
        return
    if state.ring != buffer.ring:
        raise ValueError(
            f"expected a state of this buffer, of {_size(buffer.ring, state.ring)}, got one of "
            f"{_size(state.ring, buffer.ring)}. {_MEND} {_RESIZE}"
        )
    for axes in (1, 2, 3):
        inner = [jax.ShapeDtypeStruct(shape[axes:], dtype) for shape, dtype in kinds]
        if _fits(buffer, jax.tree.unflatten(structure, inner), given):
            raise ValueError(
                f"expected a state of one buffer, got one with the leading axes "
                f"{kinds[0][0][:axes]} of many. Call the verb under jax.vmap, or take one of them."
            )
    raise _other_part(buffer, state, given)


def _fits(buffer: Buffer, state: BufferState, spec: Item | None) -> bool:
    want = _wanted(buffer, state, spec)
    if want is None or state.ring != buffer.ring:
        return False
    numbers = want.numbers, state.numbers
    return all(pytree.alike(*pair) for pair in [*_pairs(want, state).values(), numbers])


def _pairs(want: BufferState, state: BufferState) -> dict[str, tuple[Any, Any]]:
    """What parts should keep, and what they keep."""
    return {
        "writer": (want.writer, state.writer),
        "unit": (want.unit, state.unit),
        "sampler": (want.sampler, state.sampler),
        "storage": (want.storage, state.storage),
        "transforms": (want.transforms, state.transforms),
    }


def _wanted(buffer: Buffer, state: BufferState, spec: Item | None) -> BufferState | None:
    """The specs of a state for items such as this one has; None where it has none."""
    try:
        if spec is None:
            spec = buffer.storage.spec(state.storage)
        return jax.eval_shape(lambda: blank(buffer, spec))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None  # whatever the parts make of a state that is not theirs


def _same_leaves(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same arrays, whatever else they are."""
    leaves = lambda tree: [
        (pytree.leaf_name(path), leaf.shape, leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return leaves(one) == leaves(other)


def _size(ring: Ring | None, other: Ring | None) -> str:
    """The capacity, and the environments where they make a difference."""
    if ring is None:
        return "no ring"
    same = other is not None and ring.envs == other.envs
    return f"capacity {ring.capacity}" + ("" if same else f" with num_envs={ring.envs}")


def _other_part(buffer: Buffer, state: BufferState, spec: Item | None) -> TypeError:
    """An error that names the first part whose state is not what it keeps."""
    want = _wanted(buffer, state, spec)
    if want is None:
        found = _shape(state.storage)
        return _of_other("storage", type(buffer.storage).__name__, found)
    parts = {"writer": buffer.writer, "sampler": buffer.sampler, "unit": buffer.unit}
    parts |= {"storage": buffer.storage, "transforms": buffer.transforms}
    for name, (wanted, found) in _pairs(want, state).items():
        if pytree.alike(wanted, found):
            continue
        kind = type(parts[name]).__name__
        if name == "transforms":
            learning = transforming.learning(buffer.transforms)
            kind = " and ".join(type(each).__name__ for each in learning) or "without a state"
        is_same_kind = name == "sampler" and type(found) is type(wanted)
        if is_same_kind and pytree.alike(wanted, _attached(buffer, found)):
            return TypeError(
                f"expected a state whose sampler was told of all its anchors, got one on which a "
                f"new state of {kind} was put by hand. {_MEND}"
            )
        if _same_leaves(wanted, found):
            return TypeError(
                f"expected a state of this buffer, whose {name} is {parts[name]!r}, got one that "
                f"was made for another {kind}. {_MEND}"
            )
        owners = _owners(name, found)
        if owners and kind not in owners:
            return TypeError(
                f"expected a state of this buffer, whose {name} is {kind}, got one that was made "
                f"by a buffer with {' or '.join(owners)}. {_MEND}"
            )
        return _of_other(name, f"{kind}, {_shape(wanted)}", _shape(found))
    return TypeError(f"expected a state of this buffer, got another. {_MEND}")


def _owners(name: str, state: PyTree) -> list[str]:
    """The parts by which such a state is made: those of its module, or those without a state."""
    near = sys.modules[type(state).__module__]
    if name not in BASES or not isinstance(state, pytree.State):
        return _WITHOUT.get(name, []) if not jax.tree.leaves(state) else []
    parts = [it for it in vars(near).values() if isinstance(it, type) and pytree.is_component(it)]
    return [it.__name__ for it in parts if it.__module__ == near.__name__]


_WITHOUT = {"sampler": ["Uniform"], "unit": ["Transition"]}  # parts that keep nothing


def _of_other(name: str, wanted: str, found: str) -> TypeError:
    return TypeError(
        f"expected a state of this buffer, whose {name} is {wanted}, got one whose {name} keeps "
        f"{found}. {_MEND}"
    )


def _shape(tree: Item) -> str:
    """A short word for what a part keeps: its leaves, dtypes and shapes."""
    leaves = pytree.shown_leaves(tree)
    text = [f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves]
    listed = ", ".join(text[:4]) + (", ..." if len(text) > 4 else "")
    return f"{type(tree).__name__}({listed})"
