"""Draws of windows: 32 slices of 64 transitions, against the bare gather and against flashbax.

And draws from observations stored once, against plain storage.

    python -m benchmarks.windows [--quick] [--json FILE]

Each ratio is the median over rounds of jrb's time over the other's; below 1, jrb is faster.
"""

from collections.abc import Callable
from typing import Any

import flashbax as fbx
import jax
import jax.numpy as jnp

import jrb
from benchmarks import report
from benchmarks.cycle import transitions

B, L, E = 32, 64, 16
Body = Callable[[Any, Any], Any]
KEYS = jrb.Keys(observation="obs", next_observation="next_obs", reward="reward", done="done")


def steps(count: int) -> Any:
    """Transitions in episodes of about 300 steps."""
    rows = transitions(count)
    return rows | {"done": (jnp.arange(count) * 7919) % 300 == 0}


def filled(n: int, envs: int, **parts: Any) -> tuple[jrb.ReplayBuffer, Any]:
    """A full buffer."""
    n = n // envs * envs
    buffer = jrb.ReplayBuffer(n, num_envs=envs, batch_size=B, keys=KEYS, **parts)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], steps(1)))
    rows = jax.tree.map(lambda leaf: leaf.reshape(n // envs, envs, *leaf.shape[1:]), steps(n))
    return buffer, jax.jit(buffer.extend, donate_argnums=0)(state, rows)


def draw_alone(n: int, envs: int, **parts: Any) -> tuple[Body, Any]:
    """A `sample` of windows."""
    buffer, state = filled(n, envs, **parts)
    data = jax.eval_shape(lambda: buffer.sample(state, jax.random.key(0)).data)
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), data)
    return lambda carry, key: (carry[0], buffer.sample(carry[0], key).data), (state, blank)


def bare_draw(n: int, envs: int) -> tuple[Body, Any]:
    """What a draw of windows cannot do without: random starts and a gather of rows."""
    rows = steps(n // envs * envs)
    window = jnp.arange(L) * envs
    room = n // envs * envs - L * envs

    def body(carry: Any, key: jax.Array) -> Any:
        at = jax.random.randint(key, (B, 1), 0, room) + window
        return carry[0], jax.tree.map(
            lambda leaf: leaf.at[at].get(mode="promise_in_bounds"), carry[0]
        )

    blank = jax.tree.map(lambda leaf: jnp.zeros((B, L, *leaf.shape[1:]), leaf.dtype), rows)
    return body, (rows, blank)


def cycle(n: int, prioritized: bool, **unit: Any) -> tuple[Body, Any]:
    """Add one row of 16 environments and draw, with jrb."""
    sampler = jrb.Prioritized() if prioritized else jrb.Uniform()
    buffer, state = filled(n, E, sampler=sampler, unit=jrb.Sequence(L, **unit))

    def body(carry: Any, key: jax.Array) -> Any:
        state, data = carry
        row = jax.tree.map(lambda leaf: leaf[:E, 0] + leaf.dtype.type(1), data | {"done": None})
        state = buffer.add(state, row | {"done": data["done"][:E, 1]})
        return state, buffer.sample(state, key).data

    blank = jax.tree.map(lambda leaf: leaf.reshape(B, L, *leaf.shape[1:]), steps(B * L))
    return body, (state, blank)


def flashbax_cycle(n: int, prioritized: bool) -> tuple[Body, Any]:
    """The same with flashbax's trajectory buffers, whose windows cross the ends of episodes."""
    kind = fbx.make_prioritised_trajectory_buffer if prioritized else fbx.make_trajectory_buffer
    shape = {"add_batch_size": E, "sample_batch_size": B, "sample_sequence_length": L, "period": 1}
    buffer = kind(**shape, min_length_time_axis=L, max_length_time_axis=n // E)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], steps(1)))
    fill = jax.jit(buffer.add, donate_argnums=0)
    for first in range(0, n // E, 5000):
        count = min(5000, n // E - first)
        rows = jax.tree.map(lambda leaf: leaf.reshape(E, count, *leaf.shape[1:]), steps(E * count))
        state = fill(state, rows)

    def body(carry: Any, key: jax.Array) -> Any:
        state, data = carry
        row = jax.tree.map(lambda leaf: leaf[:E, :1] + leaf.dtype.type(1), data | {"done": None})
        state = buffer.add(state, row | {"done": data["done"][:E, 1:2]})
        return state, buffer.sample(state, key).experience

    blank = jax.tree.map(lambda leaf: leaf.reshape(B, L, *leaf.shape[1:]), steps(B * L))
    return body, (state, blank)


def frames_cycle(once: bool, envs: int, batch_size: int) -> tuple[Body, Any]:
    """Draw, then add one row, of 84 x 84 x 4 uint8 observations in episodes of 50 steps."""
    storage = jrb.DeviceStorage(once=once)
    buffer = jrb.ReplayBuffer(4096, num_envs=envs, batch_size=batch_size, storage=storage)
    image = jnp.zeros((84, 84, 4), jnp.uint8)
    example = {"observation": image, "next": {"observation": image, "reward": jnp.float32(0)}}
    rows = jax.tree.map(lambda leaf: jnp.zeros((64, envs, *leaf.shape), leaf.dtype), example)
    state, extend = buffer.init(example), jax.jit(buffer.extend, donate_argnums=0)
    for _ in range(4096 // envs // 64):
        state = extend(state, rows)

    def body(carry: Any, key: jax.Array) -> Any:
        state, frames, time = carry
        state, sample = buffer.draw(state, key)
        after = sample.data["observation"][:envs] + jnp.uint8(1)
        reward = sample.data["next"]["observation"][:envs, 0, 0, 0].astype(jnp.float32)
        row = {"observation": frames, "next": {"observation": after, "reward": reward}}
        state = buffer.add(state, row)
        return state, jnp.where(time % 50 == 49, after + jnp.uint8(7), after), time + 1

    return body, (state, jnp.zeros((envs, 84, 84, 4), jnp.uint8), jnp.int32(0))


def tasks(quick: bool) -> list[report.Task]:
    """What is compared."""
    rows: list[report.Task] = []
    for n in (10**4, 10**5) if quick else (10**4, 10**6, 10**7):
        for envs in (1, E):
            bare = lambda n=n, e=envs: bare_draw(n, e)
            for name, parts in DRAWS.items():
                one = lambda n=n, e=envs, parts=parts: draw_alone(n, e, **parts)
                rows.append((f"{name} of {envs} over the gather", n, one, bare, 300))
    n = 10**5 if quick else 10**6
    for name, prioritized in (("uniform", False), ("prioritized", True)):
        one = lambda p=prioritized: cycle(n, p)
        other = lambda p=prioritized: flashbax_cycle(n, p)
        rows.append((f"{name} add + draw over flashbax", n, one, other, 300))
    for envs, batch_size in ((1, 32), (8, 32), (1, 256), (16, 256)):
        one = lambda e=envs, b=batch_size: frames_cycle(True, e, b)
        other = lambda e=envs, b=batch_size: frames_cycle(False, e, b)
        name = f"observations once over plain: add {envs}, draw {batch_size}"
        rows.append((name, 4096, one, other, 100))
    return rows


DRAWS = {
    "slices": {"unit": jrb.Sequence(L)},
    "episodes": {"unit": jrb.Sequence(L, over="episodes")},
    "padded": {"unit": jrb.Sequence(L, short="pad")},
}

if __name__ == "__main__":
    report.run(__doc__, "windows.json", tasks)
