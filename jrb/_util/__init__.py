"""Helpers for the whole package: descriptions and states, checks, casts, texts for people."""
