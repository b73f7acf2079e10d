"""All commands on all kinds of paths, in this process."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import chex
import h5py
import jax
import numpy as np
import pytest

import jrb
from jrb import authoring, cli
from jrb.cli import inspect, sources
from tests.cli import paths
from tests.cli.paths import LENGTHS, OTHERS, OURS, call, make
from tests.small_blocks import small_blocks

KEYS = {
    *("path", "kind", "description", "size", "capacity", "num_envs", "nbytes", "disk"),
    *("episodes", "transitions", "generations", "leaves", "others", "extra", "notes"),
    *("metadata", "parts"),
}
CARTPOLE = "tests/data/minari/cartpole-v0"
LEAVES = [
    *("action", "next/done", "next/observation", "next/reward", "next/terminated"),
    *("next/truncated", "observation"),
]


@pytest.fixture(autouse=True)
def _as_wide_as_a_pipe(monkeypatch):
    """Whoever runs the tests may have told how wide the terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("kind", OURS + OTHERS)
def test_inspect_tells_of_every_kind(kind, tmp_path, capsys):
    path = make(kind, tmp_path)
    status, out, err = call(capsys, "inspect", path, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert set(told) == KEYS
    assert told["path"] == path
    one = told["parts"]["b/c"] if kind == "several" else told
    assert [leaf["name"] for leaf in one["leaves"]] == LEAVES
    spec = {leaf["name"]: (leaf["dtype"], leaf["shape"]) for leaf in one["leaves"]}
    assert spec["observation"] == ("float32", [3])
    assert spec["next/done"] == ("bool", [])
    assert told["disk"] > 0
    status, text, err = call(capsys, "inspect", path)
    assert (status, err) == (0, "")
    assert path in text
    assert all(name in text for name in LEAVES)


def test_inspect_tells_of_generations_and_what_was_saved_besides(tmp_path, capsys):
    told = json.loads(call(capsys, "inspect", make("native", tmp_path), "--json")[1])
    assert (told["kind"], told["size"], told["capacity"]) == ("checkpoint", 22, 30)
    sizes = [(each["generation"], each["size"]) for each in told["generations"]]
    assert sizes == [(1, 22), (2, 22)]
    assert told["extra"][0] == {"name": "params", "dtype": "float32", "shape": [2], "nbytes": 8}
    assert told["description"].startswith("ReplayBuffer(capacity=30, batch_size=4")
    memory = {leaf["name"]: leaf["nbytes"] for leaf in told["leaves"]}
    assert memory["observation"] == 30 * 12
    text = call(capsys, "inspect", told["path"])[1]
    assert "22 of 30 (73 %)" in text
    assert "sampler=Prioritized()" in text


def test_descriptions_name_functions(tmp_path, capsys):
    buffer, state = paths.filled(transforms=(paths.unchanged,))
    jrb.save(tmp_path / "a", buffer, state)
    assert "transforms=(unchanged,)" in call(capsys, "inspect", tmp_path / "a")[1]


def test_what_is_left_out_encoded_or_of_objects_is_said(tmp_path, capsys):
    buffer, state = paths.filled()
    jrb.save(tmp_path / "a", buffer, state, items=False)
    assert "22 items were left out" in call(capsys, "inspect", tmp_path / "a")[1]
    jrb.save(tmp_path / "b", buffer, state, encode=jax.tree_util.tree_leaves)
    assert "encoded by" in call(capsys, "inspect", tmp_path / "b")[1]
    jrb.save(tmp_path / "c", *jrb.from_items(["a", {}], storage=jrb.ListStorage()))
    status, out, _ = call(capsys, "inspect", tmp_path / "c")
    assert status == 0
    assert "Python objects" in out


@pytest.mark.parametrize("columns", ["40", "60", "100"])
@pytest.mark.parametrize("kind", ["native", "several", "d4rl"])
def test_lines_fit_into_a_terminal(kind, columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    for command in ("inspect", "stats"):
        if (command, kind) == ("stats", "several"):
            continue
        (tmp_path / command).mkdir()
        status, out, _ = call(capsys, command, make(kind, tmp_path / command))
        assert status == 0
        assert max(map(len, out.splitlines())) <= int(columns)
        assert "\x1b" not in out


def test_a_pipe_breaks_no_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    path = make("native", folder)
    assert f"{path}: checkpoint" in call(capsys, "inspect", path)[1].splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["native", "d4rl"])
def test_a_plot_is_drawn(kind, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    status, _, err = call(capsys, "inspect", make(kind, tmp_path), "--plot", file)
    assert (status, err) == (0, "")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_several_is_refused(tmp_path, capsys):
    path = make("several", tmp_path)
    status, out, err = call(capsys, "inspect", path, "--plot", tmp_path / "a.png")
    assert (status, out) == (1, "")
    assert "expected a single buffer" in err


@pytest.mark.parametrize("kind", OURS + OTHERS)
def test_verify_says_when_all_is_whole(kind, tmp_path, capsys):
    status, out, err = call(capsys, "verify", make(kind, tmp_path))
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 1


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def files_below(path, ending=""):
    names = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
    return sorted(name for name in names if name.endswith(ending))


@pytest.mark.parametrize("kind", ["native", "store"])
def test_verify_has_a_line_for_every_damage(kind, tmp_path, capsys):
    with small_blocks():
        path = make(kind, tmp_path)
    for file in files_below(path, ".bin")[:2]:
        flip(file, 5)
    status, out, err = call(capsys, "verify", path)
    assert (status, err) == (1, "")
    assert len(out.splitlines()) == 2
    assert all("checksum" in line and "block 0" in line for line in out.splitlines())


def test_verify_finds_damaged_parts(tmp_path, capsys):
    with small_blocks():
        path = make("several", tmp_path)
    file = next(name for name in files_below(path, ".bin") if "/b%252Fc." in name)
    flip(file, 3)
    status, out, _ = call(capsys, "verify", path)
    assert status == 1
    assert len(out.splitlines()) == 1 and file in out
    os.remove(file)
    status, out, _ = call(capsys, "verify", path)
    assert status == 1 and file in out


def test_verify_finds_a_damaged_generation(tmp_path, capsys):
    path = make("native", tmp_path)
    file = files_below(path, "000001")[0]
    flip(file, os.path.getsize(file) - 1)
    status, out, _ = call(capsys, "verify", path)
    assert status == 1
    assert len(out.splitlines()) == 1 and file in out


def recording_of_frames(folder):
    """Returns the path of a recording; most of its file is data, which Parquet checksums."""
    frames = np.random.default_rng(0).integers(0, 256, (300, 500), np.uint8)
    with jrb.datasets.Recorder(folder / "frames") as recorder:
        flags = {"reward": np.zeros(300), "done": np.arange(300) % 7 == 6}
        recorder.append({"observation": frames, "next": flags})
    return str(folder / "frames")


@pytest.mark.parametrize("where", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["h5", "recorded"])
def test_verify_finds_a_damaged_file(kind, where, tmp_path, capsys):
    path = recording_of_frames(tmp_path) if kind == "recorded" else make(kind, tmp_path)
    sizes = {name: os.path.getsize(name) for name in files_below(path) or [path]}
    file = max(sizes, key=lambda name: sizes[name])
    flip(file, int(where * sizes[file]))
    status, out, err = call(capsys, "verify", path)
    assert status == 1
    assert len(out.splitlines()) + len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_verify_tells_how_far_it_is(tmp_path):
    for kind in OURS:
        shares = []
        assert jrb.checkpoint.verify(make(kind, tmp_path), shares.append) == []
        assert shares == sorted(shares)
        assert 0 < shares[0] <= 1
        assert shares[-1] == 1


@pytest.mark.parametrize("kind", ["native", "store", "h5", *OTHERS])
def test_stats_are_those_of_the_episodes(kind, tmp_path, capsys):
    path = make(kind, tmp_path)
    status, out, err = call(capsys, "stats", path, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    lengths = LENGTHS if kind == "recorded" else [*LENGTHS, 1]
    steps = np.arange(sum(lengths), dtype=np.float64)
    returns = [part.sum() for part in np.split(steps, np.cumsum(lengths)[:-1])]
    assert (told["episodes"], told["transitions"]) == (len(lengths), len(steps))
    ended = len(lengths) if kind == "d4rl" else len(LENGTHS)  # there, what ran was cut off
    lengths, returns = lengths[:ended], returns[:ended]
    for name, values in {"lengths": lengths, "returns": returns, "rewards": steps}.items():
        assert told[name]["count"] == len(values)
        for reduce in ("min", "median", "mean", "max", "std"):
            np.testing.assert_allclose(told[name][reduce], getattr(np, reduce)(values))
        assert sum(told[name]["histogram"]) == len(values)
    assert (told["complete"], told["running"]) == (ended, told["episodes"] - ended)
    if kind in ("native", "store", "h5"):
        there = jrb.stats(*jrb.load(path))
        assert there["complete"] == ended
        assert there["return"]["mean"] == pytest.approx(told["returns"]["mean"])
    status, text, _ = call(capsys, "stats", path)
    assert status == 0
    assert "lengths" in text
    assert "returns" in text


@pytest.mark.parametrize("kind", ["native", "h5", "parquet"])
def test_stats_are_those_of_episodes_that_meet_a_condition(kind, tmp_path, capsys):
    path = make(kind, tmp_path)
    dataset = jrb.datasets.open(path)
    least = float(np.median(dataset.returns()))
    for text in (f"return >= {least} and complete", "length < 2", "length > 1000"):
        status, out, err = call(capsys, "stats", path, "--json", "--where", text)
        assert (status, err) == (0, "")
        assert json.loads(out)["episodes"] == len(dataset.where(text))
    assert "episodes" in call(capsys, "stats", path, "--where", "length > 1000")[1]
    for text in ("length", "size > 3", "__import__('os')"):
        status, out, err = call(capsys, "stats", path, "--where", text)
        assert (status, out, len(err.splitlines())) == (1, "", 1)


def test_stats_leave_out_what_is_not_finite():
    told = inspect.summary(np.array([1.0, np.nan, 3.0, np.inf]))
    assert (told["count"], told["finite"], told["mean"]) == (4, 2, 2.0)
    assert inspect.summary([])["mean"] is None
    assert inspect.bars([0, 1, 8]) == " ▁█"
    assert inspect.bars([]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["native", "h5", "torchrl", "torchrl-flat"])
@pytest.mark.parametrize("kind", ["native", "store", "h5", "d4rl"])
def test_convert_goes_there_and_back_exactly(kind, to, tmp_path, capsys):
    source, dest = make(kind, tmp_path), str(tmp_path / "dest")
    status, out, err = call(capsys, "convert", source, dest, "--to", to)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 1
    want = paths.stream()
    if kind == "d4rl":  # an episode that runs is a truncated one there
        want["next"]["truncated"][-1] = want["next"]["done"][-1] = True
    if to in ("native", "h5"):
        buffer, state = jrb.load(dest)
        chex.assert_trees_all_equal(jrb.items(buffer, state), want)
        if kind != "d4rl":
            again, old = paths.filled()
            chex.assert_trees_all_equal(buffer.priorities(state), again.priorities(old))
            draw = lambda one, held: one.sample(held, jax.random.key(3)).indices
            chex.assert_trees_all_equal(draw(buffer, state), draw(again, old))
    else:
        found_items = jrb.checkpoint.read_torchrl(dest).items
        if to == "torchrl-flat":  # which has flags and rewards at the root too
            found_items = {name: found_items[name] for name in want}
        chex.assert_trees_all_equal(found_items, want)
    assert call(capsys, "verify", dest)[0] == 0


@pytest.mark.parametrize("to", ["minari", "d4rl", "parquet", "arrow"])
@pytest.mark.parametrize("kind", ["native", "recorded"])
def test_convert_writes_datasets(kind, to, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    source, dest = make(kind, tmp_path), str(tmp_path / f"dest.{to}")
    status, out, err = call(capsys, "convert", source, dest, "--to", to)
    assert (status, err) == (0, "")
    assert "It has no place for" in out
    dataset = jrb.datasets.open(dest)
    want = paths.stream()
    rows = sum(LENGTHS) if kind == "recorded" else len(want["action"])
    found_rows = [np.concatenate([each[name] for each in dataset]) for name in ("action",)]
    chex.assert_trees_all_equal(found_rows[0].reshape(-1), want["action"][:rows])
    seen = np.concatenate([each["observation"] for each in dataset])
    chex.assert_trees_all_equal(seen, want["observation"][:rows])


@pytest.mark.slow
@pytest.mark.parametrize("to", ["native", "h5"])
def test_what_was_converted_is_loaded_without_numbers_of_64_bits(to, tmp_path, capsys):
    dest = str(tmp_path / "dest")
    status, out, _ = call(capsys, "convert", CARTPOLE, dest, "--to", to)
    assert status == 0
    assert "action int64 as int32, next/reward float64 as float32; --x64" in " ".join(out.split())
    buffer, state = jrb.load(dest)
    assert jrb.stats(buffer, state)["return"]["mean"] == pytest.approx(427.15)
    told = json.loads(call(capsys, "stats", dest, "--json")[1])
    assert (told["complete"], told["returns"]["mean"]) == (20, pytest.approx(427.15))
    assert call(capsys, "inspect", dest, "--plot", tmp_path / "x.png")[0] == 0


def test_convert_keeps_numbers_of_64_bits_where_it_is_told_so(tmp_path, capsys):
    dest = str(tmp_path / "dest")
    assert call(capsys, "convert", CARTPOLE, dest, "--to", "native", "--x64")[0] == 0
    told = json.loads(call(capsys, "inspect", dest, "--json")[1])
    types = {leaf["name"]: leaf["dtype"] for leaf in told["leaves"]}
    assert (types["action"], types["next/reward"]) == ("int64", "float64")
    assert not jax.config.jax_enable_x64


def test_convert_replaces_only_when_it_is_told(tmp_path, capsys):
    source, dest = make("native", tmp_path), tmp_path / "dest"
    convert = ["convert", source, dest, "--to", "native"]
    assert call(capsys, *convert)[0] == 0
    before = files_below(dest)
    status, out, err = call(capsys, *convert)
    assert (status, out) == (1, "")
    assert "--overwrite" in err
    assert files_below(dest) == before
    assert call(capsys, *convert, "--overwrite")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["dest", "native"]
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.tex").write_text("all of it")
    convert[2] = other
    assert call(capsys, *convert, "--overwrite")[0] == 2
    assert (other / "thesis.tex").read_text() == "all of it"
    for inside in (source, os.path.join(source, "a"), tmp_path):
        convert[2] = inside
        status, _, err = call(capsys, *convert, "--overwrite")
        assert status == 1
        assert "apart from" in err


def test_a_conversion_that_fails_leaves_nothing(tmp_path, capsys):
    source = make("several", tmp_path)
    status, out, err = call(capsys, "convert", source, tmp_path / "dest", "--to", "h5")
    assert (status, out) == (1, "")
    assert "single buffer" in err
    assert os.listdir(tmp_path) == ["several"]
    assert call(capsys, "convert", source, tmp_path / "dest", "--to", "native")[0] == 0
    assert set(jrb.load(tmp_path / "dest")[0]) == {"a", "b/c"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "tarball"], "'tarball' is not one of 'native', 'h5'"),
        (["--to", "native", "--compression", "gzip"], "--compression: expected none"),
        ([], "Missing option '--to'"),
    ],
)
def test_wrong_calls_are_told_in_a_line(options, words, tmp_path, capsys):
    status, out, err = call(capsys, "convert", CARTPOLE, tmp_path / "a", *options)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_one_of_the_states_under_vmap_is_chosen_by_its_number(tmp_path, capsys):
    path, dest = make("vmap", tmp_path), tmp_path / "dest"
    returns = lambda *words: json.loads(call(capsys, "stats", *words, "--json")[1])["returns"]
    assert returns(path, "--state", 2)["max"] == 100 * returns(path, "--state", 0)["max"] > 0
    assert jrb.datasets.open(path, state=1).returns().max() == returns(path, "--state", 1)["max"]
    for to in ("h5", "native", "torchrl", "d4rl", "parquet"):
        words = ("convert", path, f"{dest}-{to}", "--to", to, "--state", 1)
        assert call(capsys, *words)[0] == 0, to
    for to in ("h5", "native", "d4rl"):
        assert returns(f"{dest}-{to}")["max"] == returns(path, "--state", 1)["max"]
    assert call(capsys, "data", "copy", path, f"{dest}-copy", "--state", 1)[0] == 0
    assert returns(f"{dest}-copy")["max"] == returns(path, "--state", 1)["max"]
    assert call(capsys, "inspect", path, "--plot", tmp_path / "a.png", "--state", 2)[0] == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["stats"], r"expected one of the states under vmap, of shape \(3,\), got none.*--state 0"),
        (["stats", "--state", "3"], r"of shape \(3,\), got 3.*--state 0"),
        (["stats", "--state", "0,1"], r"of shape \(3,\), got 0,1"),
        (["stats", "--state", "-1"], r"expected a number, or such as 0,1, got '-1'"),
        (["inspect", "--plot", "{folder}/a.png"], "--state 0"),
        (["convert", "{folder}/dest", "--to", "d4rl"], "--state 0"),
        (["data", "copy", "{folder}/dest"], "--state 0"),
    ],
)
def test_states_under_vmap_need_a_number(words, error, tmp_path, capsys):
    path = make("vmap", tmp_path)
    at = 2 if words[0] == "data" else 1
    words = [word.format(folder=tmp_path) for word in [*words[:at], path, *words[at:]]]
    status, out, err = call(capsys, *words)
    assert status in (1, 2) and out == "" and "jax.vmap" not in err
    assert re.search(error, err) and len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == ["vmap"]


def test_a_single_state_has_no_number(tmp_path, capsys):
    for kind in ("native", "several"):
        status, _, err = call(
            capsys, "convert", make(kind, tmp_path), tmp_path / "a", "--to", "native", "--state", 0
        )
        assert status == 1 and "expected no number of a state, got 0" in err


def test_compression_goes_to_hdf5(tmp_path, capsys):
    dest = tmp_path / "a.h5"
    call(capsys, "convert", make("native", tmp_path), dest, "--to", "h5", "--compression", "gzip")
    with h5py.File(dest) as file:
        assert file["trajectories/000001/action"].compression == "gzip"


def test_datasets_are_copied_listed_and_deleted(tmp_path, capsys):
    dest = tmp_path / "copy"
    status, out, err = call(capsys, "data", "copy", CARTPOLE, dest)
    assert (status, err) == (0, "")
    assert "8,543 transitions" in out
    assert jrb.datasets.open(dest).transitions == 8543
    told = json.loads(call(capsys, "data", "list", "--root", tmp_path, "--json")[1])
    assert [(each["name"], each["episodes"]) for each in told] == [("copy", 20)]
    assert "copy" in call(capsys, "data", "list", "--root", tmp_path)[1]
    assert call(capsys, "data", "delete", "copy", "--root", tmp_path, "--yes")[0] == 0
    assert not dest.exists()
    assert "No datasets" in call(capsys, "data", "list", "--root", tmp_path)[1]
    status, _, err = call(capsys, "data", "delete", "copy", "--root", tmp_path, "--yes")
    assert status == 2
    assert "no such file or directory" in err


def test_deleting_asks_first(tmp_path, capsys, monkeypatch):
    path = make("native", tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    status, _, err = call(capsys, "data", "delete", "native", "--root", tmp_path)
    assert status != 0
    assert "Traceback" not in err
    assert os.path.exists(path)
    status, out, err = call(capsys, "data", "delete", "nothing", "--root", tmp_path)
    assert (status, out) == (2, "") and "Remove" not in err  # nothing to ask about
    assert err.endswith("nothing: no such file or directory.\n")


COMMANDS = [["inspect"], ["verify"], ["stats"], ["convert"], ["data", "copy"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[-1])
@pytest.mark.parametrize("what", ["nothing", "file", "folder", "empty"])
def test_paths_that_are_not_ours_are_told_in_a_line(what, command, tmp_path, capsys):
    path = tmp_path / what
    if what == "file":
        path.write_bytes(b"hello")
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "folder":
        path.mkdir()
    more = [tmp_path / "dest"] if command[-1] in ("convert", "copy") else []
    more += ["--to", "native"] if command == ["convert"] else []
    status, out, err = call(capsys, *command, path, *more)
    assert (status, out) == (2, "")
    assert err.startswith("jrb: ")
    assert str(path) in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["stats"]], ids=lambda w: w[0])
def test_unreadable_paths_are_told_in_a_line(command, tmp_path, capsys, monkeypatch):
    """Whoever runs this may read everything, so the system's answer is made up."""

    def refused(path, *rest, **named):
        raise PermissionError(13, "Permission denied", str(path))

    path = make("native", tmp_path)
    monkeypatch.setattr(os, "listdir", refused)
    status, out, err = call(capsys, *command, path)
    assert (status, out) == (1, "")
    assert err == f"jrb: {path}: permission denied.\n"


@pytest.mark.parametrize("size", [0, 10, 300])
@pytest.mark.parametrize("kind", ["native", "h5", "store"])
def test_damaged_heads_are_told_in_a_line(kind, size, tmp_path, capsys):
    path = make(kind, tmp_path)
    head = path if kind == "h5" else files_below(path, "")[0]
    for name in files_below(path) or [path]:
        if name == path or "generation-" in name:
            head = name
            os.truncate(name, size)
    assert head
    for command in ("inspect", "stats"):
        status, out, err = call(capsys, command, path)
        assert status in (1, 2), (command, out)
        assert len(err.splitlines()) == 1
        assert err.startswith("jrb: ")
    status, out, err = call(capsys, "verify", path)
    assert status in (1, 2)
    assert len(out.splitlines() + err.splitlines()) >= 1


def test_tracebacks_are_shown_on_request(tmp_path):
    for words in (["inspect", "nowhere", "--traceback"], ["--traceback", "inspect", "nowhere"]):
        with pytest.raises(FileNotFoundError):
            cli.main(words)


@pytest.mark.parametrize("group", [[], ["data"]])
def test_alone_it_prints_help(group, capsys):
    status, out, err = call(capsys, *group)
    assert (status, err) == (0, "")
    names = ("list", "copy", "delete") if group else ("inspect", "verify", "convert", "stats")
    assert all(name in out for name in names)
    assert call(capsys, "--version")[1] == f"jrb {jrb.__version__}\n"
    status, out, err = call(capsys, "inspct")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_interrupts_and_broken_pipes_are_quiet(error, capsys, monkeypatch):
    def fails(path):
        raise error

    monkeypatch.setattr(sources, "kind_of", fails)
    monkeypatch.setattr("sys.stderr.close", lambda: None, raising=False)
    status, out, err = call(capsys, "verify", CARTPOLE)
    assert out == ""
    if error is KeyboardInterrupt:
        assert (status, err.strip()) == (130, "jrb: interrupted.")
    else:
        assert (status, err) == (1, "")


def test_errors_that_nobody_thought_of_are_named(capsys, monkeypatch):
    def fails(path):
        raise KeyError("x")

    monkeypatch.setattr(sources, "kind_of", fails)
    status, _, err = call(capsys, "verify", CARTPOLE)
    assert (status, err) == (1, "jrb: KeyError: 'x' (--traceback shows where.)\n")


def run(code, *arguments):
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_store_is_told_of_and_checked_without_jax(tmp_path):
    path = make("store", tmp_path)
    for command in ("inspect", "verify"):
        code = "import sys; sys.modules['jax'] = None; from jrb import cli; cli.main()"
        ended = run(code, command, path)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_without_the_extra_it_says_which_to_install():
    code = "import sys; sys.modules['typer'] = None; from jrb import cli; cli.main()"
    ended = run(code, "inspect", "x")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.splitlines() == [
        "jrb: typer is not installed. It comes with the extra 'cli': pip install 'jrb[cli]'"
    ]


def test_whoever_reads_may_stop(tmp_path):
    path = make("native", tmp_path)
    command = f"{sys.executable} -m jrb inspect {path} --json | head -n 1"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("{\n", "")


def strict(text):
    """JSON without NaN and Infinity, which programs refuse."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["verify PATH >&-", "inspect PATH --json >&-", "verify PATH 2>&-", "stats PATH <&- >&- 2>&-"],
)
def test_closed_streams_are_no_error(command, tmp_path):
    program = f"{sys.executable} -c 'from jrb.cli import main; main()' "
    path = make("native", tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    done = subprocess.run(
        ["sh", "-c", program + command.replace("PATH", path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("is whole" in done.stdout) == (command == "verify PATH 2>&-")
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_json_has_no_numbers_that_json_does_not_have(tmp_path, capsys):
    buffer, state = paths.filled()
    items = paths.stream()
    items["next"]["reward"][3:5] = np.nan, np.inf
    jrb.save(tmp_path / "a", buffer, buffer.extend(buffer.empty(state), items))
    told = strict(call(capsys, "stats", tmp_path / "a", "--json")[1])
    assert (told["rewards"]["count"], told["rewards"]["finite"]) == (22, 20)
    dest = tmp_path / "minari"
    assert call(capsys, "convert", tmp_path / "a", dest, "--to", "minari")[0] == 0
    strict(call(capsys, "inspect", dest, "--json")[1])  # whose bounds are infinite


def test_what_only_a_checkpoint_can_hold_is_not_converted(tmp_path, capsys):
    buffer, state = paths.filled()
    many = jax.vmap(lambda _: jrb.ReplayBuffer(30).init(paths.EXAMPLE))(np.arange(3))
    jrb.save(tmp_path / "mix", jrb.Mix((buffer, buffer), (0.5, 0.5)), (state, state))
    jrb.save(tmp_path / "many", jrb.ReplayBuffer(30), many)
    jrb.save(tmp_path / "objects", *jrb.from_items(["a"], storage=jrb.ListStorage()))
    for name in ("mix", "many", "objects"):
        for to in ("h5", "torchrl", "d4rl", "parquet"):
            status, out, err = call(capsys, "convert", tmp_path / name, tmp_path / "to", "--to", to)
            assert (status, out) == (1, "")
            assert f"expected a single buffer of arrays with --to {to}" in err
            assert not os.path.lexists(tmp_path / "to")


def test_an_empty_dump_is_told_of(tmp_path, capsys):
    buffer, state = paths.filled()
    jrb.checkpoint.write_torchrl(tmp_path / "a", buffer, buffer.empty(state))
    told = strict(call(capsys, "stats", tmp_path / "a", "--json")[1])
    assert (told["episodes"], told["transitions"]) == (0, 0)
    assert call(capsys, "verify", tmp_path / "a")[0] == 0
    assert call(capsys, "inspect", tmp_path / "a")[0] == 0


@pytest.mark.parametrize("command", ["inspect", "verify", "stats"])
def test_pipes_are_not_waited_for(command, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "generation-000000000001")
    assert call(capsys, command, tmp_path / "pipe")[0] == 2
    assert call(capsys, command, tmp_path / "folder")[0] in (1, 2)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("there", [True, False])
def test_the_old_stays_whatever_fails(error, there, tmp_path, capsys, monkeypatch):
    source, dest = tmp_path / "h5", tmp_path / "dest"
    make("h5", tmp_path)
    if there:
        dest.write_bytes(source.read_bytes())
    before, rename = sorted(os.listdir(tmp_path)), os.rename

    def fails(one, other):
        if other == str(dest) and not one.endswith("-old"):
            raise error
        rename(one, other)

    monkeypatch.setattr(os, "rename", fails)
    convert = ["convert", source, dest, "--to", "d4rl", "--overwrite"]
    status, out, _ = call(capsys, *convert)
    assert (status, out) == (130 if isinstance(error, KeyboardInterrupt) else 1, "")
    assert sorted(os.listdir(tmp_path)) == before
    if there:
        assert dest.read_bytes() == source.read_bytes()


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path, capsys):
    source = make("h5", tmp_path)
    jrb.save(tmp_path / "other", *paths.filled())
    (tmp_path / "link").symlink_to("other")
    convert = ["convert", source, tmp_path / "link", "--to", "native", "--overwrite"]
    assert call(capsys, *convert)[0] == 0
    assert not (tmp_path / "link").is_symlink()
    assert jrb.load(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["h5", "link", "other"]


def test_leaves_without_numbers_are_not_written_to_parquet(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    items = paths.stream()
    items["observation"] = items["next"]["observation"] = np.zeros((22, 0), np.float32)
    jrb.save(tmp_path / "a", *jrb.from_items(items))
    status, out, err = call(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", "parquet")
    assert (status, out) == (1, "")
    assert "leaves ['next/observation', 'observation']" in err
    assert os.listdir(tmp_path) == ["a"]
    assert call(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", "arrow")[0] == 0
    assert call(capsys, "verify", tmp_path / "b")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["native", "h5", "store"])
def test_items_of_64_bits_are_counted_and_drawn(layout, tmp_path, capsys):
    path = tmp_path / "wide"
    storage = jrb.MemmapStorage(path) if layout == "store" else jrb.DeviceStorage()
    buffer = jrb.ReplayBuffer(8, storage=storage)
    rows = {
        "observation": np.arange(12.0).reshape(6, 2),
        "action": np.arange(6) + 2**40,
        "next": {
            "observation": np.arange(12.0).reshape(6, 2),
            "reward": np.arange(6.0),
            "done": np.arange(6) % 3 == 2,
        },
    }
    with authoring.enable_x64():
        state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], rows)), rows)
        jrb.save(path, buffer, state, layout="h5" if layout == "h5" else "native")
    del state
    status, text, _ = call(capsys, "stats", str(path), "--json")
    told = json.loads(text)
    assert (status, told["episodes"], told["complete"]) == (0, 2, 2)
    assert told["returns"]["mean"] == 7.5
    assert call(capsys, "inspect", str(path), "--plot", str(tmp_path / "x.png"))[0] == 0
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_spaces_of_minari_are_shown_as_gymnasium_does():
    frames = {"type": "Box", "dtype": "uint8", "shape": [2, 2], "low": [[0, 0], [0, 0]]}
    frames |= {"high": [[255, 255], [255, 255]]}
    pair = {"type": "Tuple", "subspaces": [{"type": "Discrete", "n": 3, "start": 1}, {"type": "?"}]}
    both = {"type": "Dict", "subspaces": {"a": frames, "b": pair}}
    assert inspect._fact_text(both) == (
        "Dict(a: Box(0, 255, (2, 2), uint8), b: Tuple(Discrete(3, start=1), {'type': '?'}))"
    )
    assert inspect._fact_text({"type": "Box", "low": 3}) == "{'type': 'Box', 'low': 3}"
    assert inspect._fact_text({}) == ""


def test_spaces_of_a_set_are_short(capsys):
    text = call(capsys, "inspect", CARTPOLE)[1]
    assert "Box(-inf, inf, (4,), float32)" in text and "Discrete(2)" in text


def test_long_metadata_is_cut(tmp_path, capsys):
    with jrb.datasets.Recorder(tmp_path / "a", metadata={"about": "x" * 500}) as recorder:
        recorder.add(jax.tree.map(lambda leaf: leaf[0], paths.stream()))
    text = call(capsys, "inspect", tmp_path / "a")[1]
    assert "x" * 196 + " ..." in text and "x" * 197 not in text


def test_calls_that_go_wrong_tell_what_there_is(tmp_path, capsys):
    status, _, err = call(capsys, "inspect", tmp_path / "none")
    assert status == 2 and err.endswith("none: no such file or directory.\n")
    assert call(capsys, "data", "list", "--root", tmp_path)[1] == f"No datasets in {tmp_path}.\n"
    assert "native|h5|torchrl" in call(capsys, "convert", "--help")[1]
    pytest.importorskip("gymnax")
    status, out, err = call(capsys, "demo", "--env", "Foo")
    assert (status, out) == (2, "") and "CartPole-v1, " in err and "got 'Foo'" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["convert", "a", "b"], "jrb convert --help says more."),
        (["demo", "--steps", "0"], "jrb demo --help says more."),
        (["inspct", "a"], "Did you mean 'inspect'? jrb --help says more."),
    ],
)
def test_wrong_calls_name_the_help(words, line, capsys):
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "") and err.endswith(f"{line}\n")


def complete(words):
    """Returns the completions that a shell gets for these words."""
    env = {"_JRB_COMPLETE": "complete_bash", "COMP_WORDS": words, "PATH": os.environ["PATH"]}
    env |= {"COMP_CWORD": str(words.count(" ")), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "jrb"], env=env, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.slow
def test_shells_complete_commands_options_and_formats():
    assert " ".join(complete("jrb ")) == "inspect verify convert stats demo doctor bench data"
    assert complete("jrb ins") == ["inspect"]
    assert "--compression" in complete("jrb convert a b --")
    assert complete("jrb convert a b --to to") == ["torchrl", "torchrl-flat"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_a_shell(shell, tmp_path):
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "COMP_WORDS": "jrb"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "_JRB_COMPLETE": f"source_{shell}"}
    ran = subprocess.run(
        [sys.executable, "-m", "jrb"], env=env, capture_output=True, text=True, check=True
    )
    assert "_JRB_COMPLETE" in ran.stdout and ran.stderr == ""


def test_a_state_on_the_host_tells_its_bytes():
    buffer = jrb.ReplayBuffer(1000, storage=jrb.MemmapStorage())
    state = buffer.init({"x": np.zeros(1000, np.uint8)})
    assert repr(state).startswith("BufferState, 24 B and 1.0 MB on the host")
    assert "1.0 MB on the host" in state._repr_html_()


WRONG_PATHS = ["", "a\0b", "picture", ".png", "folder", "folder.png", "nowhere/a.png", "file/a.png"]
WRONG_PATHS += ["a.docx", "x" * 300 + ".png"]


@pytest.mark.parametrize("words", [["inspect", "native", "--plot"], ["demo", "--out"]])
def test_pictures_that_cannot_be_written_are_refused_at_once(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("native", tmp_path)
    for name in ("folder", "folder.png"):
        os.mkdir(name)
    (tmp_path / "file").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    for path in WRONG_PATHS:
        status, out, err = call(capsys, *words, path)
        assert (status in (1, 2), out, err.count("\n")) == (True, "", 1), path
        assert "--traceback" not in err and sorted(tmp_path.rglob("*")) == before, path


WRONG_DEMOS = {
    "continuous actions": (["--env", "Pendulum-v1"], "discrete actions"),
    "steps": (["--steps", "9" * 20], "less than or equal to"),
    "seeds": (["--seeds", "9" * 20], "less than or equal to"),
    "seed": (["--seed", "9" * 20], "less than or equal to"),
    "devices": (["--devices", "1000000"], "less than or equal to"),
}


@pytest.mark.parametrize(("options", "words"), WRONG_DEMOS.values(), ids=WRONG_DEMOS)
def test_demos_that_cannot_run_are_refused_at_once(options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, "demo", *options)
    assert (status in (1, 2), out, err.count("\n")) == (True, "", 1)
    assert words in err and "--traceback" not in err and not os.listdir(tmp_path)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused_by_every_command(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = make("native", tmp_path)
    calls = [[name, path] for name in ("inspect", "verify", "stats")]
    calls += [["convert", path, "x", "--to", "h5"], ["convert", source, path, "--to", "h5"]]
    calls += [["data", "copy", path, "x"], ["data", "copy", CARTPOLE, path]]
    calls += [["data", "list", "--root", path], ["data", "delete", "x", "-y", "--root", path]]
    for words in calls:
        status, out, err = call(capsys, *words)
        assert (status, out, err.count("\n")) == (2, "", 1), words
        assert "expected a path" in err
    assert os.listdir(tmp_path) == ["native"]


def test_a_copy_is_not_put_into_what_it_copies(tmp_path, capsys):
    path = make("recorded", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for dest in (path, path + "/copy", tmp_path):
        status, out, err = call(capsys, "data", "copy", path, dest)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert "apart from that of the source" in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("what", ["nothing", "file"])
def test_datasets_are_listed_in_folders_only(what, tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"")
    status, out, err = call(capsys, "data", "list", "--root", tmp_path / what)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert ("no such file" if what == "nothing" else "not a directory") in err


@pytest.mark.parametrize("to", ["d4rl", "h5", "arrow"])
def test_convert_of_plain_arrays_names_nothing_that_they_do_not_have(to, tmp_path, capsys):
    if to == "arrow":
        pytest.importorskip("pyarrow")
    rows = {"obs": np.zeros((5, 2), np.float32), "action": np.zeros(5), "reward": np.zeros(5)}
    np.savez(tmp_path / "a.npz", **rows, next_obs=rows["obs"], dones=np.arange(5) == 4)
    status, out, _ = call(capsys, "convert", tmp_path / "a.npz", tmp_path / "b", "--to", to)
    assert status == 0 and "It has no place" not in out
    dest = tmp_path / "c"
    status, out, _ = call(capsys, "convert", CARTPOLE, dest, "--to", to)
    assert "It has no place for the facts about episodes and the metadata." in " ".join(out.split())


def test_notes_of_minari_are_shown_once(tmp_path, capsys):
    shutil.copytree(CARTPOLE, tmp_path / "set")
    path = tmp_path / "set" / "data" / "metadata.json"
    more = {"notes": ["The pole was oiled."], "author": ["somebody"]}
    about = json.loads(path.read_text()) | more
    path.write_text(json.dumps(about))
    for option in ([], ["--json"]):
        _, out, _ = call(capsys, "inspect", tmp_path / "set", *option)
        assert out.count("The pole was oiled.") == 1 and "somebody" in out
