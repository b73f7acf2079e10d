"""Writes wait for draws that are under way."""

import threading

import pytest

from jrb._store import threads
from jrb._store.threads import Gate

AT_MOST = 60  # seconds, where what is waited for never comes


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE", 2 * AT_MOST)


class Watched:
    """A lock that tells when somebody waits for it."""

    def __init__(self, lock):
        self.lock, self.is_waited_for = lock, threading.Event()
        self.release = lock.release

    def acquire(self, **options):
        self.is_waited_for.set()
        return self.lock.acquire(**options)


def waiting(one):
    """A thread that waits at the gate until this one has left."""
    ((number, lock),) = one.inside.items()
    one.inside[number] = watched = Watched(lock)
    thread = threading.Thread(target=one.wait, daemon=True)
    thread.start()
    assert watched.is_waited_for.wait(AT_MOST)
    return thread


@pytest.mark.usefixtures("patient")
def test_a_write_waits_until_a_draw_of_another_thread_is_over():
    one = Gate()
    with one.entered():
        thread = waiting(one)
        assert thread.is_alive()
    thread.join(AT_MOST)
    assert not thread.is_alive()
    assert not one.inside


@pytest.mark.usefixtures("patient")
def test_a_draw_within_a_draw_holds_a_write_up_as_long_as_the_outer_one():
    one = Gate()
    with one.entered():
        thread = waiting(one)
        with one.entered():
            pass
        assert thread.is_alive()
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
    monkeypatch.setattr(threads, "PATIENCE", 0.01)
    one.inside[-1] = threads.taken_lock()  # of a thread that an interrupt has thrown out
    one.wait()
    assert not one.inside
    monkeypatch.setattr(threads, "PATIENCE", AT_MOST)
    one.wait()
