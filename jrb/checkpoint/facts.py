"""What a checkpoint says of the program that wrote it, and of the state."""

import datetime
import importlib
import platform
import re
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jrb._util import display
from jrb.checkpoint.snapshots import Snapshot
from jrb.mix import Mix
from jrb.sharding import Sharded


def of_any() -> dict[str, Any]:
    """What is written down of any save, for JSON."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"time": now, "versions": _versions()}


def of_several(buffer: Any) -> dict[str, Any]:
    """The same of several buffers, each of which says more itself."""
    is_one = isinstance(buffer, Mix | Sharded)
    return of_any() | ({"description": text_of(buffer)} if is_one else {})


def text_of(buffer: Any) -> str:
    """A description as it is written, functions by their names."""
    return re.sub(r"<(?:function|bound method) (\S+).*?>", r"\1", display.laid_out(buffer))


def _versions() -> dict[str, str]:
    return {
        "jrb": importlib.import_module("jrb").__version__,  # which imports this
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def of(saved: Snapshot) -> dict[str, Any]:
    """The same of a state."""
    buffer, batch, state = saved.buffer, saved.batch, saved.state
    count = lambda writer: buffer.writer.held(buffer.ring, writer).size
    for _ in batch:
        count = jax.vmap(count)
    leaves = jax.tree_util.tree_leaves_with_path(state.writer)
    single = [(path, leaf) for path, leaf in leaves if leaf.ndim == len(batch)]
    return of_any() | {
        "description": text_of(buffer),
        "capacity": buffer.capacity,
        "num_envs": buffer.num_envs,
        "size": np.asarray(count(state.writer)).tolist(),
        "writer": {
            jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist()
            for path, leaf in single
        },
    }
