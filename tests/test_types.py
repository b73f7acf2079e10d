"""The types that users' type checkers see."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
import jax, jax.numpy as jnp, jrb
buffer = jrb.ReplayBuffer(100, batch_size=4, sampler=jrb.Prioritized())
methods = jrb.jitted(buffer)
state = methods.init({"x": jnp.zeros(3)})
state = methods.add(state, {"x": jnp.ones(3)})
batch = methods.sample(state, jax.random.key(0))
state = methods.update_priority(state, batch, batch.weights)
mixed = jrb.jitted(jrb.Mix((buffer, buffer), (0.5, 0.5)))
states, batch = mixed.draw((state, state), jax.random.key(0))
sharded = jrb.Sharded(buffer, axis="data", shards=2)
mix = jrb.Mix((buffer, buffer), (0.5, 0.5))
reveal_type(jrb.load("a"))
reveal_type(jrb.load("a", buffer, extra={"step": 0}))
reveal_type(jrb.load("a", mix)[1])
reveal_type(jrb.load("a", sharded, extra=0)[:2])
reveal_type(jrb.load("a", {"x": buffer})[0])
reveal_type(jrb.items(buffer, state, 3))
batch.experience  # error: Sample has none
jrb.NStep(gamma=0.9)  # error: nor has NStep
jrb.from_gymnasium(None, 10, batchsize=4)  # error: no such option
jrb.from_gymnax(None, None, 10, num_envs=4, batch_size=2, requires_mask=False, cast=True)
jrb.from_brax(None, 10, num_envs="4")  # error: a number
jrb.from_items({"x": jnp.zeros(3)}, sampelr=jrb.Uniform())  # error: no such option
jrb.ReplayBuffer.rounded(10, 3, minsize=2, unit=jrb.Transition())  # error: no such option
"""


@pytest.mark.slow
def test_the_documented_loop_has_types_and_wrong_names_are_found(tmp_path):
    pyright = shutil.which("pyright", path=os.path.dirname(sys.executable))
    if pyright is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "loop.py").write_text(PROGRAM)
    call = [pyright, "--pythonpath", sys.executable, "loop.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(call, cwd=tmp_path, env=environ, capture_output=True, text=True)
    errors = [line for line in ran.stdout.splitlines() if " - error: " in line]
    assert len(errors) == 7, ran.stdout
    assert '"experience" for class "Sample"' in errors[0]
    assert {line.split(":")[1] for line in errors} == {"19", "20", "21", "23", "24", "25"}
    types = [line.split(" is ")[1] for line in ran.stdout.splitlines() if "Type of" in line]
    assert types == [
        '"tuple[ReplayBuffer, BufferState]"',
        '"tuple[ReplayBuffer, BufferState, Any]"',
        '"tuple[BufferState, ...]"',
        '"tuple[Sharded, BufferState]"',
        '"dict[str, ReplayBuffer]"',
        '"Iterator[Any]"',
    ]


@pytest.mark.slow
def test_every_public_symbol_has_a_type(tmp_path):
    pyright = shutil.which("pyright", path=os.path.dirname(sys.executable))
    if pyright is None:
        pytest.skip("pyright is not installed")
    call = [pyright, "--pythonpath", sys.executable, "--verifytypes", "jrb", "--ignoreexternal"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(call, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert "Type completeness score: 100%" in ran.stdout, ran.stdout
