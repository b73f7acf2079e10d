"""The machine's copy speeds: on the device, to and from it, and to and from the disk."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..timing import Program
from .case import Case, Wanted


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields a case per size; its times bound every program that moves as many bytes."""
    for megabytes in wanted.pick((16,), (1, 64, 1024)):
        facts = {"megabytes": megabytes}
        size = megabytes << 20
        programs = {
            "device to device": lambda size=size: _on_device(size),
            "host to device": lambda size=size: _to_device(size),
            "device to host": lambda size=size: _to_host(size),
            "NumPy": lambda size=size: _numpy(size),
            "write and sync": lambda size=size: _disk(size, wanted.folder)[0],
            "read": lambda size=size: _disk(size, wanted.folder)[1],
        }
        yield Case("a copy", facts, programs, base="device to device")


def _program(size: int, call: Callable[[], Any]) -> Program:
    return Program(call, facts={"nbytes": size})


def _on_device(size: int) -> Program:
    source, copy = jnp.zeros(size // 4, jnp.uint32) + jnp.uint32(1), jax.jit(jnp.copy)
    return _program(size, lambda: jax.block_until_ready(copy(source)))


def _to_device(size: int) -> Program:
    """Returns a copy of a NumPy array to the device; `copy=True` stops JAX from aliasing it."""
    source = np.ones(size // 4, np.uint32)
    return _program(size, lambda: jax.block_until_ready(jnp.array(source, copy=True)))


def _to_host(size: int) -> Program:
    source = jnp.zeros(size // 4, jnp.uint32)
    return _program(size, lambda: np.array(source))


def _numpy(size: int) -> Program:
    source = np.ones(size // 4, np.uint32)
    return _program(size, source.copy)


def _disk(size: int, folder: str) -> tuple[Program, Program]:
    """Returns a write with a sync, and a read from the system's page cache."""
    path = os.path.join(folder, f"copy-{size}")
    source, target = np.random.default_rng(0).bytes(size), bytearray(size)

    def write() -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(source)
            os.fsync(file.fileno())

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            file.readinto(target)

    write()
    return _program(size, write), _program(size, read)
