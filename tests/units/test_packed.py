"""Rows packed with whole episodes, compared with plain Python."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jrb

KEY = jax.random.key(0)
EXAMPLE = {
    "token": jnp.int32(0),
    "observation": jnp.zeros(2),
    "next": {"observation": jnp.zeros(2), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}
DISTINCT = jrb.Uniform(replacement=False)
LONGEST = jrb.Weighted(
    lambda leaves, age, context: leaves["token"].astype(float) + 1.0, leaves=("token",)
)


def stream(rng, length, envs, first, ends=0.3):
    """Returns rows whose tokens number all steps; some end episodes."""
    shape = length, envs
    observation = np.zeros((*shape, 2), np.float32)
    token = np.arange(first, first + length * envs, dtype=np.int32).reshape(shape)
    after = {
        "observation": observation,
        "reward": token.astype(np.float32),
        "done": rng.random(shape) < ends,
    }
    return {"token": token, "observation": observation, "next": after}


def of_lengths(lengths):
    """Returns the rows of episodes with these lengths, whose tokens number the steps."""
    total = int(np.sum(lengths))
    rows = stream(np.random.default_rng(0), total, 1, 0)
    rows["next"]["done"] = np.isin(np.arange(1, total + 1), np.cumsum(lengths))[:, None]
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[:, 0]), rows)


def packed_in_python(lengths, num_rows, per_row, limit):
    """Returns the indices of the episodes in each row, and how many of the first fit at most."""

    def fill(number):
        left = [length if at < number else 0 for at, length in enumerate(lengths)]
        order = sorted(range(len(left)), key=lambda at: -left[at])
        rows, filled = [[] for _ in range(num_rows)], [0] * num_rows
        for turn in range(per_row):
            chosen = order[turn * num_rows : (turn + 1) * num_rows]
            emptiest = sorted(range(num_rows), key=filled.__getitem__)
            for row, at in zip(emptiest, chosen, strict=True):
                filled[row] += left[at]
                rows[row] += [at] * (left[at] > 0)
        return rows, max(filled) <= limit

    # By halves, as more episodes may fit where fewer do not.
    low, high = num_rows, len(lengths)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fill(middle)[1] else (low, middle - 1)
    return fill(low)[0], low


class Episodes:
    """The rows of each environment, with the ends of episodes that flags or truncations set."""

    def __init__(self, rows, envs):
        self.num_rows, self.envs, self.rows = rows, envs, [[] for _ in range(envs)]

    def add(self, token, done):
        for env in range(self.envs):
            self.rows[env].append([int(token[env]), bool(done[env])])

    def truncate(self, which):
        for env in np.flatnonzero(which):
            if self.rows[env]:
                self.rows[env][-1][1] = True

    def whole(self):
        """Returns the tokens of complete episodes whose first step is held, by their first."""
        found = {}
        for rows in self.rows:
            lost, episode = max(0, len(rows) - self.num_rows), []
            for number, (token, ends) in enumerate(rows):
                episode.append((number, token))
                if ends:
                    if episode[0][0] >= lost:
                        found[episode[0][1]] = [one for _, one in episode]
                    episode = []
        return found


def check(batch, episodes, limit, is_limited=False):
    """Asserts that each row has whole episodes, one after another, as `info` says."""
    info, token, mask = batch.info, batch.data["token"], batch.mask
    starts = []
    for row in range(len(token)):
        real, place = batch.weights[row] > 0, 0
        numbers = (np.flatnonzero(real) + 1).tolist()
        assert sorted({*info["segment"][row].tolist()} - {0}) == numbers
        # Without a limit of draws, no place is left out.
        assert is_limited or numbers == list(range(1, len(numbers) + 1))
        for number in numbers:
            steps = np.flatnonzero(info["segment"][row] == number)
            tokens = token[row, steps].tolist()
            starts.append(tokens[0])
            whole = episodes[tokens[0]]
            assert tokens == whole[:limit]
            assert steps.tolist() == list(range(place, place + len(tokens)))
            assert info["position"][row, steps].tolist() == list(range(len(tokens)))
            is_last = [
                len(tokens) == len(whole) and at == len(tokens) - 1 for at in range(len(tokens))
            ]
            assert info["is_first"][row, steps].tolist() == [at == 0 for at in range(len(tokens))]
            assert info["is_last"][row, steps].tolist() == is_last
            place += len(tokens)
        assert mask[row].tolist() == [at < place for at in range(limit)]
        for name in ("segment", "position", "is_first", "is_last"):
            assert not info[name][row, place:].any()
    return starts


STORAGES = {
    "device": jrb.DeviceStorage(),
    "once": jrb.DeviceStorage(share_next_observations=True, terminal_capacity=30),
    "spill": jrb.SpillStorage(None, 6),
    "memmap": jrb.MemmapStorage(),
}
CASES = [
    (jrb.Uniform(), jrb.RoundRobin(), "device", 2),
    (jrb.Prioritized(), jrb.RoundRobin(), "once", None),
    (jrb.WithoutReplacement(), jrb.PerEnvironment(), "device", 3),
    (jrb.Queue(), jrb.RoundRobin(), "memmap", None),
    (jrb.Lifo(), jrb.RoundRobin(), "device", None),
    (jrb.Newest(0.5), jrb.RoundRobin(), "spill", None),
    (LONGEST, jrb.RoundRobin(), "device", 2),
    (jrb.Prioritized(max_draws=2), jrb.RoundRobin(), "device", 2),
    (jrb.Grouped("token", 50, 2), jrb.RoundRobin(), "device", 2),
    (jrb.Mixture((jrb.Uniform(), jrb.Prioritized()), (0.5, 0.5)), jrb.RoundRobin(), "device", 1),
    (
        jrb.Mixture((jrb.Newest(0.5), jrb.Prioritized()), (0.5, 0.5), max_draws=2),
        jrb.RoundRobin(),
        "spill",
        None,
    ),
]


@pytest.mark.parametrize(
    ("sampler", "writer", "storage", "envs"),
    [pytest.param(*case, marks=[pytest.mark.slow] if at else []) for at, case in enumerate(CASES)],
    ids=lambda part: str(part).split("(", 1)[0],
)
def test_rows_hold_whole_episodes(sampler, writer, storage, envs):
    limit, per_row, size, rows = 7, 4, 3, 20
    buffer = jrb.ReplayBuffer(
        rows * (envs or 1),
        envs,
        batch_size=size,
        unit=jrb.Packed(limit, per_row),
        sampler=sampler,
        writer=writer,
        storage=STORAGES[storage],
    )
    state, model = buffer.init(EXAMPLE), Episodes(rows, envs or 1)
    methods = jrb.jitted(buffer)
    rng, first = np.random.default_rng(3), 0
    for number in range(40):
        items = stream(rng, 3, envs or 1, first)
        first += items["token"].size
        given = items if envs else jax.tree.map(lambda leaf: leaf[:, 0], items)
        state = methods.extend(state, given)
        for row in range(3):
            model.add(items["token"][row], items["next"]["done"][row])
        if number % 5 == 4:
            which = rng.random(envs or 1) < 0.5
            state = methods.truncate(state, jnp.asarray(which))
            model.truncate(which)
        episodes = model.whole()
        if not buffer.can_sample(state):
            continue
        batch = jax.device_get(methods.sample(state, jax.random.key(number)))
        starts = check(batch, episodes, limit, sampler.max_draws is not None)
        assert starts
        state, drawn = methods.draw(state, jax.random.key(number))
        np.testing.assert_array_equal(drawn.indices, batch.indices)
        assert sampler.max_draws is None or state.sampler.draws.max() <= sampler.max_draws
    assert first > 3 * rows


def test_episodes_are_packed_as_in_python():
    rng = np.random.default_rng(0)
    for limit, per_row, size in ((16, 4, 3), (40, 6, 8), (12, 12, 1), (9, 2, 5)):
        lengths = rng.integers(1, limit // 2 + 2, 60)
        # Other samplers than those that consume have an order of their own for what fits.
        parts = {"sampler": jrb.WithoutReplacement()}
        unit = jrb.Packed(limit, per_row)
        buffer, state = jrb.from_items(of_lengths(lengths), unit=unit, batch_size=size, **parts)
        # A unit of whole episodes draws the same ones with the same key.
        alone = jrb.Sequence(limit, sample_by="whole_episodes")
        twin, other = jrb.from_items(of_lengths(lengths), unit=alone, **parts)
        sample, one = jax.jit(buffer.sample), jax.jit(twin.sample, static_argnums=2)
        for number in range(5):
            key = jax.random.key(number)
            batch, drawn = sample(state, key), one(other, key, size * per_row)
            want, _ = packed_in_python(
                np.asarray(drawn.mask.sum(axis=1)).tolist(), size, per_row, limit
            )
            for row, chosen in enumerate(want):
                count = len(chosen)
                np.testing.assert_array_equal(
                    batch.indices[row, :count], drawn.indices[np.array(chosen)]
                )
                assert int((batch.weights[row] > 0).sum()) == count


@pytest.mark.parametrize("sampler", [jrb.WithoutReplacement(), jrb.Queue(), jrb.Lifo()], ids=repr)
def test_every_episode_is_drawn_once(sampler):
    lengths = np.random.default_rng(1).integers(2, 11, 70)
    buffer, state = jrb.from_items(
        of_lengths(lengths), unit=jrb.Packed(20, 5), sampler=sampler, batch_size=3
    )
    draw, seen = jax.jit(buffer.draw), []
    starts = (np.cumsum(lengths) - lengths).tolist()
    for number in range(60):
        state, batch = draw(state, jax.random.key(number))
        seen += batch.indices[batch.weights > 0].tolist()
        if len(seen) >= len(lengths):
            break
    assert sorted(seen) == starts
    if isinstance(sampler, jrb.Queue):
        assert not draw(state, KEY)[1].mask.any()


def test_draws_and_probabilities_of_episodes():
    # Of episodes that are equally long, as many fit into each batch.
    buffer, state = jrb.from_items(of_lengths([4] * 12), unit=jrb.Packed(16, 4), batch_size=500)
    batch = buffer.sample(state, KEY)
    assert batch.mask.all()
    np.testing.assert_allclose(batch.probabilities, 1 / 12, rtol=1e-6)
    count = np.bincount(np.asarray(batch.indices).reshape(-1) // 4, minlength=12)
    assert stats.chisquare(count).pvalue > 1e-4


def test_stratified_draws_favor_no_episode():
    sampler = jrb.Prioritized(alpha=0.0)
    lengths = np.random.default_rng(0).integers(3, 9, 40)
    buffer, state = jrb.from_items(
        of_lengths(lengths), unit=jrb.Packed(16, 8), sampler=sampler, batch_size=4
    )
    batches = jax.vmap(lambda key: buffer.sample(state, key))(jax.random.split(KEY, 500))
    starts = (np.cumsum(lengths) - lengths).tolist()
    count = np.bincount(batches.indices[batches.weights > 0], minlength=lengths.sum())[starts]
    # Twice as many are drawn as fit. Those that are left out are longer, by a little.
    assert abs(count[:20].sum() / count.sum() - 0.5) < 0.02
    assert np.abs(count / count.mean() - 1).max() < 0.25


def test_priorities_are_those_of_episodes():
    sampler = jrb.Prioritized(alpha=1.0, eps=0.0, count_draws=True)
    buffer, state = jrb.from_items(
        of_lengths([4] * 6), unit=jrb.Packed(16, 4), sampler=sampler, batch_size=60
    )
    state, batch = buffer.draw(state, KEY)
    priorities = 1.0 + (batch.indices // 4).astype(jnp.float32)
    state = jax.jit(buffer.update_priority)(state, batch, priorities)
    found = np.asarray(buffer.priorities(state))[::4]
    np.testing.assert_array_equal(found, np.arange(1, 7))
    share = np.arange(1, 7) / 21
    state, batch = buffer.draw(state, jax.random.key(1), 500)
    number = np.asarray(batch.indices) // 4
    np.testing.assert_allclose(batch.probabilities, share[number], rtol=1e-5)
    assert stats.chisquare(np.bincount(number.reshape(-1)), 2000 * share).pvalue > 1e-4
    assert batch.info["draws"].shape == (500, 4)
    assert int(batch.info["draws"].max()) > 0
    with pytest.raises(ValueError, match="priorities"):
        buffer.update_priority(state, batch, jnp.ones(batch.mask.shape))
    # Episodes that were overwritten since are skipped, and dropped ones are never drawn again.
    state = buffer.drop(state, batch.replace(weights=jnp.where(number == 2, batch.weights, 0.0)))
    assert not (buffer.sample(state, KEY).indices // 4 == 2).any()
    state = buffer.extend(state, of_lengths([4, 4]))
    state = buffer.update_priority(state, batch, jnp.full(batch.indices.shape, 50.0))
    np.testing.assert_array_equal(np.asarray(buffer.priorities(state))[:8:4] == 50, [False, False])
    np.testing.assert_array_equal(np.asarray(buffer.priorities(state))[12::4], [50, 50, 50])


def test_losses_of_packed_and_of_padded_rows_are_equal():
    """A causal attention with blocks, over packed rows, against one episode in each row."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 10, 40)
    rows = of_lengths(lengths)
    parts = {"sampler": jrb.WithoutReplacement(shuffle=False), "batch_size": 5}
    buffer, state = jrb.from_items(rows, unit=jrb.Packed(24, 8), **parts)
    whole = jrb.Sequence(24, sample_by="whole_episodes")
    padded, other = jrb.from_items(rows, unit=whole, batch_size=1, sampler=parts["sampler"])
    weight = jnp.asarray(rng.normal(size=(3, 8)), jnp.float32)

    def losses(tokens, segment, position):
        """Returns a loss for each step that depends on all steps of its episode before it."""
        step, token = (it[..., None].astype(jnp.float32) for it in (position, tokens))
        phase = step * jnp.arange(1.0, 9.0) / 7 + token / 40
        query, key, value = (jnp.cos(phase * one) for one in weight)
        score = jnp.einsum("blh,bmh->blm", query, key)
        sees = (segment[:, :, None] == segment[:, None]) & (
            position[:, :, None] >= position[:, None]
        )
        share = jax.nn.softmax(jnp.where(sees, score, -1e9))
        return jnp.sum(jnp.einsum("blm,bmh->blh", share, value) ** 2, axis=-1)

    batch = buffer.sample(state, KEY)
    of_step = losses(batch.data["token"], batch.info["segment"], batch.info["position"])
    total, count = float(jnp.sum(jnp.where(batch.mask, of_step, 0))), int((batch.weights > 0).sum())
    want = 0.0
    for _ in range(count):
        other, one = padded.draw(other, KEY)
        place = jnp.broadcast_to(jnp.arange(24), (1, 24))
        alone = losses(one.data["token"], one.mask.astype(int), place)
        want += float(jnp.sum(jnp.where(one.mask, alone, 0)))
    assert int(batch.mask.sum()) == int(lengths[:count].sum())
    np.testing.assert_allclose(total, want, rtol=1e-5)


@pytest.mark.parametrize(("length", "size"), [(128, 16), (256, 8), (512, 4), (2048, 8)])
def test_rows_are_nearly_full(length, size):
    lengths = np.random.default_rng(length).integers(10, length // 4 + 1, 300)
    buffer, state = jrb.from_items(
        of_lengths(lengths), unit=jrb.Packed(length, 16), batch_size=size
    )
    sample = jax.jit(buffer.sample)
    filled = [float(sample(state, jax.random.key(number)).mask.mean()) for number in range(20)]
    assert np.mean(filled) >= 0.95


def test_sums_of_rewards_end_with_each_episode():
    rows = of_lengths([3, 2, 4, 1, 9])
    rows["next"]["reward"] = jnp.ones_like(rows["next"]["reward"])
    unit, sampler = jrb.Packed(6, 3), jrb.WithoutReplacement(shuffle=False)
    buffer, state = jrb.from_items(
        rows, unit=unit, sampler=sampler, transforms=(jrb.transforms.RewardToGo(),), batch_size=2
    )
    batch = buffer.sample(state, KEY)
    to_go, info = np.asarray(batch.data["next"]["reward_to_go"]), batch.info
    for row in range(2):
        for number in range(1, 4):
            mine = to_go[row][np.asarray(info["segment"][row]) == number]
            assert mine.tolist() == list(range(len(mine), 0, -1))
    # An episode that is cut has no sums.
    long = buffer.sample(state, KEY, 5)
    is_cut = (long.mask.sum(axis=1) == 6) & ~long.info["is_last"].any(axis=1)
    assert is_cut.any()
    assert np.isnan(long.data["next"]["reward_to_go"][is_cut]).all()


def test_rows_of_a_sample_are_set():
    buffer, state = jrb.from_items(
        of_lengths([3, 2, 4, 3]), unit=jrb.Packed(6, 3), batch_size=4, sampler=DISTINCT
    )
    batch = buffer.sample(state, KEY)
    values = {"next": {"reward": 100.0 + batch.data["token"].astype(jnp.float32)}}
    state = buffer.set(state, batch, values)
    rewards = jrb.items(buffer, state)["next"]["reward"]
    drawn = set(batch.data["token"][batch.mask].tolist())
    assert rewards.tolist() == [100.0 + at if at in drawn else at for at in range(12)]
    # Steps that were overwritten since are skipped, also those of an episode across the seam.
    state = buffer.extend(state, of_lengths([2]))
    state = buffer.set(state, batch, {"next": {"reward": jnp.full((4, 6), 7.0)}})
    rewards = jrb.items(buffer, state)["next"]["reward"]
    assert rewards[-2:].tolist() == [0.0, 1.0]
    assert set(rewards[:-2].tolist()) >= {7.0}


def test_one_trace_and_vmap():
    buffer = jrb.ReplayBuffer(40, unit=jrb.Packed(8, 3), batch_size=4)
    rng, traces = np.random.default_rng(0), []
    items = [
        jax.tree.map(lambda leaf: leaf[:, 0], stream(rng, 30, 1, 100 * number))
        for number in range(8)
    ]

    @jax.jit
    @jax.vmap
    def sample(state, key):
        traces.append(1)
        return buffer.sample(state, key)

    states = [buffer.extend(buffer.init(EXAMPLE), one) for one in items]
    keys = jax.random.split(KEY, 8)
    batches = sample(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), keys)
    sample(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), jax.random.split(keys[0], 8))
    assert len(traces) == 1
    for number, state in enumerate(states):
        one = buffer.sample(state, keys[number]).replace(origin=None)
        same = jax.tree.map(lambda leaf: leaf[number], batches.replace(origin=None))  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, one, same)


@pytest.mark.parametrize("mesh", [None, 2])
def test_shards_pack_their_own_episodes(mesh):
    sampler = jrb.Prioritized(count_draws=True)
    buffer = jrb.ReplayBuffer(80, 4, unit=jrb.Packed(8, 3), sampler=sampler)
    mesh = None if mesh is None else jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharded = jrb.Sharded(buffer, 2, mesh)
    items = stream(np.random.default_rng(0), 20, 4, 0)
    state, model = sharded.extend(sharded.init(EXAMPLE), items), Episodes(20, 4)
    for row in range(20):
        model.add(items["token"][row], items["next"]["done"][row])
    state, batch = sharded.draw(state, KEY, 8)
    on_host = jax.device_get(batch)
    check(on_host, model.whole(), 8)
    real = on_host.weights > 0
    np.testing.assert_allclose(on_host.probabilities[real], 1 / len(model.whole()), rtol=1e-5)
    assert on_host.info["shard"].tolist() == [0] * 4 + [1] * 4
    state = sharded.update_priority(state, batch, jnp.where(batch.weights > 0, 5.0, 9.0))
    count = sum(int((np.asarray(leaf) == 5.0).sum()) for leaf in [sharded.priorities(state)])
    assert count == len(set(on_host.data["token"][on_host.info["is_first"]].tolist()))
    assert not (np.asarray(sharded.priorities(state)) == 9.0).any()


def test_a_state_is_saved_loaded_and_rebuilt(tmp_path):
    unit = jrb.Packed(16, 4)
    buffer, state = jrb.from_items(
        of_lengths([5, 3, 8, 2, 4, 7]), unit=unit, sampler=jrb.WithoutReplacement(), batch_size=2
    )
    state, _ = buffer.draw(state, KEY)
    jrb.save(tmp_path / "saved", buffer, state)
    loaded, restored = jrb.load(tmp_path / "saved")
    same = loaded.draw(restored, KEY)[1]
    jax.tree.map(np.testing.assert_array_equal, same, buffer.draw(state, KEY)[1])
    larger = jrb.ReplayBuffer(90, unit=jrb.Packed(20, 5), batch_size=1)
    batch = jax.device_get(larger.sample(jrb.rebuild(buffer, state, larger), KEY))
    model = Episodes(90, 1)
    rows = of_lengths([5, 3, 8, 2, 4, 7])
    for token, done in zip(rows["token"], rows["next"]["done"], strict=True):
        model.add([token], [done])
    check(batch, model.whole(), 20)


def test_rows_may_be_longer_than_the_ring():
    unit, sampler = jrb.Packed(30, 8), jrb.WithoutReplacement()
    buffer = jrb.ReplayBuffer(24, num_envs=4, unit=unit, sampler=sampler, batch_size=1)
    items = stream(np.random.default_rng(2), 6, 4, 0, ends=0.6)
    state, model = buffer.extend(buffer.init(EXAMPLE), items), Episodes(6, 4)
    for row in range(6):
        model.add(items["token"][row], items["next"]["done"][row])
    batch = jax.device_get(buffer.sample(state, KEY))
    starts = check(batch, model.whole(), 30)
    assert len(starts) == len(set(starts)) > 4


def test_nothing_to_draw():
    buffer = jrb.ReplayBuffer(20, unit=jrb.Packed(6, 3), batch_size=2)
    state = buffer.init(EXAMPLE)
    rows = of_lengths([5])
    state = buffer.extend(state, jax.tree.map(lambda leaf: leaf[:4], rows))
    assert not buffer.can_sample(state)
    with pytest.raises(ValueError, match="An anchor needs an episode"):
        buffer.sample(state, KEY)
    batch = jax.jit(buffer.sample)(state, KEY)
    for leaf in (batch.mask, batch.weights, batch.probabilities, batch.info["segment"]):
        assert not leaf.any()
    state = buffer.add(state, jax.tree.map(lambda leaf: leaf[4], rows))
    assert buffer.sample(state, KEY).mask.any(axis=1).all()


def test_wrong_arguments_are_refused():
    for arguments in ((0, 1), (4, 0), (4, 5)):
        with pytest.raises(ValueError, match="expected"):
            jrb.Packed(*arguments)
    reward = lambda achieved, goal: jnp.float32(0)
    make = functools.partial(jrb.ReplayBuffer, 40)
    with pytest.raises(ValueError, match="Hindsight: unit"):
        make(unit=jrb.Hindsight(reward, unit=jrb.Packed(8, 2)))
    with pytest.raises(ValueError, match="FrameStack"):
        make(unit=jrb.FrameStack(2, unit=jrb.Packed(8, 2)))
    with pytest.raises(ValueError, match="any order"):
        make(num_envs=2, unit=jrb.Packed(8, 2), sampler=jrb.Queue())
    mixture = jrb.Mixture((jrb.Queue(), jrb.Uniform()), (0.5, 0.5))
    buffer, state = jrb.from_items(of_lengths([4, 4, 4]), unit=jrb.Packed(8, 2), sampler=mixture)
    with pytest.raises(TypeError, match="put_back"):
        buffer.sample(state, KEY, 2)


@pytest.mark.parametrize(
    "sampler",
    [
        jrb.Prioritized(beta=1.0),
        dataclasses.replace(LONGEST, beta=1.0),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_the_largest_weight_of_a_batch_is_one(sampler):
    lengths = np.random.default_rng(0).integers(3, 9, 40)
    buffer, state = jrb.from_items(
        of_lengths(lengths), unit=jrb.Packed(16, 8), sampler=sampler, batch_size=4
    )
    if sampler.prioritized:
        priorities = jnp.arange(1.0, 41.0)
        state = buffer.update_priority(state, jnp.cumsum(lengths) - lengths, priorities)
    batches = jax.vmap(lambda key: buffer.sample(state, key))(jax.random.split(KEY, 50))
    np.testing.assert_allclose(batches.weights.max(axis=(1, 2)), 1, rtol=1e-6)
    ratio = np.asarray(batches.weights * batches.probabilities)
    for row in ratio:
        np.testing.assert_allclose(row[row > 0], row.max(), rtol=1e-4)


def test_an_epoch_with_departed_episodes_has_all_others():
    lengths = [3, 2, 4, 1, 5, 2, 3, 4, 2, 4, 3, 1, 2, 4]
    rows, starts = of_lengths(lengths), np.cumsum(lengths) - lengths
    sampler = jrb.WithoutReplacement()
    buffer, full = jrb.from_items(rows, unit=jrb.Packed(6, 4), sampler=sampler, batch_size=2)
    # A running episode overwrites the first ones, and none enters.
    long = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:18]), rows)
    extend, draw = jax.jit(buffer.extend), jax.jit(buffer.draw)
    for seed in range(30):
        state, batch = draw(full, jax.random.key(seed))
        state, order = extend(state, long), state.sampler.seed
        seen = batch.indices[batch.weights > 0].tolist()
        while True:
            state, batch = draw(state, jax.random.key(1000))
            if (state.sampler.seed != order).any():
                break
            seen += batch.indices[batch.weights > 0].tolist()
        assert len(seen) == len(set(seen))
        assert set(seen) >= set(starts[starts >= 18].tolist())


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_have_every_episode_once(drop_last):
    lengths = np.random.default_rng(2).integers(1, 6, 40)
    buffer, state = jrb.from_items(of_lengths(lengths), unit=jrb.Packed(6, 3), batch_size=2)
    batches = jrb.epochs(buffer, state, KEY, n_epochs=2, drop_last=drop_last)
    seen = list(batches)
    assert len(batches) == len(seen)
    numbers = np.concatenate([batch.indices[batch.weights > 0] for batch in seen])
    starts = np.cumsum(lengths) - lengths
    if drop_last:
        # As many are left out as might not have filled a batch.
        assert 2 * (40 - 5) <= len(numbers) < 80
        assert np.unique(numbers, return_counts=True)[1].max() == 2
        with pytest.raises(ValueError, match="expected enough for a batch of 14"):
            jrb.epochs(buffer, state, KEY, 7 * 2, drop_last=True)
        return
    for part in (numbers[:40], numbers[40:]):
        np.testing.assert_array_equal(np.sort(part), starts)
    assert len(list(jrb.steps(buffer, state, KEY, n_epochs=2))) == len(seen)


@pytest.mark.parametrize("per_row", [3, 6])
def test_priorities_of_missing_episodes_may_be_anything(per_row):
    parts = {"unit": jrb.Packed(6, per_row), "sampler": jrb.Prioritized(), "batch_size": 2}
    buffer, state = jrb.from_items(of_lengths([3, 2, 4, 1, 5, 2, 3, 4]), **parts)
    batch = buffer.sample(state, KEY)
    priorities = jnp.where(batch.weights > 0, 1.0, jnp.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.update_priority(state, batch, priorities)
        with jrb.debug():
            buffer.update_priority(state, batch, priorities)
        own = jax.tree.map(jnp.copy, state)
        jrb.jitted(buffer).update_priority(own, batch, np.asarray(priorities))
    with pytest.warns(jrb.PriorityWarning, match="1 priorities are"):
        buffer.update_priority(state, batch, priorities.at[0, 0].set(jnp.nan))
