"""The time of each method from 10^4 to 10^8 transitions, in one buffer and in eight shards.

Items are one float32, so that only jrb's own work is timed: 16 environments, batches of 256, one
device. All programs of one N take turns; the least time of the rounds and their median are
reported. At most 7.2 GB of states are alive at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrb

from .. import timing
from ..workloads.case import Wanted

E, B, S, STEPS, CHUNK = 16, 256, 8, 300, 62_500
Body = Callable[[Any, Any], Any]


def filled(n: int, sampler: Any, shards: int) -> tuple[Any, Any]:
    """Returns a full buffer, sharded if `shards` > 1, and its state."""
    buffer: Any = jrb.ReplayBuffer(n, num_envs=E, batch_size=B, sampler=sampler)
    if shards > 1:
        buffer = jrb.Sharded(buffer, shards)
    state = buffer.init({"x": jnp.float32(0)})
    extend = jax.jit(buffer.extend, donate_argnums=0)
    rows = min(CHUNK, n // E)
    for number in range(n // E // rows):
        items = jnp.sin(jnp.arange(number * rows, (number + 1) * rows, dtype=jnp.float32))
        state = extend(state, {"x": items[:, None] + jnp.arange(E, dtype=jnp.float32)})
    return buffer, state


def add(buffer: Any) -> Body:
    """Returns a step that adds a row of 16 items."""
    return lambda carry, key: (buffer.add(carry[0], {"x": carry[1][:E] + 1}), carry[1] + 1)


def draw(buffer: Any) -> Body:
    """Returns a step that samples 256 items."""

    def body(carry: Any, key: jax.Array) -> Any:
        return carry[0], buffer.sample(carry[0], key).data["x"] + carry[1]

    return body


def update(buffer: Any) -> Body:
    """Returns a step that samples 256 items and updates their priorities."""

    def body(carry: Any, key: jax.Array) -> Any:
        sample = buffer.sample(carry[0], key)
        error = jnp.abs(sample.data["x"])
        return buffer.update_priority(carry[0], sample, error), error

    return body


def cycle(buffer: Any) -> Body:
    """Returns a step that adds a row, samples 256 items and updates their priorities."""
    one, other = add(buffer), update(buffer)
    return lambda carry, key: other(one(carry, key), key)


PRIORITIZED = jrb.Prioritized()
TASKS = (
    ("uniform: add 16", jrb.Uniform(), 1, add),
    ("uniform: sample 256", jrb.Uniform(), 1, draw),
    ("prioritized: add 16", PRIORITIZED, 1, add),
    ("prioritized: sample 256", PRIORITIZED, 1, draw),
    ("prioritized: sample and update 256", PRIORITIZED, 1, update),
    ("prioritized: all three", PRIORITIZED, 1, cycle),
    ("prioritized, 8 shards: all three", PRIORITIZED, S, cycle),
)


def program(body: Body, carry: Any) -> timing.Program:
    """Returns a program of `STEPS` steps in one compiled scan, with the carry donated."""
    keys = jax.random.split(jax.random.key(0), STEPS)
    scan = lambda carry, keys: jax.lax.scan(lambda c, key: (body(c, key), None), carry, keys)[0]
    run = jax.jit(scan, donate_argnums=0).lower(carry, keys).compile()
    held, found = [carry], run.memory_analysis()
    facts = {"temp_bytes": found.temp_size_in_bytes if found else None}

    def call() -> None:
        held[0] = jax.block_until_ready(run(held[0], keys))

    return timing.Program(call, STEPS, facts=facts)


def measured(n: int, rounds: int) -> list[dict]:
    """Times all tasks at one N in turn; returns a row per task."""
    programs, sizes = {}, {}
    for what, sampler, shards, make in TASKS:
        buffer, state = filled(n, sampler, shards)
        sizes[what] = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        programs[what] = program(make(buffer), (state, jnp.zeros(B)))
        programs[what].warm()
        del state
    timing.in_turn(programs.values(), rounds)
    return [
        {
            "what": what,
            "n": n,
            "median_us": float(np.median(program.times)) * 1e6,
            "least_us": min(program.times) * 1e6,
            "temp_bytes": program.facts["temp_bytes"],
            "state_bytes": sizes[what],
        }
        for what, program in programs.items()
    ]


def run(wanted: Wanted) -> dict[str, Any]:
    """Runs all tasks at each N, 100 rounds (10 if quick)."""
    sizes = wanted.pick((10**4, 10**5), (10**4, 10**5, 10**6, 10**7, 10**8))
    rows = [row for n in sizes for row in measured(n, wanted.pick(10, 100))]
    return {"rows": together(rows)}


def together(rows: list[dict]) -> list[dict]:
    """Merges the rows of each task into one row with the figures of each N."""
    found = {}
    for row in rows:
        task = found.setdefault(row["what"], {"what": row["what"], "n": {}})
        task["n"][str(row["n"])] = {k: v for k, v in row.items() if k not in ("what", "n")}
    return list(found.values())
