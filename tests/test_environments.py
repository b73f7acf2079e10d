"""Buffers made from environments, and rows made from their steps."""

import dataclasses
import inspect
import types
from typing import Unpack

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList

import jrb
from jrb._core.validate import read_items
from jrb.buffer import BufferOptions, BufferParts
from jrb.remote import setup


class Counting(gymnasium.Env):
    """Observations count steps since the reset; episodes end after a given number of steps."""

    def __init__(self, length, is_dict):
        self.length, self.is_dict = length, is_dict
        box = spaces.Box(0, 100, (1,), np.float64)
        self.observation_space = spaces.Dict(t=box, k=spaces.Discrete(3)) if is_dict else box
        self.action_space = spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary(2)])

    def _seen(self):
        t = np.array([self.t], np.float64)
        return {"t": t, "k": 1} if self.is_dict else t

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        return self._seen(), float(self.t), self.t == self.length, False, {}


LENGTHS = (2, 5, 3)
ACTION = (np.zeros(3, np.int64), np.zeros((3, 2), np.int8))


def count_of(observation, is_dict):
    return np.asarray(observation["t"] if is_dict else observation)


@pytest.mark.parametrize("is_dict", [False, True])
@pytest.mark.parametrize("mode", [*AutoresetMode, "list of infos"])
def test_rows_of_vectors_are_true_transitions(mode, is_dict):
    makers = [lambda n=n: Counting(n, is_dict) for n in LENGTHS]
    if mode == "list of infos":
        envs = DictInfoToList(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP))
    else:
        envs = SyncVectorEnv(makers, autoreset_mode=mode)
    buffer, example = jrb.from_gymnasium(envs, 100, batch_size=4, unit=jrb.NStep(2, 0.9))
    assert (buffer.num_envs, buffer.capacity) == (3, 99)
    is_next = mode == AutoresetMode.NEXT_STEP
    assert isinstance(buffer.writer, jrb.PerEnvironment if is_next else jrb.RoundRobin)
    methods = jrb.jitted(buffer)
    state, ended = methods.init(example), np.zeros(3, bool)
    observation, _ = envs.reset()
    for _ in range(30):
        stepped = envs.step(ACTION)
        row = jrb.transition(observation, ACTION, *stepped)
        state = methods.add(state, row, **({"mask": ~ended} if is_next else {}))
        observation, ended = stepped[0], stepped[2] | stepped[3]
        if mode == AutoresetMode.DISABLED and ended.any():
            observation, _ = envs.reset(options={"reset_mask": ended})
    rows = jrb.items(buffer, state)
    before = count_of(rows["observation"], is_dict)
    after = count_of(rows["next"]["observation"], is_dict)
    assert (after == before + 1).all()
    np.testing.assert_array_equal(after[..., 0], rows["next"]["reward"])
    lengths = {
        (one.environment, len(one.slots)) for one in jrb.episodes(buffer, state) if one.complete
    }
    assert lengths == set(enumerate(LENGTHS))


def test_a_single_environment_has_no_axis_of_environments():
    env = Counting(4, True)
    buffer, example = jrb.from_gymnasium(env, 50, batch_size=2, extra={"hidden": jnp.zeros(3)})
    assert buffer.num_envs is None
    assert example["observation"]["k"].dtype == jnp.int32
    assert example["observation"]["t"].dtype == jnp.float32
    observation, _ = env.reset()
    stepped = env.step((0, np.zeros(2, np.int8)))
    row = jrb.transition(observation, (0, np.zeros(2, np.int8)), *stepped, hidden=np.zeros(3))
    state = buffer.add(buffer.init(example), row)
    assert jrb.items(buffer, state)["next"]["reward"].tolist() == [1.0]


def test_options_replace_what_the_environment_says():
    envs = SyncVectorEnv([lambda: Counting(2, False)] * 2)
    buffer, _ = jrb.from_gymnasium(envs, 10, writer=jrb.RoundRobin(), cast=False)
    assert isinstance(buffer.writer, jrb.RoundRobin)
    assert not buffer.cast


def steps_of(envs, count):
    """Yields rows of steps, and masks of those that are transitions, of `NEXT_STEP` vectors."""
    observation, _ = envs.reset()
    ended = np.zeros(envs.num_envs, bool)
    for _ in range(count):
        stepped = envs.step(ACTION)
        yield jrb.transition(observation, ACTION, *stepped), ~ended
        observation, ended = stepped[0], stepped[2] | stepped[3]


@pytest.mark.slow
def test_a_buffer_for_resets_in_the_next_step_refuses_writes_without_a_mask():
    envs = SyncVectorEnv([lambda n=n: Counting(n, False) for n in LENGTHS])
    buffer, example = jrb.from_gymnasium(envs, 60, batch_size=3, sampler=jrb.Prioritized())
    sharded, methods = jrb.Sharded(buffer, 3), jrb.jitted(buffer)
    sharded_methods = jrb.jitted(sharded)
    (row, mask), *_ = steps_of(envs, 1)
    rows = jax.tree.map(lambda leaf: np.asarray(leaf)[None], row)
    state, shards = buffer.init(example), sharded.init(example)
    writes = {
        "add": lambda *mask: buffer.add(state, row, *mask),
        "jitted add": lambda *mask: methods.add(buffer.init(example), row, *mask),
        "add in jit": lambda *mask: jax.jit(buffer.add)(
            state, read_items(row, "add", buffer.cast), *mask
        ),
        "sharded add": lambda *mask: sharded.add(shards, row, *mask),
        "jitted sharded add": lambda *mask: sharded_methods.add(sharded.init(example), row, *mask),
    }
    longer = {
        "extend": lambda *mask: buffer.extend(state, rows, *mask),
        "jitted extend": lambda *mask: methods.extend(buffer.init(example), rows, *mask),
        "sharded extend": lambda *mask: sharded.extend(shards, rows, *mask),
    }
    for name, write in (writes | longer).items():
        is_add = "add" in name
        for wrong in ([], [None], [np.bool_(True) if is_add else np.ones(1, bool)]):
            with pytest.raises(TypeError, match="mask: expected one flag for each environment"):
                write(*wrong)
        assert write(mask if is_add else mask[None]) is not None, name


def test_streams_to_a_server_need_the_mask_too():
    envs = SyncVectorEnv([lambda n=n: Counting(n, False) for n in LENGTHS])
    buffer, example = jrb.from_gymnasium(envs, 60, batch_size=3)
    spec = setup.spec_of_example(buffer, example)
    one = setup.Setup(buffer, spec, 2, 1, None, 0, None, 4, True, False)
    with pytest.raises(TypeError, match="extend: mask: expected one flag for each environment"):
        setup.convert_mask(one, None, 5)
    assert setup.convert_mask(one, np.ones((5, 3), bool), 5).all()


@pytest.mark.parametrize("storage", [jrb.DeviceStorage(), "files"])
def test_with_the_mask_only_transitions_are_stored(storage, tmp_path):
    envs = SyncVectorEnv([lambda n=n: Counting(n, False) for n in LENGTHS])
    storage = jrb.MemmapStorage(tmp_path / "rows") if storage == "files" else storage
    buffer, example = jrb.from_gymnasium(envs, 90, batch_size=3, storage=storage)
    methods = jrb.jitted(buffer)
    state = methods.init(example)
    with pytest.raises(TypeError, match="mask=~ended"):
        methods.add(state, next(steps_of(envs, 1))[0])
    for row, mask in steps_of(envs, 25):
        state = methods.add(state, row, mask=mask)
    rows = jrb.items(buffer, state)
    assert (rows["next"]["observation"] == rows["observation"] + 1).all()
    # Items that are held already are transitions: to move them takes no mask.
    other = dataclasses.replace(buffer, capacity=30, storage=jrb.DeviceStorage())
    moved = jrb.rebuild(buffer, state, other)
    assert int(other.size(moved)) > 20
    again, _ = jrb.from_items({"x": np.arange(3, dtype=np.int32)}, requires_mask=True)
    assert again.requires_mask


SPACES_OF_VECTORS = ("single_observation_space", "single_action_space")


class Renamed(gymnasium.Wrapper):
    """A wrapper around `Autoreset`, as users have them."""


def test_which_environments_require_a_mask():
    single, two = Counting(2, False), [lambda: Counting(2, False)] * 2
    spaces_of = {name: getattr(SyncVectorEnv(two), name) for name in SPACES_OF_VECTORS}
    old = types.SimpleNamespace(num_envs=2, **spaces_of)  # does not say when it resets
    envs = {
        "single": (single, False),
        "autoreset": (Renamed(gymnasium.wrappers.Autoreset(single)), True),
        "does not say": (old, True),
    }
    for mode in AutoresetMode:  # made one after the other, they share their metadata
        vector = SyncVectorEnv(two, autoreset_mode=mode)
        envs[mode.name] = vector, mode == AutoresetMode.NEXT_STEP
    for name, (env, expected) in envs.items():
        assert jrb.from_gymnasium(env, 8)[0].requires_mask == expected, name
        assert not jrb.from_gymnasium(env, 8, requires_mask=False)[0].requires_mask
    buffer, example = jrb.from_gymnasium(envs["autoreset"][0], 8)
    row = jrb.transition(np.zeros(1), (0, np.zeros(2, np.int8)), np.ones(1), 1.0, True, False, {})
    with pytest.raises(TypeError, match="mask: expected one flag"):
        buffer.add(buffer.init(example), row)


def test_functions_that_pass_options_on_have_those_of_a_buffer():
    fields = [field.name for field in dataclasses.fields(jrb.ReplayBuffer)]
    assert sorted(["capacity", *BufferOptions.__annotations__]) == sorted(fields)
    functions = [jrb.from_gymnasium, jrb.from_gymnax, jrb.from_brax, jrb.from_jaxmarl]
    for function in [*functions, jrb.from_items, jrb.ReplayBuffer.rounded]:
        last = list(inspect.signature(function).parameters.values())[-1]
        expected = BufferOptions if function in functions else BufferParts
        assert last.annotation == Unpack[expected], function


def test_spaces_without_arrays_are_refused():
    env = Counting(2, False)
    env.observation_space = spaces.Dict(text=spaces.Text(5))
    with pytest.raises(TypeError, match="leaf 'observation/text': expected a space of arrays"):
        jrb.from_gymnasium(env, 10)
    env.observation_space = spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))])
    with pytest.raises(TypeError, match="expected a space of arrays, got OneOf"):
        jrb.from_gymnasium(env, 10)


SPACES = {
    "start": (spaces.Discrete(9, start=-4), -4, (), "int32"),
    "several": (spaces.MultiDiscrete([[3, 4], [5, 6]]), np.ones((2, 2), int), (2, 2), "int32"),
    "bits": (spaces.MultiBinary(3), np.ones(3, np.int8), (3,), "int8"),
    "double": (spaces.Box(-1, 1, (2,), np.float64), np.ones(2), (2,), "float32"),
    "half": (spaces.Box(-1, 1, (2,), np.float16), np.ones(2, np.float16), (2,), "float16"),
    "scalar": (spaces.Box(-1, 1, ()), np.float32(0.5), (), "float32"),
}


@pytest.mark.parametrize("name", SPACES)
def test_elements_of_spaces_come_back(name):
    space, element, shape, dtype = SPACES[name]
    env = Counting(2, False)
    env.action_space = spaces.Dict(inner=spaces.Tuple([space]))
    buffer, example = jrb.from_gymnasium(env, 8, batch_size=2)
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), example["action"]) == {
        "inner": ((shape, dtype),)
    }
    row = jrb.transition(np.zeros(1), {"inner": (element,)}, np.ones(1), 1.0, True, False, {})
    state = buffer.add(buffer.init(example), row)
    np.testing.assert_array_equal(jrb.items(buffer, state)["action"]["inner"][0][0], element)


def test_last_observations_of_a_mask_are_those_of_ended_environments():
    after, flags = np.zeros((3, 2)), np.array([False, True, False])
    info = {"final_obs": np.full((3, 2), 7.0), "_final_obs": flags}
    row = jrb.transition(after - 1, 0, after, np.ones(3), flags, ~flags, info)
    assert row["next"]["observation"].tolist() == [[0, 0], [7, 7], [0, 0]]


def test_a_transition_needs_a_flag():
    with pytest.raises(ValueError, match="terminated, truncated or done"):
        jrb.transition(0, 0, 0, 0.0)


def test_the_caller_keeps_arrays_that_the_environment_uses_again():
    after, final = np.zeros((2, 1)), np.array([np.ones(1), None], object)
    flags = np.array([True, False])
    row = jrb.transition(after, 0, after, np.ones(2), flags, ~flags, {"final_obs": final})
    assert row["next"]["observation"].tolist() == [[1.0], [0.0]]
    assert after.tolist() == [[0.0], [0.0]]


@jax.numpy_dtype_promotion("standard")
def test_rows_of_gymnax_inside_jit():
    env, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=7)
    buffer, example = jrb.from_gymnax(env, params, 103, num_envs=4, batch_size=8)
    assert buffer.capacity == 100
    one = jax.vmap(env.step, (0, 0, 0, None))

    def step(carry, key):
        observation, worlds, state = carry
        keys = jax.random.split(key, 4)
        action = jax.vmap(env.action_space(params).sample)(keys)
        after, worlds, *rest = one(keys, worlds, action, params)
        row = jrb.transition(observation, action, after, *rest)
        return (after, worlds, buffer.add(state, row)), None

    observation, worlds = jax.vmap(env.reset, (0, None))(
        jax.random.split(jax.random.key(1), 4), params
    )
    keys = jax.random.split(jax.random.key(0), 20)
    (_, _, state), _ = jax.jit(lambda *c: jax.lax.scan(step, c, keys))(
        observation, worlds, buffer.init(example)
    )
    episodes = [one for one in jrb.episodes(buffer, state) if one.complete]
    assert len(episodes) >= 8
    for one in episodes:
        rows = jax.tree.map(np.asarray, buffer.take(state, one.slots))
        before, after = rows["observation"], rows["next"]["observation"]
        assert len(before) == 7
        assert rows["next"]["truncated"].tolist() == [False] * 6 + [True]
        np.testing.assert_array_equal(after[:-1], before[1:])
        assert 0 < np.abs(after[-1] - before[-1]).max() < 1


class FakeBrax:
    """A fake brax environment: returns the fields of `brax.envs.State` and checks keys."""

    action_size = 2

    def _state(self, number):
        info = {"truncation": jnp.zeros(())}
        return types.SimpleNamespace(
            obs=jnp.full(5, number), reward=jnp.ones(()), done=jnp.zeros(()), info=info
        )

    def reset(self, key):
        jax.random.uniform(key)  # raises if the array is not a key
        return self._state(0.0)

    def step(self, state, action):
        assert action.shape == (2,)
        return self._state(1.0)


class Wrapped:
    """A fake of brax's `VmapWrapper`: `reset` takes a batch of keys, or splits one key."""

    action_size = 2

    def __init__(self, env, batch_size=None, width=5):
        self.env, self.unwrapped, self.batch_size, self.width = env, env, batch_size, width

    def _mapped(self, function, *arguments):
        pack = lambda state: (state.obs[: self.width], state.reward, state.done)
        obs, reward, done = jax.vmap(lambda *each: pack(function(*each)))(*arguments)
        return types.SimpleNamespace(obs={"state": obs}, reward=reward, done=done, info={})

    def reset(self, key):
        keys = key if self.batch_size is None else jax.random.split(key, self.batch_size)
        return self._mapped(self.env.reset, keys)

    def step(self, state, action):
        return self._mapped(lambda a: self.env.step(None, a), action)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "options", "observation"),
    [
        (FakeBrax(), {"num_envs": 3}, (5,)),
        (Wrapped(FakeBrax()), {"num_envs": 3}, {"state": (5,)}),
        (Wrapped(FakeBrax(), 3), {}, {"state": (5,)}),
        (Wrapped(FakeBrax(), 3, width=4), {}, {"state": (4,)}),  # the wrapper changes observations
    ],
)
def test_brax(env, options, observation):
    buffer, example = jrb.from_brax(env, 100, unit=jrb.NStep(3, 0.9), **options)
    assert (buffer.capacity, buffer.num_envs) == (99, 3)
    assert jax.tree.map(jnp.shape, example) == {
        "observation": observation,
        "action": (2,),
        "next": {"observation": observation, "reward": (), "terminated": (), "truncated": ()},
    }
    state = buffer.init(example)
    rows = jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape), leaf.dtype), example)
    assert int(buffer.size(buffer.add(state, rows))) == 3


class FakeMarl:
    """A fake JaxMARL environment with two agents."""

    agents = ("a", "b")

    def action_space(self, agent):
        return types.SimpleNamespace(sample=lambda key: jax.random.randint(key, (), 0, 3))

    def reset(self, key):
        return {agent: jnp.zeros(4) for agent in self.agents}, 0

    def step(self, key, state, action):
        done = dict.fromkeys((*self.agents, "__all__"), jnp.zeros((), bool))
        reward = {"a": jnp.int32(1), "b": jnp.float32(1)}  # dtypes differ, as in MPE's simple_tag
        return self.reset(key)[0], 0, reward, done, {}


def test_several_agents():
    buffer, example = jrb.from_jaxmarl(
        FakeMarl(), 64, num_envs=2, unit=jrb.NStep(2, 0.5), batch_size=4
    )
    assert sorted(example["next"]["done"]) == ["__all__", "a", "b"]
    assert example["next"]["reward"]["a"].dtype == jnp.float32
    rows = jax.tree.map(lambda leaf: jnp.ones((6, 2, *leaf.shape), leaf.dtype), example)
    rows["next"]["done"] = jax.tree.map(jnp.zeros_like, rows["next"]["done"])
    rows["next"]["reward"]["a"] = jnp.ones((6, 2), jnp.int32)
    state = buffer.extend(buffer.init(example), rows)
    batch = buffer.sample(state, jax.random.key(0))
    assert batch.data["next"]["reward"]["b"].max() == 1.5
