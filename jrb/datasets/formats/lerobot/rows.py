"""The rows in which LeRobot tells of episodes and tasks: JSON lines, or tables.

K episodes.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrb._util import extras
from jrb.datasets.reading import arrow
from jrb.datasets.reading.names import natural_order

_MOST = 1 << 48  # steps
_OWN = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")
_GROUPS = ("stats/", "data/", "videos/", "meta/")


def names(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is told of episodes beyond LeRobot's own."""
    names = dict.fromkeys(name for line in lines for name in line)
    return [name for name in names if name not in _OWN and not name.startswith(_GROUPS)] + [
        "tasks"
    ] * ("tasks" in names)


def facts(columns: Mapping[str, list[Any]]) -> dict[str, np.ndarray]:
    """Arrays `[K]` of what is a number for all episodes; tasks as tuples of texts."""
    found: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if name == "tasks":
            found[name] = np.empty(len(column), object)
            found[name][:] = [tuple(each) if isinstance(each, list) else each for each in column]
        elif all(isinstance(value, bool | int | float) for value in column):
            found[name] = np.array(column)
    return found


def tasks(lines: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Texts by number; pandas keeps them in a column that has no name of its own."""
    found = {}
    for line in lines:
        text = next((value for value in line.values() if isinstance(value, str)), None)
        if isinstance(line.get("task_index"), int) and text is not None:
            found[line["task_index"]] = text
    return dict(sorted(found.items()))


def in_order(lines: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """The episodes by their numbers, which have no gaps."""
    numbers = [line.get("episode_index") for line in lines]
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{path}: expected a number 'episode_index' for each episode.")
    lacking = sorted(set(range(len(lines))) - set(numbers))
    if lacking or not lines:
        raise ValueError(
            f"{path}: expected episodes from 0 to {len(lines) - 1}, got none with the numbers "
            f"{lacking[:5]}."
        )
    return sorted(lines, key=lambda line: line["episode_index"])


def lengths(found: Sequence[Any], path: str) -> np.ndarray:
    """int64 `[K]`, of numbers above 0."""
    for number, length in enumerate(found):
        if type(length) is not int or not 0 < length < _MOST:
            raise ValueError(
                f"{path}: episode {number}: length: expected a number above 0, got {length!r}."
            )
    return np.array(found, np.int64)


def read_json(path: str) -> Any:
    """What a file of JSON holds.

    Raises:
        ValueError: it is damaged.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected JSON, got something else: {error}") from error


def read_lines(path: str, is_needed: bool = True) -> list[dict[str, Any]]:
    """The dicts of a file of JSON lines."""
    if not os.path.isfile(path):
        if is_needed:
            raise ValueError(f"{path}: expected a file, found none.")
        return []
    with open(path, encoding="utf-8") as file:
        try:
            found = [json.loads(line) for line in file if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected lines of JSON, got others: {error}") from error
    if not all(isinstance(line, dict) for line in found):
        raise ValueError(f"{path}: expected a dict of JSON in each line, got others.")
    return found


def read_tables(path: str, is_needed: bool) -> list[dict[str, Any]]:
    """The rows of a table, or of those in the folders of a folder, without statistics."""
    parquet = extras.require("pyarrow.parquet", "datasets")
    found: list[dict[str, Any]] = []
    for each in _tables(path):
        with arrow.refused(each):
            names = parquet.read_schema(each).names
            wanted = [name for name in names if not name.startswith("stats/")]
            found += parquet.ParquetFile(each).read(wanted).to_pylist()
    if not found and is_needed:
        raise ValueError(f"{path}: expected a table of episodes, found none.")
    return found


def _tables(path: str) -> list[str]:
    if not os.path.isdir(path):
        return arrow.tables(path)
    chunks = sorted(os.listdir(path), key=natural_order)
    return [table for chunk in chunks for table in arrow.tables(os.path.join(path, chunk))]
