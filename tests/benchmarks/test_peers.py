"""Every peer holds the added items and draws the requested ones, for each setup it supports."""

import jax
import numpy as np
import pytest

from benchmarks import items, peers
from benchmarks.setup import DISCOUNT, LENGTH, STACK, STEPS
from tests.benchmarks.tiny import SETUPS

pytestmark = pytest.mark.slow

ALIKE = ("frames", "CartPole", "many environments")
"""Setups that test something new only for peers on the host."""
CASES = [
    pytest.param(peer, setup, id=f"{peer.name}, {name}")
    for name, setup in SETUPS.items()
    for peer in peers.ALL
    if peer.can(setup) and not (peer.on_device and name in ALIKE)
]


def installed(peer):
    if peer.missing():
        pytest.skip(f"{peer.name} is not installed: pip install {' '.join(peer.missing())}")
    if peer.name == "TorchRL":
        pytest.importorskip("torchrl._torchrl", exc_type=ImportError)


def turned(peer, setup, rounds):
    """Runs some rounds of add, sample and update; returns the batches and the buffer."""
    buffer = peer.full(setup)
    compiled = jax.jit if peer.on_device else lambda function: function
    add, sample, update = map(compiled, (buffer.add, buffer.sample, buffer.update))
    found, state = [], buffer.state
    for number, rows in enumerate(setup.fresh(rounds)):
        state = add(state, buffer.rows(rows))
        after, drawn = sample(state, jax.random.key(number))
        state = state if after is None else after
        if setup.prioritized:
            state = update(state, drawn.handle, np.linspace(0.5, 1.5, setup.batch, dtype="f4"))
        found.append(buffer.read(drawn.data))
    return found, buffer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("peer", "setup"), CASES)
def test_what_is_drawn_was_added(peer, setup):
    installed(peer)
    rounds = 3
    batches, buffer = turned(peer, setup, rounds)
    for batch in batches:
        check(setup, batch)
    assert buffer.nbytes == 0 or buffer.nbytes >= setup.capacity * items.width(setup.items) // 2


def check(setup, batch):
    """Asserts that a batch holds the items that the unit makes of rows with its numbers."""
    lead = (setup.batch, LENGTH) if setup.unit == "slices" else (setup.batch,)
    seen = last_frames(setup, batch)
    numbers = items.numbers(setup.items, seen)
    assert numbers.shape == lead
    want = items.rows(setup.items, numbers, setup.envs)
    if setup.unit == "slices":
        assert (np.diff(numbers, axis=1) == setup.envs).all()
    elif setup.unit == "n-step":
        want = n_steps(setup, numbers, want, seen)
    one, other = items.leaves(want), items.leaves(seen)
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        np.testing.assert_allclose(other[name], leaf, rtol=1e-6, err_msg=name)
        assert other[name].dtype == leaf.dtype


def last_frames(setup, batch):
    """Returns the batch with only the last frame of each stack."""
    if setup.unit != "stack":
        return batch
    assert batch["obs"].shape == batch["next_obs"].shape == (setup.batch, STACK, *items.FRAME)
    return {**batch, "obs": batch["obs"][:, -1], "next_obs": batch["next_obs"][:, -1]}


def n_steps(setup, numbers, first, seen):
    """Returns items with three-step returns; those that an episode's end cuts are as drawn."""
    ahead = [items.rows(setup.items, numbers + k * setup.envs, setup.envs) for k in range(STEPS)]
    free = ~np.any([rows["done"] for rows in ahead], axis=0)
    free &= numbers + 2 * setup.envs < setup.capacity  # and all three rows are held
    rewards = sum(DISCOUNT**k * rows["reward"] for k, rows in enumerate(ahead)).astype("f4")
    pick = lambda new, old: np.where(free.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
    return {
        **first,
        "reward": pick(rewards, seen["reward"]),
        "done": pick(ahead[-1]["done"], seen["done"]),
        "next_obs": pick(ahead[-1]["next_obs"], seen["next_obs"]),
    }


def test_every_kind_of_items_is_told_by_its_numbers():
    numbers = np.array([[0, 7, 299], [70_000, 2**20 + 3, 2**24 - 1]])
    for kind in items.KINDS:
        rows = items.rows(kind, numbers, 4)
        np.testing.assert_array_equal(items.numbers(kind, rows), numbers)
        assert items.nested(items.leaves(rows)).keys() == rows.keys()
    assert len(items.leaves(items.example("nested"))) == 19
    assert items.width("vector") == 168
    assert items.width("frames") == 2 * 84 * 84 + 4 + 4 + 1


def test_the_next_observation_is_that_of_the_next_row():
    now, after = (items.rows("nested", np.arange(6) + add, 3) for add in (0, 3))
    np.testing.assert_array_equal(now["next_obs"]["goal"], after["obs"]["goal"])


def test_pieces_fill_a_buffer_in_order():
    setup = SETUPS["uniform"]
    whole = np.concatenate([piece["obs"][..., 0].reshape(-1) for piece in setup.pieces()])
    np.testing.assert_array_equal(whole, np.arange(setup.capacity))
    assert setup.fresh(1)[0]["obs"][0, 0] == setup.capacity


def test_a_peer_that_nobody_knows_is_an_error():
    assert [peer.name for peer in peers.chosen(["NumPy"])] == ["jrb", "NumPy"]
    with pytest.raises(ValueError, match=r"expected some of jrb, flashbax.*got torch"):
        peers.chosen(["torch"])


def test_numpys_tree_draws_by_mass():
    from benchmarks.peers.numpy_arrays import Tree

    tree = Tree(5)
    tree.set(np.array([0, 3, 3]), [0.0, 7.0, 3.0])
    assert tree.nodes[1] == 6
    np.testing.assert_array_equal(tree.find(np.arange(6) + 0.5), [1, 2, 3, 3, 3, 4])
