"""What of the documentation is made when it is built: names, tables, pictures, notebooks.

`tables` and `drawings` need nothing but Python; the rest needs Sphinx.
"""

import importlib
from typing import Any

PARTS = ("keywords", "made", "meta", "names", "notebooks", "pictures", "tables")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    for part in PARTS:
        importlib.import_module(f"generate.{part}").setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
