import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from jrb.datasets.reading import npz

SAVES = {"plain": np.savez, "compressed": np.savez_compressed}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_slices_gives_the_rows(tmp_path, save, seed):
    rng = np.random.default_rng(seed)
    arrays = {
        "a": rng.normal(size=(500, 3)).astype(np.float32),
        "b/c": rng.integers(0, 255, (500, 2, 2)).astype(np.uint8),
        "d": rng.random(500) < 0.5,
        "e": rng.normal(size=500) + 1j,
    }
    SAVES[save](tmp_path / "x.npz", **arrays)
    with npz.opened(str(tmp_path / "x.npz")) as archive:
        assert archive.columns.keys() == arrays.keys()
        assert archive.left_out == ()
        for _ in range(200):
            name = rng.choice(list(arrays))
            start, stop = rng.integers(0, 520, 2)
            column, wanted = archive.columns[name], arrays[name][start:stop]
            assert (column.shape, column.dtype, len(column)) == (
                arrays[name].shape,
                wanted.dtype,
                500,
            )
            found = column[start:stop]
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            assert found.tobytes() == wanted.tobytes()
            found[...] = 0  # a copy, which spoils nothing


def test_rows_that_follow_each_other_are_decompressed_once(tmp_path, monkeypatch):
    values = np.arange(1000.0)
    np.savez_compressed(tmp_path / "x.npz", a=values)
    sought, seek = [], zipfile.ZipExtFile.seek
    spy = lambda self, *rest: sought.append(rest) or seek(self, *rest)
    monkeypatch.setattr(zipfile.ZipExtFile, "seek", spy)
    with npz.opened(str(tmp_path / "x.npz")) as archive:
        column = archive.columns["a"]
        parts = [column[start : start + 11] for start in range(0, 1000, 10)]  # one row again
    assert len(sought) == 1
    np.testing.assert_array_equal(np.concatenate([part[:10] for part in parts]), values)


def test_a_large_archive_takes_little_memory(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros((64, 1 << 17)))  # 64 MiB
    with npz.opened(str(tmp_path / "x.npz")) as archive:
        tracemalloc.start()
        for start in range(64):
            archive.columns["a"][start : start + 1]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("save", SAVES)
def test_what_is_no_column_is_left_out(tmp_path, save):
    arrays = {"text": np.array(["a", "b"]), "one": np.float64(3), "a": np.arange(2)}
    arrays["objects"] = np.array([{}, []], object)
    SAVES[save](tmp_path / "x.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as file:
        file.writestr("about.json", "{}")
    with npz.opened(str(tmp_path / "x.npz")) as archive:
        assert list(archive.columns) == ["a"]
        assert set(archive.left_out) == {"text", "one", "objects", "about.json"}


def test_arrays_without_rows_and_in_the_order_of_fortran(tmp_path):
    turned = np.asfortranarray(np.arange(12.0).reshape(4, 3))
    np.savez(tmp_path / "x.npz", empty=np.zeros((0, 3)), turned=turned)
    with npz.opened(str(tmp_path / "x.npz")) as archive:
        assert archive.columns["empty"][:].shape == (0, 3)
        np.testing.assert_array_equal(archive.columns["turned"][1:3], turned[1:3])
    np.savez_compressed(tmp_path / "y.npz", turned=turned)
    with pytest.raises(ValueError, match="order of Fortran"), npz.opened(str(tmp_path / "y.npz")):
        pass


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "a/./b", "."])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr(name + ".npy", array.getvalue())
    with pytest.raises(ValueError, match="expected names of arrays"):
        npz.opened(str(tmp_path / "x.npz")).__enter__()


def test_an_array_that_is_a_group_too_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", **{"a": np.zeros(3), "a/b": np.zeros(3)})
    with pytest.raises(ValueError, match="got both"):
        npz.opened(str(tmp_path / "x.npz")).__enter__()


@pytest.mark.parametrize("save", SAVES)
def test_a_damaged_archive_is_refused_or_read_right(tmp_path, save):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 4, 4000)
    path = tmp_path / "x.npz"
    SAVES[save](path, a=values, b=values[::-1])
    whole = path.read_bytes()
    for size in rng.integers(0, len(whole), 60):
        path.write_bytes(whole[:size])
        assert npz.top(str(path)) == {}
        with pytest.raises(ValueError, match=r"x\.npz"), npz.opened(str(path)):
            pass


def test_an_array_that_is_shorter_than_it_says_is_refused(tmp_path):
    array = io.BytesIO()
    np.save(array, np.zeros(30))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", array.getvalue()[:-8])
    with pytest.raises(ValueError, match=r"240 bytes for shape \(30,\) of float64, got 232"):
        npz.opened(str(tmp_path / "x.npz")).__enter__()
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", b"no array at all")
    with pytest.raises(ValueError, match=r"'a\.npy': expected an array"):
        npz.opened(str(tmp_path / "x.npz")).__enter__()


def test_a_flipped_bit_of_compressed_data_is_found(tmp_path):
    values = np.random.default_rng(0).normal(size=4000)
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=values)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)
    with (
        pytest.raises(ValueError, match=r"expected a whole \.npz file"),
        npz.opened(str(path)) as file,
    ):
        file.columns["a"][:]
