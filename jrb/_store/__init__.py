"""Stores rows and arrays on a disk such that no crash damages them; nothing here needs JAX."""
