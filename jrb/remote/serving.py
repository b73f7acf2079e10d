"""Starts the servers."""

import secrets
from typing import Any

import jax
import numpy as np

from jrb.buffer import ReplayBuffer
from jrb.limits import SampleToInsert
from jrb.remote import setup as setups
from jrb.remote.client import Remote
from jrb.remote.gate import Gate
from jrb.remote.library import ray
from jrb.remote.server import Server
from jrb.remote.setup import Setup
from jrb.types import Item


def serve(
    buffer: ReplayBuffer,
    example: Item,
    *,
    streams: int,
    path: Any = None,
    limits: SampleToInsert | None = None,
    shards: int = 1,
    seed: int = 0,
    save_every: int | None = None,
    in_flight: int = 4,
    **ray_options: Any,
) -> Remote:
    """Runs a buffer in processes of its own, which actors feed and learners draw from.

    Every stream, the work of one actor, has a ring of its own, of capacity / streams items: no
    window or n-step return goes from one into another. Draws are over all of them.

    A server that dies is started again by Ray and goes on from what was saved last; calls that were
    under way are made again. Of what came after that save nothing but this is lost, and `stats`
    tells how much it was. Without a path it begins empty.

    Args:
        buffer: as one stream sees it: `num_envs=None` for streams of single timesteps, E for
            streams of vectors of E environments. The capacity is that of all streams together, a
            multiple of streams * E. Any sampler, unit and transforms that go with
            `writer=jrb.PerEnvironment()`; with as many shards as streams, any at all.
        example: one transition, as for `ReplayBuffer.init`.
        streams: how many there are, one for each actor.
        path: of a folder where servers save. What is there already is gone on from. A storage in
            files has its files there, and then a save costs what changed. None for the path of the
            storage; without one nothing is saved.
        limits: holds back those who add, or those who sample, over all shards. An item counts as
            one, when it is written; a batch as B samples, when it is drawn.
        shards: over how many servers the streams are dealt, stream s to shard s % shards.
        seed: of all draws; see `Server`.
        save_every: after so many items each server saves by itself, between two calls; None for
            only when `Remote.save` is called.
        in_flight: how many calls each process that holds the `Remote` may have under way before
            `extend` waits; so many chunks of each may be in the object store.
        ray_options: of the servers, as for `ray.remote`, such as `num_cpus`, `resources` or
            `max_restarts`. Servers keep to the CPU unless `num_gpus` or `resources` are asked for.

    Returns:
        What actors and learners are given. The servers end with its `close`, or when nobody holds
        it any more.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        TypeError, ValueError: parts that do not go with this, with what to do.
    """
    library = ray()
    if limits is not None and not isinstance(limits, SampleToInsert):
        raise TypeError(f"limits: expected jrb.limits.SampleToInsert(...), got {limits!r}.")
    on_cpu = not ray_options.get("num_gpus") and not ray_options.get("resources")
    setup = Setup(
        buffer=buffer,
        spec=setups.spec_of(buffer, example),
        streams=streams,
        shards=shards,
        path=setups.path_of(buffer, path),
        seed=seed,
        save_every=save_every,
        in_flight=in_flight,
        on_cpu=on_cpu,
        wide=jax.dtypes.canonicalize_dtype(np.float64) == np.float64,
        gate=None if limits is None else f"jrb-gate-{secrets.token_hex(8)}",
    )
    setups.check(setup)
    lasting = {"max_restarts": -1, "max_task_retries": -1}
    gate = None
    if limits is not None:
        options = {"name": setup.gate, "num_cpus": 0, "max_concurrency": _MANY, **lasting}
        gate = library.remote(**options)(Gate).remote(limits)
    server = library.remote(**(lasting | ray_options))(Server)
    servers = [server.remote(setup, shard) for shard in range(setup.shards)]
    library.get([one.ready.remote() for one in servers])
    return Remote(setup, servers, gate, owns=True)


_MANY = 10_000  # calls of the gate at once: three for each process that holds a `Remote`
