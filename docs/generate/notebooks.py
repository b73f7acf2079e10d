"""The notebooks of the repository, as pages, with the outputs that they are stored with.

Below its title, each page says where to run the notebook and where to get it.
"""

import pathlib
import shutil
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

FOLDER = "notebooks/"
COLAB = "https://colab.research.google.com/github/jrb-dev/jrb/blob/main/notebooks/{}.ipynb"


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


class Links(SphinxTransform):
    """Adds links to Colab and to the file below the title of a notebook."""

    default_priority = 800  # before Sphinx collects the files to download

    def apply(self, **_: Any) -> None:
        """Called by Sphinx with each page."""
        name = self.env.docname.removeprefix(FOLDER)
        section = next(self.document.findall(nodes.section), None)
        if section is None or name == self.env.docname or name == "index":
            return
        colab = nodes.reference("", "Open in Colab", refuri=COLAB.format(name))
        file = addnodes.download_reference(
            "", "", nodes.Text("Download the notebook"), reftarget=f"/{FOLDER}{name}.ipynb"
        )
        line = nodes.paragraph("", "", colab, nodes.Text(" · "), file, classes=["run-notebook"])
        section.insert(1, line)


def highlight(app: Any, document: nodes.document) -> None:
    """Called by Sphinx: a cell that writes a file of Python is shown as Python."""
    for node in document.findall(nodes.literal_block):
        if node.astext().startswith("%%writefile"):
            node["language"] = "python"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_transform(Links)
    app.connect("builder-inited", copy)
    app.connect("doctree-read", highlight)
