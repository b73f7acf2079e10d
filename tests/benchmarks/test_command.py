"""The command `jrb bench`, also known as `python -m benchmarks`."""

import json
import sys

import pytest

from tests.cli.paths import call


@pytest.mark.slow
def test_a_group_is_measured_and_written(tmp_path, capsys):
    out, whole = tmp_path / "out", tmp_path / "all.json"
    names = ["--peers", "NumPy,limit", "--only", "uniform", "--rounds", "1"]
    status, text, err = call(
        capsys, "bench", "memory", "--quick", *names, "--plot", "--out", out, "--json", whole
    )
    assert (status, err) == (0, "")
    assert f"Results are in {out}" in " ".join(text.split())
    assert sorted(path.name for path in out.iterdir()) == ["memory.json", "memory.png", "report.md"]
    found = json.loads(whole.read_text())
    assert [row["peer"] for row in found["results"][0]["rows"]] == ["jrb", "NumPy", "limit"]
    assert (found["missing"], found["results"][0]["quick"]) == ({}, True)
    assert "| uniform |" in (out / "report.md").read_text()


@pytest.mark.slow
def test_a_peer_that_is_missing_is_named(tmp_path, capsys, monkeypatch):
    benchmarks = loaded(capsys)
    peer = next(each for each in benchmarks.peers.ALL if each.name == "cpprb")
    monkeypatch.setattr(peer, "packages", {"no_such_module": "no-such-package"}, raising=False)
    arguments = ["memory", "--peers", "cpprb", "--only", "uniform", "--out", tmp_path]
    status, text, _ = call(capsys, "bench", *arguments)
    assert status == 0
    assert "cpprb is not installed: pip install no-such-package" in text
    assert "no-such-package" in (tmp_path / "report.md").read_text()


def loaded(capsys):
    """Returns the module `command` of the copy of the benchmarks that `jrb` loads."""
    call(capsys, "bench", "--list")
    return sys.modules["jrb._benchmarks.command"]


def test_groups_and_peers_are_listed(capsys):
    status, text, _ = call(capsys, "bench", "--list")
    assert status == 0
    for name in ("cycle", "remote", "flashbax", "Dopamine"):
        assert f"\n{name}" in f"\n{text}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cycles"], "expected groups of cycle"),
        (["memory", "--peers", "pytorch"], "--peers: expected some of jrb"),
        (["memory", "--only", "nothing"], "--only: expected a part"),
        (["memory", "--folder", "/no/such/folder"], "--folder: expected a folder"),
        (["memory", "--json", "/no/such/folder/a.json"], "--json: expected a file in a folder"),
        (["memory", "--out", __file__], "--out: expected a folder"),
        (["memory", "--rounds", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_calls_are_told_in_a_line(arguments, said, capsys):
    status, out, err = call(capsys, "bench", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    status, out, err = call(capsys, "bench", "memory")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "pip install 'jrb[bench]'" in err
