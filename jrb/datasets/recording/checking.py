"""What a recorder is given, looked at before anything is written. T time, E environments."""

import contextlib
import json
import os
import re
from typing import Any

import jax
import numpy as np

from jrb._store.files import Folder
from jrb._util import checks
from jrb._util.pytree import PyTree
from jrb.datasets.recording import folders, heads
from jrb.datasets.recording.heads import Head
from jrb.keys import Keys


def check_options(num_envs: Any, keys: Any, chunk: Any, name: Any) -> None:
    """Raises unless they are what a recorder takes."""
    if num_envs is not None:
        checks.count("num_envs", num_envs, 2**31 - 1)
    if chunk is not None:
        checks.count("chunk", chunk)
    if not isinstance(keys, Keys):
        raise TypeError(f"keys: expected jrb.Keys(...), got {keys!r}.")
    if name is not None and (not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,100}", name)):
        raise ValueError(
            f"name: expected at most 100 letters, digits, dots and dashes, got {name!r}."
        )


def plain_metadata(metadata: Any) -> dict[str, Any]:
    """Metadata as JSON gives them back."""
    try:
        if not isinstance(metadata, dict | None):
            raise TypeError(type(metadata).__name__)
        found = json.loads(json.dumps(metadata or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: expected a dict that JSON can hold, got {error}.") from error
    if "writers" in found:
        raise ValueError("metadata: expected other names than 'writers', which has a meaning.")
    return found


def check_alike(path: str, head: Head) -> None:
    """Raises unless the writers that are there have the same items."""
    for name in folders.writers(path):
        with contextlib.suppress(FileNotFoundError):
            other, _ = heads.read_head(Folder(os.path.join(path, name)))
            heads.check_alike(path, name, other, head)


def check_mask(mask: Any, lead: tuple[int, ...], envs: tuple[int, ...], verb: str) -> None:
    """Raises unless a mask is one of times, or of times and environments."""
    time = lead[: len(lead) - len(envs)]
    if mask.dtype != np.bool_:
        raise TypeError(f"{verb}: mask: expected dtype bool, got {mask.dtype}. Compare, not cast.")
    if mask.shape not in (time, lead):
        shapes = " or ".join(map(str, dict.fromkeys((time, lead))))
        raise ValueError(f"{verb}: mask: expected shape {shapes}, got {mask.shape}.")


def length_of(items: PyTree) -> int:
    """T, the first axis of the first leaf."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(items)]
    if not shapes or not shapes[0]:
        raise ValueError(
            "append: expected leaves with an axis of time, got none. For a single timestep there "
            "is add."
        )
    return shapes[0][0]
