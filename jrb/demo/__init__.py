"""A training to look at, and the devices that it runs on."""

import os


def prepare_devices(count: int) -> None:
    """Makes the CPU count as several devices; call it before JAX starts, or it has no effect."""
    flag = f"--xla_force_host_platform_device_count={count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
