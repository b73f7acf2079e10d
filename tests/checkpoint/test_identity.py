"""Checkpoints with a part of another save: backup, swapped, duplicated or foreign folders."""

import re
import shutil

import jax.numpy as jnp
import pytest

import jrb
from jrb import checkpoint
from tests.checkpoint.test_checkpoint import assert_same

BUFFER = jrb.ReplayBuffer(4, 1, batch_size=2)


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
    sharded = jrb.Sharded(jrb.ReplayBuffer(12, 3, batch_size=3), 3)
    state = sharded.init({"x": jnp.float32(0)})
    rows = {"x": jnp.tile(jnp.asarray(numbers, jnp.float32), (3, 1))}
    return sharded, sharded.extend(state, rows), ["0", "1", "2"]


def backup(path, other):
    """Replaces a part's folder by that of another save with as many generations."""
    shutil.rmtree(path)
    shutil.copytree(other, path)


def swapped(path, other):
    """Swaps two folders."""
    path.rename(path.with_name("for now"))
    (path.parent / other.name).rename(path)
    path.with_name("for now").rename(path.parent / other.name)


def doubled(path, other):
    """Replaces a folder by a copy of the one beside it."""
    backup(path, path.parent / other.name)


CHANGES = {
    "backup": (backup, 2),
    "foreign": (backup, 2),
    "swapped": (swapped, 1),
    "doubled": (doubled, 1),
}


@pytest.mark.parametrize("kind", ["dict", "nested", "mix", "shards"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_part_of_another_save_is_named(kind, change, tmp_path):
    buffer, state, names = whole(kind, (1, 2, 3))
    _, later, _ = whole(kind, (1, 2, 4))
    jrb.save(tmp_path / "set", buffer, state)
    jrb.save(tmp_path / "other", buffer, later)
    if change == "backup":
        shutil.rmtree(tmp_path / "other")
        shutil.copytree(tmp_path / "set", tmp_path / "other")
        for path in (tmp_path / "set", tmp_path / "other"):
            jrb.save(path, buffer, later if path.name == "set" else state)
    apply, number = CHANGES[change]
    path, other = tmp_path / "set" / names[2], tmp_path / "other" / names[number]
    apply(path, other)
    part = f"part '({names[1][-1]}|{names[2][-1]})'"
    with pytest.raises(checkpoint.DamagedError, match=f"expected {part} as .*another save"):
        jrb.load(tmp_path / "set")
    lines = checkpoint.verify(tmp_path / "set")
    assert any(re.search(part, line) for line in lines)
    with pytest.raises(checkpoint.DamagedError, match="another save"):
        checkpoint.metadata(tmp_path / "set")
    jrb.save(tmp_path / "set", buffer, later)
    assert checkpoint.verify(tmp_path / "set") == []
    assert_same(jrb.load(tmp_path / "set")[1], later)


def test_older_generations_know_their_parts_too(tmp_path):
    buffer, state, _ = whole("dict", (1, 2, 3))
    _, later, _ = whole("dict", (4, 5, 6))
    jrb.save(tmp_path / "set", buffer, state, keep=1)
    jrb.save(tmp_path / "set", buffer, later, keep=1)
    assert_same(jrb.load(tmp_path / "set", generation=1)[1], state)
    old = checkpoint.generations(tmp_path / "set" / "b")[0]
    name = f"generation-{old:012d}"
    shutil.copy(tmp_path / "set" / "a" / name, tmp_path / "set" / "b" / name)
    with pytest.raises(checkpoint.DamagedError, match="part 'b'"):
        jrb.load(tmp_path / "set", generation=1)
    assert_same(jrb.load(tmp_path / "set")[1], later)
    assert any("part 'b'" in line for line in checkpoint.verify(tmp_path / "set"))


def test_a_copy_of_the_whole_folder_is_whole(tmp_path):
    buffer, state, _ = whole("shards", (1, 2, 3))
    jrb.save(tmp_path / "set", buffer, state)
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    assert checkpoint.verify(tmp_path / "copy") == []
    assert_same(jrb.load(tmp_path / "copy")[1], state)
