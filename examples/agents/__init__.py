"""Agents, one in each file, whose whole training is one jitted function; see docs/agents.md.

They need the extra `agents`.
"""
