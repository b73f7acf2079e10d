"""Rows of streams, of which every one says where it is from; and actors that send them."""

import os

import jax
import jax.numpy as jnp
import numpy as np

import jrb

EXAMPLE = {
    "observation": {"frame": np.zeros((3, 2), np.uint8), "half": np.zeros(2, jnp.bfloat16)},
    "id": np.zeros(2, np.int32),
    "next": {"reward": np.float32(0), "done": np.bool_(False)},
}


def rows(stream, first, count, envs=()):
    """Timesteps of a stream from a number on, `[T, ...]`, or with `(E,)` `[T, E, ...]`."""
    time = np.arange(first, first + count, dtype=np.int32).reshape(count, *(1,) * len(envs))
    time = np.broadcast_to(time, (count, *envs))
    env = np.broadcast_to(np.arange(*envs or (1,), dtype=np.int32), time.shape)
    lane = stream * (envs[0] if envs else 1) + env
    code = lane * 1000 + time
    bits = (code[..., None] * np.array([7, 13])).astype(np.uint16)  # every NaN too
    return {
        "observation": {
            "frame": (code[..., None, None] * np.arange(1, 7).reshape(3, 2)).astype(np.uint8),
            "half": bits.view(jnp.bfloat16),
        },
        "id": np.stack([lane, time], axis=-1),
        "next": {"reward": reward(lane, time), "done": time % 7 == 6},
    }


def reward(lane, time):
    """Returns rewards of which no two sums of up to seven steps in a row are equal.

    The remainder of such a sum by 8 is the number of steps, and the rest tells the first one.
    """
    return ((lane * 1000 + time) * 8 + 1).astype(np.float32)


def returned(lane, time, last, steps=3):
    """Returns the return and steps of `NStep` with discount 1; it may use rows up to `last`."""
    until = min(time + steps - 1, last, time // 7 * 7 + 6)
    each = np.arange(time, until + 1)
    return float(reward(np.int32(lane), each).sum()), len(each)


def buffer(capacity=96, sampler=None, unit=None, **parts):
    """Returns a prioritized buffer of three-step returns."""
    return jrb.ReplayBuffer(
        capacity,
        batch_size=16,
        sampler=sampler or jrb.Prioritized(alpha=1.0, beta=1.0, eps=0.0),
        unit=unit or jrb.NStep(3, 1.0),
        **parts,
    )


def equal(one, other):
    """Raises unless two trees are the same, bit for bit."""
    words = lambda leaf: np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(words(a), words(b)), one, other)


class Worker:
    """An actor that sends to a stream, or draws."""

    def __init__(self, *remote):
        if remote:
            self.work(*remote)

    def work(self, remote, stream=0):
        self.remote, self.stream = remote, stream
        self.batches = remote.ahead(depth=2)
        return self.stream

    def process(self):
        return os.getpid()

    def send(self, first, count, size=5, envs=()):
        for start in range(first, first + count, size):
            length = min(size, first + count - start)
            self.remote.extend(rows(self.stream, start, length, envs), stream=self.stream)
        self.remote.wait()
        return self.stream

    def draw(self, batch_size=None):
        return np.asarray(self.remote.sample(batch_size).data["id"])

    def following(self):
        return np.asarray(next(self.batches).data["id"])
