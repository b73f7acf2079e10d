"""What of the documentation is made when it is built: names, tables, drawings, notebooks."""

from typing import Any

from generate import names, notebooks, pictures, tables


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    for part in (names, notebooks, pictures, tables):
        part.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
