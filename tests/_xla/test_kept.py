"""Tests that compiled programs go with their description, and stay while it is used."""

import gc
import itertools
import os
import subprocess
import sys
import weakref

import jax
import numpy as np
import pytest

import jrb

ITEM = {
    "observation": np.zeros(3, np.float32),
    "next": {"reward": np.float32(1), "done": False},
}
SAMPLERS = (jrb.Uniform(), jrb.Prioritized(), jrb.WithoutReplacement(), jrb.Lifo())
UNITS = (jrb.Transition(), jrb.NStep(2, discount=0.9))
KINDS = tuple(itertools.product(SAMPLERS, UNITS, (False, True)))  # the last: by `jrb.jitted`


def run(buffer, jitted):
    """Adds, samples and updates; returns the methods that did."""
    methods = jrb.jitted(buffer) if jitted else buffer
    state = methods.init(ITEM)
    for _ in range(4):
        state = methods.add(state, ITEM)
    sample = methods.sample(state, jax.random.key(0))
    if buffer.sampler.prioritized:
        methods.update_priority(state, sample, np.ones(4, np.float32))
    return methods


def described(capacity):
    unit = jrb.NStep(2, discount=0.9)
    return jrb.ReplayBuffer(capacity, batch_size=4, sampler=jrb.Prioritized(), unit=unit)


def num_programs():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.slow
def test_a_sweep_keeps_few_programs(jitted):
    begin = num_programs()
    for capacity in range(20, 34):
        run(described(capacity), jitted)
    before = num_programs()
    for capacity in range(34, 39):
        run(described(capacity), jitted)
    assert num_programs() <= before <= begin + 70


def resident():
    """Returns the resident memory of this process in MB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def sweep(count, begin):
    """Returns the number of live programs, and the growth of memory per description in MB.

    Args:
        count: the number of different descriptions.
        begin: the number of descriptions before the growth is measured.
    """
    before = 0.0
    for number in range(count):
        sampler, unit, jitted = KINDS[number % len(KINDS)]
        buffer = jrb.ReplayBuffer(20 + number, batch_size=4, sampler=sampler, unit=unit)
        run(buffer, jitted)
        if number + 1 == begin:
            before = resident()
    programs = num_programs()
    return programs, (resident() - before) / (count - begin)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
def test_a_long_sweep_keeps_its_memory():
    """In a process of its own, whose memory no other test has extended."""
    program = "from tests._xla.test_kept import sweep; print(*sweep(150, 30))"
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    programs, growth = map(float, done.stdout.split())
    # Both bounds are twice the largest figure measured: 47 programs, and 0.25 MB per description
    # with the optimizations of users (0.15 MB with the flags of tests), mostly JAX's caches of
    # traces. If all programs were kept, they would be 264 after 80 descriptions, at 9 MB for each.
    assert programs <= 94
    assert growth <= 0.5


def test_programs_go_with_other_descriptions():
    """Also those of shards and mixes, and of storages on the host."""
    kinds = [
        lambda n: jrb.Sharded(jrb.ReplayBuffer(n, num_envs=2, batch_size=4), shards=2),
        lambda n: jrb.ReplayBuffer(n, batch_size=4, storage=jrb.MemmapStorage(None)),
    ]
    gone = []
    for capacity in range(40, 100, 2):
        buffer = kinds[capacity // 2 % 2](capacity)
        lead = () if isinstance(buffer, jrb.ReplayBuffer) else (2,)
        item = jax.tree.map(
            lambda leaf, lead=lead: np.broadcast_to(leaf, lead + np.shape(leaf)), ITEM
        )
        if capacity < 44:  # which compiles; the others only have to be remembered
            state = buffer.add(buffer.init(ITEM), item)
            buffer.sample(state, jax.random.key(0))
            del state
        gone.append(weakref.ref(jrb.jitted(buffer).sample))
    del buffer
    gc.collect()
    assert sum(each() is not None for each in gone) <= 12


@pytest.mark.parametrize("held", [True, False], ids=["held", "made anew"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.slow
def test_ten_descriptions_in_turn_are_compiled_once(held, jitted, compilations):
    sizes = range(61, 71)
    buffers = list(map(described, sizes))
    for buffer in buffers:
        run(buffer, jitted)
    if not held:
        del buffers, buffer
    with compilations() as count:
        for _ in range(2):
            for capacity in sizes:
                run(buffers[capacity - 61] if held else described(capacity), jitted)
        assert count() == 0


def test_methods_outlive_their_description(compilations):
    methods = run(described(80), jitted=True)
    for capacity in range(200, 230):
        jrb.jitted(described(capacity))
    state = methods.init(ITEM)
    with compilations() as count:
        for _ in range(3):
            state = methods.add(state, ITEM)
        assert count() == 0


def test_descriptions_that_live_keep_all_programs():
    buffers = [described(capacity) for capacity in range(300, 400)]
    methods = [jrb.jitted(buffer) for buffer in buffers]
    for buffer, kept in zip(buffers, methods, strict=True):
        assert jrb.jitted(buffer).sample is kept.sample
    assert jrb.jitted(described(310)).sample is methods[10].sample
