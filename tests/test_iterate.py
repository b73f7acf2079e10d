"""Epochs and prefetching: exactly the expected draws, neither more nor fewer."""

import contextlib
import gc
import importlib
import inspect
import itertools
import subprocess
import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import iterate
from tests import seams

KEY = jax.random.key(3)


def filled(count=11, **parts):
    buffer = jrb.ReplayBuffer(16, **{"batch_size": 4, **parts})
    items = {"x": jnp.arange(count), "next": {"done": jnp.arange(count) % 5 == 4}}
    example = {"x": jnp.int32(0), "next": {"done": jnp.bool_(False)}}
    return buffer, buffer.extend(buffer.init(example), items)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 20])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_gives_everything_once(batch_size, drop_last):
    buffer, state = filled(sampler=jrb.Prioritized())
    if drop_last and batch_size > 11:
        with pytest.raises(ValueError, match="enough for a batch of 20, got 11"):
            jrb.epochs(buffer, state, KEY, batch_size, drop_last=True)
        return
    batches = jrb.epochs(buffer, state, KEY, batch_size, n_epochs=3, drop_last=drop_last)
    drawn = [batch.data["x"][batch.mask].tolist() for batch in batches]
    assert len(drawn) == len(batches)
    each = len(batches) // 3
    orders = [list(itertools.chain(*drawn[k * each : (k + 1) * each])) for k in range(3)]
    for order in orders:
        assert len(order) == len(set(order)) == (11 // batch_size * batch_size if drop_last else 11)
    assert batch_size == 11 or orders[0] != orders[1] or batch_size == 20
    assert [batch.data["x"][batch.mask].tolist() for batch in batches] == drawn


def test_an_epoch_of_windows():
    buffer, state = filled(unit=jrb.Sequence(2))
    batches = list(jrb.epochs(buffer, state, KEY, 4))
    starts = [
        int(w[0]) for b in batches for w, real in zip(b.data["x"], b.mask, strict=True) if real[0]
    ]
    assert sorted(starts) == [0, 1, 2, 3, 5, 6, 7, 8]


def test_what_epochs_refuse():
    buffer, state = filled()
    with pytest.raises(ValueError, match="got 0 anchors"):
        jrb.epochs(buffer, buffer.empty(state), KEY)
    with pytest.raises(ValueError, match="n_epochs"):
        jrb.epochs(buffer, state, KEY, n_epochs=0)
    with pytest.raises(ValueError, match="batch_size"):
        jrb.epochs(jrb.ReplayBuffer(16), state, KEY)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("sampler", [jrb.Uniform(), jrb.WithoutReplacement(), jrb.Prioritized()])
def test_prefetched_batches_are_those_that_would_be_drawn(sampler, depth):
    buffer, state = filled(sampler=sampler)
    with jrb.prefetch(buffer, state, KEY, depth) as batches:
        for number, batch in enumerate(itertools.islice(batches, 7)):
            state, expected = buffer.draw(state, jax.random.fold_in(KEY, number))
            chex.assert_trees_all_equal(batch, expected)


def test_a_mix_is_prefetched_too():
    one, other = filled(), filled()
    mix = jrb.Mix((one[0], other[0]), (0.5, 0.5), batch_size=4)
    states = (one[1], other[1])
    with jrb.prefetch(mix, states, KEY) as batches:
        chex.assert_trees_all_equal(next(batches), mix.sample(states, jax.random.fold_in(KEY, 0)))


class Counting:
    """A callable that returns a state and counts its calls."""

    def __init__(self, state):
        self.state, self.count, self.asked = state, 0, threading.Condition()

    def __call__(self):
        with self.asked:
            self.count += 1
            self.asked.notify_all()
        return self.state

    def wait_for(self, count):
        with self.asked:
            assert self.asked.wait_for(lambda: self.count >= count, timeout=60)


@pytest.mark.parametrize("depth", [1, 3])
def test_just_so_many_are_drawn_ahead(depth):
    buffer, state = filled()
    source = Counting(state)
    with jrb.prefetch(buffer, source, KEY, depth) as batches:
        for taken in range(4):
            source.wait_for(depth + taken)
            assert source.count == depth + taken
            next(batches)
    assert source.count <= depth + 4


@pytest.mark.parametrize("depth", [1, 2])
def test_new_priorities_arrive_after_as_many_batches_as_are_drawn_ahead(depth):
    buffer, state = filled(sampler=jrb.Prioritized(alpha=1.0, eps=0.0))
    source = Counting(state)
    with jrb.prefetch(buffer, source, KEY, depth) as batches:
        source.wait_for(depth)
        only = jnp.zeros(11).at[7].set(1.0)
        while next(batches) is None:
            pass
        source.wait_for(depth + 1)
        source.state = buffer.update_priority(state, jnp.arange(11), only)
        late = [next(batches).data["x"].tolist() for _ in range(depth + 3)]
    assert late[-3:] == [[7] * 4] * 3


def test_errors_come_out_in_the_caller_once():
    buffer, state = filled()
    calls = iter([state, state])

    def fail():
        try:
            return next(calls)
        except StopIteration:
            raise KeyError("no more states") from None

    batches = jrb.prefetch(buffer, fail, KEY, 1)
    next(batches)
    next(batches)
    with pytest.raises(KeyError, match="no more states"):
        next(batches)
    assert list(batches) == []
    batches.close()


def test_an_empty_buffer_is_an_error_of_the_caller():
    buffer, state = filled()
    with (
        jrb.prefetch(buffer, buffer.empty(state), KEY) as batches,
        pytest.raises(ValueError, match="something to draw"),
    ):
        next(batches)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "jrb-prefetch"]


def test_the_thread_ends_with_the_loop():
    buffer, state = filled()
    for _ in jrb.prefetch(buffer, state, KEY):
        break
    gc.collect()
    for thread in threads():
        thread.join(60)
    assert threads() == []
    batches = jrb.prefetch(buffer, state, KEY)
    batches.close()
    assert threads() == []
    assert list(batches) == []


@pytest.mark.slow
def test_a_program_ends_in_the_middle_of_a_loop():
    script = """
import jax, jax.numpy as jnp, jrb
buffer = jrb.ReplayBuffer(16, batch_size=4)
state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(7)})
batches = jrb.prefetch(buffer, state, jax.random.key(0), 3)
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_batches_are_copied_to_a_device():
    buffer, state = filled()
    device = jax.devices()[1]
    with jrb.prefetch(buffer, state, KEY, device=device) as batches:
        assert next(batches).data["x"].devices() == {device}


STORAGES = {
    "device": jrb.DeviceStorage,
    "memmap": jrb.MemmapStorage,
    "spill": lambda: jrb.SpillStorage(None, 16),
    "compressed": lambda: jrb.CompressedStorage(min_bytes=1),
}


def prioritized(storage):
    """Returns a buffer, its compiled methods, and a state that holds 0 to 63."""
    parts = {"batch_size": 8, "sampler": jrb.Prioritized(), "storage": STORAGES[storage]()}
    buffer = jrb.ReplayBuffer(64, **parts)
    methods = jrb.jitted(buffer)
    return buffer, methods, methods.extend(buffer.init({"x": 0}), {"x": jnp.arange(64)})


@pytest.mark.parametrize("storage", STORAGES)
def test_a_state_that_was_donated_is_left_for_the_next_one(storage, monkeypatch):
    seams.write_small_states_in_place(monkeypatch)
    buffer, methods, old = prioritized(storage)
    new = methods.add(old, {"x": jnp.int32(64)})
    states = iter([old, old, old, new])
    with jrb.prefetch(buffer, lambda: next(states), KEY, 1) as batches:
        expected = buffer.sample(new, jax.random.fold_in(KEY, 0))
        np.testing.assert_array_equal(next(batches).data["x"], expected.data["x"])
    monkeypatch.setattr(iterate, "_PATIENCE", 0.0)
    with (
        jrb.prefetch(buffer, lambda: old, KEY) as batches,
        pytest.raises(ValueError, match=r"donated|newest|overwritten"),
    ):
        next(batches)


def test_a_state_that_nothing_follows_ends_the_wait(monkeypatch):
    buffer, methods, state = prioritized("device")
    methods.add(state, {"x": jnp.int32(64)})
    again = lambda: jax.tree.map(lambda leaf: leaf, state)  # another object each time
    monkeypatch.setattr(iterate, "_PATIENCE", 1e9)
    batches = jrb.prefetch(buffer, again, KEY)
    batches.close()  # at once
    assert not batches._thread.is_alive()
    monkeypatch.setattr(iterate, "_PATIENCE", 0.01)
    with (
        jrb.prefetch(buffer, again, KEY) as batches,
        pytest.raises(ValueError, match="donated"),
    ):
        next(batches)


@pytest.mark.parametrize("storage", STORAGES)
def test_batches_are_drawn_ahead_while_compiled_methods_write_in_place(storage, monkeypatch):
    seams.write_small_states_in_place(monkeypatch)
    buffer, methods, state = prioritized(storage)
    with jrb.prefetch(buffer, lambda: state, KEY) as batches:
        for number, batch in zip(range(40), batches, strict=False):
            state = methods.add(state, {"x": jnp.int32(64 + number)})
            state = methods.update_priority(state, batch, jnp.arange(8.0))
            assert np.asarray(batch.mask).all()
            assert np.asarray(batch.data["x"] < 65 + number).all()
    assert int(buffer.size(state)) == 64


def test_what_prefetch_refuses():
    buffer, state = filled()
    with pytest.raises(ValueError, match="depth"):
        jrb.prefetch(buffer, state, KEY, 0)
    with pytest.raises(TypeError, match="key"):
        jrb.prefetch(buffer, state)


@pytest.mark.slow
def test_a_program_ends_while_a_dropped_iterator_still_draws():
    script = """
import jax, jax.numpy as jnp, numpy as np, jrb
buffer = jrb.ReplayBuffer(50_000, batch_size=20_000)
items = {"x": np.ones((50_000, 50), np.float32)}
state = jrb.jitted(buffer).extend(buffer.init({"x": jnp.zeros(50)}), items)
for batch in jrb.prefetch(buffer, state, jax.random.key(0)):
    break
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_epochs_and_prefetch_are_given_by_mistake():
    buffer, state = filled()
    with pytest.raises(TypeError, match="epochs: expected a ReplayBuffer, got BufferState"):
        jrb.epochs(state, buffer, KEY)
    with pytest.raises(TypeError, match="epochs: expected a state of the buffer, got tuple"):
        jrb.epochs(buffer, (state,), KEY)
    with pytest.raises(TypeError, match="under vmap"):
        jrb.epochs(buffer, jax.tree.map(lambda leaf: leaf[None], state), KEY)
    with pytest.raises(TypeError, match="The order"):
        jrb.prefetch(state, buffer, KEY)
    with (
        jrb.prefetch(buffer, iter([state]).__next__, KEY) as batches,
        pytest.raises(RuntimeError, match="StopIteration"),
    ):
        list(batches)


def test_batches_of_any_iterable_are_taken_ahead_until_they_end():
    buffer, state = jrb.from_items({"x": jnp.arange(10)}, batch_size=3)
    epochs = jrb.epochs(buffer, state, KEY, n_epochs=2)
    plain = [batch.data["x"].tolist() for batch in epochs]
    with jrb.prefetch(epochs) as ahead:
        assert [batch.data["x"].tolist() for batch in ahead] == plain
    assert list(jrb.prefetch([1, 2, 3], depth=5)) == [1, 2, 3]
    assert list(jrb.prefetch([])) == []

    def broken():
        yield 1
        raise OSError("gone")

    batches = jrb.prefetch(broken())
    assert next(batches) == 1
    with pytest.raises(OSError, match="gone"):
        next(batches)
    with pytest.raises(TypeError, match="expected no state and no key with an iterable"):
        jrb.prefetch(epochs, state, KEY)


def test_so_many_batches_for_a_loop():
    buffer, state = jrb.from_items({"x": jnp.arange(10)}, batch_size=3)
    once = list(jrb.steps(buffer, state, KEY, n_epochs=1))
    assert sorted(x for batch in once for x in batch.data["x"][batch.mask].tolist()) == list(
        range(10)
    )
    assert len(list(jrb.steps(buffer, state, KEY, n_epochs=2, max_iter=5))) == 5
    draws = list(jrb.steps(buffer, state, KEY, max_iter=2, batch_size=4))
    want = buffer.sample(state, jax.random.fold_in(KEY, 1), 4)
    np.testing.assert_array_equal(draws[1].indices, want.indices)
    queue, its = jrb.from_items({"x": jnp.arange(10)}, batch_size=3, sampler=jrb.Queue())
    taken = [batch.data["x"].tolist() for batch in jrb.steps(queue, its, KEY, max_iter=2)]
    assert taken == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="max_iter: expected at least 1"):
        jrb.steps(buffer, state, KEY, max_iter=0)


def test_iterators_need_a_key_and_take_an_integer_for_one():
    buffer, state = jrb.from_items({"x": jnp.arange(12)}, batch_size=4)
    makers = {
        "steps": lambda *key: jrb.steps(buffer, state, *key, max_iter=2),
        "steps of epochs": lambda *key: jrb.steps(buffer, state, *key, n_epochs=1),
        "epochs": lambda *key: jrb.epochs(buffer, state, *key),
        "prefetch": lambda *key: itertools.islice(jrb.prefetch(buffer, state, *key), 2),
    }
    for name, make in makers.items():
        with pytest.raises(TypeError, match="key"):
            make()
        drawn = lambda key: [batch.indices.tolist() for batch in make(key)]  # noqa: B023
        assert drawn(11) == drawn(np.int64(11)) == drawn(jax.random.key(11)), name
        assert drawn(11) != drawn(12), name
        for wrong in (True, None, 0.5):
            with pytest.raises(TypeError, match="key: expected"):
                make(wrong)
        with pytest.raises(ValueError, match="a seed from 0"):
            make(-1)


def public_functions():
    """Yields all public functions and methods by their dotted names."""
    names = (
        "checkpoint",
        "compat.flashbax",
        "samplers",
        "datasets",
        "interop",
        "plot",
        "remote",
        "testing",
    )
    modules = [jrb, *(importlib.import_module(f"jrb.{name}") for name in names)]
    for module in modules:
        for name in getattr(module, "__all__", [it for it in dir(module) if it[0] != "_"]):
            entry = getattr(module, name)
            members = vars(entry) if inspect.isclass(entry) else {"": entry}
            for member, function in members.items():
                if callable(function) and not member.startswith("_"):
                    yield f"{module.__name__}.{name}.{member}", function


def test_no_function_that_draws_has_a_default_key():
    keyed = {}
    for name, function in public_functions():
        with contextlib.suppress(TypeError, ValueError):
            parameters = inspect.signature(function).parameters
            for key in {"key", "rng", "rng_key"} & set(parameters):
                keyed[name] = parameters[key]
    assert {"jrb.steps.", "jrb.epochs.", "jrb.plot.draws.", "jrb.ReplayBuffer.draw"} <= set(keyed)
    defaults = {name for name, each in keyed.items() if each.default is not each.empty}
    assert defaults == {"jrb.prefetch."}  # for iterables only: it raises for buffers


def test_iterators_inside_jit_say_so():
    buffer, state = jrb.from_items({"x": jnp.arange(12)}, batch_size=4)
    makers = {
        "steps": lambda its, key: list(jrb.steps(buffer, its, key, max_iter=2)),
        "epochs": lambda its, key: list(jrb.epochs(buffer, its, key)),
        "prefetch": lambda its, key: next(jrb.prefetch(buffer, its, key)),
    }
    for name, make in makers.items():
        message = rf"^{name}: expected a state with values, got a traced one.*outside jit"
        for inside in (
            lambda: jax.jit(lambda its: [make(its, KEY), 0][1])(state),  # noqa: B023
            lambda: jax.jit(lambda key: [make(state, key), 0][1])(KEY),  # noqa: B023
            lambda: jax.jit(lambda: [make(state, KEY), 0][1])(),  # noqa: B023
            lambda: jax.vmap(lambda key: [make(state, key), 0][1])(jax.random.split(KEY)),  # noqa: B023
        ):
            with pytest.raises(TypeError, match=message):
                inside()


def test_a_prefetch_that_is_dropped_takes_nothing_out_of_a_queue():
    buffer = jrb.ReplayBuffer(32, batch_size=3, sampler=jrb.Queue())
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(20)})
    with contextlib.suppress(ArithmeticError):
        for batch in jrb.prefetch(buffer, state, jax.random.key(0), depth=4):
            assert batch.data["x"].tolist() == [0, 1, 2]
            raise ArithmeticError("in the learner's loop")
    rest = buffer.draw(state, jax.random.key(0), 32)[1]
    assert rest.data["x"][rest.mask].tolist() == list(range(20))
