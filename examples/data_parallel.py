"""Data parallelism: each device has its own environments and buffer; all share a network.

    python -m examples.data_parallel --devices 8

The values of a random walk are learned by three-step returns from prioritized replay. The states of
the buffers have a leading axis that is sharded over the devices; methods under `jax.vmap`, inside
`jax.shard_map`, write each state in place. Devices exchange only gradients.

Reference: Sutton and Barto, 2018, "Reinforcement learning", example 6.2 (random walk).
"""

import argparse
import os
from typing import Any

ROOMS, WALKS, BATCH, RATE = 5, 8, 64, 0.2
TRUTH = [(room + 1) / (ROOMS + 1) for room in range(ROOMS)]


def learner(devices: int, capacity: int = 1024) -> tuple[Any, Any]:
    """Returns a function that trains for some steps, and its initial arguments.

    Args:
        devices: the number of devices D, each with `WALKS` environments.
        capacity: the number of transitions on each device.

    Returns:
        A function from parameters, buffers and environments `[D, ...]`, and keys `[D, steps]` to
        new parameters, buffers and environments; and the initial values of these three.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jrb

    buffer = jrb.ReplayBuffer(
        capacity,
        num_envs=WALKS,
        batch_size=BATCH,
        sampler=jrb.Prioritized(),
        unit=jrb.NStep(3, discount=1.0),
    )
    example = {
        "observation": jnp.int32(0),
        "next": {
            "observation": jnp.int32(0),
            "reward": jnp.float32(0),
            "done": jnp.bool_(False),
        },
    }

    def value(params: Any, room: jax.Array) -> jax.Array:
        hidden = jnp.tanh(params["in"][room])
        return hidden @ params["out"]

    def walk(room: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        """Moves every environment one room left or right; the reward right of the last is 1."""
        after = room + jnp.where(jax.random.bernoulli(key, shape=room.shape), 1, -1)
        done = (after < 0) | (after >= ROOMS)
        reward = (after >= ROOMS).astype(jnp.float32)
        inside = jnp.clip(after, 0, ROOMS - 1)
        step = {
            "observation": room,
            "next": {"observation": inside, "reward": reward, "done": done},
        }
        return jnp.where(done, ROOMS // 2, inside), step

    def errors(params: Any, batch: Any) -> jax.Array:
        after = batch.data["next"]
        target = after["reward"] + jnp.where(
            after["done"], 0.0, batch.info["discount"] * value(params, after["observation"])
        )
        return jax.lax.stop_gradient(target) - value(params, batch.data["observation"])

    def on_one(params: Any, state: Any, room: jax.Array, key: jax.Array) -> Any:
        """Takes one step with one state; returns state, rooms and a gradient to apply."""
        move, draw = jax.random.split(key)
        room, step = walk(room, move)
        state = buffer.add(state, step)
        batch = buffer.sample(state, draw)
        loss = lambda params: jnp.mean(batch.weights * errors(params, batch) ** 2)
        gradient = jax.grad(loss)(params)
        priorities = jnp.abs(errors(params, batch))
        return buffer.update_priority(state, batch, priorities), room, gradient

    def on_all(params: Any, states: Any, rooms: jax.Array, keys: jax.Array) -> Any:
        """Takes some steps with all states on this device, which have a leading axis."""

        def step(carry: Any, keys: jax.Array) -> Any:
            params, states, rooms = carry
            # `pcast` marks the parameters as varying by device; else `grad` would sum gradients.
            mine = jax.lax.pcast(params, "data", to="varying")
            states, rooms, gradients = jax.vmap(on_one, (None, 0, 0, 0))(mine, states, rooms, keys)
            gradient = jax.lax.pmean(jax.tree.map(lambda leaf: leaf.mean(0), gradients), "data")
            params = jax.tree.map(lambda leaf, by: leaf - RATE * by, params, gradient)
            return (params, states, rooms), None

        carry, _ = jax.lax.scan(step, (params, states, rooms), jnp.swapaxes(keys, 0, 1))
        return carry

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    cut, whole = P("data"), P()
    train = jax.jit(
        jax.shard_map(
            on_all,
            mesh=mesh,
            in_specs=(whole, cut, cut, cut),
            out_specs=(whole, cut, cut),
        ),
        donate_argnums=(1, 2),
    )
    many = NamedSharding(mesh, cut)
    states = jax.jit(jax.vmap(lambda _: buffer.init(example)), out_shardings=many)(
        jnp.arange(devices)
    )
    rooms = jax.device_put(jnp.full((devices, WALKS), ROOMS // 2, jnp.int32), many)
    params = {
        "in": 0.5 * jax.random.normal(jax.random.key(1), (ROOMS, 16)),
        "out": jnp.zeros(16),
    }
    return train, (params, states, rooms)


def run(devices: int, steps: int = 600, seed: int = 0) -> float:
    """Trains, and returns the largest error of the learned values."""
    import jax
    import jax.numpy as jnp

    train, start = learner(devices)
    keys = jax.random.split(jax.random.key(seed), (devices, steps))
    params, _, _ = train(*start, keys)
    values = jnp.tanh(params["in"]) @ params["out"]
    return float(jnp.max(jnp.abs(values - jnp.asarray(TRUTH))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="made of the CPU if there are fewer")
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    error = run(options.devices, options.steps)
    print(
        f"{options.devices} devices, {options.steps} steps: values are off by {error:.3f} at most"
    )
