"""Random programs of methods: their arguments, and how a buffer and its model run them."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

import jrb
from jrb.authoring import context_of
from tests.methods import samplers

T, STEPS, MANY = 2, 14, 256
AFTER = {"observation": jnp.int32(0), "reward": jnp.float32(0), "done": False}
EXAMPLE = {"observation": jnp.int32(0), "number": jnp.int32(0), "key": jnp.int32(0), "next": AFTER}
CHANCES = {
    "extend": 0.2,
    "add": 0.2,
    "draw": 0.16,
    "set": 0.1,
    "set_rest": 0.06,
    "truncate": 0.07,
    "drop": 0.07,
    "update": 0.1,
    "empty": 0.04,
}
"""The probability of each method."""


def methods_of(buffer):
    """Returns the names of the methods that a buffer supports."""
    left_out = () if buffer.sampler.prioritized else ("drop", "update")
    if not buffer.writer.writes:
        left_out += ("extend", "add", "set", "set_rest", "empty")
    if buffer.storage.of_objects:
        left_out += ("set_rest",)
    if buffer.sampler.reads_written and isinstance(buffer.writer, jrb.Reservoir):
        left_out += ("extend",)  # which of its rows were stored for a while, nobody knows
    return [method for method in CHANCES if method not in left_out]


def methods(rng, names, *lead):
    """Draws methods, as indices into `names`, int32 `[*lead]`."""
    chances = np.array([CHANCES[method] for method in names])
    return rng.choice(len(chances), lead, p=chances / chances.sum()).astype(np.int32)


def arguments(rng, buffer, *lead):
    """Draws the arguments of methods, `[*lead, ...]`."""
    wide = (*lead, T, buffer.ring.envs)
    priorities = rng.random(wide).astype(np.float32) * 4
    odd = rng.random(wide)
    priorities[odd < 0.1] = np.nan
    priorities[odd > 0.95] = -1
    rewards = rng.integers(0, 5, wide).astype(np.float32)
    ranked = isinstance(buffer.writer, jrb.MaxValue)
    rewards[rng.random(wide) < 0.1 * ranked] = np.nan
    number = np.arange(np.prod(wide[1:] if lead else wide), dtype=np.int32)
    return {
        "number": np.broadcast_to(number.reshape(wide[1:] if lead else wide), wide).copy(),
        "key": rng.integers(0, 5, wide, dtype=np.int32),
        "x": rng.integers(0, 3, wide, dtype=np.int32),  # few values, often equal to the next row's
        "after": rng.integers(0, 3, wide, dtype=np.int32),
        "reward": rewards,
        "done": rng.random(wide) < 0.25,
        "mask": rng.random(wide if buffer.writer.per_env else wide[:-1]) < 0.7,
        "flags": rng.random((*lead, buffer.ring.envs)) < 0.5,
        "priorities": priorities,
        "slots": rng.integers(0, buffer.capacity, (*lead, 2), dtype=np.int32),
        "seed": rng.integers(0, 2**31, lead, dtype=np.int32),
    }


# Programs on a buffer.


def rows(given):
    """Returns items `[T, E]`."""
    after = {"observation": given["after"], "reward": given["reward"], "done": given["done"]}
    first = {"observation": given["x"], "number": given["number"], "key": given["key"]}
    return first | {"next": after}


def edits(given, flags):
    """Returns new values for some leaves of two items."""
    after = {"observation": given["after"][:, 0]} | ({"done": given["done"][:, 0]} if flags else {})
    return {"observation": given["x"][:, 0], "next": after}


def objects(items):
    """Converts items `[...]` to nested lists of objects."""
    leaf = jax.tree.leaves(items)[0]
    if not np.ndim(leaf):
        return jax.tree.map(lambda leaf: leaf.item(), items)
    return [objects(jax.tree.map(operator.itemgetter(at), items)) for at in range(len(leaf))]


def drawn(found):
    """Returns the state, and the slots, mask and draw counts of a sample."""
    state, sample = found
    draws = sample.info.get("draws", jnp.zeros_like(sample.indices))
    parts = sample.indices, sample.weights > 0, draws
    return state, tuple(part.reshape(-1) for part in parts)


def branches(buffer):
    """Returns a function per method, from a state and arguments to a state and a draw."""
    shelved = buffer.storage.of_objects
    kept = objects if shelved else lambda items: items
    at = lambda items, where: kept(jax.tree.map(lambda leaf: leaf[where], items))

    def extend(state, given):
        own = (
            {"priorities": given["priorities"]}
            if buffer.sampler.prioritized and buffer.sampler.takes_priorities
            else {}
        )
        return buffer.extend(state, kept(rows(given)), given["mask"], **own)

    def edit(state, given, flags):
        values = at(rows(given), np.s_[:, 0]) if shelved else edits(given, flags)
        return buffer.set(state, given["slots"], values)

    none = np.zeros(buffer.batch_size * buffer.unit.anchors_per_entry, np.int32)
    silent = lambda method: lambda s, g: (method(s, g), (none, none < 0, none))
    return {
        "extend": silent(extend),
        "add": silent(lambda s, g: buffer.add(s, at(rows(g), 0), g["mask"][0])),
        "draw": lambda s, g: drawn(buffer.draw(s, jax.random.key(g["seed"]))),
        "set": silent(lambda s, g: edit(s, g, True)),
        "set_rest": silent(lambda s, g: edit(s, g, False)),
        "truncate": silent(lambda s, g: buffer.truncate(s, g["flags"])),
        "drop": silent(lambda s, g: buffer.drop(s, g["slots"][:1])),
        "update": silent(lambda s, g: buffer.update_priority(s, g["slots"], g["priorities"][:, 0])),
        "empty": silent(lambda s, g: buffer.empty(s)),
    }


def step(buffer, names):
    """Returns one step of a program: to a state, and the draw and item numbers for the model."""
    known = branches(buffer)
    calls = [known[method] for method in names]

    def run(state, given):
        state, drawn = jax.lax.switch(given["method"], calls, state, given)
        return state, (drawn, items(buffer, state)["number"])

    return run


def items(buffer, state):
    """Returns the items of all slots; `take` would raise for empty slots."""
    place = jnp.arange(buffer.capacity, dtype=jnp.int32)
    return buffer.storage.read(context_of(buffer, state.writer), state.storage, lambda name: place)


def seen(buffer, state, items, many=MANY):
    """Returns the contents of a state by slot, and a batch of `many` draws (none if 0)."""
    slots = jnp.arange(buffer.capacity, dtype=jnp.int32)
    order, count = buffer.in_order(state)
    sample = buffer.sample(state, jax.random.key(0), many) if many else None
    found = {
        "items": items,
        "order": order,
        "count": count,
        "before": buffer.unit.episode_step(state.unit, slots),
        "drawn": drawn((None, sample))[1] if many else None,
    }
    if buffer.sampler.count_draws:
        found["draws"] = state.sampler.draws
    if buffer.sampler.prioritized:
        found["raw"] = buffer.priorities(state)
        found["highest"], found["refused"] = state.sampler.highest, state.sampler.refused
    return found


# Programs on a model.


def follow(model, method, given, told):
    """Runs a method on the model; `told` holds the draw and the item number of each slot."""
    drawn, numbers = told
    given = {**given, "told": numbers}
    if method == "extend":
        model.write(given, T)
    elif method == "add":
        model.write({name: leaf for name, leaf in given.items() if name != "priorities"}, 1)
    elif method == "draw":
        model.draw(*(leaf.tolist() for leaf in drawn))
    elif method in ("set", "set_rest"):
        names = ["x", "after"] + ["done"] * (method == "set")
        names += ["number", "key", "reward"] * model.buffer.storage.of_objects
        values = {name: given[name][:, 0] for name in names}
        model.set(given["slots"], values, method == "set")
    elif method == "truncate":
        model.truncate(given["flags"])
    elif method == "empty":
        model.empty()
    elif method == "drop":
        model.drop(given["slots"][0])
    elif method == "update":
        model.update(given["slots"], given["priorities"][:, 0])


def check(model, found):
    """Asserts that a state holds the contents of the model."""
    held, anchors = model.writer.held(), set(model.anchors)
    order = found["order"][: int(found["count"])].tolist()
    assert order == model.writer.in_order()
    items = found["items"]
    after = items and items["next"]
    for slot, row in held.items():
        got = {"number": items["number"], "x": items["observation"], "after": after["observation"]}
        got |= {"key": items["key"], "reward": after["reward"], "done": after["done"]}
        assert {name: leaf[slot] for name, leaf in got.items()} == row.items
        if found["before"] is not None:
            assert (found["before"][slot] <= 0) == (row.position == 0)
        assert "draws" not in found or found["draws"][slot] == row.draws
    if "raw" in found:
        want = {row.slot: row.priority for row in anchors}
        raw = [np.float32(want.get(slot, -1)) for slot in range(len(found["raw"]))]
        assert found["raw"].tolist() == raw
        assert found["highest"] == model.sampler.highest
        assert found["refused"] == model.sampler.refused
    if found["drawn"] is None:
        return
    slots, real, _ = (leaf.tolist() for leaf in found["drawn"])
    if model.unit.anchors_per_entry > 1:
        model.sampler.draw_some(model.anchors, samplers.drawn(slots, real))
    else:
        model.sampler.at_end(model.anchors, slots, real)
