"""Checkpoints as one HDF5 file: a group for each trajectory, and the rest of the state.

```
trajectories/000000/observation     [L + 1, ...]; a leaf that is no shared observation: [L, ...]
                   /next/reward     attributes: length L, environment, first_slot
state/writer/cursor ...             all arrays of the state but the items
jrb                                 the description in JSON; attributes: format, version
```

Items are in order of time, those of each environment apart. A dtype that HDF5 lacks (bfloat16,
float8, int4) is stored as unsigned integers of its size, keys as their words; the attribute `dtype`
tells which. The file is written beside the old one, synced, and renamed.
"""

import contextlib
import errno
import io
import json
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import quote

import h5py
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jrb._core import eager, memory
from jrb._store import files, opening
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.lock import Lock
from jrb._store.opening import Progress, nobody
from jrb._util import prng_keys, pytree
from jrb._util.pytree import Leaf
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import composite, descriptions, loading, manifest, saving, schema
from jrb.checkpoint.composite import AnySnapshot
from jrb.checkpoint.schema import Snapshot
from jrb.layouts.flat import from_flat, to_flat
from jrb.layouts.names import Leaves
from jrb.layouts.nested import pieces as trajectories
from jrb.migrate import pieces, replay_target
from jrb.mix import Description
from jrb.state import BufferState, Device
from jrb.types import Item
from jrb.types.messages import PartState

FORMAT, VERSION = manifest.HDF5, 1
_SAFE = " !#$&'()*+,:;=?@[]~<>|^`{}"
_PIECE = 4 << 20  # bytes that are looked at a time
_SMALLEST = 2000  # times smaller than the data is no compressed data
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_TRAJECTORIES, _STATE, _ABOUT = "trajectories", "state", "jrb"
_SEAL = struct.Struct("<8sIQ")  # a mark, the CRC-32 of all before it, and how many bytes that is
_MARK = b"jrb-crc1"


def save(path: str, saved: AnySnapshot, options: dict[str, Any]) -> None:
    """Saves; see `jrb.checkpoint.save`."""
    refusal = ValueError(
        "layout: expected a single buffer of arrays with layout='h5', got several, objects, or "
        "states under vmap. Use layout='native'."
    )
    if not isinstance(saved, Snapshot) or saved.buffer.storage.of_objects or saved.batch:
        raise refusal
    if saved.buffer.writer.per_env:
        raise ValueError(
            "layout: expected a writer of all environments together with layout='h5', got "
            f"{type(saved.buffer.writer).__name__}. Use layout='native'."
        )
    if os.path.isdir(path):
        raise ValueError(f"{path}: expected a file with layout='h5', found a folder.")
    if os.path.lexists(path) and not is_own(path):
        raise ValueError(
            f"{path}: expected nothing, or a checkpoint with layout='h5', found another file, "
            "which would be lost. Move it away, or choose another path."
        )
    files.make_folder(os.path.dirname(path))
    with locked(path) as (folder, temporary):
        _write_safely(folder, temporary, saved, options)
        for damage in verify(folder.path_of(temporary)):
            raise OSError(errno.EIO, f"what was written is not what is there: {damage}", path)
        folder.replace(temporary, os.path.basename(path))
        folder.sync()


@contextlib.contextmanager
def locked(path: str) -> Iterator[tuple[Folder, str]]:
    """Holds the right to write or remove a file; yields its folder, and a file beside it to write.

    The name of that is one which no file of a user has. Unless it is renamed, it goes in the end.
    """
    folder, temporary = Folder(os.path.dirname(path)), f".{os.path.basename(path)}.jrb-new"
    lock = Lock(folder, temporary)
    try:
        yield folder, temporary
    finally:
        folder.remove(temporary)
        lock.release()


def is_own(path: str) -> bool:
    """Returns whether a file is a checkpoint in HDF5, even a damaged one."""
    if not os.path.isfile(path):
        return False
    if _has_seal(path):
        return True
    with contextlib.suppress(OSError, RuntimeError, ValueError), h5py.File(path, "r") as file:
        return file.attrs.get("format") == manifest.HDF5
    return False


def _write_safely(folder: Folder, name: str, saved: Snapshot, options: dict[str, Any]) -> None:
    """Writes the file; HDF5 itself never sees what goes wrong on the disk."""
    opened = folder.open(name, os.O_RDWR)
    try:
        files.resize(opened, folder.path_of(name), 0, reserve=False)
        safe_file = _SafeFile(opened, folder.path_of(name))
        with h5py.File(safe_file, "w") as file:
            _write(file, saved, options)
        safe_file.check()
        put_seal(opened, folder.path_of(name))
        files.sync(opened, folder.path_of(name))
    finally:
        os.close(opened)


def _write(file: h5py.File, saved: Snapshot, options: dict[str, Any]) -> None:
    slots = _slots(saved)
    leaves = _items(saved, slots)
    about = schema.about(saving.BUFFER, saved) | {"rows": len(slots), "trajectories": []}
    if len(slots):
        flat, links = to_flat(leaves, saved.buffer.keys, slots.shape[1], ())
        for number, (environment, length, rows) in enumerate(trajectories(flat, links.ends)):
            group = file.create_group(f"{_TRAJECTORIES}/{number:06d}")
            group.attrs.update(length=length, environment=environment)
            about["trajectories"].append([environment, length])
            for name, leaf in rows.items():
                _put(group, name, leaf, options)
    rest = schema.with_tree_leaves(_parts(saved.state))
    group = file.create_group(_STATE)
    for name, leaf in schema.by_name(rest).items():
        _put(
            group,
            name,
            np.asarray(prng_keys.raw(leaf)),
            options,
            descriptions.dtype_name(leaf.dtype),
        )
    text = np.frombuffer(json.dumps(about, separators=(",", ":")).encode(), np.uint8)
    _put(file, _ABOUT, text, {})
    file.attrs.update(format=FORMAT, version=VERSION)


def _parts(state: BufferState) -> dict[str, PartState]:
    """What is written as it is."""
    parts = {"writer": state.writer, "sampler": state.sampler, "unit": state.unit}
    return parts | {"transforms": state.transforms}


def _slots(saved: Snapshot) -> np.ndarray:
    """The slots that are held, int `[T, E]`; those of items without an order of time `[T, 1]`."""
    buffer = saved.buffer
    held = buffer.writer.held(buffer.ring, saved.state.writer)
    slots = np.asarray(held.nth(buffer.ring, jnp.arange(int(held.size), dtype=jnp.int32)))
    return slots.reshape(-1, buffer.ring.envs if buffer.writer.is_chronological else 1)


def _items(saved: Snapshot, slots: np.ndarray) -> Leaves:
    """The items there, on the host, leaves `[T, E, ...]` by name; keys as their words."""
    spec, state = saved.spec, saved.state.replace(storage=saved.stored)
    specs = [prng_keys.raw_spec(leaf) for leaf in jax.tree.leaves(spec)]
    found = [np.empty((*slots.shape, *leaf.shape), leaf.dtype) for leaf in specs]
    for piece in pieces(np.arange(len(slots)), pytree.nbytes(spec) * slots.shape[1]):
        items = eager.take(saved.buffer, state, jnp.asarray(slots[piece], jnp.int32))
        for array, leaf in zip(found, jax.tree.leaves(items), strict=True):
            array[piece] = np.asarray(prng_keys.raw(leaf))
    return dict(zip(_names(spec), found, strict=True))


def _names(spec: Item) -> list[str]:
    """Names of datasets: those of the leaves, but that no name has a path or a dot in it."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(spec)]
    return ["/".join(map(_name, path)) or "item" for path in paths]


def _name(key: Any) -> str:
    name = quote(pytree.part_name(key), safe=_SAFE, errors="surrogatepass") or "%"
    return name.replace(".", "%2E") if name in (".", "..") else name


def _put(
    group: h5py.Group, name: str, leaf: Leaf, options: dict[str, Any], dtype: str | None = None
) -> None:
    """A dataset, with a checksum, and with its dtype where HDF5 has none like it."""
    array = np.ascontiguousarray(leaf).reshape(leaf.shape)
    plain = array.dtype.kind in "biufc" and array.dtype.isbuiltin != 2
    stored = array if plain else array.view(f"u{array.itemsize}")
    dataset = group.create_dataset(
        name, data=stored, **(options if stored.size and stored.shape else {})
    )
    dataset.attrs["dtype"] = dtype or descriptions.dtype_name(array.dtype)
    dataset.attrs["crc32"] = zlib.crc32(memory.view(stored))


def load(
    path: str, buffer: Description | None, example: Item, device: Device, cast: bool = False
) -> tuple[Any, Any]:
    """Loads; see `jrb.checkpoint.load`."""
    if buffer is not None:
        composite.check(buffer, "load")
    _check_seal(path)
    read = lambda device: _load(path, buffer, example, device)
    return loading.narrowed(read, path, buffer is not None, device, cast)


def _load(path: str, buffer: Description | None, example: Item, device: Device) -> tuple[Any, Any]:
    try:
        _check_signature(path)
        with h5py.File(path, "r", locking=False) as file:
            return _read(file, buffer, example, device)
    except (OSError, KeyError, RuntimeError, IndexError) as error:
        if isinstance(error, PermissionError | FileNotFoundError):
            raise
        raise DamagedError(f"{path}: expected a checkpoint in HDF5, got {error!r}.") from error


def _read(
    file: h5py.File, given: Description | None, example: Item, device: Device
) -> tuple[Any, Any]:
    about = _about(file)
    saved, spec = schema.fitting(file.filename, about, given, example)
    buffer = schema.loadable(saved, given is not None)
    want = schema.blank(buffer, spec)
    state = _replayed(file, buffer, spec, about)
    rest = _parts(want)
    packed = schema.with_tree_leaves(rest)
    arrays = [
        _restored(file, f"{_STATE}/{name}", leaf) for name, leaf in schema.by_name(packed).items()
    ]
    parts = schema.with_trees(rest, jax.tree.unflatten(jax.tree.structure(packed), arrays))
    state = state.replace(**parts, ring=buffer.ring)
    return buffer, state if device is None else jax.device_put(state, device)


def _check_signature(path: str) -> None:
    """Raises unless a file is one of HDF5, perhaps cut short; the seal was looked at before."""
    with open(path, "rb") as file:
        if not _SIGNATURE.startswith(file.read(len(_SIGNATURE))):
            raise _not_ours(path)


def _not_ours(path: str) -> ValueError:
    return ValueError(
        f"{path}: not a jrb checkpoint: expected a folder or an HDF5 file that jrb.save has made. "
        "jrb.datasets.open reads files of other programs."
    )


def _check_format(file: h5py.File) -> None:
    """Raises unless a file is a checkpoint of a version that this program reads."""
    kind, version = file.attrs.get("format"), file.attrs.get("version")
    if not isinstance(kind, str) or kind != FORMAT:
        raise _not_ours(file.filename)
    if not isinstance(version, np.integer) or version < 1:
        raise DamagedError(f"{file.filename}: expected a version from 1, got {version!r}.")
    if version > VERSION:
        raise ValueError(
            f"{file.filename}: expected version {VERSION} or older, got version {version}. A newer "
            "jrb wrote this; install that one."
        )


def _about(file: h5py.File) -> dict[str, Any]:
    _check_format(file)
    about = json.loads(_get(file, _ABOUT).tobytes())
    manifest.check(file.filename, about, manifest.ABOUT_HDF5)
    return about


def _get(group: h5py.Group, name: str, dtype: DTypeLike = np.uint8) -> np.ndarray:
    """A dataset as it was stored, checked; `dtype` is that of what is stored in it."""
    dataset = _dataset(group, name)
    told, wanted = str(dataset.attrs.get("dtype")), descriptions.dtype_name(dtype)
    if told != wanted:
        raise DamagedError(
            f"{group.file.filename}: leaf '{name}': expected dtype {wanted}, got {told}."
        )
    array = np.asarray(dataset[()])
    _check_sum(f"{group.name}/{name}", dataset, zlib.crc32(memory.view(array)))
    return array


def _dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """A dataset that holds what it says."""
    dataset = _plain(group, name)
    if not isinstance(dataset, h5py.Dataset) or dataset.external or dataset.is_virtual:
        raise DamagedError(f"{group.file.filename}: leaf '{name}': expected a plain dataset.")
    if dataset.nbytes > _SMALLEST * dataset.id.get_storage_size():
        raise DamagedError(
            f"{group.file.filename}: leaf '{name}': expected data for {dataset.nbytes} bytes, "
            f"found {dataset.id.get_storage_size()}."
        )
    return dataset


def _check_sum(name: str, dataset: h5py.Dataset, found: int) -> None:
    expected = dataset.attrs.get("crc32")
    if not isinstance(expected, np.integer) or found != expected:
        raise DamagedError(
            f"{dataset.file.filename}: leaf '{name}': expected the checksum {expected!r}, found "
            f"{found}: its bytes were damaged."
        )


def _plain(group: h5py.Group, name: str) -> Any:
    """What is in a group; links to other places are not followed."""
    for part in name.split("/"):
        if not isinstance(group.get(part, getlink=True), h5py.HardLink | None):
            raise DamagedError(f"{group.file.filename}: leaf '{name}': expected no link.")
        group = cast(h5py.Group, group[part])
    return group


def _restored(file: h5py.File, name: str, spec: jax.ShapeDtypeStruct) -> jax.Array:
    array = _get(file, name, spec.dtype)
    inner = prng_keys.raw_spec(spec)
    if array.shape != inner.shape or array.dtype.itemsize != inner.dtype.itemsize:
        raise DamagedError(
            f"{file.filename}: leaf '{name}': expected {inner.dtype}{list(inner.shape)}, got "
            f"{array.dtype}{list(array.shape)}."
        )
    return prng_keys.wrapped(jnp.array(array.view(inner.dtype), copy=True), spec.dtype)


def _replayed(file: h5py.File, buffer: ReplayBuffer, spec: Item, about: dict[str, Any]) -> Any:
    """A state into whose storage all items were written, at their slots."""
    into = replay_target(buffer)
    state = eager.init(into, spec, None)
    if not about["rows"]:
        return state
    cursor = f"{_STATE}/writer/cursor"
    first = int(_get(file, cursor, np.int32)) if buffer.writer.is_chronological else 0
    if buffer.writer.is_chronological:
        first = (first - about["rows"]) % buffer.ring.rows
        state = state.replace(writer=state.writer.replace(cursor=jnp.int32(first)))
    leaves = _leaves(file, buffer, spec, about)
    row_bytes = pytree.nbytes(spec) * into.ring.envs
    for piece in pieces(np.arange(about["rows"]), row_bytes):
        rows = [
            _unraw(leaf[piece], s) for leaf, s in zip(leaves, jax.tree.leaves(spec), strict=True)
        ]
        items = jax.tree.unflatten(jax.tree.structure(spec), rows)
        if into.num_envs is None:
            items = jax.tree.map(lambda leaf: leaf[:, 0], items)
        state = eager.fill(into, state, items)
    return state


def _leaves(
    file: h5py.File, buffer: ReplayBuffer, spec: Item, about: dict[str, Any]
) -> list[np.ndarray]:
    """The items in order of time, `[T, E, ...]`, leaf by leaf; keys as their words."""
    environments, lengths = np.asarray(about["trajectories"], np.int64).reshape(-1, 2).T
    envs = buffer.ring.envs if buffer.writer.is_chronological else 1
    each = np.bincount(environments, lengths, envs)
    if len(each) != envs or (each != about["rows"]).any() or each.sum() > buffer.capacity:
        raise DamagedError(
            f"{file.filename}: expected trajectories of {about['rows']} rows in each of {envs} "
            f"environments, found {each.tolist()}."
        )
    ends = np.zeros(lengths.sum(), bool)
    ends[np.cumsum(lengths) - 1] = True
    ends = ends.reshape(envs, -1)
    names, raws = _names(spec), [prng_keys.raw_spec(leaf) for leaf in jax.tree.leaves(spec)]
    kinds = dict(zip(names, raws, strict=True))
    parts: dict[str, list[np.ndarray]] = {}
    for number, length in enumerate(lengths):
        group = cast(h5py.Group, _plain(file, f"{_TRAJECTORIES}/{number:06d}"))
        for name in dict.fromkeys([*filter(group.__contains__, names), *_datasets(group)]):
            rows = _get(group, name, kinds[name].dtype)  # KeyError: `load` says so
            if not rows.ndim or len(rows) - length not in (0, 1):
                raise DamagedError(f"{file.filename}: leaf '{name}': expected {length} rows.")
            parts.setdefault(name, []).append(rows)
    flat = {name: np.concatenate(rows).view(kinds[name].dtype) for name, rows in parts.items()}
    found = from_flat(flat, ends, buffer.keys)
    for name, want in kinds.items():
        if name not in found or found[name].shape[2:] != want.shape:
            raise DamagedError(
                f"{file.filename}: leaf '{name}': expected items of shape {want.shape}."
            )
    return [found[name] for name in names]


def _unraw(words: np.ndarray, spec: jax.ShapeDtypeStruct) -> jax.Array:
    return prng_keys.wrapped(jnp.asarray(words), spec.dtype)


def verify(path: str, progress: Progress = nobody) -> list[str]:
    """All that is wrong with a file, a line each; see `jrb.checkpoint.verify`."""
    try:
        _check_seal(path)
        _check_signature(path)
        with h5py.File(path, "r", locking=False) as file:
            _check_format(file)
            return list(_damages(file, progress))
    except DamagedError as error:
        return [str(error)]
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        if isinstance(error, PermissionError | FileNotFoundError):
            raise
        known = isinstance(error, ValueError) and path in str(error)
        return [str(error) if known else f"{path}: expected a checkpoint in HDF5, got {error!r}."]


def _datasets(group: h5py.Group) -> list[str]:
    """The names of all datasets below a group, links to other places left out."""
    names: list[str] = []
    group.visititems(
        lambda name, thing: names.append(name) if isinstance(thing, h5py.Dataset) else None
    )
    return names


def _damages(file: h5py.File, progress: Progress) -> Iterator[str]:
    names = _datasets(file)
    for name, step in zip(names, opening.steps(progress, len(names)), strict=True):
        try:
            dataset = _dataset(file, name)
            _check_sum(f"{file.name}/{name}", dataset, _sum_of(dataset, step))
        except (DamagedError, OSError, KeyError, RuntimeError) as error:
            yield str(error)
    progress(1.0)


def _sum_of(dataset: h5py.Dataset, progress: Progress) -> int:
    """The checksum of what a dataset holds, some megabytes at a time."""
    if not dataset.shape:
        return zlib.crc32(memory.view(np.asarray(dataset[()])))
    rows, found = dataset.shape[0], 0
    step = max(1, _PIECE * rows // max(dataset.nbytes, 1))
    if dataset.chunks:  # each is unpacked whole
        step = -(-step // dataset.chunks[0]) * dataset.chunks[0]
    for start in range(0, rows, step):
        found = zlib.crc32(memory.view(np.asarray(dataset[start : start + step])), found)
        progress(min(start + step, rows) / rows)
    return found


# The seal, a checksum behind the last byte. HDF5 may read a damaged file forever, so that this is
# looked at first. HDF5 ignores what is behind the end of a file, and cuts it off when it writes to
# the file: one that something else has changed has no seal.


def put_seal(file: int, path: str) -> None:
    """Puts a seal behind a file that is open to be read and written."""
    size = os.fstat(file).st_size
    files.write_at(file, path, size, _SEAL.pack(_MARK, _sum_of_file(file, path, size), size))


def _has_seal(path: str) -> bool:
    """Returns whether a file ends with a seal."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _SEAL.size))
        return file.read().startswith(_MARK)


def _check_seal(path: str) -> None:
    """Raises `DamagedError` if a file with a seal is not what was sealed."""
    file = os.open(path, os.O_RDONLY)
    try:
        whole = os.fstat(file).st_size
        tail = os.pread(file, _SEAL.size, max(0, whole - _SEAL.size))
        if _MARK not in tail:
            return
        mark, expected, size = _SEAL.unpack(tail.rjust(_SEAL.size))
        if mark != _MARK or size != whole - _SEAL.size:
            raise DamagedError(f"{path}: found {whole} bytes, of which the last ones are missing.")
        found = _sum_of_file(file, path, size)
        if found != expected:
            raise DamagedError(
                f"{path}: expected the checksum {expected:08x}, found {found:08x}: its bytes were "
                "damaged."
            )
    finally:
        os.close(file)


def _sum_of_file(file: int, path: str, size: int) -> int:
    """The CRC-32 of so many bytes."""
    buffer, found = np.empty(min(_PIECE, size), np.uint8), 0
    for start in range(0, size, _PIECE):
        piece = buffer[: size - start].data
        files.read_at(file, path, start, piece)
        found = zlib.crc32(piece, found)
    return found


class _SafeFile(io.RawIOBase):
    """An open file whose writes never fail; `check` raises what went wrong.

    Args:
        file: opened to be read and written.
        path: of it.
    """

    def __init__(self, file: int, path: str) -> None:
        self._file, self._path, self._at = file, path, 0
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises what went wrong first."""
        if self._error is not None:
            raise self._error

    def write(self, data: Item) -> int:
        """Writes all, where nothing has gone wrong yet."""
        size = memoryview(data).nbytes
        try:
            if self._error is None:
                files.write_at(self._file, self._path, self._at, memoryview(data))
        except OSError as error:
            self._error = error
        self._at += size
        return size

    def readinto(self, target: Any) -> int:
        """Reads; zeros where nothing is, as after a write that failed."""
        view = memoryview(target).cast("B")
        view[:] = bytes(len(view))
        os.preadv(self._file, [view], self._at)
        self._at += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Goes to a place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._file).st_size}
        self._at = start[whence] + offset
        return self._at

    def tell(self) -> int:
        """The place."""
        return self._at

    def truncate(self, size: int | None = None) -> int:
        """Gives the file a size."""
        size = self._at if size is None else size
        try:
            files.resize(self._file, self._path, size, reserve=False)
        except OSError as error:
            self._error = self._error or error
        return size

    def readable(self) -> bool:
        """Yes."""
        return True

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True
