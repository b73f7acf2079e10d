"""Damage that keeps a file from being recognised, found by opening it as what its name says."""

import json
import math
import os
import zipfile
from collections.abc import Iterator

from jrb.datasets.reading import arrow, hdf5, npz

_ENDINGS = (".npz", ".h5", ".hdf5", ".parquet", ".arrow", ".feather")
_MOST = 100  # files of a folder that are looked at
_FOLDERS = ("", "data", "meta")  # where formats keep what tells them


def check(path: str) -> str:
    """Refuses a file, or a folder with one, that is not whole.

    Returns:
        A sentence on a file that does not begin as its name says; of others, nothing.

    Raises:
        ValueError: the message names the file and what is damaged.
    """
    for each in _files(path):
        if hdf5.is_hdf5(each):
            with hdf5.opened(each) as file:
                hdf5.below(file)
        elif npz.is_npz(each) or zipfile.is_zipfile(each):
            with npz.opened(each, math.inf):
                pass
        elif arrow.format_of(each):
            arrow.opened(each)
        elif each.endswith(".json"):
            _check_json(each)
        elif each.endswith(_ENDINGS):
            return f"\n{each} does not begin as its name says, and may be damaged."
    return ""


def _files(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    for folder in (os.path.join(path, name) for name in _FOLDERS):
        names = sorted(os.listdir(folder))[:_MOST] if os.path.isdir(folder) else []
        yield from filter(os.path.isfile, (os.path.join(folder, name) for name in names))


def _check_json(path: str) -> None:
    with open(path, "rb") as file:
        try:
            json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected JSON, got something else: {error}") from error
