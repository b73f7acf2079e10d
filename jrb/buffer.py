"""The replay buffer, a composition of five parts."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import eager, steps, transforming
from jrb._core.validate import check_state, explained, warn_of_refused
from jrb._util import casting, checks, display, pytree, wording
from jrb._util.pytree import Leaf
from jrb.keys import TED, Keys
from jrb.ring import Ring
from jrb.samplers import Uniform
from jrb.state import BufferState, Device, Sample, check_origin, origin_of
from jrb.storages import DeviceStorage
from jrb.types import Item, PrioritizedSampler, Sampler, Storage, Unit, Writer
from jrb.types.parts import check_part
from jrb.units import Transition
from jrb.writers import RoundRobin


@pytree.component
class ReplayBuffer:
    """A replay buffer: describes what it holds, how it writes, and how it draws.

    The description is frozen, hashable and free of arrays; the arrays are in a `BufferState`, which
    every verb takes and those that change it return. All verbs are pure and work under `jit`,
    `scan` and `vmap`. Donate the state to the jitted function that contains them, and nothing of
    the buffer's size is copied: in any order that begins with `add` or `extend`, and in orders that
    read first if they read with `draw`, or pass the `Sample` to `update_priority`, and write to the
    state that these return. A bare `sample` before a write in one function may cost a copy.

    N capacity, E environments, B batch, L window, T time.

    Attributes:
        capacity: N, the transitions held over all environments; a multiple of E. A state has at
            most 2^31 - 1 slots; what is larger is for `jrb.Sharded`, which makes several.
        num_envs: E, or None for one stream without an environment axis.
        batch_size: B, unless a draw names its own.
        sampler: which anchors are drawn.
        unit: what one drawn anchor stands for.
        writer: which slots are written.
        storage: where the items lie.
        transforms: what happens to data on its way out, from first to last; each a function from
            data to data, or one of `jrb.transforms`. One with a method `inverse` is undone on the
            way in, item by item. One with a state learns from what is written.
        keys: where the parts of a transition lie in an item.
        min_size: the transitions that must be held before anything is drawn; until then
            `can_sample` is False, `sample` raises outside `jit`, and inside it `mask` is False.
        cast: whether items of other dtypes are converted to those that are stored: NumPy's float64
            and int64 to what JAX keeps (an integer that does not fit is an error), floats to
            floats, integers to larger ones, and bool to integer to float. If not, they are errors.

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

    if not TYPE_CHECKING:  # or every misspelt name would have a type

        def __getattr__(self, name: str) -> Any:
            raise wording.no_attribute(self, name)

    def __repr__(self) -> str:
        return display.laid_out(self)

    def _repr_html_(self) -> str:
        return display.tree_html(self)

    def __post_init__(self) -> None:
        check_part("sampler", self.sampler)
        check_part("unit", self.unit)
        check_part("writer", self.writer)
        check_part("storage", self.storage)
        checks.count("capacity", self.capacity)
        if self.num_envs is not None:
            checks.count("num_envs", self.num_envs)
            checks.multiple(self.capacity, self.num_envs)
        if self.batch_size is not None:
            checks.count("batch_size", self.batch_size)
        if self.min_size is not None:
            checks.count("min_size", self.min_size, min(self.capacity, 2**31 - 1))
        checks.flag("cast", self.cast)
        numbers = {"capacity": self.capacity, "num_envs": self.num_envs}
        numbers |= {"batch_size": self.batch_size, "min_size": self.min_size}
        for name, value in numbers.items():  # NumPy's integers have a dtype
            object.__setattr__(self, name, None if value is None else int(value))
        if not isinstance(self.keys, Keys):
            raise TypeError(f"keys: expected jrb.Keys(...), got {self.keys!r}.")
        if not isinstance(self.transforms, tuple) or not all(
            callable(transform) or transforming.method(transform, "apply")
            for transform in self.transforms
        ):
            raise TypeError(
                f"transforms: expected a tuple of functions, got {self.transforms!r}. "
                "Write (f,) for a single one."
            )
        self._check_parts()

    def _check_parts(self) -> None:
        """Raises where parts do not fit each other."""
        self.unit.check(self.ring, self.sampler, self.writer)
        self.sampler.check(self.ring, self.unit)
        if self.storage.of_objects and not self.unit.one_row:
            raise ValueError(
                f"unit: expected jrb.Transition() with {type(self.storage).__name__}, which cannot "
                f"look into its objects, got {type(self.unit).__name__}."
            )
        if self.storage.requires_chronological:
            checks.chronological(type(self.storage).__name__, self.writer)
            checks.together(type(self.storage).__name__, self.writer)
        if self.sampler.in_order:
            checks.together(type(self.sampler).__name__, self.writer)
        transforming.check(self.transforms, self.storage)

    @classmethod
    def rounded(cls, capacity: int, num_envs: int | None = None, **parts: Any) -> Self:
        """Returns a buffer of at most this capacity, rounded down to a multiple of `num_envs`.

        For capacities that come from a configuration, as most libraries take them.

        Args:
            capacity: at least `num_envs`.
            num_envs: E, or None.
            parts: what else the description takes.

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
        envs = self.num_envs or 1
        return Ring(rows=self.capacity // envs, envs=envs)

    def init(self, example: Item, device: Device = None) -> BufferState:
        """Returns an empty state.

        Args:
            example: one transition, arrays or `jax.ShapeDtypeStruct`s without leading axes; only
                shapes and dtypes matter.
            device: where all arrays are made: a device, a sharding, or, with all items on the
                device, a state of shardings; None for the default device. Items to be added have to
                be there too, or nowhere in particular; `jax.device_put` brings a `Sample`
                elsewhere.

        Raises:
            TypeError: a leaf is no array, or of a dtype that JAX would change.
            ValueError: the folder of a storage on the host holds something; more than 2^31 - 1
                slots.
            OSError: there is no room on its disk.
        """
        eager.check_init(self, example)
        spec = None if self.storage.of_objects else self._stored_spec(example)
        return eager.init(self, spec, device)

    def nbytes(self, example: Item) -> int:
        """Returns the bytes that `init(example)` would allocate in arrays and files."""
        if self.storage.of_objects:
            raise eager.refusal()
        return eager.nbytes(self, self._stored_spec(example))

    def add(
        self,
        state: BufferState,
        item: Item,
        mask: jax.Array | None = None,
        priorities: jax.Array | None = None,
    ) -> BufferState:
        """Writes one timestep.

        Args:
            state: may be donated.
            item: leaves `[E, ...]`, or `[...]` without `num_envs`.
            mask: bool `[]`; nothing is written if it is False, under `vmap` for each buffer by
                itself, where a `lax.cond` around the call would copy the ring. None writes. With
                `writer=jrb.PerEnvironment()` also `[E]`, for each environment.
            priorities: real `[E]`, or `[]` without `num_envs`: of the anchors that these
                transitions are, or will be once their unit is whole; used as float32. None for
                those of new items. One that is NaN, infinite or negative is refused: the anchor
                gets the priority of a new item, and the sampler's state counts it.

        Raises:
            ValueError: another structure or shape than the example's.
            TypeError: another dtype than the example's, a mask that is not bool, or priorities for
                a sampler that has none.
        """
        return self._add(state, item, mask, priorities)

    def _add(
        self, state: BufferState, item: Item, mask: Any, priorities: Any, donate: bool = False
    ) -> BufferState:
        """`add`; with `donate`, of a state with items on the host, it writes arrays in place."""
        if mask is not None:
            mask = checks.write_mask("add", mask, (), self._lead(), self.writer)[None]
        if priorities is not None:
            self._require_given("add")
            self._warn_of_refused("add", priorities, donate)
            priorities = checks.given_priorities("add", priorities, self._lead())[None]
        if self.storage.of_objects:
            return eager.write_objects(self, state, [item], mask, "add", priorities, donate)
        stored = jax.tree.map(_one_row, self._to_stored(state, item, self._lead(), "add"))
        return eager.write(self, state, stored, mask, None, priorities, donate)

    def extend(
        self,
        state: BufferState,
        items: Item,
        mask: jax.Array | None = None,
        priorities: jax.Array | None = None,
    ) -> BufferState:
        """Writes T timesteps, time first; of more than the ring holds, the last ones.

        Args:
            state: may be donated.
            items: leaves `[T, E, ...]`, or `[T, ...]` without `num_envs`.
            mask: bool `[T]`; rows where it is False are not written, as if they were not there. For
                each buffer by itself under `vmap`, where a `lax.cond` around the call would copy
                the ring. With `writer=jrb.PerEnvironment()` also `[T, E]`, for each environment.
            priorities: real `[T, E]`, or `[T]` without `num_envs`, as for `add`.

        Returns:
            The state after T times `add`, however the rows are cut into calls.

        Raises:
            ValueError: another structure or shape than the example's, or leaves of unequal T.
            TypeError: another dtype than the example's, a mask that is not bool, or priorities for
                a sampler that has none.
        """
        return self._extend(state, items, mask, priorities)

    def _extend(
        self, state: BufferState, items: Item, mask: Any, priorities: Any, donate: bool = False
    ) -> BufferState:
        """`extend`; with `donate`, of a state with items on the host, it writes arrays in place."""
        if priorities is not None:
            self._require_given("extend")
        if self.storage.of_objects:
            return eager.write_objects(self, state, items, mask, "extend", priorities, donate)
        items = casting.arrays(items, "extend")
        if self.cast:
            items = casting.kept(items, "extend")
        length = checks.length(items)
        rows = self._to_stored(state, items, (length, *self._lead()), "extend")
        if mask is not None:
            mask = checks.write_mask("extend", mask, (length,), self._lead(), self.writer)
        if priorities is not None:
            shape = (length, *self._lead())
            self._warn_of_refused("extend", priorities, donate)
            priorities = checks.given_priorities("extend", priorities, shape)
        if not length:
            return state
        return eager.write(self, state, rows, mask, None, priorities, donate)

    @wording.takes_state
    def sample(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
    ) -> Sample:
        """Draws a batch and leaves the state as it is.

        Args:
            state: is only read.
            key: a PRNG key. It is consumed.
            batch_size: B; None for the buffer's.
            beta: of the importance weights, float `[]`, may be traced; None for the sampler's.

        Returns:
            The batch. Samplers that consume (`Queue`, `WithoutReplacement`) show what `draw` with
            this key would give.

        Raises:
            ValueError: there is nothing to draw, or less than `min_size` is held (only outside
                `jit`; inside, `mask` is False and `weights` is 0); or no batch size.
        """
        return self._drawn(state, key, batch_size, beta, moves=False)[1]

    @wording.takes_state
    def draw(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
    ) -> tuple[BufferState, Sample]:
        """Draws a batch, and moves on those samplers that consume.

        The state that it returns may be written to in the same jitted function without a copy: its
        cursor depends on everything that was read.

        Args:
            state: may be donated.
            key: a PRNG key. It is consumed.
            batch_size: B; None for the buffer's.
            beta: of the importance weights, float `[]`, may be traced; None for the sampler's.

        Returns:
            The state, and the batch.

        Raises:
            ValueError: as for `sample`.
        """
        return self._drawn(state, key, batch_size, beta)

    def _drawn(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: Any,
        beta: jax.Array | float | None,
        moves: bool = True,
    ) -> Any:
        """Checks the arguments of a draw, and draws (see `jrb._core.eager.draw`)."""
        if batch_size is not None:
            checks.count("batch_size", batch_size)
            count = int(batch_size)
        elif self.batch_size is not None:
            count = self.batch_size
        else:
            raise ValueError(
                "batch_size: expected a number, got None. "
                "Give it to ReplayBuffer(batch_size=...), or to this call."
            )
        checks.key(key)
        if beta is not None:
            beta = checks.number("beta", beta)
        return eager.draw(self, state, key, count, beta, moves=moves)

    def update_priority(
        self, state: BufferState, sample_or_indices: Sample | jax.Array, priorities: jax.Array
    ) -> BufferState:
        """New priorities for what was drawn.

        Args:
            state: may be donated.
            sample_or_indices: the `Sample`. What was overwritten since, or masked, is left alone.
                Or int32 `[B]` slots, for tools: then nothing tells a new item from the one that was
                meant, and a write in the same jitted function may cost a copy.
            priorities: real numbers `[B]`, or `[B, L]` for a unit of windows, which reduces them;
                used as float32. Those that are NaN, infinite or negative are refused: the old
                priority stays, and the sampler's state counts them.

        Returns:
            The state. Where a slot stands twice, the last one wins.

        Raises:
            TypeError: the sampler has no priorities, or those given are no real numbers.
            ValueError: another shape than `[B]`, or a sample that another description drew.
        """
        return self._update_priority(state, sample_or_indices, priorities)

    def _update_priority(
        self,
        state: BufferState,
        sample_or_indices: Sample | jax.Array,
        priorities: Any,
        donate: bool = False,
    ) -> BufferState:
        """`update_priority`; with `donate`, the sampler's arrays are written in place."""
        self._prioritized("update_priority")
        shapes = []
        if isinstance(sample_or_indices, Sample):
            check_origin("update_priority", sample_or_indices, self._origin)
            shapes.append(sample_or_indices.indices.shape)
            shapes.extend(self.unit.priority_shapes(sample_or_indices.mask.shape))
        else:
            sample_or_indices = checks.indices("update_priority", sample_or_indices)
            shapes.append(sample_or_indices.shape)
        mask = getattr(sample_or_indices, "mask", True)
        self._warn_of_refused("update_priority", priorities, donate, mask)
        priorities = checks.priorities(priorities, shapes)
        return eager.update(self, state, sample_or_indices, priorities, donate)

    def set_alpha(self, state: BufferState, alpha: jax.Array | float) -> BufferState:
        """Sets the exponent alpha of a prioritized sampler.

        Costs O(N); the same one as before costs nothing on the CPU, unless under `vmap`.

        Raises:
            TypeError: the sampler has no priorities.
            ValueError: alpha is a negative number.
        """
        prioritized = self._prioritized("set_alpha")
        check_state(self, state)
        sampler = prioritized.set_alpha(state.sampler, casting.copy_array(alpha))
        return state.replace(sampler=sampler)

    def truncate(self, state: BufferState, mask: jax.Array | None = None) -> BufferState:
        """Ends the episodes of environments: no item crosses from the newest row to the next one.

        No window, n-step return or stack of frames goes on from what is held now to what is added
        next, though no flag says that an episode ended: for environments that are reset in the
        middle of one, such as after a restart of the program. What is stored stays as it is.

        Args:
            state: may be donated.
            mask: bool `[E]`, or `[]` for all or none; None for all.

        Raises:
            TypeError: a mask that is not bool, or a unit of one's own without `truncate`.
            ValueError: a mask of another shape.

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
        envs = self.ring.envs
        if mask is None:
            mask = jnp.ones(envs, jnp.bool_)
        elif jnp.shape(mask) != (envs,):
            mask = jnp.broadcast_to(checks.mask("truncate", mask, (), _BEGIN), (envs,))
        else:
            mask = checks.mask("truncate", mask, (envs,), _BEGIN)
        return eager.truncate(self, state, mask)

    def take(self, state: BufferState, indices: jax.Array) -> Item:
        """Returns the items at these slots, as they are stored: without unit and transforms.

        Args:
            state: is only read.
            indices: integers `[...]`, in [0, N).

        Returns:
            Leaves `[..., *item]`.

        Raises:
            ValueError: an index is out of range, or nothing is held there (only outside `jit`).
        """
        indices = checks.indices("take", indices)
        checks.in_range("take", indices, self.capacity)
        return eager.take(self, state, indices)

    def set(
        self, state: BufferState, where: Sample | jax.Array | EllipsisType, values: Item
    ) -> BufferState:
        """Other values for leaves of items that are held, where they lie.

        What units know of is learned anew at once: where done flags change, that costs O(N), and
        anchors that appear get the priority of new items. Priorities stay; the next save writes the
        edit. Observations that are stored once cost O(N) to edit, and may need room as new ones do.

        Args:
            state: may be donated.
            where: a `Sample`, whose anchors are meant, or the rows of its windows, what was masked
                or overwritten since left alone, row by row; slots, int32 `[B]`; or `...` for all
                slots. Where a slot stands twice, the last one counts, by batch and then by row.
            values: any of the leaves, as they are stored, `[B, ...]`, or `[N, ...]` for `...`: a
                pytree in which they have the names that they have in the items. For the rows of
                windows `[B, L, ...]`, or those without burn-in. For objects a sequence of B.

        Raises:
            ValueError: a leaf that the items do not have, another shape, or one that the writer
                ranks items by; a slot out of range (only outside `jit`); a sample that another
                description drew.
            TypeError: another dtype.

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
        which, count = self._where("set", where)
        if self.storage.of_objects:
            self.writer.check_edit("set", frozenset())
            return eager.edit(self, state, which, checks.objects("set", values, count))
        spec, lead = self.storage.spec(state.storage), (count,)
        if isinstance(where, Sample):
            lead = self._lead_of_values(where, spec, values)
            which = where if len(lead) == 1 else self._rows_of(where, lead[1])
        named = self._values("set", spec, values, lead)
        if len(lead) == 2:
            named = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in named.items()}
        return eager.edit(self, state, which, named) if named else state

    def map(
        self, state: BufferState, function: Callable[[Item], Item], batch_size: int = 1024
    ) -> BufferState:
        """Applies a function to all items that are held, a batch at a time, in place.

        For relabelling rewards, or refreshing recurrent states: as `set` of what it returns.

        Args:
            state: may be donated.
            function: from items as they are stored, leaves `[B, ...]`, oldest first, to any of
                their leaves, `[B, ...]`; it is compiled. B is `batch_size`, but may be less for
                the last batch of items on the host.
            batch_size: B; no more is read at a time. At most N are.

        Raises:
            ValueError, TypeError: as `set`.
        """
        check_state(self, state)
        if self.storage.of_objects:
            raise eager.refusal()
        checks.count("batch_size", batch_size)

        size = min(int(batch_size), self.capacity)
        return eager.rewrite(self, state, _Mapped(self, function), size)

    def drop(self, state: BufferState, where: Sample | jax.Array) -> BufferState:
        """Excludes anchors from draws until their slots are overwritten.

        Args:
            state: may be donated.
            where: a `Sample`, those overwritten since left alone; or slots, int32 `[B]`.

        Raises:
            TypeError: the sampler has no priorities, or none that can be dropped.
            ValueError: a sample that another description drew.
        """
        return self._drop(state, where)

    def _drop(
        self, state: BufferState, where: Sample | jax.Array, donate: bool = False
    ) -> BufferState:
        """`drop`; with `donate`, the sampler's arrays are written in place."""
        if not isinstance(self.sampler, PrioritizedSampler):
            raise TypeError(
                f"drop: expected a sampler that can leave anchors out, got "
                f"{type(self.sampler).__name__}. jrb.Prioritized() can; with alpha=0 it draws all "
                "others alike."
            )
        if isinstance(where, Sample):
            check_origin("drop", where, self._origin)
        else:
            where = checks.indices("drop", where)
            checks.in_range("drop", where, self.capacity)
        return eager.drop(self, state, where, donate)

    def _where(self, verb: str, where: Sample | jax.Array | EllipsisType) -> tuple[Any, int]:
        """Slots or a sample, None for all; and how many."""
        if where is ...:
            return None, self.capacity
        if isinstance(where, Sample):
            check_origin(verb, where, self._origin)
            return where, where.indices.size
        slots = checks.indices(verb, where)
        checks.in_range(verb, slots, self.capacity)
        if slots.ndim != 1:
            raise ValueError(f"{verb}: expected slots of shape (B,), got {slots.shape}.")
        return slots, slots.size

    def _lead_of_values(self, sample: Sample, spec: Item, values: Item) -> tuple[int, ...]:
        """The axes of `values` before those of an item: `(B,)`, or `(B, L)` for rows of windows."""
        stored = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
        named = zip(pytree.leaf_names(values), jax.tree.leaves(values), strict=True)
        leads = [
            jnp.shape(leaf)[:2]
            for name, leaf in named
            if name in stored and jnp.ndim(leaf) == stored[name].ndim + 2
        ]
        if self.unit.row_steps is None or not leads:
            return (sample.indices.size,)
        shapes = self.unit.priority_shapes(sample.mask.shape)
        return leads[0] if leads[0] in shapes else sample.mask.shape

    def _rows_of(self, sample: Sample, length: int) -> Sample:
        """The last rows of each window as a sample of single items."""
        if not self.writer.generation_is_lap:
            raise TypeError(
                f"set: expected a writer whose stamps tell rows of windows apart, got "
                f"{type(self.writer).__name__}. Set the anchors alone, or see jrb.types.Writer."
            )
        steps: Any = self.unit.row_steps
        slots, laps = self.ring.rows_near(sample.indices, steps[-length:])
        stamps = sample.stamp[:, None] + laps
        mask = sample.mask[:, -length:]
        flat = {"indices": slots, "stamp": stamps, "mask": mask}
        return sample.replace(**{name: array.reshape(-1) for name, array in flat.items()})

    def _values(self, verb: str, spec: Item, values: Item, lead: tuple[int, ...]) -> dict[str, Any]:
        """Leaves by their names, all of which items have, `[*lead, ...]`; `spec` is of one."""
        values = casting.arrays(values, verb)
        values = casting.kept(values, verb) if self.cast else values
        named = dict(zip(pytree.leaf_names(values), jax.tree.leaves(values), strict=True))
        stored = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
        for name in named.keys() - stored.keys():
            raise ValueError(
                f"{verb}: leaf '{name}': expected leaves that the items have, {sorted(stored)}."
            )
        self.writer.check_edit(verb, frozenset(named))
        want = {
            name: jax.ShapeDtypeStruct((*lead, *stored[name].shape), stored[name].dtype)
            for name in named
        }
        if self.cast:
            named = casting.to_spec(want, named, verb)
        mend = "Give one value for each item, as it is stored."
        pytree.check_like(want, named, verb, mend, casts=self.cast)
        return named

    @explained
    def in_order(self, state: BufferState) -> tuple[jax.Array, jax.Array]:
        """Returns all slots in the order in which they were written, and how many hold items.

        Returns:
            int32 `[N]`, oldest first, those that hold nothing at the end; and int32 `[]`.
        """
        check_state(self, state)
        return steps.in_order(self.writer, self.ring, state.writer)

    @explained
    def newest(self, state: BufferState, n: int) -> tuple[jax.Array, jax.Array]:
        """Returns the slots of the newest rows.

        Args:
            state: is only read.
            n: how many rows, at most R = N / E.

        Returns:
            int32 `[n, E]`, or `[n]` without `num_envs`, newest last; and bool of that shape, False
            for rows that are not held.

        Raises:
            TypeError: several environments, and a writer that keeps no rows.
        """
        check_state(self, state)
        checks.count("n", n, self.ring.rows)
        if not self.writer.is_chronological and self.num_envs is not None:
            raise TypeError(
                f"newest: expected a writer that keeps rows in the order of time, got "
                f"{type(self.writer).__name__}. in_order gives single slots."
            )
        held, shape = self.writer.held(self.ring, state.writer), (n, *self._lead())
        back = jnp.arange(n - 1, -1, -1, dtype=jnp.int32)[:, None]
        if self.writer.is_chronological:
            there = jnp.broadcast_to(back < held.rows(self.ring)[None], (n, self.ring.envs))
            slots = self.ring.slot_before(held.newest(self.ring)[None], back * self.ring.envs)
        else:
            there, place = back < held.size, held.size - 1 - back
            slots = self.writer.in_order(self.ring, state.writer)[0][jnp.maximum(place, 0)]
        return slots.reshape(shape), there.reshape(shape)

    @explained
    def priorities(self, state: BufferState, slots: jax.Array | None = None) -> jax.Array:
        """Returns the priorities as they were set, without alpha and eps.

        Args:
            state: is only read.
            slots: int32 `[...]`; None for all.

        Returns:
            float32 like `slots`, or `[N]`; negative where no anchor is, or it was dropped.

        Raises:
            TypeError: the sampler has no priorities.
        """
        sampler = self._prioritized("priorities")
        check_state(self, state)
        found = sampler.priorities(state.sampler)
        if slots is None:
            return eager.copy_if_owned(found, state.sampler)
        slots = checks.indices("priorities", slots)
        checks.in_range("priorities", slots, self.capacity)
        return found[slots]

    @explained
    def size(self, state: BufferState) -> jax.Array:
        """Returns the number of transitions held, int32 `[]`."""
        check_state(self, state)
        return eager.copy_if_owned(self.writer.held(self.ring, state.writer).size, state.writer)

    @explained
    def can_sample(self, state: BufferState, batch_size: int | None = None) -> jax.Array:
        """Returns True if a draw gives at least one item, bool `[]`; if not, `sample` raises.

        One item is enough to draw a batch with replacement. A learner that is to wait for more says
        so by `ReplayBuffer(min_size=...)`.

        Args:
            state: is only read.
            batch_size: B of the draw; None for the buffer's.
        """
        check_state(self, state)
        return eager.ready(self, state, self.batch_size if batch_size is None else batch_size)

    def can_add(self, state: BufferState) -> jax.Array:
        """Returns True if `add` would write, bool `[]`: not if `ReadOnly`, or blocked when full."""
        return eager.can_add(self, state)

    def empty(self, state: BufferState) -> BufferState:
        """Returns the state without its items. Later updates by earlier samples do nothing."""
        return eager.empty(self, state)

    @property
    def _origin(self) -> str:
        """The origin of its samples."""
        return origin_of(self)

    def _lead(self) -> tuple[int, ...]:
        return () if self.num_envs is None else (self.num_envs,)

    def _stored_spec(self, example: Item) -> Item:
        example = casting.arrays(example, "init")
        if self.cast:
            example = casting.kept(example, "init")
        spec = jax.eval_shape(
            functools.partial(transforming.inward, self.transforms), pytree.spec_of(example, "init")
        )
        if not jax.tree.leaves(spec):
            raise ValueError("init: expected at least one leaf, got an empty pytree.")
        return spec

    def stored(self, state: BufferState) -> Item:
        """Returns the spec of one item as it is stored, `jax.ShapeDtypeStruct`s."""
        check_state(self, state)
        return self.storage.spec(state.storage)

    def _to_stored(self, state: BufferState, items: Item, lead: tuple[int, ...], verb: str) -> Item:
        """Items as the storage takes them, leaves `[*lead, ...]`, or an error."""
        items = casting.arrays(items, verb)
        if self.cast:
            items = casting.kept(items, verb)
        if transforming.inverses(self.transforms):
            checks.lead(items, lead, verb)
            items = casting.copy_arrays(items)
            inverse = functools.partial(transforming.inward, self.transforms)
            for _ in lead:
                inverse = jax.vmap(inverse)
            items = inverse(items)
        spec, mend = self.stored(state), f"Give {_LAYOUT[verb, self.num_envs is None]}."
        if self.num_envs is not None and _has_axis(spec, items, len(lead), self.num_envs):
            mend = _NO_AXIS
        if self.cast:
            items = casting.to_spec(spec, items, verb)
        pytree.check_like(spec, items, verb, mend, lead, casts=self.cast)
        return items

    def _require_given(self, verb: str) -> None:
        sampler = self.sampler
        if not (isinstance(sampler, PrioritizedSampler) and sampler.takes_priorities):
            raise TypeError(
                f"{verb}: priorities: expected a sampler that takes priorities with what is added, "
                f"got {type(self.sampler).__name__}. Build the buffer with "
                "sampler=jrb.Prioritized()."
            )

    def _warn_of_refused(self, verb: str, priorities: Any, donate: bool, mask: Any = True) -> None:
        """Warns outside `jit`; `jrb.jitted`, which donates, does so itself."""
        if not donate:
            warn_of_refused(self, verb, priorities, mask)

    def _prioritized(self, verb: str) -> PrioritizedSampler:
        """Returns the sampler, or raises if it has no priorities."""
        if isinstance(self.sampler, PrioritizedSampler):
            return self.sampler
        raise TypeError(
            f"{verb}: expected a sampler with priorities, got {type(self.sampler).__name__}. "
            "Build the buffer with sampler=jrb.Prioritized()."
        )


def _has_axis(spec: Item, items: Item, lead: int, envs: int) -> bool:
    """Returns True if the example had the axis of environments, as the items have it."""
    pairs = zip(jax.tree.leaves(spec), jax.tree.leaves(items), strict=False)
    return all(
        want.shape[:1] == (envs,) and np.shape(leaf)[lead - 1 :] == want.shape
        for want, leaf in pairs
    )


_NO_AXIS = (
    "The example that init was given has the axis of num_envs already. Give init one transition: "
    "jax.tree.map(lambda leaf: leaf[0], example)."
)


def _one_row(leaf: Leaf) -> Leaf:
    """`leaf[None]`, without a call of JAX for NumPy, and quickly traced."""
    if type(leaf) is np.ndarray or isinstance(leaf, np.generic):
        return np.asarray(leaf)[None]
    return jnp.expand_dims(leaf, 0)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function from items to other leaves, by name; equal ones are compiled once."""

    buffer: ReplayBuffer
    function: Callable[[Item], Item]

    def __call__(self, items: Item) -> dict[str, Any]:
        """Leaves `[B, ...]`, after all checks."""
        one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        count = jax.tree.leaves(items)[0].shape[0]
        return self.buffer._values("map", jax.tree.map(one, items), self.function(items), (count,))


_LAYOUT = {
    ("add", True): "one timestep with the leaves of the example",
    ("add", False): "one timestep with leaves [E, ...], E = num_envs",
    ("extend", True): "timesteps with leaves [T, ...], time first",
    ("extend", False): "timesteps with leaves [T, E, ...], time first, E = num_envs",
}

_BEGIN = "which environments begin anew: one flag for each, or a single one"


def check_single(buffer: object, who: str) -> None:
    """Raises unless it is a single buffer; of several, says how to come by one.

    Raises:
        TypeError: it is something else.
    """
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
    data: Item, *, capacity: int | None = None, num_envs: int | None = None, **parts: Any
) -> tuple[ReplayBuffer, BufferState]:
    """Returns a buffer that holds these items, and its state.

    N capacity, E environments, T time.

    Args:
        data: arrays `[T, ...]`, or `[T, E, ...]` with `num_envs`, time first. Of objects, with
            `storage=jrb.ListStorage()`, a sequence.
        capacity: N; None for what the items take. Of more, the last ones stay.
        num_envs: E, or None for one stream.
        parts: what else `jrb.ReplayBuffer` takes; with `cast=True` NumPy's float64 will do, and
            with `writer=jrb.ReadOnly()` nothing is written later.

    Raises:
        ValueError, TypeError: as `ReplayBuffer`, `init` and `extend`.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer, state = jrb.from_items({"x": jnp.arange(5)}, batch_size=2)
        >>> buffer.capacity, jrb.items(buffer, state)["x"].tolist()
        (5, [0, 1, 2, 3, 4])
    """
    of_objects = parts.get("storage", DeviceStorage()).of_objects
    data = data if of_objects else casting.arrays(data, "from_items")
    length = len(data) if of_objects else _common_length(data)
    if not length:
        raise ValueError("from_items: expected at least one item, got none.")
    size = length * (num_envs or 1) if capacity is None else capacity
    buffer = ReplayBuffer(capacity=size, num_envs=num_envs, **parts)
    target = dataclasses.replace(buffer, writer=buffer.writer.writable())
    if of_objects:
        return buffer, target.extend(target.init(None), data)
    axes = len(buffer._lead()) + 1
    example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), data)
    state = target.init(example)
    # In pieces of some megabytes: what is on the host need not fit the device twice.
    step = max(1, _PIECE_BYTES // max(pytree.nbytes(example) * buffer.ring.envs, 1))
    for start in range(0, length, step):
        piece = jax.tree.map(operator.itemgetter(slice(start, start + step)), data)
        lead = (min(step, length - start), *buffer._lead())
        rows = target._to_stored(state, piece, lead, "extend")
        state = eager.fill(target, state, rows)
    return buffer, state


_PIECE_BYTES = 32 << 20


def _common_length(data: Item) -> int:
    """T, the same for all leaves."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if not pytree.is_array(leaf) or not leaf.shape:
            raise TypeError(
                f"from_items: leaf '{pytree.leaf_name(path)}': expected an array with an axis of "
                f"time, got {leaf!r}."
            )
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(data)}
    if len(lengths) > 1:
        raise ValueError(
            f"from_items: expected leaves of one length, time first, got {sorted(lengths)}."
        )
    return lengths.pop() if lengths else 0
