"""What survives a crash on a disk. Nothing here needs JAX."""
