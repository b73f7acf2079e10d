"""All user paths follow one rule: `~` is the home folder, and relative paths are fixed at once."""

import os
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jrb
import jrb.authoring
from jrb.checkpoint import generations, metadata, save_async, verify, write_torchrl
from jrb.cli.app import app
from jrb.remote import setup


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Sets an empty home folder, which it returns, and another working folder."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def filled(**parts):
    buffer = jrb.ReplayBuffer(8, batch_size=2, **parts)
    item = {"observation": jnp.ones(2), "next": {"reward": jnp.float32(1), "done": False}}
    return buffer, buffer.add(buffer.init(item), item)


def test_tilde_is_the_home_folder_for_checkpoints(home):
    jrb.save("~/a", *filled())
    save_async("~/b", *filled()).wait()
    jrb.save("~/c.h5", *filled(), layout="h5")
    assert sorted(os.listdir(home)) == ["a", "b", "c.h5"]
    for path in ("~/a", "~/b", "~/c.h5"):
        assert int(jrb.load(path)[1].writer.count) == 1
        assert verify(path) == []
    assert generations("~/a") == [1] and metadata("~/a")["generation"] == 1
    assert os.listdir() == []


@pytest.mark.parametrize("make", [jrb.MemmapStorage, lambda path: jrb.SpillStorage(path, 4)])
def test_tilde_is_the_home_folder_for_storages(home, make):
    buffer, state = filled(storage=make("~/store"))
    jrb.save("~/store", buffer, state)
    assert os.listdir(home) == ["store"] and os.listdir() == []
    assert jrb.load("~/store", buffer)[0].storage.path == str(home / "store")
    assert setup.path_of(buffer, "~/store") == str(home / "store")


def test_tilde_is_the_home_folder_for_datasets_and_other_libraries(home):
    buffer, state = filled()
    with jrb.datasets.Recorder("~/r") as recorder:
        recorder.add(
            {"observation": np.ones(2), "action": 0.5, "next": {"reward": 1.0, "done": True}}
        )
    jrb.datasets.write_d4rl("~/d.hdf5", jrb.datasets.open("~/r"))
    write_torchrl("~/t", buffer, state)
    jrb.checkpoint.read_torchrl("~/t")
    assert sorted(os.listdir(home)) == ["d.hdf5", "r", "t"]
    assert [*jrb.datasets.list("~")] == ["d.hdf5", "r", "t"]
    jrb.datasets.delete("r", root="~")
    assert not (home / "r").exists() and os.listdir() == []


def test_tilde_is_the_home_folder_for_commands(home):
    jrb.save("~/a", *filled())
    for call in (
        ["inspect", "~/a"],
        ["verify", "~/a"],
        ["convert", "~/a", "~/b", "--to", "native"],
    ):
        assert CliRunner().invoke(app, call).exit_code == 0, call
    assert sorted(os.listdir(home)) == ["a", "b"] and os.listdir() == []


def test_a_store_stays_where_it_was_made(home, monkeypatch):
    buffer, state = filled(storage=jrb.MemmapStorage("here"))
    monkeypatch.chdir(home)
    inside = {*os.listdir(home.parent / "work")}
    jrb.save(buffer.storage.path, buffer, state)
    assert {*os.listdir(home.parent / "work")} == inside and os.listdir() == []
    assert metadata(home.parent / "work" / "here")["generation"] == 1


def test_a_description_is_of_the_folder_that_its_path_meant(home, monkeypatch):
    one = jrb.MemmapStorage("here")
    assert one == jrb.MemmapStorage(home.parent / "work" / "here")
    monkeypatch.chdir(home)
    other = jrb.MemmapStorage("here")
    assert one != other and hash(one) != hash(other)
    assert pickle.loads(pickle.dumps(one)) == one


def test_what_is_no_path_is_refused():
    with pytest.raises(ValueError, match="expected a path, got ''"):
        jrb.load("")
    with pytest.raises(ValueError, match="MemmapStorage: path: expected a path, got ''"):
        jrb.MemmapStorage("")
    with pytest.raises(TypeError, match="root: expected a path, got 7"):
        jrb.authoring.absolute_path(7, "root")
