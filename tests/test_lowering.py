"""What is compiled for accelerators: no loop whose trips the compiler cannot know, no host sync.

Programs are lowered for platforms that this machine lacks, and their operations looked through.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir

import jrb
from jrb._xla import compiling
from tests import test_devices as devices

pytestmark = pytest.mark.slow

B = devices.B
DEVICE_CASES = [(unit, sampler, parts) for unit, sampler, parts, _ in devices.CASES]


def operations(operation):
    """An operation and all that is nested in it."""
    yield operation
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield from operations(inner.operation)


def defining(value):
    """The name of the operation that makes a value; that of a block's argument is None."""
    return None if isinstance(value.owner, ir.Block) else value.owner.name


def is_counted(loop):
    """Whether a `while` goes on as long as a counter is below a constant, from a constant on."""
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
    """Whether a value is computed from constants alone, which a barrier hides."""
    if isinstance(value.owner, ir.Block) or value.owner.name == "stablehlo.optimization_barrier":
        return False
    return value.owner.name == "stablehlo.constant" or (
        bool(list(value.owner.operands)) and all(map(is_constant, value.owner.operands))
    )


def lowered(function, *arguments, platform="cuda"):
    """All operations of a program for another platform."""
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
    """The operations that use a value, or what it is in another form."""
    for use in value.uses:
        if use.owner.name in ("stablehlo.reshape", "stablehlo.bitcast_convert", "stablehlo.slice"):
            yield from users(use.owner.results[0])
        else:
            yield use.owner


@pytest.mark.parametrize("unit", ["transition", "n-step", "stacks", "padded"])
def test_items_are_read_once_and_not_where_they_are_used(unit):
    """Else a later write would have to copy what is still to be read."""
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


FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


def kernels(text):
    """What a program for the CPU runs one after the other, each with what it waits for."""
    found, known = {}, {}
    for line in text[text.index("\nENTRY") :].splitlines()[2:]:
        if " = " not in line:
            continue
        name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
        operands = re.findall(r"%[\w.-]+", rest.split("), ")[0])
        needed = set().union(*(known[operand] for operand in operands if operand in known))
        is_free = re.search(r" ([a-z-]+)\(", f" {rest}")[1] in FREE
        known[name] = needed if is_free else {name}
        if not is_free:
            found[name] = needed
    return found


def is_handed_over(text):
    """Whether XLA's CPU client hands kernels to another thread.

    It does where more than eight others could run beside the next one.
    """
    waiting = dict(kernels(text))
    ready = [name for name, needed in waiting.items() if not needed]
    while ready:
        done = ready.pop(0)
        if len(ready) > 8:
            return True
        before = {name for name, needed in waiting.items() if not needed}
        waiting = {name: needed - {done} for name, needed in waiting.items()}
        ready += [name for name, needed in waiting.items() if not needed and name not in before]
    return False


MANY = {str(number): jnp.zeros(number + 1) for number in range(9)}
MANY |= {**devices.EXAMPLE, "frame": jnp.zeros((40, 40)), "number": jnp.int32(0)}
WRITES = [
    ("add", 1, "prioritized", "transition", devices.EXAMPLE),
    ("add", 4, "uniform", "windows", devices.EXAMPLE),
    ("add", 1, "uniform", "stacks", devices.EXAMPLE),
    ("add", 1, "prioritized", "stacks", devices.EXAMPLE),
    ("add", 4, "prioritized", "n-step", MANY),
    ("extend", 4, "uniform", "n-step", MANY),
]


@pytest.mark.whole
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is about the CPU's threads")
@pytest.mark.parametrize(("verb", "envs", "sampler", "unit", "example"), WRITES)
def test_a_write_that_python_calls_wakes_no_thread(verb, envs, sampler, unit, example):
    parts = {"sampler": devices.SAMPLERS[sampler], "unit": devices.UNITS[unit]}
    buffer, lead = jrb.ReplayBuffer(2**14, num_envs=envs, **parts), (2, envs)[verb == "add" :]
    rows = jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), example)
    write = jax.jit(compiling.standalone_program(getattr(buffer, verb)), donate_argnums=0)
    as_users_do = {"xla_cpu_use_fusion_emitters": True}  # the tests go without: see `conftest`
    compiled = write.lower(buffer.init(example), rows).compile(as_users_do)
    assert not is_handed_over(compiled.as_text())
