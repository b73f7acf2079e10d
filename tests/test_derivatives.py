"""Methods inside differentiated functions: states are data, and no gradient flows through them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import sum_tree

B = 4
WIDE = 600  # elements of a leaf so large that it is not packed with others but stored as floats
NEXT = {"reward": jnp.float32(0), "done": jnp.bool_(False)}
ITEM = {"observation": jnp.zeros(3), "image": jnp.zeros(WIDE), "next": NEXT}
KEY = jax.random.key(0)


def rows(*lead):
    """Returns rows with a different number in each."""
    count = int(np.prod(lead))

    def leaf(like):
        number = jnp.arange(count).reshape(*lead, *(1,) * like.ndim)
        return jnp.broadcast_to(number, (*lead, *like.shape)).astype(like.dtype)

    return {
        **jax.tree.map(leaf, ITEM),
        "next": {"reward": jnp.ones(lead), "done": jnp.zeros(lead, bool)},
    }


def of(number):
    """Returns an item whose floats depend on a parameter."""
    made = lambda leaf: leaf + number if leaf.dtype == jnp.float32 else leaf
    return jax.tree.map(made, ITEM)


@functools.cache
def held(**parts):
    buffer = jrb.ReplayBuffer(16, batch_size=B, sampler=jrb.Prioritized(), **parts)
    state = jax.jit(buffer.extend)(buffer.init(ITEM), rows(8))
    return buffer, state, jax.jit(buffer.sample)(state, KEY)


@functools.cache
def held_in_shards():
    buffer = jrb.ReplayBuffer(16, num_envs=2, batch_size=B, sampler=jrb.Prioritized())
    sharded = jrb.Sharded(buffer, 2)
    state = sharded.extend(sharded.init(ITEM), rows(4, 2))
    return sharded, state, sharded.sample(state, KEY)


RUNNING = (jrb.transforms.RunningNormalize(), jrb.transforms.RunningRewardScale())


def learn(number):
    buffer, state, _ = held(transforms=RUNNING)
    after = buffer.add(state, of(number))
    return after.transforms, buffer.sample(after, KEY)


def mixed(number):
    buffer, state, _ = held()
    mix = jrb.Mix((buffer, buffer), (0.5, 0.5), batch_size=B)
    states, sample = mix.draw((state, state), KEY, beta=number)
    return mix.update_priority(states, sample, jnp.ones(B) * number), sample


def scanned(number):
    buffer, state, _ = held(unit=jrb.NStep(2, 0.9))

    def step(state, key):
        state, sample = buffer.draw(buffer.add(state, of(number)), key)
        return buffer.update_priority(state, sample, jnp.ones(B) * number), sample.weights

    return jax.lax.scan(step, state, jax.random.split(KEY, 2))


def of_buffer(call):
    return lambda number: call(*held(), number)


def of_shards(call):
    return lambda number: call(*held_in_shards(), number)


CALLS = {
    "add": of_buffer(lambda b, s, _, x: b.add(s, of(x))),
    "extend": of_buffer(
        lambda b, s, _, x: b.extend(s, jax.tree.map(lambda leaf: leaf[None], of(x)))
    ),
    "given": of_buffer(lambda b, s, _, x: b.add(s, ITEM, priorities=x)),
    "update": of_buffer(lambda b, s, batch, x: b.update_priority(s, batch, jnp.ones(B) * x)),
    "slots": of_buffer(lambda b, s, batch, x: b.update_priority(s, batch.indices, jnp.ones(B) * x)),
    "alpha": of_buffer(lambda b, s, _, x: b.set_alpha(s, x)),
    "beta": of_buffer(lambda b, s, _, x: b.sample(s, KEY, beta=x)),
    "set": of_buffer(lambda b, s, batch, x: b.set(s, batch, {"image": jnp.ones((B, WIDE)) * x})),
    "set all": of_buffer(lambda b, s, _, x: b.set(s, ..., {"image": jnp.ones((16, WIDE)) * x})),
    "map": of_buffer(lambda b, s, _, x: b.map(s, lambda items: {"image": items["image"] * x})),
    "jitted": of_buffer(
        lambda b, s, batch, x: jax.jit(b.update_priority)(s, batch, jnp.ones(B) * x)
    ),
    "tree": of_buffer(
        lambda b, s, _, x: sum_tree.update(s.sampler.masses, jnp.arange(B), jnp.ones(B) * x)
    ),
    "running": learn,
    "mix": mixed,
    "scan": scanned,
    "shards": of_shards(lambda b, s, batch, x: b.update_priority(s, batch, jnp.ones(B) * x)),
    "alpha of shards": of_shards(lambda b, s, _, x: b.set_alpha(s, x)),
    "beta of shards": of_shards(lambda b, s, _, x: b.draw(s, KEY, beta=x)),
}


def total(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree) if leaf.dtype == jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_what_a_method_returns_does_not_depend_on_parameters(name):
    call = CALLS[name]
    want = call(3.0)
    loss = lambda number: number**2 + total(call(number))
    aux = lambda number: (number**2, call(number))
    (_, state), gradient = jax.jit(jax.value_and_grad(aux, has_aux=True))(3.0)
    assert gradient == 6
    for got, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, leaf, rtol=1e-6, atol=1e-6)
    assert jax.jvp(loss, (3.0,), (1.0,))[1] == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["update", "given", "running"])
def test_nor_under_other_transformations(name):
    CALLS[name](3.0)  # fills the caches of buffers outside all transformations
    loss = lambda number: number**2 + total(CALLS[name](number))
    assert jax.linearize(loss, 3.0)[1](1.0) == 6
    assert jax.grad(jax.checkpoint(loss))(3.0) == 6
    if name == "update":
        np.testing.assert_array_equal(jax.vmap(jax.grad(loss))(jnp.array([1.0, 3.0])), [2, 6])


@pytest.mark.slow
def test_what_a_transform_makes_of_a_batch_depends_on_its_parameters():
    _, state, _ = held()

    def loss(scale):
        scaled = lambda data: {**data, "observation": data["observation"] * scale}
        buffer = jrb.ReplayBuffer(16, batch_size=B, sampler=jrb.Prioritized(), transforms=(scaled,))
        batch = buffer.sample(state, KEY)
        after = buffer.update_priority(state, batch, batch.data["observation"][:, 0])
        return jnp.sum(batch.data["observation"]), after

    value, gradient = jax.value_and_grad(lambda scale: loss(scale)[0])(2.0)
    assert gradient == value / 2 > 0
    assert jax.grad(loss, has_aux=True)(2.0)[0] == gradient
