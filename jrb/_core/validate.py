"""Checks that a state belongs to a description, that its arrays can be used, and that items fit.

`blank` makes an empty state, and `check_state` compares a state with it. Only structure, shapes and
dtypes are compared, and the result is cached: the check costs nothing when a compiled method runs,
and one look-up outside `jit`. N capacity, E environments.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb import sum_tree
from jrb._core import transforming
from jrb._core.steps import context_of, leaves_read
from jrb._util import casting, pytree, wording
from jrb._util.pytree import Leaf, PyTree, SpecKey
from jrb._xla import compat
from jrb._xla.compiling import kept_by_description, with_unified_arguments
from jrb.keys import no_numbers
from jrb.ring import Ring
from jrb.state import Buffer, BufferState, Sample
from jrb.types import DrawCounts, HostState, Item, PrioritizedSampler
from jrb.types.messages import PartState

F = TypeVar("F", bound=Callable[..., Any])

_MEND = "Pass the state that init of this very description made, or one that came from it."
_RESIZE = (
    "To bring the newest rows to another size, save the state with its own description, and load "
    "it by jrb.load(path, capacity=..., num_envs=...)."
)
# Scalars of NumPy, numbers of Python, and dtypes that JAX keeps.
_SCALARS = (np.number, np.bool_)
_NUMBER = bool | int | float | complex
_KEPT = frozenset(map(np.dtype, ("?", *"bBhHiIefF", jnp.bfloat16)))
_PARTS = ("writer", "unit", "sampler", "storage", "transforms")


@with_unified_arguments
def blank(buffer: Buffer, spec: Item) -> BufferState:
    """Returns an empty state; `spec` has the specs of a stored item, after all inverse transforms.

    Raises:
        ValueError: the state would have more slots than int32 can number.
    """
    ring = buffer.ring
    check_slots(ring.capacity)
    writer = buffer.writer.init(ring, spec)
    leaves_read(buffer, spec, (buffer.sampler.reads or ()) + buffer.sampler.reads_written)
    context = context_of(buffer, writer)
    # Episode numbers are kept only if the unit or a transform uses ends of episodes.
    transforms = buffer.transforms and transforming.init(buffer.transforms, context, spec)
    looks_at_ends = not buffer.unit.one_row or transforms
    return BufferState(
        storage=buffer.storage.init(context, spec),
        writer=writer,
        sampler=_attach_sampler(buffer, buffer.sampler.init(ring)),
        unit=buffer.unit.init(context, spec),
        edits=jnp.zeros((), jnp.uint32),
        transforms=transforms,
        numbers=no_numbers(ring.envs, spec, buffer.keys) if looks_at_ends else None,
        ring=ring,
    )


@kept_by_description
def compile_blank(buffer: Buffer) -> Any:
    """Returns `blank` as a compiled function of a `SpecKey`, traced once for all uses."""
    return jax.jit(lambda spec: blank(buffer, spec.spec), static_argnums=0)


def _attach_sampler(buffer: Buffer, state: PartState) -> Any:
    sampler = buffer.sampler
    if isinstance(sampler, PrioritizedSampler):
        state = sampler.attach(state, buffer.unit.has_delayed_anchors)
    if not sampler.count_draws:
        return state
    if not isinstance(state, DrawCounts):
        raise TypeError(
            f"{type(sampler).__name__}: count_draws: expected a state below "
            f"jrb.types.DrawCounts, got {type(state).__name__}. Nothing could be counted."
        )
    state = state.replace(draws=jnp.zeros(buffer.ring.capacity, jnp.int32))
    if sampler.max_draws is None:
        return state
    if buffer.ring.capacity > 2**24:
        raise ValueError(
            "capacity: expected at most 2^24 slots in one state with max_draws, as float32 counts "
            f"no more, got {buffer.ring.capacity}. Cut the buffer into shards: jrb.Sharded."
        )
    return state.replace(drawable=sum_tree.neutral(buffer.ring.capacity, "sum"))


def check_slots(slots: int) -> None:
    """Raises `ValueError` if a state has more slots than int32 can number."""
    if slots >= 2**31:
        raise ValueError(
            f"capacity: expected at most {2**31 - 1} slots in one state, got {slots}. Cut the "
            "buffer into more shards: jrb.Sharded(buffer, shards=...)."
        )


def is_traced(*arguments: Any) -> bool:
    """Returns True if any leaf of the arguments is a tracer."""
    return any(map(is_tracer, jax.tree.leaves(arguments)))


def is_tracer(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def on_host(buffer: Buffer) -> bool:
    """Returns True if the storage keeps items on the host."""
    return buffer.storage.is_on_host


def check_state(buffer: Buffer, state: BufferState) -> None:
    """Raises unless the state belongs to the description, its items in the same kind of storage.

    Raises:
        TypeError, ValueError: see `check_kind` and `check`.
    """
    check_kind(buffer, state)
    check(buffer, for_device(buffer, state))


def for_device(buffer: Buffer, state: BufferState) -> Any:
    """Returns the state for compiled parts of methods, without rows on the host."""
    if not on_host(buffer):
        return state
    return state.replace(storage=state.storage.without_rows())


def check_kind(buffer: Buffer, state: BufferState) -> None:
    """Raises `TypeError` unless it is a `BufferState` whose items are where the storage's are."""
    if not isinstance(state, BufferState):
        kind = "a tuple, as a Mix has" if isinstance(state, tuple) else type(state).__name__
        raise TypeError(
            f"expected a state of this buffer, a BufferState, got {kind}. Pass what init, add and "
            "the other methods return."
        )
    storage, items = buffer.storage, state.storage
    if on_host(buffer):
        is_its_kind = type(items) is storage.state_type
    else:
        is_its_kind = not isinstance(items, HostState)
    if not is_its_kind:
        raise TypeError(
            f"expected a state of this buffer, whose storage is {type(storage).__name__}, got one "
            f"that has its items in {type(items).__name__}. Pass the state that its init made."
        )


def check(buffer: Buffer, state: BufferState) -> None:
    """Raises unless a state belongs to this description.

    Args:
        buffer: the description.
        state: a `BufferState`, without rows on the host.

    Raises:
        ValueError: the state has another capacity or `num_envs`, or is a stack of states.
        TypeError: the state was made by other parts.
    """
    leaves, structure = jax.tree.flatten(state)
    try:
        # A list first: `tuple` of a generator is slower, and this runs at every call.
        kinds = tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
    except AttributeError:
        odd = next(leaf for leaf in leaves if not pytree.is_array(leaf))
        raise TypeError(
            f"expected a state of this buffer, with arrays for leaves, got {type(odd).__name__}. "
            "Pass the state that the last method returned."
        ) from None
    _checks(buffer)(structure, kinds)


# Success is cached for each description.
_checks: Callable[[Buffer], Callable[[Any, tuple], None]] = kept_by_description(
    lambda buffer: functools.lru_cache(maxsize=64)(functools.partial(_check, buffer))
)


def _check(buffer: Buffer, structure: Any, kinds: tuple) -> None:
    """Checks the structure, shapes and dtypes of a state."""

    def without_axes(count: int) -> BufferState:
        leaves = [jax.ShapeDtypeStruct(shape[count:], dtype) for shape, dtype in kinds]
        return jax.tree.unflatten(structure, leaves)

    state = without_axes(0)
    odd = _odd_part(buffer, state)
    if odd is None:
        return
    ring = state.ring
    if ring != buffer.ring:
        own = _size(buffer.ring, ring)
        raise ValueError(
            f"expected a state of this buffer, of {own}, got one of {_size(ring, buffer.ring)}. "
            f"{_MEND} {_RESIZE}"
        )
    # A common mistake: a stack of states that was not passed through `vmap`.
    for axes in (1, 2, 3):
        if _odd_part(buffer, without_axes(axes)) is None:
            raise ValueError(
                f"expected a state of one buffer, got one with the leading axes "
                f"{kinds[0][0][:axes]} of many. Call the method under jax.vmap, or take one: "
                f"jax.tree.map(lambda leaf: leaf[{', '.join('0' * axes)}], state)."
            )
    name, got = odd, getattr(state, odd)
    part, owners = getattr(buffer, name, None), _owners(name, got)
    maker = f"by a buffer with {' or '.join(owners)}"
    if type(part).__name__ in owners or not owners:
        leaves = pytree.shown_leaves(got)
        shapes = [f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves[:4]]
        listed = ", ".join(shapes) + (", ..." if len(leaves) > 4 else "")
        maker = f"for another, with {type(got).__name__}({listed})"
    kind = repr(part)
    if name == "transforms":
        learning = transforming.stateful_transforms(buffer.transforms)
        kind = " and ".join(type(each).__name__ for each in learning) or "without a state"
    raise TypeError(
        f"expected a state of this buffer, whose {name} is {kind}, got one that was made {maker}. "
        f"{_MEND}"
    )


def _owners(name: str, state: PartState) -> list[str]:
    """Returns the names of the parts that make such a state: the components in its module."""
    if not isinstance(state, pytree.State):
        without_state = {"sampler": ["Uniform"], "unit": ["Transition"]}
        return [] if jax.tree.leaves(state) else without_state.get(name, [])
    module = sys.modules[type(state).__module__]
    parts = [it for it in vars(module).values() if isinstance(it, type) and pytree.is_component(it)]
    return [it.__name__ for it in parts if it.__module__ == module.__name__]


def _odd_part(buffer: Buffer, state: BufferState) -> str | None:
    """Returns the name of the first part whose state differs from the one that it would make."""
    try:
        item = buffer.storage.spec(state.storage)
        # From the cache of `jit`: `init` has traced the same call.
        own = compile_blank(buffer).eval_shape(SpecKey(item))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return "storage"  # anything that parts raise for a state that is not theirs
    for name in (*_PARTS, "numbers"):
        if not pytree.are_alike(getattr(own, name), getattr(state, name)):
            return name
    return None if state.ring == buffer.ring else "storage"


def _size(ring: Ring | None, other: Ring | None) -> str:
    """Returns the capacity as text, and `num_envs` if it differs from that of `other`."""
    if ring is None:
        return "no ring"
    same = other is not None and ring.envs == other.envs
    return f"capacity {ring.capacity}" + ("" if same else f" with num_envs={ring.envs}")


# Items.


def read_items(items: PyTree, what: str, cast: bool = False) -> Any:
    """Returns items whose leaves are numbers, or arrays in the machine's byte order.

    With `cast`, NumPy's arrays get dtypes that JAX keeps. Raises for a list of numbers, as JAX
    would make each number a leaf.
    """
    # Most items need no conversion, and this runs at every call.
    if not all(map(_is_plain, jax.tree.leaves(items))):
        # A list that has a number, or another list, is one leaf.
        is_numbers = lambda it: (
            isinstance(it, list) and any(isinstance(entry, _NUMBER | list) for entry in it)
        )
        name = lambda path: f"{what}: leaf '{pytree.leaf_name(path)}'"
        convert = lambda path, leaf: _as_array(name(path), leaf)
        items = jax.tree_util.tree_map_with_path(convert, items, is_leaf=is_numbers)
    return casting.cast_for_jax(items, what) if cast else items


def fit_items(
    spec: PyTree,
    items: PyTree,
    what: str,
    mend: str,
    lead: tuple[int, ...] = (),
    cast: bool = False,
) -> Any:
    """Returns items with the structure and dtypes of `spec`, and its shapes after `lead`.

    With `cast`, dtypes are converted where that is safe. Raises for all else that differs; `what`
    and `mend` begin and end the message.
    """
    if cast:
        items = casting.cast_to_spec(spec, items, what)
    pytree.check_like(spec, items, what, mend, lead, casts=cast)
    return items


def _is_plain(leaf: Leaf) -> bool:
    """Returns True if a leaf can stay as it is; it must be quick, as it runs at every call."""
    if type(leaf) is np.ndarray:
        return leaf.dtype.isnative
    # NumPy's float64 and complex128 are Python numbers too, and lists of them must be refused.
    is_scalar = isinstance(leaf, _SCALARS) and leaf.dtype in _KEPT
    return is_scalar or isinstance(leaf, jax.Array)


def _as_array(where: str, leaf: Leaf) -> Any:
    if np.ma.is_masked(leaf):
        raise ValueError(f"{where}: expected values everywhere, got a masked array. Fill it.")
    # Convert arrays of other libraries, whose classes may raise anything.
    if not _is_plain(leaf) and hasattr(leaf, "__array__"):
        try:
            leaf = np.asarray(leaf)
        except Exception as error:
            kind = type(leaf).__name__
            raise TypeError(f"{where}: expected an array, got {kind}: {error}") from error
    if not (pytree.is_array(leaf) or isinstance(leaf, _NUMBER)):
        raise pytree.no_array(where, leaf)
    # JAX takes only the byte order of the machine.
    if not isinstance(leaf, np.ndarray) or leaf.dtype.isnative:
        return leaf
    return leaf.astype(leaf.dtype.newbyteorder("="))


def accept_items(items: PyTree, what: str, cast: bool) -> Any:
    """Returns items with dtypes that `jit` keeps, else raises; NumPy's arrays are copied."""
    # Copy the leaves, if all are arrays with dtypes that JAX keeps. This is done in one pass:
    # between two compiled calls, each look at a leaf costs 1 us.
    leaves, structure = jax.tree.flatten(items)
    copies = []
    for leaf in leaves:
        is_scalar = isinstance(leaf, _SCALARS)
        if is_scalar or type(leaf) is np.ndarray:
            if leaf.dtype not in _KEPT:
                break
            copies.append(leaf if is_scalar else leaf.copy())
        elif isinstance(leaf, jax.Array):
            copies.append(leaf)
        else:
            break
    else:
        return structure.unflatten(copies)
    # Else convert them. A spec raises where `jit` would, or where it would change a dtype.
    items = read_items(items, what)
    if not all(map(casting.is_kept, jax.tree.leaves(items))):
        items = casting.cast_for_jax(items, what) if cast else items
        pytree.spec_of(items, what)
    return copy_arrays(items)


def copy_arrays(tree: PyTree) -> Any:
    """Copies NumPy arrays, as the caller may write to them as soon as a method has returned."""
    # JAX reads a NumPy array in place, and sometimes only after a call has returned: by then, an
    # environment may have written its next observation there.
    return jax.tree.map(copy_array, tree)


def copy_array(leaf: Leaf) -> Any:
    """Returns a copy of a NumPy array, and anything else unchanged."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


# Errors of JAX.


class DonatedError(ValueError):
    """A state was used whose arrays had been donated, or deleted."""


_DONATED = (
    "expected arrays that are there, got some that were donated, or deleted. Go on with the state "
    "that came back from the call to which the old one was donated. After an interrupt of a method "
    "of methods = jrb.jitted(buffer), methods.recover() returns it. What a jax.jit of your own got "
    "and did not return is lost: go on from a checkpoint; methods of jrb.jitted lose nothing."
)


def explain_jax_error(method: F) -> F:
    """Wraps a method so that errors about donated arrays and explicit meshes say what to do.

    Raises:
        DonatedError, ValueError: in place of the error that JAX raises.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_one_device():
            for first in args[:2]:  # the state, which is second where a description comes first
                check_donated(first)
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if compat.is_donation_error(error):
                raise DonatedError(_DONATED) from error
            if not compat.is_explicit_mesh_error(error):
                raise
            raise ValueError(
                "expected a state and items that are not cut over an explicit axis of a mesh, got "
                f"some for which JAX says: {str(error).splitlines()[0]} Call the "
                "method inside jax.shard_map, under jax.vmap for a leading axis of buffers; or "
                "make the mesh with axis_types=(jax.sharding.AxisType.Auto,)."
            ) from error

    return cast(F, call)


def check_state_argument(method: F) -> F:
    """Wraps a method so that a call without the state raises an error that says so."""
    second = list(inspect.signature(method).parameters)[2]  # such as `key`, or `item`

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 1:
            raise TypeError(
                f"{method.__name__}: expected (state, {second}), got one argument. The items are "
                f"in the state that init and add return: buffer.{method.__name__}(state, {second})."
            )
        return method(self, *args, **kwargs)

    return cast(F, call)


@functools.lru_cache
def _has_one_device() -> bool:
    """Returns True if JAX has one device, and at most one CPU device; cached once JAX runs."""
    try:
        on_cpu = jax.device_count("cpu")
    except RuntimeError:  # the program runs without that platform
        on_cpu = 0
    return jax.device_count() == 1 and on_cpu <= 1


def check_donated(states: Any) -> None:
    """Raises if a state on several devices was donated: a use would make JAX end the process."""
    for state in states if isinstance(states, tuple) else (states,):
        edits = state.edits if isinstance(state, BufferState) else None
        if isinstance(edits, jax.core.Tracer) or not isinstance(edits, jax.Array):
            continue
        if not isinstance(edits.sharding, jax.sharding.SingleDeviceSharding):
            check_not_deleted(state)


def check_not_deleted(states: Any) -> None:
    arrays = [leaf for leaf in jax.tree.leaves(states) if isinstance(leaf, jax.Array)]
    if any(array.is_deleted() for array in arrays):
        raise DonatedError(_DONATED)


def check_outside_jit(who: str, *values: Any) -> None:
    """Raises `TypeError` inside `jit`, `vmap` and `scan`, also if these values are not traced."""
    # Inside `jit`, an array that is made is traced, whatever it is made from.
    leaves = jax.tree.leaves((values, jnp.zeros(())))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            f"{who}: expected a state with values, got a traced one. Call it outside jit, with the "
            "state that the jitted function returns. Inside jit, sample and draw work, in a "
            "jax.lax.scan over keys for several batches."
        )


class CopyWarning(UserWarning):
    """A write outside `jit` copies the buffer, as its state was not donated."""


class PriorityWarning(UserWarning):
    """Priorities that are NaN, infinite or negative were given, and refused."""


_MANY_BYTES = 1_000_000
_FLOAT32 = np.dtype(np.float32)
_BITS_OF_INFINITY = 0x7F800000  # the bits of NaN and of negative numbers are larger as uint32


# What users of a description were warned of, a set to add to.
_warned_of: Callable[[Hashable], set[str]] = kept_by_description(lambda description: set())


def warn_of_copies(buffer: Hashable, state: BufferState, depth: int = 5) -> None:
    """Warns once per description that a write copies a large state; `depth` is the stacklevel."""
    if "copies" in _warned_of(buffer):
        return
    # The description is remembered only after a warning: a larger state may follow a small one.
    size = pytree.nbytes(state)
    if size <= _MANY_BYTES:
        return
    _warned_of(buffer).add("copies")
    warnings.warn(
        f"add, extend: outside jit each call copies the whole buffer, {wording.bytes_text(size)}. "
        "Use the methods of jrb.jitted(buffer), which write in place, or call the method in a "
        "function under jax.jit(..., donate_argnums=...).",
        CopyWarning,
        stacklevel=depth,
    )


def warn_of_refused(
    buffer: Hashable, method: str, priorities: Any, which: Any = None, depth: int = 5
) -> None:
    """Warns once per description if priorities in host memory include some that are refused.

    `which` is the sample or the slots that they are for.
    """
    # Priorities inside `jit`, or on an accelerator, which would have to be copied, are not checked.
    if type(priorities) is not np.ndarray and not _is_on_cpu(priorities):
        return
    values = np.asarray(priorities)
    if values.dtype != _FLOAT32:
        if values.dtype.kind not in "biuf":
            return
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32)
    # As uint32, refused numbers are the largest, so one look at the maximum suffices. Two passes,
    # or the hash of a description, would take so long that XLA has to wake its thread again. After
    # a compiled call, with NumPy's code out of the caches, `max` takes 14 us and `argmax` 4.
    bits = values.reshape(-1).view(np.uint32)
    if not bits.size or bits[bits.argmax()] < _BITS_OF_INFINITY:
        return
    # Those of masked entries, of masked rows of windows, and of entries without weight may be
    # anything.
    flags = (which.mask, which.weights) if isinstance(which, Sample) else ()
    flags = [each for each in flags if each.shape == values.shape]
    if "priorities" in _warned_of(buffer) or not all(map(_is_on_cpu, flags)):
        return
    is_used = np.all([np.asarray(each) > 0 for each in flags], axis=0)
    wrong = ~((values >= 0) & (values < np.inf)) & is_used
    if wrong.any():
        _warned_of(buffer).add("priorities")
        warnings.warn(
            f"{method}: {wrong.sum()} priorities are NaN, infinite or negative, such as "
            f"{values[wrong][0]}: they are refused, and the state counts them. Give "
            "jnp.abs(td_error), and look for what is not finite.",
            PriorityWarning,
            stacklevel=depth,
        )


def _is_on_cpu(array: Leaf) -> bool:
    """Returns True if an array of numbers can be read without a copy from an accelerator."""
    if not isinstance(array, jax.Array):
        return np.asarray(array).dtype.kind in "biuf"
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in array.devices())
