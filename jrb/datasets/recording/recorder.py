"""What a buffer is given, kept on the disk while the ring forgets.

Items are taken into memory, an array for each leaf, and written by chunks (see `folders`): a call
costs microseconds, a chunk a write and three syncs. A crash, of the program or of the machine,
costs what was not sealed: the newest items, at most as many as a chunk holds, or those of one call
if they are more. `flush` seals them at once.

T time, E environments.
"""

import math
import os
import weakref
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._store import paths
from jrb._util import host_calls, prng_keys
from jrb._util.pytree import ArrayLike, PyTree
from jrb.checkpoint import facts
from jrb.datasets.recording.checking import (
    check_alike,
    check_mask,
    check_options,
    length_of,
    plain_metadata,
)
from jrb.datasets.recording.form import Form, check_kept, form_of
from jrb.datasets.recording.heads import Head
from jrb.datasets.recording.writer import Writer
from jrb.keys import TED, Keys


class Recorder:
    """Appends items to a dataset on the disk, which `jrb.datasets.open` reads, also meanwhile.

    Each environment of each recorder is a stream of its own, in which episodes end by the flags of
    the items, by `Keys.episode`, and by `truncate`. Several recorders may write to one path at
    once, from as many processes, and one that is made again goes on there: each writes to a folder
    of its own, and all of them are one dataset.

    Call it beside the verbs of a buffer: `add` where the buffer's `add` is called, `append` where
    `extend` is, and `record` for both inside `jit` and `scan`. A call happens as a whole, or raises
    and has not happened. Whatever is forked off cannot write.

    Next observations that are the observation of the next item are kept once.

    What is in memory is sealed when the recorder is closed, at the end of a `with` block, and, if
    nothing goes wrong, when the program ends.

    Args:
        path: of a folder, made if there is none.
        example: one transition, arrays or `ShapeDtypeStruct`s without leading axes; None for the
            first that is added. Dtypes are kept, also those that JAX would change.
        num_envs: E; None for one stream without an axis of environments.
        keys: where the parts of a transition lie in an item. There has to be a reward. Without a
            next observation, that of the next item is it.
        chunk: how many items are in memory before they are sealed; None for as many as 16 MiB hold.
        metadata: what the dataset is to say of itself, a dict for JSON: environment, author.
        name: of this writer, for its folder's name; None for the number of the process.

    Raises:
        ValueError: there is something else at the path, or a recording of other items.
        TypeError: metadata that is no dict for JSON, or an example with a leaf that is no array.

    Example:
        >>> import numpy as np, tempfile, jrb
        >>> path = tempfile.mkdtemp()
        >>> with jrb.datasets.Recorder(path) as recorder:
        ...     for step in range(5):
        ...         after = {"reward": 1.0, "terminated": step == 2, "truncated": False}
        ...         recorder.add({"observation": np.float32(step), "next": after})
        >>> jrb.datasets.open(path).lengths.tolist()
        [3, 2]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        example: Any = None,
        *,
        num_envs: int | None = None,
        keys: Keys = TED,
        chunk: int | None = None,
        metadata: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        check_options(num_envs, keys, chunk, name)
        self._path = paths.absolute(path)
        self._num_envs, self._keys, self._form = num_envs, keys, None
        self._metadata = plain_metadata(metadata)
        form = None if example is None else form_of(example, 0, keys, "Recorder: example")
        if form is not None and os.path.isdir(self._path):
            check_alike(self._path, self._head(form))
        self._every = np.arange(num_envs or 1, dtype=np.int32)
        self._writer = Writer(self._path, name or str(os.getpid()), chunk)
        self._end = weakref.finalize(self, self._writer.close)
        if form is not None:
            self._begin(form)

    @property
    def path(self) -> str:
        """Of the dataset."""
        return self._path

    @property
    def folder(self) -> str:
        """Of this recorder, below `path`."""
        return self._writer.folder.path

    @property
    def sealed(self) -> int:
        """How many items of this recorder are on the disk for good."""
        return self._writer.progress.sealed

    @property
    def held(self) -> int:
        """How many items are in memory."""
        return self._writer.progress.held

    def add(self, item: PyTree, mask: ArrayLike | None = None) -> None:
        """Takes one timestep, as a buffer's `add`.

        Args:
            item: leaves `[E, ...]`, or `[...]` without `num_envs`.
            mask: bool `[]`, whether it is taken at all, or `[E]`, of which environments.

        Raises:
            ValueError: another structure or shape than the example's, or the recorder is closed.
            TypeError: another dtype, or a leaf that is no array.
            OSError: the disk is full or broken. The item was not taken, all before it are still
                there, and a later call writes them.
            LockedError: this process was forked off from the one that made the recorder.
        """
        self._take(item, self._lead, mask, "add")

    def append(self, items: PyTree, mask: ArrayLike | None = None) -> None:
        """Takes T timesteps, time first, as a buffer's `extend`.

        Args:
            items: leaves `[T, E, ...]`, or `[T, ...]` without `num_envs`.
            mask: bool `[T]`, or `[T, E]` for each environment: those that are False are left out.

        Raises:
            ValueError, TypeError, OSError, LockedError: as `add`.
        """
        self._take(items, (length_of(items), *self._lead), mask, "append")

    def record(self, items: PyTree, mask: ArrayLike | None = None) -> None:
        """The same from inside `jit`, `scan` and `grad`: by a call to the host, in their order.

        Without an example, something must have been added before. Errors of the disk come out of
        the jitted function, as JAX's. `flush` and `close` wait for what was begun.

        Args:
            items: one timestep or several, as `add` and `append` take them.
            mask: as there; may be traced.

        Raises:
            ValueError: as `add`; or nobody has said yet how items look.
            TypeError: as `add`; a dtype that JAX would change; or under `vmap`.
        """
        form = self._form
        if form is None:
            raise ValueError(
                "record: expected a recorder that knows its items, got one without an example. "
                "Make it with Recorder(path, example)."
            )
        check_kept(form, "record")
        axes = form.axes(items, "record")
        lead = (*axes[:1], *self._lead) if len(axes) > len(self._lead) else self._lead
        leaves = [prng_keys.raw(leaf) for leaf in form.checked(items, lead, "record")]
        if mask is not None:
            mask = jnp.asarray(mask)
            check_mask(mask, lead, self._lead, "record")
        masks = () if mask is None else (mask,)

        def put(*arrays: Any) -> None:
            found = list(map(np.asarray, arrays))
            self._put(found[: len(leaves)], lead, found[len(leaves)] if masks else None)

        host_calls.call(put, None, _single, *map(lax.stop_gradient, (*leaves, *masks)))

    def truncate(self, mask: ArrayLike | None = None) -> None:
        """With the next item an episode begins, though no flag has ended the one before.

        For environments that were reset in the middle of one, as a buffer's `truncate`.

        Args:
            mask: bool `[E]`, or `[]` for all or none; None for all.
        """
        self._writer.check()
        which = np.ones((), bool) if mask is None else np.asarray(mask)
        check_mask(which, self._lead, self._lead, "truncate")
        self._writer.truncate(np.broadcast_to(which, self._every.shape))

    def flush(self) -> None:
        """Seals all that was given: it is on the disk, and what is opened from now on shows it.

        Raises:
            OSError: the disk is full or broken. All is still in memory.
            ValueError, LockedError: as `add`.
        """
        self._writer.check()
        jax.effects_barrier()
        self._writer.seal()

    def close(self) -> None:
        """Seals all that was given, and takes nothing any more; once closed, does nothing.

        Raises:
            OSError: the disk is full or broken. It is still open then.
        """
        if not self._writer.is_closed:
            jax.effects_barrier()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "Recorder: expected to stay in its process, not to be pickled or copied. Make one in "
            "each process, for the same path."
        )

    def __repr__(self) -> str:
        state = "closed" if self._writer.is_closed else f"{self.held} in memory"
        return f"Recorder({self.folder}: {self.sealed} items sealed, {state})"

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self._num_envs is None else (self._num_envs,)

    def _take(
        self, items: PyTree, lead: tuple[int, ...], mask: ArrayLike | None, verb: str
    ) -> None:
        form = self._form
        if form is None:
            form = form_of(items, len(lead), self._keys, verb)
        arrays = form.arrays(items, lead, verb)
        if mask is not None:
            mask = np.asarray(mask)
            check_mask(mask, lead, self._lead, verb)
        if self._form is None:
            self._begin(form)
        self._put(arrays, lead, mask)

    def _put(self, arrays: list[np.ndarray], lead: tuple[int, ...], mask: Any) -> None:
        """Takes the leaves `[*lead, ...]` of items that were checked."""
        count, envs = math.prod(lead), None
        if len(lead) > 1:
            arrays = [array.reshape((count, *array.shape[2:])) for array in arrays]
        if self._num_envs is not None:
            envs = np.tile(self._every, count // self._num_envs) if len(lead) > 1 else self._every
        if mask is not None:
            kept = mask.reshape(mask.shape + (1,) * (len(lead) - mask.ndim))
            kept = np.broadcast_to(kept, lead).reshape(-1)
            arrays = [array[kept] if lead else array[None][kept] for array in arrays]
            count, envs = int(kept.sum()), None if envs is None else envs[kept]
        if count:
            self._writer.put(arrays, count, envs)

    def _head(self, form: Form) -> Head:
        about = {"user": self._metadata, **facts.of_any()}
        return Head(self._num_envs, form.leaves, self._keys, about)

    def _begin(self, form: Form) -> None:
        """Writes down how items look."""
        head = self._head(form)
        check_alike(self._path, head)
        self._writer.begin(head)
        self._form = form


_single = host_calls.refusing(
    lambda size: (
        f"vmap: expected one stream of items, got {size} at once, between which there is no "
        "order. Use Recorder(num_envs=E), and call record outside vmap."
    )
)
