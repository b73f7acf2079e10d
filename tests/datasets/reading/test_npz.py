import io
import tracemalloc
import zipfile

import numpy as np
import pytest

import jrb
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


@pytest.mark.parametrize("save", SAVES)
def test_what_is_no_column_is_left_out(tmp_path, save):
    arrays = {"text": np.array(["a", "b"]), "one": np.float64(3), "a": np.arange(2)}
    arrays["objects"] = np.array([{}, []], object)
    SAVES[save](tmp_path / "x.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as file:
        file.writestr("about.json", "{}")
    with npz.opened(str(tmp_path / "x.npz")) as archive:
        assert (list(archive.columns), list(archive.texts)) == (["a"], ["text"])
        assert archive.texts["text"][:].tolist() == ["a", "b"]
        assert set(archive.left_out) == {"one", "objects", "about.json"}


@pytest.mark.parametrize("save", SAVES)
def test_arrays_without_rows_and_in_the_order_of_fortran(tmp_path, save):
    turned = np.asfortranarray(np.arange(12.0).reshape(4, 3))
    SAVES[save](tmp_path / "x.npz", empty=np.zeros((0, 3)), turned=turned)
    with npz.opened(str(tmp_path / "x.npz")) as archive:
        assert archive.columns["empty"][:].shape == (0, 3)
        np.testing.assert_array_equal(archive.columns["turned"][1:3], turned[1:3])


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
    with pytest.raises(ValueError, match=r"'a\.npy': .*magic string"):
        npz.opened(str(tmp_path / "x.npz")).__enter__()


ARRAYS = {
    "observations": np.random.default_rng(0).integers(0, 4, (20, 3)),
    "rewards": np.random.default_rng(1).normal(size=20).astype(np.float32),
    "flags": np.arange(20) % 7 == 6,
    "names": np.array(["a", "b"] * 10),
    "one": np.int64(3),
}


def read(path):
    """What an archive holds, or how it is refused."""
    try:
        return held(path)
    except ValueError as error:
        return str(error)


def held(path):
    with npz.opened(str(path)) as archive:
        found = {name: leaf[:] for name, leaf in (archive.columns | archive.texts).items()}
        return {**found, **dict.fromkeys(archive.left_out)}


@pytest.mark.parametrize("save", SAVES)
def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path, save):
    path = tmp_path / "x.npz"
    SAVES[save](path, **ARRAYS)
    raw = path.read_bytes()
    directory = raw.index(b"PK\x01\x02")
    silent = []
    for byte in range(0, len(raw), 3):
        path.write_bytes(raw[:byte] + bytes([raw[byte] ^ 1 << byte * 5 % 8]) + raw[byte + 1 :])
        found = read(path)
        if isinstance(found, str):
            assert str(path) in found
            assert byte >= directory or any(f"'{name}.npy'" in found for name in ARRAYS)
            continue
        silent.append(byte)
        assert found.keys() == ARRAYS.keys()
        for name, leaf in found.items():
            assert name == "one" or (leaf == ARRAYS[name]).all()
            assert name == "one" or leaf.dtype == ARRAYS[name].dtype
    assert len(silent) < len(raw) // 9


def test_a_flipped_bit_is_found_wherever_reading_begins(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(4000))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)
    for part in (slice(0, 1), slice(3999, 4000)):
        with pytest.raises(ValueError, match=r"'a\.npy': .*CRC"), npz.opened(str(path)) as file:
            file.columns["a"][part]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("place", [0, 40, 0.3, -21])
def test_a_damaged_archive_is_reported_as_such(tmp_path, save, place):
    path = tmp_path / "x.npz"
    arrays = {"observations": np.arange(90.0).reshape(30, 3), "actions": np.arange(30)}
    SAVES[save](path, **arrays, rewards=np.ones(30), terminals=np.arange(30) % 5 == 4)
    raw = bytearray(path.read_bytes())
    at = place if isinstance(place, int) else int(place * len(raw))
    raw[at] ^= 0xFF
    raw[at + 1] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"x\.npz.*damaged"):
        list(jrb.datasets.open(path))


@pytest.mark.parametrize("name", ["a", "left out"])
def test_an_archive_that_inflates_is_refused_before_it_does(tmp_path, name):
    arrays = {"a": np.arange(10), name: np.zeros(6 << 20)}  # 48 MiB in 48 kB
    arrays["left out"] = arrays["left out"].astype("V8") if name == "left out" else np.zeros(())
    path = str(tmp_path / "x.npz")
    np.savez_compressed(path, **arrays)
    tracemalloc.start()
    with pytest.raises(
        ValueError, match=r"\d+ bytes of the files, got 503\d+ declared.*max_expansion=1"
    ):
        npz.opened(path).__enter__()
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    with npz.opened(path, 2000) as archive:
        assert archive.columns["a"][:3].tolist() == arrays["a"][:3].tolist()
