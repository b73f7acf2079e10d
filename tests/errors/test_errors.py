"""Errors of bad input name the leaf, the expected and given values, and a fix."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import migrate

EXAMPLE = {"obs": jnp.zeros(3), "next": {"reward": jnp.float32(0), "done": jnp.bool_(False)}}
BUFFER = jrb.ReplayBuffer(capacity=8, num_envs=2, batch_size=4, sampler=jrb.Prioritized())
STATE = BUFFER.init(EXAMPLE)
KEY = jax.random.key(0)


@jrb.types.component
class AllMasked(jrb.Transition):
    """A unit with an anchor for each item, all of which are masked when read."""

    def plan_read(self, context, state, slots, mask, key):
        plan = super().plan_read(context, state, slots, mask, key)
        return dataclasses.replace(plan, mask=jnp.zeros_like(mask))


def step(**changes):
    """Returns a valid timestep of two environments, with leaves replaced or added."""
    row = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), EXAMPLE)
    return row | changes


def rejects(call, kind, *texts):
    """Asserts that `call` raises `kind` with all these texts, eagerly and under jit."""
    for run in (call, jax.jit(call)):
        with pytest.raises(kind) as caught:
            run()
        for text in texts:
            assert text in str(caught.value), (text, str(caught.value))


def test_a_missing_leaf_is_named():
    item = {"obs": jnp.zeros((2, 3))}
    rejects(
        lambda: BUFFER.add(STATE, item),
        ValueError,
        "add: leaf 'next/done'",
        "expected the leaves ['next/done', 'next/reward', 'obs']",
        "got ['obs']",
        "Give one timestep with leaves [E, ...]",
    )


def test_a_surplus_leaf_is_named():
    rejects(lambda: BUFFER.add(STATE, step(extra=jnp.zeros(2))), ValueError, "leaf 'extra'")


def test_another_container_is_named():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2)
    state = buffer.init((jnp.float32(0), jnp.float32(0)))
    rejects(
        lambda: buffer.add(state, [jnp.float32(0), jnp.float32(0)]),
        ValueError,
        "PyTreeDef((*, *))",
        "PyTreeDef([*, *])",
    )


def test_a_wrong_shape_is_named():
    item = step(obs=jnp.zeros((2, 4)))
    rejects(
        lambda: BUFFER.add(STATE, item),
        ValueError,
        "leaf 'obs'",
        "expected shape (2, 3)",
        "got (2, 4)",
        "Give",
    )


def test_a_missing_environment_axis_is_named():
    rejects(
        lambda: BUFFER.add(STATE, EXAMPLE),
        ValueError,
        "leaf 'next/done'",
        "expected shape (2,)",
        "got ()",
        "[E, ...]",
    )


def test_leaves_of_unequal_time_are_named():
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), step())
    rows["obs"] = rows["obs"][:4]
    rejects(
        lambda: BUFFER.extend(STATE, rows),
        ValueError,
        "extend: leaf 'obs'",
        "expected shape (5, 2, 3)",
        "got (4, 2, 3)",
        "[T, E, ...]",
    )


def test_a_wrong_dtype_is_named_and_not_cast():
    item = step(obs=jnp.zeros((2, 3), jnp.float16))
    rejects(
        lambda: BUFFER.add(STATE, item),
        TypeError,
        "leaf 'obs'",
        "expected dtype float32",
        "got float16",
        "Cast it",
    )


def test_float64_is_not_cast_silently():
    example = {"obs": np.zeros(3)}
    with pytest.raises(TypeError, match=r"leaf 'obs'.*float64.*float32.*jax_enable_x64"):
        jrb.ReplayBuffer(capacity=4).init(example)
    with pytest.raises(TypeError, match=r"leaf 'obs'.*float64"):
        BUFFER.add(STATE, step(obs=np.zeros((2, 3))))


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["a"]), np.array([None])])
def test_what_is_no_array_is_named(leaf):
    with pytest.raises(TypeError, match="init: leaf 'x'"):
        jrb.ReplayBuffer(capacity=4).init({"x": leaf})


def test_a_capacity_that_environments_do_not_divide_names_the_nearest():
    with pytest.raises(ValueError, match=r"multiple of num_envs = 64, got 1000.* 960 or 1024"):
        jrb.ReplayBuffer(capacity=1000, num_envs=64)
    with pytest.raises(ValueError, match=r"The nearest are 64\."):
        jrb.ReplayBuffer(capacity=10, num_envs=64)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"capacity": 0}, ValueError),
        ({"capacity": 2.0}, TypeError),
        ({"capacity": True}, TypeError),
        ({"capacity": 2**40, "min_size": 2**31}, ValueError),
        ({"capacity": 4, "num_envs": 0}, ValueError),
        ({"capacity": 4, "batch_size": 0}, ValueError),
        ({"capacity": 4, "batch_size": "8"}, TypeError),
        ({"capacity": 4, "transforms": len}, TypeError),
        ({"capacity": 4, "transforms": (1,)}, TypeError),
        ({"capacity": 4, "transforms": [len]}, TypeError),
    ],
)
def test_bad_descriptions(options, kind):
    with pytest.raises(kind, match=f"{list(options)[-1]}: expected"):
        jrb.ReplayBuffer(**options)


def test_more_slots_than_int32_tells_apart_are_for_shards():
    buffer = jrb.ReplayBuffer(2**33, num_envs=8, batch_size=8, sampler=jrb.Prioritized())
    example = {"x": jnp.bool_(False)}
    for call in (buffer.init, buffer.nbytes, jrb.Sharded(buffer, 4).init):
        with pytest.raises(ValueError, match=r"at most 2147483647 slots .* more shards: jrb\.Shar"):
            jax.eval_shape(lambda call=call: call(example))
    sharded = jrb.Sharded(buffer, 8)
    assert 2**33 * 9 < sharded.nbytes(example) < 2**33 * 12
    made = jax.eval_shape(lambda: sharded.init(example))
    assert made.storage["x"].shape == (8, 2**30)
    few = jrb.ReplayBuffer(64, num_envs=8)
    with pytest.raises(ValueError, match=r"at most 2147483647 slots .* got 8589934592"):
        migrate.regroup_shards(sharded, {}, few, 0)  # one int32 would number all slots


@pytest.mark.parametrize("value", [jnp.float32(0.5), np.zeros(2)])
def test_an_array_in_a_description_is_refused(value):
    with pytest.raises(TypeError, match=r"Prioritized.alpha.*got an array.*static"):
        jrb.Prioritized(alpha=value)
    with pytest.raises(TypeError, match=r"ReplayBuffer.capacity.*got an array"):
        jrb.ReplayBuffer(capacity=value)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"alpha": -0.1}, ValueError),
        ({"alpha": float("nan")}, ValueError),
        ({"beta": -1}, ValueError),
        ({"eps": float("inf")}, ValueError),
        ({"alpha": "high"}, TypeError),
        ({"normalize": "max"}, ValueError),
        ({"new_priority": -1.0}, ValueError),
        ({"new_priority": "mean"}, TypeError),
    ],
)
def test_bad_samplers(options, kind):
    with pytest.raises(kind, match=f"{next(iter(options))}: expected"):
        jrb.ReplayBuffer(capacity=4, sampler=jrb.Prioritized(**options)).init(jnp.float32(0))


def test_a_negative_alpha_later_is_refused():
    with pytest.raises(ValueError, match=r"alpha: expected.*at least 0, got -1"):
        BUFFER.set_alpha(STATE, -1.0)


def test_no_batch_size():
    buffer = jrb.ReplayBuffer(capacity=4)
    state = buffer.add(buffer.init(jnp.float32(0)), jnp.float32(1))
    rejects(lambda: buffer.sample(state, KEY), ValueError, "batch_size: expected", "ReplayBuffer")


@pytest.mark.parametrize("sampler", [jrb.Uniform(), jrb.Queue(), jrb.WithoutReplacement()])
def test_priorities_need_a_sampler_with_priorities(sampler):
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2, sampler=sampler)
    state = buffer.add(buffer.init(jnp.float32(0)), jnp.float32(1))
    for call in (
        lambda: buffer.update_priority(state, buffer.sample(state, KEY), jnp.ones(2)),
        lambda: buffer.set_alpha(state, 0.5),
    ):
        rejects(call, TypeError, type(sampler).__name__, "sampler=jrb.Prioritized()")


def test_priorities_of_another_shape_or_kind():
    state = BUFFER.add(STATE, step())
    sample = BUFFER.sample(state, KEY)
    rejects(
        lambda: BUFFER.update_priority(state, sample, jnp.ones(3)),
        ValueError,
        "expected shape (4,)",
        "got (3,)",
    )
    rejects(
        lambda: BUFFER.update_priority(state, sample, jnp.ones((4, 1))), ValueError, "got (4, 1)"
    )
    rejects(
        lambda: BUFFER.update_priority(state, sample, jnp.ones(4, bool)),
        TypeError,
        "got dtype bool",
    )
    rejects(lambda: BUFFER.update_priority(state, jnp.ones(4), jnp.ones(4)), TypeError, "indices")


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (0, TypeError),
        (jnp.zeros(2), TypeError),
        (jnp.zeros(3, jnp.uint32), ValueError),
        (jax.random.split(KEY, 2), ValueError),
    ],
)
def test_what_is_no_key(key, kind):
    state = BUFFER.add(STATE, step())
    with pytest.raises(kind, match="key: expected a"):
        BUFFER.sample(state, key)


@pytest.mark.parametrize(
    ("mask", "kind", "text"),
    [(1, TypeError, "dtype bool"), (jnp.ones(2, bool), ValueError, r"expected shape \(\)")],
)
def test_what_is_no_mask(mask, kind, text):
    with pytest.raises(kind, match=text):
        BUFFER.add(STATE, step(), mask)


def test_a_mask_of_another_length():
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), step())
    with pytest.raises(ValueError, match=r"mask: expected shape \(5,\), got \(4,\)"):
        BUFFER.extend(STATE, rows, jnp.ones(4, bool))


def test_extend_needs_time():
    buffer = jrb.ReplayBuffer(capacity=4)
    state = buffer.init(jnp.float32(0))
    with pytest.raises(ValueError, match=r"leaf '\.'.*axis of time"):
        buffer.extend(state, jnp.float32(0))
    with pytest.raises(ValueError, match="at least one leaf"):
        buffer.extend(state, {})


def test_taking_out_of_range():
    for indices in ([8], [-1], [0, 99]):
        with pytest.raises(ValueError, match=re.escape("expected indices in [0, 8)")):
            BUFFER.take(STATE, np.array(indices))
    with pytest.raises(TypeError, match="expected integers"):
        BUFFER.take(STATE, np.array([0.5]))


def test_an_empty_buffer_says_so():
    with pytest.raises(ValueError, match="expected something to draw, got a buffer of size 0"):
        BUFFER.sample(STATE, KEY)


def test_a_draw_that_the_unit_masks_says_so():
    buffer = jrb.ReplayBuffer(8, batch_size=4, unit=AllMasked())
    state = buffer.add(buffer.init({"obs": 0.0}), {"obs": jnp.float32(0)})
    with pytest.raises(ValueError, match="size 1 in which AllMasked masks every anchor"):
        buffer.sample(state, KEY)


def test_nothing_is_written_when_a_call_fails():
    state = BUFFER.add(STATE, step())
    before = jax.tree.map(np.array, state)
    donating = jax.jit(BUFFER.add, donate_argnums=0)
    with pytest.raises(ValueError, match="leaf 'obs'"):
        donating(state, step(obs=jnp.zeros((2, 9))))
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_key_that_items_lack_lists_those_they_have():
    with pytest.raises(ValueError, match=r"reward: expected a leaf at 'next/reward', got .*'r'"):
        jrb.TED.get({"obs": 1, "r": 2}, "reward")


def test_keys_reach_into_dicts_and_attributes():
    item = jrb.BufferState(storage={"a": {"b": 3}}, writer=1, sampler=2, unit=None, edits=0)
    keys = jrb.Keys(reward=("storage", "a", "b"), done="writer")
    assert keys.get(item, "reward") == 3
    assert keys.get(item, "done") == 1
    assert jrb.TED.get({"next": {"observation": 7}}, "next_observation") == 7


def test_a_part_that_is_a_class_is_refused():
    with pytest.raises(TypeError, match="sampler: expected a part"):
        jrb.ReplayBuffer(4, sampler=jrb.Prioritized)


@pytest.mark.parametrize("example", [{}, None, {"a": None}])
def test_items_without_leaves_are_refused(example):
    with pytest.raises(ValueError, match="init: expected at least one leaf"):
        jrb.ReplayBuffer(4).init(example)


def test_indices_of_another_rank_are_refused():
    state = BUFFER.add(STATE, step())
    for indices in (np.int32(1), np.zeros((2, 2), np.int32)):
        with pytest.raises(ValueError, match=r"indices: expected shape \(B,\)"):
            BUFFER.update_priority(state, indices, np.ones(np.shape(indices), np.float32))


@pytest.mark.parametrize("beta", ["high", jnp.ones(3)])
def test_what_is_no_beta(beta):
    with pytest.raises(TypeError, match="beta: expected a single number"):
        BUFFER.sample(BUFFER.add(STATE, step()), KEY, beta=beta)


def test_a_structured_dtype_is_named():
    with pytest.raises(TypeError, match="init: leaf 'x': expected numbers"):
        jrb.ReplayBuffer(4).init({"x": np.zeros(3, [("a", "f4")])})
