"""Methods with a donated state copy nothing of the buffer's size."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jrb
from jrb import testing
from jrb.types import component
from tests.samplers import weights

pytestmark = pytest.mark.slow

E, B = 4, 16
EXAMPLE = {
    "observation": jnp.zeros(16),
    "y": jnp.zeros(3, jnp.uint8),
    "half": jnp.zeros(4, jnp.bfloat16),
    "key": jnp.int8(0),
    "next": {
        "observation": jnp.zeros(16),
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}

SAMPLERS = {
    "uniform": jrb.Uniform(),
    "distinct": jrb.Uniform(replacement=False),
    "epochs": jrb.WithoutReplacement(),
    "queue": jrb.Queue(),
    "stack": jrb.Lifo(),
    "counted": jrb.Prioritized(count_draws=True),
    "prioritized": jrb.Prioritized(),
    "buffer": jrb.Prioritized(normalize="buffer", stratified=False),
    "held": jrb.Prioritized(new_priority="largest_held"),
    "grouped": jrb.Grouped("key", 16, 2),
    "weighted": jrb.Weighted(weights.fresh, leaves=(("next", "reward"),)),
    "limited": jrb.Uniform(replacement=False, max_draws=2),
    "limited priorities": jrb.Prioritized(normalize=None, max_draws=2),
    "limited newest": jrb.Newest(0.5, max_draws=2),
    "limited mixture": jrb.Mixture((jrb.Prioritized(), jrb.Newest(0.5)), (0.5, 0.5), max_draws=2),
}
PRIORITIZED = ("prioritized", "buffer", "counted")


def rows(total, *lead):
    return testing.rows(EXAMPLE, total, *lead)


def add_sample(buffer, state, total, key):
    state = buffer.add(state, rows(total, E))
    return state, testing.consumed(buffer.sample(state, key))


def masked_add_sample(buffer, state, total, key):
    state = buffer.add(state, rows(total, E), mask=total > 0.5)
    return state, testing.consumed(buffer.sample(state, key))


def sample_add(buffer, state, total, key):
    sample = buffer.sample(state, key)
    return buffer.add(state, rows(total, E)), testing.consumed(sample)


def draw_add(buffer, state, total, key):
    state, sample = buffer.draw(state, key)
    return buffer.add(state, rows(total, E)), testing.consumed(sample)


def extend_draw_extend(buffer, state, total, key):
    state = buffer.extend(state, rows(total, 6, E))
    state, sample = buffer.draw(state, key)
    return buffer.extend(state, rows(total + 1, 3, E)), testing.consumed(sample)


def masked_extend_draw_empty(buffer, state, total, key):
    state = buffer.extend(state, rows(total, 5, E), mask=jnp.sin(total + jnp.arange(5.0)) > 0)
    state, sample = buffer.draw(state, key)
    return buffer.add(buffer.empty(state), rows(total + 1, E)), testing.consumed(sample)


def sample_update_add(buffer, state, total, key):
    sample = buffer.sample(state, key)
    priorities = jnp.abs(jnp.sin(total + jnp.arange(B, dtype=jnp.float32)))
    state = buffer.update_priority(state, sample, priorities)
    return buffer.add(state, rows(total, E)), testing.consumed(sample)


def draw_add_update(buffer, state, total, key):
    state, sample = buffer.draw(state, key)
    state = buffer.add(state, rows(total, E))
    state = buffer.update_priority(state, sample, sample.data["next"]["reward"] ** 2)
    return state, testing.consumed(sample)


def add_sample_update_twice(buffer, state, total, key):
    for _ in range(2):
        state = buffer.add(state, rows(total, E))
        sample = buffer.sample(state, key)
        state = buffer.update_priority(state, sample, sample.data["next"]["reward"] ** 2)
        total = total + testing.consumed(sample)
    return state, total


def everything(buffer, state, total, key):
    """Calls the methods in orders in which nothing is copied."""
    state = buffer.add(state, rows(total, E), mask=total > 0.5)
    state, sample = buffer.draw(state, key)
    total = total + testing.consumed(sample)
    state = buffer.extend(state, rows(total, 6, E))
    state = buffer.add(state, rows(total, E))
    if buffer.sampler.prioritized:
        sample = buffer.sample(state, key)
        total = total + testing.consumed(sample)
        priorities = jnp.abs(jnp.sin(total + jnp.arange(B, dtype=jnp.float32)))
        state = buffer.update_priority(state, sample, priorities)
        state = buffer.add(state, rows(total, E))
    else:
        state, sample = buffer.draw(state, key)
        total = total + testing.consumed(sample)
    state = buffer.empty(state)
    state = buffer.extend(state, rows(total, 3, E), mask=jnp.sin(total + jnp.arange(3.0)) > 0)
    return state, total


ANY = [add_sample, masked_add_sample, draw_add, extend_draw_extend, masked_extend_draw_empty]
UPDATES = [sample_update_add, draw_add_update, add_sample_update_twice]
CASES = [(name, step) for name in ("uniform", "prioritized") for step in ANY]
CASES += [("prioritized", step) for step in UPDATES]


@component
class Apart(jrb.DeviceStorage):
    """A storage that cannot read other arrays together with the items."""

    def read(self, *args):
        return jrb.DeviceStorage().read(*args)

    def read_with(self, *args):
        return None


OTHERS = {
    "n-step": {"unit": jrb.NStep(3, 0.9)},
    "n-step of many rows": {"unit": jrb.NStep(40, 0.9)},
    "strict n-step": {"unit": jrb.NStep(3, 0.9, strict=True)},
    "windows": {"unit": jrb.Sequence(5)},
    "windows and their marks apart": {"unit": jrb.Sequence(5), "storage": Apart()},
    "padded": {"unit": jrb.Sequence(5, burn_in=3, partial="pad")},
    "windows of a period": {"unit": jrb.Sequence(5, burn_in=2, stride=3)},
    "padded of a period": {"unit": jrb.Sequence(5, stride=3, partial="pad")},
    "windows across": {"unit": jrb.Sequence(5, burn_in=2, cross_episodes=True, stride=3)},
    "episodes": {"unit": jrb.Sequence(5, sample_by="episodes")},
    "whole": {"unit": jrb.Sequence(5, sample_by="whole_episodes")},
    "packed": {"unit": jrb.Packed(5, 2)},
    "stacks": {"unit": jrb.FrameStack(4)},
    "stacked n-step": {"unit": jrb.FrameStack(3, unit=jrb.NStep(3, 0.9))},
    "stacked windows": {"unit": jrb.FrameStack(3, unit=jrb.Sequence(4, burn_in=2))},
    "hindsight": {
        "unit": jrb.Hindsight(
            lambda achieved, goal: -jnp.abs(achieved[0] - goal[0]),
            achieved=("next", "observation"),
            goal="observation",
            next_goal=None,
        )
    },
    "hindsight of returns": {
        "unit": jrb.Hindsight(
            lambda achieved, goal: -jnp.abs(achieved[0] - goal[0]),
            achieved=("next", "observation"),
            goal="observation",
            next_goal=None,
            unit=jrb.NStep(3, 0.9, strict=True),
        )
    },
    "once": {"storage": jrb.DeviceStorage(share_next_observations=True)},
    "stacks of once": {
        "storage": jrb.DeviceStorage(share_next_observations=True),
        "unit": jrb.FrameStack(3),
    },
    "best": {"writer": jrb.MaxValue(("next", "reward"))},
}


def growth(name, step, agents=None, **parts):
    make = lambda n: jrb.ReplayBuffer(n, num_envs=E, batch_size=B, sampler=SAMPLERS[name], **parts)
    return testing.growth(make, EXAMPLE, step, agents)


@pytest.mark.whole
@pytest.mark.parametrize("unit", [jrb.Sequence(5), jrb.Sequence(5, burn_in=2, cross_episodes=True)])
def test_marks_that_are_read_apart_are_the_same(unit):
    found = []
    for storage in (jrb.DeviceStorage(), Apart()):
        buffer = jrb.ReplayBuffer(64, num_envs=E, batch_size=B, unit=unit, storage=storage)
        items = rows(jnp.float32(1), 30, E)
        items["next"]["done"] = jnp.arange(30)[:, None] % 8 == jnp.arange(E)
        state = buffer.extend(buffer.init(EXAMPLE), items)
        found.append(buffer.sample(state, jax.random.key(0)))
    assert all(found[0].info[name].any() for name in ("is_first", "is_last"))
    chex.assert_trees_all_equal(*found)


@pytest.mark.parametrize(("name", "step"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_nothing_is_copied(name, step):
    assert growth(name, step) < 0.01


MANY = [(name, None) for name in ("distinct", "queue", "buffer", "counted")]
MANY += [("limited", None), ("limited priorities", 8), ("limited newest", 8)]
MANY += [("limited mixture", None)]
MANY += [(name, 8) for name in ("uniform", "epochs", "stack", "prioritized", "held")]
MANY += [("grouped", None), ("grouped", 8)]


@pytest.mark.parametrize(("name", "agents"), MANY)
def test_nothing_is_copied_in_any_order(name, agents):
    assert growth(name, everything, agents) < 0.01


PAIRS = [(parts, "prioritized", 8) for parts in ("stacks", "once")]
PAIRS += [(parts, "epochs", 8) for parts in ("strict n-step", "episodes", "windows across")]
PAIRS += [("strict n-step", "limited priorities", None), ("once", "limited", 8)]
PAIRS += [("packed", "epochs", 8), ("whole", "prioritized", 8), ("stacks", "held", None)]
DONE = {parts for parts, _, _ in PAIRS} | {"windows of a period", "padded of a period"}
PAIRS += [(parts, "uniform", None) for parts in OTHERS if parts not in DONE]


@pytest.mark.parametrize(("parts", "name", "agents"), PAIRS)
def test_no_other_part_copies(parts, name, agents):
    assert growth(name, everything, agents, **OTHERS[parts]) < 0.01


def edits(buffer, state, total, key):
    """Writes with priorities, and sets, drops and maps items."""
    some = lambda *shape: jnp.abs(jnp.sin(total + jnp.ones(shape)))
    state = buffer.add(state, rows(total, E), priorities=some(E))
    state = buffer.extend(state, rows(total, 6, E), some(6) > 0.2, priorities=some(6, E))
    sample = buffer.sample(state, key)
    state = buffer.set(state, sample, {"y": jnp.zeros((B, 3), jnp.uint8)})
    at = jnp.arange(256, dtype=jnp.int32) * 7
    state = buffer.set(state, at, {"next": {"reward": jnp.broadcast_to(total, 256)}})
    state = buffer.drop(state, sample)
    add_one = lambda items: {"next": {"reward": items["next"]["reward"] + total}}
    state = buffer.map(state, add_one, batch_size=64)
    total = total + testing.consumed((sample, buffer.newest(state, 2)))
    return buffer.add(state, rows(total, E)), total


def schedules(buffer, state, total, key):
    """Sets another alpha before and after a write."""
    state = buffer.set_alpha(state, total * 0.01)
    state = buffer.add(state, rows(total, E))
    sample = buffer.sample(state, key, beta=total * 0.01)
    total = total + testing.consumed(sample)
    state = buffer.update_priority(state, sample, jnp.abs(jnp.sin(total + jnp.arange(float(B)))))
    return buffer.set_alpha(state, total * 0.02), total


@pytest.mark.parametrize(("name", "agents"), [("prioritized", 8), ("buffer", None)])
def test_schedules_copy_nothing(name, agents):
    assert growth(name, schedules, agents) < 0.01


@pytest.mark.parametrize(
    ("parts", "agents"),
    [("n-step", 8), ("strict n-step", None), ("stacked n-step", 8), ("once", None)],
)
def test_edits_copy_nothing(parts, agents):
    assert growth("prioritized", edits, agents, **OTHERS[parts]) < 0.01


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("uniform", jrb.Reservoir(0)),
        ("queue", jrb.BlockWhenFull()),
        ("limited", jrb.BlockWhenFull()),
        ("limited newest", jrb.BlockWhenFull()),
    ],
)
def test_no_writer_copies(name, writer):
    assert growth(name, extend_draw_extend, writer=writer) < 0.01


def lanes(buffer, state, total, key):
    """Writes with masks under which only some environments step."""
    steps = jnp.sin(total + jnp.arange(6.0 * E)).reshape(6, E) > 0
    state = buffer.add(state, rows(total, E), mask=steps[0])
    state = buffer.extend(state, rows(total, 6, E), mask=steps)
    state, sample = buffer.draw(state, key)
    state = buffer.truncate(state, steps[1])
    state = buffer.set(state, sample, {"next": {"reward": jnp.zeros(B)}})
    total = total + testing.consumed((sample, buffer.newest(state, 2)))
    return buffer.add(state, rows(total, E)), total


LANES = [("n-step", None), ("strict n-step", 8), ("stacked n-step", None), ("episodes", 8)]


@pytest.mark.parametrize(("parts", "agents"), LANES)
def test_lanes_copy_nothing(parts, agents):
    name = "uniform" if parts == "episodes" else "prioritized"
    assert growth(name, lanes, agents, writer=jrb.PerEnvironment(), **OTHERS[parts]) < 0.01


BY_ENVIRONMENT = {"unit": jrb.Sequence(5, partial="pad")}
LINES = [(1, add_sample, None), (16, everything, 8), (16, edits, None), (1, draw_add, 8)]


@pytest.mark.parametrize(("envs", "step", "agents"), LINES)
def test_environment_by_environment_nothing_is_copied(envs, step, agents, monkeypatch):
    monkeypatch.setitem(globals(), "E", envs)  # the environments of the written rows
    assert growth("prioritized", step, agents, **BY_ENVIRONMENT) < 0.01


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_bare_sample_before_a_write_is_what_copies(name):
    assert growth(name, sample_add) > 0.5


NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "float16"]
NARROW = [("bfloat16", None), *zip(NARROW, [8, None, 8, None, 8], strict=True)]


@pytest.mark.parametrize(("dtype", "agents"), NARROW)
def test_no_dtype_is_widened_and_copied(dtype, agents):
    example = {"x": jnp.zeros(64, dtype)}

    def step(buffer, state, total, key):
        state = buffer.extend(state, testing.rows(example, total, 3, E))
        state = buffer.add(state, testing.rows(example, total, E), mask=total > 0.5)
        return state, testing.consumed(buffer.sample(state, key))

    make = lambda n: jrb.ReplayBuffer(n, num_envs=E, batch_size=B)
    assert testing.growth(make, example, step, agents) < 0.01
