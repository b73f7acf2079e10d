"""One buffer in several shards, over the devices of a mesh."""

import dataclasses
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import (
    draws,
    eager,
    over_mesh,
    shard_bodies,
    transforming,
)
from jrb._core.over_mesh import Cut, Cuts, Layout
from jrb._core.shard_bodies import Bound
from jrb._util import (
    casting,
    checks,
    display,
    hints,
    meshes,
    owned,
    pytree,
)
from jrb._util.pytree import PyTree
from jrb.buffer import ReplayBuffer
from jrb.state import BufferState, Sample, check_origin, origin_of
from jrb.types import Item, ShardedSampler

Pairs = tuple[tuple[PyTree, Cut], ...]
"""Arguments of a verb, and where each is cut."""


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
        mesh = meshes.named(self.mesh)
        return _unpickled, (self.buffer, self.shards, mesh, self.axis)

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
        if eager.on_host(self.part):  # the part says what cannot be cut
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
        whole, shards = self.buffer, self.shards
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
        """Where the shards lie."""
        return Layout(self.shards, self.mesh, self.axis)

    @property
    def _origin(self) -> str:
        """The origin of its samples."""
        return f"{self.shards} shards of {origin_of(self.buffer)}"

    def init(self, example: Item) -> Any:
        """Empty states, arrays `[S, ...]`, cut over the axis; `example` is one transition.

        Raises:
            TypeError, ValueError: as for `ReplayBuffer.init`.
        """
        spec = self.part._stored_spec(example)
        leaves, structure = jax.tree.flatten(spec)
        return self._run(shard_bodies.Blank(self.part, structure, tuple(leaves)), (), 0, ())

    def nbytes(self, example: Item) -> int:
        """The bytes of all shards together that `init(example)` allocates."""
        return self.shards * self.part.nbytes(example)

    def add(
        self,
        state: BufferState,
        item: Item,
        mask: jax.Array | None = None,
        priorities: jax.Array | None = None,
    ) -> Any:
        """Writes one timestep of all environments, leaves `[E, ...]`: see `ReplayBuffer.add`."""
        item = self._accepted(item, "add", 0)
        priorities = checks.given_numbers("add: priorities", priorities)
        each = _axis(mask, 0)
        arguments = (item, 0), (mask, each), (priorities, 0)
        return self._write(ReplayBuffer.add, state, arguments)

    def extend(
        self,
        state: BufferState,
        items: Item,
        mask: jax.Array | None = None,
        priorities: jax.Array | None = None,
    ) -> Any:
        """Writes T timesteps, leaves `[T, E, ...]`: see `ReplayBuffer.extend`."""
        items = self._accepted(items, "extend", 1)
        priorities = checks.given_numbers("extend: priorities", priorities)
        each = _axis(mask, 1)
        arguments = (items, 1), (mask, each), (priorities, 1)
        return self._write(ReplayBuffer.extend, state, arguments)

    @hints.takes_state
    def sample(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
    ) -> Sample:
        """Draws a batch and leaves the state as it is; see `draw`."""
        return self._drawn(state, key, batch_size, beta, shard_bodies.Sampled, 0)

    @hints.takes_state
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
        return self._drawn(state, key, batch_size, beta, shard_bodies.Draw, (0, 0))

    def _drawn(
        self,
        state: BufferState,
        key: jax.Array,
        batch_size: int | None,
        beta: jax.Array | float | None,
        kind: type[shard_bodies.Draw],
        out: Cuts,
        quiet: bool = False,
    ) -> Any:
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
            self._check_something(state)
        if in_program or kind is not shard_bodies.Draw:
            return self._run_draw(kind, state, key, batch_size, beta, out)
        sampler, batch = self._run_draw(shard_bodies.Drawn, state, key, batch_size, beta, out)
        return draws.after_draw(state, sampler), batch

    def _run_draw(
        self,
        kind: type[shard_bodies.Draw],
        state: BufferState,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | None,
        out: Cuts,
    ) -> Any:
        size = int(batch_size) // self.shards
        body = kind(self.part, size, self.buffer.min_size, self._origin)
        return self._run(body, (0, None, None), out, (state, key, beta))

    def _is_in_program(self, *arguments: PyTree) -> bool:
        """Whether this is inside `jit` or `jax.shard_map`, where what is returned is not copied."""
        return eager.is_traced(arguments) or self.layout.is_inside()

    def _nothing(self, state: BufferState) -> ValueError:
        return ValueError(
            f"sample: expected something to draw, got shards that hold {self.size(state)} "
            "transitions, of which none can be drawn. Add items first; can_sample tells."
        )

    def _check_something(self, state: BufferState) -> None:
        found = self.can_sample(state)
        if not eager.is_traced(found) and not found:
            raise self._nothing(state)

    def update_priority(
        self, state: BufferState, sample_or_indices: Sample | jax.Array, priorities: jax.Array
    ) -> Any:
        """New priorities `[B]` for a `Sample`; or `[S, K]` for slots of each shard, int32.

        Those in the part of the batch of another shard are left alone: do not change their order.
        """
        priorities = checks.given_numbers("update_priority: priorities", priorities)
        cut = (sample_or_indices, 0), (priorities, 0)
        splits = isinstance(sample_or_indices, Sample)
        return self._write(ReplayBuffer.update_priority, state, cut, splits=splits)

    def set_alpha(self, state: BufferState, alpha: jax.Array | float) -> Any:
        """Another exponent of the priorities: see `ReplayBuffer.set_alpha`."""
        alpha = checks.number("alpha", alpha)
        return self._write(ReplayBuffer.set_alpha, state, ((alpha, None),))

    def truncate(self, state: BufferState, mask: jax.Array | None = None) -> Any:
        """Environments begin anew, bool `[E]` or `[]`: see `ReplayBuffer.truncate`."""
        return self._write(ReplayBuffer.truncate, state, ((mask, _axis(mask, 0)),))

    def take(self, state: BufferState, indices: jax.Array) -> Item:
        """The items at slots of each shard, integers `[S, ...]`: see `ReplayBuffer.take`."""
        return self._read(ReplayBuffer.take, state, ((indices, 0),))

    def set(
        self, state: BufferState, where: Sample | jax.Array | EllipsisType, values: Item
    ) -> Any:
        """Other values for items that are held: see `ReplayBuffer.set`.

        Args:
            state: may be donated.
            where: a `Sample`; slots of each shard, int32 `[S, K]`; or `...` for all.
            values: any of the leaves, `[B, ...]`, `[S, K, ...]`, or `[S, N / S, ...]` for `...`.
        """
        values = casting.accepted(values, "set", self.buffer.cast)
        if where is ...:
            return self._write(Bound(ReplayBuffer.set, (...,)), state, ((values, 0),), splits=False)
        pairs = (where, 0), (values, 0)
        return self._write(ReplayBuffer.set, state, pairs, splits=isinstance(where, Sample))

    def map(
        self, state: BufferState, function: Callable[[Item], Item], batch_size: int = 1024
    ) -> Any:
        """Puts a function over all items that are held: see `ReplayBuffer.map`."""
        body = Bound(ReplayBuffer.map, (function, batch_size))
        return self._write(body, state, ())

    def drop(self, state: BufferState, where: Sample | jax.Array) -> Any:
        """Anchors that are drawn no more, of a `Sample` or slots `[S, K]` of each shard."""
        splits = isinstance(where, Sample)
        return self._write(ReplayBuffer.drop, state, ((where, 0),), splits=splits)

    def in_order(self, state: BufferState) -> tuple[jax.Array, jax.Array]:
        """The slots of each shard, int32 `[S, N / S]`, oldest first; how many hold items `[S]`."""
        return self._read(ReplayBuffer.in_order, state, (), (0, 0))

    def newest(self, state: BufferState, n: int) -> tuple[jax.Array, jax.Array]:
        """The slots of the newest rows, int32 `[S, n, E / S]`; and which of them there are."""
        checks.count("n", n, self.part.ring.rows)
        return self._read(Bound(ReplayBuffer.newest, (int(n),)), state, (), (0, 0))

    def priorities(self, state: BufferState, slots: jax.Array | None = None) -> jax.Array:
        """The priorities as they were given, `[S, N / S]`; or those of slots `[S, ...]`."""
        return self._read(ReplayBuffer.priorities, state, ((slots, 0),))

    def size(self, state: BufferState) -> jax.Array:
        """The transitions that all shards hold, int32 `[]`; 2^31 - 1 if there are more."""
        self._check_state(state)
        return self._run(shard_bodies.Size(self.part), (0,), None, (state,))

    def can_sample(self, state: BufferState, batch_size: int | None = None) -> jax.Array:
        """Whether a draw gives at least one item, bool `[]`.

        Args:
            state: is only read.
            batch_size: B of the draw; None for the buffer's.
        """
        self._check_state(state)
        size = self.batch_size if batch_size is None else batch_size
        body = shard_bodies.CanSample(self.part, size and size // self.shards, self.buffer.min_size)
        return self._run(body, (0,), None, (state,))

    def can_add(self, state: BufferState) -> jax.Array:
        """Whether `add` would write to every shard, bool `[]`."""
        self._check_state(state)
        return self._run(shard_bodies.CanAdd(self.part), (0,), None, (state,))

    def empty(self, state: BufferState) -> Any:
        """The state without its items."""
        return self._write(ReplayBuffer.empty, state, ())

    def draw_some(
        self,
        state: BufferState,
        key: jax.Array,
        count: int,
        beta: jax.Array | float | None,
        quiet: bool,
    ) -> tuple[Any, Sample]:
        """`draw` for a `Mix`; quiet, it may find nothing."""
        return self._drawn(state, key, count, beta, shard_bodies.Draw, (0, 0), quiet)

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
        body = shard_bodies.InEach(function, len(states), merges)
        arguments = (*states, *batches)
        return self._run(body, (0,) * len(arguments), 0, arguments)

    def _accepted(self, items: Item, verb: str, axis: int) -> Item:
        """Items that have an axis of all environments that are here, as `jit` leaves them."""
        items = casting.accepted(items, verb, self.buffer.cast)
        if self.buffer.num_envs is None:
            return items
        envs = self.buffer.num_envs // self._devices_around()
        for path, leaf in jax.tree_util.tree_leaves_with_path(items):
            shape = jnp.shape(leaf)
            if len(shape) <= axis or shape[axis] != envs:
                raise ValueError(
                    f"{verb}: leaf '{pytree.leaf_name(path)}': expected axis {axis} to have "
                    f"{envs} environments, got shape {shape}. Give those of all shards."
                )
        return items

    def _devices_around(self) -> int:
        """D inside a `jax.shard_map` over the axis, where arguments are parts; else 1."""
        return (self.layout.devices() or 1) if self.layout.is_inside() else 1

    def _check_state(self, state: BufferState) -> None:
        eager.check_there(state)
        want = self.shards // self._devices_around()
        lead = jnp.shape(state.edits) if isinstance(state, BufferState) else None
        if lead != (want,):
            raise ValueError(
                f"expected a state of {want} shards, arrays [{want}, ...], as init makes it, got "
                + (f"one with leading axes {lead}." if lead is not None else f"{type(state)}.")
            )

    def _write(
        self, verb: Callable[..., Any], state: BufferState, pairs: Pairs, splits: bool = True
    ) -> Any:
        """A verb that gives a state; outside `jit`, items that it leaves alone stay here."""
        self._check_state(state)
        if not isinstance(state, BufferState) or self._is_in_program(state, pairs):
            return self._each(verb, state, pairs, 0, splits)
        if verb in _OF_PRIORITIES:
            after = self._each(verb, state, pairs, 0, splits, shard_bodies.WithoutItems)
            return after.replace(storage=state.storage)
        eager.warn_of_copies(self, state, 4)
        return self._each(verb, state, pairs, 0, splits)

    def _read(
        self, verb: Callable[..., Any], state: BufferState, pairs: Pairs, out: Cuts = 0
    ) -> Any:
        """A verb that gives something else."""
        self._check_state(state)
        return self._each(verb, state, pairs, out, False)

    def _each(
        self,
        verb: Callable[..., Any],
        state: BufferState,
        pairs: Pairs,
        out: Cuts,
        splits: bool,
        around: Callable[..., Any] | None = None,
    ) -> Any:
        """A verb of a buffer in each shard; on devices, with something around its body."""
        arguments = tuple(owned.copy(argument) for argument, _ in pairs)
        arguments = tuple(self._without_origin(verb, argument) for argument in arguments)
        alone = self.buffer.num_envs is None and splits and verb in _OF_ENVIRONMENTS
        cuts = tuple(None if argument is None or alone else cut for argument, cut in pairs)
        body = shard_bodies.Each(self.part, verb, cuts, splits)
        body = body if around is None else around(body)
        return self._run(body, (0, *cuts), out, (state, *arguments))

    def _without_origin(self, verb: Callable[..., Any], argument: PyTree) -> Any:
        """An argument as each shard takes it; raises for a sample that was drawn elsewhere."""
        if not isinstance(argument, Sample):
            return argument
        if "shard" not in argument.info:
            raise ValueError(
                "expected a Sample of this Sharded, got one whose info has no 'shard'."
            )
        check_origin(verb.__name__, argument, self._origin)
        return argument.replace(origin=None)

    def _run(
        self, body: Callable[..., Any], cuts: tuple[Cut, ...], out: Cuts, arguments: tuple
    ) -> Any:
        return _run(self.layout, body, cuts, out, arguments)


def _unpickled(buffer: ReplayBuffer, shards: int, mesh: meshes.Named | None, axis: str) -> Sharded:
    """The description, on the devices of this program that have the same numbers."""
    return Sharded(buffer, shards, meshes.found(mesh), axis)


_run = eager.explained(over_mesh.run)

_OF_ENVIRONMENTS = (ReplayBuffer.add, ReplayBuffer.extend, ReplayBuffer.truncate)
_OF_PRIORITIES = (
    ReplayBuffer.update_priority,
    ReplayBuffer.set_alpha,
    ReplayBuffer.truncate,
    ReplayBuffer.drop,
)


def _axis(mask: jax.Array | None, axis: int) -> Cut:
    """The axis of a mask that is cut, if it has one of environments."""
    return axis if mask is not None and np.ndim(mask) > axis else None
