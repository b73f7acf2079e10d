"""Helpers for all rooms: descriptions and states, checks, casts, words for people."""
