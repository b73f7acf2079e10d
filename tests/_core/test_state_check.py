"""Every method raises at trace time for a state of another buffer description."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

import jrb

KEY = jax.random.key(0)
EXAMPLE = {
    "observation": jnp.zeros(2),
    "next": {
        "observation": jnp.zeros(2),
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}
BASE = jrb.ReplayBuffer(24, num_envs=2, batch_size=4)


def filled(buffer, rows=5):
    lead = () if buffer.num_envs is None else (buffer.num_envs,)
    row = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *lead, *leaf.shape)), EXAMPLE)
    return buffer.extend(buffer.init(EXAMPLE), row)


def methods(buffer):
    lead = () if buffer.num_envs is None else (buffer.num_envs,)
    rows = lambda *more: jax.tree.map(
        lambda leaf: jnp.zeros((*more, *lead, *leaf.shape), leaf.dtype), EXAMPLE
    )
    found = {
        "add": lambda state: buffer.add(state, rows()),
        "extend": lambda state: buffer.extend(state, rows(3)),
        "sample": lambda state: buffer.sample(state, KEY),
        "draw": lambda state: buffer.draw(state, KEY),
        "take": lambda state: buffer.take(state, jnp.arange(2)),
        "truncate": buffer.truncate,
        "size": buffer.size,
        "can_sample": buffer.can_sample,
        "empty": buffer.empty,
    }
    if buffer.sampler.prioritized:
        found["set_alpha"] = lambda state: buffer.set_alpha(state, 0.5)
        found["update_priority"] = lambda state: buffer.update_priority(
            state, jnp.arange(2), jnp.ones(2)
        )
    return found


OTHERS = {
    "capacity": ({"capacity": 48}, ValueError, "of capacity 24, got one of capacity 48"),
    "environments": (
        {"num_envs": 3},
        ValueError,
        "capacity 24 with num_envs=2, got one of capacity 24 with num_envs=3",
    ),
    "one stream": ({"num_envs": None}, ValueError, "num_envs=2, got one .* num_envs=1"),
    "sampler": ({"sampler": jrb.Queue()}, TypeError, "whose sampler is"),
    "unit": ({"unit": jrb.NStep(3, 0.9)}, TypeError, "whose unit is"),
    "n-step": ({"unit": jrb.NStep(3, 0.9, strict=True)}, TypeError, "whose unit is"),
    "writer": ({"writer": jrb.MaxValue(("next", "reward"))}, TypeError, "whose writer is"),
    "storage": (
        {"storage": jrb.DeviceStorage(share_next_observations=True)},
        TypeError,
        "whose storage is",
    ),
    "normalize": (
        {"sampler": jrb.Prioritized(normalize="buffer")},
        TypeError,
        "whose sampler is",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("sampler", [jrb.Uniform(), jrb.Prioritized()], ids=repr)
def test_every_method_refuses_a_state_of_another_description(name, sampler, inside):
    changes, error, text = OTHERS[name]
    buffer = dataclasses.replace(BASE, sampler=sampler)
    state = filled(dataclasses.replace(buffer, **changes))
    for method, call in methods(buffer).items():
        with pytest.raises(error, match=text) as raised:
            (jax.jit(call) if inside else call)(state)
        assert "init of this very description" in str(raised.value), method


LENGTHS = [
    ({"unit": jrb.Sequence(3)}, {"unit": jrb.Sequence(4)}),
    (
        {"unit": jrb.Sequence(3, sample_by="episodes")},
        {"unit": jrb.Sequence(4, sample_by="episodes")},
    ),
    ({"unit": jrb.FrameStack(3)}, {"unit": jrb.FrameStack(4)}),
    ({"unit": jrb.NStep(3, 0.9, strict=True)}, {"unit": jrb.NStep(4, 0.9, strict=True)}),
    (
        {"unit": jrb.FrameStack(2, unit=jrb.Sequence(2))},
        {"unit": jrb.FrameStack(2, unit=jrb.Sequence(3))},
    ),
    (
        {"writer": jrb.MaxValue(("next", "reward"))},
        {"writer": jrb.MaxValue(("next", "done"))},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), LENGTHS, ids=repr)
def test_parts_of_one_kind_are_told_apart_where_their_states_differ_in_meaning(one, other):
    state = filled(dataclasses.replace(BASE, **one))
    buffer = dataclasses.replace(BASE, **other)
    for call in methods(buffer).values():
        with pytest.raises(TypeError, match=r"of this buffer, whose (unit|writer) is"):
            jax.jit(call)(state)


@pytest.mark.slow
def test_parts_of_one_kind_may_change_where_their_states_do_not():
    free = [
        (jrb.NStep(3, 0.9), jrb.NStep(5, 0.5)),
        (jrb.Sequence(3, priority_max_weight=0.5), jrb.Sequence(3, priority_max_weight=1.0)),
        (jrb.Sequence(3, partial="pad"), jrb.Sequence(5, partial="pad", burn_in=1)),
        (jrb.FrameStack(3), jrb.FrameStack(3, pad="zeros")),
    ]
    for one, other in free:
        state = filled(dataclasses.replace(BASE, unit=one))
        dataclasses.replace(BASE, unit=other).sample(state, KEY)


@pytest.mark.parametrize("inside", [False, True], ids=["eager", "jit"])
def test_states_of_many_buffers_are_for_vmap(inside):
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), filled(BASE))
    for call in methods(BASE).values():
        with pytest.raises(ValueError, match=r"leading axes \(3,\).*jax\.vmap"):
            (jax.jit(call) if inside else call)(state)
    assert jax.vmap(BASE.size)(state).tolist() == [10, 10, 10]


def test_something_else_is_no_state():
    mix = jrb.Mix((BASE, BASE), (0.5, 0.5), batch_size=4)
    for other, text in (
        ((filled(BASE),) * 2, "as a Mix has"),
        ({}, "got dict"),
        (None, "NoneType"),
    ):
        with pytest.raises(TypeError, match=text):
            BASE.sample(other, KEY)
    with pytest.raises(TypeError, match=r"expected a tuple of 2 states.*got BufferState"):
        mix.sample(filled(BASE), KEY)
    with pytest.raises(TypeError, match="arrays for leaves, got int"):
        BASE.size(filled(BASE).replace(writer=3))


def test_swapped_states_of_a_mix_are_refused():
    other = dataclasses.replace(BASE, capacity=12)
    mix = jrb.Mix((BASE, other), (0.5, 0.5), batch_size=4)
    states = filled(BASE), filled(other)
    mix.sample(states, KEY)
    for call in (lambda states: mix.sample(states, KEY), lambda states: mix.draw(states, KEY)):
        with pytest.raises(ValueError, match="of capacity 24, got one of capacity 12"):
            jax.jit(call)(states[::-1])


def test_what_no_state_depends_on_may_change():
    state = filled(BASE)
    free = {
        "batch_size": 2,
        "writer": jrb.ReadOnly(),
        "transforms": (lambda data: data,),
        "min_size": 2,
    }
    for name, value in free.items():
        other = dataclasses.replace(BASE, **{name: value})
        assert int(other.size(state)) == 10
        other.sample(state, KEY, 3)


@pytest.mark.parametrize("sampler", [jrb.Prioritized(), jrb.Queue()], ids=repr)
def test_another_sampler_refuses_a_live_state(sampler):
    state, other = filled(BASE), dataclasses.replace(BASE, sampler=sampler)
    with pytest.raises(TypeError, match="whose sampler is"):
        other.sample(state, KEY)


def test_a_sampler_without_memory_may_be_put_on_a_live_state():
    sampler = jrb.WithoutReplacement()
    other = dataclasses.replace(BASE, sampler=sampler, batch_size=10)
    state = filled(BASE).replace(sampler=sampler.init(other.ring))
    assert sorted(other.sample(state, KEY).indices.tolist()) == list(range(10))


def test_the_check_costs_nothing_when_a_method_runs():
    state = filled(BASE)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state):
        return BASE.add(state, jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), EXAMPLE))

    for _ in range(3):
        state = step(state)


def test_the_length_of_a_state_names_size():
    with pytest.raises(TypeError, match=r"expected buffer\.size\(state\)"):
        len(filled(BASE))
