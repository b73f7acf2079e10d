"""The picture of an episode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.plot import buffers, pictures

pytestmark = pytest.mark.slow

SMALL = jax.ShapeDtypeStruct((3,), jnp.float32)
STORAGES = {
    "device": jrb.DeviceStorage(),
    "once": jrb.DeviceStorage(share_next_observations=True),
    "memmap": jrb.MemmapStorage(None),
    "spill": jrb.SpillStorage(None, 8),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_an_episode_is_the_one_that_jrb_reads(storage):
    buffer = jrb.ReplayBuffer(
        80, 2, sampler=jrb.Prioritized(), storage=STORAGES[storage], unit=jrb.NStep(2, 0.9)
    )
    state = buffers.filled(buffer, 63, observation=SMALL)
    found = jrb.episodes(buffer, state)
    for k in (0, len(found) // 2, -1):
        figure = jrb.plot.episode(buffer, state, k)
        pictures.check(figure)
        each, items = found[k], found[k].items
        rows = "row" if each.length == 1 else "rows"
        title = pictures.titles(figure)[0]
        start = f"Episode {k % len(found)} of {len(found)}: {each.length} {rows}, return "
        assert title.startswith(start)
        assert float(title.split()[-1]) == pytest.approx(each.return_, rel=5e-3)
        told = " ".join(pictures.words(figure))
        assert ("has ended" in told) == each.ended
        assert ("overwritten" in told) == each.cut
        named = {axes.get_ylabel(): axes for axes in figure.axes}
        np.testing.assert_array_equal(named["action"].lines[0].get_ydata(), items["action"])
        for part, line in enumerate(named["observation"].lines):
            np.testing.assert_array_equal(line.get_ydata(), items["observation"][:, part])
        total = named["sum so far"].lines[0].get_ydata()
        np.testing.assert_allclose(total, np.cumsum(items["next"]["reward"]), rtol=1e-5)
        shown = named["priority"].lines[0].get_ydata()
        want = np.asarray(buffer.priorities(state, each.slots))
        np.testing.assert_array_equal(shown, np.where(want < 0, np.nan, want))


@pytest.mark.parametrize("length", [1, 30])
def test_images_become_a_film(length):
    buffer = jrb.ReplayBuffer(40)
    items = buffers.stream(np.random.default_rng(0), length, ends=0.0)
    state = buffer.extend(buffer.init(buffers.example()), items)
    figure = jrb.plot.episode(buffer, state, 0)
    pictures.check(figure)
    shown = "all rows" if length == 1 else "12 of 30 rows, evenly apart"
    film = next(axes for axes in figure.axes if axes.images)
    assert film.get_title(loc="left") == f"observation: {shown}"
    few = min(length, 12)
    assert film.images[0].get_array().shape[1] == 11 * few - 1


def test_what_is_not_there_is_refused():
    buffer = jrb.ReplayBuffer(20)
    state = buffers.filled(buffer, 10, observation=SMALL)
    many = len(jrb.episodes(buffer, state))
    with pytest.raises(ValueError, match=rf"plot.episode: k: expected from -{many} to"):
        jrb.plot.episode(buffer, state, many)
    with pytest.raises(TypeError, match=r"plot.episode: k: expected an integer, got 0.5"):
        jrb.plot.episode(buffer, state, 0.5)
    with pytest.raises(ValueError, match=r"plot.episode: k: .* got 0 of none"):
        jrb.plot.episode(buffer, buffer.empty(state), 0)
    bare = jrb.ReplayBuffer(9)
    with pytest.raises(ValueError, match=r"done: expected a leaf"):
        jrb.plot.episode(bare, bare.init(0), 0)
    best = jrb.ReplayBuffer(9, writer=jrb.Reservoir())
    with pytest.raises(ValueError, match=r"episodes: expected a writer that keeps rows"):
        jrb.plot.episode(best, buffers.filled(best, 3, observation=SMALL), 0)


@pytest.mark.parametrize(
    "reward",
    [np.float32([1, np.nan, np.inf, -np.inf]), np.full(4, np.nan), np.zeros((4, 0))],
    ids=["some", "none", "no numbers"],
)
def test_rewards_that_are_not_finite_do_no_harm(reward):
    observation = np.where(np.arange(4) == 1, np.nan, 1.0)
    after = {"reward": np.float32(reward), "done": np.arange(4) == 3}
    items = {"observation": np.float32(observation), "action": np.zeros(4, np.int32), "next": after}
    figure = jrb.plot.episode(*jrb.from_items(items), 0)
    pictures.check(figure)
    assert figure.axes[0].get_title(loc="left").startswith("Episode 0 of 1: 4 rows")
