"""A stack draws each item once, the newest first."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.authoring import context_of

KEY = jax.random.key(0)
EXAMPLE = {"x": jnp.int32(0), "next": {"reward": jnp.float32(0), "done": False}}
EXAMPLE["observation"], EXAMPLE["next"]["observation"] = jnp.int32(0), jnp.int32(0)


def items(rng, *lead):
    whole = lambda: rng.integers(0, 9, lead, dtype=np.int32)
    after = {"reward": np.ones(lead, np.float32), "done": rng.random(lead) < 0.2}
    return {"x": whole(), "observation": whole(), "next": {**after, "observation": whole()}}


class Stack:
    """A model of the anchors that are not drawn yet, in plain Python."""

    def __init__(self):
        self.anchors, self.unread = [], set()

    def learn(self, slots, stamps, count):
        now = list(zip(slots[:count].tolist(), stamps[:count].tolist(), strict=True))
        self.unread = {a for a in now if a in self.unread or a not in self.anchors}
        self.anchors = now

    def draw(self, size):
        taken = [a for a in reversed(self.anchors) if a in self.unread][:size]
        self.unread -= set(taken)
        return [slot for slot, _ in taken]


@jax.jit
def told(buffer, state):
    """Returns the anchors in rank order, the generations of their slots, and their count."""
    found = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    slots = found.nth(jnp.arange(buffer.capacity, dtype=jnp.int32), KEY)[0]
    return slots, buffer.writer.generation_of(buffer.ring, state.writer, slots), found.count


SHORT = jrb.DeviceStorage(
    share_next_observations=True, terminal_capacity=4
)  # evicts rows early when its terminal rows are full
CASES = [  # others are in tests/methods
    (jrb.Transition(), 3),
    (jrb.Transition(), 2, SHORT),
    (jrb.Sequence(2), 1, SHORT),
    (jrb.NStep(3, 0.9, strict=True), 1),
]


def stepper(buffer, rows, envs, rng):
    """Methods with random arguments, compiled once each."""
    extend = jax.jit(buffer.extend)
    add, truncate, empty = map(jax.jit, (buffer.add, buffer.truncate, buffer.empty))
    edit = jax.jit(lambda s, where, done: buffer.set(s, where, {"next": {"done": done}}))

    def step(state):
        method = rng.choice(["add", "extend", "long", "set", "truncate", "empty"], p=CHANCES)
        if method == "add":
            return add(state, items(rng, envs), rng.random() < 0.8)
        if method in ("extend", "long"):
            length = 2 if method == "extend" else rows + 3
            return extend(state, items(rng, length, envs), rng.random(length) < 0.8)
        if method == "set":
            slots = rng.integers(0, buffer.capacity, 2, dtype=np.int32)
            return edit(state, slots, rng.random(2) < 0.5)
        return truncate(state, rng.random(envs) < 0.5) if method == "truncate" else empty(state)

    return step


CHANCES = [0.5, 0.2, 0.04, 0.1, 0.12, 0.04]


@pytest.mark.slow
@pytest.mark.parametrize("parts", CASES, ids=str)
def test_programs_of_methods_do_what_a_list_does(parts):
    (unit, envs, *storage), rows = parts, 5
    rng, sampler = np.random.default_rng(envs), jrb.Lifo()
    buffer = jrb.ReplayBuffer(rows * envs, envs, 3, sampler, unit)
    buffer = dataclasses.replace(buffer, storage=storage[0]) if storage else buffer
    draw, look = jax.jit(buffer.draw), jax.jit(buffer.sample)
    can, step = jax.jit(buffer.can_sample), stepper(buffer, rows, envs, rng)
    state, model = buffer.init(EXAMPLE), Stack()
    for _ in range(150):
        state = step(state)
        model.learn(*jax.device_get(told(buffer, state)))
        assert int(state.sampler.count) == len(model.unread)
        assert bool(can(state)) == bool(model.unread)
        if rng.random() < 0.5:
            peek = look(state, KEY)
            state, sample = draw(state, KEY)
            want, real = model.draw(3), sample.mask.reshape(3, -1).any(axis=1)
            assert sample.indices[real].tolist() == want
            assert real.tolist() == [place < len(want) for place in range(3)]
            assert peek.indices.tolist() == sample.indices.tolist()


def test_episodes_of_one_environment_are_a_stack_too():
    rng, unit = np.random.default_rng(0), jrb.Sequence(2, sample_by="episodes")
    buffer = jrb.ReplayBuffer(12, batch_size=1, sampler=jrb.Lifo(), unit=unit)
    state, add, draw = buffer.init(EXAMPLE), jax.jit(buffer.add), jax.jit(buffer.draw)
    for _ in range(60):
        state = add(state, items(rng))
        if rng.random() < 0.3:
            state, _ = draw(state, KEY)
        assert 0 <= int(state.sampler.count) <= 6
        place = state.sampler.following - state.sampler.numbers[state.sampler.bottom]
        assert int(state.sampler.count) == 0 or int(place) <= 6


def test_numbers_go_round():
    buffer = jrb.ReplayBuffer(4, batch_size=2, sampler=jrb.Lifo())
    state = buffer.init({"x": 0})
    late = jnp.uint32(2**32 - 3)
    state = state.replace(sampler=state.sampler.replace(following=late))
    for number in range(4):
        state = buffer.extend(state, {"x": jnp.arange(3) + 3 * number})
        state, sample = buffer.draw(state, KEY)
        assert sample.data["x"].tolist() == [3 * number + 2, 3 * number + 1]
    state, sample = buffer.draw(state, KEY)
    assert sample.data["x"][sample.mask].tolist() == [9]  # 0, 3 and 6 were overwritten


def pairs():
    buffer = jrb.ReplayBuffer(8, batch_size=2, sampler=jrb.Lifo())
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(10)})
    for more in (10, 12):
        state, _ = buffer.draw(state, KEY)
        state = buffer.extend(state, {"x": jnp.arange(more, more + 2)})
    return buffer, state  # holds 6 .. 13, of which 8, 9, 10, 11 were drawn


def rest(buffer, state):
    out = []
    while buffer.can_sample(state):
        state, sample = buffer.draw(state, KEY)
        out += sample.data["x"][sample.mask].tolist()
    return out


@pytest.mark.slow
def test_a_stack_goes_on_after_a_save_and_in_another_size(tmp_path):
    buffer, state = pairs()
    assert rest(buffer, state) == [13, 12, 7, 6]
    jrb.save(tmp_path / "it", buffer, state)
    assert rest(*jrb.load(tmp_path / "it")) == [13, 12, 7, 6]
    for capacity, left in ((20, [13, 12, 7, 6]), (7, [13, 12, 7]), (3, [13, 12])):
        new = dataclasses.replace(buffer, capacity=capacity)
        back = jrb.rebuild(buffer, state, new)
        assert rest(new, back) == left
        assert rest(new, new.add(back, {"x": 99}))[0] == 99


def test_a_full_buffer_gives_room_once_its_oldest_were_drawn():
    buffer = jrb.ReplayBuffer(3, batch_size=1, sampler=jrb.Lifo(), writer=jrb.BlockWhenFull())
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(3)})
    for number in (2, 1):
        state, sample = buffer.draw(state, KEY)
        assert sample.data["x"].tolist() == [number] and not buffer.can_add(state)
    state, _ = buffer.draw(state, KEY)
    state = buffer.extend(state, {"x": jnp.arange(3, 6)})
    assert rest(buffer, state) == [5, 4, 3]


@pytest.mark.parametrize(
    "unit",
    [jrb.FrameStack(2), jrb.NStep(2, 0.9, strict=True), jrb.Sequence(2, sample_by="episodes")],
)
def test_units_whose_anchors_leave_early_are_refused(unit):
    with pytest.raises(ValueError, match="Lifo"):
        jrb.ReplayBuffer(8, num_envs=2, sampler=jrb.Lifo(), unit=unit)


def test_items_without_an_order_are_refused():
    with pytest.raises(ValueError, match=r"Lifo: expected a writer .* in the order of time"):
        jrb.ReplayBuffer(8, sampler=jrb.Lifo(), writer=jrb.Reservoir(0))
