"""Changed metadata with correct checksums: errors name the file, or the saved state loads."""

import contextlib
import io
import json
import random
import zlib

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint, testing
from jrb.cli import inspect, stats
from tests.checkpoint import forging

EXAMPLE = {
    "observation": jnp.zeros(3),
    "action": jnp.int32(0),
    "next": {"observation": jnp.zeros(3), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}
BUFFER = jrb.ReplayBuffer(8, 2, batch_size=2, sampler=jrb.Prioritized(), unit=jrb.NStep(2, 0.9))
ROWS = testing.rows(EXAMPLE, jnp.float32(1), 6, 2)
STATE = BUFFER.extend(BUFFER.init(EXAMPLE), ROWS)
EXTRA = {"a": jnp.ones(3), "n": 4}


def save(kind, path):
    """Saves a state of this kind; returns its buffer and the state."""
    buffer, state, options = BUFFER, STATE, {}
    if kind == "native":
        options = {"extra": EXTRA}
    elif kind == "store":
        buffer = jrb.ReplayBuffer(8, 2, batch_size=2, storage=jrb.MemmapStorage(path))
        state = buffer.extend(buffer.init(EXAMPLE), ROWS)
    elif kind == "several":
        buffer, state = {"a": BUFFER, "b": BUFFER}, {"a": STATE, "b": STATE}
    elif kind == "mix":
        buffer, state = jrb.Mix((BUFFER, BUFFER), (0.5, 0.5), 4), (STATE, STATE)
    elif kind == "shards":
        buffer = jrb.Sharded(BUFFER, 2)
        state = buffer.extend(buffer.init(EXAMPLE), ROWS)
    elif kind == "encoded":
        options = {"encode": lambda items: {"all": items}}
    elif kind == "apart":
        options = {"items": False}
    elif kind == "list":
        buffer = jrb.ReplayBuffer(6, batch_size=2, storage=jrb.ListStorage())
        state = buffer.extend(buffer.init(None), ["a", {"b": 1}, 3])
    elif kind == "h5":
        options = {"layout": "h5"}
    jrb.save(path, buffer, state, **options)
    return buffer, state


OPTIONS = {
    "native": {"extra": EXTRA},
    "encoded": {"decode": lambda saved: saved["all"]},
    "apart": {"items": jrb.items(BUFFER, STATE)},
}


def content(buffer, state):
    """Returns the held items or leaves in a form that can be compared."""
    if isinstance(buffer, jrb.ReplayBuffer):
        held = jrb.items(buffer, state)
        return str(jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), held))
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state)]


def calls(kind, path, held):
    """Yields the calls that a user makes on a path."""

    def load():
        buffer, state, *_ = checkpoint.load(path, **OPTIONS.get(kind, {}))
        assert content(buffer, state) == held

    def told(command):
        with contextlib.redirect_stdout(io.StringIO()):
            command(str(path), json=True)

    yield load
    yield lambda: checkpoint.verify(path)
    yield lambda: told(inspect.inspect)
    if kind != "h5":
        yield lambda: checkpoint.metadata(path)
    if kind in ("native", "store", "h5"):
        yield lambda: told(stats.stats)


def check(kind, path, held, what):
    """Asserts that each call returns the saved content or raises an error that names the file."""
    for call in calls(kind, path, held):
        try:
            call()
        except (FileNotFoundError, ValueError) as error:
            known = (str(path), "decode: leaf", "Name the right one")  # errors without a path
            if not any(words in str(error) for words in known):
                raise AssertionError(what) from error
        except AssertionError as error:
            raise AssertionError(what) from error


KINDS = ["native", "store", "several", "mix", "shards", "encoded", "apart", "list"]


@pytest.mark.filterwarnings("ignore::jrb.LostWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_with_other_values(kind, tmp_path):
    path = tmp_path / "x"
    buffer, state = save(kind, path)
    held = content(buffer, state)
    del state
    file = forging.generation_at(path)
    head, body, rest = forging.parsed(file.read_bytes())
    whole = {"head": head, "body": body}
    for what, tree in forging.mutants(whole, random.Random(kind), 30):
        file.write_bytes(forging.packed(tree.get("head"), tree.get("body"), rest))
        check(kind, path, held, what)


def test_an_h5_file_with_other_values(tmp_path):
    path = tmp_path / "x"
    buffer, state = save("h5", path)
    held, whole, rng = content(buffer, state), path.read_bytes(), random.Random(1)
    names = []
    with h5py.File(path, "r") as file:
        about = json.loads(file["jrb"][()].tobytes())
        note = lambda where, thing: names.extend((where, name) for name in thing.attrs)
        note("/", file)
        file.visititems(note)
    for what, tree in forging.mutants(about, rng, 30):
        path.write_bytes(whole)
        forging.forge_h5(path, tree)
        check("h5", path, held, what)
    for _ in range(15):
        name = rng.choice(names)
        value = rng.choice([None, -1, 0, True, "3", 2**31, 0.5, np.array([1, 2]), ""])
        path.write_bytes(whole)
        forging.forge_h5(path, attributes={name: value})
        check("h5", path, held, f"{name}: {value!r}")


@pytest.mark.parametrize("version", [0, -1, "3", True, None, 2.0, [3]])
def test_versions_that_never_were_are_refused(version, tmp_path):
    for kind in ("native", "h5"):
        save(kind, tmp_path / kind)
    file = forging.generation_at(tmp_path / "native")
    head, body, rest = forging.parsed(file.read_bytes())
    file.write_bytes(forging.packed({**head, "version": version}, body, rest))
    forging.forge_h5(tmp_path / "h5", attributes={("/", "version"): version})
    for kind in ("native", "h5"):
        with pytest.raises(checkpoint.DamagedError, match="version"):
            jrb.load(tmp_path / kind)
        assert any("version" in line for line in checkpoint.verify(tmp_path / kind))


@pytest.mark.parametrize("rows", [-5, 0, 3, 7, 10**12, "6", True])
def test_other_rows_of_an_h5_file_are_refused(rows, tmp_path):
    save("h5", tmp_path / "x")
    with h5py.File(tmp_path / "x", "r") as file:
        about = json.loads(file["jrb"][()].tobytes())
    assert about["rows"] == 4
    forging.forge_h5(tmp_path / "x", {**about, "rows": rows})
    with pytest.raises(checkpoint.DamagedError, match="rows"):
        jrb.load(tmp_path / "x")


def test_what_is_no_checkpoint_of_ours_is_not_called_damaged(tmp_path):
    (tmp_path / "text").write_text("hello")
    np.savez(tmp_path / "arrays.npz", a=1)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 3
    for name in ("text", "arrays.npz", "other.h5"):
        with pytest.raises(ValueError, match=f"{name}: not a jrb checkpoint") as caught:
            jrb.load(tmp_path / name)
        assert not isinstance(caught.value, checkpoint.DamagedError)
        assert "not a jrb checkpoint" in checkpoint.verify(tmp_path / name)[0]


LONG = {"shape": (1 << 40,), "chunks": (64,)}  # none of its bytes are in the file


@pytest.mark.parametrize(
    "name", ["jrb", "state/writer/cursor", "state/sampler/masses", "trajectories/000000/action"]
)
@pytest.mark.parametrize(
    "other",
    [
        None,
        LONG,
        LONG | {"compression": "gzip"},
        {"shape": (3, 2)},
        {"dtype": "f8"},
        {"dtype": "O"},
    ],
)
def test_a_dataset_of_another_size_is_refused_before_it_is_read(name, other, tmp_path):
    path = tmp_path / "x"
    save("h5", path)
    with h5py.File(path, "r+", locking=False) as file:
        old, dtype = file[name], file[name].attrs["dtype"]
        options = {"shape": old.shape, "dtype": old.dtype} | (other or {})
        if options["dtype"] == "O":
            options["dtype"] = h5py.string_dtype()
        del file[name]
        if other is not None:
            file.create_dataset(name, **options).attrs["dtype"] = dtype
    forging.seal_h5(path)
    with pytest.raises(checkpoint.DamagedError, match=str(path)):
        jrb.load(path)


def changed(path, change):
    """Changes the metadata of the newest generation of a folder."""
    file = forging.generation_at(path)
    head, body, rest = forging.parsed(file.read_bytes())
    change(body["meta"])
    file.write_bytes(forging.packed(head, body, rest))


def set_to(*where, value):
    """Returns a change that sets the value at a path, or deletes it if the value is `...`."""

    def change(node):
        for key in where[:-1]:
            node = node[key]
        node[where[-1]] = value
        if value is ...:
            del node[where[-1]]

    return change


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("list", set_to("buffer", "fields", "storage", value=...)),
        ("list", set_to("form", value=None)),
        ("list", set_to("form", value={"kind": "apart", "count": 3, "sums": []})),
        ("native", set_to("form", value={"kind": "objects", "format": "msgpack"})),
        ("native", set_to("items", "dict", 1, 0, value=7)),
        ("apart", set_to("form", "sums", value=...)),
        ("apart", set_to("form", "sums", value=[1])),
        ("apart", set_to("form", "count", value=5)),
    ],
)
def test_items_that_do_not_go_with_the_rest_are_refused(kind, change, tmp_path):
    save(kind, tmp_path)
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=str(tmp_path)):
        jrb.load(tmp_path, **OPTIONS.get(kind, {}))


@pytest.mark.parametrize(
    "blob",
    [
        [1, ["int32", [1], b"\0\0\0\0"], 5],
        [1, [3, [1], b"\0\0\0\0"]],
        [1, ["int32", [-1], b"\0\0\0\0"]],
        [1, ["int32", [2], b"\0\0\0\0"]],
        [1, ["int32", "1", b"\0\0\0\0"]],
        [1, ["<M8[nothing]", [1], b"\0" * 8]],
        [1, ["|S1,O", [1], b"\0" * 9]],
        [1, ["O", [0], b""]],
        [3, ["uint7", [1], b"\0"]],
        [0, 5],
        [0, "text"],
    ],
)
def test_objects_that_were_never_saved_are_refused(blob, tmp_path):
    msgpack = pytest.importorskip("msgpack")
    save("list", tmp_path)
    kind, *inner = blob
    extension = msgpack.ExtType(kind, msgpack.packb(inner[0] if len(inner) == 1 else inner))
    data = msgpack.packb([msgpack.packb(extension), *[b""] * 5])
    file = forging.generation_at(tmp_path)
    head, body, rest = forging.parsed(file.read_bytes())
    (entry,) = [it for it in body["arrays"] if it["name"] == ".objects"]
    start = sum(it["size"] for it in body["arrays"][: body["arrays"].index(entry)])
    rest = rest[:start] + data + rest[start + entry["size"] :]
    entry.update(size=len(data), sum=zlib.crc32(data))
    file.write_bytes(forging.packed(head, body, rest))
    with pytest.raises(checkpoint.DamagedError, match=str(tmp_path)):
        jrb.load(tmp_path)
