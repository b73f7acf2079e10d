import os

import h5py
import numpy as np
import pytest

import jrb
from jrb import datasets
from jrb.datasets import copies


def write(path, steps=6, seed=0):
    """A set of D4RL, two episodes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for name in ("observations", "actions", "rewards"):
            file[name] = rng.normal(size=steps).astype(np.float32)
        file["terminals"] = np.arange(steps) % 3 == 2
    return path


@pytest.fixture
def root(tmp_path):
    """Sets in a folder and in a namespace, and what is none."""
    root = tmp_path / "root"
    write(root / "b.hdf5", 6)
    write(root / "a.hdf5", 3)
    dataset = datasets.open(root / "a.hdf5")
    for name in ("x-v0", "x-v1"):
        datasets.write_minari(root / "space" / name, dataset)
    (root / "notes.txt").write_text("mine")
    (root / "empty").mkdir()
    write(root / ".hidden" / "c.hdf5")
    write(root / "one" / "two" / "three" / "deep.hdf5")
    (root / "link.hdf5").symlink_to(write(tmp_path / "outside.hdf5"))
    (root / "way").symlink_to(tmp_path)
    return root


NAMES = ["a.hdf5", "b.hdf5", "space/x-v0", "space/x-v1"]


def below(folder):
    """All files and folders, but for locks."""
    return sorted(str(path) for path in folder.rglob("*") if ".locks" not in path.parts)


def test_the_sets_of_a_folder_by_name(root):
    found = datasets.list(root)
    assert list(found) == NAMES
    assert [each.transitions for each in found.values()] == [3, 6, 3, 3]
    assert [each.format.name for each in found.values()] == ["d4rl", "d4rl", "minari", "minari"]


def test_no_folder_has_no_sets(tmp_path):
    assert datasets.list(tmp_path / "nowhere") == {}
    (tmp_path / "file").write_text("x")
    assert datasets.list(tmp_path / "file") == {}


def test_a_folder_by_its_relative_path(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("HOME", str(root.parent))
    assert list(datasets.list("root")) == list(datasets.list("~/root")) == NAMES
    datasets.delete("a.hdf5", "~/root")
    assert list(datasets.list("root")) == NAMES[1:]


@pytest.mark.parametrize("name", NAMES)
def test_one_goes_and_the_others_stay(root, name):
    before = [path for path in below(root) if not path.startswith(str(root / name))]
    datasets.delete(name, root)
    assert list(datasets.list(root)) == [other for other in NAMES if other != name]
    assert below(root) == before
    with pytest.raises(FileNotFoundError):
        datasets.delete(name, root)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.hdf5",
        "space/../../outside.hdf5",
        "/",
        "",
        ".",
        "..",
        "link.hdf5",
        "way/outside.hdf5",
        "way/root",
    ],
)
def test_names_that_lead_elsewhere_are_refused(root, name):
    before = below(root.parent)
    with pytest.raises(ValueError, match="expected the name of a dataset in"):
        datasets.delete(name, root)
    with pytest.raises(ValueError, match="expected the name of a dataset in"):
        datasets.delete(str(root.parent / "outside.hdf5"), root)
    assert below(root.parent) == before


@pytest.mark.parametrize("name", ["notes.txt", "empty", "space", "one", ".hidden"])
def test_what_is_no_dataset_stays(root, name):
    before = below(root)
    with pytest.raises(ValueError, match="no format matches"):
        datasets.delete(name, root)
    assert below(root) == before


def test_copies_are_listed_and_removed(root, tmp_path):
    copied = tmp_path / "cache"
    dataset = datasets.open(root / "b.hdf5")
    dataset.buffer(cache=True, root=copied)
    ((name, found),) = datasets.list(copied).items()
    assert name.startswith("b-")
    assert found.transitions == 6
    datasets.delete(name, copied)
    assert datasets.list(copied) == {}
    buffer, state = dataset.buffer(cache=True, root=copied)
    assert int(buffer.size(state)) == 6
    assert list(datasets.list(copied)) == [name]


def test_a_partial_copy_is_removed(root, tmp_path, monkeypatch):
    """It was cut off after some of its rows were committed."""
    copied = tmp_path / "cache"
    dataset = datasets.open(root / "b.hdf5")
    save = jrb.checkpoint.save

    def stop(*rest, **more):
        save(*rest, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "_BETWEEN", 1)
    monkeypatch.setattr(jrb.checkpoint, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        dataset.buffer(cache=True, root=copied)
    monkeypatch.undo()
    path, _ = copies.copy_of(dataset, None, str(copied))
    assert os.path.isdir(path)
    datasets.delete(os.path.basename(path), copied)
    assert not os.path.exists(path)


def test_what_is_being_made_is_left_alone(root, tmp_path):
    copied = tmp_path / "cache"
    dataset = datasets.open(root / "b.hdf5")
    dataset.buffer(cache=True, root=copied)
    path, _ = copies.copy_of(dataset, None, str(copied))
    with copies.lock_copy(path, wait=False), pytest.raises(jrb.checkpoint.LockedError):
        datasets.delete(os.path.basename(path), copied)
    assert list(datasets.list(copied)) == [os.path.basename(path)]
    datasets.delete(os.path.basename(path), copied)
    assert datasets.list(copied) == {}


def test_what_has_begun_to_be_made_is_left_alone(root, tmp_path):
    """There is a folder, in which nothing was committed yet."""
    path = tmp_path / "cache" / "b-0"
    path.mkdir(parents=True)
    with copies.lock_copy(str(path), wait=False), pytest.raises(jrb.checkpoint.LockedError):
        datasets.delete("b-0", tmp_path / "cache")
    assert path.is_dir()
