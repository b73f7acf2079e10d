"""N-step returns against plain lists of episodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.units.streams import KEY, check, n_step, random_streams

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("n", "discount", "strict"), [(1, 0.5, False), (3, 0.5, False), (3, 0.5, True)]
)
@random_streams
def test_n_step(n, discount, strict, data):
    unit = jrb.NStep(n, discount, strict=strict)
    check(unit, n_step(n, discount, strict), [(3, 1), (4, 2), (11, 3)], data)


def test_the_published_example_of_n_step_returns():
    buffer = jrb.ReplayBuffer(8, batch_size=64, unit=jrb.NStep(3, 0.5))
    number, flag = jnp.float32(0), jnp.bool_(False)
    example = {
        "observation": number,
        "next": {"observation": number, "reward": number, "done": flag},
    }
    state = buffer.init(example)
    for t in range(5):
        after = {"observation": t + 1.0, "reward": 1.0, "done": t == 4}
        item = {"observation": jnp.float32(t), "next": jax.tree.map(jnp.asarray, after)}
        state = buffer.add(state, item)
    sample = buffer.sample(state, KEY)
    order = np.argsort(np.asarray(sample.indices))
    first = [order[np.searchsorted(np.asarray(sample.indices)[order], slot)] for slot in range(5)]
    assert sample.data["next"]["reward"][jnp.array(first)].tolist() == [1.75, 1.75, 1.75, 1.5, 1.0]
    assert sample.data["next"]["observation"][jnp.array(first)].tolist() == [3, 4, 5, 5, 5]
    assert sample.data["next"]["done"][jnp.array(first)].tolist() == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert sample.info["discount"][jnp.array(first)].tolist() == [0.125, 0.125, 0.125, 0.25, 0.5]
