"""Reading of dumps that TorchRL wrote, and writing of dumps that TorchRL and jrb read."""

import json
import os
import pathlib
import pickle
import shutil

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.checkpoint import DamagedError
from jrb.interop import read_torchrl, write_torchrl

pytestmark = [pytest.mark.slow, pytest.mark.interop]

DATA = pathlib.Path(__file__).parents[1] / "data" / "torchrl"
DUMPS = sorted(path.stem for path in DATA.glob("*_[12]d_*.npz") if "sampler" not in path.name)
FLAGS = ("done", "terminated", "truncated")


def named(items, prefix=""):
    """Returns the arrays of nested dicts by path."""
    out = {}
    for key, entry in items.items():
        inner = named(entry, f"{prefix}{key}/") if isinstance(entry, dict) else None
        out.update({prefix + key: entry} if inner is None else inner)
    return out


def assert_same(items, truth):
    items, truth = named(items), named(truth)
    assert items.keys() == truth.keys()
    for name, leaf in items.items():
        other = np.asarray(truth[name])
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape), name
        assert np.asarray(leaf).tobytes() == np.ascontiguousarray(other).tobytes(), name


def truth_of(name):
    """Returns the items of `rb[:]`, time first, and the recorded metadata of the buffer."""
    with np.load(DATA / f"{name}.npz") as file:
        leaves = {key: file[key] for key in file}
    about = json.loads(str(leaves.pop("__meta__")))
    if "_2d_" in name:
        leaves = {key: leaf.swapaxes(0, 1) for key, leaf in leaves.items()}
    return leaves, about


def copied(name, tmp_path):
    return pathlib.Path(shutil.copytree(DATA / name, tmp_path / name))


def changed(path, change):
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


@pytest.mark.parametrize("name", DUMPS)
def test_real_dumps_are_what_the_buffer_was(name):
    items, info = read_torchrl(DATA / name)
    truth, about = truth_of(name)
    assert_same(items, truth)
    layout, axes, fill = name.removeprefix("per_").split("_")
    assert info["layout"] == layout
    assert info["num_envs"] == (None if axes == "1d" else 3)
    assert info["full"] == about["is_full"] == (fill == "wrapped")
    assert info["cursor"] == about["cursor"]
    assert info["capacity"] == about["max_size"]
    assert info["write_count"] == about["write_count"]
    assert ("priorities" in info) == name.startswith("per")
    assert all(len(leaf) == about["storage_len_dim0"] for leaf in named(items).values())


def test_there_is_a_dump_of_every_layout():
    assert {name.removeprefix("per_").split("_")[0] for name in DUMPS} == {
        "default",
        "flat",
        "nested",
        "h5",
    }


def test_arrays_are_mapped_where_they_lie_as_they_are():
    items = named(read_torchrl(DATA / "default_1d_wrapped").items)
    assert not any(leaf.flags.owndata or leaf.flags.writeable for leaf in items.values())


@pytest.mark.parametrize("name", DUMPS)
def test_squeeze_drops_the_axis_of_rewards_and_flags(name):
    plain, squeezed = (named(read_torchrl(DATA / name, flag).items) for flag in (False, True))
    for key, leaf in plain.items():
        one = key.split("/")[-1] in ("reward", *FLAGS)
        assert squeezed[key].shape == (leaf.shape[:-1] if one else leaf.shape)
        assert squeezed[key].tobytes() == leaf.tobytes()


def test_priorities_are_what_the_sampler_had():
    info = read_torchrl(DATA / "per_default_1d_wrapped").info
    with np.load(DATA / "per_default_1d_wrapped.sampler.npz") as file:
        leaves = file["sum"]
    about = truth_of("per_default_1d_wrapped")[1]
    np.testing.assert_array_equal(info["leaves"], leaves)
    assert (info["alpha"], info["beta"], info["eps"]) == (0.7, 0.9, 1e-8)
    assert info["max_priority"] == about["max_priority"][0] == 10.0
    assert info["priorities"].dtype == np.float64
    np.testing.assert_allclose((info["priorities"] + 1e-8) ** 0.7, leaves, rtol=1e-6)


def test_an_alpha_of_0_leaves_equal_priorities(tmp_path):
    path = copied("per_default_1d_wrapped", tmp_path)
    changed(path / "sampler/sampler_metadata.json", lambda about: about.update(_alpha=0.0))
    assert (read_torchrl(path).info["priorities"] == 1).all()


def test_no_greatest_priority_is_1(tmp_path):
    path = copied("per_default_1d_wrapped", tmp_path)
    nothing = {"_max_priority": [None, None]}
    changed(path / "sampler/sampler_metadata.json", lambda about: about.update(nothing))
    assert read_torchrl(path).info["max_priority"] == 1.0


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_becomes_a_state(name):
    dump = read_torchrl(DATA / name, squeeze=True)
    dump = dump._replace(items=jax.tree.map(narrow, dump.items))
    info = dump.info
    sampler = jrb.Prioritized(alpha=0.7, eps=1e-8)
    buffer = jrb.ReplayBuffer(info["capacity"], info["num_envs"], sampler=sampler)
    state = dump.into(buffer)
    held = len(dump.items["action"]) * (info["num_envs"] or 1)
    assert int(state.writer.cursor) == info["cursor"]
    assert int(buffer.size(state)) == held
    found = buffer.take(state, jnp.arange(held, dtype=jnp.int32))
    flat = lambda leaf: leaf.reshape(held, *leaf.shape[1 if info["num_envs"] is None else 2 :])
    assert_same(jax.tree.map(np.asarray, found), jax.tree.map(flat, dump.items))
    sample = buffer.sample(state, jax.random.key(0), 64)
    leaves = info.get("leaves", np.ones(100))
    if "leaves" in info:
        assert float(state.sampler.highest) == 10.0
        chosen = leaves[np.asarray(sample.indices)]
        np.testing.assert_allclose(sample.probabilities, chosen / leaves.sum(), rtol=1e-4)


def narrow(leaf):
    """Converts int64 to int32, as JAX does by default."""
    return leaf.astype({np.dtype(np.int64): np.int32}.get(leaf.dtype, leaf.dtype))


def step(row, envs, end, one=(1,), width=3):
    """Returns the transitions of a row; observations count up, and jump after every fifth row.

    Rewards and flags have the axes `one` after those of the environments.
    """
    lead = () if envs is None else (envs,)
    shift = np.zeros(lead, np.int32) if envs is None else np.arange(envs, dtype=np.int32) * 100
    place = row + 50 * (row // 5) + shift
    column = lambda values, dtype: jnp.asarray(np.repeat(values[..., None], width, -1)).astype(
        dtype
    )
    done = jnp.asarray(np.broadcast_to(end, (*lead, *one)))
    pixels = lambda values: jnp.asarray((values % 251).astype(np.uint8))
    return {
        "observation": {"x y": column(place, jnp.bfloat16), "eye": pixels(place)},
        "action": column(place, jnp.float32),
        "mask": column(place % 2, jnp.bool_),
        "empty": jnp.zeros((*lead, 0), jnp.float32),
        "next": {
            "observation": {"x y": column(place + 1, jnp.bfloat16), "eye": pixels(place + 1)},
            "reward": jnp.asarray(np.reshape(place, (*lead, *one))).astype(jnp.float32),
            "done": done,
            "terminated": done,
        },
    }


def filled(rows, envs, count, one=(1,), **parts):
    """Returns a buffer of `rows` rows, to which `count` rows were written, and its state."""
    buffer = jrb.ReplayBuffer(rows * (envs or 1), envs, batch_size=8, **parts)
    state = buffer.init(step(0, None, False, one))
    if count:
        steps = [step(row, envs, row % 5 == 4, one) for row in range(count)]
        state = buffer.extend(state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps))
    return buffer, state


def in_storage(buffer, state):
    """Returns the items in slot order, as NumPy arrays."""
    rows = int(buffer.size(state)) // buffer.ring.envs
    lead = (rows,) if buffer.num_envs is None else (rows, buffer.ring.envs)
    slots = jnp.arange(rows * buffer.ring.envs, dtype=jnp.int32).reshape(lead)
    return jax.tree.map(np.asarray, buffer.take(state, slots))


COUNTS = [1, 7, 12, 17, 29]
WRITTEN = [(layout, 3, count) for layout in ("default", "flat") for count in COUNTS]
WRITTEN += [("default", None, 7), ("default", 1, 29), ("flat", None, 17), ("flat", 1, 12)]


@pytest.mark.parametrize(("layout", "envs", "count"), WRITTEN)
def test_what_was_written_comes_back(tmp_path, layout, envs, count):
    buffer, state = filled(12, envs, count)
    write_torchrl(tmp_path / "dump", buffer, state, layout)
    items, info = read_torchrl(tmp_path / "dump")
    truth = in_storage(buffer, state)
    if layout == "flat":
        for flag in ("done", "terminated"):
            truth[flag] = np.zeros_like(truth["next"][flag])
    assert_same(items, truth)
    assert info["layout"] == layout
    assert info["num_envs"] == envs
    assert info["full"] == (count >= 12)
    assert info["cursor"] == count % 12 == int(state.writer.cursor)
    assert info["write_count"] == count
    assert info["capacity"] == buffer.capacity
    assert "priorities" not in info
    if layout == "default":
        assert_same(in_storage(buffer, read_torchrl(tmp_path / "dump").into(buffer)), truth)


@pytest.mark.parametrize("envs", [None, 3])
@pytest.mark.parametrize("count", [7, 17])
def test_priorities_come_back(tmp_path, envs, count):
    sampler = jrb.Prioritized(alpha=0.5, eps=0.01)
    buffer, state = filled(12, envs, count, (), sampler=sampler, unit=jrb.Sequence(3))
    slots = jnp.arange(int(buffer.size(state)), dtype=jnp.int32)
    state = buffer.update_priority(state, slots, slots.astype(jnp.float32))
    write_torchrl(tmp_path / "dump", buffer, state)
    info = read_torchrl(tmp_path / "dump").info
    raw = np.asarray(state.sampler.raw)[: len(slots)].reshape(info["leaves"].shape)
    assert (raw < 0).any()
    np.testing.assert_array_equal(info["leaves"] == 0, raw < 0)
    np.testing.assert_allclose(info["priorities"], np.maximum(raw, 0), rtol=1e-5, atol=1e-6)
    assert (info["alpha"], info["beta"], info["eps"]) == (0.5, pytest.approx(0.4), 0.01)
    assert info["max_priority"] == float(state.sampler.highest)
    assert os.path.getsize(tmp_path / "dump/sampler/mintree.memmap") == 8 * buffer.capacity


def test_rows_that_begin_elsewhere_are_written_from_the_first_on(tmp_path):
    buffer, state = filled(12, None, 17)
    state = state.replace(writer=state.writer.replace(count=jnp.int32(7)))
    write_torchrl(tmp_path / "dump", buffer, state)
    items, info = read_torchrl(tmp_path / "dump")
    wanted = [float(step(row, None, False)["next"]["reward"][0]) for row in range(10, 17)]
    assert items["next"]["reward"][:, 0].tolist() == wanted
    assert (info["cursor"], info["full"], info["write_count"]) == (7, False, 7)


def test_a_ring_of_the_best_is_written_in_the_order_of_its_slots(tmp_path):
    writer = jrb.MaxValue(key=("next", "reward"))
    for count in (5, 17):
        buffer, state = filled(12, None, count, writer=writer)
        write_torchrl(tmp_path / f"{count}", buffer, state)
        items, info = read_torchrl(tmp_path / f"{count}")
        assert_same(items, in_storage(buffer, state))
        assert (info["cursor"], info["full"]) == (count % 12 if count < 12 else 0, count > 12)
    buffer, state = filled(4, 3, 2, writer=writer)
    state = state.replace(writer=state.writer.replace(count=jnp.int32(4)))
    with pytest.raises(ValueError, match="all 3 environments"):
        write_torchrl(tmp_path / "odd", buffer, state)


def test_nothing_written_is_nothing_read(tmp_path):
    buffer, state = filled(4, None, 0)
    write_torchrl(tmp_path / "dump", buffer, state)
    items, info = read_torchrl(tmp_path / "dump")
    assert items["action"].shape == (0, 3)
    assert (info["cursor"], info["full"]) == (0, False)


def test_names_that_no_file_has(tmp_path):
    keys = ["..", ".", "", "a b", "50%", "a:b", "ü"]
    item = {key: jnp.float32(number) for number, key in enumerate(keys)}
    item = {"in": item, **item}
    buffer = jrb.ReplayBuffer(2)
    state = buffer.add(buffer.init(item), item)
    write_torchrl(tmp_path / "in" / "dump", buffer, state)
    items, _ = read_torchrl(tmp_path / "in" / "dump")
    assert items.keys() == item.keys() and items["in"].keys() == item["in"].keys()
    assert [float(items["in"][key][0]) for key in keys] == list(range(len(keys)))
    assert [float(items[key][0]) for key in keys] == list(range(len(keys)))


def test_what_flat_cannot_hold_is_refused(tmp_path):
    def refused(change, match, rows=7):
        items = jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *[step(row, None, False) for row in range(5)]
        )
        change(items)
        buffer = jrb.ReplayBuffer(rows)
        state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], items)), items)
        with pytest.raises(ValueError, match=match) as error:
            write_torchrl(tmp_path / "dump", buffer, state, "flat")
        assert "default" in str(error.value)
        assert os.listdir(tmp_path) == []

    eye = lambda items: items["next"]["observation"]
    refused(lambda items: eye(items).update(eye=eye(items)["eye"].at[2].set(9)), "observation/eye")
    refused(lambda items: eye(items).update(more=eye(items)["eye"]), "observation/more")
    refused(lambda items: eye(items).update(eye=jnp.zeros((5, 2))), "dtype and shape")
    refused(lambda items: items["next"].pop("done"), "next/done")
    refused(lambda items: items.update(reward=items["next"]["reward"]), "leaf 'reward'")
    refused(lambda items: items.update(done=jnp.ones((5, 1), bool)), "leaf 'done'")
    refused(lambda items: items["next"].update(done=jnp.ones((5, 2), bool)), "one flag")


def test_a_seam_at_the_newest_row_is_held(tmp_path):
    buffer, state = filled(4, None, 7)
    write_torchrl(tmp_path / "dump", buffer, state, "flat")
    items, truth = read_torchrl(tmp_path / "dump").items, in_storage(buffer, state)
    newest, after = truth["next"]["observation"]["eye"][2], truth["observation"]["eye"][3]
    assert newest != after and not truth["next"]["done"][2]
    assert_same(items["next"]["observation"], truth["next"]["observation"])


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    buffer, state = filled(4, None, 2)
    (tmp_path / "empty").mkdir()
    write_torchrl(tmp_path / "empty", buffer, state)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="empty folder"):
        write_torchrl(tmp_path / "empty", buffer, state)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="empty folder"):
        write_torchrl(tmp_path / "file", buffer, state)
    (tmp_path / "file").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    buffer, state = filled(4, None, 2, sampler=jrb.Prioritized())

    def fail(source, target):
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        write_torchrl(tmp_path / "dump", buffer, state)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_written_is_said(tmp_path):
    path = tmp_path / "dump"
    buffer, state = filled(4, None, 2)
    with pytest.raises(ValueError, match="layout: expected"):
        write_torchrl(path, buffer, state, "nested")
    with pytest.raises(TypeError, match="expected a ReplayBuffer"):
        write_torchrl(path, state, buffer)
    for item, error, match in [
        ((jnp.zeros(3),), TypeError, "expected a dict"),
        ({"key": jax.random.key(0)}, ValueError, "leaf 'key': expected a dtype"),
        ({"a": {"shape": jnp.zeros(3)}}, ValueError, "leaf 'a/shape'"),
    ]:
        buffer = jrb.ReplayBuffer(4)
        with pytest.raises(error, match=match):
            write_torchrl(path, buffer, buffer.init(item))
    assert os.listdir(tmp_path) == []


# Damaged dumps.


@pytest.mark.faults
@pytest.mark.parametrize("name", DUMPS)
def test_every_file_cut_short_is_noticed(name, tmp_path):
    for file in sorted(p for p in (DATA / name).rglob("*") if p.is_file()):
        if file.name in ("buffer_metadata.json", "mintree.memmap"):
            continue
        size = file.stat().st_size
        for left in {0, 1, size // 2, size - 1}:
            path = tmp_path / f"{left}"
            shutil.copytree(DATA / name, path)
            os.truncate(path / file.relative_to(DATA / name), left)
            with pytest.raises(DamagedError) as error:
                read_torchrl(path)
            assert file.name in str(error.value)
            assert "expected" in str(error.value) and "found" in str(error.value)
            shutil.rmtree(path)


@pytest.mark.faults
@pytest.mark.parametrize("name", [name for name in DUMPS if "h5" not in name])
def test_every_missing_file_is_noticed(name, tmp_path):
    for file in sorted(p for p in (DATA / name).rglob("*") if p.is_file()):
        optional = ("buffer_metadata.json", "mintree.memmap", "sampler_metadata.json")
        if file.name in optional:
            continue
        path = copied(name, tmp_path)
        (path / file.relative_to(DATA / name)).unlink()
        with pytest.raises(FileNotFoundError, match=file.name):
            read_torchrl(path)
        shutil.rmtree(path)


@pytest.mark.parametrize("name", [name for name in DUMPS if "h5" not in name])
@pytest.mark.parametrize("size", [0, 1, 99, 101, 10**15, 2**63, 2**200, -1, 1.5, "9", None, True])
def test_sizes_that_the_files_do_not_have(name, size, tmp_path):
    path = copied(name, tmp_path)
    for file in sorted(path.rglob("meta.json")):
        before = file.read_text()
        about = json.loads(before)
        shapes = [
            entry["shape"]
            for entry in about.values()
            if isinstance(entry, dict) and "shape" in entry
        ]
        for shape in [
            *shapes,
            *([about["shape"]] if about.get("shape") and file.parent.name == "storage" else []),
        ]:
            old, shape[0] = shape[0], size
            file.write_text(json.dumps(about))
            if old != size and not (shape is about["shape"] and "default" not in name):
                with pytest.raises(DamagedError, match=r"expected .* found"):
                    read_torchrl(path)
            shape[0] = old
        file.write_text(before)


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("storage/storage_metadata.json", "len"),
        ("writer/metadata.json", "cursor"),
        ("sampler/sampler_metadata.json", "_max_capacity"),
        ("sampler/sampler_metadata.json", "_alpha"),
        ("sampler/sampler_metadata.json", "_max_priority"),
    ],
)
@pytest.mark.parametrize("value", [-1, 10**15, float("nan"), float("inf"), "9", None, {}, [], True])
def test_numbers_that_cannot_be(file, key, value, tmp_path):
    if (key, value) in [("_max_priority", None), ("_max_priority", 10**15), ("_alpha", 10**15)]:
        return  # these are valid
    path = copied("per_default_1d_wrapped", tmp_path)
    changed(path / file, lambda about: about.update({key: value}))
    with pytest.raises(DamagedError, match="expected"):
        read_torchrl(path)


@pytest.mark.parametrize("name", ["shift", "is_full", "_storage_shape"])
@pytest.mark.parametrize("value", [-101, 101, 10**15, "9", None, {}, [], [-1], [10**15], [50]])
def test_what_a_compact_layout_says_of_itself(name, value, tmp_path):
    path = copied("flat_1d_wrapped", tmp_path)
    changed(path / "storage" / name / "meta.json", lambda about: about.update(data=value))
    with pytest.raises(DamagedError, match="expected"):
        read_torchrl(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10**6, b"{}", b"1" * 9999])
@pytest.mark.parametrize("file", ["meta.json", "storage_metadata.json", "../writer/metadata.json"])
def test_json_that_is_none(text, file, tmp_path):
    path = copied("default_1d_wrapped", tmp_path)
    (path / "storage" / file).write_bytes(text)
    with pytest.raises(DamagedError, match=r"(metadata|meta)\.json"):
        read_torchrl(path)


@pytest.mark.parametrize(
    "key", ["../../secret", "/tmp/secret", "..", ".", "", "a/../../secret", "\0"]
)
@pytest.mark.parametrize("kind", [{"type": "TensorDict"}, {"shape": [100], "dtype": "torch.int8"}])
def test_no_name_leads_out_of_the_dump(key, kind, tmp_path):
    path = copied("default_1d_wrapped", tmp_path)
    (tmp_path / "secret.memmap").write_bytes(bytes(100))
    changed(path / "storage/meta.json", lambda about: about.update({key: kind}))
    with pytest.raises((FileNotFoundError, DamagedError), match="default_1d_wrapped/storage"):
        read_torchrl(path)


def test_no_link_leads_out_of_the_dump(tmp_path):
    path = copied("default_1d_wrapped", tmp_path)
    shutil.move(path / "storage/next", tmp_path / "next")
    (path / "storage/next").symlink_to(tmp_path / "next")
    with pytest.raises(ValueError, match="another place"):
        read_torchrl(path)
    (path / "storage/next").unlink()
    shutil.move(tmp_path / "next", path / "storage/next")
    shutil.move(path / "storage/action.memmap", tmp_path / "action.memmap")
    (path / "storage/action.memmap").symlink_to(tmp_path / "action.memmap")
    with pytest.raises(ValueError, match="another place"):
        read_torchrl(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    path = copied("default_1d_wrapped", tmp_path)
    (path / "storage/meta.json").unlink()
    os.mkfifo(path / "storage/meta.json")
    with pytest.raises(DamagedError, match="plain file"):
        read_torchrl(path)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.faults
@pytest.mark.parametrize("name", DUMPS)
def test_pickles_are_not_opened(name, tmp_path):
    path = copied(name, tmp_path)
    for place in ("prefetch.pkl", "storage/other.pickle", "storage/is_full/other.pickle"):
        (path / place).parent.mkdir(exist_ok=True)
        (path / place).write_bytes(pickle.dumps(Trap()))
    assert_same(read_torchrl(path).items, truth_of(name)[0])


def test_what_has_no_array_is_passed_over_or_refused(tmp_path):
    path = copied("default_1d_wrapped", tmp_path)
    more = {"text": {"type": "NonTensorData"}, "stack": {"type": "NonTensorStack"}, "odd": 3}
    changed(path / "storage/meta.json", lambda about: about.update(more))
    assert_same(read_torchrl(path).items, truth_of("default_1d_wrapped")[0])
    changed(path / "storage/meta.json", lambda about: about.update(x={"type": "LazyStack"}))
    with pytest.raises(ValueError, match="a LazyStack"):
        read_torchrl(path)
    qint = {"x": {"dtype": "torch.qint8", "shape": [100]}}
    changed(path / "storage/meta.json", lambda about: about.update(qint))
    with pytest.raises(ValueError, match="qint8"):
        read_torchrl(path)
    changed(path / "storage/storage_metadata.json", lambda about: about.update(is_pytree=True))
    with pytest.raises(ValueError, match="pytrees"):
        read_torchrl(path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        read_torchrl(tmp_path / "nowhere")


def test_names_that_earlier_versions_did_not_encode(tmp_path):
    path = copied("default_1d_wrapped", tmp_path)
    (path / "storage/action.memmap").rename(path / "storage/the action.memmap")
    rename = lambda about: about.update({"the action": about.pop("action")})
    changed(path / "storage/meta.json", rename)
    truth = truth_of("default_1d_wrapped")[0]
    np.testing.assert_array_equal(read_torchrl(path).items["the action"], truth["action"])


def test_bools_are_0_or_1(tmp_path):
    path = copied("default_1d_wrapped", tmp_path)
    (path / "storage/done.memmap").write_bytes(bytes(99) + b"\2")
    with pytest.raises(DamagedError, match="0 or 1"):
        read_torchrl(path)


@pytest.mark.parametrize("layout", ["default", "flat"])
def test_rows_that_were_never_written_may_hold_anything(layout, tmp_path):
    buffer, state = filled(12, None, 7)
    write_torchrl(tmp_path / "dump", buffer, state, layout)
    items = read_torchrl(tmp_path / "dump").items
    for file in (tmp_path / "dump/storage").rglob("*.memmap"):
        data = file.read_bytes()
        row = (
            len(data) // 12 if layout == "default" or "observ" not in str(file) else len(data) // 14
        )
        written = 7 if layout == "default" or "observ" not in str(file) else 9
        file.write_bytes(data[: written * row] + b"\x5c" * (len(data) - written * row))
    assert_same(read_torchrl(tmp_path / "dump").items, items)


def linked_outside(file, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.zeros((5, 2))
    del file["traj_0/action"]
    file["traj_0/action"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")


def stored_outside(file, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(80))
    del file["traj_0/action"]
    place = [(str(tmp_path / "secret"), 0, 80)]
    file["traj_0"].create_dataset("action", (5, 2), np.int64, external=place)


def virtual(file, tmp_path):
    del file["traj_0/action"]
    layout = h5py.VirtualLayout((5, 2), np.int64)
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (5, 2))
    file["traj_0"].create_virtual_dataset("action", layout)


def in_itself(file, tmp_path):
    file["traj_0/again"] = file["traj_0"]


def without_end(file, tmp_path):
    del file["traj_0/action"]
    file["traj_0"].create_dataset("action", (10**15, 2), np.int64, chunks=(1, 2))


def without_end_packed(file, tmp_path):
    del file["traj_0/action"]
    more = {"chunks": (1000, 2), "compression": "gzip"}
    file["traj_0"].create_dataset("action", (2**50, 2), np.int64, **more)[:1000] = 0


def without_a_trajectory(file, tmp_path):
    del file["traj_3"]


def without_a_leaf(file, tmp_path):
    del file["traj_3/action"]


def of_another_shape(file, tmp_path):
    del file["traj_3/action"]
    file["traj_3/action"] = np.zeros((9, 3))


def without_a_group(file, tmp_path):
    del file["traj_3"]
    file["traj_3"] = 1


def with_another_shift(file, tmp_path):
    del file["shift"]
    file["shift"] = np.zeros(10**4, np.int64)


@pytest.mark.parametrize(
    "damage",
    [
        linked_outside,
        stored_outside,
        virtual,
        in_itself,
        without_end,
        without_end_packed,
        without_a_trajectory,
        without_a_leaf,
        of_another_shape,
        without_a_group,
        with_another_shift,
    ],
)
def test_hdf5_that_is_not_a_dump(damage, tmp_path):
    path = copied("h5_1d_wrapped", tmp_path)
    with h5py.File(path / "storage/checkpoint.h5", "r+") as file:
        damage(file, tmp_path)
    with pytest.raises(DamagedError, match=r"checkpoint\.h5: expected"):
        read_torchrl(path)


def test_hdf5_may_be_compressed(tmp_path):
    path = copied("h5_1d_wrapped", tmp_path)
    with h5py.File(path / "storage/checkpoint.h5", "r+") as file:
        for name in [name for name in file if name.startswith("traj")]:
            for leaf in ("action", "observation"):
                values = file[f"{name}/{leaf}"][()]
                del file[f"{name}/{leaf}"]
                file[name].create_dataset(leaf, data=values, compression="gzip", shuffle=True)
    assert_same(read_torchrl(path).items, truth_of("h5_1d_wrapped")[0])


# Round trips with TorchRL, if it is installed.


def theirs(layout, rows, envs, prioritized=False):
    """Returns an empty TorchRL buffer with this layout of dumps."""
    data = pytest.importorskip("torchrl.data")
    checkpointers = pytest.importorskip("torchrl.data.replay_buffers.checkpointers")
    storage = data.LazyTensorStorage(rows * (envs or 1), ndim=1 if envs is None else 2)
    sampler = (
        data.PrioritizedSampler(rows * (envs or 1), 0.5, 0.4, eps=0.01) if prioritized else None
    )
    buffer = data.TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=8, priority_key="td_error"
    )
    if layout != "default":
        name = {"flat": "Flat", "nested": "Nested", "h5": "H5"}[layout]
        storage.checkpointer = getattr(checkpointers, f"{name}StorageCheckpointer")()
    return buffer


def as_tensors(items, envs, rows):
    """Converts items to a TensorDict, environments first."""
    torch, tensordict = pytest.importorskip("torch"), pytest.importorskip("tensordict")

    def tensor(leaf):
        leaf = leaf if envs is None else leaf.swapaxes(0, 1)
        if leaf.dtype == jnp.bfloat16:
            return torch.tensor(np.ascontiguousarray(leaf.view(np.int16))).view(torch.bfloat16)
        return torch.tensor(np.ascontiguousarray(leaf))

    lead = [rows] if envs is None else [envs, rows]
    return tensordict.TensorDict(jax.tree.map(tensor, items), lead)


def as_arrays(tensors, envs):
    """Converts a TensorDict to nested dicts of arrays, time first."""
    torch = pytest.importorskip("torch")
    out = {}
    for key, leaf in tensors.items():
        if not isinstance(leaf, torch.Tensor):
            out[key] = as_arrays(leaf, envs)
            continue
        half = leaf.dtype == torch.bfloat16
        array = leaf.contiguous().view(torch.int16).numpy() if half else leaf.numpy()
        array = array.view(jnp.bfloat16) if half else array
        out[key] = array if envs is None else array.swapaxes(0, 1)
    return out


CASES = pytest.mark.parametrize(
    ("envs", "count"), [(None, 7), (None, 12), (None, 30), (3, 7), (3, 12), (3, 30)]
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("layout", ["default", "flat"])
@CASES
def test_torchrl_loads_what_was_written(tmp_path, layout, envs, count, empty):
    buffer, state = filled(12, envs, count, sampler=jrb.Prioritized(alpha=0.5, eps=0.01))
    slots = jnp.arange(int(buffer.size(state)), dtype=jnp.int32)
    state = buffer.update_priority(state, slots, slots.astype(jnp.float32))
    write_torchrl(tmp_path / "dump", buffer, state, layout)
    other = theirs(layout, 12, envs, prioritized=True)
    truth = in_storage(buffer, state)
    if layout == "flat":
        for flag in ("done", "terminated"):
            truth[flag] = np.zeros_like(truth["next"][flag])
    if not empty:
        rows = len(truth["action"])
        zeros = jax.tree.map(np.zeros_like, truth)
        other.extend(as_tensors(zeros, envs, rows))
    other.loads(tmp_path / "dump")
    assert_same(as_arrays(other[:].exclude("index"), envs), truth)
    assert other.writer._cursor == int(state.writer.cursor)
    assert len(other) == int(buffer.size(state))
    leaves = np.array([other.sampler._sum_tree[i] for i in range(len(slots))])
    np.testing.assert_allclose(leaves, (np.arange(len(slots)) + 0.01) ** 0.5, rtol=1e-5)
    if not envs:
        assert other.sample(16).shape == (16,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["default", "flat", "nested", "h5"])
@pytest.mark.parametrize("before", [np.zeros_like, np.ones_like])
@CASES
def test_what_torchrl_writes_is_read(tmp_path, layout, envs, count, before):
    other = theirs(layout, 12, envs, prioritized=layout == "default")
    steps = [
        jax.tree.map(np.asarray, step(row, envs, row % 5 == 4)) for row in range(max(count, 12))
    ]
    items = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
    items["next"]["truncated"] = np.zeros_like(items["next"]["done"])
    items.update({flag: np.zeros_like(items["next"][flag]) for flag in FLAGS})
    for part in (items, items["next"]):
        if layout == "h5":
            part["observation"].pop("x y")  # HDF5 has no bfloat16
    if layout in ("nested", "h5"):
        items.pop("empty")
    rows = lambda start, stop: jax.tree.map(lambda leaf: leaf[start:stop], items)
    other.extend(as_tensors(jax.tree.map(before, rows(0, 12)), envs, 12))
    other.empty()
    for start in range(0, count, 4):
        stop = min(start + 4, count)
        other.extend(as_tensors(rows(start, stop), envs, stop - start))
    if layout == "default":
        held = len(other)
        torch = pytest.importorskip("torch")
        index = torch.arange(held)
        if envs is not None:
            index = torch.stack(torch.unravel_index(index, (12, envs)), -1)
        other.update_priority(index, torch.arange(held) / 2)
    other.dumps(tmp_path / "dump")
    items, info = read_torchrl(tmp_path / "dump")
    truth = named(as_arrays(other[:], envs))
    truth.pop("index", None)
    truth.pop("td_error", None)
    assert_same({key: leaf for key, leaf in named(items).items() if key in truth}, truth)
    assert info["layout"] == layout
    assert (info["num_envs"], info["full"]) == (envs, count >= 12)
    assert info["cursor"] == other.writer._cursor % 12
    if layout == "default":
        p = (np.arange(held) / 2).reshape(info["priorities"].shape)
        np.testing.assert_allclose(info["priorities"], p, rtol=1e-4, atol=1e-5)
        assert info["max_priority"] == pytest.approx((held - 1) / 2, rel=1e-5)
