"""Archives of NumPy: what is left out, and damage."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

import jrb
from tests.datasets.formats.trees import flat

SAVES = {"plain": np.savez, "compressed": np.savez_compressed}
ARRAYS = {
    "observation": np.random.default_rng(0).integers(0, 4, (20, 3)),
    "action": np.asfortranarray(np.arange(60.0).reshape(20, 3)),
    "next/reward": np.random.default_rng(1).normal(size=20).astype(np.float32),
    "next/terminated": np.arange(20) % 7 == 6,
    "z": np.random.default_rng(2).random(20) + 1j,
    "names": np.array(["a", "b"] * 10),
    "one": np.int64(3),
}
LEFT_OUT = ("names", "one")


def whole(path):
    """All steps of an archive, or how it is refused."""
    try:
        dataset = jrb.datasets.open(path, format="arrays")
        return flat(next(dataset.steps(20))), dataset.notes
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("save", SAVES)
def test_what_is_no_column_is_left_out(tmp_path, save):
    path = tmp_path / "x.npz"
    SAVES[save](path, **ARRAYS, objects=np.array([{}] * 20, object))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("about.json", "{}")
    leaves, notes = whole(path)
    for name in ARRAYS.keys() - {*LEFT_OUT}:
        np.testing.assert_array_equal(leaves[name], ARRAYS[name])
        assert leaves[name].dtype == ARRAYS[name].dtype
    assert notes[0].endswith(": 'about.json', 'names', 'objects', 'one'.")


def with_member(path, name, content):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, content)


def test_an_array_that_is_shorter_than_it_says_is_refused(tmp_path):
    array = io.BytesIO()
    np.save(array, np.zeros(30))
    with_member(tmp_path / "x.npz", "a.npy", array.getvalue()[:-8])
    assert "240 bytes for shape (30,) of float64, got 232" in whole(tmp_path / "x.npz")
    with_member(tmp_path / "x.npz", "a.npy", b"no array at all")
    assert "'a.npy': " in whole(tmp_path / "x.npz") and "magic" in whole(tmp_path / "x.npz")


@pytest.mark.parametrize("save", SAVES)
def test_an_archive_that_is_cut_is_refused(tmp_path, save):
    path, rng = tmp_path / "x.npz", np.random.default_rng(0)
    SAVES[save](path, **ARRAYS)
    content = path.read_bytes()
    for size in rng.integers(0, len(content), 60):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"x\.npz"):
            jrb.datasets.open(path)


@pytest.mark.parametrize("save", SAVES)
def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path, save):
    path = tmp_path / "x.npz"
    SAVES[save](path, **ARRAYS)
    raw, (leaves, notes) = path.read_bytes(), whole(path)
    directory, silent = raw.index(b"PK\x01\x02"), []
    for byte in range(0, len(raw), 3):
        path.write_bytes(raw[:byte] + bytes([raw[byte] ^ 1 << byte * 5 % 8]) + raw[byte + 1 :])
        found = whole(path)
        if isinstance(found, str):
            assert str(path) in found
            is_named = byte < 4 or byte >= directory  # the file is no archive any more, or damaged
            assert is_named or any(f"'{name}.npy'" in found for name in ARRAYS)
            continue
        silent.append(byte)
        assert found[1] == notes and found[0].keys() == leaves.keys()
        assert all((found[0][name] == leaf).all() for name, leaf in leaves.items())
    assert len(silent) < len(raw) // 9


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("place", [0, 40, 0.3, -21])
def test_a_damaged_archive_is_reported_as_such(tmp_path, save, place):
    path = tmp_path / "x.npz"
    SAVES[save](path, **ARRAYS)
    raw = bytearray(path.read_bytes())
    at = place if isinstance(place, int) else int(place * len(raw))
    raw[at] ^= 0xFF
    raw[at + 1] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"x\.npz.*damaged"):
        list(jrb.datasets.open(path))


@pytest.mark.parametrize("dtype", [np.float64, "V8"])
def test_an_archive_that_inflates_is_refused_before_it_does(tmp_path, dtype):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, **ARRAYS, big=np.zeros(6 << 20).astype(dtype))  # 48 MiB in 48 kB
    tracemalloc.start()
    with pytest.raises(
        ValueError, match=r"\d+ bytes of the files, got 503\d+ declared.*max_expansion=\d"
    ):
        jrb.datasets.open(path, format="arrays")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
