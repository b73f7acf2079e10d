"""What a checkpoint says of itself, without a look at its rows."""

import datetime
import importlib
import platform
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jrb._store import generation, opening
from jrb.checkpoint import beside, members
from jrb.mix import AnyState
from jrb.state import Buffer


def of_any() -> dict[str, Any]:
    """What is written down of any save, for JSON."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"time": now, "versions": _versions()}


def _versions() -> dict[str, str]:
    return {
        "jrb": importlib.import_module("jrb").__version__,  # which imports this
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def of(buffer: Buffer, state: AnyState, batch: tuple[int, ...]) -> dict[str, Any]:
    """The same of a state."""
    count = lambda writer: buffer.writer.held(buffer.ring, writer).size
    for _ in batch:
        count = jax.vmap(count)
    leaves = jax.tree_util.tree_leaves_with_path(state.writer)
    single = [(path, leaf) for path, leaf in leaves if leaf.ndim == len(batch)]
    return of_any() | {
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
    form, parts = meta.get("form") or {}, members.generations(opened)
    leaves = {column.name: "".join(column.kind) for column in opened.columns}
    widths = sum(column.width for column in opened.columns)
    arrays = sum(entry["size"] for entry in opened.body["arrays"])
    return {
        "generation": opened.number,
        "kind": meta.get("kind"),
        "leaves": leaves,
        "nbytes": widths * opened.body["table"]["slots"] + arrays,
        **meta.get("facts", {}),
        "items": form.get("kind", "rows"),
        "encode": form.get("encode"),
        "score": meta.get("score"),
        "extra": beside.names(meta),
        "parts": {one: metadata(members.path_of(path, one), n) for one, n in parts.items()},
    }
