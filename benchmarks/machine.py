"""Describes the machine of a measurement, and the versions of the compared libraries."""

import datetime
import functools
import importlib.metadata
import os
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp

_COPIED = 256 << 20
_TIMES_MORE = 8  # on accelerators, where a copy of `_COPIED` bytes is too short to time
OTHERS = ("jrb", "jax", "jaxlib", "numpy")


def about(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the machine, the backend, and the versions of jrb, JAX, NumPy and `packages`."""
    device = jax.devices()[0]
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "load": os.getloadavg()[0],
        "versions": versions(OTHERS + packages),
    }
    more = 1 if jax.default_backend() == "cpu" else _TIMES_MORE
    return found | {"copy_gb_s": copy_speed(_COPIED * more)}


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Returns the versions of packages; None for those that are not installed."""
    return {name: _version(name) for name in packages}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


@functools.cache
def copy_speed(size: int = _COPIED, rounds: int = 5) -> float:
    """Returns the speed of copies in the default device's memory, in GB/s read: the best round."""
    source = jnp.zeros(size // 4, jnp.uint32) + jnp.uint32(1)
    copy = jax.jit(jnp.copy)
    jax.block_until_ready(copy(source))
    least = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(copy(source))
        least = min(least, time.perf_counter() - start)
    return size / least / 1e9
