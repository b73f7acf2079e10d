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
    """Arrays of some sizes; the limit of everything that moves so many bytes."""
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
    """From memory that was just written, as NumPy's batches are, and that JAX must not keep."""
    source = np.ones(size // 4, np.uint32)
    return _program(size, lambda: jax.block_until_ready(jnp.array(source, copy=True)))


def _to_host(size: int) -> Program:
    source = jnp.zeros(size // 4, jnp.uint32)
    return _program(size, lambda: np.array(source))


def _numpy(size: int) -> Program:
    source = np.ones(size // 4, np.uint32)
    return _program(size, source.copy)


def _disk(size: int, folder: str) -> tuple[Program, Program]:
    """Written with a sync; read back while the system still has it in memory."""
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
