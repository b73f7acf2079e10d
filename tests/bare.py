"""The package without what its `__init__` imports, for scripts that never load JAX."""

import os
import sys
import types

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def install():
    """Makes that the package which this process knows."""
    package = types.ModuleType("jrb")
    package.__path__ = [os.path.join(ROOT, "jrb")]
    sys.modules["jrb"] = package
    sys.path.insert(0, ROOT)
