"""Skips the tests without the extra `bench`, and allows the dtype promotion of other libraries."""

import importlib.util

import jax
import pytest

NEEDED = ("typer", "rich", "matplotlib", "gymnasium", "gymnax", "optax", "flashbax", "orbax")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["*.py"]


@pytest.fixture(autouse=True)
def _as_others_have_it():
    with jax.numpy_dtype_promotion("standard"):
        yield
