"""Interrupts at any line of a write or a save: nothing hangs, no lock stays, and work continues."""

import gc
import inspect
import os
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint
from tests._store import injection
from tests.small_blocks import small_blocks

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ROOT = os.path.dirname(jrb.__file__)
STEP = 993  # lines; storages start a third of it apart, so that interrupts cover more lines
STORAGES = {
    "device": lambda path: jrb.DeviceStorage(),
    "memmap": lambda path: jrb.MemmapStorage(path),
    "spill": lambda path: jrb.SpillStorage(path, 4),
}


def numbered(first, count):
    return {"x": np.arange(first, first + count, dtype=np.float32)}


def attempted(trace, work):
    """Returns the result of some work, which is repeated if it was interrupted."""
    before = sys.gettrace()
    try:
        sys.settrace(trace)
        return work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return work()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("storage", "first"), list(zip(STORAGES, range(1, STEP, 331), strict=True))
)
def test_an_interrupt_at_any_line_of_extend_and_save(storage, first, tmp_path):
    number, over = first, False
    while not over:
        path = tmp_path / str(number)
        buffer = jrb.ReplayBuffer(
            8, batch_size=4, storage=STORAGES[storage](path), sampler=jrb.Prioritized()
        )
        with small_blocks(16):  # of four rows
            state = buffer.extend(buffer.init({"x": jnp.zeros(())}), numbered(0, 8))
            jrb.save(path, buffer, state)
            trace = injection.Interrupt(ROOT, number)
            state = attempted(trace, lambda: buffer.extend(state, numbered(8, 3)))  # noqa: B023
            attempted(trace, lambda: jrb.save(path, buffer, state))  # noqa: B023
            background = lambda: checkpoint.save_async(path, buffer, state).wait()  # noqa: B023
            attempted(trace, background)
        over = trace.lines < number
        again, back = jrb.load(path)
        held = sorted(np.asarray(again.take(back, jnp.arange(8))["x"]).tolist())
        assert held == list(range(3, 11)), number
        assert checkpoint.verify(path) == []
        del state, back
        gc.collect()
        shutil.rmtree(path)
        number += STEP
    assert number > 2000


def test_an_interrupt_where_a_save_in_the_background_begins_or_ends_hangs_nothing(tmp_path):
    buffer = jrb.ReplayBuffer(4, batch_size=2)
    state, number, over = buffer.extend(buffer.init({"x": jnp.zeros(())}), numbered(0, 3)), 0, False
    while not over:
        number += 1
        path, trace = (
            tmp_path / str(number),
            injection.Interrupt(inspect.getfile(checkpoint.Save), number),
        )
        for _ in range(2):
            attempted(trace, lambda: checkpoint.save_async(path, buffer, state).wait())  # noqa: B023
        over = trace.lines < number
        assert int(buffer.size(jrb.load(path)[1])) == 3
    assert number > 10
