"""Checkpoints in one file of HDF5: all functions know such a file by its content or its ending."""

import contextlib
import random
import struct
import zlib

import h5py
import numpy as np
import pytest

import jrb
from jrb.checkpoint import DamagedError, generations, metadata, save_async, verify
from tests.cli.paths import LENGTHS, filled


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.h5", "a.HDF5", "a.dat"])
def test_a_file_of_hdf5_is_known_by_its_content_or_its_ending(tmp_path, name):
    path, (buffer, state) = tmp_path / name, filled()
    if name == "a.dat":
        jrb.save(path, buffer, state, layout="h5")
    assert jrb.save(path, buffer, state) == jrb.save(path, buffer, state) == 0
    assert path.is_file() and verify(path) == [] and generations(path) == [0]
    assert jrb.datasets.open(path).lengths.tolist() == [*LENGTHS, 1]
    about, as_folder = metadata(path), tmp_path / "folder"
    jrb.save(as_folder, buffer, state)
    expected = metadata(as_folder)
    assert about == metadata(path, 0) and about.keys() == expected.keys()
    for key in about.keys() - {"generation", "nbytes", "time"}:
        assert about[key] == expected[key], key
    with pytest.raises(ValueError, match="expected a folder, got a file of HDF5"):
        save_async(path, buffer, state)
    with pytest.raises(ValueError, match="generation: expected None for a file of HDF5, got 3"):
        metadata(path, 3)
    jrb.datasets.delete(name, root=tmp_path) if name != "a.dat" else path.unlink()
    for missing in (generations, metadata, verify, jrb.load):
        with pytest.raises(FileNotFoundError):
            missing(path)


def test_what_is_there_decides_before_the_ending(tmp_path):
    path, (buffer, state) = tmp_path / "a.h5", filled()
    for _ in range(2):
        jrb.save(path, buffer, state, layout="native")
    assert jrb.save(path, buffer, state, keep=1) == 3 and generations(path) == [2, 3]
    save_async(path, buffer, state).wait()
    assert path.is_dir() and generations(path) == [4]
    with pytest.raises(ValueError, match="expected a file with layout='h5', found a folder"):
        jrb.save(path, buffer, state, layout="h5")


def change_file(path, change):
    """Changes the data of a checkpoint, and seals it again."""
    with h5py.File(path, "r+", locking=False) as file:  # it cuts the seal off
        change(file)
    data = path.read_bytes()
    path.write_bytes(data + struct.pack("<8sIQ", b"jrb-crc1", zlib.crc32(data), len(data)))


@pytest.fixture
def path(tmp_path):
    jrb.save(tmp_path / "a.h5", *filled())
    return tmp_path / "a.h5"


@pytest.mark.parametrize("version", [0, -1, "3", True, 2.0, [3]])
def test_a_version_that_never_was_is_refused(version, path):
    change_file(path, lambda file: file.attrs.update(version=version))
    for read in (jrb.load, metadata):
        with pytest.raises(DamagedError, match="version"):
            read(path)
    assert "version" in verify(path)[0]


@pytest.mark.parametrize(("version", "cure"), [(2, "load it with that one"), (4, "install it")])
def test_another_version_is_refused_by_name(version, cure, path):
    change_file(path, lambda file: file.attrs.update(version=version))
    message = f"got version {version}. Another version of jrb wrote this; {cure}"
    for read in (jrb.load, metadata):
        with pytest.raises(ValueError, match=message):
            read(path)
    assert message in verify(path)[0]


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (1 << 40,), "chunks": (64,)},  # none of its bytes are in the file
        {"shape": (1 << 40,), "chunks": (64,), "compression": "gzip"},
        {"dtype": "f8"},
        {"dtype": h5py.string_dtype()},
        h5py.SoftLink("/elsewhere"),
        h5py.ExternalLink("b.h5", "x"),
    ],
)
@pytest.mark.parametrize("name", ["jrb", "state/writer/cursor", "trajectories/000000/action"])
def test_a_dataset_is_checked_before_it_is_read_and_no_link_is_followed(name, other, path):
    def change(file):
        old, dtype = file[name], file[name].attrs["dtype"]
        shape_and_dtype = {"shape": old.shape, "dtype": old.dtype}
        del file[name]
        if isinstance(other, dict):
            file.create_dataset(name, **shape_and_dtype | other).attrs["dtype"] = dtype
        else:
            file[name] = other

    change_file(path, change)
    with pytest.raises(DamagedError, match=str(path)):
        jrb.load(path)


def test_metadata_of_damaged_json_name_the_file(path):
    whole, rng = path.read_bytes(), random.Random(0)
    start = whole.index(b'{"kind":')
    for _ in range(300):
        data = bytearray(whole)
        data[start + rng.randrange(500)] = rng.choice(b'x"{}[]:,0-\0\xff')
        path.write_bytes(data)
        with contextlib.suppress(
            DamagedError
        ):  # or it is still JSON that metadata can be read from
            metadata(path)
        assert data == whole or "its bytes were damaged" in verify(path)[0]


def test_what_is_no_checkpoint_of_ours_is_not_called_damaged(tmp_path):
    (tmp_path / "text").write_text("hello")
    np.savez(tmp_path / "arrays.npz", a=1)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 3
    for name in ("text", "arrays.npz", "other.h5"):
        with pytest.raises(ValueError, match=f"{name}: not a jrb checkpoint") as caught:
            jrb.load(tmp_path / name)
        assert not isinstance(caught.value, DamagedError)
        assert "not a jrb checkpoint" in verify(tmp_path / name)[0]
