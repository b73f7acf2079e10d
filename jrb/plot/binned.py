"""Means, bounds and histograms of parts of an array."""

import numpy as np


def edges(count: int, most: int) -> np.ndarray:
    """Returns borders, int `[bins + 1]`, of at most `most` about equal parts."""
    bins = max(1, min(count, most))
    return np.arange(bins + 1) * count // bins


def even(count: int, most: int) -> np.ndarray:
    """Returns borders, int `[bins + 1]`, of at most `most` equal parts; the last may be smaller."""
    return np.append(np.arange(0, count, -(-count // most)), count)


def block_means(values: np.ndarray, columns: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Returns the means of the finite values in parts of an array `[lines, columns]`; else NaN."""
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0), columns[:-1], 1, np.float64)
    counts = np.add.reduceat(finite, columns[:-1], 1, np.float64)
    sums, counts = (np.add.reduceat(part, lines[:-1], 0) for part in (sums, counts))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def mean_and_bounds(
    values: np.ndarray, borders: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean, least and greatest of the finite values of each part of an array `[K]`."""
    finite = np.where(np.isfinite(values), values, np.nan)
    mean = block_means(finite[None], borders, np.arange(2))[0]
    return mean, np.fmin.reduceat(finite, borders[:-1]), np.fmax.reduceat(finite, borders[:-1])


def histogram(values: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Counts numbers by bin; those beyond the borders count in the first and the last."""
    kind = values.dtype if values.dtype.kind == "f" else np.float64
    with np.errstate(over="ignore"):  # a border may be beyond the greatest float32
        inner = borders[1:-1].astype(kind)
    place = np.searchsorted(inner, values, side="right")
    return np.bincount(place, minlength=len(borders) - 1)


def bins(values: np.ndarray, most: int = 60) -> tuple[np.ndarray, bool]:
    """Returns borders of bins for numbers, and whether they are a constant factor apart.

    They are if all numbers are positive or zero, and far apart.
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
