"""The picture of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.plot import canvas
from tests.plot import buffers, pictures

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
GREY = jax.ShapeDtypeStruct((32, 32), jnp.uint8)
COLOR = jax.ShapeDtypeStruct((16, 20, 3), jnp.uint8)
UNITS = {
    "rows": (jrb.Transition(), buffers.IMAGE, "observation: 16 of 20"),
    "colour": (jrb.NStep(3, 0.9), COLOR, "observation: 16 of 20"),
    "windows": (jrb.Sequence(6, burn_in=2, partial="pad"), buffers.IMAGE, "observation: 6 of 20"),
    "stacks": (jrb.FrameStack(4), GREY, "observation: 6 of 20"),
    "stacks of windows": (jrb.FrameStack(2, unit=jrb.Sequence(3)), buffers.IMAGE, "observation: "),
}


@pytest.mark.parametrize("kind", UNITS)
def test_a_batch_of_any_unit_can_be_read(kind):
    unit, observation, said = UNITS[kind]
    buffer = jrb.ReplayBuffer(80, 2, batch_size=20, unit=unit, sampler=jrb.Prioritized())
    state = buffers.filled(buffer, 45, observation=observation)
    priorities = np.random.default_rng(0).exponential(size=80).astype(np.float32)
    state = buffer.update_priority(state, jnp.arange(80), priorities)
    batch = buffer.sample(state, KEY)
    figure = jrb.plot.sample(batch)
    pictures.check(figure)
    titles = pictures.titles(figure)
    slots = np.asarray(batch.indices)
    assert titles[0] == f"20 draws of {len(np.unique(slots))} slots"
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert sum(heights) == 20
    assert heights[0] == np.sum(slots < figure.axes[0].patches[0].get_width())
    weights = np.asarray(batch.weights)
    assert any(title == f"Weights from {weights.min():.3g} to 1" for title in titles)
    assert any(title.startswith(said.split(" of 20")[0]) for title in titles)
    mask = np.asarray(batch.mask)
    if mask.ndim > 1:
        axes = next(axes for axes in figure.axes if "Windows" in axes.get_title(loc="left"))
        shown = np.asarray(axes.collections[0].get_array())
        np.testing.assert_array_equal(shown > 0, mask)
        np.testing.assert_array_equal(shown == 3, np.asarray(batch.info["is_last"]))


def test_the_parts_of_a_mix_are_told_apart():
    one = jrb.ReplayBuffer(9)
    other = jrb.ReplayBuffer(50)
    mix = jrb.Mix((one, other), (0.25, 0.75), batch_size=40)
    states = one.extend(one.init(0), jnp.arange(5)), other.extend(other.init(0), jnp.arange(50))
    figure = jrb.plot.sample(mix.sample(states, KEY))
    pictures.check(figure)
    assert {"buffer 0", "buffer 1"} <= set(pictures.words(figure))
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == 40


def test_what_is_masked_and_what_draws_say_is_told():
    buffer = jrb.ReplayBuffer(9, sampler=jrb.Queue(count_draws=True))
    state = buffer.extend(buffer.init(0), jnp.arange(5))
    batch = buffer.sample(state, KEY, 8)
    figure = jrb.plot.sample(batch)
    pictures.check(figure)
    assert pictures.titles(figure) == ["5 draws of 5 slots"]
    assert "3 masked; draws: 0" in pictures.words(figure)
    none = batch.replace(mask=jnp.zeros(8, bool))
    assert "Nothing was drawn" in pictures.words(jrb.plot.sample(none))
    objects = jrb.ReplayBuffer(9, storage=jrb.ListStorage())
    held = objects.extend(objects.init(None), ["a", {"b": 1}])
    assert len(jrb.plot.sample(objects.sample(held, KEY, 4)).axes) == 1


def test_wrong_batches_are_refused():
    buffer = jrb.ReplayBuffer(9, batch_size=4)
    state = buffer.add(buffer.init(0), 1)
    with pytest.raises(TypeError, match=r"plot.sample: batch: expected a Sample, got tuple"):
        jrb.plot.sample(buffer.draw(state, KEY))
    many = jax.vmap(lambda key: buffer.sample(state, key))(jax.random.split(KEY, 3))
    with pytest.raises(ValueError, match=r"of indices \(B,\), got \(3, 4\). Pick one"):
        jrb.plot.sample(many)
    with pytest.raises(TypeError, match=r"plot.sample: batch: .* got traced ones"):
        jax.jit(lambda key: jrb.plot.sample(buffer.sample(state, key)).number)(KEY)


SHAPES = {
    (10, 12): (1, 10, 12, 1),
    (10, 12, 4): (1, 10, 12, 4),
    (3, 10, 12): (1, 10, 12, 3),
    (4, 84, 84): (4, 84, 84, 1),
    (4, 10, 12, 3): (4, 10, 12, 3),
    (4, 3, 20, 18): (4, 20, 18, 3),
    (8,): None,
    (): None,
    (4, 3): None,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_are_told_by_their_shape(shape):
    order, want = canvas.axes_order(shape), SHAPES[shape]
    if want is None:
        assert order is None
        return
    values = np.random.default_rng(0).integers(0, 255, (2, *shape)).astype(np.uint8)
    frames = canvas.to_frames(values, order, 1)
    assert frames.shape == (2, *want)
    assert sorted(frames.ravel()) == sorted(values.ravel())
    shown, _ = canvas.to_rgb(frames)
    assert shown.shape == (*frames.shape[:-1], 3)
    assert 0 <= shown.min() <= shown.max() <= 1


@pytest.mark.parametrize("weight", [0.0, np.nan, np.inf])
def test_weights_of_any_value(weight):
    buffer = jrb.ReplayBuffer(9, batch_size=4)
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(9)})
    batch = buffer.sample(state, KEY).replace(weights=jnp.full(4, weight))
    pictures.check(jrb.plot.sample(batch))


def test_a_batch_of_packed_rows_can_be_read():
    unit, sampler = jrb.Packed(6, 3), jrb.Prioritized(count_draws=True)
    buffer = jrb.ReplayBuffer(80, 2, batch_size=20, unit=unit, sampler=sampler)
    state = buffers.filled(buffer, 45)
    batch = buffer.sample(state, KEY)
    figure = jrb.plot.sample(batch)
    pictures.check(figure)
    drawn = np.asarray(batch.indices)[np.asarray(batch.weights) > 0]
    title = pictures.titles(figure)[0]
    assert title == f"{len(drawn)} draws of {len(np.unique(drawn))} slots"
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == len(drawn)
    with pytest.raises(ValueError, match="a single batch"):
        jrb.plot.sample(jax.vmap(lambda key: buffer.sample(state, key))(jax.random.split(KEY, 2)))
