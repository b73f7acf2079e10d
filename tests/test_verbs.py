"""Random programs of verbs against plain Python: what is held, what is drawn, how likely.

Hundreds of programs of a description run side by side, as one compiled program. Again and again, by
chance, all of them are saved and loaded, and some are rebuilt, in either order.
"""

import math
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb._engine.steps import context_of

pytestmark = pytest.mark.slow

E, R, T, STEPS, PROGRAMS = 2, 5, 2, 14, 800
PAUSE = 2
"""After how many steps programs may be saved or rebuilt."""
REBUILT = 16
"""How many programs are rebuilt at a time."""
N = R * E
EXAMPLE = {"observation": jnp.int32(0), "next": {"observation": jnp.int32(0), "done": False}}
EXAMPLE["next"]["reward"] = jnp.float32(0)
VERBS = ["extend", "add", "set_done", "set_rest", "drop", "truncate", "update", "empty"]
CHANCES = [0.25, 0.25, 0.12, 0.12, 0.06, 0.06, 0.11, 0.03]

UNITS = {
    "transition": (jrb.Transition(), lambda row: True),
    "n-step": (jrb.NStep(3, 0.9), lambda row: True),
    "strict n-step": (jrb.NStep(3, 0.9, strict=True), lambda row: row.ahead >= 3 or row.ended),
    "windows": (jrb.Sequence(3), lambda row: row.ahead >= 3),
    "windows of a period": (
        jrb.Sequence(2, period=2),
        lambda row: row.ahead >= 2 and row.position % 2 == 0,
    ),
    "padded windows of a period": (
        jrb.Sequence(2, period=3, short="pad"),
        lambda row: row.position % 3 == 0,
    ),
    "windows across": (
        jrb.Sequence(2, across=True, period=2),
        lambda row: row.following >= 2 and row.position % 2 == 0,
    ),
    "whole episodes": (
        jrb.Sequence(3, over="whole"),
        lambda row: row.position == 0 and row.ended,
    ),
    "stacks": (jrb.FrameStack(3), lambda row: row.whole),
    "stacked windows": (
        jrb.FrameStack(2, unit=jrb.Sequence(2, period=3)),
        lambda row: row.whole and row.ahead >= 2 and row.position % 3 == 0,
    ),
}


class Model:
    """The same in plain Python: for each environment all rows that ever were, oldest first."""

    def __init__(self, unit, is_anchor):
        self.is_anchor, self.waits, self.k = is_anchor, unit.waits, getattr(unit, "k", 1)
        self.rows, self.first, self.time, self.cursor = [[], []], 0, 0, 0
        self.highest, self.refused = np.float32(1), 0

    def held(self):
        return [row for rows in self.rows for row in rows[max(self.first, self.time - R) :]]

    def at(self, slot):
        return next((row for row in self.held() if row["slot"] == slot), None)

    def write(self, items, priorities):
        """One row of time."""
        for env in range(E):
            given = None if priorities is None else priorities[env]
            row = {"slot": self.cursor * E + env, "cut": False, "priority": None, "given": given}
            self.rows[env].append({**row, **{name: leaf[env] for name, leaf in items.items()}})
        self.time, self.cursor = self.time + 1, (self.cursor + 1) % R
        best = self.highest
        for given in [] if priorities is None else priorities:
            if math.isfinite(given) and given >= 0:
                best = max(best, given)
            else:
                self.refused += 1
        self.learn()
        self.highest = best
        for row in [] if self.waits else self.held():
            row["given"] = None  # for the anchor that it was at once

    def rebuilt(self):
        """The oldest row lies at the beginning of a new ring."""
        oldest = max(self.first, self.time - R)
        for env, rows in enumerate(self.rows):
            for number, row in enumerate(rows[oldest:]):
                row["slot"] = number * E + env
        self.cursor = (self.time - oldest) % R

    def learn(self):
        """Anchors come and go."""
        anchors = {id(row) for row in self.anchors()}
        for row in [row for rows in self.rows for row in rows]:
            if id(row) not in anchors:
                row["priority"] = None
            elif row["priority"] is None:
                given = row["given"]
                good = given is not None and math.isfinite(given) and given >= 0
                row["priority"], row["given"] = given if good else self.highest, None

    def anchors(self):
        found = []
        for rows in self.rows:
            oldest = max(self.first, self.time - R)
            for number in range(oldest, len(rows)):
                stop = number
                while stop < len(rows) - 1 and not self.ends(rows[stop]):
                    stop += 1
                begin = number
                while begin > self.first and not self.ends(rows[begin - 1]):
                    begin -= 1
                facts = types.SimpleNamespace(
                    ahead=stop - number + 1,
                    following=len(rows) - number,
                    ended=self.ends(rows[stop]),
                    whole=max(begin, number - self.k + 1) >= oldest,
                    position=number - begin,
                )
                rows[number]["position"] = number - begin
                if self.is_anchor(facts):
                    found.append(rows[number])
        return found

    @staticmethod
    def ends(row):
        return row["done"] or row["cut"]

    def run(self, verb, given):
        """One step of a program."""
        if verb in ("extend", "add"):
            for t in range(T if verb == "extend" else 1):
                if given["mask"][t] or verb == "add":
                    items = {name: given[name][t] for name in ("x", "after", "done")}
                    self.write(items, given["priorities"][t] if verb == "extend" else None)
        elif verb in ("set_done", "set_rest"):
            for b in range(2):
                row = self.at(given["slots"][b])
                if row is not None and verb == "set_done":
                    row["new"] = given["done"][b, 0]
                elif row is not None:
                    row["x"], row["after"] = given["x"][b, 0], given["after"][b, 0]
            for row in self.held() if verb == "set_done" else []:
                row["cut"] &= not row["done"]  # a flag that goes takes the cut along
                row["done"] = row.pop("new", row["done"])
            self.learn()
        elif verb == "drop":
            row = self.at(given["slots"][0])
            if row is not None and row["priority"] is not None:
                row["priority"] = -2
        elif verb == "truncate":
            for env in range(E):
                if given["mask"][env] and self.time > self.first:
                    self.rows[env][-1]["cut"] |= not self.rows[env][-1]["done"]
            self.learn()
        elif verb == "update":
            kept = {}
            for slot, priority in zip(given["slots"], given["priorities"][:, 0], strict=True):
                row = self.at(slot)
                if row is None or row["priority"] is None or row["priority"] < 0:
                    continue
                if math.isfinite(priority) and priority >= 0:
                    kept[slot] = row["priority"] = priority
                else:
                    self.refused += 1
            self.highest = max([self.highest, *kept.values()])
        elif verb == "empty":
            self.first, self.cursor = self.time, 0
            self.highest, self.refused = np.float32(1), 0


def programs(rng, count):
    """Verbs, and what each is given."""
    shape = (count, STEPS)
    priorities = rng.random((*shape, T, E)).astype(np.float32) * 4
    odd = rng.random(priorities.shape)
    priorities[odd < 0.1] = np.nan
    priorities[odd > 0.95] = -1
    chain = rng.integers(0, 3, (*shape, T, E), dtype=np.int32)  # few numbers, often the next one's
    return {
        "verb": rng.choice(len(VERBS), shape, p=CHANCES).astype(np.int32),
        "x": chain,
        "after": rng.integers(0, 3, (*shape, T, E), dtype=np.int32),
        "done": rng.random((*shape, T, E)) < 0.25,
        "mask": rng.random((*shape, T)) < 0.7,
        "priorities": priorities,
        "slots": rng.integers(0, N, (*shape, 2), dtype=np.int32),
    }


def branches(buffer):
    """What each verb of a program does."""

    def rows(given):
        shape = given["x"].shape
        after = {"observation": given["after"], "done": given["done"]}
        after["reward"] = jnp.ones(shape, jnp.float32)
        return {"observation": given["x"], "next": after}

    def first(tree):
        return jax.tree.map(lambda leaf: leaf[0], tree)

    def rest(given):
        return {"observation": given["x"][:, 0], "next": {"observation": given["after"][:, 0]}}

    return {
        "extend": lambda s, g: buffer.extend(s, rows(g), g["mask"], g["priorities"]),
        "add": lambda s, g: buffer.add(s, first(rows(g))),
        "set_done": lambda s, g: buffer.set(s, g["slots"], {"next": {"done": g["done"][:, 0]}}),
        "set_rest": lambda s, g: buffer.set(s, g["slots"], rest(g)),
        "drop": lambda s, g: buffer.drop(s, g["slots"][:1]),
        "truncate": lambda s, g: buffer.truncate(s, g["mask"]),
        "update": lambda s, g: buffer.update_priority(s, g["slots"], g["priorities"][:, 0]),
        "empty": lambda s, g: buffer.empty(s),
    }


def step(buffer):
    """One step of a program, compiled."""
    known = branches(buffer)
    calls = [known[verb] for verb in VERBS]
    return lambda state, given: (jax.lax.switch(given["verb"], calls, state, given), None)


def seen(buffer, state):
    """What a state holds, slot by slot."""
    slots, count = buffer.in_order(state)
    items = buffer.storage.read(  # `take` would raise where nothing is held
        context_of(buffer, state.writer), state.storage, lambda name: jnp.arange(N, dtype=jnp.int32)
    )
    place = jnp.zeros(N, bool).at[slots].set(jnp.arange(N) < count)
    raw, known = buffer.priorities(state), state.sampler
    before = buffer.unit.rows_before(state.unit, jnp.arange(N, dtype=jnp.int32))
    return items, place, raw, known.highest, known.refused, before


@pytest.mark.parametrize(
    ("name", "once"),
    [
        *((name, False) for name in UNITS),
        ("transition", True),
        ("strict n-step", True),
        ("stacks", True),
    ],
)
def test_programs_of_verbs_do_what_plain_python_does(name, once, tmp_path):
    unit, is_anchor = UNITS[name]
    storage = jrb.DeviceStorage(once=once, room=N if once else None)
    buffer = jrb.ReplayBuffer(
        N, E, batch_size=4, unit=unit, sampler=jrb.Prioritized(), storage=storage
    )
    rng = np.random.default_rng(len(name) + once)
    given, events = programs(rng, PROGRAMS), [at_a_pause(rng) for _ in range(STEPS // PAUSE)]
    some = jax.jit(jax.vmap(lambda state, given: jax.lax.scan(step(buffer), state, given)[0]))
    states = jax.vmap(lambda _: buffer.init(EXAMPLE))(jnp.arange(PROGRAMS))
    for number, event in enumerate(events):
        now = slice(PAUSE * number, PAUSE * (number + 1))
        states = some(states, {name: leaf[:, now] for name, leaf in given.items()})
        for what, chosen in event:
            states = paused(buffer, states, what, chosen, tmp_path)
    told_of = jax.device_get(jax.jit(jax.vmap(lambda state: seen(buffer, state)))(states))
    for program in range(PROGRAMS):
        model, told = Model(unit, is_anchor), [program]
        for number in range(STEPS):
            one = {name: leaf[program, number] for name, leaf in given.items()}
            told.append(VERBS[one["verb"]])
            model.run(told[-1], one)
            for what, chosen in events[number // PAUSE] if (number + 1) % PAUSE == 0 else []:
                if what == "rebuild" and program in chosen:
                    model.rebuilt()
                    told.append(what)
        check(model, jax.tree.map(operator.itemgetter(program), told_of), told)


def at_a_pause(rng):
    """What happens then, in which order, and to which programs."""
    found = [("save", None)] * int(rng.random() < 0.5)
    if rng.random() < 0.7:
        chosen = rng.choice(PROGRAMS, min(REBUILT, PROGRAMS), replace=False)
        found.insert(rng.integers(len(found) + 1), ("rebuild", chosen))
    return found


def paused(buffer, states, what, chosen, path):
    """All states from a checkpoint, or some of them in a ring of their own."""
    if what == "save":
        jrb.save(path, buffer, states)
        found, states = jrb.load(path)
        assert found == buffer
        return states
    host = jax.tree.map(np.array, states)
    for number in chosen:
        one = jax.tree.map(lambda leaf: jnp.asarray(leaf[number]), host)  # noqa: B023
        new = jax.device_get(jrb.rebuild(buffer, one, buffer))
        jax.tree.map(lambda leaf, told: operator.setitem(leaf, number, told), host, new)  # noqa: B023
    return jax.tree.map(jnp.asarray, host)


def check(model, found, told):
    """What a state holds is what the model holds."""
    items, place, raw, highest, refused, before = found
    held = {row["slot"]: row for row in model.held()}
    assert set(np.flatnonzero(place)) == set(held), told
    for slot, row in held.items():
        assert items["observation"][slot] == row["x"], (told, slot)
        assert items["next"]["observation"][slot] == row["after"], (told, slot)
        assert items["next"]["done"][slot] == row["done"], (told, slot)
        want = -1 if row["priority"] is None else row["priority"]
        assert raw[slot] == np.float32(want), (told, slot)
        assert before is None or (before[slot] == 0) == (row["position"] == 0), (told, slot)
    assert all(raw[slot] == -1 for slot in range(N) if slot not in held), told
    assert highest == model.highest, told
    assert refused == model.refused, told


SEVERAL = 4
STORAGES = [
    lambda: jrb.DeviceStorage(),
    lambda: jrb.MemmapStorage(None),
    lambda: jrb.SpillStorage(None, 2 * E),
    lambda: jrb.DeviceStorage(once=True, room=N),
]


@pytest.mark.parametrize("name", ["transition", "strict n-step", "stacks"])
def test_programs_go_on_in_another_storage_and_after_a_save(name, tmp_path):
    unit, is_anchor = UNITS[name]
    given = programs(np.random.default_rng(1), SEVERAL)
    rng = np.random.default_rng(2)
    for program in range(SEVERAL):
        make = lambda number: jrb.ReplayBuffer(
            N, E, batch_size=4, unit=unit, sampler=jrb.Prioritized(), storage=STORAGES[number]()
        )
        buffer, model = make(program % 4), Model(unit, is_anchor)
        state, told = buffer.init(EXAMPLE), [program]
        for number in range(STEPS):
            one = {name: leaf[program, number] for name, leaf in given.items()}
            verb = VERBS[one["verb"]]
            told.append(verb)
            model.run(verb, one)
            state = branches(buffer)[verb](state, jax.tree.map(jnp.asarray, one))
            chance = rng.random()
            if chance < 0.15:
                told.append("save, load")
                jrb.save(tmp_path / str(program), buffer, state)
                buffer, state = jrb.load(tmp_path / str(program))
            elif chance < 0.3:
                told.append("rebuild")
                old, buffer = buffer, make(rng.integers(4))
                state = jrb.rebuild(old, state, buffer)
                model.rebuilt()
        assert (
            jrb.checkpoint.verify(tmp_path / str(program)) == [] if "save, load" in told else True
        )
        check(model, jax.device_get(seen(buffer, state)), told)
