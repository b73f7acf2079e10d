"""The recorder, which keeps all transitions on disk. T time, E environments."""

import json
import math
import os
import re
import weakref
from typing import Any, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util.pytree import kept_dtype
from jrb.authoring import absolute_path, call_on_host, casting, checks, read_items
from jrb.datasets.reading.names import check
from jrb.datasets.recording.writer import RecordWriter, item_spec
from jrb.keys import TED, Keys


class Recorder:
    """Appends transitions to a dataset on disk, which `jrb.datasets.open` can read meanwhile.

    The dataset is a folder of Parquet files with one row per step, which other programs can read.
    The recorder needs the extra `datasets`.

    Call `add` next to the buffer's `add`, `append` next to its `extend`, and `record` for either
    inside `jit` and `scan`. A call that raises has no effect. Calls cost microseconds: items stay
    in memory until there are `chunk` of them, and are then sealed, that is, written as a file and
    synced. A crash of the program or the machine loses at most the items in memory. `flush` and
    `close` seal them, and so does the end of a `with` block or of the program.

    Each environment of each recorder is a separate stream of episodes, which end by the items'
    flags, by a new number at `Keys.episode`, or by `truncate`. Several recorders, in one or many
    processes, may write to one path at once, and a new recorder continues an existing dataset. A
    forked process cannot write. To store each observation once, leave out the next observation.

    Args:
        path: the path of a folder, which is created if necessary.
        example: one transition, arrays or `ShapeDtypeStruct`s without leading axes; None to take
            the first one added. Dtypes are kept, even those that JAX would convert.
        num_envs: the number of environments E; None for one stream without that axis.
        keys: the paths of a transition's parts in an item. A reward is required. If items have no
            next observation, the observation of the next item stands in for it.
        chunk: the number of items in memory that are sealed together; None for 16 MiB of items.
        metadata: facts about the dataset, such as environment and author, in a dict that JSON
            can represent.
        name: a part of the names of this recorder's files; None for the process id.

    Raises:
        ValueError: the path holds something else, or a recording of items with other leaves.
        TypeError: JSON cannot represent the metadata, or a leaf of the example is no array.

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
        if num_envs is not None:
            checks.count("num_envs", num_envs, 2**31 - 1)
        if chunk is not None:
            checks.count("chunk", chunk)
        if not isinstance(keys, Keys):
            raise TypeError(f"keys: expected jrb.Keys(...), got {keys!r}.")
        is_name = name is None or (isinstance(name, str) and re.fullmatch(r"[\w.-]{1,100}", name))
        check(is_name, "name", "at most 100 letters, digits, dots and dashes", repr(name))
        self._metadata = _normalize_metadata(metadata)
        self._path = absolute_path(path)
        self._num_envs, self._keys = num_envs, keys
        self._lead: tuple[int, ...] = () if num_envs is None else (num_envs,)
        self._every = np.arange(num_envs or 1, dtype=np.int32)
        # Check the example before the folder is created.
        spec = None
        if example is not None:
            what = "Recorder: example"
            spec = item_spec(read_items(example, what), 0, keys, what)
        self._writer = RecordWriter(self._path, name or str(os.getpid()), chunk)
        # Items in memory are sealed at the end of the program, or of the recorder's life.
        self._end = weakref.finalize(self, self._writer.close)
        if spec is not None:
            try:
                self._writer.begin(spec, self._num_envs, self._metadata)
            except BaseException:
                # A recorder that cannot begin must not keep its lock.
                self._end()
                raise

    @property
    def path(self) -> str:
        """The absolute path of the dataset."""
        return self._path

    @property
    def name(self) -> str:
        """The prefix of the names of this recorder's files."""
        return self._writer.name

    @property
    def sealed(self) -> int:
        """The number of this recorder's items that are on disk."""
        return self._writer.progress.sealed

    @property
    def held(self) -> int:
        """The number of this recorder's items that are only in memory."""
        return self._writer.progress.held

    def add(self, item: Any, mask: Any = None) -> None:
        """Records one timestep, like a buffer's `add`.

        Args:
            item: the transitions, leaves `[E, ...]`, or `[...]` without `num_envs`.
            mask: bool `[]`, False to record nothing; or `[E]`, True for environments to record.

        Raises:
            ValueError: structure or shape differ from the example's, or the recorder is closed.
            TypeError: a dtype differs from the example's, or a leaf is no array.
            OSError: the disk is full or broken. The item is not recorded; earlier ones stay in
                memory, and a later call writes them.
            LockedError: this process is a fork of the one that made the recorder.
        """
        self._take(read_items(item, "add"), self._lead, mask, "add")

    def append(self, items: Any, mask: Any = None) -> None:
        """Records T timesteps, like a buffer's `extend`.

        Args:
            items: the transitions, leaves `[T, E, ...]`, or `[T, ...]` without `num_envs`.
            mask: bool `[T]` or `[T, E]`, False for transitions to leave out; None to record all.

        Raises:
            ValueError: as in `add`; so are `TypeError`, `OSError` and `LockedError`.
        """
        items = read_items(items, "append")
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(items)]
        got = "none. For a single timestep there is add"
        check(shapes and shapes[0], "append", "leaves with an axis of time", got)
        self._take(items, (shapes[0][0], *self._lead), mask, "append")

    def record(self, items: Any, mask: Any = None) -> None:
        """Records one timestep or several, in order, from inside `jit`, `scan` or `grad`.

        The recorder must know its items: from an example, or from an earlier `add` or `append`.
        The jitted function raises errors of the disk as JAX errors. `flush` and `close` wait for
        running calls.

        Args:
            items: one timestep as for `add`, or several as for `append`.
            mask: as for `add` or `append`; may be traced.

        Raises:
            ValueError: as in `add`; the items are not known; or under `vmap`, which has no order.
            TypeError: as in `add`; or the items have a dtype that JAX would convert.
        """
        spec = self._writer.spec
        if spec is None:
            raise ValueError(
                "record: expected a recorder that knows its items, got one without an example. "
                "Make it with Recorder(path, example)."
            )
        # Under `jit`, JAX converts dtypes that it lacks, which would change the items.
        for leaf_name, leaf in zip(spec.names, spec.specs, strict=True):
            if not casting.is_keys(leaf.dtype) and kept_dtype(leaf.dtype) != leaf.dtype:
                raise TypeError(
                    f"record: leaf '{leaf_name}': expected a dtype that JAX keeps, got "
                    f"{leaf.dtype}. Set jax_enable_x64, or record other dtypes."
                )
        items = read_items(items, "record")
        # A further axis in the first leaf is that of time.
        first, lead = jax.tree.leaves(items)[:1], self._lead
        if first and np.ndim(first[0]) - len(spec.specs[0].shape) > len(lead):
            lead = (np.shape(first[0])[0], *lead)
        leaves = list(map(casting.raw, spec.check(items, lead, "record")))
        if mask is not None:
            mask = jnp.asarray(mask)
            _check_mask(mask, lead, self._lead, "record")
        masks = () if mask is None else (mask,)

        def put(*arrays: Any) -> None:
            host = list(map(np.asarray, arrays))
            self._put(host[: len(leaves)], lead, host[len(leaves)] if masks else None)

        # Gradients stop here, as a callback has none.
        call_on_host(put, None, *map(lax.stop_gradient, (*leaves, *masks)))

    def truncate(self, mask: Any = None) -> None:
        """Ends the current episode, so that the next item begins a new one.

        Call it for environments that were reset mid-episode, like a buffer's `truncate`.

        Args:
            mask: bool `[E]`, True for these environments; or `[]` for all or none; None for all.
        """
        self._writer.check()
        which = np.ones((), bool) if mask is None else np.asarray(mask)
        _check_mask(which, self._lead, self._lead, "truncate")
        self._writer.truncate(np.broadcast_to(which, self._every.shape))

    def flush(self) -> None:
        """Seals all items in memory, so that they are on disk and in datasets opened afterwards.

        Raises:
            OSError: the disk is full or broken. All items stay in memory.
        """
        self._writer.check()
        jax.effects_barrier()
        self._writer.seal()

    def close(self) -> None:
        """Seals all items in memory and closes the recorder. A second call does nothing.

        Raises:
            OSError: the disk is full or broken. The recorder stays open.
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
        return f"Recorder({self.path}: {self.sealed} items sealed, {state})"

    def _take(self, items: Any, lead: tuple[int, ...], mask: Any, method: str) -> None:
        # The first items define the structure of all. Check everything before the folder changes.
        spec = self._writer.spec or item_spec(items, len(lead), self._keys, method)
        leaves = spec.check(items, lead, method)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, jax.core.Tracer):
                raise TypeError(
                    f"{method}: leaf '{spec.names[number]}': expected an array, got a tracer. "
                    "Inside jit, scan and grad there is record."
                )
            if not isinstance(leaf, np.ndarray | np.generic):
                leaves[number] = np.asarray(casting.raw(leaf))
        if mask is not None:
            mask = np.asarray(mask)
            _check_mask(mask, lead, self._lead, method)
        if self._writer.spec is None:
            self._writer.begin(spec, self._num_envs, self._metadata)
        self._put(leaves, lead, mask)

    def _put(self, arrays: list[np.ndarray], lead: tuple[int, ...], mask: Any) -> None:
        """Passes checked leaves `[*lead, ...]` to the writer, without masked items."""
        # Join the axes of time and environments, and give each item the number of its environment.
        count, envs = math.prod(lead), None
        if len(lead) > 1:
            arrays = [array.reshape((count, *array.shape[2:])) for array in arrays]
        if self._num_envs is not None:
            envs = np.tile(self._every, count // self._num_envs) if len(lead) > 1 else self._every
        if mask is not None:
            # A mask of timesteps holds for all environments of each.
            is_recorded = mask.reshape(mask.shape + (1,) * (len(lead) - mask.ndim))
            is_recorded = np.broadcast_to(is_recorded, lead).reshape(-1)
            arrays = [array[is_recorded] if lead else array[None][is_recorded] for array in arrays]
            count, envs = int(is_recorded.sum()), None if envs is None else envs[is_recorded]
        if count:
            self._writer.put(arrays, count, envs)


def _normalize_metadata(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Returns metadata as JSON keeps them; raises if it cannot."""
    try:
        if not isinstance(metadata, dict | None):
            raise TypeError(type(metadata).__name__)
        entries = json.loads(json.dumps(metadata or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: expected a dict that JSON can hold, got {error}.") from error
    # Datasets list the names of the writers there.
    is_free = "writers" not in entries
    check(is_free, "metadata", "other names than 'writers'", "this one, which has a meaning")
    return entries


def _check_mask(mask: Any, lead: tuple[int, ...], envs: tuple[int, ...], method: str) -> None:
    """Raises unless a mask has the shape `lead`, or `lead` without the axis of environments."""
    time = lead[: len(lead) - len(envs)]
    if mask.dtype != np.bool_:
        raise TypeError(
            f"{method}: mask: expected dtype bool, got {mask.dtype}. Compare, not cast."
        )
    shapes = " or ".join(map(str, dict.fromkeys((time, lead))))
    check(mask.shape in (time, lead), f"{method}: mask", f"shape {shapes}", mask.shape)
