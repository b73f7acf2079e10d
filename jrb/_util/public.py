"""Names of public modules that are imported when they are first asked for."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

PublicNames = Callable[[], list[str]]
"""The type of a module's `__dir__`, which lists its public names only."""


def lazy(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a module, which imports each public name at its first use.

    Args:
        module: the name of the module.
        homes: a mapping from public names to the module that defines each, or is the name's value.
    """

    def get(name: str) -> Any:
        if name not in homes:
            hint = importlib.import_module("jrb._util.wording").hint(name, homes)
            raise AttributeError(f"module {module!r} has no attribute {name!r}.{hint}")
        # The name is that of a submodule, or of something in its home.
        value = importlib.import_module(homes[name])
        if homes[name] != f"{module}.{name}":
            value = getattr(value, name)
        # Later uses find the value without this function.
        setattr(sys.modules[module], name, value)
        return value

    return get
