"""Checkpoints: a buffer and its state on a disk, exact, and whole after any crash."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import jrb
    from jrb._store.errors import DamagedError, LockedError
    from jrb.checkpoint.api import (
        Save,
        generations,
        is_checkpoint,
        load,
        metadata,
        save,
        save_async,
        verify,
    )

    Dump = jrb.interop.Dump
    read_flashbax: Final = jrb.interop.read_flashbax
    read_torchrl: Final = jrb.interop.read_torchrl
    read_vault: Final = jrb.interop.read_vault
    write_torchrl: Final = jrb.interop.write_torchrl

__all__ = [
    "DamagedError",
    "Dump",
    "LockedError",
    "Save",
    "generations",
    "is_checkpoint",
    "load",
    "metadata",
    "read_flashbax",
    "read_torchrl",
    "read_vault",
    "save",
    "save_async",
    "verify",
    "write_torchrl",
]

_MODULES = {
    "DamagedError": "jrb._store.errors",
    "Dump": "jrb.interop.dump",
    "LockedError": "jrb._store.errors",
    "read_flashbax": "jrb.interop.flashbax",
    "read_torchrl": "jrb.interop.torchrl",
    "read_vault": "jrb.interop.flashbax",
    "write_torchrl": "jrb.interop.torchrl",
}
"""The modules of names that are not in `jrb.checkpoint.api`. All are imported when they are first
asked for: the command looks into checkpoints without JAX."""


if not TYPE_CHECKING:  # or every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        if name == "orbax":  # which needs an extra
            return importlib.import_module(f"{__name__}.orbax")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_MODULES.get(name, f"{__name__}.api"))
        globals()[name] = getattr(module, name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
