"""Times several programs in turn, in one process, so that a drifting machine meets all of them."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass
class Program:
    """A compiled loop over a donated state.

    Attributes:
        name: what it is called in a table.
        steps: how many cycles one call runs.
        compiles_s: how long tracing, lowering and compiling took, in seconds, one number a time.
        temp_bytes: what the compiled loop allocates beside its arguments and results.
        times_us: microseconds a cycle, one number a call.
    """

    name: str
    steps: int
    run: Callable[..., Any]
    state: Any
    keys: Any
    build: Callable[[], Any]
    compiles_s: list[float]
    temp_bytes: int
    times_us: list[float]

    def call(self) -> None:
        """Runs the loop once and notes the time of a cycle."""
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.run(self.state, self.keys))
        self.times_us.append((time.perf_counter() - start) / self.steps * 1e6)

    def compile(self) -> None:
        """Compiles the loop once more and notes how long it took."""
        jax.clear_caches()
        start = time.perf_counter()
        self.build()
        self.compiles_s.append(time.perf_counter() - start)

    @property
    def median_us(self) -> float:
        """The median time of a cycle."""
        return float(np.median(self.times_us))


def program(name: str, body: Callable[[Any, Any], Any], state: Any, steps: int) -> Program:
    """Compiles `steps` cycles of `body(state, key) -> state` into one scan."""

    def loop(state: Any, keys: Any) -> Any:
        return jax.lax.scan(lambda state, key: (body(state, key), None), state, keys)[0]

    keys = jax.random.split(jax.random.key(0), steps)
    shapes = jax.eval_shape(lambda: (state, keys))
    build = lambda: jax.jit(loop, donate_argnums=0).lower(*shapes).compile()
    run = build()
    temp = run.memory_analysis().temp_size_in_bytes
    return Program(name, steps, run, state, keys, build, [], temp, [])


def in_turn(programs: list[Program], rounds: int) -> None:
    """Compiles and calls the programs one after the other, round after round.

    The first round of calls is not counted; there are five of compiling.
    """
    for _ in range(5):
        for item in programs:
            item.compile()
    for _ in range(rounds + 1):
        for item in programs:
            item.call()
    for item in programs:
        item.times_us.pop(0)


def compile_ratio(one: Program, other: Program) -> float:
    """The median, over rounds, of the time to compile one over that of the other."""
    return float(np.median(np.array(one.compiles_s) / np.array(other.compiles_s)))


def ratio(one: Program, other: Program) -> float:
    """The median, over rounds, of the time of one over the time of the other."""
    return float(np.median(np.array(one.times_us) / np.array(other.times_us)))
