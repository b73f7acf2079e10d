"""One of several processes that draw from their shards and save them together.

python -m tests.devices.process_of_shards FOLDER NUMBER COUNT COORDINATOR
"""

import contextlib
import os
import pathlib
import sys

E, S, B, DEVICES = 8, 4, 16, 2


def main(folder, number, count, coordinator):
    """Runs `story` and writes its results in this process to `seen-NUMBER.npz` in the folder."""
    devices = f"--xla_force_host_platform_device_count={DEVICES // count}"
    os.environ |= {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    import jax
    import numpy as np

    if count > 1:
        jax.distributed.initialize(coordinator, count, number)
    np.savez(folder / f"seen-{number}.npz", *jax.tree.leaves(story(folder / "saved")))


def story(path):
    """Runs steps, saves, and runs more; the loaded state must give the same as the saved one."""
    import jax
    import numpy as np

    import jrb
    from tests.small_blocks import small_blocks

    rng, mesh = np.random.default_rng(0), jax.make_mesh((DEVICES,), ("data",))
    buffer = jrb.ReplayBuffer(
        8 * E, E, batch_size=B, sampler=jrb.Prioritized(), unit=jrb.NStep(2, 0.9)
    )
    sharded = jrb.Sharded(buffer, S, mesh)
    state = sharded.init(jax.tree.map(lambda leaf: leaf[0], rows(rng)))
    state, before = steps(sharded, state, rng, mesh, range(4))
    seen = [before]
    for start in (4, 6):
        with small_blocks() if start == 6 else contextlib.nullcontext():
            jrb.save(path, sharded, state)
        kept = rng.bit_generator.state
        later, after = steps(sharded, state, rng, mesh, range(start, start + 2))
        rng.bit_generator.state = kept
        loaded = jrb.load(path, sharded)[1]
        state, again = steps(sharded, loaded, rng, mesh, range(start, start + 2))
        jax.tree.map(np.testing.assert_array_equal, again, after)
        seen.append(after)
    with small_blocks():
        jrb.save(path, sharded, later)  # the blocks that are new
    assert jrb.checkpoint.generations(path) == [3]
    assert jrb.checkpoint.verify(path) == []
    return seen


def rows(rng):
    import numpy as np

    number = lambda *shape: rng.integers(0, 100, (E, *shape)).astype(np.float32)
    after = {"observation": number(3), "reward": number(), "done": rng.random(E) < 0.2}
    return {"observation": number(3), "next": after}


def steps(sharded, state, rng, mesh, numbers):
    """Runs steps; returns the state and this process's draws, `[B / processes, ...]`."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    where, seen = NamedSharding(mesh, PartitionSpec("data")), []
    cut = lambda leaf: jax.make_array_from_callback(leaf.shape, where, lambda index: leaf[index])

    def here(leaf):
        pieces = {piece.index[0].start or 0: piece.data for piece in leaf.addressable_shards}
        return np.concatenate([np.asarray(pieces[start]) for start in sorted(pieces)])

    for number in numbers:
        for _ in range(3):
            state = sharded.add(state, jax.tree.map(cut, rows(rng)))
        state, batch = sharded.draw(state, jax.random.key(number))
        error = np.abs(rng.normal(size=B)).astype(np.float32)
        state = sharded.update_priority(state, batch, cut(error))
        fields = batch.data, batch.weights, batch.probabilities, batch.indices, batch.mask
        seen.append(jax.tree.map(here, fields))
    return state, seen


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
