"""Saves that are killed or fail at any file operation leave the old state or the new one."""

import contextlib
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint
from tests import seams
from tests.checkpoint.test_hooks import negated, restored
from tests.small_blocks import small_blocks

pytestmark = [pytest.mark.slow, pytest.mark.faults]

BUFFER = jrb.ReplayBuffer(6, batch_size=2, sampler=jrb.Prioritized())
LIST = jrb.ReplayBuffer(6, batch_size=2, storage=jrb.ListStorage())


def arrays(seed):
    """Returns a state of a buffer of arrays, and a later one."""
    rows = lambda n, seed: {"observation": jnp.arange(4.0 * n).reshape(n, 4) + 100 * seed}
    state = BUFFER.extend(BUFFER.init({"observation": jnp.zeros(4)}), rows(5, seed))
    return state, BUFFER.extend(state, rows(3, seed + 10))


def words(seed):
    """Returns a state of a buffer of objects, and a later one."""
    row = lambda n: [{"text": f"{seed} {one}" * one, "x": np.arange(one)} for one in range(n)]
    state = LIST.extend(LIST.init(None), row(5))
    before = LIST.extend(LIST.init(None), row(5))  # a second state: states share objects
    return before, LIST.extend(state, row(3))


def told(buffer, state):
    """Returns the contents of a state or of several states, to be compared."""
    if isinstance(buffer, dict):
        return {name: told(part, state[name]) for name, part in buffer.items()}
    rest = jax.tree.leaves(state.replace(storage=None))
    return str([jrb.items(buffer, state), *map(np.asarray, rest)])


def cases():
    """Yields a name, a buffer, the states before and after, and options of saving and loading."""
    one, other = arrays(1)
    before, after = words(2)
    plain = (BUFFER, one, other)
    several = {"a": BUFFER, "rows": LIST}
    yield "rows", *plain, {}, lambda _: {}
    yield "encode", *plain, {"encode": negated}, lambda _: {"decode": restored}
    yield "list", LIST, before, after, {}, lambda _: {}
    first, second = {"a": one, "rows": before}, {"a": other, "rows": after}
    yield "several", several, first, second, {}, lambda _: {}
    apart = lambda state: {"items": jrb.items(BUFFER, state)}
    yield "apart", *plain, {"items": False}, apart


CASES = {name: rest for name, *rest in cases()}


def found(path, buffer, states, back):
    """Returns the index of the saved state; asserts that the folder verifies and is equal to it."""
    assert checkpoint.verify(path) == []
    for number, state in enumerate(states):
        try:
            _, there, extra = jrb.load(path, extra={"step": 0}, **back(state))
        except ValueError:
            continue  # these items belong to the other state, which must load
        if extra == {"step": number}:
            assert told(buffer, there) == told(buffer, state)
            return number
    raise AssertionError(path)


BACKGROUND = {"encode", "several"}


@pytest.fixture(params=["small", "blocks"])
def _size(request):
    """Saves small arrays as they are, and in blocks."""
    with small_blocks(48) if request.param == "blocks" else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("name", CASES)
def test_a_save_that_is_killed_at_any_moment_has_happened_or_not(name, tmp_path, monkeypatch):
    seams.use_one_thread(monkeypatch)
    buffer, old, new, out, back = CASES[name]
    path = tmp_path / "saved"
    jrb.save(path, buffer, old, extra={"step": 0}, **out)
    with seams.copied_at_each_operation(path, tmp_path) as copies:
        if name in BACKGROUND:
            checkpoint.save_async(path, buffer, new, extra={"step": 1}, **out).wait()
        else:
            jrb.save(path, buffer, new, extra={"step": 1}, **out)
    states = [found(one, buffer, (old, new), back) for one in copies]
    assert states == sorted(states)
    assert {0, 1} == set(states)
    assert found(path, buffer, (old, new), back) == 1
    for one in copies[:: max(1, len(copies) // 6)]:
        jrb.save(one, buffer, new, extra={"step": 1}, **out)
        assert found(one, buffer, (old, new), back) == 1


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("name", CASES)
def test_a_disk_that_fails_at_any_operation_leaves_the_old_or_the_new(name, tmp_path):
    buffer, old, new, out, back = CASES[name]
    number, over = 0, False
    while not over:
        path, left = tmp_path / str(number), [number]
        jrb.save(path, buffer, old, extra={"step": 0}, **out)

        def strike(*event, left=left):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(28, "No space left on device")

        with seams.hooked(strike), contextlib.suppress(OSError):
            jrb.save(path, buffer, new, extra={"step": 1}, **out)
        over = left[0] >= 0
        assert found(path, buffer, (old, new), back) in ((1,) if over else (0, 1))
        jrb.save(path, buffer, new, extra={"step": 1}, **out)
        assert found(path, buffer, (old, new), back) == 1
        assert len(checkpoint.generations(path)) == 1
        shutil.rmtree(path)
        number += {"several": 7, "list": 2}.get(name, 5)  # operations nearby do nearly the same
    assert number > 4
    assert not os.listdir(tmp_path)
