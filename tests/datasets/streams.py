"""Buffers that hold episodes, and the same episodes in plain Python."""

import jax.numpy as jnp
import numpy as np

import jrb
from tests.datasets.access import joined


def episode_of(rng, steps, terminated, more=True):
    """A whole episode in TED, with `next/done` alone beside both flags."""
    seen = rng.normal(size=(steps + 1, 3)).astype(np.float32)
    ends = np.zeros(steps, bool)
    ends[-1] = True
    found = {
        "observation": seen[:-1].copy(),
        "action": rng.integers(0, 4, steps).astype(np.int32),
        "next": {
            "observation": seen[1:].copy(),
            "reward": rng.normal(size=steps).astype(np.float32),
            "terminated": ends & terminated,
            "truncated": ends & (not terminated),
            "done": ends,
        },
    }
    if more:
        found["info"] = {"goal": rng.normal(size=(steps, 2)).astype(np.float16)}
    return found


def episodes_of(seed, count=5, **options):
    rng = np.random.default_rng(seed)
    return [
        episode_of(rng, rng.integers(1, 7), bool(number % 2), **options) for number in range(count)
    ]


def cut_off(episode, steps):
    """Returns the first `steps` steps of an episode, which is then still running."""
    if isinstance(episode, dict):
        return {name: cut_off(leaf, steps) for name, leaf in episode.items()}
    return episode[:steps]


def filled(episodes, capacity=None, **options):
    """A buffer and a state that hold the newest steps of these episodes, in a ring."""
    steps = joined(episodes)
    count = len(steps["action"])
    buffer = jrb.ReplayBuffer(capacity or count, **options)
    state = buffer.init(_tree(steps, lambda leaf: jnp.asarray(leaf[0])))
    for start in range(0, count, 4):
        part = slice(start, start + 4)
        state = buffer.extend(state, _tree(steps, lambda leaf, part=part: jnp.asarray(leaf[part])))
    return buffer, state


def _tree(tree, change):
    if isinstance(tree, dict):
        return {name: _tree(leaf, change) for name, leaf in tree.items()}
    return change(tree)
