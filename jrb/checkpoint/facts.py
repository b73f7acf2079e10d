"""What a checkpoint says of itself, without a look at its rows."""

import datetime
import importlib
import platform
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jrb._store import generation, opening
from jrb.checkpoint import beside
from jrb.mix import AnyState, Description, Mix
from jrb.state import Buffer


def of(buffer: Description, state: AnyState, batch: tuple[int, ...]) -> dict[str, Any]:
    """What is written down of a state, for JSON."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found: dict[str, Any] = {"time": now, "versions": _versions()}
    if not isinstance(buffer, Mix):
        found |= _of_one(buffer, state, batch)
    return found


def _versions() -> dict[str, str]:
    return {
        "jrb": importlib.import_module("jrb").__version__,  # which imports this
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _of_one(buffer: Buffer, state: AnyState, batch: tuple[int, ...]) -> dict[str, Any]:
    count = lambda writer: buffer.writer.held(buffer.ring, writer).size
    for _ in batch:
        count = jax.vmap(count)
    leaves = jax.tree_util.tree_leaves_with_path(state.writer)
    single = [(path, leaf) for path, leaf in leaves if leaf.ndim == len(batch)]
    return {
        "capacity": buffer.capacity,
        "num_envs": buffer.num_envs,
        "size": np.asarray(count(state.writer)).tolist(),
        "writer": {
            jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist()
            for path, leaf in single
        },
    }


def metadata(path: str, number: int | None = None) -> dict[str, Any]:
    """See `jrb.checkpoint.metadata`."""
    folder = opening.folder_at(path)
    opened = generation.newest(folder) if number is None else opening.at(folder, number)
    meta = opened.body["meta"] or {}
    leaves = {column.name: "".join(column.kind) for column in opened.columns}
    widths = sum(column.width for column in opened.columns)
    arrays = sum(entry["size"] for entry in opened.body["arrays"])
    return {
        "generation": opened.number,
        "kind": meta.get("kind"),
        "leaves": leaves,
        "nbytes": widths * opened.body["table"]["slots"] + arrays,
        **meta.get("facts", {}),
        "score": meta.get("score"),
        "extra": beside.names(meta),
    }
