"""Plots of a buffer's contents and of its samples; the extra `plot` installs matplotlib.

Each function returns a matplotlib figure. A notebook shows it; `figure.savefig("state.png")` writes
it to a file. If `ax` is given, the plot replaces these axes in their figure. Figures are not
registered with pyplot. Panels that do not apply are left out, such as priorities of a buffer
without them.
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

if not TYPE_CHECKING:  # matplotlib is imported at the first access to a function
    __getattr__ = lazy(__name__, {name: f"{__name__}.of_{name}" for name in __all__})
