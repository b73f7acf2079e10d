"""Items of `chex.dataclass` and of other classes are stored and returned like nested dicts."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import layouts

KEY = jax.random.key(3)
T = 11


@chex.dataclass(frozen=True)
class Next:
    observation: chex.Array
    reward: chex.Array
    done: chex.Array


@chex.dataclass
class Step:
    observation: chex.Array
    action: chex.ArrayTree
    next: Next


class StepTuple(NamedTuple):
    observation: Any
    action: Any
    next: Any


@chex.dataclass(mappable_dataclass=False)
class PlainStep:
    observation: chex.Array
    action: chex.ArrayTree
    next: Next


def named(make: Any, **leaves: Any) -> Any:
    return make(
        observation=leaves["seen"],
        action={"move": leaves["move"], "key": leaves["key"]},
        next=(Next if make is not dict else dict)(
            observation=leaves["after"], reward=leaves["reward"], done=leaves["done"]
        ),
    )


def stream(make: Any) -> Any:
    """Returns T steps, of episodes of four."""
    seen = jnp.arange(3.0 * (T + 1)).reshape(T + 1, 3)
    return named(
        make,
        seen=seen[:-1],
        after=seen[1:],
        move=jnp.arange(T, dtype=jnp.int8),
        key=jax.random.split(KEY, T),
        reward=jnp.arange(T, dtype=jnp.float32),
        done=jnp.arange(T) % 4 == 3,
    )


def row(steps: Any, number: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], steps)


def as_dict(steps: Any) -> dict[str, Any]:
    """Returns the same leaves as nested dicts."""
    after = steps.next
    return {
        "observation": steps.observation,
        "action": steps.action,
        "next": {"observation": after.observation, "reward": after.reward, "done": after.done},
    }


CLASSES = [Step, StepTuple, PlainStep]
PARTS = [
    {"sampler": jrb.Prioritized()},
    {"unit": jrb.NStep(3, discount=0.9)},
    {"unit": jrb.Sequence(2)},
    {"unit": jrb.FrameStack(2)},
    {"storage": jrb.DeviceStorage(share_next_observations=True)},
    {"storage": jrb.MemmapStorage()},
]


def both(make: Any, **parts: Any) -> Any:
    """Returns a buffer, its state with items of a class, and its state with items of dicts."""
    buffer = jrb.ReplayBuffer(8, batch_size=5, **parts)
    states = []
    for kind in (make, dict):
        steps = stream(kind)
        state = buffer.init(row(steps, 0))
        state = buffer.extend(state, jax.tree.map(lambda leaf: leaf[:6], steps))
        for number in range(6, T):
            state = buffer.add(state, row(steps, number))
        states.append(state)
    return buffer, *states


def same(got: Any, want: Any, make: Any) -> None:
    assert type(got) is make and type(got.next) is Next
    chex.assert_trees_all_equal(as_dict(got), want, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("parts", PARTS, ids=repr)
def test_items_of_a_class_are_those_of_dicts(make: Any, parts: dict[str, Any]) -> None:
    buffer, state, other = both(make, **parts)
    got, want = buffer.sample(state, KEY), buffer.sample(other, KEY)
    same(got.data, want.data, make)
    chex.assert_trees_all_equal(got.replace(data=None), want.replace(data=None), strict=True)
    chex.assert_tree_shape_prefix(got.data, (5,))
    same(buffer.take(state, jnp.arange(8)), buffer.take(other, jnp.arange(8)), make)
    same(jrb.items(buffer, state), jrb.items(buffer, other), make)
    found, expected = jrb.episodes(buffer, state), jrb.episodes(buffer, other)
    assert [each.return_ for each in found] == [each.return_ for each in expected]


@pytest.mark.slow
@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("storage", [jrb.DeviceStorage(), jrb.MemmapStorage()], ids=repr)
def test_items_of_a_class_are_edited(make: Any, storage: Any) -> None:
    buffer, state, other = both(make, storage=storage)
    slots = jnp.array([2, 5])
    new, plain = (jax.tree.map(lambda leaf: leaf[:2], stream(kind)) for kind in (make, dict))
    state, other = buffer.set(state, slots, new), buffer.set(other, slots, plain)
    some = {"next": {"reward": jnp.array([7.0])}}
    state, other = (buffer.set(each, jnp.array([1]), some) for each in (state, other))

    def doubled(items: Any) -> Any:
        rewards = items["next"]["reward"] if isinstance(items, dict) else items.next.reward
        return {"next": {"reward": 2 * rewards}}

    state, other = buffer.map(state, doubled), buffer.map(other, doubled)
    same(jrb.items(buffer, state), jrb.items(buffer, other), make)


@pytest.mark.slow
@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("name", ["folder", "file.h5"])
def test_items_of_a_class_are_saved(make: Any, name: str, tmp_path: Any) -> None:
    buffer, state, _ = both(make, sampler=jrb.Prioritized())
    jrb.save(tmp_path / name, buffer, state)
    for example in (None, row(stream(make), 0)):
        loaded, back = jrb.load(tmp_path / name, example=example)
        chex.assert_trees_all_equal(back, state, strict=True)
        same(jrb.items(loaded, back), as_dict(jrb.items(buffer, state)), make)


def test_layouts_take_items_of_a_class() -> None:
    steps = jax.tree.map(np.asarray, stream(dict) | {"action": jnp.arange(T)})
    flat = layouts.ted_to_flat(steps)
    made = Step(**(steps | {"next": Next(**steps["next"])}))
    chex.assert_trees_all_equal(layouts.ted_to_flat(made), flat, strict=True)
