"""Builds programs for a peer's full buffer: methods in a jitted scan, or called from Python."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..peers import Buffer, Peer
from ..setup import WINDOWS, Setup
from ..timing import Program

ALL = ("add", "sample", "update")
_FRESH = 8
"""Number of rows that are made beforehand and added in turn."""
_CALL_S = 0.1
"""Intended seconds per timed call, however short a step is: the first thousand steps or so only
refill the caches that the previous programs evicted."""


def methods_of(setup: Setup) -> tuple[str, ...]:
    """Returns add and sample, and update if the setup is prioritized."""
    return ALL if setup.prioritized else ALL[:2]


def cycle(peer: Peer, setup: Setup, steps: int, methods: tuple[str, ...] | None = None) -> Program:
    """Returns a program that repeats the methods: in a jitted scan, or in Python on the host."""
    buffer, methods = peer.full(setup), methods or methods_of(setup)
    if not peer.on_device:
        return looped(peer, buffer, setup, steps, methods)
    return scanned(buffer, setup, peer.steps(setup, steps), methods)


def calls(peer: Peer, setup: Setup, steps: int, methods: tuple[str, ...] | None = None) -> Program:
    """Returns a program that repeats the methods in Python, jitted one by one on the device."""
    return looped(peer, peer.full(setup), setup, steps, methods or methods_of(setup))


def next_rows(setup: Setup, data: Any) -> Any:
    """Returns rows to add, `[E, ...]`, computed from the last batch: XLA would fold constants."""

    def row(name: str, leaf: jax.Array) -> jax.Array:
        if setup.unit in WINDOWS:
            leaf = leaf[:, 0]
        elif setup.unit == "stack" and name in ("obs", "next_obs"):
            leaf = leaf[:, -1]
        leaf = (
            leaf[: setup.envs]
            if setup.envs <= len(leaf)
            else leaf[np.arange(setup.envs) % len(leaf)]
        )
        return leaf if leaf.dtype == bool else leaf + leaf.dtype.type(1)

    return {name: jax.tree.map(lambda leaf, n=name: row(n, leaf), data[name]) for name in data}


def priorities(data: Any) -> jax.Array:
    """Returns priorities `[B]` from 0.5 to 1.5, computed from the batch."""
    value = data["reward"] if "reward" in data else data["value"] / 1024
    value = value.max(axis=1) if value.ndim > 1 else value
    return 0.5 + value - jnp.floor(value)


def body_of(buffer: Buffer, setup: Setup, methods: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """Returns one step: from (state, last batch) and a key to (state, batch)."""

    def body(carry: Any, key: jax.Array) -> Any:
        state, data = carry
        if "add" in methods:
            rows = next_rows(setup, data)
            state = buffer.add(state, rows)
        if "sample" not in methods:
            return state, rows
        after, drawn = buffer.sample(state, key)
        state = state if after is None else after
        if "update" in methods:
            state = buffer.update(state, drawn.handle, priorities(drawn.data))
        return state, drawn.data

    return body


def carry_of(buffer: Buffer, setup: Setup, methods: tuple[str, ...]) -> Any:
    """Returns the carry of the first step: a state, and a batch or, without sample, rows."""
    if "sample" not in methods:
        rows = jax.device_put(setup.fresh(1)[0])
        return buffer.state, rows
    draw = jax.jit(lambda state, key: buffer.sample(state, key)[1].data)
    return buffer.state, draw(buffer.state, jax.random.key(0))


def loop_of(buffer: Buffer, setup: Setup, methods: tuple[str, ...], agents: int = 0) -> Any:
    """Returns a jitted scan over keys `[steps]`; with agents vmapped, over keys `[steps, A]`."""
    body = body_of(buffer, setup, methods)
    step = jax.vmap(body) if agents else body

    def loop(carry: Any, keys: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, key: (step(carry, key), None), carry, keys)[0]

    return jax.jit(loop, donate_argnums=0)


def scanned(
    buffer: Buffer, setup: Setup, steps: int, methods: tuple[str, ...], agents: int = 0
) -> Program:
    """Returns a program that repeats one compiled scan of `steps` steps, with the state donated."""
    carry, shape = carry_of(buffer, setup, methods), (steps, agents) if agents else (steps,)
    if agents:
        carry = jax.tree.map(lambda leaf: jnp.stack([leaf] * agents), carry)
    buffer.state = None
    keys = jax.random.split(jax.random.key(1), shape)
    start = time.perf_counter()
    run = loop_of(buffer, setup, methods, agents).lower(carry, keys).compile()
    facts = {"compile_s": time.perf_counter() - start, "nbytes": buffer.nbytes * max(1, agents)}
    facts["temp_bytes"] = _temporaries(run)
    held = [carry]

    def once() -> None:
        held[0] = jax.block_until_ready(run(held[0], keys))

    turns = _turns(once)

    def call() -> None:
        for _ in range(turns):
            once()

    return Program(call, steps * turns, facts=facts)


def _turns(once: Callable[[], None], most: int = 1000) -> int:
    """Returns how often to call `once`, so that a timed call lasts about `_CALL_S`."""
    start = time.perf_counter()
    once()
    return int(np.clip(_CALL_S / (time.perf_counter() - start), 1, most))


def _temporaries(run: Any) -> int | None:
    found = run.memory_analysis()
    return None if found is None else int(found.temp_size_in_bytes)


def looped(
    peer: Peer, buffer: Buffer, setup: Setup, steps: int, methods: tuple[str, ...]
) -> Program:
    """Returns a program of steps in Python, each of which waits for its results."""
    rows = [buffer.rows(row) for row in setup.fresh(_FRESH)]
    step = _python_step(peer, buffer, setup, methods)
    keys = jax.block_until_ready(list(jax.random.split(jax.random.key(1), 64)))
    for turn in range(2):  # compiles all methods
        step(rows[turn], keys[turn])
    count = _turns(lambda: step(rows[2], keys[2]), steps)

    def call() -> None:
        for turn in range(count):
            step(rows[turn % _FRESH], keys[turn % 64])

    return Program(call, count, facts={"nbytes": buffer.nbytes})


def _python_step(
    peer: Peer, buffer: Buffer, setup: Setup, methods: tuple[str, ...]
) -> Callable[[Any, Any], None]:
    """Returns one step, which keeps the state from call to call."""
    held = [buffer.state, None]
    buffer.state = None
    add, sample, update = compiled(peer, buffer, held[0])
    new = np.random.default_rng(0).uniform(0.5, 1.5, setup.batch).astype(np.float32)
    given = jax.device_put(new) if peer.on_device else new
    if "update" in methods and "sample" not in methods:
        held[1] = sample(held[0], jax.random.key(0))[1].handle

    def step(rows: Any, key: jax.Array) -> None:
        drawn = None
        if "add" in methods:
            held[0] = add(held[0], rows)
        if "sample" in methods:
            after, drawn = sample(held[0], key)
            held[0] = held[0] if after is None else after
            held[1] = drawn.handle
        if "update" in methods:
            held[0] = update(held[0], held[1], given)
        jax.block_until_ready((held[0], drawn and drawn.data))

    return step


def compiled(peer: Peer, buffer: Buffer, state: Any) -> tuple[Callable, Callable, Callable]:
    """Returns the methods for Python: jitted on the device, where a returned state is donated."""
    if buffer.in_python is not None:
        return buffer.in_python
    if not peer.on_device:
        return buffer.add, buffer.sample, buffer.update
    keeps = jax.eval_shape(buffer.sample, state, jax.random.key(0))[0] is None
    sample = jax.jit(buffer.sample, donate_argnums=() if keeps else 0)
    return jax.jit(buffer.add, donate_argnums=0), sample, jax.jit(buffer.update, donate_argnums=0)
