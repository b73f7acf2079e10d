"""The settings that servers and callers share, and the checks that need no server."""

import contextlib
import dataclasses
import os
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core.steps import origin_of
from jrb._core.validate import fit_items, read_items
from jrb.authoring import (
    absolute_path,
    checks,
    enable_x64,
    leaf_names,
    spec_of,
)
from jrb.buffer import ReplayBuffer
from jrb.limits import SampleToInsert
from jrb.remote import gate
from jrb.samplers import Lifo, Prioritized, Queue, Uniform, WithoutReplacement
from jrb.storages import MemmapStorage, SpillStorage
from jrb.types import Item, PrioritizedSampler
from jrb.writers import PerEnvironment, RoundRobin


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings of a served buffer, sent to every process that uses it."""

    buffer: ReplayBuffer  # the `num_envs` is of one stream, the capacity of all streams together
    spec: Item  # the shapes and dtypes of one item that a stream sends
    streams: int  # the number of streams
    shards: int  # the number of servers, among which streams are divided
    path: str | None  # the folder to save to; each of several servers has a subfolder
    seed: int
    save_every: int | None  # the number of items after which a server saves
    in_flight: int  # the maximum number of unfinished calls of one caller
    on_cpu: bool  # True if servers use only the CPU
    wide: bool  # True if JAX has 64-bit numbers (`jax_enable_x64`)
    gate: str | None = None  # the Ray name of the gate, the actor that enforces `limits`

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of one timestep of a stream: `()`, or `(E,)` with `num_envs`."""
        return () if self.buffer.num_envs is None else (self.buffer.num_envs,)

    @property
    def origin(self) -> str:
        """The text that identifies this buffer as the origin of samples, the same in all shards."""
        parts = f"{self.streams} streams, {self.shards} servers"
        return f"Remote({parts}) of {origin_of(self.buffer)}"

    def x64_context(self) -> AbstractContextManager[Any]:
        """Returns a context in which JAX keeps the 64-bit numbers of the servers.

        The calling thread or process may have `jax_enable_x64` off: without this context, JAX
        would truncate the integer 2^41 + 2 to 2.
        """
        return enable_x64() if self.wide else contextlib.nullcontext()

    def num_lanes(self, shard: int) -> int:
        """Returns the number of streams of a shard: stream s is lane s // S of shard s % S."""
        return len(range(shard, self.streams, self.shards))

    def path_of(self, shard: int) -> str | None:
        """Returns the folder to which a shard saves; None if nothing is saved."""
        if self.path is None or self.shards == 1:
            return self.path
        return os.path.join(self.path, f"shard-{shard}")

    def buffer_of(self, shard: int) -> ReplayBuffer:
        """Returns the buffer of a shard, in which every stream has its own environments."""
        buffer, lanes, width = self.buffer, self.num_lanes(shard), self.buffer.num_envs or 1
        parts: dict[str, Any] = {"capacity": buffer.capacity // self.streams * lanes}
        if self.shards > 1:
            parts["min_size"] = None  # the minimum is that of all shards together
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


def check_setup(setup: Setup) -> None:
    """Raises `TypeError` or `ValueError` for buffers and options that cannot be served."""
    # Check the numbers, and the kinds of the parts.
    buffer, streams, shards = setup.buffer, setup.streams, setup.shards
    for name in ("streams", "shards", "in_flight"):
        checks.count(name, getattr(setup, name))
    if shards > streams:
        raise ValueError(f"shards: expected at most streams = {streams}, got {shards}.")
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
    # Check that the ring can be divided, and that the parts work with the lanes of each shard.
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
        setup.buffer_of(shard)


def check_limits(setup: Setup, limits: SampleToInsert | None) -> tuple[int, str]:
    """Returns how many items are needed before the first draw, and for what; raises if never."""
    if limits is not None and not isinstance(limits, SampleToInsert):
        raise TypeError(f"limits: expected jrb.limits.SampleToInsert(...), got {limits!r}.")
    buffer, width = setup.buffer, setup.streams * (setup.buffer.num_envs or 1)
    sampler, batch_size, rows = buffer.sampler, buffer.batch_size or 1, buffer.unit.anchor_rows
    starts = batch_size if isinstance(sampler, WithoutReplacement) and sampler.drop_last else 1
    # Every environment of every stream may have one row less than its first anchor needs.
    needs = width * (rows - 1) + starts, f"{starts} of {buffer.unit!r} in {width} environments"
    needs = max(needs, (buffer.min_size or 1, "min_size of the buffer"))
    if needs[0] > buffer.capacity:
        raise ValueError(
            f"capacity: expected {needs[0]} or more items for {needs[1]}, got {buffer.capacity}."
        )
    # Chunks and batches must fit between the bounds, and a queue cannot give an item twice.
    if limits is not None:
        needs = max(needs, (limits.min_size, "min_size of the limits"))
        gate.check_sizes(limits, needs, buffer.num_envs or 1, batch_size)
        most = 1 / sampler.stride if isinstance(sampler, Queue) else 1
        if isinstance(sampler, Queue | Lifo) and limits.ratio > most:
            raise ValueError(
                f"limits: expected a ratio of at most {most:g} with {sampler!r}, which draws each "
                f"item once, got {limits.ratio:g}: both sides would wait for each other."
            )
    return needs


def spec_of_example(buffer: ReplayBuffer, example: Item) -> Item:
    """Returns the spec of one item that a stream sends; raises for dtypes that NumPy lacks."""
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(f"serve: expected a ReplayBuffer, got {type(buffer).__name__}.")
    spec = spec_of(read_items(example, "serve", buffer.cast), "serve")
    for name, leaf in zip(leaf_names(spec), jax.tree.leaves(spec), strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"serve: leaf '{name}': expected what NumPy can hold, got {leaf.dtype}. Send "
                "jax.random.key_data of it."
            )
    return spec


def path_of(buffer: ReplayBuffer, path: str | os.PathLike[str] | None) -> str | None:
    """Returns the folder to save to: the given path, or else that of the storage's files."""
    storage = buffer.storage
    storage_path = storage.path if isinstance(storage, MemmapStorage | SpillStorage) else None
    storage_path = None if storage_path is None else os.fspath(storage_path)
    absolute = None if path is None else absolute_path(path)
    if absolute is not None and storage_path is not None and absolute != storage_path:
        raise ValueError(
            f"path: expected that of the storage, {storage_path}, where a save costs what changed, "
            f"or none there, got {absolute}."
        )
    return absolute if storage_path is None else storage_path


def convert_items(setup: Setup, items: Item) -> list[np.ndarray]:
    """Returns the leaves of items as checked NumPy arrays, without using a JAX device."""
    items = read_items(items, "extend", setup.buffer.cast)
    lead = (checks.length(items), *setup.lead)
    axes = "[T, ...]" if len(lead) == 1 else "[T, E, ...], E = num_envs"
    mend = f"Give timesteps of one stream, leaves {axes}."
    items = fit_items(setup.spec, items, "extend", mend, lead, setup.buffer.cast)
    return list(map(np.asarray, jax.tree.leaves(items)))


def convert_mask(setup: Setup, value: Any, length: int) -> np.ndarray | None:
    """Returns a mask as a checked NumPy array, bool `[T]` or `[T, E]`."""
    if setup.buffer.requires_mask:
        checks.given_mask("extend", value, 1 + len(setup.lead))
    if value is None:
        return None
    array, shape = np.asarray(value), (length, *setup.lead)
    if array.dtype != np.bool_:
        raise TypeError(f"extend: mask: expected dtype bool, got {array.dtype}. Compare.")
    # Shards of several streams are written with a mask for each environment.
    per_env = setup.buffer.writer.per_env or setup.streams > setup.shards
    if array.shape != (length,) and not (per_env and array.shape == shape):
        legal = f"({length},)" + (f" or {shape}" if per_env and setup.lead else "")
        raise ValueError(f"extend: mask: expected shape {legal}, got {array.shape}.")
    return array


def convert_priorities(setup: Setup, value: Any, length: int) -> np.ndarray | None:
    """Returns the priorities of new items as a checked array, float32 `[T]` or `[T, E]`."""
    if value is None:
        return None
    sampler = setup.buffer.sampler
    if not (isinstance(sampler, PrioritizedSampler) and sampler.takes_priorities):
        raise TypeError(
            "extend: priorities: expected a sampler that takes priorities with what is added, got "
            f"{type(sampler).__name__}. Serve a buffer with sampler=jrb.Prioritized()."
        )
    array, shape = copy_as_float32("extend: priorities", value), (length, *setup.lead)
    if array.shape != shape:
        raise ValueError(f"extend: priorities: expected shape {shape}, got {array.shape}.")
    return array


def copy_as_float32(name: str, value: Any) -> np.ndarray:
    """Returns a float32 copy of an array of real numbers."""
    array = np.asarray(value)
    check_real(name, array.dtype)
    return array.astype(np.float32)


def check_real(name: str, dtype: Any) -> None:
    """Raises `TypeError` unless a dtype is of real numbers."""
    if not any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer)):
        raise TypeError(f"{name}: expected real numbers, got dtype {dtype}.")
