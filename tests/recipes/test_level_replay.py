"""Level replay (PLR) agrees with its formula in NumPy: probabilities, draws, and whole runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jrb
from examples import level_replay
from examples.parts.rank_based import RankBased

N, B = 12, 3
PLR = jrb.Weighted(level_replay.weights, leaves=("score", "last"))
BUFFER = jrb.ReplayBuffer(N, batch_size=B, sampler=PLR)
KEY = jax.random.key(0)


def by_score(scores, temperature):
    """Returns P_S of levels in the order of their slots; of equal scores the first comes first."""
    ranks = {level: rank for rank, level in enumerate(sorted(scores, key=lambda k: -scores[k]), 1)}
    powers = {level: ranks[level] ** (-1.0 / temperature) for level in sorted(scores)}
    return {level: power / sum(powers.values()) for level, power in powers.items()}


def by_staleness(last, episode):
    """Returns P_C; None if all levels were played in the newest episodes."""
    total = sum(episode - number for number in last.values())
    return {level: (episode - last[level]) / total for level in last} if total else None


def formula(scores, last, episode, rho, temperature):
    """Returns P_replay of each slot, a float64 `[N]` of zeros where there is no level."""
    first = by_score({slot: scores[slot] for slot in sorted(scores)}, temperature)
    second = by_staleness(last, episode) or first
    chances = np.zeros(N)
    for slot, chance in first.items():
        chances[slot] = (1 - rho) * chance + rho * second[slot]
    return chances


def context_of(episode, rho=0.1, temperature=0.1):
    numbers = {"rho": jnp.float32(rho), "temperature": jnp.float32(temperature)}
    return numbers | {"episode": jnp.int32(episode)}


def filled(count, seed, buffer=BUFFER):
    """Returns a state with levels of scores with ties, and the model of its slots."""
    random = np.random.default_rng(seed)
    scores = random.integers(0, 4, count).astype(np.float32) / 2
    last = random.integers(0, 50, count).astype(np.int32)
    items = {"level": np.arange(count, dtype=np.int32), "score": scores, "last": last}
    state = buffer.init(level_replay.EXAMPLE)
    for start in range(0, count, 5):
        piece = jax.tree.map(lambda leaf: leaf[start : start + 5], items)  # noqa: B023
        state = buffer.extend(state, piece)
    held = {number % N: number for number in range(count)}
    return state, *({slot: leaf[n] for slot, n in held.items()} for leaf in (scores, last))


draw_many = jax.jit(functools.partial(BUFFER.sample, batch_size=4000))


@pytest.mark.parametrize("count", [1, 2, 7, N, 3 * N + 5])
def test_probabilities_and_draws_are_those_of_the_formula(count):
    state, scores, last = filled(count, count)
    for rho, temperature in ((0.1, 0.1), (0.5, 1.0), (1.0, 0.3), (0.0, 2.0)):
        chances = formula(scores, last, 60, rho, temperature)
        batch = draw_many(state, KEY, context=context_of(60, rho, temperature))
        slots = np.asarray(batch.indices)
        np.testing.assert_allclose(batch.probabilities, chances[slots], rtol=2e-5)
        drawn, likely = np.bincount(slots, minlength=N), chances * 4000 >= 5
        assert not drawn[chances == 0].any()
        # Rare levels form one class of the test.
        got, want = ([*x[likely], x[~likely].sum()] for x in (drawn, chances * 4000))
        if want[-1] < 1e-9:
            got, want = got[:-1], want[:-1]
        if len(want) > 1:
            assert stats.chisquare(got, want, sum_check=False).pvalue > 1e-4


def test_levels_that_are_all_fresh_are_drawn_by_score():
    state, scores, _ = filled(5, 1)
    everything = jnp.arange(5, dtype=jnp.int32)
    state = BUFFER.set(state, everything, {"last": jnp.full(5, 60, jnp.int32)})
    batch = draw_many(state, KEY, context=context_of(60, rho=1.0))
    chances = formula(scores, dict.fromkeys(range(5), 60), 60, 1.0, 0.1)
    np.testing.assert_allclose(batch.probabilities, chances[batch.indices], rtol=2e-5)


def run(buffer, state, key, steps=40):
    """Replays or adds levels in one scan, as algorithm 1; returns the state, and what happened."""

    def step(carry, key):
        state, episode = carry
        keys = jax.random.split(key, 4)
        state, batch = buffer.draw(state, keys[0], context=context_of(episode))
        is_new = jax.random.bernoulli(keys[1], 0.3, (B,)) | ~batch.mask
        new = jax.random.randint(keys[2], (B,), 0, 2**31 - 1)
        score = jax.random.randint(keys[3], (B,), 0, 4).astype(jnp.float32) / 2
        level, episode = jnp.where(is_new, new, batch.data["level"]), episode + B
        values = {"score": score, "last": jnp.full(B, episode)}
        state = buffer.set(state, batch.replace(mask=batch.mask & ~is_new), values)
        state = buffer.extend(state, values | {"level": level}, mask=is_new)
        drawn = batch.indices, batch.probabilities, batch.mask
        return (state, episode), (*drawn, is_new, level, score)

    start = state, jnp.int32(0)
    (state, _), history = jax.lax.scan(step, start, jax.random.split(key, steps))
    return state, history


def check_run(state, history):
    """Replays a run in plain Python, and compares each probability and the last state."""
    scores, last, levels, number = {}, {}, {}, 0
    for turn, (slots, chances, mask, is_new, level, score) in enumerate(zip(*history, strict=True)):
        assert mask.all() == bool(scores)
        if scores:
            want = formula(scores, last, turn * B, 0.1, 0.1)
            np.testing.assert_allclose(chances, want[slots], rtol=2e-5)
            replayed = [levels[slot] for slot in slots[~is_new]]
            np.testing.assert_array_equal(level[~is_new], replayed)
        for one in np.argsort(is_new, stable=True):  # replayed levels are written first
            slot = number % N if is_new[one] else slots[one]
            number += is_new[one]
            scores[slot], last[slot], levels[slot] = score[one], turn * B + B, level[one]
    items = BUFFER.take(state, jnp.arange(len(scores)))
    for name, model in (("score", scores), ("last", last), ("level", levels)):
        np.testing.assert_array_equal(items[name], [model[slot] for slot in sorted(model)])


def test_runs_agree_with_plain_python_for_all_seeds_in_one_trace():
    traces = []

    @jax.jit
    def train(keys):
        traces.append(1)
        states = jax.vmap(lambda key: BUFFER.init(level_replay.EXAMPLE))(keys)
        return jax.vmap(functools.partial(run, BUFFER))(states, keys)

    for number in range(2):
        states, history = train(jax.random.split(jax.random.key(number), 8))
        for seed in range(8):
            check_run(*jax.tree.map(lambda leaf: np.asarray(leaf[seed]), (states, history)))  # noqa: B023
    assert len(traces) == 1


def test_a_saved_run_goes_on(tmp_path):
    state, _ = jax.jit(functools.partial(run, BUFFER))(BUFFER.init(level_replay.EXAMPLE), KEY)
    jrb.save(tmp_path / "levels", BUFFER, state)
    loaded, restored = jrb.load(tmp_path / "levels", buffer=BUFFER)
    assert loaded == BUFFER
    context = context_of(500, rho=0.5)
    batches = [loaded.sample(each, KEY, 100, context=context) for each in (state, restored)]
    jax.tree.map(np.testing.assert_array_equal, *batches)


def stale(leaves, age, context):
    """Returns the staleness of levels, as weights."""
    return context - leaves["last"]


def test_a_mixture_draws_exact_numbers_by_score_and_by_staleness():
    """The scores as priorities, and 3 of 4 draws of each batch by them."""
    pair = (RankBased(alpha=1 / 0.5), jrb.Weighted(stale, leaves=("last",)))
    buffer = jrb.ReplayBuffer(N, batch_size=400, sampler=jrb.Mixture(pair, (0.75, 0.25)))
    state, scores, last = filled(N + 3, 2, buffer)
    priorities = jnp.array([scores[slot] for slot in range(N)])

    @jax.jit
    def step(state, key):
        state = buffer.update_priority(state, jnp.arange(N), priorities)
        return buffer.draw(state, key, context=jnp.int32(60))

    state, batch = step(state, KEY)
    first, second = (formula(scores, last, 60, rho, 0.5) for rho in (0.0, 1.0))
    want = np.where(batch.info["sampler"] == 0, first[batch.indices], second[batch.indices])
    np.testing.assert_allclose(batch.probabilities, want, rtol=2e-5)
    assert (batch.info["sampler"] == 0).sum() == 300
