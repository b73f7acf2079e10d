"""Reads the metadata of checkpoints and stores without JAX.

The arrays of several buffers are in one generation; the names of those of a part begin with its
prefix, and its metadata are in that of the whole.
"""

import functools
import operator
from itertools import chain
from typing import Any
from urllib.parse import quote

from jrb._store import commits

MIX, SEVERAL, SHARDED = "mix", "several", "sharded"
"""The kinds of checkpoints that consist of others."""

HDF5 = "jrb-h5"
"""The format of checkpoints in one file of HDF5."""

EXTRA = ".extra/"
"""The prefix of the names of arrays that are further data of the user, `save(extra=...)`."""


def prefix_of(prefix: str, name: str) -> str:
    """Returns the prefix of the names of a part's arrays, which is in a part with a prefix."""
    # Names of arrays of the store's own begin with a dot.
    safe = quote(name, safe="", errors="surrogatepass").replace(".", "%2E")
    return f"{prefix}{safe}/"


def is_checkpoint(path: str) -> bool:
    """Returns True if a folder has a generation of a checkpoint or a store, even a damaged one."""
    try:
        folder = commits.open_folder(path)
        numbers = commits.list_generations(folder)
        return bool(numbers) and commits.is_store_file(folder, commits.generation_name(numbers[-1]))
    except OSError:
        return False


def metadata(path: str, number: int | None = None) -> dict[str, Any]:
    """See `jrb.checkpoint.metadata`."""
    file = commits.open_generation(path, number)
    file.close()
    one = file.generation
    sizes = {name: len(it.data) for name, it in one.small.items()}
    sizes |= {name: it.spec.rows * it.spec.width for name, it in one.large.items()}
    return describe(one.meta, one.number, sizes)


def describe(
    meta: dict[str, Any], number: int, sizes: dict[str, int], prefix: str = ""
) -> dict[str, Any]:
    """Returns the facts about a checkpoint, or about the part whose arrays have a prefix.

    Args:
        meta: its metadata.
        number: the number of the generation.
        sizes: the bytes of all arrays, by name.
        prefix: the beginning of the names of its arrays.
    """
    form, extra, facts = meta.get("form") or {}, meta.get("extra"), meta.get("facts", {})
    parts = {
        name: describe(part, number, sizes, prefix_of(prefix, name))
        for name, part in meta.get("parts", {}).items()
    }
    return {
        "generation": number,
        "kind": meta.get("kind"),
        "leaves": _leaves(meta),
        "nbytes": sum(size for name, size in sizes.items() if name.startswith(prefix)),
        **facts,
        "items": form.get("kind", "rows"),
        "encode": form.get("encode"),
        "extra": None if extra is None else [name.removeprefix(EXTRA) for name in extra],
        "parts": parts,
    }


def _leaves(meta: dict[str, Any]) -> dict[str, str]:
    """Returns dtypes and shapes of the arrays of items, by name."""
    lead, start = [*meta.get("batch", ()), meta.get("facts", {}).get("capacity")], "storage"
    if meta.get("form"):  # rows of all buffers follow each other
        lead, start = [functools.reduce(operator.mul, lead)], "items"
    return {
        start if name == "." else f"{start}/{name}": f"{dtype}{[*lead, *shape]}"
        for name, dtype, shape, _ in item_leaves(meta)
    }


def item_leaves(meta: dict[str, Any]) -> list[tuple[str, str, list[int], int]]:
    """Returns name, dtype, shape and bytes of the saved leaves of items, in all slots."""
    form = meta.get("form") or {}
    node = form.get("structure") if form else meta.get("items")
    if not node:
        return []
    count = functools.reduce(operator.mul, [*meta["batch"], meta["facts"]["capacity"]])
    return [
        (name.removeprefix("/") or ".", dtype, shape, count * nbytes)
        for name, (dtype, shape, nbytes) in sorted(leaves_of(node, "").items())
    ]


def leaves_of(node: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns dtype, shape and bytes of the leaves in an encoded structure of items, by name."""
    if "leaf" in node:
        return {name: node["leaf"]}
    entries = [*node.get("dict", ()), *node.get("fields", ())]
    entries += enumerate(chain(*(node.get(kind, ()) for kind in ("list", "tuple", "leaves"))))
    parts = (leaves_of(inner, f"{name}/{key}") for key, inner in entries)
    return dict(chain.from_iterable(part.items() for part in parts))
