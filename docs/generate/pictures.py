"""Drawings in pages: SVG files put into the page, where they take its colours, light or dark."""

import pathlib
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

DRAWINGS = pathlib.Path(__file__).parents[1] / "drawings"


class Drawing(Directive):
    """`{drawing} name`: the file `drawings/name.svg`, with the content as its caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The figure."""
        path = DRAWINGS / f"{self.arguments[0]}.svg"
        self.state.document.settings.env.note_dependency(str(path))
        figure = nodes.figure(classes=["drawing"])
        figure += nodes.raw("", path.read_text(), format="html")
        if self.content:
            caption = nodes.caption()
            inline, messages = self.state.inline_text(" ".join(self.content), self.lineno)
            caption += [*inline, *messages]
            figure += caption
        return [figure]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_directive("drawing", Drawing)
