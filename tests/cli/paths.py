"""Paths of every kind that commands take, and a function that runs commands."""

import jax
import jax.numpy as jnp
import numpy as np

import jrb
from jrb import cli

EXAMPLE = {
    "observation": jnp.zeros(3, jnp.float32),
    "action": jnp.int32(0),
    "next": {
        "observation": jnp.zeros(3, jnp.float32),
        "reward": jnp.float32(0),
        "terminated": False,
        "truncated": False,
        "done": False,
    },
}
LENGTHS = [5, 7, 3, 6]
"""Of the episodes; one step of another one follows."""


def stream(lengths=(*LENGTHS, 1)):
    """Episodes one after the other, all but the last of which end."""
    count = sum(lengths)
    ends = np.zeros(count, bool)
    ends[np.cumsum(lengths)[:-1] - 1] = True
    seen = np.arange(3.0 * (count + 1), dtype=np.float32).reshape(-1, 3)
    after = {"observation": seen[1:], "reward": np.arange(count, dtype=np.float32)}
    after |= {"terminated": ends, "truncated": np.zeros(count, bool), "done": ends.copy()}
    return {"observation": seen[:-1], "action": np.arange(count, dtype=np.int32), "next": after}


def unchanged(data):
    """A transform."""
    return data


def filled(storage=None, **parts):
    parts = {"sampler": jrb.Prioritized(), "batch_size": 4, **parts}
    buffer = jrb.ReplayBuffer(30, storage=storage or jrb.DeviceStorage(), **parts)
    state = buffer.extend(buffer.init(EXAMPLE), stream())
    sample = buffer.sample(state, jax.random.key(0))
    return buffer, buffer.update_priority(state, sample, jnp.arange(1.0, 5.0))


def scaled(items, scale):
    """Returns items with other rewards."""
    return {"next": {"reward": items["next"]["reward"] * scale}}


def make(kind, folder):
    """The path of something of a kind, below a folder."""
    path = str(folder / kind)
    if kind == "store":
        jrb.save(path, *filled(jrb.MemmapStorage(path)))
    elif kind == "several":
        buffer, state = filled()
        jrb.save(path, {"a": buffer, "b/c": buffer}, {"a": state, "b/c": state})
    elif kind == "vmap":
        buffer, state = filled()
        states = jax.vmap(lambda scale: buffer.map(state, lambda it: scaled(it, scale)))
        jrb.save(path, buffer, states(jnp.array([1.0, 10.0, 100.0])))
    elif kind == "h5":
        jrb.save(path, *filled(), layout="h5")
    elif kind == "torchrl":
        jrb.checkpoint.write_torchrl(path, *filled())
    elif kind == "d4rl":
        jrb.datasets.write_d4rl(path, *filled())
    elif kind == "recorded":
        with jrb.datasets.Recorder(path) as recorder:
            for row in range(sum(LENGTHS)):
                recorder.add(jax.tree.map(lambda leaf, row=row: leaf[row], stream()))
    else:
        extra = {"params": jnp.ones(2), "step": 7}
        buffer, state = filled()
        jrb.save(path, buffer, state, extra=extra, keep=1)
        jrb.save(path, buffer, state, extra=extra, keep=1)
    return path


OURS = ("native", "store", "several", "h5")
OTHERS = ("torchrl", "d4rl", "recorded")


def call(capsys, *arguments):
    """Returns the status, stdout and stderr of a command."""
    try:
        cli.main(list(map(str, arguments)))
    except SystemExit as ended:
        out = capsys.readouterr()
        return ended.code, out.out, out.err
    raise AssertionError("the command did not end")
