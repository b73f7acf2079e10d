"""Pictures of what a buffer holds, and of what it draws; the extra `plot` brings matplotlib.

Each function returns a matplotlib figure. A notebook shows it; `figure.savefig("state.png")` writes
it to a file. Given an `ax`, a picture is drawn in its place, in the figure that it belongs to.
Nothing is shown or kept by pyplot. What does not apply is left out: a buffer without priorities has
no panel for them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrb.plot.of_draws import draws
    from jrb.plot.of_episode import episode
    from jrb.plot.of_sample import sample
    from jrb.plot.of_state import state

__all__ = ["draws", "episode", "sample", "state"]


def __getattr__(name: str) -> Any:
    """A function, from its module: matplotlib is imported when one is asked for."""
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.of_{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
