"""Skips the tests of this folder if matplotlib is not installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("matplotlib") else ["*.py"]
