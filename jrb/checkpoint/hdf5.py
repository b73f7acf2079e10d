"""Checkpoints as one HDF5 file: a group for each trajectory, and the rest of the state.

```
trajectories/000000/observation     [L + 1, ...]; a leaf that is no shared observation: [L, ...]
                   /next/reward     attributes: length L, environment
state/writer/cursor ...             all arrays of the state but the items
jrb                                 the description in JSON; attributes: format, version
```

Items are in the order of time, separately for each environment. A dtype that HDF5 lacks (bfloat16,
float8, int4) is stored as unsigned integers of its size, keys as their words; the attribute `dtype`
has its name. After the last byte of HDF5 comes a seal, a checksum of the file. It is checked before
HDF5 opens the file, because HDF5 may read a damaged file forever. The file is written under another
name in the same folder, synced, read back, and renamed.
"""

import contextlib
import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import quote

import h5py
import jax
import numpy as np

from jrb._core import memory
from jrb._store import files
from jrb._store.block_store import Progress, no_progress
from jrb._store.files import DamagedError, Folder, Lock, refuse_damage
from jrb._util import casting, pytree
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions, loading, manifest, saving, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.schema import Snapshot
from jrb.layouts.compact import from_flat, iter_trajectories, to_flat
from jrb.migrate import pieces
from jrb.mix import Description
from jrb.state import Device
from jrb.types import Item

FORMAT, VERSION = manifest.HDF5, 3
_SAFE = " !#$&'()*+,:;=?@[]~<>|^`{}"
_PIECE = 4 << 20  # bytes that are checked at a time
_MOST_JSON = 64 << 20  # bytes
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SEAL = struct.Struct("<8sIQ")  # a mark; the CRC-32 and the number of all bytes before the seal
_MARK = b"jrb-crc1"
_ERRORS = OSError, KeyError, RuntimeError, IndexError, TypeError, ValueError
"""The errors that h5py raises for damaged files."""


# Saving.


def save(path: str, buffer: Several, state: Any, compression: str | None) -> None:
    """Saves one buffer as a file of HDF5; see `jrb.checkpoint.save`."""
    descriptions.check_buffers(buffer, "save")
    saved = schema.snapshot(buffer, state) if isinstance(buffer, ReplayBuffer) else None
    if saved is None or buffer.storage.of_objects or saved.batch:
        raise ValueError(
            "layout: expected a single buffer of arrays with layout='h5', got several, objects, or "
            "states under vmap. Use layout='native'."
        )
    if buffer.writer.per_env:
        raise ValueError(
            "layout: expected a writer of all environments together with layout='h5', got "
            f"{type(buffer.writer).__name__}. Use layout='native'."
        )
    files.check_links(path)
    if os.path.isdir(path):
        raise ValueError(f"{path}: expected a file with layout='h5', found a folder.")
    if os.path.lexists(path) and not is_own(path):
        raise ValueError(
            f"{path}: expected nothing, or a checkpoint with layout='h5', found another file, "
            "which would be lost. Move it away, or choose another path."
        )
    path = os.path.realpath(path)  # a link to a checkpoint stays one
    # HDF5 writes to memory: where a write to a disk fails, it may crash.
    with (
        saving.delay_writes(saved.views),
        h5py.File(path, "w", driver="core", backing_store=False) as file,
    ):
        _write(file, saved, {} if compression is None else {"compression": compression})
        file.flush()
        image = file.id.get_file_image()
    files.make_folder(os.path.dirname(path))
    seal = _SEAL.pack(_MARK, zlib.crc32(image), len(image))
    with lock_file(path) as (folder, temporary):
        new = folder.path_of(temporary)
        folder.write_new(temporary, [image, seal])
        for damage in verify(new):
            raise OSError(errno.EIO, f"what was written is not what is there: {damage}", path)
        folder.replace(temporary, os.path.basename(path))
        folder.sync()


@contextlib.contextmanager
def lock_file(path: str) -> Iterator[tuple[Folder, str]]:
    """Holds the lock to write or remove a file; yields its folder and the name of a new file.

    No file of a user has that name. The new file is removed at the end, unless it was renamed.
    """
    folder, temporary = Folder(os.path.dirname(path)), f".{os.path.basename(path)}.jrb-new"
    # The new file is the lock too: a killed save leaves one file, which the next takes over.
    lock = Lock(folder, temporary)
    try:
        yield folder, temporary
    finally:
        folder.remove(temporary)
        lock.release()


def is_own(path: str) -> bool:
    """Returns True if a file is a checkpoint in HDF5, even a damaged one."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _SEAL.size))
        if file.read().startswith(_MARK):
            return True
    with contextlib.suppress(*_ERRORS), h5py.File(path, "r", locking=False) as file:
        return file.attrs.get("format") == FORMAT
    return False


def _write(file: h5py.File, saved: Snapshot, options: dict[str, Any]) -> None:
    buffer, items = saved.buffer, schema.ItemReader(saved)
    # Oldest first. Empty slots are not written, so that the file is as large as its items.
    slots = schema.held_slots(buffer, saved.state.writer)
    specs = jax.tree.leaves(items.spec)
    arrays = [np.empty((len(slots), *leaf.shape), leaf.dtype) for leaf in specs]
    for part in pieces(np.arange(len(slots)), pytree.nbytes(saved.spec)):
        for array, leaf in zip(arrays, jax.tree.leaves(items.read(slots[part])), strict=True):
            array[part] = leaf
    about = schema.describe_state(saving.BUFFER, saved) | {"trajectories": []}
    # Write a group for each trajectory.
    if len(slots):
        # Items of a writer without order of time are no rows of environments, but one stream.
        envs = buffer.ring.envs if buffer.writer.is_chronological else 1
        # Items may have no elements, so that the number of rows cannot be found from their size.
        lead = len(slots) // envs, envs
        columns = [array.reshape(*lead, *array.shape[1:]) for array in arrays]
        leaves = dict(zip(_names(saved.spec), columns, strict=True))
        flat, links = to_flat(leaves, buffer.keys, envs, ())
        for number, (environment, length, rows) in enumerate(iter_trajectories(flat, links.ends)):
            group = file.create_group(f"trajectories/{number:06d}")
            group.attrs.update(length=length, environment=environment)
            about["trajectories"].append([environment, length])
            for name, leaf in rows.items():
                _put(group, name, leaf, leaf.dtype, options)
    # Write all other arrays, and the description.
    group = file.create_group("state")
    state = schema.with_tree_leaves(schema.without_items(buffer, saved.state))
    for name, leaf in schema.by_name(state).items():
        _put(group, name, np.asarray(casting.raw(leaf)), leaf.dtype, options)
    text = np.frombuffer(json.dumps(about, separators=(",", ":")).encode(), np.uint8)
    _put(file, "jrb", text, text.dtype, {})
    file.attrs.update(format=FORMAT, version=VERSION)


def _names(spec: Item) -> list[str]:
    """Returns names of datasets: those of the leaves, without slashes and dots in their parts."""

    def name(key: Any) -> str:
        safe = quote(pytree.part_name(key), safe=_SAFE, errors="surrogatepass") or "%"
        return safe.replace(".", "%2E") if safe in (".", "..") else safe

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(spec)]
    return ["/".join(map(name, path)) or "item" for path in paths]


def _put(group: h5py.Group, name: str, leaf: Any, dtype: Any, options: dict[str, Any]) -> None:
    """Writes a dataset, as integers if HDF5 lacks its dtype."""
    array = np.ascontiguousarray(leaf).reshape(leaf.shape)
    # 2: registered by a library, such as bfloat16, which h5py would store as opaque bytes.
    if array.dtype.kind not in "biufc" or array.dtype.isbuiltin == 2:
        array = array.view(f"u{array.itemsize}")
    options = options if array.size and array.shape else {}  # HDF5 refuses filters for others
    dataset = group.create_dataset(name, data=array, **options)
    dataset.attrs["dtype"] = descriptions.dtype_name(dtype)


# Loading.


def load(
    path: str, buffer: Description | None, example: Item, device: Device, cast: bool = False
) -> tuple[Any, Any]:
    """Loads one buffer from a file of HDF5; see `jrb.checkpoint.load`."""
    if buffer is not None:
        descriptions.check_buffers(buffer, "load")
    _check_seal(path)

    def load_to(device: Device) -> tuple[Any, Any]:
        with h5py.File(path, "r", locking=False) as file:
            return _read(file, buffer, example, device)

    try:
        return loading.load_with_cast(load_to, path, buffer is not None, device, cast)
    except (OSError, KeyError, RuntimeError, IndexError) as error:
        raise DamagedError(f"{path}: expected a checkpoint in HDF5, got {error!r}.") from error


def _read(
    file: h5py.File, given: Description | None, example: Item, device: Device
) -> tuple[Any, Any]:
    about = _about(file)
    buffer, spec = schema.match_specs(file.filename, about, given, example)
    buffer = schema.choose_target(buffer, given is not None)
    want = schema.blank(buffer, spec)
    arrays = schema.without_items(buffer, want)
    group, kinds = cast(h5py.Group, file["state"]), {}

    def add(name: str, _: Any) -> None:
        if not isinstance(group[name], h5py.Group):
            dataset = _dataset(group, name)
            dtype, shape = str(dataset.attrs.get("dtype")), list(dataset.shape)
            shape = shape[:-1] if dtype.startswith("key:") else shape  # without the words of a key
            kinds[name] = (dtype, str(shape)), dataset.size * dataset.dtype.itemsize

    def fill(name: str, target: np.ndarray) -> None:
        if target.size:
            memory.view(target)[:] = memory.view(np.asarray(_dataset(group, name)[()]))

    group.visititems(add)
    state = loading.restore_arrays(file.filename, kinds, fill, arrays, device)
    slots = schema.held_slots(buffer, state.writer)
    parts = loading.split_items(slots, _items(file, buffer, spec, about), spec)
    return buffer, loading.restore_items(buffer, want, state, spec, parts, device)


def _not_ours(path: str) -> ValueError:
    return ValueError(
        f"{path}: not a jrb checkpoint: expected a folder or an HDF5 file that jrb.save has made. "
        "jrb.datasets.open reads files of other programs."
    )


def _about(file: h5py.File) -> dict[str, Any]:
    kind, version = file.attrs.get("format"), file.attrs.get("version")
    if not isinstance(kind, str) or kind != FORMAT:
        raise _not_ours(file.filename)
    if not isinstance(version, np.integer) or version < 1:
        raise DamagedError(f"{file.filename}: expected a version from 1, got {version!r}.")
    if version != VERSION:
        cure = "install it" if version > VERSION else "load it with that one, and save it again"
        raise ValueError(
            f"{file.filename}: expected version {VERSION} of the format, got version {version}. "
            f"Another version of jrb wrote this; {cure}."
        )
    text = _dataset(file, "jrb")
    if text.dtype != np.uint8 or text.size > _MOST_JSON:
        raise DamagedError(f"{file.filename}: expected JSON in 'jrb', got {text.shape}.")
    with refuse_damage(file.filename, "JSON in 'jrb'"):
        return json.loads(text[()].tobytes())


def _dataset(group: h5py.Group, name: str) -> Any:
    """Returns a plain dataset of numbers; links to other places are not followed.

    Its shape has to be checked before it is read, as it may declare more than any memory holds.
    """
    inner: Any = group
    for part in name.split("/"):
        # A soft or external link could name any file of the machine.
        is_link = not isinstance(inner.get(part, getlink=True), h5py.HardLink | None)
        inner = None if is_link else inner[part]
        if inner is None:
            break
    if (
        not isinstance(inner, h5py.Dataset)
        or inner.external
        or inner.is_virtual
        or inner.size is None
        or inner.dtype.kind not in "biufc"
    ):
        raise DamagedError(
            f"{group.file.filename}: leaf '{name}': expected a plain dataset of numbers."
        )
    return inner


def _items(
    file: h5py.File, buffer: ReplayBuffer, spec: Item, about: dict[str, Any]
) -> list[np.ndarray]:
    """Returns the items, oldest first, `[K, ...]`, leaf by leaf; keys as their words."""
    lengths = np.asarray(about["trajectories"], np.int64).reshape(-1, 2)[:, 1]
    envs = buffer.ring.envs if buffer.writer.is_chronological else 1
    raws = list(map(casting.raw_spec, jax.tree.leaves(spec)))
    if not len(lengths):
        return [np.zeros((0, *raw.shape), raw.dtype) for raw in raws]
    # Trajectories become the flat layout, in which rows share observations.
    ends = np.zeros(lengths.sum(), bool)
    ends[np.cumsum(lengths) - 1] = True
    raw_specs = dict(zip(_names(spec), raws, strict=True))
    parts: dict[str, list[np.ndarray]] = {}
    for number, length in enumerate(lengths.tolist()):
        group = cast(h5py.Group, file[f"trajectories/{number:06d}"])
        for name in filter(group.__contains__, raw_specs):  # next observations may be shared
            dataset, raw = _dataset(group, name), raw_specs[name]
            shapes = [(count, *raw.shape) for count in (length, length + 1)]
            dtype = descriptions.dtype_name(raw.dtype)
            got = dataset.attrs.get("dtype"), dataset.dtype.itemsize
            if dataset.shape not in shapes or got != (dtype, raw.dtype.itemsize):
                raise DamagedError(
                    f"{file.filename}: leaf '{name}': expected {dtype}{list(shapes[0])}, got "
                    f"{got[0]}{dataset.shape} in {dataset.dtype}."
                )
            parts.setdefault(name, []).append(np.asarray(dataset[()]).view(raw.dtype))
    flat = {name: np.concatenate(rows) for name, rows in parts.items()}
    items = from_flat(flat, ends.reshape(envs, -1), buffer.keys)
    return [items[name].reshape(ends.size, *raw.shape) for name, raw in raw_specs.items()]


def metadata(path: str) -> dict[str, Any]:
    """Returns the metadata of a file; see `jrb.checkpoint.metadata`."""
    os.stat(path)  # raises if there is nothing
    if not is_own(path):
        raise _not_ours(path)
    try:
        with h5py.File(path, "r", locking=False) as file:
            about = _about(file)
    except (OSError, KeyError, RuntimeError, IndexError, TypeError) as error:
        raise DamagedError(f"{path}: expected a checkpoint in HDF5, got {error!r}.") from error
    # The seal is not checked here, as that would read the whole file: the JSON may be damaged.
    with refuse_damage(path, "the metadata of a checkpoint"):
        return manifest.describe(about, 0, {"": os.path.getsize(path)})


def verify(path: str, progress: Progress = no_progress) -> list[str]:
    """Returns a line about each damage of a file; see `jrb.checkpoint.verify`."""
    try:
        _check_seal(path, progress)
        with h5py.File(path, "r", locking=False) as file:
            _about(file)
    except (PermissionError, FileNotFoundError):
        raise
    except _ERRORS as error:
        is_named = isinstance(error, ValueError) and path in str(error)
        return [
            str(error) if is_named else f"{path}: expected a checkpoint in HDF5, got {error!r}."
        ]
    return []


# The seal. HDF5 ignores bytes after the end of its own data, and cuts them off when it writes to
# the file: so a file that another program has changed has no seal.


def _check_seal(path: str, progress: Progress = no_progress) -> None:
    with open(path, "rb") as sealed:
        whole = os.fstat(sealed.fileno()).st_size
        sealed.seek(max(0, whole - _SEAL.size))
        tail = sealed.read(_SEAL.size)
        sealed.seek(0)
        # A file without a seal may be a checkpoint that was cut short, or not be one at all.
        if _MARK not in tail:
            is_hdf5 = _SIGNATURE.startswith(sealed.read(len(_SIGNATURE)))
            try:
                with h5py.File(path if is_hdf5 else os.devnull, "r", locking=False) as file:
                    is_hdf5 = file.attrs.get("format") == FORMAT
            except (OSError, RuntimeError):
                pass  # it was cut short
            if not is_hdf5:
                raise _not_ours(path)
            raise DamagedError(
                f"{path}: expected a checksum behind its last byte, found none: it was cut short, "
                "or another program has changed it."
            )
        # A file shorter than a seal is filled up from the left: its mark is then wrong.
        mark, expected, size = _SEAL.unpack(tail.rjust(_SEAL.size))
        if mark != _MARK or size != whole - _SEAL.size:
            raise DamagedError(f"{path}: found {whole} bytes, of which the last ones are missing.")
        buffer, computed = bytearray(min(_PIECE, size)), 0
        for start in range(0, size, _PIECE):
            piece = memoryview(buffer)[: size - start]
            sealed.readinto(piece)
            computed = zlib.crc32(piece, computed)
            progress(min(start + _PIECE, size) / size)
        if computed != expected:
            raise DamagedError(
                f"{path}: expected the checksum {expected:08x}, found {computed:08x}: its bytes "
                "were damaged."
            )
