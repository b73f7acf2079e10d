"""Pictures of what a buffer holds, and of what it draws; the extra `plot` brings matplotlib.

Each function returns a matplotlib figure. A notebook shows it; `figure.savefig("state.png")` writes
it to a file. Given an `ax`, a picture is drawn in its place, in the figure that it belongs to.
Nothing is shown or kept by pyplot. What does not apply is left out: a buffer without priorities has
no panel for them.
"""

from typing import TYPE_CHECKING

from jrb._util.public import PublicNames, lazy

if TYPE_CHECKING:
    from jrb.plot.of_draws import draws
    from jrb.plot.of_episode import episode
    from jrb.plot.of_sample import sample
    from jrb.plot.of_state import state

__all__ = ["draws", "episode", "sample", "state"]
__dir__: PublicNames = lambda: __all__

if not TYPE_CHECKING:  # matplotlib is imported when a function is asked for
    __getattr__ = lazy(__name__, {name: f"{__name__}.of_{name}" for name in __all__})
