"""What rows written in place survive: the table of faults, with tests/lives.py."""

import errno
import functools
import threading

import numpy as np
import pytest

from jrb.disk import files, manifest, opening, past
from jrb.disk.errors import DamagedError, StaleError
from jrb.disk.table import Column
from tests import lives
from tests.scenario import outcome_of

pytestmark = pytest.mark.slow

scenario = functools.partial(outcome_of, lives)


def check(found, name):
    """Everything was as committed, first the old state, and in the end the new one."""
    assert found["operations"] > 20
    assert set(found["outcomes"]) == lives.WORK[name][2]
    order = [outcome or 0 for outcome in found["outcomes"]]
    assert order == sorted(order)


@pytest.mark.parametrize("name", lives.WORK)
def test_a_process_killed_at_any_operation_leaves_what_was_committed(name, tmp_path):
    check(scenario("kill", tmp_path / "store", name), name)


def test_a_process_killed_while_it_undoes_a_crash_leaves_what_was_committed(tmp_path):
    found = scenario("kill_twice", tmp_path / "store")
    assert found["operations"] > 5
    assert set(found["outcomes"]) == {75}


@pytest.mark.parametrize("name", lives.WORK)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_operation_leaves_what_was_committed(name, code, tmp_path):
    check(scenario("fail", tmp_path / "store", name, code), name)


def test_a_commit_that_fails_at_any_operation_can_be_followed_by_writes(tmp_path):
    found = scenario("go_on", tmp_path / "store")
    assert found["operations"] > 10
    assert set(found["outcomes"]) == {75, 82}


@pytest.mark.parametrize("name", lives.WORK)
@pytest.mark.parametrize("seed", range(3))
def test_power_lost_at_any_operation_leaves_what_was_committed(name, seed, tmp_path):
    check(scenario("power", tmp_path / "store", name, seed), name)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_store_that_could_not_be_made_is_made_the_next_time(code, tmp_path):
    found = scenario("make", tmp_path / "store", code)
    assert found["operations"] > 10
    assert set(found["outcomes"]) == {"raised"}


def test_files_that_may_not_be_as_large_are_an_error_and_are_removed(tmp_path):
    assert scenario("large", tmp_path / "store") == ["EFBIG", ["lock", "manifest.json"]]


def test_every_flipped_bit_is_noticed(tmp_path):
    found = scenario("flip", tmp_path / "store", 0)
    assert found["flips"] > 500
    assert found["missed"] == []


def test_every_cut_is_noticed(tmp_path):
    found = scenario("truncate", tmp_path / "store")
    assert found["cuts"] == 10
    assert found["missed"] == []


def test_readers_see_what_was_committed_while_another_process_writes(tmp_path):
    found = scenario("meet", tmp_path / "store", 60)
    assert found["torn"] == 0
    assert found["generations"] > 5
    assert found["last"] > 1000


def test_a_second_writer_is_turned_away(tmp_path):
    assert scenario("rivals", tmp_path / "store") == ["refused", 75, 75, 76]


def edited(path, change):
    """A manifest changed by hand, with a checksum that fits."""
    name = path / manifest.NAME
    body = manifest.read(path)
    change(body["table"])
    name.write_bytes(manifest.encode(body))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(capacity=10**15),
        lambda table: table.update(held=10**15),
        lambda table: table.update(held=-1),
        lambda table: table["columns"][0].update(width=10**15),
        lambda table: table["columns"][0].update(name="../../../etc/passwd"),
        lambda table: table["columns"][0].update(name="/etc/passwd"),
        lambda table: table["columns"][0]["sums"].pop(),
        lambda table: table["columns"][0].pop("width"),
    ],
)
def test_a_forged_manifest_is_refused(change, tmp_path):
    lives.prepared(tmp_path / "store", 20)
    edited(tmp_path / "store", change)
    with pytest.raises(DamagedError):
        lives.opened(str(tmp_path / "store"))


def test_links_are_not_followed(tmp_path):
    lives.prepared(tmp_path / "store", 20)
    (tmp_path / "store" / "x.bin").rename(tmp_path / "elsewhere")
    (tmp_path / "store" / "x.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="link"):
        lives.opened(str(tmp_path / "store"))


def test_a_log_of_slots_that_are_not_there_counts_for_nothing(tmp_path):
    ring = lives.prepared(tmp_path / "store", 75)
    ring.write(3)
    del ring
    log = next((tmp_path / "store" / "undo").iterdir())
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"x\.bin.*block"):
        lives.opened(str(tmp_path / "store"))


NAMES = ["..", ".", "a/b", "", "blocks", "undo/x", "manifest.json", "lock", "\0", "ä", "a b", "/x"]


def test_names_of_leaves_stay_below_the_folder(tmp_path):
    columns = tuple(Column(name, ("uint8", ()), 1) for name in NAMES)
    files = [column.file for column in columns]
    assert len(set(files)) == len(files)
    root = tmp_path / "store"
    opening.create(str(root), columns, 4, prealloc=False)
    found = {str(name.relative_to(root)) for name in root.rglob("*.bin")}
    assert found == set(files)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        opening.create(str(tmp_path), lives.COLUMNS, 4, prealloc=True)
    assert [name.name for name in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_store_with_something_saved_is_not_made_again(tmp_path):
    lives.prepared(tmp_path / "store", 5)
    with pytest.raises(ValueError, match=r"jrb\.load"):
        opening.create(str(tmp_path / "store"), lives.COLUMNS, 4, prealloc=True)


def test_a_commit_costs_what_changed(tmp_path, monkeypatch):
    ring = lives.prepared(tmp_path / "store", 75)
    looked = []
    whole = lives.live.zlib.crc32
    monkeypatch.setattr(
        lives.live.zlib, "crc32", lambda data: looked.append(len(data)) or whole(data)
    )
    ring.commit()
    assert sum(looked) < 10_000
    looked.clear()
    ring.write(1)
    looked.clear()
    ring.commit()
    assert sum(looked) < 2 * 65536 + 10_000


def test_logs_go_when_nobody_reads_them(tmp_path):
    ring = lives.prepared(tmp_path / "store", 75)
    logs = lambda: sorted(int(name.name) for name in (tmp_path / "store" / "undo").iterdir())
    reader = lives.opened(str(tmp_path / "store"))
    for _ in range(3):
        ring.write(4)
        ring.commit()
    assert logs() == [2, 3, 4, 5]
    assert lives.content(reader) == 75
    del reader
    ring.commit()
    assert logs() == [6]


@pytest.fixture
def hooked():
    """Sets the hook of all file operations for the time of a test."""

    def set_(hook):
        files.hook = hook

    yield set_
    files.hook = None


def test_a_gather_that_began_before_the_first_write_leaves_the_log_alone(tmp_path, hooked):
    lives.prepared(str(tmp_path / "store"), 75)
    lives.left()
    ring = lives.opened(str(tmp_path / "store"))
    kept, taken = threading.Event(), ring.store.table.take

    def take(*arguments):
        rows = taken(*arguments)
        if not writer.is_alive() and not kept.is_set():
            writer.start()
            kept.wait(60)
        return rows

    def hook(operation, path, *rest):
        if operation == "fsync" and "undo" in path:
            kept.set()

    writer = threading.Thread(target=ring.write, args=(3,))
    ring.store.table.take = take
    hooked(hook)
    stamps = np.arange(15, 75)
    found = ring.store.take(0, [stamps % 60, stamps % 60])
    assert all(map(np.array_equal, found, lives.rows(stamps)))
    writer.join()
    ring.write(40)
    assert lives.content(lives.opened(str(tmp_path / "store"))) == 75


def test_a_log_that_goes_while_somebody_opens_it_is_not_relied_on(tmp_path, hooked):
    path = str(tmp_path / "store")
    ring, opened = lives.prepared(path, 75), []

    def look():
        try:
            opened.append(opening.open_unchecked(path, body))
        except DamagedError:
            opened.append(None)

    def hook(operation, name, *rest):
        if operation == "unlink" and "undo" in name and not opened and not reader.is_alive():
            reader.start()

    reader, body = threading.Thread(target=look), manifest.read(path)
    hooked(hook)
    ring.commit()
    reader.join()
    for _ in range(3):
        ring.write(60)
        ring.commit()
    if opened[0] is not None:
        stamps = np.arange(15, 75)
        found = opened[0].take(0, [stamps % 60, stamps % 60])
        assert all(map(np.array_equal, found, lives.rows(stamps)))


def test_what_a_crash_has_left_is_synced_before_it_is_relied_on(tmp_path, hooked):
    path = str(tmp_path / "store")
    ring = lives.prepared(path, 75)
    ring.write(3)
    del ring
    lives.left()
    ring, seen = lives.opened(path), []
    hooked(lambda operation, name, *rest: seen.append((operation, "undo" in name)))
    ring.write(1)
    synced, written = seen.index(("fsync", True)), seen.index(("pwrite", False))
    assert synced < written


def test_a_chunk_that_could_not_be_synced_is_written_again(tmp_path, hooked):
    path = str(tmp_path / "store")
    ring = lives.prepared(path, 75)

    def hook(operation, name, *rest):
        if operation == "fsync":
            raise OSError(errno.EIO, "broken")

    hooked(hook)
    with pytest.raises(OSError, match="broken"):
        ring.write(3)
    hooked(None)
    size = lambda: next((tmp_path / "store" / "undo").iterdir()).stat().st_size
    before = size()
    ring.write(3)
    assert size() == before
    assert lives.content(lives.opened(path)) == 75


def test_a_reader_of_many_generations_has_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(past, "FEW", 4)
    path = str(tmp_path / "store")
    ring = lives.prepared(path, 75)
    reader = lives.opened(path)
    for number in range(40):
        ring.write(number % 7)
        ring.commit()
        assert lives.content(reader) == 75
        assert len(reader.store._past._later) <= 4


def test_rows_that_a_failed_write_has_torn_are_not_committed(tmp_path, hooked):
    ring = lives.prepared(str(tmp_path / "store"), 75)
    written = []

    def hook(operation, name, *rest):
        if operation == "pwrite" and name.endswith(".bin"):
            written.append(name)
            if len(written) == 2:
                raise OSError(errno.ENOSPC, "full")

    hooked(hook)
    with pytest.raises(OSError, match="full"):
        ring.write(4)
    hooked(None)
    with pytest.raises(StaleError, match="half-written"):
        ring.commit()
    ring.write(1)  # fewer than before: the others are torn still
    with pytest.raises(StaleError, match="half-written"):
        ring.commit()
    with pytest.raises(StaleError):
        lives.content(ring)
    ring.write(3)
    ring.commit()
    assert lives.content(lives.opened(str(tmp_path / "store"))) == 79
