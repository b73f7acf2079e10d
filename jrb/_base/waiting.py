"""Waiting, in Python, for what a thread of JAX's own computes."""

from typing import Any

import numpy as np

_LOOKS = 1000
"""How often to look before going to sleep: some 200 us."""


def soon(array: Any) -> np.ndarray:
    """An array of JAX on the host that will be computed in a moment.

    To be sent to sleep and woken takes 25 us and more, which is longer than what a verb computes
    between two parts in Python. So this looks for a while whether it is there.
    """
    looks = _LOOKS
    while looks and not array.is_ready():
        looks -= 1
    return np.asarray(array)
