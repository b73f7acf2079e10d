"""Random programs of methods against plain Python: contents, draws and priorities.

Hundreds of programs of one description run under `vmap` in one compiled program. At random pauses
all of them are saved and loaded, and some are rebuilt, in either order.
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.methods import programs
from tests.methods.model import Model
from tests.methods.programs import EXAMPLE, STEPS
from tests.methods.units import RULES
from tests.samplers import weights

pytestmark = pytest.mark.slow

PROGRAMS, PAUSE, REBUILT, ROWS = 600, 2, 24, 4
"""Number of programs, steps between pauses, rebuilt programs per pause, rows of a ring."""
IN_TURN, DEVICE = jrb.RoundRobin(), jrb.DeviceStorage()
ONCE = jrb.DeviceStorage(share_next_observations=True, terminal_capacity=8)
LANES, FULL = jrb.PerEnvironment(), jrb.BlockWhenFull()
BEST = jrb.MaxValue(("next", "reward"))
COUNTED = jrb.Prioritized(count_draws=True)
HELD = jrb.Prioritized(new_priority="largest_held")
EVERY = jrb.Weighted(weights.every, leaves=(("next", "reward"),))
TWICE = jrb.Prioritized(max_draws=2)
WEIGHTED_TWICE = dataclasses.replace(EVERY, max_draws=2)
UNSHUFFLED = jrb.WithoutReplacement(shuffle=False, uses=2)


@dataclasses.dataclass(frozen=True)
class Case:
    unit: str
    sampler: jrb.types.Sampler
    writer: jrb.types.Writer = IN_TURN
    storage: jrb.types.Storage = DEVICE
    envs: int = 2

    @property
    def buffer(self):
        parts = {"unit": RULES[self.unit].unit, "sampler": self.sampler, "writer": self.writer}
        return jrb.ReplayBuffer(ROWS * self.envs, self.envs, 4, storage=self.storage, **parts)

    @property
    def methods(self):
        """All methods but one, to save compile time; the neighboring cases leave out another."""
        left_out = ["add", "set_rest"][CASES.index(self) % 2]
        return [method for method in programs.methods_of(self.buffer) if method != left_out]

    def __str__(self):
        parts = (self.sampler, self.writer, self.storage, self.envs)
        return "-".join([self.unit, *(str(part).split("=", 1)[0] for part in parts)])


CASES = [
    Case("transition", jrb.Prioritized()),
    Case("strict n-step", jrb.Prioritized(), storage=ONCE),
    Case("whole episodes", jrb.Prioritized()),
    Case("windows of a period", COUNTED, LANES),
    Case("transition", jrb.Prioritized(), BEST),
    Case("stacks", jrb.Uniform(), LANES),
    Case("windows across", jrb.Uniform(count_draws=True)),
    Case("transition", jrb.Uniform(replacement=False, count_draws=True), jrb.Reservoir(1)),
    Case("strict n-step", jrb.Queue(count_draws=True), FULL),
    Case("padded windows of a period", jrb.Queue()),
    Case("windows over ends", jrb.Queue(stride=3)),
    Case("n-step", jrb.Queue(count_draws=True, stride=2), FULL),
    Case("windows", jrb.Lifo(count_draws=True)),
    Case("stacked strict n-step", jrb.Lifo(), FULL, envs=1),
    Case("n-step", jrb.WithoutReplacement(uses=2, count_draws=True), LANES),
    Case("stacks", jrb.WithoutReplacement(drop_last=True)),
    Case("windows of a period", UNSHUFFLED),
    Case("hindsight", UNSHUFFLED, storage=ONCE),
    Case("whole episodes", jrb.Newest(0.4), envs=1),
    Case("stacked windows", jrb.Newest(count=3, count_draws=True)),
    Case("transition", HELD, envs=1),
    Case("strict n-step", HELD, LANES),
    Case("windows", HELD, storage=ONCE),
    Case("whole episodes", HELD),
    Case("strict n-step", EVERY),
    Case("whole episodes", EVERY, storage=ONCE),
    Case("transition", EVERY, BEST),
    Case("windows", EVERY, LANES),
    Case("transition", TWICE),
    Case("strict n-step", TWICE, FULL),
    Case("whole episodes", TWICE, storage=ONCE),
    Case("windows", TWICE, LANES),
    Case("windows of a period", jrb.Uniform(max_draws=3)),
    Case("strict n-step", jrb.Uniform(False, max_draws=1), FULL),
    Case("stacks", jrb.Uniform(max_draws=1), LANES),
    Case("transition", jrb.Uniform(False, max_draws=2), BEST),
    Case("stacked strict n-step", jrb.Uniform(max_draws=2), FULL, envs=1),
    Case("padded windows of a period", WEIGHTED_TWICE),
    Case("transition", WEIGHTED_TWICE, FULL, ONCE),
    Case("strict n-step", jrb.Newest(count=3, max_draws=2), FULL),
    Case("stacked windows", jrb.Newest(0.4, max_draws=1), storage=ONCE),
    Case("whole episodes", jrb.Newest(0.5, max_draws=2), envs=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_of_methods_do_what_plain_python_does(case, tmp_path):
    buffer, names = case.buffer, case.methods
    rng = np.random.default_rng(CASES.index(case))
    given = programs.arguments(rng, buffer, PROGRAMS, STEPS)
    given["method"] = programs.methods(rng, names, PROGRAMS, STEPS)
    given["number"] += np.arange(STEPS, dtype=np.int32)[:, None, None] * 100
    step = programs.step(buffer, names)
    some = jax.jit(jax.vmap(lambda state, given: jax.lax.scan(step, state, given)))
    states = jax.vmap(lambda _: buffer.init(EXAMPLE))(jnp.arange(PROGRAMS))
    told, events = [], []
    for number in range(STEPS // PAUSE):
        now = slice(PAUSE * number, PAUSE * (number + 1))
        states, new = some(states, {name: leaf[:, now] for name, leaf in given.items()})
        told.append(jax.device_get(new))
        events.append(at_a_pause(rng, states))
        for what, chosen in events[-1]:
            states = paused(buffer, states, what, chosen, tmp_path)
    look = lambda state: programs.seen(buffer, state, programs.items(buffer, state))
    found = jax.device_get(jax.jit(jax.vmap(look))(states))
    told = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *told)
    draws = 0
    for program in range(PROGRAMS):
        one = lambda tree: jax.tree.map(operator.itemgetter(program), tree)  # noqa: B023
        model = Model(buffer, RULES[case.unit])
        moves = [rebuilt(events, step, program) for step in range(STEPS)]
        run(model, names, one(given), one(told), moves, one(found))
        draws += model.draws
    assert draws > PROGRAMS


def at_a_pause(rng, states):
    """Draws the events of a pause in order: a save of all programs, and a rebuild of some.

    Only programs with a full ring or with two rows are rebuilt, because each number of rows is
    compiled separately.
    """
    found = [("save", None)] * int(rng.random() < 0.5)
    rows = np.asarray(states.writer.count).reshape(PROGRAMS, -1).max(axis=1)
    may = np.flatnonzero((rows == rows.max()) | (rows == 2))
    if rng.random() < 0.7:
        chosen = rng.choice(may, min(REBUILT, len(may)), replace=False)
        found.insert(rng.integers(len(found) + 1), ("rebuild", chosen))
    return found


def rebuilt(events, step, program):
    """Returns True if a program is rebuilt after a step."""
    event = events[step // PAUSE] if (step + 1) % PAUSE == 0 else []
    return any(what == "rebuild" and program in chosen for what, chosen in event)


def paused(buffer, states, what, chosen, path):
    """Returns the states after a save and load of all, or after a rebuild of the chosen ones."""
    if what == "save":
        jrb.save(path, buffer, states)
        # A checkpoint stores no functions.
        holds_code = isinstance(buffer.unit, jrb.Hindsight) or buffer.sampler.reads is not None
        found, states = jrb.load(path, buffer=buffer if holds_code else None)
        assert found == buffer
        return states
    host = jax.tree.map(np.array, states)
    for number in chosen:
        one = jax.tree.map(lambda leaf: jnp.asarray(leaf[number]), host)  # noqa: B023
        new = jax.device_get(jrb.rebuild(buffer, one, buffer))
        jax.tree.map(lambda leaf, told: operator.setitem(leaf, number, told), host, new)  # noqa: B023
    return jax.tree.map(jnp.asarray, host)


def run(model, methods, given, told, moves, found):
    """Runs one program on the model, and compares the model with the final state."""
    done = []
    try:
        for step in range(STEPS):
            at = operator.itemgetter(step)
            one, now = (jax.tree.map(at, tree) for tree in (given, told))
            done.append(methods[one["method"]])
            programs.follow(model, done[-1], one, now)
            if moves[step]:
                done.append("rebuild")
                model.rebuild(model.buffer, model.rule)
        done.append("compare")
        programs.check(model, found)
    except Exception as wrong:
        wrong.add_note(f"in the program {done}")
        raise
