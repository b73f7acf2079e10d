"""Notebooks with their outputs, and what runs them."""
