"""Compiles programs for a GPU, even without one, and counts the kernels that they would launch."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84929347584
  clock_rate_ghz: 1.98
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""The description of a GPU that XLA's compiler needs: public figures of an NVIDIA H100."""

_NO_KERNEL = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")


def device() -> jax.Device:
    """Returns a GPU to compile for: one of this machine, or else a described H100.

    Raises:
        RuntimeError: there is no GPU, and JAX's compiler for CUDA is not installed.
    """
    here = jax.devices()[0]
    if here.platform == "gpu":
        return here
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            platform="cuda", topology_name="one", topology="1x1x1", target_config=H100
        )
    except Exception as error:
        raise RuntimeError(
            "kernels: expected a GPU, or JAX's compiler for one. Run pip install 'jax[cuda12]', "
            "and set JAX_PLATFORMS=cpu where there is no GPU."
        ) from error
    return described.devices[0]


@contextlib.contextmanager
def assumed() -> Iterator[None]:
    """Makes `jax.default_backend` return "gpu", and `jax.devices` accept any backend."""
    here = jax.devices()
    told = {"default_backend": lambda: "gpu", "devices": lambda backend=None: here}
    with mock.patch.multiple(jax, **told):
        yield


def compiled(function: Any, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """Returns a function compiled for that GPU; only the shapes and dtypes of `args` are used."""
    mesh = jax.sharding.Mesh([device()], ("one",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), args
    )
    return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()


def launches(text: str) -> tuple[int, int]:
    """Counts the kernels that a compiled program launches, and its loops and branches that wait.

    Returns:
        The number of kernels and copies, where those of a loop count once per iteration; and the
        number of loops and branches for which the host first reads the trip count or the choice
        from the device.
    """
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[2]
            bodies[name], entry = [], name if head[1] else entry
        elif name and " = " in line:
            bodies[name].append(line)
    return _within(bodies, entry)


def _within(bodies: dict[str, list[str]], name: str) -> tuple[int, int]:
    """Counts as `launches` in one computation and in those that it calls."""
    count = waits = 0
    for line in bodies[name]:
        found = re.match(r".* = (?:\(.*?\)|\S+) ([\w\-]+)\(", line)
        operation = found[1] if found else "constant"
        inner = re.findall(r"(?:body|to_apply|(?:true|false)_computation)=%([\w.\-]+)", line)
        branches = re.search(r"branch_computations=\{(.*?)\}", line)
        inner += re.findall(r"%([\w.\-]+)", branches[1]) if branches else []
        if operation not in ("while", "conditional", "call"):
            count += operation not in _NO_KERNEL
            continue
        turns = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        waits += operation == "conditional" or (operation == "while" and turns is None)
        for one in inner:
            kernels, more = _within(bodies, one)
            count, waits = count + kernels * (int(turns[1]) if turns else 1), waits + more
    return count, waits
