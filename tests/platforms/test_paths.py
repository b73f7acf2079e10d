"""All user paths follow one rule: `~` is the home folder, and relative paths are fixed at once.

Paths are local: URLs of other machines are refused, and nothing is made for them.
"""

import os
import pathlib
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jrb
import jrb.authoring
from jrb.checkpoint import (
    generations,
    is_checkpoint,
    metadata,
    read_torchrl,
    read_vault,
    save_async,
    verify,
    write_torchrl,
)
from jrb.checkpoint.orbax import BufferHandler, BufferRestore, BufferSave
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
    with pytest.raises(ValueError, match="source: expected a path, got ''"):
        jrb.datasets.open("")
    with pytest.raises(TypeError, match="root: expected a path, got 7"):
        jrb.authoring.absolute_path(7, "root")
    with pytest.raises(TypeError, match="expected a path, got b'a'"):
        jrb.authoring.absolute_path(b"a")
    with pytest.raises(ValueError, match=r"expected a path, got 'a\\x00b'"):
        jrb.authoring.absolute_path("a\0b")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A small dataset."""
    path = tmp_path_factory.mktemp("recorded") / "r"
    record(path)
    return jrb.datasets.open(path)


def record(path):
    with jrb.datasets.Recorder(path) as recorder:
        reward = {"reward": 1.0, "terminated": False, "truncated": False, "done": True}
        next_ = {"observation": np.ones(2), **reward}
        recorder.add({"observation": np.ones(2), "action": np.ones(1), "next": next_})


WRITERS = {
    "save": lambda path, _: jrb.save(path, *filled()),
    "save in HDF5": lambda path, _: jrb.save(path, *filled(), layout="h5"),
    "save in the background": lambda path, _: save_async(path, *filled()).wait(),
    "Orbax": lambda path, _: BufferHandler().save(path, BufferSave(*filled())),
    "MemmapStorage": lambda path, _: filled(storage=jrb.MemmapStorage(path)),
    "SpillStorage": lambda path, _: filled(storage=jrb.SpillStorage(path, 4)),
    "Recorder": lambda path, _: record(path),
    "write_d4rl": lambda path, dataset: jrb.datasets.write_d4rl(path, dataset),
    "write_minari": lambda path, dataset: jrb.datasets.write_minari(
        path, dataset, dataset_id="a-v0"
    ),
    "preprocess": lambda path, dataset: dataset.preprocess(lambda step: step, path),
    "copy": lambda path, dataset: dataset.buffer(storage=jrb.MemmapStorage(path)),
    "cache": lambda path, dataset: dataset.buffer(cache=True, root=path),
    "TorchRL": lambda path, _: write_torchrl(path, *filled()),
}
READERS = {
    "load": lambda path: jrb.load(path),
    "metadata": lambda path: metadata(path),
    "generations": lambda path: generations(path),
    "verify": lambda path: verify(path),
    "is_checkpoint": lambda path: is_checkpoint(path),
    "open": lambda path: jrb.datasets.open(path),
    "list": lambda path: jrb.datasets.list(path),
    "delete": lambda path: jrb.datasets.delete("a", root=path),
    "TorchRL": lambda path: read_torchrl(path),
    "Vault": lambda path: read_vault(path),
    "Orbax": lambda path: BufferHandler().restore(path, BufferRestore()),
    "serve": lambda path: setup.path_of(filled()[0], path),
}
URLS = [
    "gs://bucket/run",
    pathlib.PurePosixPath("s3://bucket/run"),
    "hf://datasets/a/b",
    "https://host/x.h5",
    "memory://a",
    "file://host/data",
    "simplecache::s3://bucket/run",
]


@pytest.mark.parametrize("url", URLS, ids=str)
@pytest.mark.parametrize("call", [*WRITERS, *READERS])
def test_urls_are_refused_and_nothing_is_made(home, recorded, call, url):
    with pytest.raises(ValueError, match=r"expected a path on this machine, got .*mount"):
        WRITERS[call](url, recorded) if call in WRITERS else READERS[call](url)
    assert os.listdir() == [] and os.listdir(home) == []


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["stats"], ["data", "list", "--root"]])
def test_commands_refuse_urls(home, words):
    result = CliRunner().invoke(app, [*words, "gs://bucket/x"], standalone_mode=True)
    assert result.exit_code == 2 and "expected a path on this machine" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "{here}", "s3://b/x", "--to", "native"],
        ["data", "copy", "{here}", "hf://b/x"],
        ["demo", "--out", "gs://b/x.png"],
        ["bench", "--list", "--out", "gs://b/x"],
        ["bench", "--list", "--json", "gs://b/x"],
    ],
)
def test_commands_that_write_refuse_urls(home, recorded, words):
    words = [word.format(here=recorded.source) for word in words]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "expected a path on this machine" in result.output
    assert os.listdir() == []


@pytest.mark.parametrize("call", WRITERS)
def test_urls_of_this_machine_are_opened(home, recorded, call):
    folder = home / "a folder"
    folder.mkdir()
    WRITERS[call](f"file://{folder}/x".replace(" ", "%20"), recorded)
    assert os.listdir(folder) == ["x"] and os.listdir() == []


def test_a_folder_that_looks_like_a_url_can_be_named(home):
    for path in ("./gs://bucket", "file:///" + str(home) + "/../work/gs:/bucket", "C:/a"):
        jrb.save(path, *filled())
    assert sorted(os.listdir()) == ["C:", "gs:"] and generations(home / "../work/gs:/bucket")
    assert is_checkpoint(pathlib.Path("file:///") / home.parent / "work" / "C:" / "a")


@pytest.mark.parametrize("inside", ["", "sub", "sub/x"])
@pytest.mark.parametrize("call", [each for each in WRITERS if each != "Orbax"])
def test_a_broken_link_is_named(home, recorded, call, inside):
    os.symlink(home / "unmounted", "link")
    with pytest.raises(FileNotFoundError, match=r"broken link, found one to .*unmounted"):
        WRITERS[call](os.path.join("link", inside), recorded)
    assert os.listdir() == ["link"] and os.listdir(home) == []
    (home / "unmounted").mkdir()
    if inside:
        WRITERS[call](os.path.join("link", inside), recorded)
        assert os.listdir(home / "unmounted")


def test_a_file_where_a_folder_is_expected_is_named(home):
    pathlib.Path("x").write_text("text")
    with pytest.raises(ValueError, match="expected a folder, or nothing, found a file"):
        jrb.save("x", *filled(), layout="native")
    with pytest.raises(ValueError, match="expected a folder, or nothing, found a file"):
        filled(storage=jrb.MemmapStorage("x"))
    with pytest.raises(ValueError, match="found another file, which would be lost"):
        jrb.save("x", *filled())
    assert pathlib.Path("x").read_text() == "text"
