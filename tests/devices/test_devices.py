"""One buffer on each of several devices, with jax.pmap, jax.shard_map, and a sharded vmap.

The results on eight devices equal those of eight separate buffers, bit for bit; programs have no
collectives and allocate nothing of a ring's size.
"""

import functools
import itertools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jrb
from jrb import sum_tree, testing
from jrb.authoring import tree_nbytes

D, E, B = jax.device_count(), 2, 8
pytestmark = [
    pytest.mark.slow,
    pytest.mark.devices,
    pytest.mark.skipif(D < 2, reason="needs several devices"),
    pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map"),
]

EXAMPLE = {
    "observation": jnp.zeros(4),
    "key": jnp.int32(0),
    "next": {
        "observation": jnp.zeros(4),
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}
SAMPLERS = {
    "uniform": jrb.Uniform(),
    "distinct": jrb.Uniform(replacement=False),
    "epochs": jrb.WithoutReplacement(),
    "queue": jrb.Queue(),
    "prioritized": jrb.Prioritized(),
    "buffer": jrb.Prioritized(normalize="buffer", stratified=False),
    "grouped": jrb.Grouped("key", 64, 2),
    "limited": jrb.Uniform(replacement=False, max_draws=2),
    "used once": jrb.Prioritized(max_draws=1),
}
HINDSIGHT = jrb.Hindsight(
    lambda achieved, goal: -jnp.abs(achieved[0] - goal[0]),
    achieved=("next", "observation"),
    goal="observation",
    next_goal=None,
)
UNITS = {
    "transition": jrb.Transition(),
    "n-step": jrb.NStep(3, 0.9),
    "strict n-step": jrb.NStep(3, 0.9, strict=True),
    "windows": jrb.Sequence(4),
    "padded": jrb.Sequence(4, burn_in=2, partial="pad"),
    "episodes": jrb.Sequence(3, sample_by="episodes"),
    "packed": jrb.Packed(6, 2),
    "stacks": jrb.FrameStack(3),
    "hindsight": HINDSIGHT,
}
MODES = {
    "s": "shard_map",
    "u": "shard_map, unchecked",
    "e": "explicit mesh",
    "v": "vmap",
    "p": "pmap",
}
ONCE = {"storage": jrb.DeviceStorage(share_next_observations=True)}
CASES = [  # every unit class runs in every mode, and so does every sampler class
    ("transition", "uniform", {}, "s"),
    ("transition", "queue", {}, "svp"),
    ("transition", "buffer", {"writer": jrb.MaxValue(("next", "reward"))}, "e"),
    ("transition", "epochs", ONCE, "u"),
    ("n-step", "distinct", {}, "ep"),
    ("n-step", "prioritized", {}, "sv"),
    ("strict n-step", "queue", {}, "ue"),
    ("windows", "prioritized", {}, "p"),
    ("padded", "epochs", {}, "se"),
    ("episodes", "uniform", {}, "uv"),
    ("stacks", "epochs", {}, "evp"),
    ("stacks", "prioritized", ONCE, "us"),
    ("hindsight", "prioritized", {}, "suevp"),
    ("transition", "grouped", {}, "sup"),
    ("packed", "prioritized", {}, "sev"),
    ("packed", "epochs", {}, "up"),
    ("transition", "limited", {"writer": jrb.BlockWhenFull()}, "svp"),
    ("strict n-step", "used once", {}, "ue"),
]
COLLECTIVES = ["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]


def buffer_of(unit, sampler, capacity=2**14, **parts):
    return jrb.ReplayBuffer(
        capacity, num_envs=E, batch_size=B, sampler=SAMPLERS[sampler], unit=UNITS[unit], **parts
    )


def rows(key, *lead):
    """Returns items of integers, so that rounding does not depend on the compiler."""

    def leaf(path, like):
        shape = (*lead, *like.shape)
        numbers = jax.random.randint(jax.random.fold_in(key, len(str(path))), shape, 0, 1000)
        return numbers % 7 == 0 if like.dtype == bool else numbers.astype(like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, EXAMPLE)


@jax.jit
def drawn(key):
    """Returns a program's inputs; drawing them inside it would dominate its compilation."""
    keys = jax.random.split(key, 6)
    return {
        "many": rows(keys[0], 9, E),
        "one": rows(keys[1], E),
        "mask": jax.random.uniform(keys[2]) < 0.5,
        "keys": keys[4:],
    }


def program(buffer):
    """Returns a program of every method, in an order in which nothing is copied."""

    def run(state, given):
        state = buffer.extend(state, given["many"])
        state, first = buffer.draw(state, given["keys"][0])
        state = buffer.truncate(state, mask=jnp.arange(E) == 0)
        state = buffer.add(state, given["one"], mask=given["mask"])
        taken = buffer.take(state, first.indices)
        second = None  # inside jit, `sample` computes the batch of `draw`: one sampler suffices
        if isinstance(buffer.sampler, jrb.Uniform):
            second = buffer.sample(state, given["keys"][1])
        if buffer.sampler.prioritized:
            priorities = jnp.abs(first.probabilities) + 0.25
            state = buffer.update_priority(state, first, priorities)
            if buffer.unit.one_row:  # set_alpha does not depend on the unit
                state = buffer.set_alpha(state, 0.5)
        facts = buffer.size(state), buffer.can_sample(state)
        return buffer.empty(state), (first, second, taken, facts)

    return run


def mapped(mode, run):
    """Returns the program for all devices, and the sharding of its arguments."""
    explicit = mode == "explicit mesh"
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((D,), ("data",), axis_types=(kind,))
    spec = PartitionSpec("data")
    sharding = NamedSharding(mesh, spec)
    if mode == "pmap":
        return jax.pmap(run, donate_argnums=0), sharding
    if mode == "vmap":
        return jax.jit(jax.vmap(run), donate_argnums=0), sharding
    over = jax.shard_map(
        jax.vmap(run),
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=spec,
        check_vma=mode != "shard_map, unchecked",
    )
    return jax.jit(over, donate_argnums=0), sharding


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def filled(buffer, keys):
    """Returns stacked states, one per key, whose rings have wrapped around by three rows."""
    extend = jax.jit(buffer.extend)
    length = buffer.capacity // E + 3
    return stacked([extend(buffer.init(EXAMPLE), rows(key, length, E)) for key in keys])


def allowed(buffer):
    """Returns the limit of temporaries: a tenth of a state, and the trees set_alpha rebuilds."""
    empty = jax.eval_shape(lambda: buffer.init(EXAMPLE))
    return 0.1 * tree_nbytes(empty) + tree_nbytes(empty.sampler)


@pytest.mark.parametrize(("unit", "sampler", "parts", "modes"), CASES, ids=str)
def test_each_device_does_what_a_buffer_of_its_own_does(unit, sampler, parts, modes):
    buffer = buffer_of(unit, sampler, **parts)
    compare(buffer, program(buffer), modes)


@pytest.mark.parametrize("place", [0, 1], ids=["unit", "sampler"])
def test_every_family_of_parts_meets_every_mode(place):
    met = {}
    for *names, _, modes in CASES:
        part = [UNITS, SAMPLERS][place][names[place]]
        met.setdefault(type(part), set()).update(modes)
    assert all(modes == set(MODES) for modes in met.values()), met


def edits(buffer):
    """Returns a program of methods that edit, and of `add` with priorities."""

    def run(state, given):
        error = jnp.abs(given["one"]["next"]["reward"])
        state = buffer.add(state, given["one"], priorities=error)
        state, first = buffer.draw(state, given["keys"][0])
        state = buffer.set(state, first, {"observation": jnp.ones((B, 4))})
        slots, mask = buffer.newest(state, 3)
        ends = {"next": {"done": given["many"]["next"]["done"][0]}}
        state = buffer.set(state, slots[-1], ends)
        state = buffer.drop(state, slots[0])
        state = buffer.map(state, lambda items: {"next": {"reward": items["next"]["reward"] + 1.0}})
        raw = buffer.priorities(state)
        return state, (first, slots, mask, raw, buffer.in_order(state)[1])

    return run


@pytest.mark.parametrize(("unit", "modes"), [("n-step", "sp"), ("stacks", "v")])
def test_edits_too(unit, modes):
    buffer = buffer_of(unit, "prioritized")
    compare(buffer, edits(buffer), modes, in_place=False)


def compare(buffer, run, modes, in_place=True):
    """Asserts that each device computes the same as a single one, without collectives or copies."""
    keys = jax.random.split(jax.random.key(0), D)
    before = filled(buffer, keys)
    given = jax.vmap(drawn)(keys)
    alone = jax.jit(run)
    each = [jax.tree.map(operator.itemgetter(d), before) for d in range(D)]
    its = [jax.tree.map(operator.itemgetter(d), given) for d in range(D)]
    want = stacked([alone(*pair) for pair in zip(each, its, strict=True)])
    for mode in map(MODES.get, modes):
        run_all, sharding = mapped(mode, run)
        states, cut = jax.device_put((before, given), sharding)
        compiled = run_all.lower(states, cut).compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        chex.assert_trees_all_equal(compiled(states, cut), want)
        assert not [name for name in COLLECTIVES if name in compiled.as_text()], mode
        assert temporaries < allowed(buffer) or not in_place, mode


# Arguments that vary over the axis, mixed with arguments that do not.


def calls(buffer, state):
    """Returns each method as a function of arrays, followed by its arguments."""
    key, three = jax.random.key(0), jnp.arange(3, dtype=jnp.int32)
    one, many, sample = rows(key, E), rows(key, 6, E), jax.jit(buffer.sample)(state, key)
    found = {
        "add": (lambda s, item, mask: buffer.add(s, item, mask), one, jnp.bool_(True)),
        "extend": (lambda s, items, mask: buffer.extend(s, items, mask), many, jnp.arange(6) > 2),
        "sample": (buffer.sample, key),
        "draw": (buffer.draw, key),
        "truncate": (buffer.truncate, jnp.arange(E) == 0),
        "take": (buffer.take, three),
        "set": (lambda s, at, x: buffer.set(s, at, {"observation": x}), sample, jnp.ones((B, 4))),
        "ends": (lambda s, at, x: buffer.set(s, at, {"next": {"done": x}}), three, three > 1),
        "map": (
            lambda s, x: buffer.map(s, lambda items: {"observation": items["observation"] * x}),
            2.0,
        ),
    }
    if buffer.sampler.prioritized:
        error = jnp.ones(B)
        found |= {
            "update": (buffer.update_priority, sample, error),
            "slots": (buffer.update_priority, sample.indices, error),
            "given": (lambda s, item, p: buffer.add(s, item, priorities=p), one, error[:E]),
            "beta": (lambda s, key, beta: buffer.draw(s, key, beta=beta), key, jnp.float32(0.5)),
            "alpha": (buffer.set_alpha, jnp.float32(0.3)),
            "drop": (buffer.drop, sample),
            "priorities": (buffer.priorities, three),
            "tree": (lambda s, *its: sum_tree.update(s.sampler.masses, *its), three, error[:3]),
        }
    return {name: (call, state, *given) for name, (call, *given) in found.items()}


def varied(tree, axis, wanted):
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axis, to="varying"), tree) if wanted else tree


@pytest.mark.parametrize(
    ("unit", "sampler", "parts"),
    [
        ("n-step", "prioritized", {}),
        ("transition", "buffer", {"writer": jrb.PerEnvironment()}),
        ("windows", "epochs", {"transforms": (jrb.transforms.RunningNormalize(),)}),
        ("stacks", "queue", ONCE),
        ("hindsight", "uniform", {}),
    ],
    ids=str,
)
def test_methods_take_any_mixture_of_arguments_that_vary_and_that_do_not(unit, sampler, parts):
    buffer = buffer_of(unit, sampler, 32, **parts)
    mesh = jax.make_mesh((D,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = jax.jit(buffer.extend)(buffer.init(EXAMPLE), rows(jax.random.key(1), 19, E))
    for name, (call, *given) in calls(buffer, state).items():
        given = jax.tree.map(jnp.asarray, given)
        for number, kind in itertools.product(range(len(given)), [True, False]):
            which = [(place == number) == kind for place in range(len(given))]

            def body(*its, call=call, which=which):
                out = call(*(varied(it, "data", some) for it, some in zip(its, which, strict=True)))
                # `pcast` refuses values that vary already; `where` makes every value vary.
                none = varied(jnp.zeros((), bool), "data", True)
                return jax.tree.map(lambda leaf: jnp.where(none, leaf, leaf)[None], out)

            over = jax.shard_map(
                body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("data")
            )
            if (name, number, kind) in {("update", 0, True), ("add", 1, True)}:
                want = call(*given)
                got = jax.jit(over)(*given)
                chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[-1], got), want)
            else:
                jax.eval_shape(over, *given)


def test_so_do_the_fields_of_one_sample_and_several_axes():
    buffer = buffer_of("windows", "prioritized", 32)
    mesh = jax.make_mesh((2, D // 2), ("one", "other"))
    state = jax.jit(buffer.extend)(buffer.init(EXAMPLE), rows(jax.random.key(1), 19, E))
    sample = buffer.sample(state, jax.random.key(0))

    def body(state, sample, priorities):
        state = varied(state, "one", True)
        sample = sample.replace(indices=varied(sample.indices, "other", True))
        state = buffer.update_priority(state, sample, priorities)
        return buffer.priorities(state)[None]

    spec = PartitionSpec(("one", "other"))
    over = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec)
    found = jax.jit(over)(state, sample, jnp.full(B, 3.0))
    want = buffer.priorities(buffer.update_priority(state, sample, jnp.full(B, 3.0)))
    np.testing.assert_array_equal(found, jnp.broadcast_to(want, found.shape))


# The recipe for one buffer per device.


def one_per_device(step, mesh):
    spec = PartitionSpec("data")
    over = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    return jax.jit(over, donate_argnums=0)


def by_vmap(buffer):
    return jax.vmap(cycle(buffer))


def by_index(buffer):
    def step(states, keys):
        state, out = cycle(buffer)(jax.tree.map(lambda leaf: leaf[0], states), keys[0])
        return jax.tree.map(lambda leaf: leaf[None], (state, out))

    return step


def cycle(buffer):
    def step(state, key):
        state = buffer.add(state, rows(key, E))
        sample = buffer.sample(state, key)
        state = buffer.update_priority(state, sample, jnp.abs(sample.data["next"]["reward"]))
        return state, testing.consumed(sample)

    return step


def grown(recipe):
    """Returns the growth of a device's temporaries as a fraction of its buffer's growth."""
    mesh = jax.make_mesh((D,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    temps, sizes = [], []
    for capacity in (2**15, 2**13):
        buffer = buffer_of("n-step", "prioritized", capacity)
        shape = jax.eval_shape(lambda buffer=buffer: buffer.init(EXAMPLE))
        cut = lambda leaf: jax.ShapeDtypeStruct((D, *leaf.shape), leaf.dtype, sharding=sharding)
        keys = jax.device_put(jax.random.split(jax.random.key(0), D), sharding)
        lowered = one_per_device(recipe(buffer), mesh).lower(jax.tree.map(cut, shape), keys)
        temps.append(lowered.compile().memory_analysis().temp_size_in_bytes)
        sizes.append(buffer.nbytes(EXAMPLE))
        if temps[0] < 0.005 * sizes[0]:  # an upper bound of the growth
            return temps[0] / (sizes[0] * 3 / 4)
    return (temps[0] - temps[1]) / (sizes[0] - sizes[1])


def test_a_method_under_vmap_is_in_place_on_every_device():
    assert grown(by_vmap) < 0.01


def test_so_is_one_that_is_taken_out_by_its_index():
    assert grown(by_index) < 0.01


def learned(state, key):
    """Runs four steps of one update batch; returns its buffer's state and the losses."""
    buffer = buffer_of("windows", "prioritized")

    def step(state, key):
        state = buffer.extend(state, rows(key, 6, E))
        sample = buffer.sample(state, key)
        error = jnp.abs(sample.data["next"]["reward"])
        loss = jnp.mean(sample.weights[:, None] * error)
        return buffer.update_priority(state, sample, error), loss

    return jax.lax.scan(step, state, jax.random.split(key, 4))


UPDATES = 2


@functools.lru_cache
def learned_alone():
    """Returns the final states of update batches that run alone; the key style does not matter."""
    empty, one = buffer_of("windows", "prioritized").init(EXAMPLE), jax.jit(learned)
    keys = jax.random.split(jax.random.key(3), D * UPDATES)
    states = stacked([one(empty, key)[0] for key in keys])
    return jax.tree.map(lambda leaf: leaf.reshape(D, UPDATES, *leaf.shape[1:]), states)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_pmap_over_devices_and_vmap_over_update_batches(make_key):
    """As in Stoix and brax: one buffer per update batch and device, with keys of both styles."""
    keys = jax.random.split(make_key(3), D * UPDATES)
    keys = keys.reshape(D, UPDATES, *keys.shape[1:])
    empty = buffer_of("windows", "prioritized").init(EXAMPLE)
    states = stacked([stacked([empty] * UPDATES)] * D)

    def learn(state, key):
        state, losses = learned(state, key)
        return state, jax.lax.pmean(losses, "device")

    after, losses = jax.pmap(jax.vmap(learn), axis_name="device", donate_argnums=0)(states, keys)
    chex.assert_trees_all_equal(after, learned_alone())
    assert np.asarray(losses).shape == (D, UPDATES, 4)
    np.testing.assert_array_equal(losses, np.broadcast_to(losses[:1], losses.shape))


# Meshes with explicit axes, outside shard_map.


def test_explicit_axes_work_where_nothing_is_cut_and_are_refused_where_something_is():
    mesh = jax.make_mesh((D,), ("data",))
    cut, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("data",), ()))
    buffer = buffer_of("n-step", "prioritized")
    empty = buffer.init(EXAMPLE)
    state = jax.device_put(empty, whole)
    keys = jax.random.split(jax.random.key(0), D)
    run, given = program(buffer), jax.vmap(drawn)(keys)
    first = drawn(keys[0])
    chex.assert_trees_all_equal(
        jax.jit(run)(state, jax.device_put(first, whole)), jax.jit(run)(empty, first)
    )
    many = buffer_of("transition", "uniform", 4 * D)
    wide = jrb.ReplayBuffer(4 * D, num_envs=D, batch_size=B)
    items = jax.device_put(rows(keys[0], D), cut)
    held = jax.tree.map(
        lambda leaf: jax.device_put(leaf, cut if leaf.ndim else whole), many.init(EXAMPLE)
    )
    states = jax.device_put(stacked([empty] * D), cut)
    refused = [
        lambda: jax.jit(wide.add)(jax.device_put(wide.init(EXAMPLE), whole), items),
        lambda: many.add(held, jax.device_put(rows(keys[0], E), whole)),
        lambda: jax.jit(jax.vmap(run))(states, jax.device_put(given, cut)),
    ]
    for call in refused:
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match=r"explicit axis of a mesh.*inside jax\.shard_map"),
        ):
            call()
