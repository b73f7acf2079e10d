"""A method that a part does not define has a correct default, or raises and names itself."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from examples.parts.bit_storage import BitStorage
from examples.parts.previous_action import PreviousAction
from examples.parts.rank_based import RankBased
from jrb import testing
from jrb.authoring import materialize
from jrb.remote import draws
from jrb.types import (
    Draw,
    MissingMethodError,
    PrioritizedSampler,
    Sampler,
    State,
    Unit,
    component,
)

EXAMPLE = {
    "observation": jnp.zeros(3),
    "action": jnp.int32(0),
    "next": {"observation": jnp.zeros(3), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}
KEY = jax.random.key(0)


def rows(length, *lead, done=()):
    items = testing.rows(EXAMPLE, jnp.float32(length), length, *lead)
    items["action"] = jnp.arange(1, items["action"].size + 1).reshape(items["action"].shape)
    items["next"]["done"] = jnp.zeros((length, *lead), bool).at[jnp.array(done, int)].set(True)
    return items


def filled(length=6, done=(), **parts):
    buffer = jrb.ReplayBuffer(8, batch_size=8, **parts)
    return buffer, buffer.extend(buffer.init(EXAMPLE), rows(length, done=done))


class MembersState(State):
    is_anchor: jax.Array


@component
class Members(Sampler):
    """A uniform sampler that stores the anchors as a boolean array."""

    def init(self, ring):
        return MembersState(is_anchor=jnp.zeros(ring.capacity, bool))

    def on_write(self, ring, state, change, anchors):
        members = state.is_anchor.at[change.departed_slots(ring)].set(False, mode="drop")
        return MembersState(is_anchor=members.at[change.entered].set(True, mode="drop"))

    def draw(self, ring, state, anchors, key, batch_size, beta=None):
        chances = state.is_anchor / jnp.maximum(jnp.sum(state.is_anchor), 1)
        read = lambda: jax.random.choice(key, ring.capacity, (batch_size,), p=chances)
        slots = materialize(read).astype(jnp.int32)
        mask = jnp.broadcast_to(anchors.count > 0, (batch_size,))
        drawn = jnp.where(mask, chances[slots], 0)
        weights = mask.astype(jnp.float32)
        return state, Draw(slots=slots, probabilities=drawn, weights=weights, mask=mask)


class Draws(Sampler):
    """Draws the first anchor only; the base of the samplers below, with no other method."""

    def draw(self, ring, state, anchors, key, batch_size, beta=None):
        mask = jnp.broadcast_to(anchors.count > 0, (batch_size,))
        return state, anchors.uniform_draw(jnp.zeros(batch_size, jnp.int32), mask, key)


def drawn(buffer, state):
    return set(np.asarray(buffer.sample(state, KEY, 64).indices).tolist())


def test_after_empty_a_plain_array_holds_what_init_made():
    with jax.numpy_dtype_promotion("standard"):
        buffer, state = filled(8, sampler=Members())
        state = jax.jit(buffer.empty)(state)
        assert not state.sampler.is_anchor.any()
        state = buffer.add(state, jax.tree.map(lambda leaf: leaf[0], rows(1)))
        assert drawn(buffer, state) == set(buffer.newest(state, 1)[0].reshape(-1).tolist())


def test_empty_overwrites_a_samplers_arrays_in_place():
    buffer = jrb.ReplayBuffer(2**14, batch_size=8, sampler=Members())
    step = jax.jit(buffer.empty, donate_argnums=0).lower(buffer.init(EXAMPLE)).compile()
    assert step.memory_analysis().temp_size_in_bytes < 2**12


def test_shards_need_what_a_sampler_says_of_its_weights():
    sharded = jrb.Sharded(jrb.ReplayBuffer(8, 2, batch_size=4, sampler=component(Draws)()), 2)
    state = sharded.extend(sharded.init(EXAMPLE), rows(3, 2))
    with pytest.raises(MissingMethodError, match="a method stats and exponent, got Draws"):
        sharded.sample(state, KEY)


@pytest.mark.parametrize("method", sorted(PrioritizedSampler.__abstractmethods__))
def test_a_sampler_with_priorities_has_every_method_that_has_no_safe_default(method):
    without = {name: RankBased.__dict__[name] for name in PrioritizedSampler.__abstractmethods__}
    del without[method]
    kind = type("Lacking", (PrioritizedSampler,), {"__module__": __name__, **without})
    with pytest.raises(TypeError, match=f"abstract method '?{method}"):
        component(kind)()


def test_priorities_without_their_contract_are_refused():
    @component
    class Loose(Draws):
        prioritized: ClassVar[bool] = True

    with pytest.raises(TypeError, match=r"below jrb\.types\.PrioritizedSampler, got Loose"):
        jrb.ReplayBuffer(8, sampler=Loose())


def test_counts_of_draws_need_a_state_that_has_them():
    @component
    class Uncounted(Draws):
        count_draws: bool = True

        def init(self, ring):
            return {}

    with pytest.raises(
        TypeError, match=r"count_draws: expected a state below jrb\.types\.DrawCounts"
    ):
        jrb.ReplayBuffer(8, sampler=Uncounted()).init(EXAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("new", [RankBased(), RankBased(alpha=0.2), jrb.Prioritized()])
@pytest.mark.parametrize("old", [RankBased(), jrb.Prioritized()])
def test_rebuild_keeps_priorities(old, new):
    buffer, state = filled(sampler=old)
    state = buffer.update_priority(state, jnp.arange(6), jnp.arange(2.0, 8.0))
    state = buffer.set_alpha(state, 0.3)
    other = jrb.ReplayBuffer(4, batch_size=4, sampler=new)
    after = jrb.rebuild(buffer, state, other)
    assert other.priorities(after).tolist() == [4, 5, 6, 7]
    assert old != new or float(after.sampler.alpha) == np.float32(0.3)


def test_rebuild_and_set_refuse_a_state_that_they_do_not_know():
    buffer, state = filled(sampler=Members(), unit=jrb.NStep(2, 0.9, strict=True))
    with pytest.raises(MissingMethodError, match=r"rebuild: .* a method import_state"):
        jrb.rebuild(buffer, state, buffer)
    items = buffer.take(state, jnp.arange(2))
    items["next"]["done"] = ~items["next"]["done"]
    with pytest.raises(MissingMethodError, match=r"set: .* a method rebuild_index"):
        buffer.set(state, jnp.arange(2), items)


@pytest.mark.slow
def test_shards_become_one_buffer_where_the_sampler_can_put_them_together():
    sharded = jrb.Sharded(jrb.ReplayBuffer(16, 2, batch_size=4, sampler=RankBased()), 2)
    state = sharded.extend(sharded.init(EXAMPLE), rows(3, 2))
    with pytest.raises(MissingMethodError, match="a method concat_shard_states, got RankBased"):
        jrb.rebuild(sharded, state, sharded.buffer)
    other = dataclasses.replace(sharded.buffer, sampler=jrb.Prioritized())
    state = sharded.update_priority(state, jnp.array([[1], [2]]), jnp.array([[5.0], [7.0]]))
    after = jrb.rebuild(sharded, state, other)
    assert sorted(other.priorities(after).tolist()) == [-1] * 10 + [1] * 4 + [5, 7]


def test_edited_ends_leave_priorities_as_they_are():
    buffer, state = filled(done=(5,), sampler=RankBased(), unit=jrb.NStep(2, 0.9, strict=True))
    state = buffer.update_priority(state, jnp.arange(6), jnp.arange(2.0, 8.0))
    items = buffer.take(state, jnp.arange(6))
    items["next"]["done"] = jnp.zeros(6, bool)
    after = buffer.set(state, jnp.arange(6), items)
    assert buffer.priorities(after).tolist() == [2, 3, 4, 5, 6, -1, -1, -1]


def test_weights_of_several_servers_follow_what_a_sampler_shares():
    buffer = jrb.ReplayBuffer(8, batch_size=8, sampler=RankBased())
    states = [buffer.extend(buffer.init(EXAMPLE), rows(length)) for length in (2, 6)]
    each = [
        draws.ShardFacts(*jax.device_get(draws.measure_shard(buffer, state.replace(storage=None))))
        for state in states
    ]
    parts = [jax.device_get(buffer.sample(state, KEY)) for state in states]
    whole = draws.combine_parts(buffer, parts, each, 1.0)
    assert np.ptp(whole.weights) > 0.1
    np.testing.assert_allclose(whole.weights * whole.probabilities, whole.probabilities.min(), 1e-5)


def test_a_writer_that_cannot_shrink_says_so():
    writer = jrb.MaxValue(("next", "reward"))
    with pytest.raises(MissingMethodError, match=r"a method evict_oldest, .* got MaxValue"):
        writer.evict_oldest(jrb.ReplayBuffer(8).ring, None, jnp.int32(1))


@pytest.mark.parametrize("method", sorted(Unit.__abstractmethods__))
def test_a_unit_has_every_method_that_has_no_safe_default(method):
    without = {name: PreviousAction.__dict__[name] for name in Unit.__abstractmethods__}
    del without[method]
    with pytest.raises(TypeError, match=f"abstract method '?{method}"):
        component(type("Lacking", (Unit,), {"__module__": __name__, **without}))()


@pytest.mark.parametrize("method", ["reset", "init_mid_episode", "episode_step"])
def test_a_unit_that_reads_rows_before_names_what_it_lacks(method):
    lacking: Any = component(type("Lacking", (PreviousAction,), {method: getattr(Unit, method)}))
    buffer, state = filled(unit=lacking())
    with pytest.raises(MissingMethodError, match=f"a unit with a method {method}, got Lacking"):
        buffer.empty(state) if method == "reset" else jrb.rebuild(buffer, state, buffer)


def test_the_previous_action_is_that_of_the_episode():
    buffer, state = filled(8, done=(2,), unit=PreviousAction())
    state = buffer.truncate(state)
    state = buffer.extend(state, rows(2))  # overwrites the first two rows
    batch = buffer.sample(state, KEY, 64)
    told = {
        (slot, before, first, mask)
        for slot, before, first, mask in zip(
            *(np.asarray(leaf).tolist() for leaf in (batch.indices, batch.info["previous_action"])),
            np.asarray(batch.info["is_first"]).tolist(),
            np.asarray(batch.mask).tolist(),
            strict=True,
        )
    }
    assert told == {
        (2, 0, False, False),  # the row before it was overwritten
        (3, 0, True, True),
        (4, 4, False, True),
        (5, 5, False, True),
        (6, 6, False, True),
        (7, 7, False, True),
        (0, 0, True, True),
        (1, 1, False, True),
    }
    after = jrb.rebuild(buffer, state, dataclasses.replace(buffer, capacity=4))
    batch = dataclasses.replace(buffer, capacity=4).sample(after, KEY, 64)
    seen = dict(
        zip(np.asarray(batch.indices).tolist(), np.asarray(batch.mask).tolist(), strict=True)
    )
    assert seen == {0: False, 1: True, 2: True, 3: True}


# Wrong parts, and the message of `conform` for each.


def broken(kind: Any = RankBased, **methods: Any) -> Any:
    return component(type("Broken", (kind,), {"__module__": __name__, **methods}))()


def _reset_priorities(self, ring, state, entered, old, new):
    return state.replace(raw=jnp.where(state.raw < 0, state.raw, 1))


def _stats_of_counts(self, ring, state, anchors):
    return jrb.types.ShardStats.uniform(anchors)


def _edit_another(self, context, state, slots, values):
    """Sets the slots, and another one to the first value."""
    state = BitStorage().edit(context, state, slots, values)
    first = {name: leaf[:1] for name, leaf in values.items()}
    return BitStorage().edit(context, state, jnp.array([1]), first)


WRONG = {
    "refilled": [
        (
            {"sampler": broken(reset=lambda self, ring, state, token: state)},
            "after empty, all anchors have priorities, and nothing else",
        ),
        (
            {
                "unit": broken(
                    PreviousAction, truncate=lambda self, context, state, which: (state, None)
                )
            },
            "knows the ends that truncate makes",
        ),
    ],
    "options": [
        (
            {"sampler": broken(draw=lambda self, *args: RankBased().draw(*args[:-1], 0.5))},
            "weights undo the bias of the draw, beta=0.0",
        ),
        ({"sampler": broken(normalize=None)}, "weights are divided as `normalize` says, None"),
        (
            {"sampler": broken(draw=lambda self, *args: RankBased().draw(*args[:4], 8, args[5]))},
            "batch_size is that of every leaf",
        ),
    ],
    "edited": [
        (
            {
                "unit": jrb.NStep(2, 0.9, strict=True),
                "sampler": broken(rebuild_index=_reset_priorities),
            },
            "set of done flags keeps the priorities",
        ),
        (
            {"storage": broken(BitStorage, edit=lambda self, context, state, *edits: state)},
            "set changes what it names",
        ),
        (
            {"storage": broken(BitStorage, edit=_edit_another)},
            "set changes what it names alone",
        ),
    ],
    "sharded": [
        (
            {"sampler": broken(jrb.Prioritized, stats=_stats_of_counts)},
            "shards draw anchors with the probabilities of a single buffer",
        ),
        (
            {
                "sampler": broken(
                    jrb.Prioritized,
                    draw=lambda self, *args: jrb.Prioritized().draw(*args),
                    exponent=lambda self, beta: jnp.float32(0.5),
                )
            },
            "weights of shards are those of a single buffer",
        ),
    ],
    "rebuilt": [
        (
            {"sampler": broken(import_state=lambda self, state, old, slots, new_slots: state)},
            "rebuild keeps the priorities",
        )
    ],
}
CASES = [(check, *case) for check, cases in WRONG.items() for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "parts", "says"), CASES)
def test_what_a_part_does_wrong_is_noticed(check, parts, says):
    buffer = jrb.ReplayBuffer(64, num_envs=2, batch_size=8, **parts)
    given = (lambda capacity: buffer) if check == "rebuilt" else buffer
    with pytest.raises(AssertionError, match=says):
        getattr(testing, f"check_{check}")(given, EXAMPLE)


def _unordered(state, found):
    return found.replace(weights=found.weights + state.raw[0])


@pytest.mark.parametrize("alpha", [60.0, 0.7])
def test_ranks_without_mass_are_not_drawn(alpha):
    """Of rank 5 and 60, 5^-60 is 0 in float32."""
    buffer, state = filled(8, sampler=RankBased(alpha=alpha))
    state = buffer.update_priority(state, jnp.arange(8), 8.0 - jnp.arange(8.0))
    batch = buffer.sample(state, KEY, 5000)
    assert (batch.probabilities > 0).all() and jnp.isfinite(batch.weights).all()
    assert set(np.unique(batch.indices)) == (set(range(8)) if alpha < 1 else {0})


@pytest.mark.slow
def test_weights_of_one_are_told_of_normalize():
    unit_weights = lambda self, *args: _unweighted(*RankBased().draw(*args))
    sampler = broken(draw=unit_weights, normalize=None, exponent=lambda self, beta: jnp.float32(0))
    buffer = jrb.ReplayBuffer(64, num_envs=2, batch_size=8, sampler=sampler)
    with pytest.raises(AssertionError, match="for weights of 1: normalize='batch' in the class"):
        testing.check_options(buffer, EXAMPLE)
    sampler = broken(draw=unit_weights, exponent=lambda self, beta: jnp.float32(0))
    testing.check_options(dataclasses.replace(buffer, sampler=sampler), EXAMPLE)


def _unweighted(state, found):
    return state, found.replace(weights=found.mask.astype(jnp.float32))


def _large(state, found):
    large = materialize(lambda: jnp.sort(jnp.tile(-state.raw[:, None], 24), axis=0)[0, 0])
    return found.replace(slots=found.slots + jnp.minimum(jnp.abs(large), 0).astype(jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "says"),
    [
        (_unordered, r"of the state is copied: arrays \['f32\[8192\]'"),
        (_large, "nothing is copied, but a part computes arrays of"),
    ],
)
def test_a_copy_of_the_state_is_told_from_what_a_part_computes(read, says):
    def draw(self, ring, state, anchors, key, batch_size, beta=None):
        state, found = RankBased().draw(ring, state, anchors, key, batch_size, beta)
        return state, read(state, found)

    make = lambda n: jrb.ReplayBuffer(n, num_envs=2, batch_size=8, sampler=broken(draw=draw))
    with pytest.raises(AssertionError, match=says):
        testing.check_in_place(make, EXAMPLE)


def test_the_checks_of_a_base_are_those_of_parts_below_it():
    @component
    class Mine(jrb.Queue):
        pass

    with pytest.raises(TypeError, match="count_draws: expected True or False"):
        Mine(count_draws=1)


@pytest.mark.parametrize("name", ["check", "num_pending"])
def test_methods_that_would_not_be_called_are_refused(name):
    """A sampler with an order must derive from `OrderedSampler`, or its items are overwritten."""
    with pytest.raises(TypeError, match=rf"Mine\.{name}: expected a class below .*OrderedSampler"):
        type("Mine", (jrb.types.Sampler,), {name: lambda self, *_: None})
    assert type("Mine", (jrb.types.OrderedSampler,), {name: lambda self, *_: None})


def test_a_slice_is_planned_for_a_single_row_only():
    """Of several rows, a storage would write the first and lose the others."""
    plan = {"expired": jnp.int32(0), "written": jnp.ones(2, bool), "passed": jnp.arange(1, 3)}
    slots = jnp.arange(2)
    with pytest.raises(ValueError, match="expected a single row of time"):
        jrb.types.WritePlan(starts=slots, slots=slots[:, None], consecutive=True, **plan)
