"""Draws equal recorded ones: slots, masks and integers exactly, sums of floats up to rounding.

`tests/data/golden.json` holds the recorded draws of each composition. A change that alters draws on
purpose must record them again with `python -m tests.test_golden` and give a reason.
"""

import itertools
import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

RECORDED = pathlib.Path(__file__).parent / "data" / "golden.json"
ENVS, ROWS, BATCH = 3, 12, 8
AFTER = {"observation": jnp.zeros(2), "reward": jnp.float32(0), "done": jnp.bool_(False)}
EXAMPLE = {"observation": jnp.zeros(2), "action": jnp.int32(0), "next": AFTER}

SAMPLERS = {
    "uniform": jrb.Uniform(),
    "uniform without replacement": jrb.Uniform(replacement=False),
    "prioritized": jrb.Prioritized(alpha=0.6, beta=0.4),
    "unstratified": jrb.Prioritized(alpha=0.9, beta=0.7, stratified=False, normalize=None),
    "epochs": jrb.WithoutReplacement(),
    "queue": jrb.Queue(),
    "lifo": jrb.Lifo(),
    "newest": jrb.Newest(0.4),
}
UNITS = {
    "transition": jrb.Transition(),
    "n-step": jrb.NStep(3, 0.9),
    "strict n-step": jrb.NStep(3, 0.9, strict=True),
    "windows": jrb.Sequence(4),
    "padded windows": jrb.Sequence(4, burn_in=1, partial="pad"),
    "windows of episodes": jrb.Sequence(3, sample_by="episodes", partial="pad"),
    "whole episodes": jrb.Sequence(5, sample_by="whole_episodes"),
    "windows across": jrb.Sequence(4, cross_episodes=True),
    "stacks": jrb.FrameStack(3),
    "hindsight": jrb.Hindsight(
        lambda achieved, goal: -jnp.abs(achieved - goal).sum(),
        achieved=("next", "observation"),
        goal=("observation",),
        next_goal=None,
    ),
}
WRITERS = {"lanes": jrb.PerEnvironment(), "best": jrb.MaxValue(("next", "reward"))}
STORAGES = {
    "shared": jrb.DeviceStorage(share_next_observations=True, terminal_capacity=12),
    "on disk": jrb.MemmapStorage(),
}


def compositions():
    """Yields the name and the parts of each composition."""
    for (one, sampler), (two, unit) in itertools.product(SAMPLERS.items(), UNITS.items()):
        yield f"{one}, {two}", {"sampler": sampler, "unit": unit}
    for (one, sampler), (two, writer) in itertools.product(SAMPLERS.items(), WRITERS.items()):
        if one in ("uniform", "prioritized", "epochs"):
            yield f"{one}, {two}", {"sampler": sampler, "writer": writer}
    for (one, sampler), (two, storage) in itertools.product(SAMPLERS.items(), STORAGES.items()):
        if one in ("uniform", "prioritized", "queue"):
            yield f"{one}, {two}", {"sampler": sampler, "storage": storage}


def built():
    """Yields the name and the buffer of each composition whose parts fit together."""
    for name, parts in compositions():
        try:
            yield name, jrb.ReplayBuffer(ROWS * ENVS, ENVS, BATCH, **parts)
        except (TypeError, ValueError):
            continue


def rows(seed, length):
    """Returns items `[T, E]`; episodes are short and end at different times."""
    rng = np.random.default_rng(seed)
    many = (length, ENVS)
    return {
        "observation": rng.integers(0, 9, (*many, 2)).astype(np.float32),
        "action": rng.integers(0, 2**30, many, dtype=np.int32),
        "next": {
            "observation": rng.integers(0, 9, (*many, 2)).astype(np.float32),
            "reward": rng.integers(-4, 5, many).astype(np.float32),
            "done": rng.random(many) < 0.12,
        },
    }


def program(buffer):
    """Writes, draws, updates priorities, truncates, and writes more; returns three samples."""
    keys = jax.random.split(jax.random.key(7), 3)
    state = buffer.extend(buffer.init(EXAMPLE), rows(0, 9))
    state, first = buffer.draw(state, keys[0])
    if buffer.sampler.prioritized:
        state = buffer.update_priority(state, first, jnp.arange(1.0, BATCH + 1))
    state = buffer.truncate(state, jnp.array([True, False, False]))
    state = buffer.extend(state, rows(1, 8))
    state, second = buffer.draw(state, keys[1])
    for row in range(3):
        item = jax.tree.map(lambda leaf, row=row: leaf[row], rows(2, 3))
        state = buffer.add(state, item)
    return first, second, buffer.sample(state, keys[2])


def drawn(buffer):
    """Returns the facts to record about each sample."""
    on_device = isinstance(buffer.storage, jrb.DeviceStorage)
    run = jax.jit(program, static_argnums=0) if on_device else program
    return [told(sample) for sample in run(buffer)]


def told(sample):
    real = np.asarray(sample.mask)
    some = real.reshape(real.shape[0], -1).any(1)
    exact, rounded = [], {}
    fields = (sample.data, sample.info, sample.probabilities, sample.weights)
    for path, leaf in jax.tree_util.tree_leaves_with_path(fields):
        leaf = np.asarray(leaf)
        padded = leaf.shape[: real.ndim] == real.shape
        leaf = leaf[real if padded else some]  # masked values are undefined
        if np.issubdtype(leaf.dtype, np.floating):
            rounded[jax.tree_util.keystr(path)] = float(np.abs(leaf).sum(dtype=np.float64))
        else:
            exact.append(leaf.astype(np.int64).tobytes())
    return {
        "slots": np.where(some, np.asarray(sample.indices), -1).tolist(),
        "mask": np.packbits(real).tobytes().hex(),
        "exact": zlib.crc32(b"".join(exact)),
        "rounded": rounded,
    }


BUFFERS = dict(built())


@pytest.mark.slow
@pytest.mark.parametrize("name", BUFFERS)
def test_draws_are_those_that_were_recorded(name):
    recorded = json.loads(RECORDED.read_text())[name]
    for got, want in zip(drawn(BUFFERS[name]), recorded, strict=True):
        assert got["slots"] == want["slots"]
        assert (got["mask"], got["exact"]) == (want["mask"], want["exact"])
        assert got["rounded"] == pytest.approx(want["rounded"], rel=1e-5)


def test_no_composition_was_lost():
    assert sorted(json.loads(RECORDED.read_text())) == sorted(BUFFERS)


if __name__ == "__main__":
    found = {name: drawn(buffer) for name, buffer in BUFFERS.items()}
    RECORDED.write_text(json.dumps(found, indent=0) + "\n")
