"""What a set of Minari says of itself: its metadata, as JSON or, in old sets, in HDF5."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jrb.datasets.kind import Source
from jrb.datasets.kinds.minari.leaf import Space, is_image, leaf_spaces, shape_of
from jrb.datasets.reading import hdf5

FILE = "metadata.json"
MAIN = "main_data.hdf5"
_JSON = ("observation_space", "action_space", "env_spec", "eval_env_spec")
_SPACES = {"observation_space": "observations", "action_space": "actions"}


def folder_of(source: Source) -> str | None:
    """The folder where the data lie; None if there is none."""
    if not isinstance(source, str):
        return None
    for folder in (source, os.path.join(source, "data")):
        if any(os.path.isfile(os.path.join(folder, name)) for name in (FILE, MAIN)):
            return folder
    return None


def read(folder: str) -> dict[str, Any]:
    """The metadata as they are written; those of the oldest sets are attributes of their file.

    Raises:
        ValueError: they are damaged.
    """
    path = os.path.join(folder, FILE)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            return _object(path, file.read())
    with hdf5.opened(os.path.join(folder, MAIN)) as file:
        return {name: hdf5.plain(value) for name, value in file.attrs.items()}


def metadata(folder: str) -> dict[str, Any]:
    """The same, with spaces and environments as dicts, and `environment`, the name of it."""
    about = read(folder)
    for name in _JSON:
        if isinstance(about.get(name), str):
            about[name] = _object(f"{os.path.join(folder, FILE)}: '{name}'", about[name])
    environment = about.get("env_spec")
    if isinstance(environment, dict) and "id" in environment:
        about["environment"] = environment["id"]
    return about


def attributes(folder: str) -> dict[str, Any]:
    """What is said of an episode that has a folder of its own, under flat names (`options/a`)."""
    path = os.path.join(folder, FILE)
    if not os.path.isfile(path):
        return {}
    with open(path, "rb") as file:
        return dict(_flat("", _object(path, file.read())))


def _flat(prefix: str, entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, entry in entries.items():
        if isinstance(entry, Mapping):
            yield from _flat(f"{prefix}{name}/", entry)
        else:
            yield prefix + name, entry


def _object(where: str, text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected JSON, got something else: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object of JSON, got {type(found).__name__}.")
    return found


def spaces_of(folder: str, about: Mapping[str, Any]) -> dict[str, Space]:
    """The spaces of all arrays that have one, by the names of these (`observations/image`).

    Raises:
        ValueError: what is there is no space.
    """
    found: dict[str, Space] = {}
    for name, role in _SPACES.items():
        try:
            inner = dict(leaf_spaces(role, about[name])) if name in about else {}
            for space in inner.values():
                shape_of(space)
                is_image(space)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            path = os.path.join(folder, FILE)
            raise ValueError(f"{path}: '{name}': expected a space, got no such: {error}") from error
        found |= inner
    return found
