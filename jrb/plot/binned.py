"""Many numbers as few: means, bounds and histograms of parts of an array."""

import itertools

import numpy as np

from jrb._store.threads import share

_PIECE = 1 << 20


def mean_and_bounds(
    values: np.ndarray, borders: np.ndarray, real: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean, the least and the greatest of each part of an array `[K, ...]`, float64 `[bins]`.

    Args:
        values: of real numbers.
        borders: int `[bins + 1]`, ascending, from 0 to K.
        real: bool like `values`, which of them count; None for all. NaN where none does.
    """
    found = np.full((3, len(borders) - 1), np.nan)
    for number, (start, stop) in enumerate(itertools.pairwise(borders)):
        part = values[start:stop]
        part = part.reshape(-1) if real is None else part[real[start:stop]]
        if part.size:
            found[:, number] = part.mean(dtype=np.float64), part.min(), part.max()
    return found[0], found[1], found[2]


def histogram(values: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """How many of these numbers lie in each bin, those beyond in the first and the last."""
    counts = np.zeros(len(borders) - 1, np.int64)
    kind = values.dtype if values.dtype.kind == "f" else np.float64
    with np.errstate(over="ignore"):  # beyond the greatest float32 nothing is
        inner = borders[1:-1].astype(kind)

    def count(start: int) -> None:  # most of it without the interpreter's lock
        place = np.searchsorted(inner, values[start : start + _PIECE], side="right")
        found.append(np.bincount(place, minlength=len(counts)))

    found: list[np.ndarray] = []
    share(count, range(0, len(values), _PIECE), most=8)
    return sum(found, counts)


def bins(values: np.ndarray, most: int = 60) -> tuple[np.ndarray, bool]:
    """Borders of bins for these numbers, and whether they are a constant factor apart.

    They are where all numbers are positive, or zero, and far apart.
    """
    low, high = float(values.min()), float(values.max())
    if low == high:
        wide = 0.5 if low == 0 or 1 <= abs(low) < 1000 else abs(low) / 2
        return np.linspace(low - wide, high + wide, 4), False
    if low >= 0:
        some = values[:: max(1, len(values) // 100_000)]
        some = some[some > 0]
        middle = float(np.median(some)) if some.size else high
        if high / middle > 30:
            least = max(float(np.min(values, where=values > 0, initial=high)), high * 1e-6)
            return np.geomspace(least, high, most + 1), True
    if np.issubdtype(values.dtype, np.integer) and high - low < most:
        return np.arange(int(low), int(high) + 2) - 0.5, False
    return np.linspace(low, high, most + 1), False


def share_of_top(masses: np.ndarray, part: float = 0.01) -> tuple[float, int, float]:
    """The share of all mass that the largest ones hold; how many these are; the least of them.

    Args:
        masses: `[K]`, at least 0, K at least 1.
        part: of K, rounded up.
    """
    count = max(1, int(np.ceil(len(masses) * part)))
    top = np.partition(masses, len(masses) - count)[len(masses) - count :]
    total = masses.sum(dtype=np.float64)
    return float(top.sum(dtype=np.float64) / total) if total else 0.0, count, float(top.min())
