"""Writes results as JSON files, Markdown tables and plots. Reading them needs no JAX."""
