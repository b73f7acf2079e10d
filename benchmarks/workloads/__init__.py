"""The compared workloads. To add one, add a module here with `cases` and a line below."""

import importlib
from types import ModuleType

GROUPS = (
    "cycle",
    "units",
    "windows",
    "sizes",
    "shapes",
    "calls",
    "loop",
    "agents",
    "compiling",
    "kernels",
    "memory",
    "copies",
    "checkpoint",
    "host",
    "rfc",
    "training",
)
"""Groups of cases, each a module with `cases(wanted)`, whose docstring is its description."""


def module(group: str) -> ModuleType:
    """Imports and returns the module of a group."""
    return importlib.import_module(f"{__name__}.{group}")


def about(group: str) -> str:
    """Returns the description of a group in one line."""
    return (module(group).__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
