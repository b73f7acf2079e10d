"""Without matplotlib there is nothing to be tested here."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("matplotlib") else ["*.py"]
