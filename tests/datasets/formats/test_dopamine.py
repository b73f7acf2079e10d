"""Dopamine's replay logs against a model of its ring, which knows the episode of each row."""

import gzip
import io
import pickle
import tracemalloc

import jax
import numpy as np
import pytest

import jrb
from jrb.datasets.reading import tabular
from tests.datasets.access import check_access
from tests.datasets.formats.replay_logs import Ring, expected_of, filled

LENGTHS = [9, 30, 1, 2, 41, 5, 7, 60, 3, 11, 8, 13, 21]


def logger(folder, capacity):
    """Returns spans of numbers of rows, and a function that saves just before the ring is full.

    So does `OutOfGraphLoggedReplayBuffer` of batch_rl. It misses a log if padding steps over it.
    """
    spans = []

    def save(ring):
        if len(ring.rows) % capacity == capacity - 1:
            ring.save(folder, len(spans))
            spans.append((max(0, len(ring.rows) - capacity), len(ring.rows)))

    return spans, save


def merged(spans):
    """Returns spans in which those that touch or overlap are one."""
    union = [spans[0]]
    for start, stop in spans[1:]:
        if start <= union[-1][1]:
            union[-1] = union[-1][0], stop
        else:
            union.append((start, stop))
    return union


@pytest.mark.parametrize("block", [16, 1 << 20])
def test_logs_of_one_run_are_joined_in_order_of_time(tmp_path, block, monkeypatch):
    monkeypatch.setattr(tabular, "_BLOCK", block)
    spans, save = logger(tmp_path, 40)
    ring = filled(Ring(40), 0, LENGTHS, save)
    dataset = jrb.datasets.open(tmp_path)
    assert dataset.format.name == "dopamine"
    assert merged(spans) == [(0, 79), (119, 239)]
    check_access(dataset, expected_of(ring, merged(spans)))
    assert dataset.notes[0].startswith("3 rows of zeros before each episode are left out")
    assert "Checkpoints [2] do not go on" in dataset.notes[1]
    # Of the episode after the gap all steps are there, but nothing says that the first one is.
    whole = [0, 1, 2, 3, 8, 9, 10, 11]
    assert dataset.lengths[dataset.complete].tolist() == [LENGTHS[number] for number in whole]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("stack_size", [1, 2, 4])
def test_rings_that_are_saved_at_any_time(tmp_path, stack_size, seed):
    """Checkpoints overlap, or have gaps; some episodes end by time; some steps are all zeros."""
    rng, spans = np.random.default_rng(seed), []
    ring = Ring(37, stack_size, 1 + seed % 2, logits=((2,), np.float16))

    def save(ring):
        if rng.random() < 0.06:
            ring.save(tmp_path, 3 + 2 * len(spans), ends=True)
            spans.append((max(0, len(ring.rows) - 37), len(ring.rows)))

    lengths = rng.integers(1, 40, 20)
    filled(ring, seed, lengths, save, time_outs={3, 4, 9, 12}, blank=0.05)
    dataset = jrb.datasets.open(tmp_path)
    expected = expected_of(ring, merged(spans))
    check_access(dataset, expected)
    numbers = [3 + 2 * index for index in range(len(spans))]
    assert {*dataset.facts["checkpoint"].tolist()} <= {*numbers}
    assert any("do not go on" in note for note in dataset.notes) == (len(merged(spans)) > 1)
    episode_of = [
        {episode for _, episode in ring.rows[start:stop] if episode is not None}
        for start, stop in merged(spans)
    ]
    numbered = [episode for group in episode_of for episode in sorted(group)]
    for episode, number, complete in zip(expected, numbered, dataset.complete, strict=True):
        # Never said of an episode of which a step is missing.
        is_whole = len(episode["action"]) == lengths[number]
        assert is_whole or not complete


def test_the_last_log_of_a_run_has_a_lower_count(tmp_path):
    spans, save = logger(tmp_path, 40)
    ring = filled(Ring(40), 3, LENGTHS[:8], save)
    newest = len(ring.rows)
    ring.save(tmp_path, len(spans), count=newest % 40)
    dataset = jrb.datasets.open(tmp_path)
    expected = expected_of(ring, [*merged(spans), (newest - newest % 40, newest)])
    check_access(dataset, expected)
    assert not dataset.complete[-1]
    assert dataset.cut[-2:].any()


def test_some_checkpoints(tmp_path):
    spans, save = logger(tmp_path, 40)
    ring = filled(Ring(40), 1, LENGTHS, save)
    dataset = jrb.datasets.open(tmp_path, checkpoints=(4, 1))
    check_access(dataset, expected_of(ring, [spans[1], spans[4]]))
    assert any("Checkpoints [4] do not go on" in note for note in dataset.notes)
    with pytest.raises(ValueError, match=r"checkpoint 7: expected files of .*add_count.*got \[\]"):
        jrb.datasets.open(tmp_path, checkpoints=(7,))


def test_further_arrays_are_leaves_and_attributes_are_not(tmp_path):
    extra = {"logits": ((2,), np.float16), "lives": ((), np.int8)}
    ring = filled(Ring(60, **extra), 2, [7, 5, 9], lambda ring: None)
    ring.save(tmp_path, 0)
    for name in ("sum_tree", "$store$_names"):
        with gzip.open(tmp_path / f"{name}_ckpt.0.gz", "wb") as file:
            if name == "sum_tree":
                pickle.dump({"nodes": 1}, file)
            else:
                np.save(file, np.full(60, "text"))
    dataset = jrb.datasets.open(tmp_path)
    check_access(dataset, expected_of(ring, [(0, len(ring.rows))]))
    assert "'names', 'sum_tree'" in dataset.notes[-1]
    mapped = jrb.datasets.open(tmp_path, mapping={"lives": ("info", "lives")})
    assert mapped[0]["info"]["lives"].dtype == np.int8


def test_rows_that_look_like_padding_stay(tmp_path):
    """Without stacks nothing is padded; nor is a first step in which nothing is seen or done."""
    ring = filled(Ring(50, stack_size=1, horizon=3), 4, [5, 5, 5], lambda ring: None)
    for name in ("action", "reward"):
        ring.store[name][:] = 0
        for row, _ in ring.rows:
            row[name] = np.zeros((), row[name].dtype)
    ring.save(tmp_path, 0)
    dataset = jrb.datasets.open(tmp_path)
    check_access(dataset, expected_of(ring, [(0, len(ring.rows))]))
    assert dataset.notes == ()


def zipped(array, **options):
    raw = io.BytesIO()
    np.save(raw, array, **options)
    return gzip.compress(raw.getvalue())


def with_header(old, new):
    """A file whose header declares another shape than it has."""
    header = gzip.decompress(zipped(np.ones((50, 3, 2), np.uint8)))
    assert old in header
    return gzip.compress(header.replace(old.ljust(len(new)), new))


SEEN = "$store$_observation"


@pytest.mark.parametrize(
    ("text", "name", "data"),
    [
        ("pickled objects", SEEN, zipped(np.array([{}] * 50, object), allow_pickle=True)),
        ("row by row", SEEN, zipped(np.ones((3, 2, 50), np.uint8).T)),
        ("arrays of one length", SEEN, zipped(np.ones((49, 3, 2), np.uint8))),
        ("whole gzipped .npy", SEEN, b"no gzip"),
        ("flags of 0 and 1", "$store$_terminal", zipped(np.full(50, 3, np.uint8))),
        ("a set of NumPy's int64", "episode_end_indices", gzip.compress(pickle.dumps([print]))),
        ("at most 1032 times", SEEN, with_header(b"(50, 3, 2), }", b"(50, 9999, 999), }")),
        ("expected files of .*add_count", "add_count", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_damaged_and_hostile_files_are_refused(tmp_path, text, name, data):
    filled(Ring(50), 4, [5, 20, 5], lambda ring: None).save(tmp_path, 0)
    path = tmp_path / f"{name}_ckpt.0.gz"
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=text):
        jrb.datasets.open(tmp_path)


@pytest.mark.parametrize("spoil", ["a bit", "the end"])
def test_damage_among_the_frames_is_found_when_they_are_read(tmp_path, spoil):
    ring = filled(Ring(50), 4, [5, 20, 30], lambda ring: None)
    ring.save(tmp_path, 0)
    path = tmp_path / f"{SEEN}_ckpt.0.gz"
    data = bytearray(path.read_bytes())
    if spoil == "a bit":
        data[-6] ^= 1  # of the checksum
    path.write_bytes(data if spoil == "a bit" else data[:-60])
    with pytest.raises(ValueError, match=r"observation_ckpt\.0\.gz: expected a whole"):
        list(jrb.datasets.open(tmp_path))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_files(tmp_path, monkeypatch):
    """24 MB of frames in two checkpoints, of which the second begins at its cursor."""
    monkeypatch.setattr(tabular, "_BLOCK", 1 << 20)
    capacity = 1700
    ring = Ring(capacity, frame=(84, 84))
    spans, save = logger(tmp_path, capacity)
    filled(ring, 0, [500] * 7, save)
    expected = sum(
        int(row["observation"].sum(dtype=np.int64)) for row, _ in ring.rows[: spans[-1][1]]
    )
    ring.rows = ring.store = None
    tracemalloc.start()
    try:
        dataset, total, steps = jrb.datasets.open(tmp_path), 0, 0
        for block in dataset.steps(100):
            total += int(block["observation"].sum(dtype=np.int64))
            steps += len(block["action"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(spans), total, steps) == (2, expected, dataset.transitions)
    assert dataset.nbytes > 45e6  # with next observations
    assert peak < 10e6, f"{peak / 1e6:.0f} MB"


def test_as_a_buffer_with_stacked_frames(tmp_path):
    _, save = logger(tmp_path, 64)
    filled(Ring(64), 5, LENGTHS, save)
    dataset = jrb.datasets.open(tmp_path, final="drop")
    buffer, state = dataset.buffer(unit=jrb.FrameStack(4), batch_size=32)
    batch = buffer.sample(state, jax.random.key(0))
    assert batch.data["observation"].shape == (32, 4, 3, 2)
    assert batch.data["next"]["observation"].shape == (32, 4, 3, 2)
