"""A pytest plugin that runs flashbax's own tests on `jrb.compat.flashbax`.

    python -m pytest -p tests.compat.flashbax_plugin FOLDER_OF_FLASHBAX

flashbax's tests also call the functions that its makers wrap, which take the length and the period
of windows in each call. The plugin builds these functions from the makers' buffers.
"""

import dataclasses
import sys
import types

import jax

import jrb
import jrb.compat.flashbax as fbx


def functions(state, length=None, period=1):
    """Returns the buffer of a state, with windows of this length and period."""
    prioritised = isinstance(state, fbx.PrioritisedTrajectoryBufferState)
    kind = fbx.PrioritisedTrajectoryBuffer if prioritised else fbx.TrajectoryBuffer
    buffer = state.buffer
    if length is not None:
        unit = jrb.Sequence(length, stride=period, cross_episodes=True)
        buffer = dataclasses.replace(buffer, unit=unit)
    return kind(buffer, length or 1)


def init(experience, envs, rows):
    return fbx.make_trajectory_buffer(envs, 1, 1, 1, 1, None, rows).init(experience)


def prioritised_init(experience, envs, rows, period):
    maker = fbx.make_prioritised_trajectory_buffer
    one = maker(envs, 1, 1, period, 1, None, rows + -rows % period)  # the maker needs a multiple
    buffer = dataclasses.replace(one.buffer, capacity=rows * envs)
    return dataclasses.replace(one, buffer=buffer).init(experience)


def sample(state, key, batch_size, length, period):
    return functions(state, length, period).sample(state, key, batch_size)


def queue(state, add=0, sample=0):
    return fbx.TrajectoryQueue(state.buffer, sample, add_rows=add)


FUNCTIONS = {
    "trajectory_buffer": {
        "init": init,
        "add": lambda state, batch: functions(state).add(state, batch),
        "sample": sample,
        "can_sample": lambda state, least: state.inner.writer.count >= least,
    },
    "prioritised_trajectory_buffer": {
        "prioritised_init": prioritised_init,
        "prioritised_add": lambda state, batch, length, period, _: functions(
            state, length, period
        ).add(state, batch),
        "prioritised_sample": sample,
        "set_priorities": lambda state, indices, priorities, *_: functions(state).set_priorities(
            state, indices, priorities
        ),
    },
    "trajectory_queue": {
        "init": lambda one, envs, rows: fbx.make_trajectory_queue(rows, envs, 1, 1).init(one),
        "add": lambda state, batch: queue(state).add(state, batch),
        "sample": lambda state, length: queue(state, sample=length).sample(state),
        "can_sample": lambda state, length, _: queue(state, sample=length).can_sample(state),
        "can_add": lambda state, length, _: queue(state, add=length).can_add(state),
    },
}


def pytest_configure():
    """Installs the functions; not called when doctests import this module."""
    jax.tree_map = jax.tree.map  # JAX has removed what flashbax's tests of mixtures call
    fbx.install()
    for module, names in FUNCTIONS.items():
        vars(sys.modules[f"flashbax.buffers.{module}"]).update(names)
    tree = sys.modules["flashbax.buffers.sum_tree"] = types.ModuleType("flashbax.buffers.sum_tree")
    tree.get = lambda state, items: state.nodes[state.nodes.shape[0] // 2 + items]
    sys.modules["flashbax.buffers"].sum_tree = tree
