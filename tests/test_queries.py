"""Queries over episodes, compared with loops over all episodes; conditions as text."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.test_read import EXAMPLE, STORAGES, stream

KEY = jax.random.key(0)


def filled(length, envs=3, rows=8, storage=None, **parts):
    """Returns a buffer, its state after `length` rows, and its episodes one by one."""
    buffer = jrb.ReplayBuffer(rows * envs, envs, storage=storage or jrb.DeviceStorage(), **parts)
    items = stream(np.random.default_rng(length), length, envs)
    state = buffer.extend(buffer.init(EXAMPLE), items)
    return buffer, state, list(jrb.episodes(buffer, state))


def ids(episodes):
    return [episode.slots.tolist() for episode in episodes]


@pytest.mark.parametrize("length", [1, 6, 8, 9, 30])
def test_conditions_choose_the_episodes_that_meet_them(length):
    buffer, state, every = filled(length)
    found = jrb.episodes(buffer, state)
    # The number of rows of its environment that are newer than an episode's first one.
    held = min(length, 8)
    order = {slot: row for row, slots in enumerate(rows_of(buffer, state)) for slot in slots}
    age = lambda episode: held - 1 - order[int(episode.slots[0])]
    returns = sorted(float(episode.return_) for episode in every)
    middle = returns[len(returns) // 2]
    is_even = lambda it: it.items["id"][0] % 2 == 0
    cases = [
        ({"min_return": middle}, lambda it: it.return_ >= middle),
        ({"max_return": middle}, lambda it: it.return_ <= middle),
        ({"min_length": 2}, lambda it: it.length >= 2),
        ({"max_length": 3}, lambda it: it.length <= 3),
        ({"complete": True}, lambda it: it.complete),
        ({"complete": False}, lambda it: not it.complete),
        ({"env": 1}, lambda it: it.environment == 1),
        ({"env": [0, 2]}, lambda it: it.environment in (0, 2)),
        ({"since": 4}, lambda it: age(it) < 4),
        ({"predicate": is_even}, is_even),
    ]
    texts = [
        (f"return >= {middle!r}", cases[0][1]),
        ("1 < length <= 3", lambda it: 1 < it.length <= 3),
        ("complete and not ended", lambda it: False),
        ("ended or env == 1", lambda it: it.ended or it.environment == 1),
        ("-age * 2 + 1 > -length / 3", lambda it: -age(it) * 2 + 1 > -it.length / 3),
    ]
    for (options, one), (text, other) in itertools.product(cases, texts):
        want = [it for it in every if one(it) and other(it)]
        assert ids(found.where(text, **options)) == ids(want)
        assert ids(found.where(**options).where(text)) == ids(want)
    assert repr(found.where(env=1)).startswith(f"{sum(it.environment == 1 for it in every)} epi")


def rows_of(buffer, state):
    slots, count = buffer.in_order(state)
    return np.asarray(slots)[: int(count)].reshape(-1, buffer.num_envs).tolist()


@pytest.mark.parametrize("length", [3, 8, 21])
def test_best_and_sort_follow_python(length):
    buffer, state, every = filled(length)
    found = jrb.episodes(buffer, state)
    for fraction in (0.01, 0.3, 0.5, 1.0):
        count = max(1, round(fraction * len(every)))
        chosen = sorted(range(len(every)), key=lambda n: -every[n].return_)[:count]
        assert ids(found.best(fraction)) == ids(every[n] for n in sorted(chosen))
    keys = {"length": lambda it: it.length, "return": lambda it: it.return_}
    keys |= {"env": lambda it: it.environment, "ended": lambda it: it.ended}
    for (name, key), descending in itertools.product(keys.items(), (False, True)):
        want = ids(sorted(every, key=key, reverse=descending))
        assert ids(found.sort(name, descending=descending)) == want
        assert ids(found.sort(key, descending=descending)) == want
    assert ids(found.sort("return")[1:3]) == ids(sorted(every, key=keys["return"])[1:3])
    assert found.sort("length")[-1].length == max(it.length for it in every)


@pytest.mark.parametrize("descending", [False, True])
def test_returns_that_are_nan_come_last(descending):
    returns = [3, np.nan, 1, 7, np.nan, 2, 5, 0, 6]
    rewards = {"reward": jnp.array(returns), "done": jnp.ones(9, bool)}
    found = jrb.episodes(*jrb.from_items({"next": rewards}))
    key = lambda episode: float(episode.return_)
    for one in ("return", key):
        order = [int(it.slots[0]) for it in found.sort(one, descending=descending)]
        real = [7, 2, 5, 0, 6, 8, 3]
        assert order == [*(real[::-1] if descending else real), 1, 4]
    assert found.best(1.0)[0].return_ == 3
    assert [float(it.return_) for it in found.best(0.25)] == [7, 6]


def test_slots_are_those_of_the_episodes():
    buffer, state, every = filled(13, unit=jrb.NStep(2, 0.9), sampler=jrb.Prioritized())
    found = jrb.episodes(buffer, state).where(min_length=2)
    assert found.slots.dtype == np.int32
    assert found.slots.tolist() == sum((list(it.slots) for it in every if it.length > 1), [])
    after = buffer.drop(state, found.slots)
    assert set(np.flatnonzero(buffer.priorities(after) == -2)) <= set(found.slots.tolist())
    assert not set(np.flatnonzero(buffer.priorities(after) >= 0)) & set(found.slots.tolist())
    after = buffer.set(state, found.slots, {"id": jnp.full(len(found.slots), -7)})
    assert (jrb.items(buffer, after)["id"] == -7).sum() == len(found.slots)
    none = found.where("length > 100")
    assert (len(none), none.slots.dtype, none.slots.tolist(), list(none)) == (0, np.int32, [], [])


def test_items_are_read_only_for_a_predicate_and_only_once(monkeypatch):
    buffer, state, every = filled(11)
    found, calls, reads, take = jrb.episodes(buffer, state), [], [], jrb.ReplayBuffer.take
    monkeypatch.setattr(jrb.ReplayBuffer, "take", lambda *args: reads.append(1) or take(*args))
    free = found.where("return > 0", min_length=2).sort("age").best(0.5)
    assert len(free)
    assert free.slots.size
    assert not reads

    def predicate(episode):
        calls.append(episode)
        return episode.items["id"][0] >= 0

    later = found.where(min_return=0).where(predicate=predicate, env=1).sort("length")[:2]
    assert not calls
    # The predicate is called once for each episode that is left, when the result is first used.
    assert len(list(later)) == 2
    assert len(later) == 2
    assert len(calls) == len(reads) == sum(it.environment == 1 for it in every)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("length", [8, 20])
def test_a_new_buffer_has_the_rows_and_ends_of_the_episodes(storage, length):
    storage = STORAGES[storage]()
    if isinstance(storage, jrb.SpillStorage):
        storage = dataclasses.replace(storage, device_capacity=6)
    buffer, state, _ = filled(length, storage=storage, sampler=jrb.Prioritized())
    slots = np.arange(24)
    state = buffer.update_priority(state, slots, slots + 1.0)
    found = jrb.episodes(buffer, state).where(min_length=2).sort("return", descending=True)
    new, copied = found.to_buffer(batch_size=5, unit=jrb.NStep(2, 0.9))
    assert (new.capacity, new.num_envs, int(new.size(copied))) == (
        *[len(found.slots), None],
        new.capacity,
    )
    items, want = jrb.items(new, copied), [it.items for it in found]
    for leaf, *parts in zip(*map(jax.tree.leaves, [items, *want]), strict=True):
        np.testing.assert_array_equal(leaf, np.concatenate(parts))
    # Episodes that had not ended are cut off, so that no step crosses into the next one.
    again = jrb.episodes(new, copied)
    assert [it.length for it in again] == [it.length for it in found]
    assert all(it.ended for it in again)
    np.testing.assert_array_equal(new.priorities(copied)[: len(found.slots)], found.slots + 1.0)
    batch = new.sample(copied, KEY)
    assert batch.data["id"].shape == (5,)
    larger, state = found.to_buffer(capacity=100, sampler=jrb.Uniform())
    assert int(larger.size(state)) == len(found.slots)


def test_a_dataset_is_copied_into_a_new_buffer(tmp_path):
    buffer, state, _ = filled(20)
    jrb.save(tmp_path / "saved", buffer, state)
    found = jrb.datasets.open(tmp_path / "saved").where(min_length=2)
    new, copied = found.to_buffer(batch_size=5, sampler=jrb.Prioritized())
    assert (new.capacity, new.num_envs, new.batch_size) == (found.transitions, None, 5)
    for leaf, *parts in zip(*map(jax.tree.leaves, [jrb.items(new, copied), *found]), strict=True):
        np.testing.assert_array_equal(leaf, np.concatenate(parts))
    new, copied = found.to_buffer(capacity=100, num_envs=2)
    row = jax.tree.map(lambda leaf: leaf[:2], jrb.items(new, copied))
    assert int(new.size(new.add(copied, row))) == found.transitions + 2
    assert (
        len(found.where(env=1))
        == len(found.where("env == 1"))
        == sum(it.environment == 1 and it.length > 1 for it in jrb.episodes(buffer, state))
    )
    with pytest.raises(ValueError, match="at least one step"):
        found.where("length > 99").to_buffer()
    with pytest.raises(ValueError, match="capacity: expected at least"):
        found.to_buffer(capacity=2)


def test_units_that_need_whole_episodes_refuse_incomplete_ones():
    buffer, state, every = filled(20)
    found, whole = (
        jrb.episodes(buffer, state),
        jrb.Sequence(8, sample_by="whole_episodes", partial="pad"),
    )
    for unit in (whole, jrb.FrameStack(2, paths=("x",))):
        with pytest.raises(ValueError, match=r"where\(complete=True\)"):
            found.to_buffer(capacity=50, unit=unit)
        new, copied = found.where(complete=True).to_buffer(capacity=50, unit=unit)
        count = sum(it.complete for it in every)
        assert sum(it.complete for it in jrb.episodes(new, copied)) == count
    with pytest.raises(ValueError, match="at least one episode"):
        found.where("length > 99").to_buffer()
    with pytest.raises(ValueError, match="capacity: expected at least"):
        found.to_buffer(capacity=2)
    with pytest.raises(TypeError, match=r"jrb\.rebuild"):
        found.to_buffer(num_envs=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "length",
        "length >",
        "length + 1",
        "length and complete",
        "not length",
        "complete > 'a'",
        "length == (1, 2)",
        "max(length) > 1",
        "__import__('os') == 1",
        "length.real > 1",
        "[x for x in length] == 1",
        "length > 1 if complete else complete",
        "length ** 9 ** 9 ** 9 > 1",
        "(lambda: complete)()",
        "length > 1; complete",
        "length > 1j",
        "f'{length}' == 'a'",
        "length is 1",
        "length in 3",
        "~complete",
        "length := 3",
        "length % 2 == 0",
        "9" * 400 + " / length > 0",
        "(" * 5000 + "1" + ")" * 5000 + " > length",
        "(" * 400 + "1" + ")" * 400 + " > length",
    ],
)
def test_other_texts_are_refused(text):
    buffer, state, _ = filled(4)
    with pytest.raises(ValueError, match="condition: expected"):
        list(jrb.episodes(buffer, state).where(text))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"condition": "lenght > 1"}, ValueError, r"one of \['age', .*'return'\], got 'lenght'"),
        ({"condition": 3}, TypeError, "expected a text"),
        ({"min_return": "a"}, TypeError, "min_return: expected a number"),
        ({"max_length": True}, TypeError, "max_length: expected a number"),
        ({"min_length": float("nan")}, TypeError, "min_length: expected a number"),
        ({"complete": 1}, TypeError, "complete"),
        ({"min_return": 10**400}, TypeError, "min_return: expected a number"),
        ({"min_return": np.ones(2)}, TypeError, "min_return: expected a number"),
        ({"env": 1.5}, TypeError, "env"),
        ({"env": True}, TypeError, "env: expected an integer"),
        ({"since": 0}, ValueError, "since"),
        ({"predicate": 3}, TypeError, "predicate: expected a function"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options, error, match):
    buffer, state, _ = filled(4)
    with pytest.raises(error, match=match):
        jrb.episodes(buffer, state).where(**options)


def test_words_in_strings_are_kept():
    buffer, state, every = filled(20)
    found = jrb.episodes(buffer, state)
    same = found.where("'return' == 'return' and (return>1e-1 or 1 < 0)")
    assert ids(same) == ids(it for it in every if it.return_ > 0.1)
    assert len(found.where("'return' != \"return\"")) == 0


def test_the_part_that_is_refused_is_named():
    buffer, state, _ = filled(4)
    for text in ("length % 2", "length // 2", "~complete", "+length"):
        with pytest.raises(ValueError, match=f"got '{re.escape(text)}'"):
            jrb.episodes(buffer, state).where(f"({text}) == 0")


def test_flags_are_counted_in_sums():
    buffer, state, every = filled(20)
    found = jrb.episodes(buffer, state)
    many = found.where("(length > 1) + (length > 2) + complete > 1")
    assert ids(many) == ids(
        it for it in every if (it.length > 1) + (it.length > 2) + it.complete > 1
    )
    assert len(found.where("True + True == 2")) == len(every)
    assert len(found.where("'it\\'s return' == \"it's return\"")) == len(every)


def test_names_of_facts_are_taken_as_they_are():
    buffer, state, _ = filled(4)
    for text in ("length_ > 1", "return_ > 1", "__return > 1"):
        name = text.split(" ", maxsplit=1)[0]
        with pytest.raises(ValueError, match=f"got '{name}'"):
            jrb.episodes(buffer, state).where(text)


def test_items_without_rewards_and_with_several():
    example = {"x": jnp.zeros(2), "next": {"done": False}}
    buffer = jrb.ReplayBuffer(4)
    items = {"x": jnp.zeros((3, 2)), "next": {"done": jnp.arange(3) == 1}}
    found = jrb.episodes(buffer, buffer.extend(buffer.init(example), items))
    assert [it.length for it in found.where(complete=True)] == [2]
    with pytest.raises(ValueError, match="got 'return'"):
        found.where(min_return=1)
    with pytest.raises(ValueError, match="got 'return'"):
        found.best(0.5)
    items["next"]["reward"] = jnp.ones((3, 2))
    example["next"]["reward"] = jnp.zeros(2)
    found = jrb.episodes(buffer, buffer.extend(buffer.init(example), items))
    with pytest.raises(ValueError, match="one return for each episode"):
        len(found.where(min_return=1))
    assert len(found.where(predicate=lambda it: it.return_[0] > 1.5)) == 1


def test_an_empty_state_has_no_episodes():
    buffer = jrb.ReplayBuffer(6, 2)
    found = jrb.episodes(buffer, buffer.init(EXAMPLE))
    assert len(found) == len(found.where(min_return=0).best(0.5).sort("age")) == 0
