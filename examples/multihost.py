"""Several processes, each with its own environments and shards, train one network together.

    python -m examples.multihost --processes 2 --steps 60 --path /tmp/walks --kill-at 35

This command starts the processes on this machine, kills one of them, restarts all from the last
save, and compares the result with an undisturbed run: parameters, buffer and priorities are equal
bit for bit. On a cluster, start it on each host with `--process` and `--coordinator`.

The values of a random walk are learned by three-step returns from prioritized replay. Items never
leave the process whose environments made them; processes exchange only gradients, and a few
statistics of each shard.

Reference: Sutton and Barto, 2018, "Reinforcement learning", example 6.2 (random walk).
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any

ROOMS, WALKS, SHARDS, BATCH, RATE, EVERY = 5, 16, 4, 64, 0.2, 20
PATIENCE = 600  # the maximum seconds of a process
TRUTH = [(room + 1) / (ROOMS + 1) for room in range(ROOMS)]


def build(mesh: Any) -> tuple[Any, Any, Any]:
    """Returns the sharded buffer, the jitted training step, and its initial arguments."""
    import functools

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jrb

    buffer = jrb.ReplayBuffer(
        capacity=64 * WALKS,
        num_envs=WALKS,
        batch_size=BATCH,
        sampler=jrb.Prioritized(),
        unit=jrb.NStep(3, discount=1.0),
    )
    sharded = jrb.Sharded(buffer, shards=SHARDS, mesh=mesh)

    def value(params: Any, room: jax.Array) -> jax.Array:
        return jnp.tanh(params["in"][room]) @ params["out"]

    def walk(room: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        """Moves every environment one room left or right; the reward right of the last is 1."""
        after = room + jnp.where(jax.random.bernoulli(key, shape=room.shape), 1, -1)
        done = (after < 0) | (after >= ROOMS)
        reward = (after >= ROOMS).astype(jnp.float32)
        inside = jnp.clip(after, 0, ROOMS - 1)
        step = {"observation": room, "next": {"observation": inside, "reward": reward}}
        step["next"]["done"] = done
        return jnp.where(done, ROOMS // 2, inside), step

    def errors(params: Any, batch: Any) -> jax.Array:
        after = batch.data["next"]
        later = batch.info["discount"] * value(params, after["observation"])
        target = after["reward"] + jnp.where(after["done"], 0.0, later)
        return jax.lax.stop_gradient(target) - value(params, batch.data["observation"])

    cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    @functools.partial(jax.jit, donate_argnums=1, out_shardings=(whole, cut, cut))
    def train(params: Any, state: Any, rooms: jax.Array, number: Any) -> Any:
        move, draw = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
        rooms, step = walk(rooms, move)
        state = sharded.add(state, step)
        batch = sharded.sample(state, draw)
        loss = lambda params: jnp.mean(batch.weights * errors(params, batch) ** 2)
        params = jax.tree.map(lambda leaf, by: leaf - RATE * by, params, jax.grad(loss)(params))
        state = sharded.update_priority(state, batch, jnp.abs(errors(params, batch)))
        return params, state, rooms

    example = {"observation": jnp.int32(0), "next": {"observation": jnp.int32(0)}}
    example["next"] |= {"reward": jnp.float32(0), "done": jnp.bool_(False)}

    def start() -> Any:
        params = {"in": 0.5 * jax.random.normal(jax.random.key(1), (ROOMS, 16))}
        params["out"] = jnp.zeros(16)
        return params, sharded.init(example), jnp.full(WALKS, ROOMS // 2, jnp.int32)

    return sharded, train, jax.jit(start, out_shardings=(whole, cut, cut))()


def work(path: pathlib.Path, steps: int, kill_at: int | None) -> str:
    """Trains from the last save on, in each process; returns a text with error and digest."""
    import jax
    import numpy as np

    import jrb

    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    sharded, train, (params, state, rooms) = build(mesh)
    first = 0
    if path.exists():
        like = {"params": params, "rooms": rooms, "step": 0}
        sharded, state, extra = jrb.load(path, device=mesh, extra=like)
        params, rooms, first = extra["params"], extra["rooms"], extra["step"]
    for number in range(first, steps):
        if number == kill_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), 9)
        params, state, rooms = train(params, state, rooms, np.int32(number))
        if (number + 1) % EVERY == 0:
            extra = {"params": params, "rooms": rooms, "step": number + 1}
            jrb.save(path, sharded, state, extra=extra)
    values = np.tanh(np.asarray(params["in"])) @ np.asarray(params["out"])
    off = np.abs(values - TRUTH).max()
    return f"values are off by {off:.3f} at most, digest {digest(params, state)}"


def digest(params: Any, state: Any) -> str:
    """Returns a digest of the parameters and of this process's shards."""
    import jax
    import numpy as np

    known = hashlib.sha256()
    for leaf in jax.tree.leaves((params, state)):
        for piece in leaf.addressable_shards:
            known.update(np.asarray(piece.data).tobytes())
    return known.hexdigest()[:16]


def free_port() -> int:
    """Returns a free port below those that the system assigns to programs by itself.

    Raises:
        RuntimeError: no port is free.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise RuntimeError("expected a free port from 20000 to 31999, found none.")


def launch(path: pathlib.Path, processes: int, steps: int, kill_at: int | None = None) -> list[str]:
    """Runs the processes; returns the last line of each, or nothing if one was to be killed.

    Raises:
        RuntimeError: a process failed, or was not killed although it should have been.
    """
    coordinator = f"localhost:{free_port()}"
    flags = f"--xla_force_host_platform_device_count={SHARDS // processes}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "examples.multihost", "--path", str(path.resolve())]
    command += ["--steps", str(steps), "--processes", str(processes), "--coordinator", coordinator]
    command += [] if kill_at is None else ["--kill-at", str(kill_at)]
    running = [
        subprocess.Popen(
            [*command, "--process", str(number)],
            env=environment,
            cwd=pathlib.Path(__file__).resolve().parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        if kill_at is None:
            return [_said(one, 0).splitlines()[-1] for one in running]
        _said(running[-1], -signal.SIGKILL)
        return []
    finally:  # otherwise the others would wait for the dead process
        for one in running:
            one.kill()
            one.communicate()


def _said(process: subprocess.Popen[str], code: int) -> str:
    """Waits for a process and returns its output; raises if its exit code is not `code`."""
    told, error = process.communicate(timeout=PATIENCE)
    if process.returncode != code:
        raise RuntimeError(f"a process ended with {process.returncode}:\n{error}")
    return told


def main(path: pathlib.Path, processes: int, steps: int, kill_at: int) -> tuple[Any, Any]:
    """Returns the processes' results of a killed and resumed run, and of an undisturbed one."""
    launch(path / "killed", processes, steps, kill_at)
    resumed = launch(path / "killed", processes, steps)
    return resumed, launch(path / "whole", processes, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=pathlib.Path, default=pathlib.Path("walks"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at", type=int, help="the step at which the last process is killed")
    parser.add_argument("--process", type=int, help="index of this process; if missing, start all")
    parser.add_argument("--coordinator", help="host:port of process 0")
    options = parser.parse_args()
    if options.process is None:
        shutil.rmtree(options.path, ignore_errors=True)
        kill_at = options.steps // 2 + 5 if options.kill_at is None else options.kill_at
        resumed, whole = main(options.path, options.processes, options.steps, kill_at)
        print("killed and resumed:", *resumed, "undisturbed:", *whole, sep="\n")
        print("the same, bit for bit" if resumed == whole else "NOT the same")
    else:
        import jax

        jax.distributed.initialize(options.coordinator, options.processes, options.process)
        print(work(options.path, options.steps, options.kill_at))
