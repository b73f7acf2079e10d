"""Leaves that look like a role without a key are refused; flags of agents are combined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

UNITS = [
    jrb.NStep(2, 0.9),
    jrb.NStep(2, 0.9, strict=True),
    jrb.Sequence(2),
    jrb.Sequence(2, cross_episodes=True),
    jrb.FrameStack(2),
    jrb.FrameStack(2, unit=jrb.NStep(2, 0.9)),
    jrb.Hindsight(lambda reached, goal: jnp.float32(0), achieved="obs", goal="obs", next_goal=None),
]
FLAT = {"observation": "obs", "reward": "r", "next_observation": "next_obs"}


def item(*flags, **more):
    number, flag = np.float32(0), np.bool_(False)
    parts = {"obs": number, "act": number, "r": number, "next_obs": number}
    return {**parts, **dict.fromkeys(flags, flag), **more}


def init(keys, example, unit, transforms=()):
    buffer = jrb.ReplayBuffer(8, batch_size=2, unit=unit, keys=keys, transforms=transforms)
    return jax.eval_shape(buffer.init, example)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: repr(unit).split(" at ")[0])
@pytest.mark.parametrize("other", ["terminated", "truncated", "next_terminated", "next_truncated"])
def test_a_flag_that_is_not_named_is_an_error(unit, other):
    keys = jrb.Keys(done="done", **FLAT)
    role = other.removeprefix("next_")
    with pytest.raises(ValueError, match=f"{role}: leaf '{other}'.*{role}='{other}'"):
        init(keys, item("done", other), unit)
    init(jrb.Keys(done="done", **FLAT, **{role: other}), item("done", other), unit)
    init(jrb.Keys(done="done", **FLAT, **{role: None}), item("done", other), unit)


def test_what_is_left_out_by_keys_is_no_flag():
    keys = jrb.Keys(done="done", truncated=None, **FLAT)
    rows = jax.tree.map(lambda leaf: np.repeat(leaf, 6), item("done", "truncated"))
    rows["truncated"] = np.arange(6) % 2 == 0
    buffer, state = jrb.from_items(rows, unit=jrb.NStep(2, 0.9), keys=keys, batch_size=64)
    sample = buffer.sample(state, jax.random.key(0))
    assert set(zip(sample.indices.tolist(), sample.info["steps"].tolist(), strict=True)) == {
        *((slot, 2) for slot in range(5)),
        (5, 1),
    }
    np.testing.assert_array_equal(sample.data["truncated"], sample.indices % 2 == 0)


@pytest.mark.parametrize("name", ["next_observation", "next_obs"])
def test_a_next_observation_that_is_not_named_is_an_error(name):
    example = {"obs": np.float32(0), "r": np.float32(0), "done": np.bool_(0), name: np.float32(0)}
    keys = {"observation": "obs", "reward": "r", "done": "done"}
    with pytest.raises(ValueError, match=f"next_observation: leaf '{name}'.*jrb.Keys"):
        init(jrb.Keys(**keys), example, jrb.NStep(2, 0.9))
    for named in (name, None):
        init(jrb.Keys(**keys, next_observation=named), example, jrb.NStep(2, 0.9))


def test_nested_names_are_found_beside_what_is_named():
    after = {"r": np.float32(0), "over": np.bool_(0), "truncated": np.bool_(0)}
    keys = {"reward": ("step", "r"), "done": ("step", "over")}
    with pytest.raises(ValueError, match=r"truncated=\('step', 'truncated'\)"):
        init(jrb.Keys(**keys), {"obs": np.float32(0), "step": after}, jrb.NStep(2, 0.9))
    flat = {"next/reward": np.float32(0), "next/done": np.bool_(0), "next/truncated": np.bool_(0)}
    keys = {"reward": "next/reward", "done": "next/done"}
    with pytest.raises(ValueError, match="truncated='next/truncated'"):
        init(jrb.Keys(**keys), flat, jrb.NStep(2, 0.9))


def test_running_returns_ask_for_all_flags_too():
    scale = (jrb.transforms.RunningRewardScale(),)
    with pytest.raises(ValueError, match="truncated: leaf 'truncated'"):
        init(jrb.Keys(done="done", **FLAT), item("done", "truncated"), jrb.Transition(), scale)


@pytest.mark.parametrize(
    "example",
    [
        item("done", info={"terminated": np.bool_(0), "done": np.bool_(0)}),
        item("done", terminated_by_user=np.bool_(0)),
        item("done", action={"done": np.float32(0), "truncated": np.float32(0)}),
    ],
    ids=["info", "longer name", "inside another leaf"],
)
def test_other_leaves_of_such_names_are_no_roles(example):
    for unit in UNITS:
        init(jrb.Keys(done="done", **FLAT), example, unit)


def test_flags_of_the_observation_beside_those_of_the_next_are_no_roles():
    flags = {"done": np.bool_(0), "terminated": np.bool_(0), "truncated": np.bool_(0)}
    after = {"observation": np.float32(0), "reward": np.float32(0), **flags}
    init(jrb.TED, {"observation": np.float32(0), **flags, "next": after}, jrb.NStep(2, 0.9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        ({"done": {"a": [1, 0, 1], "b": [0, 1, 1]}}, [0, 0, 1]),
        ({"done": {"a": [1, 0, 1], "b": [1, 1, 1], "__all__": [0, 1, 0]}}, [0, 1, 0]),
        (
            {
                "terminated": {"a": [1, 0, 0], "b": [0, 0, 1]},
                "truncated": {"a": [0, 0, 1], "b": [1, 0, 0]},
            },
            [1, 0, 1],
        ),
        ({"done": [0, 0, 1], "terminated": {"a": [1, 0, 0], "b": [1, 1, 0]}}, [1, 0, 1]),
    ],
    ids=["dones", "__all__", "two kinds", "one for all too"],
)
def test_an_episode_ends_where_all_agents_are_done(flags, ends):
    flags = jax.tree.map(
        lambda leaf: np.array(leaf, bool), flags, is_leaf=lambda x: isinstance(x, list)
    )
    rows = {"next": {"reward": np.ones(3, np.float32), **flags}}
    buffer, state = jrb.from_items(rows, unit=jrb.Sequence(1), batch_size=64)
    sample = buffer.sample(state, jax.random.key(0))
    found = dict(zip(sample.indices.tolist(), sample.info["is_last"][:, 0].tolist(), strict=True))
    assert [found[slot] for slot in range(3)] == [bool(end) for end in ends]
    assert jrb.datasets.trajectories.lengths(rows).sum() == 3
    # Edited flags are combined over agents too.
    state = buffer.set(state, jnp.array([0]), {"next": jax.tree.map(lambda leaf: leaf[2:], flags)})
    again = buffer.sample(state, jax.random.key(0))
    assert set(again.info["is_last"][again.indices == 0, 0].tolist()) == {bool(ends[2])}


def test_flags_of_agents_of_another_shape_are_refused():
    rows = {"next": {"reward": np.ones(3, np.float32), "done": {"a": np.zeros((3, 2), bool)}}}
    with pytest.raises(ValueError, match=r"leaf 'next/done/a': expected shape \(\) or \(1,\)"):
        jrb.from_items(rows, unit=jrb.Sequence(1))
