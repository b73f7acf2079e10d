"""Sets of Minari: recorded by it, written by hand, and what must come back of them."""

import contextlib
import json
import os
import warnings

import h5py
import jax
import numpy as np
import pytest

pytest.importorskip("minari")

import gymnasium
import minari
from gymnasium import spaces
from minari.serialization import serialize_space


class World(gymnasium.Env):
    """Every kind of space; images of one colour if the options ask for them."""

    def __init__(self, nested=False):
        self.nested = nested
        image = lambda *shape: spaces.Box(0, 255, shape, np.uint8)
        pair = spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2, 3), np.float32)))
        self.observation_space = spaces.Dict(
            {
                "colour": image(32, 40, 3),
                "grey": image(33, 32),
                "small": image(8, 8),
                "pair": pair,
                "text": spaces.Text(5),
                "bits": spaces.MultiBinary(3),
                "numbers": spaces.MultiDiscrete([3, 4]),
            }
        )
        self.action_space = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float64)))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps, self.plain = 0, bool(options)
        return self.seen(), self.info()

    def step(self, action):
        self.steps += 1
        over = self.steps == 3 + self.np_random_seed % 3
        return self.seen(), 0.5 * self.steps, over and self.plain, over, self.info()

    def seen(self):
        seen = self.observation_space.sample()
        if self.plain:
            seen["colour"][:] = self.steps
        return seen

    def info(self):
        grid = np.full((2, 2), self.steps, np.float32)
        return {
            "steps": self.steps,
            "grid": grid,
            **({"more": {"grid": grid}} if self.nested else {}),
        }


@contextlib.contextmanager
def root(path):
    """A place where Minari keeps its sets."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("MINARI_DATASETS_PATH", str(path))
        yield path


def recorded(path, env, name, episodes=12, **options):
    """A set that Minari records: its folder, and its episodes as Minari reads them."""
    with root(path):
        collector = minari.DataCollector(env, record_infos=True, **options)
        for seed in range(episodes):
            collector.reset(seed=seed, options={"plain": {"x": 2.5}} if seed % 2 else None)
            over = False
            while not over:
                _, _, terminated, truncated, _ = collector.step(collector.action_space.sample())
                over = terminated or truncated
        made = collector.create_dataset(name, author="somebody", algorithm_name="none")
        collector._tmp_dir.cleanup()
        return str(path / name), list(made.iterate_episodes())


def named(tree):
    """Tuples as dicts; without texts."""
    if isinstance(tree, tuple):
        tree = {f"_index_{number}": entry for number, entry in enumerate(tree)}
    if isinstance(tree, dict):
        return {name: named(entry) for name, entry in tree.items() if not isinstance(entry, list)}
    return np.asarray(tree)


def in_ted(episode, with_infos=True):
    """Returns in TED what must be read of an episode, given as Minari reads it."""
    head = lambda tree: jax.tree.map(lambda leaf: leaf[:-1], named(tree))
    tail = lambda tree: jax.tree.map(lambda leaf: leaf[1:], named(tree))
    found = {
        "observation": head(episode.observations),
        "action": named(episode.actions),
        "next": {
            "observation": tail(episode.observations),
            "reward": episode.rewards,
            "terminated": episode.terminations,
            "truncated": episode.truncations,
            "done": episode.terminations | episode.truncations,
        },
    }
    if with_infos and episode.infos:
        found["info"], found["next"]["info"] = head(episode.infos), tail(episode.infos)
    return found


FORM = {
    "data_format": "hdf5",
    "observation_space": serialize_space(spaces.Box(-np.inf, np.inf, (3,), np.float64)),
    "action_space": serialize_space(spaces.Discrete(5)),
}


def made(folder, episodes, **about):
    """A set by hand, from flat arrays by name; the metadata may be changed."""
    os.makedirs(folder, exist_ok=True)
    with h5py.File(os.path.join(folder, "main_data.hdf5"), "w") as file:
        for number, episode in enumerate(episodes):
            put(file, f"episode_{number}", episode)
    steps = sum(len(episode.get("rewards", ())) for episode in episodes)
    about = {"total_episodes": len(episodes), "total_steps": steps, **FORM, **about}
    with open(os.path.join(folder, "metadata.json"), "w") as file:
        json.dump(about, file)
    return str(folder)


def put(file, name, episode):
    group = file.create_group(name)
    for leaf, array in episode.items():
        group[leaf] = array


def episode(steps, seed=0, rows=None, **more):
    """The arrays of an episode that was truncated."""
    rng = np.random.default_rng(seed)
    return {
        "observations": rng.normal(size=(steps + 1 if rows is None else rows, 3)),
        "actions": rng.integers(0, 5, steps),
        "rewards": rng.normal(size=steps),
        "terminations": np.zeros(steps, bool),
        "truncations": np.arange(steps) == steps - 1,
        **more,
    }


def assert_same(found, expected):
    """Two trees of arrays, bit by bit."""
    found, expected = (
        dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (found, expected)
    )
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        got, leaf = found[path], np.asarray(leaf)
        assert (got.dtype, got.shape) == (leaf.dtype, leaf.shape), path
        assert got.tobytes() == leaf.tobytes(), path
