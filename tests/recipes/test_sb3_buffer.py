"""The buffer for Stable-Baselines3 stores what its own buffer stores, and its models learn."""

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")

from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from examples.sb3_buffer import JrbBuffer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You are trying to run"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ENVS = 3
BOX = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
PICTURE = gymnasium.spaces.Box(0, 255, (2, 3, 3), np.uint8)
SPACES = {
    "array": BOX,
    "dict": gymnasium.spaces.Dict(
        {"place": BOX, "picture": gymnasium.spaces.Box(0, 255, (2, 3, 3), np.uint8)}
    ),
}
ACTIONS = {"discrete": gymnasium.spaces.Discrete(5), "box": gymnasium.spaces.Box(-1, 1, (2,))}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Networks as small as these wait for other threads of torch longer than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps(space, actions, count):
    """Arguments of `add`, as models give them: int64 and float64, and time limits in `infos`."""
    random = np.random.default_rng(0)
    space.seed(0)
    actions.seed(0)
    several = lambda space: jax.tree.map(
        lambda *each: np.stack(each), *[space.sample() for _ in range(ENVS)]
    )
    for _ in range(count):
        done = random.random(ENVS) < 0.4
        infos = [
            {"TimeLimit.truncated": bool(random.random() < 0.5)} if end else {} for end in done
        ]
        action, reward = np.stack([actions.sample() for _ in range(ENVS)]), random.normal(size=ENVS)
        yield several(space), several(space), action, reward.astype(np.float32), done, infos


@pytest.mark.parametrize("time_limits", [True, False])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("space", SPACES)
def test_it_stores_what_theirs_stores(space, actions, time_limits):
    theirs = DictReplayBuffer if space == "dict" else ReplayBuffer
    arguments = 30, SPACES[space], ACTIONS[actions], "cpu", ENVS
    pair = [
        kind(*arguments, handle_timeout_termination=time_limits) for kind in (theirs, JrbBuffer)
    ]
    for each in steps(SPACES[space], ACTIONS[actions], 14):  # of which ten are held
        for buffer in pair:
            buffer.add(*each)
    assert [buffer.size() for buffer in pair] == [10, 10]
    rows = (theirs_rows(pair[0]), ours_rows(pair[1]))
    assert sorted(map(str, rows[0])) == sorted(map(str, rows[1]))
    samples = [buffer.sample(64) for buffer in pair]
    for one, other in zip(jax.tree.leaves(samples[0]), jax.tree.leaves(samples[1]), strict=True):
        assert one.shape == other.shape
        assert one.dtype.is_floating_point == other.dtype.is_floating_point
    kept = set(map(str, rows[1]))
    assert all(str(row) in kept for row in listed(samples[1]))


def listed(samples):
    fields = samples.observations, samples.actions, samples.next_observations
    fields += samples.dones, samples.rewards
    numbers = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), fields)
    flat = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(numbers)]
    return np.concatenate(flat, axis=1).round(5).tolist()


def theirs_rows(buffer):
    every = []
    for env in range(ENVS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np.random, "randint", lambda *_, size, env=env, **__: np.full(size, env))
            every += listed(buffer._get_samples(np.arange(10)))
    return every


def ours_rows(buffer):
    batch = jrb.ReplayBuffer.sample  # of all items, each once
    whole = jrb.Uniform(replacement=False)
    full, state = jrb.from_items(jrb.items(buffer.buffer, buffer.state), sampler=whole)
    return listed(buffer._get_samples(batch(full, state, jax.random.key(0), full.capacity)))


def test_goals_and_files(tmp_path):
    goals = gymnasium.spaces.Dict(dict.fromkeys(("achieved_goal", "desired_goal"), BOX))
    reward = lambda achieved, goal: -jnp.abs(achieved - goal).sum()
    parts = {"unit": jrb.Hindsight(reward), "storage": jrb.MemmapStorage(tmp_path)}
    buffer = JrbBuffer(30, goals, ACTIONS["box"], "cpu", ENVS, **parts)
    for each in steps(goals, ACTIONS["box"], 14):
        buffer.add(*each)
    samples = buffer.sample(64)
    goal, achieved = (
        samples.observations["desired_goal"],
        samples.next_observations["achieved_goal"],
    )
    distance = -(achieved - goal).abs().sum(dim=1, keepdim=True)
    relabeled = (samples.rewards - distance).abs() < 1e-5
    assert 48 <= int(relabeled.sum()) <= 52  # 0.8 of 64, rounded
    assert list(tmp_path.iterdir())


class Corridor(gymnasium.Env):
    """Go right five times; half of the observations is a dict entry that does not matter."""

    observation_space = gymnasium.spaces.Dict({"at": BOX, "noise": BOX})
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.seen(), {}

    def seen(self):
        place = np.full(4, self.at / 5, np.float32)
        return {"at": place, "noise": self.np_random.normal(size=4).clip(-1, 1).astype(np.float32)}

    def step(self, action):
        self.at = max(0, self.at + (1 if action == 1 else -1))
        return self.seen(), float(self.at == 5), self.at == 5, False, {}


def corridor():
    return gymnasium.wrappers.TimeLimit(Corridor(), 20)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"unit": jrb.NStep(3, 0.95)},
        {"storage": jrb.DeviceStorage(share_next_observations=True)},
    ],
)
def test_q_learning_from_dicts_of_several_environments(parts):
    model = DQN(
        "MultiInputPolicy",
        make_vec_env(corridor, 2, seed=0),
        buffer_size=2000,
        learning_starts=200,
        train_freq=4,
        gradient_steps=2,
        learning_rate=5e-3,
        target_update_interval=40,
        gamma=0.95,
        exploration_fraction=0.8,
        policy_kwargs={"net_arch": [32]},
        replay_buffer_class=JrbBuffer,
        replay_buffer_kwargs=parts,
        device="cpu",
        seed=0,
    ).learn(2000)
    env, steps = corridor(), 0
    seen, done = env.reset(seed=1)[0], False
    while not done and steps < 20:
        seen, _, done, _, _ = env.step(int(model.predict(seen, deterministic=True)[0]))
        steps += 1
    assert steps == 5
    discounts = model.replay_buffer.sample(64).discounts
    if parts.get("unit"):
        assert {round(value, 4) for value in discounts.ravel().tolist()} >= {0.8574, 0.95}
    else:
        assert discounts is None


def test_soft_actor_critic_with_normalized_environments(tmp_path):
    def trained():
        env = VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0))
        kwargs = {"replay_buffer_class": JrbBuffer, "policy_kwargs": {"net_arch": [16]}}
        options = {"learning_starts": 50, "batch_size": 16, "buffer_size": 500, "seed": 0}
        return SAC("MlpPolicy", env, device="cpu", **options, **kwargs).learn(300)

    one, other = trained(), trained()
    for name, value in one.policy.state_dict().items():
        np.testing.assert_array_equal(value, other.policy.state_dict()[name])
    replay = one.replay_buffer
    assert replay.size() == 150
    one.save_replay_buffer(tmp_path / "pickled")
    one.load_replay_buffer(tmp_path / "pickled")
    again = one.replay_buffer
    chex.assert_trees_all_equal(again.state, replay.state)
    jrb.save(tmp_path / "saved", replay.buffer, replay.state)
    buffer, state = jrb.load(tmp_path / "saved")
    assert int(buffer.size(state)) == 300
    again.reset()
    assert again.size() == 0
