"""The demo: a training of a double DQN with prioritized replay (`jrb demo`)."""

import os


def prepare_devices(count: int) -> None:
    """Makes the CPU appear as `count` JAX devices; has no effect once JAX has started."""
    flag = f"--xla_force_host_platform_device_count={count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
