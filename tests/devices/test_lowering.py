"""Programs for accelerators have only loops with known trip counts, and no host callbacks.

The tests lower programs for platforms that this machine lacks, and inspect their operations.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

import jrb
from tests.devices import test_devices as devices

pytestmark = pytest.mark.slow

B = devices.B
DEVICE_CASES = [(unit, sampler, parts) for unit, sampler, parts, _ in devices.CASES]


def operations(operation):
    """Yields an operation and all operations nested in it."""
    yield operation
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield from operations(inner.operation)


def defining(value):
    """Returns the name of the operation that makes a value; None for a block's argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.name


def is_counted(loop):
    """Returns True if a `while` compares a counter with a constant and starts it at a constant."""
    condition = loop.regions[0].blocks[0]
    going_on = list(condition.operations)[-1].operands[0]
    if defining(going_on) != "stablehlo.compare":
        return False
    counter, limit = going_on.owner.operands
    if defining(limit) != "stablehlo.constant" or defining(counter) is not None:
        return False
    start = loop.operands[ir.BlockArgument(counter).arg_number]
    return defining(start) in ("stablehlo.constant", "stablehlo.broadcast_in_dim")


def is_constant(value):
    """Returns True if a value is computed from constants alone, without an optimization barrier."""
    if isinstance(value.owner, ir.Block) or value.owner.name == "stablehlo.optimization_barrier":
        return False
    return value.owner.name == "stablehlo.constant" or (
        bool(list(value.owner.operands)) and all(map(is_constant, value.owner.operands))
    )


def lowered(function, *arguments, platform="cuda"):
    """Returns all operations of a program that is lowered for another platform."""
    traced = jax.jit(function, donate_argnums=0).trace(*arguments)
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    return list(operations(module.operation))


def assert_known(found):
    names = {operation.name for operation in found}
    loops = [operation for operation in found if operation.name == "stablehlo.while"]
    unknown = [loop for loop in loops if not is_counted(loop)]
    assert not unknown, f"{len(unknown)} of {len(loops)} loops have trips that nobody knows"
    branches = [operation for operation in found if operation.name == "stablehlo.case"]
    assert all(is_constant(branch.operands[0]) for branch in branches)
    assert not [name for name in names if "callback" in name]


def everything(buffer):
    run = devices.program(buffer)

    def step(state, key):
        state, out = run(state, devices.drawn(key))
        state = buffer.extend(state, devices.rows(key, 3, devices.E), mask=jnp.arange(3) != 1)
        return state, out, buffer.can_sample(state, B)

    return step


@pytest.mark.parametrize(("unit", "sampler", "parts"), DEVICE_CASES, ids=lambda case: str(case))
def test_every_loop_has_trips_that_the_compiler_knows(unit, sampler, parts):
    buffer = devices.buffer_of(unit, sampler, **parts)
    found = lowered(everything(buffer), buffer.init(devices.EXAMPLE), jax.random.key(0))
    assert_known(found)


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
def test_other_accelerators_get_the_same(platform):
    buffer = devices.buffer_of(
        "stacks", "prioritized", storage=jrb.DeviceStorage(share_next_observations=True)
    )
    state, key = buffer.init(devices.EXAMPLE), jax.random.key(0)
    assert_known(lowered(everything(buffer), state, key, platform=platform))


@pytest.mark.parametrize("agents", [None, 3])
def test_a_mix(agents):
    parts = devices.buffer_of("n-step", "prioritized"), devices.buffer_of("n-step", "uniform")
    mix = jrb.Mix(parts, (0.5, 0.5), batch_size=B)

    def step(states, key):
        states, sample = mix.draw(states, key)
        states = mix.update_priority(states, sample, jnp.abs(sample.weights))
        other = mix.sample(states, key, proportions=jnp.array([0.25, 0.75]))
        return states, sample, other

    arguments = mix.init(devices.EXAMPLE), jax.random.key(0)
    if agents:
        stack = lambda leaf: jnp.broadcast_to(leaf, (agents, *leaf.shape))
        step, arguments = jax.vmap(step), jax.tree.map(stack, arguments)
    assert_known(lowered(step, *arguments))


def test_windows_and_goals_under_vmap():
    for unit in ("hindsight", "padded"):
        buffer = devices.buffer_of(unit, "epochs")
        states, keys = devices.stacked([buffer.init(devices.EXAMPLE)] * 3), jnp.arange(3)
        keys = jax.vmap(jax.random.key)(keys)
        assert_known(lowered(jax.vmap(everything(buffer)), states, keys))


def users(value):
    """Yields the operations that use a value, seen through reshapes, bitcasts and slices."""
    for use in value.uses:
        if use.owner.name in ("stablehlo.reshape", "stablehlo.bitcast_convert", "stablehlo.slice"):
            yield from users(use.owner.results[0])
        else:
            yield use.owner


@pytest.mark.parametrize("unit", ["transition", "n-step", "stacks", "padded"])
def test_items_are_read_once_and_not_where_they_are_used(unit):
    """Otherwise, a later write would have to copy the items that are still to be read."""
    buffer = devices.buffer_of(unit, "uniform")
    found = lowered(buffer.draw, buffer.init(devices.EXAMPLE), jax.random.key(0))
    reads = [it for it in found if it.name == "stablehlo.gather"]
    reads = [it for it in reads if ir.RankedTensorType(it.operands[0].type).shape[0] >= 64]
    assert reads
    for read in reads:
        names = {user.name for user in users(read.results[0])}
        assert names == {"stablehlo.optimization_barrier"}


def test_a_sum_tree():
    tree = jrb.sum_tree.init(100_000, branching=32)

    def step(tree, key):
        indices = jrb.sum_tree.sample(tree, key, B)
        masses = jrb.sum_tree.get(tree, indices) + 1
        return jrb.sum_tree.update(tree, indices, masses), indices

    assert_known(lowered(step, tree, jax.random.key(0)))


def test_an_unknown_loop_is_noticed():
    def step(x):
        return jax.lax.while_loop(lambda x: x < 10, lambda x: x * 2, x)

    with pytest.raises(AssertionError, match="1 of 1 loops"):
        assert_known(lowered(step, jnp.int32(1)))
