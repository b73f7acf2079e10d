"""Checkpoints that an earlier version wrote (see tests/data/checkpoints/README.md)."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

import jrb

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "checkpoints"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def restored(items):
    """Inverts the function that encoded the checkpoint `encoded`."""
    return {**items, "observation": items["observation"].astype(np.float32)}


def kept_items():
    """Returns the items of `without_items`, which that checkpoint does not hold."""
    leaves = EXPECTED["trajectories.h5"]["leaves"]
    action, done, next_observation, reward, terminated, truncated, observation = (
        np.asarray(values, dtype) for dtype, values in leaves.values()
    )
    following = {
        "done": done,
        "observation": next_observation,
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
    }
    return {"action": action, "next": following, "observation": observation}


def check(buffer, state, expected):
    """Asserts that the items and the next sample equal the recorded ones."""
    items = jax.tree.leaves(jrb.items(buffer, state))
    for leaf, (dtype, values) in zip(items, expected["leaves"].values(), strict=True):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = np.asarray(leaf)
        assert str(leaf.dtype) == dtype
        np.testing.assert_array_equal(leaf.astype(np.float64), np.asarray(values, np.float64))
    if expected["indices"] is not None:
        sample = buffer.sample(state, jax.random.key(7))
        np.testing.assert_array_equal(sample.indices, expected["indices"])
        if expected["probabilities"] is not None:
            np.testing.assert_allclose(sample.probabilities, expected["probabilities"], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"objects"}))
def test_a_recorded_checkpoint_loads(name, tmp_path):
    path = tmp_path / name
    copy = shutil.copyfile if (FOLDER / name).is_file() else shutil.copytree
    copy(FOLDER / name, path)
    options = {}
    if name == "encoded":
        options["decode"] = restored
    if name == "without_items":
        options["items"] = kept_items()
    buffer, state = jrb.load(path, **options)
    if name == "mix":
        assert len(buffer.buffers) == len(state) == 2
    elif name == "several":
        for part, expected in EXPECTED[name].items():
            check(buffer[part], state[part], expected)
    else:
        check(buffer, state, EXPECTED[name])
    assert jrb.checkpoint.verify(path) == []
    if not path.is_file():
        jrb.save(tmp_path / "again", buffer, state)


def test_recorded_objects_are_refused():
    """Objects were saved in a format that jrb no longer reads."""
    with pytest.raises(ValueError, match="Load them with that version"):
        jrb.load(FOLDER / "objects")


def test_what_was_saved_besides_a_recorded_checkpoint_loads():
    example = {"step": 0, "w": np.zeros(3, np.float32)}
    *_, extra = jrb.load(FOLDER / "prioritized", extra=example)
    assert extra["step"] == 21
    np.testing.assert_array_equal(extra["w"], np.arange(3))
