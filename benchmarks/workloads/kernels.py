"""The number of GPU kernels of each method, compiled for a GPU that need not be present."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .. import gpu
from ..peers import Buffer, Peer
from ..setup import Setup
from ..timing import Program
from .case import Case, Wanted, beside
from .programs import body_of, carry_of, methods_of, next_rows

SETUPS = {
    "uniform": Setup("vector"),
    "prioritized": Setup("vector", sampler="prioritized"),
    "prioritized, 19 leaves": Setup("nested", sampler="prioritized"),
    "prioritized, 3-step returns": Setup("episodic", sampler="prioritized", unit="n-step"),
    "uniform, stacks": Setup("frames", 1024, 8, 32, unit="stack"),
}


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields cases of each method alone, and of all methods in one step."""
    able = Wanted([peer for peer in wanted.peers if peer.on_device], wanted.quick)
    for name, setup in list(SETUPS.items())[: wanted.pick(2, None)]:
        setup = dataclasses.replace(setup, n=wanted.pick(1024, setup.n))
        for method in (*methods_of(setup), "step"):
            make = lambda peer, setup, method=method: launched(peer, setup, method)
            yield beside(able, f"{name}: {method}", setup, make, unit="kernels", within=gpu.assumed)


def launched(peer: Peer, setup: Setup, method: str) -> Program:
    """Compiles a method; returns a program that does nothing, with the kernel count as a fact."""
    function, args = _call(peer.full(setup), setup, method)
    run = gpu.compiled(function, *args, donate=() if method == "sample" else (0,))
    kernels, waits = gpu.launches(run.as_text())
    facts = {"value": kernels, "waits": waits}
    facts["temp_bytes"] = int(run.memory_analysis().temp_size_in_bytes)
    return Program(lambda: None, facts=facts)


def _call(buffer: Buffer, setup: Setup, method: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a method, or a step of all methods, and its arguments."""
    methods, key = methods_of(setup), jax.random.key(0)
    state, data = carry_of(buffer, setup, methods)
    if method == "add":
        return buffer.add, (state, jax.eval_shape(lambda: next_rows(setup, data)))
    if method == "sample":
        return lambda state, key: _distinct(buffer.sample(state, key)), (state, key)
    if method == "update":
        handle = jax.eval_shape(buffer.sample, state, key)[1].handle
        return buffer.update, (state, handle, jnp.ones(setup.batch))
    return body_of(buffer, setup, methods), ((state, data), key)


def _distinct(drawn: Any) -> list[jax.Array]:
    """Returns each array once: XLA copies an array that is returned twice."""
    return list({id(leaf): leaf for leaf in jax.tree.leaves(drawn)}.values())
