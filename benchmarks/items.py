"""The items of all workloads: NumPy arrays in which each row encodes its own number.

A test can decode the numbers of a batch with `numbers`, and compare the batch with `rows`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jrb.layouts import names

Items = dict[str, Any]
FRAME = (84, 84)
EPISODE = 300
"""Number of rows of an episode."""
_PARTS = {"joints": 6, "speeds": 6, "forces": 4, "touch": 2, "gyro": 3, "goal": 3, "body": 7}
_LARGEST = 2**24  # float32 represents every integer up to it


def rows(kind: str, numbers: np.ndarray, envs: int = 1) -> Items:
    """Returns the rows with these numbers; the shape of `numbers` leads that of each leaf.

    Args:
        kind: one of `KINDS`.
        numbers: row t of environment e has the number `t * envs + e`.
        envs: E; the next observation is the observation of row t + 1.
    """
    return KINDS[kind](np.asarray(numbers), envs)


def example(kind: str) -> Items:
    """Returns one row, without leading axes."""
    return rows(kind, np.array(0))


def width(kind: str) -> int:
    """Returns the bytes of a row."""
    return sum(leaf.nbytes for leaf in leaves(example(kind)).values())


def leaves(items: Items) -> dict[str, Any]:
    """Returns the leaves by their paths, such as `obs/joints`."""
    return names.flatten(items, "benchmarks")


def nested(flat: dict[str, Any]) -> Items:
    """Returns the nested items of leaves by path: the inverse of `leaves`."""
    return names.nest(flat)


def numbers(kind: str, items: Items) -> np.ndarray:
    """Decodes the numbers of rows, modulo 2^24, from their observations."""
    if kind == "number":
        return np.asarray(items["value"]).astype(np.int64)
    seen = np.asarray(items["obs"]["joints"] if kind == "nested" else items["obs"])
    if kind == "frames":
        head = seen[..., 0, :3].astype(np.int64)
        return head[..., 0] + 256 * head[..., 1] + 65536 * head[..., 2]
    return seen[..., 0].astype(np.int64)


def _wide(numbers: np.ndarray, count: int, salt: int = 0) -> np.ndarray:
    """Returns `count` floats per row, of which the first is the number modulo 2^24."""
    found = (numbers[..., None] % 1021 * 31 + np.arange(count) * 7 + salt) % 1021
    found[..., 0] = numbers % _LARGEST
    return found.astype(np.float32)


def _reward(numbers: np.ndarray) -> np.ndarray:
    return (numbers * 7919 % 1024).astype(np.float32) / np.float32(1024)


def _ends(numbers: np.ndarray, envs: int) -> np.ndarray:
    """Returns a mask of the rows that end an episode; environments end at different times."""
    return (numbers // envs + numbers % envs * 7) % EPISODE == EPISODE - 1


def _transition(
    numbers: np.ndarray, envs: int, see: Callable[[np.ndarray], Any], done: Any, action: Any
) -> Items:
    return {
        "obs": see(numbers),
        "action": action,
        "reward": _reward(numbers),
        "done": _ends(numbers, envs).astype(done),
        "next_obs": see(numbers + envs),
    }


def _vector(numbers: np.ndarray, envs: int, done: Any = np.float32) -> Items:
    see = lambda numbers: _wide(numbers, 17)
    return _transition(numbers, envs, see, done, _wide(numbers, 6, 3))


def _nested(numbers: np.ndarray, envs: int) -> Items:
    def see(numbers: np.ndarray) -> Items:
        parts = {name: _wide(numbers, count, count) for name, count in _PARTS.items()}
        return parts | {"time": _reward(numbers)[..., None]}

    return _transition(numbers, envs, see, np.float32, _wide(numbers, 6, 3))


def _pixels(numbers: np.ndarray) -> np.ndarray:
    ground = (np.arange(84 * 84, dtype=np.uint32) * 13).astype(np.uint8).reshape(FRAME)
    found = ground + (numbers * 31 % 256).astype(np.uint8)[..., None, None]
    head = np.stack([numbers >> shift & 255 for shift in (0, 8, 16)], axis=-1)
    found[..., 0, :3] = head.astype(np.uint8)
    return found


def _frames(numbers: np.ndarray, envs: int) -> Items:
    return _transition(numbers, envs, _pixels, np.bool_, (numbers % 4).astype(np.int32))


def _cartpole(numbers: np.ndarray, envs: int) -> Items:
    see = lambda numbers: _wide(numbers, 4)
    return _transition(numbers, envs, see, np.bool_, (numbers % 2).astype(np.int32))


def _number(numbers: np.ndarray, envs: int) -> Items:
    return {"value": (numbers % _LARGEST).astype(np.float32)}


KINDS: dict[str, Callable[[np.ndarray, int], Items]] = {
    "vector": _vector,
    "episodic": lambda numbers, envs: _vector(numbers, envs, np.bool_),
    "nested": _nested,
    "frames": _frames,
    "cartpole": _cartpole,
    "number": _number,
}
"""Kinds of items: "vector", 5 leaves, float32; "episodic", the same with boolean done flags;
"nested", 19 leaves; "frames", 84 x 84 uint8; "cartpole"; "number", one float32."""

WORDS = {
    "vector": "5 leaves",
    "episodic": "5 leaves",
    "nested": "19 leaves",
    "frames": "84 x 84 uint8",
    "cartpole": "CartPole",
    "number": "one float32",
}
"""The kinds as they appear in tables."""
