"""Programs on a simulated Windows, which lacks flock and much else; see `windows.py`."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

import jrb

SETUP = """
import os, tempfile
import jax, jax.numpy as jnp, numpy as np
import jrb

after = {"observation": jnp.zeros(3), "reward": 0.0, "done": False}
example = {"observation": jnp.zeros(3), "action": 0, "next": after}
buffer = jrb.ReplayBuffer(64, batch_size=4, sampler=jrb.Prioritized(), unit=jrb.NStep(2, 0.9))
state = buffer.init(example)
for number in range(20):
    state = buffer.add(state, {**example, "observation": jnp.full(3, float(number))})
folder = tempfile.mkdtemp(dir={folder!r})
"""
WORKS = {
    "buffers on the device": """
methods = jrb.jitted(buffer)
sample = methods.sample(state, jax.random.key(0))
state = methods.update_priority(state, sample, jnp.ones(4))
assert int(methods.size(state)) == 20
assert jrb.stats(buffer, state)["size"] == 20
jrb.Mix((buffer, buffer), (0.5, 0.5))
""",
    "objects": """
jrb.from_items(["a", {}], storage=jrb.ListStorage())
""",
    "datasets": """
assert len(jrb.datasets.open("tests/data/minari/cartpole-v0").buffer(batch_size=4)) == 2
numbers = np.zeros(4, np.float32)
arrays = dict.fromkeys(("observations", "actions", "rewards"), numbers)
np.savez(folder + "/a.npz", **arrays, terminals=numbers == 0)
assert jrb.datasets.open(folder + "/a.npz").transitions == 4
""",
    "checkpoints in HDF5, which are read": """
assert jrb.checkpoint.verify({h5!r}) == []
assert int(jrb.ReplayBuffer(4).size(jrb.load({h5!r})[1])) == 2
""",
    "arrays that are saved by hand": """
np.savez(folder + "/replay.npz", *jax.tree.leaves(state))
tree = jax.tree.structure(jax.eval_shape(buffer.init, example))
with np.load(folder + "/replay.npz") as file:
    again = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in file.values()])
one, other = (buffer.sample(each, jax.random.key(1)) for each in (state, again))
jax.tree.map(np.testing.assert_array_equal, one, other)
""",
}
RAISES = {
    "save": "jrb.save(folder + '/replay', buffer, state)",
    "save_async": "jrb.checkpoint.save_async(folder + '/replay', buffer, state).wait()",
    "save h5": "jrb.save(folder + '/replay.h5', buffer, state, layout='h5')",
    "load": "jrb.load({native!r})",
    "verify": "jrb.checkpoint.verify({native!r})",
    "memmap": "jrb.ReplayBuffer(4, storage=jrb.MemmapStorage(folder + '/rows')).init(example)",
    "temporary": "jrb.ReplayBuffer(4, storage=jrb.MemmapStorage()).init(example)",
    "spill": "jrb.ReplayBuffer(4, storage=jrb.SpillStorage(folder + '/rows', 2)).init(example)",
    "write": "jrb.datasets.write_d4rl(folder + '/a.hdf5', buffer, state)",
    "dump": "jrb.checkpoint.write_torchrl(folder + '/dump', buffer, state)",
    "recorder": "jrb.datasets.Recorder(folder + '/recording')",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Returns the paths of a folder and of checkpoints that were saved outside the simulation."""
    folder = tmp_path_factory.mktemp("windows")
    buffer = jrb.ReplayBuffer(4)
    state = buffer.extend(buffer.init({"x": jnp.float32(0)}), {"x": jnp.arange(2.0)})
    jrb.save(folder / "native", buffer, state)
    jrb.save(folder / "a.h5", buffer, state, layout="h5")
    return {name: str(folder / path) for name, path in NAMES.items()}


NAMES = {"folder": ".", "native": "native", "h5": "a.h5"}


def run(program, paths):
    for name, path in paths.items():
        program = program.replace(f"{{{name}!r}}", repr(path))
    command = [sys.executable, "-m", "tests.platforms.windows"]
    return subprocess.run(command, input=program, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_needs_no_locks_works(paths):
    ran = run(SETUP + "".join(WORKS.values()), paths)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_what_needs_locks_says_so_and_leaves_nothing(paths):
    calls = "".join(f"calls[{name!r}] = lambda: {call}\n" for name, call in RAISES.items())
    check = """
for name, call in calls.items():
    try:
        call()
    except OSError as error:
        assert "expected a system with flock" in str(error), (name, error)
    else:
        raise AssertionError(name)
assert os.listdir(folder) == []
"""
    ran = run(f"{SETUP}\ncalls = {{}}\n{calls}{check}", paths)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_importing_takes_no_module_that_windows_lacks():
    code = (
        "import sys; sys.modules['fcntl'] = None; import jrb, jrb.checkpoint, jrb.datasets, jrb.cli"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
