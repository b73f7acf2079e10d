"""The contracts as a check that any buffer can be put through, with parts of your own or ours.

Samplers, units, writers, storages on the device and on the host: a part is checked in the buffers
that have it.

Example:
    >>> import jax.numpy as jnp, jrb
    >>> from jrb import testing
    >>> make = lambda capacity: jrb.ReplayBuffer(capacity, num_envs=2, batch_size=8)
    >>> testing.conform(make, {"x": jnp.zeros(16)})
"""

import contextlib
import dataclasses
import functools
import operator
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import checkpoint
from jrb._core import editing
from jrb._core.steps import context_of
from jrb._store.errors import StaleError
from jrb._util import pytree
from jrb._util.pytree import PyTree
from jrb.buffer import ReplayBuffer
from jrb.migrate import rebuild
from jrb.mix import AnyState
from jrb.samplers import Prioritized
from jrb.sharding import Sharded
from jrb.state import BufferState, Sample
from jrb.storages import DeviceStorage
from jrb.types import HostStorage, Item, MissingMethodError, Sampler
from jrb.units import FrameStack

Make = Callable[[int], ReplayBuffer]
Step = Callable[[BufferState, jax.Array, jax.Array], tuple[BufferState, jax.Array]]
Stepper = Callable[[BufferState, jax.Array, jax.Array], tuple[BufferState, Sample]]


def conform(make: Make, example: Item) -> None:
    """Checks that a buffer keeps the contracts that do not depend on what it draws.

    Args:
        make: from a capacity, a multiple of 64, to the buffer; it has a batch size. Of a storage
            at a path, each buffer needs a path of its own.
        example: one transition. A few hundred bytes make the check for copies sharp.

    Raises:
        AssertionError: a contract is broken; the message says which, where, and what came instead.
    """
    check_description(make)
    check_chunks(make, example)
    check_saved(make, example)
    if isinstance(make(64).storage, HostStorage):
        check_on_host(make, example)
        return
    buffer = make(64)
    check_memory(buffer, example)
    check_compiled(buffer, example)
    check_batched(buffer, example)
    check_empty(buffer, example)
    check_refilled(buffer, example)
    check_options(buffer, example)
    check_edited(buffer, example)
    check_rebuilt(make, example)
    check_sharded(buffer, example)
    check_stacked(buffer, example)
    check_in_place(make, example)


def rows(example: Item, total: jax.Array, *lead: int) -> Any:
    """Rows of the example's shapes and dtypes that depend on `total`, float `[]`.

    Args:
        example: one transition.
        total: a number that the compiler does not know.
        lead: the leading axes.
    """
    leaves, structure = jax.tree.flatten(pytree.spec_of(example, "rows"))
    kinds = tuple(((*lead, *leaf.shape), leaf.dtype) for leaf in leaves)
    return jax.tree.unflatten(structure, _rows(kinds, total))


@functools.partial(jax.jit, static_argnums=0)
def _rows(kinds: tuple[tuple[tuple[int, ...], Any], ...], total: jax.Array) -> list[jax.Array]:
    def fill(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            seed = (total * 1000).astype(jnp.uint32)
            return jnp.broadcast_to(jax.random.key(seed), shape)
        count = jnp.arange(int(np.prod(shape)), dtype=jnp.float32).reshape(shape)
        wave = jnp.abs(jnp.sin(total + count)) * 100
        return wave > 90 if dtype == jnp.bool_ else wave.astype(dtype)

    return [fill(*kind) for kind in kinds]


def consumed(tree: Item) -> jax.Array:
    """A float `[]` that needs every leaf."""

    def add_up(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return jnp.sum(jnp.real(leaf).astype(jnp.float32))

    return sum(map(add_up, jax.tree.leaves(tree)), jnp.float32(0))


def temporaries(step: Step, state: BufferState, total: jax.Array, key: jax.Array) -> int:
    """Bytes that a scan of `step` over a donated state allocates beside it."""
    return _looped(step, state, total, key).memory_analysis().temp_size_in_bytes


def _looped(step: Step, *arguments: Any) -> Any:
    """A scan of `step` over a donated state, compiled."""

    def loop(state: BufferState, total: jax.Array, key: jax.Array) -> Any:
        body = lambda carry, _: (step(carry[0], carry[1], key), None)
        return jax.lax.scan(body, (state, total), None, length=3)[0]

    lowered = jax.jit(loop, donate_argnums=0).lower(*arguments)
    options: Any = {"xla_backend_optimization_level": 0}  # faster, and the buffers are the same
    return lowered.compile(options)


def growth(make: Make, example: Item, step: Callable[..., Any], agents: int | None = None) -> float:
    """What the temporaries of `step(buffer, state, total, key)` grow by from N = 8192 to 32768.

    Args:
        make: from a capacity to the buffer.
        example: one transition.
        step: some verbs; returns the state and a float `[]`.
        agents: how many buffers side by side, under `vmap`.

    Returns:
        A part of what the state grows by: 0 where nothing is copied, 1 where everything is. If all
        temporaries at the larger N are less than 1 %, that part, and the smaller N is not compiled.
    """
    temps, sizes = [], []
    for capacity in (2**15, 2**13):
        sizes.append(make(capacity).nbytes(example) * (agents or 1))
        temps.append(temporaries(*_arguments(make(capacity), example, step, agents)))
        if temps[0] < 0.01 * (sizes[0] * 3 / 4):
            return temps[0] / (sizes[0] * 3 / 4)
    return (temps[0] - temps[1]) / (sizes[0] - sizes[1])


def _arguments(
    buffer: ReplayBuffer, example: Item, step: Callable[..., Any], agents: int | None
) -> Any:
    """The step of one buffer, or of several under `vmap`, and its arguments."""
    run = lambda state, total, key: step(buffer, state, total, key)
    arguments: Any = (buffer.init(example), jnp.float32(1), jax.random.key(0))
    if agents is None:
        return run, *arguments
    many = lambda leaf: jnp.broadcast_to(leaf, (agents, *leaf.shape))
    return jax.vmap(run), *jax.tree.map(many, arguments)


def _copies(make: Make, example: Item, step: Callable[..., Any], agents: int | None) -> list[str]:
    """The shapes that XLA copies which have as many entries as the buffer has slots, or more."""
    text = _looped(*_arguments(make(2**13), example, step, agents)).as_text()
    shapes = re.findall(r"= (\w+\[[\d,]+\])\S* copy\(", text)
    size = lambda shape: np.prod([int(axis) for axis in re.findall(r"\d+(?=[,\]])", shape)])
    return sorted(shape for shape in shapes if size(shape) >= 2**13)


def check_description(make: Make) -> None:
    """Equal descriptions hash equal, pickle, and are jit arguments that do not retrace."""
    one = make(64)
    other = dataclasses.replace(one) if isinstance(one.storage, HostStorage) else make(64)
    _expect(one == other and hash(one) == hash(other), "equal descriptions hash equal")
    _expect(pickle.loads(pickle.dumps(one)) == one, "a description pickles")
    capacity: Any = jax.jit(lambda buffer: buffer.capacity)
    _expect(capacity(one) == capacity(other), "a description is a jit argument")
    _expect(capacity._cache_size() == 1, "an equal description does not retrace")


def check_chunks(make: Make, example: Item) -> None:
    """How rows are cut into calls does not matter: for what is held, and for the next draw."""
    whole, single = make(64), make(64)
    lead, key = _lead(whole), jax.random.key(4)
    length = 64 // whole.ring.envs + 5  # once around and further
    items = rows(example, jnp.float32(1), length, *lead)
    one = whole.extend(whole.init(example), items)
    other = single.init(example)
    for row in range(length):
        other = single.add(other, jax.tree.map(operator.itemgetter(row), items))
    _agree(single.size(other), whole.size(one), "add T times holds what one extend does: size")
    _agree(single.sample(other, key), whole.sample(one, key), "add T times draws as one extend")


def check_saved(make: Make, example: Item) -> None:
    """What is saved and loaded draws as what was saved."""
    buffer, key = make(64), jax.random.key(5)
    state = buffer.init(example)
    state = buffer.extend(state, rows(example, jnp.float32(2), 9, *_lead(buffer)))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        checkpoint.save(path, buffer, state)
        back = checkpoint.load(path, make(64), example=example)[1]
        _agree(buffer.sample(back, key), buffer.sample(state, key), "a loaded state draws alike")


def check_on_host(make: Make, example: Item) -> None:
    """A storage on the host does what one on the device does, outside `jit` and inside."""
    plain = dataclasses.replace(make(64), storage=DeviceStorage())
    keys = jax.random.split(jax.random.key(1), 6)
    for compile_ in (lambda step: step, jax.jit):
        buffer = make(64)
        step, twin = compile_(_stepper(buffer, example)), _stepper(plain, example)
        state, other = buffer.init(example), plain.init(example)
        old = state
        for number, key in enumerate(keys):
            old = state
            state, sample = step(state, jnp.float32(number), key)
            other, wanted = twin(other, jnp.float32(number), key)
            _agree(sample, wanted, "a storage on the host draws what one on the device does")
        slots = jnp.arange(int(buffer.size(state)), dtype=jnp.int32)
        _agree(buffer.take(state, slots), plain.take(other, slots), "items are what was added")
        try:
            buffer.add(old, rows(example, jnp.float32(0), *_lead(buffer)))
        except StaleError:
            continue
        raise AssertionError("broken contract: an old state of shared rows is refused")


def check_memory(buffer: ReplayBuffer, example: Item) -> None:
    """`nbytes` is what `init` allocates."""
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(buffer.init(example)))
    told = buffer.nbytes(example)
    _expect(told == allocated, "nbytes is what init allocates", f"told {told}, got {allocated}")


def check_compiled(buffer: ReplayBuffer, example: Item) -> None:
    """Eager, jit and scan agree, and a second call does not retrace."""
    step, states = _stepper(buffer, example), [buffer.init(example)]
    samples, keys = [], jax.random.split(jax.random.key(1), 6)
    for number, key in enumerate(keys):
        state, sample = step(states[-1], jnp.float32(number), key)
        states.append(state)
        samples.append(sample)
    compiled: Any = jax.jit(step)
    state, traced = states[0], []
    for number, key in enumerate(keys):
        state, sample = compiled(state, jnp.float32(number), key)
        _agree(sample, samples[number], "jit draws what eager draws")
        traced.append(compiled._cache_size())
    _expect(traced[0] == traced[-1], "a second call does not retrace")
    numbers = jnp.arange(6, dtype=jnp.float32)
    scan = jax.jit(lambda *xs: jax.lax.scan(lambda state, x: step(state, *x), states[0], xs))
    _agree(scan(numbers, keys)[0], states[-1], "scan leaves the state that a loop leaves")


def check_batched(buffer: ReplayBuffer, example: Item) -> None:
    """`vmap` is a loop over buffers."""
    step = jax.jit(_stepper(buffer, example))
    state, keys = buffer.init(example), jax.random.split(jax.random.key(2), 3)
    states = [step(state, jnp.float32(number), keys[number])[0] for number in range(3)]
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    numbers = jnp.arange(3, dtype=jnp.float32)
    together = jax.jit(jax.vmap(step))(stack(*states), numbers, keys)
    alone = [step(states[number], numbers[number], keys[number]) for number in range(3)]
    _agree(together, stack(*alone), "vmap does what a loop over buffers does")


def check_empty(buffer: ReplayBuffer, example: Item) -> None:
    """An empty buffer raises outside jit, and masks inside; a late update revives nothing."""
    state, key = buffer.init(example), jax.random.key(3)
    for empty in (state, buffer.empty(_stepper(buffer, example)(state, jnp.float32(1), key)[0])):
        try:
            buffer.sample(empty, key)
        except ValueError:
            pass
        else:
            raise AssertionError("sampling an empty buffer outside jit raises")
        sample = jax.jit(buffer.sample)(empty, key)
        nothing = not sample.mask.any() and not sample.weights.any()
        _expect(nothing, "an empty buffer gives a batch whose mask and weights are zero")
        _expect(not buffer.can_sample(empty), "can_sample is False when empty")
        _expect(int(buffer.size(empty)) == 0, "size is 0 when empty")


def check_refilled(buffer: ReplayBuffer, example: Item) -> None:
    """After `empty`, and after `truncate`, only what is held is drawn."""
    step, keys = _stepper(buffer, example), jax.random.split(jax.random.key(6), 3)
    state = buffer.init(example)
    for number, key in enumerate(keys):
        state = step(state, jnp.float32(number), key)[0]
    few = rows(example, jnp.float32(3), 9, *_lead(buffer))
    if buffer.writer.writes:
        _expect_held(buffer, buffer.extend(buffer.empty(state), few), "after empty")
    state = buffer.truncate(state)
    newest = (
        buffer.newest(state, 1)[0] if buffer.writer.is_chronological else jnp.zeros(0, jnp.int32)
    )
    if _reads_other_rows(buffer, state):
        context = context_of(buffer, state.writer)
        ends = buffer.unit.is_episode_end(context, state.unit, newest.reshape(-1))
        _expect(ends.all(), "a unit of several rows knows the ends that truncate makes")
    _expect_held(buffer, buffer.extend(state, few), "after truncate")


def check_options(buffer: ReplayBuffer, example: Item) -> None:
    """The options of `draw` do what they say, and what it says of probabilities is true."""
    state, sampler, key = _filled(buffer, example), buffer.sampler, jax.random.key(7)
    if sampler.prioritized and sampler.takes_priorities and buffer.writer.is_chronological:
        items, lead = rows(example, jnp.float32(1), 9, *_lead(buffer)), (9, *_lead(buffer))
        given = 2 + jnp.arange(9 * buffer.ring.envs, dtype=jnp.float32).reshape(lead)
        found = buffer.priorities(buffer.extend(buffer.init(example), items, priorities=given))
        right = (found < 0).at[: given.size].max(found[: given.size] == given.reshape(-1))
        _expect(right.all(), "priorities that come with rows are those of the anchors there")
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(buffer.sample(state, key, 5))}
    _expect(sizes == {5}, "batch_size is that of every leaf of the sample", f"got {sizes}")
    if sampler.consumes:
        return
    for beta in (0.0, 1.0):
        batch = buffer.sample(state, key, 4096, beta)
        _expect_weights(sampler, batch, beta, "weights")
    _expect_scale(buffer, state, batch)
    drawn = np.asarray(batch.mask).reshape(4096, -1).any(axis=1)
    if not drawn.all():
        return
    slots, first, counts = np.unique(batch.indices, return_index=True, return_counts=True)
    wanted = 4096 * np.asarray(batch.probabilities, np.float64)[first]
    chi = float((np.square(counts - wanted) / wanted).sum())
    most = slots.size + 6 * np.sqrt(2 * slots.size)
    _expect(chi < most, "anchors are drawn as often as their probabilities say", f"chi {chi:.0f}")
    total = batch.probabilities[first].sum()
    _expect(0.9 < total < 1.001, "probabilities add up to 1", f"got {total:.3f}")


def check_edited(buffer: ReplayBuffer, example: Item) -> None:
    """Where `set` changes ends of episodes, anchors that stay keep their priorities."""
    state = _filled(buffer, example)
    names = editing.flags(buffer, state)
    if not names:
        return
    slots = buffer.in_order(state)[0][: 2 * buffer.ring.envs]

    def turned(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return jnp.zeros_like(leaf) if pytree.leaf_name(path) in names else leaf

    items = jax.tree_util.tree_map_with_path(turned, buffer.take(state, slots))
    with contextlib.suppress(MissingMethodError):
        after = buffer.set(state, slots, items)
        _expect_held(buffer, after, "after a set of done flags")
        every = jnp.arange(buffer.capacity)
        _expect_priorities(buffer, (state, every), (after, every), "set of done flags")


def check_rebuilt(make: Make, example: Item) -> None:
    """`jrb.rebuild` keeps the priorities of what stays, and what is drawn is held."""
    buffer, other = make(64), make(64)
    state = _filled(buffer, example)
    with contextlib.suppress(MissingMethodError):
        after = rebuild(buffer, state, other)
        _expect_held(other, after, "after rebuild")
        (old, count), (new, _) = buffer.in_order(state), other.in_order(after)
        _expect_priorities(buffer, (state, old[:count]), (after, new[:count]), "rebuild")


def check_sharded(buffer: ReplayBuffer, example: Item) -> None:
    """Two shards draw by probabilities and weights that belong together, or say why they do not."""
    envs, size = 2 * (buffer.num_envs or 1), 2 * (buffer.batch_size or 1)
    sizes = {"num_envs": envs, "batch_size": size, "capacity": 2 * buffer.capacity}
    try:
        sharded = Sharded(dataclasses.replace(buffer, **sizes), 2)
    except ValueError:  # such as transforms with a state, or a number that two does not divide
        return
    state = sharded.extend(sharded.init(example), rows(example, jnp.float32(4), 9, envs))
    with contextlib.suppress(MissingMethodError):
        state, batch = sharded.draw(state, jax.random.key(8), beta=1.0)
        if buffer.sampler.prioritized:
            state = sharded.update_priority(state, batch, 1 + jnp.arange(size, dtype=jnp.float32))
            batch = sharded.draw(state, jax.random.key(9), beta=1.0)[1]
        for shard in range(0 if buffer.sampler.consumes else 2):
            part = jax.tree.map(lambda leaf, at=batch.info["shard"] == shard: leaf[at], batch)
            _expect_weights(buffer.sampler, part, 1.0, "weights of shards")


def check_stacked(buffer: ReplayBuffer, example: Item) -> None:
    """Priorities go with the unit, and `jrb.FrameStack` around it; or they say why not."""
    for unit in () if buffer.unit.one_row else (buffer.unit, FrameStack(2, unit=buffer.unit)):
        try:
            stacked = dataclasses.replace(buffer, unit=unit, sampler=Prioritized())
            stacked.init(example)
        except ValueError:  # such as anchors that are no rows, or items without observations
            continue
        check_refilled(stacked, example)


def _filled(buffer: ReplayBuffer, example: Item) -> BufferState:
    """A state with priorities that differ, of rows once around the ring and further."""
    step, state = _stepper(buffer, example), buffer.init(example)
    for number, key in enumerate(jax.random.split(jax.random.key(5), 4)):
        state = step(state, jnp.float32(number), key)[0]
    return state


def _reads_other_rows(buffer: ReplayBuffer, state: BufferState) -> bool:
    """Whether the unit reads other rows than those of the anchors."""
    context = context_of(buffer, state.writer)
    slots = buffer.sample(state, jax.random.key(10)).indices
    mask = jnp.ones(slots.shape, jnp.bool_)
    plan_read = buffer.unit.plan_read(context, state.unit, slots, mask, jax.random.key(11))
    names = pytree.leaf_names(buffer.stored(state))
    return any((slots != plan_read.where(name).T).any() for name in names)


def _expect_held(buffer: ReplayBuffer, state: BufferState, when: str) -> None:
    """What is drawn is held, and something is."""
    slots, count = buffer.in_order(state)
    held = set(slots[:count].tolist())
    if buffer.sampler.prioritized:
        known = set(np.flatnonzero(np.asarray(buffer.priorities(state)) >= 0).tolist())
        anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
        place = jnp.arange(max(int(anchors.count), 1), dtype=jnp.int32)
        there = set(anchors.nth(place, jax.random.key(0))[0][: int(anchors.count)].tolist())
        text = f"got others at the slots {sorted(known ^ there)}"
        _expect(known == there, f"{when}, all anchors have priorities, and nothing else", text)
    for key in jax.random.split(jax.random.key(12), 4 if buffer.can_sample(state) else 0):
        batch = buffer.sample(state, key)
        drawn = np.asarray(batch.mask).reshape(len(batch.indices), -1).any(axis=1)
        found = set(np.asarray(batch.indices)[drawn].tolist())
        text = f"got the slots {sorted(found - held)}, which hold nothing"
        _expect(found <= held, f"{when}, only items that are held are drawn", text)


def _expect_weights(sampler: Sampler, batch: Sample, beta: float, what: str) -> None:
    """Weights are in proportion to P^-beta, and to nothing else."""
    try:
        power = float(sampler.exponent(beta))
    except MissingMethodError:  # a sampler that is refused in shards
        return
    drawn = np.asarray(batch.probabilities) > 0
    chances = np.asarray(batch.probabilities, np.float64)[drawn]
    constant = np.asarray(batch.weights, np.float64)[drawn] * chances**power
    if constant.size:
        even = np.allclose(constant, constant[0], rtol=1e-3)
        text = f"weights times P^{power:g} lie between {constant.min()} and {constant.max()}"
        _expect(even, f"{what} undo the bias of the draw, beta={beta}", text)


def _expect_scale(buffer: ReplayBuffer, state: BufferState, batch: Sample) -> None:
    """Importance weights, of beta 1, are divided by what `normalize` says."""
    anchors = int(buffer.unit.anchors(context_of(buffer, state.writer), state.unit).count)
    most = {"batch": 1, None: 1 / (anchors * float(np.min(batch.probabilities)))}
    kind = buffer.sampler.normalize
    if buffer.sampler.prioritized and batch.mask.all() and kind in most:
        even = np.isclose(np.max(batch.weights), most[kind], rtol=1e-3)
        text = f"the greatest is {np.max(batch.weights)}"
        _expect(even, f"weights are divided as `normalize` says, {kind}", text)


def _expect_priorities(
    buffer: ReplayBuffer, before: tuple[Any, Any], after: tuple[Any, Any], verb: str
) -> None:
    """Priorities of slots that were anchors, and are, stay; each of a state and its slots."""
    if not buffer.sampler.prioritized:
        return
    old, new = (np.asarray(buffer.priorities(*pair)) for pair in (before, after))
    both = (old >= 0) & (new >= 0)
    _expect_equal(new[both], old[both], f"{verb} keeps the priorities of anchors that stay")


def check_in_place(make: Make, example: Item) -> None:
    """Nothing of the buffer's size is copied, alone and under vmap.

    A part may compute arrays of its own, of less than 64 bytes a slot, as to sort all priorities.
    """

    def add(buffer: ReplayBuffer, state: AnyState, total: jax.Array, key: jax.Array) -> Any:
        return buffer.add(state, rows(example, total, *_lead(buffer))), total

    def sample(buffer: ReplayBuffer, state: AnyState, total: jax.Array, key: jax.Array) -> Any:
        return state, total + consumed(buffer.sample(state, jax.random.fold_in(key, 1)))

    def add_sample(buffer: ReplayBuffer, state: AnyState, total: jax.Array, key: jax.Array) -> Any:
        state = buffer.add(state, rows(example, total, *_lead(buffer)))
        return state, consumed(buffer.sample(state, key))

    def draw_add(buffer: ReplayBuffer, state: AnyState, total: jax.Array, key: jax.Array) -> Any:
        state, sample = buffer.draw(state, key)
        state = buffer.add(state, rows(example, total, *_lead(buffer)))
        return state, consumed(sample)

    for step in (add_sample, draw_add):
        for agents in (None, 4):
            grown = growth(make, example, step, agents)
            if grown < 0.01:
                continue
            # A verb alone has no reason to copy: what it needs by itself, a part computes.
            copied, *own = (_copies(make, example, verbs, agents) for verbs in (step, add, sample))
            what = f"{step.__name__}, {agents or 'no'} agents: "
            is_copy = len(copied) > sum(map(len, own))
            _expect(not is_copy, f"{what}{grown:.0%} of the state is copied", f"arrays {copied}")
            per_slot = grown * make(2**13).nbytes(example) / 2**13
            what += f"nothing is copied, but a part computes arrays of {per_slot:.0f} bytes a slot"
            _expect(per_slot < _OWN, what, f"expected less than {_OWN}, as a sort of all slots has")


_OWN = 64  # bytes a slot: a sort of all priorities has some 20


def _lead(buffer: ReplayBuffer) -> tuple[int, ...]:
    return () if buffer.num_envs is None else (buffer.num_envs,)


def _stepper(buffer: ReplayBuffer, example: Item) -> Stepper:
    """Add, draw, and update priorities where there are any; compiled once for all checks."""
    leaves, structure = jax.tree.flatten(pytree.spec_of(example, "example"))
    return _step_of(buffer, tuple(leaves), structure)


@functools.lru_cache(maxsize=8)
def _step_of(buffer: ReplayBuffer, leaves: tuple[Any, ...], structure: Any) -> Stepper:
    example = jax.tree.unflatten(structure, leaves)

    def step(state: BufferState, total: jax.Array, key: jax.Array) -> tuple[BufferState, Sample]:
        state = buffer.extend(state, rows(example, total, 9, *_lead(buffer)))
        state, sample = buffer.draw(state, key)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, sample, total + sample.probabilities)
        return state, sample

    return step


def _agree(got: PyTree, want: PyTree, contract: str) -> None:
    """Integers and data exactly, computed floats to rounding."""
    structures = jax.tree.structure(got), jax.tree.structure(want)
    _expect(
        structures[0] == structures[1], contract, f"expected {structures[1]}, got {structures[0]}"
    )
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, one), other in zip(leaves, jax.tree.leaves(want), strict=True):
        where = f"{contract}: leaf '{pytree.leaf_name(path)}'"
        kinds = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in (other, one)]
        _expect(kinds[0] == kinds[1], where, f"expected {kinds[0]}, got {kinds[1]}")
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        _expect_equal(np.asarray(one), np.asarray(other), where)


def _expect_equal(got: np.ndarray, want: np.ndarray, where: str) -> None:
    differs = got != want
    if jnp.issubdtype(got.dtype, jnp.floating):
        wide = np.float64
        differs &= ~np.isclose(got.astype(wide), want.astype(wide), 1e-6, 1e-7, equal_nan=True)
    if differs.any():
        at = tuple(map(int, np.argwhere(differs)[0])) if got.ndim else ()
        count = f"{int(differs.sum())} of {differs.size} differ"
        _expect(False, where, f"{count}, at {at} expected {want[at]}, got {got[at]}")


def _expect(kept: object, contract: str, found: str = "") -> None:
    if not kept:
        raise AssertionError(f"broken contract: {contract}{': ' if found else ''}{found}")
