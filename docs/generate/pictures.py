"""Drawings in pages: put into the page itself, where they take its colours, light or dark."""

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from generate.drawings import DRAWINGS


class Drawing(Directive):
    """`{drawing} name`: a drawing, with the content as its caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The figure."""
        svg = DRAWINGS[self.arguments[0]]()
        figure = nodes.figure(classes=["drawing"])
        figure += nodes.raw("", svg, format="html")
        caption, messages = self.state.inline_text(" ".join(self.content), self.lineno)
        figure += nodes.caption("", "", *caption, *messages)
        return [figure]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_directive("drawing", Drawing)
