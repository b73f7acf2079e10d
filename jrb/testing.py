"""Checks that a buffer, with parts of jrb or of your own, keeps the contracts of its parts.

To check a sampler, unit, writer or storage, check buffers that use it.

Example:
    >>> import jax.numpy as jnp, jrb
    >>> from jrb import testing
    >>> make = lambda capacity: jrb.ReplayBuffer(capacity, num_envs=2, batch_size=8)
    >>> testing.conform(make, {"x": jnp.zeros(16)})
"""

import contextlib
import dataclasses
import functools
import math
import operator
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jrb
from jrb._core import eager, editing
from jrb._core.steps import context_of, drawable_anchors, has_item, leaves_read, num_anchors
from jrb._util import pytree
from jrb._util.public import PublicNames
from jrb._util.pytree import PyTree, SpecKey
from jrb.buffer import ReplayBuffer
from jrb.doctor import doctor as doctor
from jrb.state import BufferState, Sample
from jrb.types import Item, MissingMethodError, PrioritizedSampler, ShardedSampler
from jrb.types.messages import DrawInputs

__all__ = ["conform", "consumed", "growth", "rows"]
__dir__: PublicNames = lambda: __all__

Make = Callable[[int], ReplayBuffer]
Step = Callable[[ReplayBuffer, BufferState, jax.Array, jax.Array], tuple[BufferState, jax.Array]]

_NUM_DRAWS = 4096
"""The number of draws whose probabilities and frequencies are compared."""

_UNWEIGHTED = " (for weights of 1: normalize='batch' in the class, and exponent returns 0)"


def conform(make: Make, example: Item) -> None:
    """Checks that a buffer keeps the contracts that are common to all buffers.

    Args:
        make: a function from a capacity, a multiple of 64, to a buffer with a batch size. If the
            storage has a path, each call must use another one.
        example: one transition; with a few hundred bytes, the check for copies is sharp.

    It warns if the unit finds no anchor in its rows, so that only writes are checked.

    Raises:
        AssertionError: a contract is broken; the message says which, where, and what was expected.
    """
    # These checks hold for all storages.
    check_description(make)
    check_chunks(make, example)
    check_saved(make, example)
    # Warn if the unit finds no anchor, so that no check of draws can fail.
    buffer = make(64)
    state = _fill_state(buffer, example)
    if not num_anchors(buffer, state.replace(storage=None)):
        why = eager.explain_no_draw(buffer, int(buffer.size(state)), 0)
        warnings.warn(f"conform: draws are not checked: {why}", stacklevel=2)
    if buffer.storage.is_on_host:
        check_on_host(make, example)
        return
    for check in (
        check_memory,
        check_compiled,
        check_batched,
        check_empty,
        check_refilled,
        check_options,
        check_edited,
        check_sharded,
        check_stacked,
    ):
        check(make(64), example)
    check_rebuilt(make, example)
    check_in_place(make, example)


def rows(example: Item, total: jax.Array, *lead: int) -> Any:
    """Returns rows of the example's shapes and dtypes that depend on `total`.

    Args:
        example: one transition.
        total: float `[]`, a number whose value the compiler does not know.
        lead: the leading axes, such as T and E.
    """
    return _rows(SpecKey(pytree.spec_of(example, "rows")), lead, total)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rows(example: SpecKey, lead: tuple[int, ...], total: jax.Array) -> Any:
    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        shape = (*lead, *leaf.shape)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key((total * 1000).astype(jnp.uint32)), shape)
        count = jnp.arange(int(np.prod(shape)), dtype=jnp.float32).reshape(shape)
        # Compute from a number that XLA does not know: it would fold and copy a constant row.
        wave = jnp.abs(jnp.sin(total + count)) * 100
        return wave > 90 if leaf.dtype == jnp.bool_ else wave.astype(leaf.dtype)

    return jax.tree.map(fill, example.spec)


def consumed(tree: Item) -> jax.Array:
    """Returns a number, float32 `[]`, that depends on every leaf."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        total += jnp.sum(jnp.real(leaf).astype(jnp.float32))
    return total


def growth(make: Make, example: Item, step: Step, agents: int | None = None) -> float:
    """Returns how much the temporaries of a step grow with the state, from N = 8192 to 32768.

    Args:
        make: a function from a capacity to a buffer.
        example: one transition.
        step: calls methods, as `step(buffer, state, total, key)`; returns the state and a float
            `[]`.
        agents: the number of buffers under `vmap`; None for one without it.

    Returns:
        The growth of temporaries over that of the state: 0 if nothing is copied, 1 if all is. If
        the temporaries at the larger N are below 1 % of the state's growth, this ratio is returned,
        and the smaller N is not compiled.
    """
    temps, sizes = [], []
    for capacity in (2**15, 2**13):
        sizes.append(make(capacity).nbytes(example) * (agents or 1))
        scan = _compile_scan(make(capacity), example, step, agents)
        temps.append(scan.memory_analysis().temp_size_in_bytes)
        # Return a ratio that is too small to need a second compilation.
        if temps[0] < 0.01 * (sizes[0] * 3 / 4):
            return temps[0] / (sizes[0] * 3 / 4)
    return (temps[0] - temps[1]) / (sizes[0] - sizes[1])


def _compile_scan(buffer: ReplayBuffer, example: Item, step: Step, agents: int | None) -> Any:
    """Returns a compiled scan of `step` over a donated state, or `agents` states under `vmap`."""
    run: Any = functools.partial(step, buffer)
    arguments: Any = (buffer.init(example), jnp.float32(1), jax.random.key(0))
    if agents is not None:
        run = jax.vmap(run)
        many = lambda leaf: jnp.broadcast_to(leaf, (agents, *leaf.shape))
        arguments = jax.tree.map(many, arguments)

    def loop(state: BufferState, total: jax.Array, key: jax.Array) -> Any:
        body = lambda carry, _: (run(carry[0], carry[1], key), None)
        return jax.lax.scan(body, (state, total), None, length=3)[0]

    # Compile without optimizations of machine code, which takes less time for the same buffers.
    lowered = jax.jit(loop, donate_argnums=0).lower(*arguments)
    options: Any = {"xla_backend_optimization_level": 0}
    return lowered.compile(options)


def check_description(make: Make) -> None:
    """Checks that equal descriptions hash equal, pickle, and do not retrace as arguments."""
    one = make(64)
    # Two buffers over files are not equal, as they have two paths: copy the description.
    other = dataclasses.replace(one) if one.storage.is_on_host else make(64)
    _expect(one == other and hash(one) == hash(other), "equal descriptions hash equal")
    _expect(pickle.loads(pickle.dumps(one)) == one, "a description pickles")
    capacity: Any = jax.jit(lambda buffer: buffer.capacity)
    _expect(capacity(one) == capacity(other), "a description is a jit argument")
    _expect(capacity._cache_size() == 1, "an equal description does not retrace")


def check_chunks(make: Make, example: Item) -> None:
    """Checks that T calls of `add` do what one `extend` of T rows does."""
    # Write once around the ring and further.
    whole, single = make(64), make(64)
    key, length = jax.random.key(4), 64 // whole.ring.envs + 5
    items = rows(example, jnp.float32(1), length, *whole._lead())
    one = whole.extend(whole.init(example), items)
    other = single.init(example)
    for row in range(length):
        other = single.add(other, jax.tree.map(operator.itemgetter(row), items))
    _expect_close(
        single.size(other), whole.size(one), "add T times holds what one extend does: size"
    )
    _expect_close(
        _draw(single, other, key)[1], _draw(whole, one, key)[1], "add T times draws as one"
    )


def check_saved(make: Make, example: Item) -> None:
    """Checks that a state that was saved and loaded draws as before."""
    buffer, key = make(64), jax.random.key(5)
    state = buffer.init(example)
    state = buffer.extend(state, rows(example, jnp.float32(2), 9, *buffer._lead()))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        jrb.save(path, buffer, state)
        loaded = jrb.load(path, make(64), example=example)[1]
        _expect_close(
            _draw(buffer, loaded, key)[1], _draw(buffer, state, key)[1], "a loaded draws alike"
        )


def check_on_host(make: Make, example: Item) -> None:
    """Checks that a storage on the host does what one on the device does, in `jit` too."""
    plain = dataclasses.replace(make(64), storage=jrb.DeviceStorage())
    keys = jax.random.split(jax.random.key(1), 6)
    for transform in (lambda step: step, jax.jit):
        buffer = make(64)
        step, twin = transform(_make_step(buffer, example)), _make_step(plain, example)
        state, other = buffer.init(example), plain.init(example)
        old = state
        for number, key in enumerate(keys):
            # Keep the state before the last write, which must be refused afterwards.
            old = state
            state, sample = step(state, jnp.float32(number), key)
            other, expected = twin(other, jnp.float32(number), key)
            _expect_close(
                sample, expected, "a storage on the host draws what one on the device does"
            )
        slots = jnp.arange(int(buffer.size(state)), dtype=jnp.int32)
        _expect_close(
            buffer.take(state, slots), plain.take(other, slots), "items are what was added"
        )
        add = functools.partial(buffer.add, old, rows(example, jnp.float32(0), *buffer._lead()))
        _expect_raises(jrb.StaleError, add, "an old state of shared rows is refused")


def check_memory(buffer: ReplayBuffer, example: Item) -> None:
    """Checks that `nbytes` is what `init` allocates."""
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer.init(example)))
    got = buffer.nbytes(example)
    _expect(got == allocated, "nbytes is what init allocates", f"expected {allocated}, got {got}")


def check_compiled(buffer: ReplayBuffer, example: Item) -> None:
    """Checks that eager, jit and scan agree, and that a second call does not retrace."""
    step, state = _make_step(buffer, example), buffer.init(example)
    # Run the step outside `jit`, and compare each of its samples with that of the compiled step.
    samples, keys = [], jax.random.split(jax.random.key(1), 6)
    after = state
    for number, key in enumerate(keys):
        after, sample = step(after, jnp.float32(number), key)
        samples.append(sample)
    compiled: Any = jax.jit(step)
    traced, other = [], state
    for number, key in enumerate(keys):
        other, sample = compiled(other, jnp.float32(number), key)
        _expect_close(sample, samples[number], "jit draws what eager draws")
        traced.append(compiled._cache_size())
    _expect(traced[0] == traced[-1], "a second call does not retrace")
    scan = jax.jit(lambda *xs: jax.lax.scan(lambda carry, x: step(carry, *x), state, xs))
    numbers = jnp.arange(6, dtype=jnp.float32)
    _expect_close(scan(numbers, keys)[0], after, "scan leaves the state that a loop leaves")


def check_batched(buffer: ReplayBuffer, example: Item) -> None:
    """Checks that `vmap` does what a loop over buffers does."""
    step, state = jax.jit(_make_step(buffer, example)), buffer.init(example)
    numbers, keys = jnp.arange(3, dtype=jnp.float32), jax.random.split(jax.random.key(2), 3)
    states = [step(state, numbers[i], keys[i])[0] for i in range(3)]
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    batched = jax.jit(jax.vmap(step))(stack(*states), numbers, keys)
    single = [step(states[i], numbers[i], keys[i]) for i in range(3)]
    _expect_close(batched, stack(*single), "vmap does what a loop over buffers does")


def check_empty(buffer: ReplayBuffer, example: Item) -> None:
    """Checks that a buffer without items, new or emptied, raises outside `jit` and masks inside."""
    state, key = buffer.init(example), jax.random.key(3)
    filled = _make_step(buffer, example)(state, jnp.float32(1), key)[0]
    for empty in (state, buffer.empty(filled)):
        contract = "sampling an empty buffer outside jit raises"
        _expect_raises(ValueError, functools.partial(buffer.sample, empty, key), contract)
        sample = jax.jit(buffer.sample)(empty, key)
        is_masked = not sample.mask.any() and not sample.weights.any()
        _expect(is_masked, "an empty buffer gives a batch whose mask and weights are zero")
        _expect(not buffer.can_sample(empty), "can_sample is False when empty")
        _expect(int(buffer.size(empty)) == 0, "size is 0 when empty")


def check_refilled(buffer: ReplayBuffer, example: Item) -> None:
    """Checks that after `empty` and `truncate` only items that are held are drawn."""
    state = _fill_state(buffer, example, 6, 3)
    items = rows(example, jnp.float32(3), 9, *buffer._lead())
    if buffer.writer.writes:
        _expect_held(buffer, buffer.extend(buffer.empty(state), items), "after empty")
    state = buffer.truncate(state)
    # A unit that reads other rows than those of its anchors has to know the ends, also those that
    # `truncate` makes; find out by the slots that it reads.
    context = context_of(buffer, state.writer)
    slots = _draw(buffer, state, jax.random.key(10))[1].indices.reshape(-1)
    mask = jnp.ones(slots.shape, jnp.bool_)
    plan = buffer.unit.plan_read(context, state.unit, slots, mask, jax.random.key(11))
    names = pytree.leaf_names(buffer.item_spec(state))
    reads = [plan.where(name) for name in names]
    if any(len(one) != len(slots) or (slots != one.T).any() for one in reads):
        is_ordered = buffer.writer.is_chronological
        newest = buffer.newest(state, 1)[0] if is_ordered else jnp.zeros(0, jnp.int32)
        ends = buffer.unit.is_episode_end(context, state.unit, newest.reshape(-1))
        _expect(ends.all(), "a unit of several rows knows the ends that truncate makes")
    _expect_held(buffer, buffer.extend(state, items), "after truncate")


def check_options(buffer: ReplayBuffer, example: Item) -> None:
    """Checks the options of methods, and probabilities against the frequencies of draws."""
    sampler, key = buffer.sampler, jax.random.key(7)
    state = _fill_state(buffer, example)
    # Priorities that are given with rows must be stored at the anchors among them.
    takes = isinstance(sampler, PrioritizedSampler) and sampler.takes_priorities
    if takes and buffer.writer.is_chronological:
        lead = (9, *buffer._lead())
        items = rows(example, jnp.float32(1), *lead)
        new = 2 + jnp.arange(9 * buffer.ring.envs, dtype=jnp.float32).reshape(lead)
        stored = buffer.priorities(buffer.extend(buffer.init(example), items, priorities=new))
        right = (stored < 0).at[: new.size].max(stored[: new.size] == new.reshape(-1))
        _expect(right.all(), "priorities that come with rows are those of the anchors there")
    # The batch size of a call overrides that of the buffer.
    size = 3 * (buffer.batch_size or 1)
    sample = _draw(buffer, state, key, batch_size=size)[1]
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(sample)}
    _expect(sizes == {size}, "batch_size is that of every leaf of the sample", f"got {sizes}")
    if not sampler.consumes and buffer.can_sample(state):
        _check_weights(buffer, state, key)


def _check_weights(buffer: ReplayBuffer, state: BufferState, key: jax.Array) -> None:
    """Checks weights against probabilities, and these against the frequencies of draws."""
    sampler = buffer.sampler
    # Weights are powers of probabilities, up to a factor.
    for beta in (0.0, 1.0):
        batch = buffer.sample(state, key, _NUM_DRAWS, beta)
        drawn = np.asarray(batch.probabilities) > 0
        chances = np.asarray(batch.probabilities, np.float64)[drawn]
        # Only these samplers have an exponent.
        if isinstance(sampler, ShardedSampler):
            undone = np.asarray(batch.weights)[drawn] * chances ** float(sampler.exponent(beta))
            contract = f"weights undo the bias of the draw, beta={beta}{_UNWEIGHTED}"
            _expect_even(undone, contract, 1e-3)
    # The factor is the greatest weight of the batch, or of all anchors.
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    greatest = {"batch": 1, None: 1 / (int(anchors.count) * float(np.min(chances)))}
    if isinstance(sampler, PrioritizedSampler) and batch.mask.all():
        kind, got = sampler.normalize, np.max(batch.weights)
        right = kind not in greatest or np.isclose(got, greatest[kind], rtol=1e-3)
        contract = f"weights are divided as `normalize` says, {kind}{_UNWEIGHTED}"
        _expect(right, contract, f"the greatest is {got}")
    # Anchors are drawn as often as their probabilities say, by each sampler of a mixture.
    # Of several anchors in an entry, the unit keeps those that fit.
    if batch.indices.ndim > 1 or not has_item(batch).all():
        return
    source = np.asarray(batch.info.get("sampler", np.zeros(_NUM_DRAWS, np.int32)))
    for number in np.unique(source):
        own = source == number
        slots, first, counts = np.unique(batch.indices[own], return_index=True, return_counts=True)
        chances = np.asarray(batch.probabilities, np.float64)[own][first]
        expected = own.sum() * chances
        chi = float((np.square(counts - expected) / expected).sum())
        # Allow six standard deviations: the variance is twice the degrees of freedom.
        most = slots.size + 6 * np.sqrt(2 * slots.size)
        _expect(
            chi < most, "anchors are drawn as often as their probabilities say", f"chi {chi:.0f}"
        )
        total = chances.sum()
        _expect(0.9 < total < 1.001, "probabilities add up to 1", f"got {total:.3f}")


def check_edited(buffer: ReplayBuffer, example: Item) -> None:
    """Checks that `set` changes only what it is given, and keeps the priorities of anchors."""
    state = _fill_state(buffer, example)
    names = editing.flags(buffer, state)
    # Set other leaves than flags, at some slots; the items at others must stay.
    if not buffer.transforms:
        slots, count = buffer.in_order(state)
        slots = slots[: int(count)]
        some, others = slots[:: 2 * buffer.ring.envs], slots[1 :: 2 * buffer.ring.envs]
        kept, new = buffer.take(state, some), rows(example, jnp.float32(7), len(some))
        # Nor may leaves be set that the sampler has read as items were written.
        kept_names = names | leaves_read(buffer, kept, buffer.sampler.reads_written).keys()
        is_kept = lambda path: pytree.leaf_name(path) in kept_names
        choose = lambda path, old, leaf: old if is_kept(path) else leaf
        items = jax.tree_util.tree_map_with_path(choose, kept, new)
        named = lambda path, leaf: None if is_kept(path) else leaf
        with contextlib.suppress(MissingMethodError):
            after = buffer.set(state, some, jax.tree_util.tree_map_with_path(named, items))
            _expect_close(buffer.take(after, some), items, "set changes what it names")
            unnamed = buffer.take(state, others)
            _expect_close(buffer.take(after, others), unnamed, "set changes what it names alone")
    # Clear the flags of the oldest rows, which changes what the anchors are.
    if not names:
        return
    slots = buffer.in_order(state)[0][: 2 * buffer.ring.envs]
    is_flag = lambda path: pytree.leaf_name(path) in names
    items = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if is_flag(path) else None,
        buffer.take(state, slots),
    )
    with contextlib.suppress(MissingMethodError):
        after = buffer.set(state, slots, items)
        _expect_held(buffer, after, "after a set of done flags")
        every = jnp.arange(buffer.capacity)
        _expect_priorities(buffer, (state, every), (after, every), "set of done flags")


def check_rebuilt(make: Make, example: Item) -> None:
    """Checks that `jrb.rebuild` keeps priorities, and that items drawn after it are held."""
    buffer, other = make(64), make(64)
    state = _fill_state(buffer, example)
    with contextlib.suppress(MissingMethodError):
        after = jrb.rebuild(buffer, state, other)
        _expect_held(other, after, "after rebuild")
        (old, count), (new, _) = buffer.in_order(state), other.in_order(after)
        _expect_priorities(buffer, (state, old[:count]), (after, new[:count]), "rebuild")


def check_sharded(buffer: ReplayBuffer, example: Item) -> None:
    """Checks that two shards draw as a single buffer with the same items does.

    Skips buffers that cannot be cut in two, samplers that are not below `ShardedSampler`, and those
    that draw groups, as shards have groups of their own.
    """
    if buffer.sampler.reads_written:
        return
    envs, total = 2 * (buffer.num_envs or 1), buffer.capacity * 2
    size = 2 * (buffer.batch_size or 1)
    whole = dataclasses.replace(buffer, num_envs=envs, batch_size=size, capacity=total)
    # Two shards may be refused: for transforms with a state, or numbers that two does not divide.
    try:
        sharded = jrb.Sharded(whole, 2)
    except ValueError:
        return
    # Write the same items to both.
    items, key = rows(example, jnp.float32(4), 10, envs), jax.random.key(8)
    state, single = (each.extend(each.init(example), items) for each in (sharded, whole))
    # Shard s has the environments from s E / 2 on. `slots` has their slots in the whole buffer.
    row, env = np.divmod(np.arange(buffer.capacity), envs // 2)
    slots = row * envs + env + np.array([[0], [envs // 2]])
    if not sharded.can_sample(state):
        return
    with contextlib.suppress(MissingMethodError):
        state = sharded.draw(state, key)[0]
        if buffer.sampler.consumes:
            return
        # Give the items of the second shard three times the priorities.
        if buffer.sampler.prioritized:
            new = (1 + jnp.arange(total, dtype=jnp.float32) % 13).at[slots[1]].multiply(3)
            own = jnp.broadcast_to(jnp.arange(buffer.capacity, dtype=jnp.int32), slots.shape)
            state = sharded.update_priority(state, own, new[slots])
            single = whole.update_priority(single, jnp.arange(total, dtype=jnp.int32), new)
        draw = (key, _NUM_DRAWS, 1.0)
        batch, other = sharded.sample(state, *draw), whole.sample(single, *draw)
        shard = np.asarray(batch.info["shard"]).reshape(-1, *(1,) * (batch.indices.ndim - 1))
        slots = slots[shard, np.asarray(batch.indices)]
        _expect_as_single(buffer.sampler, slots, batch, other)


def _expect_as_single(sampler: Any, slots: np.ndarray, batch: Sample, other: Sample) -> None:
    """Raises unless `batch`, from shards with beta 1, is drawn like `other`, from a single buffer.

    `slots`, int like `indices`, are the slots of the batch's items in the single buffer.
    """
    drawn = np.asarray(batch.probabilities) > 0
    shard = np.asarray(batch.info["shard"]).reshape(-1, *(1,) * (slots.ndim - 1))
    shard, slots = np.broadcast_to(shard, slots.shape)[drawn], slots[drawn]
    chances = np.asarray(batch.probabilities, np.float64)[drawn]
    first = np.unique(slots, return_index=True)[1]
    # Each shard draws equally many items, whatever its part of the mass: an item of probability P
    # is drawn in proportion to P / part, so that its weight is P^-beta times this part.
    part = np.bincount(shard[first], chances[first])[shard]
    weights = np.asarray(batch.weights, np.float64)[drawn] / part
    power = float(sampler.exponent(1.0)) if isinstance(sampler, ShardedSampler) else 0.0
    _expect_even(weights * chances**power, "weights of shards undo the bias of the draw")
    # Compare with the single buffer, if it has drawn the same anchors. The newest half of an odd
    # number of anchors, for example, is another one in shards.
    fields = (other.indices, other.probabilities, other.weights)
    entries = zip(*(np.asarray(field).reshape(-1).tolist() for field in fields), strict=True)
    single = {slot: (chance, weight) for slot, chance, weight in entries if chance > 0}
    if not single or single.keys() != set(slots):
        return
    ratio = chances / np.array([single[slot][0] for slot in slots])
    # Skip samplers whose probabilities within a shard differ, such as those by ranks.
    if all(np.ptp(ratio[shard == number]) < 1e-3 for number in set(shard)):
        text = f"divided by those of a single buffer they are {np.unique(ratio.round(4))}"
        even = np.allclose(ratio, 1, rtol=1e-3)
        _expect(even, "shards draw anchors with the probabilities of a single buffer", text)
        ratio = weights / np.array([single[slot][1] for slot in slots])
        _expect_even(ratio, "weights of shards are those of a single buffer")


def check_stacked(buffer: ReplayBuffer, example: Item) -> None:
    """Checks `empty` and `truncate`, with priorities, for the unit and a `jrb.FrameStack` of it."""
    for unit in () if buffer.unit.one_row else (buffer.unit, jrb.FrameStack(2, unit=buffer.unit)):
        try:
            stacked = dataclasses.replace(buffer, unit=unit, sampler=jrb.Prioritized())
            stacked.init(example)
        except ValueError:
            # Anchors may be no rows, or items may have no observations.
            continue
        check_refilled(stacked, example)


def check_in_place(make: Make, example: Item) -> None:
    """Checks that nothing of the buffer's size is copied, for one buffer and under vmap.

    A part may compute arrays of less than 64 bytes per slot, such as to sort all priorities.
    """

    def add(buffer: ReplayBuffer, state: BufferState, total: Any, key: Any) -> Any:
        return buffer.add(state, rows(example, total, *buffer._lead())), total

    def sample(buffer: ReplayBuffer, state: BufferState, total: Any, key: Any) -> Any:
        return state, total + consumed(buffer.sample(state, jax.random.fold_in(key, 1)))

    def add_sample(buffer: ReplayBuffer, state: BufferState, total: Any, key: Any) -> Any:
        state = add(buffer, state, total, key)[0]
        return state, consumed(buffer.sample(state, key))

    def draw_add(buffer: ReplayBuffer, state: BufferState, total: Any, key: Any) -> Any:
        state, sample = buffer.draw(state, key)
        return add(buffer, state, total, key)[0], consumed(sample)

    for step in (add_sample, draw_add):
        for agents in (None, 4):
            # Under `vmap` too, where XLA turns slices into scatters and branches into selects.
            grown = growth(make, example, step, agents)
            if grown < 0.01:
                continue
            # Find copies with an entry for each slot, of the step and of single methods: these have
            # no reason to copy, so a part computes such arrays. In XLA's text a copy is
            # `%copy.1 = f32[8192,16]{1,0} copy(%x)`.
            copies: list[list[str]] = []
            for each in (step, add, sample):
                text = _compile_scan(make(2**13), example, each, agents).as_text()
                shapes = re.findall(r"= (\w+\[[\d,]+\])\S* copy\(", text)
                size = lambda shape: math.prod(map(int, re.findall(r"\d+(?=[,\]])", shape)))
                copies.append(sorted(shape for shape in shapes if size(shape) >= 2**13))
            copied, *own = copies
            what = f"{step.__name__}, {agents or 'no'} agents: "
            is_copy = len(copied) > sum(map(len, own))
            _expect(not is_copy, f"{what}{grown:.0%} of the state is copied", f"arrays {copied}")
            per_slot = grown * make(2**13).nbytes(example) / 2**13
            what += f"nothing is copied, but a part computes arrays of {per_slot:.0f} bytes a slot"
            # A sort of all priorities has some 20 bytes a slot.
            _expect(per_slot < 64, what, "expected less than 64, as a sort of all slots has")


# This is `ReplayBuffer.draw`, but gives a masked batch where there is nothing to draw.
_draw = functools.partial(eager.draw, batch_size=8, inputs=DrawInputs(), quiet=True)


def _make_step(buffer: ReplayBuffer, example: Item) -> Any:
    """Returns a step that extends, draws, and updates priorities; compiled once for all checks."""
    return _cached_step(buffer, SpecKey(pytree.spec_of(example, "example")))


@functools.lru_cache(maxsize=8)
def _cached_step(buffer: ReplayBuffer, example: SpecKey) -> Any:
    def step(state: BufferState, total: jax.Array, key: jax.Array) -> tuple[BufferState, Sample]:
        state = buffer.extend(state, rows(example.spec, total, 9, *buffer._lead()))
        state, sample = _draw(buffer, state, key)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, sample, total + sample.probabilities)
        return state, sample

    return step


def _fill_state(buffer: ReplayBuffer, example: Item, seed: int = 5, steps: int = 4) -> BufferState:
    """Returns a state with different priorities, after several writes, draws and updates."""
    step, state = _make_step(buffer, example), buffer.init(example)
    for number, each in enumerate(jax.random.split(jax.random.key(seed), steps)):
        state = step(state, jnp.float32(number), each)[0]
    return state


def _expect_held(buffer: ReplayBuffer, state: BufferState, when: str) -> None:
    """Raises unless only held items are drawn, and exactly the anchors have priorities."""
    # Compare the slots with priorities to those of anchors.
    slots, count = buffer.in_order(state)
    held = set(slots[:count].tolist())
    if buffer.sampler.prioritized:
        has_priority = set(np.flatnonzero(np.asarray(buffer.priorities(state)) >= 0).tolist())
        anchors = drawable_anchors(buffer, state)
        ranks = jnp.arange(max(int(anchors.count), 1), dtype=jnp.int32)
        expected = set(anchors.nth(ranks, jax.random.key(0))[0][: int(anchors.count)].tolist())
        text = f"got others at the slots {sorted(has_priority ^ expected)}"
        right = has_priority == expected
        _expect(right, f"{when}, all anchors have priorities, and nothing else", text)
    # Draw some batches, whose entries that are no padding must be of held items.
    for key in jax.random.split(jax.random.key(12), 4 if buffer.can_sample(state) else 0):
        batch = buffer.sample(state, key)
        sampled = set(np.asarray(batch.indices)[np.asarray(has_item(batch))].tolist())
        text = f"got the slots {sorted(sampled - held)}, which hold nothing"
        _expect(sampled <= held, f"{when}, only items that are held are drawn", text)


def _expect_priorities(
    buffer: ReplayBuffer, before: tuple[Any, Any], after: tuple[Any, Any], method: str
) -> None:
    """Raises unless slots that are anchors before and after kept their priorities."""
    if buffer.sampler.prioritized:
        old, new = (np.asarray(buffer.priorities(*pair)) for pair in (before, after))
        both = (old >= 0) & (new >= 0)
        _expect_equal(new[both], old[both], f"{method} keeps the priorities of anchors that stay")


def _expect_even(numbers: np.ndarray, contract: str, rtol: float = 1e-2) -> None:
    if numbers.size:
        text = f"got ratios from {numbers.min()} to {numbers.max()}"
        _expect(np.allclose(numbers, numbers[0], rtol=rtol), contract, text)


def _expect_raises(error: type[Exception], call: Callable[[], Any], contract: str) -> None:
    try:
        call()
    except error:
        return
    _expect(False, contract)


def _expect_close(got: PyTree, want: PyTree, contract: str) -> None:
    """Raises unless integers are equal and floats are equal up to rounding."""
    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(want, got)
    except AssertionError as error:
        _expect(False, contract, str(error))
    leaves = jax.tree_util.tree_leaves_with_path(got)
    # chex has no comparison of floats with a tolerance that keeps integers exact.
    for (path, one), other in zip(leaves, jax.tree.leaves(want), strict=True):
        where = f"{contract}: leaf '{pytree.leaf_name(path)}'"
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        _expect_equal(np.asarray(one), np.asarray(other), where)


def _expect_equal(got: np.ndarray, want: np.ndarray, where: str) -> None:
    differs = got != want
    if jnp.issubdtype(got.dtype, jnp.floating):
        # Compare in float64, in which bfloat16 and float32 are exact.
        wide = np.float64
        differs &= ~np.isclose(got.astype(wide), want.astype(wide), 1e-6, 1e-7, equal_nan=True)
    if differs.any():
        at = tuple(map(int, np.argwhere(differs)[0])) if got.ndim else ()
        count = f"{int(differs.sum())} of {differs.size} differ"
        _expect(False, where, f"{count}, at {at} expected {want[at]}, got {got[at]}")


def _expect(kept: object, contract: str, details: str = "") -> None:
    if not kept:
        raise AssertionError(f"broken contract: {contract}{': ' if details else ''}{details}")
