"""Recordings as they are read: access, damage, what lies beside them."""

import json
import os
import shutil
import zlib

import numpy as np
import pytest

import jrb
from jrb.datasets import Recorder
from jrb.datasets.recording import framed
from tests.datasets.recording.recordings import Stream, assert_same, check, item, stacked

HOWS = ["goes on", "terminated", "goes on", "goes on", "truncated", "terminated", "goes on"]


def recorded(path, after=None, envs=None):
    """A recording of 7 steps of each environment in chunks of a few, and its streams."""
    streams = [Stream() for _ in range(envs or 1)]
    with Recorder(path, num_envs=envs, chunk=3 * (envs or 1), metadata={"env": "x"}) as recorder:
        for step, how in enumerate(HOWS):
            row = [(100 * env + step, how) for env in range(envs or 1)]
            for stream, one in zip(streams, row, strict=True):
                stream.add(*one)
            items = [item(*one, after=after) for one in row]
            recorder.add(stacked(items) if envs else items[0])
    return streams


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
    fewer = jrb.datasets.open(tmp_path, sealed=((first, 1),))
    assert fewer.lengths.tolist() == [2, 1]
    os.rename(tmp_path / first, tmp_path.parent / "elsewhere")
    with pytest.raises(ValueError, match="no format matches"):
        jrb.datasets.open(tmp_path)
    with pytest.raises(ValueError, match="a folder that jrb"):
        jrb.datasets.open(tmp_path, format="recorded")


def test_describing_reads_no_payload(tmp_path):
    recorded(tmp_path)
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            if name.startswith("chunk"):
                spoil(os.path.join(folder, name), -1)
    dataset = jrb.datasets.open(tmp_path)
    assert dataset.lengths.tolist() == [2, 3, 1, 1]
    with pytest.raises(ValueError, match="'observation/image', block 0: expected the checksum"):
        dataset[0]


def test_next_observations_are_kept_once(tmp_path):
    sizes = {}
    for after in (None, 0.5, 1):
        recorded(tmp_path / str(after), after)
        sizes[after] = sum(map(os.path.getsize, files_of(tmp_path / str(after))[:2]))
    observation = 2 * 3 * 4 * 3  # bytes of a chunk's
    assert sizes[0.5] - sizes[1] > observation // 2


def test_steps_across_many_blocks_are_read_in_part(tmp_path):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (50, 11_001), np.uint8)  # no block ends with a frame
    rewards = np.arange(50, dtype=np.float32)
    done = np.arange(50) % 7 == 0
    with Recorder(tmp_path, chunk=20) as recorder:
        for start in (0, 11, 18, 30):
            part = slice(start, {0: 11, 11: 18, 18: 30, 30: 50}[start])
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


def spoil(path, place):
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        data[place] ^= 0x10
        file.seek(0)
        file.write(data)


def files_of(path):
    (writer,) = os.listdir(path)
    return [os.path.join(path, writer, n) for n in sorted(os.listdir(path / writer)) if n != "lock"]


def test_every_flipped_byte_is_noticed(tmp_path):
    recorded(tmp_path / "whole")
    wanted = [str(one) for one in jrb.datasets.open(tmp_path / "whole")]
    rng = np.random.default_rng(0)
    for number, file in enumerate(files_of(tmp_path / "whole")):
        places = rng.permutation(os.path.getsize(file))[:60]
        for place in places.tolist():
            shutil.rmtree(tmp_path / "spoilt", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "spoilt")
            spoil(files_of(tmp_path / "spoilt")[number], place)
            try:
                found = [str(one) for one in jrb.datasets.open(tmp_path / "spoilt")]
            except ValueError as error:
                assert os.path.basename(file) in str(error) or "no format" in str(error)  # noqa: PT017
            else:
                assert found == wanted, (file, place)  # the word "version", say, or a newline


@pytest.mark.parametrize("name", ["head", "chunk-000000000001"])
def test_cut_files_are_noticed(name, tmp_path):
    recorded(tmp_path)
    file = next(one for one in files_of(tmp_path) if one.endswith(name))
    size = os.path.getsize(file)
    for cut in (size - 1, size // 2, 60, 3, 0):
        os.truncate(file, cut)
        with pytest.raises(ValueError, match=rf"{name}|no format matches"):
            jrb.datasets.open(tmp_path)
    os.unlink(file)
    with pytest.raises(ValueError, match=rf"no {name} before|no format matches"):
        jrb.datasets.open(tmp_path)


def rewritten(path, change):
    """A file with another body, its checksum right."""
    with open(path, "rb") as file:
        first, body, rest = file.read().split(b"\n", 2)
    body = json.loads(body)
    change(body)
    text = json.dumps(body).encode() + b"\n"
    head = {**json.loads(first), "size": len(text), "sum": zlib.crc32(text)}
    with open(path, "wb") as file:
        file.write(json.dumps(head).encode() + b"\n" + text + rest)


NONSENSE = {
    "head": [
        lambda body: body.pop("leaves"),
        lambda body: body.update(leaves=[]),
        lambda body: body["leaves"][0].__setitem__(1, "float13"),
        lambda body: body["leaves"][0].__setitem__(2, [-1]),
        lambda body: body["leaves"][0].__setitem__(0, 3),
        lambda body: body.update(keys={"other": 1}),
        lambda body: body.update(num_envs=0),
        lambda body: body.update(metadata=None),
        lambda body: body["metadata"].update(user=3),
        lambda body: body["leaves"][1].__setitem__(0, "next/reward"),
    ],
    "chunk-000000000000": [
        lambda body: body.pop("counts"),
        lambda body: body.update(counts=[4]),
        lambda body: body.update(counts=[-1]),
        lambda body: body.update(counts=[1, 2]),
        lambda body: body.update(counts=[1e30]),
        lambda body: body.update(ends=[1, 7]),
        lambda body: body.update(ends=[2, 1]),
        lambda body: body.update(terminated="x"),
        lambda body: body.update(starts=[-1]),
        lambda body: body.update(starts={}),
        lambda body: body.update(sums=[[]]),
        lambda body: body.update(sums=3),
        lambda body: body.update(number=1),
        lambda body: body.update(head=1),
        lambda body: body.update(shared=[[7, 0, [2]]]),
        lambda body: body.update(shared=[[0, 1, [2]]]),
        lambda body: body.update(shared=[[1, 1, [2]]]),
        lambda body: body.update(shared=[[1, 1, []]]),
        lambda body: body.update(shared=3),
    ],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_with_a_right_checksum_is_noticed(name, tmp_path):
    for number, change in enumerate(NONSENSE[name]):
        path = tmp_path / str(number)
        recorded(path)
        rewritten(next(one for one in files_of(path) if one.endswith(name)), change)
        with pytest.raises(ValueError, match=str(path)):
            list(jrb.datasets.open(path))


def test_a_newer_version_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(framed, "VERSION", 2)
    recorded(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="expected version 1 or older, got version 2"):
        jrb.datasets.open(tmp_path)


def test_links_are_not_followed(tmp_path):
    recorded(tmp_path / "a")
    file = files_of(tmp_path / "a")[0]
    os.rename(file, tmp_path / "chunk")
    os.symlink(tmp_path / "chunk", file)
    with pytest.raises(ValueError, match="found a link"):
        jrb.datasets.open(tmp_path / "a")


def test_folders_that_are_none_are_not_recognised(tmp_path):
    kind = jrb.datasets.formats()["recorded"]
    (tmp_path / "writer-1").mkdir()
    (tmp_path / "writer-2").write_text("x")
    for head in (None, b"", b"{}", b"[]\n", b"\xff\n", b'{"format": "jrb"}\n', b"[" * 10_000):
        if head is not None:
            (tmp_path / "writer-1" / "head").write_bytes(head)
        assert not kind.matches(str(tmp_path))
    for other in (str(tmp_path / "none"), str(tmp_path / "writer-2"), [], None, 3):
        assert not kind.matches(other)


def test_other_items_beside_are_told(tmp_path):
    recorded(tmp_path / "a")
    recorded(tmp_path / "b", after=1)
    (writer,) = os.listdir(tmp_path / "b")
    os.rename(tmp_path / "b" / writer, tmp_path / "a" / writer)
    with pytest.raises(ValueError, match="expected items as the writer"):
        jrb.datasets.open(tmp_path / "a")
