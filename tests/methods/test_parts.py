"""Random programs that continue in buffers of other parts.

Programs run one at a time, method by method outside `jit`. From time to time a program is saved and
loaded, or rebuilt as another description, with which it continues.
"""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.methods import programs
from tests.methods.model import Model
from tests.methods.programs import EXAMPLE, MANY, STEPS, T
from tests.methods.units import RULES
from tests.samplers import weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::jrb.PriorityWarning")]

E, ROWS, PROGRAMS, TOGETHER = 2, 4, 30, 6
"""Environments, rows of a ring, programs, and descriptions among which they move."""
HELD = jrb.Prioritized(new_priority="largest_held")
HELD_ONES = [HELD, dataclasses.replace(HELD, max_draws=1)]
COUNTED = jrb.Prioritized(count_draws=True)
IN_ORDER = jrb.WithoutReplacement(shuffle=False, count_draws=True)
EVERY = jrb.Weighted(weights.every, leaves=(("next", "reward"),))
ALIKE = jrb.Weighted(weights.alike)
DISTINCT = jrb.Uniform(replacement=False)
STORAGES = [
    jrb.DeviceStorage(),
    jrb.DeviceStorage(share_next_observations=True, terminal_capacity=E * ROWS),
    jrb.MemmapStorage(),
    jrb.MemmapStorage(share_next_observations=True),
    jrb.SpillStorage(None, 2 * E),
    jrb.SpillStorage(None, 2 * E, share_next_observations=True),
    jrb.CompressedStorage(min_bytes=1),
]
WRITERS = [
    jrb.RoundRobin(),
    jrb.PerEnvironment(),
    jrb.BlockWhenFull(),
    jrb.ReadOnly(),
    jrb.MaxValue(("next", "reward")),
    jrb.Reservoir(0),
]
SAMPLERS = {
    "unlimited": [
        HELD,
        jrb.Queue(),
        COUNTED,
        jrb.Newest(count=2),
        DISTINCT,
        jrb.Queue(stride=2),
        jrb.Lifo(),
        jrb.Uniform(),
    ],
    "weighted": [EVERY, dataclasses.replace(EVERY, count_draws=True)],
    "groups": [
        jrb.Grouped("key", 3, 2),
        jrb.Grouped("key", 2, 2, partial="drop"),
        jrb.Grouped("key", 3, 2, DISTINCT, count_draws=True),
        jrb.Grouped("key", 9, 1, jrb.Newest(count=2)),
        jrb.Grouped("key", 4, 2, ALIKE),
        jrb.Grouped("key", 4, 2, dataclasses.replace(ALIKE, leaves=("number",)), "drop"),
    ],
    "limited": [
        jrb.Prioritized(max_draws=2),
        jrb.Uniform(max_draws=1),
        jrb.Uniform(False, max_draws=2),
        jrb.Newest(count=2, max_draws=2),
        dataclasses.replace(EVERY, max_draws=2),
        HELD_ONES[1],
    ],
}
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


def all_descriptions():
    """Returns every unit, writer and storage that a kind of samplers accepts, in a random order.

    Of the samplers of a kind that accept them, each is taken in turn. Which items a reservoir has
    in the middle of a call is unknown, and with it the largest priority that is held.
    """
    known, turn = [], itertools.count()
    for samplers, unit, writer, storage in itertools.product(
        SAMPLERS.values(), RULES, WRITERS, STORAGES
    ):
        accepted = []
        for sampler in samplers:
            if isinstance(writer, jrb.Reservoir) and sampler in HELD_ONES:
                continue
            with contextlib.suppress(ValueError):
                accepted.append(described(unit, sampler, writer, storage))
        known += [accepted[next(turn) % len(accepted)]] if accepted else []
    return [known[at] for at in np.random.default_rng(0).permutation(len(known))]


def test_programs_go_on_in_other_parts(tmp_path):
    run_programs(all_descriptions()[:TOGETHER], 0, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("part", range(16))
def test_programs_go_on_in_all_parts(part, tmp_path):
    known = all_descriptions()[part::16]
    for start in range(0, len(known), TOGETHER):
        run_programs(known[start : start + TOGETHER], start, tmp_path / str(start))


def test_programs_of_objects_go_on_in_other_parts(tmp_path):
    run_programs([described(*each) for each in OBJECTS], 1, tmp_path)


def run_programs(known, seed, path):
    """Runs programs that begin in each of some descriptions, and go on in others of them."""
    rng = np.random.default_rng(seed)
    for number in range(PROGRAMS):
        buffer, rule = known[number % len(known)]
        program = Program(buffer, rule, rng)
        try:
            for _ in range(STEPS):
                program.step()
                chance = rng.random()
                if chance < 0.04:
                    program.save(path / str(number))
                elif chance < 0.2:
                    program.rebuild(*known[rng.integers(len(known))])
            program.check()
        except BaseException as wrong:
            wrong.add_note(f"in program {number} of seed {seed}, {buffer}: {program.done}")
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
        # A checkpoint stores no functions.
        chooser = getattr(self.buffer.sampler, "sampler", self.buffer.sampler)  # of groups, or all
        holds_code = isinstance(self.buffer.unit, jrb.Hindsight)
        holds_code |= isinstance(chooser, jrb.Weighted)
        found, self.state = jrb.load(path, buffer=self.buffer if holds_code else None)
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
