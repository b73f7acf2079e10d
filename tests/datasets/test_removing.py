"""Removing and overwriting touch only files that jrb recognizes as its own."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import jrb
from jrb import cli, datasets
from jrb.authoring import Folder, Lock
from jrb.checkpoint import LockedError
from jrb.datasets import library
from tests.cli import paths
from tests.cli.paths import call
from tests.small_blocks import small_blocks

FOLDERS = ["native", "store", "several", "torchrl", "minari", "recorded", "parquet", "npz"]


def made(kind, folder):
    """A dataset of a kind, in a folder."""
    folder.mkdir(exist_ok=True)
    path = folder / kind
    if kind == "minari":
        datasets.write_minari(path, *paths.filled(), dataset_id="set-v0")
    elif kind == "npz":
        path.mkdir()
        rows = {"observation": np.zeros((4, 2)), "action": np.zeros(3), "reward": np.zeros(3)}
        for number in range(2):
            np.savez(path / f"episode-{number}.npz", **rows)
    elif kind in ("parquet", "arrow"):
        source = paths.make("h5", folder)
        path.mkdir()
        with pytest.raises(SystemExit, match="0"):
            cli.main(["convert", source, str(path / "part-0"), "--to", kind])
        os.remove(source)
    else:
        paths.make(kind, folder)
    return path


def remove(path):
    with library.lock_dataset(str(path)) as is_own:
        library.discard(str(path), is_own)


def below(folder):
    """Every file with what is in it, every folder, every link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.read_bytes() if path.is_file() else path.is_symlink()
    return {name: what for name, what in found.items() if ".locks" not in name}


def thesis(folder):
    (folder / "thesis.tex").write_text("all of it")
    return "'thesis.tex'"


def repository(folder):
    (folder / ".git" / "objects").mkdir(parents=True)
    (folder / ".git" / "objects" / "0a").write_bytes(b"\0")
    return "'.git'"


def deep(folder):
    inner = next((path for path in sorted(folder.iterdir()) if path.is_dir()), folder)
    (inner / "notes.md").write_text("...")
    return "notes.md'"


def empty(folder):
    (folder / "results").mkdir()
    return "'results'"


def link(folder):
    (folder / "home").symlink_to(folder.parent)
    return "'home'"


def another_checkpoint(folder):
    jrb.save(folder / "best", *paths.filled())
    return "'best'"


OTHERS = [thesis, repository, deep, empty, link, another_checkpoint]


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_with_files_of_others_stays_whole(kind, tmp_path, capsys):
    path, source = made(kind, tmp_path / "sets"), paths.make("h5", tmp_path)
    whole = below(path)
    for put in OTHERS:
        name = put(path)
        before = below(tmp_path)
        with pytest.raises(ValueError, match=name):
            remove(path) if kind == "several" else datasets.delete(kind, path.parent)
        status, _, err = call(capsys, "convert", source, path, "--to", "native", "--overwrite")
        assert status == 1 and name.strip("'") in err
        assert below(tmp_path) == before
        for other in {*below(path)} - {*whole}:
            at = path / other
            if at.is_symlink() or at.is_file():
                at.unlink()
            elif at.is_dir():
                shutil.rmtree(at)
    assert below(path) == whole
    assert call(capsys, "convert", source, path, "--to", "native", "--overwrite")[0] == 0
    assert {*os.listdir(path.parent)} - {".locks"} == {kind}
    assert int(jrb.load(path)[1].writer.count) == 22


@pytest.mark.parametrize("kind", ["native", "store", "several"])
def test_a_file_that_no_table_has_stays_among_its_rows(kind, tmp_path):
    with small_blocks():
        path = made(kind, tmp_path / "sets")
    for name in ("notes.bin", "notes-1.bin", "notes-1-1.txt", "more/x-1-1.bin"):
        other = path / "arrays" / name
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"all of it")
        before = below(path)
        with pytest.raises(ValueError, match=r"arrays/(notes|more)"):
            remove(path)
        assert below(path) == before
        other.unlink()
    other.parent.rmdir()
    remove(path)
    assert os.listdir(path.parent) == []


def test_a_checkpoint_whose_arrays_have_become_small_goes_without_a_rest(tmp_path):
    with small_blocks():
        path = made("native", tmp_path / "sets")
    jrb.save(path, *paths.filled())
    assert os.listdir(path / "arrays") == []
    remove(path)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("kind", [*FOLDERS, "h5", "d4rl", "arrow"])
def test_a_dataset_goes_without_a_rest(kind, tmp_path):
    path = made(kind, tmp_path / "sets")
    remove(path)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("kind", ["store", "several", "recorded"])
def test_what_is_being_written_to_stays(kind, tmp_path, capsys):
    path = tmp_path / kind
    if kind == "recorded":
        writer = datasets.Recorder(path)
        writer.append(paths.stream())
        writer.flush()
    elif kind == "store":
        writer = paths.filled(jrb.MemmapStorage(path))
        jrb.save(path, *writer)
    else:
        paths.make("several", tmp_path)
        writer = Lock(Folder(str(path)))
    before = below(tmp_path)
    with pytest.raises(LockedError, match="this process holds the lock"):
        remove(path)
    source = paths.make("h5", tmp_path)
    status, _, err = call(capsys, "convert", source, path, "--to", "native", "--overwrite")
    assert status == 1 and "this process holds the lock" in err
    os.remove(source)
    assert below(tmp_path) == before
    del writer


def test_a_lock_says_which_process_has_it(tmp_path):
    code = (
        "import sys; from jrb.authoring import Folder, Lock\n"
        "lock = Lock(Folder(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=rf"process {other.pid} holds the lock"):
            jrb.save(tmp_path, *paths.filled())
        other.communicate()


def test_links_and_the_folder_of_the_source_are_refused(tmp_path, capsys):
    source = made("native", tmp_path / "sets")
    (tmp_path / "way").symlink_to(source)
    before = below(tmp_path)
    for dest in (source, source.parent, tmp_path / "way", source / "arrays"):
        status, _, err = call(capsys, "convert", source, dest, "--to", "h5", "--overwrite")
        assert status == 1 and "apart from" in err
    assert below(tmp_path) == before


def test_what_came_while_it_was_written_is_not_replaced(tmp_path, capsys, monkeypatch):
    source, dest = paths.make("h5", tmp_path), tmp_path / "dest"
    save = jrb.save

    def slow(*args, **options):
        save(*args, **options)
        dest.write_text("mine")

    monkeypatch.setattr(jrb, "save", slow)
    status, _, err = call(capsys, "convert", source, dest, "--to", "native")
    assert status == 1 and "--overwrite" in err
    assert sorted(os.listdir(tmp_path)) == ["dest", "h5"] and dest.read_text() == "mine"


# Saving.

NAMES = ["generation.new", "generation-000000000001", "generation-000000000000", "lock"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [b"my notes", b"x", b'{"format":"json","a":1}', "link"])
def test_a_file_of_somebody_else_is_not_saved_over(tmp_path, name, content):
    path = tmp_path / "run"
    path.mkdir()
    if content == "link":
        (path / name).symlink_to("elsewhere")
    else:
        (path / name).write_bytes(content)
    buffer, state = paths.filled()
    save = lambda: jrb.save(path, buffer, state)
    mapped = lambda: paths.filled(jrb.MemmapStorage(path))
    several = lambda: jrb.save(path, {"a": buffer}, {"a": state})
    for attempt in (save, mapped, several):
        with pytest.raises(ValueError, match=name):
            attempt()
        assert os.listdir(path) == [name]
    assert (path / name).is_symlink() or (path / name).read_bytes() == content


@pytest.mark.parametrize("name", ["generation.new", "generation-000000000007"])
@pytest.mark.parametrize("is_commit", [False, True])
def test_a_file_that_came_after_a_save_is_not_lost(tmp_path, name, is_commit):
    path = tmp_path / "run"
    buffer, state = paths.filled(jrb.MemmapStorage(path) if is_commit else None)
    jrb.save(path, buffer, state)
    (path / name).write_text("my notes")
    before = below(path)
    with pytest.raises(ValueError, match=name):
        jrb.save(path, buffer, state)
    assert below(path) == before
    os.remove(path / name)
    assert jrb.save(path, buffer, state) == 2


@pytest.mark.parametrize("put", [thesis, repository, empty])
def test_a_folder_that_is_neither_empty_nor_a_checkpoint_is_refused(tmp_path, put):
    name = put(tmp_path)
    buffer, state = paths.filled()
    before = below(tmp_path)
    for one in (
        lambda: jrb.save(tmp_path, buffer, state),
        lambda: several(tmp_path, buffer, state),
    ):
        with pytest.raises(ValueError, match=name):
            one()
        assert below(tmp_path) == before
    jrb.save(tmp_path / "run", buffer, state)
    put(tmp_path / "run")  # beside a checkpoint it stays
    assert jrb.save(tmp_path / "run", buffer, state) == 2


def several(path, buffer, state):
    jrb.save(path, {"a": buffer}, {"a": state})


def test_what_lies_among_the_rows_stays(tmp_path):
    buffer, state = paths.filled()
    with small_blocks():
        jrb.save(tmp_path / "run", buffer, state)
    notes = tmp_path / "run" / "arrays" / "notes.md"
    notes.write_text("...")
    jrb.save(tmp_path / "run", *jrb.from_items({"x": np.zeros(3, np.float32)}))
    assert notes.read_text() == "..."
    assert os.listdir(notes.parent) == ["notes.md"]


@pytest.mark.parametrize("content", [b"", b"thesis", "hdf5", "npz"])
def test_a_file_of_somebody_else_is_not_replaced_by_hdf5(tmp_path, content):
    path, buffer = tmp_path / "x.h5", paths.filled()
    if content == "hdf5":
        os.rename(paths.make("d4rl", tmp_path), path)
    elif content == "npz":
        path.write_bytes(b"PK\3\4")
    else:
        path.write_bytes(content)
    (tmp_path / "x.h5.new").write_text("mine too")
    before = below(tmp_path)
    with pytest.raises(ValueError, match="another file"):
        jrb.save(path, *buffer, layout="h5")
    assert below(tmp_path) == before
    path.unlink()
    jrb.save(path, *buffer, layout="h5")
    jrb.save(path, *buffer, layout="h5")
    assert sorted(os.listdir(tmp_path)) == ["x.h5", "x.h5.new"]
