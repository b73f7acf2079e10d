"""Where episodes begin and end, from the done flags of what is written.

N capacity, E environments, R = N / E rows, T time, B batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core import rows
from jrb._util import pytree
from jrb._xla import dependencies, random_bits
from jrb.keys import Keys, lookup, path_name
from jrb.occupancy import lane_of
from jrb.ring import Ring
from jrb.types import Anchors, AnchorUpdate, Context, Item, WritePlan

_STARTS = 1  # the number that `bits.fold` gets for starts within episodes


def check(spec: Item, keys: Keys, is_needed: bool = True) -> None:
    """Raises unless the items say where episodes end: by flags, of one number each, or a number.

    Items that say nothing of it are an error only where that `is_needed`.
    """
    for role, name in keys.unnamed(spec).items():
        path = tuple(name.split("/")) if lookup(spec, name) is None else name
        raise ValueError(
            f"{role}: leaf '{name}': expected a leaf that keys= names, got one that it does not, "
            f"while nothing lies at '{path_name(getattr(keys, role))}'. Name it with "
            f"keys=jrb.Keys({role}={path!r}); or write {role}=None if it is something else."
        )
    is_needed = is_needed and keys.episode is None
    flags = _flags(spec, keys) if is_needed else keys.flags(spec)
    for name, flag in flags.items():
        where = f"done: leaf '{name}'"
        if flag.shape not in ((), (1,)):
            raise ValueError(
                f"{where}: expected shape () or (1,) for one transition, got {flag.shape}. "
                "Reduce it: an episode ends for an environment as a whole."
            )
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(flag.dtype, kind) for kind in kinds):
            raise TypeError(
                f"{where}: expected a bool, integer or floating dtype, got {flag.dtype}. "
                "Compare it, as done > 0."
            )


def no_numbers(ring: Ring, spec: Item, keys: Keys) -> jax.Array | None:
    """Zeros in place of the numbers of episodes, `[E]`; None if items are not known to have any.

    Raises:
        ValueError, TypeError: there is no such leaf, or it is not one integer.
    """
    if keys.episode is None:
        return None
    leaf, where = keys.get(spec, "episode"), f"episode: leaf '{path_name(keys.episode)}'"
    if not pytree.is_array(leaf) or leaf.shape not in ((), (1,)):
        found = leaf.shape if pytree.is_array(leaf) else pytree.leaf_names(leaf)
        raise ValueError(
            f"{where}: expected shape () or (1,) for one transition, got {found}. An episode has "
            "one number."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        raise TypeError(f"{where}: expected an integer dtype, got {leaf.dtype}. Count episodes.")
    return jnp.zeros(ring.envs, leaf.dtype)


def changes(
    items: Item, keys: Keys, written: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the numbers of episodes change from one row to the next of the same environment.

    Args:
        items: leaves `[T, E, ...]`.
        keys: how they are keyed.
        written: bool `[T, 1]` or `[T, E]`, the rows of time that pass.
        before: integers `[E]`, the numbers of the rows before them.

    Returns:
        Which rows are followed by one of another number, bool `[T, E]`; whether that holds for the
        row before them, bool `[E]`; and the numbers of the last rows that pass, like `before`.
    """
    numbers = keys.get(items, "episode")
    numbers = numbers.reshape(numbers.shape[:2])
    length, env = numbers.shape[0], jnp.arange(numbers.shape[1], dtype=jnp.int32)
    row = jnp.arange(length, dtype=jnp.int32)[:, None]
    last = lax.cummax(jnp.where(written, row, -1) + jnp.zeros_like(env), axis=0)
    earlier = jnp.concatenate([jnp.full_like(last[:1], -1), last[:-1]])
    number = lambda at: jnp.where(at < 0, before, numbers[jnp.maximum(at, 0), env])
    changed = written & (numbers != number(earlier))
    at = jnp.where(changed & (earlier >= 0), earlier, length)
    cuts = jnp.zeros(numbers.shape, jnp.bool_).at[at, env].set(True, mode="drop")
    return cuts, jnp.any(changed & (earlier < 0), axis=0), number(last[-1])


def ends(items: Item, keys: Keys, lead: int = 2) -> jax.Array:
    """Which rows end an episode: those of which any flag that the items have is not zero.

    Args:
        items: leaves `[T, E, ...]`.
        keys: how they are keyed.
        lead: how many axes come before those of an item.

    Returns:
        Bool `[T, E]`.
    """
    _flags(items, keys)
    is_set = lambda flag: (flag != jnp.zeros((), flag.dtype)).reshape(flag.shape[:lead])
    return keys.ends(items, is_set)


def ending(context: Context, write: WritePlan, items: Item) -> jax.Array:
    """Which rows of a write are the last of their episodes: by their flags, or cut off by it.

    Items without any flag end by cuts alone.

    Args:
        context: of the buffer.
        write: of these rows.
        items: leaves `[T, E, ...]`.

    Returns:
        Bool `[T, E]`.
    """
    flagged = bool(context.keys.flags(items))
    done = ends(items, context.keys) if flagged else jnp.zeros(write.slots.shape, jnp.bool_)
    return done if write.cuts is None else done | write.cuts


def _flags(item: Item, keys: Keys) -> dict[str, jax.Array]:
    """The flags that say where episodes end, by name; at least one."""
    flags = keys.flags(item)
    if not flags:
        raise ValueError(
            f"done: expected a leaf at '{path_name(keys.done)}', '{path_name(keys.terminated)}' or "
            f"'{path_name(keys.truncated)}', got an item with the leaves {pytree.leaf_names(item)}."
            f" Name the right ones with keys=jrb.Keys({keys.guesses(item, 'done')})."
        )
    return flags


def newest(context: Context, which: jax.Array) -> jax.Array:
    """The slots of the newest row, int32 `[E]`; N where not `which` (bool `[E]`), or no row is."""
    ring, held = context.ring, context.held
    return jnp.where(which & (held.rows(ring) > 0), held.newest(ring), ring.capacity)


def mark_newest(context: Context, ended: jax.Array, which: jax.Array) -> jax.Array:
    """`ended`, bool `[N]`, with the newest rows of some environments (bool `[E]`) ends too."""
    return ended.at[newest(context, which)].set(True, mode="drop")


def lengths(
    before: jax.Array, done: jax.Array, write: WritePlan, most: int
) -> tuple[jax.Array, jax.Array]:
    """How long the running episode is at each row, that row included, and after the call.

    Args:
        before: int32 `[E]`, rows of the running episode before the call.
        done: bool `[T, E]`, which rows end an episode.
        write: which rows pass.
        most: lengths above are given as this.

    Returns:
        int32 `[T, E]`, where rows that do not pass mean nothing; and int32 `[E]`, `before` of the
        next call.
    """
    written, passed = write.times
    start = jnp.broadcast_to(-before, done.shape[1:])
    ends = lax.cummax(jnp.where(done & written, passed, start), axis=0)
    began = jnp.concatenate([start[None], ends[:-1]]) if len(done) > 1 else start[None]
    return jnp.minimum(passed - began, most), jnp.minimum(passed[-1] - ends[-1], most)


def steps_ahead(
    context: Context, ended: jax.Array | None, slots: jax.Array, most: int
) -> jax.Array:
    """How many rows there are from each slot to the end of its episode, itself included.

    Args:
        context: of the buffer.
        ended: bool `[N]`, which slots end an episode; None where none does.
        slots: int32 `[B]`.
        most: counts above are given as this.

    Returns:
        int32 `[B]`, from 1 to `most`.
    """
    ring, held = context.ring, context.held
    newest = held.after(ring, slots)
    if ended is None:
        return jnp.clip(newest + 1, 1, most)
    step = jnp.arange(most - 1, dtype=jnp.int32)
    at = ring.slot_after(slots[:, None], jnp.minimum(step, ring.rows - 1) * ring.envs)
    last = rows.read(ended, at)
    first = jnp.min(jnp.where(last, step, most - 1), axis=1, initial=most - 1)
    return jnp.maximum(jnp.minimum(first, newest) + 1, 1)


def steps_back(context: Context, ended: jax.Array | None, slots: jax.Array, most: int) -> jax.Array:
    """How many rows of the same episode are held before each slot, int32 `[B]`, 0 to `most`."""
    ring, held = context.ring, context.held
    oldest = held.before(ring, slots)
    if ended is None:
        return jnp.minimum(oldest, most)
    step = jnp.arange(most, dtype=jnp.int32)
    at = ring.slot_before(slots[:, None], jnp.minimum(step + 1, ring.rows) * ring.envs)
    last = rows.read(ended, at)
    first = jnp.min(jnp.where(last, step, most), axis=1, initial=most)
    return jnp.minimum(first, oldest)


class Episodes(pytree.State):
    """The episodes of which enough rows are held, for each environment from old to new. M room.

    Times are rows passed since the start, modulo 2^32.

    Attributes:
        first: uint32 `[M, E]`, when the episode began.
        last: uint32 `[M, E]`, when it ended; means nothing for the one that runs.
        head: int32 `[E]`, where the oldest episode stands.
        count: int32 `[E]`, how many there are, with the one that runs.
        length: int32 `[E]`, the rows of the running episode, up to one more than enough.
        now: uint32 `[E]`, the time of the next row.
    """

    first: jax.Array
    last: jax.Array
    head: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()
    length: jax.Array = pytree.tally()
    now: jax.Array


def init(ring: Ring, enough: int) -> Episodes:
    """No episodes. `enough`: the least number of rows that counts."""
    room = ring.rows // enough + 2
    zero = lambda dtype, *shape: jnp.zeros((*shape, ring.envs), dtype)
    return Episodes(
        first=zero(jnp.uint32, room),
        last=zero(jnp.uint32, room),
        head=zero(jnp.int32),
        count=zero(jnp.int32),
        length=zero(jnp.int32),
        now=zero(jnp.uint32),
    )


def after_write(
    context: Context,
    state: Episodes,
    write: WritePlan,
    done: jax.Array,
    enough: int,
    whole: bool = False,
) -> tuple[Episodes, AnchorUpdate, jax.Array]:
    """Episodes grow, begin, end, and leave when too few of their rows are held.

    Args:
        context: of the buffer, before the write.
        state: the episodes before.
        write: which rows pass and which leave.
        done: bool `[T, E]`, which rows end an episode.
        enough: as for `init`.
        whole: whether they leave with their first row, unless they run.

    Returns:
        The episodes after; the change if each of them is one anchor; and where the episode of each
        row stands in the table, int32 `[T, E]`.
    """
    ring, held, (expired, came) = context.ring, context.held, write.lengths
    written, passed = write.times
    length, running = lengths(state.length, done, write, enough + 1)
    begins = written & (length == enough)
    ends = written & done & (length >= enough)
    number = jnp.cumsum(begins, axis=0, dtype=jnp.int32)
    room, env = state.first.shape[0], jnp.arange(ring.envs, dtype=jnp.int32)
    place = (state.head + state.count - 1 + number) % room
    time = state.now + passed.astype(jnp.uint32) - 1

    def put(table: jax.Array, which: jax.Array, value: jax.Array) -> jax.Array:
        lasting = which & (number > number[-1] - room)  # of more than there is room for, the last
        return table.at[jnp.where(lasting, place, room), env].set(value, mode="drop")

    count = state.count + number[-1]
    surplus = jnp.maximum(count - room, 0)
    grown = Episodes(
        first=put(state.first, begins, time - np.uint32(enough - 1)),
        last=put(state.last, ends, jnp.broadcast_to(time, done.shape)),
        head=(state.head + surplus) % room,
        count=count - surplus,
        length=running,
        now=state.now + came.astype(jnp.uint32),
    )
    rows_held = held.rows(ring) + came - expired
    kept = without_lost(ring, grown, rows_held, write, enough, whole)
    joined = jnp.sum(number[-1], dtype=jnp.int32)
    left = jnp.sum(surplus + grown.count - kept.count, dtype=jnp.int32)
    return _clipped(kept, ring), change(ring, joined, left), place


def change(ring: Ring, came: jax.Array, left: jax.Array) -> AnchorUpdate:
    """Old episodes of one environment leave, and new ones join, among those of the others."""
    none = jnp.zeros(0, jnp.int32)
    return AnchorUpdate(
        entered=none,
        consecutive=False,
        expired=None,
        most=None,
        removed=none,
        entered_count=came,
        departed_count=left,
        departed_from=lambda place: jnp.maximum(left - place, 0),
        reordered=(came + left > 0) & (ring.envs > 1),
    )


def without_lost(
    ring: Ring,
    state: Episodes,
    rows_held: jax.Array,
    write: WritePlan,
    enough: int,
    whole: bool = False,
) -> Episodes:
    """The episodes of which enough rows are among the last `rows_held`; or else all, if `whole`."""
    room, env = state.first.shape[0], jnp.arange(ring.envs, dtype=jnp.int32)

    def leave(state: Episodes, most: int) -> Episodes:
        some = jnp.arange(most, dtype=jnp.int32)[:, None]
        edge = state.first if whole else state.last
        edge = dependencies.read(lambda: edge[(state.head + some) % room, env])
        runs = (some == state.count - 1) & (state.length >= enough)
        age = state.now - 1 - edge
        lost = (some < state.count) & ~runs & (age + enough > rows_held.astype(jnp.uint32))
        lost = jnp.sum(lost, axis=0, dtype=jnp.int32)
        return state.replace(head=(state.head + lost) % room, count=state.count - lost)

    few = min(write.length, ring.rows) // enough + 2
    if write.bounded:
        return leave(state, few)
    passes = dependencies.at_least(jnp.max(write.expired)) // max(1, (few - 2) * enough) + 1
    return lax.platform_dependent(
        cpu=lambda: dependencies.loop(passes, lambda _, state: leave(state, few), state),
        default=lambda: leave(state, room),  # all at once: the passes would be unknown
    )


def _clipped(state: Episodes, ring: Ring) -> Episodes:
    """The same, the running episodes at most a row longer than the ring: ages never overflow."""
    at = (
        (state.head + state.count - 1) % state.first.shape[0],
        jnp.arange(ring.envs, dtype=jnp.int32),
    )
    first = dependencies.read(lambda: state.first[at])
    most = np.uint32(ring.rows + 1)
    begin = jnp.where(state.now - first > most, state.now - most, first)
    return state.replace(first=state.first.at[at].set(begin))


def complete(state: Episodes) -> jax.Array:
    """How many episodes there are but those that run, int32 `[E]`; of any number of rows."""
    return jnp.maximum(state.count - (state.length > 0).astype(jnp.int32), 0)


def anchors(context: Context, state: Episodes, enough: int, whole: bool = False) -> Anchors:
    """Every episode alike, then every row of it from which `enough` rows follow, alike.

    Where `whole`, every complete episode, and of each its first row.
    """
    ring, held = context.ring, context.held
    counts = jnp.where(held.rows(ring) < enough, 0, complete(state) if whole else state.count)
    ends, newest = jnp.cumsum(counts, dtype=jnp.int32), held.newest(ring)

    def nth(places: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        env = lane_of(ends, places)
        index = places - (ends[env] - counts[env])
        at = (state.head[env] + index) % state.first.shape[0]
        age, part = extent(context, state, env, at, enough)
        starts = jnp.ones_like(part) if whole else jnp.maximum(part - (enough - 1), 1)
        words = random_bits.words(random_bits.fold(key, _STARTS), places.size)
        back = age + part - 1 - random_bits.below(starts, *words)
        slots = ring.slot_before(newest[env], back * ring.envs)
        known = places < ends[-1]
        return jnp.where(known, slots, newest[0]), 1 / starts.astype(jnp.float32)

    return Anchors(count=ends[-1], nth=nth)


def extent(
    context: Context, state: Episodes, env: jax.Array, at: jax.Array, enough: int
) -> tuple[jax.Array, jax.Array]:
    """How many rows ago an episode ended, and how many of its rows are held, int32 `[B]`.

    Args:
        context: of the buffer.
        state: the episodes.
        env: int32 `[B]`.
        at: int32 `[B]`, where the episode stands in the table.
        enough: as for `init`.
    """
    rows_held = jnp.broadcast_to(context.held.rows(context.ring), state.head.shape)[env]
    first, last = dependencies.read(lambda: (state.first[at, env], state.last[at, env]))
    running = (state.head[env] + state.count[env] - 1) % state.first.shape[0]
    runs = (at == running) & (state.length[env] >= enough)
    newest = state.now[env] - 1
    last = jnp.where(runs, newest, last)
    age = (newest - last).astype(jnp.int32)
    part = jnp.minimum((last - first + 1).astype(jnp.int32), rows_held - age)
    return age, part


def truncated(state: Episodes, which: jax.Array, enough: int) -> Episodes:
    """The same, the running episodes of some environments (bool `[E]`) ended by the newest row."""
    room, env = state.first.shape[0], jnp.arange(which.shape[0], dtype=jnp.int32)
    at = jnp.where(which & (state.length >= enough), (state.head + state.count - 1) % room, room)
    last = state.last.at[at, env].set(state.now - 1, mode="drop")
    return state.replace(last=last, length=jnp.where(which, 0, state.length))
