import os

import h5py
import numpy as np

import jrb
from jrb.datasets.reading.stat_cache import StatCache, file_stamps


def test_the_newest_are_kept():
    made, held = [], StatCache()

    def get(key):
        return held.get(key, lambda: made.append(key) or f"made of {key}")

    assert [get(key) for key in (1, 1, 2, 1)] == [f"made of {key}" for key in (1, 1, 2, 1)]
    assert made == [1, 2]
    for key in range(10, 17):  # 2, which was asked for before 1, has to go
        get(key)
    get(1)
    assert made == [1, 2, *range(10, 17)]
    get(2)
    assert made[-1] == 2


def test_files_are_told_from_those_that_come_after(tmp_path):
    path = tmp_path / "a"
    assert file_stamps([str(path)]) == ()
    path.write_text("one")
    first = file_stamps([str(path)])
    assert first == file_stamps([str(path)])
    os.utime(path, ns=(1, 1))
    assert file_stamps([str(path)]) != first
    path.unlink()
    path.write_text("two")
    assert file_stamps([str(path)]) != first


def write(path, ends):
    steps = 12
    with h5py.File(path, "w") as file:
        for name in ("observations", "actions", "rewards"):
            file[name] = np.arange(steps, dtype=np.float32)
        file["terminals"] = np.isin(np.arange(steps), ends)
        file["timeouts"] = np.zeros(steps, bool)
    return path


def test_another_file_at_the_path_is_read_anew(tmp_path):
    path = tmp_path / "a.hdf5"
    assert jrb.datasets.open(write(path, [2, 11])).lengths.tolist() == [3, 9]
    path.unlink()
    write(path, [4, 11])
    os.utime(path, ns=(5, 5))
    assert jrb.datasets.open(path).lengths.tolist() == [5, 7]


def test_what_was_read_may_be_changed(tmp_path):
    """Flags are kept for the next episode: none is a view of them."""
    dataset = jrb.datasets.open(write(tmp_path / "a.hdf5", [2, 11]))
    first = dataset[0]
    for name in ("terminated", "truncated", "done"):
        first["next"][name][:] = True
    assert dataset[0]["next"]["terminated"].tolist() == [False, False, True]
    assert dataset[0]["next"]["truncated"].tolist() == [False] * 3
    for block in dataset.blocks():
        block["next"]["terminated"][:] = True
    assert dataset[1]["next"]["terminated"].tolist() == [False] * 8 + [True]


def test_options_have_their_own(tmp_path):
    path = tmp_path / "a.npz"
    over = np.arange(6) == 3
    np.savez(path, obs=np.zeros(6), actions=np.zeros(6), x=over, y=~over)
    for name, lengths in (("x", [4, 2]), ("y", [1, 1, 1, 2, 1]), ("x", [4, 2])):
        dataset = jrb.datasets.open(path, mapping={name: "done"})
        assert dataset.lengths.tolist() == lengths
        assert dataset[0]["next"]["terminated"].sum() == 1
