"""Stores: their guarantees, costs and errors."""

import os
import pathlib
import shutil
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jrb._store import files, generation, opening, places, store, table, threads
from jrb._store.errors import DamagedError, StaleError
from jrb._store.files import Folder
from jrb._store.table import Column, Leaf, files_of
from jrb._store.threads import Gate
from tests._store import faults


@pytest.fixture
def path(tmp_path):
    store.writing.clear()
    return str(tmp_path / "store")


@pytest.fixture
def announced():
    """Records the operations on files in their order."""
    found = []
    files.hook = lambda *event: found.append(event)
    yield found
    files.hook = None


def change_generation(path, change):
    """Writes a changed copy of the newest generation, with valid checksums."""
    folder = Folder(path)
    opened = generation.newest(folder)
    arrays = {name: opened.array(name, np.uint8).tobytes() for name in opened.arrays}
    change(opened.body)
    generation.write(folder, opened.body, arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(room=10**15),
        lambda table: table.update(folder="1/../../elsewhere"),
        lambda table: table["columns"][0]["leaves"][0].update(width=10**15),
        lambda table: table["columns"][0]["leaves"][0].update(name="../../../etc/passwd"),
        lambda table: table["columns"][0]["leaves"][0].update(name="/etc/passwd"),
    ],
)
def test_no_name_leads_out_of_the_folder_and_files_are_as_large_as_declared(change, path):
    faults.prepared(path, 20)
    change_generation(path, lambda body: change(body["table"]))
    with pytest.raises(ValueError, match=r"found no file|bytes, found|format code 'd'"):
        faults.opened(path)


def test_a_renamed_generation_is_refused(path):
    faults.prepared(path, 20)
    newest = os.path.join(path, generation.name_of(generation.last(Folder(path))))
    shutil.copy(newest, os.path.join(path, generation.name_of(9)))
    with pytest.raises(DamagedError, match=r"generation 9, got .*renamed"):
        faults.opened(path)


@pytest.mark.parametrize("version", [0, -1, 2.5, True, None, "4", [4]])
def test_a_version_that_never_was_is_refused(version, path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(generation, "VERSION", version)
        faults.prepared(path, 20)
    with pytest.raises(DamagedError, match="expected a generation of a store"):
        faults.opened(path)


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"{", b"[]\n", b"1\n", b"[" * 10**5, b'{"format":"jrb","version":3}\n']
)
def test_what_is_no_generation_is_refused(text, path):
    faults.prepared(path, 20)
    name = os.path.join(path, generation.name_of(2))
    with open(name, "wb") as file:
        file.write(text)
    with pytest.raises(DamagedError, match=generation.name_of(2)) as caught:
        faults.opened(path)
    assert "older" in caught.value.__notes__[0]
    assert faults.content(faults.opened(path, 1)) == 20


def test_a_newer_version_is_refused_by_name(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(generation, "VERSION", generation.VERSION + 1)
        faults.prepared(path, 20)
    with pytest.raises(ValueError, match="A newer jrb wrote this"):
        faults.opened(path)


@pytest.mark.parametrize("name", ["rows", "rows/x.bin", "rows/.numbers", generation.name_of(1)])
def test_links_are_not_followed(name, path, tmp_path):
    faults.prepared(path, 20)
    os.rename(os.path.join(path, name), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", os.path.join(path, name))
    with pytest.raises(DamagedError, match="link"):
        faults.opened(path)


def test_a_file_of_several_leaves_has_a_name_that_no_leaf_has():
    one, other = Leaf("next/a", (), 2), Leaf("b", (), 4)
    column = Column((one, other))
    assert (column.file, column.width) == ("next/a+1.bin", 6)
    assert column.parts == [slice(0, 2), slice(2, 6)]
    assert Column.of("next/a+1", (), 2).file == "next/a%2B1.bin"
    assert Column((Leaf(".", (), 2), other)).file == "items+1.bin"


def test_files_have_names_of_their_own():
    wanted = {
        "": "%.bin",
        "%": "#1.bin",
        "+": "%2B.bin",
        "%2B": "#3.bin",
        "a": "a.bin",
        "a.bin/q": "#5.bin",
        "b.bin/q": "b.bin/q.bin",
        "b": "#7.bin",
        "c" * 251: "c" * 251 + ".bin",
        "d" * 252: "#9.bin",
    }
    assert files_of(tuple(Column.of(name, (), 1) for name in wanted)) == list(wanted.values())


def test_a_place_without_a_number_has_no_check_either(path):
    opening.create(path, (Column.of("x", (), 1),), 40, 80, reserve=False).close()
    file = pathlib.Path(path, "rows", ".numbers")
    for place in range(1, 80):
        for word in (1 << 15, int(table._checks(np.array([place], np.uint64), np.uint64(0))[0])):
            words = np.zeros(80, np.uint64)
            words[place] = word
            file.write_bytes(words.tobytes())
            rows = table.RowTable(
                Folder(path), "rows", (Column.of("x", (), 1),), 80, writable=False
            )
            with pytest.raises(DamagedError, match=f"the number of place {place} was damaged"):
                rows.check_numbers()


def test_numbers_that_change_while_they_are_looked_at_are_not_damaged(path):
    opening.create(path, (Column.of("x", (), 1),), 40, 80, reserve=False).close()
    rows = table.RowTable(Folder(path), "rows", (Column.of("x", (), 1),), 80, writable=False)
    places = np.arange(80, dtype=np.uint64)
    sixteen = np.uint64(16)
    words = lambda numbers: numbers << sixteen | table._checks(places.copy(), numbers)
    there, new = (words(np.uint64(most) - places) for most in (80, 200))

    class Written(np.ndarray):
        """An array that another process overwrites between the read and the checks."""

        def __rshift__(self, bits):
            found = np.asarray(self) >> bits
            there[:] = new
            return found

    rows._words = there.view(Written)
    rows.check_numbers()
    np.testing.assert_array_equal(there, new)


NAMES = ["..", ".", "a/b", "", "rows", "undo/x", "numbers", "lock", "\0", "ä", "a b", "/x"]


def test_names_of_leaves_stay_below_the_folder(path, tmp_path):
    columns = tuple(Column.of(name, ("uint8", "[]"), 1) for name in NAMES)
    names = [column.file for column in columns]
    assert len(set(names)) == len(names)
    opening.create(path, columns, 4, 8, reserve=False)
    root = tmp_path / "store" / "rows"
    assert {str(name.relative_to(root)) for name in root.rglob("*.bin")} == set(names)
    assert os.listdir(tmp_path) == ["store"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        faults.created(str(tmp_path))
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        faults.BEFORE(str(tmp_path))
    assert os.listdir(tmp_path) == ["thesis.tex"]
    faults.BEFORE(str(tmp_path / "mine"))
    (tmp_path / "mine" / "manifest.json").write_text("{}")
    faults.BEFORE(str(tmp_path / "mine"))  # other files may be beside a checkpoint
    assert (tmp_path / "mine" / "manifest.json").read_text() == "{}"
    (tmp_path / "other" / "rows").mkdir(parents=True)
    with pytest.raises(ValueError, match="rows"):
        faults.BEFORE(str(tmp_path / "other"))


def test_a_store_with_something_saved_is_not_made_again(path):
    faults.prepared(path, 5)
    store.writing.clear()
    with pytest.raises(ValueError, match=r"jrb\.load"):
        faults.created(path)


def test_a_commit_costs_what_changed(path, announced):
    ring = faults.prepared(path, 75)
    announced.clear()
    ring.write(3)
    ring.commit()
    written = sum(len(event[3]) for event in announced if event[0] == "pwrite")
    assert written < 3 * 3004 + 10_000 + 75 * 8
    assert sum(event[0] == "fsync" for event in announced) <= 6


def test_what_was_promised_is_not_written_over_while_there_is_room(path, announced):
    ring = faults.prepared(path, 75)
    reader = faults.opened(path)
    ring.write(faults.SLACK)
    assert faults.content(reader) == 75
    announced.clear()
    ring.write(1)
    order = [(event[0], os.path.basename(event[1])) for event in announced]
    assert order[:2] == [("pwrite", ".numbers"), ("fsync", ".numbers")]
    with pytest.raises(StaleError):
        faults.content(reader)
    assert 0 < faults.opened(path).lost < faults.SLACK


def test_older_generations_stay_as_long_as_asked(path):
    for stamp in range(6):
        faults.Save(range(stamp * 100, stamp * 100 + 40), keep=2)(path)
    assert generation.numbers(Folder(path)) == [4, 5, 6]
    assert [faults.saved_at(path, number)[0] for number in (4, 5, 6)] == [300, 400, 500]
    faults.Save(range(40), keep=0)(path)
    assert generation.numbers(Folder(path)) == [7]
    assert opening.damages(path) == []
    with pytest.raises(FileNotFoundError, match="keep=n"):
        faults.reopen(path, 5)


def test_rows_that_a_failed_sync_may_have_lost_are_written_again(path, announced):
    ring = faults.prepared(path, 20)
    ring.write(5)
    failed = []

    def fail_once(operation, name, *rest):
        if operation == "fsync" and name.endswith("x.bin") and not failed:
            failed.append(name)
            raise OSError(5, "Input/output error")
        announced.append((operation, name, *rest))

    files.hook = fail_once
    with pytest.raises(OSError, match="Input/output") as caught:
        ring.commit()
    assert "has not happened" in caught.value.__notes__[0]
    announced.clear()
    ring.commit()
    again = [event[1:3] for event in announced if event[0] == "pwrite" and "x.bin" in event[1]]
    assert again == [(failed[0], 20 * 3000)]
    assert faults.content(faults.opened(path)) == 25


@pytest.mark.parametrize("more", [37, 45, 54])
def test_a_commit_that_failed_to_sync_can_be_made_after_more_writes(more, path):
    ring = faults.prepared(path, 75)
    ring.write(14)

    def fail(operation, name, *rest):
        if operation == "fsync" and name.endswith("x.bin"):
            raise OSError(5, "Input/output error")

    files.hook = fail
    try:
        with pytest.raises(OSError, match="Input/output"):
            ring.commit()
    finally:
        files.hook = None
    ring.write(more)
    ring.commit()
    assert faults.content(faults.opened(path)) == 89 + more


def test_a_commit_does_not_make_damage_valid(path):
    ring = faults.prepared(path, 20)
    with open(os.path.join(path, "rows", "x.bin"), "r+b") as file:
        file.seek(19 * 3000)
        file.write(b"damage")
    ring.write(1)
    with pytest.raises(DamagedError, match="leaf 'x'"):
        ring.commit()


def test_a_damaged_number_is_no_loss_without_a_word(path):
    faults.BEFORE(path)
    name = os.path.join(path, "rows", ".numbers")
    with open(name, "r+b") as file:
        file.seek(5 * 8 + 6)
        file.write(b"\x40")
    with pytest.raises(DamagedError, match="numbers"):
        faults.reopen(path)
    faults.SAVES["incremental"](path)  # rewrites all rows
    assert faults.SAVES["incremental"].is_at(path)


def test_folders_of_others_stay(tmp_path):
    path = str(tmp_path)
    for name in ("rows_of_mine", "rows-12"):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=name):
            faults.BEFORE(path)
        (tmp_path / name).rmdir()
    faults.BEFORE(path)
    (tmp_path / "rows_of_mine").mkdir()
    (tmp_path / "rows.csv").write_text("1,2")
    (tmp_path / "rows-12").mkdir()
    (tmp_path / "rows-12" / "notes").write_text("...")
    faults.SAVES["other columns"](path)
    assert {"rows_of_mine", "rows-12", "rows.csv"} <= set(os.listdir(path))
    assert "rows" not in os.listdir(path)
    (tmp_path / "rows-3").mkdir()
    (tmp_path / "rows-3" / "notes").write_text("...")
    with pytest.raises(ValueError, match="rows-3"):
        faults.BEFORE(path)
    assert os.listdir(tmp_path / "rows-3") == ["notes"]
    (tmp_path / "rows-3" / "notes").unlink()
    (tmp_path / "rows-3").rmdir()
    (tmp_path / "rows-3").write_text("a file, or a link")
    for _ in range(2):
        with pytest.raises(ValueError, match="rows-3"):
            faults.BEFORE(path)
        assert (tmp_path / "rows-3").read_text() == "a file, or a link"
        (tmp_path / "rows-3").rename(tmp_path / "another")
        (tmp_path / "rows-3").symlink_to("another")


def test_names_that_only_look_like_generations_count_for_nothing(path):
    faults.BEFORE(path)
    for name in ("generation-9", "generation-\u0661", "generation-x"):
        with open(os.path.join(path, name), "w") as file:
            file.write("{")
    assert generation.numbers(Folder(path)) == [1]
    assert faults.BEFORE.is_at(path)


def test_what_an_expiry_could_not_finish_is_freed_by_the_next(path):
    ring = faults.prepared(path, 60)
    for _ in range(8):
        ring.write(5)

        def fail(operation, name, *rest, seen=[]):  # noqa: B006
            seen.append(operation)
            if operation == "fsync" and "unlink" in seen:
                raise OSError(5, "Input/output error")

        files.hook = fail
        with pytest.raises(OSError, match="Input/output") as caught:
            ring.commit()
        files.hook = None
        assert "has happened, and lasts" in caught.value.__notes__[0]
    ring.commit()
    ring.write(15)
    assert len(faults.opened(path).store.lost) == 0


def test_a_takeover_that_fails_leaves_the_writer_as_it_was(path, monkeypatch):
    ring = faults.prepared(path, 20)
    ring.write(3)
    other = faults.opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(other.store, "begin", lambda lock: other.store.missing)
        with pytest.raises(AttributeError):
            other.write(1)
    ring.write(2)
    assert faults.content(ring) == 25
    other = faults.opened(path)
    other.write(1)
    with pytest.raises(StaleError):
        ring.write(1)


def test_a_copy_of_a_folder_is_another_store(path, tmp_path):
    ring = faults.prepared(path, 20)
    os.rename(path, path + ".away")
    shutil.copytree(path + ".away", path)
    other = faults.opened(path)
    other.write(1)
    other.commit()
    with pytest.raises(OSError, match="renamed"):
        ring.write(1)
    assert faults.content(faults.opened(path)) == 21


# Places of slots, as runs.


@st.composite
def lying(draw):
    """Draws the places of slots, in ring or random order, some never written; and the room."""
    room = draw(st.integers(1, 12))
    count = draw(st.integers(1, room))
    order = draw(st.permutations(range(room)))
    turned = np.roll(np.arange(room), draw(st.integers(0, room)))
    of = np.asarray(draw(st.sampled_from([order, list(turned)]))[:count], np.int64)
    never = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return np.where(never, places.NEVER, of), room


@pytest.fixture(params=[0, 64], scope="module")
def few(request):
    """Handles runs in one NumPy call (0) or in a loop with pieces of three (64)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "_FEW", request.param)
        patch.setattr(places, "_PIECE", 3)
        yield


@pytest.mark.usefixtures("few")
@hypothesis.given(lying())
def test_runs_say_where_all_slots_lie_and_are_as_few_as_can_be(where):
    of, room = where
    runs = places.runs_of(of)
    np.testing.assert_array_equal(places.Places(runs, len(of), room).at(np.arange(len(of))), of)
    follows = lambda s: s > 0 and of[s - 1] >= 0 and of[s] == of[s - 1] + 1
    assert len(runs) == sum(of[s] >= 0 and not follows(s) for s in range(len(of)))


@pytest.mark.usefixtures("few")
@hypothesis.given(lying())
def test_named_places_are_those_of_slots(where):
    of, room = where
    known = places.Places(places.runs_of(of), len(of), room)
    assert np.flatnonzero(known.named()).tolist() == sorted(place for place in of if place >= 0)
    assert known.reach == max((s + 1 for s in range(len(of)) if of[s] >= 0), default=0)
    assert known.slots == len(of) and known.room == room
    np.testing.assert_array_equal(known.runs, places.runs_of(of))
    np.testing.assert_array_equal(known.used, of[: known.reach])
    slots = {place: slot for slot, place in enumerate(of) if place >= 0}
    assert known.slots_at().tolist() == [slots.get(place, -1) for place in range(room)]


# Writes wait for running draws.

AT_MOST = 60  # seconds until a wait that does not end fails the test


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE", 2 * AT_MOST)


class Watched:
    """A lock with an event that is set when a thread waits for it."""

    def __init__(self, lock):
        self.lock, self.is_waited_for = lock, threading.Event()
        self.release = lock.release

    def acquire(self, **options):
        self.is_waited_for.set()
        return self.lock.acquire(**options)


def waiting(one):
    """Starts and returns a thread that waits at the gate until the caller has left."""
    ((number, lock),) = one.inside.items()
    one.inside[number] = watched = Watched(lock)
    thread = threading.Thread(target=one.wait, daemon=True)
    thread.start()
    assert watched.is_waited_for.wait(AT_MOST)
    return thread


@pytest.mark.usefixtures("patient")
def test_a_write_waits_until_a_draw_of_another_thread_is_over():
    one = Gate()
    with one.entered():
        thread = waiting(one)
        assert thread.is_alive()
    thread.join(AT_MOST)
    assert not thread.is_alive()
    assert not one.inside


@pytest.mark.usefixtures("patient")
def test_a_draw_within_a_draw_holds_a_write_up_as_long_as_the_outer_one():
    one = Gate()
    with one.entered():
        thread = waiting(one)
        with one.entered():
            pass
        assert thread.is_alive()
    thread.join(AT_MOST)
    assert not thread.is_alive()


@pytest.mark.usefixtures("patient")
def test_nobody_waits_for_oneself():
    one = Gate()
    with one.entered():
        one.wait()
    assert not one.inside


def test_a_draw_that_never_ends_is_not_waited_for_twice(monkeypatch):
    one = Gate()
    monkeypatch.setattr(threads, "PATIENCE", 0.01)
    one.inside[-1] = threads.taken_lock()  # as if an interrupt ended a thread in the gate
    one.wait()
    assert not one.inside
    monkeypatch.setattr(threads, "PATIENCE", AT_MOST)
    one.wait()
