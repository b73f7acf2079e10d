"""What of the documentation is made when it is built: names, tables, drawings, notebooks.

`tables` and `drawings` need nothing but Python; the rest needs Sphinx.
"""

import importlib
from typing import Any


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    for part in ("names", "notebooks", "pictures", "tables"):
        importlib.import_module(f"generate.{part}").setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
