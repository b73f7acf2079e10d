"""A buffer of several shards, over the devices of a mesh."""

import contextlib
import dataclasses
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrb._core import eager, memory, steps, transforming
from jrb._core.lengths import lengths_of
from jrb._core.methods import METHODS
from jrb._core.validate import (
    accept_items,
    check_donated,
    check_state_argument,
    copy_array,
    explain_jax_error,
    on_host,
    warn_of_copies,
)
from jrb._util import casting, checks, display, pytree
from jrb._util.pytree import Leaf, PyTree
from jrb._xla.compiling import kept_by_description
from jrb.buffer import ReplayBuffer, draw_arguments
from jrb.sharding import joint, mesh
from jrb.sharding.mesh import Cut, Layout
from jrb.state import BufferState, Memory, Sample, check_origin
from jrb.types import Item, ShardedSampler
from jrb.types.messages import Array, DrawInputs, PRNGKey

_run = explain_jax_error(mesh.run)


@pytree.component
class Sharded:
    """A buffer of S shards, each an ordinary buffer of N / S slots and E / S environments.

    Its methods are those of a buffer, on arrays that are cut over an axis of a mesh: states have a
    leading axis `[S, ...]`, items have all environments, batches are as for one buffer. Results
    depend on S, not on the number of devices D, which divides S: shard s draws with the key
    `jax.random.fold_in(key, s)`. Methods work outside and inside `jit`, and inside a
    `jax.shard_map` over the axis, where each device passes its part of every argument and one key.

    A mean of `weights * loss` over a batch has the same expectation as with a single buffer. Each
    shard draws B / S of its own anchors, and the weights correct for its share of the mass: they
    are `(n P_i)^-beta S M_s / M`, with P_i the probability of anchor i among all n, M_s the mass of
    its shard and M that of all. If a shard has nothing to draw, its part of the batch is masked,
    and the others get larger weights. Samplers that consume do so in each shard separately, and
    have no weights.

    Only `draw` and `sample` communicate between devices: a few numbers of each shard, in one
    `all_gather`, and with `normalize="batch"` one maximum. `jrb.MaxValue` and `jrb.Reservoir` keep
    the best items, or a sample, of each shard.

    N capacity, E environments, B batch, S shards, D devices.

    Items are on the devices. Storages on the host (`jrb.MemmapStorage`, `jrb.SpillStorage`) are
    refused: `jrb.remote.serve(buffer, example, streams=k, shards=k)` serves such a buffer.

    Attributes:
        buffer: the description of the whole buffer.
        shards: S, the number of shards, which divides E and B.
        mesh: None for the mesh that is set around a call (`jax.set_mesh`); without one, all shards
            are on one device. After unpickling, it has the devices with the same numbers.
        axis: the axis of the mesh over which the shards are cut.

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
        return display.format_code(self)

    _repr_html_ = display.tree_html

    def __reduce__(self) -> Any:
        # Devices cannot be pickled: keep the numbers of those of the mesh.
        named = None
        if self.mesh is not None:
            ids = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices).tolist()
            platform = self.mesh.devices.flat[0].platform
            named = platform, ids, tuple(self.mesh.axis_names), self.mesh.axis_types
        return _unpickle_sharded, (self.buffer, self.shards, named, self.axis)

    def __post_init__(self) -> None:
        if not isinstance(self.buffer, ReplayBuffer):
            raise TypeError(f"buffer: expected a ReplayBuffer, got {self.buffer!r}.")
        if not (self.mesh is None or isinstance(self.mesh, jax.sharding.Mesh)):
            raise TypeError(f"mesh: expected a jax.sharding.Mesh or None, got {self.mesh!r}.")
        # Check that everything can be divided among the shards.
        checks.count("shards", self.shards)
        self._check_divides("num_envs", self.buffer.num_envs or 1)
        if self.buffer.batch_size is not None:
            self._check_divides("batch_size", self.buffer.batch_size)
        stateful = transforming.stateful_transforms(self.buffer.transforms)
        if stateful:
            raise ValueError(
                "transforms: expected none with a state, as each shard would learn another, got "
                f"{stateful[0]!r}. Let the learner do it."
            )
        # To make the part raises for what cannot be cut.
        if on_host(self.part):
            raise ValueError(
                f"storage: expected jrb.DeviceStorage(), got {self.buffer.storage!r}. Use one "
                "buffer per process, or jrb.remote.serve(buffer, example, streams=k, shards=k)."
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
        return _part_of(self)

    @property
    def batch_size(self) -> int | None:
        """B, the size of batches from all shards together."""
        return self.buffer.batch_size

    @property
    def layout(self) -> Layout:
        """The device that each shard is on."""
        return Layout(self.shards, self.mesh, self.axis)

    @property
    def _origin(self) -> str:
        return f"{self.shards} shards of {steps.origin_of(self.buffer)}"

    def init(self, example: Item) -> Any:
        """Returns empty states, arrays `[S, ...]`, cut over the axis: see `ReplayBuffer.init`."""
        leaves, structure = jax.tree.flatten(self.part._stored_spec(example))
        return _run(self, self.layout, joint.init, (self.part, structure, tuple(leaves)), (), 0, ())

    def nbytes(self, example: Item, where: Memory = None) -> int:
        """Returns the bytes that `init(example)` allocates in all shards: see `ReplayBuffer`."""
        return self.shards * self.part.nbytes(example, where)

    def add(
        self,
        state: BufferState,
        item: Item,
        mask: Array | None = None,
        priorities: Array | None = None,
    ) -> Any:
        """Writes one timestep of all environments, leaves `[E, ...]`: see `ReplayBuffer.add`."""
        return self._write("add", 0, state, item, mask, priorities)

    def extend(
        self,
        state: BufferState,
        items: Item,
        mask: Array | None = None,
        priorities: Array | None = None,
    ) -> Any:
        """Writes T timesteps, leaves `[T, E, ...]`: see `ReplayBuffer.extend`."""
        return self._write("extend", 1, state, items, mask, priorities)

    def _write(
        self, name: str, axis: int, state: BufferState, items: Item, mask: Any, priorities: Any
    ) -> Any:
        """Writes items that have an axis of environments, `axis`."""
        # Check that the items have all environments.
        items = accept_items(items, name, self.buffer.cast)
        if self.buffer.num_envs is not None:
            # Inside a `jax.shard_map`, each device passes its own environments.
            devices = (self.layout.devices() or 1) if self.layout.is_inside() else 1
            envs = self.buffer.num_envs // devices
            for path, leaf in jax.tree_util.tree_leaves_with_path(items):
                shape = jnp.shape(leaf)
                if len(shape) <= axis or shape[axis] != envs:
                    raise ValueError(
                        f"{name}: leaf '{pytree.leaf_name(path)}': expected axis {axis} to have "
                        f"{envs} environments, got shape {shape}. Give those of all shards."
                    )
        # Pad the timesteps of an `extend`, so that few lengths are compiled, and write.
        priorities = checks.given_numbers(f"{name}: priorities", priorities)
        lengths = contextlib.nullcontext((items, mask, priorities))
        if name == "extend":
            lengths = lengths_of(self).pad_arguments(state, items, mask, priorities)
        with lengths as (items, mask, priorities):
            pairs = (items, axis), (mask, _axis_of_mask(mask, axis)), (priorities, axis)
            return self._call(name, state, *pairs)

    @check_state_argument
    def sample(
        self,
        state: BufferState,
        key: PRNGKey,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        context: Any = None,
    ) -> Sample:
        """Samples a batch and leaves the state as it is; see `draw`."""
        inputs = DrawInputs(beta, context)
        return self._draw(state, key, batch_size, inputs, moves=False)[1]

    @check_state_argument
    def draw(
        self,
        state: BufferState,
        key: PRNGKey,
        batch_size: int | None = None,
        beta: jax.Array | float | None = None,
        context: Any = None,
    ) -> tuple[Any, Sample]:
        """Samples a batch, and advances samplers that consume.

        Args:
            state: may be donated.
            key: a PRNG key, the same for all shards. It is consumed.
            batch_size: B, a multiple of S; None for the buffer's.
            beta: the exponent of the weights, float `[]`, may be traced; None for the sampler's.
            context: a pytree of arrays or numbers, may be traced, for samplers that take one, such
                as `jrb.Weighted`; else None.

        Returns:
            The state; and the batch, cut over the axis: the part of shard 0, then that of shard 1,
            and so on. `info["shard"]`, int32 `[B]`, is the shard of each item, `indices` its slot
            there, and `probabilities` are those among the anchors of all shards.

        Raises:
            ValueError: as for `ReplayBuffer.draw`.
        """
        return self._draw(state, key, batch_size, DrawInputs(beta, context))

    def _draw(
        self,
        state: BufferState,
        key: PRNGKey,
        batch_size: int | None,
        inputs: DrawInputs,
        quiet: bool = False,
        moves: bool = True,
    ) -> tuple[Any, Sample]:
        """Does `draw`, or `sample` unless `moves`; if `quiet`, there may be nothing to draw."""
        # Outside `jit`, raise if there is nothing to draw.
        self._check_state(state)
        count, inputs = draw_arguments(
            [self.buffer.sampler], self.batch_size, key, batch_size, inputs
        )
        self._check_divides("batch_size", count)
        in_program = self._is_in_program(state, key)
        if not (quiet or in_program):
            can_sample = self.can_sample(state)
            if not eager.is_traced(can_sample) and not can_sample:
                static = self.part, steps.num_anchors, (), (), False, True
                counts = _run(self, self.layout, joint.call_method, static, (0,), 0, (state,))
                size, anchors = int(self.size(state)), int(jnp.sum(counts))
                text = eager.explain_no_draw(self.buffer, size, anchors)
                raise ValueError(f"sample: {text}")
        # A compiled function copies the items that it returns, so it returns no more than changes.
        returns = ("state" if in_program else "sampler") if moves else "sample"
        static = self.part, count // self.shards, self.buffer.min_size, self._origin, returns
        cuts, out = (0, None, None), (0, 0) if moves else 0
        result = _run(self, self.layout, joint.draw, static, cuts, out, (state, key, inputs))
        if not moves:
            return state, result
        after, batch = result
        return after if in_program else state.replace(sampler=after), batch

    def update_priority(
        self, state: BufferState, sample_or_indices: Sample | Array, priorities: Array
    ) -> Any:
        """Sets priorities `[B]` for a `Sample`; or `[S, K]` for slots of each shard, int32.

        Keep the order of the sample: entries in the part of another shard are ignored.
        """
        priorities = checks.given_numbers("update_priority: priorities", priorities)
        pairs = (sample_or_indices, 0), (priorities, 0)
        splits = isinstance(sample_or_indices, Sample)
        return self._call("update_priority", state, *pairs, splits=splits)

    def set_alpha(self, state: BufferState, alpha: jax.Array | float) -> Any:
        """Sets the exponent of the priorities: see `ReplayBuffer.set_alpha`."""
        return self._call("set_alpha", state, (checks.number("alpha", alpha), None))

    def truncate(self, state: BufferState, mask: Array | None = None) -> Any:
        """Ends episodes of environments, bool `[E]` or `[]`: see `ReplayBuffer.truncate`."""
        return self._call("truncate", state, (mask, _axis_of_mask(mask, 0)))

    def take(self, state: BufferState, indices: jax.Array) -> Item:
        """Returns the items at slots of each shard, `[S, ...]`: see `ReplayBuffer.take`."""
        return self._call("take", state, (indices, 0), splits=False)

    def set(
        self, state: BufferState, where: Sample | jax.Array | EllipsisType, values: Item
    ) -> Any:
        """Sets leaves of stored items: see `ReplayBuffer.set`.

        Args:
            state: may be donated.
            where: a `Sample`; slots of each shard, int32 `[S, K]`; or `...` for all.
            values: some of the leaves, `[B, ...]`, `[S, K, ...]`, or `[S, N / S, ...]` for `...`.
        """
        values = accept_items(values, "set", self.buffer.cast)
        if where is ...:
            return self._call("set", state, (values, 0), options=(...,), splits=False)
        splits = isinstance(where, Sample)
        return self._call("set", state, (where, 0), (values, 0), splits=splits)

    def map(
        self, state: BufferState, function: Callable[[Item], Item], batch_size: int = 1024
    ) -> Any:
        """Applies a function to all stored items: see `ReplayBuffer.map`."""
        return self._call("map", state, options=(function, batch_size))

    def drop(self, state: BufferState, where: Sample | jax.Array) -> Any:
        """Excludes the anchors of a `Sample`, or at slots `[S, K]`: see `ReplayBuffer.drop`.

        A mask is bool `[S, N / S]`.
        """
        self._check_state(state)
        if isinstance(where, jax.Array | np.ndarray) and where.dtype == np.bool_:
            # Inside a `jax.shard_map`, the state has the shards of one device only.
            shape = *jnp.shape(state.edits), self.part.capacity
            where = checks.mask("drop", where, shape, "which slots of each shard are dropped")
        return self._call("drop", state, (where, 0), splits=isinstance(where, Sample))

    def in_order(self, state: BufferState) -> tuple[jax.Array, jax.Array]:
        """Returns slots, int32 `[S, N / S]`, oldest first; and the numbers of items, `[S]`."""
        return self._call("in_order", state)

    def newest(self, state: BufferState, n: int) -> tuple[jax.Array, jax.Array]:
        """Returns the slots of the newest rows, int32 `[S, n, E / S]`, and True for those held."""
        checks.count("n", n, self.part.ring.rows)
        return self._call("newest", state, options=(int(n),))

    def priorities(self, state: BufferState, slots: jax.Array | None = None) -> jax.Array:
        """Returns the priorities as they were set, `[S, N / S]`; or those of slots `[S, ...]`."""
        return self._call("priorities", state, (slots, 0), splits=False)

    def size(self, state: BufferState) -> jax.Array:
        """Returns the number of transitions in all shards, int32 `[]`; at most 2^31 - 1."""
        self._check_state(state)
        return _run(self, self.layout, joint.size, (self.part,), (0,), None, (state,))

    def can_sample(self, state: BufferState, batch_size: int | None = None) -> jax.Array:
        """Returns True if `sample` gives at least one item: see `ReplayBuffer.can_sample`."""
        self._check_state(state)
        size = self.batch_size if batch_size is None else batch_size
        static = self.part, size and size // self.shards, self.buffer.min_size
        return _run(self, self.layout, joint.can_sample, static, (0,), None, (state,))

    def can_add(self, state: BufferState) -> jax.Array:
        """Returns True if `add` would write to every shard, bool `[]`."""
        self._check_state(state)
        return _run(self, self.layout, joint.can_add, (self.part,), (0,), None, (state,))

    def empty(self, state: BufferState) -> Any:
        """Returns the state without items."""
        return self._call("empty", state)

    def in_each(
        self,
        function: Callable[..., Any],
        states: tuple[Any, ...],
        batches: tuple[Any, ...],
        merges: bool = False,
    ) -> Any:
        """Calls a function for each shard.

        Args:
            function: a hashable function of arrays of one shard.
            states: its first arguments, arrays `[S, ...]`.
            batches: the others, arrays `[B, ...]` as from `draw`; each shard gets its part.
            merges: True if the results are parts of a batch, and not of a state.
        """
        static, arrays = (function, len(states), merges), (*states, *batches)
        return _run(self, self.layout, joint.in_each, static, (0,) * len(arrays), 0, arrays)

    # States of single shards.

    def names(self) -> list[str]:
        """Returns a name for each shard, in order."""
        return [f"{number:0{len(str(self.shards - 1))}}" for number in range(self.shards)]

    def split(self, state: Any) -> dict[int, BufferState]:
        """Returns the states of the shards that this process has, by number.

        No array moves from one device to another.

        Raises:
            ValueError: the state does not have S shards.
        """
        num_shards = self.shards
        leaves, structure = jax.tree.flatten(state)
        # The items are large: their shards are copied only when they are read.
        item_ids = set(map(id, jax.tree.leaves(state.storage)))
        parts = []
        for leaf in leaves:
            if not np.ndim(leaf) or np.shape(leaf)[0] != num_shards:
                raise ValueError(
                    f"expected a state of {num_shards} shards, arrays [{num_shards}, ...], got one "
                    f"with an array of shape {np.shape(leaf)}."
                )
            parts.append(_shards_of(leaf, id(leaf) in item_ids))
        # A process of several has some shards of each array, and may have small arrays whole.
        numbers = sorted(set.intersection(*map(set, parts)))
        return {
            number: jax.tree.unflatten(structure, [part[number] for part in parts])
            for number in numbers
        }

    def join(self, states: dict[int, BufferState]) -> Any:
        """Returns the state of all shards, given the states that this process has, by number.

        Args:
            states: the states, each on the device of its shard or on the host.
        """
        if self.mesh is None:
            each = [states[number] for number in range(self.shards)]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axis))
        groups = self.layout.groups()

        def join_leaf(*leaves: Any) -> jax.Array:
            by_number = dict(zip(states, leaves, strict=True))
            # Stack the shards of each device there; a single one only gets an axis.
            pieces = []
            for device, numbers in groups.items():
                parts = [jax.device_put(by_number[number], device) for number in numbers]
                pieces.append(jnp.expand_dims(parts[0], 0) if len(parts) == 1 else jnp.stack(parts))
            shape = (self.shards, *leaves[0].shape)
            return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

        return jax.tree.map(join_leaf, *states.values())

    def on_mesh(self, device: Any) -> Self:
        """Returns the description with the mesh `device`, or itself for None; else raises."""
        if device is None:
            return self
        if not isinstance(device, jax.sharding.Mesh):
            raise TypeError(
                "load: device: expected a mesh for a checkpoint of shards, got "
                f"{type(device).__name__}. Pass the mesh whose axis {self.axis!r} they go over."
            )
        return dataclasses.replace(self, mesh=device)

    def _call(
        self,
        name: str,
        state: BufferState,
        *pairs: tuple[PyTree, Cut],
        options: tuple[Any, ...] = (),
        splits: bool = True,
    ) -> Any:
        """Calls a method of the buffer in each shard.

        `pairs` are the array arguments, each with its axis that is cut over shards; `options` are
        other arguments. If `splits` is False, arrays have an axis of shards already.
        """
        # Outside `jit`, a compiled function copies all that it returns: leave out unchanged items.
        self._check_state(state)
        method, returns_items = METHODS[name], True
        if method.changes and not self._is_in_program(state, pairs):
            returns_items = method.changes == "items"
            if returns_items:
                warn_of_copies(self, state, 5 if name in ("add", "extend") else 4)
        # Check that samples are of this buffer; the compiled function gets them without the origin.
        arguments = []
        for argument, _ in pairs:
            if isinstance(argument, Sample):
                if "shard" not in argument.info:
                    raise ValueError(
                        "expected a Sample of this Sharded, got one whose info has no 'shard'."
                    )
                check_origin(name, argument, self._origin)
                argument = argument.replace(origin=None)
            arguments.append(copy_array(argument))
        # Cut the arguments. A buffer without environments writes the same rows to each shard.
        is_shared = self.buffer.num_envs is None and method.per_env
        cuts = tuple(None if argument is None or is_shared else cut for argument, cut in pairs)
        call = getattr(ReplayBuffer, name)
        static = self.part, call, options, cuts, splits, returns_items
        arrays, out = (state, *arguments), 0 if method.num_results == 1 else (0, 0)
        result = _run(self, self.layout, joint.call_method, static, (0, *cuts), out, arrays)
        return result if returns_items else result.replace(storage=state.storage)

    def _is_in_program(self, *arguments: PyTree) -> bool:
        """Returns True inside `jit` or `jax.shard_map`, where results are not copied."""
        return eager.is_traced(arguments) or self.layout.is_inside()

    def _check_state(self, state: BufferState) -> None:
        check_donated(state)
        # Inside a `jax.shard_map` a state has the shards of one device only.
        devices = (self.layout.devices() or 1) if self.layout.is_inside() else 1
        expected = self.shards // devices
        lead = jnp.shape(state.edits) if isinstance(state, BufferState) else None
        if lead != (expected,):
            got = f"{type(state)}" if lead is None else f"one with leading axes {lead}"
            raise ValueError(
                f"expected a state of {expected} shards, arrays [{expected}, ...], as init makes "
                f"it, got {got}."
            )


@kept_by_description
def _part_of(sharded: Sharded) -> ReplayBuffer:
    buffer, shards, sampler = sharded.buffer, sharded.shards, sharded.buffer.sampler
    return dataclasses.replace(
        buffer,
        capacity=buffer.capacity // shards,
        num_envs=buffer.num_envs and buffer.num_envs // shards,
        batch_size=buffer.batch_size and buffer.batch_size // shards,
        sampler=sampler.for_shard(shards) if isinstance(sampler, ShardedSampler) else sampler,
        min_size=None,
    )


def _unpickle_sharded(buffer: ReplayBuffer, shards: int, named: Any, axis: str) -> Sharded:
    """Returns the description on a mesh of this program's devices with the same numbers.

    `named` is the platform of the mesh's devices, their numbers, and the names and types of its
    axes; None without a mesh.
    """
    if named is None:
        return Sharded(buffer, shards, None, axis)
    platform, ids, names, types = named
    # Look up the devices of the mesh by their numbers.
    try:
        devices = {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # no such platform
        devices = {}
    missing = sorted({*np.ravel(ids).tolist()} - devices.keys())
    if missing:
        raise ValueError(
            f"mesh: expected the devices {missing} of {platform!r} that it was made of, got "
            f"a program with {sorted(devices)}. Pickle the description with mesh=None, and give it "
            "a mesh where it is used: dataclasses.replace(sharded, mesh=mesh)."
        )
    chosen = np.vectorize(devices.get, otypes=[object])(np.array(ids))
    return Sharded(buffer, shards, jax.sharding.Mesh(chosen, names, axis_types=types), axis)


def _axis_of_mask(mask: Array | None, axis: int) -> Cut:
    """Returns the axis of environments of a mask, which is cut; None if it has none."""
    return axis if mask is not None and np.ndim(mask) > axis else None


def _shards_of(leaf: Leaf, is_large: bool) -> dict[int, Any]:
    """Returns the shards of an array that this process has, by number.

    On the CPU they are not copied; those of a large array on a device are copied when read.
    """
    if isinstance(leaf, np.ndarray):
        return dict(enumerate(leaf))
    shards = {}
    # Each piece is on one device, and has the shards from `first` on.
    for piece in leaf.addressable_shards:
        array, first = piece.data, piece.index[0].start or 0
        for index in range(array.shape[0]):
            if casting.is_keys(array.dtype):
                shard = array[index]
            elif memory.on_host(array):
                shard = np.asarray(array)[index]
            else:
                shard = memory.Part(array, index) if is_large else array[index]
            # Devices of a mesh with further axes have copies of the same shards.
            shards.setdefault(first + index, shard)
    return shards
