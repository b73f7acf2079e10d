"""The pictures of pages: drawn when the documentation is built, so that none is stale.

The quick start is run, and its buffer drawn by `jrb.plot`; results of benchmarks are drawn from
their JSON. The pictures are in `docs/_made`, and drawn again when a file that they come from
changes.
"""

import contextlib
import hashlib
import importlib
import io
import pathlib
import tempfile
from typing import Any

from generate.tables import RESULTS

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "_made"
STAMP = "sources.txt"
QUICK_START = ("quick_start", "quick_start_narrow", "plot_sample", "plot_episode", "plot_draws")
WITHOUT_PICTURE = ("remote", "scale", "skew")
"""Results that are tables only."""
SOURCES = (
    "examples/quick_start.py",
    "jrb/plot/*.py",
    "benchmarks/report/*.py",
    "benchmarks/results/*.json",
    "docs/generate/made.py",
)


def names() -> list[str]:
    """Returns the names of all pictures."""
    groups = sorted(path.stem for path in RESULTS.glob("*.json"))
    return [*QUICK_START, *(name for name in groups if name not in WITHOUT_PICTURE)]


def digest() -> str:
    """Returns a hash of the files that the pictures come from."""
    paths = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def draw_quick_start(folder: pathlib.Path) -> None:
    """Trains the agent of the quick start, and draws its buffer in four ways."""
    import jax
    import matplotlib.figure

    import jrb
    from examples import quick_start

    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(io.StringIO()):
        quick_start.main(work)
        pathlib.Path(work, "priorities.png").rename(folder / "quick_start.png")
        buffer, state = jrb.load(pathlib.Path(work, "replay"))
    # For narrow windows, where the wide picture would be cut. "tight" keeps all of long titles.
    narrow = matplotlib.figure.Figure(figsize=(5, 8.5), layout="constrained", facecolor="white")
    jrb.plot.state(buffer, state, narrow.add_subplot())
    narrow.savefig(folder / "quick_start_narrow.png", dpi=110, bbox_inches="tight")
    key = jax.random.key(0)
    newest = len(jrb.episodes(buffer, state)) - 2 * buffer.num_envs  # of those that are complete
    figures = {
        "plot_sample": jrb.plot.sample(buffer.sample(state, key)),
        "plot_episode": jrb.plot.episode(buffer, state, newest),
        "plot_draws": jrb.plot.draws(buffer, state, key, 20_000),
    }
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=110)


def draw_results(folder: pathlib.Path) -> None:
    """Draws the results of all benchmarks that have a picture."""
    from benchmarks import alone
    from benchmarks.report import files

    plots = importlib.import_module("benchmarks.report.plots")
    for name in names()[len(QUICK_START) :]:
        module = alone if name in alone.GROUPS else plots
        if not module.draw(files.read(RESULTS, name), folder / f"{name}.png"):
            raise ValueError(f"{name}.json: expected results that can be drawn, got none.")


def make(app: Any) -> None:
    """Called by Sphinx before it reads a page."""
    stamp, now = FOLDER / STAMP, digest()
    if stamp.exists() and stamp.read_text() == now:
        return
    FOLDER.mkdir(exist_ok=True)
    draw_results(FOLDER)
    draw_quick_start(FOLDER)
    stamp.write_text(now)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", make)
