"""Writes wait for draws that are under way."""

import threading

import pytest

from jrb._store import gate
from jrb._store.gate import Gate

AT_MOST = 60  # seconds, where what is waited for never comes


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(gate, "PATIENCE", 2 * AT_MOST)


class Watched(threading.Condition):
    """A condition that tells when somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait_for(self, predicate, timeout=None):
        self.is_waited_for.set()
        return super().wait_for(predicate, timeout)


def waiting(one):
    """A thread that waits at the gate."""
    one.changed = Watched()
    thread = threading.Thread(target=one.wait, daemon=True)
    thread.start()
    assert one.changed.is_waited_for.wait(AT_MOST)
    with one.changed:  # which it gives free as soon as it does
        return thread


@pytest.mark.usefixtures("patient")
def test_a_write_waits_until_a_draw_of_another_thread_is_over():
    one = Gate()
    with one.entered():
        thread = waiting(one)
        assert thread.is_alive()
    thread.join(AT_MOST)
    assert not thread.is_alive()
    assert not one.waiting


@pytest.mark.usefixtures("patient")
def test_a_draw_within_a_draw_holds_a_write_up_no_longer_than_the_outer_one():
    one = Gate()
    with one.entered():
        thread = waiting(one)
        with one.entered():
            pass
    thread.join(AT_MOST)
    assert not thread.is_alive()


@pytest.mark.usefixtures("patient")
def test_nobody_waits_for_oneself():
    one = Gate()
    with one.entered():
        one.wait()
    assert not one.inside


def test_a_draw_that_never_ends_is_not_waited_for_twice(monkeypatch):
    one = Gate()
    monkeypatch.setattr(gate, "PATIENCE", 0.01)
    one.inside[-1] = object()  # a thread that an interrupt has thrown out
    one.wait()
    assert not one.inside
    monkeypatch.setattr(gate, "PATIENCE", AT_MOST)
    one.wait()
