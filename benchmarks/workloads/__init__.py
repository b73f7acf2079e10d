"""The workloads that are compared. A new one is a module here with `cases`, and a line below."""

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
"""Groups of cases, each a module with `cases(wanted)`; its docstring says what it is."""


def module(group: str) -> ModuleType:
    """The module of a group."""
    return importlib.import_module(f"{__name__}.{group}")


def about(group: str) -> str:
    """What a group is, in a line."""
    return (module(group).__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
