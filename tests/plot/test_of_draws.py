"""The picture of draws, compared with their expectation."""

import chex
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest

import jrb
from jrb.plot import of_draws
from tests.plot import buffers, pictures
from tests.samplers import weights

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
SMALL = jax.ShapeDtypeStruct((3,), jnp.float32)


def state_of(buffer, length=50):
    return buffers.filled(buffer, length, observation=SMALL)


SAMPLERS = {
    "uniform": (jrb.Uniform(), jrb.Transition(), "as far", "all anchors alike"),
    "n-step": (jrb.Uniform(), jrb.NStep(3, 0.9, strict=True), "as far", "all anchors alike"),
    "episodes": (jrb.Uniform(), jrb.Sequence(2, sample_by="episodes"), "as far", "probabilities"),
    "newest": (jrb.Newest(0.3), jrb.Transition(), "as far", "probabilities"),
    "prioritized": (jrb.Prioritized(stratified=False), jrb.Transition(), "as far", "mass"),
    "stratified": (jrb.Prioritized(), jrb.Transition(), "closer", "stratified"),
    "distinct": (jrb.Uniform(replacement=False), jrb.Transition(), "closer", "no replacement"),
    "weighted": (
        jrb.Weighted(weights.by_reward, (("next", "reward"),)),
        jrb.Transition(),
        "as far",
        "probabilities",
    ),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_draws_are_counted_and_judged(kind):
    sampler, unit, verdict, by = SAMPLERS[kind]
    buffer = jrb.ReplayBuffer(60, 2, batch_size=40, sampler=sampler, unit=unit)
    state = state_of(buffer, 40)
    if sampler.prioritized:
        raw = np.random.default_rng(0).exponential(size=60).astype(np.float32)
        state = buffer.update_priority(state, jnp.arange(60), jnp.asarray(raw))
    figure = jrb.plot.draws(buffer, state, KEY, 30_017)
    pictures.check(figure)
    title = pictures.titles(figure)[0]
    assert title.startswith("30,017 draws of ")
    assert verdict in title, title
    assert by in " ".join(pictures.words(figure))
    assert sum(bar.get_height() for bar in figure.axes[0].patches[:60]) == 30_017


def test_the_expectation_is_the_share_of_the_mass():
    buffer = jrb.ReplayBuffer(8, batch_size=16, sampler=jrb.Prioritized(1.0, eps=0.0))
    state = buffer.extend(buffer.init(0), jnp.arange(6))
    state = buffer.update_priority(state, jnp.arange(6), jnp.array([0.0, 1, 2, 3, 4, 10]))
    figure = jrb.plot.draws(buffer, state, KEY, 2000)
    want = figure.axes[0].patches[8].get_data().values
    np.testing.assert_allclose(want, np.array([0, 1, 2, 3, 4, 10, 0, 0]) * 100, rtol=1e-5)
    assert "2,000 draws of 5 anchors" in pictures.titles(figure)[0]


def test_a_sampler_that_is_wrong_is_found_out():
    buffer = jrb.ReplayBuffer(40, batch_size=16, sampler=jrb.Prioritized(stratified=False))
    state = state_of(buffer, 40)
    raw = jnp.linspace(0.1, 3, 40)
    state = buffer.update_priority(state, jnp.arange(40), raw)
    wrong = buffer.update_priority(state, jnp.arange(40), raw[::-1])
    slots = np.concatenate(
        [buffer.sample(wrong, key, 100).indices for key in jax.random.split(KEY, 50)]
    )
    seen, masses = np.bincount(slots, minlength=40), (np.asarray(raw) + 1e-6) ** 0.6
    said, how = of_draws.judge(buffer, seen, masses / masses.sum())
    assert "further" in said
    assert "p = 0" in how or "e-" in how
    none = np.where(np.arange(40) < 5, 0.0, masses / masses.sum())
    assert "not expected at all" in of_draws.judge(buffer, seen, none)[0]


@pytest.mark.parametrize(
    "sampler", [jrb.WithoutReplacement(count_draws=True), jrb.Queue(), jrb.Lifo()], ids=repr
)
def test_samplers_that_consume_have_no_expectation_and_keep_their_state(sampler):
    buffer = jrb.ReplayBuffer(30, batch_size=8, sampler=sampler)
    state = state_of(buffer, 20)
    before = jax.tree.map(np.asarray, state.sampler)
    figure = jrb.plot.draws(buffer, state, KEY, 20)
    pictures.check(figure)
    chex.assert_trees_all_equal(before, state.sampler)
    assert pictures.titles(figure) == ["20 draws of 20 anchors, none more than 1 time"]
    assert "there is no expectation" in " ".join(pictures.words(figure))


@pytest.mark.parametrize("size", [None, 6])
def test_groups_are_drawn_whole(size):
    sampler = jrb.Grouped("key", 9, 3, jrb.Weighted(lambda leaves, age, context: age[:, 0] + 1))
    buffer, state = jrb.from_items({"key": jnp.arange(30) % 5}, sampler=sampler, batch_size=size)
    figure = jrb.plot.draws(buffer, state, KEY, 100)
    assert pictures.titles(figure)[0].startswith("102 draws of 15 anchors")
    assert "Grouped draws groups" in " ".join(pictures.words(figure))


def test_limits_of_draws_hold():
    buffer, state = jrb.from_items({"x": jnp.arange(30)}, sampler=jrb.Prioritized(max_draws=2))
    title = pictures.titles(jrb.plot.draws(buffer, state, KEY, 1000))[0]
    assert title.startswith("60 draws of 30 anchors, none more than 2 times")


def test_little_to_draw():
    buffer = jrb.ReplayBuffer(30, batch_size=8)
    figure = jrb.plot.draws(buffer, state_of(buffer, 0), KEY, 20)
    pictures.check(figure)
    assert "There is nothing to draw" in pictures.words(figure)
    figure = jrb.plot.draws(buffer, state_of(buffer, 1), KEY, 20)
    assert "too few to tell" in pictures.titles(figure)[0]
    assert "too few" in pictures.titles(jrb.plot.draws(buffer, state_of(buffer), KEY, 1))[0]
    objects = jrb.ReplayBuffer(9, storage=jrb.ListStorage())
    held = objects.extend(objects.init(None), ["a", "b"])
    assert "500 draws of 2 anchors" in pictures.titles(jrb.plot.draws(objects, held, KEY, 500))[0]


def test_wrong_arguments_are_refused():
    buffer = jrb.ReplayBuffer(30)
    state = state_of(buffer)
    with pytest.raises(ValueError, match=r"plot.draws: n: expected at least 1, got 0"):
        jrb.plot.draws(buffer, state, KEY, 0)
    with pytest.raises(TypeError, match=r"plot.draws: n: expected an integer, got 2.5"):
        jrb.plot.draws(buffer, state, KEY, 2.5)
    with pytest.raises(TypeError, match=r"plot.draws: key: expected a PRNG key, got 3"):
        jrb.plot.draws(buffer, state, 3, 10)


@pytest.mark.parametrize(("value", "freedom", "want"), [(18.307, 10, 0.05), (124.34, 100, 0.05)])
def test_chi_square_is_that_of_the_tables(value, freedom, want):
    assert of_draws.chi_square_above(value, freedom) == pytest.approx(want, rel=0.02)


def test_long_lines_leave_panels_as_wide_as_they_are():
    buffer = jrb.ReplayBuffer(40, 2, sampler=jrb.Prioritized(), unit=jrb.Sequence(3, partial="pad"))
    state = buffers.filled(buffer, 30)
    figure = matplotlib.figure.Figure((12, 12), layout="constrained")
    jrb.plot.draws(buffer, state, jax.random.key(1), 100, ax=figure.subplots(2, 2)[0, 0])
    pictures.check(figure)
