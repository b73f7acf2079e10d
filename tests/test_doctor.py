"""The doctor reports each copy of a buffer with its line, and nothing if there is no copy."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jrb
from jrb.testing import doctor
from tests.cli.paths import call

N, B, AGENTS = 20_000, 32, 4
AFTER = {"observation": jnp.zeros(16), "reward": jnp.float32(0), "done": jnp.bool_(False)}
ITEM = {"observation": jnp.zeros(16), "action": jnp.int32(0), "next": AFTER}
PLAIN = jrb.ReplayBuffer(N, batch_size=B)
LATER = jrb.ReplayBuffer(N, batch_size=B, sampler=jrb.Prioritized(), unit=jrb.NStep(3, 0.99))
KEY = jax.random.key(0)


def used(batch):
    return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(batch.data))


def stacked(buffer):
    return jax.vmap(lambda _: buffer.init(ITEM))(jnp.arange(AGENTS))


def sample_then_add(state, item, key):
    batch = PLAIN.sample(state, key)  # read
    return PLAIN.add(state, item), used(batch)


@functools.partial(jax.jit, donate_argnums=0)
def compiled_before(state, item, key):
    batch = PLAIN.sample(state, key)  # read
    return PLAIN.add(state, item), used(batch)


@jax.jit
def not_donated(state, item):
    return PLAIN.add(state, item)


def cond_under_vmap(states, go):
    choose = lambda state, go: lax.cond(go, lambda s: PLAIN.add(s, ITEM), lambda s: s, state)  # if
    return jax.vmap(choose)(states, go)


def indexed(states, item):
    state = jax.tree.map(lambda leaf: leaf[0], states)  # index
    return PLAIN.add(state, item)


def closed_over():
    state = PLAIN.init(ITEM)

    @jax.jit
    def step(item):
        return PLAIN.add(state, item)  # closure

    return step


def unordered_in_a_loop(state, keys):
    def body(state, key):
        batch = LATER.sample(state, key)  # read
        return LATER.add(state, ITEM), used(batch)

    return lax.scan(body, state, keys)


COPIES = {
    "a sample before a write": (
        lambda: (sample_then_add, PLAIN.init(ITEM), ITEM, KEY), "state.storage", "# read", "draw",
    ),
    "a sample before a write, compiled": (
        lambda: (compiled_before, PLAIN.init(ITEM), ITEM, KEY), "state.storage", "# read", "draw",
    ),
    "no donation": (
        lambda: (not_donated, PLAIN.init(ITEM), ITEM),
        "state: is not donated", "", "donate_argnames",
    ),
    "cond under vmap": (
        lambda: (cond_under_vmap, stacked(PLAIN), jnp.arange(AGENTS) > 1),
        "states.storage", "# if", "mask=",
    ),
    "an index": (
        lambda: (indexed, stacked(PLAIN), ITEM), "states.storage", "# index", "Do not index",
    ),
    "a closure": (lambda: (closed_over(), ITEM), "a constant", "# closure", "as an argument"),
    "a sample before a write in a loop": (
        lambda: (unordered_in_a_loop, LATER.init(ITEM), jax.random.split(KEY, 3)),
        "state", "# read", "draw",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", COPIES)
def test_copies_are_found_with_their_argument_and_line(case):
    make, problem, line, mend = COPIES[case]
    step, *arguments = make()
    report = doctor(step, *arguments)
    assert len(report.findings) == 1, str(report)
    (finding,) = report.findings
    assert problem in finding.problem
    assert mend in finding.mend
    path, number = finding.where.rsplit(":", 1)
    assert path == __file__
    source, first = inspect.getsourcelines(inspect.unwrap(step))
    assert line in source[int(number) - first]
    assert finding.problem in str(report)


def fresh_step(state, item, key):
    state = LATER.add(state, item)
    batch = LATER.sample(state, key)
    return LATER.update_priority(state, batch, jnp.abs(batch.data["next"]["reward"])), used(batch)


@functools.partial(jax.jit, donate_argnames="carry")
def draw_then_add(carry, item, key):
    state, params = carry
    state, batch = LATER.draw(state, key)
    return (LATER.add(state, item), params + used(batch)), params


def loop(state, keys):
    def body(state, key):
        state, batch = PLAIN.draw(state, key)
        return PLAIN.add(state, ITEM), used(batch)

    return lax.scan(body, state, keys)


def cond(state, go):
    return lax.cond(go, lambda s: LATER.add(s, ITEM), lambda s: s, state)


def read_only(state, key):
    return used(PLAIN.sample(state, key))


IN_PLACE = {
    "add, sample, update": lambda: (fresh_step, LATER.init(ITEM), ITEM, KEY),
    "draw, add, in a carry": lambda: (
        draw_then_add, (LATER.init(ITEM), jnp.float32(0)), ITEM, KEY
    ),
    "agents": lambda: (
        jax.vmap(fresh_step, in_axes=(0, None, 0)),
        stacked(LATER), ITEM, jax.random.split(KEY, AGENTS),
    ),
    "a loop": lambda: (loop, PLAIN.init(ITEM), jax.random.split(KEY, 5)),
    "cond": lambda: (cond, LATER.init(ITEM), jnp.bool_(True)),
    "a sample alone": lambda: (read_only, PLAIN.init(ITEM), KEY),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_PLACE)
def test_nothing_is_found_where_nothing_is_copied(case):
    step, *arguments = IN_PLACE[case]()
    before = jax.tree.map(jnp.copy, arguments)
    report = doctor(step, *arguments)
    assert report.findings == ()
    assert report.traces == 1
    assert report.seconds > 0
    assert "Nothing is wrong." in str(report)
    jax.tree.map(lambda a, b: bool((a == b).all()) or pytest.fail("changed"), arguments, before)


def test_methods_and_traces_are_counted():
    report = doctor(fresh_step, LATER.init(ITEM), ITEM, KEY)
    assert [(method, count) for method, count, _ in report.parts] == [
        ("add", 1), ("sample", 1), ("update_priority", 1)
    ]  # fmt: skip

    def grows(state, total):
        return PLAIN.add(state, ITEM), jnp.concatenate([total, total])

    twice = doctor(lambda carry: grows(*carry), (PLAIN.init(ITEM), jnp.ones(1)))
    assert twice.traces == 1  # the shapes grow, so each call gets the original arguments

    def promotes(state, count):
        return PLAIN.add(state, ITEM), count.astype(jnp.int32) + 1

    assert doctor(lambda carry: promotes(*carry), (PLAIN.init(ITEM), jnp.int8(0))).traces == 2


def test_the_command(capsys, tmp_path, monkeypatch):
    (tmp_path / "steps.py").write_text(
        "import jax, jax.numpy as jnp, jrb\n"
        "buffer = jrb.ReplayBuffer(20_000, batch_size=8)\n"
        "item = {'x': jnp.zeros(8)}\n"
        "def bad(state, key):\n"
        "    batch = buffer.sample(state, key)\n"
        "    return buffer.add(state, item), batch.data['x'].sum()\n"
        "def good(state, key):\n"
        "    state, batch = buffer.draw(state, key)\n"
        "    return buffer.add(state, item), batch.data['x'].sum()\n"
        "case = lambda: (bad, buffer.init(item), jax.random.key(0))\n"
        "fine = lambda: (good, buffer.init(item), jax.random.key(0))\n"
        "nothing = 3\n"
        "step_alone = lambda: good\n"
        "in_a_list = lambda: [good, buffer.init(item)]\n"
    )
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, "doctor", "steps:case")
    assert (status, err) == (1, "")
    assert "steps.py:5" in out
    status, out, err = call(capsys, "doctor", "steps:fine")
    assert (status, err) == (0, "")
    assert "Nothing is wrong." in out
    for target, text in {
        "steps": "expected MODULE:FUNCTION",
        "absent:case": "expected a module",
        "steps:absent": "expected a function",
        "steps:nothing": "expected a function",
        "steps:step_alone": "return step, arg1, arg2",
        "steps:in_a_list": "return step, arg1, arg2",
    }.items():
        status, out, err = call(capsys, "doctor", target)
        assert (status, out) == (2, "")
        assert text in err
        assert err.count("\n") == 1
