"""The devices of a training: real ones, or the CPU cut into as many."""

import os

import jax
import numpy as np
from jax.sharding import Mesh

AXIS = "data"


def prepare(count: int) -> None:
    """Lets the CPU count as so many devices; before anything is computed, else without effect."""
    flag = f"--xla_force_host_platform_device_count={count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def mesh(count: int) -> Mesh | None:
    """So many devices in a line; None for one. The CPU's, where there are fewer of the others.

    Raises:
        ValueError: there are not so many.
    """
    if count == 1:
        return None
    found = jax.devices() if jax.device_count() >= count else jax.devices("cpu")
    if len(found) < count:
        raise ValueError(
            f"devices: expected at most {len(found)}, as many as there are, got {count}. Call "
            "jrb.demo.devices.prepare before JAX starts, and the CPU counts as more."
        )
    return Mesh(np.array(found[:count]), (AXIS,))
