"""What a checkpoint survives: killed processes, lost power, full disks, damaged files, rivals."""

import errno
import functools
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.disk import files, manifest, store
from jrb.disk.errors import DamagedError, LockedError
from tests import stores
from tests.scenario import outcome_of

pytestmark = pytest.mark.slow

scenario = functools.partial(outcome_of, stores)


@pytest.mark.parametrize("name", stores.SAVES)
def test_a_process_killed_at_any_operation_leaves_the_old_or_the_new(name, tmp_path):
    found = scenario("kill", tmp_path / "store", name)
    assert found["operations"] > 8
    assert set(found["outcomes"]) <= {"old", "new"}
    assert found["outcomes"][0] == "old"
    assert found["outcomes"][-1] == "new"


@pytest.mark.parametrize("name", ["full", "incremental", "first"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_operation_leaves_the_old_or_the_new(name, code, tmp_path):
    found = scenario("fail", tmp_path / "store", name, code)
    assert found["operations"] > 8
    assert set(found["outcomes"]) <= {"old", "new"}


@pytest.mark.parametrize("name", ["full", "incremental", "first"])
@pytest.mark.parametrize("seed", range(3))
def test_power_lost_at_any_operation_leaves_the_old_or_the_new(name, seed, tmp_path):
    found = scenario("power", tmp_path / "store", name, seed)
    assert found["operations"] > 8
    assert set(found["outcomes"]) <= {"old", "new"}
    assert found["outcomes"][-1] == "new"


def test_a_write_that_falls_short_is_an_error(tmp_path):
    assert scenario("large", tmp_path / "store") == ["EFBIG", "old"]


def test_a_write_that_falls_short_goes_on(tmp_path, monkeypatch):
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: whole(file, data[:1000], at))
    stores.save(tmp_path, stores.contents(1))
    assert stores.read(tmp_path) == stores.contents(1)


def test_every_flipped_bit_is_noticed(tmp_path):
    found = scenario("flip", tmp_path / "store", 0)
    assert found["flips"] > 700
    assert found["missed"] == []


def test_every_cut_is_noticed(tmp_path):
    found = scenario("truncate", tmp_path / "store")
    assert found["cuts"] > 8
    assert found["missed"] == []


def test_a_reader_sees_one_save_while_another_process_writes(tmp_path):
    found = scenario("meet", tmp_path / "store", 60)
    assert found["torn"] == 0
    assert found["last"] == 60
    assert found["reads"] > 1


def test_a_second_writer_is_turned_away_until_the_first_is_killed(tmp_path):
    command = [sys.executable, stores.__file__, "hold", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"locked\n"
        with pytest.raises(LockedError, match="holds the lock"):
            store.Saving(str(tmp_path))
        first.kill()
        first.wait()
    stores.save(str(tmp_path), stores.contents(1))
    assert stores.read(str(tmp_path)) == stores.contents(1)


def test_two_writers_in_one_process(tmp_path):
    assert stores.second(str(tmp_path)) == "refused"


def edited(path, change, sign=True):
    """A manifest changed by hand, with a checksum that fits if it is signed."""
    name = path / manifest.NAME
    text = json.loads(name.read_text())
    change(text)
    if sign:
        name.write_bytes(manifest.encode(text["body"]))
    else:
        name.write_text(json.dumps(text))


def test_a_newer_version_is_refused_by_name(tmp_path):
    stores.save(tmp_path, stores.contents(1))
    edited(tmp_path, lambda text: text.update(version=99), sign=False)
    with pytest.raises(ValueError, match=r"version 99\. A newer jrb"):
        stores.read(tmp_path)
    with pytest.raises(ValueError, match="version 99"):
        stores.save(tmp_path, stores.contents(2))


def test_another_format_is_refused(tmp_path):
    stores.save(tmp_path, stores.contents(1))
    edited(tmp_path, lambda text: text.update(format="something"), sign=False)
    with pytest.raises(DamagedError, match="'something'"):
        stores.read(tmp_path)


def test_a_manifest_changed_by_hand_is_refused(tmp_path):
    stores.save(tmp_path, stores.contents(1))
    edited(tmp_path, lambda text: text["body"].update(generation=7), sign=False)
    with pytest.raises(DamagedError, match="checksum"):
        stores.read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda leaf: leaf.update(size=10**15),
        lambda leaf: leaf.update(size=-1),
        lambda leaf: leaf.update(size=10**15, block=10**15, blocks=leaf["blocks"][:1]),
        lambda leaf: leaf["blocks"].pop(),
        lambda leaf: leaf["blocks"].__setitem__(0, ["../../etc", 0, 0, 0, 0, 0]),
        lambda leaf: leaf["blocks"].__setitem__(0, [1, 0, 2**40, 0, 0, 0]),
        lambda leaf: leaf.update(block=0),
        lambda leaf: leaf.pop("size"),
    ],
)
def test_absurd_numbers_are_refused_before_anything_is_allocated(change, tmp_path):
    stores.save(tmp_path, stores.contents(1))
    edited(tmp_path, lambda text: change(text["body"]["leaves"][0]))
    with pytest.raises(DamagedError):
        stores.read(tmp_path)


def test_links_are_not_followed(tmp_path):
    store_ = tmp_path / "store"
    stores.save(store_, stores.contents(1))
    name = sorted((store_ / "blocks").iterdir())[0]
    name.rename(tmp_path / "elsewhere")
    name.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="link"):
        stores.read(store_)
    (store_ / manifest.NAME).rename(tmp_path / "manifest")
    (store_ / manifest.NAME).symlink_to(tmp_path / "manifest")
    with pytest.raises(DamagedError, match="link"):
        stores.read(store_)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        stores.save(tmp_path, stores.contents(1))
    with pytest.raises(ValueError, match="found a file"):
        stores.save(tmp_path / "thesis.tex", stores.contents(1))


def test_a_folder_that_cannot_be_written_can_be_read(tmp_path, monkeypatch):
    stores.save(tmp_path, stores.contents(1))

    def refuse(operation, path, *rest):
        raise PermissionError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(files, "hook", refuse)
    with pytest.raises(OSError, match="Read-only file system"):
        stores.save(tmp_path, stores.contents(2))
    assert stores.read(tmp_path) == stores.contents(1)


def test_older_generations_stay_as_long_as_asked(tmp_path):
    for stamp in range(1, 6):
        stores.save(tmp_path, stores.contents(stamp), keep=2)
    assert manifest.generations(tmp_path) == [3, 4, 5]
    for generation in (3, 4, 5):
        assert stores.read(tmp_path, generation) == stores.contents(generation)
    assert stores.read(tmp_path, 2) is None
    stores.save(tmp_path, stores.contents(6))
    assert manifest.generations(tmp_path) == [6]
    assert len(list(tmp_path.glob("manifest*"))) == 1


def test_more_generations_may_be_asked_for_than_there_are(tmp_path):
    for stamp in range(1, 8):
        stores.save(tmp_path, stores.contents(stamp), keep=20)
    for generation in range(1, 8):
        assert stores.read(tmp_path, generation) == stores.contents(generation)


def test_a_damaged_store_is_saved_over(tmp_path):
    stores.save(tmp_path, stores.contents(1))
    (tmp_path / manifest.NAME).write_text("{")
    with pytest.raises(DamagedError):
        stores.read(tmp_path)
    stores.save(tmp_path, stores.contents(2))
    assert stores.read(tmp_path) == stores.contents(2)


def test_only_what_changed_is_written(tmp_path):
    stores.save(tmp_path, stores.contents(1))
    new = stores.contents(2, (100_000, 110_000))
    written = []
    files.hook = lambda operation, path, *rest: (
        written.append(len(rest[1])) if operation == "pwrite" and "blocks" in path else None
    )
    try:
        stores.save(tmp_path, new, fresh=[(100_000, 110_000)])
        assert sum(written) == 65536
        written.clear()
        stores.save(tmp_path, new, fresh=[])
        assert written == []
    finally:
        files.hook = None
    assert stores.read(tmp_path) == new


def test_data_from_elsewhere_is_noticed_whatever_is_said_of_it(tmp_path):
    stores.save(tmp_path, stores.contents(1))
    stores.save(tmp_path, stores.contents(2), fresh=[(0, 10)])
    assert stores.read(tmp_path) == stores.contents(2)


def test_files_that_are_mostly_dead_are_emptied(tmp_path):
    data = stores.contents(1)
    stores.save(tmp_path, data)
    for start in range(0, 262_144, 65536):
        array = bytearray(data["storage/a"])
        array[start : start + 65536] = os.urandom(65536)
        data = {**data, "storage/a": bytes(array)}
        stores.save(tmp_path, data, fresh=[(start, start + 65536)])
        assert stores.read(tmp_path) == data
    sizes = [name.stat().st_size for name in (tmp_path / "blocks").iterdir()]
    assert sum(sizes) < 2.5 * sum(map(len, data.values()))


def test_a_state_survives_a_kill_in_the_middle_of_a_background_save(tmp_path):
    script = """
import os, signal, sys
import jax, jax.numpy as jnp, jrb
from jrb.disk import files
buffer = jrb.ReplayBuffer(1000)
state = buffer.add(buffer.init({"x": jnp.zeros(100)}), {"x": jnp.ones(100)})
jrb.save(sys.argv[1], buffer, state)
seen = []
def strike(*event):
    seen.append(event)
    if len(seen) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
files.hook = strike
state = buffer.add(state, {"x": jnp.full(100, 2.0)})
jrb.checkpoint.save_async(sys.argv[1], buffer, state).wait()
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -9
    buffer, state = jrb.load(tmp_path)
    assert int(buffer.size(state)) == 1
    state = buffer.add(state, {"x": jnp.full(100, 2.0)})
    jrb.save(tmp_path, buffer, state)
    np.testing.assert_array_equal(jrb.load(tmp_path)[1].storage["x"], state.storage["x"])
