"""Several buffers in one folder, saved in one generation."""

import contextlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint
from tests.checkpoint.test_checkpoint import BUFFERS, assert_same, filled
from tests.checkpoint.test_hooks import negated, restored
from tests.small_blocks import damage, file_of, small_blocks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::jrb.CopyWarning")]


ONE, ITS = filled()
OTHER, OWN = filled(**BUFFERS["prioritized"])


def grown(state):
    """Returns the state with an incremented edit count."""
    return state.replace(edits=state.edits + jnp.uint32(1))


@pytest.mark.parametrize(
    ("buffer", "state"),
    [
        ({"train": ONE, "demo": OTHER}, {"demo": OWN, "train": ITS}),
        ((ONE, OTHER, ONE), (ITS, OWN, ITS)),
        (
            {"mix": jrb.Mix((ONE, OTHER), (0.5, 0.5)), "in": {"a": ONE}},
            {"mix": (ITS, OWN), "in": {"a": ITS}},
        ),
    ],
    ids=["dict", "tuple", "nested"],
)
def test_what_comes_back_is_what_was_there(buffer, state, tmp_path):
    assert jrb.save(tmp_path, buffer, state, extra={"step": 3}) == 1
    again, back, extra = jrb.load(tmp_path, extra={"step": 0})
    assert again == buffer
    assert type(again) is type(buffer)
    assert type(back) is type(state)
    assert_same(back, state)
    assert extra == {"step": 3}
    assert_same(jrb.load(tmp_path, buffer)[1], state)
    later = jax.tree.map(grown, state, is_leaf=lambda node: hasattr(node, "edits"))
    checkpoint.save_async(tmp_path, buffer, later, keep=1).wait()
    assert_same(jrb.load(tmp_path)[1], later)
    assert_same(jrb.load(tmp_path, generation=1)[1], state)
    assert checkpoint.verify(tmp_path) == []
    jrb.save(tmp_path, buffer, state)
    assert checkpoint.generations(tmp_path) == [3]
    with small_blocks():
        jrb.save(tmp_path, buffer, state, keep=1)
        jrb.save(tmp_path, buffer, later, keep=1)
        assert_same(jrb.load(tmp_path)[1], later)
        assert_same(jrb.load(tmp_path, generation=4)[1], state)
    assert checkpoint.verify(tmp_path) == []
    facts = checkpoint.metadata(tmp_path)
    json.dumps(facts)
    assert facts["kind"] == "several"
    assert len(facts["parts"]) == len(buffer)


NAMES = [
    *("", ".", "..", "a/b", "/", "%", "%2F", "rows", "rows-3", "lock", "generation.new", "\0"),
    *("generation-000000000001", "é", "\ud83d", "con", "a b", "0", "-", "~", "rows%", "x" * 300),
    *("a", "A", "arrays", ".extra", ".items", "items", "items/x", "x" * 299 + "y", "\n"),
]


def test_any_name_is_safe(tmp_path):
    buffer, state = jrb.from_items({"x": jnp.arange(3)}, batch_size=2)
    whole = dict.fromkeys(NAMES, buffer)
    states = {
        name: buffer.set(state, jnp.arange(3), {"x": jnp.full(3, n)})
        for n, name in enumerate(NAMES)
    }
    path = tmp_path / "inside"
    for number in range(4):
        with small_blocks(16) if number > 1 else contextlib.nullcontext():
            jrb.save(path, whole, states, extra={"x": jnp.arange(5)})
        _, back, extra = jrb.load(path, extra={"x": jnp.arange(5)})
        assert list(back) == NAMES
        assert_same(back, states)
        assert_same(extra, {"x": jnp.arange(5)})
    assert list(checkpoint.metadata(path)["parts"]) == NAMES
    assert checkpoint.verify(path) == []
    assert os.listdir(tmp_path) == ["inside"]
    jrb.save(path, buffer, state)  # a single buffer replaces the parts
    assert_same(jrb.load(path)[1], state)
    assert os.listdir(path / "arrays") == []


def test_others_come_and_go(tmp_path):
    saves = [
        ({"a": ONE}, {"a": ITS}),
        ({"a": OTHER, "b": ONE}, {"a": OWN, "b": ITS}),
        ({"b": ONE}, {"b": grown(ITS)}),
        (ONE, ITS),
        (jrb.Mix((ONE, OTHER), (0.5, 0.5)), (ITS, OWN)),
        ({"b": OTHER, "a": ONE}, {"b": OWN, "a": ITS}),
    ]
    for buffer, state in saves:
        jrb.save(tmp_path, buffer, state, keep=9)
        assert_same(jrb.load(tmp_path)[1], state)
    for number, (buffer, state) in enumerate(saves, 1):
        again, back = jrb.load(tmp_path, generation=number)
        assert again == buffer
        assert_same(back, state)
    assert checkpoint.verify(tmp_path) == []


def test_hooks_for_all_or_by_name(tmp_path):
    words = jrb.ReplayBuffer(4, batch_size=2, storage=jrb.ListStorage())
    text = words.extend(words.init(None), ["a", "b"])
    buffer, state = {"train": ONE, "words": words}, {"train": ITS, "words": text}
    with pytest.raises(TypeError, match="ListStorage"):
        jrb.save(tmp_path / "x", buffer, state, encode=negated)
    assert not os.listdir(tmp_path)
    jrb.save(tmp_path, buffer, state, encode={"train": negated, "words": None})
    with pytest.raises(ValueError, match="expected decode="):
        jrb.load(tmp_path)
    with pytest.raises(ValueError, match="decode: expected None"):
        jrb.load(tmp_path, decode=restored)
    with pytest.raises(ValueError, match="expected a dict of 2 functions, one for each of"):
        jrb.load(tmp_path, decode={"train": restored})
    _, back = jrb.load(tmp_path, decode={"train": restored, "words": None})
    assert_same(back["train"], ITS)
    assert jrb.items(words, back["words"]) == ["a", "b"]
    jrb.save(tmp_path, buffer, state, items=False)
    items = {"train": jrb.items(ONE, ITS), "words": ["a", "b"]}
    assert_same(jrb.load(tmp_path, items=items)[1]["train"], ITS)
    pair = {"a": ONE, "b": OTHER}, {"a": ITS, "b": OWN}
    jrb.save(tmp_path, *pair, encode=negated)
    assert_same(jrb.load(tmp_path, decode=restored)[1], pair[1])


def test_wrong_input_is_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "x"
    for buffer, state, kind, message in [
        ({}, {}, TypeError, "expected a ReplayBuffer, a Mix, or a dict"),
        ({"a": ITS}, {"a": ONE}, TypeError, "got BufferState"),
        ({3: ONE}, {3: ITS}, TypeError, "expected names of buffers, got the key 3"),
        (
            {"a": ONE},
            {"b": ITS},
            ValueError,
            r"dict of 1 states, one for each of \['a'\], got those",
        ),
        ({"a": ONE}, (ITS,), ValueError, "got tuple"),
        ((ONE, ONE), (ITS,), ValueError, "tuple of 2 states"),
        ({"a": ONE, "b": ONE}, {"a": ITS, "b": OWN}, Exception, "sampler"),
    ]:
        with pytest.raises(kind, match=message):
            jrb.save(path, buffer, state)
        assert not path.exists()
    with pytest.raises(ValueError, match="expected a single buffer"):
        jrb.save(path, {"a": ONE}, {"a": ITS}, layout="h5")
    jrb.save(path, {"a": ONE}, {"a": ITS})
    with pytest.raises(ValueError, match=r"expected a dict of 1 buffers, one for each of \['a'\]"):
        jrb.load(path, {"b": ONE})
    with pytest.raises(ValueError, match="got ReplayBuffer"):
        jrb.load(path, ONE)
    with pytest.raises(ValueError, match=r"buffer\.sampler: expected"):
        jrb.load(path, {"a": OTHER})
    with pytest.raises(TypeError, match="single buffer, got several"):
        jrb.load(path, capacity=6)
    assert_same(
        jrb.load(path, example={"a": jax.tree.map(lambda x: x[0], ITS.storage.leaves)})[1]["a"], ITS
    )


def test_damage_to_a_part_and_a_lost_one_are_found(tmp_path):
    with small_blocks():
        jrb.save(tmp_path, {"a": ONE, "b": OTHER}, {"a": ITS, "b": OWN})
    file = file_of(tmp_path, "b/storage/arrays/uint32")
    damage(file, 3)
    (line,) = checkpoint.verify(tmp_path)
    assert file.name in line
    with pytest.raises(checkpoint.DamagedError, match=f"{file.name}: leaf 'storage/action'"):
        jrb.load(tmp_path)
    file.unlink()
    (line, *_) = checkpoint.verify(tmp_path)
    assert f"{file.name}: leaf 'storage/action'" in line and "found none" in line
    with pytest.raises(checkpoint.DamagedError, match=file.name):
        jrb.load(tmp_path)
    jrb.save(tmp_path, {"a": ONE, "b": OTHER}, {"a": ITS, "b": OWN})
    assert checkpoint.verify(tmp_path) == []


def test_parts_on_the_host_are_copied(tmp_path):
    buffer, state = filled(storage=jrb.MemmapStorage(tmp_path / "own"))
    jrb.save(tmp_path / "all", {"a": buffer}, {"a": state})
    again, back = jrb.load(tmp_path / "all")
    key = jax.random.key(0)
    assert_same(again["a"].sample(back["a"], key), buffer.sample(state, key))
    np.testing.assert_array_equal(
        jrb.items(again["a"], back["a"])["action"], jrb.items(buffer, state)["action"]
    )


def test_files_of_others_where_a_part_would_be_stay_alone(tmp_path):
    parts = {"0": ONE, "1": {"deep": OTHER, "rows": ONE}}
    states = {"0": ITS, "1": {"deep": OWN, "rows": ITS}}
    for name in ["0/thesis.tex", "1/deep/.git/config", "1/%72ows/x.bin", "0"]:
        path = tmp_path / name.replace("/", "-")
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text("mine")
        before = sorted(path.rglob("*"))
        for method in (jrb.save, checkpoint.save_async):
            with pytest.raises(ValueError, match=str(path)):
                method(path, parts, states)
            assert sorted(path.rglob("*")) == before
