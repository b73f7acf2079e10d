"""Rows and arrays on a disk that a crash leaves whole; nothing here knows of JAX."""
