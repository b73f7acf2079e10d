"""Sharded buffers: the same on any number of devices, and as exact as a single buffer."""

import copy
import dataclasses
import functools
import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jrb
from jrb.authoring import tree_nbytes

DEVICES = jax.device_count()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.devices,
    pytest.mark.skipif(DEVICES < 8, reason="needs eight devices"),
    pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map"),
]

S, E, B = 8, 16, 32
EXAMPLE = {
    "observation": jnp.zeros(3),
    "next": {"observation": jnp.zeros(3), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}
UNITS = {
    "transition": jrb.Transition(),
    "n-step": jrb.NStep(3, 0.9),
    "strict n-step": jrb.NStep(2, 0.9, strict=True),
    "windows": jrb.Sequence(3),
    "episodes": jrb.Sequence(3, sample_by="episodes"),
    "stacks": jrb.FrameStack(2),
}
SAMPLERS = {
    "prioritized": jrb.Prioritized(),
    "buffer": jrb.Prioritized(normalize="buffer", count_draws=True),
    "plain": jrb.Prioritized(normalize=None, stratified=False),
    "uniform": jrb.Uniform(),
    "distinct": jrb.Uniform(replacement=False),
    "limited": jrb.Uniform(replacement=False, max_draws=2),
    "used once": jrb.Prioritized(max_draws=1),
    "newest": jrb.Newest(count=16),
    "limited newest": jrb.Newest(count=16, max_draws=2),
    "limited mixture": jrb.Mixture((jrb.Uniform(False), jrb.Newest(0.5)), (0.5, 0.5), max_draws=2),
    "queue": jrb.Queue(),
    "lifo": jrb.Lifo(),
    "epochs": jrb.WithoutReplacement(),
}
FAMILIES = [
    ("transition", "uniform"),
    ("transition", "lifo"),
    ("transition", "newest"),
    ("n-step", "prioritized"),
    ("strict n-step", "queue"),
    ("windows", "buffer"),
    ("episodes", "distinct"),
    ("stacks", "epochs"),
    ("stacks", "plain"),
    ("transition", "limited"),
    ("strict n-step", "used once"),
    ("windows", "limited newest"),
    ("transition", "limited mixture"),
]


def whole(unit="transition", sampler="prioritized", capacity=16 * E, **parts):
    return jrb.ReplayBuffer(
        capacity, E, batch_size=B, unit=UNITS[unit], sampler=SAMPLERS[sampler], **parts
    )


def mesh_of(devices, kind=AxisType.Auto):
    if devices is None:
        return None
    return jax.make_mesh((devices,), ("data",), (kind,), devices=jax.devices()[:devices])


def rows(rng, *lead):
    """Returns items of integers, so that rounding does not depend on the compiler."""
    number = lambda *shape: rng.integers(0, 100, (*lead, *shape)).astype(np.float32)
    after = {"observation": number(3), "reward": number(), "done": rng.random(lead) < 0.15}
    return {"observation": number(3), "next": after}


def story(sharded, seed=0):
    """Calls the methods as training does; returns the final state and all results."""
    rng, found = np.random.default_rng(seed), []
    some = sharded.buffer.sampler
    given = {"priorities": rng.random((11, E)).astype(np.float32) * 4} if some.prioritized else {}
    state = sharded.init(EXAMPLE)
    state = sharded.extend(state, rows(rng, 11, E), **given)
    for number in range(2):
        state = sharded.extend(state, rows(rng, 5, E), mask=rng.random(5) < 0.7)
        state = sharded.add(state, rows(rng, E))
        state, batch = sharded.draw(state, jax.random.key(number))
        found.append(batch)
        state = sharded.truncate(state, mask=rng.random(E) < 0.5)
        if some.prioritized:
            error = np.abs(rng.normal(size=B)).astype(np.float32)
            state = sharded.update_priority(state, batch, error)
    return jax.device_get((state, found, sharded.size(state), sharded.can_sample(state)))


def assert_same(one, other):
    names = jax.tree_util.tree_leaves_with_path(one)
    for (path, got), want in zip(names, jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("unit", "sampler"), FAMILIES[2:])
def test_any_number_of_devices_does_the_same(unit, sampler):
    meshes = [(None, None), (4, AxisType.Explicit)]
    if FAMILIES.index((unit, sampler)) % 2:
        meshes[1] = (8, AxisType.Auto)
    told = [story(jrb.Sharded(whole(unit, sampler), S, mesh_of(*mesh))) for mesh in meshes]
    if (unit, sampler) == ("n-step", "prioritized"):
        told += [story(jrb.Sharded(whole(unit, sampler), S, mesh_of(n))) for n in (1, 2)]
    for other in told[1:]:
        assert_same(other, told[0])


def test_windows_of_a_shard_are_runs():
    state = jrb.Sharded(whole("windows"), S).init(EXAMPLE)
    assert state.storage.arrays["uint32"].shape == (S, E // S, 16, 6)


@pytest.mark.parametrize(("unit", "sampler"), FAMILIES)
def test_each_shard_is_an_ordinary_buffer(unit, sampler):
    """Data, slots and stamps equal those that `sharded.part` draws with the shard's key."""
    sharded = jrb.Sharded(whole(unit, sampler), S)
    part, state = sharded.part, sharded.init(EXAMPLE)
    rng = np.random.default_rng(1)
    items = rows(rng, 13, E)
    state = sharded.extend(state, items)
    key, batch = jax.random.key(3), None
    state, batch = sharded.draw(state, key)
    for shard in (0, S - 1):
        mine = slice(shard * E // S, (shard + 1) * E // S)
        alone = part.init(EXAMPLE)
        alone = part.extend(alone, jax.tree.map(lambda leaf: leaf[:, mine], items))  # noqa: B023
        alone, want = part.draw(alone, jax.random.fold_in(key, shard))
        drawn = slice(shard * B // S, (shard + 1) * B // S)
        got = jax.tree.map(lambda leaf: leaf[drawn], batch)  # noqa: B023
        assert (got.info.pop("shard") == shard).all()
        for name in ("data", "indices", "mask", "stamp", "info"):
            assert_same(getattr(got, name), getattr(want, name))


MASSES = {
    "balanced": lambda rng, shard: rng.random() + 0.5,
    "lognormal": lambda rng, shard: np.exp(2 * rng.normal()),
    "one shard has 90 %": lambda rng, shard: rng.random() * (9 * (S - 1) if shard == 3 else 1),
    "an empty shard": lambda rng, shard: 0.0 if shard == 5 else np.exp(rng.normal()),
}


def with_masses(name, sampler, length=4):
    """Returns a buffer, a state with these masses, and the masses, `[S, length * E / S]`."""
    rng = np.random.default_rng(0)
    sharded = jrb.Sharded(whole(sampler=sampler), S)
    state = sharded.extend(sharded.init(EXAMPLE), rows(rng, length, E))
    count = length * E // S
    masses = [[MASSES[name](rng, shard) for _ in range(count)] for shard in range(S)]
    masses = np.array(masses, np.float32)
    slots = np.broadcast_to(np.arange(count, dtype=np.int32), masses.shape)
    return sharded, sharded.update_priority(state, slots, masses), masses.astype(np.float64)


def exact(masses, beta, normalize, drawn):
    """Returns the probability and the weight of each anchor, in float64."""
    chance, anchors = masses / masses.sum(), masses.size
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = (anchors * chance) ** -beta * (S * masses.sum(1) / masses.sum())[:, None]
    some = masses > 0
    divisor = {"batch": drawn & some, "buffer": some, None: None}[normalize]
    weights = np.where(some, weights, 0)
    return chance, weights if divisor is None else weights / weights[divisor].max()


@pytest.mark.whole
@pytest.mark.parametrize("name", MASSES)
@pytest.mark.parametrize("normalize", ["batch", "buffer", None])
def test_weights_follow_the_formula(name, normalize):
    sampler = jrb.Prioritized(alpha=1.0, eps=0.0, normalize=normalize)
    SAMPLERS["this"] = sampler
    sharded, state, masses = with_masses(name, "this")
    for number, beta in enumerate([0.0, 0.4, 1.0]):
        batch = jax.device_get(sharded.sample(state, jax.random.key(number), beta=beta))
        at = batch.info["shard"], batch.indices
        drawn = np.zeros(masses.shape, bool)
        drawn[at] = batch.mask
        chance, weights = exact(masses, np.float64(np.float32(beta)), normalize, drawn)
        real = batch.mask
        assert (real == (masses[at[0]].sum(1) > 0)).all()
        np.testing.assert_allclose(batch.probabilities[real], chance[at][real], rtol=1e-6)
        np.testing.assert_allclose(batch.weights[real], weights[at][real], rtol=1e-6)
        assert (batch.weights[~real] == 0).all()


@functools.partial(jax.jit, static_argnums=(0, 2))
def many_draws(sharded, state, rounds):
    """Returns `rounds` batches without their items."""
    draw = lambda key: sharded.sample(state, key).replace(data=None)
    return jax.lax.map(draw, jax.random.split(jax.random.key(7), rounds))


@pytest.mark.whole
@pytest.mark.parametrize("name", MASSES)
def test_estimates_are_those_of_one_buffer(name):
    """Draws in each shard follow the masses (chi-square); weighted means are unbiased (z)."""
    SAMPLERS["this"] = jrb.Prioritized(alpha=1.0, eps=0.0, normalize=None, stratified=False)
    sharded, state, masses = with_masses(name, "this")
    rounds = 100_000 // B
    found = jax.device_get(many_draws(sharded, state, rounds))
    shard = np.broadcast_to(np.repeat(np.arange(S), B // S), found.indices.shape)
    counts = np.zeros(masses.shape)
    np.add.at(counts, (shard[found.mask], found.indices[found.mask]), 1)
    want = masses / np.maximum(masses.sum(1, keepdims=True), 1e-9) * rounds * B / S
    assert (counts[want == 0] == 0).all()
    some = want > 0
    chi = ((counts - want)[some] ** 2 / want[some]).sum()
    free = some.sum() - (masses.sum(1) > 0).sum()
    assert abs(chi - free) < 4.5 * np.sqrt(2 * free)
    values = np.random.default_rng(1).normal(size=masses.shape)
    chance = masses / masses.sum()
    for beta in (0.0, 0.4, 1.0):
        weights = weights_of(found, masses, beta)
        means = (weights * values[shard, found.indices]).mean(axis=1)
        truth = np.where(chance > 0, chance * (masses.size * chance + (chance == 0)) ** -beta, 0)
        error = (means.mean() - (truth * values).sum()) / (means.std() / np.sqrt(rounds))
        assert abs(error) < 4, (beta, error)


def weights_of(found, masses, beta):
    """Returns the weights of draws at `beta`, computed from their probabilities."""
    share = masses.sum(1) / masses.sum() * S
    share = np.broadcast_to(np.repeat(share, B // S), found.indices.shape)
    base = np.where(found.mask, masses.size * found.probabilities.astype(np.float64), 1)
    return np.where(found.mask, share * base**-beta, 0)


COLLECTIVES = ["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]


def collectives(text):
    """Counts the collectives of each kind in a compiled program."""
    count = lambda name: len(re.findall(rf"= [^=]*? {name}(?:-start)?\(", text))
    return {name: count(name) for name in COLLECTIVES if count(name)}


def methods_of(sharded):
    sampler = sharded.buffer.sampler
    found = {
        "add": lambda s, g: sharded.add(s, g["one"]),
        "extend": lambda s, g: sharded.extend(s, g["many"], mask=g["mask"]),
        "draw": lambda s, g: sharded.draw(s, g["key"]),
        "empty": lambda s, g: sharded.empty(s),
    }
    if sampler.prioritized:
        found["update"] = lambda s, g: sharded.update_priority(s, g["batch"], g["error"])
        found["drop"] = lambda s, g: sharded.drop(s, g["batch"])
    return found


@pytest.mark.whole
@pytest.mark.parametrize("sampler", ["prioritized", "buffer", "uniform", "queue"])
def test_only_a_draw_talks_and_nothing_of_the_rings_size_is_allocated(sampler):
    mesh = mesh_of(8)
    sharded = jrb.Sharded(whole("n-step", sampler, capacity=2**13 * S * E), S, mesh)
    rng, cut = np.random.default_rng(0), NamedSharding(mesh, PartitionSpec("data"))
    state = sharded.init(EXAMPLE)
    wide = NamedSharding(mesh, PartitionSpec(None, "data"))
    given = {"one": jax.device_put(rows(rng, E), cut), "key": jax.random.key(0)}
    given["many"] = jax.device_put(rows(rng, 5, E), wide)
    given |= {"mask": jnp.ones(5, bool), "error": jax.device_put(np.ones(B, np.float32), cut)}
    state = jax.jit(sharded.add, donate_argnums=0)(state, given["one"])
    given["batch"] = sharded.sample(state, given["key"])
    for name, method in methods_of(sharded).items():
        if name != "draw" and sampler != "buffer":
            continue  # writes do not depend on the sampler
        compiled = jax.jit(method, donate_argnums=0).lower(state, given).compile()
        want = {} if sampler == "queue" or name != "draw" else {"all-gather": 1}
        if want and sampler == "prioritized":
            want["all-reduce"] = 1
        assert collectives(compiled.as_text()) == want, name
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        assert temporaries < 0.005 * sharded.part.nbytes(EXAMPLE), name


def cycle(sharded):
    def run(state, item, key):
        state = sharded.add(state, item)
        batch = sharded.sample(state, key)
        return sharded.update_priority(state, batch, jnp.abs(batch.data["next"]["reward"])), batch

    return run


@pytest.mark.parametrize(("kind", "ambient"), [(AxisType.Auto, False), (AxisType.Explicit, True)])
def test_it_works_inside_a_users_own_shard_map(kind, ambient):
    mesh = mesh_of(8, kind)
    sharded = jrb.Sharded(whole("n-step"), S, None if ambient else mesh)
    outside = jrb.Sharded(whole("n-step"), S, mesh)
    start = outside.init(EXAMPLE)
    rng, spec = np.random.default_rng(0), PartitionSpec("data")
    items = jax.device_put(rows(rng, E), NamedSharding(mesh, spec))
    key = jax.random.key(5)
    want = cycle(outside)(start, items, key)
    own = jax.shard_map(
        cycle(sharded),
        mesh=mesh,
        in_specs=(spec, spec, PartitionSpec()),
        out_specs=(spec, spec),
    )
    assert_same(jax.device_get(jax.jit(own)(start, items, key)), jax.device_get(want))
    with jax.set_mesh(mesh):
        got = jax.jit(cycle(sharded), donate_argnums=0)(sharded.init(EXAMPLE), items, key)
        assert_same(jax.device_get(got), jax.device_get(want))
    assert got[1].weights.sharding.spec == spec


def test_new_items_get_the_greatest_priority_that_any_shard_has_seen():
    sharded = jrb.Sharded(whole(), S)
    rng = np.random.default_rng(0)
    state = sharded.extend(sharded.init(EXAMPLE), rows(rng, 3, E))
    slots = np.zeros((S, 1), np.int32)
    priorities = np.arange(1, S + 1, dtype=np.float32)[:, None]
    state = sharded.update_priority(state, slots, priorities)
    state, _ = sharded.draw(state, jax.random.key(0))
    state = sharded.add(state, rows(rng, E))
    newest, _ = sharded.newest(state, 1)
    assert (np.asarray(sharded.priorities(state, newest.reshape(S, -1))) == S).all()


def test_new_items_get_the_greatest_priority_that_any_shard_holds():
    SAMPLERS["this"] = jrb.Prioritized(new_priority="largest_held")
    sharded = jrb.Sharded(whole(sampler="this"), S)
    rng = np.random.default_rng(0)
    state = sharded.extend(sharded.init(EXAMPLE), rows(rng, 3, E))
    slots = np.broadcast_to(np.arange(6, dtype=np.int32), (S, 6))
    given = np.full((S, 6), 0.25, np.float32)
    for spikes in ({}, {0: 1e6}, {0: 3.0, S - 1: 5.0}, {1: 0.5}):  # by shard
        for shard, spike in spikes.items():
            given[shard, 4] = spike
        state = sharded.update_priority(state, slots, given)
        state, _ = sharded.draw(state, jax.random.key(0))
        after = sharded.add(state, rows(rng, E))
        newest, _ = sharded.newest(after, 1)
        new = np.asarray(sharded.priorities(after, newest.reshape(S, -1)))
        assert (new == given.max()).all(), spikes
        # Without another draw, a shard does not know of the others, but of its own.
        own = sharded.update_priority(state, slots, given * 100)
        newest, _ = sharded.newest(own := sharded.add(own, rows(rng, E)), 1)
        new = np.asarray(sharded.priorities(own, newest.reshape(S, -1)))
        assert (new.max(axis=1) >= given.max(axis=1) * 100).all()


def test_shards_without_mass_are_not_drawn_and_if_none_has_mass_nothing_is():
    SAMPLERS["this"] = jrb.Prioritized(eps=0.0)
    sharded = jrb.Sharded(whole(sampler="this"), S)
    rng = np.random.default_rng(0)
    state = sharded.extend(sharded.init(EXAMPLE), rows(rng, 2, E))
    slots = np.broadcast_to(np.arange(4, dtype=np.int32), (S, 4))
    none = sharded.update_priority(state, slots, np.zeros((S, 4), np.float32))
    some = sharded.drop(none, slots[:, :2])
    for each in (none, some):
        assert not sharded.can_sample(each)
        with pytest.raises(ValueError, match="expected something to draw"):
            sharded.sample(each, jax.random.key(0))
        batch = jax.jit(sharded.sample)(each, jax.random.key(0))
        assert not batch.mask.any() and not batch.weights.any() and not batch.probabilities.any()
    one = np.zeros((S, 4), np.float32)
    one[2, 1] = 3
    batch = sharded.sample(sharded.update_priority(state, slots, one), jax.random.key(0))
    assert (np.asarray(batch.info["shard"])[batch.mask] == 2).all()
    assert (np.asarray(batch.indices)[batch.mask] == 1).all()
    assert int(batch.mask.sum()) == B // S


def test_min_size_counts_all_shards():
    buffer = dataclasses.replace(whole("n-step", "queue"), min_size=2 * E)
    sharded = jrb.Sharded(buffer, S, mesh_of(4))
    rng = np.random.default_rng(0)
    state = sharded.add(sharded.init(EXAMPLE), rows(rng, E))
    assert not sharded.can_sample(state)
    with pytest.raises(ValueError, match=rf"size {E} where min_size is {2 * E}"):
        sharded.sample(state, jax.random.key(0))
    after, batch = jax.jit(sharded.draw)(state, jax.random.key(0))
    assert not batch.mask.any()
    assert (batch.weights == 0).all()
    assert_same(jax.device_get(after.sampler), jax.device_get(state.sampler))
    state = sharded.add(state, rows(rng, E))
    assert sharded.can_sample(state)
    assert sharded.sample(state, jax.random.key(0)).mask.any()


def test_edits_and_facts_are_those_of_each_shard():
    sharded = jrb.Sharded(whole(), S, mesh_of(8))
    part, rng = sharded.part, np.random.default_rng(0)
    state = sharded.extend(sharded.init(EXAMPLE), rows(rng, 6, E))
    parts = lambda tree: [jax.tree.map(lambda leaf: leaf[s], tree) for s in range(S)]  # noqa: B023
    jitted = jrb.jitted(sharded)
    batch = sharded.sample(state, jax.random.key(0))
    state = sharded.set(state, batch, {"next": {"reward": jnp.full(B, 7.0)}})
    state = sharded.map(state, _doubled)
    slots, there = sharded.newest(state, 2)
    assert slots.shape == (S, 2, E // S)
    assert there.all()
    taken = sharded.take(state, batch.indices.reshape(S, -1))
    assert (taken["next"]["reward"] == 14).all()
    state = sharded.drop(state, slots.reshape(S, -1))
    raw = sharded.priorities(state)
    order, counts = sharded.in_order(state)
    host = jax.device_get(state)
    for shard, one in enumerate(parts(host)):
        assert_same(np.asarray(raw)[shard], part.priorities(one))
        assert_same(np.asarray(order)[shard], part.in_order(one)[0])
        assert counts[shard] == part.size(one)
    assert (np.asarray(raw) == -2).sum() == 2 * E
    everything = np.ones((S, sharded.part.capacity), np.float32)
    state = jitted.set(state, ..., {"next": {"reward": everything}})
    assert (sharded.take(state, order)["next"]["reward"] == 1).all()
    state = jitted.empty(jitted.set_alpha(state, 0.5))
    assert int(jitted.size(state)) == 0
    assert bool(jitted.can_add(state))


def _doubled(items):
    return {"next": {"reward": 2 * items["next"]["reward"]}}


def test_masks_reach_their_environments():
    buffer = whole("n-step", "prioritized", writer=jrb.PerEnvironment())
    told = []
    for mesh in (None, mesh_of(8)):
        sharded, rng = jrb.Sharded(buffer, S, mesh), np.random.default_rng(0)
        state = sharded.init(EXAMPLE)
        state = sharded.extend(state, rows(rng, 7, E), mask=rng.random((7, E)) < 0.5)
        state = sharded.add(state, rows(rng, E), mask=rng.random(E) < 0.5)
        told.append(jax.device_get((state, sharded.sample(state, jax.random.key(0)))))
    assert_same(*told)
    kept = np.random.default_rng(0)
    rows(kept, 7, E)
    mask = kept.random((7, E)) < 0.5
    rows(kept, E)
    want = mask.sum() + (kept.random(E) < 0.5).sum()
    assert sharded.size(state) == want


def test_reservoirs_of_shards_choose_for_themselves():
    sharded = jrb.Sharded(whole(sampler="uniform", writer=jrb.Reservoir(0)), S)
    items = rows(np.random.default_rng(0), 40, E)
    items["observation"][...] = np.arange(40)[:, None, None]
    state = sharded.extend(sharded.init(EXAMPLE), items)
    kept = np.asarray(state.storage["observation"])[..., 0]
    assert len({tuple(row) for row in kept}) == S


def test_a_sample_in_another_order_reaches_no_row_of_another_shard():
    sharded, rng = jrb.Sharded(whole(), S), np.random.default_rng(0)
    state = sharded.extend(sharded.init(EXAMPLE), rows(rng, 16, E))
    batch = sharded.sample(state, jax.random.key(0))
    order, error = rng.permutation(B), np.arange(2, B + 2, dtype=np.float32)
    moved = jax.tree.map(lambda leaf: leaf[order], batch)
    want = np.array(sharded.priorities(state))
    for place, (shard, slot) in enumerate(zip(moved.info["shard"], moved.indices, strict=True)):
        if shard == place // (B // S):
            want[shard, slot] = error[place]
    after = sharded.update_priority(state, moved, error)
    np.testing.assert_array_equal(sharded.priorities(after), want)
    with pytest.raises(ValueError, match="expected a Sample of this Sharded"):
        sharded.update_priority(after, batch.replace(info={}), error)


def test_a_state_that_was_donated_and_is_used_again_is_an_error():
    sharded, rng = jrb.Sharded(whole(), S, mesh_of(4)), np.random.default_rng(0)
    methods, item, key = jrb.jitted(sharded), rows(rng, E), jax.random.key(0)
    mix = jrb.jitted(jrb.Mix((sharded, sharded), (0.5, 0.5), batch_size=2 * B))
    for donate in (lambda s: methods.add(s, item), lambda s: methods.draw(s, key)):
        old = methods.add(sharded.init(EXAMPLE), item)
        new = donate(old)
        for again in (
            lambda s: methods.add(s, item),
            lambda s: methods.draw(s, key),
            lambda s: sharded.add(s, item),
            lambda s: sharded.sample(s, key),
            lambda s: sharded.size(s),
            lambda s: mix.draw((s, s), key),
        ):
            with pytest.raises(ValueError, match="got some that were donated"):
                again(old)
        del new


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_of_both_styles(make):
    sharded = jrb.Sharded(whole(), S)
    state = sharded.add(sharded.init(EXAMPLE), rows(np.random.default_rng(0), E))
    got = sharded.sample(state, make(3))
    assert_same(got, sharded.sample(state, jax.random.key(3)))


def test_it_does_not_trace_again():
    sharded = jrb.Sharded(whole(), S, mesh_of(8))
    methods, rng = jrb.jitted(sharded), np.random.default_rng(0)
    state, item = sharded.init(EXAMPLE), rows(rng, E)
    traced = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, item, key):
        traced.append(None)
        return cycle(sharded)(state, item, key)[0]

    for number in range(3):
        state = step(state, item, jax.random.key(number))
        state = methods.add(state, item)
    assert len(traced) == 1
    same = jrb.Sharded(whole(), S, mesh_of(8))
    assert (same, hash(same)) == (sharded, hash(sharded))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_it_pickles_with_the_numbers_of_its_devices(kind):
    back = jax.devices()[:4][::-1]
    mesh = jax.make_mesh((2, 2), ("model", "data"), (kind, kind), devices=back)
    for one in (jrb.Sharded(whole(), S, mesh), jrb.Sharded(whole(), S)):
        for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            assert (again, hash(again)) == (one, hash(one))
            assert again.layout.groups() == one.layout.groups()


def test_where_its_devices_are_not_there_it_is_not_unpickled():
    fewer = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", fewer],
        input=pickle.dumps(jrb.Sharded(whole(), S, mesh_of(4))),
        env={**os.environ, **flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
    )
    assert ended.returncode == 1
    assert b"mesh: expected the devices [2, 3] of 'cpu'" in ended.stderr


def test_a_mix_of_sharded_buffers_draws_its_parts_in_each_shard():
    mesh = mesh_of(8)
    make = lambda sampler: jrb.Sharded(whole("n-step", sampler), S, mesh)
    mix = jrb.Mix((make("prioritized"), make("uniform")), (0.25, 0.75), batch_size=B)
    rng = np.random.default_rng(0)
    states = mix.init(EXAMPLE)
    first, second = mix.buffers
    states = first.add(states[0], rows(rng, E)), second.extend(states[1], rows(rng, 4, E))
    compiled = jax.jit(mix.draw).lower(states, jax.random.key(0)).compile()
    assert collectives(compiled.as_text()) == {"all-gather": 2, "all-reduce": 1}
    after, batch = compiled(states, jax.random.key(0))
    assert batch.info["source"].tolist() == ([0] + [1] * 3) * S
    keys = jax.random.split(jax.random.key(0), 3)
    for number, (part, state, size) in enumerate(zip(mix.buffers, states, (8, 24), strict=True)):
        want = part.sample(state, keys[number], size)
        mine = np.asarray(batch.info["source"]) == number
        got = jax.tree.map(lambda leaf: np.asarray(leaf)[mine], batch)  # noqa: B023
        got.info.pop("source")
        assert_same(got, want)
    after = mix.update_priority(after, batch, jnp.full(B, 3.0))
    assert (np.asarray(first.priorities(after[0])) == 3).sum() == S
    traced = jax.jit(mix.draw)(states, jax.random.key(0), proportions=jnp.array([0.5, 0.5]))[1]
    assert traced.info["source"].reshape(S, -1).sum(1).tolist() == [2] * S


REFUSED = [
    (lambda b: jrb.Sharded(b, 3), "num_envs: expected a multiple of 3"),
    (lambda b: jrb.Sharded(dataclasses.replace(b, batch_size=12), 8), "batch_size: expected a mul"),
    (lambda b: jrb.Sharded(b, 4, mesh_of(8)), "shards: expected a multiple of 8"),
    (lambda b: jrb.Sharded(b, 8, mesh_of(8), axis="x"), "axis: expected one of the mesh"),
    (lambda b: jrb.Sharded(b, 0), "shards: expected at least 1"),
    (
        lambda b: jrb.Sharded(dataclasses.replace(b, sampler=jrb.Newest(count=3)), 8),
        "count: expected a multiple of 8",
    ),
    (
        lambda b: jrb.Sharded(
            dataclasses.replace(b, transforms=(jrb.transforms.RunningNormalize(),)), 8
        ),
        "transforms: expected none with a state",
    ),
    *[
        (
            lambda b, storage=storage: jrb.Sharded(dataclasses.replace(b, storage=storage), 8),
            r"Use one buffer per process, or jrb\.remote\.serve\(buffer, example",
        )
        for storage in (
            jrb.MemmapStorage("rows"),
            jrb.SpillStorage(None, 2),
            jrb.ListStorage(),
            jrb.CompressedStorage(),
        )
    ],
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_what_cannot_work_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make(whole())


def test_wrong_arguments_are_named():
    sharded = jrb.Sharded(whole(), S, mesh_of(8))
    state, rng = sharded.init(EXAMPLE), np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"add: leaf 'next/done': expected axis 0 to have 16"):
        sharded.add(state, rows(rng, E // 2))
    with pytest.raises(ValueError, match=r"expected a state of 8 shards"):
        sharded.add(sharded.part.init(EXAMPLE), rows(rng, E))
    with pytest.raises(ValueError, match=r"batch_size: expected a multiple of 8"):
        sharded.sample(state, jax.random.key(0), 12)
    with pytest.raises(ValueError, match="expected something to draw"):
        sharded.sample(state, jax.random.key(0))
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), rows(rng, E))
    with pytest.raises(TypeError, match=r"add: leaf 'next/done': .*float64"):
        sharded.add(state, {**rows(rng, E), "next": wide["next"]})
    filled = sharded.add(state, rows(rng, E))
    batch = sharded.sample(filled, jax.random.key(0))
    for wrong in (np.ones(B - 1), np.float32(1)):
        with pytest.raises(ValueError, match=r"axis 0 can be cut into 1|does not evenly|rank"):
            sharded.update_priority(filled, batch, wrong)
    slots = np.zeros((S, 1), np.int32)
    with pytest.raises(TypeError, match=r"set: leaf 'observation': .*float64"):
        sharded.set(state, slots, {"observation": np.zeros((S, 1, 3))})
    with pytest.raises(TypeError, match="buffer: expected a ReplayBuffer"):
        jrb.Sharded(jrb.Uniform(), 2)
    with pytest.raises(TypeError, match="mesh: expected"):
        jrb.Sharded(whole(), S, mesh="data")


def test_one_shard_is_the_buffer_also_without_environments():
    buffer = jrb.ReplayBuffer(8, batch_size=4)
    sharded = jrb.Sharded(buffer, 1, mesh_of(1))
    items = {"x": jnp.arange(5)}
    state = sharded.extend(sharded.init({"x": 0}), items)
    state = sharded.add(state, {"x": jnp.int32(9)})
    alone = buffer.add(buffer.extend(buffer.init({"x": 0}), items), {"x": jnp.int32(9)})
    key = jax.random.key(0)
    want = buffer.sample(alone, jax.random.fold_in(key, 0))
    assert_same(sharded.sample(state, key).data, want.data)
    assert sharded.nbytes({"x": 0}) == buffer.nbytes({"x": 0}) == tree_nbytes(state)
    assert sharded.nbytes({"x": 0}, "device") == tree_nbytes(state)
    assert sharded.nbytes({"x": 0}, "files") == buffer.nbytes({"x": 0}, "host") == 0


def held(buffer, state):
    """Returns the items and priorities of each environment, oldest first."""
    parts = buffer.split(state) if isinstance(buffer, jrb.Sharded) else {0: state}
    part = buffer.part if isinstance(buffer, jrb.Sharded) else buffer
    found = []
    for number in sorted(parts):
        one = jax.tree.map(jnp.asarray, parts[number])
        slots, count = part.in_order(one)
        slots = np.asarray(slots)[: int(count)]
        priorities = np.asarray(part.priorities(one))[slots]
        rows = jax.tree.map(np.asarray, (part.take(one, slots), priorities))
        for env in range(part.ring.envs):
            mine = slots % part.ring.envs == env
            found.append(jax.tree.map(lambda leaf: leaf[mine], rows))  # noqa: B023
    return found


@pytest.mark.parametrize(
    ("unit", "writer"),
    [("strict n-step", jrb.PerEnvironment()), ("stacks", jrb.RoundRobin())],
    ids=str,
)
def test_other_shards_have_the_same_environments_with_their_priorities(unit, writer):
    rng = np.random.default_rng(0)
    old = jrb.Sharded(whole(unit, writer=writer), 4, mesh_of(4))
    masks = {"mask": rng.random((23, E)) < 0.7} if writer.per_env else {}
    given = rng.random((23, E)).astype(np.float32) * 5
    state = old.extend(old.init(EXAMPLE), rows(rng, 23, E), priorities=given, **masks)
    state = old.truncate(state, mask=rng.random(E) < 0.5)
    want = held(old, state)
    wider, fewer = jrb.Sharded(old.buffer, 8, mesh_of(2)), jrb.Sharded(old.buffer, 2)
    for new in (wider, old.buffer) if writer.per_env else (fewer,):
        other = jrb.rebuild(old, state, new)
        assert_same(held(new, other), want)
        assert_same(held(old, jrb.rebuild(new, other, old)), want)
        items, more = rows(np.random.default_rng(3), 3, E), np.ones((3, E), np.float32)
        told = [held(b, b.extend(s, items, None, more)) for b, s in ((old, state), (new, other))]
        if unit != "stacks":
            assert_same(*told)
    smaller = jrb.Sharded(dataclasses.replace(old.buffer, capacity=4 * E), 2)
    kept = held(smaller, jrb.rebuild(old, state, smaller))
    newest = [jax.tree.map(lambda leaf: leaf[-4:], one) for one in want]
    if unit == "stacks":  # the first stacks lost their older frames
        kept, newest = ([items for items, _ in each] for each in (kept, newest))
    assert_same(kept, newest)


def test_what_other_shards_cannot_have_is_refused():
    queue = jrb.Sharded(whole(sampler="queue"), 4)
    rng = np.random.default_rng(0)
    state = queue.add(queue.init(EXAMPLE), rows(rng, E))
    with pytest.raises(ValueError, match="whose order would be lost"):
        jrb.rebuild(queue, state, jrb.Sharded(queue.buffer, 2))
    few = jrb.ReplayBuffer(16, 8, batch_size=8)
    with pytest.raises(ValueError, match="num_envs: expected 16"):
        jrb.rebuild(queue, state, jrb.Sharded(few, 2))
    best = jrb.Sharded(whole(sampler="uniform", writer=jrb.MaxValue(("next", "reward"))), 4)
    with pytest.raises(ValueError, match="order of time"):
        jrb.rebuild(best, best.init(EXAMPLE), jrb.Sharded(best.buffer, 2))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_items_with_keys(kind):
    items = {"key": jax.random.split(jax.random.key(1), (3, E)), "x": np.arange(3 * E)}
    items["x"] = items["x"].reshape(3, E).astype(np.int32)
    told = []
    for mesh in (None, mesh_of(4, kind)):
        sharded = jrb.Sharded(jrb.ReplayBuffer(4 * E, E, batch_size=B), 4, mesh)
        state = sharded.init({"key": jax.random.key(0), "x": 0})
        state = sharded.extend(state, items)
        batch = sharded.sample(state, jax.random.key(0))
        drawn = jax.random.key_data(items["key"]).reshape(3 * E, -1)[np.asarray(batch.data["x"])]
        np.testing.assert_array_equal(jax.random.key_data(batch.data["key"]), drawn)
        told.append(np.asarray(batch.data["x"]))
    np.testing.assert_array_equal(*told)
