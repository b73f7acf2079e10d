"""The progress bar in the terminal."""

import builtins
import sys

import pytest

from jrb.datasets.output import track_progress


def test_nothing_is_written_where_nobody_looks(capsys):
    with track_progress(3, "reading") as advance:
        advance(3)
    with track_progress(3, "reading", show=False) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_stderr(capsys):
    pytest.importorskip("rich")
    with track_progress(3, "reading", show=True) as advance:
        advance(1)
        advance(2)
    out, err = capsys.readouterr()
    assert not out and "reading" in err and "3/3" in err


def test_a_terminal_without_rich(monkeypatch, capsys):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.split(".")[0] == "rich":
            raise ModuleNotFoundError(name, name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("importlib.import_module", lambda name, package=None: missing(name))
    with track_progress(3, "reading") as advance:
        advance(1)
    assert not capsys.readouterr().err
    with (
        pytest.raises(ModuleNotFoundError, match=r"jrb\[datasets\]"),
        track_progress(3, "reading", True),
    ):
        pass


def test_what_is_no_flag_is_refused():
    with (
        pytest.raises(TypeError, match="progress: expected True or False"),
        track_progress(3, "x", 1),
    ):
        pass
