"""What chooses items of 100,000 by groups, staleness, returns or numbers of draws.

    python -m benchmarks.alone.selection [--rounds 15]

Each program of jrb is timed beside its bare computation in JAX, without a buffer, and beside the
counterpart of TorchRL 0.14, if torchrl is installed; all take turns in one process. A batch has 256
items of 16 floats, groups have 8 items, and episodes 100. A cycle adds 64 items, 8 groups, and
draws a batch; cycles of JAX run in a compiled loop, those of TorchRL in Python.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrb

from ..timing import Program, in_turn, ratio

N, B, K, LENGTH = 100_000, 256, 8, 100
ROWS, STEPS = 64, 100  # of a cycle, and cycles per call
RNG = np.random.default_rng(0)
ITEMS = {
    "prompt": np.arange(N, dtype=np.int32) // K,
    "version": np.arange(N, dtype=np.int32) // 10_000,
    "x": RNG.normal(size=(N, 16)).astype(np.float32),
    "next": {
        "reward": RNG.normal(size=N).astype(np.float32),
        "done": np.arange(N) % LENGTH == LENGTH - 1,
    },
}


def fresh(leaves: dict[str, jax.Array], age: jax.Array, version: jax.Array) -> jax.Array:
    """Returns weights that decay with staleness, 0 beyond 5 versions."""
    staleness = version - leaves["version"]
    return jnp.where(staleness <= 5, 1 / (staleness.astype(jnp.float32) + 1), 0.0)


def timed(call: Callable[[], Any], steps: int = 1) -> Program:
    """Returns a program that waits for its results."""
    program = Program(lambda: jax.block_until_ready(call()), steps)
    program.warm()
    return program


def compile_loop(cycle: Callable[[Any, Any, jax.Array], tuple[Any, Any]], state: Any) -> Program:
    """Returns a compiled loop over `cycle(state, rows, key)`, which returns a state and a batch."""

    def step(carry: Any, key: jax.Array) -> Any:
        state, data = carry
        # Made of the last batch, as XLA would fold constants; with new keys of groups.
        rows = jax.tree.map(lambda leaf: leaf[:ROWS], data)
        return cycle(state, rows | {"prompt": rows["prompt"] + N}, key), None

    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys)[0], donate_argnums=0)
    keys = jax.random.split(jax.random.key(0), STEPS)
    last = [(state, jax.tree.map(lambda leaf: jnp.asarray(leaf[:B]), ITEMS))]

    def call() -> Any:
        last[0] = run(last[0], keys)
        return last[0]

    return timed(call, STEPS)


def of_jrb() -> dict[str, Program]:
    """Returns the programs of jrb."""
    key = jax.random.key(0)
    samplers = {
        "groups": jrb.Grouped("prompt", N // K, K),
        "staleness": jrb.Weighted(fresh, leaves=("version",)),
    }
    programs = {}
    for name, sampler in samplers.items():
        buffer, state = jrb.from_items(ITEMS, sampler=sampler, batch_size=B)
        context = {} if sampler.reads is None else {"context": jnp.int32(9)}
        sample = jax.jit(buffer.sample)
        programs[name] = timed(lambda s=sample, st=state, c=context: s(st, key, **c))

        def cycle(state: Any, rows: Any, key: Any, buffer: Any = buffer, by: Any = context) -> Any:
            state = buffer.extend(state, rows)
            state, sample = buffer.draw(state, key, **by)
            return state, sample.data

        programs[f"{name}, cycle"] = compile_loop(cycle, jax.tree.map(jnp.copy, state))
    once = jrb.Uniform(replacement=False, max_draws=1)
    buffer, full = jrb.from_items(ITEMS, sampler=once, batch_size=B)
    draw = jax.jit(buffer.draw, donate_argnames="state")

    def consume() -> Any:
        state = jax.tree.map(jnp.copy, full)
        for _ in range(20):
            state, sample = draw(state, key)
        return sample

    programs["consumption"] = timed(consume, 20)
    buffer, state = jrb.from_items(ITEMS)
    query = lambda: jrb.episodes(buffer, state).where(min_return=5.0, min_length=50).slots
    programs["returns"] = timed(query)
    return programs


def of_jax() -> dict[str, Program]:
    """Returns the bare computations: what has to be drawn and read, without any buffer."""
    items, key = jax.device_put(ITEMS), jax.random.key(0)
    members = jnp.arange(N, dtype=jnp.int32).reshape(-1, K)

    def groups(items: Any, key: jax.Array, members: jax.Array = members) -> Any:
        group = jax.random.randint(key, (B // K,), 0, N // K)
        return jax.tree.map(lambda leaf: leaf[members[group].reshape(-1)], items)

    def staleness(items: Any, key: jax.Array) -> Any:
        total = jnp.cumsum(fresh(items, jnp.zeros(N), jnp.int32(9)))
        at = jnp.searchsorted(total, jax.random.uniform(key, (B,)) * total[-1])
        return jax.tree.map(lambda leaf: leaf[at], items)

    def write_rows(items: Any, rows: Any, cursor: jax.Array) -> Any:
        put = lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, cursor, 0)
        return jax.tree.map(put, items, rows)

    def groups_cycle(state: Any, rows: Any, key: jax.Array) -> Any:
        items, members, cursor = state
        items, slots = write_rows(items, rows, cursor), cursor + jnp.arange(ROWS).reshape(-1, K)
        members = jax.lax.dynamic_update_slice_in_dim(members, slots, cursor // K, 0)
        return (items, members, (cursor + ROWS) % (N - ROWS)), groups(items, key, members)

    def staleness_cycle(state: Any, rows: Any, key: jax.Array) -> Any:
        items = write_rows(state[0], rows, state[1])
        return (items, (state[1] + ROWS) % (N - ROWS)), staleness(items, key)

    order = jax.random.permutation(key, N)

    @jax.jit
    def consume(items: Any, first: jax.Array) -> Any:
        at = jax.lax.dynamic_slice_in_dim(order, first, B)
        return jax.tree.map(lambda leaf: leaf[at], items)

    def returns() -> Any:
        sums = np.add.reduceat(ITEMS["next"]["reward"], np.arange(0, N, LENGTH))
        good = np.flatnonzero(sums >= 5.0)
        return (good[:, None] * LENGTH + np.arange(LENGTH)).reshape(-1)

    draws = {"groups": jax.jit(groups), "staleness": jax.jit(staleness)}
    copy_items = lambda: jax.tree.map(jnp.copy, items)
    return {
        "groups": timed(lambda: draws["groups"](items, key)),
        "groups, cycle": compile_loop(
            groups_cycle, (copy_items(), jnp.copy(members), jnp.int32(0))
        ),
        "staleness": timed(lambda: draws["staleness"](items, key)),
        "staleness, cycle": compile_loop(staleness_cycle, (copy_items(), jnp.int32(0))),
        "consumption": timed(lambda: consume(items, jnp.int32(B))),
        "returns": timed(returns),
    }


def of_torchrl() -> dict[str, Program]:
    """Returns the programs of TorchRL; none if it is not installed."""
    try:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, ReplayBuffer, traj
        from torchrl.data.replay_buffers import samplers
    except ImportError:
        return {}
    # Its threads would wait actively between calls, and take time from the other programs.
    torch.set_num_threads(1)
    flat = {name: torch.from_numpy(ITEMS[name]) for name in ("prompt", "version", "x")}
    flat["done"] = torch.from_numpy(ITEMS["next"]["done"])[:, None]
    rows = TensorDict(flat, batch_size=[N])
    after = {name: torch.from_numpy(leaf)[:, None] for name, leaf in ITEMS["next"].items()}
    rows["next"] = TensorDict(after, batch_size=[N])

    def filled(sampler: Any = None) -> Any:
        storage = LazyTensorStorage(N)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=B)
        buffer.extend(rows)
        return buffer

    groups = filled(samplers.PromptGroupSampler(num_groups=B // K, group_key="prompt"))
    stale = samplers.StalenessAwareSampler(max_staleness=5, version_key="version")
    stale.consumer_version = 9
    staleness = filled(stale)
    once = filled(samplers.ConsumingSampler(1))
    returns, new = filled(), rows[:ROWS].clone()

    def cycle(buffer: Any) -> Any:
        new["prompt"] += N
        buffer.extend(new)
        return buffer.sample()

    good = (traj[("next", "reward")].sum() >= 5.0) & (traj.length >= 50)
    return {
        "groups": timed(groups.sample),
        "groups, cycle": timed(lambda: cycle(groups)),
        "staleness": timed(staleness.sample),
        "staleness, cycle": timed(lambda: cycle(staleness)),
        "consumption": timed(once.sample),
        "returns": timed(lambda: returns.query(good)),
    }


def main() -> None:
    """Prints the times, and the ratios to the bare computations and to TorchRL."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    ours, bare, theirs = of_jrb(), of_jax(), of_torchrl()
    for name, program in ours.items():
        others = [each[name] for each in (bare, theirs) if each]
        in_turn([program, *others], rounds)
        times = [f"{np.median(one.times) * 1e6:10.0f} us" for one in (program, *others)]
        ratios = [f"{ratio(program, other):8.3f}" for other in others]
        line = f"{name:16} jrb, bare, TorchRL: {' '.join(times)}; ratios: {' '.join(ratios)}"
        print(line)  # noqa: T201


if __name__ == "__main__":
    main()
