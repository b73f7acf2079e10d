"""Samples record the description that drew them; buffers with another one refuse them."""

import dataclasses
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(0)
ITEM = {"x": jnp.float32(0), "next": {"reward": jnp.float32(0), "done": jnp.bool_(False)}}


def buffer_of(**parts):
    parts = {"capacity": 16, "batch_size": 4, "sampler": jrb.Prioritized()} | parts
    return jrb.ReplayBuffer(**parts)


def filled(buffer):
    rows = {"x": jnp.arange(8.0), "next": {"reward": jnp.ones(8), "done": jnp.zeros(8, bool)}}
    if buffer.num_envs:
        rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * buffer.num_envs, axis=1), rows)
    return buffer.extend(buffer.init(ITEM), rows)


OTHERS = {
    "capacity": {"capacity": 32},
    "environments": {"num_envs": 2},
    "alpha": {"sampler": jrb.Prioritized(alpha=0.7)},
    "counted": {"sampler": jrb.Prioritized(count_draws=True)},
    "unit": {"unit": jrb.NStep(2, 0.9)},
    "length": {"unit": jrb.Sequence(2)},
    "writer": {"writer": jrb.Reservoir()},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_sample_of_another_description_is_refused(name):
    buffer, other = buffer_of(), buffer_of(**OTHERS[name])
    state, sample = filled(buffer), other.sample(filled(other), KEY)
    calls = {
        "update_priority": lambda: buffer.update_priority(state, sample, jnp.ones(4)),
        "set": lambda: buffer.set(state, sample, {"x": jnp.ones(4)}),
        "drop": lambda: buffer.drop(state, sample),
    }
    for method, call in calls.items():
        for run in (call, jax.jit(call)):
            with pytest.raises(ValueError, match=f"{method}: expected a Sample that this buffer"):
                run()
    with pytest.raises(ValueError, match="expected a Sample that this buffer drew"):
        jrb.jitted(buffer).update_priority(state, sample, jnp.ones(4))
    buffer.update_priority(state, sample.replace(origin=None), jnp.ones(4))


def test_what_a_draw_may_ask_for_makes_no_other_description():
    buffer = buffer_of(transforms=(lambda data: data,))
    state, origin = filled(buffer), buffer.sample(filled(buffer), KEY).origin
    for changes in ({"batch_size": 8}, {"transforms": ()}, {"min_size": 3}, {"cast": True}):
        other = dataclasses.replace(buffer, **changes)
        sample = other.sample(state, KEY)
        assert sample.origin == origin
        buffer.update_priority(state, sample, jnp.ones(sample.indices.size))


def test_equal_descriptions_have_equal_origins_and_nothing_is_traced_again():
    one = buffer_of(sampler=jrb.Prioritized(alpha=1, beta=np.float64(0.5)))
    other = buffer_of(capacity=np.int64(16), sampler=jrb.Prioritized(alpha=1.0, beta=0.5))
    assert one == other
    state, traced = filled(one), []

    @jax.jit
    def learn(state, sample):
        traced.append(sample.origin)
        return one.update_priority(state, sample, jnp.ones(4))

    for sample in (
        one.sample(state, KEY),
        other.draw(state, KEY)[1],
        jax.jit(one.sample)(state, KEY),
    ):
        learn(state, sample)
    assert len(traced) == 1


def goes_round(buffer, state, sample):
    """Yields samples of the buffer that went through pickling and transformations of JAX."""
    draw = lambda state, key: buffer.draw(state, key)
    yield jax.jit(lambda sample: sample)(sample)
    yield jax.tree.map(lambda leaf: leaf + 0 if leaf.dtype != bool else leaf, sample)
    yield jax.device_get(sample)
    yield pickle.loads(pickle.dumps(jax.device_get(sample)))
    yield jax.lax.fori_loop(0, 2, lambda i, s: draw(state, jax.random.fold_in(KEY, i))[1], sample)
    yield jax.lax.scan(draw, state, jax.random.split(KEY, 2))[1].replace(origin=sample.origin)
    yield jax.tree.map(lambda leaf: leaf[0], jax.lax.scan(draw, state, jax.random.split(KEY, 2))[1])
    both = jax.vmap(lambda key: buffer.sample(state, key))(jax.random.split(KEY, 2))
    yield jax.tree.map(lambda leaf: leaf[1], both)
    yield next(iter(jrb.epochs(buffer, state, KEY)))
    yield jrb.jitted(buffer).sample(state, KEY)


def test_it_stays_through_whatever_is_done_to_trees():
    buffer = buffer_of()
    state = filled(buffer)
    sample = buffer.sample(state, KEY)
    for found in goes_round(buffer, state, sample):
        assert found.origin == sample.origin
        if found.indices.ndim == 1:
            buffer.update_priority(state, found, jnp.ones(4))


def test_it_is_the_same_in_another_process(tmp_path):
    buffer = buffer_of(sampler=jrb.Prioritized(alpha=0.3), unit=jrb.NStep(2, 0.9))
    path = tmp_path / "sample"
    path.write_bytes(pickle.dumps((buffer, jax.device_get(buffer.sample(filled(buffer), KEY)))))
    program = """
import pickle, sys
buffer, sample = pickle.load(open(sys.argv[1], "rb"))
assert buffer._origin == sample.origin
"""
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, env=environment)


@pytest.mark.slow
def test_a_mix_and_shards_have_origins_of_their_own():
    buffer, other = buffer_of(num_envs=2), buffer_of(num_envs=2, capacity=32)
    states = filled(buffer), filled(other)
    mix, pair = jrb.Mix((buffer, other), (0.5, 0.5), 4), jrb.Mix((other, buffer), (0.5, 0.5), 4)
    _, sample = mix.draw(states, KEY)
    assert jrb.jitted(mix).sample(states, KEY).origin == sample.origin
    assert mix.sample(states, KEY, proportions=jnp.array([0.2, 0.8])).origin == sample.origin
    mix.update_priority(states, sample, jnp.ones(4))
    sharded, four = (jrb.Sharded(buffer_of(num_envs=4), count) for count in (2, 4))
    rows = {"x": jnp.ones(4), "next": {"reward": jnp.ones(4), "done": jnp.zeros(4, bool)}}
    held = sharded.add(sharded.init(ITEM), rows)
    batch = sharded.sample(held, KEY)
    held = sharded.update_priority(held, batch, jnp.ones(4))
    sharded.set(held, sharded.draw(held, KEY)[1], {"x": jnp.ones(4)})
    refused = [
        lambda: pair.update_priority(states[::-1], sample, jnp.ones(4)),
        lambda: buffer.update_priority(states[0], sample, jnp.ones(4)),
        lambda: four.update_priority(four.init(ITEM), batch, jnp.ones(4)),
        lambda: sharded.part.update_priority(
            jax.tree.map(lambda leaf: leaf[0], held), batch, jnp.ones(4)
        ),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="expected a Sample that this buffer drew"):
            call()


@pytest.mark.parametrize("storage", [jrb.MemmapStorage(), jrb.DeviceStorage()], ids=str)
def test_a_description_that_was_saved_takes_its_samples(tmp_path, storage):
    buffer = buffer_of(storage=storage)
    state = filled(buffer)
    sample = buffer.sample(state, KEY)
    state = jrb.jitted(buffer).update_priority(state, sample, jnp.ones(4))
    path = jrb.save(tmp_path / "saved", buffer, state) and tmp_path / "saved"
    loaded, state = jrb.load(path)[:2]
    if loaded == buffer:
        loaded.update_priority(state, sample, jnp.ones(4))
    loaded.update_priority(state, loaded.sample(state, KEY), jnp.ones(4))
