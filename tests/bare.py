"""The package without its `__init__`, for scripts that must not load JAX."""

import os
import sys
import types

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def install():
    """Registers an empty package `jrb`, whose modules can be imported one by one."""
    package = types.ModuleType("jrb")
    package.__path__ = [os.path.join(ROOT, "jrb")]
    sys.modules["jrb"] = package
    sys.path.insert(0, ROOT)
