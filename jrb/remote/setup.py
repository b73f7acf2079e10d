"""What servers and those who call them have to agree on."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from jrb._store import files
from jrb._util import casting, checks, prng_keys, pytree
from jrb.buffer import ReplayBuffer
from jrb.samplers import Prioritized, Uniform
from jrb.state import origin_of
from jrb.storages import MemmapStorage, SpillStorage
from jrb.storages.memmap import StoreArrays
from jrb.types import Item, PrioritizedSampler
from jrb.writers import PerEnvironment, RoundRobin


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a buffer is served. It travels to every process that takes part.

    Attributes:
        buffer: as one stream sees it; its capacity is that of all streams together.
        spec: one item as streams send it, `jax.ShapeDtypeStruct`s.
        streams: how many there are.
        shards: over how many servers they are dealt.
        path: where servers save, in folders of their own if there are several; None for nowhere.
        seed: of all draws.
        save_every: after so many items a server saves by itself; None for never.
        in_flight: how many calls of one caller may be under way.
        on_cpu: whether servers keep to the CPU.
        wide: whether JAX has numbers of 64 bits.
        gate: the name of the actor that compares what servers count; None without limits.
    """

    buffer: ReplayBuffer
    spec: Item
    streams: int
    shards: int
    path: str | None
    seed: int
    save_every: int | None
    in_flight: int
    on_cpu: bool
    wide: bool
    gate: str | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes of a timestep of one stream: `()`, or `(E,)` for a vector of environments."""
        return () if self.buffer.num_envs is None else (self.buffer.num_envs,)

    @property
    def origin(self) -> str:
        """The origin of all samples that are drawn, from whatever shard."""
        place = f"{self.streams} streams, {self.shards} servers"
        return f"Remote({place}) of {origin_of(self.buffer)}"

    def place(self, stream: int) -> tuple[int, int]:
        """The shard in which a stream lies, and its lane there."""
        return stream % self.shards, stream // self.shards

    def lanes(self, shard: int) -> int:
        """How many streams a shard has."""
        return len(range(shard, self.streams, self.shards))

    def path_of(self, shard: int) -> str | None:
        """Where a shard saves."""
        alone = self.path is None or self.shards == 1
        return self.path if alone else os.path.join(self.path or "", f"shard-{shard}")

    def served(self, shard: int) -> ReplayBuffer:
        """The buffer of a shard: every stream has lanes of its own there.

        Raises:
            ValueError: there are parts that do not go with several streams in one ring.
        """
        buffer, lanes, width = self.buffer, self.lanes(shard), self.buffer.num_envs or 1
        parts: dict[str, Any] = {"capacity": buffer.capacity // self.streams * lanes}
        if self.shards > 1:
            parts["min_size"] = None  # it is about all shards together
        if self.path is not None and isinstance(buffer.storage, MemmapStorage | SpillStorage):
            parts["storage"] = dataclasses.replace(buffer.storage, path=self.path_of(shard))
        if lanes > 1:
            parts |= {"num_envs": lanes * width, "writer": PerEnvironment()}
        try:
            return dataclasses.replace(buffer, **parts)
        except ValueError as error:
            raise ValueError(
                f"streams: expected parts that go with {lanes} streams in one ring: {error} Or "
                f"give shards={self.streams}, a ring for each stream."
            ) from error


def check(setup: Setup) -> None:
    """Raises what can be told before a server runs.

    Raises:
        TypeError, ValueError: something does not go with being served.
    """
    buffer, streams, shards = setup.buffer, setup.streams, setup.shards
    for name in ("streams", "shards", "in_flight"):
        checks.count(name, getattr(setup, name))
    if shards > streams:
        raise ValueError(f"shards: expected at most streams = {streams}, got {shards}.")
    _check_parts(buffer, shards)
    width = streams * (buffer.num_envs or 1)
    if buffer.capacity % width:
        raise ValueError(
            f"capacity: expected a multiple of {width}, streams times num_envs, as each stream has "
            f"as much room, got {buffer.capacity}."
        )
    if setup.save_every is not None:
        checks.count("save_every", setup.save_every)
        if setup.path is None:
            raise ValueError("save_every: expected a path to save to, got None. Give path=.")
    for shard in range(shards):
        setup.served(shard)


def spec_of(buffer: ReplayBuffer, example: Item) -> Item:
    """The spec of one item as streams send it."""
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(f"serve: expected a ReplayBuffer, got {type(buffer).__name__}.")
    example = casting.arrays(example, "serve")
    spec = pytree.spec_of(casting.kept(example, "serve") if buffer.cast else example, "serve")
    for name, leaf in zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True):
        if prng_keys.is_keys(leaf.dtype):
            raise TypeError(
                f"serve: leaf '{name}': expected what NumPy can hold, got {leaf.dtype}. Send "
                "jax.random.key_data of it."
            )
    return spec


def _check_parts(buffer: ReplayBuffer, shards: int) -> None:
    if buffer.storage.of_objects:
        raise TypeError(
            f"serve: expected items of arrays, got {type(buffer.storage).__name__}. Use "
            "jrb.DeviceStorage() or jrb.MemmapStorage()."
        )
    if not isinstance(buffer.writer, RoundRobin | PerEnvironment):
        raise TypeError(
            f"serve: expected a writer that gives each stream a ring, jrb.RoundRobin() or "
            f"jrb.PerEnvironment(), got {type(buffer.writer).__name__}."
        )
    if shards != 1 and not isinstance(buffer.sampler, Uniform | Prioritized):
        raise TypeError(
            f"shards: expected jrb.Uniform() or jrb.Prioritized(), whose masses say how much of a "
            f"batch each shard gives, got {type(buffer.sampler).__name__}. Use shards=1."
        )


def path_of(buffer: ReplayBuffer, path: str | os.PathLike[str] | None) -> str | None:
    """Where is saved: what was given, or where the storage has its files."""
    given = None if path is None else files.absolute(path)
    own = buffer.storage.path if isinstance(buffer.storage, StoreArrays) else None
    own = None if own is None else os.fspath(own)
    if given is not None and own is not None and given != own:
        raise ValueError(
            f"path: expected that of the storage, {own}, where a save costs what changed, or none "
            f"there, got {given}."
        )
    return given if own is None else os.fspath(own)


def arrays(setup: Setup, items: Item) -> list[np.ndarray]:
    """The leaves of items as they are sent, after all checks; nothing touches a device of JAX.

    Raises:
        ValueError: another structure or shape than the example's, or leaves of unequal T.
        TypeError: another dtype than the example's.
    """
    items = casting.arrays(items, "extend")
    if setup.buffer.cast:
        items = casting.kept(items, "extend")
    lead = (checks.length(items), *setup.lead)
    spec = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype), setup.spec
    )
    if setup.buffer.cast:
        items = casting.to_spec(spec, items, "extend")
    axes = "[T, ...]" if len(lead) == 1 else "[T, E, ...], E = num_envs"
    pytree.check_like(spec, items, "extend", f"Give timesteps of one stream, leaves {axes}.")
    return list(map(np.asarray, jax.tree.leaves(items)))


def mask(setup: Setup, value: Any, length: int) -> np.ndarray | None:
    """A mask as it is sent, bool `[T]` or `[T, E]`."""
    if value is None:
        return None
    found, lanes = np.asarray(value), (length, *setup.lead)
    if found.dtype != np.bool_:
        raise TypeError(f"extend: mask: expected dtype bool, got {found.dtype}. Compare.")
    per_env = setup.buffer.writer.per_env or setup.streams > setup.shards
    if found.shape != (length,) and not (per_env and found.shape == lanes):
        legal = f"({length},)" + (f" or {lanes}" if per_env and setup.lead else "")
        raise ValueError(f"extend: mask: expected shape {legal}, got {found.shape}.")
    return found


def priorities(setup: Setup, value: Any, length: int) -> np.ndarray | None:
    """Priorities of new items as they are sent, float32 `[T]` or `[T, E]`."""
    if value is None:
        return None
    sampler = setup.buffer.sampler
    if not (isinstance(sampler, PrioritizedSampler) and sampler.takes_priorities):
        raise TypeError(
            "extend: priorities: expected a sampler that takes priorities with what is added, got "
            f"{type(sampler).__name__}. Serve a buffer with sampler=jrb.Prioritized()."
        )
    found, shape = numbers("extend: priorities", value), (length, *setup.lead)
    if found.shape != shape:
        raise ValueError(f"extend: priorities: expected shape {shape}, got {found.shape}.")
    return found


def numbers(name: str, value: Any) -> np.ndarray:
    """Real numbers, as float32."""
    found = np.asarray(value)
    if not any(jax.numpy.issubdtype(found.dtype, kind) for kind in (np.floating, np.integer)):
        raise TypeError(f"{name}: expected real numbers, got dtype {found.dtype}.")
    return found.astype(np.float32)
