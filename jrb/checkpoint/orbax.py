"""A replay buffer as an item of an Orbax checkpoint, with checksums of its own.

Importing this module registers `BufferSave` and `BufferRestore` with Orbax. The buffer is saved in
the folder `<step>/<item>/jrb`, as `jrb.checkpoint.save` does, so that `jrb.checkpoint.verify` and
`load` accept this path, `load` also with another capacity.

Example:
    ```
    import orbax.checkpoint as ocp
    from jrb.checkpoint.orbax import BufferRestore, BufferSave

    with ocp.CheckpointManager(folder) as manager:
        manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params), buffer=BufferSave(buffer, state)
            ),
        )
        manager.wait_until_finished()
        restored = manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(params), buffer=BufferRestore(buffer)
            ),
        )
    buffer, state = restored.buffer
    ```
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import memory
from jrb._store import files
from jrb._util import wording
from jrb._util.pytree import Leaf
from jrb.checkpoint import api, saving
from jrb.checkpoint.saving import SaveJob

ocp: Any = wording.require("orbax.checkpoint", "orbax")
if TYPE_CHECKING:  # Orbax has no types
    _Handler = _Args = object
else:
    _Handler, _Args = ocp.AsyncCheckpointHandler, ocp.args.CheckpointArgs

FOLDER = "jrb"
"""The folder below that of the item; Orbax may put files of its own beside it."""


def _path_in(directory: Any) -> str:
    return os.path.join(files.absolute_path(directory, "directory"), FOLDER)


class BufferHandler(_Handler):
    """Writes and reads one buffer, in programs of one process. Every step is written in full."""

    def save(self, directory: Any, args: "BufferSave") -> None:
        """Writes the state, and returns when that is done."""
        api.save_job(SaveJob(_path_in(directory), args.buffer, args.state), 0)

    async def async_save(self, directory: Any, args: "BufferSave") -> list[Any]:
        """Copies the state to host memory; then it may be donated.

        Returns:
            A future of Orbax in a list, which waits until the folder exists and writes the copy.
        """

        def copy_leaf(leaf: Leaf) -> Any:  # safe from donation; on the host, except for keys
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.array(leaf, copy=True)
            return np.array(leaf) if memory.on_host(leaf) else np.asarray(leaf)

        job = SaveJob(_path_in(directory), args.buffer, jax.tree.map(copy_leaf, args.state))

        async def write() -> None:
            api.save_job(job, 0)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="jrb-save")]

    def restore(self, directory: Any, args: "BufferRestore | None" = None) -> tuple[Any, Any]:
        """Returns the description and the state.

        Raises:
            FileNotFoundError: there is no such item.
            DamagedError: a file is not what was written; the message names leaf, block and file.
            ValueError: the checkpoint has another version, dtype, shape, structure or description.
        """
        how: Any = BufferRestore() if args is None else args
        return api.load_generation(_path_in(directory), how.buffer, how.example, how.device)


@ocp.args.register_with_handler(BufferHandler, for_save=True)
@dataclasses.dataclass
class BufferSave(_Args):
    """The arguments of a save. A state that cannot be saved is refused here.

    If the handler refused it later, the threads in which Orbax writes the other items would wait
    for minutes.

    Attributes:
        buffer: the description, a `ReplayBuffer` or a `Mix`, or several, as for `jrb.save`.
        state: its state, or a stack of states made by `vmap`. It is only read, and may be donated
            as soon as `save` of the manager has returned.

    Raises:
        TypeError: the buffer is no description, or the state does not belong to it.
        ValueError: the state belongs to another description.
        NotImplementedError: the program has several processes.
    """

    buffer: Any
    state: Any

    def __post_init__(self) -> None:
        # Made and thrown away: its checks raise here, before Orbax has started a thread.
        with saving.delay_writes(SaveJob("", self.buffer, self.state).views):
            pass
        if jax.process_count() > 1:
            raise NotImplementedError(
                f"save: expected a program of one process, got {jax.process_count()}. Save the "
                "part of each process by jrb.checkpoint.save, to a path of its own."
            )


@ocp.args.register_with_handler(BufferHandler, for_restore=True)
@dataclasses.dataclass
class BufferRestore(_Args):
    """The arguments of a restore, which returns `(buffer, state)`; see `jrb.checkpoint.load`.

    Attributes:
        buffer: the description as it was saved; needed if that holds functions.
        example: one transition; needed if the items are of classes that the program has not
            defined.
        device: a device or a sharding, for all arrays; None for the default device.
    """

    buffer: Any = None
    example: Any = None
    device: Any = None
