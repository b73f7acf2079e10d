"""Every part keeps the contracts, and so does a custom sampler of twenty lines."""

import re

import jax
import jax.numpy as jnp
import pytest

import jrb
from jrb import testing
from jrb.types import Sampler, component
from tests.samplers import weights

pytestmark = pytest.mark.slow

SAMPLERS = [
    jrb.Uniform(),
    jrb.Uniform(replacement=False),
    jrb.WithoutReplacement(),
    jrb.WithoutReplacement(drop_last=True),
    jrb.Queue(),
    jrb.Lifo(),
    jrb.Prioritized(count_draws=True),
    jrb.Prioritized(),
    jrb.Prioritized(normalize=None, new_priority=2.0, stratified=False),
    jrb.Prioritized(normalize="buffer"),
    jrb.Weighted(weights.every, leaves=(("next", "reward"),), beta=1.0),
    jrb.Grouped("key", 16, 2),
    jrb.Uniform(max_draws=2),
    jrb.Prioritized(max_draws=1, normalize="buffer"),
    jrb.Weighted(weights.every, leaves=(("next", "reward"),), max_draws=3),
    jrb.Newest(0.5, max_draws=2),
]
EXAMPLE = {
    "x": jnp.zeros(16),
    "key": jnp.int8(0),
    "flag": jnp.bool_(False),
    "next": {"reward": jnp.float32(0)},
}


@component
class Recent(Sampler):
    """Draws among the newest `count` anchors only."""

    count: int = 8

    def draw(self, ring, state, anchors, key, batch_size, beta=None):
        some = jnp.minimum(anchors.count, self.count)
        back = jax.random.randint(key, (batch_size,), 0, jnp.maximum(some, 1))
        mask = jnp.broadcast_to(anchors.count > 0, (batch_size,))
        drawn = anchors.uniform_draw(jnp.maximum(anchors.count - 1 - back, 0), mask, key)
        share = 1 / jnp.maximum(some, 1).astype(jnp.float32)
        return state, drawn.replace(probabilities=jnp.where(mask, share, 0))


def name_of(part):
    """Returns the text of a part, without addresses, which differ between processes."""
    return re.sub(r" at 0x\w+", "", repr(part))


CASES = [(sampler, 4) for sampler in SAMPLERS]
CASES += [(jrb.Uniform(), None), (jrb.Prioritized(), None)]


def conform_but_for_copies(make, example):
    """Runs part of `testing.conform`; the rest runs below and in tests/in_place."""
    testing.check_description(make)
    for check in (testing.check_memory, testing.check_compiled, testing.check_batched):
        check(make(64), example)
    testing.check_empty(make(64), example)
    testing.check_chunks(make, example)
    testing.check_saved(make, example)


@pytest.mark.parametrize(("sampler", "num_envs"), CASES, ids=name_of)
def test_samplers_keep_the_contracts(sampler, num_envs):
    make = lambda n: jrb.ReplayBuffer(n, num_envs=num_envs, batch_size=8, sampler=sampler)
    check = testing.conform if num_envs is None else conform_but_for_copies
    check(make, EXAMPLE)


EPISODIC = {
    "observation": jnp.zeros(16),
    "key": jnp.int8(0),
    "next": {
        "observation": jnp.zeros(16),
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}
PARTS = [
    {"unit": jrb.NStep(3, 0.9), "sampler": jrb.Prioritized()},
    {"unit": jrb.Sequence(4, burn_in=2, partial="pad"), "sampler": jrb.WithoutReplacement()},
    {"unit": jrb.Sequence(3, sample_by="episodes", partial="pad")},
    {"unit": jrb.Sequence(3, stride=2, partial="pad"), "sampler": jrb.Prioritized()},
    {"unit": jrb.Sequence(3, sample_by="whole_episodes"), "sampler": jrb.Prioritized()},
    {"unit": jrb.Packed(4, 3), "sampler": jrb.Prioritized(count_draws=True)},
    {"unit": jrb.Packed(4, 2), "sampler": jrb.WithoutReplacement()},
    {"unit": jrb.FrameStack(3), "sampler": jrb.Queue()},
    {"storage": jrb.DeviceStorage(share_next_observations=True), "unit": jrb.NStep(2, 0.9)},
    {"writer": jrb.MaxValue(("next", "reward"))},
    {"writer": jrb.Reservoir(0)},
    {
        "writer": jrb.PerEnvironment(),
        "unit": jrb.NStep(2, 0.9, strict=True),
        "sampler": jrb.Prioritized(),
    },
]


@pytest.mark.parametrize("parts", PARTS, ids=name_of)
def test_other_parts_keep_the_contracts(parts):
    make = lambda n: jrb.ReplayBuffer(n, num_envs=2, batch_size=8, **parts)
    conform_but_for_copies(make, EPISODIC)


THROUGH_CHANGES = [
    {"unit": jrb.FrameStack(3), "sampler": jrb.Prioritized()},
    {"unit": jrb.Sequence(3, sample_by="episodes", partial="pad")},
]
THROUGH_CHANGES += [
    pytest.param(parts, marks=pytest.mark.long)
    for parts in [*({"sampler": sampler} for sampler in SAMPLERS), *PARTS]
]


@pytest.mark.parametrize("parts", THROUGH_CHANGES, ids=name_of)
def test_parts_keep_the_contracts_through_changes(parts):
    make = lambda n: jrb.ReplayBuffer(n, num_envs=2, batch_size=8, **parts)
    for check in (testing.check_refilled, testing.check_options, testing.check_edited):
        check(make(64), EPISODIC)
    testing.check_rebuilt(make, EPISODIC)
    testing.check_sharded(make(64), EPISODIC)
    testing.check_stacked(make(64), EPISODIC)


def test_a_sampler_of_ones_own_keeps_the_contracts():
    make = lambda n: jrb.ReplayBuffer(n, num_envs=2, batch_size=4, sampler=Recent())
    testing.conform(make, EXAMPLE)


@pytest.mark.parametrize(
    ("storage", "unit"),
    [
        (jrb.MemmapStorage(), jrb.NStep(3, 0.9)),
        (jrb.SpillStorage(None, 16), jrb.Transition()),
        (jrb.CompressedStorage(min_bytes=1), jrb.Sequence(3)),
        (jrb.MemmapStorage(share_next_observations=True), jrb.NStep(3, 0.9)),
    ],
    ids=name_of,
)
def test_storages_on_the_host_keep_the_contracts(storage, unit):
    make = lambda n: jrb.ReplayBuffer(
        n, num_envs=2, batch_size=8, storage=storage, unit=unit, sampler=jrb.Prioritized()
    )
    testing.conform(make, EPISODIC)


def test_a_broken_part_is_noticed():
    @component
    class Forgetful(Recent):
        def ready(self, state, anchors, batch_size):
            return jnp.bool_(True)

    make = lambda n: jrb.ReplayBuffer(n, num_envs=2, batch_size=4, sampler=Forgetful())
    with pytest.raises(AssertionError, match="can_sample is False when empty"):
        testing.check_empty(make(64), EXAMPLE)


def test_a_copy_is_noticed():
    def sample_add(buffer, state, total, key):
        sample = buffer.sample(state, key)
        return buffer.add(state, testing.rows(EXAMPLE, total, 4)), testing.consumed(sample)

    make = lambda n: jrb.ReplayBuffer(n, num_envs=4, batch_size=8)
    assert testing.growth(make, EXAMPLE, sample_add) > 0.5


@pytest.mark.parametrize("dtype", ["bool", "bfloat16"])
def test_any_dtype_keeps_the_contracts(dtype):
    make = lambda n: jrb.ReplayBuffer(n, num_envs=2, batch_size=4)
    check = testing.conform if dtype == "bool" else conform_but_for_copies
    check(make, {"x": jnp.zeros(64, dtype)})


def test_typed_keys_keep_the_contracts():
    make = lambda n: jrb.ReplayBuffer(n, num_envs=2, batch_size=4)
    testing.conform(make, {"x": jnp.zeros(64), "key": jax.random.key(0)})
