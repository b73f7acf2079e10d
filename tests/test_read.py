"""Functions that read a buffer, compared with plain lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests import reference

EXAMPLE = {
    "x": jnp.zeros(2, jnp.bfloat16),
    "id": jnp.int32(0),
    "next": {"reward": jnp.float32(0), "done": False, "truncated": False},
}
STORAGES = {
    "device": lambda: jrb.DeviceStorage(),
    "memmap": lambda: jrb.MemmapStorage(None),
    "spill": lambda: jrb.SpillStorage(None, 4),
    "compressed": lambda: jrb.CompressedStorage(min_bytes=1),
}


def stream(rng, length, envs):
    ids = np.arange(length * envs, dtype=np.int32).reshape(length, envs)
    return {
        "x": jnp.asarray(np.stack([ids, -ids], -1), jnp.bfloat16),
        "id": ids,
        "next": {
            "reward": rng.random((length, envs)).astype(np.float32),
            "done": rng.random((length, envs)) < 0.2,
            "truncated": rng.random((length, envs)) < 0.1,
        },
    }


def row_of(items, t, envs):
    flags = {name: items["next"][name][t] for name in ("done", "truncated")}
    return [
        {"id": int(items["id"][t, env]), "reward": items["next"]["reward"][t, env]}
        | {name: bool(flag[env]) for name, flag in flags.items()}
        for env in range(envs)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("unit", [jrb.Transition(), jrb.NStep(2, 0.9)], ids=["row", "n-step"])
@pytest.mark.parametrize("length", [0, 3, 6, 17])
def test_items_and_episodes_are_those_that_were_added(length, unit, storage):
    envs = 2
    buffer = jrb.ReplayBuffer(12, envs, unit=unit, storage=STORAGES[storage]())
    state, model = buffer.init(EXAMPLE), reference.Episodes(6, envs)
    items = stream(np.random.default_rng(length), length, envs)
    if length:
        state = buffer.extend(state, items)
        model.extend([row_of(items, t, envs) for t in range(length)])
    if unit != jrb.Transition() and length:
        state = buffer.truncate(state, jnp.array([True, False]))
        model.truncate([True, False])
    want = sorted(model.all(), key=lambda entry: entry["id"])
    found = jrb.items(buffer, state)
    assert found["id"].tolist() == [entry["id"] for entry in want]
    assert found["x"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["x"][:, 0].astype(np.int32), found["id"])
    parts = list(jrb.items(buffer, state, chunks=5))
    assert [len(part["id"]) for part in parts[:-1]] == [5] * (len(want) // 5 - (not len(want) % 5))
    joined = np.concatenate([part["id"] for part in parts]) if parts else np.zeros(0)
    assert joined.tolist() == found["id"].tolist()
    episodes = jrb.episodes(buffer, state)
    groups = {}
    for entry in want:
        groups.setdefault((entry["env"], entry["episode"]), []).append(entry)
    ordered = sorted(groups.values(), key=lambda rows: (rows[0]["time"], rows[0]["env"]))
    assert len(episodes) == len(ordered)
    for episode, rows in zip(episodes, ordered, strict=True):
        assert episode.slots.tolist() == [row["slot"] for row in rows]
        assert (episode.environment, episode.length) == (rows[0]["env"], len(rows))
        assert episode.ended == rows[-1]["ends"]
        assert episode.complete == (episode.ended and not episode.cut)
        np.testing.assert_allclose(episode.return_, sum(float(row["reward"]) for row in rows))
        assert episode.items["id"].tolist() == [row["id"] for row in rows]
        assert episode.cut == (length > 6 and rows[0] is model.held[rows[0]["env"]][0])
    told = jrb.stats(buffer, state)
    over = [each for each in episodes if each.complete]
    assert (told["size"], told["episodes"], told["complete"]) == (
        len(want),
        len(episodes),
        len(over),
    )
    if over:
        assert told["return"]["max"] == max(each.return_ for each in over)
        assert told["length"]["mean"] == np.mean([each.length for each in over])


WHOLE = jrb.Sequence(3, sample_by="whole_episodes")


def ends(rng, rows, envs):
    done = rng.random((rows, envs)) < 0.3
    zero = np.zeros((rows, envs), np.float32)
    return {"observation": zero, "next": {"observation": zero, "reward": zero + 1, "done": done}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "writer", [jrb.RoundRobin(), jrb.PerEnvironment()], ids=["together", "lanes"]
)
def test_complete_means_the_same_everywhere(writer, tmp_path):
    rng, envs = np.random.default_rng(0), 2
    parts = {"writer": writer, "unit": WHOLE, "sampler": jrb.Prioritized()}
    buffer = jrb.ReplayBuffer(16, envs, batch_size=1, **parts)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], ends(rng, 1, 1)))
    for rows in (5, 5, 5, 5):
        state = buffer.extend(state, ends(rng, rows, envs))
        found = jrb.episodes(buffer, state)
        complete = sum(each.complete for each in found)
        anchors = int((buffer.priorities(state) >= 0).sum())
        assert jrb.stats(buffer, state)["complete"] == anchors == complete
        assert repr(found) == f"{len(found)} episodes, {complete} of them complete"
    jrb.save(tmp_path / "saved", buffer, state)
    dataset = jrb.datasets.open(tmp_path / "saved")
    assert int(dataset.complete.sum()) == complete
    assert dataset.facts["cut"].tolist() == [each.cut for each in found]


@pytest.mark.parametrize("num_envs", [None, 3])
def test_what_was_never_overwritten_is_complete(num_envs):
    dataset = jrb.datasets.open("tests/data/minari/cartpole-v0")
    told = jrb.stats(*dataset.buffer(num_envs=num_envs))
    assert (told["episodes"], told["complete"], dataset.complete.sum()) == (20, 20, 20)
    assert told["return"]["mean"] == pytest.approx(dataset.returns().mean())


@pytest.mark.parametrize(
    "writer", [jrb.RoundRobin(), jrb.PerEnvironment()], ids=["together", "lanes"]
)
def test_an_episode_is_cut_where_its_first_row_was_overwritten(writer):
    buffer = jrb.ReplayBuffer(4, 1, writer=writer)
    reward = np.ones((1, 1), np.float32)
    done = lambda flag: {"next": {"reward": reward, "done": np.full((1, 1), flag)}}
    state = buffer.init({"next": {"reward": 0.0, "done": False}})
    cuts = []
    for row in range(6):
        state = buffer.extend(state, done(row in (1, 3)))
        cuts.append([(len(each), each.cut) for each in jrb.episodes(buffer, state)])
    assert cuts[3] == [(2, False), (2, False)]
    assert cuts[4] == [(1, True), (2, False), (1, False)]
    state = buffer.extend(buffer.empty(state), done(True))
    assert [each.complete for each in jrb.episodes(buffer, state)] == [True]


def test_rewards_of_several_numbers_are_added_up_each_for_itself():
    rewards = jnp.arange(6.0).reshape(3, 2)
    data = {"next": {"reward": rewards, "done": jnp.array([False, True, False])}}
    buffer, state = jrb.from_items(data)
    first, second = jrb.episodes(buffer, state)
    assert first.return_.tolist() == [2.0, 4.0]
    assert (first.complete, second.complete) == (True, False)
    assert "return" not in jrb.stats(buffer, state)
    assert len(jrb.episodes(buffer, state)[1:]) == 1
    assert repr(jrb.episodes(buffer, state)) == "2 episodes, 1 of them complete"


def test_items_without_rewards_or_flags():
    buffer, state = jrb.from_items({"next": {"done": jnp.zeros(3, bool)}})
    assert jrb.episodes(buffer, state)[0].return_ is None
    plain, its = jrb.from_items(jnp.arange(4.0))
    assert jrb.items(plain, its).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert jrb.stats(plain, its) == {"size": 4, "capacity": 4}
    with pytest.raises(ValueError, match="done: expected a leaf at 'next/done'"):
        jrb.episodes(plain, its)
    with pytest.raises(ValueError, match="in the order of time, got MaxValue"):
        jrb.episodes(*jrb.from_items({"r": jnp.ones(3)}, writer=jrb.MaxValue("r")))


def test_objects_and_keys_are_read_out_too():
    buffer, state = jrb.from_items(["a", None, {"b": 1}], storage=jrb.ListStorage(), capacity=2)
    assert jrb.items(buffer, state) == [None, {"b": 1}]
    keys = jax.random.split(jax.random.key(0), 3)
    buffer, state = jrb.from_items({"key": keys})
    np.testing.assert_array_equal(jrb.items(buffer, state)["key"], jax.random.key_data(keys))
    many = jax.vmap(lambda _: state)(jnp.arange(2))
    with pytest.raises(ValueError, match="leading axes"):
        jrb.items(buffer, many)


def test_priorities_are_summed_up():
    buffer, state = jrb.from_items({"x": jnp.arange(4)}, sampler=jrb.Prioritized(), batch_size=2)
    state = buffer.update_priority(state, jnp.arange(4), jnp.array([1.0, 2.0, 3.0, 2.0]))
    state = buffer.drop(state, jnp.array([2]))
    assert buffer.priorities(state).tolist() == [1.0, 2.0, -2.0, 2.0]
    assert buffer.priorities(state, jnp.array([[1], [0]])).tolist() == [[2.0], [1.0]]
    assert jrb.stats(buffer, state)["priority"]["max"] == 2.0
    with pytest.raises(TypeError, match="priorities: expected a sampler with priorities"):
        jrb.ReplayBuffer(4).priorities(jrb.ReplayBuffer(4).init({"x": 0}))


@pytest.mark.slow
@pytest.mark.parametrize("envs", [None, 2])
def test_the_newest_rows_are_told_by_their_slots(envs):
    buffer = jrb.ReplayBuffer(8, num_envs=envs)
    lead, rows = () if envs is None else (envs,), 8 // (envs or 1)
    state = buffer.init({"x": jnp.int32(0)})
    for length in (0, 1, rows - 1, rows, rows + 3):
        data = jnp.arange(length * (envs or 1)).reshape(length, *lead)
        after = buffer.extend(state, {"x": data}) if length else state
        slots, mask = jax.jit(buffer.newest, static_argnums=1)(after, 3)
        assert slots.shape == mask.shape == (3, *lead)
        held = min(3, length)
        assert mask.reshape(3, -1).any(1).tolist() == [False] * (3 - held) + [True] * held
        np.testing.assert_array_equal(after.storage["x"][slots[3 - held :]], data[length - held :])
    with pytest.raises(ValueError, match=f"n: expected from 1 to {rows}"):
        buffer.newest(state, rows + 1)


def test_episodes_of_many_lengths_are_read_in_few_shapes(monkeypatch):
    """Every shape is compiled once, which takes longer than the reads."""
    lengths = np.arange(1, 20)
    done = np.zeros(lengths.sum(), bool)
    done[np.cumsum(lengths) - 1] = True
    items = {"id": np.arange(len(done), dtype=np.int32), "next": {"done": done}}
    buffer = jrb.ReplayBuffer(len(done))
    state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], items)), items)
    shapes, take = set(), jrb.ReplayBuffer.take

    def counted(self, state, indices, *rest):
        shapes.add(indices.shape)
        return take(self, state, indices, *rest)

    monkeypatch.setattr(jrb.ReplayBuffer, "take", counted)
    found = [episode.items["id"] for episode in jrb.episodes(buffer, state)]
    assert [len(ids) for ids in found] == lengths.tolist()
    np.testing.assert_array_equal(np.concatenate(found), items["id"])
    assert len(shapes) <= 6


@pytest.mark.parametrize(
    "read",
    [jrb.items, jrb.episodes, jrb.stats, jrb.to_pandas, jrb.to_arrow],
    ids=lambda f: f.__name__,
)
def test_what_reads_on_the_host_says_so_inside_jit(read):
    items = {"next": {"reward": jnp.ones(4), "done": jnp.arange(4) % 2 == 1}}
    buffer, state = jrb.from_items(items)
    with pytest.raises(
        TypeError, match=rf"^{read.__name__}: expected a state with values.*outside jit"
    ):
        jax.jit(lambda state: read(buffer, state))(state)
    with pytest.raises(TypeError, match="expected a state with values"):
        jax.jit(lambda: read(buffer, state))()  # what is computed from it is traced
