"""A draw that finds no anchor says what the unit needs, and the cure works."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import testing

KEY = jax.random.key(0)
EXAMPLE = {
    "observation": {"x": jnp.zeros(2), "goal": jnp.float32(0)},
    "next": {
        "observation": {"x": jnp.zeros(2), "goal": jnp.float32(0)},
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}
WINDOWS = jrb.Sequence(6, burn_in=1)
GOALS = {"achieved": ("next", "observation", "goal"), "goal": ("observation", "goal")}
GOALS |= {"next_goal": None, "unit": jrb.Sequence(5)}
SHORT = [
    (WINDOWS, "6 rows of one episode", {"partial": "pad"}),
    (jrb.Sequence(5, stride=2), "5 rows of one episode", {"partial": "pad"}),
    (jrb.Sequence(7, sample_by="episodes"), "7 rows of one episode", {"partial": "pad"}),
    (jrb.Sequence(11, cross_episodes=True), "11 rows of one environment", {"partial": "pad"}),
    (jrb.FrameStack(3, unit=WINDOWS), "6 rows of one episode", {"unit": jrb.NStep(6, 0.5)}),
    (jrb.Hindsight(lambda *_: jnp.float32(0), **GOALS), "5 rows", {"unit": jrb.Transition()}),
]
"""Units for which episodes of three rows are too short; the need; and options that cure it."""


def rows(count, *envs, ends_every=3):
    """Returns rows of episodes of `ends_every` rows each."""
    items = jax.tree.map(lambda leaf: np.zeros((count, *envs, *leaf.shape), leaf.dtype), EXAMPLE)
    items["next"]["done"][ends_every - 1 :: ends_every] = True
    return items


def message(call):
    with pytest.raises(ValueError, match="expected") as caught:
        call()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORT, ids=lambda case: type(case[0]).__name__)
def test_short_episodes_are_named_and_the_cure_works(case):
    unit, need, cure = case
    buffer = jrb.ReplayBuffer(16, batch_size=4, unit=unit)
    state = buffer.extend(buffer.init(EXAMPLE), rows(10))
    text = message(lambda: buffer.sample(state, KEY))
    assert "got a buffer of size 10" in text and type(unit).__name__ in text
    assert need in text and unit.anchor_requirement in text and "Add items first" not in text
    cured = dataclasses.replace(buffer, unit=dataclasses.replace(unit, **cure))
    assert cured.sample(cured.extend(cured.init(EXAMPLE), rows(10)), KEY).mask.any()


@pytest.mark.parametrize("ends", [False, True])
def test_running_episodes_are_named_where_ends_are_needed(ends):
    whole, strict = jrb.Sequence(4, sample_by="whole_episodes"), jrb.NStep(6, 0.9, strict=True)
    for unit, need in [
        (whole, "from its first row to its last"),
        (strict, "6 rows of one episode, or its end"),
    ]:
        buffer = jrb.ReplayBuffer(8, batch_size=4, unit=unit)
        state = buffer.extend(buffer.init(EXAMPLE), rows(5, ends_every=9))
        if ends:
            assert buffer.sample(buffer.truncate(state), KEY).mask.any()
        else:
            assert need in message(lambda buffer=buffer, state=state: buffer.sample(state, KEY))


def test_an_episode_longer_than_the_ring_is_named():
    stacks = jrb.FrameStack(4, unit=jrb.Sequence(5))
    whole = jrb.Sequence(4, sample_by="whole_episodes")
    for unit, need in [(stacks, "Of the 3 rows before"), (whole, "capacity hold the longest")]:
        buffer = jrb.ReplayBuffer(6, batch_size=4, unit=unit)
        state = buffer.extend(buffer.init(EXAMPLE), rows(20, ends_every=20))
        assert need in message(lambda buffer=buffer, state=state: buffer.sample(state, KEY))


@pytest.mark.parametrize(
    "unit",
    [
        jrb.Transition(),
        jrb.NStep(3, 0.9),
        jrb.NStep(1, 0.9, strict=True),
        jrb.Sequence(4, partial="pad", stride=2),
        jrb.Sequence(1, burn_in=3),
        jrb.FrameStack(1, unit=jrb.Sequence(3, sample_by="windows", partial="pad")),
    ],
    ids=repr,
)
def test_a_unit_without_a_need_has_an_anchor_in_one_row(unit):
    buffer = jrb.ReplayBuffer(8, batch_size=2, unit=unit)
    state = buffer.extend(buffer.init(EXAMPLE), rows(1))
    assert unit.anchor_requirement == "" and buffer.can_sample(state)


def test_other_reasons_are_not_blamed_on_the_unit():
    buffer = jrb.ReplayBuffer(16, batch_size=4, unit=WINDOWS, min_size=9)
    state = buffer.extend(buffer.init(EXAMPLE), rows(4))
    assert "size 4 where min_size is 9. Add items" in message(lambda: buffer.sample(state, KEY))
    queue = jrb.ReplayBuffer(16, batch_size=4, sampler=jrb.Queue())
    state = queue.draw(queue.extend(queue.init(EXAMPLE), rows(3)), KEY)[0]
    assert "size 3 in which Queue finds nothing" in message(lambda: queue.sample(state, KEY))


def test_shards_mixes_and_epochs_name_the_need():
    whole = jrb.ReplayBuffer(32, num_envs=2, batch_size=4, unit=WINDOWS)
    sharded, part = jrb.Sharded(whole, 2), jrb.ReplayBuffer(16, batch_size=4, unit=WINDOWS)
    state = sharded.extend(sharded.init(EXAMPLE), rows(10, 2))
    text = message(lambda: sharded.sample(state, KEY))
    assert "size 20 in which Sequence has no anchor" in text and WINDOWS.anchor_requirement in text
    mix = jrb.Mix((part, part), (0.5, 0.5), batch_size=4)
    states = tuple(part.extend(each, rows(9)) for each in mix.init(EXAMPLE))
    assert WINDOWS.anchor_requirement in message(lambda: mix.sample(states, KEY))
    text = message(lambda: jrb.epochs(part, states[0], KEY))
    assert "got 0 anchors" in text and WINDOWS.anchor_requirement in text


@jrb.types.component
class Pairs(jrb.Sequence):
    """A user's unit that says its need in its own words, which may have braces."""

    anchor_requirement = property(lambda self: "A pair needs {two} rows. Play on.")


def test_a_unit_of_ones_own_says_its_need_also_inside_jit():
    buffer = jrb.ReplayBuffer(8, batch_size=2, unit=Pairs(4))
    state = buffer.extend(buffer.init(EXAMPLE), rows(6))
    text = message(lambda: buffer.sample(state, KEY))
    assert text.endswith("in which Pairs has no anchor. A pair needs {two} rows. Play on.")
    with jrb.debug(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(jax.jit(buffer.sample)(state, KEY))
        jax.effects_barrier()
    assert any("Play on." in str(each.message) for each in caught)


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [True, False])
def test_conform_warns_if_it_could_not_check_draws(on_disk, tmp_path):
    storages = map(jrb.MemmapStorage, map(tmp_path.joinpath, map(str, range(99))))
    storage = lambda: next(storages) if on_disk else jrb.DeviceStorage()
    unit = jrb.FrameStack(2, unit=jrb.Sequence(8))
    make = lambda n: jrb.ReplayBuffer(n, num_envs=4, batch_size=8, unit=unit, storage=storage())
    with pytest.warns(UserWarning, match=r"draws are not checked: .* 8 rows of one episode"):
        testing.conform(make, EXAMPLE)
