"""The replay buffer, a composition of five parts."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import eager, steps, transforming
from jrb._core.lengths import lengths_of
from jrb._core.validate import (
    check_state,
    check_state_argument,
    copy_array,
    copy_arrays,
    explain_jax_error,
    fit_items,
    on_host,
    read_items,
    warn_of_refused,
)
from jrb._util import checks, display, pytree, wording
from jrb._xla import random_bits
from jrb.keys import TED, Keys
from jrb.ring import Ring
from jrb.samplers import Uniform
from jrb.state import BufferState, Device, Memory, Sample, check_origin
from jrb.storages import DeviceStorage
from jrb.storages.objects import object_refusal, object_rows
from jrb.types import Item, OrderedSampler, PrioritizedSampler, Sampler, Storage, Unit, Writer
from jrb.types.messages import Array, DrawInputs, PRNGKey
from jrb.types.parts import check_part
from jrb.types.transform import Transform
from jrb.units import Transition
from jrb.writers import RoundRobin


class BufferParts(TypedDict, total=False):
    """Further arguments of `ReplayBuffer`, for functions that make one: all but its size."""

    batch_size: int | None
    sampler: Sampler
    unit: Unit
    writer: Writer
    storage: Storage
    transforms: tuple[Any, ...]
    keys: Keys
    min_size: int | None
    cast: bool
    requires_mask: bool


class BufferOptions(BufferParts, total=False):
    """Further arguments of `ReplayBuffer`, for functions that choose its capacity only."""

    num_envs: int | None


@pytree.component
class ReplayBuffer:
    """A replay buffer: describes what it holds, how it writes, and how it samples.

    The description is frozen, hashable and free of arrays. The arrays are in a `BufferState`, which
    every method takes; methods that change it return a new one. All methods are pure and work under
    `jit`, `scan` and `vmap`. Donate the state to the jitted function that calls them: then nothing
    of the buffer's size is copied if the function writes first (`add`, `extend`), or if it reads
    with `draw`, or passes the `Sample` to `update_priority`, and writes to the state that these
    return. A `sample` before a write in one function may cost a copy.

    N capacity, E environments, B batch, L window, T time.

    Attributes:
        capacity: N, the transitions of all environments together; a multiple of E. A state has at
            most 2^31 - 1 slots; `jrb.Sharded` makes larger buffers of several states.
        num_envs: E, or None for one stream without an environment axis.
        batch_size: B, for calls that do not pass their own.
        sampler: chooses anchors, the slots that are sampled.
        unit: decides which data an anchor stands for, such as a transition or a sequence.
        writer: chooses the slots that are written.
        storage: keeps the items.
        transforms: change data on its way out, from first to last. Each is a function from data to
            data, or one of `jrb.transforms`. If a transform has a method `inverse`, that is applied
            to each item before it is stored. A transform with a state learns from the items that
            are written.
        keys: the paths of the reward, the done flags, ... in an item.
        min_size: the number of transitions that must be held before anything is sampled. Until then
            `can_sample` is False, `sample` raises outside `jit`, and inside it `mask` is False.
        cast: if True, items of other dtypes are converted to the stored ones: NumPy's float64 and
            int64 to the dtype that JAX keeps (an integer that does not fit is an error), floats to
            floats, integers to larger ones, and bool to integer to float. If False, they raise.
        requires_mask: if True, `add` and `extend` raise without a mask of each environment. Use it
            if some steps of an environment are no transitions, as `from_gymnasium` does.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(capacity=1000, batch_size=32)
        >>> state = buffer.init({"x": jnp.zeros(3)})
        >>> state = buffer.add(state, {"x": jnp.ones(3)})
        >>> buffer.sample(state, jax.random.key(0)).data["x"].shape
        (32, 3)
    """

    capacity: int
    num_envs: int | None = None
    batch_size: int | None = None
    sampler: Sampler = Uniform()
    unit: Unit = Transition()
    writer: Writer = RoundRobin()
    storage: Storage = DeviceStorage()
    transforms: tuple[Any, ...] = ()
    keys: Keys = TED
    min_size: int | None = None
    cast: bool = False
    requires_mask: bool = False

    if not TYPE_CHECKING:  # or every misspelt name would have a type
        __getattr__ = wording.refuse_attribute

    def __repr__(self) -> str:
        return display.format_code(self)

    _repr_html_ = display.tree_html

    def __post_init__(self) -> None:
        parts = {"sampler": self.sampler, "unit": self.unit}
        parts |= {"writer": self.writer, "storage": self.storage}
        for name, part in parts.items():
            check_part(name, part)
        checks.count("capacity", self.capacity)
        numbers = {"capacity": self.capacity, "num_envs": self.num_envs}
        numbers |= {"batch_size": self.batch_size, "min_size": self.min_size}
        for name, value in numbers.items():
            if value is not None:
                most = min(self.capacity, 2**31 - 1) if name == "min_size" else None
                checks.count(name, value, most)
        if self.num_envs is not None:
            checks.multiple(self.capacity, self.num_envs)
        checks.flag("cast", self.cast)
        checks.flag("requires_mask", self.requires_mask)
        if not isinstance(self.keys, Keys):
            raise TypeError(f"keys: expected jrb.Keys(...), got {self.keys!r}.")
        if not isinstance(self.transforms, tuple) or not all(
            callable(transform) or getattr(transform, "apply", None)
            for transform in self.transforms
        ):
            raise TypeError(
                f"transforms: expected a tuple of functions, got {self.transforms!r}. "
                "Write (f,) for a single one."
            )
        # Parts that do not fit each other.
        self.unit.check(self.ring, self.sampler, self.writer)
        storage = type(self.storage).__name__
        if self.sampler.reads is not None and self.storage.is_on_host:
            raise ValueError(
                f"storage: expected one on the device for {type(self.sampler).__name__}, which "
                f"reads leaves of all items at each draw, got {type(self.storage).__name__}. Use "
                "jrb.DeviceStorage()."
            )
        if self.storage.of_objects and not self.unit.one_row:
            raise ValueError(
                f"unit: expected jrb.Transition() with {storage}, which cannot look into its "
                f"objects, got {type(self.unit).__name__}."
            )
        if self.storage.requires_chronological:
            checks.chronological(storage, self.writer)
            checks.shared_clock(storage, self.writer)
        if isinstance(self.sampler, OrderedSampler):
            self.sampler.check(self.ring, self.unit)
            checks.shared_clock(type(self.sampler).__name__, self.writer)
        transforming.check(self.transforms, self.storage)
        for transform in self.transforms:
            if isinstance(transform, Transform):
                transform.check(self.unit)

    @classmethod
    def rounded(
        cls, capacity: int, num_envs: int | None = None, **parts: Unpack[BufferParts]
    ) -> Self:
        """Returns a buffer of at most this capacity, rounded down to a multiple of `num_envs`.

        Use this for capacities from a configuration that are not multiples of `num_envs`.

        Args:
            capacity: at least `num_envs`.
            num_envs: E, or None.
            parts: further arguments of `ReplayBuffer`.

        Example:
            >>> import jrb
            >>> jrb.ReplayBuffer.rounded(1_000_000, num_envs=1024).capacity
            999424
        """
        checks.count("capacity", capacity)
        if num_envs is not None:
            checks.count("num_envs", num_envs)
            if capacity < num_envs:
                raise ValueError(
                    f"capacity: expected at least num_envs = {num_envs}, got {capacity}: a row has "
                    "a slot for each environment."
                )
            capacity = capacity // num_envs * num_envs
        return cls(capacity=capacity, num_envs=num_envs, **parts)

    @property
    def ring(self) -> Ring:
        """The shape of the ring: N / E rows of E slots."""
        return _ring(self.capacity, self.num_envs or 1)

    @property
    def _origin(self) -> str:
        return steps.origin_of(self)

    def _lead(self) -> tuple[int, ...]:
        return () if self.num_envs is None else (self.num_envs,)

    def init(self, example: Item, device: Device = None) -> BufferState:
        """Returns an empty state.

        Args:
            example: one transition, arrays or `jax.ShapeDtypeStruct`s without leading axes; only
                shapes and dtypes matter.
            device: where to put all arrays: a device, a sharding, or, if the storage is on the
                device, a state of shardings; None for the default device. Items that are added
                later must be on this device or uncommitted; `jax.device_put` moves a `Sample`.

        Raises:
            TypeError: a leaf is not an array, or has a dtype that JAX would change.
            ValueError: the folder of the storage is not empty, or N is above 2^31 - 1.
            OSError: the disk of the storage has no room.
        """
        makes_rows = on_host(self) and not self.storage.of_objects
        if makes_rows and eager.is_traced(example, jnp.zeros(())):
            raise TypeError(
                "init: expected to be called outside jit, vmap and scan, as it makes rows on the "
                "host. Make the state before, and pass it as an argument."
            )
        spec = None if self.storage.of_objects else self._stored_spec(example)
        return eager.init(self, spec, device)

    def nbytes(self, example: Item, where: Memory = None) -> int:
        """Returns the number of bytes that `init(example)` would allocate in arrays and files.

        Args:
            example: as for `init`.
            where: "device" for arrays of JAX (on a CPU these too are in memory of the host), "host"
                for other memory, "files" for files when they are full; None for the sum.
        """
        checks.choice("nbytes: where", where, (None, "device", "host", "files"))
        if self.storage.of_objects:
            raise object_refusal()
        return eager.nbytes(self, self._stored_spec(example), where)

    @check_state_argument
    def add(
        self,
        state: BufferState,
        item: Item,
        mask: Array | None = None,
        priorities: Array | None = None,
    ) -> BufferState:
        """Writes one timestep.

        Args:
            state: may be donated.
            item: leaves `[E, ...]`, or `[...]` without `num_envs`.
            mask: bool `[]`; if it is False, nothing is written. None writes. Under `vmap`, each
                buffer has its own mask, where a `lax.cond` around the call would copy the ring.
                With `writer=jrb.PerEnvironment()` also `[E]`, one for each environment. A buffer
                with `requires_mask=True` takes no other, and not None.
            priorities: real `[E]`, or `[]` without `num_envs`, used as float32: the priorities that
                these transitions get when they become anchors, at once or when their unit is
                complete. None for the priority of new items. A priority that is NaN, infinite or
                negative is refused and counted in the sampler's state; the anchor gets the priority
                of new items.

        Raises:
            ValueError: the item has another structure or shape than the example.
            TypeError: the item has another dtype than the example, the mask is not bool or missing,
                or the sampler takes no priorities.
        """
        return self._write("add", state, item, mask, priorities)

    @check_state_argument
    def extend(
        self,
        state: BufferState,
        items: Item,
        mask: Array | None = None,
        priorities: Array | None = None,
    ) -> BufferState:
        """Writes T timesteps; if the ring has fewer rows, only the last of them.

        Outside `jit`, calls of many lengths T share a handful of compiled programs.

        Args:
            state: may be donated.
            items: leaves `[T, E, ...]`, or `[T, ...]` without `num_envs`.
            mask: bool `[T]`; rows where it is False are skipped, as if they were not in `items`.
                With `writer=jrb.PerEnvironment()` also `[T, E]`, one for each environment.
            priorities: real `[T, E]`, or `[T]` without `num_envs`, as for `add`.

        Returns:
            The state that T calls of `add` return, up to the layout of the unit's arrays.

        Raises:
            ValueError, TypeError: as for `add`, or leaves differ in T.
        """
        return self._write("extend", state, items, mask, priorities)

    def _write(
        self,
        method: str,
        state: BufferState,
        items: Item,
        mask: Any,
        priorities: Any,
        donate: bool = False,
    ) -> BufferState:
        """Checks and writes one row of time (`method` "add") or several ("extend").

        With `donate` and a storage on the host, arrays of the state are written in place.
        """
        lead, is_add, objects = self._lead(), method == "add", None
        takes = isinstance(self.sampler, PrioritizedSampler) and self.sampler.takes_priorities
        if priorities is not None and not takes:
            raise TypeError(
                f"{method}: priorities: expected a sampler that takes priorities with what is "
                f"added, got {type(self.sampler).__name__}. Build the buffer with "
                "sampler=jrb.Prioritized()."
            )
        if self.requires_mask:
            checks.given_mask(method, mask, len(lead) + (not is_add))
        if self.storage.of_objects:
            # In compiled parts, a number without a meaning stands for each object.
            objects = object_rows(self, [items] if is_add else items, method)
            items = {"item": np.zeros(lead if is_add else (len(objects), *lead), np.uint8)}
        else:
            items = read_items(items, method, self.cast)
        if not is_add:
            checks.length(items)
        if priorities is not None and not donate:  # `jrb.jitted` warns itself, after the call
            warn_of_refused(self, method, priorities, depth=5)
        lengths = contextlib.nullcontext((items, mask, priorities))
        if not is_add:
            lengths = lengths_of(self).pad_arguments(state, items, mask, priorities)
        with lengths as (items, mask, priorities):
            time = () if is_add else np.shape(jax.tree.leaves(items)[0])[:1]
            if mask is not None:
                mask = checks.write_mask(method, mask, time, lead, self.writer)
            if priorities is not None:
                priorities = checks.given_priorities(method, priorities, (*time, *lead))
            if is_add:
                mask, priorities = (it if it is None else it[None] for it in (mask, priorities))
            if objects is None:
                items = self._to_stored(state, items, (*time, *lead), method)
            else:
                check_state(self, state)
                objects += [[None] * self.ring.envs] * (sum(time) - len(objects))
            if is_add:
                items = jax.tree.map(_one_row, items)
            elif 0 in time:
                return state
            return eager.write(self, state, items, mask, None, priorities, donate, objects)

    @check_state_argument
    def sample(
        self,
        state: BufferState,
        key: PRNGKey,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        context: Any = None,
    ) -> Sample:
        """Samples a batch and leaves the state as it is.

        Derivatives through the buffer are 0 by design: to a loss, a sample is a constant.

        Args:
            state: is only read.
            key: a PRNG key. It is consumed.
            batch_size: B; None for the buffer's.
            beta: the exponent of the weights, float `[]`, may be traced; None for the sampler's.
            context: a pytree of arrays or numbers, may be traced, for samplers that take one, such
                as `jrb.Weighted`; else None.

        Returns:
            The batch. For samplers that consume (`Queue`, `WithoutReplacement`), it is the batch
            that `draw` would return with this key.

        Raises:
            ValueError: no batch size is given, there is nothing to sample, or less than `min_size`
                is held. Inside `jit`, the last two give a batch with `mask` False and `weights` 0.
        """
        inputs = DrawInputs(beta, context)
        count, inputs = draw_arguments([self.sampler], self.batch_size, key, batch_size, inputs)
        return eager.draw(self, state, key, count, inputs, moves=False)[1]

    @check_state_argument
    def draw(
        self,
        state: BufferState,
        key: PRNGKey,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        context: Any = None,
    ) -> tuple[BufferState, Sample]:
        """Samples a batch, and advances samplers that consume.

        Writes to the returned state in the same jitted function need no copy, as its cursor depends
        on everything that was read. Derivatives through the buffer are 0, as for `sample`.

        Args:
            state: may be donated.
            key: a PRNG key. It is consumed.
            batch_size: B; None for the buffer's.
            beta: the exponent of the weights, float `[]`, may be traced; None for the sampler's.
            context: a pytree of arrays or numbers, may be traced, for samplers that take one, such
                as `jrb.Weighted`; else None.

        Returns:
            The state, and the batch.

        Raises:
            ValueError: as for `sample`.
        """
        inputs = DrawInputs(beta, context)
        count, inputs = draw_arguments([self.sampler], self.batch_size, key, batch_size, inputs)
        return eager.draw(self, state, key, count, inputs)

    def update_priority(
        self, state: BufferState, sample_or_indices: Sample | Array, priorities: Array
    ) -> BufferState:
        """Sets the priorities of sampled anchors.

        Args:
            state: may be donated.
            sample_or_indices: the `Sample`; entries that are masked or were overwritten since are
                skipped. Or slots, int32 `[B]`: then an overwritten item is not noticed, and a write
                in the same jitted function may cost a copy. Of equal slots, the last one counts.
            priorities: real numbers `[B]`, used as float32; or `[B, L]` for a unit of windows,
                which reduces them to `[B]`. A priority that is NaN, infinite or negative is refused
                and counted in the sampler's state; the old one stays.

        Raises:
            TypeError: the sampler has no priorities, or those given are not real numbers.
            ValueError: the priorities have another shape, or another description drew the sample.
        """
        return self._update_priority(state, sample_or_indices, priorities)

    def _update_priority(
        self, state: BufferState, which: Sample | Array, priorities: Any, donate: bool = False
    ) -> BufferState:
        """Does `update_priority`; with `donate`, writes the sampler's arrays in place."""
        self._prioritized_sampler("update_priority")
        num_axes = 1
        if isinstance(which, Sample):
            check_origin("update_priority", which, self._origin)
            num_axes = 1 if self.unit.anchors_per_entry == 1 else 2
            # One priority for each anchor, or those of the rows, which the unit reduces.
            shapes = [which.indices.shape, *self.unit.priority_shapes(which.mask.shape)]
        else:
            which = checks.indices("update_priority", which)
            shapes = [which.shape]
        if not donate:
            warn_of_refused(self, "update_priority", priorities, which, depth=4)
        priorities = checks.priorities(priorities, shapes, num_axes)
        return eager.update(self, state, which, priorities, donate)

    @explain_jax_error
    def set_alpha(self, state: BufferState, alpha: jax.Array | float) -> BufferState:
        """Sets the exponent alpha of a prioritized sampler.

        Costs O(N); on the CPU, setting the current alpha again is free, except under `vmap`.

        Raises:
            TypeError: the sampler has no priorities.
            ValueError: alpha is negative.
        """
        sampler = self._prioritized_sampler("set_alpha")
        check_state(self, state)
        return state.replace(sampler=sampler.set_alpha(state.sampler, copy_array(alpha)))

    def truncate(self, state: BufferState, mask: Array | None = None) -> BufferState:
        """Ends the running episodes of environments at their newest rows.

        Call it when environments are reset in the middle of an episode, such as after a restart of
        the program: no flag marks this reset, but no window, n-step return or stack of frames may
        cross it. Stored items stay as they are.

        Args:
            state: may be donated.
            mask: bool `[E]`, True for environments that are reset, or `[]` for all or none; None
                for all.

        Raises:
            TypeError: the mask is not bool, or a custom unit has no `truncate`.
            ValueError: the mask has another shape.

        Example:
            >>> import jax.numpy as jnp, jrb
            >>> buffer = jrb.ReplayBuffer(10, batch_size=1, unit=jrb.NStep(3, 1.0))
            >>> step = {"next": {"reward": jnp.float32(1), "done": False}}
            >>> state = buffer.add(buffer.init(step), step)
            >>> state = buffer.truncate(state)                   # the environment is reset
            >>> state = buffer.add(state, step)
            >>> sorted(buffer.sample(state, jax.random.key(0), 9).info["steps"].tolist())[-1]
            1
        """
        shape = (self.ring.envs,)
        if mask is None:
            mask = jnp.ones(shape, jnp.bool_)
        else:
            meaning = "which environments are reset: one flag for each, or a single one"
            mask = checks.mask("truncate", mask, shape if jnp.shape(mask) == shape else (), meaning)
        return eager.truncate(self, state, jnp.broadcast_to(mask, shape))

    def take(self, state: BufferState, indices: jax.Array) -> Item:
        """Returns the items at given slots as they are stored, without unit and transforms.

        Args:
            state: is only read.
            indices: integers `[...]`, in [0, N).

        Returns:
            The items; their leaves have the axes of `indices`, and then those of one item.

        Raises:
            ValueError: an index is out of range, or its slot is empty (only outside `jit`).
        """
        return eager.take(self, state, self._slots("take", indices))

    def set(
        self, state: BufferState, where: Sample | jax.Array | EllipsisType, values: Item
    ) -> BufferState:
        """Sets leaves of stored items, in place.

        The unit is updated at once: if done flags change, this costs O(N), and new anchors get the
        priority of new items. Other priorities stay. The next checkpoint has the edit. In a
        `DeviceStorage` with `share_next_observations`, editing observations costs O(N), and may
        need room in the pool.

        Args:
            state: may be donated.
            where: a `Sample`, for its anchors or all rows of its windows; rows that are masked or
                were overwritten since are skipped. Or slots, int32 `[B]`; or `...` for all slots.
                If a slot occurs twice, its last value counts, by batch and then by row.
            values: some of the leaves of items, as they are stored, in a pytree with the same
                names: `[B, ...]`, or `[N, ...]` for `...`, or `[B, L, ...]` for rows of windows,
                with or without burn-in. For objects, a sequence of B.

        Raises:
            ValueError: the items have no such leaf, or one of another shape; the writer ranks items
                by the leaf; a slot is out of range (only outside `jit`); another description drew a
                sample.
            TypeError: a leaf has another dtype.

        Example:
            >>> import jax.numpy as jnp, jrb
            >>> buffer = jrb.ReplayBuffer(4)
            >>> items = {"x": jnp.arange(4), "reward": jnp.zeros(4)}
            >>> state = buffer.extend(buffer.init({"x": 0, "reward": 0.0}), items)
            >>> state = buffer.set(state, jnp.array([1, 2]), {"reward": jnp.array([5.0, 6.0])})
            >>> buffer.take(state, jnp.arange(4))["reward"].tolist()
            [0.0, 5.0, 6.0, 0.0]
        """
        check_state(self, state)
        which, lead = None, (self.capacity,)
        if isinstance(where, Sample):
            check_origin("set", where, self._origin)
            which, lead = where, (where.indices.size,)
        elif where is not ...:
            which = self._slots("set", where)
            if which.ndim != 1:
                raise ValueError(f"set: expected slots of shape (B,), got {which.shape}.")
            lead = which.shape
        if self.storage.of_objects:
            self.writer.check_edit("set", frozenset())
            objects = checks.objects("set", values, lead[0])
            return eager.edit(self, state, which, {}, objects)
        spec = self.storage.spec(state.storage)
        # Values may be for all rows of windows, `[B, L, ...]`, and not only for their anchors.
        if isinstance(where, Sample) and self.unit.row_steps is not None:
            which, lead = self._rows_of_windows(where, spec, values)
        named = self._values("set", spec, values, lead)
        if len(lead) == 2:
            named = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in named.items()}
        return eager.edit(self, state, which, named) if named else state

    def map(
        self, state: BufferState, function: Callable[[Item], Item], batch_size: int = 1024
    ) -> BufferState:
        """Applies a function to all stored items, a batch at a time, and sets its results in place.

        Use it to relabel rewards or to refresh recurrent states.

        Args:
            state: may be donated.
            function: takes stored items, leaves `[B, ...]`, oldest first, and returns new values of
                some leaves, `[B, ...]`; it is compiled. B is `batch_size`, or less for the last
                batch of items on the host.
            batch_size: B, the number of items that are read at a time; at most N.

        Raises:
            ValueError, TypeError: as for `set`.
        """
        check_state(self, state)
        if self.storage.of_objects:
            raise object_refusal()
        checks.count("batch_size", batch_size)
        size = min(int(batch_size), self.capacity)
        return eager.rewrite(self, state, _MapFunction(self, function), size)

    def drop(self, state: BufferState, where: Sample | jax.Array) -> BufferState:
        """Excludes anchors from sampling until their slots are overwritten.

        Their priority is then -2, and later updates of it do nothing. Slots that are no anchors are
        skipped. Dropped items are still held: `size`, `take` and `jrb.items` have them.

        Args:
            state: may be donated.
            where: a `Sample`, whose overwritten entries are skipped; or slots, int32 `[B]`, N for
                padding; or a mask, bool `[N]`, True for slots to drop, which costs O(N): for
                conditions inside `jit`.

        Raises:
            TypeError: the sampler has no priorities, or cannot drop anchors.
            ValueError: another description drew the sample, a mask has another shape, or a slot is
                out of range (only outside `jit`; inside, it is skipped).

        Example:
            >>> import jax.numpy as jnp, jrb
            >>> buffer = jrb.ReplayBuffer(4, sampler=jrb.Prioritized())
            >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(3)})
            >>> state = buffer.drop(state, jnp.arange(4) % 2 == 1)
            >>> buffer.priorities(state).tolist()
            [1.0, -2.0, 1.0, -1.0]
        """
        return self._drop(state, where)

    def _drop(
        self, state: BufferState, where: Sample | jax.Array, donate: bool = False
    ) -> BufferState:
        """Does `drop`; with `donate`, writes the sampler's arrays in place."""
        if not isinstance(self.sampler, PrioritizedSampler):
            raise TypeError(
                f"drop: expected a sampler that can leave anchors out, got "
                f"{type(self.sampler).__name__}. jrb.Prioritized() can; with alpha=0 it draws all "
                "others alike."
            )
        if isinstance(where, Sample):
            check_origin("drop", where, self._origin)
            return eager.drop(self, state, where, donate)
        array: Any = where if isinstance(where, jax.Array) else np.asarray(where)
        if array.dtype == np.bool_:
            meaning = "which of all slots are dropped. Or give their numbers"
            slots = checks.mask("drop", array, (self.capacity,), meaning)
        else:
            slots = checks.indices("drop", array)
            checks.in_range("drop", slots, self.capacity, has_padding=True)
        return eager.drop(self, state, slots, donate)

    @explain_jax_error
    def in_order(self, state: BufferState) -> tuple[jax.Array, jax.Array]:
        """Returns all slots in the order in which they were written, and the number of items.

        Returns:
            The slots, int32 `[N]`, oldest first, with empty slots at the end; and int32 `[]`.
        """
        check_state(self, state)
        return steps.in_order(self, state.writer)

    @explain_jax_error
    def newest(self, state: BufferState, n: int) -> tuple[jax.Array, jax.Array]:
        """Returns the slots of the newest rows.

        Args:
            state: is only read.
            n: the number of rows, at most R = N / E.

        Returns:
            The slots, int32 `[n, E]`, or `[n]` without `num_envs`, newest last; and bool of that
            shape, False for rows that are not held.

        Raises:
            TypeError: there are several environments, and the writer keeps no rows of them.
        """
        check_state(self, state)
        checks.count("n", n, self.ring.rows)
        if not self.writer.is_chronological and self.num_envs is not None:
            raise TypeError(
                f"newest: expected a writer that keeps rows in the order of time, got "
                f"{type(self.writer).__name__}. in_order gives single slots."
            )
        occupancy, shape = self.writer.held(self.ring, state.writer), (n, *self._lead())
        # Rows ago, from the oldest of the n to the newest, 0.
        age = jnp.arange(n - 1, -1, -1, dtype=jnp.int32)[:, None]
        if self.writer.is_chronological:
            is_held = age < occupancy.rows(self.ring)[None]
            is_held = jnp.broadcast_to(is_held, (n, self.ring.envs))
            newest = occupancy.newest(self.ring)[None]
            slots = self.ring.slot_before(newest, age * self.ring.envs)
        else:
            is_held, rank = age < occupancy.size, occupancy.size - 1 - age
            slots = self.writer.in_order(self.ring, state.writer)[0][jnp.maximum(rank, 0)]
        return slots.reshape(shape), is_held.reshape(shape)

    @explain_jax_error
    def priorities(self, state: BufferState, slots: jax.Array | None = None) -> jax.Array:
        """Returns the priorities as they were set, without alpha and eps.

        Args:
            state: is only read.
            slots: int32 `[...]`; None for all.

        Returns:
            float32 like `slots`, or `[N]`; -1 for slots that are no anchors, and -2 for anchors
            that `drop` removed.

        Raises:
            TypeError: the sampler has no priorities.
        """
        sampler = self._prioritized_sampler("priorities")
        check_state(self, state)
        priorities = sampler.priorities(state.sampler)
        if slots is None:
            return eager.copy_if_owned(priorities, state.sampler)
        return priorities[self._slots("priorities", slots)]

    @explain_jax_error
    def size(self, state: BufferState) -> jax.Array:
        """Returns the number of transitions held, int32 `[]`."""
        check_state(self, state)
        return eager.copy_if_owned(self.writer.held(self.ring, state.writer).size, state.writer)

    @explain_jax_error
    def can_sample(self, state: BufferState, batch_size: int | None = None) -> jax.Array:
        """Returns True if the sampler has an item to draw, bool `[]`; if not, `sample` raises.

        One item is enough to sample a batch with replacement. To wait for more, set `min_size`.

        Args:
            state: is only read.
            batch_size: B; None for the buffer's.
        """
        check_state(self, state)
        return eager.ready(self, state, self.batch_size if batch_size is None else batch_size)

    def can_add(self, state: BufferState) -> jax.Array:
        """Returns True if `add` would write, bool `[]` (see `ReadOnly` and `BlockWhenFull`)."""
        return eager.can_add(self, state)

    def empty(self, state: BufferState) -> BufferState:
        """Returns the state without items; updates by earlier samples then do nothing."""
        return eager.empty(self, state)

    def item_spec(self, state: BufferState) -> Item:
        """Returns the spec of one item as it is stored, `jax.ShapeDtypeStruct`s."""
        check_state(self, state)
        return self.storage.spec(state.storage)

    # Arguments.

    def _prioritized_sampler(self, method: str) -> PrioritizedSampler:
        """Returns the sampler, or raises if it has no priorities."""
        if isinstance(self.sampler, PrioritizedSampler):
            return self.sampler
        raise TypeError(
            f"{method}: expected a sampler with priorities, got {type(self.sampler).__name__}. "
            "Build the buffer with sampler=jrb.Prioritized()."
        )

    def _slots(self, method: str, indices: Any) -> jax.Array:
        slots = checks.indices(method, indices)
        checks.in_range(method, slots, self.capacity)
        return slots

    def _stored_spec(self, example: Item) -> Item:
        """Returns the spec of one item after the inverses of all transforms."""
        inward = functools.partial(transforming.apply_inverses, self.transforms)
        example = read_items(example, "init", self.cast)
        spec = jax.eval_shape(inward, pytree.spec_of(example, "init"))
        if not jax.tree.leaves(spec):
            raise ValueError("init: expected at least one leaf, got an empty pytree.")
        return spec

    def _to_stored(
        self, state: BufferState, items: Item, lead: tuple[int, ...], method: str
    ) -> Item:
        """Returns items as the storage takes them, leaves `[*lead, ...]`, or raises."""
        if any(getattr(transform, "inverse", None) for transform in self.transforms):
            checks.lead(items, lead, method)
            # A transform that is no description may close over a value that changes.
            is_fixed = transforming.count_fixed(self.transforms) == len(self.transforms)
            invert = steps.invert_compiled if is_fixed else steps.invert
            items = invert(self, copy_arrays(items), len(lead))
        spec, envs = self.item_spec(state), self.num_envs  # which checks the state
        mend = f"Give {_LAYOUT[method, envs is None]}."
        pairs = zip(jax.tree.leaves(spec), jax.tree.leaves(items), strict=False)
        if envs is not None and all(
            want.shape[:1] == (envs,) and np.shape(leaf)[len(lead) - 1 :] == want.shape
            for want, leaf in pairs
        ):
            mend = (
                "The example that init was given has the axis of num_envs already. Give init one "
                "transition: jax.tree.map(lambda leaf: leaf[0], example)."
            )
        return fit_items(spec, items, method, mend, lead, self.cast)

    def _values(
        self, method: str, spec: Item, values: Item, lead: tuple[int, ...]
    ) -> dict[str, Any]:
        """Returns values `[*lead, ...]` by name, checked against `spec`, which is of one item."""
        values = read_items(values, method, self.cast)
        named = dict(zip(pytree.leaf_names(values), jax.tree.leaves(values), strict=True))
        stored = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
        for name in named.keys() - stored.keys():
            raise ValueError(
                f"{method}: leaf '{name}': expected leaves that the items have, {sorted(stored)}."
            )
        self.writer.check_edit(method, frozenset(named))
        fixed = named.keys() & steps.leaves_read(self, spec, self.sampler.reads_written).keys()
        if fixed:
            raise ValueError(
                f"{method}: expected other leaves than those that {type(self.sampler).__name__} "
                f"has read as items were written, got {sorted(fixed)}. Write the items again."
            )
        expected = {
            name: jax.ShapeDtypeStruct((*lead, *stored[name].shape), stored[name].dtype)
            for name in named
        }
        mend = "Give one value for each item, as it is stored."
        return fit_items(expected, named, method, mend, cast=self.cast)

    def _rows_of_windows(self, sample: Sample, spec: Item, values: Item) -> tuple[Sample, Any]:
        """Returns the rows of windows to set, as a sample of single items, and the lead `(B, L)`.

        If no value has an axis of rows, values are for anchors: returns `sample` and `(B,)`.
        """
        stored = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
        named = zip(pytree.leaf_names(values), jax.tree.leaves(values), strict=True)
        leads = [
            jnp.shape(leaf)[:2]
            for name, leaf in named
            if name in stored and jnp.ndim(leaf) == stored[name].ndim + 2
        ]
        if not leads and sample.indices.ndim == 1:
            return sample, (sample.indices.size,)
        shapes = self.unit.priority_shapes(sample.mask.shape)
        # With burn-in or without: both are shapes that the unit takes.
        lead = leads[0] if leads and leads[0] in shapes else sample.mask.shape
        if not self.writer.generation_is_lap:
            raise TypeError(
                f"set: expected a writer whose stamps tell rows of windows apart, got "
                f"{type(self.writer).__name__}. Set the anchors alone, or see jrb.types.Writer."
            )
        slots, stamp = self.unit.rows_of(self.ring, sample, lead[1])
        fields = {"indices": slots, "stamp": stamp, "mask": sample.mask[:, -lead[1] :]}
        flat = {name: array.reshape(-1) for name, array in fields.items()}
        return sample.replace(**flat), lead


_LAYOUT = {
    ("add", True): "one timestep with the leaves of the example",
    ("add", False): "one timestep with leaves [E, ...], E = num_envs",
    ("extend", True): "timesteps with leaves [T, ...], time first",
    ("extend", False): "timesteps with leaves [T, E, ...], time first, E = num_envs",
}


_ring = functools.lru_cache(maxsize=1024)(lambda capacity, envs: Ring(capacity // envs, envs))


# `it[None]`, without a call of JAX for arrays of NumPy, and quickly traced.
_one_row = lambda it: (
    np.asarray(it)[None] if isinstance(it, np.ndarray | np.generic) else jnp.expand_dims(it, 0)
)


@dataclasses.dataclass(frozen=True)
class _MapFunction:
    """The function of `map`, made hashable, so that equal ones are compiled once."""

    buffer: ReplayBuffer
    function: Callable[[Item], Item]

    def __call__(self, items: Item) -> dict[str, Any]:
        """Returns leaves `[B, ...]` by name, after all checks."""
        one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        count = jax.tree.leaves(items)[0].shape[0]
        return self.buffer._values("map", jax.tree.map(one, items), self.function(items), (count,))


def draw_arguments(
    samplers: list[Sampler],
    default: int | None,
    key: jax.Array,
    batch_size: Any,
    inputs: DrawInputs,
) -> tuple[int, DrawInputs]:
    """Checks the arguments of a draw by one or several samplers; returns B and the others."""
    beta, context = inputs
    size = check_batch(samplers, default, batch_size, context)
    random_bits.check_key(key)
    return size, DrawInputs(None if beta is None else checks.number("beta", beta), context)


def check_batch(samplers: list[Sampler], default: int | None, batch_size: Any, context: Any) -> int:
    """Checks the batch size and the context of a draw; returns the batch size."""
    size = default if batch_size is None else batch_size
    if size is None:
        raise ValueError(
            "batch_size: expected a number, got None. Give it to the description, as in "
            "ReplayBuffer(batch_size=...), or to this call."
        )
    # The default was checked when the description was made.
    if batch_size is not None:
        checks.count("batch_size", batch_size)
    if context is not None and all(sampler.reads is None for sampler in samplers):
        raise TypeError(
            f"context: expected None, as {type(samplers[0]).__name__} does not use it, got "
            f"{type(context).__name__}. Samplers such as jrb.Weighted do."
        )
    return int(size)


def check_single(buffer: object, who: str) -> None:
    """Raises TypeError unless `buffer` is a `ReplayBuffer`; its message says how to get one."""
    if isinstance(buffer, ReplayBuffer):
        return
    cure = {
        "Mix": " Take one at a time: mix.buffers[0] and states[0].",
        "Sharded": " Bring shards together: jrb.rebuild(sharded, state, sharded.buffer) is the "
        "state of sharded.buffer.",
    }
    kind = type(buffer).__name__
    raise TypeError(f"{who}: expected a ReplayBuffer, got {kind}.{cure.get(kind, '')}")


def from_items(
    data: Item,
    *,
    capacity: int | None = None,
    num_envs: int | None = None,
    **parts: Unpack[BufferParts],
) -> tuple[ReplayBuffer, BufferState]:
    """Returns a buffer that holds these items, and its state.

    N capacity, E environments, T time.

    Args:
        data: arrays `[T, ...]`, or `[T, E, ...]` with `num_envs`. A sequence of objects with
            `storage=jrb.ListStorage()`.
        capacity: N; None for the number of items. If it is smaller, the last items are kept.
        num_envs: E, or None for one stream.
        parts: further arguments of `ReplayBuffer`. `cast=True` converts NumPy's float64, and
            `writer=jrb.ReadOnly()` refuses all later writes.

    Raises:
        ValueError, TypeError: as for `ReplayBuffer`, `init` and `extend`.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer, state = jrb.from_items({"x": jnp.arange(5)}, batch_size=2)
        >>> buffer.capacity, jrb.items(buffer, state)["x"].tolist()
        (5, [0, 1, 2, 3, 4])
    """
    of_objects = parts.get("storage", DeviceStorage()).of_objects
    if of_objects:
        lengths = {len(data)}
    else:
        data = read_items(data, "from_items")
        for path, leaf in jax.tree_util.tree_leaves_with_path(data):
            if not pytree.is_array(leaf) or not leaf.shape:
                raise TypeError(
                    f"from_items: leaf '{pytree.leaf_name(path)}': expected an array with an axis "
                    f"of time, got {leaf!r}."
                )
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(data)}
    if len(lengths) > 1:
        raise ValueError(
            f"from_items: expected leaves of one length, time first, got {sorted(lengths)}."
        )
    length = max(lengths, default=0)
    if not length:
        raise ValueError("from_items: expected at least one item, got none.")
    size = length * (num_envs or 1) if capacity is None else capacity
    buffer = ReplayBuffer(capacity=size, num_envs=num_envs, **parts)
    # A read-only buffer is filled with the writer inside `ReadOnly`, which has the same states.
    writer = buffer.writer.writable()
    target = dataclasses.replace(buffer, writer=writer, requires_mask=False)
    if of_objects:
        return buffer, target.extend(target.init(None), data)
    lead = buffer._lead()
    one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[len(lead) + 1 :], leaf.dtype)
    example = jax.tree.map(one, data)
    state = target.init(example)
    # In pieces of 32 MB: items on the host are not all copied to the device at once.
    step = max(1, (32 << 20) // max(pytree.nbytes(example) * buffer.ring.envs, 1))
    for start in range(0, length, step):
        piece = jax.tree.map(operator.itemgetter(slice(start, start + step)), data)
        shape = (min(step, length - start), *lead)
        piece = read_items(piece, "extend", target.cast)
        rows = target._to_stored(state, piece, shape, "extend")
        state = eager.fill(target, state, rows)
    return buffer, state
