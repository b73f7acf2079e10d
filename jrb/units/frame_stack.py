"""Stacks of frames, built when they are drawn from frames that are stored once."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrb import checks, episodes, line, order, pytree, rows
from jrb.keys import Keys, Path, path_name, within
from jrb.line import Line
from jrb.ring import Held, Ring
from jrb.types import Anchors, Change, Item, Look, Sampler, Unit, Where, Write, Writer
from jrb.units.transition import Transition


@pytree.state
class Stacks:
    """What frame stacks must know before they read.

    Attributes:
        back: uint8 or int32 `[N]`, the rows of its episode before each slot, up to k - 1.
        length: int32 `[E]`, the rows of the running episode, up to k.
        line: the anchors.
        unit: the state of the unit whose observations are stacked.
        k: what the rows were counted for; no array.
    """

    back: jax.Array
    length: jax.Array
    line: Line
    unit: Any
    k: int = pytree.static(0)


@pytree.component
class FrameStack:
    """Single frames are stored, stacks of the last k are drawn, oldest first.

    Leaves of the observation and of the next observation become `[B, k, ...]`, for windows
    `[B, L, k, ...]`, bit for bit what stacking in the environment gives. A stack never crosses the
    beginning of an episode; an anchor whose stack is no longer held as a whole is not drawn, and as
    a row of burn-in it is masked.

    Attributes:
        k: frames in a stack.
        paths: which leaves, as paths into the item; None for all of the observation and the next.
        unit: whose observations are stacked, such as `NStep(3, 0.99)` or `Sequence(80)`.
        pad: what stands before the first frame of an episode: "first", that frame; or "zeros".

    Reference: Mnih et al., 2015, "Human-level control through deep reinforcement learning",
    methods (preprocessing).
    """

    k: int
    paths: tuple[Path, ...] | None = None
    unit: Unit = Transition()
    pad: Literal["first", "zeros"] = "first"

    def __post_init__(self) -> None:
        checks.count("k", self.k)
        checks.choice("pad", self.pad, ("first", "zeros"))
        checks.part("unit", self.unit)
        if isinstance(self.paths, str):
            raise TypeError(f"paths: expected a tuple of paths, got {self.paths!r}. Write it (f,).")

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """The ring holds a stack, in order of time."""
        checks.window("FrameStack: k", self.k, ring.rows)
        checks.in_time("FrameStack", writer)
        self.unit.check(ring, sampler, writer)
        if isinstance(self.unit, FrameStack):
            raise ValueError(
                "FrameStack: unit: expected a unit of single frames, got a FrameStack."
            )
        if getattr(self.unit, "lag", ...) is None:
            raise ValueError(
                "FrameStack: expected a unit whose anchors are rows, got over='episodes'. "
                "Use over='steps'."
            )
        if not isinstance(getattr(self.unit, "lag", None), int):
            raise TypeError(
                f"FrameStack: unit: expected one that says by how many rows its anchors may lag, "
                f"got {type(self.unit).__name__} without it. Give it a `lag`, 0 if its anchors "
                "enter in the order of their rows (see jrb.types.Unit)."
            )

    @property
    def lag(self) -> int:
        """That of the inner unit; and stacks leave early."""
        return self.k - 1 + (self.unit.lag or 0)

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Stacks:
        """No rows. Raises if the items have no done flag, or nothing at one of the paths."""
        episodes.check(spec, keys)
        names = pytree.leaf_names(spec)
        for prefix in self._prefixes(keys):
            if self.paths is None and prefix == path_name(keys.next_observation):
                continue  # not every item has it
            if not any(within(name, prefix) for name in names):
                raise ValueError(
                    f"FrameStack: paths: expected leaves at '{prefix}', got an item with the "
                    f"leaves {names}."
                )
        for name in names:
            self._check_twin(name, spec, keys)
        for path in getattr(self.unit, "goals", ()):
            if any(within(name, path_name(path)) for name in names if self._stacked(name, keys)):
                raise ValueError(
                    f"FrameStack: '{path_name(path)}': expected a goal that is not stacked. "
                    "Name the frames alone with paths=."
                )
        return Stacks(
            back=jnp.zeros(ring.capacity, jnp.uint8 if self.k <= 256 else jnp.int32),
            length=jnp.zeros(ring.envs, jnp.int32),
            line=line.init(ring),
            unit=self.unit.init(ring, spec, keys),
            k=self.k,
        )

    def _prefixes(self, keys: Keys) -> list[str]:
        paths = (keys.observation, keys.next_observation) if self.paths is None else self.paths
        return [path_name(path) for path in paths]

    def _stacked(self, name: str, keys: Keys) -> bool:
        return any(within(name, prefix) for prefix in self._prefixes(keys))

    def _check_twin(self, name: str, spec: Item, keys: Keys) -> None:
        if not self._stacked(name, keys) or not keys.is_next(name):
            return
        twin = keys.twin(name)
        named = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
        if twin not in named or named[twin] != named[name]:
            raise ValueError(
                f"FrameStack: leaf '{name}': expected a leaf of the next observation, and one "
                f"like it in the observation ('{twin or path_name(keys.observation)}'), whose "
                f"rows are the frames before it, got {named.get(twin or name)}."
            )

    def on_write(
        self, ring: Ring, state: Stacks, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[Stacks, Change]:
        """Anchors of the inner unit enter; they leave when the ring's tail cuts their stack."""
        inner, change = self.unit.on_write(ring, state.unit, held, write, items, keys)
        length = episodes.lengths(state.length, episodes.ends(items, keys), write, self.k)
        later = rows.after(write, line.waited(state.line))  # `back` was read for the line
        back = rows.put(state.back, later, (length[:-1] - 1).astype(state.back.dtype))
        reach = lambda slots: rows.get(back, slots).astype(jnp.int32)
        entered = _still_whole(ring, held, write, change.entered, reach)
        anchors, own = line.after_write(ring, state.line, held, write, entered, self.lag, reach)
        cut = self._cut(ring, held, write, reach)
        anchors = line.hold(anchors, jnp.minimum(jnp.min(cut, initial=0), 0))
        own = Change(
            entered=entered,
            consecutive=change.consecutive and write.bounded,
            gone=change.gone,
            most=change.most,
            cut=jnp.concatenate([change.cut, cut]),
            entered_count=own.entered_count,
            left_count=own.left_count,
            left_from=own.left_from,
            moved=own.moved,
        )
        state = state.replace(  # pyright: ignore
            back=back, length=length[-1], line=anchors, unit=inner
        )
        return state, own

    def truncate(
        self, ring: Ring, state: Stacks, held: Held, which: jax.Array
    ) -> tuple[Stacks, Change | None]:
        """As the inner unit does; the next rows begin stacks anew."""
        inner, change = self.unit.truncate(ring, state.unit, held, which)
        state = state.replace(  # pyright: ignore
            unit=inner, length=jnp.where(which, 0, state.length)
        )
        if change is None:
            return state, None
        now, reach = line.look_back(ring), functools.partial(self.rows_before, state)
        entered = _still_whole(ring, held, now, change.entered, reach)
        anchors, own = line.after_write(ring, state.line, held, now, entered, slack=0)
        return state.replace(line=anchors), own  # pyright: ignore

    def ends(self, ring: Ring, state: Stacks, held: Held, slots: jax.Array) -> jax.Array:
        """Those after which a stack begins anew, and those that the inner unit knows."""
        after = ring.slot_after(slots, ring.envs)
        last = ring.place(held, slots) >= held.count - ring.envs
        running = state.length[slots % ring.envs] > 0
        begins = jnp.where(last, ~running, state.back[after] == 0) & (self.k > 1)
        return begins | self.unit.ends(ring, state.unit, held, slots)

    def rows_before(self, state: Stacks, slots: jax.Array) -> jax.Array:
        """How many rows of its episode came before each slot, int32, up to k - 1."""
        return state.back[slots].astype(jnp.int32)

    def resume(self, state: Stacks, before: jax.Array) -> Stacks:
        """An empty state whose next rows have so many rows of their episodes behind them.

        Args:
            state: without rows.
            before: int32 `[E]`; those rows are not held, so that no stack may reach them.
        """
        return state.replace(length=jnp.minimum(before, self.k))  # pyright: ignore

    def _cut(self, ring: Ring, held: Held, write: Write, reach: Any) -> jax.Array:
        """The slots at the ring's tail whose stacks reach beyond it, int32 `[(k - 1) E]`."""
        most = (self.k - 1) * ring.envs
        first = ring.slot_after(held.first, write.gone % ring.rows * ring.envs)
        count = held.count + (write.rows - write.gone) * ring.envs
        slots = ring.run(Held(first=first, count=count), most)
        row = jnp.arange(most, dtype=jnp.int32) // ring.envs
        safe = jnp.minimum(slots, ring.capacity - 1)
        cut = order.once(lambda: reach(safe)) > row
        return jnp.where(cut, slots, ring.capacity)

    def anchors(self, ring: Ring, state: Stacks, held: Held) -> Anchors:
        """Anchors of the inner unit whose stack is held."""
        del held
        return line.anchors(ring, state.line)

    def look(
        self,
        ring: Ring,
        state: Stacks,
        held: Held,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
        keys: Keys,
    ) -> Look:
        """Frames at the k last rows before each row at which the inner unit reads observations.

        Next observations are read once, and the frames before them from the observations.
        """
        inner = self.unit.look(ring, state.unit, held, slots, mask, key, keys)
        here = inner.where(path_name(keys.observation))
        there = inner.where(path_name(keys.next_observation))
        frames, whole, real = self._stack(ring, state, held, here)
        if here is not there:
            more, _, more_real = self._stack(ring, state, held, there)
            frames = jnp.concatenate([frames, more[..., 1:]], axis=-1)
            real = jnp.concatenate([real, more_real[..., 1:]], axis=-1)
        return Look(
            where=self._where(inner.where, frames, keys),
            mask=inner.mask & whole if inner.mask.shape == whole.shape else inner.mask,
            info=inner.info,
            rest=(inner, real),
        )

    def _where(self, inner: Where, frames: jax.Array, keys: Keys) -> Where:
        def where(name: str) -> jax.Array:
            return frames if self._many(name, keys) else inner(name)

        return where

    def _many(self, name: str, keys: Keys) -> bool:
        """Whether many frames of this leaf are read: for its stack, or for that of its twin."""
        if keys.twin(name) is not None:
            return False
        return self._stacked(name, keys) or self._is_twin(name, keys)

    def _is_twin(self, name: str, keys: Keys) -> bool:
        """Whether a next observation that is stacked needs the frames of this leaf."""
        before = path_name(keys.observation)
        if not within(name, before):
            return False
        return self._stacked(path_name(keys.next_observation) + name[len(before) :], keys)

    def _stack(
        self, ring: Ring, state: Stacks, held: Held, slots: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The slots of the stacks that end at slots `[...]`.

        Returns:
            int32 `[..., k]`, oldest first; whether each stack is held, bool `[...]`; and which
            frames are of the episode, bool `[..., k]`.
        """
        back = order.once(lambda: rows.get(state.back, slots)).astype(jnp.int32)
        oldest = ring.place(held, slots) // ring.envs
        step = jnp.arange(self.k - 1, -1, -1, dtype=jnp.int32)
        near = jnp.minimum(step, jnp.minimum(back, oldest)[..., None])
        return (
            ring.slot_before(slots[..., None], near * ring.envs),
            back <= oldest,
            step <= back[..., None],
        )

    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Frames that were read once are put together; the rest is the inner unit's."""
        inner, real = look.rest
        axis, last = look.mask.ndim, self.k - 1
        named = dict(zip(pytree.leaf_names(raw), jax.tree.leaves(raw), strict=True))
        cut = lambda leaf, start, stop: jax.lax.slice_in_dim(leaf, start, stop, axis=axis)
        frames = lambda name: self._filled(named[name], real)

        def stack(path: tuple, leaf: jax.Array) -> jax.Array:
            name = pytree.leaf_name(path)
            twin = keys.twin(name)
            if not self._stacked(name, keys):
                return leaf if not self._many(name, keys) else cut(leaf, last, self.k)[(*rest, 0)]
            if twin is None:
                return cut(frames(name), 0, self.k)
            before = cut(frames(twin), real.shape[-1] - last, None)
            return jnp.concatenate([before, jnp.expand_dims(leaf, axis)], axis=axis)

        rest = (slice(None),) * axis
        return self.unit.reduce(jax.tree_util.tree_map_with_path(stack, raw), inner, keys)

    def _filled(self, frames: jax.Array, real: jax.Array) -> jax.Array:
        """Zeros instead of the first frame, if so wished."""
        if self.pad == "first":
            return frames
        real = real.reshape(*real.shape, *(1,) * (frames.ndim - real.ndim))
        return jnp.where(real, frames, jnp.zeros_like(frames))

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those of the inner unit."""
        shapes = getattr(self.unit, "priority_shapes", lambda mask: [])
        return shapes(mask)

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """As the inner unit does."""
        return self.unit.reduce_priorities(priorities, mask)  # pyright: ignore

    def reset(self, ring: Ring, state: Stacks, token: jax.Array) -> Stacks:
        """No rows."""
        return state.replace(  # pyright: ignore
            length=jnp.zeros_like(state.length),
            line=line.reset(state.line, token),
            unit=self.unit.reset(ring, state.unit, token),
        )

    def hold(self, state: Stacks, token: jax.Array) -> Stacks:
        """The same, its line and the inner unit's written after the token."""
        return state.replace(  # pyright: ignore
            line=line.hold(state.line, token), unit=self.unit.hold(state.unit, token)
        )


def _still_whole(ring: Ring, held: Held, write: Write, slots: jax.Array, reach: Any) -> jax.Array:
    """The slots, N where the stack is no longer held once the write is done."""
    safe = jnp.minimum(slots, ring.capacity - 1)
    rows_held = held.count // ring.envs + write.rows - write.gone
    tail = ring.slot_after(held.first, write.gone % ring.rows * ring.envs)
    oldest = ring.place(Held(first=tail, count=held.count), safe) // ring.envs
    whole = (order.once(lambda: reach(safe)) <= oldest) & (oldest < rows_held)
    return jnp.where(whole, slots, ring.capacity)
