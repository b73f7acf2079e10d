"""Recordings as they are read: access, other readers, damage, what lies beside them."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil

import numpy as np
import pyarrow.parquet
import pytest

import jrb
from jrb.datasets import Recorder
from tests.datasets.recording.recordings import Stream, assert_same, check, item, stacked

HOWS = ["goes on", "terminated", "goes on", "goes on", "truncated", "terminated", "goes on"]


def recorded(path, after=None, envs=None):
    """A recording of 7 steps of each environment in parts of a few, and its streams."""
    streams = [Stream() for _ in range(envs or 1)]
    with Recorder(path, num_envs=envs, chunk=3 * (envs or 1), metadata={"env": "x"}) as recorder:
        for step, how in enumerate(HOWS):
            row = [(100 * env + step, how) for env in range(envs or 1)]
            for stream, one in zip(streams, row, strict=True):
                stream.add(*one)
            items = [item(*one, after=after) for one in row]
            recorder.add(stacked(items) if envs else items[0])
    return streams


def parts_of(path):
    return [os.path.join(path, name) for name in sorted(os.listdir(path))]


@pytest.mark.parametrize("envs", [None, 1, 4])
@pytest.mark.parametrize("after", [None, 0.5, 1])
def test_every_access_reads_the_same(envs, after, tmp_path):
    streams = recorded(tmp_path, after, envs)
    dataset = jrb.datasets.open(tmp_path)
    check(dataset, streams, after)
    whole = list(dataset)
    assert len(whole) == 4 * (envs or 1)
    for got, wanted in zip(dataset[::-2], whole[::-2], strict=True):
        assert_same(got, wanted)
    blocks = list(dataset.blocks())
    rewards = np.concatenate([one["next"]["reward"] for one in whole])
    assert_same(np.concatenate([block["next"]["reward"] for block in blocks]), rewards)
    returns = [one["next"]["reward"].sum() for one in whole]
    np.testing.assert_allclose(dataset.returns(), returns)
    assert dataset.facts["env"].tolist() == [e for e in range(envs or 1) for _ in range(4)]
    dropped = jrb.datasets.open(tmp_path, final="drop")
    fewer = 0 if after is not None else 2 * (envs or 1)
    assert dropped.transitions == dataset.transitions - fewer
    assert sum(len(one["action"]) for one in dropped) == dropped.transitions


def test_it_is_opened_by_what_is_there(tmp_path):
    recorded(tmp_path)
    dataset = jrb.datasets.open(tmp_path)
    assert dataset.format.name == "recorded"
    assert dataset.metadata["env"] == "x"
    again = jrb.datasets.open(tmp_path, format=dataset.format)
    assert again.lengths.tolist() == dataset.lengths.tolist()
    first = dataset.format.sealed[0][0]
    fewer = jrb.datasets.open(tmp_path, sealed=((first, 2),))
    assert fewer.lengths.tolist() == [2, 1]
    for part in parts_of(tmp_path):
        os.unlink(part)
    with pytest.raises(ValueError, match="no format matches"):
        jrb.datasets.open(tmp_path)
    with pytest.raises(ValueError, match="a folder that jrb"):
        jrb.datasets.open(tmp_path, format="recorded")


def test_other_programs_read_numbers_episodes_and_steps(tmp_path):
    rng = np.random.default_rng(0)
    numbers, frames = rng.random((20, 3, 2), np.float32), rng.integers(0, 9, (20, 100), np.uint8)
    after = {"reward": np.arange(20.0), "done": np.arange(20) % 6 == 5}
    with Recorder(tmp_path, chunk=7, num_envs=2) as recorder:
        for start in range(0, 20, 2):
            rows = slice(start, start + 2)
            nexts = {name: leaf[rows] for name, leaf in after.items()}
            recorder.add({"observation": numbers[rows], "frame": frames[rows], "next": nexts})
    table = pyarrow.parquet.read_table(tmp_path)
    columns = {
        name: table[name].to_numpy() for name in ("env_index", "episode_index", "step_index")
    }
    order = np.lexsort((columns["step_index"], columns["episode_index"], columns["env_index"]))
    assert table["next/reward"].to_numpy()[order].tolist() == [*range(0, 20, 2), *range(1, 20, 2)]
    assert columns["step_index"][order].tolist() == [*range(10), *[0, 1, 2] * 3, 0]
    assert len(set(columns["episode_index"])) == 5
    assert_same(np.array(table["observation"].to_pylist(), np.float32).reshape(20, 3, 2)[order],
                numbers[[*range(0, 20, 2), *range(1, 20, 2)]])  # fmt: skip
    assert b"".join(table["frame"].to_pylist()[row] for row in order[:10]) == frames[::2].tobytes()


def test_the_reader_of_tables_opens_it_too(tmp_path):
    recorded(tmp_path, after=1)
    whole = list(jrb.datasets.open(tmp_path))
    table = jrb.datasets.open(tmp_path, format="table")
    for one, other in zip(whole, table, strict=True):
        for name in ("action", "next"):
            assert_same(
                {**other[name]} if name == "next" else other[name], _without_empty(one[name])
            )
        assert_same(other["observation"], _without_empty(one["observation"]))


def _without_empty(tree):
    """Leaves without numbers have no column."""
    if not isinstance(tree, dict):
        return tree
    return {name: _without_empty(leaf) for name, leaf in tree.items() if name != "none"}


def test_describing_reads_no_payload(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (50, 1000), np.uint8)
    done = np.arange(50) % 7 == 0
    with Recorder(tmp_path) as recorder:
        recorder.append({"observation": frames, "next": {"reward": np.ones(50), "done": done}})
    with open(parts_of(tmp_path)[1], "r+b") as file:
        data = bytearray(file.read())
        data[data.index(frames[3, :100].tobytes())] ^= 1
        file.seek(0)
        file.write(data)
    dataset = jrb.datasets.open(tmp_path)
    assert len(dataset) == 8
    with pytest.raises(ValueError, match="expected a whole Parquet"):
        dataset[0]


def test_steps_across_many_groups_are_read_in_part(tmp_path):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (50, 11_001), np.uint8)
    rewards = np.arange(50, dtype=np.float32)
    done = np.arange(50) % 7 == 0
    with Recorder(tmp_path, chunk=20) as recorder:
        for start, stop in ((0, 11), (11, 18), (18, 30), (30, 50)):
            part = slice(start, stop)
            after = {"reward": rewards[part], "done": done[part]}
            recorder.append({"observation": frames[part], "next": after})
    dataset, start = jrb.datasets.open(tmp_path), 0
    assert len(dataset) == 8
    for episode in dataset:
        stop = start + len(episode["observation"])
        assert_same(episode["observation"], frames[start:stop])
        assert_same(episode["next"]["observation"][:-1], frames[start + 1 : stop])
        start = stop
    assert start == 50


@pytest.mark.slow
def test_every_flipped_byte_is_noticed_or_changes_nothing(tmp_path):
    recorded(tmp_path / "whole")
    wanted = [str(one) for one in jrb.datasets.open(tmp_path / "whole")]
    rng = np.random.default_rng(0)
    names = sorted(os.listdir(tmp_path / "whole"))
    for name in names:
        size = os.path.getsize(tmp_path / "whole" / name)
        for place in rng.permutation(size)[:80].tolist():
            shutil.rmtree(tmp_path / "spoilt", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "spoilt")
            data = bytearray((tmp_path / "spoilt" / name).read_bytes())
            data[place] ^= 0x10
            (tmp_path / "spoilt" / name).write_bytes(data)
            try:
                opened = jrb.datasets.open(tmp_path / "spoilt", format="recorded")
                found = list(map(str, opened))
            except ValueError as error:
                assert name in str(error) or "a folder that jrb" in str(error)  # noqa: PT017
            else:
                assert found == wanted, (name, place)


@pytest.mark.parametrize("number", [0, 2])
def test_cut_files_are_noticed(number, tmp_path):
    recorded(tmp_path)
    part = parts_of(tmp_path)[number]
    size, name = os.path.getsize(part), os.path.basename(part)
    for cut in (size - 1, size // 2, 60, 3, 0):
        os.truncate(part, cut)
        with pytest.raises(ValueError, match=rf"{name}|no format matches"):
            jrb.datasets.open(tmp_path)
    os.unlink(part)
    with pytest.raises(ValueError, match=f"no {name} before"):
        jrb.datasets.open(tmp_path)


def with_metadata(path, change):
    """Writes a part anew with other metadata."""
    table = pyarrow.parquet.read_table(path)
    body = json.loads(table.schema.metadata[b"jrb.recording"])
    body = change(body) or body
    table = table.replace_schema_metadata({b"jrb.recording": json.dumps(body)})
    pyarrow.parquet.write_table(table, path)


NONSENSE = [
    lambda body: [1],
    lambda body: body.pop("leaves"),
    lambda body: body.update(leaves=[]),
    lambda body: body.update(leaves=body["leaves"][1:]),
    lambda body: body["leaves"][0].update(dtype="float13"),
    lambda body: body["leaves"][0].update(dtype="O"),
    lambda body: body["leaves"][0].update(shape=[-1]),
    lambda body: body["leaves"][0].update(shape=3),
    lambda body: body["leaves"][0].update(name=3),
    lambda body: body["leaves"][1].update(other=3),
    lambda body: body.update(num_envs="x"),
    lambda body: body.update(metadata=None),
    lambda body: body.update(notes=3),
    lambda body: body.update(version="x"),
    lambda body: body.update(other=3),
]


@pytest.mark.parametrize("number", range(len(NONSENSE)))
def test_nonsense_in_metadata_is_noticed(number, tmp_path):
    recorded(tmp_path)
    with_metadata(parts_of(tmp_path)[0], NONSENSE[number])
    with pytest.raises(ValueError, match=str(tmp_path)):
        list(jrb.datasets.open(tmp_path))


def test_a_newer_version_says_so(tmp_path):
    recorded(tmp_path)
    with_metadata(parts_of(tmp_path)[0], lambda body: body.update(version=2, more=1))
    with pytest.raises(ValueError, match="expected version 1 or older, got version 2"):
        jrb.datasets.open(tmp_path)


def test_folders_that_are_none_are_not_recognised(tmp_path):
    format = jrb.datasets.formats()["recorded"]
    name = "20260131T120000123456-name-0a1b2c3d-000000.parquet"
    for content in (None, b"", b"{}", b"PAR1", b"PAR1" * 100):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert not format.matches(str(tmp_path))
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / name)
    assert not format.matches(str(tmp_path))
    for other in (str(tmp_path / "none"), str(tmp_path / name), [], None, 3):
        assert not format.matches(other)


def test_a_part_without_its_mark_is_damage_not_another_format(tmp_path):
    recorded(tmp_path)
    first = parts_of(tmp_path)[0]
    table = pyarrow.parquet.read_table(first)
    pyarrow.parquet.write_table(table.replace_schema_metadata({}), first)
    with pytest.raises(jrb.checkpoint.DamagedError, match="expected a part of a recording"):
        jrb.datasets.open(tmp_path)


def test_rows_that_a_part_declares_and_does_not_have_are_damage(tmp_path):
    recorded(tmp_path)
    first = pathlib.Path(parts_of(tmp_path)[0])
    whole = first.read_bytes()
    stop = whole.index(b"jrb.recording")  # numbers of rows stand right before the metadata
    for place, bit in itertools.product(range(stop - 40, stop), (1, 2)):
        damaged = bytearray(whole)
        damaged[place] ^= bit
        first.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            list(jrb.datasets.open(tmp_path))


def test_other_items_beside_are_told(tmp_path):
    recorded(tmp_path / "a")
    recorded(tmp_path / "b", after=1)
    for part in parts_of(tmp_path / "b"):
        shutil.move(part, tmp_path / "a")
    with pytest.raises(ValueError, match="expected items as the writer"):
        jrb.datasets.open(tmp_path / "a")
