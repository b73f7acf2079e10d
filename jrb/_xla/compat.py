"""The differences between the versions of JAX that jrb runs on, in one place.

JAX 0.5 has neither explicit mesh axes nor types that say over which mesh axes an array varies;
functions that ask for these axes return none there.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax

HAS_MESH_IN_TYPES: bool = hasattr(jax, "typeof")

# JAX 0.6 to 0.8 have `pvary` instead; JAX 0.5 has neither.
_HAS_CAST = hasattr(lax, "pcast")
CAST_TO_VARYING: Callable[..., Any] | None = (
    functools.partial(lax.pcast, to="varying") if _HAS_CAST else getattr(lax, "pvary", None)
)

_IS_RECENT = jax.__version_info__ >= (0, 10)
# Settings that change results, and can be set for one thread.
_SETTINGS = (
    "enable_x64",
    "default_device",
    "default_prng_impl",
    "threefry_partitionable",
    "default_matmul_precision",
    "numpy_dtype_promotion",
)
# Milliseconds to wait for a message. If a process has died, this is reported sooner.
_PATIENCE = 600_000

# The dtype of gather indices. XLA is quicker with unsigned ones, but XLA of JAX 0.5 fails with them
# if the array is sharded over devices.
INDEX = "uint32" if _IS_RECENT else "int32"


def enable_x64() -> AbstractContextManager[Any]:
    """Returns a context in which JAX keeps dtypes of 64 bits."""
    return _find_setting("enable_x64")(True)


def is_x64() -> bool:
    return jax.dtypes.canonicalize_dtype("int64") == "int64"


def with_settings(work: Callable[..., None]) -> Callable[..., None]:
    """Wraps a function so that other threads call it under the JAX settings of this thread.

    JAX keeps the settings of a `with` statement, such as `jax.enable_x64(True)`, per thread.
    Without them, another thread would silently narrow 64-bit arrays, or draw other numbers.
    """
    values = {name: getattr(jax.config, f"jax_{name}", None) for name in _SETTINGS}
    mesh = jax.sharding.get_mesh() if hasattr(jax.sharding, "get_mesh") else None

    def run(*arguments: Any) -> None:
        with contextlib.ExitStack() as settings:
            # A setting that this version of JAX lacks is None on both sides.
            for name, value in values.items():
                if getattr(jax.config, f"jax_{name}", None) != value:
                    settings.enter_context(_find_setting(name)(value))
            if mesh is not None and not mesh.empty:
                settings.enter_context(jax.set_mesh(mesh))
            work(*arguments)

    return run


def _find_setting(name: str) -> Callable[[Any], AbstractContextManager[Any]]:
    # Older versions of JAX have some of these context managers in `jax.experimental`.
    module = jax if hasattr(jax, name) else importlib.import_module("jax.experimental")
    return getattr(module, name)


def shard_map(body: Callable[..., Any], mesh: Any, ins: Any, outs: Any) -> Callable[..., Any]:
    """Returns `jax.shard_map` of a body; arguments are resharded as `ins` says."""
    if not hasattr(jax, "shard_map"):
        old = importlib.import_module("jax.experimental.shard_map").shard_map
        return old(body, mesh=mesh, in_specs=ins, out_specs=outs, check_rep=False)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=_IS_RECENT)
    # XLA reshards the arguments, except over explicit mesh axes, where JAX would refuse them.
    mesh = mesh or jax.sharding.get_abstract_mesh()
    if not any("Explicit" in str(kind) for kind in mesh.axis_types):
        return mapped

    def call_resharded(*arguments: Any) -> Any:
        to = lambda spec: jax.sharding.NamedSharding(mesh, spec)
        move = lambda tree, spec: jax.tree.map(lambda leaf: jax.reshard(leaf, to(spec)), tree)
        return mapped(*map(move, arguments, ins))

    return call_resharded


def coordination() -> tuple[int, int, Callable[[str, str], Any], Callable[[str], str]] | None:
    """Returns the message channel of `jax.distributed`, which is not public in JAX.

    Returns:
        The index of this process; the number of processes; a function `(name, message)` that posts
        a message; and a function `(name)` that waits for one. None for a single process.
    """
    if jax.process_count() == 1:
        return None
    client = importlib.import_module("jax._src.distributed").global_state.client
    fetch = lambda name: client.blocking_key_value_get(name, _PATIENCE)
    return jax.process_index(), jax.process_count(), client.key_value_set, fetch


def is_committed(array: jax.Array) -> bool:
    """Returns True if an array was put on its device explicitly, and has to stay there."""
    return getattr(array, "committed", False)


def is_explicit_mesh_error(error: Exception) -> bool:
    """Returns True if JAX could not infer the sharding of a result over explicit mesh axes."""
    # Compare by name, as JAX does not export the class.
    if type(error).__name__ == "ShardingTypeError":
        return True
    # Under vmap, JAX looks for the axis of a sharded array in the empty mesh of other arrays.
    return isinstance(error, ValueError) and "is not found in mesh: ()" in str(error)


def is_donation_error(error: Exception) -> bool:
    # JAX and XLA both check for this, with messages of their own.
    return isinstance(error, RuntimeError | ValueError) and (
        "has been deleted" in str(error) or "deleted or donated" in str(error)
    )
