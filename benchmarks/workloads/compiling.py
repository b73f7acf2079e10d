"""The time to trace, lower and compile a scan of steps, with empty caches."""

import gc
from collections.abc import Iterator

import jax

from ..peers import Peer
from ..setup import Setup
from ..timing import Program
from .case import Case, Wanted, beside
from .programs import carry_of, loop_of, methods_of

SETUPS = {
    "uniform step": Setup("vector", 10**4),
    "prioritized step": Setup("vector", 10**4, sampler="prioritized"),
    "prioritized step, 19 leaves": Setup("nested", 10**4, sampler="prioritized"),
    "uniform, frames": Setup("frames", 1024),
    "prioritized, 3-step returns": Setup(
        "episodic", 10**4, 16, sampler="prioritized", unit="n-step"
    ),
    "uniform, windows": Setup("episodic", 10**4, 16, 32, unit="slices"),
    "prioritized, windows": Setup("episodic", 10**4, 16, 32, "prioritized", "slices"),
    "uniform, stacks": Setup("frames", 1024, 8, 32, unit="stack"),
    "without replacement": Setup("vector", 10**4, sampler="without replacement"),
}


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields cases of all kinds of steps, and of one under vmap, for peers on the device."""
    able = Wanted([peer for peer in wanted.peers if peer.on_device], wanted.quick)
    for name, setup in list(SETUPS.items())[: wanted.pick(2, None)]:
        yield beside(able, name, setup, compiles, weight=1 / 3)
    vmapped = lambda peer, setup: compiles(peer, setup, agents=8)
    setup = Setup("vector", 2000, 4, 64, "prioritized")
    yield beside(able, "prioritized step, 8 agents", setup, vmapped, weight=1 / 3)


def compiles(peer: Peer, setup: Setup, agents: int = 0) -> Program:
    """Returns a program that traces, lowers and compiles a scan of steps from shapes alone."""
    buffer = peer.full(setup)
    methods = methods_of(setup)
    carry = jax.eval_shape(lambda: carry_of(buffer, setup, methods))
    shape = (100, agents) if agents else (100,)
    if agents:
        carry = jax.tree.map(lambda x: jax.ShapeDtypeStruct((agents, *x.shape), x.dtype), carry)
    keys, buffer.state = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape)), None

    def call() -> None:
        loop_of(buffer, setup, methods, agents).lower(carry, keys).compile()

    return Program(call, before=_forgotten)


def _forgotten() -> None:
    """Clears JAX's caches and collects garbage, outside the timed call."""
    jax.clear_caches()
    gc.collect()
