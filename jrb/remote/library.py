"""Ray, which is imported when it is needed."""

from typing import Any

from jrb._base import extras


def ray() -> Any:
    """The library.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    return extras.require("ray", "ray")
