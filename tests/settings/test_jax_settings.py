"""Every kind of part under JAX's debugging switches and other settings that change results."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import sum_tree
from tests.samplers import weights

E, B = 2, 4
NEXT = {"observation": jnp.zeros(3), "reward": jnp.float32(0), "done": jnp.bool_(False)}
ITEM = {"observation": jnp.zeros(3), "action": jnp.zeros(2), "next": NEXT}
HINDSIGHT = jrb.Hindsight(
    lambda achieved, goal: -jnp.abs(achieved[0] - goal[0]),
    achieved=("next", "observation"),
    goal="observation",
    next_goal=None,
)
RUNNING = (jrb.transforms.RunningNormalize(), jrb.transforms.RunningRewardScale())
PARTS = {  # each sampler and unit, and most writers and storages
    "uniform": {"sampler": jrb.Uniform(replacement=False)},
    "n-step": {"sampler": jrb.Prioritized(), "unit": jrb.NStep(2, 0.9)},
    "counted": {
        "sampler": jrb.Prioritized(stratified=False, count_draws=True),
        "writer": jrb.PerEnvironment(),
    },
    "buffer's weights": {"sampler": jrb.Prioritized(normalize="buffer")},
    "windows": {
        "sampler": jrb.WithoutReplacement(),
        "unit": jrb.Sequence(2),
        "transforms": RUNNING,
    },
    "episodes": {"unit": jrb.Sequence(2, sample_by="episodes")},
    "newest": {"sampler": jrb.Newest(0.9)},
    "stacks": {"sampler": jrb.Queue(), "unit": jrb.FrameStack(2)},
    "goals": {"sampler": jrb.Prioritized(), "unit": HINDSIGHT},
    "once": {"sampler": jrb.Lifo(), "storage": jrb.DeviceStorage(share_next_observations=True)},
    "reservoir": {"sampler": jrb.Prioritized(), "writer": jrb.Reservoir()},
    "ranked": {"writer": jrb.MaxValue(("next", "reward"))},
    "full": {"sampler": jrb.Queue(), "writer": jrb.BlockWhenFull()},
    "files": {
        "sampler": jrb.Prioritized(),
        "unit": jrb.NStep(2, 0.9),
        "storage": jrb.MemmapStorage(),
    },
}
SWITCHES = {
    "rank promotion": {"jax_numpy_rank_promotion": "raise"},
    "nans": {"jax_debug_nans": True},
    "infinities": {"jax_debug_infs": True},
    "leaks": {"jax_check_tracer_leaks": True},
    "no jit": {"jax_disable_jit": True},
    "x64": {"jax_enable_x64": True},
    "random bits": {"jax_threefry_partitionable": False},
    "rbg": {"jax_default_prng_impl": "rbg"},
    "custom keys": {"jax_enable_custom_prng": True},
    "no transfers": {},
}
ALL = ["rank promotion"]  # tested with every composition; the other switches with some
SOME = ["n-step", "windows", "counted", "buffer's weights"]


@contextlib.contextmanager
def switched(switch):
    before = {name: getattr(jax.config, name) for name in SWITCHES[switch]}
    try:
        for name, value in SWITCHES[switch].items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def rows(length, *lead):
    """Returns rows made by NumPy, so that the switches do not apply to making them."""

    def leaf(like):
        number = np.arange(length) % 6 == 5 if like.dtype == bool else np.arange(length) % 7 + 1
        shape = (length, *lead, *like.shape)
        return np.broadcast_to(number.reshape(-1, *(1,) * (len(shape) - 1)), shape).astype(
            like.dtype
        )

    return jax.tree.map(leaf, ITEM)


@functools.cache
def given(key_style):
    """Returns the arguments of the methods, on the device."""
    arrays = {
        "many": rows(7, E),
        "one": jax.tree.map(lambda leaf: leaf[0], rows(1, E)),
        "priorities": np.ones(E, np.float32),
        "errors": np.full(B, 0.5, np.float32),
        "mask": np.bool_(True),
        "which": np.array([True, False]),
        "slots": np.array([1, 2], np.int32),
        "actions": np.ones((B, 2), np.float32),
        "ends": np.array([True, False]),
        "beta": np.float32(0.5),
    }
    return {**jax.device_put(arrays), "key": key_style(0)}


def run(buffer, its):
    """Calls most methods, compiled."""
    methods = jrb.jitted(buffer)
    state = methods.extend(methods.init(ITEM), its["many"])
    if buffer.writer.blocks_when_full:
        state, _ = methods.draw(state, its["key"])
    state = methods.add(state, its["one"], its["mask"])
    if buffer.sampler.prioritized and buffer.sampler.takes_priorities:
        state = methods.add(state, its["one"], None, its["priorities"])
    state, batch = methods.draw(state, its["key"])
    methods.sample(state, its["key"])
    if buffer.sampler.prioritized:
        state = methods.update_priority(state, batch, its["errors"])
        state = methods.set_alpha(state, its["beta"])
        methods.sample(state, its["key"], None, its["beta"])
    state = methods.truncate(state, its["which"])
    state = methods.set(state, batch, {"action": its["actions"]})
    if not buffer.unit.one_row:
        state = methods.set(state, its["slots"], {"next": {"done": its["ends"]}})
    state = methods.map(state, lambda items: {"action": items["action"] * 2.0})
    if buffer.writer.is_chronological:
        methods.newest(state, 2)
    facts = methods.size(state), methods.can_sample(state), methods.in_order(state)
    return methods.empty(state), batch, facts


def cases():
    for switch in SWITCHES:
        some = SOME if switch != "no jit" else ["windows"]  # see below
        for parts in PARTS if switch in ALL else some:
            is_slow = switch not in ("x64", "nans") or parts != "n-step"
            marks = [pytest.mark.slow] if is_slow else []
            marks += [pytest.mark.whole] if is_slow and switch in ALL else []
            yield pytest.param(switch, parts, marks=marks, id=f"{switch}, {parts}")


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "parts"), list(cases()))
def test_compositions_work_under_every_switch(switch, parts):
    buffer = jrb.ReplayBuffer(10, num_envs=E, batch_size=B, **PARTS[parts])
    key_style = jax.random.PRNGKey if switch == "random bits" else jax.random.key
    with switched(switch):
        given.cache_clear()
        its = given(key_style)
        guard = (
            jax.transfer_guard("disallow") if switch == "no transfers" else contextlib.nullcontext()
        )
        with guard:
            state, batch, _ = run(buffer, its)
        assert batch.mask.any()
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(batch.data))
        del state


IMAGE = {"image": jnp.zeros((6, 6, 3), jnp.uint8)}
WHOLE = jrb.Sequence(2, sample_by="whole_episodes", partial="pad")
HELD = jrb.Prioritized(new_priority="largest_held")
OTHERS = [  # with `PARTS`, every part that jrb exports
    {"sampler": jrb.Mixture((jrb.Prioritized(), jrb.Newest(count=2)), (0.5, 0.5))},
    {"sampler": HELD, "unit": jrb.NStep(2, 0.9, strict=True)},
    {"sampler": jrb.Weighted(weights.fresh, leaves=(("next", "reward"),))},
    {"sampler": jrb.Grouped("kind", 4, 1)},
    {"unit": jrb.Packed(2, 2)},
    {"sampler": jrb.WithoutReplacement(drop_last=True), "unit": jrb.Sequence(2, stride=2)},
    {"sampler": jrb.Prioritized(), "unit": WHOLE},
    {"unit": jrb.FrameStack(2, unit=jrb.NStep(2, 0.9))},
    {"sampler": jrb.Prioritized(), "storage": jrb.SpillStorage(None, 4)},
    {"storage": jrb.CompressedStorage(min_bytes=1), "unit": jrb.NStep(2, 0.9)},
    {"writer": jrb.MaxValue("action"), "sampler": jrb.Prioritized()},
    {"transforms": (jrb.transforms.RewardToGo(to="window"),), "unit": WHOLE},
]
OF_IMAGES = (
    jrb.transforms.CenterCrop(5, 5, ("image",)),
    jrb.transforms.RandomCrop(4, 4, ("image",)),
    jrb.transforms.RandomShift(1, ("image",)),
    jrb.transforms.Grayscale(("image",)),
    jrb.transforms.Resize(3, 3, ("image",)),
    jrb.transforms.ToFloat(("image",)),
    jrb.transforms.Rename((("image", "picture"),)),
)
OF_VECTORS = (
    jrb.transforms.Clip(),
    jrb.transforms.Normalize(1.0, 2.0, ("observation",)),
    jrb.transforms.Scale(2.0, 1.0, ("observation",)),
    jrb.transforms.Concatenate(("observation", "action"), "both"),
    jrb.transforms.Cast("float16", ("both",)),
    jrb.transforms.Exclude(("image",)),
    jrb.transforms.Select(("both", ("next", "reward"))),
)
KINDS = jrb.types.Sampler, jrb.types.Unit, jrb.types.Writer, jrb.types.Storage
WITHOUT_JIT = [*PARTS.values(), *OTHERS, {"transforms": OF_IMAGES}, {"transforms": OF_VECTORS}]


def without_jit_cases():
    """Yields every exported part; those of `PARTS`, which other switches have too, if asked for."""
    for number, parts in enumerate(WITHOUT_JIT):
        marks = [pytest.mark.long] if number < len(PARTS) else []
        yield pytest.param(parts, id=f"{number}", marks=marks)


def without_jit(buffer, example, items):
    """Calls the methods of a buffer one operation at a time; returns the last sample."""
    key = jax.random.key(1)
    with jax.disable_jit():
        state = buffer.extend(buffer.init(example), items)
        state, sample = buffer.draw(state, key)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, sample, sample.weights)
            if not isinstance(buffer.sampler, jrb.Mixture):
                state = buffer.drop(state, sample.indices[:1])
        one = jax.tree.map(lambda leaf: leaf[0], items)
        state = buffer.add(buffer.truncate(state), one)
        assert buffer.size(state) <= buffer.capacity
        buffer.can_sample(state), buffer.in_order(state), buffer.take(state, jnp.array([0]))
        assert not buffer.can_sample(buffer.empty(state))
    return sample


@pytest.mark.slow  # operations outside `jit` are compiled one by one
@pytest.mark.whole
@pytest.mark.parametrize("parts", list(without_jit_cases()))
def test_every_part_works_without_jit(parts):
    buffer = jrb.ReplayBuffer(14, num_envs=E, batch_size=B, **parts)
    example, items = ITEM | IMAGE | {"kind": jnp.int32(0)}, rows(7, E)
    items |= {"kind": np.arange(7 * E, dtype=np.int32).reshape(7, E) % 3}
    items |= {"image": np.arange(7 * E * 108, dtype=np.uint8).reshape(7, E, 6, 6, 3)}
    if isinstance(buffer.writer, jrb.MaxValue):
        example, items = ITEM, rows(7, E)
    sample = without_jit(buffer, example, items)
    assert sample.mask.any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sample.data))


@pytest.mark.slow
@pytest.mark.parametrize("parts", OTHERS, ids=range(len(OTHERS)))
def test_other_parts_keep_their_dtypes_under_x64(parts):
    buffer = jrb.ReplayBuffer(14, num_envs=E, batch_size=B, **parts)
    example, items = ITEM, rows(7, E)
    if isinstance(buffer.sampler, jrb.Grouped):
        example, items = ITEM | {"kind": jnp.int32(0)}, items | {"kind": np.int32([[0, 1]] * 7)}
    with switched("x64"):
        state = buffer.extend(buffer.init(example), items)
        state, sample = buffer.draw(state, jax.random.key(0))
    assert sample.mask.any()
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} & {"int64", "float64"} == set()
    assert sample.weights.dtype == sample.probabilities.dtype == jnp.float32


@pytest.mark.slow
def test_objects_shards_and_mixes_work_without_jit():
    buffer = jrb.ReplayBuffer(4, batch_size=B, sampler=HELD, storage=jrb.ListStorage())
    with jax.disable_jit():
        state = buffer.extend(buffer.init(None), list("abcdef"))
        assert set(buffer.sample(state, jax.random.key(0)).data) <= set("cdef")
        buffer = jrb.ReplayBuffer(8, num_envs=E, batch_size=B, sampler=HELD)
        mix = jrb.Mix((buffer, buffer), (0.5, 0.5), batch_size=B)
        states = tuple(buffer.extend(state, rows(3, E)) for state in mix.init(ITEM))
        states, sample = mix.draw(states, jax.random.key(0))
        mix.update_priority(states, sample, jnp.ones(B))
        sharded = jrb.Sharded(buffer, 2)
        state = sharded.extend(sharded.init(ITEM), rows(3, E))
        state, sample = sharded.draw(state, jax.random.key(0))
        state = sharded.update_priority(state, sample, jnp.ones(B))
        assert sharded.sample(sharded.drop(state, jnp.zeros((2, 4), bool)), jax.random.key(1))


def test_all_exported_parts_are_among_those_without_jit():
    parts = [each for its in WITHOUT_JIT for each in its.values()]
    parts = {type(it) for each in parts for it in (each if isinstance(each, tuple) else (each,))}
    parts |= {jrb.Transition, jrb.RoundRobin, jrb.DeviceStorage}  # the defaults
    parts |= {jrb.ListStorage, jrb.ReadOnly}  # without arrays; without writes
    exported = [getattr(jrb, name) for name in jrb.__all__]
    exported += [getattr(jrb.transforms, name) for name in jrb.transforms.__all__]
    kinds = *KINDS, jrb.types.Transform
    exported = {each for each in exported if isinstance(each, type) and issubclass(each, kinds)}
    missing = {each for each in exported if not any(issubclass(part, each) for part in parts)}
    assert missing == set()


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("switch", ["rank promotion", "nans", "x64"])
def test_so_do_mixes_shards_trees_and_limits(switch):
    with switched(switch):
        its = given.__wrapped__(jax.random.key)
        buffer = jrb.ReplayBuffer(10, num_envs=E, batch_size=B, sampler=jrb.Prioritized())
        state = buffer.extend(buffer.init(ITEM), its["many"])
        mix = jrb.Mix((buffer, buffer), (0.5, 0.5), batch_size=B)
        states, batch = mix.draw(
            (state, state), its["key"], proportions=jnp.array([0.3, 0.7], jnp.float32)
        )
        mix.update_priority(states, batch, its["errors"])
        sharded = jrb.Sharded(buffer, 2)
        held = sharded.extend(sharded.init(ITEM), its["many"])
        held, batch = sharded.draw(held, its["key"])
        sharded.update_priority(held, batch, its["errors"])
        tree = sum_tree.update(sum_tree.init(5000), jnp.arange(B), its["errors"])
        assert sum_tree.find(tree, its["errors"]).shape == (B,)
        assert sum_tree.sample(tree, its["key"], 3).shape == (3,)
        limit = jrb.limits.SampleToInsert(2, 3, 4)
        assert limit.may_sample(limit.inserted(limit.init(), 3), 4)
