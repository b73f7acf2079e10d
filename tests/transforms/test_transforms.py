"""Transforms change the leaves that they name, and no others."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import authoring
from jrb import transforms as tr
from jrb.types import TransformContext

B = 6
RNG = np.random.default_rng(0)


def image(*shape, dtype=np.uint8):
    return jnp.asarray(RNG.integers(0, 256, (B, *shape)).astype(dtype))


def batch(mask=None, seed=0):
    mask = jnp.ones(B, jnp.bool_) if mask is None else mask
    return TransformContext(key=jax.random.key(seed), mask=mask, keys=jrb.TED)


def data(**more):
    return {
        "observation": {"image": image(9, 7, 3), "state": jnp.ones((B, 4))},
        "action": jnp.arange(B),
        "next": {
            "observation": {"image": image(9, 7, 3), "state": jnp.zeros((B, 4))},
            "reward": jnp.linspace(-3.0, 3.0, B),
            "done": jnp.zeros(B, jnp.bool_),
        },
        **more,
    }


IMAGES = (("observation", "image"), ("next", "observation", "image"))


def changed(before, after):
    """Returns the names of the leaves of `before` that changed or are missing."""
    named = lambda tree: dict(zip(authoring.leaf_names(tree), jax.tree.leaves(tree), strict=True))
    one, other = named(before), named(after)
    same = lambda a, b: a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
    return {name for name in one if name not in other or not same(one[name], other[name])}


def test_images_become_floats_and_states_stay():
    before = data()
    after = tr.ToFloat().apply(before, batch())
    assert changed(before, after) == {"observation/image", "next/observation/image"}
    want = np.asarray(before["observation"]["image"], np.float32) / 255
    np.testing.assert_allclose(after["observation"]["image"], want, rtol=1e-6)
    half = tr.ToFloat(IMAGES[:1], scale=1.0, dtype="bfloat16").apply(before, batch())
    assert half["observation"]["image"].dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "shape", "want"),
    [("HWC", (9, 7, 3), (4, 5, 3)), ("CHW", (3, 9, 7), (3, 4, 5)), ("HW", (2, 9, 7), (2, 4, 5))],
)
@pytest.mark.parametrize(
    "transform",
    [tr.Resize(4, 5), tr.RandomCrop(4, 5), tr.CenterCrop(4, 5)],
    ids=lambda t: type(t).__name__,
)
def test_sizes(transform, layout, shape, want):
    transform = dataclasses.replace(transform, layout=layout, paths=("x",))
    after = transform.apply({"x": image(*shape), "y": jnp.ones(B)}, batch())
    assert after["x"].shape == (B, *want)
    assert after["x"].dtype == jnp.uint8


def test_a_resized_flat_image_stays_flat_and_floats_stay_floats():
    flat = {"x": jnp.full((B, 8, 8, 1), 77, jnp.uint8), "y": jnp.full((B, 8, 8, 1), 0.5)}
    after = tr.Resize(3, 5, ("x", "y")).apply(flat, batch())
    assert (after["x"] == 77).all()
    np.testing.assert_allclose(after["y"], 0.5, rtol=1e-6)


def test_gray_is_the_weighted_sum_of_colours():
    colours = image(5, 4, 3)
    want = np.asarray(colours, np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    gray = tr.Grayscale(("x",)).apply({"x": colours}, batch())["x"]
    assert gray.shape == (B, 5, 4, 1)
    assert np.abs(np.asarray(gray[..., 0], np.float32) - want).max() <= 0.5001
    first = jnp.moveaxis(colours, -1, 1)
    other = tr.Grayscale(("x",), layout="CHW", keep=False).apply({"x": first}, batch())["x"]
    np.testing.assert_array_equal(other, gray[..., 0])


def test_a_shift_moves_every_item_and_repeats_its_border():
    before = {"x": image(8, 8, 1), "y": image(8, 8, 1)}
    after = tr.RandomShift(2, ("x", "y")).apply(before, batch())
    padded = np.pad(before["x"], ((0, 0), (2, 2), (2, 2), (0, 0)), mode="edge")
    moves = []
    for b in range(B):
        found = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if (padded[b, i : i + 8, j : j + 8] == after["x"][b]).all()
        ]
        assert found
        moves.append(found[0])
    assert len(set(moves)) > 1
    again = tr.RandomShift(2, ("x", "y")).apply(before, batch())
    assert changed(after, again) == set()
    assert changed(after, tr.RandomShift(2, ("x", "y")).apply(before, batch(seed=1)))


def test_a_shift_moves_all_frames_of_a_stack_alike():
    frames = jnp.broadcast_to(image(1, 8, 8), (B, 4, 8, 8))
    after = tr.RandomShift(3, ("x",), layout="HW").apply({"x": frames}, batch())["x"]
    assert (after == after[:, :1]).all()


def test_crops_are_windows_of_the_image():
    before = image(6, 5)
    after = tr.RandomCrop(3, 4, ("x",), layout="HW").apply({"x": before}, batch())["x"]
    for b in range(B):
        windows = [before[b, i : i + 3, j : j + 4] for i in range(4) for j in range(2)]
        assert any((window == after[b]).all() for window in windows)
    center = tr.CenterCrop(2, 3, ("x",), layout="HW").apply({"x": before}, batch())["x"]
    np.testing.assert_array_equal(center, before[:, 2:4, 1:4])


def test_values():
    before = data()
    after = tr.Normalize((0.0, 1.0, 2.0, 3.0), 2.0, (("observation", "state"),)).apply(
        before, batch()
    )
    assert changed(before, after) == {"observation/state"}
    np.testing.assert_array_equal(after["observation"]["state"][0], [0.5, 0.0, -0.5, -1.0])
    after = tr.Clip().apply(before, batch())
    assert changed(before, after) == {"next/reward"}
    assert (float(after["next"]["reward"].min()), float(after["next"]["reward"].max())) == (-1, 1)
    after = tr.Scale(2.0, 1.0).apply(before, batch())
    np.testing.assert_allclose(after["next"]["reward"], 2 * before["next"]["reward"] + 1)
    after = tr.Cast("bfloat16").apply(before, batch())
    assert changed(before, after) == {"observation/state", "next/observation/state", "next/reward"}
    assert tr.Cast("float32", ("action",)).apply(before, batch())["action"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16"])
def test_clipping_keeps_a_dtype_whatever_the_bounds(dtype):
    values = jnp.array([0, 1, 100]).astype(dtype)
    clip = lambda low, high: tr.Clip(low, high, ("x",)).apply({"x": values}, batch())["x"]
    assert clip(-1, 1).tolist() == [0, 1, 1]
    assert clip(-1.5, 1.5).astype(jnp.float32).tolist() == [0, 1, 1 if dtype != "float16" else 1.5]
    assert clip(1, None).tolist() == [1, 1, 100]
    assert clip(None, 1e9).dtype == dtype


def test_half_floats_are_normalized_as_wide_ones():
    half = {"x": jnp.full((B, 1), 60000.0, jnp.float16)}
    out = tr.Normalize(60000.0, 1e-8, ("x",)).apply(half, batch())["x"]
    assert (out == (60000.0 - 60000.0)).all()
    assert out.dtype == jnp.float32


def test_images_do_not_begin_within_the_window():
    windows = {"x": jnp.zeros((B, 4, 8, 8), jnp.uint8)}
    mask = jnp.ones((B, 4), jnp.bool_)
    with pytest.raises(ValueError, match=r"'x': expected images \[B, L, ..., H, W, C\]"):
        tr.RandomShift(2, ("x",)).apply(windows, batch(mask))


def test_a_transform_gets_a_key_of_the_kind_of_the_draw():
    class Noise:
        def __hash__(self):
            return 0

        def apply(self, data, batch):
            return data | {"noise": jax.random.normal(batch.key, batch.mask.shape)}

    buffer = jrb.ReplayBuffer(4, batch_size=3, transforms=(Noise(),))
    state = buffer.add(buffer.init({"x": jnp.zeros(())}), {"x": jnp.zeros(())})
    for impl in ("threefry2x32", "rbg"):
        noise = buffer.sample(state, jax.random.key(0, impl=impl)).data["noise"]
        assert len(set(noise.tolist())) == 3
    assert buffer.sample(state, jax.random.PRNGKey(0)).data["noise"].shape == (3,)


def test_structure():
    before = data()
    kept = tr.Select(("action", ("next", "reward"))).apply(before, batch())
    assert authoring.leaf_names(kept) == ["action", "next/reward"]
    rest = tr.Exclude(("action", ("next", "observation"))).apply(before, batch())
    assert authoring.leaf_names(rest) == [
        "next/done",
        "next/reward",
        "observation/image",
        "observation/state",
    ]
    renamed = tr.Rename(((("next", "reward"), "r"), ("action", ("act", "ion")))).apply(
        before, batch()
    )
    assert {"r", "act/ion"} <= set(authoring.leaf_names(renamed))
    assert not {"next/reward", "action"} & set(authoring.leaf_names(renamed))
    paths = (("observation", "state"), ("next", "observation", "state"))
    joined = tr.Concatenate(paths, "both").apply(before, batch())
    assert joined["both"].shape == (B, 8)
    assert "observation/state" not in authoring.leaf_names(joined)
    assert tr.Concatenate(paths, "both", keep=True).apply(before, batch())["observation"]


def test_reward_to_go_ends_with_the_episode_and_the_mask():
    reward = jnp.array([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
    done = jnp.array([[False, True, False, False], [False] * 4])
    mask = jnp.array([[True] * 4, [False, True, True, False]])
    windows = {"next": {"reward": reward, "done": done}}
    out = tr.RewardToGo(0.5).apply(windows, batch(mask))["next"]["reward_to_go"]
    np.testing.assert_array_equal(out, [[2, 2, 8, 8], [0, 4, 4, 0]])


def test_they_work_on_other_containers():
    class Item(NamedTuple):
        observation: jax.Array
        reward: jax.Array

    item = Item(image(8, 8, 3), jnp.ones(B))
    after = tr.ToFloat(("observation",)).apply(item, batch())
    assert isinstance(after, Item)
    assert after.observation.dtype == jnp.float32
    with pytest.raises(TypeError, match="expected nested dicts, got Item"):
        tr.Exclude(("reward",)).apply(item, batch())


@pytest.mark.slow
def test_in_a_buffer_inside_jit_and_in_order():
    example = jax.tree.map(lambda leaf: leaf[0], data())
    steps = (tr.RandomShift(2, IMAGES), tr.ToFloat(), lambda item: item | {"new": item["action"]})
    buffer = jrb.ReplayBuffer(8, batch_size=4, transforms=steps, unit=jrb.Sequence(2))
    state = buffer.extend(buffer.init(example), data())
    draw = jax.jit(buffer.sample)
    sample = draw(state, jax.random.key(0))
    assert sample.data["observation"]["image"].shape == (4, 2, 9, 7, 3)
    assert sample.data["observation"]["image"].dtype == jnp.float32
    np.testing.assert_array_equal(sample.data["new"], sample.data["action"])
    eager = buffer.sample(state, jax.random.key(0))
    np.testing.assert_array_equal(
        sample.data["observation"]["image"], eager.data["observation"]["image"]
    )
    assert hash(buffer) == hash(
        jrb.ReplayBuffer(8, batch_size=4, transforms=steps, unit=jrb.Sequence(2))
    )


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (tr.Cast("float32", (("next", "rewards"),)), ValueError, "'next/rewards'.*'next/reward'"),
        (tr.Select(("acton",)), ValueError, "'acton'.*'action'"),
        (tr.Exclude((("next", "x"),)), ValueError, "'next/x'"),
        (tr.Rename((("x", "y"),)), ValueError, "'x'"),
        (tr.Rename((("action", ("next", "done")),)), ValueError, "nothing at 'next/done'"),
        (
            tr.Concatenate((("observation", "state"), IMAGES[0]), "z"),
            TypeError,
            "'observation/image'.*float32, got uint8",
        ),
        (tr.Concatenate((("next", "reward"),) * 2, "z"), ValueError, "'next/reward'.*the batch"),
        (tr.Normalize(1.0, 2.0, (("action", "mean"),)), ValueError, "'action/mean'"),
        (tr.ToFloat(("action",)), TypeError, "'action'.*uint8, got int32"),
        (tr.ToFloat((("observation", "state"),)), TypeError, "'observation/state'.*uint8"),
        (tr.Grayscale(), ValueError, "'next/observation/state'.*images"),
        (tr.Resize(3, 3, ("action",)), ValueError, "'action'.*images"),
        (tr.RandomCrop(20, 3, IMAGES), ValueError, r"'next/observation/image'.*\(20, 3\)"),
        (tr.Normalize((0.0, 1.0), 1.0, (("next", "reward"),)), ValueError, "'next/reward'.*of 2"),
        (tr.RewardToGo(), ValueError, r"'next/reward'.*windows \[B, L\]"),
    ],
    ids=lambda case: type(case).__name__ if not isinstance(case, type | str) else "",
)
def test_bad_input_is_named(transform, error, text):
    with pytest.raises(error, match=text):
        transform.apply(data(), batch())


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: tr.Cast("float33"), TypeError),
        (lambda: tr.Cast("float32", "x"), TypeError),
        (lambda: tr.Normalize(0.0, 0.0), ValueError),
        (lambda: tr.Clip(1.0, -1.0), ValueError),
        (lambda: tr.Resize(0, 4), ValueError),
        (lambda: tr.RandomShift(2, layout="WH"), ValueError),
        (lambda: tr.RewardToGo(1.5), ValueError),
        (lambda: tr.Cast("float64"), TypeError),
        (lambda: tr.ToFloat(dtype="foo"), TypeError),
        (lambda: tr.Rename((("a", "b", "c"),)), TypeError),
        (lambda: tr.Normalize((1.0, 2.0), (1.0, 2.0, 3.0)), ValueError),
        (lambda: tr.Concatenate(("a",), "b", axis=0), ValueError),
    ],
)
def test_bad_descriptions_are_refused(make, error):
    with pytest.raises(error):
        make()


@dataclasses.dataclass(unsafe_hash=True)
class Shift:
    """A function that adds `by`; all such functions compare equal."""

    by: int = dataclasses.field(compare=False)

    def __call__(self, data):
        return data + self.by


@pytest.mark.parametrize("storage", [jrb.DeviceStorage(), jrb.MemmapStorage()], ids=repr)
def test_a_buffer_calls_its_own_functions(storage):
    for by in (1, 100):
        buffer = jrb.ReplayBuffer(4, batch_size=2, storage=storage, transforms=(Shift(by),))
        state = buffer.add(buffer.init(jnp.int32(0)), jnp.int32(7))
        assert buffer.sample(state, jax.random.key(0)).data.tolist() == [7 + by] * 2


def ended_by_truncate(buffer, row, has_ended):
    state = buffer.init(row(0))
    for t in range(6):
        state = buffer.add(state, row(t))
        state = buffer.truncate(state) if has_ended(t) else state
    return state


def ended_by_number(buffer, row, has_ended):
    rows = [{"id": np.int32(sum(map(has_ended, range(t)))), **row(t)} for t in range(6)]
    return buffer.extend(buffer.init(rows[0]), jax.tree.map(lambda *x: np.stack(x), *rows))


def row_of_one(t):
    return {"observation": np.float32(t), "next": {"reward": np.float32(1)}}


def row_with_a_flag(t):
    after = {**row_of_one(t)["next"], "done": np.bool_(False)}
    return {**row_of_one(t), "next": after}


@pytest.mark.slow
@pytest.mark.parametrize("row", [row_of_one, row_with_a_flag])
@pytest.mark.parametrize("write", [ended_by_truncate, ended_by_number])
@pytest.mark.parametrize("kind", ["plain", "stack", "host", "behind a function"])
def test_a_reward_to_go_ends_where_the_unit_knows_of_an_end(row, write, kind, tmp_path):
    unit, to_go = jrb.Sequence(4, cross_episodes=True), (tr.RewardToGo(to="window"),)
    keys = jrb.Keys(episode="id") if write is ended_by_number else jrb.TED
    parts = {"batch_size": 64, "keys": keys, "unit": unit, "transforms": to_go}
    if kind == "stack":
        if row is row_of_one and write is ended_by_truncate:
            pytest.skip("stacks need to be told where episodes end")
        parts["unit"] = jrb.FrameStack(2, unit=unit)
    if kind == "host":
        parts["storage"] = jrb.MemmapStorage(str(tmp_path / "rows"))
    if kind == "behind a function":
        parts["transforms"] = (lambda data: data, *to_go)
    buffer = jrb.ReplayBuffer(8, **parts)
    state = write(buffer, row, lambda t: t == 1)
    batch = buffer.sample(state, jax.random.key(0))
    found = zip(batch.indices.tolist(), batch.data["next"]["reward_to_go"].tolist(), strict=True)
    want = {0: [2, 1, 2, 1], 1: [1, 3, 2, 1], 2: [4, 3, 2, 1]}
    assert {anchor: list(map(int, sums)) for anchor, sums in found} == want


def test_a_reward_to_go_of_several_agents_is_one_for_each():
    rewards = {"a": jnp.ones((2, 3)), "b": jnp.arange(6.0).reshape(2, 3, 1)}
    windows = {"next": {"reward": rewards, "done": jnp.bool_([[0, 1, 0], [0, 0, 0]])}}
    mask = jnp.bool_([[1, 1, 1], [1, 1, 0]])
    out = tr.RewardToGo(0.5).apply(windows, batch(mask))["next"]["reward_to_go"]
    np.testing.assert_allclose(out["a"], [[1.5, 1, 1], [1.5, 1, 0]])
    np.testing.assert_allclose(out["b"][..., 0], [[0.5, 1, 2], [5, 4, 0]])


@pytest.mark.parametrize(
    "unit",
    [
        jrb.Transition(),
        jrb.NStep(3, 0.9),
        jrb.Sequence(3),
        jrb.Sequence(8, partial="pad"),
        jrb.Sequence(1, burn_in=5, partial="pad"),
        jrb.Sequence(3, sample_by="episodes"),
        jrb.Sequence(3, cross_episodes=True),
        jrb.FrameStack(2, unit=jrb.Sequence(3)),
        jrb.Hindsight(jnp.equal, unit=jrb.Sequence(3)),
    ],
    ids=lambda unit: type(unit).__name__,
)
@pytest.mark.parametrize("where", ["first", "behind another"])
def test_a_reward_to_go_needs_whole_episodes_when_the_buffer_is_made(unit, where):
    before = () if where == "first" else (tr.Cast("float32"), lambda data: data)
    with pytest.raises(ValueError, match=r"expected whole episodes, got .*return_to_go"):
        jrb.ReplayBuffer(8, unit=unit, transforms=(*before, tr.RewardToGo(0.9)))
    options = (tr.RewardToGo(to="window"), tr.RewardToGo(bootstrap="value"))
    for each in options:
        if isinstance(unit, jrb.Transition | jrb.NStep):
            with pytest.raises(ValueError, match="RewardToGo"):
                jrb.ReplayBuffer(8, unit=unit, transforms=(*before, each))
        else:
            jrb.ReplayBuffer(8, unit=unit, transforms=(*before, each))


@pytest.mark.parametrize("wrap", [False, True])
def test_a_reward_to_go_of_whole_episodes_ends_with_them(wrap):
    """An episode that is longer than the window has no sum, as its end is not in sight."""
    done = np.isin(np.arange(12), [3, 9])
    reward = np.arange(12, dtype=np.float32) + 1
    seen = {"achieved_goal": np.zeros(12), "desired_goal": np.zeros(12)}
    rows = {"observation": seen, "next": {"observation": seen, "reward": reward, "done": done}}
    unit = jrb.Sequence(5, sample_by="whole_episodes")
    unit = jrb.Hindsight(lambda one, other: one, ratio=0.0, unit=unit) if wrap else unit
    options = {"unit": unit, "batch_size": 64, "transforms": (tr.RewardToGo(0.5),)}
    buffer, state = jrb.from_items(jax.tree.map(jnp.asarray, rows), capacity=16, **options)
    batch = jax.jit(buffer.sample)(state, jax.random.key(0))
    sums = dict(zip(batch.indices.tolist(), batch.data["next"]["reward_to_go"], strict=True))
    assert sums.keys() == {0, 4}
    np.testing.assert_array_equal(sums[0], [3.25, 4.5, 5, 4, 0])
    assert np.isnan(sums[4]).all()


@pytest.mark.parametrize("flags", ["both", "done", "truncate"])
def test_a_bootstrap_is_worth_what_follows_unless_the_episode_terminated(flags):
    reward, value = np.float32([1, 2, 4, 8, 16, 32]), np.float32([10, 20, 30, 40, 50, 60])
    over, cut = np.arange(6) == 1, np.arange(6) == 3
    after = {"reward": reward, "terminated": over, "truncated": cut}
    if flags != "both":
        after = {"reward": reward, "done": over}
    rows = {"value": value, "next": after}
    unit = jrb.Sequence(6, partial="pad", cross_episodes=True)
    to_go = tr.RewardToGo(0.5, bootstrap="value", path="goal")
    buffer = jrb.ReplayBuffer(6, unit=unit, batch_size=64, transforms=(to_go,))
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
    for row in range(6):
        state = buffer.add(state, jax.tree.map(lambda leaf, row=row: leaf[row], rows))
        state = buffer.truncate(state) if flags == "truncate" and cut[row] else state
    batch = buffer.sample(state, jax.random.key(0))
    (goal,) = np.unique(batch.data["goal"][batch.indices == 0], axis=0)
    if flags == "done":  # one episode from row 2 on
        np.testing.assert_array_equal(
            goal, [2, 2, 21.875, 35.75, 55.5, 62 + 17][:2] + goal.tolist()[2:]
        )
        np.testing.assert_allclose(goal[5], 32 + 30)
        np.testing.assert_allclose(goal[2], 4 + 0.5 * (8 + 0.5 * (16 + 0.5 * 62)))
    else:
        last = 16 + 0.5 * 62
        np.testing.assert_allclose(goal, [2, 2, 4 + 0.5 * (8 + 20), 8 + 20, last, 62])


def test_a_discount_of_0_leaves_out_what_comes_later():
    rewards = jnp.array([[1.0, jnp.inf, jnp.nan, 2.0]])
    windows = {"next": {"reward": rewards, "done": jnp.zeros((1, 4), jnp.bool_)}}
    out = tr.RewardToGo(0.0).apply(windows, batch(jnp.ones((1, 4), jnp.bool_)))
    np.testing.assert_array_equal(out["next"]["reward_to_go"], rewards)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tr.Scale(float("inf")), "Scale: factor: expected finite numbers, got inf"),
        (lambda: tr.Scale(1.0, "x"), "Scale: offset: expected finite numbers"),
        (lambda: tr.Normalize((0.0, float("nan")), 1.0), "Normalize: mean: expected fin"),
        (lambda: tr.Normalize(0.0, None), "Normalize: std: expected finite numbers"),
        (lambda: tr.ToFloat(scale="x"), "ToFloat: scale: expected finite numbers"),
        (lambda: tr.Resize(3, 3, method="foo"), "Resize: method: .*got 'foo'"),
        (lambda: tr.RewardToGo(path=("next", 3)), "path: expected a name or a tuple of names"),
        (lambda: tr.RewardToGo(bootstrap=0.5), "bootstrap: expected a name or a tuple of"),
        (lambda: tr.RewardToGo(to="end"), "to: expected one of 'episode', 'window', got 'end'"),
    ],
)
def test_options_that_cannot_work_are_refused_when_the_transform_is_made(make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        make()
