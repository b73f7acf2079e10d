"""Draws from several servers are draws from one buffer."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jrb
from jrb.remote import client, gate, serve
from jrb.remote import draws as drawing
from jrb.remote import setup as setups
from jrb.remote.draws import ShardFacts
from jrb.remote.server import Server
from jrb.remote.setup import Setup
from jrb.types.messages import DrawInputs
from tests.remote.rows import EXAMPLE, buffer, rows

GIVEN = {0: np.arange(1.0, 9), 1: np.full(5, 0.5), 2: np.arange(3.0, 15)}
TOTAL, COUNT = sum(map(np.sum, GIVEN.values())), sum(map(len, GIVEN.values()))


def test_shares_are_the_masses_in_the_mean():
    each = [ShardFacts(mass, 1.0, 5, 5) for mass in (0.5, 0.0, 3.0, 1.2)]
    given = np.array([drawing.divide_batch(each, 16, [0, number]) for number in range(3000)])
    assert (given.sum(axis=1) == 16).all() and not given[:, 1].any()
    exact = np.array([0.5, 0.0, 3.0, 1.2]) / 4.7 * 16
    assert (np.abs(given - exact) < 1).all()
    np.testing.assert_allclose(given.mean(axis=0), exact, atol=0.05)


def test_shards_without_mass_have_nothing_to_draw():
    none = [ShardFacts(0.0, np.inf, 3, 3), ShardFacts(0.0, np.inf, 5, 6)]
    assert not drawing.can_draw(none, None)
    some = [none[0], ShardFacts(2.0, 0.5, 5, 6)]
    assert drawing.can_draw(some, 9) and not drawing.can_draw(some, 10)
    assert drawing.divide_batch(some, 8, [0, 1]) == [0, 8]


def part(slots, likely):
    """Returns a sample, as one shard would give it."""
    count = len(slots)
    return jrb.Sample(
        data={"x": np.array(slots)},
        indices=np.array(slots, np.int32),
        probabilities=np.array(likely, np.float32),
        weights=np.ones(count, np.float32),
        mask=np.array(likely) > 0,
        info={},
        stamp=np.zeros(count, np.uint32),
    )


@pytest.mark.parametrize("normalize", ["batch", "buffer", None])
def test_weights_are_those_of_one_buffer(normalize):
    sampler = jrb.Prioritized(beta=0.7, normalize=normalize)
    each = [ShardFacts(4.0, 0.5, 3, 3), ShardFacts(1.0, 0.25, 2, 2)]
    parts = [part([0, 2, 1], [0.5, 0.25, 0.0]), part([7], [0.75])]
    whole = drawing.combine_parts(buffer(sampler=sampler), parts, each, None)
    likely = np.array([0.4, 0.2, 0.0, 0.15])
    np.testing.assert_allclose(whole.probabilities, likely, rtol=1e-6)
    drawn = likely[[0, 1, 3]]
    least = {"batch": 0.15, "buffer": 0.25 / 5, None: 1 / 5}[normalize]
    np.testing.assert_allclose(whole.weights[[0, 1, 3]], (drawn / least) ** -0.7, rtol=1e-5)
    assert whole.weights[2] == 0 and whole.data["x"].tolist() == [0, 2, 1, 7]


class SingleProcess:
    """Ray in this process: calls run at once, and references are their results."""

    get = staticmethod(lambda found: found)
    wait = staticmethod(lambda calls, timeout: (calls, []))

    @staticmethod
    def actor(server):
        """Returns an object whose methods are called as those of an actor."""

        method = lambda name: lambda *given, **named: getattr(server(), name)(*given, **named)
        call = lambda name: types.SimpleNamespace(
            remote=method(name), options=lambda **_: call(name)
        )
        return types.SimpleNamespace(
            **{name: call(name) for name in ("facts", "draw", "extend", "update")}
        )


def in_this_process(monkeypatch, made, example, shards):
    """Returns a `Remote` whose servers, one for each stream, are in this process."""
    for module in (drawing, gate):
        monkeypatch.setattr(module, "ray", lambda: SingleProcess)
    options = {"path": None, "seed": 0, "save_every": None, "in_flight": 4}
    spec = setups.spec_of_example(made, example)
    own = Setup(made, spec, shards, shards, **options, on_cpu=False, wide=False)
    servers = [Server(own, shard) for shard in range(shards)]
    return client.Remote(own, [SingleProcess.actor(lambda one=one: one) for one in servers], None)


def test_a_batch_is_whole_where_a_shard_was_begun_anew_after_it_said_what_it_holds(monkeypatch):
    monkeypatch.setattr(drawing, "ray", lambda: SingleProcess)
    made = buffer(96, unit=jrb.Transition())
    options = {"path": None, "seed": 0, "save_every": None, "in_flight": 4}
    own = Setup(
        made, setups.spec_of_example(made, EXAMPLE), 2, 2, **options, on_cpu=False, wide=False
    )
    servers = [Server(own, shard) for shard in range(2)]
    for shard, one in enumerate(servers):
        one.extend(0, 7, 0, jax.tree.leaves(rows(shard, 0, 9)), None, None)
    actors = [SingleProcess.actor(lambda shard=shard: servers[shard]) for shard in range(2)]
    own_draws = drawing.Drawing(own, actors, None)
    (draw,) = own_draws.ask(16, [DrawInputs()])
    assert own_draws.take(draw, None).info["shard"].tolist().count(1) == 8
    facts = [one.facts() for one in servers]
    servers[1] = Server(own, 1)
    parts = [one.draw(16, DrawInputs(), 1, *facts) for one in servers]
    assert parts[1] is None
    sample = own_draws.take(draw._replace(parts=parts, each=facts), None)
    assert sample.info["shard"].tolist() == [0] * 16
    np.testing.assert_allclose(sample.probabilities, 1 / 9, rtol=1e-6)


def test_a_patient_draw_waits_for_what_was_counted_but_is_not_written_yet(monkeypatch):
    monkeypatch.setattr(drawing, "ray", lambda: SingleProcess)
    made = buffer(96, unit=jrb.Transition())
    options = {"path": None, "seed": 0, "save_every": None, "in_flight": 4}
    own = Setup(
        made, setups.spec_of_example(made, EXAMPLE), 1, 1, **options, on_cpu=False, wide=False
    )
    server = Server(own, 0)
    arrives = lambda _: server.extend(0, 7, 0, jax.tree.leaves(rows(0, 0, 9)), None, None)
    monkeypatch.setattr(gate.time, "sleep", arrives)
    own_draws = drawing.Drawing(own, [SingleProcess.actor(lambda: server)], None)
    assert own_draws.draw(16, DrawInputs(), None, patient=False) is None
    assert own_draws.draw(16, DrawInputs(), None, patient=True).data["id"].shape == (16, 2)


def test_draws_are_in_proportion_over_all_shards(cluster):
    sampler = jrb.Prioritized(alpha=1.0, beta=0.7, eps=0.0, normalize="buffer")
    made = buffer(96, sampler=sampler, unit=jrb.Transition())
    drawn = {(stream, time): 0 for stream, given in GIVEN.items() for time in range(len(given))}
    with serve(made, EXAMPLE, streams=3, shards=2, num_cpus=0) as remote:
        assert not remote.can_sample()
        for stream, given in GIVEN.items():
            remote.extend(rows(stream, 0, len(given)), stream=stream, priorities=given)
        batches = remote.ahead(64, depth=4)
        for _ in range(40):
            sample = next(batches)
            lanes, times = np.asarray(sample.data["id"]).T.tolist()
            likely = np.array([GIVEN[s][t] for s, t in zip(lanes, times, strict=True)]) / TOTAL
            np.testing.assert_allclose(sample.probabilities, likely, rtol=1e-5)
            np.testing.assert_allclose(sample.weights, (likely / 0.5 * TOTAL) ** -0.7, rtol=1e-4)
            np.testing.assert_array_equal(sample.info["shard"], np.array(lanes) % 2)
            for row in zip(lanes, times, strict=True):
                drawn[row] += 1
        expected = np.array([GIVEN[s][t] for s, t in drawn]) / TOTAL * 40 * 64
        assert stats.chisquare(list(drawn.values()), expected).pvalue > 0.01
        lanes, times = np.asarray(sample.data["id"]).T
        remote.update_priority(sample, jnp.asarray(100.0 + 50 * lanes + times))
        remote.wait()  # each goes to the shard of its item
        again, new = (
            remote.sample(64),
            dict(zip(zip(lanes, times, strict=True), [1] * 64, strict=True)),
        )
        masses = {
            row: 100.0 + 50 * row[0] + row[1] if row in new else GIVEN[row[0]][row[1]]
            for row in drawn
        }
        likely = [
            masses[tuple(row)] / sum(masses.values())
            for row in np.asarray(again.data["id"]).tolist()
        ]
        np.testing.assert_allclose(again.probabilities, likely, rtol=1e-5)


TOKENS = {"token": np.int32(0), "next": {"done": np.bool_(False)}}


@pytest.mark.parametrize(("shards", "size"), [(1, 4), (2, 4), (2, 6)])
def test_packed_rows_of_servers_are_those_of_one_buffer(monkeypatch, shards, size):
    sampler = jrb.Prioritized(alpha=1.0, beta=0.7, eps=0.0)
    made = jrb.ReplayBuffer(80, batch_size=size, unit=jrb.Packed(16, 4), sampler=sampler)
    remote, masses = in_this_process(monkeypatch, made, TOKENS, shards), {}
    for stream in range(shards):
        lengths = np.array([3, 7, 5, 9, 4])
        starts, token = lengths.cumsum() - lengths, np.arange(28, dtype=np.int32) + 100 * stream
        items = {"token": token, "next": {"done": np.isin(np.arange(1, 29), lengths.cumsum())}}
        remote.extend(items, stream=stream)
        masses |= dict.fromkeys(token[starts].tolist(), 1.0)
    for number in range(5):
        batch = jax.device_get(remote.sample())
        real, first = batch.weights > 0, batch.data["token"][batch.info["is_first"]]
        assert real.any(axis=1).all() and not real.all()
        total = sum(masses.values())
        np.testing.assert_allclose(
            batch.probabilities[real], np.array([masses[one] for one in first]) / total, rtol=1e-5
        )
        want = (batch.probabilities[real] / batch.probabilities[real].min()) ** -0.7
        np.testing.assert_allclose(batch.weights[real], want, rtol=1e-5)
        priorities = np.full(real.shape, np.nan, np.float32)
        priorities[real] = first % 10 + number
        remote.update_priority(batch, priorities)
        masses |= {one: float(one % 10 + number) for one in first.tolist()}


@pytest.mark.parametrize("size", [25, 30, 35])
def test_a_server_gives_whole_groups(monkeypatch, size):
    made = jrb.ReplayBuffer(80, batch_size=size, sampler=jrb.Grouped("token", 20, 5))
    remote = in_this_process(monkeypatch, made, TOKENS, 1)
    token = np.arange(60, dtype=np.int32) % 12
    remote.extend({"token": token, "next": {"done": np.zeros(60, bool)}}, stream=0)
    group = np.asarray(remote.sample().data["token"]).reshape(-1, 5)
    assert (group == group[:, :1]).all()


def test_a_server_says_that_no_weight_is_above_0(monkeypatch):
    nothing = jrb.Weighted(lambda leaves, age, context: jnp.zeros(age.shape[0]))
    for sampler in (nothing, jrb.Grouped("token", 9, 1, nothing)):
        made = jrb.ReplayBuffer(80, batch_size=4, sampler=sampler)
        remote = in_this_process(monkeypatch, made, TOKENS, 1)
        remote.extend(
            {"token": np.arange(3, dtype=np.int32), "next": {"done": np.ones(3, bool)}}, stream=0
        )
        with pytest.raises(ValueError, match="no anchor with a weight above 0"):
            remote.sample()
