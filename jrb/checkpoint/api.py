"""The functions of `jrb.checkpoint`: arguments are checked here, and saves begin and end."""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from types import EllipsisType, ModuleType
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax

from jrb._store import files, opening
from jrb._store import generation as generation_files
from jrb._store.errors import DamagedError, StaleError
from jrb._store.opening import Progress, no_progress
from jrb._util import checks
from jrb._util.wording import escaped_errors, printable
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import background, composite, descriptions, manifest, saving, schema
from jrb.checkpoint import extra as extra_data
from jrb.checkpoint.background import Save
from jrb.checkpoint.composite import AnyJob, AnySnapshot, Several
from jrb.checkpoint.extra import ExtraData
from jrb.checkpoint.hooks import Hook, Inward, Outward
from jrb.checkpoint.loading import OpenedCheckpoint
from jrb.migrate import rebuild
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
from jrb.state import BufferState, Device
from jrb.types import Item

Path = str | os.PathLike[str]

Hooks = Hook | dict[str, Any] | None
"""A function over items, or one for each of several buffers; None for none."""


@escaped_errors()
def save(
    path: Path,
    buffer: Several,
    state: AnyState,
    *,
    extra: Item = None,
    encode: Hooks = None,
    items: bool = True,
    keep: int = 0,
    layout: str = "native",
    compression: str | None = None,
) -> int:
    """Saves a buffer and its state.

    A reader sees the old checkpoint or the new one, never a mixture, also after a crash at any
    moment. Of the items, only those that are new or changed since the last save to this path are
    written. The writer says which are new. Changed ones are found by checksums of all items in
    memory, computed at several GB/s on the host, or on the accelerator, so also an array that you
    have edited by hand is saved as it is.

    Where `path` is that of the buffer's own storage on the host (`jrb.MemmapStorage`), this is a
    commit: rows are in their files already, and it costs what changed. Elsewhere it writes all of
    them.

    Args:
        path: of a folder that is not there, is empty, or has a checkpoint; with `layout="h5"` of a
            file that is not there, or is such a checkpoint. Files of others are never written over.
        buffer: the description, a `ReplayBuffer` or a `Mix`; or several, as a dict by name or as a
            tuple, which are saved in one generation. Of a `Sharded`, each process saves the shards
            that it has, in the same folder, which all must see; all call this alike, and return
            when all is saved.
        state: its state, also one that `vmap` has put axes before; of several, a dict with the same
            names, or a tuple. It is only read.
        extra: what belongs to it, in the same generation, so that no crash can part them: a pytree
            of arrays, PRNG keys and Python numbers, such as parameters, the state of an optimizer
            and the number of the step. None for nothing.
        encode: what is written in place of the items: a function from K of them, NumPy arrays
            `[K, ...]` in the structure and dtypes in which they are stored, keys as their words, to
            a pytree of arrays `[K, ...]`. It casts or packs, is called for some megabytes at a
            time, also for items of zeros, and has to give the same for the same item always,
            whatever is beside it. The checkpoint keeps its name: with another name, or another
            structure, dtype or shape of what it gives, everything is written anew; else it is
            called for what is new or changed, for items beside these, and for some older ones,
            which tell whether it still gives the same. Observations that are stored once are whole
            items here. Of several buffers, one function for all, or a dict of functions by name.
            See the example.
        items: False leaves out the items, which `load` then asks for: all else is small, and saved
            at once.
        keep: how many older generations stay; see `generations`.
        layout: "native", or "h5": one file, a group for each trajectory, written whole each time.
        compression: with "h5", of its datasets, such as "gzip".

    Returns:
        The number of the generation; 0 for a file.

    Raises:
        LockedError: somebody else is saving there.
        OSError: the disk is full or broken; what was there before is still there.
        TypeError: an object in a `ListStorage` that no file can hold; the message says which.
        ValueError: the state is not one of this buffer; or there is something else at the path,
            which the message names.

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
    path, out = _settled(path), _outward(encode, items)
    saved = composite.snapshot(buffer, state)
    if layout == "h5":
        _check_hdf5(keep, extra is None, out)
        with composite.reading(saved):
            _hdf5().save(path, saved, compression)
        return 0
    _check_native(layout, compression, keep)
    return save_snapshot(path, saved, keep, extra_data.of(extra, copy=False), out)


def _outward(encode: Hooks, items: bool) -> Outward:
    """Returns what becomes of items, checked."""
    out = Outward(encode, items)
    out.check()
    return out


def _check_hdf5(keep: int, has_no_extra: bool, out: Outward) -> None:
    if keep:
        raise ValueError(f"keep: expected 0 with layout='h5', which is one file, got {keep!r}.")
    if not has_no_extra:
        raise ValueError("extra: expected none with layout='h5'. Use layout='native'.")
    if not out.is_plain:
        raise ValueError(
            "encode, items: expected none with layout='h5', whose files others read. Use "
            "compression=, or layout='native'."
        )


@escaped_errors()
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

    What is to be written is copied to host memory before this returns: at first everything, later
    what changed. Then the state may be donated. If the save fails, the next call of `save`,
    `save_async` or `load` with this path raises, and so does `wait`. A program that ends waits, and
    has the status 120 if a save failed and nobody was told. An interrupt of `wait` ends the waiting
    only. A commit of a storage on the host to its own path is over when this returns.

    Args:
        path: of a folder.
        buffer: the description.
        state: its state.
        extra: as for `save`.
        encode: as for `save`; it is called before this returns.
        items: as for `save`.
        keep: how many older generations stay.

    Returns:
        The save, with `wait()` and `done()`.

    Raises:
        As `save`, and what went wrong with the save before.
    """
    path, out = _settled(path), _outward(encode, items)
    saved = composite.snapshot(buffer, state, "save_async")
    _check_native("native", None, keep)
    copied = extra_data.of(extra, copy=True)
    opened = functools.partial(_open_job, path, saved, keep, True, copied, out)
    return background.start(path, opened, keep)


_NO_EXTRA, _PLAIN, _AS_SAVED = ExtraData(), Outward(), Inward()


def save_snapshot(
    path: str,
    saved: AnySnapshot,
    keep: int,
    extra: ExtraData = _NO_EXTRA,
    out: Outward = _PLAIN,
) -> int:
    """Saves now, and returns the number of the generation. Writes of other threads wait."""
    job: AnyJob | int = 0
    try:
        with composite.reading(saved):
            job = _open_job(path, saved, keep, False, extra, out)
            return job if isinstance(job, int) else job.finish(keep)
    except BaseException:
        if not isinstance(job, int):
            job.close()
        raise


def _open_job(
    path: str, saved: AnySnapshot, keep: int, copy: bool, extra: ExtraData, out: Outward
) -> AnyJob | int:
    """Returns a save that is to be finished, or the number of the generation if it is over already.

    Args:
        path: of the folder.
        saved: one state, or several.
        keep: how many older generations stay.
        copy: whether what will be written is copied now, so that the state may change.
        extra: what is saved besides.
        out: what becomes of items.
    """
    is_commit = saved.lies_at(path)
    if is_commit:
        saving.check_commit(keep, out)
    job: AnyJob | None = None
    try:
        with composite.reading(saved):
            job = composite.job(path, saved, extra, out)
            job.open(copy)
            return job.finish(keep) if is_commit else job
    except BaseException:  # an interrupt may come where the context ends
        if job is not None:
            job.close()
        raise


def check_snapshot(saved: AnySnapshot) -> None:
    """Raises what a save would raise before it writes."""
    with composite.reading(saved):
        composite.job("", saved, _NO_EXTRA, _PLAIN)


def _hdf5() -> ModuleType:
    """Returns what reads and writes HDF5, whose library is imported when it is needed."""
    return importlib.import_module("jrb.checkpoint.hdf5")


def _check_native(layout: str, compression: Any, keep: int) -> None:
    if layout != "native":
        raise ValueError(f"layout: expected 'native' or 'h5', got {layout!r}.")
    if compression is not None:
        raise ValueError("compression: expected none with layout='native'. It is for layout='h5'.")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep: expected a number of at least 0, got {keep!r}.")


class _Options(TypedDict, total=False):
    """What else `load` takes."""

    example: Item
    decode: Hooks
    items: Item
    capacity: int | None
    num_envs: int | EllipsisType | None
    generation: int | None
    device: Device
    verify: bool
    cast: bool


D = TypeVar("D", bound=Mix | Sharded | dict[str, Any] | tuple[Any, ...])


@overload
def load(
    path: Path, buffer: ReplayBuffer, *, extra: None = None, **options: Unpack[_Options]
) -> tuple[ReplayBuffer, BufferState]: ...
@overload
def load(
    path: Path, buffer: ReplayBuffer, *, extra: Item, **options: Unpack[_Options]
) -> tuple[ReplayBuffer, BufferState, Any]: ...
@overload
def load(
    path: Path, buffer: D, *, extra: None = None, **options: Unpack[_Options]
) -> tuple[D, Any]: ...
@overload
def load(
    path: Path, buffer: D, *, extra: Item, **options: Unpack[_Options]
) -> tuple[D, Any, Any]: ...
@overload
def load(
    path: Path, buffer: None = None, *, extra: None = None, **options: Unpack[_Options]
) -> tuple[Any, Any]: ...
@overload
def load(
    path: Path, buffer: None = None, *, extra: Item, **options: Unpack[_Options]
) -> tuple[Any, Any, Any]: ...
@escaped_errors()
def load(
    path: Path,
    buffer: Several = None,
    *,
    example: Item = None,
    extra: Item = None,
    decode: Hooks = None,
    items: Item = None,
    capacity: int | None = None,
    num_envs: int | EllipsisType | None = ...,
    generation: int | None = None,
    device: Device = None,
    verify: bool = True,
    cast: bool = False,
) -> Any:
    """Loads what was saved: the next draws are, bit for bit, those of an uninterrupted run.

    From the path of a storage on the host, that is opened, after a look at all of its rows; others
    may write there meanwhile, and the first write from here takes their place when they are gone.
    Items on the host from any other checkpoint go to a temporary store, or to that of `buffer`.

    Args:
        path: of a checkpoint, in either layout.
        buffer: the description as it was saved; needed if that holds functions, whose code no file
            has. Batch size and transforms may be others; if anything else is, the state becomes one
            of this description as `jrb.rebuild` does it. Of several, a dict or tuple of them.
        example: one transition; needed if the items are of classes that the program has not
            defined. Otherwise it is only compared. Of several, a dict or tuple of them.
        extra: an example of what was saved besides, arrays, `jax.ShapeDtypeStruct`s or numbers: its
            leaves say where each comes back, as an array of JAX where that of the example lies, as
            one of NumPy, or as a Python number, which takes a saved number of any width. None
            leaves it out.
        decode: the inverse of the `encode` of the save, chunk by chunk: from what that gave, NumPy
            arrays `[K, ...]`, to items as they are stored. Of several, as for `encode`. Next
            observations that nothing holds any more, of those that are stored once, become zeros.
        items: with a checkpoint that was saved with `items=False`, what `jrb.items(buffer, state)`
            gave then: arrays `[K, ...]`, oldest first, keys as their words; of a `ListStorage` a
            list. A few of them are compared with what was held. Of several, a dict or tuple of
            them. Rows that hold no items come back as zeros.
        capacity: N of the buffer that is wanted; None for that of the checkpoint. The newest rows
            stay, with their priorities, and all the states start from there.
        num_envs: E of the buffer that is wanted; `...` for that of the checkpoint. The rows of all
            environments are then dealt out anew, each trajectory in one piece, and no window
            crosses a seam.
        generation: which one; None for the newest.
        device: a device or a sharding, for all arrays, so that it may cut only axes that all have,
            as those of `vmap`; None for the default device. Of a `Sharded`, its mesh: each process
            then reads the shards that it has.
        verify: False opens the path of a storage on the host without a look at all of its rows, at
            once; a damaged row is then drawn as it is. Else nothing is read without a look.
        cast: whether items of float64, int64 and other 64 bits become what JAX keeps without
            `jax_enable_x64`, as with `jrb.ReplayBuffer(cast=True)`. Rows that hold no items come
            back as zeros; items on the host are copied to a temporary store.

    Returns:
        The description and the state, of several buffers each as they were saved, dicts or tuples;
        and what was saved besides, if there is an example of it.

    Raises:
        FileNotFoundError: there is no checkpoint, or no such generation.
        DamagedError: a file is not what was written; the message names leaf, block and file.
        TypeError: items of 64 bits, without `cast`.
        ValueError: another version, dtype, shape, structure or capacity, with the leaf's name; no
            `decode` or `items` where they are needed, or one where it is not.
    """
    path = _settled(path)
    if generation is not None:
        checks.count("generation", generation)
    checks.flag("verify", verify)
    checks.flag("cast", cast)
    back = Inward(decode, items, verify, cast)
    read = functools.partial(load_generation, number=generation, extra=extra, back=back)
    if os.path.isfile(path):
        if any(given is not None for given in (generation, extra, decode, items)):
            raise ValueError(
                "generation, extra, decode, items: expected None for an HDF5 file, which holds but "
                "one generation, and all of it as it is."
            )
        read = functools.partial(_hdf5().load, cast=cast)
    try:
        loaded, state, *besides = read(path, buffer, example, device)
    except schema.OtherError as other:
        loaded, state, *besides = _as_another(read, path, buffer, example, other)
        state = state if device is None else jax.device_put(state, device)
    if capacity is not None or num_envs is not ...:
        loaded, state = _resized(loaded, state, capacity, num_envs, device)
    return loaded, state, *besides


def load_generation(
    path: str,
    buffer: Several,
    example: Item,
    device: Device,
    number: int | None = None,
    extra: Item = None,
    back: Inward = _AS_SAVED,
) -> Any:
    """Loads a generation, the newest one if none is named.

    Returns:
        A description and its state; and what was saved besides, where `extra` is an example of it.
    """
    folder = opening.folder_at(path)
    while True:
        newest = generation_files.last(folder)
        try:
            one = manifest.opened(path, number)
            opened = OpenedCheckpoint(path, one)
            besides = () if extra is None else (extra_data.restored(path, one, opened.meta, extra),)
            return *composite.load(opened, buffer, example, device, back), *besides
        except (DamagedError, FileNotFoundError, StaleError):
            if number is not None or generation_files.last(folder) == newest:
                raise  # else the next generation has come meanwhile


def _resized(
    loaded: Any,
    state: AnyState,
    capacity: int | None,
    num_envs: int | EllipsisType | None,
    device: Device,
) -> tuple[Any, Any]:
    """What was loaded, of another size."""
    if not isinstance(loaded, ReplayBuffer):
        raise TypeError(
            "load: capacity, num_envs: expected a checkpoint of a single buffer, got several. Load "
            "them as they are, and call jrb.rebuild."
        )
    resized = dataclasses.replace(
        schema.loadable(loaded, given=False),
        capacity=loaded.capacity if capacity is None else capacity,
        num_envs=loaded.num_envs if num_envs is ... else num_envs,
    )
    if resized.ring == loaded.ring:
        return loaded, state
    state = rebuild(loaded, state, resized)
    return resized, state if device is None else jax.device_put(state, device)


def _as_another(
    read: Callable[..., Any], path: str, buffer: Any, example: Item, other: schema.OtherError
) -> Any:
    """What was saved, as a state of another description."""
    if not isinstance(buffer, ReplayBuffer | Sharded):
        raise other
    if schema.is_at(path, buffer):
        raise other  # the store that is read cannot be made anew
    try:
        loaded, state, *besides = read(path, None, example, None)
    except descriptions.UnknownError:
        raise other from None  # only a description that has its functions can load it
    if not isinstance(loaded, ReplayBuffer | Sharded):
        raise other
    return buffer, rebuild(loaded, state, buffer), *besides


def _settled(path: Path) -> str:
    """The path, absolute, when nothing is under way for it."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected a path, got {path!r}. The order is (path, buffer, state).")
    absolute = files.absolute(path)
    background.settle(absolute)
    return absolute


@escaped_errors()
def generations(path: Path) -> list[int]:
    """The generations that a checkpoint has, oldest first."""
    folder = opening.folder_at(_settled(path))
    return [number for number in generation_files.numbers(folder) if number]


@escaped_errors()
def metadata(path: Path, generation: int | None = None) -> dict[str, Any]:
    """What a checkpoint in a folder says of itself; its rows are not read, however many there are.

    Args:
        path: of the folder.
        generation: which one; None for the newest.

    Returns:
        For JSON: `generation`; `description`, as it is written; `time`, when it was saved, in UTC;
        `versions` of libraries; `capacity`, `num_envs`, `size`; `writer`, where the next row goes;
        `leaves` that lie in rows, with dtype and shape; `nbytes`; `items`, "rows" as they are,
        "encoded", "objects", or "apart" if they were left out; `encode`, the name of the function;
        `extra`, the leaves that were saved besides, None where there is none; and `parts`,
        the same of each of several buffers, by name.

    Raises:
        FileNotFoundError: there is no checkpoint, or no such generation.
    """
    return manifest.metadata(_settled(path), generation)


def is_checkpoint(path: Path) -> bool:
    """Returns whether a path is that of a checkpoint in either layout, even of a damaged one."""
    path = _settled(path)
    if not os.path.isdir(path):
        return _hdf5().is_own(path)
    return manifest.is_checkpoint(path)


@escaped_errors()
def verify(path: Path, progress: Progress = no_progress) -> list[str]:
    """Reads all of a checkpoint, older generations too, and says what is wrong, a line each.

    It takes some megabytes of memory, whatever the size.

    Args:
        path: of a checkpoint, in either layout.
        progress: a function that is called now and then with the share of the work that is done,
            from 0 to 1; perhaps from another thread, one call at a time.

    Returns:
        Nothing for one that is whole.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    path = _settled(path)
    check = _hdf5().verify if os.path.isfile(path) else manifest.damages
    return list(map(printable, check(path, progress)))
