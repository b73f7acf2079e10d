"""Benchmarks without peers: each is a module with `run` and its own form of results."""

import importlib
import pathlib
from typing import Any

from .. import machine
from ..workloads.case import Wanted

GROUPS = ("remote", "scale", "skew", "offline")


def about(group: str) -> str:
    """Returns the description of a group in one line."""
    module = importlib.import_module(f"{__name__}.{group}")
    return (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def run(group: str, wanted: Wanted) -> dict[str, Any]:
    """Runs a group and returns its results as a JSON object."""
    found = importlib.import_module(f"{__name__}.{group}").run(wanted)
    told = {"group": group, "about": about(group), "quick": wanted.quick}
    return told | {"machine": machine.about(("ray", "torchrl"))} | found


def draw(result: dict[str, Any], path: pathlib.Path) -> bool:
    """Writes the plot of a group; returns False if the group has none."""
    picture = getattr(importlib.import_module(f"{__name__}.{result['group']}"), "picture", None)
    if picture is None:
        return False
    picture(result["rows"][0]).savefig(path, dpi=150)
    return True
