"""Random programs that continue in buffers of other parts.

Programs run one at a time, method by method outside `jit`. From time to time a program is saved and
loaded, or rebuilt as another description, with which it continues.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.methods import programs
from tests.methods.model import Model
from tests.methods.programs import EXAMPLE, MANY, STEPS, T
from tests.methods.units import RULES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::jrb.PriorityWarning")]

E, ROWS, PROGRAMS = 2, 3, 60
MEMMAP, SPILL = jrb.MemmapStorage(None), jrb.SpillStorage(None, 2 * E)
COMPRESSED = jrb.CompressedStorage(min_bytes=1)
ONCE = jrb.MemmapStorage(share_next_observations=True)
COUNTED = jrb.Prioritized(count_draws=True)
HELD = jrb.Prioritized(new_priority="largest_held")
IN_ORDER = jrb.WithoutReplacement(shuffle=False, count_draws=True)
ARRAYS = [
    ("strict n-step", HELD, jrb.RoundRobin(), MEMMAP),
    ("transition", HELD, jrb.RoundRobin(), SPILL),
    ("transition", jrb.Queue(), jrb.BlockWhenFull(), SPILL),
    ("windows of a period", COUNTED, jrb.PerEnvironment(), MEMMAP),
    ("windows of a period", COUNTED, jrb.PerEnvironment(), ONCE),
    ("strict n-step", HELD, jrb.RoundRobin(), ONCE),
    ("stacks", jrb.Newest(count=2), jrb.ReadOnly(), SPILL),
    ("transition", jrb.Uniform(False), jrb.MaxValue(("next", "reward")), MEMMAP),
    ("stacks", HELD, jrb.PerEnvironment(), COMPRESSED),
    ("transition", jrb.Uniform(), jrb.Reservoir(0), COMPRESSED),
    ("windows of a period", jrb.Prioritized(max_draws=2), jrb.BlockWhenFull(), MEMMAP),
    ("strict n-step", jrb.Uniform(max_draws=1), jrb.RoundRobin(), SPILL),
    ("stacks", jrb.Newest(count=2, max_draws=2), jrb.BlockWhenFull(), MEMMAP),
]
OBJECTS = [
    ("transition", HELD, jrb.RoundRobin(), jrb.ListStorage()),
    ("transition", jrb.Queue(count_draws=True), jrb.BlockWhenFull(), jrb.ListStorage()),
    ("transition", IN_ORDER, jrb.PerEnvironment(), jrb.ListStorage()),
    ("transition", jrb.Uniform(), jrb.Reservoir(0), jrb.ListStorage()),
    ("transition", jrb.Uniform(False, max_draws=2), jrb.BlockWhenFull(), jrb.ListStorage()),
]


def described(unit, sampler, writer, storage):
    """Returns a buffer, and the rule for its anchors."""
    parts = {"unit": RULES[unit].unit, "sampler": sampler, "writer": writer, "storage": storage}
    return jrb.ReplayBuffer(ROWS * E, E, 4, **parts), RULES[unit]


@pytest.mark.parametrize(("parts", "seed"), [(ARRAYS, 0), (OBJECTS, 1)], ids=["arrays", "objects"])
def test_programs_go_on_in_other_parts(parts, seed, tmp_path):
    rng, known = np.random.default_rng(seed), [described(*each) for each in parts]
    for number in range(PROGRAMS):
        buffer, rule = known[rng.integers(len(known))]
        program = Program(buffer, rule, rng)
        try:
            for _ in range(STEPS):
                program.step()
                chance = rng.random()
                if chance < 0.04:
                    program.save(tmp_path / str(number))
                elif chance < 0.2:
                    program.rebuild(*known[rng.integers(len(known))])
            program.check()
        except BaseException as wrong:
            wrong.add_note(f"in program {number}: {program.done}")
            raise


class Program:
    """A buffer, its state, and its model."""

    def __init__(self, buffer, rule, rng):
        self.buffer, self.model, self.rng = buffer, Model(buffer, rule), rng
        self.done, self.number = [], 0
        self.state = buffer.init(None if buffer.storage.of_objects else EXAMPLE)

    def step(self):
        """Runs one random method, or asserts that it raises if it must."""
        names = programs.methods_of(self.buffer)
        method = names[programs.methods(self.rng, names)]
        given = programs.arguments(self.rng, self.buffer)
        given["number"] += self.number
        self.number += given["number"].size
        self.done.append(method)
        if self.is_refused(method, given):
            self.done.append("refused")
            with pytest.raises(ValueError, match="expected"):
                self.call(method, given)
            return
        self.state, drawn = self.call(method, given)
        items = None if self.model.writer.is_chronological else self.items()
        numbers = items and items["number"]
        programs.follow(self.model, method, given, (jax.device_get(drawn), numbers))

    def call(self, method, given):
        return programs.branches(self.buffer)[method](self.state, given)

    def is_refused(self, method, given):
        """Returns True if there is nothing to draw, or no room to write."""
        if method == "draw":
            return not self.model.sampler.ready(self.model.anchors)
        rows = given["mask"][: {"extend": T, "add": 1}.get(method, 0)]
        return int(rows.any(axis=tuple(range(1, rows.ndim))).sum()) > self.model.room()

    def save(self, path):
        self.done.append("save, load")
        jrb.save(path, self.buffer, self.state)
        found, self.state = jrb.load(path)
        assert found == self.buffer
        assert jrb.checkpoint.verify(path) == []

    def rebuild(self, buffer, rule):
        """Continues as another description, or asserts that the rebuild is refused."""
        self.done.append(f"rebuild {buffer}")
        if self.model.is_refused(buffer):
            with pytest.raises(ValueError, match="num_envs"):
                jrb.rebuild(self.buffer, self.state, buffer)
            return
        self.state = jrb.rebuild(self.buffer, self.state, buffer)
        self.model.rebuild(buffer, rule)
        self.buffer = buffer

    def items(self):
        """Returns the items of all slots; an empty slot repeats the first item in order."""
        slots, count = self.buffer.in_order(self.state)
        slots = np.asarray(slots)[: int(count)]
        if not len(slots):
            return None
        found = self.buffer.take(self.state, jnp.asarray(slots))
        if self.buffer.storage.of_objects:
            found = jax.tree.map(lambda *leaves: np.array(leaves), *found)
        place = np.zeros(self.buffer.capacity, int)
        place[slots] = np.arange(len(slots))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[place], found)

    def check(self):
        self.done.append("compare")
        ready = self.model.sampler.ready(self.model.anchors)
        assert ready == bool(self.buffer.can_sample(self.state))
        found = programs.seen(self.buffer, self.state, self.items(), MANY if ready else None)
        programs.check(self.model, jax.device_get(found))
