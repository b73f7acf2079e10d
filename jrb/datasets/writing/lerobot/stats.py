"""Statistics of features, of each episode and of all, as LeRobot keeps them.

L steps.
"""

import numpy as np

Stats = dict[str, np.ndarray]
"""`mean, std, min, max`, float64 in the shape of a feature, and `count`, int64 `[1]`."""


def stats_of(array: np.ndarray, is_image: bool) -> Stats:
    """Of steps `[L, ...]`; of images `[L, height, width, C]` those of channels `[C, 1, 1]`, in 0-1.

    Numbers without axes have the shape `[1]`.
    """
    array = array.reshape(-1, 1) if array.ndim == 1 else array
    axes = (0, 1, 2) if is_image else 0
    found = {
        "min": array.min(axes).astype(np.float64),
        "max": array.max(axes).astype(np.float64),
        "mean": array.mean(axes, dtype=np.float64),
        "std": array.std(axes, dtype=np.float64),
    }
    if is_image:
        found = {name: (value / 255)[:, None, None] for name, value in found.items()}
    return {**found, "count": np.array([len(array)], np.int64)}


def joined(one: Stats | None, other: Stats) -> Stats:
    """Of the steps of both."""
    if one is None:
        return other
    count = one["count"] + other["count"]
    share = float(other["count"][0] / count[0])
    apart = other["mean"] - one["mean"]
    variance = (1 - share) * one["std"] ** 2 + share * other["std"] ** 2
    return {
        "min": np.minimum(one["min"], other["min"]),
        "max": np.maximum(one["max"], other["max"]),
        "mean": one["mean"] + share * apart,
        "std": np.sqrt(variance + share * (1 - share) * apart**2),
        "count": count,
    }
