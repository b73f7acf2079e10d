"""The notebooks of the repository, as pages, with the outputs that they are stored with."""

import pathlib
import shutil
from typing import Any


def copy(app: Any) -> None:
    """Copies `notebooks/*.ipynb` beside the pages; what is unchanged is left alone."""
    source = pathlib.Path(app.srcdir).parent / "notebooks"
    target = pathlib.Path(app.srcdir) / "notebooks"
    target.mkdir(exist_ok=True)
    found = {path.name: path for path in source.glob("*.ipynb")}
    for old in target.glob("*.ipynb"):
        if old.name not in found:
            old.unlink()
    for name, path in found.items():
        into = target / name
        if not into.exists() or into.read_bytes() != path.read_bytes():
            shutil.copyfile(path, into)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", copy)
