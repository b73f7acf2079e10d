import itertools

import numpy as np
import pytest

import jrb
from jrb import datasets
from jrb.datasets.reading import arrow
from jrb.datasets.reading import tabular as layout

pa = pytest.importorskip("pyarrow")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.ipc as ipc  # noqa: E402
import pyarrow.parquet as parquet  # noqa: E402

from tests.datasets.formats.trees import flat, same  # noqa: E402

LENGTHS = [5, 1, 7, 3, 1, 1, 9, 2, 4, 6, 8, 3]
STEPS = sum(LENGTHS)


def nested(array, fixed=True):
    inner = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        offsets = np.arange(0, len(inner) + 1, size, dtype=np.int32)
        inner = (
            pa.FixedSizeListArray.from_arrays(inner, size)
            if fixed
            else pa.ListArray.from_arrays(offsets, inner)
        )
    return inner


def made(lengths=LENGTHS, seed=0):
    """The leaves of TED of a set, and which steps end episodes."""
    rng, steps = np.random.default_rng(seed), sum(lengths)
    over = np.zeros(steps, bool)
    over[np.cumsum(lengths) - 1] = True
    terminated = over & rng.integers(0, 2, steps).astype(bool)
    reward = rng.normal(size=steps)
    reward[0] = np.nan
    return {
        "observation/arm": rng.normal(size=(steps, 3)).astype(np.float32),
        "observation/grid": rng.integers(0, 9, (steps, 2, 4)).astype(np.int16),
        "action": rng.normal(size=(steps, 2)).astype(np.float16),
        "next/reward": reward,
        "next/terminated": terminated,
        "next/truncated": over & ~terminated,
        "count": np.arange(steps, dtype=np.uint8),
    }


def table_of(leaves, fixed=True, names=None):
    names = names or {name: name.replace("/", ".") for name in leaves}
    return pa.table({names[name]: nested(leaf, fixed) for name, leaf in leaves.items()})


@pytest.mark.parametrize("mapping", [None, {"id": "episode"}, jrb.Keys(episode="id")])
@pytest.mark.parametrize("encoded", [False, True])
def test_texts_that_tell_episodes_apart_become_numbers(tmp_path, mapping, encoded):
    leaves = {"observation": np.arange(9.0), "action": np.arange(9)}
    names = ["zoo"] * 2 + ["ant"] * 3 + ["bee"] * 4
    column = pa.array(names).dictionary_encode() if encoded else pa.array(names)
    table = table_of(leaves).append_column("episode_id" if mapping is None else "id", column)
    table = table.append_column("task", pa.array(["run"] * 9))
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    dataset = datasets.open(tmp_path / "a.parquet", mapping=mapping)
    assert dataset.lengths.tolist() == [2, 3, 4]
    assert [each["episode"].tolist() for each in dataset] == [[0] * 2, [1] * 3, [2] * 4]
    assert dataset.facts["episode"].tolist() == ["zoo", "ant", "bee"]
    assert any("are left out: task (string)" in note for note in dataset.notes)
    assert any("Texts tell episodes apart" in note for note in dataset.notes)
    assert jrb.stats(*dataset.buffer())["complete"] == 3
    with pytest.raises(ValueError, match="'next/reward': expected numbers, got 'task', which hold"):
        datasets.open(tmp_path / "a.parquet", mapping={"task": "reward"})


def test_tables_that_inflate_are_refused(tmp_path):
    steps = 2 << 20  # 48 MiB
    ends = pa.array(np.arange(steps) % 1000 == 999)
    zeros = pa.array(np.zeros(steps))
    table = pa.table({"observation": zeros, "action": zeros, "reward": zeros, "done": ends})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"bytes of the files, got 5\d+ declared.*max_expansion="):
        datasets.open(tmp_path / "a.parquet")
    assert datasets.open(tmp_path / "a.parquet", max_expansion=10_000).transitions == steps


def test_a_table_of_a_folder_that_is_none_any_more_is_not_left_out(tmp_path):
    for number in range(3):
        parquet.write_table(table_of(made(seed=number)), tmp_path / f"{number}.parquet")
    with open(tmp_path / "1.parquet", "r+b") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match=r"1\.parquet: expected a Parquet or Arrow file"):
        datasets.open(tmp_path)


def expected(leaves, lengths, number):
    """An episode in TED, in plain Python."""
    start = sum(lengths[:number])
    part = slice(start, start + lengths[number])
    found = {name: leaf[part] for name, leaf in leaves.items()}
    for name in [name for name in leaves if name.startswith("observation")]:
        after = np.zeros_like(found[name])
        after[:-1] = found[name][1:]
        found["next/" + name] = after
    over = np.zeros(lengths[number], bool)
    over[-1] = True
    found["next/terminated"] = found.get("next/terminated", ~over & over)
    found["next/truncated"] = over & ~found["next/terminated"]
    found["next/done"] = over
    found["next/valid"] = found["next/terminated"] | ~over
    return found


def write_parquet(path, table):
    parquet.write_table(table, path, row_group_size=7)


def write_file(path, table):
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_stream(path, table):
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_feather(path, table):
    feather.write_feather(table, path, compression="zstd", chunksize=7)


WRITERS = [write_parquet, write_file, write_stream, write_feather]


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("piece", [1, 4 << 20])
def test_every_way_of_reading_gives_what_was_written(tmp_path, monkeypatch, write, fixed, piece):
    monkeypatch.setattr(arrow, "_PIECE", piece)
    leaves = made()
    write(path := str(tmp_path / "any.name"), table_of(leaves, fixed))
    dataset = datasets.open(path)
    assert dataset.format.name == "table"
    assert dataset.lengths.tolist() == LENGTHS
    for number in [*range(len(LENGTHS)), -1, -12, 3, 2]:
        same(dataset[number], expected(leaves, LENGTHS, number % len(LENGTHS)))
    wanted = [expected(leaves, LENGTHS, number) for number in range(len(LENGTHS))]
    for episode, want in zip(dataset, wanted, strict=True):
        same(episode, want)
    for episode, want in zip(dataset[::-2], wanted[::-2], strict=True):
        same(episode, want)
    whole = {name: np.concatenate([each[name] for each in wanted]) for name in wanted[0]}
    for read in (dataset.blocks(), dataset.steps(11)):
        found = [flat(block) for block in read]
        joined = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        for name, leaf in whole.items():
            np.testing.assert_array_equal(joined[name], leaf, err_msg=name)
    returns = [each["next/reward"].sum() for each in wanted]
    np.testing.assert_allclose(dataset.returns(), returns)


def test_files_of_a_folder_follow_each_other_by_numbers(tmp_path):
    leaves = made()
    table, edges = table_of(leaves), [0, 0, 3, 3, 4, 20, 21, 22, 23, 24, 25, 26, 40, 45, STEPS]
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        path = tmp_path / f"part-{number}.{'arrow' if number % 2 else 'parquet'}"
        (write_file if number % 2 else write_parquet)(str(path), table.slice(start, stop - start))
    parquet.write_metadata(table.schema, tmp_path / "_metadata")
    (tmp_path / "state.json").write_text("{}")
    dataset = datasets.open(tmp_path)
    assert dataset.transitions == STEPS
    for number, episode in enumerate(dataset):
        same(episode, expected(leaves, LENGTHS, number))
    same(dataset[5], expected(leaves, LENGTHS, 5))


@pytest.mark.slow
def test_random_episodes_of_files_with_other_groups_and_lists(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "_PIECE", 100)
    leaves = made()
    for number, part in enumerate([slice(0, 20), slice(20, 21), slice(21, STEPS)]):
        table = table_of({name: leaf[part] for name, leaf in leaves.items()}, fixed=number != 1)
        write_parquet(str(tmp_path / f"{number}.parquet"), table)
    dataset, rng = datasets.open(tmp_path), np.random.default_rng(1)
    for _ in range(20):
        numbers = rng.integers(0, len(LENGTHS), 10)
        for number, episode in zip(numbers, dataset.only(numbers), strict=True):
            same(episode, expected(leaves, LENGTHS, number))


def test_what_is_held_while_columns_are_read_together_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "_PIECE", 100_000)
    monkeypatch.setattr(layout, "_BLOCK", 200_000)
    steps = 8000
    leaves = {
        "observation": np.ones((steps, 250), np.float32),
        "action": np.ones(steps, np.float32),
        "next/terminated": np.arange(steps) % 100 == 99,
    }
    parquet.write_table(table_of(leaves), tmp_path / "t", row_group_size=1000)
    before, most = pa.total_allocated_bytes(), 0
    for block in datasets.open(tmp_path / "t").blocks():
        most = max(most, pa.total_allocated_bytes() - before)
        assert block["observation"].shape[1:] == (250,)
    assert most < 2_000_000  # of 8 MB


def test_only_the_row_groups_that_are_needed_are_read(tmp_path):
    leaves = {**made(), "wide": np.arange(STEPS * 50_000).reshape(STEPS, -1)}
    write_parquet(path := str(tmp_path / "t"), table_of(leaves))
    metadata = parquet.read_metadata(path)
    column = metadata.schema.names.index("element", metadata.num_columns - 1)
    with open(path, "r+b") as file:  # a group amid the file
        chunk = metadata.row_group(3).column(column)
        file.seek(chunk.data_page_offset + chunk.total_compressed_size // 2)
        file.write(bytes(40))
    dataset = datasets.open(path)
    same(dataset[0], expected(leaves, LENGTHS, 0))
    same(dataset[-1], expected(leaves, LENGTHS, len(LENGTHS) - 1))
    with pytest.raises(ValueError, match="t: expected a whole"):
        list(dataset)


@pytest.mark.parametrize("write", WRITERS)
def test_columns_of_no_numbers_are_left_out_and_told(tmp_path, write):
    leaves = made()
    table = table_of(leaves)
    table = table.append_column("text", pa.array(["a"] * STEPS))
    table = table.append_column("word", pa.array(["a"] * STEPS).dictionary_encode())
    table = table.append_column("when", pa.array([0] * STEPS, pa.timestamp("s")))
    write(path := str(tmp_path / "t"), table)
    dataset = datasets.open(path)
    same(dataset[0], expected(leaves, LENGTHS, 0))
    assert any("text (string), word (dict" in note and "when" in note for note in dataset.notes)


def test_structs_and_tensors_are_read(tmp_path):
    leaves = made()
    inner = [nested(leaves["observation/arm"]), nested(leaves["observation/grid"])]
    struct = pa.StructArray.from_arrays(inner, ["arm", "grid"])
    kind = pa.fixed_shape_tensor(pa.float16(), (1, 2))
    storage = pa.FixedSizeListArray.from_arrays(pa.array(leaves["action"].reshape(-1)), 2)
    table = pa.table(
        {
            "obs": struct,
            "action": pa.ExtensionArray.from_storage(kind, storage),
            "rewards": leaves["next/reward"],
            "terminals": leaves["next/terminated"],
            "timeouts": leaves["next/truncated"],
            "count": leaves["count"],
        }
    )
    wanted = {**leaves, "action": leaves["action"].reshape(STEPS, 1, 2)}
    for write in (write_parquet, write_file):
        write(path := str(tmp_path / write.__name__), table)
        dataset = datasets.open(path)
        for number in (0, 6, 11):
            same(dataset[number], expected(wanted, LENGTHS, number))


@pytest.mark.parametrize(
    "mapping",
    [
        {"s": "observation", "r": "reward", "t": ("next", "terminated"), "u": "next/truncated"},
        jrb.Keys(observation="s", reward="r", terminated="t", truncated="u"),
    ],
)
def test_a_mapping_names_columns(tmp_path, mapping):
    names = {
        "observation/arm": "s.arm",
        "observation/grid": "s.grid",
        "action": "actions",
        "next/reward": "r",
        "next/terminated": "t",
        "next/truncated": "u",
        "count": "count",
    }
    leaves = made()
    write_parquet(path := str(tmp_path / "t"), table_of(leaves, names=names))
    same(datasets.open(path, mapping=mapping)[2], expected(leaves, LENGTHS, 2))
    with pytest.raises(ValueError, match=r"there, got 'nothing'\. There are \['actions'"):
        datasets.open(path, mapping={"nothing": "reward"})


def test_the_number_of_an_episode_tells_where_it_ends(tmp_path):
    leaves = {name: leaf for name, leaf in made().items() if name[:5] != "next/"}
    numbers = np.repeat(np.arange(len(LENGTHS)) * 3 + 1, LENGTHS)
    write_parquet(path := str(tmp_path / "t"), table_of({**leaves, "episode_id": numbers}))
    dataset = datasets.open(path)
    assert dataset.facts["episode"].tolist() == list(range(1, 36, 3))
    assert dataset.lengths.tolist() == LENGTHS
    assert any("No flags" in note for note in dataset.notes)
    for number, episode in enumerate(dataset):
        same(episode, expected({**leaves, "episode": numbers}, LENGTHS, number))
    with pytest.raises(ValueError, match="expected a leaf 'next/reward'"):
        dataset.returns()


@pytest.mark.parametrize(
    "others", [(), ("truncated",), ("terminated",), ("terminated", "truncated")]
)
def test_done_beside_other_flags(tmp_path, others):
    leaves = made()
    flags = {name: leaves.pop("next/" + name) for name in ("terminated", "truncated")}
    given = {name: flags[name].astype(float) for name in others}
    given["done"] = flags["terminated"] | flags["truncated"]
    write_parquet(path := str(tmp_path / "t"), table_of({**leaves, **given}))
    dataset = datasets.open(path)
    whole = next(dataset.steps(STEPS))["next"]
    terminated = flags["terminated"] if others else given["done"]
    np.testing.assert_array_equal(whole["terminated"], terminated)
    np.testing.assert_array_equal(whole["done"], given["done"])
    assert any("taken for terminated" in note for note in dataset.notes) == (
        "terminated" not in others
    )


def test_next_observations_of_a_table_are_taken(tmp_path):
    leaves = made()
    leaves["next/observation/arm"] = leaves["observation/arm"] + 1
    leaves["next/observation/grid"] = leaves["observation/grid"] + 1
    write_parquet(path := str(tmp_path / "t"), table_of(leaves))
    found = flat(datasets.open(path)[0])
    assert "next/valid" not in found
    np.testing.assert_array_equal(found["next/observation/arm"], leaves["next/observation/arm"][:5])


def test_a_last_step_without_its_next_observation_is_dropped(tmp_path):
    leaves = made()
    write_parquet(path := str(tmp_path / "t"), table_of(leaves))
    dataset = datasets.open(path, final="drop")
    cut = leaves["next/truncated"][np.cumsum(LENGTHS) - 1]
    assert dataset.lengths.tolist() == (np.array(LENGTHS) - cut).tolist()


def bad(**changes):
    leaves = made()
    table = table_of(leaves)
    for name, column in changes.items():
        name = name.replace("__", ".")
        if name in table.column_names:
            table = table.drop_columns([name])
        if column is not None:
            table = table.append_column(name, column)
    return table


def uneven():
    return pa.array([[0.0] * (2 + (row == 30)) for row in range(STEPS)])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"action": uneven()},
            r"column 'action': expected lists of one length, got some of \[2, 3\]",
        ),
        ({"next__reward": pa.array([None, *[1.0] * (STEPS - 1)])}, "values everywhere, got a null"),
        ({"action": pa.array([None, *[[1.0]] * (STEPS - 1)])}, "values everywhere, got a null"),
        ({"next__terminated": pa.array([2] * STEPS)}, "flags of 0 and 1"),
        ({"next__terminated": pa.array([[0, 1]] * STEPS)}, "a flag for each step"),
        (
            {"observation__arm": None, "observation__grid": None},
            r"an array for .observation., got \['action'",
        ),
        ({"next__terminated": None, "next__truncated": None}, "where episodes end"),
        ({"episode": pa.array(np.arange(STEPS) % 3)}, r"of \[0, 1, 2\] apart"),
        ({"../x": pa.array([0] * STEPS)}, r"expected names of leaves, got '\.\./x'"),
        ({"obs__arm": pa.array([0] * STEPS)}, "a leaf of its own"),
    ],
)
def test_bad_columns_are_refused(tmp_path, changes, told):
    write_parquet(path := str(tmp_path / "t"), bad(**changes))
    with pytest.raises(ValueError, match=told):
        list(datasets.open(path))


@pytest.mark.parametrize("write", [write_parquet, write_file, write_feather])
def test_damaged_files_are_refused(tmp_path, write):
    write(str(tmp_path / "t"), table_of(made()))
    whole = (tmp_path / "t").read_bytes()
    for size in (4, 9, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "t").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"t: expected a whole Parquet or Arrow file"):
            datasets.open(tmp_path / "t")


def test_damage_within_is_refused(tmp_path):
    write_parquet(str(tmp_path / "t"), table_of({**made(), "wide": np.ones((STEPS, 500))}))
    whole = bytearray((tmp_path / "t").read_bytes())
    whole[4:-2000] = b"\xff" * (len(whole) - 2004)
    (tmp_path / "t").write_bytes(bytes(whole))
    with pytest.raises(ValueError, match="t: expected a whole"):
        list(datasets.open(tmp_path / "t"))


def test_files_with_other_columns_are_refused(tmp_path):
    table = table_of(made())
    write_parquet(str(tmp_path / "1"), table)
    write_parquet(str(tmp_path / "2"), table.drop_columns(["count"]))
    with pytest.raises(ValueError, match=r"2: expected the columns .*'count'"):
        datasets.open(tmp_path)


def test_files_of_other_types_are_refused(tmp_path):
    table = table_of(made())
    write_parquet(str(tmp_path / "1"), table)
    other = table.drop_columns(["count"]).append_column("count", pa.array([0.0] * STEPS))
    write_parquet(str(tmp_path / "2"), other)
    with pytest.raises(ValueError, match=r"2: column 'count': expected uint8, got double|float64"):
        list(datasets.open(tmp_path))


def test_tables_without_rows_are_refused(tmp_path):
    write_parquet(path := str(tmp_path / "t"), table_of(made()).slice(0, 0))
    with pytest.raises(ValueError, match="expected rows, got none"):
        datasets.open(path)


def test_other_files_are_no_tables(tmp_path):
    kind = datasets.formats()["table"]
    (tmp_path / "t").write_bytes(b"PAR")
    assert not kind.matches(str(tmp_path / "t"))
    assert not kind.matches(str(tmp_path))
    assert not kind.matches([1, 2])
    with pytest.raises(ValueError, match="Parquet or Arrow"):
        datasets.open(tmp_path / "t", format="table")
