"""Techniques for XLA: quick gathers, and an order of reads and writes that avoids copies."""
