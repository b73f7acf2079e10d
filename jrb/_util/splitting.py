"""Shares of a batch: how many entries each source gives, and in what order."""

import math
from typing import Any

import numpy as np


def check(name: str, shares: Any, count: int, source: str) -> None:
    """Raises ValueError unless there is a share for each source, and they add up to 1."""
    values = np.asarray(shares, np.float64)
    if values.shape != (count,):
        raise ValueError(
            f"{name}: expected {count} numbers, one for each {source}, got shape {values.shape}."
        )
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"{name}: expected numbers of at least 0, got {values.tolist()}.")
    if not math.isclose(values.sum(), 1.0, abs_tol=1e-5):
        raise ValueError(
            f"{name}: expected numbers that add up to 1, got {values.tolist()}, which add up "
            f"to {values.sum():g}. Divide them by that."
        )


def counts(xp: Any, shares: Any, batch_size: int, slack: float = 1e-6) -> Any:
    """Returns how many of B entries each source gives, int32 `[K]`; largest remainders round up.

    Args:
        xp: NumPy or `jax.numpy`.
        shares: `[K]`, the relative share of each source, at least 0.
        batch_size: B.
        slack: a number at most this far below an integer counts as the integer.
    """
    # Round down, and add one to the sources with the largest remainders until all B are given.
    exact = shares / xp.maximum(xp.sum(shares), 1e-30) * batch_size
    whole = xp.floor(exact + slack)
    rank = xp.argsort(xp.lexsort((whole - exact,)))  # a stable order, in both libraries
    missing = batch_size - xp.sum(whole.astype(np.int32))
    return xp.where(rank < missing, whole + 1, whole).astype(np.int32)


def alternate_sources(xp: Any, source: Any, num_sources: int) -> Any:
    """Returns the order in which sources alternate as evenly as their shares allow, int `[B]`.

    Args:
        xp: NumPy or `jax.numpy`.
        source: int32 `[B]`, the source of each entry.
        num_sources: K.
    """
    # Number the entries of each source: 0.5, 1.5, ...
    is_from = source[:, None] == xp.arange(num_sources, dtype=np.int32)[None]
    number = xp.cumsum(is_from, axis=0, dtype=np.int32).astype(np.float32) - np.float32(0.5)
    total = xp.sum(is_from, axis=0, keepdims=True, dtype=np.int32).astype(np.float32)
    # The n-th item of a source with c items belongs at (n - 1/2) / c of the batch.
    position = xp.where(is_from, number / xp.maximum(total, np.float32(1)), np.float32(0))
    return xp.lexsort((xp.sum(position, axis=1),))  # a stable order, in both libraries
