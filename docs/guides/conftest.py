"""Guides are run as their readers run them: with the promotion of dtypes that is the default."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _as_readers_have_it():
    with jax.numpy_dtype_promotion("standard"):
        yield
