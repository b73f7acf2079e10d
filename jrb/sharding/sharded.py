"""One buffer in several shards, over the devices of a mesh."""

import dataclasses
from collections.abc import Callable
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import eager, transforming
from jrb._core.host_proxy import on_host
from jrb._core.validate import check_donated, explained, warn_of_copies
from jrb._util import casting, checks, display, pytree, wording
from jrb._util.pytree import PyTree
from jrb.buffer import ReplayBuffer
from jrb.sharding import bodies, mesh
from jrb.sharding.mesh import Cut, Cuts, Layout, NamedMesh, mesh_of, named_mesh
from jrb.state import BufferState, Sample, check_origin, origin_of
from jrb.types import Item, ShardedSampler


class _Verb(NamedTuple):
    """How a verb of a buffer is called for its shards.

    Attributes:
        method: of `ReplayBuffer`.
        out: the cut of what it returns.
        changes: "items" if it writes items; "index" if it leaves them alone; "" if it only reads.
        per_env: whether its arguments have an axis of environments, which all shards share where
            the buffer has none.
    """

    method: Callable[..., Any]
    out: Cuts = 0
    changes: str = "items"
    per_env: bool = False


_ADD = _Verb(ReplayBuffer.add, per_env=True)
_EXTEND = _Verb(ReplayBuffer.extend, per_env=True)
_SET, _MAP = _Verb(ReplayBuffer.set), _Verb(ReplayBuffer.map)
_EMPTY = _Verb(ReplayBuffer.empty)
_UPDATE = _Verb(ReplayBuffer.update_priority, changes="index")
_SET_ALPHA = _Verb(ReplayBuffer.set_alpha, changes="index")
_DROP = _Verb(ReplayBuffer.drop, changes="index")
_TRUNCATE = _Verb(ReplayBuffer.truncate, changes="index", per_env=True)
_TAKE = _Verb(ReplayBuffer.take, changes="")
_PRIORITIES = _Verb(ReplayBuffer.priorities, changes="")
_IN_ORDER = _Verb(ReplayBuffer.in_order, (0, 0), changes="")
_NEWEST = _Verb(ReplayBuffer.newest, (0, 0), changes="")


@pytree.component
class Sharded:
    """A buffer in S shards, each an ordinary one of N / S slots and E / S environments.

    Its verbs are those of a buffer, on arrays that are cut over an axis of a mesh: states have a
    leading axis `[S, ...]`, items have all environments, batches are as for one buffer. What they
    do depends on S, not on the number of devices D, which divides S: shard s draws with the key
    `jax.random.fold_in(key, s)`. They work outside and inside `jit`, and inside a `jax.shard_map`
    over the axis, where each device passes its part of every argument, and the same key.

    A draw is as exact as one from a single buffer. Each shard draws B / S of its own anchors; the
    weights correct for how much of the whole that is: `(n P_i)^-beta S M_s / M`, with P_i the
    probability of anchor i among all n, M_s the mass of its shard and M that of all. A mean of
    `weights * loss` over the batch has the expectation that it has with one buffer. Of a shard
    without anything to draw, the part of the batch is masked, and the others weigh more. Samplers
    that use up what they draw do so in each shard for itself, and have no weights.

    Only `draw` and `sample` let devices talk: a few numbers of each shard, in one `all_gather`, and
    with `normalize="batch"` one maximum. What was seen of the greatest priority goes round with
    them. Writers that rank items, and reservoirs, keep the best, or a sample, of each shard.

    N capacity, E environments, B batch, S shards, D devices.

    Items are on the devices. Storages on the host (`jrb.MemmapStorage`, `jrb.SpillStorage`) are
    refused: `jrb.remote(buffer, shards=k)` keeps such a buffer in several processes.

    Attributes:
        buffer: what the shards are together.
        shards: S, which divides E and B.
        mesh: None for the mesh that is set around a call (`jax.set_mesh`); without one, all shards
            lie on one device. Pickled, it is that of the devices with the same numbers.
        axis: the axis of the mesh that the shards are cut over.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(1000, num_envs=4, batch_size=8, sampler=jrb.Prioritized())
        >>> sharded = jrb.Sharded(buffer, shards=2)
        >>> state = sharded.init({"x": 0.0})
        >>> state = sharded.add(state, {"x": jnp.arange(4.0)})
        >>> state, batch = sharded.draw(state, jax.random.key(0))
        >>> state = sharded.update_priority(state, batch, jnp.abs(batch.data["x"]))
        >>> batch.data["x"].shape, int(sharded.size(state))
        ((8,), 4)
    """

    buffer: ReplayBuffer
    shards: int
    mesh: jax.sharding.Mesh | None = None
    axis: str = "data"

    def __repr__(self) -> str:
        return display.laid_out(self)

    def _repr_html_(self) -> str:
        return display.tree_html(self)

    def __reduce__(self) -> Any:
        return _unpickled, (self.buffer, self.shards, named_mesh(self.mesh), self.axis)

    def __post_init__(self) -> None:
        if not isinstance(self.buffer, ReplayBuffer):
            raise TypeError(f"buffer: expected a ReplayBuffer, got {self.buffer!r}.")
        if not (self.mesh is None or isinstance(self.mesh, jax.sharding.Mesh)):
            raise TypeError(f"mesh: expected a jax.sharding.Mesh or None, got {self.mesh!r}.")
        checks.count("shards", self.shards)
        object.__setattr__(self, "shards", int(self.shards))
        self._check_divides("num_envs", self.buffer.num_envs or 1)
        if self.buffer.batch_size is not None:
            self._check_divides("batch_size", self.buffer.batch_size)
        if transforming.learning(self.buffer.transforms):
            raise ValueError(
                "transforms: expected none with a state, as each shard would learn another, got "
                f"{transforming.learning(self.buffer.transforms)[0]!r}. Let the learner do it."
            )
        if on_host(self.part):  # to make the part raises for what cannot be cut
            raise ValueError(
                f"storage: expected jrb.DeviceStorage(), got {self.buffer.storage!r}. Items on the "
                "host are for jrb.remote(buffer, shards=k), or for one buffer per process."
            )
        if self.mesh is not None:
            self.layout.devices()

    def _check_divides(self, name: str, value: int) -> None:
        if value % self.shards:
            raise ValueError(
                f"{name}: expected a multiple of {self.shards}, the number of shards, got {value}."
            )

    @property
    def part(self) -> ReplayBuffer:
        """The description of one shard."""
        whole, shards, sampler = self.buffer, self.shards, self.buffer.sampler
        sampler = whole.sampler
        return dataclasses.replace(
            whole,
            capacity=whole.capacity // shards,
            num_envs=whole.num_envs and whole.num_envs // shards,
            batch_size=whole.batch_size and whole.batch_size // shards,
            sampler=sampler.for_shard(shards) if isinstance(sampler, ShardedSampler) else sampler,
            min_size=None,
        )

    @property
    def batch_size(self) -> int | None:
        """B of all shards together."""
        return self.buffer.batch_size

    @property
    def layout(self) -> Layout:
        """The device that each shard is on."""
        return Layout(self.shards, self.mesh, self.axis)

    @property
    def _origin(self) -> str:
        """The origin of its samples."""
        return f"{self.shards} shards of {origin_of(self.buffer)}"

    def init(self, example: Item) -> Any:
        """Makes empty states, arrays `[S, ...]`, cut over the axis.

        Args:
            example: one transition, as for `ReplayBuffer.init`.

        Raises:
            TypeError, ValueError: as for `ReplayBuffer.init`.
        """
        leaves, structure = jax.tree.flatten(self.part._stored_spec(example))
        return _run(self.layout, bodies.blank, (self.part, structure, tuple(leaves)), (), 0, ())

    def nbytes(self, example: Item) -> int:
        """Returns the bytes of all shards together that `init(example)` allocates."""
        return self.shards * self.part.nbytes(example)

    def add(
        self,
        state: BufferState,
        item: Item,
        mask: jax.Array | None = None,
        priorities: jax.Array | None = None,
    ) -> Any:
        """Writes one timestep of all environments, leaves `[E, ...]`: see `ReplayBuffer.add`."""
        return self._add(_ADD, 0, state, item, mask, priorities)

    def extend(
        self,
        state: BufferState,
        items: Item,
        mask: jax.Array | None = None,
        priorities: jax.Array | None = None,
    ) -> Any:
        """Writes T timesteps, leaves `[T, E, ...]`: see `ReplayBuffer.extend`."""
        return self._add(_EXTEND, 1, state, items, mask, priorities)

    def _add(
        self, verb: _Verb, axis: int, state: BufferState, items: Item, mask: Any, priorities: Any
    ) -> Any:
        """Writes items whose environments are along an axis."""
        name = verb.method.__name__
        items = casting.accepted(items, name, self.buffer.cast)
        if self.buffer.num_envs is not None:
            envs = self.buffer.num_envs // self._devices_around()
            for path, leaf in jax.tree_util.tree_leaves_with_path(items):
                shape = jnp.shape(leaf)
                if len(shape) <= axis or shape[axis] != envs:
                    raise ValueError(
                        f"{name}: leaf '{pytree.leaf_name(path)}': expected axis {axis} to have "
                        f"{envs} environments, got shape {shape}. Give those of all shards."
                    )
        priorities = checks.given_numbers(f"{name}: priorities", priorities)
        pairs = (items, axis), (mask, _axis_of_mask(mask, axis)), (priorities, axis)
        return self._call(verb, state, *pairs)

    @wording.takes_state
    def sample(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
    ) -> Sample:
        """Draws a batch and leaves the state as it is; see `draw`."""
        return self._draw(state, key, batch_size, beta, moves=False)[1]

    @wording.takes_state
    def draw(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
    ) -> tuple[Any, Sample]:
        """Draws a batch, and moves on those samplers that consume.

        Args:
            state: may be donated.
            key: a PRNG key, the same for all shards. It is consumed.
            batch_size: B, a multiple of S; None for the buffer's.
            beta: of the importance weights, float `[]`, may be traced; None for the sampler's.

        Returns:
            The state, and the batch, cut over the axis: first what shard 0 drew, then shard 1, as
            `info["shard"]` says, int32 `[B]`. `indices` are slots of that shard; `probabilities`
            are those among the anchors of all shards.

        Raises:
            ValueError: as for `ReplayBuffer.draw`.
        """
        return self._draw(state, key, batch_size, beta)

    def _draw(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None,
        beta: jax.Array | float | None,
        quiet: bool = False,
        moves: bool = True,
    ) -> tuple[Any, Sample]:
        """`draw`; quiet, it may find nothing, as for a `Mix`; unless it moves, as `sample`."""
        self._check_state(state)
        batch_size = self.batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError(
                "batch_size: expected a number, got None. Give it to ReplayBuffer(batch_size=...), "
                "or to this call."
            )
        checks.count("batch_size", batch_size)
        self._check_divides("batch_size", int(batch_size))
        checks.key(key)
        beta = None if beta is None else checks.number("beta", beta)
        in_program = self._is_in_program(state, key)
        if not (quiet or in_program):
            can_sample = self.can_sample(state)
            if not eager.is_traced(can_sample) and not can_sample:
                raise ValueError(
                    f"sample: expected something to draw, got shards that hold {self.size(state)} "
                    "transitions, of which none can be drawn. Add items first; can_sample tells."
                )
        returns = ("state" if in_program else "sampler") if moves else "sample"
        size, out = int(batch_size) // self.shards, (0, 0) if moves else 0
        static = self.part, size, self.buffer.min_size, self._origin, returns
        drawn = _run(self.layout, bodies.draw, static, (0, None, None), out, (state, key, beta))
        if not moves:
            return state, drawn
        after, batch = drawn
        return after if in_program else state.replace(sampler=after), batch

    def update_priority(
        self, state: BufferState, sample_or_indices: Sample | jax.Array, priorities: jax.Array
    ) -> Any:
        """Sets priorities `[B]` for a `Sample`; or `[S, K]` for slots of each shard, int32.

        Those in the part of the batch of another shard are left alone: do not change their order.
        """
        priorities = checks.given_numbers("update_priority: priorities", priorities)
        return self._call_where(_UPDATE, state, sample_or_indices, (priorities, 0))

    def set_alpha(self, state: BufferState, alpha: jax.Array | float) -> Any:
        """Sets the exponent of the priorities: see `ReplayBuffer.set_alpha`."""
        return self._call(_SET_ALPHA, state, (checks.number("alpha", alpha), None))

    def truncate(self, state: BufferState, mask: jax.Array | None = None) -> Any:
        """Lets environments begin anew, bool `[E]` or `[]`: see `ReplayBuffer.truncate`."""
        return self._call(_TRUNCATE, state, (mask, _axis_of_mask(mask, 0)))

    def take(self, state: BufferState, indices: jax.Array) -> Item:
        """Returns the items at slots of each shard, `[S, ...]`: see `ReplayBuffer.take`."""
        return self._call(_TAKE, state, (indices, 0), splits=False)

    def set(
        self, state: BufferState, where: Sample | jax.Array | EllipsisType, values: Item
    ) -> Any:
        """Sets values of items that are held: see `ReplayBuffer.set`.

        Args:
            state: may be donated.
            where: a `Sample`; slots of each shard, int32 `[S, K]`; or `...` for all.
            values: any of the leaves, `[B, ...]`, `[S, K, ...]`, or `[S, N / S, ...]` for `...`.
        """
        values = casting.accepted(values, "set", self.buffer.cast)
        if where is ...:
            return self._call(_SET, state, (values, 0), options=(...,), splits=False)
        return self._call_where(_SET, state, where, (values, 0))

    def map(
        self, state: BufferState, function: Callable[[Item], Item], batch_size: int = 1024
    ) -> Any:
        """Puts a function over all items that are held: see `ReplayBuffer.map`."""
        return self._call(_MAP, state, options=(function, batch_size))

    def drop(self, state: BufferState, where: Sample | jax.Array) -> Any:
        """Takes anchors out of the draws: of a `Sample`, or at slots `[S, K]` of each shard."""
        return self._call_where(_DROP, state, where)

    def in_order(self, state: BufferState) -> tuple[jax.Array, jax.Array]:
        """Returns slots, int32 `[S, N / S]`, oldest first; and how many hold items, `[S]`."""
        return self._call(_IN_ORDER, state)

    def newest(self, state: BufferState, n: int) -> tuple[jax.Array, jax.Array]:
        """Returns the slots of the newest rows, int32 `[S, n, E / S]`; and which of them exist."""
        checks.count("n", n, self.part.ring.rows)
        return self._call(_NEWEST, state, options=(int(n),))

    def priorities(self, state: BufferState, slots: jax.Array | None = None) -> jax.Array:
        """Returns the priorities as they were given, `[S, N / S]`; or those of slots `[S, ...]`."""
        return self._call(_PRIORITIES, state, (slots, 0), splits=False)

    def size(self, state: BufferState) -> jax.Array:
        """Returns the transitions that all shards hold, int32 `[]`; at most 2^31 - 1."""
        self._check_state(state)
        return _run(self.layout, bodies.size, (self.part,), (0,), None, (state,))

    def can_sample(self, state: BufferState, batch_size: int | None = None) -> jax.Array:
        """Returns if a draw gives at least one item, bool `[]`.

        Args:
            state: is only read.
            batch_size: B of the draw; None for the buffer's.
        """
        self._check_state(state)
        size = self.batch_size if batch_size is None else batch_size
        static = self.part, size and size // self.shards, self.buffer.min_size
        return _run(self.layout, bodies.can_sample, static, (0,), None, (state,))

    def can_add(self, state: BufferState) -> jax.Array:
        """Returns if `add` would write to every shard, bool `[]`."""
        self._check_state(state)
        return _run(self.layout, bodies.can_add, (self.part,), (0,), None, (state,))

    def empty(self, state: BufferState) -> Any:
        """Returns the state without its items."""
        return self._call(_EMPTY, state)

    def in_each(
        self,
        function: Callable[..., Any],
        states: tuple[Any, ...],
        batches: tuple[Any, ...],
        merges: bool = False,
    ) -> Any:
        """Calls a function for each shard.

        Args:
            function: hashable, of arrays of one shard.
            states: its first arguments, arrays `[S, ...]`.
            batches: the others, arrays `[B, ...]` as from `draw`; each shard gets its part.
            merges: whether the results are parts of a batch, and not of a state.
        """
        static, arrays = (function, len(states), merges), (*states, *batches)
        return _run(self.layout, bodies.in_each, static, (0,) * len(arrays), 0, arrays)

    def _call_where(
        self, verb: _Verb, state: BufferState, where: Sample | jax.Array, *pairs: tuple[PyTree, Cut]
    ) -> Any:
        """Calls a verb for a sample of all shards; or for slots that have an axis of shards."""
        return self._call(verb, state, (where, 0), *pairs, splits=isinstance(where, Sample))

    def _call(
        self,
        verb: _Verb,
        state: BufferState,
        *pairs: tuple[PyTree, Cut],
        options: tuple[Any, ...] = (),
        splits: bool = True,
    ) -> Any:
        """Calls a verb in each shard.

        Args:
            verb: what to call.
            state: arrays `[S, ...]`.
            pairs: its arguments, and where each is cut.
            options: arguments that are no arrays.
            splits: whether arguments are of all shards; else they have an axis of shards.
        """
        self._check_state(state)
        returns_items = True
        if verb.changes and not self._is_in_program(state, pairs):
            # Outside `jit`, all that a compiled function returns is copied.
            returns_items = verb.changes == "items"
            if returns_items:
                warn_of_copies(self, state, 5)
        arguments = tuple(
            self._argument(verb, casting.copy_array(argument)) for argument, _ in pairs
        )
        is_shared = self.buffer.num_envs is None and verb.per_env
        cuts = tuple(None if argument is None or is_shared else cut for argument, cut in pairs)
        static = self.part, verb.method, options, cuts, splits, returns_items
        result = _run(self.layout, bodies.each, static, (0, *cuts), verb.out, (state, *arguments))
        return result if returns_items else result.replace(storage=state.storage)

    def _argument(self, verb: _Verb, argument: PyTree) -> Any:
        """Returns an argument as each shard takes it; raises for a sample of another buffer."""
        if not isinstance(argument, Sample):
            return argument
        if "shard" not in argument.info:
            raise ValueError(
                "expected a Sample of this Sharded, got one whose info has no 'shard'."
            )
        check_origin(verb.method.__name__, argument, self._origin)
        return argument.replace(origin=None)

    def _is_in_program(self, *arguments: PyTree) -> bool:
        """Returns if this is inside `jit` or `jax.shard_map`, where results are not copied."""
        return eager.is_traced(arguments) or self.layout.is_inside()

    def _devices_around(self) -> int:
        """Returns D inside a `jax.shard_map` over the axis, where arguments are parts; else 1."""
        return (self.layout.devices() or 1) if self.layout.is_inside() else 1

    def _check_state(self, state: BufferState) -> None:
        check_donated(state)
        expected = self.shards // self._devices_around()
        lead = jnp.shape(state.edits) if isinstance(state, BufferState) else None
        if lead != (expected,):
            raise ValueError(
                f"expected a state of {expected} shards, arrays [{expected}, ...], as init makes "
                "it, got "
                + (f"one with leading axes {lead}." if lead is not None else f"{type(state)}.")
            )


def _unpickled(buffer: ReplayBuffer, shards: int, mesh: NamedMesh | None, axis: str) -> Sharded:
    """Makes the description, on the devices of this program that have the same numbers."""
    return Sharded(buffer, shards, mesh_of(mesh), axis)


_run = explained(mesh.run)


def _axis_of_mask(mask: jax.Array | None, axis: int) -> Cut:
    """Returns the axis of a mask that is cut, if it has one of environments."""
    return axis if mask is not None and np.ndim(mask) > axis else None
