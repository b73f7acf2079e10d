"""Checkpoints: saves and loads a buffer and its state exactly; no crash damages a checkpoint."""

from typing import TYPE_CHECKING, Final

from jrb._util.public import PublicNames, lazy

if TYPE_CHECKING:
    import jrb
    from jrb._store.files import DamagedError, LockedError
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
__dir__: PublicNames = lambda: __all__

if not TYPE_CHECKING:  # or every misspelt name would have a type
    # Imported when used: the command inspects checkpoints without JAX, and Orbax is optional.
    _HOMES = dict.fromkeys(__all__, "jrb.checkpoint.api") | {
        "DamagedError": "jrb._store.files",
        "Dump": "jrb.interop.dump",
        "LockedError": "jrb._store.files",
        "orbax": "jrb.checkpoint.orbax",
        "read_flashbax": "jrb.interop.flashbax",
        "read_torchrl": "jrb.interop.torchrl",
        "read_vault": "jrb.interop.flashbax",
        "write_torchrl": "jrb.interop.torchrl_write",
    }
    __getattr__ = lazy(__name__, _HOMES)
