"""Libraries that only some of jrb needs."""

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """The module, imported.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise ModuleNotFoundError(
            f"{package} is not installed. It comes with the extra '{extra}': "
            f"pip install 'jrb[{extra}]'",
            name=error.name,
        ) from error
