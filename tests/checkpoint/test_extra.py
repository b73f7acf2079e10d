"""`extra=` is saved in one generation with the buffer, and always loaded with it."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint
from tests.small_blocks import file_of

EXTRA = {
    "params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)},
    "key": jax.random.key(7),
    "host": np.arange(3),
    "step": 12,
    "lr": 0.1,
    "done": False,
    "none": None,
}


def made(**parts):
    return jrb.from_items({"x": jnp.arange(20.0)}, batch_size=4, **parts)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for got, want in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert type(got) is type(want) or isinstance(got, jax.Array)
        if isinstance(want, jax.Array) and jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(got, want)


def test_it_comes_back_as_its_example_says(tmp_path):
    buffer, state = made()
    jrb.save(tmp_path, buffer, state, extra=EXTRA, keep=1)
    _, _, extra = jrb.load(tmp_path, extra=EXTRA)
    same(extra, EXTRA)
    spec = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
        ),
        EXTRA,
    )
    same(jrb.load(tmp_path, extra=spec)[2], EXTRA)
    assert len(jrb.load(tmp_path)) == 2
    later = {**EXTRA, "step": 13}
    checkpoint.save_async(tmp_path, buffer, state, extra=later, keep=1).wait()
    assert jrb.load(tmp_path, extra=EXTRA)[2]["step"] == 13
    assert jrb.load(tmp_path, extra=EXTRA, generation=1)[2]["step"] == 12
    assert checkpoint.verify(tmp_path) == []


@pytest.mark.parametrize(
    ("saved", "number", "other"),
    [
        (jnp.int32(12), 0, 0.0),
        (np.uint8(12), 0, False),
        (jnp.bfloat16(0.5), 0.0, 0),
        (jnp.bool_(True), False, 0),
        (jnp.complex64(2j), 0j, 0.0),
        (12, 0, False),
    ],
)
def test_a_number_that_became_an_array_comes_back_as_a_number(saved, number, other, tmp_path):
    buffer, state = made()
    jrb.save(tmp_path, buffer, state, extra={"n": saved})
    back = jrb.load(tmp_path, extra={"n": number})[2]["n"]
    assert type(back) is type(number) and back == saved
    with pytest.raises(ValueError, match="leaf 'n': expected"):
        jrb.load(tmp_path, extra={"n": other})


@pytest.mark.parametrize("saved", [jnp.ones(1, jnp.int32), jax.random.key(0)])
def test_what_is_no_single_number_does_not(saved, tmp_path):
    buffer, state = made()
    jrb.save(tmp_path, buffer, state, extra={"n": saved})
    with pytest.raises(ValueError, match="leaf 'n': expected"):
        jrb.load(tmp_path, extra={"n": 0})


@pytest.mark.slow
def test_it_goes_with_a_mix_with_files_and_to_another_description(tmp_path):
    buffer, state = made()
    mix = jrb.Mix((buffer, buffer), (0.5, 0.5), 4)
    jrb.save(tmp_path / "mix", mix, (state, state), extra={"step": 1})
    assert jrb.load(tmp_path / "mix", extra={"step": 0})[2] == {"step": 1}
    files, its = made(storage=jrb.MemmapStorage(tmp_path / "files"))
    jrb.save(tmp_path / "files", files, its, extra={"step": 2})
    assert jrb.load(tmp_path / "files", extra={"step": 0})[2] == {"step": 2}
    smaller, _, extra = jrb.load(tmp_path / "files", extra={"step": 0}, capacity=8)
    assert (smaller.capacity, extra) == (8, {"step": 2})
    other = jrb.ReplayBuffer(30, sampler=jrb.Queue(), batch_size=2)
    jrb.save(tmp_path / "plain", buffer, state, extra={"step": 3})
    found, back, extra = jrb.load(tmp_path / "plain", other, extra={"step": 0})
    assert (found, extra) == (other, {"step": 3})
    assert jrb.items(other, back)["x"].tolist() == list(range(20))


def test_where_nothing_was_saved_yet_no_extra_is_missed(tmp_path):
    buffer = jrb.ReplayBuffer(4, storage=jrb.MemmapStorage(tmp_path / "rows"))
    state = buffer.init({"x": jnp.zeros(2)})
    with pytest.raises(FileNotFoundError, match="found one to which nothing was"):
        jrb.load(tmp_path / "rows", extra={"step": 0})
    del state


def test_wrong_input_is_refused_and_nothing_is_written(tmp_path):
    buffer, state = made()
    with pytest.raises(TypeError, match=r"save: extra: leaf 'name': expected an array or a number"):
        jrb.save(tmp_path, buffer, state, extra={"name": "x"})
    assert not os.listdir(tmp_path)
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match="saved with extra=, got one without"):
        jrb.load(tmp_path, extra={"step": 0})
    jrb.save(tmp_path, buffer, state, extra={"a": jnp.ones(2), "b": 1})
    for example, message in [
        ({"a": jnp.ones(2)}, r"leaf 'b': expected the leaves \['a', 'b'\]"),
        ({"a": jnp.ones(3), "b": 1}, r"leaf 'a': expected \['float32', '\[2\]'\]"),
        ({"a": jnp.ones(2), "b": 1.0}, r"leaf 'b': expected \['int64', '\[\]'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            jrb.load(tmp_path, extra=example)
    with pytest.raises(ValueError, match="extra: expected none with layout='h5'"):
        jrb.save(tmp_path / "file.h5", buffer, state, extra={"b": 1}, layout="h5")


def test_a_checkpoint_tells_its_facts_without_its_rows(tmp_path):
    buffer = jrb.ReplayBuffer(200_000, 2, sampler=jrb.Prioritized())
    state = buffer.init({"x": jnp.zeros(64), "next": {"done": False}})
    state = jax.jit(buffer.extend)(
        state, {"x": jnp.ones((7, 2, 64)), "next": {"done": jnp.zeros((7, 2), bool)}}
    )
    jrb.save(tmp_path, buffer, state, extra={"step": 5})
    file_of(tmp_path, "storage/x").unlink()  # `metadata` does not read rows
    facts = checkpoint.metadata(tmp_path)
    json.dumps(facts)
    assert (facts["capacity"], facts["num_envs"]) == (200_000, 2)
    assert facts["size"] == 14
    assert facts["writer"] == {"count": 7, "cursor": 7, "lap": 0}
    assert facts["leaves"]["storage/x"] == "float32[200000, 64]"
    assert facts["nbytes"] > 200_000 * 65 * 4
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["extra"] == ["step"]
    assert facts["time"].endswith("+00:00")
    many = jax.vmap(lambda _: state)(jnp.arange(2))
    jrb.save(tmp_path / "many", buffer, many)
    assert checkpoint.metadata(tmp_path / "many")["size"] == [14, 14]
    with pytest.raises(FileNotFoundError):
        checkpoint.metadata(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="expected generation 9"):
        checkpoint.metadata(tmp_path, generation=9)


# Runs that are killed repeatedly.

RUN = """
import os, random, signal, sys
import jax, jax.numpy as jnp, numpy as np
import jrb
from tests import seams

path, seed, storage = sys.argv[1], int(sys.argv[2]), sys.argv[3]
made = {"device": jrb.DeviceStorage, "memmap": lambda: jrb.MemmapStorage(path)}[storage]()
buffer = jrb.ReplayBuffer(16, 2, 4, jrb.Prioritized(), jrb.NStep(2, 0.9), storage=made)
item = {"x": jnp.zeros(2), "next": {"reward": jnp.float32(0), "done": False}}
start = {"w": jnp.zeros(2), "key": jax.random.key(0), "step": 0}
methods = jrb.jitted(buffer)
if os.path.exists(os.path.join(path, "saved")):
    _, state, at = jrb.load(path, buffer, extra=start)
else:
    state, at = buffer.init(item), start
    jrb.save(path, buffer, state, extra=at)
    open(os.path.join(path, "saved"), "w").close()
if seed:
    left = random.Random(seed).randrange(5, 90)
    def kill(*event):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    seams.set_hook(kill)
while at["step"] < 60:
    key, draw = jax.random.split(at["key"])
    row = {"x": at["w"] + jax.random.normal(draw, (2, 2)),
           "next": {"reward": jax.random.normal(key, (2,)),
                    "done": jnp.arange(2) == at["step"] % 5}}
    state = methods.add(state, row)
    state, sample = methods.draw(state, draw)
    reward = sample.data["next"]["reward"]
    state = methods.update_priority(state, sample, jnp.abs(reward))
    w = at["w"] + 0.1 * jnp.mean(sample.data["x"] * sample.weights[:, None], 0)
    at = {"w": w, "key": key, "step": at["step"] + 1}
    if at["step"] % 2 == 0:
        jrb.save(path, buffer, state, extra=at)
print(np.asarray(at["w"]).tobytes().hex(), np.asarray(state.sampler.raw).tobytes().hex())
"""


KILLS = 3


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("storage", ["memmap", pytest.param("device", marks=pytest.mark.long)])
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    storage, tmp_path, tmp_path_factory
):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.getbasetemp() / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(name, seed):
        return subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path / name), str(seed), storage],
            check=False,
            cwd=pathlib.Path(__file__).parents[2],
            capture_output=True,
            text=True,
            env=environment,
        )

    whole = run("whole", 0)
    assert whole.returncode == 0, whole.stderr
    kills = 0
    for seed in range(1, 30):
        one = run("killed", seed if kills < KILLS else 0)
        if one.returncode == 0:
            break
        assert one.returncode == -signal.SIGKILL, one.stderr
        kills += 1
    assert kills == KILLS
    assert one.stdout == whole.stdout
