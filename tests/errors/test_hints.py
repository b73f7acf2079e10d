"""Errors for newcomers: wrong names, classes in place of parts, states of other buffers."""

import copy
import pickle
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import authoring

EXAMPLE = {
    "observation": jnp.zeros(4),
    "action": jnp.int32(0),
    "next": {"reward": jnp.float32(0), "done": jnp.bool_(False)},
}
FLAT = {"obs": np.zeros(3, np.float32), "act": np.int32(0), "rew": np.float32(0)}
FLAT |= {"next_obs": np.zeros(3, np.float32), "terminal": np.bool_(False)}


def filled(**parts):
    buffer = jrb.ReplayBuffer(8, batch_size=2, **parts)
    return buffer, buffer.add(buffer.init(EXAMPLE), EXAMPLE)


def wrong(name):
    buffer, state = filled()
    sample = buffer.sample(state, jax.random.key(0))
    calls = {
        "attribute": lambda: sample.experience,
        "old data": lambda: state.experience,
        "index": lambda: sample["observation"],
        "method": lambda: buffer.push,
        "maker": lambda: jrb.make_prioritised_flat_buffer,
        "spelling": lambda: jrb.NStpe,
        "option": lambda: jrb.NStep(gamma=0.9),
        "misspelt": lambda: jrb.NStep(3, disount=0.9),
        "options": lambda: jrb.ReplayBuffer(max_length=8, sample_batch_size=4),
        "prioritized": lambda: jrb.Prioritized(priority_exponent=0.5),
        "leaf": lambda: sample.observation,
        "cpprb": lambda: jrb.ReplayBuffer(size=8),
        "sampler": lambda: jrb.ReplayBuffer(8, alpha=0.6, prioritized=True),
        "device": lambda: jrb.ReplayBuffer(8, device="cpu", seed=0),
        "dopamine": lambda: jrb.ReplayBuffer(replay_capacity=8, update_horizon=3, stack_size=4),
        "her": lambda: jrb.HerReplayBuffer,
        "plot": lambda: jrb.plot.batch,
        "no state": lambda: buffer.sample(jax.random.key(0)),
        "only an item": lambda: buffer.add(EXAMPLE),
        "only items": lambda: buffer.extend({"x": jnp.zeros(3)}),
        "float": lambda: jrb.ReplayBuffer(1e6),
        "draw": lambda: buffer.draw(jax.random.key(0)),
        "class": lambda: jrb.ReplayBuffer(8, sampler=jrb.Prioritized),
        "string": lambda: jrb.ReplayBuffer(8, unit="n_step"),
        "storage": lambda: jrb.ReplayBuffer(8, storage=jrb.MemmapStorage),
        "writer": lambda: jrb.ReplayBuffer(8, writer="perenvironment"),
        "inner": lambda: jrb.FrameStack(4, unit=jrb.NStep),
        "first": lambda: jrb.Sequence(4, first_only="hidden"),
        "paths": lambda: jrb.FrameStack(4, paths="observation"),
    }
    return calls[name]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("attribute", AttributeError, "experience is data here"),
        ("old data", AttributeError, "'BufferState' object has no attribute 'experience'"),
        ("index", TypeError, r"data\['observation'\]"),
        ("method", AttributeError, "push is add here"),
        ("maker", AttributeError, r"jrb\.ReplayBuffer\(.*jrb\.Prioritized\(\)"),
        ("spelling", AttributeError, r"Did you mean NStep\?"),
        ("option", TypeError, "gamma is discount here"),
        ("misspelt", TypeError, r"Did you mean discount\?"),
        ("options", TypeError, "max_length is capacity.*sample_batch_size is batch_size here"),
        ("prioritized", TypeError, "priority_exponent is alpha"),
        ("leaf", AttributeError, r"observation is a leaf of sample\.data here"),
        ("cpprb", TypeError, r"size is capacity .*buffer\.size\(state\)"),
        ("sampler", TypeError, r"alpha is sampler=jrb\.Prioritized.*prioritized is sampler="),
        ("device", TypeError, r"jax\.default_device.*seed is the key of sample\(state, key\)"),
        ("dopamine", TypeError, r"is capacity.*unit=jrb\.NStep.*unit=jrb\.FrameStack\(k\)"),
        ("her", AttributeError, r"HerReplayBuffer is jrb\.Hindsight here"),
        ("plot", AttributeError, r"^module 'jrb\.plot' has no attribute 'batch'\.$"),
        ("no state", TypeError, r"sample: expected \(state, key\)"),
        ("only an item", TypeError, r"add: expected \(state, item\).*buffer\.add\(state, item\)"),
        ("only items", TypeError, r"extend: expected \(state, items\)"),
        ("float", TypeError, r"capacity: expected an integer, got 1000000\.0\. Write int\("),
        ("draw", TypeError, r"buffer\.draw\(state, key\)"),
        ("class", TypeError, r"Did you mean jrb\.Prioritized\(\.\.\.\)\?"),
        ("string", TypeError, r"Did you mean jrb\.NStep\(\.\.\.\)\?"),
        ("storage", TypeError, r"Did you mean jrb\.MemmapStorage\(\.\.\.\)\?"),
        ("writer", TypeError, r"Did you mean jrb\.PerEnvironment\(\.\.\.\)\?"),
        ("inner", TypeError, r"Did you mean jrb\.NStep\(\.\.\.\)\?"),
        ("first", TypeError, r"Write \('hidden',\)\."),
        ("paths", TypeError, r"Write \('observation',\)\."),
    ],
)
def test_errors_say_what_to_write(name, kind, text):
    with pytest.raises(kind, match=text):
        wrong(name)()


def test_hints_are_in_nobodys_way():
    buffer, state = filled()
    sample = buffer.sample(state, jax.random.key(0))
    for thing in (buffer, state, sample, jrb):
        assert not hasattr(thing, "experience") and not hasattr(thing, "_repr_png_")
    assert pickle.loads(pickle.dumps(buffer)) == buffer == copy.deepcopy(buffer)
    same = copy.copy(copy.deepcopy(jax.device_get(sample)))
    np.testing.assert_array_equal(jax.jit(lambda it: it.indices)(same), sample.indices)
    for name in jrb.__all__:
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'$"):
            getattr(sample, name)


def test_an_example_with_the_axis_of_environments_is_told():
    buffer = jrb.ReplayBuffer(8, num_envs=4)
    steps = {"x": np.zeros((4, 2), np.float32), "done": np.zeros(4, bool)}
    state = buffer.init(steps)
    with pytest.raises(ValueError, match=r"init was given has the axis.*leaf\[0\], example"):
        buffer.add(state, steps)
    with pytest.raises(ValueError, match=r"init was given has the axis"):
        buffer.extend(state, jax.tree.map(lambda leaf: leaf[None], steps))
    with pytest.raises(ValueError, match=r"Give one timestep with leaves \[E"):
        buffer.add(buffer.init({"x": np.zeros(2, np.float32)}), {"x": np.zeros(2, np.float32)})


def test_a_missing_leaf_is_named_first():
    buffer, state = filled()
    item = {name: leaf for name, leaf in EXAMPLE.items() if name != "action"}
    with pytest.raises(ValueError, match=r"^add: leaf 'action': the item is missing \['action'\]:"):
        buffer.add(state, item)
    with pytest.raises(
        ValueError, match=r"^add: leaf 'z': the item has leaves not expected \['z'\]:"
    ):
        buffer.add(state, {**EXAMPLE, "z": 1})


def test_all_keys_that_lack_are_told_at_once():
    unit = jrb.NStep(2, 0.9)
    for keys in (jrb.TED, jrb.Keys(done="terminal")):
        with pytest.raises(ValueError, match=r"keys=jrb\.Keys") as caught:
            jrb.ReplayBuffer(8, unit=unit, keys=keys).init(FLAT)
        text = str(caught.value)
        for guess in ("observation='obs'", "action='act'", "reward='rew'"):
            assert guess in text
        assert "next_observation='next_obs'" in text
    assert "done='terminal'" not in text


@pytest.mark.parametrize(
    ("made", "used", "text"),
    [
        ({"sampler": jrb.Prioritized()}, {}, "sampler is Uniform.*a buffer with Prioritized"),
        ({}, {"sampler": jrb.Prioritized()}, "sampler is Prioritized.*a buffer with Uniform"),
        ({"unit": jrb.NStep(2, 0.9)}, {"unit": jrb.Sequence(2)}, "is Sequence.* with NStep"),
        ({"sampler": jrb.Queue()}, {"sampler": jrb.Prioritized()}, "is Prioritized.* with Queue"),
    ],
)
def test_a_state_of_another_buffer_is_told_by_its_parts(made, used, text):
    state = filled(**made)[1]
    with pytest.raises(TypeError, match=text) as caught:
        filled(**used)[0].sample(state, jax.random.key(0))
    assert "float32[" not in str(caught.value)


def test_refused_priorities_are_told_once():
    buffer, state = filled(sampler=jrb.Prioritized(alpha=0.31))
    sample = buffer.sample(state, jax.random.key(0))
    bad = jnp.array([jnp.nan, -1.0])
    with pytest.warns(jrb.PriorityWarning, match="update_priority: 2 priorities are NaN"):
        buffer.update_priority(state, sample, bad)
    buffer.update_priority(state, sample, bad)  # warnings are errors here
    other, state = filled(sampler=jrb.Prioritized(alpha=0.32))
    sample, jitted = other.sample(state, jax.random.key(0)), jrb.jitted(other)
    with pytest.warns(jrb.PriorityWarning, match=r"update_priority: 1 .* such as inf"):
        state = jitted.update_priority(state, sample, np.array([1e39, 1.0]))
    other, state = filled(sampler=jrb.Prioritized(alpha=0.33))
    with pytest.warns(jrb.PriorityWarning, match="add: 1 priorities"):
        other.add(state, EXAMPLE, priorities=-1.0)


def test_refused_priorities_cost_no_wait_and_nothing_inside_jit():
    buffer, state = filled(sampler=jrb.Prioritized(alpha=0.34))
    sample = buffer.sample(state, jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(buffer.update_priority)(state, sample, jnp.array([jnp.nan, 1.0]))
        methods = jrb.jitted(buffer)
        methods.update_priority(jax.tree.map(jnp.copy, state), sample, jnp.array([jnp.nan, 1.0]))
        masked = sample.replace(mask=jnp.array([False, True]))
        buffer.update_priority(state, masked, np.array([np.nan, 1.0]))


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"^nosuchthing is not .*jrb\[plot\]"):
        authoring.require("nosuchthing.axes", "plot")
    code = (
        "import sys; sys.modules['orbax'] = None; import jrb.checkpoint\n"
        "try: jrb.checkpoint.orbax\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'jrb[orbax]'" in ran.stdout


@pytest.mark.parametrize(
    ("kind", "name"), [("writer", "ringwriter"), ("writer", "onebyone"), ("sampler", "onceinorder")]
)
def test_no_hint_names_a_base_that_cannot_be_made(kind, name):
    with pytest.raises(TypeError, match=r"expected a part, got .* Make a "):
        jrb.ReplayBuffer(8, **{kind: name})
