"""One training cycle of a buffer: add 64, sample 256, update 256 priorities, in a jitted scan.

    python -m benchmarks.cycle [--quick] [--json FILE]

jrb and flashbax take turns in one process. Each ratio is the median over rounds of jrb's time over
the other's; below 1, jrb is faster.
"""

from collections.abc import Callable
from typing import Any

import flashbax as fbx
import jax
import jax.numpy as jnp
from flashbax.buffers import sum_tree as fbx_sum_tree

import jrb
from benchmarks import report

E, B = 64, 256
Body = Callable[[Any, Any], Any]


def transitions(count: int) -> Any:
    """A locomotion transition: obs 17, action 6, reward, done, next obs, float32."""
    rows = jnp.arange(count, dtype=jnp.float32)
    wide = lambda width: jnp.sin(rows[:, None] + jnp.arange(width, dtype=jnp.float32))
    return {
        "obs": wide(17),
        "action": wide(6),
        "reward": wide(1)[:, 0],
        "done": wide(1)[:, 0],
        "next_obs": wide(17),
    }


def frames(count: int) -> Any:
    """An Atari transition: one 84 x 84 frame and the next, uint8."""
    rows = jnp.arange(count, dtype=jnp.uint32)[:, None, None]
    frame = (rows * 31 + jnp.arange(84 * 84, dtype=jnp.uint32).reshape(84, 84)).astype(jnp.uint8)
    return {"obs": frame, "reward": rows[:, 0, 0].astype(jnp.float32), "next_obs": frame + 1}


def next_rows(batch: Any) -> Any:
    """64 rows to add, computed from the batch drawn last."""
    return jax.tree.map(lambda leaf: leaf[:E] + leaf.dtype.type(1), batch)


def errors(batch: Any) -> jax.Array:
    """256 priorities, computed from the batch."""
    return jnp.abs(batch["reward"])


def jrb_cycle(make: Callable[[int], Any], n: int, prioritized: bool) -> tuple[Body, Any]:
    """The cycle with jrb, and a full buffer."""
    sampler = jrb.Prioritized() if prioritized else jrb.Uniform()
    n = n // E * E
    buffer = jrb.ReplayBuffer(capacity=n, num_envs=E, batch_size=B, sampler=sampler)
    example = jax.tree.map(lambda leaf: leaf[0], make(1))
    fill = jax.jit(buffer.extend, donate_argnums=0)
    rows = jax.tree.map(lambda leaf: leaf.reshape(n // E, E, *leaf.shape[1:]), make(n))
    state = fill(buffer.init(example), rows)

    def body(carry: Any, key: jax.Array) -> Any:
        state, batch = carry
        state = buffer.add(state, next_rows(batch))
        sample = buffer.sample(state, key)
        if prioritized:
            state = buffer.update_priority(state, sample, errors(sample.data))
        return state, sample.data

    return body, (state, make(B))


def flashbax_cycle(make: Callable[[int], Any], n: int, prioritized: bool) -> tuple[Body, Any]:
    """The cycle with flashbax's item buffers, and a full buffer."""
    kind = fbx.make_prioritised_item_buffer if prioritized else fbx.make_item_buffer
    buffer = kind(max_length=n, min_length=B, sample_batch_size=B, add_batches=True)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], make(1)))
    fill = jax.jit(buffer.add, donate_argnums=0)
    rows = make(n)
    for first in range(0, n, 5000):
        state = fill(state, jax.tree.map(lambda leaf: leaf[first : first + 5000], rows))

    def body(carry: Any, key: jax.Array) -> Any:
        state, batch = carry
        state = buffer.add(state, next_rows(batch))
        sample = buffer.sample(state, key)
        if prioritized:
            state = buffer.set_priorities(state, sample.indices, errors(sample.experience))
        return state, sample.experience

    return body, (state, make(B))


def jrb_tree(n: int) -> tuple[Body, Any]:
    """Jrb's sum-tree alone: sample and update."""
    tree = jrb.sum_tree.init(n)
    tree = jrb.sum_tree.update(tree, jnp.arange(n), jnp.ones(n))

    def body(tree: Any, key: jax.Array) -> Any:
        indices = jrb.sum_tree.sample(tree, key, B)
        return jrb.sum_tree.update(tree, indices, masses_for(indices))

    return body, tree


def flashbax_tree(n: int) -> tuple[Body, Any]:
    """Flashbax's sum-tree alone, with the update that it uses on the CPU."""
    tree = fbx_sum_tree.init(n)
    tree = fbx_sum_tree.set_batch_bincount(tree, jnp.arange(n), jnp.ones(n))

    def body(tree: Any, key: jax.Array) -> Any:
        indices = fbx_sum_tree.stratified_sample(tree, B, key)
        return fbx_sum_tree.set_batch_scan(tree, indices, masses_for(indices))

    return body, tree


def masses_for(indices: jax.Array) -> jax.Array:
    """256 masses between 0.5 and 1.5."""
    return 0.5 + (indices & 1023).astype(jnp.float32) / 1024


def jrb_uniform_sample(n: int) -> tuple[Body, Any]:
    """A uniform `sample` alone."""
    buffer = jrb.ReplayBuffer(capacity=n, batch_size=B)
    state = jax.jit(buffer.extend)(
        buffer.init(jax.tree.map(lambda leaf: leaf[0], transitions(1))), transitions(n)
    )
    return lambda carry, key: (carry[0], buffer.sample(carry[0], key).data), (
        state,
        transitions(B),
    )


def bare_uniform_sample(n: int) -> tuple[Body, Any]:
    """What a uniform sample cannot do without: random integers and a gather of rows."""

    def body(carry: Any, key: jax.Array) -> Any:
        indices = jax.random.randint(key, (B,), 0, n)
        rows = jax.tree.map(lambda leaf: leaf.at[indices].get(mode="promise_in_bounds"), carry[0])
        return carry[0], rows

    return body, (transitions(n), transitions(B))


def tasks(quick: bool) -> list[report.Task]:
    """What is compared."""
    rows = []
    for n in (10**5,) if quick else (10**5, 10**6):
        for name, prioritized in (("uniform cycle", False), ("prioritized cycle", True)):
            one = lambda n=n, p=prioritized: jrb_cycle(transitions, n, p)
            other = lambda n=n, p=prioritized: flashbax_cycle(transitions, n, p)
            rows.append((name, n, one, other, 300))
        rows.append(
            ("sum-tree alone", n, lambda n=n: jrb_tree(n), lambda n=n: flashbax_tree(n), 300)
        )
        rows.append(
            (
                "uniform sample over randint + gather",
                n,
                lambda n=n: jrb_uniform_sample(n),
                lambda n=n: bare_uniform_sample(n),
                1000,
            )
        )
    for name, prioritized in (("uniform, frames", False), ("prioritized, frames", True)):
        one = lambda p=prioritized: jrb_cycle(frames, 10**4, p)
        other = lambda p=prioritized: flashbax_cycle(frames, 10**4, p)
        rows.append((name, 10**4, one, other, 30))
    return rows


if __name__ == "__main__":
    report.run(__doc__, "cycle.json", tasks)
