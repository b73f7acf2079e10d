"""The recorder: recorded items are read back for all calls, chunks, environments and writers."""

import collections
import gc
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jrb
from jrb.checkpoint import LockedError
from jrb.datasets import Recorder
from jrb.datasets.format import native_dtype
from tests.datasets.recording.recordings import KINDS, Stream, assert_same, check, item, stacked

pytestmark = pytest.mark.slow


class Told:
    """A recorder, and what it was given, call by call."""

    def __init__(self, path, envs, chunk, after, rng):
        self.recorder = Recorder(path, num_envs=envs, chunk=chunk, name=str(rng.random())[2:])
        self.envs, self.after, self.rng = envs, after, rng
        self.calls, self.count = [], 0
        self.chunk = chunk

    def rows(self, times):
        """The items `[T, E]`, and what they are."""
        plan = []
        for _ in range(times):
            plan.append([])
            for _ in range(self.envs or 1):
                plan[-1].append((self.count, KINDS[self.rng.choice(3, p=[0.7, 0.2, 0.1])]))
                self.count += 1
        made = [[item(*one, after=self.after) for one in row] for row in plan]
        rows = [stacked(row) if self.envs else row[0] for row in made]
        return plan, rows

    def add(self):
        plan, rows = self.rows(1)
        shape = [(), (self.envs,)][self.rng.integers(2) if self.envs else 0]
        mask = self.rng.random(shape) < 0.8 if self.rng.random() < 0.5 else None
        self.recorder.add(rows[0], None if mask is None else np.asarray(mask))
        self.note(plan, None if mask is None else np.asarray(mask)[None])

    def append(self):
        times = int(self.rng.integers(1, 9))
        plan, rows = self.rows(times)
        shape = [(times,), (times, self.envs)][self.rng.integers(2) if self.envs else 0]
        mask = self.rng.random(shape) < 0.6 if self.rng.random() < 0.5 else None
        self.recorder.append(stacked(rows), mask)
        self.note(plan, mask)

    def note(self, plan, mask):
        if mask is None:
            mask = np.ones((len(plan), self.envs or 1), bool)
        mask = np.broadcast_to(mask.reshape(len(plan), -1), (len(plan), self.envs or 1))
        kept = [(e, *plan[t][e]) for t, e in np.argwhere(mask).tolist()]
        if kept:
            self.calls.append(kept)
        assert self.recorder.sealed + self.recorder.held == sum(map(len, self.calls_of_items()))
        assert self.recorder.held <= max(self.chunk, *map(len, self.calls_of_items()), 0)

    def calls_of_items(self):
        return [call for call in self.calls if isinstance(call, list)] or [[]]

    def truncate(self):
        mask = self.rng.random(self.envs) < 0.5 if self.envs else None
        self.recorder.truncate(mask)
        self.calls.append(np.ones(1, bool) if mask is None else mask)

    def streams(self):
        """Returns the streams of all sealed items."""
        left, found = self.recorder.sealed, [Stream() for _ in range(self.envs or 1)]
        for call in self.calls:
            if not isinstance(call, list):
                for env in np.flatnonzero(call):
                    found[env].anew = True
                continue
            if left <= 0:
                break
            left -= len(call)
            for env, number, how in call:
                found[env].add(number, how)
        assert left == 0
        return found


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([None, 1, 3]), st.sampled_from([None, 0.5, 1]))
def test_all_that_was_sealed_comes_back(tmp_path_factory, seed, envs, after):
    path, rng = tmp_path_factory.mktemp("recorded"), np.random.default_rng(seed)
    after = envs if after == 1 and envs else after  # that of the next step, where none is left out
    make = lambda: Told(path, envs, int(rng.integers(1, 20)), after, rng)
    writers = [make()]
    for _ in range(25):
        writer = writers[rng.integers(len(writers))]
        act = rng.choice(["add", "append", "truncate", "flush", "open", "make"], p=_OFTEN)
        if act == "make":
            writers.append(make())
        elif act == "flush":
            writer.recorder.flush()
            assert not writer.recorder.held
        elif act == "open":
            look(path, writers, after)
        else:
            getattr(writer, act)()
    for writer in writers:
        writer.recorder.close()
    look(path, writers, after)


_OFTEN = [0.4, 0.3, 0.1, 0.05, 0.1, 0.05]


def look(path, writers, after):
    begun = [w for w in writers if os.path.exists(path / f"{w.recorder.name}-000000.parquet")]
    if not begun:
        with pytest.raises(ValueError, match="no format matches"):
            jrb.datasets.open(path)
        return
    check(jrb.datasets.open(path), [s for writer in begun for s in writer.streams()], after)


def test_what_is_opened_stays_while_it_grows(tmp_path):
    with Recorder(tmp_path, item(0), num_envs=None, chunk=4) as recorder:
        assert len(jrb.datasets.open(tmp_path)) == 0
        for number in range(10):
            recorder.add(item(number))
        dataset = jrb.datasets.open(tmp_path)
        assert dataset.lengths.tolist() == [8]
        for number in range(10, 20):
            recorder.add(item(number, "terminated"))
        assert len(dataset[0]["action"]) == 8
        later = jrb.datasets.open(tmp_path)
        assert later.lengths.tolist() == [11, 1, 1, 1, 1, 1]
        assert later.lengths.sum() == recorder.sealed == 16
    assert jrb.datasets.open(tmp_path).transitions == 20
    assert dataset.transitions == 8
    assert "1 episodes had not ended when their last part was sealed." in dataset.notes


def test_episodes_end_by_their_numbers_too_across_chunks(tmp_path):
    keys = jrb.Keys(reward="r", done="d", episode="id")
    ids = [3, 3, 3, 5, 5, 3, 3, 9, 9]
    recorder = Recorder(tmp_path, keys=keys, chunk=2, num_envs=2)
    for number, one in enumerate(ids):
        both = np.array([one, number // 4], np.uint8)
        recorder.add({"r": np.ones(2), "d": np.zeros((2, 1), np.int32), "id": both})
    recorder.close()
    dataset = jrb.datasets.open(tmp_path)
    assert dataset.lengths.tolist() == [3, 2, 2, 2, 4, 4, 1]
    assert dataset.facts["env"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert dataset[0]["id"].tolist() == [3, 3, 3]


def test_an_environment_begins_anew_with_its_own_next_item(tmp_path):
    with Recorder(tmp_path, item(0), num_envs=3) as recorder:
        row = stacked([item(0)] * 3)
        recorder.add(row)
        recorder.truncate(np.array([True, True, False]))
        recorder.add(row, np.array([True, False, True]))
        recorder.add(row)
        recorder.truncate()
        recorder.append(stacked([row] * 4), np.array([[False, True, True]] + [[True] * 3] * 3))
    dataset = jrb.datasets.open(tmp_path)
    assert dataset.lengths.tolist() == [1, 2, 3, 1, 1, 4, 3, 4]


def test_items_are_mapped_by_their_keys(tmp_path):
    keys = jrb.Keys(
        observation="obs", action=("do", "it"), reward="r", done="over", next_observation="obs2"
    )
    with Recorder(tmp_path, keys=keys, metadata={"env": "Maze", "size": [3, 4]}) as recorder:
        for number in range(4):
            after = {"a": np.float32(number + 1), "b": [np.int16(number + 1)]}
            seen = {"a": np.float32(number), "b": [np.int16(number)]}
            flags = {"r": np.float32(1), "over": np.float32(number == 2), "extra": number}
            recorder.add({"obs": seen, "do": {"it": np.uint8(7)}, "obs2": after, **flags})
    dataset = jrb.datasets.open(tmp_path)
    assert dataset.lengths.tolist() == [3, 1]
    episode = dataset[0]
    assert set(episode) == {"observation", "action", "next", "extra"}
    assert episode["observation"]["b"]["0"].tolist() == [0, 1, 2]
    assert episode["next"]["observation"]["a"].tolist() == [1, 2, 3]
    assert episode["action"].dtype == np.uint8
    assert episode["extra"].dtype == np.int32
    assert episode["next"]["terminated"].tolist() == [False, False, True]
    assert dataset.metadata["env"] == "Maze"
    assert dataset.metadata["size"] == [3, 4]
    assert any("'over' stands for it" in note for note in dataset.notes)


DTYPES = [np.float64, np.int64, np.uint8, np.bool_, np.complex64, np.dtype(">f4")]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
DTYPES += [np.longdouble, np.clongdouble]


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    columns = {}
    for dtype in map(np.dtype, DTYPES):
        if dtype.kind == "b":
            columns[str(dtype)] = rng.random((9, 3)) < 0.5
        elif dtype == ml_dtypes.int4:
            columns[str(dtype)] = rng.integers(-8, 8, (9, 3)).astype(dtype)
        elif dtype.char in "gG":  # which have bits without a meaning
            columns[str(dtype)] = rng.normal(size=(9, 3)).astype(dtype) / 3
        else:  # NaN and all
            raw = rng.integers(0, 256, (9, 3 * dtype.itemsize), np.uint8)
            columns[str(dtype)] = raw.view(dtype)
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 9)
    items = {**columns, "key": keys, "next": {"reward": np.zeros(9)}}
    with Recorder(tmp_path, chunk=4) as recorder:
        recorder.append({**items})
    dataset = jrb.datasets.open(tmp_path)
    for name, column in columns.items():
        assert_same(dataset[0][name], column.astype(native_dtype(column.dtype)))
    words = dataset[0]["key"]
    again = jax.random.wrap_key_data(words, impl="rbg")
    assert (again == keys).all()
    assert any("words of PRNG keys" in note and "rbg" in note for note in dataset.notes)
    assert any("no flags" in note for note in dataset.notes)


def test_numbers_of_python_are_those_of_jax(tmp_path):
    with Recorder(tmp_path) as recorder:
        for step in range(3):
            recorder.add({"next": {"reward": 0.1, "terminated": step == 2}, "n": step})
        with pytest.raises(ValueError, match="integer that int32 holds"):
            recorder.add({"next": {"reward": 0.1, "terminated": False}, "n": 2**40})
    episode = jrb.datasets.open(tmp_path)[0]
    assert_same(episode["next"]["reward"], np.full(3, 0.1, np.float32))
    assert_same(episode["n"], np.arange(3, dtype=np.int32))
    assert episode["next"]["terminated"].tolist() == [False, False, True]


# Inside jit.


def example(envs=None):
    lead = () if envs is None else (envs,)
    zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((*lead, *shape), dtype)
    after = {"reward": zeros(), "terminated": zeros(dtype=bool), "truncated": zeros(dtype=bool)}
    return {"observation": zeros(2), "key": jax.random.key(0), "next": after}


@pytest.mark.parametrize("envs", [None, 3])
def test_a_scan_records_what_a_loop_adds(envs, tmp_path):
    shape = (2,) if envs is None else (envs, 2)

    def step(number):
        one = example(envs)
        key = jax.random.fold_in(jax.random.key(1), number)
        one["key"] = key if envs is None else jax.random.split(key, envs)
        one["observation"] = one["observation"] + jax.random.uniform(key, shape)
        one["next"]["terminated"] = one["next"]["terminated"] | (number % 4 == 3)
        return one

    spec = jax.eval_shape(example)
    looped = Recorder(tmp_path / "loop", spec, num_envs=envs, chunk=5)
    for number in range(10):
        looped.add(step(number), np.bool_(number != 6))
    scanned = Recorder(tmp_path / "scan", spec, num_envs=envs, chunk=5)

    @jax.jit
    def run(number):
        body = lambda number, _: (number + 1, scanned.record(step(number), number != 6))
        return jax.lax.scan(body, number, None, 10)[0]

    run(0)
    for recorder in (looped, scanned):
        recorder.close()
    one, other = (jrb.datasets.open(tmp_path / name) for name in ("loop", "scan"))
    assert one.lengths.tolist() == other.lengths.tolist()
    assert one.lengths.tolist() == [4, 3, 2] * (envs or 1)
    for a, b in zip(one, other, strict=True):
        assert_same(a, b)


def test_jitted_code_records_several_timesteps_and_gradients_pass(tmp_path):
    recorder = Recorder(tmp_path, example(), chunk=100)

    @jax.jit
    def loss(x):
        items = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (4, *leaf.shape)), example())
        items["observation"] = items["observation"] + x
        items["next"]["reward"] = jnp.arange(4.0) * x
        recorder.record(items, jnp.array([True, False, True, True]))
        return (items["next"]["reward"] ** 2).sum()

    assert jax.grad(loss)(2.0) == 2 * 2.0 * 14
    recorder.flush()
    assert jrb.datasets.open(tmp_path)[0]["next"]["reward"].tolist() == [0, 4, 6]


def test_vmap_and_what_jit_would_change_are_refused(tmp_path):
    recorder = Recorder(tmp_path / "a", example())
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), example())
    with pytest.raises(ValueError, match=r"vmap.*ordered"):
        jax.vmap(recorder.record)(several)
    with pytest.raises(TypeError, match="tracer"):
        jax.jit(recorder.add)(example())
    with pytest.raises(ValueError, match="without an example"):
        Recorder(tmp_path / "b").record(example())
    wide = Recorder(tmp_path / "c", {"next": {"reward": np.float64(1)}})
    with pytest.raises(TypeError, match="dtype that JAX keeps, got float64"):
        wide.record({"next": {"reward": np.float64(1)}})
    with pytest.raises(ValueError, match="expected shape"):
        recorder.record(jax.tree.map(lambda leaf: leaf[None, None], example()))
    assert recorder.held == wide.held == 0


def test_errors_come_out_of_jitted_code(tmp_path):
    recorder = Recorder(tmp_path, example(), chunk=1)
    recorder.add(example())
    recorder.close()
    run = jax.jit(recorder.record)
    with pytest.raises(Exception, match="got one that was closed"):
        jax.block_until_ready((run(example()), jax.effects_barrier()))


# Several at once, and the end.


def test_threads_may_share_a_recorder(tmp_path):
    recorder = Recorder(tmp_path, item(0), chunk=7)

    def work(first):
        for number in range(first, first + 200):
            recorder.add(item(number, "terminated"))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    rewards = np.concatenate([e["next"]["reward"] for e in jrb.datasets.open(tmp_path)])
    assert sorted(np.round(rewards * 7).astype(int)) == [
        1000 * n + k for n in range(3) for k in range(200)
    ]


def test_it_is_read_while_another_thread_writes(tmp_path):
    recorder, opened = Recorder(tmp_path, item(0), chunk=1), threading.Event()

    def work():
        number = 0
        while number < 50 or not (opened.is_set() or number == 300):  # a file for each
            recorder.add(item(number))
            number += 1
        recorder.close()

    thread = threading.Thread(target=work)
    thread.start()
    counts = []
    try:
        for _ in range(15):
            dataset = jrb.datasets.open(tmp_path)
            counts.append(dataset.transitions)
            for episode in dataset:
                actions = np.arange(counts[-1]) % 100
                assert_same(episode["action"], actions.astype(np.int8))
    finally:
        opened.set()
        thread.join()
    assert counts == sorted(counts)
    assert jrb.datasets.open(tmp_path).transitions == recorder.sealed >= 50


def test_threads_that_begin_together_agree(tmp_path):
    recorder, told, gate = Recorder(tmp_path), [], threading.Barrier(2)

    def work(one):
        gate.wait()
        try:
            recorder.add(one)
        except ValueError as error:
            told.append(str(error))

    ones = [item(3, after=None), item(3)]
    threads = [threading.Thread(target=work, args=(one,)) for one in ones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert len(told) == 1
    assert jrb.datasets.open(tmp_path)[0]["action"].tolist() == [3]


def test_what_is_let_go_of_is_sealed(tmp_path):
    recorder = Recorder(tmp_path, item(0))
    recorder.add(item(0))
    del recorder
    gc.collect()
    assert jrb.datasets.open(tmp_path).transitions == 1


SCRIPT = """
import sys, numpy as np, jrb
recorder = jrb.datasets.Recorder(sys.argv[1], name="other")
recorder.add({"next": {"reward": np.float32(3), "done": True}})
"""


def test_a_program_that_ends_seals_what_it_has(tmp_path):
    root = os.path.dirname(os.path.dirname(jrb.__file__))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path], cwd=root, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = jrb.datasets.open(tmp_path)
    assert dataset[0]["next"]["reward"].tolist() == [3]
    assert "-other-" in dataset.metadata["writers"][0]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_cannot_write(tmp_path):
    recorder = Recorder(tmp_path, item(0))
    recorder.add(item(0))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = []
            for act in (lambda: recorder.add(item(1)), recorder.flush, recorder.truncate):
                try:
                    act()
                    told.append("nothing")
                except LockedError:
                    told.append("refused")
            recorder._end()
            os.write(write, " ".join(told).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode() == "refused refused refused"
    for file in (read, write):
        os.close(file)
    recorder.add(item(2))
    recorder.close()
    assert jrb.datasets.open(tmp_path)[0]["action"].tolist() == [0, 2]


# Bad input.


def wrong():
    good = item(0)
    yield "float32", {**good, "action": np.float32(0)}, TypeError, "'action': expected dtype int8"
    yield "shape", {**good, "action": np.zeros(2, np.int8)}, ValueError, r"expected shape \(\)"
    yield "missing", {"next": good["next"]}, ValueError, "missing .*action"
    yield "more", {**good, "more": np.zeros(1)}, ValueError, "not expected .*more"
    yield "text", {**good, "action": "left"}, TypeError, "'action': expected an array, got str"
    yield "none", {**good, "action": None}, ValueError, "missing .*action"
    kind = {**good, "observation": collections.OrderedDict(good["observation"])}
    yield "class", kind, ValueError, "expected an item with the structure"


WRONG = {name: rest for name, *rest in wrong()}


@pytest.mark.parametrize(("bad", "error", "text"), list(WRONG.values()), ids=WRONG)
def test_another_item_is_refused(bad, error, text, tmp_path):
    with Recorder(tmp_path, item(0)) as recorder:
        recorder.add(item(1))
        with pytest.raises(error, match=text):
            recorder.add(bad)
        assert recorder.held == 1


class Lazy:
    """Frames that are joined when they are looked at."""

    def __init__(self, frames):
        self.frames = frames

    def __array__(self, dtype=None, copy=None):
        return np.asarray(np.stack(self.frames), dtype)


def test_what_can_be_made_an_array_is_taken(tmp_path):
    frames = np.arange(12, dtype=np.uint8).reshape(4, 3)
    flags = {"next": {"reward": 0.0, "done": False}}
    with Recorder(tmp_path, {"observation": Lazy(frames), **flags}) as recorder:
        recorder.add({"observation": Lazy(frames), **flags})
        recorder.add({"observation": np.ma.masked_array(frames), **flags})
        masked = np.ma.masked_array(frames, frames > 5)
        with pytest.raises(ValueError, match="'observation': expected values everywhere, got a"):
            recorder.add({"observation": masked, **flags})
        with pytest.raises(TypeError, match=r"expected an array, got list|list of numbers"):
            recorder.add({"observation": frames.tolist(), **flags})
    seen = jrb.datasets.open(tmp_path)[0]["observation"]
    assert_same(seen, np.stack([frames, frames]))


def test_calls_of_the_wrong_shape_are_refused(tmp_path):
    with Recorder(tmp_path, item(0), num_envs=2) as recorder:
        row = stacked([item(0), item(1)])
        with pytest.raises(ValueError, match=r"expected shape \(2,\), got \(\)"):
            recorder.add(item(0))
        with pytest.raises(ValueError, match="add takes one timestep"):
            recorder.append(row)
        with pytest.raises(ValueError, match="add takes one timestep"):
            recorder.add(stacked([row]))
        with pytest.raises(ValueError, match="axis of time"):
            recorder.append({})
        for mask, error in [(np.ones(3, bool), ValueError), (np.ones(2), TypeError)]:
            with pytest.raises(error, match="mask"):
                recorder.add(row, mask)
            with pytest.raises(error, match="mask"):
                recorder.truncate(mask)
        recorder.append(jax.tree.map(lambda leaf: leaf[:0], stacked([row])))
        assert recorder.held == 0


def bad_examples():
    keys = jrb.Keys(reward="r", observation="obs")
    good = {"r": np.zeros(())}
    yield "no reward", item(0), jrb.Keys(reward="r"), ValueError, "expected a leaf at 'r'"
    yield "slash", {**good, "a/b": np.zeros(())}, keys, ValueError, "without a slash"
    yield "two", {**good, "obs": 1, "observation": 2}, keys, ValueError, "place of its own"
    yield "beside", {**good, "next": {"reward": 1}}, keys, ValueError, "place of its own"
    yield "flag", {**good, "next": {"done": np.zeros(2)}}, keys, ValueError, "one number"
    yield "flags", {**good, "next": {"done": {"a": 1}}}, keys, ValueError, "one number"
    other = jrb.Keys(reward="r", done="over")
    yield "another", {**good, "next": {"done": 1}, "over": 1}, other, ValueError, "place of its own"
    ids = jrb.Keys(reward="r", episode="id")
    yield "ids", {**good, "id": np.float32(1)}, ids, TypeError, "expected integers"
    yield "no ids", good, ids, ValueError, "'id': expected one number for each item.*no such leaf"
    yield "strings", {**good, "x": np.array("a")}, keys, TypeError, "expected numbers, got dtype"
    wide = jax.ShapeDtypeStruct((1 << 20, 1 << 11), np.uint8)
    yield "wide", {**good, "x": wide}, keys, ValueError, "leaf 'x': expected less than 2 GiB in one"
    yield "objects", {**good, "x": np.array([{}])}, keys, TypeError, "expected numbers, got dtype"


BAD = {name: rest for name, *rest in bad_examples()}


@pytest.mark.parametrize(("bad", "keys", "error", "text"), list(BAD.values()), ids=BAD)
def test_items_that_are_no_transitions_are_refused(bad, keys, error, text, tmp_path):
    path = tmp_path / "new"
    with pytest.raises(error, match=text):
        Recorder(path, bad, keys=keys)
    assert not path.exists()
    with Recorder(path, keys=keys) as recorder, pytest.raises(error, match=text):
        recorder.add(bad)


def test_arguments_are_checked_before_anything_is_made(tmp_path):
    path = tmp_path / "new"
    for error, bad in [
        (ValueError, {"num_envs": 0}),
        (TypeError, {"chunk": 1.5}),
        (TypeError, {"keys": "TED"}),
        (ValueError, {"name": "../x"}),
        (ValueError, {"name": ""}),
        (TypeError, {"metadata": {"x": object()}}),
        (TypeError, {"metadata": [1]}),
        (ValueError, {"metadata": {"writers": 3}}),
    ]:
        with pytest.raises(error, match=next(iter(bad))):
            Recorder(path, **bad)
    assert not path.exists()


def test_paths_that_hold_something_else_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match="expected a folder"):
        Recorder(file)
    with pytest.raises(ValueError, match="got 'file' in it"):
        Recorder(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_other_items_do_not_come_to_a_recording(tmp_path):
    Recorder(tmp_path, item(0)).close()
    before = os.listdir(tmp_path)
    with pytest.raises(ValueError, match="expected items as the writer"):
        Recorder(tmp_path, item(0, after=None))
    assert os.listdir(tmp_path) == before
    late = Recorder(tmp_path)
    with pytest.raises(ValueError, match="expected items as the writer"):
        late.add({"next": {"reward": 1.0}})
    late.add(item(0))


def test_a_closed_recorder_says_so(tmp_path):
    recorder = Recorder(tmp_path, item(0))
    recorder.close()
    recorder.close()
    assert "closed" in repr(recorder)
    for act in (lambda: recorder.add(item(0)), recorder.flush, recorder.truncate):
        with pytest.raises(ValueError, match="was closed"):
            act()
    with pytest.raises(TypeError, match="not to be pickled"):
        __import__("copy").copy(recorder)


def test_a_recording_that_was_moved_is_not_written_to(tmp_path):
    recorder = Recorder(tmp_path / "a", item(0))
    recorder.add(item(0))
    os.rename(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OSError, match="renamed"):
        recorder.flush()
    os.rename(tmp_path / "b", tmp_path / "a")
    recorder.close()
    assert jrb.datasets.open(tmp_path / "a").transitions == 1
