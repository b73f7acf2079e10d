import pytest

for name in ("model", "programs", "samplers", "units", "writers"):
    pytest.register_assert_rewrite(f"tests.methods.{name}")  # makes their asserts print details
