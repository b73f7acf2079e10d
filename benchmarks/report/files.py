"""Writes and reads results, one JSON file for each group."""

import json
import pathlib
from typing import Any


def write(folder: pathlib.Path, found: dict[str, Any]) -> pathlib.Path:
    """Writes the result of a group and returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found['group']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def read(folder: pathlib.Path, group: str) -> dict[str, Any] | None:
    """Returns the result of a group; None if there is none."""
    path = folder / f"{group}.json"
    return json.loads(path.read_text()) if path.exists() else None
