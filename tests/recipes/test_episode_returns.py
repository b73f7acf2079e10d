"""Returns of complete episodes, stored beside transitions, agree with plain Python."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from examples import episode_returns

AFTER = {"reward": jnp.zeros(()), "done": jnp.zeros((), bool)}
EXAMPLE = {"id": jnp.zeros((), jnp.int32), "episode": episode_returns.EXAMPLE, "next": AFTER}


class Model:
    """All steps of one environment that were ever taken, and the returns of their episodes."""

    def __init__(self):
        self.steps, self.so_far, self.episode, self.totals = {}, np.float32(0), 0, {}

    def step(self, name, reward, done):
        self.steps[name] = self.episode, self.so_far
        self.so_far = np.float32(self.so_far + np.float32(reward))
        if done:
            self.totals[self.episode] = self.so_far
            self.episode, self.so_far = self.episode + 1, np.float32(0)

    def truncate(self):
        if self.episode in {episode for episode, _ in self.steps.values()}:
            self.totals[self.episode] = self.so_far
            self.episode, self.so_far = self.episode + 1, np.float32(0)

    def look_up(self, name):
        episode, before = self.steps[name]
        total = self.totals.get(episode)
        return (0.0, 0.0, False) if total is None else (total, total - before, True)


def played(buffer, steps, seed, chance, masked):
    """A scan of random steps: the last states, and the steps as NumPy has them."""
    envs, random = buffer.num_envs or 1, np.random.default_rng(seed)
    rewards = random.normal(size=(steps, envs)).astype(np.float32)
    done = random.random((steps, envs)) < chance
    mask = random.random((steps, envs)) < (0.7 if masked else 1)
    names = np.arange(steps * envs, dtype=np.int32).reshape(steps, envs)

    def body(carry, step):
        state, table = carry
        name, reward, done, mask = step
        table, leaf = episode_returns.step(table, reward, done, mask)
        item = {"id": name, "episode": leaf, "next": {"reward": reward, "done": done}}
        if buffer.num_envs is None:
            item, mask = jax.tree.map(lambda leaf: leaf[0], item), mask[0]
        return (buffer.add(state, item, mask if masked else None), table), 0

    start = buffer.init(EXAMPLE), episode_returns.init(buffer)
    carry = jax.lax.scan(body, start, (names, rewards, done, mask))[0]
    return carry, (names, rewards, done, mask)


def modelled(names, rewards, done, mask):
    models = {}
    for t, env in np.argwhere(mask):
        model = models.setdefault(env, Model())
        model.step(names[t, env], rewards[t, env], done[t, env])
    return models


PARTS = {
    "one environment": {"capacity": 7, "num_envs": None},
    "environments": {"capacity": 24, "num_envs": 3},
    "masked environments": {"capacity": 24, "num_envs": 3, "writer": jrb.PerEnvironment()},
    "windows": {"capacity": 24, "num_envs": 3, "unit": jrb.Sequence(4, partial="pad")},
    "priorities": {"capacity": 24, "num_envs": 3, "sampler": jrb.Prioritized()},
}


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("steps", [5, 60])
@pytest.mark.parametrize("parts", PARTS)
def test_returns_are_those_of_a_list(parts, steps, chance):
    buffer = jrb.ReplayBuffer(batch_size=128, **PARTS[parts])
    masked = parts == "masked environments"

    @jax.jit
    def program():
        (state, table), history = played(buffer, steps, 0, chance, masked)
        batch = buffer.sample(state, jax.random.key(1))
        return batch, episode_returns.look_up(table, batch.data["episode"]), history

    batch, (total, to_go, known), history = jax.device_get(program())
    models, envs = modelled(*history), buffer.num_envs or 1
    seen = set()
    for at in np.argwhere(batch.mask):
        name = batch.data["id"][tuple(at)]
        want = models[name % envs].look_up(name)
        got = tuple(each[tuple(at)] for each in (total, to_go, known))
        assert got == want  # bit for bit
        seen.add(want[2])
    if chance == 0.3 and envs > 1:
        assert seen == {True, False}


def test_truncated_episodes_end_once():
    buffer = jrb.ReplayBuffer(15, num_envs=3, batch_size=64)
    state, table = buffer.init(EXAMPLE), episode_returns.init(buffer)
    models, random = [Model() for _ in range(3)], np.random.default_rng(0)
    step, truncate = jax.jit(episode_returns.step), jax.jit(episode_returns.truncate)
    add = jax.jit(buffer.add)
    for time in range(60):
        reward, done, cut = random.normal(size=3), random.random(3) < 0.2, random.random(3) < 0.4
        reward, names = reward.astype(np.float32), 3 * time + np.arange(3, dtype=np.int32)
        table, leaf = step(table, reward, done)
        state = add(state, {"id": names, "episode": leaf, "next": {"reward": reward, "done": done}})
        for env, model in enumerate(models):
            model.step(names[env], reward[env], done[env])
        for _ in range(time % 3):  # also twice, and where nothing runs
            table = truncate(table, cut)
            for env in np.flatnonzero(cut):
                models[env].truncate()
    data = jax.device_get(buffer.sample(state, jax.random.key(0)).data)
    looked_up = zip(*map(np.asarray, episode_returns.look_up(table, data["episode"])), strict=True)
    for name, got in zip(data["id"], looked_up, strict=True):
        assert got == models[name % 3].look_up(name)


def test_each_of_several_agents_has_its_own_table():
    buffer = jrb.ReplayBuffer(12, num_envs=2, batch_size=32)
    seeds = jnp.arange(3)
    random = np.random.default_rng(0)
    rewards = random.normal(size=(3, 20, 2)).astype(np.float32)
    done = random.random((3, 20, 2)) < 0.3

    def agent(seed, rewards, done):
        def body(carry, step):
            state, table = carry
            table, leaf = episode_returns.step(table, *step)
            after = {"reward": step[0], "done": step[1]}
            item = {"id": jnp.zeros(2, jnp.int32), "episode": leaf, "next": after}
            return (buffer.add(state, item), table), 0

        start = buffer.init(EXAMPLE), episode_returns.init(buffer)
        state, table = jax.lax.scan(body, start, (rewards, done))[0]
        leaf = buffer.sample(state, jax.random.key(seed)).data["episode"]
        return episode_returns.look_up(table, leaf)

    together = jax.jit(jax.vmap(agent))(seeds, rewards, done)
    alone = [agent(*each) for each in zip(seeds, rewards, done, strict=True)]
    for agents, each in zip(together, zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(agents, np.stack(each))


def test_the_table_is_written_in_place():
    def temporaries(capacity):
        buffer = jrb.ReplayBuffer(capacity, num_envs=4, batch_size=8)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def cycle(state, table, key):
            def body(carry, key):
                state, table = carry
                reward, done = jnp.ones(4), jax.random.bernoulli(key, 0.1, (4,))
                table, leaf = episode_returns.step(table, reward, done)
                after = {"reward": reward, "done": done}
                item = {"id": jnp.zeros(4, jnp.int32), "episode": leaf, "next": after}
                state, batch = buffer.draw(buffer.add(state, item), key)
                total, _, known = episode_returns.look_up(table, batch.data["episode"])
                return (state, table), jnp.sum(jnp.where(known, total, 0.0))

            return jax.lax.scan(body, (state, table), jax.random.split(key, 5))

        given = buffer.init(EXAMPLE), episode_returns.init(buffer), jax.random.key(0)
        return cycle.lower(*given).compile().memory_analysis().temp_size_in_bytes

    assert abs(temporaries(2**16) - temporaries(2**12)) < 1000


def test_it_is_saved_with_the_buffer(tmp_path):
    buffer = jrb.ReplayBuffer(24, num_envs=3, batch_size=8)
    (state, table), _ = played(buffer, 30, 0, 0.2, False)
    jrb.save(tmp_path, buffer, state, extra=table)
    again, restored, extra = jrb.load(tmp_path, extra=table)
    key = jax.random.key(0)
    leaf = again.sample(restored, key).data["episode"]
    want = episode_returns.look_up(table, buffer.sample(state, key).data["episode"])
    chex.assert_trees_all_equal(episode_returns.look_up(extra, leaf), want)
