"""The replay of DreamerV3 in plain Python, compared with its composition in jrb.

The published replay keeps a queue of windows that follow each other without overlap. A batch
takes what is in the queue, oldest first, and fills up with windows that start anywhere. Windows
continue in the next episode, with `is_first`. Latents are written back after each training step.
The published queue starts at the second row of an environment; here it starts at the first.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jrb


def composition(envs, rows, length, batch_size, **parts):
    online = jrb.Mixture((jrb.Queue(stride=length), jrb.Uniform()), (1.0, 0.0), fill=True)
    unit = jrb.Sequence(length, cross_episodes=True, slots=True, **parts)
    return jrb.ReplayBuffer(rows * envs, envs, batch_size=batch_size, sampler=online, unit=unit)


EXAMPLE = {"number": jnp.int32(0), "latent": jnp.float32(0), "next": {"done": jnp.bool_(False)}}


class Replay:
    """The replay in plain Python; row n of an environment is a dict in `streams[env][n]`."""

    def __init__(self, envs, rows, length):
        self.envs, self.rows, self.length = envs, rows, length
        self.streams = [{} for _ in range(envs)]
        self.overwritten = 0  # rows whose latents came too late
        self.written, self.queue, self.is_first = 0, collections.deque(), [True] * envs

    def add(self, done):
        for env, stream in enumerate(self.streams):
            flags = {"is_first": self.is_first[env], "ends": done[env]}
            stream[self.written] = {"latent": 0.0} | flags
            self.is_first[env] = done[env]
            stream.pop(self.written - self.rows, None)
        self.written += 1
        start = self.written - self.length
        if start >= 0 and start % self.length == 0:
            self.queue.extend((start, env) for env in range(self.envs))
        while self.queue and self.queue[0][0] not in self.streams[0]:
            self.queue.popleft()

    def truncate(self, which):
        for env in np.flatnonzero(which):
            self.is_first[env] = True
            if self.written:
                self.streams[env][self.written - 1]["ends"] = True

    def starts(self):
        """Returns all valid starts, in the order of rows and then of environments."""
        first = max(0, self.written - self.rows)
        numbers = range(first, self.written - self.length + 1)
        return [(number, env) for number in numbers for env in range(self.envs)]

    def window(self, start, env, name):
        return [self.streams[env][start + step][name] for step in range(self.length)]

    def update(self, start, env, latents):
        for step, latent in enumerate(latents):
            if start + step not in self.streams[env]:
                self.overwritten += 1
            else:
                self.streams[env][start + step]["latent"] = latent


def train(buffer, per_turn, turns, key):
    """Writes rows, draws, and writes the latents of the previous batch back, in one scan."""
    envs, length = buffer.num_envs, buffer.unit.length

    def step(carry, inputs):
        state, written, before, latents = carry
        number, key = inputs
        keys = jax.random.split(key, 4)
        done = jax.random.bernoulli(keys[0], 0.1, (per_turn, envs))
        cut = jax.random.bernoulli(keys[1], 0.1, (envs,))
        mask = jax.random.bernoulli(keys[2], 0.8, (per_turn,))
        names = written + jnp.cumsum(mask, dtype=jnp.int32) - 1
        rows = {
            "number": jnp.broadcast_to(names[:, None], (per_turn, envs)),
            "latent": jnp.zeros((per_turn, envs)),
            "next": {"done": done},
        }
        state = buffer.extend(state, rows, mask=mask)
        state = buffer.truncate(state, cut)
        # The learner is one turn late, so some of its rows were overwritten since.
        state = buffer.set(state, before, {"latent": latents})
        state, batch = buffer.draw(state, keys[3])
        lead = (buffer.batch_size, length)
        latents = number * 1000 + jnp.arange(np.prod(lead), dtype=jnp.float32).reshape(lead)
        return (state, names[-1] + 1, batch, latents), (done, mask, cut, batch, latents)

    state = buffer.init(EXAMPLE)
    state, batch = buffer.draw(state, key)
    carry = state, jnp.int32(0), batch, jnp.zeros((buffer.batch_size, length))
    numbers = jnp.arange(1, turns + 1, dtype=jnp.float32)
    return jax.lax.scan(step, carry, (numbers, jax.random.split(key, turns)))


def follow(replay, history, length):
    """Runs the model along a history, and compares each batch; returns the uniform starts."""
    uniform, replayed, late = [], [], None
    for done, mask, cut, batch, latents in history:
        for t in np.flatnonzero(mask):
            replay.add(done[t])
        replay.truncate(cut)
        for start, env, values in late or []:
            replay.update(start, env, values)
        starts = replay.starts()
        assert batch.mask.all() == batch.mask.any() == bool(starts)
        late = []
        if not starts:
            continue
        # Windows of the queue come first, in their order; each of them comes once.
        online = [replay.queue.popleft() for _ in range(min(len(batch.mask), len(replay.queue)))]
        drawn = list(zip(batch.data["number"][:, 0], batch.indices % replay.envs, strict=True))
        assert drawn[: len(online)] == online
        assert batch.info["sampler"].tolist() == [
            int(place >= len(online)) for place in range(len(drawn))
        ]
        replayed += online
        rank = {start: number for number, start in enumerate(starts)}
        uniform += [(rank[start], len(starts)) for start in drawn[len(online) :]]
        for place, (start, env) in enumerate(drawn):
            rows = np.arange(start, start + length)
            np.testing.assert_array_equal(batch.data["number"][place], rows)
            for name, values in (
                ("latent", batch.data["latent"]),
                ("is_first", batch.info["is_first"]),
                ("ends", batch.info["is_last"]),
            ):
                np.testing.assert_array_equal(values[place], replay.window(start, env, name))
            late.append((start, env, latents[place]))
    assert len(replayed) == len(set(replayed))
    return uniform, replayed


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    ("envs", "rows", "length", "batch_size", "per_turn"),
    [(3, 16, 4, 5, 3), (1, 24, 5, 3, 2), (2, 12, 6, 2, 4)],  # the queue of the last one overflows
)
def test_batches_are_those_of_the_published_replay(envs, rows, length, batch_size, per_turn):
    buffer = composition(envs, rows, length, batch_size)
    traces = []

    @jax.jit
    def program(key):
        traces.append(1)
        return train(buffer, per_turn, 150, key)[1]

    ranks = []
    for seed in range(3):
        done, mask, cut, batches, latents = jax.device_get(program(jax.random.key(seed)))
        history = [
            jax.tree.map(lambda leaf: leaf[turn], (done, mask, cut, batches, latents))  # noqa: B023
            for turn in range(150)
        ]
        replay = Replay(envs, rows, length)
        uniform, replayed = follow(replay, history, length)
        ranks += [rank for rank, count in uniform if count == (rows - length + 1) * envs]
        assert replay.overwritten > 0
        if (envs, rows) == (3, 16):  # nothing was lost: all windows were replayed once
            numbers = range(0, replayed[-1][0], length)
            first = [(start, env) for start in numbers for env in range(envs)]
            assert replayed[: len(first)] == first
    assert len(traces) == 1
    assert stats.chisquare(np.bincount(ranks, minlength=(rows - length + 1) * envs)).pvalue > 1e-4


def test_latents_of_the_first_row_are_read_alone():
    """A window starts from the latent that the row before it got last, as in the guide."""
    buffer = composition(2, 16, 4, 6, burn_in=1, first_only=("latent",))
    state, rows = buffer.init(EXAMPLE), jnp.arange(20, dtype=jnp.int32)
    items = {"number": jnp.stack([rows, rows], 1), "latent": jnp.zeros((20, 2))}
    state = buffer.extend(state, items | {"next": {"done": jnp.zeros((20, 2), bool)}})

    @functools.partial(jax.jit, donate_argnums=0)
    def learn(state, key):
        state, batch = buffer.draw(state, key)
        start = jnp.where(batch.mask[:, 0], batch.data["latent"], 0.0)
        version = start[:, None] + jnp.arange(1.0, 5.0)
        return buffer.set(state, batch, {"latent": version}), batch

    latents = np.zeros((2, 20), np.float32)
    for key in jax.random.split(jax.random.key(0), 30):
        state, batch = learn(state, key)
        before = latents.copy()
        pairs = zip(batch.data["number"][:, 1].tolist(), (batch.indices % 2).tolist(), strict=True)
        for place, (start, env) in enumerate(pairs):
            assert batch.mask[place, 0] == (start > 4)  # row 4 is the oldest one stored
            first = before[env, start - 1] if start > 4 else 0
            assert first == 0 or batch.data["latent"][place] == first
            latents[env, start : start + 4] = first + np.arange(1, 5)


def test_a_stride_of_a_queue_needs_a_unit_of_rows():
    strided = jrb.Sequence(4, stride=4, cross_episodes=True)
    for unit in (jrb.Sequence(4), strided, jrb.FrameStack(2)):
        with pytest.raises(ValueError, match="Queue: stride=4: expected a unit of which every row"):
            jrb.ReplayBuffer(64, 2, sampler=jrb.Queue(stride=4), unit=unit)
    with pytest.raises(ValueError, match="stride"):
        jrb.Queue(stride=0)
    with pytest.raises(ValueError, match="stride"):
        jrb.Queue(stride=2**15 + 1)


@pytest.mark.slow
def test_a_queue_with_a_stride_is_saved_and_rebuilt(tmp_path):
    buffer = jrb.ReplayBuffer(12, batch_size=1, sampler=jrb.Queue(stride=5))
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(12, dtype=jnp.int32)})
    state, first = buffer.draw(state, jax.random.key(0))
    jrb.save(tmp_path / "queue", buffer, state)
    loaded, state = jrb.load(tmp_path / "queue")
    assert loaded == buffer
    larger = jrb.ReplayBuffer(40, batch_size=1, sampler=jrb.Queue(stride=5))
    state = jrb.rebuild(loaded, state, larger)
    state = larger.extend(state, {"x": jnp.arange(12, 24, dtype=jnp.int32)})
    drawn = [int(first.data["x"][0])]
    while larger.can_sample(state):
        state, batch = larger.draw(state, jax.random.key(0))
        drawn.append(int(batch.data["x"][0]))
    assert drawn == [0, 5, 10, 15, 20]
