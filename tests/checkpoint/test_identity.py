"""Checkpoints with files of another save, and copies of whole ones."""

import contextlib
import shutil

import jax.numpy as jnp
import pytest

import jrb
from jrb import checkpoint
from tests.checkpoint.test_checkpoint import assert_same
from tests.small_blocks import file_of, small_blocks

BUFFER = jrb.ReplayBuffer(8, 1, batch_size=2)


def state_of(number):
    """Returns a state whose items all hold this number."""
    return BUFFER.extend(BUFFER.init({"x": jnp.float32(0)}), {"x": jnp.full((3, 1), number)})


def whole(kind, numbers):
    """Returns several buffers, their states with these numbers, and the parts' names."""
    states = [state_of(jnp.float32(number)) for number in numbers]
    if kind == "mix":
        return jrb.Mix((BUFFER,) * 3, (0.4, 0.3, 0.3), 4), tuple(states), ["0", "1", "2"]
    names = ["a", "b", "c"]
    if kind == "nested":
        inner = {"inner": dict(zip(names, [BUFFER] * 3, strict=True))}
        paths = [f"inner/{name}" for name in names]
        return inner, {"inner": dict(zip(names, states, strict=True))}, paths
    if kind == "dict":
        return dict.fromkeys(names, BUFFER), dict(zip(names, states, strict=True)), names
    sharded = jrb.Sharded(jrb.ReplayBuffer(24, 3, batch_size=3), 3)
    state = sharded.init({"x": jnp.float32(0)})
    rows = {"x": jnp.tile(jnp.asarray(numbers, jnp.float32), (3, 1))}
    return sharded, sharded.extend(state, rows), ["0", "1", "2"]


@pytest.mark.parametrize("kind", ["dict", "nested", "mix", "shards"])
def test_arrays_of_another_part_or_another_save_are_damage(kind, tmp_path):
    buffer, state, names = whole(kind, (1, 2, 3))
    _, later, _ = whole(kind, (1, 2, 4))
    with small_blocks():
        jrb.save(tmp_path / "set", buffer, state)
        jrb.save(tmp_path / "other", buffer, later)
        file = file_of(tmp_path / "set", f"{names[2]}/storage/x")
        for other in (
            file_of(tmp_path / "set", f"{names[1]}/storage/x"),
            file_of(tmp_path / "other", f"{names[2]}/storage/x"),
        ):
            shutil.copy(other, file)
            message = f"{file.name}: leaf 'storage/x', block 0: expected the checksum"
            with pytest.raises(checkpoint.DamagedError, match=message):
                jrb.load(tmp_path / "set")
            (line,) = checkpoint.verify(tmp_path / "set")
            assert message in line
        jrb.save(tmp_path / "set", buffer, later)
        assert_same(jrb.load(tmp_path / "set")[1], later)


@pytest.mark.parametrize("large", [False, True])
def test_older_generations_that_are_put_back(large, tmp_path):
    buffer, state, _ = whole("dict", (1, 2, 3))
    _, later, _ = whole("dict", (4, 5, 6))
    with small_blocks() if large else contextlib.nullcontext():
        jrb.save(tmp_path / "set", buffer, state)
        shutil.copytree(tmp_path / "set", tmp_path / "backup")
        for one in (later, whole("dict", (7, 8, 9))[1], later):
            jrb.save(tmp_path / "set", buffer, one)
        name = "generation-000000000001"
        shutil.copy(tmp_path / "backup" / name, tmp_path / "set" / name)
        assert checkpoint.generations(tmp_path / "set") == [1, 4]
        assert_same(jrb.load(tmp_path / "set")[1], later)
        if large:  # its blocks were overwritten since
            with pytest.raises(checkpoint.DamagedError, match="expected the checksum"):
                jrb.load(tmp_path / "set", generation=1)
            assert checkpoint.verify(tmp_path / "set")
        else:
            assert_same(jrb.load(tmp_path / "set", generation=1)[1], state)
        jrb.save(tmp_path / "set", buffer, state)
        assert checkpoint.generations(tmp_path / "set") == [5]
        assert checkpoint.verify(tmp_path / "set") == []
        assert_same(jrb.load(tmp_path / "set")[1], state)


def test_a_backup_over_a_newer_checkpoint(tmp_path):
    buffer, state, _ = whole("dict", (1, 2, 3))
    _, later, _ = whole("dict", (4, 5, 6))
    with small_blocks():
        jrb.save(tmp_path / "set", buffer, state)
        shutil.copytree(tmp_path / "set", tmp_path / "backup")
        jrb.save(tmp_path / "set", buffer, later)
        jrb.save(tmp_path / "set", buffer, later)
        shutil.rmtree(tmp_path / "set")
        shutil.copytree(tmp_path / "backup", tmp_path / "set")
        assert_same(jrb.load(tmp_path / "set")[1], state)
        assert jrb.save(tmp_path / "set", buffer, later) == 2
        assert_same(jrb.load(tmp_path / "set")[1], later)
        assert checkpoint.verify(tmp_path / "set") == []


def test_a_copy_of_the_whole_folder_is_whole(tmp_path):
    buffer, state, _ = whole("shards", (1, 2, 3))
    jrb.save(tmp_path / "set", buffer, state)
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    assert checkpoint.verify(tmp_path / "copy") == []
    assert_same(jrb.load(tmp_path / "copy")[1], state)
