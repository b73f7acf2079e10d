"""Devices for XLA: how arrays are gathered, and in which order reads and writes happen."""
