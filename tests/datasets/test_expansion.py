"""Files of kilobytes that declare gigabytes, beside the arrays of steps: refused before memory."""

import json
import resource

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from jrb import datasets

TOLD = r"at most 100 times the \d+ bytes of the files, got \d+ declared bytes.*max_expansion=\d"
STEPS = 4


def robomimic(path):
    with h5py.File(path, "w") as file:
        group = file.create_group("data/demo_0")
        for name in ("obs/x", "actions", "rewards", "dones"):
            group[name] = np.zeros(STEPS)
        file.create_dataset("mask/train", (70_000_000,), "S7", chunks=(1024,))


def d4rl(path):
    with h5py.File(path, "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file[name] = np.zeros(STEPS)
        file.create_dataset("metadata/text", (), h5py.string_dtype(length=1 << 29))


@pytest.mark.parametrize("write", [robomimic, d4rl])
def test_lists_and_texts_of_hdf5(write, tmp_path):
    write(tmp_path / "set.h5")
    with pytest.raises(ValueError, match=TOLD):
        datasets.open(tmp_path / "set.h5")


def test_numbers_of_recorded_steps(tmp_path):
    item = {"observation": np.float32(0), "next": {"reward": np.float32(0), "done": False}}
    with datasets.Recorder(tmp_path) as recorder:
        recorder.add(item)
    part = max(tmp_path.glob("*.parquet"))
    table = parquet.read_table(part)
    rows = pa.array(np.zeros(15_000_000, np.int64))
    columns = [rows.cast(field.type) for field in table.schema]
    parquet.write_table(pa.table(columns, schema=table.schema), part, compression="zstd")
    with pytest.raises(ValueError, match=TOLD):
        datasets.open(tmp_path)


def test_tables_of_episodes_of_lerobot(tmp_path):
    (tmp_path / "meta/episodes").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    features = {"observation.state": {"dtype": "float32", "shape": [1]}}
    features["action"] = features["observation.state"]
    info = {"codebase_version": "v3.0", "fps": 10, "features": features}
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    zeros = pa.array(np.zeros(2_000_000, np.int64))
    names = ("episode_index", "length", "data/chunk_index", "data/file_index")
    table = pa.table(dict.fromkeys(names, zeros))
    parquet.write_table(table, tmp_path / "meta/episodes/0.parquet", compression="zstd")
    with pytest.raises(ValueError, match=TOLD):
        datasets.open(tmp_path)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_text_that_all_rows_share_is_in_memory_once(ending, tmp_path):
    rows, path = 50_000, str(tmp_path / f"a.{ending}")
    index = pa.array(np.repeat([1, 0], rows // 2).astype(np.int32))
    texts = pa.DictionaryArray.from_arrays(index, pa.array(["a" * 20_000, "b" * 20_000]))
    table = pa.table({"observation": np.zeros(rows), "episode_id": texts})
    if ending == "parquet":
        parquet.write_table(table, path, store_schema=False)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = datasets.open(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert dataset.lengths.tolist() == [rows // 2, rows // 2]
    assert [text[0] for text in dataset.facts["episode"]] == ["b", "a"]


@pytest.mark.slow
def test_a_list_longer_than_the_first_is_refused_before_it_is_decoded(tmp_path):
    numbers = pa.array(np.zeros(60_000_000))
    lists = pa.LargeListArray.from_arrays(pa.array([0, 2, len(numbers)], pa.int64()), numbers)
    table = pa.table({"observation": lists, "done": [False, True]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    del numbers, lists, table
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match="expected lists of one length, 4 numbers, got 60000000"):
        _ = datasets.open(tmp_path / "a.parquet")[0]
    assert pa.total_allocated_bytes() - before < 1 << 20
