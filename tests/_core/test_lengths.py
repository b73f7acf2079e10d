"""Tests that writes of many lengths need few programs, and give what exact programs give."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

ITEM = {
    "observation": np.zeros(3, np.float32),
    "action": np.int32(0),
    "next": {
        "observation": np.zeros(3, np.float32),
        "reward": np.float32(0),
        "done": False,
    },
}
PRIORITIZED = {"sampler": jrb.Prioritized(), "unit": jrb.NStep(3, discount=0.9)}
ROWS = 300  # of every ring; some writes are longer


@jrb.types.component
class Halves(jrb.types.Transform):
    """Stores half of each observation."""

    def apply(self, data, batch):
        return {**data, "observation": data["observation"] * 2}

    def inverse(self, item):
        return {**item, "observation": item["observation"] * jnp.float32(0.5) + jnp.float32(1)}


def moments():
    return jrb.transforms.RunningNormalize(), jrb.transforms.RunningRewardScale()


BUFFERS = {
    "prioritized": PRIORITIZED,
    "episodes": {"unit": jrb.Sequence(4, sample_by="episodes")},
    "windows": {"unit": jrb.Sequence(3, partial="pad"), "sampler": jrb.Prioritized()},
    "stack": {"unit": jrb.FrameStack(3), "sampler": jrb.WithoutReplacement()},
    "shared": {
        "storage": jrb.DeviceStorage(share_next_observations=True, terminal_capacity=30),
        "num_envs": 2,
    },
    "lanes": {"writer": jrb.PerEnvironment(), "num_envs": 2, **PRIORITIZED},
    "best": {"writer": jrb.MaxValue(("next", "reward")), "sampler": jrb.Prioritized()},
    "reservoir": {"writer": jrb.Reservoir(3)},
    "queue": {"sampler": jrb.Queue()},
    "moments": {"transforms": moments(), **PRIORITIZED},
    "inverse": {"transforms": (Halves(),)},
    "cast": {"cast": True, **PRIORITIZED},
    "memmap": {"storage": jrb.MemmapStorage(None), **PRIORITIZED},
    "spill": {"storage": jrb.SpillStorage(None, device_capacity=40), "num_envs": 2},
    "compressed": {"storage": jrb.CompressedStorage(min_bytes=1), **PRIORITIZED},
    "sharded": {"num_envs": 2, **PRIORITIZED},
}


def build(name):
    parts = BUFFERS[name]
    buffer = jrb.ReplayBuffer(ROWS * parts.get("num_envs", 1), batch_size=16, **parts)
    return jrb.Sharded(buffer, shards=2) if name == "sharded" else buffer


def items(rng, length, envs, wide=False):
    lead = (length,) if envs is None else (length, envs)
    rows = jax.tree.map(
        lambda leaf: (rng.normal(size=(*lead, *np.shape(leaf))) * 50).astype(leaf.dtype),
        jax.tree.map(np.asarray, ITEM),
    )
    rows["next"]["done"] = rng.random(lead) < 0.15
    if wide:
        rows["observation"] = rows["observation"].astype(np.float64)
    return rows


def envs_of(buffer):
    return getattr(buffer, "buffer", buffer).num_envs


def arguments(rng, name, buffer, length, on_device, share=0.5):
    """Returns arguments of `extend` for this length; each optional one with probability `share`."""
    envs = envs_of(buffer)
    given = {"items": items(rng, length, envs, wide=name == "cast")}
    if rng.random() < share:
        shape = (length, envs) if name == "lanes" else (length,)
        given["mask"] = rng.random(shape) < 0.8
    if getattr(buffer, "buffer", buffer).sampler.prioritized and rng.random() < share:
        given["priorities"] = rng.random(given["items"]["action"].shape).astype(np.float32)
    return jax.tree.map(jnp.asarray, given) if on_device and name != "cast" else given


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUFFERS))
@hypothesis.settings(max_examples=3)
@hypothesis.given(st.integers(0, 2**31), st.booleans(), st.booleans())
def test_padded_writes_are_exact(name, seed, on_device, jitted):
    """Inside the caller's `jit`, nothing is padded."""
    rng, buffer, key = np.random.default_rng(seed), build(name), jax.random.key(seed)
    methods = jrb.jitted(buffer) if jitted else buffer
    on_host = name in ("memmap", "spill")
    plain = build(name)
    exact = (lambda state, **given: _row_by_row(plain, state, **given)) if on_host else None
    exact = exact or jax.jit(plain.extend)
    example = {**ITEM, "observation": np.zeros(3, np.float32)}
    state, expected = methods.init(example), plain.init(example)
    for length in (24, 2, 40, 24, 3, ROWS + 77, 130):
        given = arguments(rng, name, buffer, length, on_device)
        state = methods.extend(state, **given)
        given["items"] = jax.tree.map(lambda leaf: jnp.asarray(leaf, _kept(leaf)), given["items"])
        expected = exact(expected, **given)
        one, two = (each.sample(it, key) for each, it in ((buffer, state), (plain, expected)))
        chex.assert_trees_all_equal(one, two)
    if not on_host and name != "sharded":
        chex.assert_trees_all_equal(state.writer, expected.writer)
        chex.assert_trees_all_equal(state.transforms, expected.transforms)
        chex.assert_trees_all_equal(jrb.items(buffer, state), jrb.items(plain, expected))


def _kept(leaf):
    return jnp.float32 if leaf.dtype == np.float64 else leaf.dtype


def _row_by_row(buffer, state, items, mask=None, priorities=None):
    pick = lambda tree, t: jax.tree.map(lambda leaf: np.asarray(leaf)[t], tree)
    for t in range(len(items["action"])):
        state = buffer.add(state, pick(items, t), pick(mask, t), pick(priorities, t))
    return state


@pytest.mark.slow
@pytest.mark.parametrize("most", [200, 2000])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", ["prioritized", "lanes", "best", "memmap", "inverse", "sharded"])
def test_thirty_lengths_need_few_programs(name, jitted, most, compilations):
    rng, buffer = np.random.default_rng(most), build(name)
    methods = jrb.jitted(buffer) if jitted else buffer
    state = methods.init(ITEM)
    lengths = rng.choice(np.arange(1, most + 1), 30, replace=False).tolist()
    share = rng.integers(2)  # a loop has masks and priorities always, or never
    given = [arguments(rng, name, buffer, length, length % 2, share) for length in lengths]
    with compilations() as count:
        for each in given:
            state = methods.extend(state, **each)
        assert count() <= 6


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_a_length_that_repeats_has_its_own_program(jitted, compilations):
    buffer = jrb.ReplayBuffer(500, **PRIORITIZED, min_size=7)
    methods = jrb.jitted(buffer) if jitted else buffer
    rng = np.random.default_rng(0)
    state = methods.extend(methods.init(ITEM), items(rng, 30, None))
    with compilations() as count:
        for length in [30] * 5 + [31, 200, 32, 199]:
            state = methods.extend(state, items(rng, length, None))
        assert count() == 1
        for _ in range(20):
            state = methods.extend(state, items(rng, 64, None))
        assert count() == 2


def test_objects_of_many_lengths(compilations):
    buffer = jrb.ReplayBuffer(50, storage=jrb.ListStorage(), sampler=jrb.Prioritized())
    state, expected = buffer.init(None), []
    with compilations() as count:
        for length in (3, 8, 1, 20, 70, 11, 9):
            objects = [(length, number) for number in range(length)]
            state = buffer.extend(state, objects, mask=np.arange(length) != 1)
            expected += objects[:1] + objects[2:]
        assert count() <= 6
    assert jrb.items(buffer, state) == expected[-50:]


def test_errors_have_the_length_that_was_given():
    buffer = jrb.ReplayBuffer(100)
    for methods in (buffer, jrb.jitted(buffer)):
        state = methods.init(ITEM)
        for length in (5, 6, 7):
            state = methods.extend(state, items(np.random.default_rng(0), length, None))
        odd = items(np.random.default_rng(0), 11, None)
        odd["observation"] = odd["observation"][:, :2]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"leaf 'observation'.*\(11, 3\), got \(11, 2\)"):
                methods.extend(state, odd)


def test_keys_are_padded_too():
    example = {"key": jax.random.key(0), "x": jnp.zeros((), jnp.bfloat16)}
    buffer = jrb.ReplayBuffer(40)
    state = buffer.init(example)
    for length in (4, 7, 5, 12):
        keys = jax.random.split(jax.random.key(length), length)
        state = buffer.extend(state, {"key": keys, "x": jnp.arange(length, dtype=jnp.bfloat16)})
        held = jrb.items(buffer, state)
        chex.assert_trees_all_equal(
            jax.random.key_data(held["key"][-length:]), jax.random.key_data(keys)
        )


def test_a_full_buffer_that_blocks_takes_what_has_room():
    buffer = jrb.ReplayBuffer(60, sampler=jrb.Queue(), writer=jrb.BlockWhenFull(), batch_size=4)
    state, count = buffer.init({"x": 0}), 0
    for length in (10, 3, 40, 6):
        state = buffer.extend(state, {"x": np.arange(count, count + length, dtype=np.int32)})
        count += length
    assert jrb.items(buffer, state)["x"].tolist() == list(range(59))
    with pytest.raises(ValueError, match="at most 1 rows, for which there is room, got 2"):
        buffer.extend(state, {"x": np.arange(2, dtype=np.int32)})


def test_from_items_pads_its_last_piece():
    rows = functools.partial(items, np.random.default_rng(0))
    for length in (40, 31, 17):
        data = rows(length, None)
        buffer, state = jrb.from_items(data, capacity=64, transforms=(Halves(),))
        held = jrb.items(buffer, state)
        assert int(buffer.size(state)) == length
        np.testing.assert_array_equal(held["observation"], data["observation"] * 0.5 + 1)
