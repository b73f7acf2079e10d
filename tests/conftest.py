"""One setting for all tests: two simulated devices, strict dtypes, warnings as errors."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "jrb", deadline=None, max_examples=40, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("jrb")
