"""Epochs of several passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(0)


class Passes:
    """A model of the possible batches, for buffers in which every slot is an anchor."""

    def __init__(self, sampler, size):
        self.sampler, self.size = sampler, size
        self.slots, self.left, self.passes = [], [], 0

    def draw(self, held, drawn):
        """Asserts that `drawn` may be the next batch, given all `held` slots, oldest first."""
        needed = self.size if self.sampler.drop_last else 1
        if len(self.left) < needed:
            if self.passes == self.sampler.uses or len(self.slots) < needed:
                self.slots, self.passes = held, 0
            self.left, self.passes = list(self.slots), self.passes + 1
        want = self.size if len(self.left) >= needed else 0
        if not self.sampler.shuffle:
            assert drawn == self.left[:want]
        assert len(drawn) == min(want, len(self.left))
        for slot in drawn:
            self.left.remove(slot)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [
        jrb.WithoutReplacement(uses=3),
        jrb.WithoutReplacement(uses=2, drop_last=True),
        jrb.WithoutReplacement(uses=2, shuffle=False),
        jrb.WithoutReplacement(),
    ],
)
@pytest.mark.parametrize(("capacity", "envs"), [(7, 1), (10, 2)])
def test_programs_of_writes_and_draws(sampler, capacity, envs):
    rng, orders = np.random.default_rng(capacity), set()
    buffer = jrb.ReplayBuffer(capacity, num_envs=envs, batch_size=4, sampler=sampler)
    extend, draw = jax.jit(buffer.extend), jax.jit(buffer.draw)
    state, model = buffer.init({"x": 0}), Passes(sampler, 4)
    for number in range(120):
        if rng.random() < 0.25:
            rows = rng.random(3) < 0.6
            state = extend(state, {"x": jnp.zeros((3, envs), int)}, rows)
        slots, count = buffer.in_order(state)
        state, sample = draw(state, jax.random.key(number))
        drawn = sample.indices[sample.mask].tolist()
        model.draw(slots[: int(count)].tolist(), drawn)
        orders.add(tuple(drawn))
    assert sampler.shuffle is False or len(orders) > 40


def test_each_item_is_drawn_so_often_before_what_came_since():
    sampler = jrb.WithoutReplacement(uses=3, count_draws=True)
    buffer = jrb.ReplayBuffer(9, batch_size=5, sampler=sampler)
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(5)})
    passes = []
    for number in range(3):
        state, sample = buffer.draw(state, jax.random.key(number))
        state = buffer.add(state, {"x": 100 + number})
        assert sample.info["draws"].tolist() == [number] * 5
        passes.append(sample.data["x"].tolist())
    assert [sorted(drawn) for drawn in passes] == [[*range(5)]] * 3
    assert len(set(map(tuple, passes))) == 3
    state, sample = buffer.draw(state, KEY)
    state, rest = buffer.draw(state, KEY)
    drawn = sample.data["x"].tolist() + rest.data["x"][rest.mask].tolist()
    assert sorted(drawn) == [0, 1, 2, 3, 4, 100, 101, 102]


def test_an_epoch_of_several_passes_goes_on_after_a_save(tmp_path):
    buffer = jrb.ReplayBuffer(6, batch_size=4, sampler=jrb.WithoutReplacement(uses=2))
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(6)})
    for number in range(3):
        state, _ = buffer.draw(state, jax.random.key(number))
    jrb.save(tmp_path / "it", buffer, state)
    back = jrb.load(tmp_path / "it")[1]
    for number in range(3, 6):
        state, one = buffer.draw(state, jax.random.key(number))
        back, other = buffer.draw(back, jax.random.key(number))
        assert one.indices.tolist() == other.indices.tolist()


@pytest.mark.parametrize("uses", [0, -1, 1.5, True])
def test_a_number_of_passes_is_asked_for(uses):
    with pytest.raises((TypeError, ValueError), match="uses: expected"):
        jrb.WithoutReplacement(uses=uses)
