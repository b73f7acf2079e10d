"""Whatever adds numbers of users adds them in float32 or wider, and rounds the sum once.

Each part that adds is given rewards in every floating dtype, and compared with sums of float64.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jrb
from jrb import transforms as tr

RARE = ["float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"]
NARROW = ["bfloat16", "float16", "float8_e4m3fn"]
NARROW += [pytest.param(name, marks=pytest.mark.slow) for name in RARE]
DTYPES = [*NARROW, "float32", "float64"]
T = 300  # as a sum in bfloat16, ones stop at 256
KEY = jax.random.key(0)
DISCOUNTS = {"plain": 1.0, "discounted": 0.99}


def rewards_of(dtype):
    """Numbers that are exact in `dtype`, and whose sums are exact in float32."""
    numbers = np.random.default_rng(5).choice([0.25, 0.5, 0.75, 1.0], T)
    return numbers.astype(np.dtype(dtype))


def sums_of(rewards, discount, most=T):
    """The discounted sums of up to `most` rewards from each row on, float64."""
    wide, sums = rewards.astype(np.float64), np.zeros(T)
    for row in range(T):
        ahead = wide[row : row + most]
        sums[row] = (ahead * discount ** np.arange(len(ahead))).sum()
    return sums


def assert_rounded(found, sums):
    """`found` is `sums` rounded to its dtype; to a unit in the last place of it for float32."""
    dtype = np.asarray(found).dtype
    info = ml_dtypes.finfo(dtype)
    with np.errstate(over="ignore"):
        near = [(sums * (1 + sign * 3e-6)).astype(dtype).astype(np.float64) for sign in (-1, 1)]
    found = np.asarray(found).astype(np.float64)
    slack = 3e-6 * np.abs(sums) if info.bits >= 32 else 0
    low, high = np.fmin(*near) - slack, np.fmax(*near) + slack
    is_right = ((found >= low) & (found <= high)) | (np.isnan(found) & np.isnan(low + high))
    assert is_right.all(), (dtype, found[~is_right][:3], sums[~is_right][:3])


def rows_of(rewards):
    after = {"reward": rewards, "done": np.arange(T) == T - 1}
    return {"next": after}


@pytest.fixture(params=DTYPES)
def rewards(request):
    if request.param != "float64":
        yield rewards_of(request.param)
        return
    with jax.enable_x64(True):
        yield rewards_of(request.param)


def sampled(rewards, unit, *transforms, batch_size=128):
    buffer, state = jrb.from_items(rows_of(rewards), unit=unit, transforms=transforms)
    return state, buffer.sample(state, KEY, batch_size=batch_size)


@pytest.mark.slow
def test_rewards_to_go(rewards):
    unit = jrb.Sequence(T, sample_by="whole_episodes")
    to_go = {path: tr.RewardToGo(discount, path=path) for path, discount in DISCOUNTS.items()}
    _, batch = sampled(rewards, unit, *to_go.values(), batch_size=1)
    for path, discount in DISCOUNTS.items():
        assert batch.data[path].dtype == rewards.dtype
        assert_rounded(batch.data[path][0], sums_of(rewards, discount))


def test_rewards_to_go_in_windows(rewards):
    """Far from the end of a window, what follows it makes no difference."""
    unit, options = jrb.Sequence(200), {"one": None, "two": ("next", "reward")}
    to_go = [tr.RewardToGo(0.5, "window", other, path) for path, other in options.items()]
    _, batch = sampled(rewards, unit, *to_go, batch_size=8)
    sums = sums_of(rewards, 0.5)
    for path in options:
        assert batch.data[path].dtype == rewards.dtype
        for first, found in zip(batch.indices.tolist(), batch.data[path], strict=True):
            assert_rounded(found[:120], sums[first : first + 120])


@pytest.mark.slow
@pytest.mark.parametrize(("n", "discount"), [(290, 1.0), (3, 0.99)])
def test_returns_of_n_steps(rewards, n, discount):
    _, batch = sampled(rewards, jrb.NStep(n, discount))
    found = batch.data["next"]["reward"]
    assert found.dtype == rewards.dtype
    assert_rounded(found, sums_of(rewards, discount, n)[batch.indices])


@pytest.mark.slow
def test_running_statistics(rewards):
    running = tr.RunningNormalize((("next", "reward"),)), tr.RunningRewardScale(1.0)
    for transform in running:
        state, _ = sampled(rewards, jrb.Transition(), transform)
        (own,) = state.transforms
        moments = own["next/reward"] if isinstance(own, dict) else own.moments
        numbers = rewards.astype(np.float64)
        numbers = numbers if isinstance(own, dict) else np.cumsum(numbers)
        assert moments.mean.dtype == (np.float64 if rewards.dtype == np.float64 else np.float32)
        np.testing.assert_allclose(moments.mean, numbers.mean(), rtol=1e-5)
        np.testing.assert_allclose(moments.var, numbers.var(), rtol=1e-4)


def test_returns_of_episodes_and_of_datasets(rewards):
    rows = rows_of(rewards)
    buffer, state = jrb.from_items(rows)
    total = rewards.astype(np.float64).sum()
    assert jrb.episodes(buffer, state)[0].return_ == total
    assert jrb.stats(buffer, state)["return"]["mean"] == total
    assert jrb.datasets.returns(rows).tolist() == [total]


@pytest.mark.parametrize("discount", [1.0, 0.99, 0.0])
def test_returns_to_go_of_episodes(rewards, discount):
    rows = rows_of(rewards)
    found = jrb.datasets.return_to_go(rows, discount=discount, path=("next", "to_go"))
    assert found["next"].keys() == {*rows["next"], "to_go"}
    assert found["next"]["to_go"].dtype == rewards.dtype
    assert_rounded(found["next"]["to_go"], sums_of(rewards, discount))
    assert rows["next"].keys() == {"reward", "done"}


@pytest.mark.parametrize("dtype", NARROW)
def test_priorities_of_windows(dtype):
    """The mean over a window, and the sum over all anchors."""
    unit, sampler = jrb.Sequence(T, priority_max_weight=0.0), jrb.Prioritized(1.0)
    buffer = jrb.ReplayBuffer(T + 3, unit=unit, sampler=sampler, batch_size=8)
    rows = rows_of(rewards_of("float32"))
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
    state = buffer.extend(state, rows)
    batch, given = buffer.sample(state, KEY), jnp.asarray(rewards_of(dtype))
    state = buffer.update_priority(state, batch, jnp.tile(given, (8, 1)))
    want = np.asarray(given).astype(np.float64).mean()
    np.testing.assert_allclose(buffer.priorities(state, batch.indices), want, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_images(dtype):
    image = np.random.default_rng(0).random((4, 64, 64, 3)).astype(np.dtype(dtype))
    context = jrb.types.TransformContext(KEY, jnp.ones(4, jnp.bool_), jrb.TED)
    for transform in (tr.Grayscale(), tr.Resize(2, 2)):
        apply = functools.partial(transform.apply, batch=context)
        found = apply({"observation": jnp.asarray(image)})["observation"]
        want = apply({"observation": jnp.asarray(image, jnp.float32)})["observation"]
        assert found.dtype == image.dtype
        assert (found == want.astype(found.dtype)).all()


def test_returns_to_go_of_other_rewards():
    """Integers; several rewards; a reward of several objectives."""
    after = {"reward": {"a": np.arange(5), "b": np.ones((5, 2), np.int8)}}
    after["terminated"] = np.arange(5) == 4
    found = jrb.datasets.return_to_go({"next": after}, discount=0.5)["return_to_go"]
    assert (found["a"].dtype, found["b"].dtype) == (np.float64, np.float32)
    np.testing.assert_allclose(found["a"], [1.625, 3.25, 4.5, 5.0, 4.0])
    np.testing.assert_allclose(found["b"], np.repeat([[1.9375], [1.875], [1.75], [1.5], [1]], 2, 1))


def test_returns_to_go_by_preprocess(tmp_path):
    source = jrb.datasets.open("tests/data/minari/cartpole-v0")[:3]
    function = functools.partial(jrb.datasets.return_to_go, discount=0.9)
    found = source.preprocess(function, tmp_path / "a", by="episode")
    for episode in found:
        reward, sums = episode["next"]["reward"], 0.0
        for step in range(len(reward) - 1, -1, -1):
            sums = float(reward[step]) + 0.9 * sums
            np.testing.assert_allclose(episode["return_to_go"][step], sums, rtol=1e-6)
    with pytest.raises(RuntimeError, match=r"got a step\. Pass by='episode'"):
        source.preprocess(jrb.datasets.return_to_go, tmp_path / "b")
    function = functools.partial(jrb.datasets.return_to_go, path="action")
    with pytest.raises(RuntimeError, match="nothing at 'action'"):
        source.preprocess(function, tmp_path / "b", by="episode")
    with pytest.raises(ValueError, match="discount"):
        jrb.datasets.return_to_go(source[0], discount=1.5)
