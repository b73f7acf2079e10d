"""Skips this folder's tests if typer is not installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("typer") else ["*.py"]
