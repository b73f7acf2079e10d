"""The functions of `jrb.checkpoint`: arguments are checked here, and saves begin and end."""

import atexit
import dataclasses
import functools
import importlib
import numbers
import os
from collections.abc import Callable
from types import EllipsisType, ModuleType
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax

from jrb._store import block_store, commits, files
from jrb._store.block_store import BlockStore, Progress, no_progress
from jrb._store.threads import Worker
from jrb._util import checks
from jrb._util.wording import escape_errors, printable
from jrb._xla import compat
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions, loading, manifest, saving, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.loading import LoadOptions, OpenedCheckpoint
from jrb.checkpoint.saving import Hook, ItemOptions, SaveJob
from jrb.migrate import rebuild
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
from jrb.state import BufferState, Device
from jrb.types import Item

Path = str | os.PathLike[str]

Hooks = Hook | dict[str, Any] | None
"""A function of items, or a dict with one for each of several buffers; None for none."""


# Saving.


@escape_errors()
def save(
    path: Path,
    buffer: Several,
    state: AnyState,
    *,
    extra: Item = None,
    encode: Hooks = None,
    items: bool = True,
    keep: int = 0,
    layout: str | None = None,
    compression: str | None = None,
) -> int:
    """Saves a buffer and its state.

    A reader sees the old checkpoint or the new one, never a mixture, also after a crash at any
    moment. Only blocks (of up to 256 kB) in which something has changed since the last save to this
    path are written. They are found by checksums of all arrays in memory, or by hashes that an
    accelerator computes, so that changes which you make to arrays by hand are saved too; JAX arrays
    that are the very objects of the last save are not looked at.

    If `path` is that of the buffer's own storage on the host (`jrb.MemmapStorage`), this is a
    commit: rows are in their files already, and the time depends only on how many have changed.

    Args:
        path: a folder, or a file of HDF5, that is new, empty, or a checkpoint. Files of other
            programs are never overwritten.
        buffer: a `ReplayBuffer`, `Mix` or `Sharded`; or several, as a dict by name or as a tuple,
            which are saved in one generation. For a `Sharded`, all processes make the same call
            with a folder that all of them see, and each saves its shards.
        state: its state, or a stack of states made by `vmap`; for several buffers, a dict with the
            same names, or a tuple. It is only read.
        extra: a pytree of arrays, PRNG keys and Python numbers that is saved in the same
            generation, such as parameters, the state of an optimizer and the number of the step.
        encode: a function whose results are written in place of the items. It takes K items, arrays
            `[K, ...]` in their stored structure and dtypes, keys as their words, and returns a
            pytree of arrays `[K, ...]`. It is called for some megabytes at a time, also for items
            of zeros, and later only for blocks of items that changed. Its result for an item must
            always be the same, whatever other items come with it. If its name, its result for
            zeros, or dtypes or shapes of results change, everything is written again: give a
            changed function a new name. For several buffers, one function for all, or a dict of
            functions by name.
        items: False leaves out the items, which must then be passed to `load`; all else is small,
            and quickly saved.
        keep: the number of older generations that are kept; see `generations`.
        layout: "native", a folder; or "h5": one file, a group for each trajectory. None for that
            of the checkpoint at the path; where there is none, "h5" if the path ends in `.h5` or
            `.hdf5`, and else "native".
        compression: a filter for the datasets in "h5", such as "gzip".

    Returns:
        The number of the generation; 0 for a file of HDF5.

    Raises:
        LockedError: another process or thread is saving there.
        OSError: the disk is full or broken; the checkpoint that was there before is unchanged.
        TypeError: an object in a `ListStorage` cannot be saved; the message says which.
        ValueError: the state does not belong to this buffer; or at the path is something else than
            a checkpoint, which the message names.

    Example:
        >>> import tempfile, numpy as np, jax.numpy as jnp, jrb
        >>> def pack(items):
        ...     mask = np.packbits(items["mask"], axis=1)
        ...     return {"frame": items["frame"].astype(np.float16), "mask": mask}
        >>> def unpack(saved):
        ...     mask = np.unpackbits(saved["mask"], axis=1, count=9).astype(bool)
        ...     return {"frame": saved["frame"].astype(np.float32), "mask": mask}
        >>> items = {"frame": jnp.ones((4, 8)), "mask": jnp.ones((4, 9), bool)}
        >>> buffer, state = jrb.from_items(items)
        >>> path = tempfile.mkdtemp() + "/replay"
        >>> jrb.save(path, buffer, state, encode=pack)
        1
        >>> jrb.load(path, decode=unpack)[1].storage["mask"].shape
        (4, 9)
    """
    path, out = _prepare_path(path), ItemOptions(encode, items)
    layout = ("h5" if _is_hdf5(path) else "native") if layout is None else layout
    _check_options(layout, compression, keep, out)
    if layout == "native":
        return save_job(SaveJob(path, buffer, state, extra, out), keep)
    if extra is not None:
        raise ValueError("extra: expected none with layout='h5'. Use layout='native'.")
    _hdf5().save(path, buffer, state, compression)
    return 0


def _check_options(layout: str, compression: Any, keep: int, out: ItemOptions) -> None:
    if not isinstance(out.items, bool):
        raise TypeError(f"items: expected True or False, got {out.items!r}.")
    if out.encode is not None and not out.items:
        raise ValueError("encode: expected None with items=False, which writes no items.")
    if layout not in ("native", "h5"):
        raise ValueError(f"layout: expected 'native' or 'h5', got {layout!r}.")
    if isinstance(keep, bool) or not isinstance(keep, numbers.Integral) or keep < 0:
        raise ValueError(f"keep: expected a number of at least 0, got {keep!r}.")
    if layout == "native" and compression is not None:
        raise ValueError("compression: expected none with layout='native'. It is for layout='h5'.")
    if layout == "h5" and keep:
        raise ValueError(f"keep: expected 0 with layout='h5', which is one file, got {keep!r}.")
    if layout == "h5" and out != ItemOptions():
        raise ValueError(
            "encode, items: expected none with layout='h5', whose files others read. Use "
            "compression=, or layout='native'."
        )


def save_job(job: SaveJob, keep: int) -> int:
    """Saves now, and returns the number of the generation. Writes of other threads wait."""
    # Rows on the host are not overwritten by other threads until all of them are written.
    with saving.delay_writes(job.views), job:
        job.open(copy=False)
        return job.finish(keep)


def _hdf5() -> ModuleType:
    """Returns the module for HDF5, whose library is imported only when it is needed."""
    return importlib.import_module("jrb.checkpoint.hdf5")


# Saving in the background.

_running: dict[str, "Save"] = {}  # without a lock, as an interrupt could leave that taken
if hasattr(os, "register_at_fork"):  # a forked process has no thread that would end a save
    os.register_at_fork(after_in_child=_running.clear)


class Save:
    """A save in a background thread; before the program ends, it waits for the thread."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._job: SaveJob | None = None  # None again when the save is over
        self._worker = Worker(compat.with_settings(self._finish), "jrb-save")
        self._was_raised = False  # True once `wait` has raised the error

    def _begin(self, job: SaveJob) -> None:
        """Copies what will be written, and starts the thread if anything is left to be done."""
        try:
            self._job = job
            with saving.delay_writes(job.views):
                # A commit only syncs files and writes one: it is done here, so that nothing has to
                # be copied.
                job.open(copy=not job.is_commit)
                if job.is_commit:
                    self._finish()
            if not job.is_commit:
                self._worker.start()
        except BaseException:  # also an interrupt at the end of the context
            if self._job is not None and not self._worker.is_started:
                self._job.close()
            raise

    def _finish(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.finish(self._keep)

    def done(self) -> bool:
        """Returns True if the save is over."""
        return not self._worker.is_alive()

    def wait(self) -> None:
        """Waits until the save is over. An interrupt ends the waiting, not the save.

        Raises:
            OSError: the save has failed.
        """
        self._worker.wait()
        if self._worker.error is not None:
            self._was_raised = True
            raise self._worker.error


@escape_errors()
def save_async(
    path: Path,
    buffer: Several,
    state: AnyState,
    *,
    extra: Item = None,
    encode: Hooks = None,
    items: bool = True,
    keep: int = 0,
) -> Save:
    """Saves in the background.

    Rows and arrays are copied to host memory before this returns: all of them in the first save to
    a path, later only those that changed. Afterwards the state may be donated. If the save fails,
    the next call of `save`, `save_async` or `load` with this path raises, and so does `wait`. A
    program waits for its saves before it ends, and prints the error of one that has failed without
    a call of `wait`. A commit of a storage on the host to its own path is over when this returns.

    Args:
        path: the path of a folder.
        buffer: the description.
        state: its state.
        extra: as for `save`.
        encode: as for `save`; it is called before this returns.
        items: as for `save`.
        keep: the number of older generations that are kept.

    Returns:
        The save, with `wait()` and `done()`.

    Raises:
        As `save`; also the error of an earlier save to this path.
    """
    path, out = _prepare_path(path), ItemOptions(encode, items)
    if _is_hdf5(path):
        raise ValueError(f"{path}: expected a folder, got a file of HDF5. jrb.save writes it.")
    _check_options("native", None, keep, out)
    job = SaveJob(path, buffer, state, extra, out, "save_async")
    save = _running[os.path.realpath(path)] = Save(keep)
    save._begin(job)
    atexit.unregister(_wait_for_all)
    atexit.register(_wait_for_all)  # called before the finalizers that close the files of the save
    return save


def wait_for_save(path: str) -> None:
    """Waits for a running save to a path, and raises its error, but only once."""
    path = os.path.realpath(path)
    save = _running.get(path)
    if save is None:
        return
    save._worker.wait()
    error = save._worker.error
    # No call comes between these lines, so no interrupt: an error is forgotten only when raised.
    if path in _running and _running[path] is save:
        del _running[path]
    if error is not None:
        raise error


@atexit.register
def _wait_for_all() -> None:
    """Waits for all saves; raises errors that `wait` did not raise, which Python then prints."""
    errors: list[BaseException] = []
    for save in list(_running.values()):
        try:
            save._worker.wait()
            if save._worker.error is not None and not save._was_raised:
                errors.append(save._worker.error)
        except BaseException as error:  # an interrupt: the program ends before the save
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else BaseExceptionGroup("saves failed", errors)


# Loading.


class _Options(TypedDict, total=False):
    """The arguments of `load` that its overloads have in common."""

    example: Item
    decode: Hooks
    convert: Hooks
    items: Item
    cast: bool
    capacity: int | None
    num_envs: int | EllipsisType | None
    generation: int | None
    device: Device
    verify: bool


D = TypeVar("D", bound=dict[str, Any] | tuple[Any, ...])


# Without a description, type checkers assume a single buffer, as most checkpoints have one.
@overload
def load(
    path: Path, buffer: ReplayBuffer | None = None, *, extra: None = None, **how: Unpack[_Options]
) -> tuple[ReplayBuffer, BufferState]: ...
@overload
def load(
    path: Path, buffer: ReplayBuffer | None = None, *, extra: Item, **how: Unpack[_Options]
) -> tuple[ReplayBuffer, BufferState, Any]: ...
@overload
def load(
    path: Path, buffer: Sharded, *, extra: None = None, **how: Unpack[_Options]
) -> tuple[Sharded, BufferState]: ...
@overload
def load(
    path: Path, buffer: Sharded, *, extra: Item, **how: Unpack[_Options]
) -> tuple[Sharded, BufferState, Any]: ...
@overload
def load(
    path: Path, buffer: Mix, *, extra: None = None, **how: Unpack[_Options]
) -> tuple[Mix, tuple[BufferState, ...]]: ...
@overload
def load(
    path: Path, buffer: Mix, *, extra: Item, **how: Unpack[_Options]
) -> tuple[Mix, tuple[BufferState, ...], Any]: ...
@overload
def load(
    path: Path, buffer: D, *, extra: None = None, **how: Unpack[_Options]
) -> tuple[D, Any]: ...
@overload
def load(path: Path, buffer: D, *, extra: Item, **how: Unpack[_Options]) -> tuple[D, Any, Any]: ...
@escape_errors()
def load(
    path: Path,
    buffer: Several = None,
    *,
    example: Item = None,
    extra: Item = None,
    decode: Hooks = None,
    convert: Hooks = None,
    items: Item = None,
    cast: bool = False,
    capacity: int | None = None,
    num_envs: int | EllipsisType | None = ...,
    generation: int | None = None,
    device: Device = None,
    verify: bool = True,
) -> Any:
    """Loads a checkpoint: the next draws are, bit for bit, those of an uninterrupted run.

    The path of a storage on the host is opened in place; with `verify`, all rows are read first.
    Another process may be writing there, but must have ended before the first write from here.
    Items on the host from any other checkpoint go to a temporary store, or to that of `buffer`.

    Args:
        path: the path of a checkpoint, in either layout.
        buffer: the description; needed if it contains functions, as no code is saved. Batch size
            and transforms may differ from the saved ones; if anything else differs, the state is
            converted as by `jrb.rebuild`. For several buffers, a dict or tuple of descriptions.
        example: one transition; needed if the program has not defined the classes of the items.
            Otherwise it is only compared. For several buffers, a dict or tuple of transitions.
        extra: an example of the saved `extra`. Each leaf is returned as the example's leaf is: a
            JAX array on the same device, a NumPy array, or a Python number.
        decode: the inverse of the `encode` of the save. For each chunk, it takes NumPy arrays
            `[K, ...]` and returns items as they are stored. For several buffers, as for `encode`.
        convert: a function from one stored item to the new one, such as one with a further leaf, as
            for `jrb.rebuild`; for several buffers, one for all, or a dict. Priorities and all else
            that stays valid are kept; `example` is an item as it was saved. Items on the host go
            to a temporary store, or to that of `buffer`, which must have another path.
        items: for a checkpoint that was saved with `items=False`, the result of
            `jrb.items(buffer, state)` at that time: arrays `[K, ...]`, oldest first, keys as their
            words; for a `ListStorage`, a list. Some are compared with saved checksums. For several
            buffers, a dict or tuple. Slots without items become zeros.
        cast: True converts items of float64, int64 and other 64 bits to the dtypes that JAX keeps
            without `jax_enable_x64`, as `jrb.ReplayBuffer(cast=True)` does. Slots without items
            become zeros.
        capacity: another N; the newest rows stay, with their priorities.
        num_envs: another E, or None. All trajectories are then distributed over the environments,
            each in one piece, and no window reaches from one into the next.
        generation: its number; None for the newest.
        device: a device or a sharding for all arrays; None for the default device. For a `Sharded`,
            its mesh; each process reads its own shards.
        verify: False opens the path of a storage on the host at once, without a check of all rows;
            a damaged row is then drawn as it is.

    Returns:
        The description and the state, for several buffers as dicts or tuples, like those that were
        saved; and the saved `extra`, if an example of it is given.

    Raises:
        FileNotFoundError: there is no checkpoint, or no such generation.
        DamagedError: a file is not what was written; the message names leaf, block and file.
        TypeError: the items have dtypes of 64 bits that JAX does not keep, and `cast` is False.
        ValueError: the version, or a leaf's dtype or shape, the structure or the capacity differ;
            `decode` or `items` is missing, or is given and not needed.
    """
    path = _prepare_path(path)
    checks.flag("verify", verify)
    checks.flag("cast", cast)
    options = LoadOptions(decode, items, verify, cast)
    read = functools.partial(load_generation, number=generation, extra=extra, options=options)
    if _is_hdf5(path):
        if generation or any(given is not None for given in (extra, decode, items)):
            raise ValueError(
                "generation, extra, decode, items: expected None for an HDF5 file, which holds but "
                "generation 0, and all of it as it is."
            )
        read = functools.partial(_hdf5().load, cast=cast)
    elif generation is not None:
        checks.count("generation", generation)
    if convert is None:
        loaded, state, *besides = _load_as(read, path, buffer, example, device)
    else:
        loaded, state, *besides = _load_converted(read, path, buffer, example, device, convert)
    if capacity is None and num_envs is ...:
        return loaded, state, *besides
    if not isinstance(loaded, ReplayBuffer):
        raise TypeError(
            "load: capacity, num_envs: expected a checkpoint of a single buffer, got several. Load "
            "them as they are, and call jrb.rebuild."
        )
    resized = dataclasses.replace(
        schema.choose_target(loaded, given=False),
        capacity=loaded.capacity if capacity is None else capacity,
        num_envs=loaded.num_envs if num_envs is ... else num_envs,
    )
    if resized.ring != loaded.ring:
        loaded, state = resized, rebuild(loaded, state, resized)
        state = state if device is None else jax.device_put(state, device)
    return loaded, state, *besides


def _load_as(
    read: Callable[..., Any], path: str, buffer: Several, example: Item, device: Device
) -> Any:
    """Reads a buffer and its state; a state of another description is converted by `rebuild`."""
    try:
        return read(path, buffer, example, device)
    except descriptions.OtherError as other:
        # A store that is opened at its own path cannot be converted.
        if not isinstance(buffer, ReplayBuffer | Sharded) or schema.is_at(path, buffer):
            raise
        try:
            loaded, state, *besides = read(path, None, example, None)
        except descriptions.UnknownError:
            raise other from None  # only a description that has its functions can load it
        if not isinstance(loaded, ReplayBuffer | Sharded):
            raise
    state = rebuild(loaded, state, buffer)
    return buffer, state if device is None else jax.device_put(state, device), *besides


def _load_converted(
    read: Callable[..., Any], path: str, buffer: Several, example: Item, device: Device, hooks: Any
) -> Any:
    """Reads buffers and their states as they were saved, and converts all items."""
    try:
        loaded, state, *besides = read(path, None, example, None)
    except descriptions.UnknownError:  # only a description that has its functions can load it
        saved = buffer
        if isinstance(buffer, ReplayBuffer):
            saved = schema.choose_target(buffer, given=False)  # `buffer` gets the new items
        loaded, state, *besides = read(path, saved, example, None)

    loaded, state = _convert_items(path, loaded, state, buffer, hooks)
    return loaded, state if device is None else jax.device_put(state, device), *besides


def _convert_items(path: str, old: Any, state: Any, new: Any, hook: Any) -> tuple[Any, Any]:
    """Returns the descriptions and states with converted items; `new` may be None."""
    if isinstance(old, ReplayBuffer | Sharded):
        if schema.is_at(path, new):
            raise ValueError(
                f"load: convert: expected a storage at another path than {path}, where the rows "
                "are that are converted. Save there afterwards, or give it a new path."
            )
        if new is None:
            new = schema.choose_target(old, given=False) if isinstance(old, ReplayBuffer) else old
        return new, rebuild(old, state, new, convert=hook)
    parts, states = descriptions.buffers_by_name(old), descriptions.buffers_by_name(state)
    hooks = descriptions.functions_by_name(old, hook, "load: convert functions")
    news = dict.fromkeys(parts)
    if new is not None:
        news = descriptions.match_by_name(old, new, "load: buffers")
    done = {n: _convert_items(path, parts[n], states[n], news[n], hooks[n]) for n in parts}
    whole = new if isinstance(new, Mix) else old
    return descriptions.combine(whole, done)


def load_generation(
    path: str,
    buffer: Several,
    example: Item,
    device: Device,
    number: int | None = None,
    extra: Item = None,
    options: LoadOptions = loading.AS_SAVED,
) -> Any:
    """Returns a description and its state; and the saved `extra`, if there is an example of it."""
    # The generation does not expire before the store is closed; a storage on disk keeps it open.
    store = BlockStore.open_to_read(path, number)
    checkpoint = OpenedCheckpoint(path, store, store.meta)
    try:
        besides = () if extra is None else (loading.load_extra(checkpoint, extra),)
        loaded = *loading.load(checkpoint, buffer, example, device, options), *besides
    except BaseException:
        store.close()
        raise
    if store.meta.get("kind") != saving.STORE:
        store.close()
    return loaded


def _prepare_path(path: Path) -> str:
    """Returns the absolute path, after waiting for a running save to it."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected a path, got {path!r}. The order is (path, buffer, state).")
    # Made absolute before the wait, as a relative path means another folder after a `chdir`.
    absolute = files.absolute_path(path)
    wait_for_save(absolute)
    return absolute


def _is_hdf5(path: str) -> bool:
    """Returns True if a checkpoint at a path is a file of HDF5, or would be made as one."""
    if os.path.isdir(path) or os.path.isfile(path):
        return os.path.isfile(path)
    return path.lower().endswith((".h5", ".hdf5"))


# Facts.


@escape_errors()
def generations(path: Path) -> list[int]:
    """Returns the numbers of the generations that a checkpoint has, oldest first; 0 for HDF5."""
    path = _prepare_path(path)
    return (
        [_hdf5().metadata(path)["generation"]]
        if _is_hdf5(path)
        else commits.list_generations(commits.open_folder(path))
    )


@escape_errors()
def metadata(path: Path, generation: int | None = None) -> dict[str, Any]:
    """Returns the metadata of a checkpoint; its rows are not read.

    Args:
        path: the path of a checkpoint, in either layout.
        generation: its number; None for the newest.

    Returns:
        A dict for JSON: `generation`, 0 for HDF5; `description`, as code; `time`, when it was
        saved, in UTC; `versions` of libraries; `capacity`, `num_envs`, `size`; `writer`, where the
        next row goes; `leaves` in rows, with dtype and shape; `nbytes`; `items`, "rows" if they
        were saved unchanged, "encoded", "objects", or "apart" if left out; `encode`, the function's
        name; `extra`, the names of its leaves, None without any; and `parts`, such a dict for
        each of several buffers, by name.

    Raises:
        FileNotFoundError: there is no checkpoint, or no such generation.
    """
    path = _prepare_path(path)
    if _is_hdf5(path):
        if generation:
            raise ValueError(f"generation: expected None for a file of HDF5, got {generation!r}.")
        return _hdf5().metadata(path)
    if generation is not None:
        checks.count("generation", generation)
    return manifest.metadata(path, generation)


def is_checkpoint(path: Path) -> bool:
    """Returns True if a checkpoint in either layout is at a path, even a damaged one."""
    path = _prepare_path(path)
    return manifest.is_checkpoint(path) if os.path.isdir(path) else _hdf5().is_own(path)


@escape_errors()
def verify(path: Path, progress: Progress = no_progress) -> list[str]:
    """Reads a whole checkpoint, older generations too, and returns a line about each damage.

    It takes some megabytes of memory, whatever the size.

    Args:
        path: the path of a checkpoint, in either layout.
        progress: a function that is called now and then with the share of the work that is done,
            from 0 to 1; perhaps from another thread, one call at a time.

    Returns:
        Lines of text; an empty list if nothing is damaged.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    path = _prepare_path(path)
    check = _hdf5().verify if _is_hdf5(path) else block_store.find_damages
    return list(map(printable, check(path, progress)))
