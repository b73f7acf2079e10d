"""Checkpoints in one file of HDF5: all functions know such a file by its content or its ending."""

import pytest

import jrb
from jrb.checkpoint import generations, metadata, save_async, verify
from tests.cli.paths import LENGTHS, filled


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
