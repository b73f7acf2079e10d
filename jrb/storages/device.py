"""The storage on the device: an array for each large leaf, and few for all small ones.

N capacity, E environments, M capacity of the pool of last observations.

With `share_next_observations`, a next observation that equals the next row's observation is not
stored twice. An array of observations has N + M + E rows: the ring, N; a pool of next observations
that differ from the next row's observation, M; and the next observations of the newest row, E.
When a row is written, its observations are compared, bit by bit, with the next observations of the
row before; those that differ move to the pool. Done flags are not used, so this is correct for
termination, truncation, automatic resets and concatenated data. The pool is first in, first out.
If it is full, the oldest rows are removed, up to the one whose pool entry is reused.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._core import packed
from jrb._util import checks, pytree
from jrb._util.pytree import Leaf
from jrb._xla import dependencies, gather
from jrb.keys import Keys, path_name
from jrb.ring import Ring
from jrb.types import AuxRead, Context, Item, SlotsForLeaf, Storage, WritePlan
from jrb.types.messages import PartState


@pytree.component
class DeviceStorage(Storage):
    """Keeps the leaves of the items in arrays `[N, ...]`, bit for bit.

    Leaves of up to a kilobyte whose elements have the same size are packed into one array, so that
    a draw or an add costs little more for many leaves than for few. `state.storage["action"]` is
    then a copy of that leaf, `[N, ...]`, and `state.storage.leaves` a copy of all leaves, a pytree
    like the items. Functions of `jax.tree`, and shardings of a state, see the packed arrays,
    `[N, W]`, where W is the number of elements of all these leaves. Shard them over N; results are
    the same if they are sharded over W, but devices exchange more data.

    The arrays hold rows in the order of slots. Where the unit reads windows (`jrb.Sequence`) and
    there are several environments, they are `[E, R, W]`, one environment after the other, so that
    a window is contiguous in memory; slots, views, draws and checkpoints do not depend on it.

    Attributes:
        share_next_observations: if True, a next observation that equals, bit for bit, the
            observation of the same environment's next row takes no memory of its own. Reads
            return exactly what was written. Rows must arrive in the order of time.
        terminal_capacity: with `share_next_observations`, the number of next observations that
            can be stored by themselves, mostly those at the ends of episodes: at least E, at most
            N. None for the larger of N / 32 and E. When more are needed, the oldest rows are
            removed early: `size` reports it, and `take` reads next observations only of slots
            that are held.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> frame = jnp.zeros((84, 84), jnp.uint8)
        >>> step = {"observation": frame, "next": {"observation": frame}}
        >>> plain = jrb.ReplayBuffer(10_000)
        >>> storage = jrb.DeviceStorage(share_next_observations=True)
        >>> shared = jrb.ReplayBuffer(10_000, storage=storage)
        >>> round(shared.nbytes(step) / plain.nbytes(step), 2)
        0.52
    """

    share_next_observations: bool = False
    terminal_capacity: int | None = None

    def __post_init__(self) -> None:
        checks.flag("share_next_observations", self.share_next_observations)
        if self.terminal_capacity is not None:
            checks.count("terminal_capacity", self.terminal_capacity)

    @property
    def requires_chronological(self) -> bool:
        """True if rows must come in the order of time."""
        return self.share_next_observations

    def init(self, context: Context, spec: Item) -> Any:
        """Returns arrays of zeros."""
        ring = context.ring
        if not self.share_next_observations:
            # Measured on a CPU, windows of 64 rows of 160 bytes in a ring of 10^6: an add and a
            # draw of 32 take 0.86 of the time with 16 environments, 0.73 with 64; adds cost the
            # same.
            in_runs = context.reads_windows and ring.envs > 1
            order = packed.RowOrder(ring.envs if in_runs else None)
            return packed.zeros(ring.capacity, spec, context, order)
        count = self.terminal_capacity
        if count is None:
            count = max(ring.capacity // 32, ring.envs)
        if count < ring.envs:
            raise ValueError(
                f"terminal_capacity: expected at least one for each of {ring.envs} environments, "
                f"got {count}."
            )
        count = min(count, ring.capacity)
        # Slots, entries of the pool and rows of the tail are numbered in one int32.
        if ring.capacity + count + ring.envs >= 2**31:
            raise ValueError(
                "capacity: expected, with terminal_capacity and num_envs, less than 2^31, got "
                f"{ring.capacity}."
            )
        return _init_shared(context, spec, count)

    def spec(self, state: PartState) -> Item:
        """Returns the spec of one item."""
        return packed.spec(self.slotted(state))

    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Writes a slice for consecutive slots, else a scatter of items. Gradients stop here."""
        if self.share_next_observations:
            return _write_shared(context, state, plan, items)
        return packed.put(state, plan, items)

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """Reads by one gather for each large leaf, and one for all small leaves of one size."""
        return self.read_with(context, state, where, [])[0]

    def read_with(
        self, context: Context, state: PartState, where: SlotsForLeaf, lookups: list[AuxRead]
    ) -> tuple[Item, list[jax.Array]]:
        """Reads items, and each of the lookups by one gather."""
        if self.share_next_observations:
            return _read_shared(context, state, where, lookups)
        return packed.get(state, where, lookups)

    def shares(self, context: Context, state: PartState, names: frozenset[str]) -> bool:
        """Returns True if any of these leaves is an observation that is stored once."""
        if not self.share_next_observations:
            return False
        twins = shared_leaves(packed.spec(state.items), context.keys)
        return bool(names & {*twins.keys(), *twins.values()})

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """Scatters new values of each leaf to slots, or replaces its whole array."""
        new = packed.edit(self.slotted(state), slots, values)
        return state.replace(items=new) if self.share_next_observations else new

    def slotted(self, state: PartState) -> Item:
        """Returns the items, without the arrays that locate shared next observations."""
        return state.items if self.share_next_observations else state


class SharedObservations(pytree.State):
    """The state of a storage in which rows share next observations with the rows after them."""

    items: Item  # as in a plain storage; observations have N + M + E rows, next observations none
    pointer: jax.Array  # int32 [N], the pool entry with a slot's next observation; -1 for none
    owner: jax.Array  # int32 [M], the slot whose next observation each pool entry is
    head: jax.Array = pytree.cursor()  # int32 [], the oldest entry
    count: jax.Array = pytree.tally()  # int32 [], the number of entries


def shared_leaves(spec: Item, keys: Keys) -> dict[str, str]:
    """Maps leaves of the next observation to leaves of the observation that hold their rows.

    Raises `ValueError` if there are none.
    """
    named = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
    twins = {name: keys.twin(name) for name in named}
    shared = {
        name: other
        for name, other in twins.items()
        if other in named and named[name] == named[other]
    }
    if not shared:
        raise ValueError(
            "share_next_observations: expected leaves at "
            f"'{path_name(keys.next_observation)}' like those at '{path_name(keys.observation)}', "
            f"got an item with the leaves {pytree.leaf_names(spec)}. Name them with "
            "keys=jrb.Keys(...)."
        )
    return shared


def _init_shared(context: Context, spec: Item, room: int) -> SharedObservations:
    """Returns a state without items, with a pool of `room` next observations."""
    ring = context.ring
    shared = shared_leaves(spec, context.keys)

    def zeros(path: tuple, leaf: Leaf) -> Any:
        name = pytree.leaf_name(path)
        # After the ring: the pool, and the tail with the next observations of the newest row.
        more = room + ring.envs if name in shared.values() else 0
        return packed.zeros_column(0 if name in shared else ring.capacity + more, leaf)

    return SharedObservations(
        items=jax.tree_util.tree_map_with_path(zeros, spec),
        pointer=jnp.full(ring.capacity, -1, jnp.int32),
        owner=jnp.zeros(room, jnp.int32),
        head=jnp.zeros((), jnp.int32),
        count=jnp.zeros((), jnp.int32),
    )


def _columns(items: Item) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(items, is_leaf=packed.is_column)
    return {pytree.leaf_name(path): column for path, column in pairs}


def _read_shared(
    context: Context, state: SharedObservations, where: SlotsForLeaf, lookups: Sequence[AuxRead]
) -> tuple[Item, list[jax.Array]]:
    """Reads each leaf by one gather; next observations from the array of observations."""
    shared = shared_leaves(packed.spec(state.items), context.keys)
    columns, slots_of = _columns(state.items), {}
    # Computed once for all leaves that are read at the same slots: `pointer` is gathered once.
    sources: dict[int, jax.Array] = {}  # of next observations, by the `id` of their slots
    for name in columns:
        slots = slots_of[name] = where(name)
        if name in shared:
            if id(slots) not in sources:
                sources[id(slots)] = next_observation_rows(context, state, slots)
            slots_of[name] = sources[id(slots)]

    def get(path: tuple, column: packed.Column) -> jax.Array:
        name = pytree.leaf_name(path)
        words = packed.stored_array(columns[shared.get(name, name)])
        return packed.from_words(gather.items_at(words, slots_of[name]), column.dtype)

    every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=packed.is_column)
    extra = lambda: [gather.items_at(it.array, it.slots) for it in lookups]
    return dependencies.materialize(lambda: (every(get, state.items), extra()))


def next_observation_rows(
    context: Context, state: SharedObservations, slots: jax.Array
) -> jax.Array:
    """Returns, for each slot, the row of the observation arrays that has its next observation."""
    ring = context.ring
    pointer = gather.read(state.pointer, slots)
    is_newest = context.held.after(ring, slots) <= 0
    tail = ring.capacity + state.owner.size + ring.env_of(slots)
    # It is the observation of the next row, in the pool, or, for the newest row, in the tail.
    later = jnp.where(pointer < 0, ring.slot_after(slots, ring.envs), ring.capacity + pointer)
    return jnp.where(is_newest, tail, later)


def _write_shared(
    context: Context, state: SharedObservations, plan: WritePlan, items: Item
) -> tuple[SharedObservations, WritePlan]:
    """Writes observations row by row, and all other leaves at once."""
    shared = shared_leaves(packed.spec(state.items), context.keys)
    new = {name: packed.to_words(leaf) for name, leaf in _columns(items).items()}
    old = _columns(state.items)
    both = {name: (after, new[name], new[after]) for after, name in shared.items()}
    before = context.held.rows(context.ring)[0]
    carry = ({name: packed.stored_array(old[name]) for name in both}, state, before)
    step = lambda t, carry: _write_row(context, plan, both, t, carry)
    # One row, as `add` writes it, needs no loop to be compiled.
    if plan.written.size == 1:
        arrays, state, num_rows = step(0, carry)
    else:
        arrays, state, num_rows = dependencies.loop(plan.written.size, step, carry)

    def put(path: tuple, column: packed.Column) -> packed.Column:
        name = pytree.leaf_name(path)
        if name in arrays:
            return packed.with_array(column, arrays[name])
        return column if name in shared else packed.put_column(column, plan, new[name])

    items = jax.tree_util.tree_map_with_path(put, state.items, is_leaf=packed.is_column)
    # Rows removed to free pool entries are expired; those of this call are not written at all.
    expired = before + plan.rows - num_rows
    stays = before + plan.passed > expired
    drop = lambda slots, stays: jnp.where(stays, slots, context.ring.capacity)
    plan = dataclasses.replace(
        plan,
        starts=drop(plan.starts, stays),
        slots=drop(plan.slots, stays[:, None]),
        expired=expired,
        bounded=False,
    )
    return state.replace(items=items), plan


def _write_row(context: Context, plan: WritePlan, both: Any, t: Any, carry: Any) -> Any:
    """Writes row t, after storing the next observation of the row before it.

    `context` is the one before the call. `both` maps the name of a leaf of the observation to the
    name of the leaf of the next one, and to the rows of both, `[T, E, ...]`.
    """
    arrays, state, num_rows = carry  # observations by name, and how many rows are held
    ring, room, is_written = context.ring, state.owner.size, plan.written[t]
    envs = jnp.arange(ring.envs, dtype=jnp.int32)
    tail, end = ring.capacity + room, ring.capacity + room + ring.envs  # `end` is out of range
    waited = jnp.minimum(state.head, 0)  # zero, not known before what earlier draws read
    cursor = context.held.next_row(ring)[0]  # of the first row of the call
    start = ring.row_after(cursor, plan.passed[t] - 1 + ring.rows) * ring.envs
    before = ring.slot_before(start, ring.envs) + envs

    # The next observation of the row before, which is in the tail, is compared with the observation
    # of this row. If they are equal, it need not be kept: the row that is written now holds it.
    has_before = is_written & (num_rows > 0)
    compared = [(arrays[name][tail:], one[t]) for name, (_, one, _) in both.items()]

    def differ() -> jax.Array:
        """Returns True for rows that differ in any bit, bool `[E]`."""
        bits = [(_integers(stored), _integers(new)) for stored, new in compared]
        unequal = [(stored != new).reshape(stored.shape[0], -1) for stored, new in bits]
        return jnp.any(jnp.stack([jnp.any(each, axis=1) for each in unequal]), axis=0)

    # Read once and before the tail is overwritten below.
    differs = has_before & dependencies.materialize(differ)
    state, num_rows = _make_room(ring, state, start, num_rows, is_written, differs)

    # If not, it moves from the tail to the pool, before the tail gets the new next observation.
    entry = (state.head + state.count + jnp.cumsum(differs, dtype=jnp.int32) - 1) % room
    to_pool = jnp.where(differs, ring.capacity + entry, end) + waited
    to_ring = jnp.where(is_written, start, end) + waited
    to_tail = jnp.where(is_written, tail, end) + waited
    stop = lax.stop_gradient
    for name, (_, one, after) in both.items():
        array = arrays[name]
        # Read out of the tail before it is written: `materialize` keeps the order.
        kept = lambda array=array: gather.items_at(array, tail + envs)
        array = array.at[to_pool].set(dependencies.materialize(kept), mode="drop")
        array = packed.put_blocks(array, to_ring[None], stop(one[t])[None])
        arrays = {**arrays, name: packed.put_blocks(array, to_tail[None], stop(after[t])[None])}
    settled = jnp.where(has_before, before, ring.capacity) + waited
    owned = jnp.where(differs, entry, room) + waited
    state = state.replace(
        pointer=state.pointer.at[settled].set(jnp.where(differs, entry, -1), mode="drop"),
        owner=state.owner.at[owned].set(before, mode="drop"),
        count=state.count + jnp.sum(differs, dtype=jnp.int32),
    )
    return arrays, state, num_rows + is_written.astype(jnp.int32)


def _make_room(
    ring: Ring,
    state: SharedObservations,
    start: jax.Array,
    num_rows: jax.Array,
    is_written: jax.Array,
    differs: jax.Array,
) -> tuple[SharedObservations, jax.Array]:
    """Frees what the new row, which begins at `start`, needs: its slots and entries of the pool.

    Each environment that `differs`, bool `[E]`, needs an entry; the oldest rows are removed until
    there are enough. Returns the state, and the number of rows that are still held.
    """
    room = state.owner.size
    first = jnp.arange(min(3 * ring.envs, room), dtype=jnp.int32)
    # Oldest first. At most E entries are needed, E - 1 more belong to the last row that is removed
    # for them, and E to the row that is overwritten: no more than 3 E are freed.
    owners = gather.read(state.owner, (state.head + first) % room)
    # How many rows older than the new one an owner is, 1 to R.
    age = (start - owners - 1 + ring.capacity) % ring.capacity // ring.envs + 1
    entries = first < state.count
    most = jnp.where(is_written, ring.rows - 1, ring.rows)  # without the new row
    needed = state.count + jnp.sum(differs, dtype=jnp.int32) - room
    limit = jnp.min(jnp.where(entries & (first < needed), age - 1, ring.rows))
    kept = jnp.minimum(jnp.minimum(num_rows, most), limit)
    leaves = jnp.sum(entries & (age > kept), dtype=jnp.int32)
    return state.replace(head=(state.head + leaves) % room, count=state.count - leaves), kept


def _integers(leaf: jax.Array) -> jax.Array:
    """Returns a leaf as integers with the same bits, which are equal only if the bits are."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([_integers(leaf.real), _integers(leaf.imag)], axis=-1)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        # Compared as floats, NaN would differ from itself, and 0.0 would equal -0.0.
        width = jnp.finfo(leaf.dtype).bits
        return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}"))
    return leaf
