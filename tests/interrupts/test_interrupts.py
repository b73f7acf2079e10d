"""Interrupts of code that waits for threads: at every instruction, and at random moments."""

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import operator
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint, iterate, loops
from jrb.checkpoint import api
from tests import seams
from tests.interrupts.scenarios import usable

ROOT = pathlib.Path(seams.__file__).parents[1]
OURS = [module.__file__ for module in (api, iterate, seams.threads)]
THEIRS = [threading.__file__, os.path.join(os.path.dirname(threading.__file__), "queue.py")]
MEMORY = "/dev/shm"
AT_MOST = 60  # seconds before a wait fails


class AtInstruction:
    """A trace function that interrupts the k-th instruction in some files.

    The exception is raised where Python next checks for signals: after a call, at a backward jump,
    or at the start of a function. An exception raised by the trace function itself could also come
    between the acquisition of a lock and the block that releases it.
    """

    # Called through a property, so that `__call__` does not check for signals afterwards.
    _set = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))
    strike = property(_set)

    def __init__(self, number, paths=(*OURS, *THEIRS)):
        self.number, self.paths, self.count = number, frozenset(paths), 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in self.paths:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.number:
                sys.settrace(None)
                _ = self.strike
        return self


def at_each_instruction(work, step=1, paths=(*OURS, *THEIRS)):
    """Calls `work` repeatedly and interrupts it at a later instruction each time.

    Yields:
        True if the call was interrupted.
    """
    before = sys.gettrace()
    for number in itertools.count(1, step):
        trace, is_interrupted = AtInstruction(number, paths), False
        try:
            try:
                sys.settrace(trace)
                work()
            finally:
                sys.settrace(before)  # a call, after which a pending interrupt is raised
        except KeyboardInterrupt:
            is_interrupted = True
        yield is_interrupted
        if trace.count < number:
            assert number > 10
            return


def within_time(work):
    """Calls `work` in another thread; fails if it blocks, as on a lock that was not released."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(AT_MOST)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _interrupts_are_raised():
    """A shell lets the programs that it starts in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    """Silences interrupts in `weakref` callbacks, which Python prints and ignores."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.fixture
def path(tmp_path):
    """Returns a path in memory if the system has one: these tests do not need a disk."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path / "saved"
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield pathlib.Path(folder) / "saved"


@pytest.fixture
def filled():
    buffer = jrb.ReplayBuffer(4, batch_size=2)
    rows = {"x": np.arange(3, dtype=np.float32)}
    return buffer, buffer.extend(buffer.init({"x": jnp.zeros(())}), rows)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_of_next_loses_no_batch(depth):
    taken, batches = [], None

    def take():  # only C calls: every batch that `next` returns is in the list
        taken.extend(map(next, itertools.repeat(batches, 3)))

    def check():
        take()
        batches.close()

    run = at_each_instruction(take)
    for _ in itertools.chain([None], run):
        if batches is not None:
            within_time(check)
            assert taken == list(range(len(taken)))
            assert not batches._thread.is_alive()
            taken.clear()
        batches = jrb.prefetch(itertools.count(), depth=depth)
    batches.close()


def test_an_interrupt_where_prefetch_begins_or_closes_leaves_no_thread():
    def loop():
        with jrb.prefetch(itertools.count(), depth=1) as batches:
            next(batches)

    for _ in at_each_instruction(loop):
        within_time(ended)


def ended():
    """Waits until no prefetching thread runs."""
    while any(one.name == "jrb-prefetch" for one in threading.enumerate()):
        time.sleep(0)


def test_an_interrupt_of_shared_work_leaves_nothing_going_on():
    done, before = [], threading.active_count()
    work = lambda: seams.threads.run_all([functools.partial(done.append, n) for n in range(10)])
    for is_interrupted in at_each_instruction(work):
        assert threading.active_count() == before
        assert is_interrupted or sorted(done) == list(range(10))
        assert len(done) == len(set(done))
        done.clear()


def test_an_interrupt_of_a_write_that_waits_for_draws_holds_nobody_up():
    one, inside, over = seams.threads.Gate(), threading.Semaphore(0), threading.Event()

    def draw():
        while not over.is_set():
            with one.enter():
                inside.release()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    for _ in at_each_instruction(one.wait):
        within_time(one.wait)
        for _ in range(3):
            assert inside.acquire(timeout=AT_MOST)
    over.set()
    thread.join(AT_MOST)
    assert not thread.is_alive()
    assert not one.inside


def test_an_interrupt_of_a_save_in_the_background_loses_nothing(filled, path):
    buffer, state = filled
    begun = []

    def work():
        begun.append(checkpoint.save_async(path, buffer, state))
        begun[0].wait()

    count = 0
    for _ in at_each_instruction(work, 11):
        if begun:
            count += 1
            begun[0].wait()
            assert begun[0].done()
            assert checkpoint.generations(path)[-1] >= count
        count = jrb.save(path, buffer, state)
        begun.clear()
    assert int(buffer.size(jrb.load(path)[1])) == 3


def test_a_failure_in_the_background_is_raised_once_whatever_is_interrupted(filled, path):
    buffer, state = filled
    jrb.save(path, buffer, state)
    raised = []

    def fail():
        with seams.hooked(refused):
            save = checkpoint.save_async(path, buffer, state)
            while not save.done():
                pass

    def settle():
        try:
            api.wait_for_save(str(path))
        except OSError as error:
            raised.append(error)

    fail()
    for _ in at_each_instruction(settle, 1, [api.__file__]):
        settle()
        assert len(raised) == 1
        raised.clear()
        fail()
    settle()


def refused(operation, *_):
    if operation == "replace" and threading.current_thread().name == "jrb-save":
        raise OSError(28, "No space left on device")


def test_a_save_goes_on_whose_wait_was_interrupted(filled, path):
    buffer, state = filled
    go = threading.Event()

    def hold(operation, *_):
        if operation == "replace" and threading.current_thread().name == "jrb-save":
            go.wait(AT_MOST)

    jrb.save(path, buffer, buffer.empty(state))
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with seams.hooked(hold):
        save = checkpoint.save_async(path, buffer, state)
        try:
            for wait in (save.wait, lambda: jrb.load(path)):
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                with pytest.raises(KeyboardInterrupt):
                    wait()
                assert not save.done()
        finally:
            signal.signal(signal.SIGALRM, handler)
            go.set()
        assert jrb.save(path, buffer, state) == 3  # waits for the save before it
    assert save.done()


PROGRAM = """
import signal, sys, threading, time, jax.numpy as jnp, jrb
from tests import seams

def hook(operation, *rest):
    if operation == "replace" and threading.current_thread().name == "jrb-save":
        time.sleep(0.3)
        if sys.argv[2] == "refused":
            raise OSError(28, "No space left on device")

seams.set_hook(hook)
buffer = jrb.ReplayBuffer(4)
save = jrb.checkpoint.save_async(sys.argv[1], buffer, buffer.init({"x": jnp.zeros(3)}))
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    if sys.argv[2] != "at the end":
        save.wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("outcome", ["saved", "at the end", "refused"])
def test_a_program_that_ends_saves_or_says_that_it_has_not(outcome, path):
    command = [sys.executable, "-c", PROGRAM, path, outcome]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    interrupted = "KeyboardInterrupt" in done.stderr or "interrupted" in done.stdout
    assert (done.returncode, interrupted) == (0, True), done.stderr
    assert ("No space left" in done.stderr) == (outcome == "refused")
    assert (outcome == "refused") == ("generation-000000000001" not in os.listdir(path))


@pytest.fixture
def looped():
    """Returns compiled methods, a state, and an item."""
    buffer = jrb.ReplayBuffer(4, batch_size=2, sampler=jrb.WithoutReplacement())
    methods, item = jrb.jitted(buffer), {"x": np.float32(7)}
    rows = {"x": np.arange(3, dtype=np.float32)}
    return methods, methods.add(methods.extend(methods.init(item), rows), item), item


@pytest.mark.parametrize("unpacks", [False, True])
@pytest.mark.parametrize("name", ["add", "draw"])
def test_an_interrupt_of_a_method_that_donates_leaves_the_state_before_or_after_it(
    looped, name, unpacks
):
    methods, state, item = looped
    arguments = [item] if name == "add" else [5]

    def work():
        nonlocal state
        method = getattr(methods, name)
        # In Python 3.11, only the second call is made without C.
        result = method(*[state, *arguments]) if unpacks else method(state, arguments[0])
        state = result if name == "add" else result[0]

    work()
    recovered = 0
    for is_interrupted in at_each_instruction(work, paths=[loops.__file__]):
        if not usable(state):
            assert is_interrupted
            state, recovered = methods.recover(), recovered + 1
        assert usable(state)
    assert recovered > 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class OwnInterrupt(BaseException):
    """Raised by the handler of a test."""


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, "noting", "raising"])
def test_the_handler_of_an_interrupt_is_called_after_the_call_and_stays(looped, handler):
    methods, state, _ = looped
    calls, passed = [], []

    def note(number, frame):
        calls.append((number, frame is not None, usable(state)))
        if handler == "raising":
            raise OwnInterrupt

    def mapped(items):  # called twice while the method is traced, before anything is donated
        if handler != signal.SIG_DFL and not passed:
            passed.append(1)
            signal.raise_signal(signal.SIGINT)
        assert calls == []
        return {"x": items["x"] + 1}

    own = handler if isinstance(handler, signal.Handlers) else note
    before = signal.signal(signal.SIGINT, own)
    after, expected = None, pytest.raises(OwnInterrupt) if handler == "raising" else None
    try:
        with expected or contextlib.nullcontext() as raised:
            after = methods.map(state, mapped)
        assert signal.getsignal(signal.SIGINT) == own
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [(signal.SIGINT, True, False)] * (own is note)
    assert (after is None) == (handler == "raising")
    assert raised is None or "recover()" in raised.value.__notes__[0]
    newest = methods.recover()  # also if no handler can be exchanged
    assert after is None or newest is after
    assert sorted(methods.buffer.take(newest, jnp.arange(4))["x"].tolist()) == [1, 2, 3, 8]


def test_a_second_interrupt_does_not_wait_while_nothing_is_donated(looped):
    methods, state, _ = looped
    passed = []

    def mapped(items):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            passed.append(1)
        return items

    with pytest.raises(KeyboardInterrupt):
        methods.map(state, mapped)
    assert len(passed) == 1
    assert usable(state)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_call_that_fails_after_an_interrupt_raises_both(looped):
    methods, state, _ = looped

    def broken(items):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("broken")

    with pytest.raises(KeyboardInterrupt) as raised:
        methods.map(state, broken)
    assert "broken" in str(raised.value.__context__)
    assert usable(state)
    assert usable(methods.recover())  # the result of the call before
    with pytest.raises(TypeError, match="expected"):
        methods.add(state, {"x": "text"})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_state_is_held_without_an_interrupt(looped):
    methods, state, item = looped
    assert methods.recover() is state
    donated, state = state, methods.add(state, item)
    leaf = weakref.ref(state.storage["x"])
    del state
    assert leaf() is None
    with pytest.raises(ValueError, match="recover: expected a state"):
        methods.recover()
    assert not usable(donated)
    with pytest.raises(ValueError, match="recover: expected a state"):
        jrb.jitted(jrb.ReplayBuffer(3)).recover()


def test_a_held_state_is_dropped_by_the_next_call(looped):
    methods, state, item = looped
    passed = []

    def interrupted(items):  # called twice
        if not passed:
            passed.append(1)
            signal.raise_signal(signal.SIGINT)
        return items

    with contextlib.suppress(KeyboardInterrupt):
        methods.map(state, interrupted)
    leaf = weakref.ref(methods.recover().storage["x"])
    gc.collect()
    assert leaf() is not None
    state = methods.add(methods.buffer.init({"x": jnp.zeros(())}), item)
    gc.collect()
    assert leaf() is None
    assert methods.recover() is state


def test_other_threads_use_the_methods_as_before(looped):
    methods, state, item = looped
    sizes = []

    def add():
        after = methods.add(state, item)
        sizes.append(int(methods.size(after)))

    within_time(add)
    assert sizes == [4]


def test_an_error_of_a_donated_state_says_how_to_get_the_newest_one(looped):
    methods, state, item = looped
    methods.add(state, item)
    for use in (lambda: methods.sample(state, 1), lambda: methods.buffer.take(state, [0])):
        with pytest.raises(jrb.DonatedError, match=r"recover\(\).*jax.jit of your own.*lost"):
            use()


SCENARIOS = ["save", "save_async", "prefetch", "prefetch_draws", "record", "copy", "loop"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "names"),
    [
        (10, SCENARIOS),
        (1000, ["loop"]),
        *(pytest.param(400, [name], marks=pytest.mark.long) for name in SCENARIOS),
    ],
)
def test_interrupts_at_random_moments_lose_nothing(count, names, tmp_path):
    program = "tests.interrupts.scenarios"
    command = [sys.executable, "-m", program, tmp_path, str(count), "0", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert list(found) == names
    for name, one in found.items():
        assert one["errors"] == [], name
        assert one["threads"] == [], name
        assert one["count"] >= count


@pytest.mark.parametrize("mixed", [False, True], ids=["buffer", "mix"])
def test_the_states_of_equal_buffers_are_not_mistaken_for_each_other(mixed):
    part, item = jrb.ReplayBuffer(4, batch_size=2, sampler=jrb.Prioritized()), {"x": jnp.ones(())}
    mix, filled = jrb.Mix((part,) * 2, (0.5, 0.5), batch_size=2), part.add(part.init(item), item)

    def changed(methods):
        if not mixed:
            return methods.add(jax.tree.map(jnp.copy, filled), item)
        return methods.draw(jax.tree.map(jnp.copy, (filled, filled)), 0)[0]

    ours, theirs = (jrb.jitted(mix if mixed else part) for _ in range(2))
    states = [changed(methods) for methods in (ours, theirs)]
    for methods, state in zip((ours, theirs), states, strict=True):
        same = map(operator.is_, *map(jax.tree.leaves, (methods.recover(), state)))
        assert all(same)
