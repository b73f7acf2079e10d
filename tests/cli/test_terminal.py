"""No text of a file reaches the terminal in a form that the terminal obeys."""

import json
import os

import h5py
import jax
import numpy as np
import pytest

import jrb
from jrb.authoring import printable
from tests.cli.paths import call, stream

BAD = "\x1b]0;x\x07\x1b[2J\x9b31m\u202e\u2066\u200b[bold]"


def hostile(kind, folder):
    """The path of a file of a kind in which all names are hostile."""
    path = str(folder / f"{kind}{BAD}")
    items = stream()
    if kind in ("native", "h5"):
        items[BAD] = items["action"]
        example = jax.tree.map(lambda leaf: leaf[0], items)
        buffer = jrb.ReplayBuffer(30)
        state = buffer.extend(buffer.init(example), items)
        extra = {BAD: np.ones(2)} if kind == "native" else None
        jrb.save(path, buffer, state, extra=extra, layout=kind)
    elif kind == "npz":
        path += ".npz"
        flat = {"observations": items["observation"], "actions": items["action"]}
        flat |= {"rewards": items["next"]["reward"], "terminals": items["next"]["done"]}
        np.savez(path, **flat, **{BAD: items["action"]})
    elif kind == "d4rl":
        path += ".hdf5"
        with h5py.File(path, "w") as file:
            file["observations"], file["actions"] = items["observation"], items["action"]
            file["rewards"], file["terminals"] = items["next"]["reward"], items["next"]["done"]
            file["timeouts"], file[f"infos/{BAD}"] = items["next"]["truncated"], items["action"]
            file[f"metadata/{BAD}"] = BAD
    elif kind == "recorded":
        with jrb.datasets.Recorder(path, metadata={BAD: BAD}) as recorder:
            for row in range(len(items["action"]) - 1):
                one = jax.tree.map(lambda leaf, row=row: leaf[row], items)
                recorder.add({**one, BAD: np.float32(0)})
    return path


def check(*texts):
    for text in texts:
        assert text == printable(text)


@pytest.mark.parametrize("kind", ["native", "h5", "npz", "d4rl", "recorded"])
def test_names_and_metadata_are_shown_escaped(kind, tmp_path, capsys):
    path = hostile(kind, tmp_path)
    commands = [("inspect",), ("inspect", "--json"), ("verify",), ("stats",)]
    commands += [("convert", str(tmp_path / "out"), "--to", "parquet")]
    seen = ""
    for name, *more in commands:
        status, out, err = call(capsys, name, path, *more)
        check(out, err)
        assert status == 0, (name, err)
        seen += out
    assert printable(BAD, "") in seen and "[bold]" in seen
    check(*call(capsys, "convert", path, path + "-2", "--to", "minari")[1:])  # perhaps an error


def test_lists_of_datasets_and_their_notes_are_escaped(tmp_path, capsys):
    hostile("recorded", tmp_path)
    status, out, err = call(capsys, "data", "list", "--root", tmp_path)
    check(out, err)
    assert status == 0 and "[bold]" in out
    (dataset,) = jrb.datasets.list(tmp_path).values()
    check(repr(dataset), dataset._repr_html_(), *dataset.notes)
    assert BAD in dataset.spec  # names themselves stay


@pytest.mark.parametrize("kind", ["native", "h5", "npz", "d4rl", "recorded"])
def test_errors_are_escaped(kind, tmp_path, capsys):
    path = hostile(kind, tmp_path)
    files = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names] or [path]
    for file in files:
        with open(file, "r+b") as opened:
            opened.truncate(os.path.getsize(file) // 2)
    for command in ("inspect", "verify", "stats"):
        status, out, err = call(capsys, command, path)
        check(out, err)
    assert status
    with pytest.raises(Exception, match=r".") as caught:
        jrb.load(path) if kind in ("native", "h5") else jrb.datasets.open(path)[0]
    check(str(caught.value), str(caught.value.__cause__))


def test_a_name_that_is_no_text_can_be_printed(tmp_path, capsys):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x9b")
    jrb.save(path, buffer := jrb.ReplayBuffer(4), buffer.init({"x": np.float32(0)}))
    for command in ("inspect", "verify"):
        status, out, err = call(capsys, command, path)
        check(out, err)
        assert (status, err) == (0, "") and "\\udcff" in out
    json.loads(call(capsys, "inspect", path, "--json")[1])


def test_errors_of_leaves_are_escaped_and_html_is_too():
    buffer = jrb.ReplayBuffer(4)
    state = buffer.init({f"{BAD}<b>": np.float32(0)})
    with pytest.raises(ValueError, match="expected") as caught:
        buffer.add(state, {f"{BAD}<b>": np.zeros(2, np.float32)})
    check(str(caught.value))
    check(repr(state), state._repr_html_())
    assert "[bold]&lt;b&gt;" in state._repr_html_()
