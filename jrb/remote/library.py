"""Ray, which is imported when it is needed."""

from typing import Any

from jrb._util import extras


def ray() -> Any:
    """The library.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    return extras.require("ray", "ray")


def restarts() -> int:
    """Returns how often Ray has started the actor of this process again."""
    state: Any = extras.require("ray._private.state", "ray")  # in public Ray says only whether
    return int(state.actors(actor_id=ray().get_runtime_context().get_actor_id())["NumRestarts"])
