"""Contract 2: with a donated state nothing of the buffer's size is copied."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jrb
from jrb import order

E, B, AGENTS = 4, 16, 8
SMALL, LARGE = 2**13, 2**15

SAMPLERS = {
    "uniform": jrb.Uniform(),
    "distinct": jrb.Uniform(replacement=False),
    "epochs": jrb.WithoutReplacement(),
    "queue": jrb.Queue(),
    "prioritized": jrb.Prioritized(),
    "buffer": jrb.Prioritized(normalize="buffer", new_priority="max_in_buffer", stratified=False),
}
PRIORITIZED = ("prioritized", "buffer")


def example():
    return {"x": jnp.zeros(16), "y": jnp.zeros(3, jnp.uint8), "next": {"reward": jnp.float32(0)}}


def rows(total, *lead):
    """Rows that the compiler cannot know."""
    base = jnp.arange(16, dtype=jnp.float32)
    return {
        "x": jnp.broadcast_to(jnp.sin(total + base), (*lead, 16)),
        "y": jnp.broadcast_to((total * 7).astype(jnp.uint8), (*lead, 3)),
        "next": {"reward": jnp.broadcast_to(jnp.cos(total), lead)},
    }


def consumed(sample):
    """A number that needs every leaf of the sample."""
    return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(sample))


def add_sample(buffer, state, total, key):
    state = buffer.add(state, rows(total, E))
    return state, consumed(buffer.sample(state, key))


def masked_add_sample(buffer, state, total, key):
    state = buffer.add(state, rows(total, E), mask=total > 0.5)
    return state, consumed(buffer.sample(state, key))


def draw_add(buffer, state, total, key):
    state, sample = buffer.draw(state, key)
    return buffer.add(state, rows(total, E)), consumed(sample)


def extend_draw_extend(buffer, state, total, key):
    state = buffer.extend(state, rows(total, 6, E))
    state, sample = buffer.draw(state, key)
    return buffer.extend(state, rows(total + 1, 3, E)), consumed(sample)


def masked_extend_draw_empty(buffer, state, total, key):
    state = buffer.extend(state, rows(total, 5, E), mask=jnp.sin(total + jnp.arange(5.0)) > 0)
    state, sample = buffer.draw(state, key)
    return buffer.add(state, rows(total + 1, E)), consumed(sample)


def sample_update_add(buffer, state, total, key):
    sample = buffer.sample(state, key)
    priorities = jnp.abs(jnp.sin(total + jnp.arange(B, dtype=jnp.float32)))
    state = buffer.update_priority(state, sample, priorities)
    return buffer.add(state, rows(total, E)), consumed(sample)


def draw_add_update(buffer, state, total, key):
    state, sample = buffer.draw(state, key)
    state = buffer.add(state, rows(total, E))
    return buffer.update_priority(state, sample, sample.data["next"]["reward"] ** 2), consumed(sample)


def add_sample_update_twice(buffer, state, total, key):
    for _ in range(2):
        state = buffer.add(state, rows(total, E))
        sample = buffer.sample(state, key)
        state = buffer.update_priority(state, sample, sample.data["next"]["reward"] ** 2)
        total = total + consumed(sample)
    return state, total


ANY = [add_sample, masked_add_sample, draw_add, extend_draw_extend, masked_extend_draw_empty]
UPDATES = [sample_update_add, draw_add_update, add_sample_update_twice]
CASES = [(name, order_) for name in SAMPLERS for order_ in ANY]
CASES += [(name, order_) for name in PRIORITIZED for order_ in UPDATES]


def temporaries(step, capacity, sampler, *, agents=None, scan=True):
    """Bytes of temporaries of a compiled loop over a donated state, and bytes of the state."""
    buffer = jrb.ReplayBuffer(capacity=capacity, num_envs=E, batch_size=B, sampler=sampler)
    state = buffer.init(example())
    step = functools.partial(step, buffer)
    key = jax.random.key(0)
    total = jnp.float32(1)
    if agents:
        state, total, key = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (agents, *leaf.shape)), (state, total, key)
        )
        step = jax.vmap(step)

    def loop(state, total, key):
        body = lambda carry, _: (step(*carry, key), None)
        return jax.lax.scan(body, (state, total), None, 3)[0]

    run = jax.jit(loop if scan else step, donate_argnums=0)
    compiled = run.lower(state, total, key).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.dtype != key.dtype)
    return compiled.memory_analysis().temp_size_in_bytes, size


def growth(step, sampler, **options):
    """What the temporaries grow by, as a part of what the state grows by."""
    small = temporaries(step, SMALL, sampler, **options)
    large = temporaries(step, LARGE, sampler, **options)
    return (large[0] - small[0]) / (large[1] - small[1])


@pytest.mark.parametrize(("name", "step"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_scan(name, step):
    assert growth(step, SAMPLERS[name]) < 0.01
