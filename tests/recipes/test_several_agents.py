"""Environments of several agents with the shapes of JaxMARL, from its `step` to losses."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

pytestmark = [pytest.mark.slow, pytest.mark.whole]

ENVS, LONGEST = 3, 6
WIDTH = {"ally_0": 5, "ally_1": 5, "enemy_0": 7}


class Battle:
    """Has the interface of JaxMARL: dicts of agents, `__all__`, a state for critics, masks.

    Agents die on their own and get nothing from then on; all ends when the allies or the enemy are
    dead, or after six steps. As in JaxMARL, `step` resets when all ends.
    """

    agents = list(WIDTH)

    def action_space(self, agent):
        return types.SimpleNamespace(
            sample=lambda key: jax.random.randint(key, (), 0, WIDTH[agent])
        )

    def observations(self, key, alive):
        keys = dict(zip(WIDTH, jax.random.split(key, len(WIDTH)), strict=True))
        see = lambda agent: jnp.where(
            alive[agent], jax.random.normal(keys[agent], (WIDTH[agent],)), 0.0
        )
        return {agent: see(agent) for agent in WIDTH} | {"world_state": jnp.ones(9)}

    def reset(self, key):
        alive = dict.fromkeys(WIDTH, jnp.bool_(True))
        return self.observations(key, alive), (alive, jnp.int32(0))

    def step(self, key, state, actions):
        alive, time = state
        keys = jax.random.split(key, 3)
        dies = jax.random.bernoulli(keys[0], 0.15, (len(WIDTH),))
        after = {agent: alive[agent] & ~dies[n] for n, agent in enumerate(WIDTH)}
        rewards = {agent: jnp.where(alive[agent], n + 1.0, 0.0) for n, agent in enumerate(WIDTH)}
        over = ~(after["ally_0"] | after["ally_1"]) | ~after["enemy_0"] | (time + 1 >= LONGEST)
        done = {agent: ~after[agent] for agent in WIDTH} | {"__all__": over}
        fresh = self.reset(keys[1])
        stepped = self.observations(keys[2], after), (after, time + 1)
        seen, state = jax.tree.map(lambda new, old: jnp.where(over, new, old), fresh, stepped)
        return seen, state, rewards, done, {"alive": alive}


def collected(env, steps):
    """Rows `[T, E]` as `jrb.transition` makes them, with who was alive before each step."""

    def step(carry, key):
        seen, state = carry
        keys = jax.random.split(key, ENVS)
        actions = {agent: jnp.zeros(ENVS, jnp.int32) for agent in env.agents}
        after, state, reward, done, info = jax.vmap(env.step)(keys, state, actions)
        row = jrb.transition(seen, actions, after, reward, done=done, alive=info["alive"])
        return (after, state), row

    start = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), ENVS))
    return jax.lax.scan(step, start, jax.random.split(jax.random.key(1), steps))[1]


def made(unit, **parts):
    extra = {"alive": {agent: jnp.zeros((), bool) for agent in WIDTH}}
    options = {"num_envs": ENVS, "batch_size": 64, "unit": unit, "extra": extra, **parts}
    buffer, example = jrb.from_jaxmarl(Battle(), 90, **options)
    rows = jax.jit(lambda: collected(Battle(), 50))()
    state = jax.jit(buffer.extend)(buffer.init(example), rows)
    return buffer, state, jax.device_get(rows)


def episode_of(rows, slot):
    """The steps of an episode from the row in this slot on: of 50 rows, the last 30 are held."""
    time, env = slot // ENVS, slot % ENVS
    time += 30 if time < 20 else 0
    ends = rows["next"]["done"]["__all__"][time:, env]
    length = int(np.argmax(ends)) + 1 if ends.any() else len(ends)
    return jax.tree.map(lambda leaf: leaf[time : time + length, env], rows)


def test_team_returns_of_whole_episodes_in_which_agents_die():
    unit = jrb.Sequence(LONGEST, sample_by="whole_episodes", partial="pad")
    buffer, state, rows = made(unit)
    batch = buffer.sample(state, jax.random.key(2))
    reward = batch.data["next"]["reward"]
    team = sum(jnp.where(batch.mask, each, 0.0) for each in reward.values())
    lengths = set()
    for number, slot in enumerate(np.asarray(batch.indices)):
        want = episode_of(rows, slot)
        length = len(want["next"]["done"]["__all__"])
        lengths.add(length)
        assert batch.mask[number].sum() == length
        total = sum(each.sum() for each in want["next"]["reward"].values())
        assert team[number].sum() == total
        got = jax.tree.map(lambda leaf: leaf[number, :length], batch.data)  # noqa: B023
        chex.assert_trees_all_equal(got, want)
    assert len(lengths) > 2


@pytest.mark.parametrize("agent", WIDTH)
def test_n_step_returns_of_an_agent_run_on_after_its_death_until_all_ends(agent):
    buffer, state, rows = made(jrb.NStep(3, 0.5))
    batch = buffer.sample(state, jax.random.key(2))
    for number, slot in enumerate(np.asarray(batch.indices)):
        rewards = episode_of(rows, slot)["next"]["reward"][agent][:3]
        want = sum(0.5**step * reward for step, reward in enumerate(rewards))
        assert batch.data["next"]["reward"][agent][number] == pytest.approx(want)
        assert batch.info["steps"][number] == len(rewards)


def test_each_agents_loss_leaves_out_the_steps_after_its_death():
    buffer, state, _ = made(jrb.Sequence(4, partial="pad"))
    batch = buffer.sample(state, jax.random.key(3))
    for agent, width in WIDTH.items():
        seen = batch.data["observation"][agent]
        assert seen.shape == (64, 4, width)
        mask = batch.mask & batch.data["alive"][agent]
        assert ((seen != 0).any(axis=-1) == batch.data["alive"][agent])[batch.mask].all()
        assert (batch.data["next"]["reward"][agent] > 0)[mask].all()
        assert (batch.data["next"]["reward"][agent] == 0)[batch.mask & ~mask].all()
        assert bool((batch.mask & ~mask).any()) == agent.startswith("ally")  # else all ends


def test_one_priority_for_all_agents():
    unit, sampler = jrb.Sequence(4, partial="pad"), jrb.Prioritized(1.0)
    buffer, state, _ = made(unit, sampler=sampler)
    batch = buffer.sample(state, jax.random.key(0))
    errors = {agent: batch.data["next"]["reward"][agent] for agent in WIDTH}
    after = buffer.update_priority(state, batch, sum(errors.values()))
    assert bool(buffer.can_sample(after))
    assert float(buffer.priorities(after, batch.indices).max()) > 1
