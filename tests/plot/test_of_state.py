"""The picture of a state, against plain NumPy."""

import dataclasses
import pickle

import chex
import jax
import jax.numpy as jnp
import matplotlib.collections as collections
import matplotlib.figure
import numpy as np
import pytest

import jrb
from jrb import authoring
from jrb.plot import facts
from jrb.storages import memmap
from tests.plot import buffers, pictures

pytestmark = pytest.mark.slow

SMALL = jax.ShapeDtypeStruct((3,), jnp.float32)


KINDS = {
    "plain": {},
    "environments": {"num_envs": 4},
    "prioritized": {"num_envs": 4, "sampler": jrb.Prioritized(count_draws=True)},
    "n-step": {"unit": jrb.NStep(3, 0.9, strict=True), "sampler": jrb.Prioritized()},
    "windows": {"num_envs": 2, "unit": jrb.Sequence(4, burn_in=2, partial="pad")},
    "whole": {"num_envs": 2, "unit": jrb.Sequence(4, sample_by="whole_episodes")},
    "stacks": {"num_envs": 2, "unit": jrb.FrameStack(3)},
    "lanes": {"num_envs": 4, "writer": jrb.PerEnvironment()},
    "reservoir": {"writer": jrb.Reservoir()},
    "best": {"writer": jrb.MaxValue(("next", "reward")), "sampler": jrb.Prioritized()},
    "immutable": {"num_envs": 2, "writer": jrb.RoundRobin()},
    "epochs": {"sampler": jrb.WithoutReplacement(count_draws=True)},
    "queue": {"sampler": jrb.Queue()},
    "stack": {"sampler": jrb.Lifo()},
    "once": {"storage": jrb.DeviceStorage(share_next_observations=True), "num_envs": 2},
    "lines": {"unit": jrb.Sequence(2), "num_envs": 2},
    "memmap": {"storage": jrb.MemmapStorage(None), "num_envs": 2},
    "spill": {"storage": jrb.SpillStorage(None, 8), "num_envs": 2},
    "compressed": {"storage": jrb.CompressedStorage(min_bytes=1), "num_envs": 2},
}


LONGER = ("immutable", "whole", "stacks", "epochs", "stack", "once", "n-step", "environments")
slow = lambda kind: [pytest.mark.slow] if kind in LONGER else []
CASES = [pytest.param(kind, 60, marks=slow(kind)) for kind in KINDS]
CASES += [(kind, 5) for kind in ("prioritized", "windows", "lanes", "best", "spill")]
CASES += [(kind, 0) for kind in ("plain", "lanes", "reservoir")]


@pytest.mark.parametrize(("kind", "length"), CASES)
def test_every_kind_of_buffer_has_a_picture_that_can_be_read(kind, length):
    buffer = jrb.ReplayBuffer(40, batch_size=4, **KINDS[kind])
    state = buffers.filled(buffer, length, observation=SMALL)
    if kind == "immutable":
        buffer = dataclasses.replace(buffer, writer=jrb.ReadOnly())
    before = jax.tree.map(np.asarray, state.sampler)
    figure = jrb.plot.state(buffer, state)
    pictures.check(figure)
    chex.assert_trees_all_equal(before, state.sampler)
    said, size = pictures.titles(figure), int(buffer.size(state))
    if not size:
        assert "The buffer is empty" in pictures.words(figure)
        return
    items = "item" if size == 1 else "items"
    assert said[0].startswith(f"Holds {size} {items} in 40 slots ({100 * size / 40:.0f} %)")
    rewards = jrb.items(buffer, state)["next"]["reward"]
    told = [title for title in said if title.startswith("Rewards")]
    assert float(told[0].split()[1]) == pytest.approx(rewards.mean(), rel=5e-3, abs=1e-6)
    _check_episodes(buffer, state, figure, said)
    assert any("mass" in title for title in said) == buffer.sampler.prioritized
    assert any("never drawn" in title for title in said) == buffer.sampler.count_draws


def bars_of(figure):
    """Returns the bars of episodes."""
    every = [each for axes in figure.axes for each in axes.collections]
    (bars,) = [each for each in every if type(each) is collections.PolyCollection]
    return bars


def _check_episodes(buffer, state, figure, said):
    told = [title for title in said if "episode" in title]
    if not buffer.writer.is_chronological:
        assert not told
        return
    found = jrb.episodes(buffer, state)
    complete = sum(each.complete for each in found)
    one = "episode" if len(found) == 1 else "episodes"
    assert told == [f"{len(found)} {one}, {complete} complete"]
    bars = bars_of(figure)
    assert len(bars.get_paths()) == len(found)
    wide = [np.ptp(path.vertices[:, 0]) for path in bars.get_paths()]
    assert sum(wide) == pytest.approx(int(buffer.size(state)), abs=0.21 * len(found))


@pytest.mark.parametrize(
    "writer", [jrb.RoundRobin(), jrb.PerEnvironment()], ids=["together", "lanes"]
)
@pytest.mark.parametrize("length", [1, 7, 33])
@pytest.mark.parametrize("envs", [1, 3])
def test_bars_are_the_episodes_that_jrb_reads(writer, length, envs):
    buffer = jrb.ReplayBuffer(10 * envs, envs, writer=writer, unit=jrb.NStep(2, 0.9))
    mask = None
    if writer.per_env:
        mask = jnp.asarray(np.random.default_rng(1).random((length, envs)) < 0.7)
    state = buffers.filled(buffer, length, observation=SMALL, mask=mask)
    state = buffer.truncate(state, jnp.arange(envs) == 0)
    if not int(buffer.size(state)):
        return
    bars = bars_of(jrb.plot.state(buffer, state))
    shown = {}
    for path, color in zip(bars.get_paths(), bars.get_facecolors(), strict=True):
        (left, low), (right, high) = path.get_extents().get_points()
        shown[round((low + high) / 2), round(right)] = round(right - left), color[3] == 1
    want, stops = {}, [0] * envs
    for each in reversed(jrb.episodes(buffer, state)):  # newest first within an environment
        env = each.environment
        want[env, stops[env]] = each.length, each.ended
        stops[env] -= each.length
    assert shown == want


def test_the_share_of_the_top_is_that_of_the_masses():
    rng, buffer = np.random.default_rng(0), jrb.ReplayBuffer(1000, sampler=jrb.Prioritized(0.7))
    state = buffers.filled(buffer, 700, observation=SMALL)
    raw = rng.exponential(size=700).astype(np.float32) ** 4
    state = buffer.update_priority(state, jnp.arange(700), jnp.asarray(raw))
    masses = np.sort((raw.astype(np.float64) + 1e-6) ** 0.7)
    share = masses[-7:].sum() / masses.sum()
    figure = jrb.plot.state(buffer, state)
    pictures.check(figure)
    assert f"The top 1 % hold {100 * share:.0f} % of the mass" in pictures.titles(figure)
    assert f"7 of 700 anchors, from {np.sort(raw)[-7]:.3g} up (line)" in pictures.words(figure)
    spread = figure.axes[-1]
    assert sum(bar.get_height() for bar in spread.patches) == 700
    over = next(axes for axes in figure.axes if axes.get_title(loc="left").startswith("Priorities"))
    means = over.patches[-1].get_data().values
    borders = facts.edges(1000, 400)
    first = raw[borders[0] : borders[1]].mean()
    assert means[0] == pytest.approx(first, rel=1e-5)


def test_priorities_that_are_zero_dropped_or_alike():
    buffer = jrb.ReplayBuffer(50, sampler=jrb.Prioritized(eps=0.0))
    state = buffers.filled(buffer, 50, observation=SMALL)
    none = buffer.update_priority(state, jnp.arange(50), jnp.zeros(50))
    figure = jrb.plot.state(buffer, none)
    pictures.check(figure)
    assert "No anchor has mass" in pictures.titles(figure)
    some = buffer.drop(state, jnp.arange(5))
    figure = jrb.plot.state(buffer, some)
    assert "all the same; 5 dropped" in pictures.words(figure)


def test_a_large_state_is_binned_exactly():
    envs, rows = 70, 3000
    buffer = jrb.ReplayBuffer(envs * rows, envs)
    done = np.random.default_rng(0).random((rows, envs)) < 0.02
    reward = np.random.default_rng(1).random((rows, envs)).astype(np.float32)
    spec = {"next": {"reward": jnp.float32(0), "done": False}}
    state = jax.jit(buffer.extend)(buffer.init(spec), {"next": {"reward": reward, "done": done}})
    figure = jrb.plot.state(buffer, state)
    pictures.check(figure)
    cells = figure.axes[1].collections[0].get_array()
    assert cells.shape == (64, 400)
    value = np.empty((rows, envs))
    for each in jrb.episodes(buffer, state):
        value[each.slots // envs, each.environment] = each.return_
    columns, lines = facts.edges(rows, 400), facts.edges(envs, 64)
    part = value[columns[7] : columns[8], lines[5] : lines[6]]
    assert cells[5, 7] == pytest.approx(part.mean(), rel=1e-4)
    means = figure.axes[2].patches[0].get_data().values
    borders = facts.edges(rows, len(means))
    assert means[3] == pytest.approx(reward[borders[3] : borders[4]].mean(), rel=1e-4)


@pytest.mark.parametrize("ground", ["white", "#131416"])
def test_a_picture_goes_where_it_is_told_to_and_replaces_itself(ground):
    buffer = jrb.ReplayBuffer(40, sampler=jrb.Prioritized())
    state = buffers.filled(buffer, 20, observation=SMALL)
    figure = matplotlib.figure.Figure((18, 9), layout="constrained", facecolor=ground)
    ax, other = figure.subplots(1, 2)
    other.set_xlabel("mine")
    assert jrb.plot.state(buffer, state, ax=ax) is figure
    once = len(pictures.every_axes(figure))
    jrb.plot.state(buffer, state, ax=ax)
    assert len(pictures.every_axes(figure)) == once > 5
    said = [axes.get_title(loc="left") for axes in pictures.every_axes(figure)]
    assert "Holds 20 items in 40 slots (50 %)" in said
    ink = next(axes for axes in pictures.every_axes(figure) if axes.get_title(loc="left")).xaxis
    light = sum(matplotlib.colors.to_rgb(ink.label.get_color())) > 1.5
    assert light == (ground != "white")
    pictures.check(figure)
    with pytest.raises(TypeError, match="expected an axes of a figure's grid, got Axes"):
        jrb.plot.state(buffer, state, ax=figure.add_axes((0.1, 0.1, 0.8, 0.8)))


def test_items_of_any_form():
    buffer = jrb.ReplayBuffer(9)
    state = buffer.extend(buffer.init(0), jnp.arange(5))
    figure = jrb.plot.state(buffer, state)
    assert pictures.titles(figure) == ["Holds 5 items in 9 slots (56 %)"]
    objects = jrb.ReplayBuffer(9, storage=jrb.ListStorage(), sampler=jrb.Prioritized())
    state = objects.extend(objects.init(None), ["a", {"b": 1}, None])
    assert len(pictures.titles(jrb.plot.state(objects, state))) == 3
    many = {"next": {"reward": jnp.arange(8.0).reshape(4, 2), "done": jnp.zeros((4, 1), bool)}}
    figure = jrb.plot.state(*jrb.from_items(many))
    pictures.check(figure)
    assert "1 episode, 0 complete" in pictures.titles(figure)


def test_what_cannot_be_shown_is_refused():
    buffer = jrb.ReplayBuffer(9)
    state = buffer.init(0)
    with pytest.raises(TypeError, match=r"plot.state: expected a ReplayBuffer, got Mix. Take one"):
        jrb.plot.state(jrb.Mix((buffer,), (1.0,)), (state,))
    sharded = jrb.Sharded(jrb.ReplayBuffer(8), shards=1)
    with pytest.raises(TypeError, match=r"jrb.rebuild\(sharded, state, sharded.buffer\)"):
        jrb.plot.state(sharded, sharded.init(0))
    with pytest.raises(TypeError, match=r"plot.state: state: .* a BufferState, got a tuple"):
        jrb.plot.state(buffer, (state,))
    with pytest.raises(ValueError, match=r"plot.state: state: .* capacity 9, got .* capacity 8"):
        jrb.plot.state(buffer, jrb.ReplayBuffer(8).init(0))
    many = jax.vmap(lambda _: buffer.init(0))(jnp.arange(3))
    with pytest.raises(ValueError, match=r"got 3 of them .* jax.tree.map\(lambda x: x\[0\], state"):
        jrb.plot.state(buffer, many)
    with pytest.raises(TypeError, match=r"plot.state: state: .* got traced ones. .*outside jit"):
        jax.jit(lambda state: jrb.plot.state(buffer, state).number)(state)
    with pytest.raises(TypeError, match=r"plot.state: ax: expected an axes .*, got str"):
        jrb.plot.state(buffer, state, ax="here")
    gone = jax.jit(buffer.add, donate_argnums=0)(state, 1)
    with pytest.raises(ValueError, match=r"plot.state: state: .* got donated ones"):
        jrb.plot.state(buffer, state)
    assert int(buffer.size(gone)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_bins_hold_every_number(seed):
    rng = np.random.default_rng(seed)
    values = [
        rng.normal(size=500),
        rng.exponential(size=500).astype(np.float32) ** 5,
        rng.integers(0, 7, 300),
        np.full(3, 2.5),
        np.zeros(4, np.float32),
        np.append(np.zeros(9), 1e6),
    ]
    for each in values:
        borders, _ = facts.bins(each)
        assert (np.diff(borders) > 0).all()
        assert facts.histogram(each, borders).sum() == len(each)


ODD = {
    "some": ([1.0, np.nan, 3.0, np.inf, -np.inf, 2.0], "Rewards: 2 on average"),
    "most": ([np.nan, 1.0, np.inf, 1.0, -np.inf, np.nan], "Rewards: all 1"),
    "all": ([np.nan, np.inf, -np.inf, np.inf, np.nan, np.nan], "Rewards: none is finite"),
}


@pytest.mark.parametrize(
    ("case", "times", "writer"),
    [
        *[(case, 1, jrb.RoundRobin()) for case in ODD],
        ("most", 600, jrb.RoundRobin()),
        ("some", 1, jrb.Reservoir()),
    ],
)
def test_rewards_that_are_not_finite_are_counted_and_left_out(case, times, writer):
    rewards, title = ODD[case]
    reward = np.tile(np.float32(rewards), times)
    buffer = jrb.ReplayBuffer(len(reward) + 3, writer=writer)
    state = buffer.init({"next": {"reward": jnp.float32(0), "done": False}})
    done = np.arange(len(reward)) % 2 == 1
    state = jax.jit(buffer.extend)(state, {"next": {"reward": reward, "done": done}})
    figure = jrb.plot.state(buffer, state)
    pictures.check(figure)
    assert title in pictures.titles(figure)
    odd = int((~np.isfinite(reward)).sum())
    said = " ".join(pictures.words(figure))
    assert f"{odd:,} are not finite" in said.replace("others are", "are") or case == "all"
    if writer.is_chronological:
        told = "grey: return is not finite" if times == 1 else "some returns are not finite"
        assert told in said


@pytest.mark.parametrize("reward", [jnp.full(5, -(2**31)), jnp.full(5, 6e4, jnp.float16)])
def test_rewards_at_the_bounds_of_their_dtype(reward):
    figure = jrb.plot.state(*jrb.from_items({"next": {"reward": reward, "done": reward == 0}}))
    pictures.check(figure)
    assert f"Rewards: all {int(reward[0]):,}" in pictures.titles(figure)


@pytest.mark.parametrize(
    ("priority", "count"), [(3e38, 9), (3e38, 3), (2e6, 9), (1e-38, 3), (1.0000001, 3)]
)
def test_priorities_of_any_size(priority, count):
    buffer = jrb.ReplayBuffer(9, sampler=jrb.Prioritized())
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(9)})
    state = buffer.update_priority(state, jnp.arange(count), jnp.full(count, priority))
    pictures.check(jrb.plot.state(buffer, state))
    state = buffer.drop(state, jnp.arange(9))
    assert len(pictures.titles(jrb.plot.state(buffer, state))) == 1


def test_of_items_only_flags_and_rewards_are_read(monkeypatch):
    buffer = jrb.ReplayBuffer(12, 2, storage=jrb.MemmapStorage(None), sampler=jrb.Prioritized())
    state = buffers.filled(buffer, 9, observation=SMALL)
    names, read = authoring.leaf_names(buffer.item_spec(state)), set()
    original = memmap.StoreRows.read

    def note(self, version, slots, first=0):
        read.update(name for name, at in zip(names[first:], slots, strict=False) if at.size)
        return original(self, version, slots, first)

    monkeypatch.setattr(memmap.StoreRows, "read", note)
    jrb.plot.state(buffer, state)
    assert read == {"next/reward", "next/done"}


def test_a_picture_can_be_pickled_and_an_axes_that_was_removed_is_refused():
    buffer = jrb.ReplayBuffer(40, sampler=jrb.Prioritized())
    state = buffers.filled(buffer, 20, observation=SMALL)
    figure = pickle.loads(pickle.dumps(jrb.plot.state(buffer, state)))
    assert "Holds 20 items in 40 slots (50 %)" in pictures.titles(figure)
    ax = matplotlib.figure.Figure().subplots()
    ax.remove()
    with pytest.raises(TypeError, match=r"plot.state: ax: expected an axes of a figure's grid"):
        jrb.plot.state(buffer, state, ax=ax)
