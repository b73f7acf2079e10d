"""Sets of LeRobot, version 3, written without LeRobot.

K episodes, L steps of one.
"""

import contextlib
import os
from collections.abc import Sequence

from jrb._base import checks
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.writing.beside import free, new_folder
from jrb.datasets.writing.lerobot import features as known
from jrb.datasets.writing.lerobot.tables import Tables, Tasks
from jrb.datasets.writing.source import Source
from jrb.state import BufferState


def write_lerobot(
    path: str | os.PathLike[str],
    buffer: ReplayBuffer | Dataset,
    state: BufferState | None = None,
    *,
    fps: int,
    robot_type: str | None = None,
    task: str | Sequence[str] = "",
    images: bool = True,
    next_observations: bool = False,
    whole: bool = False,
    file_mb: int = 100,
) -> None:
    """Writes what a buffer holds, or a dataset, as a set that LeRobot loads (version 3.0).

    Names are TED's with dots for slashes; an observation that is a single array becomes
    `observation.state`, or `observation.image`. LeRobot has no place for the observation after the
    last step of an episode: it is left out, unless next observations are features too. Leaves
    `timestamp, frame_index, episode_index, index` are made anew.

    Args:
        path: of a folder, which is not there yet.
        buffer: the description; its items are nested dicts, and tell where episodes end. Or a
            dataset, without a state.
        state: its state. It is only read, some megabytes at a time.
        fps: steps in a second.
        robot_type: which robot it was.
        task: what was to be done; or texts, of which an integer leaf `task_index` takes one for
            each step.
        images: whether observations uint8 `[height, width, 1 or 3]` are stored as PNGs, which is
            exact, rather than as lists.
        next_observations: whether they are stored, as `next.observation...`; needed where they are
            not the observations of the next steps.
        whole: whether episodes are left out that are running, or whose beginning was overwritten.
        file_mb: about how large a table becomes before the next one begins.

    Raises:
        ValueError: something is at the path; there are no episodes; LeRobot cannot hold a leaf;
            next observations that would be lost.
        TypeError: items are no nested dicts; or neither a buffer with its state nor a dataset.
    """
    target = free(path)
    checks.count("fps", fps)
    checks.count("file_mb", file_mb)
    source = Source("write_lerobot", buffer, state, whole)
    if not len(source):
        raise ValueError("write_lerobot: expected a buffer that holds episodes, got none.")
    spec = known.with_done(source)
    features = known.features_of(spec, next_observations, images)
    tasks = Tasks(task, spec)
    with (
        new_folder(target) as folder,
        contextlib.closing(Tables(folder, features, tasks, fps, file_mb << 20)) as tables,
    ):
        for number, held in enumerate(source):
            leaves = held.leaves
            if not next_observations:
                known.check_chain(leaves, number)
            done = known.done_of(leaves)
            tables.add(leaves if done is None else {**leaves, "next/done": done})
        tables.finish(robot_type)
