import importlib.metadata
import itertools
import os
import shutil
import tracemalloc

import h5py
import numpy as np
import pytest

import jrb
from jrb.datasets import Format, library
from tests.datasets.access import check_access
from tests.datasets.memory import Memory, expected_of, source_of


@pytest.fixture(autouse=True)
def forget_the_kinds_of_others():
    library._installed_formats.cache_clear()
    yield
    library._installed_formats.cache_clear()


def d4rl(path):
    with h5py.File(path, "w") as file:
        for name in ("observations", "actions", "rewards"):
            file[name] = np.zeros((4, 2))
        file["terminals"] = np.array([0, 1, 0, 1], bool)
    return path


def test_what_is_not_recognised_lists_what_was_looked_for(tmp_path):
    path = tmp_path / "text.hdf5"
    path.write_text("no data")
    with pytest.raises(ValueError, match="no format matches") as error:
        jrb.datasets.open(path)
    for name, format in jrb.datasets.formats().items():
        assert f"\n  {name}: {format.looks_for}" in str(error.value)
    assert str(path) in str(error.value)
    assert "format=..." in str(error.value)


def test_nothing_at_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        jrb.datasets.open(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        jrb.datasets.open(tmp_path / "link")


def test_a_minari_set_of_this_machine_by_its_id(tmp_path, monkeypatch):
    sets = tmp_path / "datasets"
    shutil.copytree("tests/data/minari/cartpole-v0", sets / "mine" / "cartpole-v0")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(sets))
    monkeypatch.chdir(tmp_path)
    assert len(jrb.datasets.open("mine/cartpole-v0")) == 20
    with pytest.raises(FileNotFoundError, match="minari download mine/other-v1"):
        jrb.datasets.open("mine/other-v1")
    for name in ("mine/cartpole", "../datasets/mine/cartpole-v0/../cartpole-v0x", "mine//x-v0"):
        with pytest.raises(FileNotFoundError, match=r"no such file or directory\.$"):
            jrb.datasets.open(name)
    (tmp_path / "mine").mkdir()  # a path comes before an id
    shutil.copytree(sets / "mine" / "cartpole-v0", tmp_path / "mine" / "cartpole-v0")
    assert jrb.datasets.open("mine/cartpole-v0").source == str(tmp_path / "mine" / "cartpole-v0")
    monkeypatch.delenv("MINARI_DATASETS_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".minari").mkdir()
    sets.rename(tmp_path / ".minari" / "datasets")
    shutil.rmtree(tmp_path / "mine")
    assert len(jrb.datasets.open("mine/cartpole-v0")) == 20


def test_paths_of_every_form(tmp_path, monkeypatch):
    d4rl(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / "a", str(tmp_path / "a"), "a", "./a", "~/a"):
        dataset = jrb.datasets.open(path)
        assert dataset.source == os.path.join(tmp_path, "a")
        assert dataset.format.name == "d4rl"


def test_a_kind_by_its_name(tmp_path):
    path = d4rl(tmp_path / "a")
    assert jrb.datasets.open(path, format="arrays").format.name == "arrays"
    with pytest.raises(ValueError, match=r"format: expected one of .*'d4rl'.*got 'd5rl'"):
        jrb.datasets.open(path, format="d5rl")


def test_options_that_a_kind_does_not_have(tmp_path):
    path = d4rl(tmp_path / "a")
    with pytest.raises(
        TypeError, match=r"'d4rl' \(max_expansion, horizon, mapping\), got fps, horizont"
    ):
        jrb.datasets.open(path, horizont=3, fps=3)
    with pytest.raises(TypeError, match=r"'rlds' \(max_expansion, last\), got horizon"):
        jrb.datasets.open([{"steps": {}}], horizon=3)
    for wrong, error in ((0, ValueError), ("3", TypeError)):
        with pytest.raises(error, match="horizon"):
            jrb.datasets.open(path, horizon=wrong)
    with pytest.raises(ValueError, match="final: expected one of 'keep', 'drop'"):
        jrb.datasets.open(path, final="cut")


def test_a_kind_without_fields_has_no_options(tmp_path):
    class Plain(Format):
        name, looks_for = "plain", "nothing"

        def matches(self, source):
            return False

        def describe(self, source):
            raise NotImplementedError

        def episodes(self, source):
            raise NotImplementedError

    with pytest.raises(
        TypeError, match=r"options of the format 'plain' \(max_expansion\), got horizon"
    ):
        jrb.datasets.open(tmp_path, format=Plain(), horizon=3)


def test_a_kind_of_ones_own():
    source = source_of(0)
    with pytest.raises(ValueError, match="no format matches"):
        jrb.datasets.open(source)
    check_access(jrb.datasets.open(source, format=Memory()), expected_of(source))
    dataset = jrb.datasets.open(source, format=Memory(), scale=2.0)
    assert dataset.format.scale == 2.0
    np.testing.assert_array_equal(dataset[0]["next"]["reward"], 2 * source[0]["reward"])


class Greedy(Memory):
    """A format of another package, which matches everything."""

    name = "greedy"

    def matches(self, source):
        return True


class Entry:
    def __init__(self, format):
        self.format = format

    def load(self):
        return self.format


def bring(monkeypatch, *found):
    entries = lambda *, group: [Entry(each) for each in found] if group == "jrb.datasets" else []
    monkeypatch.setattr(importlib.metadata, "entry_points", entries)


def test_kinds_of_another_package(monkeypatch):
    bring(monkeypatch, Memory)
    assert next(iter(jrb.datasets.formats())) == "memory"
    assert {
        "d4rl",
        "roboset",
        "robomimic",
        "ogbench",
        "rlds",
        "arrays",
    } <= jrb.datasets.formats().keys()
    source = source_of(0)
    for options in ({}, {"format": "memory"}):
        dataset = jrb.datasets.open(source, **options)
        assert dataset.format == Memory()
        check_access(dataset, expected_of(source))


def test_kinds_of_another_package_are_asked_first(monkeypatch):
    bring(monkeypatch, Greedy)
    source = source_of(0)
    assert jrb.datasets.open(source).format.name == "greedy"


def test_general_kinds_are_asked_last():
    assert list(jrb.datasets.formats())[-1] == "arrays"


@pytest.mark.parametrize("format", [None, *jrb.datasets.formats()])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, format):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", os.devnull):
        with pytest.raises(ValueError, match="expected a file or a folder, got a pipe"):
            jrb.datasets.open(path, format=format)


def test_an_empty_path_is_not_the_folder_one_is_in():
    with pytest.raises(ValueError, match="source: expected a path, got ''"):
        jrb.datasets.open("")


@pytest.mark.parametrize("format", jrb.datasets.formats())
def test_a_kind_that_is_not_there_says_so(tmp_path, format):
    (tmp_path / "text").write_text("no data")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "text", tmp_path / "folder"):
        with pytest.raises((ValueError, OSError), match=r"expected|Is a directory"):
            jrb.datasets.open(path, format=format)


def robomimic(path):
    with h5py.File(path, "w") as file:
        group = file.create_group("data/demo_0")
        for name, dtype in {
            "actions": "f4",
            "dones": "i1",
            "obs/x": "f4",
            "next_obs/x": "f4",
        }.items():
            group.create_dataset(name, (9_000_000,), dtype, chunks=(1 << 16,))
    return path


def roboset(path):
    with h5py.File(path, "w") as file:
        arrays = {"actions": "f4", "rewards": "f4", "done": "?", "observations/x": "f4"}
        for trial, name in itertools.product(range(3), arrays):
            shape = {"shape": (3_000_000,), "dtype": arrays[name], "chunks": (1 << 16,)}
            file.create_dataset(f"Trial{trial}/{name}", **shape)
    return path


def ogbench(path):
    steps = 4 << 20
    ends = np.arange(steps) % 1000 == 999
    arrays = {"observations": np.zeros((steps, 2)), "actions": np.zeros(steps, np.int8)}
    np.savez_compressed(path.with_suffix(".npz"), **arrays, terminals=ends)
    return path.with_suffix(".npz")


def minari(path):
    folder = shutil.copytree("tests/data/minari/cartpole-v0", path)
    with h5py.File(next(folder.rglob("main_data.hdf5")), "r+") as file:
        group = file["episode_3"]
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            dtype, shape = group[name].dtype, group[name].shape[1:]
            del group[name]
            rows = 6_000_000 + (name == "observations")
            group.create_dataset(name, (rows, *shape), dtype, chunks=(1 << 16, *shape))
    return folder


@pytest.mark.parametrize("make", [robomimic, roboset, ogbench, minari])
def test_no_kind_takes_much_more_than_its_files_hold(tmp_path, make):
    path = make(tmp_path / "a")
    tracemalloc.start()
    told = r"at most 100 times the \d+ bytes of the files, got \d+ declared bytes.*max_expansion=\d"
    with pytest.raises(ValueError, match=told):
        jrb.datasets.open(path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
